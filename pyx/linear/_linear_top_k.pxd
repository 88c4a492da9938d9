from ascend_grad._kernels cimport ag_sum
from ascend_grad._linear_kernels cimport ag_top_k
from ascend_grad._linear_problem cimport Problem
from ascend_grad._linear_run cimport Run


cdef void describe_top_k(Problem *p) noexcept nogil
cdef ag_top_k top_k_of(const Run *run) noexcept nogil
cdef int begin_top_k(const Problem *p, ag_sum *rest, double *last_check) except -1 nogil
cdef void finish_top_k(const Run *run) noexcept nogil
cdef void run_top_k_streamed(const Run *run) noexcept nogil
