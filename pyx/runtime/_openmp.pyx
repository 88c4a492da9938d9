"""The functions of OpenMP, for modules that do not include omp.h themselves."""

cdef extern from *:
    """
    #ifdef _OPENMP
    #define AG_OPENMP_VERSION _OPENMP
    #else
    #define AG_OPENMP_VERSION 0
    #endif
    typedef _Atomic int ag_team_record;
    """
    ctypedef int ag_team_record
    int AG_OPENMP_VERSION

cdef extern from "ascend_grad/openmp.h" nogil:
    int omp_get_max_threads()
    int omp_get_thread_limit()
    int omp_get_num_threads()
    int omp_in_parallel()
    void ag_openmp_init()
    bint ag_may_start_team(int threads)
    bint ag_can_start_team(int threads)
    void ag_record_pool(int threads)
    int ag_threads_to_start(int threads, int cores, bint are_awake)
    int ag_usable_cores()

#: Version of OpenMP, as in its macro (yyyymm), or 0 in a build without OpenMP.
VERSION = AG_OPENMP_VERSION

#: Version of OpenMP as text.
DESCRIPTION = f"OpenMP {VERSION}" if VERSION else "no OpenMP: one thread"

cdef ag_team_record _last_team = 0  # atomic, as teams of concurrent calls write it

ag_openmp_init()


cdef int max_threads() noexcept nogil:
    """Return OpenMP's number of threads for the next region, set by OMP_NUM_THREADS, threadpoolctl, or the cores."""
    return omp_get_max_threads()


cdef int thread_limit() noexcept nogil:
    """Return the most threads that OpenMP gives to this program, set by OMP_THREAD_LIMIT."""
    return omp_get_thread_limit()


cdef int usable_cores() noexcept nogil:
    """Return the number of cores that a team of this thread may run on. It may change between calls."""
    return ag_usable_cores()


cdef bint in_parallel() noexcept nogil:
    """Return whether the caller runs in a team already."""
    return omp_in_parallel()


cdef bint may_start_team(int threads) noexcept nogil:
    """Return whether this thread may try to start a team: not in some forked children, nor after the system refused."""
    return ag_may_start_team(threads)


cdef bint can_start_team(int threads) noexcept nogil:
    """Return whether this thread can start a team. If not, OpenMP would hang or end the process."""
    return ag_can_start_team(threads)


cdef void record_pool(int threads) noexcept nogil:
    """Record the number of threads of the team that this thread has just ended."""
    ag_record_pool(threads)


cdef int threads_to_start(int threads, int cores, bint are_awake) noexcept nogil:
    """Return the number of threads of OpenMP's team for a call, of which those beyond `threads` get no work."""
    return ag_threads_to_start(threads, cores, are_awake)


cdef int team_size() noexcept nogil:
    """Return the number of threads of the current team."""
    return omp_get_num_threads()


cdef void record_team(int size) noexcept nogil:
    """Record the number of threads of a call."""
    global _last_team
    if _last_team != size:
        _last_team = size


def last_team_size():
    """Return the number of threads of the last region that any call ran, for tests."""
    return _last_team
