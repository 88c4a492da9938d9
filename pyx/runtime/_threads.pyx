"""The number of threads of a call."""

import os

from libc.math cimport sqrt

from ascend_grad cimport _openmp
from ascend_grad._kernels cimport ag_coarse_ns

cdef extern from *:
    """
    typedef _Atomic double ag_atomic_double;
    typedef _Atomic int ag_atomic_int;
    """
    ctypedef double ag_atomic_double
    ctypedef int ag_atomic_int

# Calls run concurrently without the GIL, so variables that they share are atomic. They may still overwrite each other's
# times, which are only hints.
cdef ag_atomic_int _limit = 0     # the number from set_num_threads or the environment; 0: none

# All times are in nanoseconds. The threads of a team fall asleep after a while without calls. Waking them takes 5 to 50
# microseconds on idle cores, and milliseconds if the cores are busy or virtual: the calling thread spins and keeps its
# worker from a core. Every team that may sleep is timed while it wakes. Calls after a pause are serial until their
# serial times add up to the time that waking took. Now and then a team is tried anyway, in case that waking has become
# faster: when teams would have saved `TRY_AFTER` times the time of waking.
cdef double SERIAL_GATE = 10e3              # least serial time of a call for which a team pays
cdef double LEAST_WORK = 15e3               # least serial time for every thread but the first
cdef double IDLE_TIME = 8e6                 # time without teams after which their threads sleep
cdef double FIRST_WAKE_TIME = 300e3         # time that the first team is expected to take to start its threads
cdef double MAX_WAKE_TIME = 6e6             # least serial time of a call that always wakes a team
cdef double TRY_AFTER = 8.0                 # factor without unit
# A team that is slower than one thread by `LOSS` has lost its cores to other processes. Calls are then serial for a
# while that doubles with every loss. It is at least `BACKOFF` times the loss, so that the next try costs little of it.
cdef double LOSS = 1e6
cdef double MIN_SERIAL_TIME = 20e6          # least time for which calls are serial
cdef double MAX_SERIAL_TIME = 640e6         # most time for which calls are serial
cdef double BACKOFF = 16.0                  # factor without unit
cdef ag_atomic_double _last_use = 0.0       # time of the last call that may have used a team
cdef ag_atomic_double _last_team = 0.0      # time of the end of the last team
cdef ag_atomic_double _busy_time = 0.0      # serial time of calls back to back since a team may sleep
cdef ag_atomic_double _wake_time = FIRST_WAKE_TIME  # time that a sleeping team takes to start
cdef ag_atomic_double _missed = 0.0         # time that teams would have saved since one was last woken
cdef ag_atomic_double _serial_until = 0.0   # time until which calls are serial
cdef ag_atomic_double _serial_for = MIN_SERIAL_TIME  # time for which calls are serial after the next loss
cdef ag_atomic_double _gain = 0.0           # time that teams saved against one thread since it last exceeded LOSS
cdef ag_atomic_int _detects_oversubscription = True


def _read(path):
    """Return the bytes of a file. Names of control groups are bytes, of no encoding that Python knows."""
    with open(path, "rb") as file:
        return file.read()


