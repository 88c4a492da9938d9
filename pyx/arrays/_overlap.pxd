cimport numpy as cnp

from ascend_grad._views cimport View

cdef bint may_share_memory(const View *first, const View *second) noexcept nogil
cdef bint is_same_memory(const View *first, const View *second) noexcept nogil
cdef bint are_nested(const View *view) noexcept nogil
cdef bint may_overlap(cnp.ndarray first, cnp.ndarray second) except -1
cdef bint overlaps_partly(cnp.ndarray first, cnp.ndarray second) except -1
cdef bint overlaps_itself(cnp.ndarray array) except -1
