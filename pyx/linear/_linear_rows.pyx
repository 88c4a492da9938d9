"""Arrays as the linear kernels see them, and the rows of a call that count."""

cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memset

from ascend_grad cimport _cpu, _tasks
from ascend_grad._dtypes cimport dtype_of
from ascend_grad._kernels cimport AG_FLOAT32, AG_FLOAT64, ag_convert, ag_copy_block, ag_dtype, ag_itemsize, ag_variant
from ascend_grad._linear_kernels cimport ag_matrix
from ascend_grad._linear_plan cimport Buffers

cnp.import_array()


cdef ag_matrix matrix_of(cnp.ndarray array):
    """A matrix for the kernels; a vector is one of one row."""
    cdef ag_matrix result
    cdef int last = cnp.PyArray_NDIM(array) - 1
    result.data = <char *>cnp.PyArray_DATA(array)
    result.dtype = <ag_dtype>dtype_of(array)
    result.row_stride = cnp.PyArray_STRIDE(array, 0) if last else 0
    # A dimension of one element may have any stride.
    result.step = cnp.PyArray_STRIDE(array, last) if cnp.PyArray_DIM(array, last) > 1 else ag_itemsize[<int>result.dtype]
    result.swapped = cnp.PyArray_ISBYTESWAPPED(array)
    return result


cdef bint holds_sums(cnp.ndarray out, int acc_size):
    """Whether the kernels can add up in the result itself."""
    cdef ag_matrix matrix = matrix_of(out)
    return (
        ag_itemsize[<int>matrix.dtype] == acc_size and not matrix.swapped and matrix.step == acc_size
        and <uintptr_t>matrix.data % acc_size == 0 and matrix.row_stride % acc_size == 0
    )


cdef bint is_streamed(cnp.ndarray out):
    """Whether a result is so large that it is written past the caches."""
    return cnp.PyArray_NBYTES(out) >= max(_cpu.cache_size(3) // 2, 1 << 20)


cdef void convert_segment(
    ag_variant variant, int acc_size, const char *source, const ag_matrix *to, Py_ssize_t row, Py_ssize_t begin, Py_ssize_t n
) noexcept nogil:
    """Accumulators to columns [begin, begin + n) of a row, of any dtype and layout."""
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


cdef bint is_flat(const ag_matrix *to, int acc_size, Py_ssize_t n) noexcept nogil:
    """Whether rows of n elements follow one another, in a dtype that accumulators are rounded to."""
    cdef int itemsize = ag_itemsize[<int>to.dtype]
    return itemsize != acc_size and to.step == itemsize and to.row_stride == n * itemsize and not to.swapped


@cython.final
cdef class Rows:
    """What the rows of a call hold, as contiguous arrays (BT,), and which of them count.

    A row counts if its `grad` is not zero; without `grad`, if its target is not `ignored` (None: every row). Its row of
    weight is target - start, or none where `mask` is set (bool, or uint8 with eight rows to a byte) or where that is not
    in [0, size).
    """

    def __init__(
        self, cnp.ndarray target, int64_t start, int64_t size, cnp.ndarray mask=None, cnp.ndarray grad=None,
        cnp.ndarray maximum=None, cnp.ndarray sum=None, ignored=None
    ):
        cdef Py_ssize_t i
        cdef double last = 0
        self.keep = (target, mask, grad, maximum, sum)
        self.total = cnp.PyArray_DIM(target, 0)
        self.target = cnp.PyArray_BYTES(target)
        self.is_wide = cnp.PyArray_ITEMSIZE(target) == 8
        self.start, self.size = start, size
        self.mask = NULL
        if mask is not None:
            self.mask = <const uint8_t *>cnp.PyArray_DATA(mask)
        self.is_packed = mask is not None and cnp.PyArray_TYPE(mask) != cnp.NPY_BOOL
        self.grad = NULL if grad is None else cnp.PyArray_BYTES(grad)
        self.is_double = grad is not None and cnp.PyArray_ITEMSIZE(grad) == 8
        self.maximum = NULL if maximum is None else cnp.PyArray_BYTES(maximum)
        self.sum = NULL if sum is None else cnp.PyArray_BYTES(sum)
        self.can_ignore = ignored is not None
        self.ignored = ignored if self.can_ignore else 0
        if grad is None and not self.can_ignore:
            self.count = self.total
            return
        for i in range(self.total):
            self.count += self.counts(i)
            if i % ROWS_PER_CHECK == 0:
                _tasks.check_signals(&last)

    cdef int64_t target_of(self, Py_ssize_t i) noexcept nogil:
        return (<const int64_t *>self.target)[i] if self.is_wide else (<const int32_t *>self.target)[i]

    cdef bint counts(self, Py_ssize_t i) noexcept nogil:
        # By its bits: a thread may take subnormal numbers for zero.
        if self.grad != NULL and self.is_double:
            return (<const uint64_t *>self.grad)[i] << 1 != 0
        if self.grad != NULL:
            return <uint32_t>((<const uint32_t *>self.grad)[i] << 1) != 0
        return not (self.can_ignore and self.target_of(i) == self.ignored)

    cdef bint is_masked(self, Py_ssize_t i) noexcept nogil:
        if self.mask == NULL:
            return False
        return (self.mask[i // 8] >> (i % 8)) & 1 if self.is_packed else self.mask[i]

    cdef int64_t row_of_weight(self, Py_ssize_t i) noexcept nogil:
        """-1 for none."""
        cdef int64_t target = self.target_of(i)
        # The difference of any two such numbers fits where there is no sign.
        if self.is_masked(i) or target < self.start or <uint64_t>target - <uint64_t>self.start >= <uint64_t>self.size:
            return -1
        return target - self.start

    cdef Py_ssize_t select(
        self, Py_ssize_t *next, Py_ssize_t end, Py_ssize_t n, Py_ssize_t most, int acc, const Buffers *to
    ) noexcept nogil:
        """What the next rows hold that count, from row `next` on, which moves behind them, beside the `n` that are there;
        how many they are then, at most `most`."""
        cdef Py_ssize_t i = next[0]
        while i < end and n < most:
            if self.counts(i):
                to.row_numbers[n] = i
                to.target[n] = self.row_of_weight(i)
                if self.grad != NULL:
                    copy_number(to.grad, n, self.grad, i, acc)
                if self.maximum != NULL:
                    copy_number(to.max, n, self.maximum, i, acc)
                    copy_number(to.sum, n, self.sum, i, acc)
                n += 1
            i += 1
        next[0] = i
        return n

    cdef int clear_absent(self, const ag_matrix *out, Py_ssize_t n) except -1 nogil:
        """Zeros in the rows of n elements that do not count."""
        cdef Py_ssize_t i
        cdef double last = 0
        for i in range(self.total):
            if not self.counts(i):
                clear_rows(out, i, 1, n, &last)
        return 0


cdef int clear_rows(
    const ag_matrix *out, Py_ssize_t first, Py_ssize_t rows, Py_ssize_t n, double *last
) except -1 nogil:
    """Zeros, whose bytes are 0 in every dtype, in rows of n elements."""
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
        _tasks.check_signals(last)
    return 0
