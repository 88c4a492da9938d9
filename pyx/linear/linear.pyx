"""The linear operators on typed memoryviews, for Cython users: the plans and schedules of the Python functions.

`linear.pxd` tells what holds for all of them. Views are checked here without the interpreter's lock; plans are Python
objects, so whoever makes them takes it, and the schedules release it while they compute.
"""

from libc.stdint cimport int64_t, uint8_t, uint16_t
from libc.string cimport memset

cimport numpy as cnp

from ascend_grad cimport _tasks
from ascend_grad._kernels cimport (
    AG_FLOAT32,
    AG_FLOAT64,
    ag_fpenv,
    ag_fpenv_enter,
    ag_fpenv_leave,
)
from ascend_grad._linear_kernels cimport ag_matrix
from ascend_grad._linear_plan cimport OF_BLOCKS, Plan, bytes_of
from ascend_grad._linear_rows cimport Rows, clear_rows, holds_sums, matrix_of, number, set_number
from ascend_grad._linear_schedule cimport Schedule
from ascend_grad._linear_skinny cimport SkinnySchedule
from ascend_grad._memory cimport SIZE_LIMIT
from ascend_grad._overlap cimport are_nested, may_share_memory
from ascend_grad._views cimport View, is_addressable, matrix_view, size_of

from . import _linear_python, arguments
from ._dtypes import FLOATING_DTYPES

cnp.import_array()

cdef int MAX_THREADS = arguments.MAX_THREADS

cdef enum:  # inputs
    INPUT
    WEIGHT
    TARGET
    SOFTMAX
    GRAD
    TARGET_MASK
    LOGITS_MAX
    SUM_EXP_LOGITS
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
    RESULTS

ctypedef struct Arguments:
    # What is None, or not an argument of the operator, has no data.
    View[INPUTS] inputs
    View[RESULTS] results


cdef View vector_view(
    const void *data, const Py_ssize_t *shape, const Py_ssize_t *strides, int itemsize, int dtype
) noexcept nogil:
    cdef View view = matrix_view(data, shape, strides, itemsize, dtype)
    view.ndim = 1
    return view


# ---- views as arrays -------------------------------------------------------------------------------------------------

cdef cnp.ndarray array_of(const View *view, int type_number):
    """The memory of a view as an array of the dtype with this number; None where there is no view."""
    if view.data == NULL:
        return None
    return cnp.PyArray_New(
        cnp.ndarray, view.ndim, <cnp.npy_intp *>view.shape, type_number, <cnp.npy_intp *>view.strides, view.data, 0,
        cnp.NPY_ARRAY_WRITEABLE, None
    )


cdef cnp.ndarray floating(const View *view):
    return None if view.data == NULL else array_of(view, FLOATING_DTYPES[view.dtype].num)


cdef bint has_shape(const View *view, Py_ssize_t rows, Py_ssize_t columns) noexcept nogil:
    """Return whether a view that is there has this shape, for vectors (rows,), and all of its elements have addresses."""
    return view.data == NULL or (
        view.shape[0] == rows and (view.ndim == 1 or view.shape[1] == columns) and is_addressable(view)
    )


# ---- checks ----------------------------------------------------------------------------------------------------------

cdef bint fits_memory(const View *view) noexcept nogil:
    """Return whether plans can count the bytes of a matrix, whose elements have addresses."""
    return is_addressable(view) and size_of(view) <= SIZE_LIMIT // view.itemsize


cdef Status check_matrices(const Arguments *a) noexcept nogil:
    cdef const View *input = &a.inputs[INPUT]
    cdef const View *weight = &a.inputs[WEIGHT]
    if input.data == NULL or weight.data == NULL:
        return PARAM_NULLPTR
    if weight.shape[1] != input.shape[1] or input.dtype < 0:
        return PARAM_INVALID
    if not fits_memory(input) or not fits_memory(weight):
        return PARAM_INVALID
    return SUCCESS


cdef Status check_call(const Arguments *a, int num_threads) noexcept nogil:
    """All extents, and that no result shares memory with anything else."""
    cdef Py_ssize_t rows, hidden, vocab
    cdef const View *result
    cdef int i, k
    cdef Status status = check_matrices(a)
    if status != SUCCESS:
        return status
    if a.inputs[TARGET].data == NULL or a.results[WORKSPACE].data == NULL:
        return PARAM_NULLPTR
    rows, hidden, vocab = a.inputs[INPUT].shape[0], a.inputs[INPUT].shape[1], a.inputs[WEIGHT].shape[0]
    for i in range(TARGET, INPUTS):
        if not has_shape(&a.inputs[i], rows, vocab):
            return PARAM_INVALID
    for i in range(INPUT_GRAD, RESULTS):
        if not has_shape(&a.results[i], vocab if i == WEIGHT_GRAD else rows, hidden):
            return PARAM_INVALID
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
    """Whether every target that is not masked is a row of weight."""
    cdef const int64_t *targets = <const int64_t *>a.inputs[TARGET].data
    cdef const uint8_t *mask = <const uint8_t *>a.inputs[TARGET_MASK].data
    cdef Py_ssize_t i
    for i in range(a.inputs[TARGET].shape[0]):
        if (mask == NULL or not mask[i]) and not 0 <= targets[i] < a.inputs[WEIGHT].shape[0]:
            return False
    return True


