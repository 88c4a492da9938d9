"""Dtypes of arrays, as the kernels name them."""

cimport numpy as cnp

from ascend_grad._kernels cimport AG_BFLOAT16, AG_FLOAT16, AG_FLOAT32, AG_FLOAT64

from .arrays import BFLOAT16

cnp.import_array()

cdef int _bfloat16_number = BFLOAT16.num


cdef int dtype_of(cnp.ndarray array) noexcept:
    """The kernels' name of an array's dtype, -1 where it has none. The byte order is not looked at."""
    cdef int number = cnp.PyArray_TYPE(array)
    if number == cnp.NPY_FLOAT:
        return AG_FLOAT32
    if number == _bfloat16_number:
        return AG_BFLOAT16
    if number == cnp.NPY_FLOAT16:
        return AG_FLOAT16
    if number == cnp.NPY_DOUBLE:
        return AG_FLOAT64
    return -1
