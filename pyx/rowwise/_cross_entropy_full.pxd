from ascend_grad._cross_entropy_rows cimport CrossEntropy, Rows
from ascend_grad._rowwise_kernels cimport ag_loss_rows, ag_single_target_columns, ag_tile

cdef enum:
    # Columns whose results are computed together. Two results of AG_STRIP_ROWS(2) rows take at most AG_SCRATCH_BYTES.
    FULL_COLUMNS = 256


cdef void write_full_results(
    const CrossEntropy *x, const ag_tile *tile, const ag_loss_rows *rows, Py_ssize_t k, const Rows *r
) noexcept nogil
cdef void place_full_columns(
    const CrossEntropy *x, Py_ssize_t count, char *memory, ag_single_target_columns *columns
) noexcept nogil
cdef void store_full_columns(
    const CrossEntropy *x, const ag_single_target_columns *columns, Py_ssize_t count, Py_ssize_t number,
    const Py_ssize_t *numbers
) noexcept nogil
cdef void sum_products(
    const CrossEntropy *x, const ag_tile *tile, const ag_loss_rows *rows, Py_ssize_t k, const Rows *r, double *others,
    double *at_largest
) noexcept nogil
