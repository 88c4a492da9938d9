from ascend_grad._linear_problem cimport Problem
from ascend_grad._linear_schedule cimport Schedule


cdef enum Reduction:
    REDUCTION_MEAN
    REDUCTION_SUM
    REDUCTION_NONE


ctypedef struct Loss:
    # A loss with its gradients. `p` has the matrices, the results, and rows of which some may have the ignored target.
    Problem p
    Reduction reduction
    const double *grad_loss           # upstream gradient: one number, or one for each row
    bint has_grad_for_each_row
    void *loss                        # accumulators: one number, or (BT,) without reduction
    char *vectors                     # memory of vectors_size bytes: statistics and upstream gradients of the rows
    # Set by prepare_loss.
    void *grad                        # (BT,): upstream gradient of each row
    bint is_one_pass                  # logits are cached between statistics and gradients
    Schedule first                    # statistics and gradients if is_one_pass, otherwise statistics alone
    Schedule second                   # gradients, unless is_one_pass


cdef Py_ssize_t vectors_size(const Problem *p) noexcept nogil
cdef int prepare_loss(Loss *x, Py_ssize_t workspace_bytes, double *last_check) except -1 nogil
cdef bint has_loss_plans(const Loss *x) noexcept nogil
cdef Py_ssize_t loss_workspace_size(Loss *x) noexcept nogil
cdef Py_ssize_t loss_workspace_bound(const Problem *p, Py_ssize_t workspace_bytes) noexcept nogil
cdef void place_loss_workspace(Loss *x, char *base) noexcept nogil
cdef int run_loss(Loss *x, int num_threads, double *last_check) except -1 nogil
