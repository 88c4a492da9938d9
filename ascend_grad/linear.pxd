# The gradient of the linear cross-entropy, the statistics that it needs, and the largest log-probabilities, on typed
# memoryviews.
#
# BT tokens, H features, V rows of weight; input is (BT, H), weight (V, H), vectors (BT,). Matrices may have any strides. The
# functions never take the interpreter's lock, and raise nothing. If they return anything but `SUCCESS`, no result was
# written. A result overlaps nothing else. `workspace` is the caller's memory. The functions whose names end in `_workspace`
# return the bytes that it must have, or -1 if the views do not fit together. docs/cython.md has more.

from libc.stdint cimport int64_t, uint8_t, uint16_t

from ascend_grad.rowwise cimport BFLOAT16, FLOAT16, Dtype16, real_t
from ascend_grad.status cimport BAD_ALLOC, PARAM_INVALID, PARAM_NULLPTR, SUCCESS, Status


cdef Py_ssize_t linear_cross_entropy_grad_workspace(
    const real_t[:, :] input,             # IN
    const real_t[:, :] weight,            # IN
    const real_t[:, :] softmax,           # IN  (BT, V); None: computed from the statistics
    real_t[:, :] input_grad,              # IN  None: not wanted
    real_t[:, :] weight_grad              # IN  None: not wanted
) noexcept nogil

cdef Status linear_cross_entropy_grad(
    const real_t[::1] grad,               # IN
    const real_t[:, :] input,             # IN
    const real_t[:, :] weight,            # IN
    const uint8_t[::1] target_mask,       # IN  not 0: the target lies in another shard; None: no target does
    const int64_t[::1] masked_target,     # IN  not read where masked
    const real_t[::1] logits_max,         # IN  not read with softmax
    const real_t[::1] sum_exp_logits,     # IN  not read with softmax
    const real_t[:, :] softmax,           # IN  (BT, V), or None
    real_t[:, :] input_grad,              # OUT (BT, H), or None
    real_t[:, :] weight_grad,             # OUT (V, H), or None
    uint8_t[::1] workspace,               # OUT
    int num_threads=*
) noexcept nogil

cdef Py_ssize_t linear_cross_entropy_grad_16bit_workspace(
    const uint16_t[:, :] input,           # IN
    const uint16_t[:, :] weight,          # IN
    const float[:, :] softmax,            # IN
    uint16_t[:, :] input_grad,            # IN
    uint16_t[:, :] weight_grad,           # IN
    Dtype16 dtype
) noexcept nogil

cdef Status linear_cross_entropy_grad_16bit(
    const float[::1] grad,                # IN
    const uint16_t[:, :] input,           # IN
    const uint16_t[:, :] weight,          # IN
    const uint8_t[::1] target_mask,       # IN
    const int64_t[::1] masked_target,     # IN
    const float[::1] logits_max,          # IN
    const float[::1] sum_exp_logits,      # IN
    const float[:, :] softmax,            # IN
    uint16_t[:, :] input_grad,            # OUT
    uint16_t[:, :] weight_grad,           # OUT
    uint8_t[::1] workspace,               # OUT
    Dtype16 dtype, int num_threads=*
) noexcept nogil

cdef Py_ssize_t online_max_sum_workspace(
    const real_t[:, :] input,             # IN
    const real_t[:, :] weight             # IN
) noexcept nogil

cdef Status online_max_sum(
    const real_t[:, :] input,             # IN
    const real_t[:, :] weight,            # IN
    const int64_t[::1] target,            # IN
    int64_t vocab_start_index, int64_t vocab_end_index,
    real_t[::1] logits_max,               # OUT
    real_t[::1] sum_exp_logits,           # OUT
    real_t[::1] predicted_logits,         # OUT
    uint8_t[::1] target_mask,             # OUT 1: the target lies in another shard
    int64_t[::1] masked_target,           # OUT
    uint8_t[::1] workspace,               # OUT
    int num_threads=*
) noexcept nogil

cdef Py_ssize_t online_max_sum_16bit_workspace(
    const uint16_t[:, :] input,           # IN
    const uint16_t[:, :] weight,          # IN
    Dtype16 dtype
) noexcept nogil

cdef Status online_max_sum_16bit(
    const uint16_t[:, :] input,           # IN
    const uint16_t[:, :] weight,          # IN
    const int64_t[::1] target,            # IN
    int64_t vocab_start_index, int64_t vocab_end_index,
    float[::1] logits_max,                # OUT
    float[::1] sum_exp_logits,            # OUT
    float[::1] predicted_logits,          # OUT
    uint8_t[::1] target_mask,             # OUT
    int64_t[::1] masked_target,           # OUT
    uint8_t[::1] workspace,               # OUT
    Dtype16 dtype, int num_threads=*
) noexcept nogil

cdef Py_ssize_t linear_top_k_workspace(
    const real_t[:, :] input,             # IN
    const real_t[:, :] weight,            # IN
    Py_ssize_t k,                         # IN  1 to 128, and at most V
    const double[::1] temperatures,       # IN  None, or as in the call
    const double[::1] bias                # IN  None, or as in the call
) noexcept nogil

cdef Status linear_top_k(
    const real_t[:, :] input,             # IN
    const real_t[:, :] weight,            # IN
    Py_ssize_t k,                         # IN
    double temperature,                   # IN  positive and finite
    const double[::1] temperatures,       # IN  (BT,), likewise; None: all are `temperature`
    const double[::1] bias,               # IN  (V,) or None
    double logit_scale,                   # IN  finite
    double softcap,                       # IN  finite and positive; 0: none
    real_t[:, ::1] log_prob,              # OUT (BT, k)
    int64_t[:, ::1] index,                # OUT (BT, k)
    uint8_t[::1] workspace,               # OUT
    int num_threads=*
) noexcept nogil

cdef Py_ssize_t linear_top_k_16bit_workspace(
    const uint16_t[:, :] input,           # IN
    const uint16_t[:, :] weight,          # IN
    Py_ssize_t k,                         # IN
    const double[::1] temperatures,       # IN
    const double[::1] bias,               # IN
    Dtype16 dtype
) noexcept nogil

cdef Status linear_top_k_16bit(
    const uint16_t[:, :] input,           # IN
    const uint16_t[:, :] weight,          # IN
    Py_ssize_t k,                         # IN
    double temperature,                   # IN
    const double[::1] temperatures,       # IN
    const double[::1] bias,               # IN
    double logit_scale,                   # IN
    double softcap,                       # IN
    float[:, ::1] log_prob,               # OUT
    int64_t[:, ::1] index,                # OUT
    uint8_t[::1] workspace,               # OUT
    Dtype16 dtype, int num_threads=*
) noexcept nogil
