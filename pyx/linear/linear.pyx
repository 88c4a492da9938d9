"""The linear operators on typed memoryviews, for Cython users.

They describe their arguments as problems, which the schedules of the Python functions solve. `linear.pxd` documents them.
Nothing here takes the interpreter's lock.
"""

from libc.math cimport INFINITY
from libc.stdint cimport int64_t, uint8_t, uint16_t
from libc.string cimport memset

from ascend_grad._kernels cimport AG_FLOAT32, AG_FLOAT64, ag_dtype
from ascend_grad._linear_kernels cimport ag_matrix
from ascend_grad._linear_problem cimport Problem, acc_size_of, count_active_rows, matrix_of
from ascend_grad._linear_results cimport describe_targets
from ascend_grad._linear_schedule cimport Schedule, prepare, solve, workspace_bound
from ascend_grad._linear_top_k cimport describe_top_k
from ascend_grad._memory cimport SIZE_LIMIT
from ascend_grad._overlap cimport are_nested, may_share_memory
from ascend_grad._views cimport View, is_addressable, matrix_view, size_of

from . import arguments
from .operators.options import MAX_TOP_K as MOST_TOP_K

cdef int MAX_THREADS = arguments.MAX_THREADS
cdef Py_ssize_t MAX_TOP_K = MOST_TOP_K

cdef enum:  # inputs
    INPUT
    WEIGHT
    TARGET
    SOFTMAX
    GRAD
    TARGET_MASK
    LOGITS_MAX
    SUM_EXP_LOGITS
    BIAS
    TEMPERATURES
    INPUTS

cdef enum:  # results
    WORKSPACE
    INPUT_GRAD
    WEIGHT_GRAD
    NEW_LOGITS_MAX
    NEW_SUM_EXP_LOGITS
    PREDICTED_LOGITS
    NEW_TARGET_MASK
    MASKED_TARGET
    LOG_PROB
    INDEX
    RESULTS

ctypedef struct Arguments:
    # The views of a call. A view has no data if the argument is None, or is none of the operator's.
    View[INPUTS] inputs
    View[RESULTS] results
    # Fields of top_k, beside BIAS and TEMPERATURES:
    Py_ssize_t top_k                  # columns of LOG_PROB and INDEX
    double temperature                # of all rows without TEMPERATURES
    double logit_scale
    double softcap                    # 0: none


cdef View vector_view(
    const void *data, const Py_ssize_t *shape, const Py_ssize_t *strides, int itemsize, int dtype
) noexcept nogil:
    cdef View view = matrix_view(data, shape, strides, itemsize, dtype)
    view.ndim = 1
    return view


cdef bint has_shape(const View *view, Py_ssize_t rows, Py_ssize_t columns) noexcept nogil:
    """Return whether a view is None, or has this shape (a vector: (rows,)) and addresses for all of its elements."""
    return view.data == NULL or (
        view.shape[0] == rows and (view.ndim == 1 or view.shape[1] == columns) and is_addressable(view)
    )


# ---- checks ----------------------------------------------------------------------------------------------------------

cdef bint fits_memory(const View *view) noexcept nogil:
    """Return whether all elements of a matrix have addresses, and plans can count its bytes."""
    return is_addressable(view) and size_of(view) <= SIZE_LIMIT // view.itemsize


cdef Status check_matrices(const Arguments *a) noexcept nogil:
    """Check that input and weight are given, fit together, and are not too large."""
    cdef const View *input = &a.inputs[INPUT]
    cdef const View *weight = &a.inputs[WEIGHT]
    if input.data == NULL or weight.data == NULL:
        return PARAM_NULLPTR
    if weight.shape[1] != input.shape[1] or input.dtype < 0:
        return PARAM_INVALID
    if not fits_memory(input) or not fits_memory(weight):
        return PARAM_INVALID
    return SUCCESS


