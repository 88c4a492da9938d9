# cython: language_level=3
"""The operators of ascend_grad.linear, for test_linear.py; each returns a status, or the bytes of a workspace."""

from cython cimport floating
from libc.stdint cimport int64_t, uint8_t, uint16_t

from ascend_grad cimport linear
from ascend_grad.linear cimport Dtype16


def grad_workspace(
    const floating[:, :] input, const floating[:, :] weight, const floating[:, :] softmax, floating[:, :] input_grad,
    floating[:, :] weight_grad
):
    return linear.linear_cross_entropy_grad_workspace[floating](input, weight, softmax, input_grad, weight_grad)


def grad(
    const floating[::1] grad, const floating[:, :] input, const floating[:, :] weight, const uint8_t[::1] target_mask,
    const int64_t[::1] masked_target, const floating[::1] logits_max, const floating[::1] sum_exp, const floating[:, :] softmax,
    floating[:, :] input_grad, floating[:, :] weight_grad, uint8_t[::1] workspace, int threads
):
    cdef int result
    with nogil:
        result = linear.linear_cross_entropy_grad[floating](
            grad, input, weight, target_mask, masked_target, logits_max, sum_exp, softmax, input_grad, weight_grad,
            workspace, threads
        )
    return result


def max_sum_workspace(const floating[:, :] input, const floating[:, :] weight):
    return linear.online_max_sum_workspace[floating](input, weight)


def max_sum(
    const floating[:, :] input, const floating[:, :] weight, const int64_t[::1] target, int64_t start, int64_t end,
    floating[::1] logits_max, floating[::1] sum_exp, floating[::1] predicted, uint8_t[::1] target_mask,
    int64_t[::1] masked_target, uint8_t[::1] workspace, int threads
):
    cdef int result
    with nogil:
        result = linear.online_max_sum[floating](
            input, weight, target, start, end, logits_max, sum_exp, predicted, target_mask, masked_target, workspace,
            threads
        )
    return result


def grad_workspace_bits16(
    const uint16_t[:, :] input, const uint16_t[:, :] weight, const float[:, :] softmax, uint16_t[:, :] input_grad,
    uint16_t[:, :] weight_grad, int dtype
):
    return linear.linear_cross_entropy_grad_16bit_workspace(
        input, weight, softmax, input_grad, weight_grad, <Dtype16>dtype
    )


def grad_bits16(
    const float[::1] grad, const uint16_t[:, :] input, const uint16_t[:, :] weight, const uint8_t[::1] target_mask,
    const int64_t[::1] masked_target, const float[::1] logits_max, const float[::1] sum_exp, const float[:, :] softmax,
    uint16_t[:, :] input_grad, uint16_t[:, :] weight_grad, uint8_t[::1] workspace, int dtype, int threads
):
    cdef int result
    with nogil:
        result = linear.linear_cross_entropy_grad_16bit(
            grad, input, weight, target_mask, masked_target, logits_max, sum_exp, softmax, input_grad, weight_grad,
            workspace, <Dtype16>dtype, threads
        )
    return result


def max_sum_workspace_bits16(const uint16_t[:, :] input, const uint16_t[:, :] weight, int dtype):
    return linear.online_max_sum_16bit_workspace(input, weight, <Dtype16>dtype)


def max_sum_bits16(
    const uint16_t[:, :] input, const uint16_t[:, :] weight, const int64_t[::1] target, int64_t start, int64_t end,
    float[::1] logits_max, float[::1] sum_exp, float[::1] predicted, uint8_t[::1] target_mask,
    int64_t[::1] masked_target, uint8_t[::1] workspace, int dtype, int threads
):
    cdef int result
    with nogil:
        result = linear.online_max_sum_16bit(
            input, weight, target, start, end, logits_max, sum_exp, predicted, target_mask, masked_target, workspace,
            <Dtype16>dtype, threads
        )
    return result


def top_k_workspace(
    const floating[:, :] input, const floating[:, :] weight, Py_ssize_t k, const double[::1] temperatures, const double[::1] bias
):
    return linear.linear_top_k_workspace[floating](input, weight, k, temperatures, bias)


def top_k(
    const floating[:, :] input, const floating[:, :] weight, Py_ssize_t k, double temperature,
    const double[::1] temperatures, const double[::1] bias, double logit_scale, double softcap, floating[:, ::1] log_prob,
    int64_t[:, ::1] index, uint8_t[::1] workspace, int threads
):
    cdef int result
    with nogil:
        result = linear.linear_top_k[floating](
            input, weight, k, temperature, temperatures, bias, logit_scale, softcap, log_prob, index, workspace, threads
        )
    return result


def top_k_workspace_bits16(
    const uint16_t[:, :] input, const uint16_t[:, :] weight, Py_ssize_t k, const double[::1] temperatures,
    const double[::1] bias, int dtype
):
    return linear.linear_top_k_16bit_workspace(input, weight, k, temperatures, bias, <Dtype16>dtype)


def top_k_bits16(
    const uint16_t[:, :] input, const uint16_t[:, :] weight, Py_ssize_t k, double temperature,
    const double[::1] temperatures, const double[::1] bias, double logit_scale, double softcap, float[:, ::1] log_prob,
    int64_t[:, ::1] index, uint8_t[::1] workspace, int dtype, int threads
):
    cdef int result
    with nogil:
        result = linear.linear_top_k_16bit(
            input, weight, k, temperature, temperatures, bias, logit_scale, softcap, log_prob, index, workspace,
            <Dtype16>dtype, threads
        )
    return result