# ---- plans and calls, with the interpreter's lock --------------------------------------------------------------------

cdef list plans_of_gradient(cnp.ndarray x, cnp.ndarray weight, Py_ssize_t count, softmax, input_grad, weight_grad):
    """Those of the Python function, where so many rows count."""
    cdef Py_ssize_t acc_size = max(cnp.PyArray_ITEMSIZE(x), 4)
    limit = _linear_python.default_workspace(
        x, weight, input_grad is not None, weight_grad is not None, 0 if softmax is None else softmax.nbytes
    )
    return _linear_python.plans(
        x, weight, count, limit, softmax is None, input_grad is not None, weight_grad is not None,
        weight_grad is not None and not holds_sums(weight_grad, <int>acc_size)
    )


cdef list plans_of_statistics(cnp.ndarray x, cnp.ndarray weight, Py_ssize_t count):
    return _linear_python.plans(
        x, weight, count, _linear_python.default_workspace(x, weight, False, False), True, False, False, False
    )


cdef Py_ssize_t gradient_workspace(const Arguments *a) noexcept with gil:
    cdef cnp.ndarray x, weight
    if check_matrices(a) != SUCCESS:
        return -1
    try:
        x, weight = floating(&a.inputs[INPUT]), floating(&a.inputs[WEIGHT])
        plans = plans_of_gradient(
            x, weight, a.inputs[INPUT].shape[0], floating(&a.inputs[SOFTMAX]), floating(&a.results[INPUT_GRAD]),
            floating(&a.results[WEIGHT_GRAD])
        )
        return most_bytes(plans)
    except BaseException:  # for memory
        return -1


cdef Py_ssize_t statistics_workspace(const Arguments *a) noexcept with gil:
    if check_matrices(a) != SUCCESS:
        return -1
    try:
        return most_bytes(
            plans_of_statistics(floating(&a.inputs[INPUT]), floating(&a.inputs[WEIGHT]), a.inputs[INPUT].shape[0])
        )
    except BaseException:  # for memory
        return -1


cdef Py_ssize_t most_bytes(list plans) except -1:
    """What plans for as many rows or fewer take, which may be cut in another way."""
    return max([_linear_python.workspace_bound([plan], (<Plan>plan).workspace) for plan in plans], default=0)


cdef Schedule schedule_of(
    Plan plan, cnp.ndarray x, cnp.ndarray weight, cnp.ndarray memory, Rows rows, int num_threads
):
    cdef Schedule schedule = (
        Schedule.__new__(Schedule) if plan.tasks_of == OF_BLOCKS else SkinnySchedule.__new__(SkinnySchedule)
    )
    schedule.prepare(x, weight, plan, memory, rows, num_threads)
    return schedule


cdef Status compute_gradient(const Arguments *a, int num_threads) noexcept with gil:
    cdef cnp.ndarray x, weight, softmax, memory, input_grad, weight_grad
    cdef Rows rows
    cdef Plan plan
    cdef Schedule schedule
    cdef ag_matrix matrix
    cdef double last = 0
    cdef list plans, schedules = []
    cdef bint deferred = _tasks.defer_signals(True)
    try:
        x, weight, softmax = floating(&a.inputs[INPUT]), floating(&a.inputs[WEIGHT]), floating(&a.inputs[SOFTMAX])
        input_grad, weight_grad = floating(&a.results[INPUT_GRAD]), floating(&a.results[WEIGHT_GRAD])
        memory = array_of(&a.results[WORKSPACE], cnp.NPY_UINT8)
        rows = Rows(
            array_of(&a.inputs[TARGET], cnp.NPY_INT64), 0, cnp.PyArray_DIM(weight, 0),
            array_of(&a.inputs[TARGET_MASK], cnp.NPY_BOOL), floating(&a.inputs[GRAD]),
            floating(&a.inputs[LOGITS_MAX]), floating(&a.inputs[SUM_EXP_LOGITS])
        )
        plans = plans_of_gradient(x, weight, rows.count, softmax, input_grad, weight_grad)
        if bytes_of(plans) > cnp.PyArray_SIZE(memory):
            return PARAM_INVALID
        # Whatever is allocated is allocated here.
        for plan in plans:
            schedule = schedule_of(plan, x, weight, memory, rows, num_threads)
            schedule.set_gradient(softmax, input_grad, weight_grad, 0.0)
            schedules.append(schedule)
        for schedule in schedules:
            schedule.work()
        if not plans:
            for result in (input_grad, weight_grad):
                if result is not None:
                    matrix = matrix_of(result)
                    clear_rows(&matrix, 0, cnp.PyArray_DIM(result, 0), cnp.PyArray_DIM(result, 1), &last)
        return SUCCESS
    except BaseException:  # for memory: arguments were checked, and signals' handlers wait
        return BAD_ALLOC
    finally:
        _tasks.defer_signals(deferred)


