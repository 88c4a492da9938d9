cimport numpy as cnp

cdef int dtype_of(cnp.ndarray array) noexcept
