cimport numpy as cnp

cdef cnp.ndarray empty_like(cnp.ndarray prototype, cnp.dtype dtype)