cdef Status check_shapes(const Arguments *a) noexcept nogil:
    """Check the shapes of all views but those of input, weight and the workspace, which have none to fit."""
    cdef Py_ssize_t rows = a.inputs[INPUT].shape[0], hidden = a.inputs[INPUT].shape[1], vocab = a.inputs[WEIGHT].shape[0]
    cdef Py_ssize_t columns
    cdef int i
    for i in range(TARGET, INPUTS):
        if not has_shape(&a.inputs[i], vocab if i == BIAS else rows, vocab):
            return PARAM_INVALID
    for i in range(INPUT_GRAD, RESULTS):
        columns = a.top_k if i >= LOG_PROB else hidden
        if not has_shape(&a.results[i], vocab if i == WEIGHT_GRAD else rows, columns):
            return PARAM_INVALID
    return SUCCESS


cdef Status check_call(const Arguments *a, int num_threads) noexcept nogil:
    """Check all shapes, and that no result shares memory with another argument."""
    cdef const View *result
    cdef int i, k
    cdef Status status = check_matrices(a)
    if status != SUCCESS:
        return status
    if a.results[WORKSPACE].data == NULL:
        return PARAM_NULLPTR
    if a.inputs[TARGET].data == NULL and a.results[LOG_PROB].data == NULL:
        return PARAM_NULLPTR
    status = check_shapes(a)
    if status != SUCCESS:
        return status
    if num_threads < 0 or num_threads > MAX_THREADS:
        return PARAM_INVALID
    for i in range(RESULTS):
        result = &a.results[i]
        if result.data == NULL or size_of(result) == 0:
            continue
        if not are_nested(result):
            return PARAM_INVALID
        for k in range(INPUTS):
            if a.inputs[k].data != NULL and may_share_memory(result, &a.inputs[k]):
                return PARAM_INVALID
        for k in range(i):
            if a.results[k].data != NULL and may_share_memory(result, &a.results[k]):
                return PARAM_INVALID
    return SUCCESS


cdef bint are_targets(const Arguments *a) noexcept nogil:
    """Return whether every target that is not masked is a row of weight."""
    cdef const int64_t *targets = <const int64_t *>a.inputs[TARGET].data
    cdef const uint8_t *mask = <const uint8_t *>a.inputs[TARGET_MASK].data
    cdef Py_ssize_t i
    for i in range(a.inputs[TARGET].shape[0]):
        if (mask == NULL or not mask[i]) and not 0 <= targets[i] < a.inputs[WEIGHT].shape[0]:
            return False
    return True


# ---- problems --------------------------------------------------------------------------------------------------------

cdef ag_matrix matrix(const View *view) noexcept nogil:
    """Return a view as a matrix for the kernels; None has no data."""
    cdef ag_matrix nothing
    if view.data == NULL:
        memset(&nothing, 0, sizeof(nothing))
        return nothing
    return matrix_of(view)


cdef Problem problem_of(const Arguments *a) noexcept nogil:
    """Return a problem of two matrices and the targets, with all rows active."""
    cdef Problem p
    memset(&p, 0, sizeof(p))
    p.dtype = <ag_dtype>a.inputs[INPUT].dtype
    p.vocab, p.hidden = a.inputs[WEIGHT].shape[0], a.inputs[WEIGHT].shape[1]
    p.input, p.weight = matrix(&a.inputs[INPUT]), matrix(&a.inputs[WEIGHT])
    p.rows.total = p.rows.active = a.inputs[INPUT].shape[0]
    p.rows.target, p.rows.is_wide = a.inputs[TARGET].data, True
    return p


cdef Problem gradient_problem(const Arguments *a) noexcept nogil:
    cdef Problem p = problem_of(a)
    p.rows.size = p.vocab
    p.rows.mask = <const uint8_t *>a.inputs[TARGET_MASK].data
    p.rows.grad, p.rows.max = a.inputs[GRAD].data, a.inputs[LOGITS_MAX].data
    p.rows.sum = a.inputs[SUM_EXP_LOGITS].data
    p.softmax = matrix(&a.inputs[SOFTMAX])
    p.input_grad, p.weight_grad = matrix(&a.results[INPUT_GRAD]), matrix(&a.results[WEIGHT_GRAD])
    p.with_input_grad, p.with_weight_grad = p.input_grad.data != NULL, p.weight_grad.data != NULL
    return p


