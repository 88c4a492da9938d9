"""The linear operators on NumPy arrays: problems of validated calls, and memory for their schedules.

The caller holds references to the arrays while a function runs. Vectors are contiguous and of native byte order; `Rows` in
`_linear_problem` describes them.
"""

from typing import NamedTuple

import numpy as np

cimport numpy as cnp
from libc.stdint cimport int64_t, uint8_t
from libc.string cimport memcpy, memset

from ascend_grad cimport _cpu, _memory, _threads
from ascend_grad._call cimport (
    BT,
    GRADIENT,
    LOSS,
    LOSS_GRADIENT,
    LOSS_OF_STATISTICS,
    TOP_K,
    Call,
    K,
    native_vector,
)
from ascend_grad._dtypes cimport dtype_of
from ascend_grad._kernels cimport AG_FLOAT64, ag_dtype
from ascend_grad._linear_candidates cimport choose_plans
from ascend_grad._linear_kernels cimport ag_matrix
from ascend_grad._linear_loss cimport (
    Loss,
    describe_loss,
    has_loss_plans,
    loss_schedule,
    loss_workspace_bound,
    loss_workspace_size,
    place_loss_workspace,
    prepare_loss,
    run_loss,
    vectors_size,
)
from ascend_grad._linear_plan cimport (
    Plan,
    Plans,
    Work,
    caches_exp,
    compensates_input_grad,
    compensates_weight_grad,
    kernels_for,
    nbytes,
)
from ascend_grad._linear_problem cimport Problem, Rows, count_active_rows, matrix_of, number, set_matrices
from ascend_grad._linear_results cimport (
    Probabilities,
    describe_targets,
    write_doubles,
    write_losses,
    write_probabilities,
)
from ascend_grad._linear_schedule cimport (
    Schedule,
    default_workspace,
    has_plans,
    least_workspace_of_sizes,
    place_workspace,
    prepare,
    run,
    threads_of,
    workspace_bound,
    workspace_size,
)
from ascend_grad._linear_top_k cimport describe_top_k
from ascend_grad._loss_arguments cimport one_number, option, set_options, set_results, vector_of
from ascend_grad._memory cimport ALIGNMENT, ceil_div
from ascend_grad._views cimport View, view_of

from ._dtypes import FLOATING_DTYPES
from .arrays import counted

cnp.import_array()

cdef tuple _dtypes = FLOATING_DTYPES  # in the order of ag_dtype
cdef cnp.dtype _float32 = np.dtype(np.float32)
cdef cnp.dtype _float64 = np.dtype(np.float64)
cdef cnp.dtype _int32 = np.dtype(np.int32)
cdef cnp.dtype _int64 = np.dtype(np.int64)
cdef cnp.dtype _uint8 = np.dtype(np.uint8)


cdef ag_matrix matrix(cnp.ndarray array):
    """Return an array as a matrix for the kernels; None has no data."""
    cdef View view = view_of(array)
    return matrix_of(&view)


cdef const void *data_of(cnp.ndarray vector):
    """Return the address of a vector's elements, or NULL for None."""
    return NULL if vector is None else cnp.PyArray_DATA(vector)


cdef Rows rows_of(
    cnp.ndarray target, int64_t start, int64_t size, cnp.ndarray mask=None, cnp.ndarray grad=None,
    cnp.ndarray maximum=None, cnp.ndarray sum=None
):
    """Describe the vectors of a call. None: not given."""
    cdef Rows rows
    memset(&rows, 0, sizeof(rows))
    rows.total = rows.active = cnp.PyArray_DIM(target, 0)
    rows.target, rows.is_wide = data_of(target), cnp.PyArray_ITEMSIZE(target) == 8
    rows.start, rows.size = start, size
    rows.mask = <const uint8_t *>data_of(mask)
    rows.is_packed = mask is not None and cnp.PyArray_TYPE(mask) != cnp.NPY_BOOL
    rows.grad, rows.max, rows.sum = data_of(grad), data_of(maximum), data_of(sum)
    return rows


