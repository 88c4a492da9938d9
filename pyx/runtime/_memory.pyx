"""Memory of results and workspaces. Large arrays use huge pages, so that their first touch takes less time.

Below `HUGE_THRESHOLD` bytes the C library recycles freed memory, which is cheaper than any new mapping. Every larger
allocation would be a new mapping anyway. Here it is aligned to 2 MB with huge pages advised, and unmapped when the
array is freed.
"""

import numpy as np

from libc.stdint cimport uintptr_t
from libc.stdlib cimport free
from libc.string cimport memset

cimport cython
cimport numpy as cnp

from ascend_grad cimport _tasks
from ascend_grad._kernels cimport ag_copy_block

cnp.import_array()

cdef extern from "<sys/mman.h>" nogil:
    void *mmap(void *address, size_t length, int protection, int flags, int fd, long offset)
    int munmap(void *address, size_t length)
    int madvise(void *address, size_t length, int advice)
    enum:
        PROT_READ
        PROT_WRITE
        MAP_PRIVATE
        MAP_ANONYMOUS
    void *MAP_FAILED

cdef extern from *:
    """
    #ifndef MADV_HUGEPAGE
    #define MADV_HUGEPAGE (-1) /* madvise fails with this value, and the mapping has ordinary pages */
    #endif
    """
    enum:
        MADV_HUGEPAGE

cdef extern from "<stdlib.h>" nogil:
    void *aligned_alloc(size_t alignment, size_t size)

cdef extern from "numpy/arrayobject.h":
    object PyArray_NewFromDescr(
        type subtype, cnp.dtype descr, int nd, const cnp.npy_intp *dims, const cnp.npy_intp *strides, void *data,
        int flags, object obj
    )
    int PyArray_SetBaseObject(cnp.ndarray arr, object base) except -1

from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF

cdef extern from "Python.h":
    Py_ssize_t Py_REFCNT(PyObject *)  # takes a pointer, as passing an object would add a reference

cdef cnp.dtype _uint8 = np.dtype(np.uint8)
# Bytes of a huge page on x86-64, and on aarch64 with pages of 4 KiB. With pages of 16 or 64 KiB, whose huge pages are
# larger, the mapping has ordinary pages.
cdef size_t HUGE_PAGE = 2 << 20
HUGE_THRESHOLD = 32 << 20
cdef size_t _threshold = HUGE_THRESHOLD
#: Most bytes of a workspace that is cached for the next call.
cdef Py_ssize_t MAX_CACHED_BYTES = 16 << 20
cdef cnp.ndarray _cached = None
cdef object _cache_lock = object()


cdef size_t huge_pages(size_t nbytes) noexcept nogil:
    """Return the bytes of the huge pages that hold these bytes, or 0 for more than there are."""
    cdef size_t length = (nbytes + HUGE_PAGE - 1) // HUGE_PAGE * HUGE_PAGE
    return 0 if length < nbytes else length


cdef void *map_huge_pages(size_t length) noexcept nogil:
    """Return an anonymous mapping of huge pages, aligned to one, or NULL."""
    cdef char *start = <char *>mmap(
        NULL, length + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0
    )
    if start == MAP_FAILED:
        return NULL
    # Unmap the parts before and after the aligned range.
    cdef size_t before = (HUGE_PAGE - <uintptr_t>start % HUGE_PAGE) % HUGE_PAGE
    if before:
        munmap(start, before)
    if before < HUGE_PAGE:
        munmap(start + before + length, HUGE_PAGE - before)
    madvise(start + before, length, MADV_HUGEPAGE)
    return start + before


