"""The floating dtypes of the library, and their numbers in the kernels."""

import ml_dtypes
import numpy as np

cimport numpy as cnp

from ascend_grad._kernels cimport AG_BFLOAT16, AG_FLOAT16, AG_FLOAT32, AG_FLOAT64

cnp.import_array()

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

#: The floating dtypes in native byte order, in the order of ag_dtype.
FLOATING_DTYPES = (np.dtype(np.float32), np.dtype(np.float16), BFLOAT16, np.dtype(np.float64))

cdef tuple _floating = FLOATING_DTYPES
cdef cnp.dtype _float32 = np.dtype(np.float32)
cdef cnp.dtype _float64 = np.dtype(np.float64)
cdef int _bfloat16_number = BFLOAT16.num


cdef int dtype_of(cnp.ndarray array) noexcept:
    """Return the ag_dtype of an array in any byte order, or -1 if the kernels do not have its dtype."""
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


cdef cnp.dtype native_dtype(cnp.ndarray array):
    """Return the array's dtype in native byte order, without metadata."""
    cdef int number = dtype_of(array)
    return <cnp.dtype>_floating[number] if number >= 0 else array.dtype.newbyteorder("=")


cdef cnp.dtype accumulator_of(cnp.ndarray array):
    """Return the dtype of results that are sums over the array's elements."""
    return _float64 if dtype_of(array) == AG_FLOAT64 else _float32
