"""How many threads a call gets."""

import os

from ascend_grad cimport _openmp
from ascend_grad._kernels cimport ag_affinity_cores
from ascend_grad._tasks cimport now

cdef int _limit = 0               # what set_num_threads or the environment asked for; 0: nothing
cdef bint _is_forked_child = False

# Calls that run side by side without the interpreter's lock may overwrite one another's times, which are only hints.
#
# Times in nanoseconds. A team pays from the gate on. One that sleeps takes long to wake where the cores are busy
# (milliseconds were measured: the calling thread spins and keeps its worker from a core), so after a pause a call
# shorter than that runs alone, until calls have followed one another for a while.
cdef double SERIAL_GATE = 10e3
cdef double WAKE_COST = 6e6
cdef double PAUSE = 8e6
cdef double BURST = 1e6
# A member of a team that is missed for so long has lost its core to another process. Without it for these times.
cdef double MISSED = 1e6
cdef double SHORTEST_ALONE = 20e6
cdef double LONGEST_ALONE = 640e6
cdef double PRICE = 16.0          # and at least so many times what was waited: trying again costs a small part of the time
cdef double _last_use = 0.0
cdef double _burst = 0.0
cdef double _burst_before = 0.0  # the current call
cdef double _alone_until = 0.0
cdef double _alone_for = SHORTEST_ALONE
cdef bint _notices = True


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


cdef int cores() noexcept nogil:
    """Those that this process may keep busy. The affinity may change between calls."""
    return min(ag_affinity_cores(), _quota)


cdef int resolve() noexcept nogil:
    """Threads that a large call uses by default. OpenMP's number may change between calls."""
    if _is_forked_child:
        return 1
    if _limit > 0:
        return _limit
    return max(1, min(_openmp.max_threads(), cores()))


cdef int choose(double cost, int asked) noexcept nogil:
    """Threads of a call that would take `cost` nanoseconds alone: the number it asked for, else as many as pay.

    A caller that is one thread of a team gets one.
    """
    global _last_use, _burst, _burst_before
    if _is_forked_child:
        return 1
    if asked > 0:
        return asked
    if cost < SERIAL_GATE or _openmp.in_parallel():
        return 1
    if now() - _last_use > PAUSE:
        _burst = 0.0
    _last_use = now()
    _burst_before = _burst
    _burst += cost
    if cost < WAKE_COST and _burst - cost < BURST:
        return 1
    return resolve()


cdef void finished() noexcept nogil:
    """A call that `choose` was asked about has ended: what follows at once follows without a pause."""
    global _last_use
    _last_use = now()


cdef bint is_warm() noexcept nogil:
    """Whether calls have followed one another for so long that the threads of a team are awake."""
    return _burst_before >= BURST


cdef bint is_disturbed() noexcept nogil:
    """Whether a team would be slower than one thread now, because other processes keep its cores busy."""
    return _notices and now() < _alone_until


cdef void took(double elapsed, double waited) noexcept nogil:
    """A team has worked for so long, and the calling thread has waited for the last of the others for so long.

    Where the wait is most of it, that one had no core: then threads that depend on each other lose, and everything runs
    alone for a while, after which they try again.
    """
    global _alone_until, _alone_for
    if waited > MISSED and 2 * waited > elapsed:
        _alone_until = now() + max(_alone_for, min(PRICE * waited, LONGEST_ALONE))
        _alone_for = min(2 * _alone_for, LONGEST_ALONE)
    else:
        _alone_for = SHORTEST_ALONE


def default_threads():
    """Threads that a large call uses now."""
    return resolve()


def set_limit(int limit):
    """Use so many threads by default; 0: as OpenMP, affinity and control group allow."""
    global _limit
    _limit = limit


def notice_disturbance(bint notices):
    """Whether other processes may keep a call from using a team; for tests that count its threads."""
    global _notices
    _notices = notices


def _after_fork_in_child():
    # The parent's team does not exist in the child, but libgomp believes that it does and would wait for it.
    global _is_forked_child
    _is_forked_child = True


os.register_at_fork(after_in_child=_after_fork_in_child)
