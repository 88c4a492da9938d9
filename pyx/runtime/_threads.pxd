cdef int usable_cores() noexcept nogil
cpdef int default_threads() noexcept nogil
cdef int choose_num_threads(double cost, int asked) noexcept nogil
cdef void mark_team_used() noexcept nogil
cdef bint is_oversubscribed() noexcept nogil
cdef void record_team_times(double elapsed, double busy) noexcept nogil
cdef int expected_threads(double cost, int asked) noexcept nogil
