# The only module that uses OpenMP's functions. In a build without OpenMP they answer for a single thread.

cdef int max_threads() noexcept nogil
cdef bint in_parallel() noexcept nogil
cdef int team_size() noexcept nogil
cdef void record_team() noexcept nogil
