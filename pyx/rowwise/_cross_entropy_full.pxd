from ascend_grad._cross_entropy_rows cimport CrossEntropy, Rows
from ascend_grad._rowwise_kernels cimport ag_loss_rows, ag_tile

cdef void write_full_results(
    const CrossEntropy *x, const ag_tile *tile, const ag_loss_rows *rows, Py_ssize_t k, const Rows *r
) noexcept nogil
cdef void sum_products(
    const CrossEntropy *x, const ag_tile *tile, const ag_loss_rows *rows, Py_ssize_t k, const Rows *r, double *others,
    double *at_largest
) noexcept nogil