cdef void advise_huge_pages(char *memory, Py_ssize_t nbytes) noexcept nogil:
    """Advise huge pages for memory of `HUGE_THRESHOLD` bytes and more that somebody else has allocated."""
    if <size_t>nbytes < _threshold:
        return
    # Advise whole huge pages only, so that no other memory is meant.
    cdef size_t before = (HUGE_PAGE - <uintptr_t>memory % HUGE_PAGE) % HUGE_PAGE
    if <size_t>nbytes > before:
        madvise(memory + before, (<size_t>nbytes - before) // HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE)


cdef char *allocate(Py_ssize_t nbytes) noexcept nogil:
    """Return memory at an aligned address, or NULL, for callers without the interpreter's lock, which `release` it."""
    if <size_t>nbytes >= _threshold:
        return <char *>map_huge_pages(huge_pages(nbytes))
    return <char *>aligned_alloc(ALIGNMENT, align_up(max(nbytes, <Py_ssize_t>1), ALIGNMENT))


cdef void release(char *memory, Py_ssize_t nbytes) noexcept nogil:
    """Free what `allocate` returned for this number of bytes."""
    if <size_t>nbytes >= _threshold:
        munmap(memory, huge_pages(nbytes))
    else:
        free(memory)


cdef class Mapping:
    """An anonymous mapping, aligned to a huge page, and unmapped with the last array that refers to it."""

    cdef void *address
    cdef size_t length

    def __cinit__(self, size_t nbytes):
        self.length = huge_pages(nbytes)
        self.address = map_huge_pages(self.length) if self.length else NULL
        if self.address == NULL:
            raise MemoryError(f"cannot allocate {nbytes} bytes for a result")

    def __dealloc__(self):
        if self.address != NULL:
            munmap(self.address, self.length)


cdef cnp.ndarray array_over(
    int ndim, const cnp.npy_intp *shape, cnp.dtype dtype, void *data, object owner, const cnp.npy_intp *strides
):
    """Return an array over memory that its owner keeps alive, which becomes the array's base.

    It has these strides, or is C-contiguous for NULL.
    """
    Py_INCREF(dtype)  # the next calls steal this reference, and the owner's below
    cdef cnp.ndarray result = PyArray_NewFromDescr(
        cnp.ndarray, dtype, ndim, shape, strides, data, cnp.NPY_ARRAY_CARRAY, None
    )
    Py_INCREF(owner)
    PyArray_SetBaseObject(result, owner)
    return result


cdef cnp.ndarray empty(int ndim, const cnp.npy_intp *shape, cnp.dtype dtype):
    """Return a new C-contiguous array."""
    return empty_strided(ndim, shape, dtype, NULL)


cdef cnp.ndarray empty_strided(int ndim, const cnp.npy_intp *shape, cnp.dtype dtype, const cnp.npy_intp *strides):
    """Return a new array with these strides, which leave no gaps, or a C-contiguous one for NULL."""
    cdef Py_ssize_t nbytes = dtype.itemsize
    cdef Mapping mapping
    cdef int axis
    for axis in range(ndim):
        if shape[axis] == 0:  # no memory is needed, however long the other axes are
            nbytes = 0
    for axis in range(ndim):
        if shape[axis] and nbytes > SIZE_LIMIT // shape[axis]:
            raise MemoryError(f"cannot allocate a result of shape {tuple([shape[axis] for axis in range(ndim)])}")
        nbytes *= shape[axis]
    if <size_t>nbytes >= _threshold:
        mapping = Mapping(nbytes)
        return array_over(ndim, shape, dtype, mapping.address, mapping, strides)
    Py_INCREF(dtype)  # the next call steals this reference
    return PyArray_NewFromDescr(cnp.ndarray, dtype, ndim, shape, strides, NULL, 0, None)


cdef cnp.ndarray empty_in_order(cnp.ndarray prototype, cnp.dtype dtype):
    """Return a new array in the axis order of a dense prototype, or else in C order."""
    cdef cnp.npy_intp[MAX_RANK] strides
    cdef bint is_other = not cnp.PyArray_IS_C_CONTIGUOUS(prototype) and set_order(prototype, dtype.itemsize, strides)
    return empty_strided(
        cnp.PyArray_NDIM(prototype), cnp.PyArray_DIMS(prototype), dtype, strides if is_other else NULL
    )


cdef bint set_order(cnp.ndarray prototype, Py_ssize_t itemsize, cnp.npy_intp *strides) noexcept:
    """Set the strides of a new array in the axis order of a dense prototype; return False if that is C order.

    An array is dense if it has neither gaps nor repeated elements; others count as arrays in C order. The strides
    follow NumPy's order "K": all axes run forwards.
    """
    cdef int[MAX_RANK] order  # axes from the slowest to the fastest
    cdef int rank = cnp.PyArray_NDIM(prototype), axis, i
    cdef Py_ssize_t size = 1
    if cnp.PyArray_IS_C_CONTIGUOUS(prototype):
        return False
    if cnp.PyArray_IS_F_CONTIGUOUS(prototype):  # strides of axes of length 1 then mean nothing
        for axis in range(rank):
            order[rank - 1 - axis] = axis
    else:
        sort_axes(prototype, order)
    for i in range(rank - 1, -1, -1):
        axis = order[i]
        if cnp.PyArray_DIM(prototype, axis) != 1 and (
            magnitude(cnp.PyArray_STRIDE(prototype, axis)) != size * cnp.PyArray_ITEMSIZE(prototype)
        ):
            return False
        strides[axis] = size * itemsize
        size *= cnp.PyArray_DIM(prototype, axis)
    return True


cdef void sort_axes(cnp.ndarray array, int *order) noexcept:
    """Sort the axes by stride, the smallest last. Axes with equal strides stay in order, as in NumPy's order "K"."""
    cdef int rank = cnp.PyArray_NDIM(array), axis, k
    for axis in range(rank):
        k = axis
        while k > 0 and magnitude(cnp.PyArray_STRIDE(array, order[k - 1])) < magnitude(cnp.PyArray_STRIDE(array, axis)):
            order[k] = order[k - 1]
            k -= 1
        order[k] = axis


cdef bint is_aligned(cnp.ndarray array) noexcept:
    return <uintptr_t>cnp.PyArray_DATA(array) % ALIGNMENT == 0


cdef cnp.ndarray empty_aligned(int ndim, const cnp.npy_intp *shape, cnp.dtype dtype):
    """Return a new C-contiguous array that begins at a multiple of `ALIGNMENT`."""
    cdef cnp.ndarray result = empty(ndim, shape, dtype), memory
    cdef cnp.npy_intp nbytes = cnp.PyArray_NBYTES(result) + ALIGNMENT
    if is_aligned(result):
        return result
    memory = empty(1, &nbytes, _uint8)
    return array_over(ndim, shape, dtype, aligned(cnp.PyArray_BYTES(memory)), memory, NULL)


cdef cnp.ndarray at_aligned_address(cnp.ndarray array):
    """Return the array if it begins at a multiple of `ALIGNMENT`, else a copy that does."""
    if is_aligned(array):
        return array
    result = empty_aligned(cnp.PyArray_NDIM(array), cnp.PyArray_DIMS(array), array.dtype)
    copy_into(result, array)
    return result


cdef cnp.ndarray empty_like(cnp.ndarray prototype, cnp.dtype dtype):
    """Return a new C-contiguous array of the prototype's shape."""
    return empty(cnp.PyArray_NDIM(prototype), cnp.PyArray_DIMS(prototype), dtype)


cdef cnp.ndarray zeros(cnp.npy_intp n, cnp.dtype dtype):
    """Return a new vector of zeros."""
    cdef cnp.ndarray result = empty(1, &n, dtype)
    if <size_t>cnp.PyArray_NBYTES(result) < _threshold:  # a larger array is a new mapping, which has zeros
        memset(cnp.PyArray_DATA(result), 0, cnp.PyArray_NBYTES(result))
    return result


cdef cnp.ndarray workspace(Py_ssize_t nbytes):
    """Return memory of at least `nbytes` bytes for a workspace.

    A workspace of up to MAX_CACHED_BYTES is kept for later calls, as mapping and unmapping pages takes as long as a
    small problem. It is reused if no other call is using it.
    """
    global _cached
    cdef cnp.npy_intp size = nbytes
    cdef cnp.ndarray result = None
    # The section keeps two threads of free-threaded Python from taking the same memory. With a GIL it costs nothing.
    with cython.critical_section(_cache_lock):
        if _cached is not None and Py_REFCNT(<PyObject *>_cached) == 1 and cnp.PyArray_SIZE(_cached) >= nbytes:
            result = _cached
    if result is not None:
        return result
    result = empty(1, &size, _uint8)
    if nbytes <= MAX_CACHED_BYTES:
        with cython.critical_section(_cache_lock):
            if _cached is None or cnp.PyArray_SIZE(_cached) < nbytes:
                _cached = result
    return result


cdef int check_layout(Py_ssize_t used, cnp.ndarray memory) except -1:
    """Check that a layout used no more bytes than were measured, as its buffers would exceed the workspace."""
    if used > cnp.PyArray_SIZE(memory):
        raise RuntimeError(f"a workspace of {cnp.PyArray_SIZE(memory)} bytes was laid out in {used}")
    return 0


cpdef copy_into(cnp.ndarray to, cnp.ndarray source):
    """Copy an array of at most 32 dimensions to one of the same shape and dtype, but maybe another byte order.

    Nothing is allocated, and signals are checked.
    """
    cdef int rank = cnp.PyArray_NDIM(to), axis, i, itemsize = <int>cnp.PyArray_ITEMSIZE(to)
    cdef bint swapped = cnp.PyArray_ISBYTESWAPPED(to) != cnp.PyArray_ISBYTESWAPPED(source)
    cdef int[32] order
    cdef cnp.npy_intp[34] length, to_stride, from_stride, at
    cdef char *target = cnp.PyArray_BYTES(to)
    cdef const char *place = cnp.PyArray_BYTES(source)
    cdef Py_ssize_t begin, rows
    cdef double last = 0
    if not cnp.PyArray_SIZE(to):
        return
    sort_axes(to, order)  # the last two axes make a block
    length[0] = length[1] = 1
    to_stride[0] = to_stride[1] = from_stride[0] = from_stride[1] = 0
    for i in range(rank):
        axis = order[i]
        length[i + 2], at[i + 2] = cnp.PyArray_DIM(to, axis), 0
        to_stride[i + 2], from_stride[i + 2] = cnp.PyArray_STRIDE(to, axis), cnp.PyArray_STRIDE(source, axis)
    rank += 2
    rows = max(1, (1 << 18) // length[rank - 1])
    while True:
        begin = 0
        while begin < length[rank - 2]:  # not a loop over range(), as a range with a step would be allocated
            with nogil:
                ag_copy_block(
                    target + begin * to_stride[rank - 2], to_stride[rank - 2], to_stride[rank - 1],
                    place + begin * from_stride[rank - 2], from_stride[rank - 2], from_stride[rank - 1],
                    min(rows, length[rank - 2] - begin), length[rank - 1], itemsize, swapped
                )
            _tasks.check_signals(&last)
            begin += rows
        axis = rank - 3
        while axis >= 2:
            at[axis] += 1
            target += to_stride[axis]
            place += from_stride[axis]
            if at[axis] < length[axis]:
                break
            target -= length[axis] * to_stride[axis]
            place -= length[axis] * from_stride[axis]
            at[axis] = 0
            axis -= 1
        if axis < 2:
            return
