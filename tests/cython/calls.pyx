# cython: language_level=3
"""Every operator of ascend_grad.rowwise, called by its number, with and without the interpreter's lock."""

from cython.parallel cimport prange
from libc.stdint cimport uint8_t, uint16_t

from ascend_grad cimport rowwise, status
from ascend_grad.rowwise cimport Dtype16, Status, real_t

STATUS = {
    "SUCCESS": <int>status.SUCCESS,
    "PARAM_NULLPTR": <int>status.PARAM_NULLPTR,
    "PARAM_INVALID": <int>status.PARAM_INVALID,
    "BAD_ALLOC": <int>status.BAD_ALLOC,
}
DTYPES_16 = {"float16": <int>rowwise.FLOAT16, "bfloat16": <int>rowwise.BFLOAT16}


cdef Status call(
    int operator, const real_t[:, :] a, const real_t[:, :] b, const uint8_t[:, :] mask, real_t[:, :] out, double scale,
    int threads
) noexcept nogil:
    if operator == 0:
        return rowwise.softmax_backward(a, b, out, threads)
    if operator == 1:
        return rowwise.log_softmax_backward(a, b, out, threads)
    if operator == 2:
        return rowwise.scaled_masked_softmax_backward(a, b, mask, out, scale, threads)
    if operator == 3:
        return rowwise.softmax(a, out, threads)
    if operator == 4:
        return rowwise.log_softmax(a, out, threads)
    return rowwise.scaled_masked_softmax(a, mask, out, scale, threads)


cdef Status call_16bit(
    int operator, const uint16_t[:, :] a, const uint16_t[:, :] b, const uint8_t[:, :] mask, uint16_t[:, :] out,
    Dtype16 dtype, double scale, int threads
) noexcept nogil:
    if operator == 0:
        return rowwise.softmax_backward_16bit(a, b, out, dtype, threads)
    if operator == 1:
        return rowwise.log_softmax_backward_16bit(a, b, out, dtype, threads)
    if operator == 2:
        return rowwise.scaled_masked_softmax_backward_16bit(a, b, mask, out, dtype, scale, threads)
    if operator == 3:
        return rowwise.softmax_16bit(a, out, dtype, threads)
    if operator == 4:
        return rowwise.log_softmax_16bit(a, out, dtype, threads)
    return rowwise.scaled_masked_softmax_16bit(a, mask, out, dtype, scale, threads)


def float32(
    int operator, const float[:, :] a, const float[:, :] b, const uint8_t[:, :] mask, float[:, :] out, double scale,
    int threads
):
    cdef int result
    with nogil:
        result = call[float](operator, a, b, mask, out, scale, threads)
    return result


def float64(
    int operator, const double[:, :] a, const double[:, :] b, const uint8_t[:, :] mask, double[:, :] out, double scale,
    int threads
):
    return <int>call[double](operator, a, b, mask, out, scale, threads)


def bits16(
    int operator, const uint16_t[:, :] a, const uint16_t[:, :] b, const uint8_t[:, :] mask, uint16_t[:, :] out,
    int dtype, double scale, int threads
):
    cdef int result
    with nogil:
        result = call_16bit(operator, a, b, mask, out, <Dtype16>dtype, scale, threads)
    return result


def float32_in_prange(
    int operator, const float[:, :, :] a, const float[:, :, :] b, const uint8_t[:, :, :] mask, float[:, :, :] out,
    double scale, int threads
):
    """Call the operator on each matrix, on threads of the caller, and return the number of failed calls."""
    cdef Py_ssize_t i
    cdef int failures = 0
    for i in prange(a.shape[0], nogil=True, num_threads=2, schedule="dynamic"):
        failures += call[float](operator, a[i], b[i], mask[i], out[i], scale, threads) != status.SUCCESS
    return failures
