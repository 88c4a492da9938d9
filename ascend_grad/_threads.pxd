cdef int usable_cores() except -1
cpdef int default_threads() except -1
cdef int choose_num_threads(double cost, int asked) except -1
cdef void mark_team_used() noexcept nogil
cdef bint is_oversubscribed() noexcept nogil
cdef void record_team_times(double elapsed, double busy) noexcept nogil
