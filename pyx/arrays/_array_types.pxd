cimport numpy as cnp

from ascend_grad._dlpack cimport DLPackExchangeAPI


cdef class ArrayType:
    cdef readonly str library
    cdef const DLPackExchangeAPI *api
    cdef object from_dlpack
    cdef object refused
    cdef object mark_written, is_neg
    cdef bint is_torch, is_jax, is_plain
    cpdef cnp.ndarray view(self, object value, str name, str operator)
    cpdef object view_anywhere(self, object value, str name, str operator)
    cdef object own(self, cnp.ndarray array)


cdef ArrayType NUMPY

cdef ArrayType known_array_type(object value)
cpdef ArrayType array_type(object value, str name, str operator)
cpdef bint is_on_device(object value) except -1
cdef int mark_written(object value) except -1
