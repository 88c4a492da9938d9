"""From the statistics of rows to their results: losses, outputs, factors of exponentials, and gradients at targets.

The formulas are in loss.h, for logits relative to the maximum.
"""

from libc.math cimport NAN, fabs, isinf
from libc.stdint cimport int64_t, uint16_t

from ascend_grad._cross_entropy_rows cimport (
    CrossEntropy,
    Rows,
    Slot,
    bends,
    inverse_of_row,
    load_at_targets,
    logit_scale_of,
    needs_gradient,
    row_weight,
    rows_from,
    set_loss,
    upstream_of_all,
)
from ascend_grad._kernels cimport (
    AG_NEARLY_CERTAIN,
    ag_certain_gradient,
    ag_coefficients,
    ag_coefficients_of,
    ag_copy_block,
    ag_entropy_gradient,
    ag_smoothed_sum,
    ag_upstream,
    ag_widen,
)
from ascend_grad._loss_options cimport (
    grad_loss_of,
    has_square,
    has_upstream,
    has_target_grads,
    is_dense,
    smoothing_term,
    target_grad,
    token_weight_of,
    upstream_of,
    write_log_prob,
    write_nothing,
    write_outputs,
)
from ascend_grad._rowwise_plan cimport A, Operand

cdef enum:
    SEGMENT = 256                     # elements of a row that are converted together


cdef void set_target_weights(const CrossEntropy *x, Py_ssize_t count, Rows *r) noexcept nogil:
    """Set the weights (1 - smoothing) q_k c_tk of the targets of rows, 0 for ignored targets."""
    cdef Py_ssize_t targets = x.o.target_count, block = r.t.block, pitch = r.t.pitch, i, k, number
    cdef const int64_t *entries
    cdef double *weights
    cdef double kept = 1 - x.o.label_smoothing
    for i in range(count if targets else 0):
        entries, weights, number = &r.t.entries[i], &r.t.weights[i], r.numbers[i] * targets
        if x.o.target_prob == NULL:
            weights[0] = kept if entries[0] >= 0 else 0
        elif x.o.has_float_prob:
            for k in range(targets):
                weights[k * block] = (
                    kept * (<const float *>x.o.target_prob)[number + k] if entries[k * pitch] >= 0 else 0
                )
        else:
            for k in range(targets):
                weights[k * block] = (
                    kept * (<const double *>x.o.target_prob)[number + k] if entries[k * pitch] >= 0 else 0
                )
    if x.o.class_weight == NULL:
        return
    for k in range(x.o.target_count):
        entries, weights = &r.t.entries[k * r.t.pitch], &r.t.weights[k * r.t.block]
        for i in range(count):
            if entries[i] >= 0:
                weights[i] *= x.o.class_weight[entries[i]]


cdef inline void clear_gradient(Py_ssize_t i, Rows *r) noexcept nogil:
    r.factor[i] = r.smoothing[i] = 0
    if r.slope != NULL:
        r.slope[i] = 0
    if r.certain != NULL:
        r.certain[i] = 2
    if r.first != NULL:
        r.first[i] = r.second[i] = r.at_one[i] = 0


cdef inline void set_curvature(Py_ssize_t i, double a, double square, double slope, double reciprocal, Rows *r) noexcept nogil:
    """Set the numbers of the diagonal of the Hessian, ``slope^2 p (a (1 - p) + 2 square p)`` without a softcap's factors.

    `a` is the coefficient of loss.h, and `square` the upstream gradient of the squared lse, with its factor.
    """
    cdef double factor = slope * slope * reciprocal
    r.first[i] = a * factor
    r.second[i] = (2 * square - a) * factor * reciprocal
    r.at_one[i] = factor * (a * (r.rest[i] * reciprocal) + 2 * square * reciprocal)


cdef void finish_ignored_row(CrossEntropy *x, Py_ssize_t number, Py_ssize_t i, Rows *r) noexcept nogil:
    clear_gradient(i, r)
    if r.reciprocal != NULL:
        r.reciprocal[i] = 0
    r.stores[i] = False
    set_loss(x, number, 0, 0)
    write_nothing(&x.o, number)
    if x.predicted != NULL:
        x.predicted[number] = -1


