cimport numpy as cnp

cdef int dtype_of(cnp.ndarray array) noexcept
cdef cnp.dtype native_dtype(cnp.ndarray array)
cdef cnp.dtype accumulator_of(cnp.ndarray array)
