"""Calls of XLA, as it hands them over: buffers, attributes, errors, and the question for the version of its interface."""

from libc.string cimport memcmp, strlen

from ascend_grad._kernels cimport AG_BFLOAT16, AG_FLOAT16, AG_FLOAT32, AG_FLOAT64, ag_itemsize
from ascend_grad._memory cimport advise_huge_pages
from ascend_grad._views cimport is_addressable

cdef const char *SIGNATURE = b"ascend_grad: the arguments, results or attributes match no operator"
cdef const char *SHAPES = b"ascend_grad: shapes or dtypes do not match, or arrays have more than 8 dimensions, counting the dimensions of vmap"
cdef const char *MEMORY = b"ascend_grad: out of memory"


# ---- buffers ---------------------------------------------------------------------------------------------------------

cdef int dtype_of(const ag_xla_buffer *buffer) noexcept nogil:
    if buffer.dtype == AG_XLA_F32:
        return AG_FLOAT32
    if buffer.dtype == AG_XLA_F16:
        return AG_FLOAT16
    if buffer.dtype == AG_XLA_BF16:
        return AG_BFLOAT16
    if buffer.dtype == AG_XLA_F64:
        return AG_FLOAT64
    if buffer.dtype == AG_XLA_S32:
        return INT32
    if buffer.dtype == AG_XLA_S64:
        return INT64
    return BOOL if buffer.dtype == AG_XLA_PRED else OTHER


cdef const ag_xla_buffer *buffer_of(const ag_xla_values *values, int64_t i) noexcept nogil:
    return <const ag_xla_buffer *>values.values[i] if values.types[i] == AG_XLA_BUFFER else NULL


cdef bint describe_buffer(BufferView *to, const ag_xla_buffer *buffer) noexcept nogil:
    """View a buffer of a floating dtype; return False if there is none, or if its elements have no addresses."""
    cdef int axis
    cdef Py_ssize_t step
    if buffer == NULL or dtype_of(buffer) < 0 or not 0 <= buffer.rank <= MAX_RANK:
        return False
    to.view.data, to.view.ndim, to.view.dtype = <char *>buffer.data, <int>buffer.rank, dtype_of(buffer)
    to.view.shape, to.view.strides, to.view.swapped = to.shape, to.strides, False
    to.view.itemsize = step = ag_itemsize[to.view.dtype]
    for axis in range(to.view.ndim - 1, -1, -1):
        to.shape[axis], to.strides[axis] = buffer.dims[axis], step
        step *= buffer.dims[axis]  # overflows only for sizes that is_addressable refuses
    return is_addressable(&to.view)


cdef void advise_results(const ag_xla_call_frame *frame) noexcept nogil:
    """Advise huge pages for large results, which XLA allocates without: their first touch then takes less time."""
    cdef BufferView result
    cdef Py_ssize_t nbytes
    cdef int64_t i
    cdef int axis
    for i in range(frame.results.size):
        if describe_buffer(&result, buffer_of(&frame.results, i)):
            nbytes = result.view.itemsize
            for axis in range(result.view.ndim):
                nbytes *= result.shape[axis]
            advise_huge_pages(result.view.data, nbytes)


# ---- attributes ------------------------------------------------------------------------------------------------------

cdef bint is_text(const ag_xla_span *span, const char *text) noexcept nogil:
    return span.length == strlen(text) and memcmp(span.data, text, span.length) == 0


cdef const void *attribute(const ag_xla_attrs *attrs, const char *name, ag_xla_attr kind) noexcept nogil:
    """Return the value of an attribute of this kind, or NULL if there is none."""
    cdef int64_t i
    for i in range(attrs.size):
        if is_text(attrs.names[i], name):
            return attrs.values[i] if attrs.types[i] == kind else NULL
    return NULL


cdef const void *number(const ag_xla_attrs *attrs, const char *name, ag_xla_dtype dtype) noexcept nogil:
    cdef const ag_xla_scalar *scalar = <const ag_xla_scalar *>attribute(attrs, name, AG_XLA_SCALAR)
    return scalar.value if scalar != NULL and scalar.dtype == dtype else NULL


cdef const ag_xla_span *text(const ag_xla_attrs *attrs, const char *name) noexcept nogil:
    return <const ag_xla_span *>attribute(attrs, name, AG_XLA_STRING)


cdef const int64_t *integer(const ag_xla_attrs *attrs, const char *name) noexcept nogil:
    return <const int64_t *>number(attrs, name, AG_XLA_S64)


cdef const double *real(const ag_xla_attrs *attrs, const char *name) noexcept nogil:
    return <const double *>number(attrs, name, AG_XLA_F64)


# ---- answers ---------------------------------------------------------------------------------------------------------

cdef ag_xla_error *failed(const ag_xla_call_frame *frame, ag_xla_code code, const char *message) noexcept nogil:
    cdef ag_xla_error_args args
    args.struct_size, args.extensions, args.message, args.code = sizeof(args), NULL, message, code
    return frame.api.create_error(&args)


cdef bint is_question(ag_xla_call_frame *frame) noexcept nogil:
    """Return whether XLA asks which version of its interface a function was made for; the answer is in the frame."""
    cdef ag_xla_extension *extension = frame.extensions
    cdef ag_xla_metadata *metadata
    while extension != NULL:
        if extension.type == AG_XLA_METADATA:
            metadata = (<ag_xla_metadata_extension *>extension).metadata
            metadata.version.major, metadata.version.minor, metadata.traits = AG_XLA_MAJOR, AG_XLA_MINOR, 0
            return True
        extension = extension.next
    return False
