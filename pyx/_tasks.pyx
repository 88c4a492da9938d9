"""Independent tasks on a team of threads, in the floating-point mode of the kernels, interruptible by signals."""

from cython.parallel cimport parallel, threadid
from libc.math cimport INFINITY
from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free

from ascend_grad cimport _openmp
from ascend_grad._kernels cimport ag_fpenv, ag_fpenv_enter, ag_fpenv_leave, ag_team_now
from ascend_grad.status cimport BAD_ALLOC, SUCCESS

cdef extern from "Python.h":
    int PyErr_CheckSignals() except -1

cdef extern from "<time.h>" nogil:
    struct timespec:
        long tv_sec
        long tv_nsec
    int clock_gettime(int clock, timespec *time)
    enum:
        CLOCK_MONOTONIC_COARSE

cdef extern from * nogil:
    """
    #define AG_FETCH_ADD(counter, n) __atomic_fetch_add(counter, n, __ATOMIC_RELAXED)
    static _Thread_local int ag_signals_deferred;
    """
    int64_t AG_FETCH_ADD(int64_t *counter, int n)
    int ag_signals_deferred

# What threads write stands in a cache line for each of them: a counter, and when it had no tasks left.
cdef enum:
    COUNTER = 0
    END = 1
    LINE = 8

# Nanoseconds of computing after which signals are looked at.
cdef double CHECK_INTERVAL = 40e6


cdef double now() noexcept nogil:
    """Nanoseconds, of a clock that is cheap to read and ticks every few milliseconds."""
    cdef timespec time
    clock_gettime(CLOCK_MONOTONIC_COARSE, &time)
    return time.tv_sec * 1e9 + time.tv_nsec


cdef bint is_time_to_check(double *last) noexcept nogil:
    """Whether signals should be looked at again; if so, the time of the last look becomes now."""
    cdef double time = now()
    if time - last[0] < CHECK_INTERVAL:
        return False
    last[0] = time
    return True


cdef bint defer_signals(bint deferred) noexcept nogil:
    """Whether signals' handlers wait until this thread says otherwise: its caller takes no exceptions. What it was."""
    global ag_signals_deferred
    cdef bint before = ag_signals_deferred
    ag_signals_deferred = deferred
    return before


cdef int handle_signals() except -1:
    """Let signals' handlers run."""
    return 0 if ag_signals_deferred else PyErr_CheckSignals()


cdef void run_share(
    task_function function, void *context, int64_t *next, int64_t begin, int64_t end, int thread, bint dynamic, double start
) noexcept nogil:
    """Tasks until there are none left, or signals have to be looked at. Counters begin at 0."""
    cdef int64_t task
    cdef ag_fpenv mode = ag_fpenv_enter()
    while True:
        if dynamic:
            task = begin + AG_FETCH_ADD(next, 1)
        else:
            task = begin + next[0]
            next[0] += 1
        if task >= end:
            break
        function(context, task, thread)
        if now() - start >= CHECK_INTERVAL:
            break
    ag_fpenv_leave(mode)


cdef void run_shares(
    task_function function, void *context, int64_t *counters, int64_t tasks, int threads, bint dynamic, double start
) noexcept nogil:
    """What one thread of a team does."""
    cdef int thread = threadid(), team = _openmp.team_size(), share = thread
    _openmp.record_team()
    if dynamic:
        run_share(function, context, counters, 0, tasks, thread, True, start)
    else:
        while share < threads:  # there may be fewer threads than shares
            run_share(
                function, context, counters + share * LINE, tasks * share // threads, tasks * (share + 1) // threads, thread,
                False, start
            )
            share += team
    counters[thread * LINE + END] = ag_team_now()


cdef int check_signals(double *last) except -1 nogil:
    """Let signals' handlers run, if the last look (0: none yet) was some time ago. With or without the interpreter's lock."""
    if last[0] == 0:
        last[0] = now()
    elif is_time_to_check(last):
        with gil:
            handle_signals()
    return 0


cdef int run_tasks(
    task_function function, void *context, Py_ssize_t tasks, int threads, bint dynamic, double *last
) except -1 nogil:
    cdef Times times
    return run_timed(function, context, tasks, threads, dynamic, last, &times)


cdef int run_timed(
    task_function function, void *context, Py_ssize_t tasks, int threads, bint dynamic, double *last, Times *times
) except -1 nogil:
    """Run ``function(context, task, thread)`` for all tasks; a status, `BAD_ALLOC` before the first of them.

    `last`: when the caller's call last looked at signals; NULL: it never does, and nothing is raised.

    Static: neighbouring tasks belong to one thread, and to the same one in every call of the same size, which may have
    their data in its cache. Dynamic: whoever is free takes the next one. An exception of a signal's handler is raised
    between tasks. `times` are of a team, and 0 for one thread.
    """
    cdef int64_t[LINE] alone
    cdef int64_t *counters = alone
    cdef int64_t begin, first, end
    cdef int thread, share, shares = 1 if dynamic else threads
    cdef bint is_done = False
    cdef double start = INFINITY
    if last != NULL and last[0] == 0:
        last[0] = now()
    alone[COUNTER] = 0
    times.elapsed = times.waited = 0
    if threads == 1:
        shares = 1
        dynamic = False
    else:
        counters = <int64_t *>calloc(threads * LINE, sizeof(int64_t))
        if counters == NULL:
            return BAD_ALLOC
    try:
        while not is_done:
            if last != NULL:
                start = last[0]
            if threads == 1:
                run_share(function, context, counters, 0, tasks, 0, False, start)
                _openmp.record_team()
            else:
                begin = ag_team_now()
                with parallel(num_threads=threads):
                    run_shares(function, context, counters, tasks, threads, dynamic, start)
                first = end = counters[END]
                for thread in range(1, threads):
                    if counters[thread * LINE + END] > begin:  # there may be fewer threads than asked for
                        first = min(first, counters[thread * LINE + END])
                        end = max(end, counters[thread * LINE + END])
                times.elapsed += end - begin
                times.waited += end - first
            is_done = True
            for share in range(shares):
                if counters[share * LINE] < tasks * (share + 1) // shares - tasks * share // shares:
                    is_done = False
            if last != NULL:
                check_signals(last)
    finally:
        if counters != alone:
            free(counters)
    return SUCCESS
