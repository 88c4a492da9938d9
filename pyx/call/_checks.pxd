cimport numpy as cnp

from ascend_grad._call cimport Call, Check


cdef class Floating(Check):
    cdef bint converts
    cdef bint convert_integers(self, Call call) except -1


cdef class Number(Check):
    cdef double low, high
    cdef bint has_range, includes_low, includes_high, is_optional
    cdef str expected
    cdef int run_expecting(self, Call call, str expected) except -1


cdef class Shape(Check):
    cdef tuple dims
    cdef bint of_rows
    cdef str advice(self, Call call, cnp.ndarray array)
    cdef int run_on_rows(self, Call call, cnp.ndarray array) except -1
    cdef str other_axis(self, Call call, cnp.ndarray array)


cdef bint is_tensor(Call call, int slot) except -1
cdef str conversion(Call call, int slot, str dtype)
cdef bint have_same_shape(cnp.ndarray a, cnp.ndarray b) noexcept
cdef tuple rows_of(Call call)
cdef Py_ssize_t vocabulary_of(Call call) except -1
cdef object integer_between(Call call, int slot, object low, object high)