cdef bint has_nan(const CrossEntropy *x, const char *row) noexcept nogil:
    """Return whether a logit of a row at this address is NaN."""
    cdef const Operand *operand = &x.s.p.operands[A]
    cdef Py_ssize_t begin = 0, count, k
    cdef double[SEGMENT] doubles
    cdef float[SEGMENT] floats
    cdef uint16_t[SEGMENT] halves
    cdef char *packed = <char *>halves
    if operand.itemsize == 8:
        packed = <char *>doubles
    elif operand.itemsize == 4:
        packed = <char *>floats
    while begin < x.s.p.n:
        count = min(<Py_ssize_t>SEGMENT, x.s.p.n - begin)
        ag_copy_block(
            packed, 0, operand.itemsize, row + begin * operand.dim_stride, 0, operand.dim_stride, 1, count,
            operand.itemsize, operand.swapped
        )
        if operand.itemsize == 2:
            ag_widen(x.s.variant, operand.dtype, packed, floats, count)
        for k in range(count):
            if operand.itemsize == 8:
                if doubles[k] != doubles[k]:
                    return True
            elif floats[k] != floats[k]:
                return True
        begin += count
    return False


cdef double lse_of(const CrossEntropy *x, Py_ssize_t i, double inverse, const Rows *r) noexcept nogil:
    """Return the lse of a row. It is the maximum if that is infinite, unless a logit is NaN, which maxima leave out."""
    if isinf(r.max[i]):
        if x.s.p.is_transformed and (x.s.p.cap > 0 or x.s.p.inner == 0):
            return NAN  # such logits are finite or NaN
        return NAN if has_nan(x, r.a[i]) else r.max[i]
    return r.max[i] * inverse + r.log_sum[i]


cdef void finish_row(CrossEntropy *x, Py_ssize_t i, Rows *r) noexcept nogil:
    """Compute the results of a row from its statistics, which are number i of `r`: all but most of the gradient."""
    cdef Py_ssize_t number = r.numbers[i], k
    cdef double inverse = r.t.inverse[i], token_weight = token_weight_of(&x.o, number)
    cdef double lse = lse_of(x, i, inverse, r), reciprocal = 1 / (1 + r.rest[i])
    cdef double mean_gap = r.moment[i] * reciprocal if x.needs_moment else 0
    cdef double loss = r.t.losses[i], square = 0, weights = r.t.sums[i]
    if is_dense(&x.o):
        weights = (r.below[i] + r.at_max[i]) * x.class_scale
        loss = r.deficit[i] * x.class_scale
        if weights != 0:  # or all distances that the loss counts are 0, as the log-probability may be NaN
            loss = ag_smoothed_sum(r.log_sum[i], weights, loss)
    if x.needs_deficit:
        loss += smoothing_term(&x.o, x.s.p.n, r.log_sum[i], x.class_sum, r.deficit[i] * x.class_scale)
    if has_square(&x.o):
        square = x.o.lse_square_scale * lse * lse
    if token_weight == 0:
        set_loss(x, number, 0, 0)
    else:
        set_loss(x, number, token_weight * loss, token_weight * square if square != 0 else 0)
    write_outputs(&x.o, number, lse, r.log_sum[i] + mean_gap)
    for k in range(x.o.target_count if x.o.outputs.log_prob != NULL else 0):
        write_log_prob(&x.o, number * x.o.target_count + k, r.t.logits[k * x.pitch + i] - r.log_sum[i])
    if r.reciprocal != NULL:
        r.reciprocal[i] = reciprocal
    if needs_gradient(x):
        set_gradient(x, i, weights, lse, mean_gap, reciprocal, inverse * x.outer_slope, r)


