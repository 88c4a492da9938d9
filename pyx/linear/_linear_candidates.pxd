from ascend_grad._linear_kernels cimport ag_linear_kernels
from ascend_grad._linear_plan cimport Plans, Work

cdef Plans choose_plans(const ag_linear_kernels *kernels, const Work *work, Py_ssize_t workspace) noexcept nogil
cdef Py_ssize_t least_workspace(const ag_linear_kernels *kernels, const Work *work) noexcept nogil
cdef bint is_empty(const Work *work) noexcept nogil
cdef bint follows_rows(const Plans *plans) noexcept nogil
