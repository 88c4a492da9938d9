"""Rows of a block in a loss of rows: their numbers, addresses and buffers, and the elements at their targets."""

from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.string cimport memcpy, memset

from ascend_grad._kernels cimport AG_FLOAT32, AG_FLOAT64, ag_convert, ag_scaled_weight, ag_widen
from ascend_grad._loss_options cimport is_dense
from ascend_grad._memory cimport Arena, align_up, arena_alloc
from ascend_grad._rowwise_kernels cimport AG_MAX_LANES, ag_loss_rows, ag_target_rows
from ascend_grad._rowwise_plan cimport MASK, MAX_AXES, OUT, A, Operand, Problem, offset_of

# ---- buffers ---------------------------------------------------------------------------------------------------------

cdef void place_targets(const CrossEntropy *x, Rows *r, Arena *arena) noexcept nogil:
    """Place the arrays of one number per target, and the arrays per row that only the kernels of targets read."""
    cdef ag_target_rows *t = &r.t
    cdef Py_ssize_t size = x.o.target_count * x.pitch * sizeof(double), row = x.together * sizeof(double)
    cdef Py_ssize_t block = x.o.target_count * row
    t.targets, t.pitch, t.block, t.class_weight = x.o.target_count, x.pitch, x.together, x.o.class_weight
    t.max, t.rest, t.log_sum = r.max, r.rest, r.log_sum
    t.entries = <int64_t *>arena_alloc(arena, size)
    t.logits = <double *>arena_alloc(arena, size)
    t.slopes = <double *>arena_alloc(arena, size) if x.o.softcap > 0 else NULL
    t.weights = <double *>arena_alloc(arena, block)
    t.exp = <double *>arena_alloc(arena, block) if needs_gradient(x) else NULL
    t.equal, r.slots = NULL, NULL
    if x.o.target_count > MOST_COMPARED:
        t.equal = <double *>arena_alloc(arena, block)
        r.slots = <Slot *>arena_alloc(arena, sizeof(Slot) << x.slot_bits)
    r.packed = arena_alloc(arena, block)
    t.inverse = <double *>arena_alloc(arena, row)
    t.losses = <double *>arena_alloc(arena, row)
    t.sums = <double *>arena_alloc(arena, row)
    t.balance = <double *>arena_alloc(arena, row)
    t.a = <double *>arena_alloc(arena, row)
    t.b = <double *>arena_alloc(arena, row)
    t.s = <double *>arena_alloc(arena, row)
    t.grad_loss = <double *>arena_alloc(arena, row)
    t.grad_log_prob = <double *>arena_alloc(arena, row)
    t.reciprocal = <double *>arena_alloc(arena, row)
    t.mean_gap = <double *>arena_alloc(arena, row)
    t.outer = <double *>arena_alloc(arena, row)


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
    r.slope = <double *>arena_alloc(arena, size) if x.o.grad_entropy != NULL else NULL
    r.reciprocal = <double *>arena_alloc(arena, size) if x.prob != NULL else NULL
    r.first = r.second = r.at_one = r.at_targets = r.others = r.at_largest = NULL
    if x.hessian != NULL:
        r.first = <double *>arena_alloc(arena, size)
        r.second = <double *>arena_alloc(arena, size)
        r.at_one = <double *>arena_alloc(arena, size)
    if x.vector != NULL:
        r.others = <double *>arena_alloc(arena, size)
        r.at_largest = <double *>arena_alloc(arena, size)
    if bends(x):
        r.at_targets = <double *>arena_alloc(arena, x.o.target_count * x.pitch * sizeof(double))
    r.below = r.at_max = r.certain = r.at_certain = NULL
    if is_dense(&x.o):
        r.below = <double *>arena_alloc(arena, size)
        r.at_max = <double *>arena_alloc(arena, size)
        r.certain = <double *>arena_alloc(arena, size)
        r.at_certain = <double *>arena_alloc(arena, size)
    r.log_sum = <double *>arena_alloc(arena, size)
    place_targets(x, r, arena)
    r.numbers = <Py_ssize_t *>arena_alloc(arena, size)
    r.a = <char **>arena_alloc(arena, size)
    r.out = <char **>arena_alloc(arena, size)
    r.stores = <uint8_t *>arena_alloc(arena, x.buffered)
    r.cached = arena_alloc(arena, x.cached_bytes)
    if not x.cached_bytes:
        r.cached = NULL


