from libc.stdint cimport int64_t, uint8_t

from ascend_grad._rowwise_kernels cimport ag_loss_kernels, ag_row_op
from ascend_grad._rowwise_plan cimport Problem
from ascend_grad._rowwise_schedule cimport Schedule


ctypedef struct Slot:
    # The sum of the weights of a row's targets that are the same entry.
    int64_t entry
    double weight
    bint is_empty


ctypedef struct Rows:
    # Parameters and statistics of rows, one number per row, and what is stored at the K targets of each.
    double *max
    double *scale                     # 1 / temperature; 0: the row is ignored
    double *rest                      # sums of exponentials, then without one entry that has the maximum
    double *log_sum                   # log(1 + rest), or the losses of rows with a single target
    double *moment
    double *deficit
    double *factor
    double *smoothing
    double *targets                   # (rows, K): logits relative to the maximum, then gradients at the targets
    double *exp                       # (rows, K): exponentials of these logits, and memory to load and store elements
    int64_t *indices                  # targets of columns with a single target each; the memory of `exp`
    # Targets of one row: (K,), with room for a multiple of AG_MAX_LANES numbers.
    int64_t *entries
    double *weights                   # 0 for ignored targets
    double *equal                     # sums of the weights of targets that are the same entry
    Slot *slots                       # (2**slot_bits,): a table, or NULL
    Py_ssize_t *numbers               # numbers of the rows in C order
    char **a                          # addresses of the rows of the input, and of the result
    char **out
    uint8_t *stores                   # whether a row has gradients at its targets
    char *cached                      # exponentials of the rows, or NULL


ctypedef struct CrossEntropy:
    # A loss of rows. The caller fills in the arguments and results. Arrays of rows are in C order.
    Schedule s
    const ag_loss_kernels *kernels
    # Arguments. The first ones, without addresses, are all that the plan and the size of the workspace depend on.
    bint has_prob                     # whether there is `prob`
    bint has_class_weight
    bint has_temperatures
    bint has_grad_of_rows
    bint has_outputs                  # lse, log_prob, entropy, predicted or correct is requested
    bint has_row_outputs              # entropy, predicted or correct is requested
    const void *target                # (rows, K), int32 or int64
    bint has_wide_targets
    Py_ssize_t target_count           # K
    int64_t ignore_index
    const double *prob                # (rows, K); NULL: one target of probability 1
    const double *class_weight        # (V,), or NULL
    const double *token_weight        # (rows,), or NULL
    const double *temperature         # (rows,), or one number
    const double *grad_loss           # (rows,), or one number
    double label_smoothing
    double lse_square_scale
    bint is_mean
    double denominator                # 0: that of the rows
    bint return_grad
    # Results, NULL if not requested. Floating ones are float64 if `is_double`, else float32.
    bint is_double
    void *losses                      # (rows,): without a reduction
    double *loss_terms                # (rows,): with a reduction
    double *square_terms              # (rows,): with a reduction and lse_square_scale
    double loss                       # the reduced loss
    void *lse
    void *log_prob                    # of rows with one target
    void *entropy
    int64_t *predicted
    int64_t correct                   # counted if there is `predicted`
    # What follows from the arguments.
    double class_sum
    double class_scale                # see ag_class_scale; 1 without class weights
    void *kernel_weight               # (V,): class weights in the kernels' compute type; NULL: no kernel reads them
    double loss_denominator
    double square_denominator
    bint is_undefined                 # a mean over a sum of weights of 0, which is NaN
    double loss_share                 # reciprocals of these; 0 if they are 0
    double square_share
    bint is_single_target             # see the function of this name
    ag_row_op deficit_sum             # the row sum of label smoothing
    bint needs_deficit
    double scale                      # that of all rows, unless `has_temperatures`
    double inverse_temperature
    # Rows of a thread, or all rows of a problem that is split.
    Py_ssize_t chunk                  # rows that are computed together in place
    Py_ssize_t buffered               # rows of a buffer
    Py_ssize_t cached_bytes
    int slot_bits                     # at least half of the slots are empty
    Py_ssize_t buffer_size
    char *buffers                     # (threads, buffer_size), or (buffer_size,) if the problem is split
    ag_row_op sum                     # what SPLIT_SUM sums up


cdef double scale_of(double temperature, bint is_double) noexcept nogil
cdef ag_row_op plan_of(const CrossEntropy *x, Py_ssize_t classes, bint has_other_dtype) noexcept nogil
cdef void prepare_loss(CrossEntropy *x, const Problem *p, int threads) noexcept nogil
cdef Py_ssize_t loss_workspace_size(CrossEntropy *x) noexcept nogil
cdef Py_ssize_t place_loss_workspace(CrossEntropy *x, char *base) noexcept nogil
cdef int run_loss(CrossEntropy *x, bint default_threads, double *last_check) except -1 nogil