cdef Status compute_statistics(const Arguments *a, int64_t start, int64_t end, int num_threads) noexcept with gil:
    cdef cnp.ndarray x, weight, memory, logits_max, sum_exp, predicted
    cdef Rows rows
    cdef Schedule schedule
    cdef list plans
    cdef bint deferred = _tasks.defer_signals(True)
    try:
        x, weight = floating(&a.inputs[INPUT]), floating(&a.inputs[WEIGHT])
        memory = array_of(&a.results[WORKSPACE], cnp.NPY_UINT8)
        logits_max, sum_exp = floating(&a.results[NEW_LOGITS_MAX]), floating(&a.results[NEW_SUM_EXP_LOGITS])
        predicted = floating(&a.results[PREDICTED_LOGITS])
        rows = Rows(array_of(&a.inputs[TARGET], cnp.NPY_INT64), start, end - start)
        plans = plans_of_statistics(x, weight, rows.count)
        if bytes_of(plans) > cnp.PyArray_SIZE(memory):
            return PARAM_INVALID
        if not plans:
            return SUCCESS
        schedule = schedule_of(plans[0], x, weight, memory, rows, num_threads)
        schedule.set_statistics(logits_max, sum_exp, predicted, None)
        memset(cnp.PyArray_DATA(predicted), 0, cnp.PyArray_NBYTES(predicted))
        schedule.work()
        return SUCCESS
    except BaseException:  # for memory: arguments were checked, and signals' handlers wait
        return BAD_ALLOC
    finally:
        _tasks.defer_signals(deferred)


# ---- the operators ---------------------------------------------------------------------------------------------------

cdef Status gradient(const Arguments *a, int num_threads) noexcept nogil:
    cdef Status status = check_call(a, num_threads)
    if a.inputs[GRAD].data == NULL or (
        a.inputs[SOFTMAX].data == NULL and (a.inputs[LOGITS_MAX].data == NULL or a.inputs[SUM_EXP_LOGITS].data == NULL)
    ):
        return PARAM_NULLPTR
    if status != SUCCESS:
        return status
    if not are_targets(a):
        return PARAM_INVALID
    return compute_gradient(a, num_threads)


cdef Status statistics(const Arguments *a, int64_t start, int64_t end, int num_threads) noexcept nogil:
    cdef Status status = check_call(a, num_threads)
    cdef const int64_t *targets = <const int64_t *>a.inputs[TARGET].data
    cdef uint8_t *mask = <uint8_t *>a.results[NEW_TARGET_MASK].data
    cdef int64_t *places = <int64_t *>a.results[MASKED_TARGET].data
    cdef void *predicted = a.results[PREDICTED_LOGITS].data
    cdef const void *largest = a.results[NEW_LOGITS_MAX].data
    cdef bint is_double = a.inputs[INPUT].dtype == AG_FLOAT64
    cdef ag_fpenv mode
    cdef Py_ssize_t i
    for i in range(NEW_LOGITS_MAX, RESULTS):
        if a.results[i].data == NULL:
            return PARAM_NULLPTR
    if status != SUCCESS:
        return status
    if not 0 <= start <= end or end - start > a.inputs[WEIGHT].shape[0] or a.inputs[WEIGHT].shape[0] == 0:
        return PARAM_INVALID
    status = compute_statistics(a, start, end, num_threads)
    if status != SUCCESS:
        return status
    mode = ag_fpenv_enter()
    for i in range(a.inputs[TARGET].shape[0]):
        mask[i] = targets[i] < start or targets[i] >= end
        places[i] = 0 if mask[i] else targets[i] - start
        if not mask[i]:
            set_number(predicted, i, is_double, number(predicted, i, is_double) - number(largest, i, is_double))
    ag_fpenv_leave(mode)
    return SUCCESS

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
