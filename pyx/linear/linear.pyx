"""The linear operators on typed memoryviews, for Cython users.

They describe their arguments as views; `linear.pxd` documents them. Nothing here takes the interpreter's lock.
"""

from libc.stdint cimport int64_t, uint8_t, uint16_t
from libc.string cimport memset

from ascend_grad._kernels cimport AG_FLOAT32, AG_FLOAT64
from ascend_grad._linear_views cimport (
    ARGUMENTS,
    BIAS,
    GRAD,
    GRADIENT,
    INDEX,
    INPUT,
    INPUT_GRAD,
    LOG_PROB,
    LOGITS_MAX,
    MASKED_TARGET,
    NEW_LOGITS_MAX,
    NEW_SUM_EXP_LOGITS,
    NEW_TARGET_MASK,
    PREDICTED_LOGITS,
    SOFTMAX,
    STATISTICS,
    SUM_EXP_LOGITS,
    TARGET,
    TARGET_MASK,
    TEMPERATURES,
    TOP_K,
    WEIGHT,
    WEIGHT_GRAD,
    WORKSPACE,
    Arguments,
    LinearOperator,
    compute,
    workspace_of,
)
from ascend_grad._views cimport matrix_view

ctypedef fused matrix_t:
    uint16_t
    float
    double

ctypedef fused element_t:
    matrix_t
    uint8_t
    int64_t

cdef enum:
    FROM_VIEWS = -1                   # the dtype follows from the type of the views

ctypedef struct ViewedCall:
    # A call with the shapes and strides of its views. It must not be copied, as the views point into it.
    Arguments a
    int dtype                         # of views of 16 bits
    Py_ssize_t[ARGUMENTS][2] shapes
    Py_ssize_t[ARGUMENTS][2] strides


# ---- arguments -------------------------------------------------------------------------------------------------------

cdef inline void set_view(
    ViewedCall *c, int i, const element_t *data, int ndim, const Py_ssize_t *shape, const Py_ssize_t *strides
) noexcept nogil:
    cdef int axis, dtype = -1
    if element_t is float:
        dtype = AG_FLOAT32
    elif element_t is double:
        dtype = AG_FLOAT64
    elif element_t is uint16_t:
        dtype = c.dtype if c.dtype == FLOAT16 or c.dtype == BFLOAT16 else -1
    for axis in range(ndim):
        c.shapes[i][axis], c.strides[i][axis] = shape[axis], strides[axis]
    c.a.views[i] = matrix_view(data, c.shapes[i], c.strides[i], sizeof(element_t), dtype)
    c.a.views[i].ndim = ndim


cdef inline void set_matrix(ViewedCall *c, int i, const element_t[:, :] matrix) noexcept nogil:
    set_view(c, i, &matrix[0, 0], 2, matrix.shape, matrix.strides)


cdef inline void set_vector(ViewedCall *c, int i, const element_t[::1] vector) noexcept nogil:
    set_view(c, i, &vector[0], 1, vector.shape, vector.strides)


cdef inline void begin(
    ViewedCall *c, LinearOperator operator, int dtype, const matrix_t[:, :] input, const matrix_t[:, :] weight
) noexcept nogil:
    """Describe a call that has no other argument yet. `dtype` is read for views of 16 bits."""
    memset(&c.a, 0, sizeof(c.a))
    c.a.operator, c.dtype = operator, dtype
    set_matrix(c, INPUT, input)
    set_matrix(c, WEIGHT, weight)


cdef inline void set_gradients(
    ViewedCall *c, const real_t[:, :] softmax, matrix_t[:, :] input_grad, matrix_t[:, :] weight_grad
) noexcept nogil:
    set_matrix(c, SOFTMAX, softmax)
    set_matrix(c, INPUT_GRAD, input_grad)
    set_matrix(c, WEIGHT_GRAD, weight_grad)


cdef inline void set_top_k(
    ViewedCall *c, Py_ssize_t k, const double[::1] temperatures, const double[::1] bias, double temperature,
    double logit_scale, double softcap
) noexcept nogil:
    c.a.top_k, c.a.temperature, c.a.logit_scale, c.a.softcap = k, temperature, logit_scale, softcap
    set_vector(c, TEMPERATURES, temperatures)
    set_vector(c, BIAS, bias)


