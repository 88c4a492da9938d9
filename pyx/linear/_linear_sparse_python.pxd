from ascend_grad._call cimport Call

cdef int compute(Call call, list results, int num_threads) except -1
cdef Py_ssize_t workspace_bound_of(Call call, list results, int num_threads) except -1
cdef tuple plan_and_threads(Call call, list results, int num_threads)
