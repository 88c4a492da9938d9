# The one place that knows OpenMP; without it every answer is that of a single thread.

cdef int max_threads() noexcept nogil
cdef bint in_parallel() noexcept nogil
cdef int team_size() noexcept nogil
cdef void record_team() noexcept nogil