cdef Problem layer_of(cnp.ndarray input, cnp.ndarray weight):
    """Return the problem of two matrices, without vectors and results."""
    cdef View x = view_of(input), w = view_of(weight)
    cdef Problem p
    set_matrices(&p, &x, &w)
    return p


cdef int solve(const Problem *p, Py_ssize_t workspace_bytes, int num_threads, double *last_check) except -1:
    """Solve a problem whose active rows were counted."""
    cdef Schedule schedule
    cdef cnp.ndarray memory
    prepare(&schedule, p, workspace_bytes)
    if not has_plans(&schedule):
        refuse_workspace(schedule.workspace_bytes)
    memory = _memory.workspace(workspace_size(&schedule))
    _memory.check_layout(place_workspace(&schedule, _memory.aligned(cnp.PyArray_BYTES(memory))), memory)
    with nogil:
        run(&schedule, num_threads, last_check)
    return 0


cdef int refuse_workspace(Py_ssize_t workspace_bytes) except -1:
    raise MemoryError(f"no plan fits into a workspace of {workspace_bytes} bytes")


# ---- gradients -------------------------------------------------------------------------------------------------------

cdef Problem gradient_problem(
    cnp.ndarray input, cnp.ndarray weight, cnp.ndarray softmax, cnp.ndarray input_grad, cnp.ndarray weight_grad
):
    """Describe a gradient without its vectors. None: not given, or not requested."""
    cdef Problem p = layer_of(input, weight)
    p.with_input_grad, p.with_weight_grad = input_grad is not None, weight_grad is not None
    p.softmax, p.input_grad, p.weight_grad = matrix(softmax), matrix(input_grad), matrix(weight_grad)
    return p


cdef int gradient(Call call, list results, int num_threads) except -1:
    """Compute the gradients that are requested."""
    cdef Problem p = problem_of(call, results, [], True)
    cdef cnp.ndarray grad = native_vector(option(call, "grad")), target = native_vector(option(call, "masked_target"))
    cdef cnp.ndarray mask = native_vector(counted(option(call, "target_mask"), call.sizes[BT]))
    cdef cnp.ndarray maximum = native_vector(option(call, "logits_max"))
    cdef cnp.ndarray sum_exp = native_vector(option(call, "sum_exp_logits"))
    cdef double last_check = 0
    p.rows, p.filter_eps = rows_of(target, 0, p.vocab, mask, grad, maximum, sum_exp), option(call, "filter_eps")
    with nogil:
        count_active_rows(&p.rows, cnp.PyArray_ITEMSIZE(grad), &last_check)
    return solve(&p, workspace_of(call), num_threads, &last_check)


# ---- statistics ------------------------------------------------------------------------------------------------------

cdef tuple statistics(Call call, int num_threads):
    """Compute and return the six results of fused_linear_online_max_sum."""
    cdef Problem p = layer_of(option(call, "input"), option(call, "weight"))
    cdef cnp.ndarray target = native_vector(option(call, "target"))
    cdef int64_t start = option(call, "vocab_start_index"), end = option(call, "vocab_end_index")
    cdef cnp.npy_intp[2] shape = [p.rows.total, p.vocab]
    cdef bint is_double = p.dtype == AG_FLOAT64
    cdef cnp.dtype acc_dtype = _float64 if is_double else _float32
    cdef cnp.ndarray logits_max = _memory.empty(1, shape, acc_dtype), sum_exp = _memory.empty(1, shape, acc_dtype)
    cdef cnp.ndarray predicted = _memory.empty(1, shape, acc_dtype)
    cdef cnp.ndarray mask = _memory.zeros(ceil_div(shape[0], 8), _uint8)
    cdef cnp.ndarray entries = _memory.empty(1, shape, _int64 if cnp.PyArray_ITEMSIZE(target) == 8 else _int32)
    cdef cnp.ndarray logits = None
    cdef void *bits = cnp.PyArray_DATA(mask)
    cdef void *rows_of_weight = cnp.PyArray_DATA(entries)
    cdef double last_check = 0
    if option(call, "return_logits"):
        logits = _memory.empty(2, shape, <cnp.dtype>_dtypes[<int>p.dtype])
    p.rows, p.with_statistics = rows_of(target, start, end - start), True
    p.logits_max, p.sum_exp = cnp.PyArray_DATA(logits_max), cnp.PyArray_DATA(sum_exp)
    p.predicted, p.logits = cnp.PyArray_DATA(predicted), matrix(logits)
    solve(&p, 0, num_threads, &last_check)
    with nogil:
        describe_targets(
            &p.rows, is_double, p.logits_max, p.predicted, bits, True, rows_of_weight, &last_check
        )
    return logits_max, sum_exp, predicted, mask, entries, logits


