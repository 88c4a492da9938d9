"""Calls of the linear operators whose arguments are views: their checks, and the problems that they describe.

Nothing here takes the interpreter's lock.
"""

from libc.math cimport INFINITY
from libc.stdint cimport int64_t, uint8_t

from ascend_grad._linear_problem cimport Problem, acc_size_of, count_active_rows, matrix_of, set_matrices
from ascend_grad._linear_results cimport describe_targets
from ascend_grad._linear_schedule cimport Schedule, prepare, solve, workspace_bound
from ascend_grad._linear_top_k cimport describe_top_k
from ascend_grad._memory cimport SIZE_LIMIT
from ascend_grad._overlap cimport are_nested, may_share_memory
from ascend_grad._views cimport View, is_addressable, size_of
from ascend_grad.status cimport PARAM_INVALID, PARAM_NULLPTR, SUCCESS, Status

from . import arguments
from .operators.options import MAX_TOP_K as MOST_TOP_K

cdef int MAX_THREADS = arguments.MAX_THREADS
cdef Py_ssize_t MAX_TOP_K = MOST_TOP_K

# ---- checks ----------------------------------------------------------------------------------------------------------

cdef inline bint is_given(const Arguments *a, int i) noexcept nogil:
    return a.views[i].data != NULL


cdef bint has_arguments(const Arguments *a) noexcept nogil:
    """Return whether the arguments are given that the operator needs beside input, weight, target and workspace."""
    cdef int i
    if a.operator == GRADIENT:
        return is_given(a, GRAD) and (is_given(a, SOFTMAX) or (is_given(a, LOGITS_MAX) and is_given(a, SUM_EXP_LOGITS)))
    for i in range(LOG_PROB if a.operator == TOP_K else NEW_LOGITS_MAX, ARGUMENTS if a.operator == TOP_K else LOG_PROB):
        if not is_given(a, i):
            return False
    return True


cdef bint fits_memory(const View *view) noexcept nogil:
    """Return whether all elements of a matrix have addresses, and plans can count its bytes."""
    return is_addressable(view) and size_of(view) <= SIZE_LIMIT // view.itemsize


cdef Status check_matrices(const Arguments *a) noexcept nogil:
    """Check that input and weight are given, fit together, and are not too large."""
    cdef const View *input = &a.views[INPUT]
    cdef const View *weight = &a.views[WEIGHT]
    if input.data == NULL or weight.data == NULL:
        return PARAM_NULLPTR
    if weight.shape[1] != input.shape[1] or not fits_memory(input) or not fits_memory(weight):
        return PARAM_INVALID
    return SUCCESS


cdef bint has_shapes(const Arguments *a) noexcept nogil:
    """Return whether all views but input, weight and workspace fit to these, and have addresses for all elements."""
    cdef Py_ssize_t hidden = a.views[INPUT].shape[1], vocab = a.views[WEIGHT].shape[0], rows, columns
    cdef const View *view
    cdef int i
    for i in range(TARGET, ARGUMENTS):
        view = &a.views[i]
        if view.data == NULL or i == WORKSPACE:
            continue
        rows = vocab if i == BIAS or i == WEIGHT_GRAD else a.views[INPUT].shape[0]
        columns = vocab if i == SOFTMAX else a.top_k if i >= LOG_PROB else hidden
        if view.shape[0] != rows or (view.ndim == 2 and view.shape[1] != columns) or not is_addressable(view):
            return False
    return True


cdef bint has_separate_results(const Arguments *a) noexcept nogil:
    """Return whether no result shares memory with another argument, or has two elements in the same memory."""
    cdef int i, k
    for i in range(WORKSPACE, ARGUMENTS):
        if not is_given(a, i) or size_of(&a.views[i]) == 0:
            continue
        if not are_nested(&a.views[i]):
            return False
        for k in range(i):
            if is_given(a, k) and may_share_memory(&a.views[i], &a.views[k]):
                return False
    return True


cdef bint are_targets(const Arguments *a) noexcept nogil:
    """Return whether every target that is not masked is a row of weight."""
    cdef const int64_t *targets = <const int64_t *>a.views[TARGET].data
    cdef const uint8_t *mask = <const uint8_t *>a.views[TARGET_MASK].data
    cdef Py_ssize_t i
    for i in range(a.views[TARGET].shape[0]):
        if (mask == NULL or not mask[i]) and not 0 <= targets[i] < a.views[WEIGHT].shape[0]:
            return False
    return True


cdef bint has_top_k(const Arguments *a) noexcept nogil:
    """Return whether the number of log-probabilities is valid for the vocabulary."""
    return 1 <= a.top_k <= min(MAX_TOP_K, a.views[WEIGHT].shape[0])


