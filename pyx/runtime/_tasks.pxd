ctypedef void (*task_function)(void *context, Py_ssize_t task, int thread) noexcept nogil

ctypedef struct Times:
    double elapsed                    # nanoseconds
    double busy                       # CPU time of all threads

cdef int run_timed(
    task_function function, void *context, Py_ssize_t tasks, int threads, bint dynamic, double *last, Times *times
) except -1 nogil
cdef int run_tasks(
    task_function function, void *context, Py_ssize_t tasks, int threads, bint dynamic, double *last
) except -1 nogil
cdef int check_signals(double *last) except -1 nogil
cdef double now() noexcept nogil
cdef bint is_check_due(double *last) noexcept nogil
cdef bint defer_signals(bint deferred) noexcept nogil
cdef int handle_signals() except -1