cdef void set_gradient(
    CrossEntropy *x, Py_ssize_t i, double weights, double lse, double mean_gap, double reciprocal, double inverse, Rows *r
) noexcept nogil:
    """Set what the kernels read of a row's gradient, and the gradients at its targets.

    `weights` is the sum of the weights of the targets, `mean_gap` that of loss.h, and `inverse` the derivative of the
    row's logits with respect to the input, but for the softcap's.
    """
    cdef Py_ssize_t number = r.numbers[i], k
    cdef double token_weight = token_weight_of(&x.o, number), grad_output = grad_loss_of(&x.o, number), grad_loss
    cdef double smoothing = 0, square = 0
    cdef double *weight
    cdef ag_upstream upstream
    cdef ag_coefficients c
    # For the loss, rows of weight 0 and means that are not defined have no gradient, whatever the upstream gradient is.
    # Neither have rows whose upstream gradient is 0, whatever their weight.
    if token_weight == 0 or x.denominators[0] == 0:
        grad_output = 0
    if grad_output != 0:
        grad_output *= token_weight
    if grad_output != 0 and has_square(&x.o):
        square = grad_output / x.denominators[1] * x.o.lse_square_scale
    upstream = upstream_of(&x.o, number, square)
    r.stores[i] = grad_output != 0 or has_upstream(&upstream) or has_target_grads(&x.o, number)
    if not r.stores[i]:
        clear_gradient(i, r)
        return
    grad_loss = grad_output / x.denominators[0] if grad_output != 0 else 0
    if grad_loss == 0:  # also if the sum of the weights is infinite
        weights = 0
        for k in range(x.o.target_count):
            r.t.weights[k * r.t.block + i] = 0
    if x.needs_deficit:
        smoothing = grad_loss * x.o.label_smoothing / x.s.p.n
    c = ag_coefficients_of(&upstream, grad_loss * weights, smoothing, x.class_sum, lse)
    r.factor[i] = (c.a if c.b == 0 else c.a + c.b * mean_gap) * reciprocal * inverse
    r.smoothing[i] = smoothing * x.class_scale * inverse
    if r.slope != NULL:
        r.slope[i] = c.b * reciprocal * inverse
    if r.first != NULL:
        set_curvature(i, c.a, square, inverse, reciprocal, r)
    if is_dense(&x.o):
        r.smoothing[i] = grad_loss * x.class_scale * inverse
        set_certain_gradient(x, i, grad_loss, &c, mean_gap, reciprocal, inverse, r)
        return
    if x.o.target_prob != NULL and x.o.grad_log_prob != NULL:
        for k in range(x.o.target_count):
            weight = &r.t.weights[k * r.t.block + i]
            weight[0] = grad_loss * weight[0] - target_grad(&x.o, number * x.o.target_count + k)
        grad_loss, upstream.log_prob = 1, 0
    r.t.balance[i], r.t.a[i], r.t.b[i], r.t.s[i] = c.balance, c.a, c.b, c.s
    r.t.grad_loss[i], r.t.grad_log_prob[i] = grad_loss, upstream.log_prob
    r.t.reciprocal[i], r.t.mean_gap[i], r.t.outer[i] = reciprocal, mean_gap, inverse
    if r.slots != NULL:
        sum_equal_targets(x, i, r)


cdef inline void set_certain_gradient(
    const CrossEntropy *x, Py_ssize_t i, double grad_loss, const ag_coefficients *c, double mean_gap, double reciprocal,
    double inverse, Rows *r
) noexcept nogil:
    """Set the gradient of a row with dense targets at the entry that has the maximum, if that is nearly certain."""
    cdef double at_certain, others = 0 if grad_loss == 0 else grad_loss * r.below[i] * x.class_scale
    # Without statistics no entry counts as nearly certain.
    r.certain[i] = 1 if reciprocal > AG_NEARLY_CERTAIN and x.given_lse == NULL else 2
    at_certain = ag_certain_gradient(c, others, r.rest[i] * reciprocal)
    if c.b != 0:
        at_certain += ag_entropy_gradient(c, reciprocal, mean_gap)
    r.at_certain[i] = at_certain * inverse


cdef inline Slot *slot_of(const CrossEntropy *x, const Rows *r, int64_t entry) noexcept nogil:
    """Return the slot of an entry, which may be empty."""
    # The multiplier is 2**64 divided by the golden ratio: neighbours get distant slots.
    cdef size_t number = (<size_t>entry * <size_t>0x9E3779B97F4A7C15) >> (64 - x.slot_bits)
    while not r.slots[number].is_empty and r.slots[number].entry != entry:
        number = (number + 1) & ((<size_t>1 << x.slot_bits) - 1)
    return &r.slots[number]