cdef Problem statistics_problem(const Arguments *a) noexcept nogil:
    cdef Problem p = problem_of(a)
    p.with_statistics = True
    p.logits_max, p.sum_exp = a.results[NEW_LOGITS_MAX].data, a.results[NEW_SUM_EXP_LOGITS].data
    p.predicted = a.results[PREDICTED_LOGITS].data
    return p


cdef Problem top_k_problem(const Arguments *a) noexcept nogil:
    cdef Problem p = problem_of(a)
    p.with_statistics, p.top_k, p.temperature = True, a.top_k, a.temperature
    p.temperatures, p.bias = <const double *>a.inputs[TEMPERATURES].data, <const double *>a.inputs[BIAS].data
    p.transform.scale, p.transform.softcap = a.logit_scale, a.softcap
    describe_top_k(&p)
    p.top_values, p.top_indices = a.results[LOG_PROB].data, <int64_t *>a.results[INDEX].data
    return p


cdef bint has_top_k(const Arguments *a) noexcept nogil:
    """Return whether the number of log-probabilities is valid for the vocabulary."""
    return 1 <= a.top_k <= min(MAX_TOP_K, a.inputs[WEIGHT].shape[0])


cdef bint is_positive(double number) noexcept nogil:
    return 0 < number < INFINITY


cdef bint has_logit_options(const Arguments *a) noexcept nogil:
    """Return whether temperatures, scale and softcap are valid."""
    cdef const double *temperatures = <const double *>a.inputs[TEMPERATURES].data
    cdef Py_ssize_t i
    for i in range(a.inputs[TEMPERATURES].shape[0] if temperatures != NULL else 0):
        if not is_positive(temperatures[i]):
            return False
    return is_positive(a.temperature) and -INFINITY < a.logit_scale < INFINITY and 0 <= a.softcap < INFINITY


cdef Py_ssize_t gradient_workspace(const Arguments *a) noexcept nogil:
    """Return the bytes of a workspace for a gradient, whichever rows are active, or -1 if the views do not fit together."""
    cdef Schedule schedule
    cdef Problem p
    if check_matrices(a) != SUCCESS or check_shapes(a) != SUCCESS:
        return -1
    p = gradient_problem(a)
    prepare(&schedule, &p, 0)
    return workspace_bound(&schedule)


cdef Py_ssize_t statistics_workspace(const Arguments *a) noexcept nogil:
    """Return the bytes of a workspace for statistics, or -1 if the views do not fit together."""
    cdef Schedule schedule
    cdef Problem p
    if check_matrices(a) != SUCCESS:
        return -1
    p = statistics_problem(a)
    prepare(&schedule, &p, 0)
    return workspace_bound(&schedule)


cdef Py_ssize_t top_k_workspace(const Arguments *a) noexcept nogil:
    """Return the bytes of a workspace for the largest log-probabilities, or -1 if the arguments do not fit together."""
    cdef Schedule schedule
    cdef Problem p
    if check_matrices(a) != SUCCESS or check_shapes(a) != SUCCESS or not has_top_k(a):
        return -1
    p = top_k_problem(a)
    prepare(&schedule, &p, 0)
    return workspace_bound(&schedule)


# ---- the operators ---------------------------------------------------------------------------------------------------

cdef Status gradient(const Arguments *a, int num_threads) noexcept nogil:
    cdef Status status = check_call(a, num_threads)
    cdef Problem p
    if a.inputs[GRAD].data == NULL or (
        a.inputs[SOFTMAX].data == NULL and (a.inputs[LOGITS_MAX].data == NULL or a.inputs[SUM_EXP_LOGITS].data == NULL)
    ):
        return PARAM_NULLPTR
    if status != SUCCESS:
        return status
    if not are_targets(a):
        return PARAM_INVALID
    p = gradient_problem(a)
    count_active_rows(&p.rows, acc_size_of(p.dtype), NULL)
    return solve(&p, a.results[WORKSPACE].data, a.results[WORKSPACE].shape[0], num_threads)