cdef Rows rows_at(const CrossEntropy *x, char *base) noexcept nogil:
    """Return the buffers of rows in memory that begins at `base`."""
    cdef Rows r
    cdef Arena arena
    place_rows(x, &r, &arena, base)
    return r


cdef ag_loss_rows parameters(const CrossEntropy *x, const Rows *r) noexcept nogil:
    """Return the kernels' parameters of rows."""
    cdef ag_loss_rows rows
    rows.max, rows.scale, rows.factor, rows.smoothing = r.max, r.scale, r.factor, r.smoothing
    rows.slope, rows.class_weight = r.slope, x.kernel_weight
    rows.cached, rows.pitch = r.cached, align_up(x.s.p.n, AG_MAX_LANES)
    rows.is_uniform = x.o.temperatures == NULL
    rows.is_smoothed = x.o.label_smoothing != 0 or is_dense(&x.o)
    rows.next = NULL
    rows.is_dense, rows.certain, rows.at_certain = is_dense(&x.o), r.certain, r.at_certain
    # A share does not become 0, as an infinite distance is left out of the loss only if its weight is 0.
    rows.kept, rows.share = 1 - x.o.label_smoothing, ag_scaled_weight(x.o.label_smoothing / x.s.p.n, 1, x.o.is_double)
    return rows


cdef Rows rows_from(const Rows *r, Py_ssize_t begin) noexcept nogil:
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
    if part.slope != NULL:
        part.slope += begin
    if part.reciprocal != NULL:
        part.reciprocal += begin
    if part.first != NULL:
        part.first += begin
        part.second += begin
        part.at_one += begin
    if part.others != NULL:
        part.others += begin
        part.at_largest += begin
    if part.at_targets != NULL:
        part.at_targets += begin
    if part.below != NULL:
        part.below += begin
        part.at_max += begin
        part.certain += begin
        part.at_certain += begin
    part.t.max, part.t.rest, part.t.log_sum = part.max, part.rest, part.log_sum
    part.t.entries += begin
    part.t.logits += begin
    if part.t.slopes != NULL:
        part.t.slopes += begin
    part.numbers += begin
    part.a += begin
    part.out += begin
    part.stores += begin
    return part


# ---- numbers and addresses -------------------------------------------------------------------------------------------

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


cdef inline void load_targets_of_width(const CrossEntropy *x, Py_ssize_t count, bint is_wide, Rows *r) noexcept nogil:
    """Set the entries of the targets of rows, and the factors of their logits; 0 for ignored rows."""
    cdef Py_ssize_t targets = x.o.target_count, pitch = x.pitch, i, k, number
    cdef int64_t entry, ignored = x.o.ignore_index
    cdef size_t classes = x.s.p.n
    cdef int64_t *entries
    cdef bint has_targets
    cdef double scale = x.scale
    for i in range(count):
        number = r.numbers[i] * targets
        entries = &r.t.entries[i]
        has_targets = targets == 0  # rows of dense targets are never ignored
        for k in range(targets):
            if is_wide:
                entry = (<const int64_t *>x.o.target)[number + k]
            else:
                entry = (<const int32_t *>x.o.target)[number + k]
            # Targets of calls were checked, but another thread may have changed them since.
            if entry == ignored or <size_t>entry >= classes:
                entry = -1 - k
            else:
                has_targets = True
            entries[k * pitch] = entry
        if x.o.temperatures != NULL:
            scale = scale_of(&x.o, x.o.temperatures[r.numbers[i]])
        r.scale[i] = scale if has_targets else 0


cdef void begin_rows(const CrossEntropy *x, Py_ssize_t begin, Py_ssize_t count, Rows *r) noexcept nogil:
    """Set the numbers of rows, the entries of their targets, and the factors of their logits, 0 for ignored rows."""
    number_rows(x, begin, count, True, r)
    if x.o.is_wide:
        load_targets_of_width(x, count, True, r)
    else:
        load_targets_of_width(x, count, False, r)