cdef void sum_equal_targets(const CrossEntropy *x, Py_ssize_t i, Rows *r) noexcept nogil:
    """Set the sums of the weights of a row's targets that are the same entry.

    The time grows with the number of targets, not with its square as that of the kernel.
    """
    cdef Py_ssize_t k
    cdef int64_t entry
    cdef Slot *slot
    for k in range(<Py_ssize_t>1 << x.slot_bits):
        r.slots[k].is_empty = True
    for k in range(x.o.target_count):
        entry = r.t.entries[k * x.pitch + i]
        slot = slot_of(x, r, entry)
        if slot.is_empty:
            slot.entry, slot.weight, slot.is_empty = entry, 0, False
        slot.weight += r.t.weights[k * r.t.block + i]
    for k in range(x.o.target_count):
        r.t.equal[k * r.t.block + i] = slot_of(x, r, r.t.entries[k * x.pitch + i]).weight


cdef void finish_single_target_rows(CrossEntropy *x, Py_ssize_t count, Rows *r) noexcept nogil:
    """Compute what `finish_rows` does for rows of which `is_single_target` holds."""
    cdef Py_ssize_t i
    cdef double grad = upstream_of_all(x), share = x.o.label_smoothing / x.s.p.n, weight = 1, loss
    cdef double subtrahend = grad * x.inverse_temperature * share
    cdef double balance = grad * x.inverse_temperature * (x.o.label_smoothing - share)
    cdef bint has_weights = x.o.class_weight != NULL or x.o.token_weight != NULL
    x.kernels.finish(
        r.rest, r.max, r.t.logits, x.scale, grad, x.inverse_temperature, x.o.label_smoothing, r.log_sum, r.factor,
        r.t.logits, count
    )
    for i in range(count):
        loss = r.log_sum[i]
        r.stores[i] = r.scale[i] > 0 and grad != 0
        if x.needs_deficit:
            loss += share * r.deficit[i]
            r.t.logits[i] += balance
        r.smoothing[i] = subtrahend
        if r.scale[i] <= 0:
            loss = 0
        elif has_weights:
            weight = row_weight(&x.o, r.numbers[i])
            loss = 0 if weight == 0 else loss * weight
            r.stores[i] = r.stores[i] and token_weight_of(&x.o, r.numbers[i]) != 0
            r.factor[i] *= weight
            r.smoothing[i] *= weight
            r.t.logits[i] *= weight
        if not r.stores[i]:
            r.factor[i] = r.smoothing[i] = 0
        if r.first != NULL:
            # Nothing but p has a second derivative: the factor is that of p in the gradient.
            set_curvature(i, r.factor[i] * (1 + r.rest[i]) * x.inverse_temperature, 0, 1, 1 / (1 + r.rest[i]), r)
            if not r.stores[i]:  # the other numbers may be NaN
                r.first[i] = r.second[i] = r.at_one[i] = 0
        if r.reciprocal != NULL:
            r.reciprocal[i] = 1 / (1 + r.rest[i]) if r.scale[i] > 0 else 0
        set_loss(x, r.numbers[i], loss, 0)


cdef void finish_plain_rows(CrossEntropy *x, Py_ssize_t count, Rows *r) noexcept nogil:
    """Do what `finish_row` does for rows of which `is_plain` holds, without its branches."""
    cdef Py_ssize_t i
    cdef double inverse = x.inverse_temperature, token_weight, reciprocal, grad, weights
    # Without an upstream gradient rows have none, whatever their weights.
    cdef bint has_grad = x.o.grad_loss != 0 and x.denominators[0] != 0
    for i in range(count):
        if r.scale[i] == 0:
            token_weight = 0
        elif x.o.token_weight != NULL:
            token_weight = x.o.token_weight[r.numbers[i]]
        else:
            token_weight = 1
        set_loss(x, r.numbers[i], token_weight * r.t.losses[i] if token_weight != 0 else 0, 0)
        grad = x.o.grad_loss * token_weight / x.denominators[0] if has_grad and token_weight != 0 else 0
        reciprocal = 1 / (1 + r.rest[i])
        r.stores[i] = grad != 0
        weights = grad * r.t.sums[i] if grad != 0 else 0
        r.factor[i] = weights * reciprocal * inverse if grad != 0 else 0  # the reciprocal may be NaN
        r.t.grad_loss[i], r.t.a[i], r.t.reciprocal[i], r.t.outer[i] = grad, weights, reciprocal, inverse
        r.smoothing[i] = r.t.balance[i] = r.t.b[i] = r.t.s[i] = r.t.grad_log_prob[i] = r.t.mean_gap[i] = 0
    if r.slots != NULL:
        for i in range(count):
            sum_equal_targets(x, i, r)