# ---- largest logits --------------------------------------------------------------------------------------------------

cdef Problem top_k_problem(
    cnp.ndarray input, cnp.ndarray weight, Py_ssize_t k, object source, list held, bint with_values
):
    """Describe the problem without its results; `set_options` describes the last three arguments."""
    cdef Problem p = layer_of(input, weight)
    p.with_statistics, p.top_k = True, k
    temperature = option(source, "temperature")
    p.temperatures, p.temperature = vector_of(temperature, held, with_values), one_number(temperature)
    p.bias = vector_of(option(source, "bias"), held, with_values)
    p.transform.scale, p.transform.softcap = option(source, "logit_scale"), option(source, "softcap") or 0
    describe_top_k(&p)
    return p


cdef Py_ssize_t workspace_of(Call call) except -1:
    """Return the limit of the workspace, 0 for the default."""
    return option(call, "workspace_bytes") or 0


cdef int top_k(Call call, list results, int num_threads) except -1:
    """Compute the k largest log-probabilities of each row and their indices."""
    cdef list held = []
    cdef Problem p = problem_of(call, results, held, True)
    cdef double last_check = 0
    p.top_values, p.top_indices = cnp.PyArray_DATA(results[0]), <int64_t *>cnp.PyArray_DATA(results[1])
    return solve(&p, workspace_of(call), num_threads, &last_check)


def part_top_k(
    cnp.ndarray input, cnp.ndarray weight, Py_ssize_t k, dict options, cnp.ndarray logits not None,
    cnp.ndarray index not None, cnp.ndarray rest not None, Py_ssize_t workspace_bytes, int num_threads
):
    """Compute the k largest logits of each row of a part of a vocabulary, not yet divided by the temperature.

    `options` has the temperature, bias, scale and softcap by name. `logits` and `index` are new arrays (BT, k). `rest` (BT,)
    of float64 receives the sum of exponentials of each row without the largest.
    """
    cdef list held = []
    cdef Problem p = top_k_problem(input, weight, k, options, held, True)
    cdef double last_check = 0
    p.top_values, p.top_indices = cnp.PyArray_DATA(logits), <int64_t *>cnp.PyArray_DATA(index)
    p.top_rest = <double *>cnp.PyArray_DATA(rest)
    solve(&p, workspace_bytes, num_threads, &last_check)


# ---- losses ----------------------------------------------------------------------------------------------------------

cdef Loss loss_of(
    cnp.ndarray input, cnp.ndarray weight, cnp.ndarray target, object source, tuple gradients, list held, bint with_values
):
    """Fill in a loss, without results but its gradients: of input, weight and bias, each None if it is not requested.

    `set_options` describes `source` and `with_values`. The arrays that hold the options are added to `held`.
    """
    cdef Loss x
    cdef cnp.ndarray input_grad, weight_grad
    input_grad, weight_grad, bias_grad = gradients
    memset(&x, 0, sizeof(x))
    x.p = gradient_problem(input, weight, None, input_grad, weight_grad)
    if weight_grad is not None and cnp.PyArray_IS_C_CONTIGUOUS(weight_grad):
        x.p.weight_grad_bytes = cnp.PyArray_NBYTES(weight_grad)
    if dtype_of(target) >= 0:
        x.p.prob = matrix(target)
    elif with_values:
        target = native_vector(target)
    held += set_options(&x.o, target, source, with_values)
    x.with_bias_grad = bias_grad is not None
    x.p.filter_eps = option(source, "filter_eps")
    x.bias = vector_of(option(source, "bias"), held, with_values)
    return x


