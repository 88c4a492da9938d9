# The row-wise operators on typed memoryviews: rows along the last axis, any strides of both axes.
#
# They need no interpreter's lock and raise nothing. Whatever they return but `SUCCESS`, nothing was written. Views of one
# call have one shape. `out` may be one of the inputs, element for element; any other overlap is PARAM_INVALID. A mask
# hides where it is not 0. `num_threads`: 0 for the default; 1 where the caller is one of several threads.
# docs/cython.md has an example.

from libc.stdint cimport uint8_t, uint16_t

from ascend_grad.status cimport BAD_ALLOC, PARAM_INVALID, PARAM_NULLPTR, SUCCESS, Status


ctypedef fused real_t:
    float
    double


cdef enum Dtype16:
    # Dtypes of views of 16 bits, numbered as in the C headers.
    FLOAT16 = 1
    BFLOAT16 = 2


cdef Status softmax_backward(
    const real_t[:, :] grad_output,       # IN
    const real_t[:, :] output,            # IN
    real_t[:, :] out,                     # OUT
    int num_threads=*
) noexcept nogil

cdef Status log_softmax_backward(
    const real_t[:, :] grad_output,       # IN
    const real_t[:, :] output,            # IN
    real_t[:, :] out,                     # OUT
    int num_threads=*
) noexcept nogil

cdef Status scaled_masked_softmax_backward(
    const real_t[:, :] grad_output,       # IN
    const real_t[:, :] y,                 # IN
    const uint8_t[:, :] mask,             # IN
    real_t[:, :] out,                     # OUT
    double scale=*, int num_threads=*
) noexcept nogil

cdef Status softmax(
    const real_t[:, :] input,             # IN
    real_t[:, :] out,                     # OUT
    int num_threads=*
) noexcept nogil

cdef Status log_softmax(
    const real_t[:, :] input,             # IN
    real_t[:, :] out,                     # OUT
    int num_threads=*
) noexcept nogil

cdef Status scaled_masked_softmax(
    const real_t[:, :] x,                 # IN
    const uint8_t[:, :] mask,             # IN
    real_t[:, :] out,                     # OUT
    double scale=*, int num_threads=*
) noexcept nogil

cdef Status softmax_backward_16bit(
    const uint16_t[:, :] grad_output,     # IN
    const uint16_t[:, :] output,          # IN
    uint16_t[:, :] out,                   # OUT
    Dtype16 dtype, int num_threads=*
) noexcept nogil

cdef Status log_softmax_backward_16bit(
    const uint16_t[:, :] grad_output,     # IN
    const uint16_t[:, :] output,          # IN
    uint16_t[:, :] out,                   # OUT
    Dtype16 dtype, int num_threads=*
) noexcept nogil

cdef Status scaled_masked_softmax_backward_16bit(
    const uint16_t[:, :] grad_output,     # IN
    const uint16_t[:, :] y,               # IN
    const uint8_t[:, :] mask,             # IN
    uint16_t[:, :] out,                   # OUT
    Dtype16 dtype, double scale=*, int num_threads=*
) noexcept nogil

cdef Status softmax_16bit(
    const uint16_t[:, :] input,           # IN
    uint16_t[:, :] out,                   # OUT
    Dtype16 dtype, int num_threads=*
) noexcept nogil

cdef Status log_softmax_16bit(
    const uint16_t[:, :] input,           # IN
    uint16_t[:, :] out,                   # OUT
    Dtype16 dtype, int num_threads=*
) noexcept nogil

cdef Status scaled_masked_softmax_16bit(
    const uint16_t[:, :] x,               # IN
    const uint8_t[:, :] mask,             # IN
    uint16_t[:, :] out,                   # OUT
    Dtype16 dtype, double scale=*, int num_threads=*
) noexcept nogil