cdef void finish_rows(CrossEntropy *x, Py_ssize_t count, Rows *r) noexcept nogil:
    """Compute the results of rows from their statistics, and the parameters of the gradient."""
    cdef Py_ssize_t first = 0, some
    cdef Rows part
    while first < count:
        part = rows_from(r, first)
        some = min(x.together, count - first)
        load_at_targets(x, some, &part)
        if x.is_single_target:
            finish_single_target_rows(x, some, &part)
        else:
            finish_some_rows(x, some, &part)
        first += some


cdef void finish_some_rows(CrossEntropy *x, Py_ssize_t count, Rows *r) noexcept nogil:
    """Do what `finish_rows` does for at most `together` rows, from the logits at their targets."""
    cdef Py_ssize_t i, k
    cdef double value
    for k in range(x.o.target_count if r.t.slopes != NULL else 0):
        for i in range(count):
            value = r.t.logits[k * x.pitch + i] / x.s.p.cap
            r.t.slopes[k * x.pitch + i] = 1 - value * value
            if r.at_targets != NULL:
                r.at_targets[k * x.pitch + i] = value
    for i in range(count):
        r.t.inverse[i] = inverse_of_row(x, r.numbers[i])
    set_target_weights(x, count, r)
    x.kernels.log1p(r.rest, r.log_sum, count)
    x.kernels.target_losses(&r.t, count)
    if x.is_plain:
        finish_plain_rows(x, count, r)
    else:
        for i in range(count):
            if r.scale[i] == 0:
                finish_ignored_row(x, r.numbers[i], i, r)
            else:
                finish_row(x, i, r)
    if needs_gradient(x) and not is_dense(&x.o):
        x.kernels.target_gradients(&r.t, count)
    if bends(x):
        bend_at_targets(x, count, r)


cdef double bend_of(const CrossEntropy *x) noexcept nogil:
    """Return the second derivative of the softcap divided by its first one and by z / cap."""
    return -2 * logit_scale_of(&x.o) / x.s.p.cap


cdef inline double vector_at(const CrossEntropy *x, Py_ssize_t i) noexcept nogil:
    """Return element i of the vector, whose dtype is the compute type if there is a softcap."""
    return (<const double *>x.vector)[i] if x.o.is_double else (<const float *>x.vector)[i]


cdef inline double bent_by_kernel(const CrossEntropy *x, double v, double value) noexcept nogil:
    """Return an element of the vector times the slope of the softcap at value = z / cap, rounded as the kernels do."""
    cdef float ratio, square, slope
    if x.o.is_double:
        return v * (1 - value * value)
    ratio = <float>(value * x.s.p.cap) / <float>x.s.p.cap  # z and the cap are float32 in the kernels
    square = ratio * ratio
    slope = 1 - square
    return <float>v * slope


cdef void bend_at_targets(const CrossEntropy *x, Py_ssize_t count, Rows *r) noexcept nogil:
    """Replace z / cap at the targets by the Hessian's result there, from the gradients at the targets."""
    cdef Py_ssize_t i, k, at
    cdef double e, value, slope, factor = 1, v, others
    for k in range(x.o.target_count):
        for i in range(count):
            at = k * x.pitch + i
            if r.t.entries[at] < 0:
                continue
            e, slope = r.t.exp[k * r.t.block + i], r.t.slopes[at]
            if x.vector == NULL:
                value = (r.at_one[i] if e == 1 else e * (r.first[i] + e * r.second[i])) * slope
            else:
                factor = vector_at(x, r.numbers[i] * x.s.p.n + r.t.entries[at])
                v = factor * slope
                if e == 1:
                    # If a row has one maximum, `at_largest` is this element in the arithmetic of the kernel.
                    others = r.at_largest[i] - bent_by_kernel(x, factor, r.at_targets[at])
                    if fabs(others) <= (1e-15 if x.o.is_double else 1e-6) * fabs(v):
                        others = 0
                    value = r.at_one[i] * v + r.second[i] * (r.others[i] + others)
                else:
                    value = e * (r.first[i] * v + r.second[i] * (r.others[i] + r.at_largest[i]))
            r.at_targets[at] = value * slope + r.t.logits[at] * (bend_of(x) * r.at_targets[at]) * factor
