cimport numpy as cnp

cdef cnp.ndarray fresh(int ndim, const cnp.npy_intp *shape, cnp.dtype dtype)
cdef cnp.ndarray empty_like(cnp.ndarray prototype, cnp.dtype dtype)
