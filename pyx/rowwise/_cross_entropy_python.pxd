from ascend_grad._call cimport Call

cdef object compute(Call call, int threads)
cdef Py_ssize_t workspace_bound(Call call, int threads) except -1
cdef tuple plan_and_threads(Call call, int threads)