cdef Status statistics(const Arguments *a, int64_t start, int64_t end, int num_threads) noexcept nogil:
    cdef Status status = check_call(a, num_threads)
    cdef Problem p
    cdef int i
    for i in range(NEW_LOGITS_MAX, MASKED_TARGET + 1):
        if a.results[i].data == NULL:
            return PARAM_NULLPTR
    if status != SUCCESS:
        return status
    if not 0 <= start <= end or end - start > a.inputs[WEIGHT].shape[0] or a.inputs[WEIGHT].shape[0] == 0:
        return PARAM_INVALID
    p = statistics_problem(a)
    p.rows.start, p.rows.size = start, end - start
    status = solve(&p, a.results[WORKSPACE].data, a.results[WORKSPACE].shape[0], num_threads)
    if status == SUCCESS:
        describe_targets(
            &p.rows, acc_size_of(p.dtype) == 8, p.logits_max, p.predicted, a.results[NEW_TARGET_MASK].data, False,
            a.results[MASKED_TARGET].data, NULL
        )
    return status


cdef Status top_k(const Arguments *a, int num_threads) noexcept nogil:
    cdef Status status = check_call(a, num_threads)
    cdef Problem p
    if a.results[LOG_PROB].data == NULL or a.results[INDEX].data == NULL:
        return PARAM_NULLPTR
    if status != SUCCESS:
        return status
    if not has_top_k(a) or not has_logit_options(a):
        return PARAM_INVALID
    p = top_k_problem(a)
    return solve(&p, a.results[WORKSPACE].data, a.results[WORKSPACE].shape[0], num_threads)


cdef Py_ssize_t linear_cross_entropy_grad_workspace(
    const real_t[:, :] input, const real_t[:, :] weight, const real_t[:, :] softmax, real_t[:, :] input_grad,
    real_t[:, :] weight_grad
) noexcept nogil:
    cdef Arguments a
    cdef int dtype = AG_FLOAT32 if real_t is float else AG_FLOAT64
    memset(&a, 0, sizeof(a))
    a.inputs[INPUT] = matrix_view(&input[0, 0], input.shape, input.strides, sizeof(real_t), dtype)
    a.inputs[WEIGHT] = matrix_view(&weight[0, 0], weight.shape, weight.strides, sizeof(real_t), dtype)
    a.inputs[SOFTMAX] = matrix_view(&softmax[0, 0], softmax.shape, softmax.strides, sizeof(real_t), dtype)
    a.results[INPUT_GRAD] = matrix_view(&input_grad[0, 0], input_grad.shape, input_grad.strides, sizeof(real_t), dtype)
    a.results[WEIGHT_GRAD] = matrix_view(
        &weight_grad[0, 0], weight_grad.shape, weight_grad.strides, sizeof(real_t), dtype
    )
    return gradient_workspace(&a)


