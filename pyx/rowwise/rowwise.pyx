"""The row-wise operators on typed memoryviews, for Cython users. They run the same schedules as the Python functions.

`rowwise.pxd` documents them.
"""

from libc.stdint cimport uint8_t, uint16_t

from ascend_grad._kernels cimport (
    AG_BFLOAT16,
    AG_FLOAT16,
    AG_FLOAT32,
    AG_FLOAT64,
)
from ascend_grad._rowwise_kernels cimport (
    AG_LOG_SOFTMAX,
    AG_LOG_SOFTMAX_BACKWARD,
    AG_SCALED_MASKED_SOFTMAX,
    AG_SCALED_MASKED_SOFTMAX_BACKWARD,
    AG_SOFTMAX,
    AG_SOFTMAX_BACKWARD,
    ag_row_op,
)
from ascend_grad._overlap cimport are_nested, is_same_memory, may_share_memory
from ascend_grad._rowwise_plan cimport Problem, describe
from ascend_grad._rowwise_schedule cimport solve
from ascend_grad._views cimport View, is_addressable, matrix_view, size_of

from . import arguments

ctypedef fused element_t:
    float
    double
    uint16_t

cdef enum:
    OF_VIEWS = -1                     # the dtype follows from the type of the views

cdef int MAX_THREADS = arguments.MAX_THREADS


cdef bint is_like(const View *view, const View *other) noexcept nogil:
    """Return whether two matrices have equal shapes."""
    return view.shape[0] == other.shape[0] and view.shape[1] == other.shape[1]


cdef bint overlaps_partly(const View *view, const View *other) noexcept nogil:
    return not is_same_memory(view, other) and may_share_memory(view, other)


cdef Status compute(
    ag_row_op op, int dtype, const element_t[:, :] a, const element_t[:, :] b, const View *mask, element_t[:, :] out,
    double scale, int num_threads
) noexcept nogil:
    """Check the arguments and compute. If the operator has no second input, `b` is `a`; if no mask, `mask` is NULL."""
    cdef View a_view, b_view, out_view
    cdef Problem p
    if a is None or b is None or out is None:
        return PARAM_NULLPTR
    if element_t is float:
        dtype = AG_FLOAT32
    elif element_t is double:
        dtype = AG_FLOAT64
    else:
        if dtype != AG_FLOAT16 and dtype != AG_BFLOAT16:
            return PARAM_INVALID
    a_view = matrix_view(&a[0, 0], a.shape, a.strides, sizeof(element_t), dtype)
    b_view = matrix_view(&b[0, 0], b.shape, b.strides, sizeof(element_t), dtype)
    out_view = matrix_view(&out[0, 0], out.shape, out.strides, sizeof(element_t), dtype)
    if mask == NULL:
        mask = &a_view
    if not is_like(&b_view, &a_view) or not is_like(mask, &a_view) or not is_like(&out_view, &a_view):
        return PARAM_INVALID
    if not (
        is_addressable(&a_view) and is_addressable(&b_view) and is_addressable(mask) and is_addressable(&out_view)
    ):
        return PARAM_INVALID
    if num_threads < 0 or num_threads > MAX_THREADS:
        return PARAM_INVALID
    if size_of(&out_view) == 0:
        return SUCCESS
    if (
        not are_nested(&out_view)
        or overlaps_partly(&out_view, &a_view)
        or overlaps_partly(&out_view, &b_view)
        or overlaps_partly(&out_view, mask)
    ):
        return PARAM_INVALID
    describe(&p, op, &a_view, &b_view, mask, &out_view, 1, scale)
    return solve(&p, num_threads)


cdef Status compute_masked(
    ag_row_op op, int dtype, const element_t[:, :] a, const element_t[:, :] b, const uint8_t[:, :] mask,
    element_t[:, :] out, double scale, int num_threads
) noexcept nogil:
    cdef View view
    if mask is None:
        return PARAM_NULLPTR
    view = matrix_view(&mask[0, 0], mask.shape, mask.strides, 1, OF_VIEWS)
    return compute(op, dtype, a, b, &view, out, scale, num_threads)


