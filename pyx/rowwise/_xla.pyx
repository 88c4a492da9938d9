"""The row-wise operators as a function that XLA calls without the interpreter's lock, for `ascend_grad.jax`.

The attributes of a call are ``operator`` (its name), ``dim`` (counted from the end) and ``scale``. Its arguments are
the arrays of the public function, in order. They have the result's rank and are broadcast to its shape.
"""

from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport int64_t, uint32_t
from libc.string cimport memcmp, strlen

from ascend_grad._kernels cimport AG_BFLOAT16, AG_FLOAT16, AG_FLOAT32, AG_FLOAT64, ag_itemsize
from ascend_grad._rowwise_kernels cimport AG_ROW_OP_COUNT, ag_row_op, ag_row_ops
from ascend_grad._rowwise_plan cimport MAX_AXES, Problem, describe, has_b, has_mask
from ascend_grad._rowwise_schedule cimport solve
from ascend_grad._views cimport View, is_addressable
from ascend_grad.status cimport SUCCESS

cdef extern from "ascend_grad/xla/ffi.h" nogil:
    enum:
        AG_XLA_MAJOR
        AG_XLA_MINOR

    ctypedef struct ag_xla_error:
        pass

    ctypedef enum ag_xla_code:
        AG_XLA_INVALID_ARGUMENT
        AG_XLA_RESOURCE_EXHAUSTED

    ctypedef enum ag_xla_dtype:
        AG_XLA_PRED
        AG_XLA_S64
        AG_XLA_F16
        AG_XLA_F32
        AG_XLA_F64
        AG_XLA_BF16

    ctypedef enum ag_xla_extension_type:
        AG_XLA_METADATA

    ctypedef enum ag_xla_value_type:
        AG_XLA_BUFFER

    ctypedef enum ag_xla_attr:
        AG_XLA_SCALAR
        AG_XLA_STRING

    ctypedef struct ag_xla_extension:
        ag_xla_extension_type type
        ag_xla_extension *next

    ctypedef struct ag_xla_version:
        int major
        int minor

    ctypedef struct ag_xla_metadata:
        ag_xla_version version
        uint32_t traits

    ctypedef struct ag_xla_metadata_extension:
        ag_xla_metadata *metadata

    ctypedef struct ag_xla_error_args:
        size_t struct_size
        ag_xla_extension *extensions
        const char *message
        ag_xla_code code

    ctypedef struct ag_xla_api:
        ag_xla_error *(*create_error)(ag_xla_error_args *args) noexcept nogil

    ctypedef struct ag_xla_buffer:
        ag_xla_dtype dtype
        void *data
        int64_t rank
        const int64_t *dims

    ctypedef struct ag_xla_values:
        int64_t size
        const ag_xla_value_type *types
        void **values

    ctypedef struct ag_xla_span:
        const char *data
        size_t length

    ctypedef struct ag_xla_scalar:
        ag_xla_dtype dtype
        const void *value

    ctypedef struct ag_xla_attrs:
        int64_t size
        const ag_xla_attr *types
        const ag_xla_span **names
        void **values

    ctypedef struct ag_xla_call_frame:
        ag_xla_extension *extensions
        const ag_xla_api *api
        ag_xla_values args
        ag_xla_values results
        ag_xla_attrs attrs

cdef enum:
    # Numbers of dtypes that ag_dtype lacks: bool, and all dtypes that no operator takes.
    BOOL = -1
    OTHER = -2

cdef const char *SIGNATURE = b"ascend_grad: the arguments, results or attributes are not those of an operator"
cdef const char *SHAPES = b"ascend_grad: shapes and dtypes do not fit, or have more than 8 dimensions with those of vmap"
cdef const char *MEMORY = b"ascend_grad: no memory to work in"


# ---- the arguments and attributes of a call --------------------------------------------------------------------------


cdef int dtype_of(const ag_xla_buffer *buffer) noexcept nogil:
    if buffer.dtype == AG_XLA_F32:
        return AG_FLOAT32
    if buffer.dtype == AG_XLA_F16:
        return AG_FLOAT16
    if buffer.dtype == AG_XLA_BF16:
        return AG_BFLOAT16
    if buffer.dtype == AG_XLA_F64:
        return AG_FLOAT64
    return BOOL if buffer.dtype == AG_XLA_PRED else OTHER


cdef const ag_xla_buffer *buffer_of(const ag_xla_values *values, int i) noexcept nogil:
    return <const ag_xla_buffer *>values.values[i] if values.types[i] == AG_XLA_BUFFER else NULL


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


cdef int operator_of(const ag_xla_attrs *attrs) noexcept nogil:
    """Return the number of the operator, or `AG_ROW_OP_COUNT` if there is none of that name."""
    cdef const ag_xla_span *name = <const ag_xla_span *>attribute(attrs, "operator", AG_XLA_STRING)
    cdef int op
    for op in range(<int>AG_ROW_OP_COUNT):
        if name != NULL and is_text(name, ag_row_ops[op].name):
            return op
    return AG_ROW_OP_COUNT


