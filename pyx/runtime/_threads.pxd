cdef int usable_cores() noexcept nogil
cpdef int default_threads() noexcept nogil
cdef int choose_num_threads(double cost, int asked) noexcept nogil
cdef bint may_sleep() noexcept nogil
cdef void record_end(int threads) noexcept nogil
cpdef void record_wake_time(double time) noexcept nogil
cdef bint is_oversubscribed() noexcept nogil
cdef void record_team_times(double elapsed, double busy) noexcept nogil
cdef void record_short_call(double elapsed, double cost) noexcept nogil
cdef int expected_threads(double cost, int asked) noexcept nogil
