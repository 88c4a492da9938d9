cimport numpy as cnp

from ascend_grad._dlpack cimport DLPackExchangeAPI


cdef class ArrayType:
    cdef readonly str library
    cdef bint is_plain
    cpdef cnp.ndarray view(self, object value, str name, str operator)
    cpdef object view_anywhere(self, object value, str name, str operator)
    cdef cnp.ndarray empty(self, int ndim, const cnp.npy_intp *shape, cnp.dtype dtype)
    cdef object own(self, cnp.ndarray array)
    cdef int mark_written(self, object value) except -1


cdef class DLPackType(ArrayType):
    cdef const DLPackExchangeAPI *api
    cdef object from_dlpack
    cdef int check(self, object value, str name, str operator) except -1
    cdef cnp.ndarray read(self, object value)
    cdef object view_on_device(self, object value, object error, str name, str operator)
    cdef object view_after_error(self, object value, object error, str name, str operator)


cdef class TorchType(DLPackType):
    cdef object overriding, is_neg, increment_version


cdef class JaxType(DLPackType):
    pass


cdef ArrayType NUMPY

cdef ArrayType known_array_type(object value)
cpdef ArrayType array_type(object value, str name, str operator)
cpdef bint is_on_device(object value) except -1
cdef int mark_written(object value) except -1
