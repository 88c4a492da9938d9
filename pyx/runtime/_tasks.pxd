from libc.stdint cimport int64_t

from ascend_grad._kernels cimport ag_flag, ag_team

# Compute one task of a phase that `context` describes. `thread` is the number of the thread in its team.
ctypedef void (*task_function)(const void *context, Py_ssize_t task, int thread) noexcept nogil

ctypedef struct Team
ctypedef struct Team:
    # The threads of one call.
    ag_team team
    int64_t end_of_phases             # nanoseconds of the monotonic clock
    # Description of the current phase.
    task_function function
    const void *context
    bint default_threads              # the caller gave no number of threads
    bint measures                     # clocks of CPU time are read
    double *last_check                # time of the last check for signals; NULL: signals are not checked
    ag_flag is_cancelled              # a handler of a signal has raised an exception: no further task runs
    # A team of one thread that computes a task of another team: that team, and the number of the thread there. Else NULL.
    Team *outer
    int thread

# Run the phases of a call, by `run_phase`, on the calling thread.
ctypedef void (*program_function)(void *context, Team *team) noexcept nogil

cdef int run_team(
    program_function program, void *context, int threads, bint default_threads, double cost, double *last_check
) except -1 nogil
cdef void begin_nested(Team *team, Team *outer, int thread) noexcept nogil
cdef void run_phase(
    Team *team, task_function function, const void *context, Py_ssize_t tasks, bint by_thread
) noexcept nogil
cdef void run_serially(Team *team, task_function function, const void *context, Py_ssize_t tasks) noexcept nogil
cdef bint is_cancelled(Team *team, int thread) noexcept nogil
cdef int run_tasks(
    task_function function, const void *context, Py_ssize_t tasks, int threads, bint default_threads, double cost,
    double *last_check
) except -1 nogil
cdef int check_signals(double *last_check) except -1 nogil
