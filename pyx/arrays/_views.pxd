cimport numpy as cnp

from ascend_grad._kernels cimport ag_dim, ag_variant


ctypedef struct View:
    # A strided array without a Python object. Shape and strides are stored by the array that was viewed.
    char *data
    int ndim
    const Py_ssize_t *shape
    const Py_ssize_t *strides         # bytes
    int itemsize
    int dtype                         # an ag_dtype, or -1 for any other dtype
    bint swapped


cdef inline View matrix_view(
    const void *data, const Py_ssize_t *shape, const Py_ssize_t *strides, int itemsize, int dtype
) noexcept nogil:
    """Return the view of a typed memoryview of two dimensions."""
    cdef View view
    view.data, view.ndim, view.shape, view.strides = <char *>data, 2, shape, strides
    view.itemsize, view.dtype, view.swapped = itemsize, dtype, False
    return view


cdef View view_of(cnp.ndarray array) noexcept
cdef Py_ssize_t size_of(const View *view) noexcept nogil
cdef bint is_addressable(const View *view) noexcept nogil
cdef void copy_3d(
    ag_variant variant, char *to, const char *source, ag_dim x, ag_dim y, ag_dim z, int itemsize, bint swapped
) noexcept nogil