cdef Status run(ViewedCall *c, const uint8_t[::1] workspace, int num_threads) noexcept nogil:
    set_vector(c, WORKSPACE, workspace)
    return compute(&c.a, num_threads)


# ---- the operators ---------------------------------------------------------------------------------------------------

cdef Py_ssize_t linear_cross_entropy_grad_workspace(
    const real_t[:, :] input, const real_t[:, :] weight, const real_t[:, :] softmax, real_t[:, :] input_grad,
    real_t[:, :] weight_grad
) noexcept nogil:
    cdef ViewedCall c
    begin(&c, GRADIENT, FROM_VIEWS, input, weight)
    set_gradients(&c, softmax, input_grad, weight_grad)
    return workspace_of(&c.a)


cdef Status linear_cross_entropy_grad(
    const real_t[::1] grad, const real_t[:, :] input, const real_t[:, :] weight, const uint8_t[::1] target_mask,
    const int64_t[::1] masked_target, const real_t[::1] logits_max, const real_t[::1] sum_exp_logits,
    const real_t[:, :] softmax, real_t[:, :] input_grad, real_t[:, :] weight_grad, uint8_t[::1] workspace,
    int num_threads=0
) noexcept nogil:
    cdef ViewedCall c
    begin(&c, GRADIENT, FROM_VIEWS, input, weight)
    set_gradients(&c, softmax, input_grad, weight_grad)
    set_vector(&c, GRAD, grad)
    set_vector(&c, TARGET_MASK, target_mask)
    set_vector(&c, TARGET, masked_target)
    set_vector(&c, LOGITS_MAX, logits_max)
    set_vector(&c, SUM_EXP_LOGITS, sum_exp_logits)
    return run(&c, workspace, num_threads)


cdef Py_ssize_t online_max_sum_workspace(
    const real_t[:, :] input, const real_t[:, :] weight
) noexcept nogil:
    cdef ViewedCall c
    begin(&c, STATISTICS, FROM_VIEWS, input, weight)
    return workspace_of(&c.a)


cdef Status online_max_sum(
    const real_t[:, :] input, const real_t[:, :] weight, const int64_t[::1] target, int64_t vocab_start_index,
    int64_t vocab_end_index, real_t[::1] logits_max, real_t[::1] sum_exp_logits, real_t[::1] predicted_logits,
    uint8_t[::1] target_mask, int64_t[::1] masked_target, uint8_t[::1] workspace, int num_threads=0
) noexcept nogil:
    cdef ViewedCall c
    begin(&c, STATISTICS, FROM_VIEWS, input, weight)
    c.a.start, c.a.end = vocab_start_index, vocab_end_index
    set_vector(&c, TARGET, target)
    set_vector(&c, NEW_LOGITS_MAX, logits_max)
    set_vector(&c, NEW_SUM_EXP_LOGITS, sum_exp_logits)
    set_vector(&c, PREDICTED_LOGITS, predicted_logits)
    set_vector(&c, NEW_TARGET_MASK, target_mask)
    set_vector(&c, MASKED_TARGET, masked_target)
    return run(&c, workspace, num_threads)


cdef Py_ssize_t linear_cross_entropy_grad_16bit_workspace(
    const uint16_t[:, :] input, const uint16_t[:, :] weight, const float[:, :] softmax, uint16_t[:, :] input_grad,
    uint16_t[:, :] weight_grad, Dtype16 dtype
) noexcept nogil:
    cdef ViewedCall c
    begin(&c, GRADIENT, dtype, input, weight)
    set_gradients(&c, softmax, input_grad, weight_grad)
    return workspace_of(&c.a)


cdef Status linear_cross_entropy_grad_16bit(
    const float[::1] grad, const uint16_t[:, :] input, const uint16_t[:, :] weight, const uint8_t[::1] target_mask,
    const int64_t[::1] masked_target, const float[::1] logits_max, const float[::1] sum_exp_logits,
    const float[:, :] softmax, uint16_t[:, :] input_grad, uint16_t[:, :] weight_grad, uint8_t[::1] workspace,
    Dtype16 dtype, int num_threads=0
) noexcept nogil:
    cdef ViewedCall c
    begin(&c, GRADIENT, dtype, input, weight)
    set_gradients(&c, softmax, input_grad, weight_grad)
    set_vector(&c, GRAD, grad)
    set_vector(&c, TARGET_MASK, target_mask)
    set_vector(&c, TARGET, masked_target)
    set_vector(&c, LOGITS_MAX, logits_max)
    set_vector(&c, SUM_EXP_LOGITS, sum_exp_logits)
    return run(&c, workspace, num_threads)


