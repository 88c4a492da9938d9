"""Linear problems as the kernels see them: matrices, and the active rows of a call."""

from libc.float cimport FLT_MAX
from libc.math cimport INFINITY, fabs
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memset

from ascend_grad cimport _cpu, _tasks
from ascend_grad._kernels cimport (
    AG_FLOAT32,
    AG_FLOAT64,
    ag_bounded_factor,
    ag_convert,
    ag_copy_block,
    ag_dtype,
    ag_itemsize,
    ag_variant,
)
from ascend_grad._linear_kernels cimport ag_matrix
from ascend_grad._memory cimport ceil_div
from ascend_grad._views cimport View

# ---- matrices --------------------------------------------------------------------------------------------------------


cdef ag_matrix matrix_of(const View *view) noexcept nogil:
    """Return a view as a matrix for the kernels, without data if the view has none. A vector is a matrix of one row."""
    cdef ag_matrix result
    cdef int last = view.ndim - 1
    if view.data == NULL:
        memset(&result, 0, sizeof(result))
        return result
    result.data, result.dtype, result.swapped = view.data, <ag_dtype>view.dtype, view.swapped
    result.row_stride = view.strides[0] if last else 0
    # A dimension of length 1 may have any stride.
    result.step = view.strides[last] if view.shape[last] > 1 else view.itemsize
    return result


cdef void set_matrices(Problem *p, const View *input, const View *weight) noexcept nogil:
    """Describe the problem of two matrices, without vectors and results."""
    memset(p, 0, sizeof(Problem))
    p.dtype = <ag_dtype>input.dtype
    p.vocab, p.hidden = weight.shape[0], weight.shape[1]
    p.input, p.weight = matrix_of(input), matrix_of(weight)
    p.rows.total = p.rows.active = input.shape[0]


cdef bint holds_sums(const ag_matrix *matrix, int acc_size) noexcept nogil:
    """Return whether a result can hold the accumulators of the kernels."""
    return (
        ag_itemsize[<int>matrix.dtype] == acc_size and not matrix.swapped and matrix.step == acc_size
        and <uintptr_t>matrix.data % acc_size == 0 and matrix.row_stride % acc_size == 0
    )


cdef bint is_rounded_by_kernels(const ag_matrix *matrix, int acc_size) noexcept nogil:
    """Return whether kernels can round complete sums to the rows of a result."""
    return ag_itemsize[<int>matrix.dtype] == 2 and not matrix.swapped and matrix.step == 2 and acc_size == 4


cdef bint has_dense_rows(const ag_matrix *matrix, Py_ssize_t columns) noexcept nogil:
    """Return whether the rows follow one another without gaps, in native byte order."""
    cdef int itemsize = ag_itemsize[<int>matrix.dtype]
    return matrix.step == itemsize and matrix.row_stride == columns * itemsize and not matrix.swapped


