from libc.stdint cimport uintptr_t

cimport numpy as cnp

cdef cnp.ndarray array_over(
    int ndim, const cnp.npy_intp *shape, cnp.dtype dtype, void *data, object owner, const cnp.npy_intp *strides
)
cdef cnp.ndarray empty(int ndim, const cnp.npy_intp *shape, cnp.dtype dtype)
cdef cnp.ndarray empty_in_order(cnp.ndarray prototype, cnp.dtype dtype)
cdef bint set_order(cnp.ndarray prototype, Py_ssize_t itemsize, cnp.npy_intp *strides) noexcept
cdef cnp.ndarray empty_aligned(int ndim, const cnp.npy_intp *shape, cnp.dtype dtype)
cdef cnp.ndarray at_aligned_address(cnp.ndarray array)
cdef cnp.ndarray zeros(cnp.npy_intp n, cnp.dtype dtype)
cdef cnp.ndarray empty_like(cnp.ndarray prototype, cnp.dtype dtype)


# A workspace is laid out by a function that allocates from an arena. It runs twice: first without memory, to measure
# the size, then with memory. That is `ALIGNMENT` bytes longer than the layout, which begins at its first aligned
# address.
ctypedef struct Arena:
    char *base                        # start of the memory; NULL: only measure the size
    Py_ssize_t used                   # bytes allocated so far


cdef extern from *:
    """
    /* Bytes that no array exceeds, more than any machine has: the buffers of a problem then add up without overflow. */
    #define AG_SIZE_LIMIT ((Py_ssize_t)1 << 57)
    """
    const Py_ssize_t SIZE_LIMIT "AG_SIZE_LIMIT"


cdef enum:
    ALIGNMENT = 64
    MAX_RANK = 64  # most dimensions of a NumPy array


cdef inline Py_ssize_t magnitude(Py_ssize_t x) noexcept nogil:
    return -x if x < 0 else x  # Cython compiles abs() of a Py_ssize_t to a call of Python


cdef inline Py_ssize_t ceil_div(Py_ssize_t n, Py_ssize_t by) noexcept nogil:
    return (n + by - 1) // by


cdef inline Py_ssize_t align_up(Py_ssize_t n, Py_ssize_t to) noexcept nogil:
    return ceil_div(n, to) * to


cdef inline char *arena_alloc(Arena *arena, Py_ssize_t size) noexcept nogil:
    cdef char *result = NULL if arena.base == NULL else arena.base + arena.used
    arena.used += align_up(size, ALIGNMENT)
    return result


cdef inline char *aligned(char *memory) noexcept nogil:
    """Return the first address from `memory` on that is a multiple of `ALIGNMENT`."""
    return memory + (ALIGNMENT - <uintptr_t>memory % ALIGNMENT) % ALIGNMENT


cdef void advise_huge_pages(char *memory, Py_ssize_t nbytes) noexcept nogil
cdef char *allocate(Py_ssize_t nbytes) noexcept nogil
cdef void release(char *memory, Py_ssize_t nbytes) noexcept nogil
cdef cnp.ndarray workspace(Py_ssize_t nbytes)
cdef int check_layout(Py_ssize_t used, cnp.ndarray memory) except -1
cpdef copy_into(cnp.ndarray to, cnp.ndarray source)