cdef Status linear_cross_entropy_grad(
    const real_t[::1] grad, const real_t[:, :] input, const real_t[:, :] weight, const uint8_t[::1] target_mask,
    const int64_t[::1] masked_target, const real_t[::1] logits_max, const real_t[::1] sum_exp_logits,
    const real_t[:, :] softmax, real_t[:, :] input_grad, real_t[:, :] weight_grad, uint8_t[::1] workspace,
    int num_threads=0
) noexcept nogil:
    cdef Arguments a
    cdef int dtype = AG_FLOAT32 if real_t is float else AG_FLOAT64
    memset(&a, 0, sizeof(a))
    a.inputs[INPUT] = matrix_view(&input[0, 0], input.shape, input.strides, sizeof(real_t), dtype)
    a.inputs[WEIGHT] = matrix_view(&weight[0, 0], weight.shape, weight.strides, sizeof(real_t), dtype)
    a.inputs[SOFTMAX] = matrix_view(&softmax[0, 0], softmax.shape, softmax.strides, sizeof(real_t), dtype)
    a.results[INPUT_GRAD] = matrix_view(&input_grad[0, 0], input_grad.shape, input_grad.strides, sizeof(real_t), dtype)
    a.results[WEIGHT_GRAD] = matrix_view(
        &weight_grad[0, 0], weight_grad.shape, weight_grad.strides, sizeof(real_t), dtype
    )
    a.inputs[GRAD] = vector_view(&grad[0], grad.shape, grad.strides, sizeof(real_t), dtype)
    a.inputs[TARGET_MASK] = vector_view(&target_mask[0], target_mask.shape, target_mask.strides, sizeof(uint8_t), -1)
    a.inputs[TARGET] = vector_view(&masked_target[0], masked_target.shape, masked_target.strides, sizeof(int64_t), -1)
    a.inputs[LOGITS_MAX] = vector_view(&logits_max[0], logits_max.shape, logits_max.strides, sizeof(real_t), dtype)
    a.inputs[SUM_EXP_LOGITS] = vector_view(
        &sum_exp_logits[0], sum_exp_logits.shape, sum_exp_logits.strides, sizeof(real_t), dtype
    )
    a.results[WORKSPACE] = vector_view(&workspace[0], workspace.shape, workspace.strides, sizeof(uint8_t), -1)
    return gradient(&a, num_threads)


cdef Py_ssize_t online_max_sum_workspace(
    const real_t[:, :] input, const real_t[:, :] weight
) noexcept nogil:
    cdef Arguments a
    cdef int dtype = AG_FLOAT32 if real_t is float else AG_FLOAT64
    memset(&a, 0, sizeof(a))
    a.inputs[INPUT] = matrix_view(&input[0, 0], input.shape, input.strides, sizeof(real_t), dtype)
    a.inputs[WEIGHT] = matrix_view(&weight[0, 0], weight.shape, weight.strides, sizeof(real_t), dtype)
    return statistics_workspace(&a)


cdef Status online_max_sum(
    const real_t[:, :] input, const real_t[:, :] weight, const int64_t[::1] target, int64_t vocab_start_index,
    int64_t vocab_end_index, real_t[::1] logits_max, real_t[::1] sum_exp_logits, real_t[::1] predicted_logits,
    uint8_t[::1] target_mask, int64_t[::1] masked_target, uint8_t[::1] workspace, int num_threads=0
) noexcept nogil:
    cdef Arguments a
    cdef int dtype = AG_FLOAT32 if real_t is float else AG_FLOAT64
    memset(&a, 0, sizeof(a))
    a.inputs[INPUT] = matrix_view(&input[0, 0], input.shape, input.strides, sizeof(real_t), dtype)
    a.inputs[WEIGHT] = matrix_view(&weight[0, 0], weight.shape, weight.strides, sizeof(real_t), dtype)
    a.inputs[TARGET] = vector_view(&target[0], target.shape, target.strides, sizeof(int64_t), -1)
    a.results[NEW_LOGITS_MAX] = vector_view(&logits_max[0], logits_max.shape, logits_max.strides, sizeof(real_t), dtype)
    a.results[NEW_SUM_EXP_LOGITS] = vector_view(
        &sum_exp_logits[0], sum_exp_logits.shape, sum_exp_logits.strides, sizeof(real_t), dtype
    )
    a.results[PREDICTED_LOGITS] = vector_view(
        &predicted_logits[0], predicted_logits.shape, predicted_logits.strides, sizeof(real_t), dtype
    )
    a.results[NEW_TARGET_MASK] = vector_view(
        &target_mask[0], target_mask.shape, target_mask.strides, sizeof(uint8_t), -1
    )
    a.results[MASKED_TARGET] = vector_view(
        &masked_target[0], masked_target.shape, masked_target.strides, sizeof(int64_t), -1
    )
    a.results[WORKSPACE] = vector_view(&workspace[0], workspace.shape, workspace.strides, sizeof(uint8_t), -1)
    return statistics(&a, vocab_start_index, vocab_end_index, num_threads)


