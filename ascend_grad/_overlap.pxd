cimport numpy as cnp

cdef bint may_overlap(cnp.ndarray first, cnp.ndarray second) except -1
cdef bint overlaps_partly(cnp.ndarray first, cnp.ndarray second) except -1
cdef bint overlaps_itself(cnp.ndarray array) except -1
