from libc.stdint cimport int64_t

from ascend_grad._linear_problem cimport Problem
from ascend_grad._linear_schedule cimport Schedule


cdef enum Reduction:
    REDUCTION_MEAN
    REDUCTION_SUM
    REDUCTION_NONE


ctypedef struct Outputs:
    # Results beside the loss, for each row; NULL for a result that is not requested. `correct` is one number.
    void *lse                         # accumulators
    void *log_prob
    void *entropy
    int64_t *predicted
    int64_t *correct


ctypedef struct Whole:
    # Statistics of rows of logits over a vocabulary of which the loss has a part, for its gradients.
    const double *max                 # (BT,): as in ag_row_statistics; NULL: there are no gradients
    const double *rest
    const double *moment
    const double *deficit
    const double *target_logits       # (BT, targets of a row)
    const double *target_weights      # (BT, targets of a row): probabilities times class weights; 0 for ignored targets
    Py_ssize_t vocab                  # entries of the whole vocabulary
    double class_sum                  # sum of their class weights
    double[2] denominators            # of the cross-entropy, and of the squared lse; 0: neither has a gradient


ctypedef struct Loss:
    # A loss with its gradients. `p` has the matrices, the results, and rows of which some may have the ignored target.
    Problem p
    Reduction reduction
    const double *grad_loss           # upstream gradient: one number, or one for each row
    bint has_grad_for_each_row
    double denominator                # of a mean; 0: the sum of the weights of the rows
    double temperature
    const double *temperatures        # (BT,) or NULL: all are `temperature`
    const double *bias                # (V,) or NULL
    const double *class_weight        # (V,) or NULL
    const double *target_prob         # (BT, targets of a row) or NULL: a row has one target
    Py_ssize_t target_count           # targets of a row
    double lse_square_scale
    bint with_bias_grad
    Outputs outputs
    void *loss                        # accumulators: one number, or (BT,) without reduction
    # Upstream gradients of a backward pass, (BT,); NULL: 0. With `lse`, there are gradients alone.
    const double *lse                 # (BT,): the statistics are not computed; NULL: they are, or `whole` has them
    const double *entropy             # (BT,) or NULL
    const double *grad_lse
    const double *grad_log_prob
    const double *grad_entropy
    # A part of a vocabulary: either its statistics are computed, or its gradients from the whole vocabulary's statistics.
    bint is_part                      # targets may be in other parts; there is no loss
    bint with_more                    # the statistics include moments and first maxima
    Whole whole
    char *vectors                     # memory of vectors_size bytes: statistics and upstream gradients of the rows
    # Set by prepare_loss.
    void *grad                        # (BT,): upstream gradient of each row; if p.is_general, whether there is any
    double[2] denominators            # of the cross-entropy, and of the squared lse
    int64_t *row_targets              # (BT,): the first target of each row, if rows have several
    const void *all_targets           # the caller's targets (BT, target_count), if rows have several
    bint is_wide                      # all_targets is int64
    bint is_one_pass                  # logits are cached between statistics and gradients
    Schedule first                    # statistics and gradients if is_one_pass, otherwise statistics alone
    Schedule second                   # gradients, unless is_one_pass


cdef Py_ssize_t vectors_size(const Loss *x) noexcept nogil
cdef void describe_loss(Loss *x) noexcept nogil
cdef int prepare_loss(Loss *x, Py_ssize_t workspace_bytes, double *last_check) except -1 nogil
cdef bint has_loss_plans(const Loss *x) noexcept nogil
cdef void loss_schedule(const Loss *x, Py_ssize_t workspace_bytes, Schedule *schedule, bint *is_one_pass) noexcept nogil
cdef Py_ssize_t loss_workspace_size(Loss *x) noexcept nogil
cdef Py_ssize_t loss_workspace_bound(const Loss *x, Py_ssize_t workspace_bytes) noexcept nogil
cdef void place_loss_workspace(Loss *x, char *base) noexcept nogil
cdef int run_loss(Loss *x, int num_threads, double *last_check) except -1 nogil
