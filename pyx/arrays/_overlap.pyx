"""Tests whether arrays share memory: by their strides if these decide, else by NumPy's search.

The functions on views are for callers without Python. They do not search: in doubt they say that memory is shared.
"""

import numpy as np
from numpy.exceptions import TooHardError

cimport numpy as cnp

from ascend_grad._memory cimport MAX_RANK, magnitude
from ascend_grad._views cimport View, size_of, view_of

cnp.import_array()


cdef bint extent_of(const View *view, char **low, char **high) noexcept nogil:
    """Set the address of an array's first byte and the end of its last byte; return False if it has no elements."""
    cdef int axis
    cdef Py_ssize_t reach
    low[0] = view.data
    high[0] = low[0] + view.itemsize
    for axis in range(view.ndim):
        reach = (view.shape[axis] - 1) * view.strides[axis]
        if view.shape[axis] == 0:
            return False
        if reach > 0:
            high[0] += reach
        else:
            low[0] += reach
    return True


cdef Py_ssize_t gcd(Py_ssize_t a, Py_ssize_t b) noexcept nogil:
    while b:
        a, b = b, a % b
    return a


cdef void strides_of(const View *view, Py_ssize_t *largest, Py_ssize_t *common) noexcept nogil:
    """Set the largest stride, and the greatest common divisor of all; both are 0 if no axis has two elements."""
    cdef int axis
    largest[0] = common[0] = 0
    for axis in range(view.ndim):
        if view.shape[axis] > 1:
            largest[0] = max(largest[0], magnitude(view.strides[axis]))
            common[0] = gcd(magnitude(view.strides[axis]), common[0])


cdef Py_ssize_t span_of(const View *view, Py_ssize_t modulus, char **low) noexcept nogil:
    """Return the length of an interval from `low` on that has all bytes' addresses modulo `modulus`, and set `low`."""
    cdef Py_ssize_t length = view.itemsize, reach
    cdef int axis
    low[0] = view.data
    for axis in range(view.ndim):
        if view.strides[axis] % modulus:
            reach = (view.shape[axis] - 1) * view.strides[axis]
            length += magnitude(reach)
            low[0] += min(reach, 0)
    return length


cdef bint are_disjoint_modulo(const View *first, const View *second, Py_ssize_t modulus) noexcept nogil:
    cdef char *low
    cdef char *other_low
    cdef Py_ssize_t length, other_length, distance
    if modulus == 0:
        return False
    length, other_length = span_of(first, modulus, &low), span_of(second, modulus, &other_low)
    distance = (other_low - low) % modulus
    if distance < 0:
        distance += modulus
    return length <= distance and other_length <= modulus - distance


cdef bint may_share_memory(const View *first, const View *second) noexcept nogil:
    """Return whether two arrays may share memory.

    The answer is exact if one array follows the other in memory, or uses other columns of the same rows.
    """
    cdef char *low
    cdef char *high
    cdef char *other_low
    cdef char *other_high
    cdef Py_ssize_t largest, common, other_largest, other_common
    if not extent_of(first, &low, &high) or not extent_of(second, &other_low, &other_high):
        return False
    if high <= other_low or other_high <= low:
        return False
    strides_of(first, &largest, &common)
    strides_of(second, &other_largest, &other_common)
    return not (
        are_disjoint_modulo(first, second, gcd(largest, other_largest))
        or are_disjoint_modulo(first, second, gcd(common, other_common))
    )


cdef bint may_overlap(cnp.ndarray first, cnp.ndarray second) except -1:
    """Return whether two arrays may share memory: exactly for simple layouts, or True if a search takes too long."""
    cdef View view = view_of(first), other = view_of(second)
    if not may_share_memory(&view, &other):
        return False
    try:
        return np.may_share_memory(first, second, max_work=1000)
    except RuntimeError as error:  # raised by NumPy if it fails to allocate memory
        raise MemoryError(str(error)) from error


cdef bint is_same_memory(const View *first, const View *second) noexcept nogil:
    """Return whether two arrays have the same elements in the same memory, with the same dtype."""
    cdef int axis
    if (
        first.data != second.data or first.ndim != second.ndim or first.dtype != second.dtype
        or first.itemsize != second.itemsize or first.swapped != second.swapped
    ):
        return False
    for axis in range(first.ndim):
        if first.shape[axis] != second.shape[axis]:
            return False
        if first.shape[axis] > 1 and first.strides[axis] != second.strides[axis]:
            return False
    return True


cdef bint overlaps_partly(cnp.ndarray first, cnp.ndarray second) except -1:
    """Return whether two arrays may share memory, unless they have the same elements in the same memory.

    The first array has a floating dtype.
    """
    cdef View view = view_of(first), other = view_of(second)
    return not is_same_memory(&view, &other) and may_overlap(first, second)


cdef bint are_nested(const View *view) noexcept nogil:
    """Return whether each stride is at least the extent of the smaller ones, so that no two elements share memory."""
    cdef int[MAX_RANK] order
    cdef int axis, k, rank = 0
    cdef Py_ssize_t extent = view.itemsize
    for axis in range(view.ndim):
        if view.shape[axis] > 1:
            k = rank
            while k > 0 and magnitude(view.strides[order[k - 1]]) > magnitude(view.strides[axis]):
                order[k] = order[k - 1]
                k -= 1
            order[k] = axis
            rank += 1
    for k in range(rank):
        axis = order[k]
        if magnitude(view.strides[axis]) < extent:
            return False
        extent += (view.shape[axis] - 1) * magnitude(view.strides[axis])
    return True


cdef bint overlaps_itself(cnp.ndarray array) except -1:
    """Return whether two elements of the array share memory."""
    cdef View view = view_of(array)
    if cnp.PyArray_IS_C_CONTIGUOUS(array) or size_of(&view) <= 1 or are_nested(&view):
        return False
    # Interleaved axes need NumPy's exact search. Two elements that share memory differ in their index along some axis.
    # If both are moved along that axis, they still share memory, and one of them can have index 0 there.
    for axis in range(array.ndim):
        if array.shape[axis] > 1:
            before = (slice(None),) * axis
            try:
                if np.shares_memory(array[(*before, slice(0, 1))], array[(*before, slice(1, None))], max_work=10**6):
                    return True
            except TooHardError:
                return True  # ordinary arrays are decided at once; others are refused, as a search would take minutes
    return False