def _quota_of_control_group(root=b"/sys/fs/cgroup", membership=b"/proc/self/cgroup"):
    """Return the number of whole cores that the control groups of this process allow, or a large number."""
    cores = 1 << 20
    try:
        groups = [line.split(b":", 2) for line in _read(membership).split(b"\n") if line.count(b":") >= 2]
    except OSError:
        return cores
    for _, controllers, path in groups:
        if controllers and b"cpu" not in controllers.split(b","):
            continue
        # Version 2 has one tree and one file, version 1 a tree per controller and two files. Parent groups also limit
        # the process. Inside a container the path may not exist, and the root is the container's own group.
        tree = os.path.join(root, controllers) if controllers else root
        parts = path.strip(b"/").split(b"/")
        for depth in range(len(parts) + 1):
            group = os.path.join(tree, *parts[:depth])
            try:
                if controllers:
                    limit, per = _read(group + b"/cpu.cfs_quota_us"), _read(group + b"/cpu.cfs_period_us")
                else:
                    limit, per = _read(group + b"/cpu.max").split()[:2]
                if int(limit) > 0:
                    cores = min(cores, max(1, -(-int(limit) // int(per))))
            except (OSError, ValueError, ZeroDivisionError):  # no such file, "max", or not what the kernel writes
                continue
    return cores


# Cores that control groups allow, read once, as calls should not open files.
cdef int _quota = _quota_of_control_group()


cdef int usable_cores() noexcept nogil:
    """Return the number of cores that a team of this thread may use. It may change between calls."""
    return min(_openmp.usable_cores(), _quota)


cdef int possible(int threads) noexcept nogil:
    """Return the number of threads, at most OpenMP's limit, or 1 if this thread cannot start a team."""
    threads = min(threads, _openmp.thread_limit())
    return threads if _openmp.may_start_team(threads) else 1


cpdef int default_threads() noexcept nogil:
    """Return the number of threads of a large call by default. OpenMP's number may change between calls."""
    cdef int limit = _limit  # read once, as another thread may set it meanwhile
    return possible(limit if limit > 0 else max(1, min(_openmp.max_threads(), usable_cores())))


cdef int worthwhile_threads(double cost) noexcept nogil:
    """Return the default number of threads, but at most as many as have enough work."""
    return <int>min(<double>default_threads(), 1 + cost / LEAST_WORK)


cdef int choose_num_threads(double cost, int asked) noexcept nogil:
    """Return the number of threads of a call that would take `cost` nanoseconds serially.

    It is `asked` unless that is 0, else 1 or at most the default, whichever is faster. A caller inside a team gets 1. A thread
    that cannot start a team always gets 1. OpenMP's limit holds for all numbers.
    """
    global _last_use, _busy_time, _missed
    cdef double now
    cdef int threads
    if asked > 0:
        return possible(asked)
    if cost < SERIAL_GATE or _openmp.in_parallel():
        return 1
    now = ag_coarse_ns()
    if now - _last_use > IDLE_TIME:
        _busy_time = 0.0
    _last_use = now
    threads = worthwhile_threads(cost)
    if threads == 1 or not may_sleep():
        return threads
    _busy_time += cost
    if _busy_time <= _wake_time and _missed <= TRY_AFTER * _wake_time:
        _missed += cost - cost / threads
        return 1
    return threads


cdef int expected_threads(double cost, int asked) noexcept nogil:
    """Return the number of threads of calls that follow one another, each of `cost` nanoseconds serially."""
    if asked > 0:
        return possible(asked)
    return 1 if cost < SERIAL_GATE or _openmp.in_parallel() else worthwhile_threads(cost)


cdef bint may_sleep() noexcept nogil:
    """Return whether the threads of the last team may sleep by now."""
    return ag_coarse_ns() - _last_team > IDLE_TIME


cdef void record_end(int threads) noexcept nogil:
    """Record the end of a call that got its threads from `choose_num_threads`, from which idle time counts."""
    global _last_use, _last_team
    _last_use = ag_coarse_ns()
    if threads > 1:
        _last_team = _last_use


cpdef void record_wake_time(double time) noexcept nogil:
    """Record how long the last thread of a team that may have slept took to start.

    The geometric mean with earlier times follows both a machine that becomes idle and one that becomes busy.
    """
    global _wake_time, _missed
    _wake_time = min(sqrt(max(time, 1e3) * _wake_time), MAX_WAKE_TIME)
    _missed = 0.0


cdef bint is_oversubscribed() noexcept nogil:
    """Return whether a team would be slower than one thread now, because other processes use its cores."""
    return _detects_oversubscription and ag_coarse_ns() < _serial_until


cdef void record_team_times(double elapsed, double busy) noexcept nogil:
    """Record the wall time of a team's work, and the CPU time of its threads, which is about the time of one thread.

    A thread without a core keeps the others waiting. If that makes teams slower than one thread, calls are serial for a
    while. That time doubles with every loss and is halved by every gain of `LOSS`.
    """
    global _gain, _serial_until, _serial_for
    _gain += busy - elapsed
    if _gain < -LOSS:
        _serial_until = ag_coarse_ns() + max(_serial_for, min(-BACKOFF * _gain, MAX_SERIAL_TIME))
        _serial_for = min(2 * _serial_for, MAX_SERIAL_TIME)
        _gain = 0
    elif _gain > LOSS:
        _serial_for = max(_serial_for / 2, MIN_SERIAL_TIME)
        _gain = 0


cdef void record_short_call(double elapsed, double cost) noexcept nogil:
    """Record the wall time of a call in which no CPU time is read, and its estimated serial time.

    Only a wall time far beyond the estimate is a loss.
    """
    if elapsed < cost or elapsed - cost > LOSS:
        record_team_times(elapsed, cost)


def set_limit(int limit):
    """Set the default number of threads, or with 0 as many as OpenMP, affinity and control groups allow."""
    global _limit
    _limit = limit


def threads_after(double pause, double since_team, double cost):
    """Return the default number of threads of a call of this serial time, `pause` after the last call, for tests."""
    global _last_use, _last_team
    _last_use, _last_team = ag_coarse_ns() - pause, ag_coarse_ns() - since_team
    return choose_num_threads(cost, 0)


def detect_oversubscription(bint enabled):
    """Set whether calls are serial while other processes use the cores. Tests that count threads disable it."""
    global _detects_oversubscription
    _detects_oversubscription = enabled
