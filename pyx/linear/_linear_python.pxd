cimport numpy as cnp

from ascend_grad._call cimport Call
from ascend_grad._linear_kernels cimport ag_matrix
from ascend_grad._linear_problem cimport Problem

cdef ag_matrix matrix(cnp.ndarray array)
cdef Problem layer_of(cnp.ndarray input, cnp.ndarray weight)
cdef Problem gradient_problem(
    cnp.ndarray input, cnp.ndarray weight, cnp.ndarray softmax, cnp.ndarray input_grad, cnp.ndarray weight_grad
)
cdef int solve(const Problem *p, Py_ssize_t workspace_bytes, int num_threads, double *last_check) except -1
cdef tuple statistics(Call call, int num_threads)
cdef int compute(Call call, list results, int num_threads) except -1
cdef Py_ssize_t workspace_bound_of(Call call, list results) except -1
cdef tuple plan_and_threads(Call call, list results, int num_threads)
