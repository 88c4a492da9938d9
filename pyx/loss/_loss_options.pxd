from libc.stdint cimport int32_t, int64_t

from ascend_grad._kernels cimport ag_smoothed_sum, ag_upstream


cdef enum Reduction:
    REDUCTION_MEAN
    REDUCTION_SUM
    REDUCTION_NONE


ctypedef struct Outputs:
    # Results beside the loss, one number for each row; NULL for a result that is not requested. `correct` is one number.
    void *lse
    void *log_prob                    # of each target: (rows, target_count)
    void *entropy
    int64_t *predicted
    int64_t *correct


ctypedef struct LossOptions:
    # What a loss takes beside its logits, and its results. Arrays of rows are in C order; NULL: not given.
    Py_ssize_t rows
    const void *target                # (rows, target_count), int32 or int64; not read if targets are dense
    bint is_wide                      # target is int64
    Py_ssize_t target_count           # targets of a row; 0: targets are dense, probabilities of all classes
    int64_t ignore_index
    int64_t first_entry               # the target of the first class
    Py_ssize_t classes                # length of `class_weight`
    const void *target_prob           # (rows, target_count), float64 or float32; NULL: one target of probability 1
    bint has_float_prob               # target_prob is float32
    const double *class_weight        # (V,)
    const double *target_class_weight  # (rows,): weights of the targets' classes, if ranks share class_weight
    const double *token_weight        # (rows,)
    double label_smoothing
    double lse_square_scale
    double logit_scale
    double softcap                    # 0: none
    double temperature
    const double *temperatures        # (rows,); NULL: all are `temperature`
    Reduction reduction
    double denominator                # of a mean; 0: the sum of the weights of the rows
    const double *denominators        # of both terms, if the rows are a block of a call; NULL: they follow from the rows
    # Upstream gradients.
    double grad_loss
    const double *grad_losses         # (rows,); NULL: all are `grad_loss`
    const double *grad_lse            # (rows,); NULL: 0
    const double *grad_log_prob       # (rows, target_count); NULL: 0
    const double *grad_entropy
    # Results. Floating ones are float64 if `is_double`, else float32.
    bint is_double
    void *loss                        # one number, or (rows,) without a reduction
    Outputs outputs


cdef inline int64_t target_at(const LossOptions *o, Py_ssize_t i) noexcept nogil:
    """Return element i of the targets."""
    return (<const int64_t *>o.target)[i] if o.is_wide else (<const int32_t *>o.target)[i]


cdef inline double prob_at(const LossOptions *o, Py_ssize_t i) noexcept nogil:
    """Return element i of the probabilities of targets."""
    return (<const float *>o.target_prob)[i] if o.has_float_prob else (<const double *>o.target_prob)[i]


cdef inline int64_t first_target(const LossOptions *o, Py_ssize_t row) noexcept nogil:
    """Return the first target of a row that is not ignored, or else the ignored one."""
    cdef Py_ssize_t i
    for i in range(row * o.target_count, (row + 1) * o.target_count):
        if target_at(o, i) != o.ignore_index:
            return target_at(o, i)
    return o.ignore_index


cdef inline bint is_dense(const LossOptions *o) noexcept nogil:
    return o.target_count == 0


cdef inline bint is_ignored(const LossOptions *o, Py_ssize_t row) noexcept nogil:
    """Return whether no target of a row adds anything. Rows of dense targets are never ignored."""
    return not is_dense(o) and first_target(o, row) == o.ignore_index


cdef inline double token_weight_of(const LossOptions *o, Py_ssize_t row) noexcept nogil:
    return 1 if o.token_weight == NULL else o.token_weight[row]


cdef inline double class_weight_of(const LossOptions *o, int64_t entry) noexcept nogil:
    return 1 if o.class_weight == NULL else o.class_weight[entry]


cdef inline double temperature_of(const LossOptions *o, Py_ssize_t row) noexcept nogil:
    return o.temperature if o.temperatures == NULL else o.temperatures[row]


cdef inline double grad_loss_of(const LossOptions *o, Py_ssize_t row) noexcept nogil:
    return o.grad_loss if o.grad_losses == NULL else o.grad_losses[row]


cdef inline double number_of(const double *numbers, Py_ssize_t row) noexcept nogil:
    """Return the number of a row, 0 without an array."""
    return 0 if numbers == NULL else numbers[row]


cdef inline bint has_square(const LossOptions *o) noexcept nogil:
    """Return whether the loss has a second term, of the squared lse."""
    return o.lse_square_scale != 0


