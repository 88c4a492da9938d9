cimport numpy as cnp

from ascend_grad._call cimport Call

cdef tuple product(Call call, int threads)
cdef cnp.ndarray hessian(Call call, int threads)
cdef Py_ssize_t workspace_bound(Call call, int threads) except -1
cdef tuple plan_and_threads(Call call, int threads)
