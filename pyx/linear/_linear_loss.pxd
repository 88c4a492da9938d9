from libc.stdint cimport int64_t

from ascend_grad._linear_problem cimport Problem
from ascend_grad._linear_schedule cimport Schedule
from ascend_grad._loss_options cimport LossOptions


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
    # A loss with its gradients. `p` has the matrices and the gradients; `describe_loss` describes its rows by the options.
    Problem p
    LossOptions o
    const double *bias                # (V,) or NULL
    bint with_bias_grad
    # Outputs that a backward pass is given, (BT,). With `lse`, only gradients are computed.
    const double *lse                 # NULL: the statistics are computed, or `whole` has them
    const double *entropy             # NULL: 0
    # A part of a vocabulary: either its statistics are computed, or its gradients from the whole vocabulary's statistics.
    bint is_part                      # targets may be in other parts; there is no loss
    bint with_more                    # the statistics include moments and first maxima
    Whole whole
    char *vectors                     # memory of vectors_size bytes: statistics and upstream gradients of the rows
    # Set by prepare_loss.
    void *grad                        # (BT,): upstream gradient of each row; if p.is_general, whether there is any
    double[2] denominators            # of the cross-entropy, and of the squared lse
    int64_t *row_targets              # (BT,): the first target of each row, if rows have several
    bint is_one_pass                  # logits are cached between statistics and gradients
    Schedule first                    # statistics and gradients if is_one_pass, otherwise only statistics
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
