from ascend_grad._kernels cimport ag_dtype, ag_sum, ag_variant
from ascend_grad._linear_plan cimport Plans
from ascend_grad._linear_problem cimport Problem
from ascend_grad.status cimport Status


ctypedef struct Schedule:
    # A problem with its plans and its workspace.
    Problem p
    Plans plans
    ag_variant variant
    Py_ssize_t workspace_bytes        # most bytes of the buffers of a sweep
    bint is_empty                     # there is nothing to compute: statistics of no logits, gradients of zeros
    ag_sum *sums                      # (BT,): sums of exponentials, relative to the maxima so far
    char *input_sums                  # (BT, H) accumulators of input_grad; NULL if kernels write the result
    char *buffers                     # the buffers of the sweep that runs


cdef void prepare(Schedule *s, const Problem *p, Py_ssize_t workspace_bytes) noexcept nogil
cdef Py_ssize_t place_workspace(Schedule *s, char *base) noexcept nogil
cdef Py_ssize_t workspace_size(Schedule *s) noexcept nogil
cdef Py_ssize_t workspace_bound(Schedule *s) noexcept nogil
cdef Py_ssize_t default_workspace(const Problem *p) noexcept nogil
cdef Py_ssize_t least_workspace_of(const Problem *p) noexcept nogil
cdef Py_ssize_t least_workspace_of_sizes(
    ag_dtype dtype, Py_ssize_t rows, Py_ssize_t vocab, Py_ssize_t hidden, bint with_logits, bint with_statistics,
    bint with_input_grad, bint with_weight_grad, bint buffers_weight_grad, bint is_loss, Py_ssize_t top_k
) noexcept nogil
cdef int threads_of(const Schedule *s, int asked) noexcept nogil
cdef bint has_plans(const Schedule *s) noexcept nogil
cdef int run(Schedule *s, int num_threads, double *last_check) except -1 nogil
cdef Status solve(const Problem *p, char *memory, Py_ssize_t nbytes, int num_threads) noexcept nogil
