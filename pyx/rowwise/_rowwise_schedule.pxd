from ascend_grad._kernels cimport ag_variant
from ascend_grad._rowwise_plan cimport Plan, Problem
from ascend_grad.status cimport Status


cdef enum Phase:
    WHOLE_BLOCKS
    SPLIT_MAX
    COMBINE_MAX
    SPLIT_SUM
    COMBINE_SUM
    SPLIT_WRITE


ctypedef struct Schedule:
    # The tasks of one problem, and the memory that they need.
    Problem p
    Plan plan
    ag_variant variant
    Phase phase
    bint default_threads
    double *last_check                # when signals were last looked at; NULL: they never are
    char *scratch                     # (threads, SCRATCH_BYTES), for column kernels
    char *tiles                       # (tasks or threads, tiles_size)
    double *maxima                    # (splits, rows)
    double *sums                      # (segments, rows)
    double *max                       # (rows,)
    double *sum                       # (rows,)


cdef int choose_threads(const Problem *p, int asked) noexcept nogil
cdef bint compute_at_once(const Problem *p, int threads) noexcept nogil
cdef void prepare(Schedule *s, const Problem *p, int threads) noexcept nogil
cdef Py_ssize_t workspace_size(Schedule *s) noexcept nogil
cdef Py_ssize_t place_workspace(Schedule *s, char *base) noexcept nogil
cdef int run(Schedule *s, bint default_threads, double *last_check) except -1 nogil
cdef Status solve(const Problem *p, int num_threads) noexcept nogil
