from libc.stdint cimport int64_t

from ascend_grad._linear_kernels cimport ag_linear_block, ag_matrix
from ascend_grad._linear_run cimport Run

cdef void sum_columns(const ag_linear_block *block, const void *tile, bint is_double, double *sums) noexcept nogil
cdef void combine_partial_sums(
    const Run *run, const ag_matrix *out, const int64_t *row_numbers, Py_ssize_t rows, Py_ssize_t task_rows
) noexcept nogil
