from ascend_grad._cross_entropy_rows cimport CrossEntropy, Rows

cdef void finish_rows(CrossEntropy *x, Py_ssize_t count, Rows *r) noexcept nogil
cdef double bend_of(const CrossEntropy *x) noexcept nogil
