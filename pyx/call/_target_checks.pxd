from ascend_grad._call cimport Call

cdef bint is_dense(Call call) except -1
cdef str advice_on_one_hot(str name)
