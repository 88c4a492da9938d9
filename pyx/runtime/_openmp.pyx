"""The functions of OpenMP, for modules that do not include omp.h themselves."""

cdef extern from *:
    """
    #ifdef _OPENMP
    #include <omp.h>
    #define AG_OPENMP_VERSION _OPENMP
    #else
    #define AG_OPENMP_VERSION 0
    #define omp_get_max_threads() 1
    #define omp_get_num_threads() 1
    #define omp_in_parallel() 0
    #endif
    typedef _Atomic int ag_team_record;
    """
    ctypedef int ag_team_record
    int AG_OPENMP_VERSION
    int omp_get_max_threads() nogil
    int omp_get_num_threads() nogil
    int omp_in_parallel() nogil

#: Version of OpenMP, as in its macro (yyyymm), or 0 in a build without OpenMP.
VERSION = AG_OPENMP_VERSION

#: Version of OpenMP as text.
DESCRIPTION = f"OpenMP {VERSION}" if VERSION else "no OpenMP: one thread"

cdef ag_team_record _last_team = 0  # atomic, as teams of concurrent calls write it


cdef int max_threads() noexcept nogil:
    """Return OpenMP's number of threads for the next region, set by OMP_NUM_THREADS, threadpoolctl, or the cores."""
    return omp_get_max_threads()


cdef bint in_parallel() noexcept nogil:
    """Return whether the caller runs in a team already."""
    return omp_in_parallel()


cdef int team_size() noexcept nogil:
    """Return the number of threads of the current team."""
    return omp_get_num_threads()


cdef void record_team() noexcept nogil:
    """Record the size of the current team. Every thread of a team writes the same number."""
    global _last_team
    if _last_team != omp_get_num_threads():
        _last_team = omp_get_num_threads()


def last_team_size():
    """Return the number of threads of the last region that any call ran, for tests."""
    return _last_team