cdef Py_ssize_t linear_cross_entropy_grad_16bit_workspace(
    const uint16_t[:, :] input, const uint16_t[:, :] weight, const float[:, :] softmax, uint16_t[:, :] input_grad,
    uint16_t[:, :] weight_grad, Dtype16 dtype
) noexcept nogil:
    cdef Arguments a
    if dtype != FLOAT16 and dtype != BFLOAT16:
        return -1
    memset(&a, 0, sizeof(a))
    a.inputs[INPUT] = matrix_view(&input[0, 0], input.shape, input.strides, sizeof(uint16_t), dtype)
    a.inputs[WEIGHT] = matrix_view(&weight[0, 0], weight.shape, weight.strides, sizeof(uint16_t), dtype)
    a.inputs[SOFTMAX] = matrix_view(&softmax[0, 0], softmax.shape, softmax.strides, sizeof(float), AG_FLOAT32)
    a.results[INPUT_GRAD] = matrix_view(
        &input_grad[0, 0], input_grad.shape, input_grad.strides, sizeof(uint16_t), dtype
    )
    a.results[WEIGHT_GRAD] = matrix_view(
        &weight_grad[0, 0], weight_grad.shape, weight_grad.strides, sizeof(uint16_t), dtype
    )
    return gradient_workspace(&a)


cdef Status linear_cross_entropy_grad_16bit(
    const float[::1] grad, const uint16_t[:, :] input, const uint16_t[:, :] weight, const uint8_t[::1] target_mask,
    const int64_t[::1] masked_target, const float[::1] logits_max, const float[::1] sum_exp_logits,
    const float[:, :] softmax, uint16_t[:, :] input_grad, uint16_t[:, :] weight_grad, uint8_t[::1] workspace,
    Dtype16 dtype, int num_threads=0
) noexcept nogil:
    cdef Arguments a
    if dtype != FLOAT16 and dtype != BFLOAT16:
        return PARAM_INVALID
    memset(&a, 0, sizeof(a))
    a.inputs[INPUT] = matrix_view(&input[0, 0], input.shape, input.strides, sizeof(uint16_t), dtype)
    a.inputs[WEIGHT] = matrix_view(&weight[0, 0], weight.shape, weight.strides, sizeof(uint16_t), dtype)
    a.inputs[SOFTMAX] = matrix_view(&softmax[0, 0], softmax.shape, softmax.strides, sizeof(float), AG_FLOAT32)
    a.results[INPUT_GRAD] = matrix_view(
        &input_grad[0, 0], input_grad.shape, input_grad.strides, sizeof(uint16_t), dtype
    )
    a.results[WEIGHT_GRAD] = matrix_view(
        &weight_grad[0, 0], weight_grad.shape, weight_grad.strides, sizeof(uint16_t), dtype
    )
    a.inputs[GRAD] = vector_view(&grad[0], grad.shape, grad.strides, sizeof(float), AG_FLOAT32)
    a.inputs[TARGET_MASK] = vector_view(&target_mask[0], target_mask.shape, target_mask.strides, sizeof(uint8_t), -1)
    a.inputs[TARGET] = vector_view(&masked_target[0], masked_target.shape, masked_target.strides, sizeof(int64_t), -1)
    a.inputs[LOGITS_MAX] = vector_view(&logits_max[0], logits_max.shape, logits_max.strides, sizeof(float), AG_FLOAT32)
    a.inputs[SUM_EXP_LOGITS] = vector_view(
        &sum_exp_logits[0], sum_exp_logits.shape, sum_exp_logits.strides, sizeof(float), AG_FLOAT32
    )
    a.results[WORKSPACE] = vector_view(&workspace[0], workspace.shape, workspace.strides, sizeof(uint8_t), -1)
    return gradient(&a, num_threads)


cdef Py_ssize_t online_max_sum_16bit_workspace(
    const uint16_t[:, :] input, const uint16_t[:, :] weight, Dtype16 dtype
) noexcept nogil:
    cdef Arguments a
    if dtype != FLOAT16 and dtype != BFLOAT16:
        return -1
    memset(&a, 0, sizeof(a))
    a.inputs[INPUT] = matrix_view(&input[0, 0], input.shape, input.strides, sizeof(uint16_t), dtype)
    a.inputs[WEIGHT] = matrix_view(&weight[0, 0], weight.shape, weight.strides, sizeof(uint16_t), dtype)
    return statistics_workspace(&a)


