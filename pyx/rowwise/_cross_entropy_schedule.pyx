"""Schedules of the cross-entropy of rows, without Python: the losses, outputs beside them, and the gradient.

Kernels compute the maxima and the sums of a block of rows, and later write the gradient of the same block, which is then
still in the cache. In between, `finish_rows` computes the losses, the factors of the exponentials, and the gradients at the
targets, which are stored last. A target's logit is read before, as the gradient may overwrite the input.

The plan is that of a forward row-wise operator (`_rowwise_plan`). Sums that are needed for some options alone have no column
kernels; with such options the problem is described as `plan_of` returns it.

The caller owns the workspace. It fills in the arguments of a `CrossEntropy`, calls `prepare_loss`, allocates
`loss_workspace_size` bytes, calls `place_loss_workspace` and `run_loss`.
"""

from libc.math cimport INFINITY, NAN, expm1, isinf
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t
from libc.string cimport memcpy, memset

from ascend_grad cimport _cpu, _tasks
from ascend_grad._kernels cimport (
    AG_ACCURATE_SUM,
    AG_FLOAT32,
    AG_FLOAT64,
    AG_SUM_LANES,
    ag_bounded_factor,
    ag_class_scale,
    ag_convert,
    ag_copy_block,
    ag_fpenv,
    ag_fpenv_enter,
    ag_fpenv_leave,
    ag_scaled_weight,
    ag_smoothed_sum,
    ag_sum,
    ag_sum_add,
    ag_sum_total,
    ag_sums_total_of_all,
    ag_widen,
)
from ascend_grad._memory cimport ALIGNMENT, Arena, align_up, arena_alloc
from ascend_grad._rowwise_kernels cimport (
    AG_LOSS_DEFICIT,
    AG_LOSS_EXP,
    AG_LOSS_EXP_OF_ROWS,
    AG_LOSS_MOMENT,
    AG_LOSS_REST,
    AG_LOSS_WEIGHTED_DEFICIT,
    AG_MAX_COLUMNS,
    AG_MAX_LANES,
    AG_STRIP_COLUMNS,
    AG_STRIP_ROWS,
    ag_loss_rows,
    ag_row_op,
    ag_single_target_columns,
    ag_tile,
)
from ascend_grad._rowwise_plan cimport MASK, MAX_AXES, OUT, A, Operand, Problem, limit_blocks, offset_of, tile_at
from ascend_grad._rowwise_schedule cimport (
    COMBINE_MAX,
    COMBINE_SUM,
    SPLIT_MAX,
    SPLIT_SUM,
    SPLIT_WRITE,
    Schedule,
    column_tile,
    gather,
    loss_kernels,
    place_workspace,
    prepare,
    row_tile,
    run_phase,
    scatter,
    scatter_columns,
    scratch_of,
    tiles_of,
)
from ascend_grad._tasks cimport Team

cdef enum:
    CACHED_BYTES = 16 << 10           # most bytes of the exponentials of a chunk of rows, which mostly stay in L1
    MAX_CHUNK = 1024                  # most rows of a chunk
    ROWS_PER_CHECK = 1 << 18          # rows between two checks for signals
    ROWS_PER_SUM = 256                # rows whose weights are added up together
    SEGMENT = 256                     # elements of a row that are converted together
    MOST_COMPARED = 32                # most targets of a row that are compared with one another, as measured
    MOST_ROWS = 1 << 12               # most rows of a block
    MOST_TARGETS = 1 << 16            # most targets of a block's rows, if it has several rows

# The gradient at a target whose probability is above this number is computed from 1 - p, as AG_NEARLY_CERTAIN of the
# linear loss.
cdef double NEARLY_CERTAIN = 0.9375

# ---- elements --------------------------------------------------------------------------------------------------------

cdef inline int64_t target_of(const CrossEntropy *x, Py_ssize_t number, Py_ssize_t k) noexcept nogil:
    cdef Py_ssize_t i = number * x.target_count + k
    return (<const int64_t *>x.target)[i] if x.has_wide_targets else (<const int32_t *>x.target)[i]


cdef inline void copy_targets_of_size(
    const CrossEntropy *x, const Rows *r, Py_ssize_t count, int which, int itemsize, char *packed
) noexcept nogil:
    """Copy elements at targets of `count` rows from the input (`which` is A) to `packed`, or from there to the result (OUT).

    `packed` has one element for each target. It gets zeros for ignored targets.
    """
    cdef Py_ssize_t stride = x.s.p.operands[which].dim_stride, i, k
    cdef int64_t entry
    for i in range(count):
        if which == OUT and not r.stores[i]:
            packed += x.target_count * itemsize
            continue
        for k in range(x.target_count):
            entry = target_of(x, r.numbers[i], k)
            if which == A and entry == x.ignore_index:
                memset(packed, 0, itemsize)
            elif which == A:
                memcpy(packed, r.a[i] + entry * stride, itemsize)
            elif entry != x.ignore_index:
                memcpy(r.out[i] + entry * stride, packed, itemsize)
            packed += itemsize


cdef void copy_targets(const CrossEntropy *x, const Rows *r, Py_ssize_t count, int which, char *packed) noexcept nogil:
    """Do what `copy_targets_of_size` does, which is compiled for each size of an element."""
    cdef int itemsize = x.s.p.operands[which].itemsize
    if itemsize == 2:
        copy_targets_of_size(x, r, count, which, 2, packed)
    elif itemsize == 4:
        copy_targets_of_size(x, r, count, which, 4, packed)
    else:
        copy_targets_of_size(x, r, count, which, 8, packed)