cdef Loss loss_of_call(Call call, list results, list held, bint with_values):
    """Describe the loss of a validated call, or only its gradients. `results` has an array, or None, for each result."""
    cdef bint has_loss = call.operator.kernels == LOSS
    cdef Loss x = loss_of(
        option(call, "input"), option(call, "weight"), option(call, "target"), call, tuple(results[has_loss:has_loss + 3]),
        held, with_values
    )
    if has_loss:
        set_results(&x.o, results)
    else:
        x.lse = vector_of(option(call, "lse"), held, with_values)
        x.entropy = vector_of(option(call, "entropy"), held, with_values)
    describe_loss(&x)
    return x


cdef cnp.ndarray solve_loss(Loss *x, Py_ssize_t workspace_bytes, int num_threads):
    """Compute a loss whose rows were described. Return the memory of its vectors, which the caller reads results from."""
    cdef cnp.ndarray vectors, memory
    cdef cnp.npy_intp size = vectors_size(x) + ALIGNMENT
    cdef double last_check = 0
    vectors = _memory.empty(1, &size, _uint8)
    x.vectors = _memory.aligned(cnp.PyArray_BYTES(vectors))
    with nogil:
        prepare_loss(x, workspace_bytes, &last_check)
    if not has_loss_plans(x):
        refuse_workspace(x.first.workspace_bytes)
    memory = _memory.workspace(loss_workspace_size(x))
    place_loss_workspace(x, _memory.aligned(cnp.PyArray_BYTES(memory)))
    with nogil:
        run_loss(x, num_threads, &last_check)
    return vectors


cdef int write_bias_grad(const Loss *x, cnp.ndarray bias_grad) except -1:
    """Write the gradient of a bias, which is None if it is not requested."""
    cdef ag_matrix to
    if bias_grad is not None:
        to = matrix(bias_grad)
        write_doubles(_cpu.active(), x.p.bias_sums, x.p.vocab, &to)
    return 0


cdef int loss_and_gradients(Call call, list results, int num_threads) except -1:
    """Compute the loss of a validated call and its gradients, or only the gradients.

    Logits are cached between the passes, in the workspace and in the memory of ``weight_grad`` (6 BT V H flops). Logits that
    find no space there are computed twice (8 BT V H).
    """
    cdef list held = []
    cdef Loss x = loss_of_call(call, results, held, True)
    _vectors = solve_loss(&x, workspace_of(call), num_threads)
    return write_bias_grad(&x, results[3 if call.operator.kernels == LOSS else 2])


cdef Loss part_of(
    cnp.ndarray input, cnp.ndarray weight, cnp.ndarray target, dict options, tuple gradients, list held
):
    """Describe a part of a loss. `part_statistics` and `part_gradients` describe the arguments."""
    cdef Loss x = loss_of(input, weight, target, options, gradients, held, True)
    x.is_part, x.with_more = True, options["with_more"]
    describe_loss(&x)
    x.p.rows.with_outputs = options["with_outputs"]
    return x