cdef bint is_positive(double number) noexcept nogil:
    return 0 < number < INFINITY


cdef bint has_values(const Arguments *a) noexcept nogil:
    """Return whether the numbers and the elements of an operator are valid."""
    cdef const double *temperatures = <const double *>a.views[TEMPERATURES].data
    cdef Py_ssize_t vocab = a.views[WEIGHT].shape[0], i
    if a.operator == GRADIENT:
        return are_targets(a)
    if a.operator == STATISTICS:
        return 0 <= a.start <= a.end and a.end - a.start <= vocab and vocab > 0
    for i in range(a.views[TEMPERATURES].shape[0] if temperatures != NULL else 0):
        if not is_positive(temperatures[i]):
            return False
    return (
        has_top_k(a) and is_positive(a.temperature) and -INFINITY < a.logit_scale < INFINITY and 0 <= a.softcap < INFINITY
    )


cdef Status check(const Arguments *a, int num_threads) noexcept nogil:
    cdef Status status
    if a.views[INPUT].dtype < 0:
        return PARAM_INVALID
    if not has_arguments(a):
        return PARAM_NULLPTR
    status = check_matrices(a)
    if status != SUCCESS:
        return status
    if not is_given(a, WORKSPACE) or (a.operator != TOP_K and not is_given(a, TARGET)):
        return PARAM_NULLPTR
    if not has_shapes(a) or num_threads < 0 or num_threads > MAX_THREADS:
        return PARAM_INVALID
    return SUCCESS if has_separate_results(a) and has_values(a) else PARAM_INVALID


# ---- problems --------------------------------------------------------------------------------------------------------

cdef void describe(Problem *p, const Arguments *a) noexcept nogil:
    """Describe the problem of a call, with all rows active."""
    set_matrices(p, &a.views[INPUT], &a.views[WEIGHT])
    p.rows.target, p.rows.is_wide, p.rows.start, p.rows.size = a.views[TARGET].data, True, a.start, a.end - a.start
    if a.operator == GRADIENT:
        p.rows.size = p.vocab
    p.rows.mask, p.rows.grad = <const uint8_t *>a.views[TARGET_MASK].data, a.views[GRAD].data
    p.rows.max, p.rows.sum = a.views[LOGITS_MAX].data, a.views[SUM_EXP_LOGITS].data
    p.softmax = matrix_of(&a.views[SOFTMAX])
    p.input_grad, p.weight_grad = matrix_of(&a.views[INPUT_GRAD]), matrix_of(&a.views[WEIGHT_GRAD])
    p.with_input_grad, p.with_weight_grad = p.input_grad.data != NULL, p.weight_grad.data != NULL
    p.with_statistics = a.operator != GRADIENT
    p.logits_max, p.sum_exp = a.views[NEW_LOGITS_MAX].data, a.views[NEW_SUM_EXP_LOGITS].data
    p.predicted = a.views[PREDICTED_LOGITS].data
    if a.operator == TOP_K:
        p.top_k, p.temperature = a.top_k, a.temperature
        p.temperatures, p.bias = <const double *>a.views[TEMPERATURES].data, <const double *>a.views[BIAS].data
        p.transform.scale, p.transform.softcap = a.logit_scale, a.softcap
        describe_top_k(p)
        p.top_values, p.top_indices = a.views[LOG_PROB].data, <int64_t *>a.views[INDEX].data


cdef Py_ssize_t workspace_of(const Arguments *a) noexcept nogil:
    """Return the bytes of a workspace for a call, whichever rows are active, or -1 if the arguments do not fit together."""
    cdef Schedule schedule
    cdef Problem p
    if a.views[INPUT].dtype < 0 or check_matrices(a) != SUCCESS or not has_shapes(a):
        return -1
    if a.operator == TOP_K and not has_top_k(a):
        return -1
    describe(&p, a)
    prepare(&schedule, &p, 0)
    return workspace_bound(&schedule)


cdef Status compute(const Arguments *a, int num_threads) noexcept nogil:
    """Check a call and compute its results."""
    cdef const View *workspace = &a.views[WORKSPACE]
    cdef Status status = check(a, num_threads)
    cdef Problem p
    if status != SUCCESS:
        return status
    describe(&p, a)
    count_active_rows(&p.rows, acc_size_of(p.dtype), NULL)
    status = solve(&p, workspace.data, workspace.shape[0], num_threads)
    if status == SUCCESS and a.operator == STATISTICS:
        describe_targets(
            &p.rows, acc_size_of(p.dtype) == 8, p.logits_max, p.predicted, a.views[NEW_TARGET_MASK].data, False,
            a.views[MASKED_TARGET].data, NULL
        )
    return status
