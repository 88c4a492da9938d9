"""Whether arrays share memory: by what their strides reach where that decides, else by NumPy's search."""

import numpy as np
from numpy.exceptions import TooHardError

cimport numpy as cnp

from ascend_grad._memory cimport magnitude

cnp.import_array()

cdef enum:
    MAX_RANK = 64  # of NumPy's arrays


cdef bint extent_of(cnp.ndarray array, char **low, char **high) noexcept:
    """The first byte of an array, and the first one behind it; False where it has no elements."""
    cdef int axis
    cdef Py_ssize_t reach
    low[0] = cnp.PyArray_BYTES(array)
    high[0] = low[0] + cnp.PyArray_ITEMSIZE(array)
    for axis in range(cnp.PyArray_NDIM(array)):
        reach = (cnp.PyArray_DIMS(array)[axis] - 1) * cnp.PyArray_STRIDES(array)[axis]
        if cnp.PyArray_DIMS(array)[axis] == 0:
            return False
        if reach > 0:
            high[0] += reach
        else:
            low[0] += reach
    return True


cdef bint may_overlap(cnp.ndarray first, cnp.ndarray second) except -1:
    """Whether two arrays may share memory; exact for simple layouts, True where it is too costly to tell."""
    cdef char *low
    cdef char *high
    cdef char *other_low
    cdef char *other_high
    if not extent_of(first, &low, &high) or not extent_of(second, &other_low, &other_high):
        return False
    if high <= other_low or other_high <= low:
        return False
    try:
        return np.may_share_memory(first, second, max_work=1000)
    except RuntimeError as error:  # what NumPy makes of memory that it does not get here
        raise MemoryError(str(error)) from error


cdef bint is_same_memory(cnp.ndarray first, cnp.ndarray second) noexcept:
    """Whether two arrays are the same memory, element for element, seen as the same dtype."""
    cdef int axis, rank = cnp.PyArray_NDIM(first)
    if (
        cnp.PyArray_BYTES(first) != cnp.PyArray_BYTES(second) or cnp.PyArray_NDIM(second) != rank
        or cnp.PyArray_TYPE(first) != cnp.PyArray_TYPE(second)
        or cnp.PyArray_ISBYTESWAPPED(first) != cnp.PyArray_ISBYTESWAPPED(second)
    ):
        return False
    for axis in range(rank):
        if cnp.PyArray_DIMS(first)[axis] != cnp.PyArray_DIMS(second)[axis]:
            return False
        if cnp.PyArray_DIMS(first)[axis] > 1 and cnp.PyArray_STRIDES(first)[axis] != cnp.PyArray_STRIDES(second)[axis]:
            return False
    return True


cdef bint overlaps_partly(cnp.ndarray first, cnp.ndarray second) except -1:
    """Whether two arrays may share memory otherwise than element for element."""
    return not is_same_memory(first, second) and may_overlap(first, second)


cdef bint are_nested(cnp.ndarray array) noexcept:
    """Whether each axis steps over all that lies within, so that no two elements share memory."""
    cdef int[MAX_RANK] order
    cdef int axis, k, rank = 0
    cdef cnp.npy_intp *shape = cnp.PyArray_DIMS(array)
    cdef cnp.npy_intp *strides = cnp.PyArray_STRIDES(array)
    cdef Py_ssize_t extent = cnp.PyArray_ITEMSIZE(array)
    for axis in range(cnp.PyArray_NDIM(array)):
        if shape[axis] > 1:
            k = rank
            while k > 0 and magnitude(strides[order[k - 1]]) > magnitude(strides[axis]):
                order[k] = order[k - 1]
                k -= 1
            order[k] = axis
            rank += 1
    for k in range(rank):
        axis = order[k]
        if magnitude(strides[axis]) < extent:
            return False
        extent += (shape[axis] - 1) * magnitude(strides[axis])
    return True


cdef bint overlaps_itself(cnp.ndarray array) except -1:
    """Whether two elements of the array share memory."""
    if cnp.PyArray_IS_C_CONTIGUOUS(array) or cnp.PyArray_SIZE(array) <= 1 or are_nested(array):
        return False
    # Axes that interleave need an exact answer. Two elements that collide differ along some axis; moved along it
    # together, one of them has index 0 there.
    for axis in range(array.ndim):
        if array.shape[axis] > 1:
            before = (slice(None),) * axis
            try:
                if np.shares_memory(array[(*before, slice(0, 1))], array[(*before, slice(1, None))], max_work=10**6):
                    return True
            except TooHardError:
                return True  # no ordinary array is: refusing it is better than searching for minutes
    return False