cdef bint use_nontemporal_stores(
    const ag_matrix *matrix, Py_ssize_t rows, Py_ssize_t columns, int threads
) noexcept nogil:
    """Return whether a result is so large that a team's stores should bypass the caches."""
    return rows * columns * ag_itemsize[<int>matrix.dtype] >= max(_cpu.shared_cache_size(threads) // 2, 1 << 20)


cdef void convert_segment(
    ag_variant variant, int acc_size, const char *source, const ag_matrix *to, Py_ssize_t row, Py_ssize_t begin,
    Py_ssize_t n
) noexcept nogil:
    """Write accumulators to columns [begin, begin + n) of a row of any dtype and layout; n is at most SEGMENT."""
    cdef char[SEGMENT * 8] buffer
    cdef int itemsize = ag_itemsize[<int>to.dtype]
    cdef bint is_dense = to.step == itemsize and not to.swapped
    cdef char *target = to.data + row * to.row_stride + begin * to.step
    if to.dtype != (AG_FLOAT64 if acc_size == 8 else AG_FLOAT32):
        ag_convert(variant, acc_size == 8, source, to.dtype, target if is_dense else buffer, n)
        if is_dense:
            return
        source = buffer
    ag_copy_block(target, 0, to.step, source, 0, itemsize, 1, n, itemsize, to.swapped)


cdef int clear_rows(
    const ag_matrix *out, Py_ssize_t first, Py_ssize_t rows, Py_ssize_t n, double *last_check
) except -1 nogil:
    """Write zeros, whose bytes are 0 in every dtype, to rows of n elements. `last_check` NULL: signals are not checked."""
    cdef int itemsize = ag_itemsize[<int>out.dtype]
    cdef Py_ssize_t row, column
    cdef char *to
    for row in range(first, first + rows):
        to = out.data + row * out.row_stride
        if out.step == itemsize:
            memset(to, 0, n * itemsize)
        else:
            for column in range(n):
                memset(to + column * out.step, 0, itemsize)
        if last_check != NULL:
            _tasks.check_signals(last_check)
    return 0


# ---- logits ----------------------------------------------------------------------------------------------------------

cdef void bound_transform(Problem *p) noexcept nogil:
    """Replace softcap and scale by the nearest numbers that the accumulators can multiply with."""
    cdef bint is_double = acc_size_of(p.dtype) == 8
    cdef double largest = ag_bounded_factor(INFINITY, is_double)
    if p.transform.softcap > 0:
        p.transform.softcap = ag_bounded_factor(p.transform.softcap, is_double)
    p.transform.scale = min(max(p.transform.scale, -largest), largest)


cdef double largest_bias(
    const Problem *p, double temperature, const double *temperatures, Py_ssize_t rows
) noexcept nogil:
    """Return the largest bias whose logits are finite in float32; infinity for accumulators of float64."""
    cdef double least = temperature
    cdef Py_ssize_t i
    if acc_size_of(p.dtype) == 8:
        return INFINITY
    if temperatures != NULL:
        least = INFINITY
        for i in range(rows):
            least = min(least, temperatures[i])
    least = min(ag_bounded_factor(least, False), 1.0)
    if p.transform.softcap > 0:
        least *= min(p.transform.softcap, 1.0)
    return FLT_MAX * least / max(fabs(p.transform.scale), 1.0)


cdef void round_bias(void *to, const double *bias, Py_ssize_t n, double largest, bint is_double) noexcept nogil:
    """Round a bias to accumulators, followed by zeros.

    A finite number beyond the largest one counts as that: probabilities of infinite logits would be NaN.
    """
    cdef Py_ssize_t v
    for v in range(n):
        if -INFINITY < bias[v] < INFINITY:
            set_number(to, v, is_double, min(max(bias[v], -largest), largest))
        else:
            set_number(to, v, is_double, bias[v])
    for v in range(n, n + VECTOR_PADDING):
        set_number(to, v, is_double, 0)


# ---- rows ------------------------------------------------------------------------------------------------------------

cdef int count_active_rows(Rows *rows, int acc_size, double *last_check) except -1 nogil:
    """Count the active rows. `last_check` NULL: signals are not checked."""
    cdef Py_ssize_t part
    rows.active = 0
    if rows.grad == NULL and not rows.can_ignore and rows.token_weight == NULL:
        rows.active = rows.total
        return 0
    for part in range(ceil_div(rows.total, ROWS_PER_CHECK)):
        rows.active += count_some(rows, part * ROWS_PER_CHECK, min((part + 1) * ROWS_PER_CHECK, rows.total), acc_size)
        if last_check != NULL:
            _tasks.check_signals(last_check)
    return 0


cdef Py_ssize_t count_some(const Rows *rows, Py_ssize_t begin, Py_ssize_t end, int acc_size) noexcept nogil:
    """Count the active rows in [begin, end), as `is_active` tells. The frequent cases have separate loops."""
    cdef Py_ssize_t i, count = 0
    cdef const uint32_t *bits = <const uint32_t *>rows.grad
    cdef const uint64_t *wide_bits = <const uint64_t *>rows.grad
    cdef const int64_t *target = <const int64_t *>rows.target
    cdef bint is_usual = rows.grad == NULL and rows.can_ignore and rows.is_wide
    if rows.grad != NULL and acc_size == 4:
        for i in range(begin, end):
            count += <uint32_t>(bits[i] << 1) != 0
    elif rows.grad != NULL:
        for i in range(begin, end):
            count += wide_bits[i] << 1 != 0
    elif is_usual and (rows.token_weight == NULL or rows.with_outputs):
        for i in range(begin, end):
            count += target[i] != rows.ignored
    elif is_usual:
        for i in range(begin, end):
            count += <int>(target[i] != rows.ignored) & <int>(rows.token_weight[i] != 0)
    else:
        for i in range(begin, end):
            count += is_active(rows, i, acc_size)
    return count


cdef Py_ssize_t select_rows(
    const Rows *rows, Py_ssize_t *next, Py_ssize_t end, Py_ssize_t n, Py_ssize_t most, int acc_size,
    const ChunkBuffers *to
) noexcept nogil:
    """Append the elements of active rows to the `n` selected rows, and return the number of selected rows, at most `most`.

    The rows are searched from `next` to `end`; `next` becomes the row after the last one searched.
    """
    cdef Py_ssize_t i = next[0], count
    if rows.active == rows.total:
        count = max(min(end - i, most - n), 0)
        select_run(rows, i, n, count, acc_size, to)
        next[0] = i + count
        return n + count
    while i < end and n < most:
        if is_active(rows, i, acc_size):
            to.row_numbers[n] = i
            to.target[n] = entry_of_row(rows, i)
            if rows.grad != NULL:
                copy_number(to.grad, n, rows.grad, i, acc_size)
            if rows.max != NULL:
                copy_number(to.max, n, rows.max, i, acc_size)
                copy_number(to.sum, n, rows.sum, i, acc_size)
            n += 1
        i += 1
    next[0] = i
    return n


cdef void select_run(
    const Rows *rows, Py_ssize_t first, Py_ssize_t n, Py_ssize_t count, int acc_size, const ChunkBuffers *to
) noexcept nogil:
    """Append the elements of `count` rows, from `first` on, to the `n` selected rows."""
    cdef Py_ssize_t i
    cdef int64_t target
    cdef uint64_t entry
    for i in range(count):
        to.row_numbers[n + i] = first + i
    if rows.is_wide and rows.target != NULL and rows.mask == NULL:
        for i in range(count):
            target = (<const int64_t *>rows.target)[first + i]
            entry = <uint64_t>target - <uint64_t>rows.start
            to.target[n + i] = <int64_t>entry if target >= rows.start and entry < <uint64_t>rows.size else -1
    else:
        for i in range(count):
            to.target[n + i] = entry_of_row(rows, first + i)
    if rows.grad != NULL:
        memcpy(<char *>to.grad + n * acc_size, <const char *>rows.grad + first * acc_size, count * acc_size)
    if rows.max != NULL:
        memcpy(<char *>to.max + n * acc_size, <const char *>rows.max + first * acc_size, count * acc_size)
        memcpy(<char *>to.sum + n * acc_size, <const char *>rows.sum + first * acc_size, count * acc_size)


cdef int clear_inactive_rows(
    const Rows *rows, int acc_size, const ag_matrix *out, Py_ssize_t n, double *last_check
) except -1 nogil:
    """Write zeros to the inactive rows of a result, of n elements each."""
    cdef Py_ssize_t i
    for i in range(rows.total):
        if not is_active(rows, i, acc_size):
            clear_rows(out, i, 1, n, last_check)
    return 0