def part_statistics(
    cnp.ndarray input, cnp.ndarray weight, cnp.ndarray target, dict options, cnp.ndarray to_logits,
    Py_ssize_t workspace_bytes, int num_threads
):
    """Compute and return the statistics of the logits of a part of a vocabulary.

    Parameters
    ----------
    options : dict
        The options of the loss by name. Further: `with_more`, whether moments and first maxima are requested;
        `with_outputs`, whether rows of token weight 0 have statistics; `grad_lse`, `grad_log_prob` and `grad_entropy`, the
        upstream gradients of outputs.
    to_logits : ndarray, shape (BT, V), or None
        Receives the logits of the rows that are not ignored, in the dtype of sums. None: not requested.

    Returns
    -------
    numbers : ndarray of float64, shape (4, BT)
        Each row's maximum, rest, moment and deficit, as in ``ag_row_statistics``.
    argmax : ndarray of int64, shape (BT,)
        The entry of this part that has the first maximum.
    target_logits : ndarray of float64, shape (BT, targets of a row)
        The logits of the targets, 0 for a target in another part.
    """
    cdef list held = []
    cdef Loss x = part_of(input, weight, target, options, (None, None, None), held)
    cdef Py_ssize_t i, n = x.p.rows.total
    of_rows, argmax, logits = np.zeros((4, n)), np.zeros(n, np.int64), np.zeros((n, x.o.target_count))
    cdef double[:, ::1] to = of_rows
    cdef int64_t[::1] entries = argmax
    cdef cnp.ndarray target_logits = logits
    cdef bint is_double = x.p.dtype == AG_FLOAT64
    x.p.logits = matrix(to_logits)
    _vectors = solve_loss(&x, workspace_bytes, num_threads)
    memcpy(cnp.PyArray_DATA(target_logits), x.p.target_logits, n * x.o.target_count * sizeof(double))
    for i in range(n):
        to[0, i], to[1, i] = number(x.p.logits_max, i, is_double), x.p.rest[i]
        if x.p.with_more:
            to[2, i], to[3, i] = x.p.loss_rows[i].moment, x.p.loss_rows[i].deficit * x.p.class_scale
            entries[i] = x.p.loss_rows[i].argmax
    return of_rows, argmax, logits


def part_gradients(
    cnp.ndarray input, cnp.ndarray weight, cnp.ndarray target, dict options, cnp.ndarray numbers not None,
    cnp.ndarray target_logits not None, cnp.ndarray target_weights not None, dict results, cnp.ndarray logits,
    Py_ssize_t workspace_bytes, int num_threads
):
    """Compute the gradients of a part of a vocabulary from the statistics of the whole, into new arrays.

    Parameters
    ----------
    options : dict
        As in `part_statistics`. Of the whole vocabulary: `vocab`, the number of entries; `class_sum`, the sum of their
        class weights; and `denominators`, of the cross-entropy and of the squared lse.
    numbers, target_logits : ndarray
        As `part_statistics` returns them, of the whole vocabulary.
    target_weights : ndarray of float64, shape (BT, targets of a row)
        The targets' probabilities times class weights, 0 for an ignored target.
    results : dict of (ndarray or None)
        ``input_grad``, ``weight_grad`` and ``bias_grad``. None: not requested.
    logits : ndarray, shape (BT, V), or None
        As `part_statistics` returns them. None: they are computed again.
    """
    cdef list held = []
    cdef tuple gradients = (results["input_grad"], results["weight_grad"], results["bias_grad"])
    cdef Loss x = part_of(input, weight, target, options, gradients, held)
    cdef Py_ssize_t n = cnp.PyArray_DIM(input, 0)
    cdef const double *base = <const double *>cnp.PyArray_DATA(numbers)
    x.whole.max, x.whole.rest, x.whole.moment, x.whole.deficit = base, base + n, base + 2 * n, base + 3 * n
    x.whole.target_logits = <const double *>cnp.PyArray_DATA(target_logits)
    x.whole.target_weights = <const double *>cnp.PyArray_DATA(target_weights)
    x.whole.vocab, x.whole.class_sum = options["vocab"], options["class_sum"]
    x.whole.denominators = options["denominators"]
    x.p.softmax = matrix(logits)
    _vectors = solve_loss(&x, workspace_bytes, num_threads)
    write_bias_grad(&x, results["bias_grad"])


cdef int probabilities(
    cnp.ndarray logits, cnp.ndarray logits_max, cnp.ndarray sum_exp, cnp.ndarray out, int num_threads
) except -1:
    """Compute ``exp(logits - logits_max) / sum_exp`` of every row into `out`, which overlaps no input."""
    cdef Probabilities p
    cdef double last_check = 0
    p.kernels, p.variant = kernels_for(<ag_dtype>dtype_of(logits)), _cpu.active()
    p.logits, p.out = matrix(logits), matrix(out)
    p.rows, p.n = cnp.PyArray_DIM(logits, 0), cnp.PyArray_DIM(logits, 1)
    p.max, p.sum, p.is_double = data_of(logits_max), data_of(sum_exp), dtype_of(logits_max) == AG_FLOAT64
    with nogil:
        write_probabilities(&p, num_threads, &last_check)
    return 0


