from libc.math cimport INFINITY, fabs
from libc.stdint cimport int64_t, uint8_t

from ascend_grad._kernels cimport ag_bounded_factor
from ascend_grad._loss_options cimport LossOptions, class_weight_of, target_at, token_weight_of, write_number
from ascend_grad._memory cimport Arena
from ascend_grad._rowwise_kernels cimport ag_loss_kernels, ag_loss_rows, ag_row_op, ag_target_rows
from ascend_grad._rowwise_schedule cimport Schedule


cdef enum:
    MOST_COMPARED = 32                # most targets of a row that are compared with one another, as measured


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
    double *log_sum                   # log(1 + rest), or the losses of rows of which `is_single_target` holds
    double *moment
    double *deficit
    double *factor
    double *smoothing
    double *slope                     # NULL: no upstream gradient of the entropy
    # Results of the shape of the logits, see ag_loss_quadratic; NULL: not requested.
    double *reciprocal                # 1 / (1 + rest): factors of the probabilities
    double *first                     # of the Hessian's diagonal with respect to the logits before the softcap
    double *second
    double *at_one
    double *at_targets                # (K, pitch): the result at the targets, if there is a softcap
    double *others                    # sums of the exponentials times the vector, see ag_loss_quadratic; NULL: no vector
    double *at_largest
    # Dense targets: sums of weights, and results at nearly certain entries, see ag_loss_rows.
    double *below
    double *at_max
    double *certain
    double *at_certain
    # Targets: (K, pitch), and (K, together) for rows that are finished together. The pointers of numbers of rows are those
    # above, or of `together` numbers.
    ag_target_rows t
    char *packed                      # (K, together) elements on their way from the input or to the result
    Slot *slots                       # (2**slot_bits,): a table, or NULL
    Py_ssize_t *numbers               # numbers of the rows in C order
    char **a                          # addresses of the rows of the input, and of the result
    char **out
    uint8_t *stores                   # whether a row has gradients at its targets
    char *cached                      # exponentials of the rows, or NULL


ctypedef struct CrossEntropy:
    # A loss of rows. The caller fills in the options, their results and `return_grad`.
    Schedule s
    const ag_loss_kernels *kernels
    LossOptions o
    bint return_grad
    char *prob                        # (rows, V), in the dtype of the logits: the probabilities; NULL: not requested
    char *hessian                     # (rows, V), likewise: the diagonal of the Hessian of the loss, or with a vector their product
    const char *vector                # (rows, V), in the dtype of tiles; NULL: none
    # Outputs that only the gradient is computed from, (rows,). The entropy may be NULL: 0.
    const double *given_lse           # NULL: the statistics are computed
    const double *given_entropy
    # What follows from the options.
    double class_sum
    double class_scale                # see ag_class_scale; 1 without class weights
    void *kernel_weight               # (V,): class weights in the kernels' compute type; NULL: no kernel reads them
    double[2] denominators            # of the cross-entropy, and of the squared lse; 0: the mean is not defined
    bint is_single_target             # see the function of this name
    bint is_plain                     # likewise
    ag_row_op deficit_sum             # the row sum of label smoothing
    bint needs_deficit
    bint needs_moment
    double scale                      # that of all rows, unless there are temperatures
    double inverse_temperature        # with the factor of `factor_of`
    double outer_slope                # of the gradient beside the inverse temperature and the softcap's derivative
    # Results of all rows in the workspace; NULL if they are not needed.
    double *loss_terms                # (rows,): with a reduction
    double *square_terms              # (rows,): with a reduction and a term of the squared lse
    int64_t *predicted                # (rows,): the caller's if it is requested
    # Rows of a thread, or all rows of a problem that is split.
    Py_ssize_t chunk                  # rows that are computed together in place
    Py_ssize_t buffered               # rows of a buffer
    Py_ssize_t pitch                  # numbers of a buffer between two targets of a row
    Py_ssize_t together               # rows that are finished together
    Py_ssize_t cached_bytes
    int slot_bits                     # at least half of the slots are empty
    Py_ssize_t buffer_size
    char *buffers                     # (threads, buffer_size), or (buffer_size,) if the problem is split
    ag_row_op sum                     # what SPLIT_SUM sums up
    bint sums_products                # it sums up the exponentials times the vector
    double *further_sums              # (2, segments, rows): further sums of dense targets or of the vector, if the problem is split


# Logits x become z = softcap tanh(logit_scale x / softcap) / temperature. A positive logit_scale without a softcap and the
# temperature make one factor of the kernels. Otherwise tiles hold the logits before the temperature divides them.

cdef inline double logit_scale_of(const LossOptions *o) noexcept nogil:
    """Return the scale of logits, within the limits of the compute type."""
    cdef double largest = ag_bounded_factor(INFINITY, o.is_double)
    return min(max(o.logit_scale, -largest), largest)


