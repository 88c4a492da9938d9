from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from ascend_grad._kernels cimport ag_dtype, ag_variant
from ascend_grad._linear_kernels cimport ag_logit_transform, ag_loss_row, ag_loss_targets, ag_matrix
from ascend_grad._views cimport View

cdef enum:
    SEGMENT = 256                     # most values of a row that are converted at a time
    ROWS_PER_CHECK = 1 << 18          # rows between two checks for signals, in loops over all rows of a call
    VECTOR_PADDING = 16               # elements behind vectors over the vocabulary, the most lanes of a vector


ctypedef struct Rows:
    # The caller's vectors (BT,), contiguous, which determine the active rows.
    #
    # A row is active if its `grad` is not zero; without `grad`, if its target is not ignored. An active row's vocabulary
    # entry is target - start. A row has no entry if it is masked, or if the difference is not in [0, size).
    Py_ssize_t total                  # number of rows
    Py_ssize_t active                 # number of active rows; set by count_active_rows
    const void *target                # int32 or int64; NULL: no row has an entry
    bint is_wide                      # target is int64
    int64_t start, size
    const uint8_t *mask               # NULL: no row is masked
    bint is_packed                    # mask has eight rows to a byte, as bits
    bint can_ignore
    int64_t ignored                   # target of inactive rows, if can_ignore
    const void *grad                  # accumulators; NULL: no gradient is requested
    const void *max                   # accumulators or NULL: maxima of the logits
    const void *sum                   # accumulators or NULL: sums of exponentials relative to the maxima
    const double *token_weight        # NULL: all are 1. Rows of weight 0 are not active, unless they have outputs
    bint with_outputs                 # rows have results beside their loss


ctypedef struct Problem:
    # A linear problem: X (BT, H) is input, W (V, H) is weight, and the logits are X W^T.
    ag_dtype dtype                    # dtype of X and W
    Py_ssize_t vocab, hidden          # V, H
    ag_matrix input, weight
    Rows rows
    # Gradients. P is made of `softmax` if its data is not NULL, otherwise of the logits and the statistics in `rows`.
    # If is_general, `softmax` holds logits.
    bint with_input_grad, with_weight_grad
    ag_matrix softmax                 # (BT, V)
    ag_matrix input_grad, weight_grad
    double filter_eps
    # Statistics of the logits. If gradients are also requested, `rows` points to the same statistics.
    bint with_statistics
    void *logits_max                  # accumulators (BT,), contiguous
    void *sum_exp
    void *predicted                   # 0 for a row without a vocabulary entry
    ag_matrix logits                  # (BT, V); data is NULL if they are not requested
    # The largest logits of each row, with statistics that are computed only for them; all rows are active. `transform`
    # makes them of the products, but for the temperature.
    Py_ssize_t top_k                  # number of logits; 0: not requested
    double temperature
    const double *temperatures        # (BT,) or NULL: all are `temperature`
    double *scales                    # (BT,) with temperatures: their reciprocals; the schedule places them
    const double *bias                # (V,) or NULL; the schedule places `transform.bias`
    void *top_values                  # accumulators (BT, top_k), contiguous: log-probabilities
    int64_t *top_indices              # (BT, top_k), contiguous
    # Sums of exponentials without the largest (BT,); NULL: not requested. With them, top_values are logits, not yet divided
    # by the temperature.
    double *top_rest
    # The loss; all NULL or 0 without one. Vectors over all rows, which sweeps and finish_row write.
    double *rest                      # (BT,): see ag_statistics
    void *complement                  # accumulators (BT,): see ag_gradient_rule
    ag_loss_row *loss_rows            # (BT,), if the transformation, further statistics or the gradient need them
    ag_logit_transform transform
    bint with_more                    # argmax of ag_loss_row is computed
    bint with_moments                 # moment, deficit and weight of ag_loss_row are computed as well
    bint is_general                   # P is made of the coefficients of ag_loss_row
    ag_loss_targets targets           # (BT, count), if loss_rows is not NULL
    double *target_logits             # (BT, count), if is_general
    double label_smoothing
    const double *class_weight        # (V,) or NULL: the weights that smoothing, or dense targets, use
    const void *class_weight_values   # the same as accumulators, divided by class_scale, with a vector of padding
    double class_scale                # see ag_class_scale; 1 without them
    double class_sum                  # their sum; V without them
    # Dense targets: (BT, V) probabilities, without data if there are none, and the numbers of ag_gradient_rule.
    ag_matrix prob
    double kept, share
    double *bias_sums                 # (V,): the gradient with respect to the bias; NULL: not requested
    # Bytes of weight_grad whose memory may hold logits until its rows are written; 0: none.
    Py_ssize_t weight_grad_bytes