cdef int loss_of_statistics(Call call, list results, int num_threads) except -1:
    """Compute ``log(sum_exp) - predicted``, and the probabilities if they are requested."""
    cdef cnp.ndarray loss = results[0], sum_exp = native_vector(option(call, "sum_exp_logits"))
    cdef cnp.ndarray predicted = native_vector(option(call, "predicted_logits"))
    cdef ag_matrix out = matrix(loss)
    cdef const void *sums = data_of(sum_exp)
    cdef const void *logits = data_of(predicted)
    cdef bint is_double = dtype_of(sum_exp) == AG_FLOAT64
    cdef Py_ssize_t rows = cnp.PyArray_DIM(loss, 0)
    cdef double last_check = 0
    if results[1] is not None:
        probabilities(
            option(call, "vocab_parallel_logits"), native_vector(option(call, "logits_max")), sum_exp, results[1],
            num_threads
        )
    with nogil:
        write_losses(_cpu.active(), is_double, sums, logits, rows, &out, &last_check)
    return 0


# ---- any operator ----------------------------------------------------------------------------------------------------

cdef Problem problem_of(Call call, list results, list held, bint with_values):
    """Describe a call of an operator without a loss, but for its vectors, by the arguments of `compute`.

    `set_options` describes `with_values`, and the arrays that hold the options are added to `held`.
    """
    cdef Problem p
    cdef cnp.ndarray input = option(call, "input"), weight = option(call, "weight")
    if call.operator.kernels == GRADIENT:
        return gradient_problem(input, weight, option(call, "softmax"), results[0], results[1])
    if call.operator.kernels == TOP_K:
        return top_k_problem(input, weight, call.sizes[K], call, held, with_values)
    p = layer_of(input, weight)
    p.with_statistics, p.logits = True, matrix(None if results is None else results[5])
    return p


cdef int compute(Call call, list results, int num_threads) except -1:
    """Compute a validated call into arrays that overlap no input; `statistics` allocates its own.

    `results` has an array, or None, for each result.
    """
    if call.operator.kernels == GRADIENT:
        return gradient(call, results, num_threads)
    if call.operator.kernels == TOP_K:
        return top_k(call, results, num_threads)
    if call.operator.kernels == LOSS_OF_STATISTICS:
        return loss_of_statistics(call, results, num_threads)
    return loss_and_gradients(call, results, num_threads)


cdef Py_ssize_t workspace_bound_of(Call call, list results) except -1:
    """Return the most bytes that `compute` allocates for arrays of these shapes and layouts, but copies.

    `loss_of_statistics` allocates nothing else.
    """
    cdef Loss x
    cdef Problem p
    cdef Schedule schedule
    if call.operator.kernels == LOSS or call.operator.kernels == LOSS_GRADIENT:
        x = loss_of_call(call, results, [], False)
        return loss_workspace_bound(&x, workspace_of(call)) + ALIGNMENT
    p = problem_of(call, results, [], False)
    prepare(&schedule, &p, workspace_of(call))
    return workspace_bound(&schedule)


cdef tuple plan_and_threads(Call call, list results, int num_threads):
    """Return the plan and the number of threads of `compute`, if all rows are active.

    `results` may be None for statistics, and for their loss.
    """
    cdef Loss x
    cdef Problem p
    cdef Schedule schedule
    cdef bint is_one_pass = True
    cdef str plan
    if call.operator.kernels == LOSS_OF_STATISTICS:
        logits = option(call, "vocab_parallel_logits")
        return "row by row", _threads.expected_threads(0 if logits is None else logits.size, num_threads)
    if call.operator.kernels == LOSS or call.operator.kernels == LOSS_GRADIENT:
        x = loss_of_call(call, results, [], False)
        loss_schedule(&x, workspace_of(call), &schedule, &is_one_pass)
        is_one_pass = is_one_pass or schedule.is_empty or x.lse != NULL
    else:
        p = problem_of(call, results, [], False)
        prepare(&schedule, &p, workspace_of(call))
    plan = (<bytes>schedule.plans.name).decode() if schedule.plans.count else "nothing to compute"
    return plan if is_one_pass else f"statistics, then gradients: {plan}", threads_of(&schedule, num_threads)


