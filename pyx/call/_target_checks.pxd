from ascend_grad._call cimport Call

cdef bint is_dense(Call call) except -1
