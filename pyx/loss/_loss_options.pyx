"""What both losses share: their options, the divisor of a mean, and class weights as accumulators.

`LossOptions` describes a loss to the schedules of `cross_entropy` and of `linear_cross_entropy`. It is filled in from a call or
by a rank (`_loss_arguments`), or from XLA's buffers (`_xla_losses`).
"""

from libc.math cimport NAN
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memset

from ascend_grad cimport _tasks
from ascend_grad._kernels cimport (
    AG_SUM_LANES,
    ag_class_scale,
    ag_fpenv,
    ag_fpenv_enter,
    ag_fpenv_leave,
    ag_scaled_weight,
    ag_sum,
    ag_sum_add,
    ag_sums_total_of_all,
)

cdef enum:
    ROWS_PER_CHECK = 1 << 18          # rows between two checks for signals


cdef double *numeric_option(LossOptions *o, int i, const char **name) noexcept nogil:
    """Return where option `i` is among those that are one number, 0 if not given, and set its name; NULL after the last."""
    if i == 0:
        name[0] = "label_smoothing"
        return &o.label_smoothing
    if i == 1:
        name[0] = "lse_square_scale"
        return &o.lse_square_scale
    if i == 2:
        name[0] = "denominator"
        return &o.denominator
    if i == 3:
        name[0] = "logit_scale"
        return &o.logit_scale
    if i == 4:
        name[0] = "softcap"
        return &o.softcap
    return NULL


cdef LossOptions options_of_rows(const LossOptions *o, Py_ssize_t begin, Py_ssize_t count) noexcept nogil:
    """Return the options of `count` rows of a loss without outputs and their upstream gradients."""
    cdef LossOptions some = o[0]
    cdef Py_ssize_t targets = begin * o.target_count
    some.rows = count
    some.target = <const char *>o.target + targets * (8 if o.is_wide else 4)
    if o.target_prob != NULL:
        some.target_prob = <const char *>o.target_prob + targets * (4 if o.has_float_prob else 8)
    if o.token_weight != NULL:
        some.token_weight += begin
    if o.temperatures != NULL:
        some.temperatures += begin
    if o.grad_losses != NULL:
        some.grad_losses += begin
    return some


cdef inline double weight_of_target_class(const LossOptions *o, Py_ssize_t row) noexcept nogil:
    """Return the class weight of a row with one target, which is not ignored."""
    cdef int64_t entry
    if o.target_class_weight != NULL:
        return o.target_class_weight[row]
    # A target that is no class counts as the nearest one here. It is an error elsewhere.
    entry = target_at(o, row) - o.first_entry
    return o.class_weight[min(max(entry, <int64_t>0), <int64_t>o.classes - 1)]


cdef Py_ssize_t count_rows(const LossOptions *o, Py_ssize_t begin, Py_ssize_t end) noexcept nogil:
    """Return the number of rows in [begin, end) that are not ignored."""
    cdef Py_ssize_t row, count = 0
    if is_dense(o):
        return end - begin
    if o.target_count > 1:
        for row in range(begin, end):
            count += not is_ignored(o, row)
    elif o.is_wide:
        for row in range(begin, end):
            count += (<const int64_t *>o.target)[row] != o.ignore_index
    else:
        for row in range(begin, end):
            count += (<const int32_t *>o.target)[row] != o.ignore_index
    return count


cdef void add_weights(
    const LossOptions *o, bint has_classes, Py_ssize_t begin, Py_ssize_t end, ag_sum *losses, ag_sum *squares
) noexcept nogil:
    """Add the weights of rows in [begin, end) to AG_SUM_LANES sums: of the cross-entropy, and of the squared lse."""
    cdef Py_ssize_t row
    cdef double weight
    if o.target_count == 1 and not has_classes:
        for row in range(begin, end):
            ag_sum_add(&squares[row % AG_SUM_LANES], 0 if target_at(o, row) == o.ignore_index else o.token_weight[row])
        return
    for row in range(begin, end):
        if is_ignored(o, row):
            continue
        weight = token_weight_of(o, row)
        ag_sum_add(&squares[row % AG_SUM_LANES], weight)
        if has_classes:
            # A row of weight 0 adds nothing, whatever its class.
            ag_sum_add(&losses[row % AG_SUM_LANES], 0 if weight == 0 else weight * weight_of_target_class(o, row))


cdef int sum_weights(const LossOptions *o, double *sums, double *last_check) except -1 nogil:
    """Set `sums` to the sums of the weights of the rows that are not ignored: of the cross-entropy, and of the squared lse.

    The sums are compensated. With several targets of a row, its weight is its token weight.
    """
    cdef ag_sum[AG_SUM_LANES] losses, squares
    cdef bint has_classes = o.target_prob == NULL and not is_dense(o) and (
        o.target_class_weight != NULL or (o.class_weight != NULL and o.classes > 0)
    )
    cdef bint is_count = o.token_weight == NULL and not has_classes
    cdef Py_ssize_t begin = 0, end, count = 0
    memset(losses, 0, sizeof(losses))
    memset(squares, 0, sizeof(squares))
    while begin < o.rows:
        end = min(begin + ROWS_PER_CHECK, o.rows)
        if is_count:
            count += count_rows(o, begin, end)
        else:
            add_weights(o, has_classes, begin, end, losses, squares)
        begin = end
        if last_check != NULL:
            _tasks.check_signals(last_check)
    sums[1] = <double>count if is_count else ag_sums_total_of_all(squares)
    sums[0] = ag_sums_total_of_all(losses) if has_classes else sums[1]
    return 0


cdef int set_denominators(const LossOptions *o, double *denominators, double *last_check) except -1 nogil:
    """Set what the cross-entropy and the squared lse are divided by. Both are 0 if the mean is NaN, without a gradient."""
    if o.denominators != NULL:
        denominators[0], denominators[1] = o.denominators[0], o.denominators[1]
        return 0
    denominators[0] = denominators[1] = 1
    if o.reduction != REDUCTION_MEAN:
        return 0
    if o.denominator > 0:
        denominators[0] = denominators[1] = o.denominator
        return 0
    sum_weights(o, denominators, last_check)
    if denominators[0] == 0 or (has_square(o) and denominators[1] == 0):
        denominators[0] = denominators[1] = 0
    return 0


cdef void write_reduced(
    const LossOptions *o, const double *denominators, double cross_entropy, double square
) noexcept nogil:
    """Write the reduced loss from the sums of both terms over the rows."""
    cdef ag_fpenv mode = ag_fpenv_enter()
    cdef double loss = NAN
    if denominators[0] != 0:
        loss = cross_entropy / denominators[0]
        if has_square(o):
            loss += square / denominators[1]
    write_number(o, o.loss, 0, loss)
    ag_fpenv_leave(mode)


cdef double round_class_weights(void *to, const double *weights, Py_ssize_t n, bint is_double) noexcept nogil:
    """Write class weights as accumulators, divided by a number that is returned; see ag_class_scale."""
    cdef double scale = ag_class_scale(weights, n, is_double)
    cdef Py_ssize_t v
    for v in range(n):
        if is_double:
            (<double *>to)[v] = ag_scaled_weight(weights[v], scale, True)
        else:
            (<float *>to)[v] = <float>ag_scaled_weight(weights[v], scale, False)
    return scale