cdef Py_ssize_t online_max_sum_16bit_workspace(
    const uint16_t[:, :] input, const uint16_t[:, :] weight, Dtype16 dtype
) noexcept nogil:
    cdef ViewedCall c
    begin(&c, STATISTICS, dtype, input, weight)
    return workspace_of(&c.a)


cdef Status online_max_sum_16bit(
    const uint16_t[:, :] input, const uint16_t[:, :] weight, const int64_t[::1] target, int64_t vocab_start_index,
    int64_t vocab_end_index, float[::1] logits_max, float[::1] sum_exp_logits, float[::1] predicted_logits,
    uint8_t[::1] target_mask, int64_t[::1] masked_target, uint8_t[::1] workspace, Dtype16 dtype, int num_threads=0
) noexcept nogil:
    cdef ViewedCall c
    begin(&c, STATISTICS, dtype, input, weight)
    c.a.start, c.a.end = vocab_start_index, vocab_end_index
    set_vector(&c, TARGET, target)
    set_vector(&c, NEW_LOGITS_MAX, logits_max)
    set_vector(&c, NEW_SUM_EXP_LOGITS, sum_exp_logits)
    set_vector(&c, PREDICTED_LOGITS, predicted_logits)
    set_vector(&c, NEW_TARGET_MASK, target_mask)
    set_vector(&c, MASKED_TARGET, masked_target)
    return run(&c, workspace, num_threads)


cdef Py_ssize_t linear_top_k_workspace(
    const real_t[:, :] input, const real_t[:, :] weight, Py_ssize_t k, const double[::1] temperatures, const double[::1] bias
) noexcept nogil:
    cdef ViewedCall c
    begin(&c, TOP_K, FROM_VIEWS, input, weight)
    set_top_k(&c, k, temperatures, bias, 1, 1, 0)
    return workspace_of(&c.a)


cdef Status linear_top_k(
    const real_t[:, :] input, const real_t[:, :] weight, Py_ssize_t k, double temperature, const double[::1] temperatures,
    const double[::1] bias, double logit_scale, double softcap, real_t[:, ::1] log_prob, int64_t[:, ::1] index,
    uint8_t[::1] workspace, int num_threads=0
) noexcept nogil:
    cdef ViewedCall c
    begin(&c, TOP_K, FROM_VIEWS, input, weight)
    set_top_k(&c, k, temperatures, bias, temperature, logit_scale, softcap)
    set_view(&c, LOG_PROB, &log_prob[0, 0], 2, log_prob.shape, log_prob.strides)
    set_view(&c, INDEX, &index[0, 0], 2, index.shape, index.strides)
    return run(&c, workspace, num_threads)


cdef Py_ssize_t linear_top_k_16bit_workspace(
    const uint16_t[:, :] input, const uint16_t[:, :] weight, Py_ssize_t k, const double[::1] temperatures,
    const double[::1] bias, Dtype16 dtype
) noexcept nogil:
    cdef ViewedCall c
    begin(&c, TOP_K, dtype, input, weight)
    set_top_k(&c, k, temperatures, bias, 1, 1, 0)
    return workspace_of(&c.a)


cdef Status linear_top_k_16bit(
    const uint16_t[:, :] input, const uint16_t[:, :] weight, Py_ssize_t k, double temperature,
    const double[::1] temperatures, const double[::1] bias, double logit_scale, double softcap, float[:, ::1] log_prob,
    int64_t[:, ::1] index, uint8_t[::1] workspace, Dtype16 dtype, int num_threads=0
) noexcept nogil:
    cdef ViewedCall c
    begin(&c, TOP_K, dtype, input, weight)
    set_top_k(&c, k, temperatures, bias, temperature, logit_scale, softcap)
    set_view(&c, LOG_PROB, &log_prob[0, 0], 2, log_prob.shape, log_prob.strides)
    set_view(&c, INDEX, &index[0, 0], 2, index.shape, index.strides)
    return run(&c, workspace, num_threads)
