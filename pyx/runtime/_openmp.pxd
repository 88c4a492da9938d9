# The only module that uses OpenMP's functions. In a build without OpenMP they answer for a single thread.

cdef int max_threads() noexcept nogil
cdef int thread_limit() noexcept nogil
cdef int usable_cores() noexcept nogil
cdef bint in_parallel() noexcept nogil
cdef bint may_start_team(int threads) noexcept nogil
cdef bint can_start_team(int threads) noexcept nogil
cdef void record_pool(int threads) noexcept nogil
cdef int team_size() noexcept nogil
cdef int threads_to_start(int threads, int cores, bint are_awake) noexcept nogil
cdef void record_team(int size) noexcept nogil