cdef Status online_max_sum_16bit(
    const uint16_t[:, :] input, const uint16_t[:, :] weight, const int64_t[::1] target, int64_t vocab_start_index,
    int64_t vocab_end_index, float[::1] logits_max, float[::1] sum_exp_logits, float[::1] predicted_logits,
    uint8_t[::1] target_mask, int64_t[::1] masked_target, uint8_t[::1] workspace, Dtype16 dtype, int num_threads=0
) noexcept nogil:
    cdef Arguments a
    if dtype != FLOAT16 and dtype != BFLOAT16:
        return PARAM_INVALID
    memset(&a, 0, sizeof(a))
    a.inputs[INPUT] = matrix_view(&input[0, 0], input.shape, input.strides, sizeof(uint16_t), dtype)
    a.inputs[WEIGHT] = matrix_view(&weight[0, 0], weight.shape, weight.strides, sizeof(uint16_t), dtype)
    a.inputs[TARGET] = vector_view(&target[0], target.shape, target.strides, sizeof(int64_t), -1)
    a.results[NEW_LOGITS_MAX] = vector_view(
        &logits_max[0], logits_max.shape, logits_max.strides, sizeof(float), AG_FLOAT32
    )
    a.results[NEW_SUM_EXP_LOGITS] = vector_view(
        &sum_exp_logits[0], sum_exp_logits.shape, sum_exp_logits.strides, sizeof(float), AG_FLOAT32
    )
    a.results[PREDICTED_LOGITS] = vector_view(
        &predicted_logits[0], predicted_logits.shape, predicted_logits.strides, sizeof(float), AG_FLOAT32
    )
    a.results[NEW_TARGET_MASK] = vector_view(
        &target_mask[0], target_mask.shape, target_mask.strides, sizeof(uint8_t), -1
    )
    a.results[MASKED_TARGET] = vector_view(
        &masked_target[0], masked_target.shape, masked_target.strides, sizeof(int64_t), -1
    )
    a.results[WORKSPACE] = vector_view(&workspace[0], workspace.shape, workspace.strides, sizeof(uint8_t), -1)
    return statistics(&a, vocab_start_index, vocab_end_index, num_threads)


cdef Py_ssize_t linear_top_k_workspace(
    const real_t[:, :] input, const real_t[:, :] weight, Py_ssize_t k, const double[::1] temperatures, const double[::1] bias
) noexcept nogil:
    cdef Arguments a
    cdef int dtype = AG_FLOAT32 if real_t is float else AG_FLOAT64
    memset(&a, 0, sizeof(a))
    a.top_k, a.temperature, a.logit_scale = k, 1, 1
    a.inputs[INPUT] = matrix_view(&input[0, 0], input.shape, input.strides, sizeof(real_t), dtype)
    a.inputs[WEIGHT] = matrix_view(&weight[0, 0], weight.shape, weight.strides, sizeof(real_t), dtype)
    a.inputs[TEMPERATURES] = vector_view(
        &temperatures[0], temperatures.shape, temperatures.strides, sizeof(double), AG_FLOAT64
    )
    a.inputs[BIAS] = vector_view(&bias[0], bias.shape, bias.strides, sizeof(double), AG_FLOAT64)
    return top_k_workspace(&a)


