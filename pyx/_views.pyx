"""Arrays as C sees them: what NumPy's arrays and typed memoryviews have in common."""

cimport numpy as cnp

from ascend_grad._dtypes cimport dtype_of

cnp.import_array()


cdef View view_of(cnp.ndarray array) noexcept:
    cdef View view
    view.data = cnp.PyArray_BYTES(array)
    view.ndim = cnp.PyArray_NDIM(array)
    view.shape = <const Py_ssize_t *>cnp.PyArray_DIMS(array)
    view.strides = <const Py_ssize_t *>cnp.PyArray_STRIDES(array)
    view.itemsize = <int>cnp.PyArray_ITEMSIZE(array)
    view.dtype = dtype_of(array)
    view.swapped = cnp.PyArray_ISBYTESWAPPED(array)
    return view


cdef Py_ssize_t size_of(const View *view) noexcept nogil:
    """Elements."""
    cdef Py_ssize_t size = 1
    cdef int axis
    for axis in range(view.ndim):
        size *= view.shape[axis]
    return size