cdef inline double smoothing_term(
    const LossOptions *o, Py_ssize_t classes, double log_sum, double class_sum, double deficit
) noexcept nogil:
    """Return what label smoothing adds to the loss of a row; see `ag_smoothed_sum`."""
    return o.label_smoothing / classes * ag_smoothed_sum(log_sum, class_sum, deficit)


cdef inline double target_grad(const LossOptions *o, Py_ssize_t i) noexcept nogil:
    """Return the upstream gradient of the log-probability of target i of all, 0 for an ignored target."""
    return 0 if o.grad_log_prob == NULL or target_at(o, i) == o.ignore_index else o.grad_log_prob[i]


cdef inline bint has_target_grads(const LossOptions *o, Py_ssize_t row) noexcept nogil:
    """Return whether a target of a row has an upstream gradient. The sum over the row's targets may be 0."""
    cdef Py_ssize_t i
    for i in range(row * o.target_count, (row + 1) * o.target_count if o.grad_log_prob != NULL else 0):
        if target_grad(o, i) != 0:
            return True
    return False


cdef inline ag_upstream upstream_of(const LossOptions *o, Py_ssize_t row, double square) noexcept nogil:
    """Return the upstream gradients of a row that is not ignored; `square` is that of its squared lse."""
    cdef ag_upstream upstream
    cdef Py_ssize_t i
    upstream.square, upstream.lse = square, number_of(o.grad_lse, row)
    upstream.log_prob, upstream.entropy = 0, number_of(o.grad_entropy, row)
    for i in range(row * o.target_count, (row + 1) * o.target_count if o.grad_log_prob != NULL else 0):
        upstream.log_prob += target_grad(o, i)
    return upstream


cdef inline bint has_upstream(const ag_upstream *upstream) noexcept nogil:
    return upstream.square != 0 or upstream.lse != 0 or upstream.log_prob != 0 or upstream.entropy != 0


cdef inline bint has_output_grads(const LossOptions *o) noexcept nogil:
    return o.grad_lse != NULL or o.grad_log_prob != NULL or o.grad_entropy != NULL


cdef inline bint needs_entropy(const LossOptions *o) noexcept nogil:
    """Return whether outputs or gradients depend on the entropy of the rows."""
    return o.outputs.entropy != NULL or o.grad_entropy != NULL


cdef inline bint has_outputs(const LossOptions *o) noexcept nogil:
    cdef const Outputs *outputs = &o.outputs
    return (
        outputs.lse != NULL or outputs.log_prob != NULL or outputs.entropy != NULL or outputs.predicted != NULL
        or outputs.correct != NULL
    )


cdef inline void write_number(const LossOptions *o, void *results, Py_ssize_t i, double value) noexcept nogil:
    """Write a floating result, if it is requested."""
    if results == NULL:
        return
    if o.is_double:
        (<double *>results)[i] = value
    else:
        (<float *>results)[i] = <float>value


cdef inline void write_outputs(const LossOptions *o, Py_ssize_t row, double lse, double entropy) noexcept nogil:
    """Write the floating outputs of a row that are requested, but for the log-probabilities of its targets."""
    write_number(o, o.outputs.lse, row, lse)
    write_number(o, o.outputs.entropy, row, entropy)


cdef inline void write_log_prob(const LossOptions *o, Py_ssize_t i, double log_prob) noexcept nogil:
    """Write the log-probability of target i of all, 0 for an ignored target."""
    write_number(o, o.outputs.log_prob, i, 0 if target_at(o, i) == o.ignore_index else log_prob)


cdef inline void write_nothing(const LossOptions *o, Py_ssize_t row) noexcept nogil:
    """Write the floating outputs of an ignored row."""
    cdef Py_ssize_t i
    write_outputs(o, row, 0, 0)
    for i in range(row * o.target_count, (row + 1) * o.target_count):
        write_number(o, o.outputs.log_prob, i, 0)


cdef LossOptions options_of_rows(const LossOptions *o, Py_ssize_t begin, Py_ssize_t count) noexcept nogil
cdef double *numeric_option(LossOptions *o, int i, const char **name) noexcept nogil
cdef int sum_weights(const LossOptions *o, double *sums, double *last_check) except -1 nogil
cdef int set_denominators(const LossOptions *o, double *denominators, double *last_check) except -1 nogil
cdef void write_reduced(
    const LossOptions *o, const double *denominators, double cross_entropy, double square
) noexcept nogil
cdef double round_class_weights(void *to, const double *weights, Py_ssize_t n, bint is_double) noexcept nogil
