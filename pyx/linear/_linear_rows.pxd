cimport cython
cimport numpy as cnp
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from ascend_grad._kernels cimport ag_variant
from ascend_grad._linear_kernels cimport ag_matrix
from ascend_grad._linear_plan cimport Buffers

cdef enum:
    SEGMENT = 256                     # values of a row that are converted at a time
    ROWS_PER_CHECK = 1 << 18          # rows of the caller between two checks of signals


cdef inline double number(const void *values, Py_ssize_t i, bint is_double) noexcept nogil:
    return (<const double *>values)[i] if is_double else (<const float *>values)[i]


cdef inline void set_number(void *values, Py_ssize_t i, bint is_double, double value) noexcept nogil:
    if is_double:
        (<double *>values)[i] = value
    else:
        (<float *>values)[i] = <float>value


cdef inline void copy_number(char *to, Py_ssize_t n, const char *source, Py_ssize_t i, int itemsize) noexcept nogil:
    if itemsize == 8:
        (<uint64_t *>to)[n] = (<const uint64_t *>source)[i]
    else:
        (<uint32_t *>to)[n] = (<const uint32_t *>source)[i]


cdef ag_matrix matrix_of(cnp.ndarray array)
cdef bint holds_sums(cnp.ndarray out, int acc_size)
cdef bint is_streamed(cnp.ndarray out)
cdef void convert_segment(
    ag_variant variant, int acc_size, const char *source, const ag_matrix *to, Py_ssize_t row, Py_ssize_t begin, Py_ssize_t n
) noexcept nogil
cdef bint is_flat(const ag_matrix *to, int acc_size, Py_ssize_t n) noexcept nogil
cdef int clear_rows(
    const ag_matrix *out, Py_ssize_t first, Py_ssize_t rows, Py_ssize_t n, double *last
) except -1 nogil


@cython.final
cdef class Rows:
    cdef readonly Py_ssize_t total, count
    cdef const char *grad
    cdef const char *maximum
    cdef const char *sum
    cdef const char *target
    cdef const uint8_t *mask
    cdef bint is_wide, is_packed, is_double, can_ignore
    cdef int64_t start, size, ignored
    cdef tuple keep

    cdef int64_t target_of(self, Py_ssize_t i) noexcept nogil
    cdef bint counts(self, Py_ssize_t i) noexcept nogil
    cdef bint is_masked(self, Py_ssize_t i) noexcept nogil
    cdef int64_t row_of_weight(self, Py_ssize_t i) noexcept nogil
    cdef Py_ssize_t select(
        self, Py_ssize_t *next, Py_ssize_t end, Py_ssize_t n, Py_ssize_t most, int acc, const Buffers *to
    ) noexcept nogil
    cdef int clear_absent(self, const ag_matrix *out, Py_ssize_t n) except -1 nogil