cdef inline double cap_of(const LossOptions *o) noexcept nogil:
    """Return the softcap, within the limits of the compute type and rounded to it; 0 for none."""
    cdef double cap = ag_bounded_factor(o.softcap, o.is_double) if o.softcap > 0 else 0
    return cap if o.is_double else <float>cap


cdef inline double factor_of(const LossOptions *o) noexcept nogil:
    """Return the positive part of the scale that is applied with the temperature."""
    return 1 if o.softcap > 0 else ag_bounded_factor(fabs(o.logit_scale), o.is_double)


cdef inline double inner_of(const LossOptions *o) noexcept nogil:
    """Return the other part of the scale, by which tiles are multiplied, with a softcap the factor of tanh's argument."""
    return logit_scale_of(o) / (cap_of(o) if o.softcap > 0 else factor_of(o))


cdef inline bint is_transformed(const LossOptions *o) noexcept nogil:
    return o.softcap > 0 or inner_of(o) != 1


cdef inline double inverse_of(const LossOptions *o, double temperature) noexcept nogil:
    """Return the factor of logits for a temperature, within the limits of the compute type.

    So no factor of a row that is not ignored is 0 or infinite.
    """
    return factor_of(o) / ag_bounded_factor(temperature, o.is_double)


cdef inline double scale_of(const LossOptions *o, double temperature) noexcept nogil:
    """Return the factor of logits, rounded to the kernels' compute type: float64 if `is_double`, else float32."""
    cdef double scale = inverse_of(o, temperature)
    return scale if o.is_double else <float>scale


cdef inline double scale_of_all(const CrossEntropy *x) noexcept nogil:
    """Return the factor of all logits, 1 if rows have temperatures."""
    return 1 if x.o.temperatures != NULL else scale_of(&x.o, x.o.temperature)


cdef inline double inverse_of_row(const CrossEntropy *x, Py_ssize_t number) noexcept nogil:
    """Return the reciprocal temperature of a row, with the factor of `factor_of`."""
    return x.inverse_temperature if x.o.temperatures == NULL else inverse_of(&x.o, x.o.temperatures[number])


cdef inline double row_weight(const LossOptions *o, Py_ssize_t number) noexcept nogil:
    """Return the weight of a row with one target, which is not ignored."""
    cdef double token_weight = token_weight_of(o, number)
    return 0 if token_weight == 0 else token_weight * class_weight_of(o, target_at(o, number))


cdef inline double upstream_of_all(const CrossEntropy *x) noexcept nogil:
    """Return the gradient of the result with respect to the loss of a row of weight 1, if it is the same for all rows."""
    return 0 if x.denominators[0] == 0 or x.o.grad_loss == 0 else x.o.grad_loss / x.denominators[0]


cdef inline bint has_full_results(const CrossEntropy *x) noexcept nogil:
    """Return whether a result beside the gradient has the shape of the logits."""
    return x.prob != NULL or x.hessian != NULL


cdef inline bint needs_gradient(const CrossEntropy *x) noexcept nogil:
    """Return whether the numbers of the rows' gradients are computed."""
    return x.return_grad or x.hessian != NULL


cdef inline bint bends(const CrossEntropy *x) noexcept nogil:
    """Return whether the Hessian has terms of the softcap's second derivative."""
    return x.hessian != NULL and x.o.softcap > 0


cdef inline void set_loss(CrossEntropy *x, Py_ssize_t number, double loss, double square) noexcept nogil:
    if x.loss_terms == NULL:
        write_number(&x.o, x.o.loss, number, loss + square + 0.0)  # the last addition turns -0 into +0
        return
    x.loss_terms[number] = loss
    if x.square_terms != NULL:
        x.square_terms[number] = square


cdef void place_rows(const CrossEntropy *x, Rows *r, Arena *arena, char *base) noexcept nogil
cdef Rows rows_at(const CrossEntropy *x, char *base) noexcept nogil
cdef Rows rows_from(const Rows *r, Py_ssize_t begin) noexcept nogil
cdef void number_rows(
    const CrossEntropy *x, Py_ssize_t begin, Py_ssize_t count, bint with_addresses, Rows *r
) noexcept nogil
cdef void begin_rows(const CrossEntropy *x, Py_ssize_t begin, Py_ssize_t count, Rows *r) noexcept nogil
cdef ag_loss_rows parameters(const CrossEntropy *x, const Rows *r) noexcept nogil
cdef void load_at_targets(const CrossEntropy *x, Py_ssize_t count, Rows *r) noexcept nogil
cdef void store_at_targets(const CrossEntropy *x, Py_ssize_t count, const Rows *r) noexcept nogil
