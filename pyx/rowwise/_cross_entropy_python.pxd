cimport numpy as cnp

from ascend_grad._call cimport Call
from ascend_grad._cross_entropy_rows cimport CrossEntropy
from ascend_grad._rowwise_plan cimport Problem

cdef bint describe_rows(
    Problem *p, const CrossEntropy *x, cnp.ndarray input, cnp.ndarray target, int dim, cnp.ndarray out
) except -1
cdef int solve(CrossEntropy *x, const Problem *p, int asked, cnp.ndarray vector, int axis) except -1
cdef Py_ssize_t most_workspace(CrossEntropy *x, const Problem *p, int threads) except -1
cdef object compute(Call call, int threads)
cdef Py_ssize_t workspace_bound(Call call, int threads) except -1
cdef tuple plan_and_threads(Call call, int threads)