cdef Status linear_top_k(
    const real_t[:, :] input, const real_t[:, :] weight, Py_ssize_t k, double temperature, const double[::1] temperatures,
    const double[::1] bias, double logit_scale, double softcap, real_t[:, ::1] log_prob, int64_t[:, ::1] index,
    uint8_t[::1] workspace, int num_threads=0
) noexcept nogil:
    cdef Arguments a
    cdef int dtype = AG_FLOAT32 if real_t is float else AG_FLOAT64
    memset(&a, 0, sizeof(a))
    a.top_k, a.temperature, a.logit_scale, a.softcap = k, temperature, logit_scale, softcap
    a.inputs[INPUT] = matrix_view(&input[0, 0], input.shape, input.strides, sizeof(real_t), dtype)
    a.inputs[WEIGHT] = matrix_view(&weight[0, 0], weight.shape, weight.strides, sizeof(real_t), dtype)
    a.inputs[TEMPERATURES] = vector_view(
        &temperatures[0], temperatures.shape, temperatures.strides, sizeof(double), AG_FLOAT64
    )
    a.inputs[BIAS] = vector_view(&bias[0], bias.shape, bias.strides, sizeof(double), AG_FLOAT64)
    a.results[LOG_PROB] = matrix_view(&log_prob[0, 0], log_prob.shape, log_prob.strides, sizeof(real_t), dtype)
    a.results[INDEX] = matrix_view(&index[0, 0], index.shape, index.strides, sizeof(int64_t), -1)
    a.results[WORKSPACE] = vector_view(&workspace[0], workspace.shape, workspace.strides, sizeof(uint8_t), -1)
    return top_k(&a, num_threads)


cdef Py_ssize_t linear_top_k_16bit_workspace(
    const uint16_t[:, :] input, const uint16_t[:, :] weight, Py_ssize_t k, const double[::1] temperatures,
    const double[::1] bias, Dtype16 dtype
) noexcept nogil:
    cdef Arguments a
    if dtype != FLOAT16 and dtype != BFLOAT16:
        return -1
    memset(&a, 0, sizeof(a))
    a.top_k, a.temperature, a.logit_scale = k, 1, 1
    a.inputs[INPUT] = matrix_view(&input[0, 0], input.shape, input.strides, sizeof(uint16_t), dtype)
    a.inputs[WEIGHT] = matrix_view(&weight[0, 0], weight.shape, weight.strides, sizeof(uint16_t), dtype)
    a.inputs[TEMPERATURES] = vector_view(
        &temperatures[0], temperatures.shape, temperatures.strides, sizeof(double), AG_FLOAT64
    )
    a.inputs[BIAS] = vector_view(&bias[0], bias.shape, bias.strides, sizeof(double), AG_FLOAT64)
    return top_k_workspace(&a)


cdef Status linear_top_k_16bit(
    const uint16_t[:, :] input, const uint16_t[:, :] weight, Py_ssize_t k, double temperature,
    const double[::1] temperatures, const double[::1] bias, double logit_scale, double softcap, float[:, ::1] log_prob,
    int64_t[:, ::1] index, uint8_t[::1] workspace, Dtype16 dtype, int num_threads=0
) noexcept nogil:
    cdef Arguments a
    if dtype != FLOAT16 and dtype != BFLOAT16:
        return PARAM_INVALID
    memset(&a, 0, sizeof(a))
    a.top_k, a.temperature, a.logit_scale, a.softcap = k, temperature, logit_scale, softcap
    a.inputs[INPUT] = matrix_view(&input[0, 0], input.shape, input.strides, sizeof(uint16_t), dtype)
    a.inputs[WEIGHT] = matrix_view(&weight[0, 0], weight.shape, weight.strides, sizeof(uint16_t), dtype)
    a.inputs[TEMPERATURES] = vector_view(
        &temperatures[0], temperatures.shape, temperatures.strides, sizeof(double), AG_FLOAT64
    )
    a.inputs[BIAS] = vector_view(&bias[0], bias.shape, bias.strides, sizeof(double), AG_FLOAT64)
    a.results[LOG_PROB] = matrix_view(&log_prob[0, 0], log_prob.shape, log_prob.strides, sizeof(float), AG_FLOAT32)
    a.results[INDEX] = matrix_view(&index[0, 0], index.shape, index.strides, sizeof(int64_t), -1)
    a.results[WORKSPACE] = vector_view(&workspace[0], workspace.shape, workspace.strides, sizeof(uint8_t), -1)
    return top_k(&a, num_threads)