cdef inline double number(const void *values, Py_ssize_t i, bint is_double) noexcept nogil:
    return (<const double *>values)[i] if is_double else (<const float *>values)[i]


cdef inline void set_number(void *values, Py_ssize_t i, bint is_double, double value) noexcept nogil:
    if is_double:
        (<double *>values)[i] = value
    else:
        (<float *>values)[i] = <float>value


cdef inline void copy_number(void *to, Py_ssize_t n, const void *source, Py_ssize_t i, int itemsize) noexcept nogil:
    if itemsize == 8:
        (<uint64_t *>to)[n] = (<const uint64_t *>source)[i]
    else:
        (<uint32_t *>to)[n] = (<const uint32_t *>source)[i]


cdef inline int acc_size_of(ag_dtype dtype) noexcept nogil:
    """Return the bytes of an accumulator of a problem."""
    return 8 if dtype == ag_dtype.AG_FLOAT64 else 4


ctypedef struct ChunkBuffers:
    # Buffers of select_rows: one element of each vector for each selected row.
    int64_t *row_numbers
    int64_t *target
    void *grad
    void *max
    void *sum


cdef void bound_transform(Problem *p) noexcept nogil
cdef double largest_bias(
    const Problem *p, double temperature, const double *temperatures, Py_ssize_t rows
) noexcept nogil
cdef void round_bias(void *to, const double *bias, Py_ssize_t n, double largest, bint is_double) noexcept nogil
cdef ag_matrix matrix_of(const View *view) noexcept nogil
cdef void set_matrices(Problem *p, const View *input, const View *weight) noexcept nogil
cdef bint holds_sums(const ag_matrix *matrix, int acc_size) noexcept nogil
cdef bint is_rounded_by_kernels(const ag_matrix *matrix, int acc_size) noexcept nogil
cdef bint has_dense_rows(const ag_matrix *matrix, Py_ssize_t columns) noexcept nogil
cdef bint use_nontemporal_stores(
    const ag_matrix *matrix, Py_ssize_t rows, Py_ssize_t columns, int threads
) noexcept nogil
cdef void convert_segment(
    ag_variant variant, int acc_size, const char *source, const ag_matrix *to, Py_ssize_t row, Py_ssize_t begin,
    Py_ssize_t n
) noexcept nogil
cdef int clear_rows(
    const ag_matrix *out, Py_ssize_t first, Py_ssize_t rows, Py_ssize_t n, double *last_check
) except -1 nogil

cdef inline int64_t target_of(const Rows *rows, Py_ssize_t i) noexcept nogil:
    return (<const int64_t *>rows.target)[i] if rows.is_wide else (<const int32_t *>rows.target)[i]


cdef inline bint is_active(const Rows *rows, Py_ssize_t i, int acc_size) noexcept nogil:
    """Return whether row i is active."""
    # The bits of grad decide, since a comparison may take subnormal numbers for zero.
    if rows.grad != NULL and acc_size == 8:
        return (<const uint64_t *>rows.grad)[i] << 1 != 0
    if rows.grad != NULL:
        return <uint32_t>((<const uint32_t *>rows.grad)[i] << 1) != 0
    if rows.token_weight != NULL and not rows.with_outputs and rows.token_weight[i] == 0:
        return False
    return not (rows.can_ignore and target_of(rows, i) == rows.ignored)


cdef inline bint is_masked(const Rows *rows, Py_ssize_t i) noexcept nogil:
    if rows.mask == NULL:
        return False
    return (rows.mask[i // 8] >> (i % 8)) & 1 if rows.is_packed else rows.mask[i]


cdef inline int64_t entry_of_row(const Rows *rows, Py_ssize_t i) noexcept nogil:
    """Return the vocabulary entry of row i, its row of weight, or -1 for none."""
    cdef int64_t target
    if rows.target == NULL:
        return -1
    target = target_of(rows, i)
    # The difference of two signed numbers, if it is positive, fits in an unsigned number.
    if is_masked(rows, i) or target < rows.start or <uint64_t>target - <uint64_t>rows.start >= <uint64_t>rows.size:
        return -1
    return target - rows.start


cdef int count_active_rows(Rows *rows, int acc_size, double *last_check) except -1 nogil
cdef Py_ssize_t select_rows(
    const Rows *rows, Py_ssize_t *next, Py_ssize_t end, Py_ssize_t n, Py_ssize_t most, int acc_size,
    const ChunkBuffers *to
) noexcept nogil
cdef int clear_inactive_rows(
    const Rows *rows, int acc_size, const ag_matrix *out, Py_ssize_t n, double *last_check
) except -1 nogil
