"""Rows of a block in a loss of rows: their numbers, addresses and buffers, and the elements at their targets."""

from libc.stdint cimport int64_t, uint8_t
from libc.string cimport memcpy, memset

from ascend_grad._kernels cimport AG_FLOAT32, AG_FLOAT64, ag_convert, ag_scaled_weight, ag_widen
from ascend_grad._loss_options cimport is_dense, is_ignored, target_at
from ascend_grad._memory cimport Arena, align_up, arena_alloc
from ascend_grad._rowwise_kernels cimport AG_MAX_LANES, ag_loss_rows
from ascend_grad._rowwise_plan cimport MASK, MAX_AXES, OUT, A, Operand, Problem, offset_of

# ---- buffers ---------------------------------------------------------------------------------------------------------

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
    r.below = r.at_max = r.certain = r.at_certain = NULL
    if is_dense(&x.o):
        r.below = <double *>arena_alloc(arena, size)
        r.at_max = <double *>arena_alloc(arena, size)
        r.certain = <double *>arena_alloc(arena, size)
        r.at_certain = <double *>arena_alloc(arena, size)
    r.log_sum = <double *>arena_alloc(arena, size)
    r.targets = <double *>arena_alloc(arena, size * x.o.target_count)
    r.exp = <double *>arena_alloc(arena, size * x.o.target_count)
    r.indices = <int64_t *>r.exp
    r.target_slopes = NULL
    if x.o.softcap > 0:
        r.target_slopes = <double *>arena_alloc(arena, size * x.o.target_count)
    r.entries = <int64_t *>arena_alloc(arena, align_up(x.o.target_count, AG_MAX_LANES) * sizeof(double))
    r.weights = <double *>arena_alloc(arena, align_up(x.o.target_count, AG_MAX_LANES) * sizeof(double))
    r.equal = <double *>arena_alloc(arena, align_up(x.o.target_count, AG_MAX_LANES) * sizeof(double))
    r.slots = NULL
    if x.o.target_count > MOST_COMPARED:
        r.slots = <Slot *>arena_alloc(arena, sizeof(Slot) << x.slot_bits)
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
    if part.slope != NULL:
        part.slope += begin
    if part.below != NULL:
        part.below += begin
        part.at_max += begin
        part.certain += begin
        part.at_certain += begin
    part.targets += begin * targets
    if part.target_slopes != NULL:
        part.target_slopes += begin * targets
    part.exp += begin * targets
    part.indices = <int64_t *>part.exp
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


cdef void begin_rows(const CrossEntropy *x, Py_ssize_t begin, Py_ssize_t count, Rows *r) noexcept nogil:
    """Set the numbers of rows, and the factors of their logits, 0 for ignored rows."""
    cdef Py_ssize_t i
    cdef double scale = x.scale
    number_rows(x, begin, count, True, r)
    for i in range(count):
        if x.o.temperatures != NULL:
            scale = scale_of(&x.o, x.o.temperatures[r.numbers[i]])
        r.scale[i] = 0 if is_ignored(&x.o, r.numbers[i]) else scale


# ---- elements at targets ---------------------------------------------------------------------------------------------

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
            packed += x.o.target_count * itemsize
            continue
        for k in range(x.o.target_count):
            entry = target_at(&x.o, r.numbers[i] * x.o.target_count + k)
            if which == A and entry == x.o.ignore_index:
                memset(packed, 0, itemsize)
            elif which == A:
                memcpy(packed, r.a[i] + entry * stride, itemsize)
            elif entry != x.o.ignore_index:
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
    """Set `r.targets` to the logits at the targets of rows, as tiles hold them. It overwrites `r.exp`.

    Ignored targets get 0.
    """
    cdef const Operand *operand = &x.s.p.operands[A]
    cdef Py_ssize_t size = count * x.o.target_count, i
    cdef char *packed = <char *>(r.targets if operand.dtype == AG_FLOAT64 else r.exp)
    cdef float *widened = <float *>packed
    copy_targets(x, r, count, A, packed)
    if operand.swapped:
        swap_elements(packed, size, operand.itemsize)
    if operand.dtype != AG_FLOAT64 and operand.dtype != AG_FLOAT32:
        widened += size
        ag_widen(x.s.variant, operand.dtype, packed, widened, size)
    if x.s.p.is_transformed:
        x.kernels.transform(<char *>widened, size, x.s.p.inner, x.s.p.cap)
    if operand.dtype == AG_FLOAT64:
        return
    for i in range(size):
        r.targets[i] = widened[i]


cdef void store_at_targets(const CrossEntropy *x, Py_ssize_t count, const Rows *r) noexcept nogil:
    """Store the gradients at the targets of rows, each rounded once. It overwrites `r.exp`."""
    cdef const Operand *operand = &x.s.p.operands[OUT]
    cdef Py_ssize_t size = count * x.o.target_count, i
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