cdef bint broadcast(
    View *view, Py_ssize_t *strides, const ag_xla_buffer *buffer, const View *out, int dtype
) noexcept nogil:
    """Fill in a view of a buffer, broadcast to the result's shape; return False if dtype or shape do not fit."""
    cdef Py_ssize_t step
    cdef int axis
    if buffer == NULL or dtype_of(buffer) != dtype or buffer.rank != out.ndim:
        return False
    view[0] = out[0]
    view.data, view.strides, view.dtype = <char *>buffer.data, strides, dtype
    view.itemsize = step = 1 if dtype == BOOL else ag_itemsize[dtype]
    for axis in range(out.ndim - 1, -1, -1):
        if buffer.dims[axis] != out.shape[axis] and buffer.dims[axis] != 1:
            return False
        strides[axis] = step if buffer.dims[axis] == out.shape[axis] else 0
        step *= buffer.dims[axis]  # overflows only for sizes that is_addressable refuses
    return is_addressable(view)


# ---- the function ----------------------------------------------------------------------------------------------------


cdef ag_xla_error *failed(const ag_xla_call_frame *frame, ag_xla_code code, const char *message) noexcept nogil:
    cdef ag_xla_error_args args
    args.struct_size, args.extensions, args.message, args.code = sizeof(args), NULL, message, code
    return frame.api.create_error(&args)


cdef ag_xla_error *compute(ag_xla_call_frame *frame) noexcept nogil:
    cdef const int64_t *dim = <const int64_t *>number(&frame.attrs, "dim", AG_XLA_S64)
    cdef const double *scale = <const double *>number(&frame.attrs, "scale", AG_XLA_F64)
    cdef int op = operator_of(&frame.attrs), axis, dtype, i = 0
    cdef const ag_xla_buffer *result
    cdef Py_ssize_t[MAX_AXES] shape, a_strides, b_strides, mask_strides, out_strides
    cdef View a, b, mask, out
    cdef Problem p
    cdef bint fits
    if op == <int>AG_ROW_OP_COUNT or dim == NULL or scale == NULL or frame.results.size != 1:
        return failed(frame, AG_XLA_INVALID_ARGUMENT, SIGNATURE)
    result = buffer_of(&frame.results, 0)
    if result == NULL or frame.args.size != 1 + has_b(<ag_row_op>op) + has_mask(<ag_row_op>op):
        return failed(frame, AG_XLA_INVALID_ARGUMENT, SIGNATURE)
    dtype = dtype_of(result)
    if dtype < 0 or result.rank > MAX_AXES or not -result.rank <= dim[0] < 0:
        return failed(frame, AG_XLA_INVALID_ARGUMENT, SHAPES)
    for axis in range(<int>result.rank):
        shape[axis] = result.dims[axis]
    out.ndim, out.shape, out.swapped = <int>result.rank, shape, False
    if not broadcast(&out, out_strides, result, &out, dtype) or not broadcast(
        &a, a_strides, buffer_of(&frame.args, 0), &out, dtype
    ):
        return failed(frame, AG_XLA_INVALID_ARGUMENT, SHAPES)
    b = mask = a
    fits = True
    if has_b(<ag_row_op>op):
        i += 1
        fits = broadcast(&b, b_strides, buffer_of(&frame.args, i), &out, dtype)
    if fits and has_mask(<ag_row_op>op):
        i += 1
        fits = broadcast(&mask, mask_strides, buffer_of(&frame.args, i), &out, BOOL)
    if not fits:
        return failed(frame, AG_XLA_INVALID_ARGUMENT, SHAPES)
    if describe(&p, <ag_row_op>op, &a, &b, &mask, &out, out.ndim + <int>dim[0], scale[0]):
        if solve(&p, 0) != SUCCESS:
            return failed(frame, AG_XLA_RESOURCE_EXHAUSTED, MEMORY)
    return NULL


cdef ag_xla_error *call(ag_xla_call_frame *frame) noexcept nogil:
    """Compute an operator for XLA, or tell XLA the version of its interface that this function uses, for its check."""
    cdef ag_xla_extension *extension = frame.extensions
    cdef ag_xla_metadata *metadata
    while extension != NULL:
        if extension.type == AG_XLA_METADATA:
            metadata = (<ag_xla_metadata_extension *>extension).metadata
            metadata.version.major, metadata.version.minor, metadata.traits = AG_XLA_MAJOR, AG_XLA_MINOR, 0
            return NULL
        extension = extension.next
    return compute(frame)


def handler():
    """Return the function as a capsule, for ``jax.ffi.register_ffi_target``."""
    return PyCapsule_New(<void *>call, NULL, NULL)
