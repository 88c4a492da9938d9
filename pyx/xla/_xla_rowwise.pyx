"""The row-wise operators as a function that XLA calls without the interpreter's lock, for `ascend_grad.jax`.

The attributes of a call are ``operator`` (its name), ``axis`` (counted from the end) and ``scale``. Its arguments are
the arrays of the public function, in order. They have the result's rank and are broadcast to its shape.
"""

from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport int64_t

from ascend_grad._kernels cimport ag_itemsize
from ascend_grad._rowwise_kernels cimport AG_ROW_OP_COUNT, ag_row_op, ag_row_ops
from ascend_grad._rowwise_plan cimport MAX_AXES, Problem, describe, has_b, has_mask
from ascend_grad._rowwise_schedule cimport solve
from ascend_grad._views cimport View, is_addressable
from ascend_grad._xla_frame cimport (
    AG_XLA_INVALID_ARGUMENT,
    AG_XLA_RESOURCE_EXHAUSTED,
    BOOL,
    MEMORY,
    SHAPES,
    SIGNATURE,
    advise_results,
    ag_xla_attrs,
    ag_xla_buffer,
    ag_xla_call_frame,
    ag_xla_error,
    ag_xla_span,
    buffer_of,
    dtype_of,
    failed,
    integer,
    is_question,
    is_text,
    real,
    text,
)
from ascend_grad.status cimport SUCCESS


# ---- the arguments and attributes of a call --------------------------------------------------------------------------

cdef int operator_of(const ag_xla_attrs *attrs) noexcept nogil:
    """Return the number of the operator, or `AG_ROW_OP_COUNT` if there is none of that name."""
    cdef const ag_xla_span *name = text(attrs, "operator")
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


cdef ag_xla_error *compute(ag_xla_call_frame *frame) noexcept nogil:
    cdef const int64_t *reduced = integer(&frame.attrs, "axis")
    cdef const double *scale = real(&frame.attrs, "scale")
    cdef int op = operator_of(&frame.attrs), axis, dtype, i = 0
    cdef const ag_xla_buffer *result
    cdef Py_ssize_t[MAX_AXES] shape, a_strides, b_strides, mask_strides, out_strides
    cdef View a, b, mask, out
    cdef Problem p
    cdef bint fits
    if op == <int>AG_ROW_OP_COUNT or reduced == NULL or scale == NULL or frame.results.size != 1:
        return failed(frame, AG_XLA_INVALID_ARGUMENT, SIGNATURE)
    result = buffer_of(&frame.results, 0)
    if result == NULL or frame.args.size != 1 + has_b(<ag_row_op>op) + has_mask(<ag_row_op>op):
        return failed(frame, AG_XLA_INVALID_ARGUMENT, SIGNATURE)
    dtype = dtype_of(result)
    if dtype < 0 or result.rank > MAX_AXES or not -result.rank <= reduced[0] < 0:
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
    advise_results(frame)
    if describe(&p, <ag_row_op>op, &a, &b, &mask, &out, out.ndim + <int>reduced[0], scale[0]):
        if solve(&p, 0) != SUCCESS:
            return failed(frame, AG_XLA_RESOURCE_EXHAUSTED, MEMORY)
    return NULL


cdef ag_xla_error *call(ag_xla_call_frame *frame) noexcept nogil:
    return NULL if is_question(frame) else compute(frame)


def handler():
    """Return the function as a capsule, for ``jax.ffi.register_ffi_target``."""
    return PyCapsule_New(<void *>call, NULL, NULL)