cdef void swap_elements(char *elements, Py_ssize_t count, int itemsize) noexcept nogil:
    """Reverse the bytes of each element."""
    cdef Py_ssize_t i
    cdef int j
    cdef char *element
    for i in range(count):
        element = elements + i * itemsize
        for j in range(itemsize // 2):
            element[j], element[itemsize - 1 - j] = element[itemsize - 1 - j], element[j]


cdef void load_at_targets(const CrossEntropy *x, Py_ssize_t count, Rows *r) noexcept nogil:
    """Set `r.targets` to the logits at the targets of rows, 0 for ignored targets. It overwrites `r.exp`."""
    cdef const Operand *operand = &x.s.p.operands[A]
    cdef Py_ssize_t size = count * x.target_count, i
    cdef char *packed = <char *>(r.targets if operand.dtype == AG_FLOAT64 else r.exp)
    cdef float *widened = <float *>packed
    copy_targets(x, r, count, A, packed)
    if operand.swapped:
        swap_elements(packed, size, operand.itemsize)
    if operand.dtype == AG_FLOAT64:
        return
    if operand.dtype != AG_FLOAT32:
        widened += size
        ag_widen(x.s.variant, operand.dtype, packed, widened, size)
    for i in range(size):
        r.targets[i] = widened[i]


cdef inline void set_result(const CrossEntropy *x, void *results, Py_ssize_t i, double value) noexcept nogil:
    if results == NULL:
        return
    if x.is_double:
        (<double *>results)[i] = value
    else:
        (<float *>results)[i] = <float>value


cdef inline double class_weight_of(const CrossEntropy *x, Py_ssize_t entry) noexcept nogil:
    return 1 if x.class_weight == NULL else x.class_weight[entry]


cdef inline double token_weight_of(const CrossEntropy *x, Py_ssize_t number) noexcept nogil:
    return 1 if x.token_weight == NULL else x.token_weight[number]


cdef inline double row_weight(const CrossEntropy *x, Py_ssize_t number) noexcept nogil:
    """Return the weight of a row with one target, which is not ignored."""
    cdef double token_weight = token_weight_of(x, number)
    return 0 if token_weight == 0 else token_weight * class_weight_of(x, target_of(x, number, 0))


cdef inline bint is_ignored(const CrossEntropy *x, Py_ssize_t number) noexcept nogil:
    """Return whether no target of a row adds anything."""
    cdef Py_ssize_t k
    for k in range(x.target_count):
        if target_of(x, number, k) != x.ignore_index:
            return False
    return True


# ---- rows ------------------------------------------------------------------------------------------------------------

cdef void number_rows(
    const CrossEntropy *x, Py_ssize_t begin, Py_ssize_t count, bint with_addresses, Rows *r
) noexcept nogil:
    """Set the numbers of rows, and their addresses if `with_addresses`."""
    cdef const Problem *p = &x.s.p
    cdef const Operand *a = &p.operands[A]
    cdef const Operand *out = &p.operands[OUT]
    cdef const Operand *numbers = &p.operands[MASK]
    cdef int last = p.axes - 1, axis = last
    cdef Py_ssize_t[MAX_AXES] index
    cdef Py_ssize_t i = 0, j, run, rest = begin
    cdef Py_ssize_t number = offset_of(p, numbers, begin)
    cdef char *at = a.data + offset_of(p, a, begin)
    cdef char *to = out.data + offset_of(p, out, begin)
    while axis > 0:
        index[axis] = rest % p.shape[axis]
        rest //= p.shape[axis]
        axis -= 1
    index[0] = rest
    while True:
        run = min(count - i, p.shape[last] - index[last])
        for j in range(run):
            r.numbers[i + j] = number + j * numbers.strides[last]
        if with_addresses:
            for j in range(run):
                r.a[i + j] = at + j * a.strides[last]
                r.out[i + j] = to + j * out.strides[last]
        i += run
        if i == count:
            return
        # Proceed to the next index of the outer axes.
        axis = last
        while True:
            number += run * numbers.strides[axis]
            at += run * a.strides[axis]
            to += run * out.strides[axis]
            index[axis] += run
            if index[axis] < p.shape[axis]:
                break
            number -= index[axis] * numbers.strides[axis]
            at -= index[axis] * a.strides[axis]
            to -= index[axis] * out.strides[axis]
            index[axis] = 0
            axis -= 1
            run = 1


cdef void begin_rows(const CrossEntropy *x, Py_ssize_t begin, Py_ssize_t count, Rows *r) noexcept nogil:
    """Set the numbers of rows, and the factors of their logits, 0 for ignored rows."""
    cdef Py_ssize_t i
    cdef double scale = x.scale
    number_rows(x, begin, count, True, r)
    for i in range(count):
        if x.has_temperatures:
            scale = scale_of(x.temperature[r.numbers[i]], x.s.p.dtype == AG_FLOAT64)
        r.scale[i] = 0 if is_ignored(x, r.numbers[i]) else scale


cdef double scale_of(double temperature, bint is_double) noexcept nogil:
    """Return the factor of logits, rounded to the kernels' compute type: float64 if `is_double`, else float32."""
    cdef double scale = inverse_of(temperature, is_double)
    return scale if is_double else <float>scale


cdef inline double inverse_of(double temperature, bint is_double) noexcept nogil:
    """Return the reciprocal of a temperature, within the limits of the compute type.

    So no factor of a row that is not ignored is 0 or infinite.
    """
    return 1 / ag_bounded_factor(temperature, is_double)


cdef inline double inverse_of_row(const CrossEntropy *x, Py_ssize_t number) noexcept nogil:
    """Return the reciprocal temperature of a row."""
    return inverse_of(x.temperature[number], x.s.p.dtype == AG_FLOAT64) if x.has_temperatures else x.inverse_temperature


cdef ag_loss_rows parameters(const CrossEntropy *x, const Rows *r) noexcept nogil:
    """Return the kernels' parameters of rows."""
    cdef ag_loss_rows rows
    rows.max, rows.scale, rows.factor, rows.smoothing = r.max, r.scale, r.factor, r.smoothing
    rows.class_weight = x.kernel_weight
    rows.cached, rows.pitch = r.cached, align_up(x.s.p.n, AG_MAX_LANES)
    rows.is_uniform = not x.has_temperatures
    rows.is_smoothed = x.label_smoothing != 0
    rows.next = NULL
    return rows


cdef Rows rows_from(const Rows *r, Py_ssize_t begin, Py_ssize_t targets) noexcept nogil:
    """Return the rows from number `begin` on. The cache of exponentials is shared."""
    cdef Rows part = r[0]
    part.max += begin
    part.scale += begin
    part.rest += begin
    part.log_sum += begin
    part.moment += begin
    part.deficit += begin
    part.factor += begin
    part.smoothing += begin
    part.targets += begin * targets
    part.exp += begin * targets
    part.indices = <int64_t *>part.exp
    part.numbers += begin
    part.a += begin
    part.out += begin
    part.stores += begin
    return part


cdef inline double target_weight(const CrossEntropy *x, Py_ssize_t number, Py_ssize_t k, int64_t entry) noexcept nogil:
    """Return (1 - smoothing) q_k c_tk of a target, 0 if it is ignored."""
    if entry == x.ignore_index:
        return 0
    cdef double prob = 1 if x.prob == NULL else x.prob[number * x.target_count + k]
    return (1 - x.label_smoothing) * prob * class_weight_of(x, entry)


cdef inline void set_loss(CrossEntropy *x, Py_ssize_t number, double loss, double square) noexcept nogil:
    if x.losses != NULL:
        set_result(x, x.losses, number, loss + square + 0.0)  # the last addition turns -0 into +0
        return
    x.loss_terms[number] = loss
    if x.square_terms != NULL:
        x.square_terms[number] = square


cdef void finish_ignored_row(CrossEntropy *x, Py_ssize_t number, Py_ssize_t i, Rows *r) noexcept nogil:
    r.factor[i] = r.smoothing[i] = 0
    r.stores[i] = False
    set_loss(x, number, 0, 0)
    set_result(x, x.lse, number, 0)
    set_result(x, x.entropy, number, 0)
    set_result(x, x.log_prob, number, 0)
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
        return NAN if has_nan(x, r.a[i]) else r.max[i]
    return r.max[i] * inverse + r.log_sum[i]


cdef void finish_row(CrossEntropy *x, Py_ssize_t i, Rows *r) noexcept nogil:
    """Compute the results of a row from its statistics, which are number i of `r`: all but most of the gradient.

    The formulas are those of loss.h, for logits relative to the maximum.
    """
    cdef Py_ssize_t number = r.numbers[i], k
    cdef const double *targets = &r.targets[i * x.target_count]
    cdef double inverse = inverse_of_row(x, number)
    cdef double token_weight = token_weight_of(x, number), upstream, grad_loss, grad_square
    cdef double lse = lse_of(x, i, inverse, r), reciprocal = 1 / (1 + r.rest[i])
    cdef double loss = 0, square = 0, weight, weights = 0, balance, smoothing
    for k in range(x.target_count):
        r.entries[k] = target_of(x, number, k)
        r.weights[k] = weight = target_weight(x, number, k, r.entries[k])
        weights += weight
        if weight != 0:
            loss += weight * (r.log_sum[i] - targets[k])
    if x.needs_deficit:
        loss += x.label_smoothing / x.s.p.n * ag_smoothed_sum(
            r.log_sum[i], x.class_sum, r.deficit[i] * x.class_scale
        )
    if x.lse_square_scale != 0:
        square = x.lse_square_scale * lse * lse
    if token_weight == 0:
        set_loss(x, number, 0, 0)
    else:
        set_loss(x, number, token_weight * loss, token_weight * square if square != 0 else 0)
    set_result(x, x.lse, number, lse)
    set_result(x, x.log_prob, number, targets[0] - r.log_sum[i])
    if x.entropy != NULL:
        set_result(x, x.entropy, number, r.log_sum[i] + r.moment[i] * reciprocal)
    if not x.return_grad:
        return

    # Rows of weight 0, and means that are not defined, have no gradient, whatever arrives. Neither have rows at which 0
    # arrives, whatever their weight.
    upstream = x.grad_loss[number if x.has_grad_of_rows else 0]
    if token_weight == 0 or x.is_undefined:
        upstream = 0
    if upstream != 0:
        upstream *= token_weight
    r.stores[i] = upstream != 0
    r.factor[i] = r.smoothing[i] = 0
    if upstream == 0:
        return
    grad_loss = upstream * x.loss_share
    grad_square = upstream * x.square_share
    if grad_loss == 0:  # the share is 0, as the sum of the weights is infinite
        weights = 0
        for k in range(x.target_count):
            r.weights[k] = 0
    smoothing = grad_loss * x.label_smoothing / x.s.p.n
    # What the targets do not take back is summed apart, since it may be tiny beside their weights.
    balance = smoothing * x.class_sum if smoothing != 0 else 0
    if x.lse_square_scale != 0:
        balance += 2 * grad_square * x.lse_square_scale * lse
    r.factor[i] = (balance + grad_loss * weights) * reciprocal * inverse
    r.smoothing[i] = smoothing * x.class_scale * inverse
    set_gradients(x, i, grad_loss, balance, weights, smoothing, reciprocal, inverse, r)


cdef inline Slot *slot_of(const CrossEntropy *x, const Rows *r, int64_t entry) noexcept nogil:
    """Return the slot of an entry, which may be empty."""
    # The multiplier is 2**64 divided by the golden ratio: neighbours get distant slots.
    cdef size_t number = (<size_t>entry * <size_t>0x9E3779B97F4A7C15) >> (64 - x.slot_bits)
    while not r.slots[number].is_empty and r.slots[number].entry != entry:
        number = (number + 1) & ((<size_t>1 << x.slot_bits) - 1)
    return &r.slots[number]


cdef void sum_equal_targets(const CrossEntropy *x, const Rows *r) noexcept nogil:
    """Do what the kernel `sum_equal` does, in a time that grows with the number of targets, not with its square."""
    cdef Py_ssize_t k
    cdef Slot *slot
    for k in range(<Py_ssize_t>1 << x.slot_bits):
        r.slots[k].is_empty = True
    for k in range(x.target_count):
        slot = slot_of(x, r, r.entries[k])
        if slot.is_empty:
            slot.entry, slot.weight, slot.is_empty = r.entries[k], 0, False
        slot.weight += r.weights[k]
    for k in range(x.target_count):
        r.equal[k] = slot_of(x, r, r.entries[k]).weight


cdef void set_gradients(
    CrossEntropy *x, Py_ssize_t i, double grad_loss, double balance, double weights, double smoothing, double reciprocal,
    double inverse, Rows *r
) noexcept nogil:
    """Replace the logits of a row's targets by the gradients there.

    With ``a = balance + grad_loss * weights`` and the weight w of the entry, the gradient is ``a p - grad_loss w``. If p is
    almost 1, ``(a - grad_loss w) - a (1 - p)`` is accurate.
    """
    cdef Py_ssize_t k, certain = -1
    cdef double *targets = &r.targets[i * x.target_count]
    cdef const double *exp = &r.exp[i * x.target_count]
    cdef const double *equal = r.equal
    cdef double a = balance + grad_loss * weights, at_certain = 0, beside = 0
    for k in range(x.target_count):
        if exp[k] * reciprocal > NEARLY_CERTAIN and r.entries[k] != x.ignore_index:
            certain = k  # all such targets of a row are the same entry
    if certain >= 0:
        for k in range(x.target_count):
            if r.entries[k] != r.entries[certain]:
                beside += r.weights[k]
        at_certain = balance + grad_loss * beside - a * ((r.rest[i] - expm1(targets[certain])) * reciprocal)
    if x.target_count == 1:
        equal = r.weights
    elif x.target_count <= MOST_COMPARED:
        x.kernels.sum_equal(r.entries, r.weights, x.target_count, r.equal)
    else:
        sum_equal_targets(x, r)
    for k in range(x.target_count):
        targets[k] = a * (exp[k] * reciprocal) - grad_loss * equal[k]
    if certain >= 0:
        for k in range(x.target_count):
            if r.entries[k] == r.entries[certain]:
                targets[k] = at_certain
    if smoothing != 0:
        for k in range(x.target_count):
            if r.entries[k] != x.ignore_index:
                targets[k] -= smoothing * class_weight_of(x, r.entries[k])
    for k in range(x.target_count):
        targets[k] *= inverse


cdef inline double upstream_of_all(const CrossEntropy *x) noexcept nogil:
    """Return the gradient of the result with respect to the loss of a row of weight 1, if it is the same for all rows."""
    return 0 if x.is_undefined or x.grad_loss[0] == 0 else x.grad_loss[0] * x.loss_share


cdef void finish_single_target_rows(CrossEntropy *x, Py_ssize_t count, Rows *r) noexcept nogil:
    """Compute what `finish_rows` does for rows of which `is_single_target` holds."""
    cdef Py_ssize_t i
    cdef double grad = upstream_of_all(x), share = x.label_smoothing / x.s.p.n, weight = 1, loss
    cdef double subtrahend = grad * x.inverse_temperature * share
    cdef double balance = grad * x.inverse_temperature * (x.label_smoothing - share)
    cdef bint has_weights = x.class_weight != NULL or x.token_weight != NULL
    load_at_targets(x, count, r)
    x.kernels.finish(
        r.rest, r.max, r.targets, x.scale, grad, x.inverse_temperature, x.label_smoothing, r.log_sum, r.factor, r.targets,
        count
    )
    for i in range(count):
        loss = r.log_sum[i]
        r.stores[i] = r.scale[i] > 0 and grad != 0
        if x.needs_deficit:
            loss += share * r.deficit[i]
            r.targets[i] += balance
        r.smoothing[i] = subtrahend
        if r.scale[i] <= 0:
            loss = 0
        elif has_weights:
            weight = row_weight(x, r.numbers[i])
            loss = 0 if weight == 0 else loss * weight
            r.stores[i] = r.stores[i] and token_weight_of(x, r.numbers[i]) != 0
            r.factor[i] *= weight
            r.smoothing[i] *= weight
            r.targets[i] *= weight
        if not r.stores[i]:
            r.factor[i] = r.smoothing[i] = 0
        set_loss(x, r.numbers[i], loss, 0)


cdef void finish_rows(CrossEntropy *x, Py_ssize_t count, Rows *r) noexcept nogil:
    """Compute the results of rows from their statistics, and the parameters of the gradient."""
    cdef Py_ssize_t i, k
    cdef double inverse
    if x.is_single_target:
        finish_single_target_rows(x, count, r)
        return
    load_at_targets(x, count, r)
    for i in range(count):
        inverse = inverse_of_row(x, r.numbers[i])
        for k in range(i * x.target_count, (i + 1) * x.target_count):
            r.targets[k] = (r.targets[k] - r.max[i]) * inverse
    x.kernels.log1p(r.rest, r.log_sum, count)
    if x.return_grad:
        x.kernels.exp(r.targets, r.exp, count * x.target_count)
    for i in range(count):
        if r.scale[i] == 0:
            finish_ignored_row(x, r.numbers[i], i, r)
        else:
            finish_row(x, i, r)


cdef void store_at_targets(const CrossEntropy *x, Py_ssize_t count, const Rows *r) noexcept nogil:
    """Store the gradients at the targets of rows, each rounded once. It overwrites `r.exp`."""
    cdef const Operand *operand = &x.s.p.operands[OUT]
    cdef Py_ssize_t size = count * x.target_count, i
    cdef char *packed = <char *>r.exp
    if operand.dtype == AG_FLOAT64:
        packed = <char *>r.targets
    elif operand.dtype == AG_FLOAT32:
        for i in range(size):
            (<float *>packed)[i] = <float>r.targets[i]
    else:
        ag_convert(x.s.variant, True, r.targets, operand.dtype, packed, size)
    if operand.swapped:
        swap_elements(packed, size, operand.itemsize)
    copy_targets(x, r, count, OUT, packed)


# ---- tasks that are whole blocks -------------------------------------------------------------------------------------

cdef void subtract_largest(const CrossEntropy *x, const ag_tile *tile, const ag_loss_rows *rows, Rows *r) noexcept nogil:
    """Subtract 1, the exponential of the maximum, from sums of rows. Sums close to 1 are computed again, without it."""
    cdef ag_loss_rows part = rows[0]
    cdef ag_tile close = tile[0]
    cdef Py_ssize_t i = 0, first
    while i < tile.rows:
        first = i
        while i < tile.rows and r.rest[i] < AG_ACCURATE_SUM and r.scale[i] > 0:
            i += 1
        if i == first:
            r.rest[i] -= 1
            i += 1
            continue
        close.a, close.rows = tile.a + first * tile.a_stride, i - first
        part.max, part.scale = &r.max[first], &r.scale[first]
        x.kernels.rows_sum(&close, AG_LOSS_REST, &part, &r.rest[first])


cdef void whole_rows(CrossEntropy *x, Py_ssize_t begin, const ag_tile *tile, Rows *r, const char *next) noexcept nogil:
    """Compute the whole rows of a tile, which begins at row `begin`, up to the gradients at targets."""
    cdef ag_loss_rows rows
    cdef Py_ssize_t i
    begin_rows(x, begin, tile.rows, r)
    x.kernels.rows_max(tile, r.max)
    rows = parameters(x, r)
    rows.next = next
    x.kernels.rows_sum(tile, AG_LOSS_EXP, &rows, r.rest)
    subtract_largest(x, tile, &rows, r)
    if x.entropy != NULL:
        x.kernels.rows_sum(tile, AG_LOSS_MOMENT, &rows, r.moment)
    if x.needs_deficit:
        x.kernels.rows_sum(tile, x.deficit_sum, &rows, r.deficit)
    if x.predicted != NULL:
        for i in range(tile.rows):
            x.predicted[r.numbers[i]] = find_place(
                x, tile.a + i * tile.a_stride, x.s.p.n, r.max[i], r.rest[i]
            ) % x.s.p.n
    finish_rows(x, tile.rows, r)
    if x.return_grad:
        x.kernels.rows_write(tile, &rows)


cdef Py_ssize_t find_place(
    const CrossEntropy *x, const char *a, Py_ssize_t length, double maximum, double rest
) noexcept nogil:
    """Return the first place of the maximum in elements of a row, or `length` if they do not have it.

    As in NumPy, a NaN is larger than anything else. In a row with NaN, places of the maximum of the others count from V on.
    """
    cdef Py_ssize_t place
    if rest == rest:
        return x.kernels.find(a, length, maximum)
    place = x.kernels.find(a, length, NAN)
    if place < length:
        return place
    place = x.kernels.find(a, length, maximum)
    return place + x.s.p.n if place < length else length


cdef void chunks_of_rows(
    CrossEntropy *x, Py_ssize_t begin, const ag_tile *tile, Rows *r, bint stores_targets
) noexcept nogil:
    """Compute the rows of a tile, which begins at row `begin`, in chunks whose exponentials are cached."""
    cdef Py_ssize_t row = 0
    cdef ag_tile part = tile[0]
    cdef Rows rows = r[0]
    cdef const char *next
    cdef bint prefetches = tile.nontemporal and x.s.p.n * x.s.p.operands[A].itemsize <= _cpu.cache_size(2) // 4
    while row < tile.rows:
        part.rows = min(x.chunk, tile.rows - row)
        part.a = tile.a + row * tile.a_stride
        part.out = tile.out + row * tile.out_stride
        if not stores_targets:
            rows = rows_from(r, row, x.target_count)
        next = part.a + part.rows * tile.a_stride if prefetches and row + 2 * part.rows <= tile.rows else NULL
        whole_rows(x, begin + row, &part, &rows, next)
        if x.return_grad and stores_targets:
            store_at_targets(x, part.rows, &rows)
        row += part.rows


cdef void columns_in_segments(CrossEntropy *x, const ag_tile *tile, bint is_rest, Rows *r, char *scratch) noexcept nogil:
    """Compute sums of the columns of a tile, segment by segment, into r.moment."""
    cdef ag_tile part = tile[0]
    cdef ag_sum total
    cdef double *compensation = r.smoothing
    cdef double *sums = r.deficit
    cdef Py_ssize_t segment = x.s.plan.kernels.segment, k = 0, c
    for c in range(tile.rows):
        r.moment[c] = compensation[c] = 0
    while k < tile.n:
        part.a = tile.a + k * tile.a_stride
        part.n = min(segment, tile.n - k)
        x.kernels.columns_sum(&part, is_rest, r.max, sums, scratch)
        for c in range(tile.rows):
            total.sum, total.compensation = r.moment[c], compensation[c]
            ag_sum_add(&total, sums[c])
            r.moment[c], compensation[c] = total.sum, total.compensation
        k += segment
    for c in range(tile.rows):
        total.sum, total.compensation = r.moment[c], compensation[c]
        r.moment[c] = ag_sum_total(total)


cdef inline bint is_strip(const CrossEntropy *x, const ag_tile *tile) noexcept nogil:
    """Return whether the columns of a tile are short enough for `strips`, and not better computed packed."""
    cdef bint is_packed = tile.a_stride == tile.rows * x.s.plan.tile_itemsize
    return tile.n <= x.s.plan.kernels.strip_rows and (tile.rows >= AG_STRIP_COLUMNS or not is_packed)


cdef void single_target_columns(CrossEntropy *x, Py_ssize_t begin, const ag_tile *tile, Rows *r) noexcept nogil:
    """Compute the columns of a strip that begins at row `begin` of the problem, of which `is_single_target` holds."""
    cdef ag_single_target_columns columns
    cdef const Problem *p = &x.s.p
    cdef int last = p.axes - 1
    cdef Py_ssize_t number = offset_of(p, &p.operands[MASK], begin), i
    # Targets and weights of columns that follow each other in C order need no copies, and neither do reduced losses.
    cdef bint copies = (
        x.losses != NULL or p.operands[MASK].strides[last] != 1
        or begin // p.shape[last] != (begin + tile.rows - 1) // p.shape[last]
    )
    columns.has_wide_targets, columns.ignore_index = x.has_wide_targets, x.ignore_index
    columns.grad, columns.inverse, columns.return_grad = upstream_of_all(x), x.inverse_temperature, x.return_grad
    columns.smoothing, columns.class_weight, columns.token_weight = x.label_smoothing, x.class_weight, x.token_weight
    if copies:
        number_rows(x, begin, tile.rows, False, r)
        columns.targets, columns.has_wide_targets, columns.losses = r.indices, True, r.log_sum
        for i in range(tile.rows):
            r.indices[i] = target_of(x, r.numbers[i], 0)
        if x.token_weight != NULL:
            columns.token_weight = r.factor
            for i in range(tile.rows):
                r.factor[i] = x.token_weight[r.numbers[i]]
    else:
        columns.targets = <const char *>x.target + number * (8 if x.has_wide_targets else 4)
        columns.losses = &x.loss_terms[number]
        if x.token_weight != NULL:
            columns.token_weight = &x.token_weight[number]
    x.kernels.single_target_strips(tile, &columns)
    if copies and x.losses == NULL:
        for i in range(tile.rows):
            x.loss_terms[r.numbers[i]] = r.log_sum[i]
    elif copies:
        for i in range(tile.rows):
            set_loss(x, r.numbers[i], r.log_sum[i], 0)


cdef void whole_columns(CrossEntropy *x, Py_ssize_t begin, const ag_tile *tile, Rows *r, char *scratch) noexcept nogil:
    """Compute the whole columns of a tile, which begins at row `begin` of the problem, up to the gradients at targets."""
    cdef ag_loss_rows rows = parameters(x, r)
    cdef ag_tile part
    cdef Rows some
    cdef Py_ssize_t c, first = 0, i
    cdef bint has_near_one
    begin_rows(x, begin, tile.rows, r)
    if is_strip(x, tile):
        x.kernels.strips(tile, r.max, r.rest)
    else:
        x.s.plan.kernels.columns_max(tile, r.max, scratch)
        columns_in_segments(x, tile, False, r, scratch)
        for c in range(tile.rows):
            r.rest[c] = r.moment[c]
    while first < tile.rows:
        part = tile[0]
        part.a += first * x.s.plan.tile_itemsize
        part.rows = min(<Py_ssize_t>AG_MAX_COLUMNS, tile.rows - first)
        some = rows_from(r, first, x.target_count)
        has_near_one = False
        for i in range(part.rows):
            has_near_one = has_near_one or some.rest[i] < AG_ACCURATE_SUM
        if has_near_one:
            columns_in_segments(x, &part, True, &some, scratch)
        for i in range(part.rows):
            some.rest[i] = some.moment[i] if some.rest[i] < AG_ACCURATE_SUM else some.rest[i] - 1
        first += part.rows
    finish_rows(x, tile.rows, r)
    if x.return_grad:
        x.kernels.columns_write(tile, &rows, scratch)


cdef void whole_block(const void *context, Py_ssize_t block, int thread) noexcept nogil:
    """Compute a block of whole rows, or of whole columns. The task of a phase."""
    cdef CrossEntropy *x = <CrossEntropy *>context
    cdef const Schedule *s = &x.s
    cdef Py_ssize_t begin = block * s.plan.block_size, end = min(begin + s.plan.block_size, s.p.rows)
    cdef Py_ssize_t last = s.p.shape[s.p.axes - 1]
    cdef char *tiles = tiles_of(s, block, thread)
    cdef Rows r = rows_at(x, x.buffers + thread * x.buffer_size)
    cdef ag_tile tile
    if s.plan.by_columns:
        begin = column_tile(s, block, 0, s.p.n, tiles, &tile)
        # The kernel rounds gradients at targets to the dtype of the tile, which has to be the result's.
        if x.is_single_target and s.plan.tile_dtype == s.p.operands[OUT].dtype and (
            x.label_smoothing != 0 or is_strip(x, &tile)
        ):
            single_target_columns(x, begin, &tile, &r)
            if x.return_grad:
                scatter_columns(s, block, 0, s.p.n, tiles, &tile)
            return
        whole_columns(x, begin, &tile, &r, scratch_of(s, thread))
        if x.return_grad:
            scatter_columns(s, block, 0, s.p.n, tiles, &tile)
            store_at_targets(x, tile.rows, &r)
    elif s.plan.gathers:
        gather(s, begin, end, 0, s.p.n, tiles, &tile)
        chunks_of_rows(x, begin, &tile, &r, False)
        if x.return_grad:
            scatter(s, begin, end, 0, s.p.n, tiles, &tile)
            store_at_targets(x, tile.rows, &r)
    else:
        while begin < end:
            tile_at(&s.p, begin, &tile)
            tile.nontemporal = s.plan.nontemporal
            tile.rows = min(end - begin, last - begin % last)
            chunks_of_rows(x, begin, &tile, &r, True)
            begin += tile.rows


# ---- tasks that are splits -------------------------------------------------------------------------------------------

cdef Py_ssize_t split_range(
    const Schedule *s, Py_ssize_t task, Py_ssize_t *begin, Py_ssize_t *end, Py_ssize_t *length
) noexcept nogil:
    """Set the rows and the length of a split, and return its first element."""
    cdef Py_ssize_t block = task // s.plan.splits, k = task % s.plan.splits * s.plan.split_size
    begin[0] = block * s.plan.block_size
    end[0] = min(begin[0] + s.plan.block_size, s.p.rows)
    length[0] = min(s.plan.split_size, s.p.n - k)
    return k


cdef const void *weights_from(const CrossEntropy *x, Py_ssize_t k) noexcept nogil:
    """Return the kernels' class weights from element k on."""
    if x.kernel_weight == NULL:
        return NULL
    return <const char *>x.kernel_weight + k * (8 if x.s.p.dtype == AG_FLOAT64 else 4)


cdef void sum_split(const void *context, Py_ssize_t task, int thread) noexcept nogil:
    """Sum up the segments of a split. The task of a phase."""
    cdef CrossEntropy *x = <CrossEntropy *>context
    cdef const Schedule *s = &x.s
    cdef Py_ssize_t begin, end, length, k = split_range(s, task, &begin, &end, &length), last = k + length
    cdef Py_ssize_t segment = k // s.plan.kernels.segment, row
    cdef Rows all_rows = rows_at(x, x.buffers), r
    cdef ag_loss_rows rows
    cdef ag_tile tile
    while k < last:
        length = min(s.plan.kernels.segment, last - k)
        if s.plan.by_columns:
            row = column_tile(s, task // s.plan.splits, k, length, tiles_of(s, task, thread), &tile)
            x.kernels.columns_sum(
                &tile, x.sum == AG_LOSS_REST, &s.max[row], &s.sums[segment * s.p.rows + row], scratch_of(s, thread)
            )
        else:
            row_tile(s, begin, end, k, length, tiles_of(s, task, thread), &tile)
            r = rows_from(&all_rows, begin, x.target_count)
            rows = parameters(x, &r)
            rows.class_weight = weights_from(x, k)
            x.kernels.rows_sum(&tile, x.sum, &rows, &s.sums[segment * s.p.rows + begin])
        k += length
        segment += 1


cdef void find_in_split(const void *context, Py_ssize_t task, int thread) noexcept nogil:
    """Find the predicted entries of rows, as far as they are in a split, or else infinity. The task of a phase."""
    cdef CrossEntropy *x = <CrossEntropy *>context
    cdef const Schedule *s = &x.s
    cdef Py_ssize_t begin, end, length, k = split_range(s, task, &begin, &end, &length), row, place
    cdef Rows r = rows_at(x, x.buffers)
    cdef ag_tile tile
    row_tile(s, begin, end, k, length, tiles_of(s, task, thread), &tile)
    for row in range(begin, end):
        place = find_place(x, tile.a + (row - begin) * tile.a_stride, length, r.max[row], r.rest[row])
        s.maxima[task % s.plan.splits * s.p.rows + row] = -(k + place) if place != length else -INFINITY


cdef void write_split(const void *context, Py_ssize_t task, int thread) noexcept nogil:
    """Write the gradients of a split. The task of a phase."""
    cdef CrossEntropy *x = <CrossEntropy *>context
    cdef const Schedule *s = &x.s
    cdef Py_ssize_t begin, end, length, k = split_range(s, task, &begin, &end, &length)
    cdef Rows all_rows = rows_at(x, x.buffers), r
    cdef ag_loss_rows rows
    cdef char *tiles = tiles_of(s, task, thread)
    cdef ag_tile tile
    if s.plan.by_columns:
        begin = column_tile(s, task // s.plan.splits, k, length, tiles, &tile)
    else:
        row_tile(s, begin, end, k, length, tiles, &tile)
    r = rows_from(&all_rows, begin, x.target_count)
    rows = parameters(x, &r)
    rows.class_weight = weights_from(x, k)
    if s.plan.by_columns:
        x.kernels.columns_write(&tile, &rows, scratch_of(s, thread))
        scatter_columns(s, task // s.plan.splits, k, length, tiles, &tile)
    else:
        x.kernels.rows_write(&tile, &rows)
        if s.plan.gathers:
            scatter(s, begin, end, k, length, tiles, &tile)


cdef void finish_all_rows(const void *context, Py_ssize_t task, int thread) noexcept nogil:
    """Compute what follows from the statistics of all rows. The only task of a phase."""
    cdef CrossEntropy *x = <CrossEntropy *>context
    cdef Rows r = rows_at(x, x.buffers)
    finish_rows(x, x.s.p.rows, &r)


cdef void store_at_all_targets(const void *context, Py_ssize_t task, int thread) noexcept nogil:
    """Store the gradients at the targets of all rows. The only task of a phase."""
    cdef CrossEntropy *x = <CrossEntropy *>context
    cdef Rows r = rows_at(x, x.buffers)
    store_at_targets(x, x.s.p.rows, &r)


cdef void sum_splits(CrossEntropy *x, Team *team, ag_row_op which, double *sums) noexcept nogil:
    """Compute a sum of all rows of a problem that is split."""
    x.sum = which
    x.s.sum = sums
    x.s.phase = SPLIT_SUM
    _tasks.run_phase(team, sum_split, x, x.s.plan.blocks * x.s.plan.splits, True)
    run_phase(&x.s, team, COMBINE_SUM, x.s.p.rows)


cdef void run_split_phases(CrossEntropy *x, Team *team) noexcept nogil:
    cdef Schedule *s = &x.s
    cdef Rows r = rows_at(x, x.buffers)
    cdef Py_ssize_t tasks = s.plan.blocks * s.plan.splits, row
    cdef bint has_near_one = False
    begin_rows(x, 0, s.p.rows, &r)
    s.max = r.max
    run_phase(s, team, SPLIT_MAX, tasks)
    run_phase(s, team, COMBINE_MAX, s.p.rows)
    sum_splits(x, team, AG_LOSS_EXP, r.rest)
    for row in range(s.p.rows):
        has_near_one = has_near_one or (r.scale[row] > 0 and r.rest[row] < AG_ACCURATE_SUM)
    if has_near_one:
        sum_splits(x, team, AG_LOSS_REST, r.factor)
    for row in range(s.p.rows):
        r.rest[row] = r.factor[row] if has_near_one and r.rest[row] < AG_ACCURATE_SUM else r.rest[row] - 1
    if x.entropy != NULL:
        sum_splits(x, team, AG_LOSS_MOMENT, r.moment)
    if x.needs_deficit:
        sum_splits(x, team, x.deficit_sum, r.deficit)
    if x.predicted != NULL:
        _tasks.run_phase(team, find_in_split, x, tasks, True)
        s.max = r.factor
        run_phase(s, team, COMBINE_MAX, s.p.rows)  # the first place is the largest negative one
        s.max = r.max
        for row in range(s.p.rows):
            x.predicted[r.numbers[row]] = <int64_t>-r.factor[row] % s.p.n
    _tasks.run_serially(team, finish_all_rows, x, 1)
    if x.return_grad:
        s.phase = SPLIT_WRITE
        _tasks.run_phase(team, write_split, x, tasks, not s.plan.nontemporal)
        _tasks.run_serially(team, store_at_all_targets, x, 1)


# ---- the schedule ----------------------------------------------------------------------------------------------------

cdef Rows rows_at(const CrossEntropy *x, char *base) noexcept nogil:
    """Return the buffers of rows in memory that begins at `base`."""
    cdef Rows r
    cdef Arena arena
    place_rows(x, &r, &arena, base)
    return r


cdef void place_rows(const CrossEntropy *x, Rows *r, Arena *arena, char *base) noexcept nogil:
    cdef Py_ssize_t size = x.buffered * sizeof(double)
    arena.base, arena.used = base, 0
    r.max = <double *>arena_alloc(arena, size)
    r.scale = <double *>arena_alloc(arena, size)
    r.rest = <double *>arena_alloc(arena, size)
    r.moment = <double *>arena_alloc(arena, size)
    r.deficit = <double *>arena_alloc(arena, size)
    r.factor = <double *>arena_alloc(arena, size)
    r.smoothing = <double *>arena_alloc(arena, size)
    r.log_sum = <double *>arena_alloc(arena, size)
    r.targets = <double *>arena_alloc(arena, size * x.target_count)
    r.exp = <double *>arena_alloc(arena, size * x.target_count)
    r.indices = <int64_t *>r.exp
    r.entries = <int64_t *>arena_alloc(arena, align_up(x.target_count, AG_MAX_LANES) * sizeof(double))
    r.weights = <double *>arena_alloc(arena, align_up(x.target_count, AG_MAX_LANES) * sizeof(double))
    r.equal = <double *>arena_alloc(arena, align_up(x.target_count, AG_MAX_LANES) * sizeof(double))
    r.slots = NULL
    if x.target_count > MOST_COMPARED:
        r.slots = <Slot *>arena_alloc(arena, sizeof(Slot) << x.slot_bits)
    r.numbers = <Py_ssize_t *>arena_alloc(arena, size)
    r.a = <char **>arena_alloc(arena, size)
    r.out = <char **>arena_alloc(arena, size)
    r.stores = <uint8_t *>arena_alloc(arena, x.buffered)
    r.cached = arena_alloc(arena, x.cached_bytes)
    if not x.cached_bytes:
        r.cached = NULL


cdef bint is_single_target(const CrossEntropy *x) noexcept nogil:
    """Return whether rows have one target, one weight, and no other term or output but label smoothing without weights."""
    return not (
        x.has_prob or x.has_temperatures or x.has_grad_of_rows or x.has_outputs or x.lse_square_scale != 0
        or (x.label_smoothing != 0 and x.has_class_weight)
    )


cdef ag_row_op plan_of(const CrossEntropy *x, Py_ssize_t classes, bint has_other_dtype) noexcept nogil:
    """Return the operator whose plan a loss follows: AG_LOSS_EXP_OF_ROWS if column kernels do not compute all of it.

    `has_other_dtype`: the gradient has another dtype than the logits.
    """
    if x.has_row_outputs or x.has_temperatures:
        return AG_LOSS_EXP_OF_ROWS
    # The kernel of strips computes label smoothing. With every instruction set, strips have up to AG_STRIP_ROWS(2) rows.
    if x.label_smoothing != 0 and (has_other_dtype or classes > AG_STRIP_ROWS(2) or not is_single_target(x)):
        return AG_LOSS_EXP_OF_ROWS
    return AG_LOSS_EXP


cdef void prepare_loss(CrossEntropy *x, const Problem *p, int threads) noexcept nogil:
    """Fill in the schedule of a loss whose arguments are given, without a workspace."""
    cdef Py_ssize_t row_bytes = align_up(p.n, AG_MAX_LANES) * (8 if p.dtype == AG_FLOAT64 else 4)
    cdef Py_ssize_t most
    cdef Rows r
    cdef Arena arena
    # Whole cache lines of a block of columns, if possible.
    most = max(<Py_ssize_t>1, min(<Py_ssize_t>MOST_ROWS, MOST_TARGETS // max(<Py_ssize_t>1, x.target_count)))
    if most > 64:
        most = most // 64 * 64
    prepare(&x.s, p, threads)
    limit_blocks(&x.s.plan, p, most)
    x.kernels = loss_kernels(&x.s)
    x.is_single_target = is_single_target(x)
    x.needs_deficit = x.label_smoothing != 0
    x.deficit_sum = AG_LOSS_DEFICIT if x.class_weight == NULL else AG_LOSS_WEIGHTED_DEFICIT
    x.chunk = max(<Py_ssize_t>1, min(min(<Py_ssize_t>MAX_CHUNK, most), CACHED_BYTES // row_bytes))
    x.cached_bytes = 0
    x.slot_bits = 1
    while <Py_ssize_t>1 << x.slot_bits < 2 * x.target_count:
        x.slot_bits += 1
    x.buffered = x.s.plan.block_size
    if x.s.plan.is_split:
        x.buffered = p.rows
    elif not x.s.plan.by_columns:
        if not x.s.plan.gathers:
            x.buffered = min(x.buffered, x.chunk)
        if x.return_grad and row_bytes <= CACHED_BYTES:
            x.cached_bytes = x.chunk * row_bytes + AG_MAX_LANES * sizeof(double)
    place_rows(x, &r, &arena, NULL)
    x.buffer_size = arena.used


cdef Py_ssize_t place_loss_workspace(CrossEntropy *x, char *base) noexcept nogil:
    """Place the workspace in memory that begins at `base`, and return its bytes. NULL only measures the bytes."""
    cdef Arena arena
    arena.base, arena.used = base, align_up(place_workspace(&x.s, base), ALIGNMENT)
    x.buffers = arena_alloc(&arena, x.buffer_size * (1 if x.s.plan.is_split else x.s.plan.threads))
    x.kernel_weight = NULL
    if x.has_class_weight and x.needs_deficit:
        x.kernel_weight = arena_alloc(&arena, x.s.p.n * (8 if x.s.p.dtype == AG_FLOAT64 else 4))
    return arena.used


cdef Py_ssize_t loss_workspace_size(CrossEntropy *x) noexcept nogil:
    """Return the bytes to allocate for the workspace, at any alignment."""
    return place_loss_workspace(x, NULL) + ALIGNMENT


cdef int set_shares(CrossEntropy *x, double *last_check) except -1 nogil:
    """Set the part of the two terms of the loss that a row of weight 1 has in the result.

    A mean over a sum of weights of 0 is NaN, and has no gradient.
    """
    set_denominators(x, last_check)
    x.is_undefined = x.loss_denominator == 0 or (x.lse_square_scale != 0 and x.square_denominator == 0)
    x.loss_share = 0 if x.is_undefined else 1 / x.loss_denominator
    x.square_share = 0 if x.is_undefined or x.square_denominator == 0 else 1 / x.square_denominator
    return 0


cdef int set_denominators(CrossEntropy *x, double *last_check) except -1 nogil:
    """Compute what the terms of a mean are divided by: sums over the rows that are not ignored."""
    cdef ag_sum[AG_SUM_LANES] losses, squares
    cdef double[ROWS_PER_SUM] tokens
    cdef double[ROWS_PER_SUM] weights
    cdef Py_ssize_t begin = 0, count, i
    # The term of lse_square_scale is divided by the sum of the token weights, and so is the loss of sparse targets.
    cdef bint adds_tokens = x.has_prob or x.lse_square_scale != 0
    x.loss_denominator = x.square_denominator = 1
    if not x.is_mean:
        return 0
    if x.denominator != 0:
        x.loss_denominator = x.square_denominator = x.denominator
        return 0
    if x.token_weight == NULL and x.class_weight == NULL:
        x.loss_denominator = x.square_denominator = <double>count_rows(x, last_check)
        return 0
    memset(losses, 0, sizeof(losses))
    memset(squares, 0, sizeof(squares))
    while begin < x.s.p.rows:
        count = min(<Py_ssize_t>ROWS_PER_SUM, x.s.p.rows - begin)
        if adds_tokens:
            for i in range(count):
                tokens[i] = 0 if is_ignored(x, begin + i) else token_weight_of(x, begin + i)
            x.kernels.add_numbers(squares, tokens, count)
        if not x.has_prob:
            for i in range(count):
                weights[i] = 0 if target_of(x, begin + i, 0) == x.ignore_index else row_weight(x, begin + i)
            x.kernels.add_numbers(losses, weights, count)
        begin += count
        if last_check != NULL:
            _tasks.check_signals(last_check)
    x.square_denominator = ag_sums_total_of_all(squares)
    x.loss_denominator = x.square_denominator if x.has_prob else ag_sums_total_of_all(losses)
    return 0


cdef Py_ssize_t count_rows(const CrossEntropy *x, double *last_check) except -1 nogil:
    """Return the number of rows that are not ignored."""
    cdef Py_ssize_t begin = 0, end, number, count = 0
    while begin < x.s.p.rows:
        end = min(begin + ROWS_PER_CHECK, x.s.p.rows)
        if x.target_count > 1:
            for number in range(begin, end):
                count += not is_ignored(x, number)
        elif x.has_wide_targets:
            for number in range(begin, end):
                count += (<const int64_t *>x.target)[number] != x.ignore_index
        else:
            for number in range(begin, end):
                count += (<const int32_t *>x.target)[number] != x.ignore_index
        begin = end
        if last_check != NULL:
            _tasks.check_signals(last_check)
    return count


cdef int reduce_losses(CrossEntropy *x, double *last_check) except -1 nogil:
    """Add up the losses of the rows, and count the rows whose target is predicted."""
    cdef ag_sum[AG_SUM_LANES] losses, squares
    cdef Py_ssize_t begin = 0, end, number
    memset(losses, 0, sizeof(losses))
    memset(squares, 0, sizeof(squares))
    x.correct = 0
    while begin < x.s.p.rows:
        end = min(begin + ROWS_PER_CHECK, x.s.p.rows)
        if x.losses == NULL:
            x.kernels.add_numbers(losses, &x.loss_terms[begin], end - begin)
            if x.square_terms != NULL:
                x.kernels.add_numbers(squares, &x.square_terms[begin], end - begin)
        if x.predicted != NULL and x.prob == NULL:
            for number in range(begin, end):
                x.correct += x.predicted[number] == target_of(x, number, 0) and not is_ignored(x, number)
        begin = end
        if last_check != NULL:
            _tasks.check_signals(last_check)
    if x.is_undefined:
        x.loss = NAN
        return 0
    x.loss = ag_sums_total_of_all(losses) / x.loss_denominator
    if x.square_terms != NULL:
        x.loss += ag_sums_total_of_all(squares) / x.square_denominator
    return 0


cdef void run_phases(void *context, Team *team) noexcept nogil:
    """Run the phases of a schedule; the program of a team."""
    cdef CrossEntropy *x = <CrossEntropy *>context
    if x.s.plan.is_split:
        run_split_phases(x, team)
    else:
        _tasks.run_phase(team, whole_block, x, x.s.plan.blocks, not x.s.plan.nontemporal)


cdef void set_class_weights(CrossEntropy *x) noexcept nogil:
    """Set the sum of the class weights, and the kernels' class weights if they read any."""
    cdef Py_ssize_t v
    cdef ag_sum total
    cdef ag_fpenv mode
    x.class_sum, x.class_scale = <double>x.s.p.n, 1
    if x.class_weight == NULL:
        return
    mode = ag_fpenv_enter()
    total.sum = total.compensation = 0
    for v in range(x.s.p.n):
        ag_sum_add(&total, x.class_weight[v])
    x.class_sum = ag_sum_total(total)
    if x.kernel_weight != NULL:
        round_class_weights(x)
    ag_fpenv_leave(mode)


cdef void round_class_weights(CrossEntropy *x) noexcept nogil:
    """Set the kernels' class weights."""
    cdef Py_ssize_t v
    cdef double weight
    x.class_scale = ag_class_scale(x.class_weight, x.s.p.n, x.s.p.dtype == AG_FLOAT64)
    for v in range(x.s.p.n):
        weight = ag_scaled_weight(x.class_weight[v], x.class_scale, x.s.p.dtype == AG_FLOAT64)
        if x.s.p.dtype == AG_FLOAT64:
            (<double *>x.kernel_weight)[v] = weight
        else:
            (<float *>x.kernel_weight)[v] = <float>weight


cdef int run_loss(CrossEntropy *x, bint default_threads, double *last_check) except -1 nogil:
    """Compute the loss in its workspace; see `_tasks.run_team` for the arguments."""
    set_class_weights(x)
    set_shares(x, last_check)
    if not x.has_temperatures:
        x.scale = scale_of(x.temperature[0], x.s.p.dtype == AG_FLOAT64)
        x.inverse_temperature = inverse_of(x.temperature[0], x.s.p.dtype == AG_FLOAT64)
    _tasks.run_team(run_phases, x, x.s.plan.threads, default_threads, last_check)
    return reduce_losses(x, last_check)
