"""Views: address, shape and strides of NumPy arrays and typed memoryviews, for code without Python."""

from libc.stdint cimport UINTPTR_MAX, uintptr_t
from libc.string cimport memset

cimport numpy as cnp

from ascend_grad._dtypes cimport dtype_of
from ascend_grad._kernels cimport ag_copy_3d, ag_dim, ag_variant

cnp.import_array()

cdef extern from "Python.h":
    size_t PY_SSIZE_T_MAX


cdef View view_of(cnp.ndarray array) noexcept:
    """Return the view of an array; that of None has no data."""
    cdef View view
    if array is None:
        memset(&view, 0, sizeof(view))
        return view
    view.data = cnp.PyArray_BYTES(array)
    view.ndim = cnp.PyArray_NDIM(array)
    view.shape = <const Py_ssize_t *>cnp.PyArray_DIMS(array)
    view.strides = <const Py_ssize_t *>cnp.PyArray_STRIDES(array)
    view.itemsize = <int>cnp.PyArray_ITEMSIZE(array)
    view.dtype = dtype_of(array)
    view.swapped = cnp.PyArray_ISBYTESWAPPED(array)
    return view


cdef Py_ssize_t size_of(const View *view) noexcept nogil:
    """Return the number of elements."""
    cdef Py_ssize_t size = 1
    cdef int axis
    for axis in range(view.ndim):
        size *= view.shape[axis]
    return size


cdef bint is_addressable(const View *view) noexcept nogil:
    """Return whether all elements lie within the address space, and their bytes, gaps included, are less than 2**63.

    Then no product of sizes and strides overflows. Strides of dimensions of length 1, and of empty arrays, are ignored.
    """
    cdef size_t most = PY_SSIZE_T_MAX, size = view.itemsize, reach = view.itemsize, below = 0, step, length
    cdef uintptr_t address = <uintptr_t>view.data
    cdef bint is_empty = False
    cdef int axis
    for axis in range(view.ndim):
        if view.shape[axis] < 0:
            return False
        length = max(view.shape[axis], 1)
        if length > most // size:
            return False
        size *= length
        is_empty = is_empty or view.shape[axis] == 0
    if is_empty:
        return True
    for axis in range(view.ndim):
        if view.shape[axis] == 1:
            continue
        length = view.shape[axis] - 1
        # The stride is negated as unsigned, as the least Py_ssize_t has no negative.
        step = -<size_t>view.strides[axis] if view.strides[axis] < 0 else <size_t>view.strides[axis]
        if step > (most - reach) // length:
            return False
        reach += length * step
        if view.strides[axis] < 0:
            below += length * step
    return below <= address and reach - below <= UINTPTR_MAX - address


cdef void copy_3d(
    ag_variant variant, char *to, const char *source, ag_dim x, ag_dim y, ag_dim z, int itemsize, bint swapped
) noexcept nogil:
    """Copy a block of three dimensions, given in any order. Modules share this copy of the function in strided.h."""
    ag_copy_3d(variant, to, source, x, y, z, itemsize, swapped)
