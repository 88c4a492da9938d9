from libc.stdint cimport uintptr_t

cimport numpy as cnp

cdef cnp.ndarray empty(int ndim, const cnp.npy_intp *shape, cnp.dtype dtype)
cdef cnp.ndarray empty_aligned(int ndim, const cnp.npy_intp *shape, cnp.dtype dtype)
cdef cnp.ndarray at_aligned_address(cnp.ndarray array)
cdef cnp.ndarray zeros(cnp.npy_intp n, cnp.dtype dtype)
cdef cnp.ndarray empty_like(cnp.ndarray prototype, cnp.dtype dtype)


# A workspace is laid out by a function that allocates from an arena. It runs twice: without memory, to measure, and
# with it. The memory is `ALIGNMENT` bytes longer than the layout, which begins at the first aligned address.
ctypedef struct Arena:
    char *base                        # NULL: sizes are measured only
    Py_ssize_t used


cdef extern from *:
    """
    /* Bytes, more than any memory has. A sum of all buffers of a problem whose arrays are not larger does not overflow. */
    #define AG_SIZE_LIMIT ((Py_ssize_t)1 << 57)
    """
    const Py_ssize_t SIZE_LIMIT "AG_SIZE_LIMIT"


cdef enum:
    ALIGNMENT = 64


cdef inline Py_ssize_t magnitude(Py_ssize_t x) noexcept nogil:
    return -x if x < 0 else x  # abs() of this type would be Python's


cdef inline Py_ssize_t ceil_div(Py_ssize_t n, Py_ssize_t by) noexcept nogil:
    return (n + by - 1) // by


cdef inline Py_ssize_t align_up(Py_ssize_t n, Py_ssize_t to) noexcept nogil:
    return ceil_div(n, to) * to


cdef inline char *arena_alloc(Arena *arena, Py_ssize_t size) noexcept nogil:
    cdef char *result = NULL if arena.base == NULL else arena.base + arena.used
    arena.used += align_up(size, ALIGNMENT)
    return result


cdef inline char *aligned(char *memory) noexcept nogil:
    """The first aligned address."""
    return memory + (ALIGNMENT - <uintptr_t>memory % ALIGNMENT) % ALIGNMENT


cdef cnp.ndarray workspace(Py_ssize_t nbytes)
cdef int check_layout(Py_ssize_t used, cnp.ndarray memory) except -1
cpdef copy_into(cnp.ndarray to, cnp.ndarray source)
