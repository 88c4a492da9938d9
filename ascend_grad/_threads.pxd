cdef int cores() except -1
cdef int resolve() except -1
cdef int choose(double cost, int asked) except -1
cdef void finished() noexcept nogil
cdef bint is_disturbed() noexcept nogil
cdef void took(double elapsed, double busy) noexcept nogil
