"""How many threads a call gets."""

import os

from ascend_grad cimport _openmp
from ascend_grad._kernels cimport ag_affinity_cores
from ascend_grad._tasks cimport now

cdef extern from *:
    """
    typedef _Atomic double ag_atomic_double;
    typedef _Atomic int ag_atomic_int;
    """
    ctypedef double ag_atomic_double
    ctypedef int ag_atomic_int

# Calls run side by side without the GIL, so what one of them writes and others read is atomic. They may still overwrite
# one another's times, which are only hints.
cdef ag_atomic_int _limit = 0     # what set_num_threads or the environment asked for; 0: nothing
cdef bint _is_forked_child = False

# Times in nanoseconds. A team pays from `SERIAL_GATE` on. After `IDLE_TIME` its threads are asleep, and take long to
# wake where the cores are busy (milliseconds were measured: the calling thread spins and keeps its worker from a core).
# A call shorter than `WAKE_COST` is then serial, until calls have followed one another for `WARM_UP_TIME`.
cdef double SERIAL_GATE = 10e3
cdef double WAKE_COST = 6e6
cdef double IDLE_TIME = 8e6
cdef double WARM_UP_TIME = 1e6
# A team that has lost so much time against one thread has lost its cores to other processes. Calls are then serial for
# a time that doubles with every loss, and is at least `BACKOFF` times what was lost: another try costs little of it.
cdef double LOSS = 1e6
cdef double MIN_SERIAL_TIME = 20e6
cdef double MAX_SERIAL_TIME = 640e6
cdef double BACKOFF = 16.0
cdef ag_atomic_double _last_use = 0.0
cdef ag_atomic_double _busy_time = 0.0      # of calls back to back
cdef ag_atomic_double _serial_until = 0.0
cdef ag_atomic_double _serial_for = MIN_SERIAL_TIME
cdef ag_atomic_double _gain = 0.0           # of teams, since the last loss or as large a gain
cdef ag_atomic_int _detects_oversubscription = True


def _quota_of_control_group(root="/sys/fs/cgroup", membership="/proc/self/cgroup"):
    """Whole cores that the control groups of this process grant it, or a large number."""
    cores = 1 << 20
    try:
        with open(membership) as file:
            groups = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return cores
    for _, controllers, path in groups:
        if controllers and "cpu" not in controllers.split(","):
            continue
        # Version 2 has one tree and one file, version 1 a tree per controller and two files. Groups further up limit,
        # too; inside a container the path may lead nowhere, and the root is the container's own group.
        tree = os.path.join(root, controllers) if controllers else root
        parts = path.strip("/").split("/")
        for depth in range(len(parts) + 1):
            group = os.path.join(tree, *parts[:depth])
            try:
                if controllers:
                    with open(f"{group}/cpu.cfs_quota_us") as quota, open(f"{group}/cpu.cfs_period_us") as period:
                        limit, per = quota.read(), period.read()
                else:
                    with open(f"{group}/cpu.max") as file:
                        limit, per = file.read().split()[:2]
                if int(limit) > 0:
                    cores = min(cores, max(1, -(-int(limit) // int(per))))
            except (OSError, ValueError):  # no such file, or "max"
                continue
    return cores


# Read once: a call should not open files.
cdef int _quota = _quota_of_control_group()


cdef int usable_cores() noexcept nogil:
    """Those that this process may keep busy. The affinity may change between calls."""
    return min(ag_affinity_cores(), _quota)


cpdef int default_threads() noexcept nogil:
    """Threads that a large call uses by default. OpenMP's number may change between calls."""
    if _is_forked_child:
        return 1
    if _limit > 0:
        return _limit
    return max(1, min(_openmp.max_threads(), usable_cores()))


cdef int choose_num_threads(double cost, int asked) noexcept nogil:
    """Threads of a call that would take `cost` nanoseconds serially: the number it asked for, else as many as pay.

    A caller that is one thread of a team gets one.
    """
    global _last_use, _busy_time
    if _is_forked_child:
        return 1
    if asked > 0:
        return asked
    if cost < SERIAL_GATE or _openmp.in_parallel():
        return 1
    if now() - _last_use > IDLE_TIME:
        _busy_time = 0.0
    _last_use = now()
    _busy_time += cost
    if cost < WAKE_COST and _busy_time - cost < WARM_UP_TIME:
        return 1
    return default_threads()


cdef void mark_team_used() noexcept nogil:
    """A call that `choose_num_threads` was asked about has ended: idle time begins."""
    global _last_use
    _last_use = now()


cdef bint is_oversubscribed() noexcept nogil:
    """Whether a team would be slower than one thread now, because other processes use its cores."""
    return _detects_oversubscription and now() < _serial_until


cdef void record_team_times(double elapsed, double busy) noexcept nogil:
    """A team has worked for `elapsed`, and its threads have used the CPU time `busy`, about what one thread would take.

    A thread without a core keeps the others waiting. A team that is slower than one thread for that reason is given up
    for a while, then tried again: after twice the time of the loss before, unless there was a gain in between.
    """
    global _gain, _serial_until, _serial_for
    _gain += busy - elapsed
    if _gain < -LOSS:
        _serial_until = now() + max(_serial_for, min(-BACKOFF * _gain, MAX_SERIAL_TIME))
        _serial_for = min(2 * _serial_for, MAX_SERIAL_TIME)
        _gain = 0
    elif _gain > LOSS:
        _serial_for = max(_serial_for / 2, MIN_SERIAL_TIME)
        _gain = 0


def set_limit(int limit):
    """Use so many threads by default; 0: as OpenMP, affinity and control group allow."""
    global _limit
    _limit = limit


def detect_oversubscription(bint enabled):
    """Whether other processes may keep a call from using a team; for tests that count its threads."""
    global _detects_oversubscription
    _detects_oversubscription = enabled


def _after_fork_in_child():
    # The parent's team does not exist in the child, but libgomp believes that it does and would wait for it.
    global _is_forked_child
    _is_forked_child = True


os.register_at_fork(after_in_child=_after_fork_in_child)
