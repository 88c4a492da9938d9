cdef int cores() noexcept nogil
cdef int resolve() noexcept nogil
cdef int choose(double cost, int asked) noexcept nogil
cdef void finished() noexcept nogil
cdef bint is_warm() noexcept nogil
cdef bint is_disturbed() noexcept nogil
cdef void took(double elapsed, double waited) noexcept nogil
