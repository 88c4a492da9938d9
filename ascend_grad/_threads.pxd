cdef int resolve() except -1
cdef int choose(double cost, int asked) except -1
cdef void finished() noexcept nogil
