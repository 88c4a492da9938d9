from ascend_grad._cross_entropy_rows cimport CrossEntropy
from ascend_grad._rowwise_kernels cimport ag_row_op
from ascend_grad._rowwise_plan cimport Problem

cdef ag_row_op plan_of(const CrossEntropy *x, Py_ssize_t classes, bint has_other_dtype) noexcept nogil
cdef void prepare_loss(CrossEntropy *x, const Problem *p, int threads) noexcept nogil
cdef Py_ssize_t loss_workspace_size(CrossEntropy *x) noexcept nogil
cdef Py_ssize_t place_loss_workspace(CrossEntropy *x, char *base) noexcept nogil
cdef int run_loss(CrossEntropy *x, bint default_threads, double *last_check) except -1 nogil
cdef void finish_without_rows(CrossEntropy *x) noexcept nogil
cdef void set_factors(CrossEntropy *x) noexcept nogil