# ---- elements at targets ---------------------------------------------------------------------------------------------

cdef inline void copy_targets_of_size(
    const CrossEntropy *x, const Rows *r, Py_ssize_t count, int which, int itemsize, char *packed
) noexcept nogil:
    """Copy elements at targets of `count` rows from the input (`which` is A) to `packed`, or from there to the result (OUT).

    `packed` has the elements of the rows' first targets, then of their second targets, and so on. It gets zeros for ignored
    targets.
    """
    # Values that do not change have local names, as stores of bytes might change any others.
    cdef Py_ssize_t stride = x.s.p.operands[which].dim_stride, pitch = x.pitch, targets = x.o.target_count, i, _k
    cdef const int64_t *entries = r.t.entries
    cdef char *element = packed
    cdef char **rows = r.out if which == OUT else r.a
    cdef const uint8_t *stores = r.stores
    for _k in range(targets):
        for i in range(count):
            if which == OUT:
                if entries[i] >= 0 and stores[i]:
                    memcpy(rows[i] + entries[i] * stride, element, itemsize)
            elif entries[i] >= 0:
                memcpy(element, rows[i] + entries[i] * stride, itemsize)
            else:
                memset(element, 0, itemsize)
            element += itemsize
        entries += pitch


cdef void copy_targets(
    const CrossEntropy *x, const Rows *r, Py_ssize_t count, int which, char *packed
) noexcept nogil:
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
    """Set `r.t.logits` to the logits at the targets of at most `together` rows, as tiles hold them; 0 for ignored targets."""
    cdef const Operand *operand = &x.s.p.operands[A]
    cdef Py_ssize_t size = count * x.o.target_count, i, k
    cdef char *packed = r.packed
    cdef float *widened = <float *>packed
    cdef double *logits
    copy_targets(x, r, count, A, packed)
    if operand.swapped:
        swap_elements(packed, size, operand.itemsize)
    if operand.dtype != AG_FLOAT64 and operand.dtype != AG_FLOAT32:
        widened += size
        ag_widen(x.s.variant, operand.dtype, packed, widened, size)
    if x.s.p.is_transformed:
        x.kernels.transform(<char *>widened, size, x.s.p.inner, x.s.p.cap)
    for k in range(x.o.target_count):
        logits = &r.t.logits[k * x.pitch]
        if operand.dtype == AG_FLOAT64:
            for i in range(count):
                logits[i] = (<double *>packed)[k * count + i]
        else:
            for i in range(count):
                logits[i] = widened[k * count + i]


cdef void store_at_targets(const CrossEntropy *x, Py_ssize_t count, const Rows *r) noexcept nogil:
    """Store the gradients at the targets of rows, each rounded once."""
    cdef Py_ssize_t first = 0
    cdef Rows some
    while first < count:
        some = rows_from(r, first)
        store_at_targets_of_some(x, min(x.together, count - first), &some)
        first += x.together


cdef void store_at_targets_of_some(const CrossEntropy *x, Py_ssize_t count, const Rows *r) noexcept nogil:
    """Do what `store_at_targets` does for at most `together` rows."""
    cdef const Operand *operand = &x.s.p.operands[OUT]
    cdef Py_ssize_t i, k
    cdef const double *gradients
    cdef char *line
    for k in range(x.o.target_count):
        gradients = &r.t.logits[k * x.pitch]
        line = r.packed + k * count * operand.itemsize
        if operand.dtype == AG_FLOAT64:
            memcpy(line, gradients, count * sizeof(double))
        elif operand.dtype == AG_FLOAT32:
            for i in range(count):
                (<float *>line)[i] = <float>gradients[i]
        else:
            ag_convert(x.s.variant, True, gradients, operand.dtype, line, count)
    if operand.swapped:
        swap_elements(r.packed, count * x.o.target_count, operand.itemsize)
    copy_targets(x, r, count, OUT, r.packed)