# ---- the operators ---------------------------------------------------------------------------------------------------

cdef Status softmax_backward(
    const real_t[:, :] grad_output, const real_t[:, :] output, real_t[:, :] out, int num_threads=0
) noexcept nogil:
    return compute(AG_SOFTMAX_BACKWARD, OF_VIEWS, grad_output, output, NULL, out, 1.0, num_threads)


cdef Status log_softmax_backward(
    const real_t[:, :] grad_output, const real_t[:, :] output, real_t[:, :] out, int num_threads=0
) noexcept nogil:
    return compute(AG_LOG_SOFTMAX_BACKWARD, OF_VIEWS, grad_output, output, NULL, out, 1.0, num_threads)


cdef Status scaled_masked_softmax_backward(
    const real_t[:, :] grad_output, const real_t[:, :] y, const uint8_t[:, :] mask, real_t[:, :] out,
    double scale=1.0, int num_threads=0
) noexcept nogil:
    return compute_masked(AG_SCALED_MASKED_SOFTMAX_BACKWARD, OF_VIEWS, grad_output, y, mask, out, scale, num_threads)


cdef Status softmax(const real_t[:, :] input, real_t[:, :] out, int num_threads=0) noexcept nogil:
    return compute(AG_SOFTMAX, OF_VIEWS, input, input, NULL, out, 1.0, num_threads)


cdef Status log_softmax(const real_t[:, :] input, real_t[:, :] out, int num_threads=0) noexcept nogil:
    return compute(AG_LOG_SOFTMAX, OF_VIEWS, input, input, NULL, out, 1.0, num_threads)


cdef Status scaled_masked_softmax(
    const real_t[:, :] x, const uint8_t[:, :] mask, real_t[:, :] out, double scale=1.0, int num_threads=0
) noexcept nogil:
    return compute_masked(AG_SCALED_MASKED_SOFTMAX, OF_VIEWS, x, x, mask, out, scale, num_threads)


cdef Status softmax_backward_16bit(
    const uint16_t[:, :] grad_output, const uint16_t[:, :] output, uint16_t[:, :] out, Dtype16 dtype, int num_threads=0
) noexcept nogil:
    return compute(AG_SOFTMAX_BACKWARD, dtype, grad_output, output, NULL, out, 1.0, num_threads)


cdef Status log_softmax_backward_16bit(
    const uint16_t[:, :] grad_output, const uint16_t[:, :] output, uint16_t[:, :] out, Dtype16 dtype, int num_threads=0
) noexcept nogil:
    return compute(AG_LOG_SOFTMAX_BACKWARD, dtype, grad_output, output, NULL, out, 1.0, num_threads)


cdef Status scaled_masked_softmax_backward_16bit(
    const uint16_t[:, :] grad_output, const uint16_t[:, :] y, const uint8_t[:, :] mask, uint16_t[:, :] out,
    Dtype16 dtype, double scale=1.0, int num_threads=0
) noexcept nogil:
    return compute_masked(AG_SCALED_MASKED_SOFTMAX_BACKWARD, dtype, grad_output, y, mask, out, scale, num_threads)


cdef Status softmax_16bit(
    const uint16_t[:, :] input, uint16_t[:, :] out, Dtype16 dtype, int num_threads=0
) noexcept nogil:
    return compute(AG_SOFTMAX, dtype, input, input, NULL, out, 1.0, num_threads)


cdef Status log_softmax_16bit(
    const uint16_t[:, :] input, uint16_t[:, :] out, Dtype16 dtype, int num_threads=0
) noexcept nogil:
    return compute(AG_LOG_SOFTMAX, dtype, input, input, NULL, out, 1.0, num_threads)


cdef Status scaled_masked_softmax_16bit(
    const uint16_t[:, :] x, const uint8_t[:, :] mask, uint16_t[:, :] out,
    Dtype16 dtype, double scale=1.0, int num_threads=0
) noexcept nogil:
    return compute_masked(AG_SCALED_MASKED_SOFTMAX, dtype, x, x, mask, out, scale, num_threads)