# ---- plans -----------------------------------------------------------------------------------------------------------

class PlanDescription(NamedTuple):
    """One sweep of a plan, for tests. `Plan` in `_linear_plan` describes the fields."""

    name: str
    nbytes: int
    rows: int
    vocab: int
    chunks: int
    blocks: int
    chunks_outside: bool
    caches_logits: bool
    cached_blocks: int
    blocks_in_weight_grad: int
    packed_chunks: int
    tasks: int  #: 0 if the sweep packs
    products: frozenset
    compensated: frozenset


cdef object described(const Plan *plan, bytes name):
    """Return one sweep of a plan as a named tuple."""
    products = {
        "logits": plan.work.with_logits, "input_grad": plan.work.with_input_grad, "weight_grad": plan.work.with_weight_grad
    }
    compensated = {"input_grad": compensates_input_grad(plan), "weight_grad": compensates_weight_grad(plan)}
    return PlanDescription(
        name.decode(), nbytes(plan), plan.rows, plan.vocab, plan.chunks, plan.blocks, plan.chunks_outside,
        plan.caches_logits, plan.cached_blocks, plan.blocks_in_weight_grad, plan.packed_chunks, plan.tasks,
        frozenset([each for each, is_chosen in products.items() if is_chosen]),
        frozenset([each for each, is_chosen in compensated.items() if is_chosen]),
    )


def plans(
    cnp.ndarray input, cnp.ndarray weight, Py_ssize_t rows, Py_ssize_t workspace_bytes, bint with_logits,
    bint with_input_grad, bint with_weight_grad, bint buffers_weight_grad, bint with_statistics=False,
    Py_ssize_t weight_grad_bytes=0, Py_ssize_t top_k=0
):
    """Return the plans of a problem with `rows` active rows, for tests. `Work` in `_linear_plan` describes the arguments."""
    cdef Work work
    cdef Plans chosen
    cdef int i
    memset(&work, 0, sizeof(work))
    work.rows, work.total_rows = rows, cnp.PyArray_DIM(input, 0)
    work.vocab, work.hidden = cnp.PyArray_DIM(weight, 0), cnp.PyArray_DIM(weight, 1)
    work.itemsize = cnp.PyArray_ITEMSIZE(input)
    work.with_logits, work.with_statistics = with_logits, with_statistics
    work.with_input_grad, work.with_weight_grad = with_input_grad, with_weight_grad
    work.buffers_weight_grad, work.weight_grad_bytes = with_weight_grad and buffers_weight_grad, weight_grad_bytes
    work.top_k = top_k
    work.caches_exp = caches_exp(<ag_dtype>dtype_of(input))
    chosen = choose_plans(kernels_for(<ag_dtype>dtype_of(input)), &work, workspace_bytes)
    return [described(&chosen.each[i], chosen.name) for i in range(chosen.count)]


def least_workspace_bytes(
    cnp.ndarray input, cnp.ndarray weight, bint with_logits, bint with_input_grad, bint with_weight_grad,
    bint buffers_weight_grad, bint with_statistics=False, bint is_loss=False, Py_ssize_t top_k=0
):
    """Return the least `workspace_bytes` of a problem; see `Work` in `_linear_plan`. For tests."""
    return least_workspace_of_sizes(
        <ag_dtype>dtype_of(input), cnp.PyArray_DIM(input, 0), cnp.PyArray_DIM(weight, 0), cnp.PyArray_DIM(weight, 1),
        with_logits, with_statistics, with_input_grad, with_weight_grad, buffers_weight_grad, is_loss, top_k
    )


def default_workspace_bytes(cnp.ndarray input, cnp.ndarray weight, bint with_input_grad, bint with_weight_grad):
    """Return the default of `workspace_bytes` for the loss with these gradients."""
    cdef Problem p = layer_of(input, weight)
    p.with_input_grad, p.with_weight_grad = with_input_grad, with_weight_grad
    p.weight_grad = p.weight
    return default_workspace(&p)
