"""Independent tasks on a team of threads, in the floating-point mode of the kernels, interruptible by signals."""

from cython.parallel cimport parallel, threadid
from libc.math cimport INFINITY
from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free

from ascend_grad cimport _openmp
from ascend_grad._kernels cimport ag_fpenv, ag_fpenv_enter, ag_fpenv_leave, ag_monotonic_ns, ag_thread_ns
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
    /* Of the threads' own memory from the start: to allocate it at first use may fail, which ends the process. */
    static _Thread_local int ag_signals_deferred __attribute__((tls_model("initial-exec")));
    """
    int64_t AG_FETCH_ADD(int64_t *counter, int n)
    int ag_signals_deferred

# Each thread writes to a cache line of its own: a counter, and the CPU time that it used.
cdef enum:
    COUNTER = 0
    BUSY = 1
    CACHE_LINE = 8  # numbers

# Nanoseconds of computing after which signals are checked.
cdef double CHECK_INTERVAL = 40e6


cdef double now() noexcept nogil:
    """Nanoseconds, of a clock that is cheap to read and ticks every few milliseconds."""
    cdef timespec time
    clock_gettime(CLOCK_MONOTONIC_COARSE, &time)
    return time.tv_sec * 1e9 + time.tv_nsec


cdef bint is_check_due(double *last) noexcept nogil:
    """Whether signals should be checked again; if so, the time of the last check becomes now."""
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


cdef void run_partition(
    task_function function, void *context, int64_t *next, int64_t begin, int64_t end, int thread, bint dynamic,
    double start
) noexcept nogil:
    """Tasks until there are none left, or signals have to be checked. Counters begin at 0."""
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


cdef void run_partitions(
    task_function function, void *context, int64_t *counters, int64_t tasks, int threads, bint dynamic, double start
) noexcept nogil:
    """What one thread of a team does."""
    cdef int thread = threadid(), team = _openmp.team_size(), partition = thread
    cdef int64_t begin = ag_thread_ns()
    _openmp.record_team()
    if dynamic:
        run_partition(function, context, counters, 0, tasks, thread, True, start)
    else:
        while partition < threads:  # there may be fewer threads than partitions
            run_partition(
                function, context, counters + partition * CACHE_LINE, tasks * partition // threads,
                tasks * (partition + 1) // threads, thread, False, start
            )
            partition += team
    counters[thread * CACHE_LINE + BUSY] += ag_thread_ns() - begin


cdef int check_signals(double *last) except -1 nogil:
    """Let signals' handlers run, if the last check (0: none yet) was some time ago. With or without the GIL."""
    if last[0] == 0:
        last[0] = now()
    elif is_check_due(last):
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

    `last`: when the call last checked signals; NULL: it never does, and nothing is raised.

    Static: neighbouring tasks belong to one thread, and to the same one in every call of the same size, which may have
    their data in its cache. Dynamic: a free thread fetches the next one. An exception of a signal's handler is raised
    between tasks. `times` are of a team, and 0 for one thread.
    """
    cdef int64_t[CACHE_LINE] serial_counters
    cdef int64_t *counters = serial_counters
    cdef int64_t begin, size
    cdef int thread, partition, partitions = 1 if dynamic else threads
    cdef bint is_done = False
    cdef double start = INFINITY
    if last != NULL and last[0] == 0:
        last[0] = now()
    serial_counters[COUNTER] = 0
    times.elapsed = times.busy = 0
    if threads == 1:
        partitions = 1
        dynamic = False
    else:
        counters = <int64_t *>calloc(threads * CACHE_LINE, sizeof(int64_t))
        if counters == NULL:
            return BAD_ALLOC
    try:
        while not is_done:
            if last != NULL:
                start = last[0]
            if threads == 1:
                run_partition(function, context, counters, 0, tasks, 0, False, start)
                _openmp.record_team()
            else:
                begin = ag_monotonic_ns()
                with parallel(num_threads=threads):
                    run_partitions(function, context, counters, tasks, threads, dynamic, start)
                times.elapsed += ag_monotonic_ns() - begin
            is_done = True
            for partition in range(partitions):
                size = tasks * (partition + 1) // partitions - tasks * partition // partitions
                if counters[partition * CACHE_LINE] < size:
                    is_done = False
            if last != NULL:
                check_signals(last)
        if threads > 1:
            for thread in range(threads):
                times.busy += counters[thread * CACHE_LINE + BUSY]
    finally:
        if counters != serial_counters:
            free(counters)
    return SUCCESS
