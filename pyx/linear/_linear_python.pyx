"""The linear operators on the CPU: from arrays to plans and schedules, and what comes before and after them."""

import numpy as np

cimport cython

cimport numpy as cnp
from libc.math cimport NAN, log
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.string cimport memset

from ascend_grad cimport _cpu, _memory, _tasks, _threads
from ascend_grad._dtypes cimport dtype_of
from ascend_grad._kernels cimport (
    AG_FLOAT64,
    ag_copy_block,
    ag_dtype,
    ag_fpenv,
    ag_fpenv_enter,
    ag_fpenv_leave,
    ag_itemsize,
    ag_variant,
    ag_widen,
)
from ascend_grad._linear_kernels cimport ag_linear_kernels, ag_linear_kernels_of, ag_matrix
from ascend_grad._linear_plan cimport OF_BLOCKS, Plan, Problem, bytes_of, plan_with_logits, plans_of
from ascend_grad._linear_rows cimport (
    ROWS_PER_CHECK,
    SEGMENT,
    Rows,
    clear_rows,
    convert_segment,
    holds_sums,
    matrix_of,
    number,
    set_number,
)
from ascend_grad._linear_schedule cimport Schedule
from ascend_grad._linear_skinny cimport SkinnySchedule
from ascend_grad._memory cimport align_up, ceil_div
from ascend_grad.status cimport SUCCESS

from ._dtypes import FLOATING_DTYPES

cnp.import_array()

cdef tuple _dtypes = FLOATING_DTYPES  # in the order of ag_dtype
cdef cnp.dtype _float32 = np.dtype(np.float32)
cdef cnp.dtype _float64 = np.dtype(np.float64)
cdef cnp.dtype _int32 = np.dtype(np.int32)
cdef cnp.dtype _int64 = np.dtype(np.int64)
cdef cnp.dtype _uint8 = np.dtype(np.uint8)

# What a call may take to work in where nobody says: so much, or this share of the bytes of its matrices where that is more.
cdef Py_ssize_t DEFAULT_WORKSPACE = 64 << 20
cdef Py_ssize_t WORKSPACE_SHARE = 4
# Elements of a task of `probabilities`.
cdef Py_ssize_t PART_ELEMENTS = 1 << 16


cdef const ag_linear_kernels *kernels_for(cnp.ndarray array):
    return ag_linear_kernels_of(_cpu.active(), <ag_dtype>dtype_of(array))


cdef Schedule new_schedule(
    cnp.ndarray input, cnp.ndarray weight, Plan plan, cnp.ndarray memory, Rows rows, int threads
):
    # A constructor's arguments would travel as a tuple of objects.
    cdef Schedule schedule = (
        Schedule.__new__(Schedule) if plan.tasks_of == OF_BLOCKS else SkinnySchedule.__new__(SkinnySchedule)
    )
    schedule.prepare(input, weight, plan, memory, rows, threads)
    return schedule


cdef Problem problem_of(cnp.ndarray input, cnp.ndarray weight, Py_ssize_t rows, bint with_logits) noexcept:
    cdef Problem problem
    memset(&problem, 0, sizeof(problem))
    problem.rows, problem.with_logits = rows, with_logits
    problem.vocab, problem.hidden = cnp.PyArray_DIM(weight, 0), cnp.PyArray_DIM(weight, 1)
    problem.total_rows, problem.itemsize = cnp.PyArray_DIM(input, 0), cnp.PyArray_ITEMSIZE(input)
    return problem


cpdef Py_ssize_t default_workspace(
    cnp.ndarray input, cnp.ndarray weight, bint with_input_grad, bint with_weight_grad, Py_ssize_t beside=0
):
    """Bytes, from inputs and results: `beside` those of probabilities or logits that a call takes or returns."""
    cdef Py_ssize_t x = cnp.PyArray_NBYTES(input) // WORKSPACE_SHARE, w = cnp.PyArray_NBYTES(weight) // WORKSPACE_SHARE
    return max(DEFAULT_WORKSPACE, x * (1 + with_input_grad) + w * (1 + with_weight_grad) + beside // WORKSPACE_SHARE)


cdef list plans_of_statistics(cnp.ndarray input, cnp.ndarray weight, Py_ssize_t rows, Py_ssize_t workspace):
    """None where there is nothing to do."""
    cdef Problem problem = problem_of(input, weight, rows, True)
    problem.with_statistics = True
    return plans_of(kernels_for(input), &problem, workspace) if rows and problem.vocab else []


cdef list plans_of_gradient(
    cnp.ndarray input, cnp.ndarray weight, Py_ssize_t rows, bint with_logits, bint with_input_grad, bint with_weight_grad,
    bint buffers_weight_grad, Py_ssize_t workspace, bint caches_logits=False, Py_ssize_t weight_grad_bytes=0
):
    """None where there is nothing to do, or, with logits to be cached, no plan that does so."""
    cdef const ag_linear_kernels *kernels = kernels_for(input)
    cdef Problem problem = problem_of(input, weight, rows, with_logits)
    problem.with_input_grad, problem.with_weight_grad = with_input_grad, with_weight_grad
    problem.buffers_weight_grad, problem.with_statistics = with_weight_grad and buffers_weight_grad, caches_logits
    problem.weight_grad_bytes = weight_grad_bytes
    if not rows or not problem.vocab or not problem.hidden or not (with_input_grad or with_weight_grad):
        return []
    if not caches_logits:
        return plans_of(kernels, &problem, workspace)
    plan = plan_with_logits(kernels, &problem, workspace)
    return [] if plan is None else [plan]


def plans(
    cnp.ndarray input, cnp.ndarray weight, Py_ssize_t rows, Py_ssize_t workspace, bint with_logits, bint with_input_grad,
    bint with_weight_grad, bint buffers_weight_grad, bint caches_logits=False, Py_ssize_t weight_grad_bytes=0
):
    """The plans of the statistics (neither gradient) or of the gradients, where so many rows count."""
    if not (with_input_grad or with_weight_grad):
        return plans_of_statistics(input, weight, rows, workspace)
    return plans_of_gradient(
        input, weight, rows, with_logits, with_input_grad, with_weight_grad, buffers_weight_grad, workspace, caches_logits,
        weight_grad_bytes
    )


def workspace_bound(list plans, Py_ssize_t workspace):
    """Bytes that a workspace takes at most for these plans, or for those of fewer rows, which are cut differently."""
    cdef Plan plan
    for plan in plans:
        if plan.blocks > 1 or plan.chunks > 1 or plan.slices > 1:
            return workspace
    return bytes_of(plans)


@cython.final
cdef class Gradient:
    """One call that is ready to run: nothing is allocated from there on, so that nothing fails after the first result is
    written."""

    cdef list schedules
    cdef Rows rows
    cdef ag_matrix input_grad, weight_grad
    cdef Py_ssize_t vocab, hidden
    cdef bint clears_input_grad, clears_weight_grad

    cdef int prepare(
        self, cnp.ndarray input, cnp.ndarray weight, list plans, cnp.ndarray memory, Rows rows, cnp.ndarray softmax,
        cnp.ndarray input_grad, cnp.ndarray weight_grad, double filter_eps, int threads
    ) except -1:
        """`plans`: none where there is nothing to do but to write zeros."""
        cdef Schedule schedule
        cdef Plan plan
        self.schedules, self.rows = [], rows
        self.vocab, self.hidden = cnp.PyArray_DIM(weight, 0), cnp.PyArray_DIM(weight, 1)
        for plan in plans:
            schedule = new_schedule(input, weight, plan, memory, rows, threads)
            schedule.set_gradient(softmax, input_grad, weight_grad, filter_eps)
            self.schedules.append(schedule)
        if not plans and input_grad is not None:
            self.clears_input_grad, self.input_grad = True, matrix_of(input_grad)
        if not plans and weight_grad is not None:
            self.clears_weight_grad, self.weight_grad = True, matrix_of(weight_grad)
        return 0

    cdef int run(self) except -1:
        cdef Schedule schedule
        cdef double last = 0
        for schedule in self.schedules:
            schedule.work()
        with nogil:
            if self.clears_input_grad:
                clear_rows(&self.input_grad, 0, self.rows.total, self.hidden, &last)
            if self.clears_weight_grad:
                clear_rows(&self.weight_grad, 0, self.vocab, self.hidden, &last)
        return 0


def gradient(
    cnp.ndarray input, cnp.ndarray weight, Rows rows, cnp.ndarray softmax, cnp.ndarray input_grad,
    cnp.ndarray weight_grad, Py_ssize_t workspace, double filter_eps, int threads, list aside
):
    """Both gradients (None: not wanted) into arrays that overlap no input.

    `workspace`: bytes to work in at most, 0 for the default. `aside`: see `copy_all`.
    """
    if not workspace:
        workspace = default_workspace(
            input, weight, input_grad is not None, weight_grad is not None,
            0 if softmax is None else cnp.PyArray_NBYTES(softmax)
        )
    cdef list plans = plans_of_gradient(
        input, weight, rows.count, softmax is None, input_grad is not None, weight_grad is not None,
        weight_grad is not None and not holds_sums(weight_grad, kernels_for(input).acc_size), workspace
    )
    cdef cnp.ndarray memory = _memory.workspace(bytes_of(plans))
    cdef Gradient call = Gradient.__new__(Gradient)
    call.prepare(input, weight, plans, memory, rows, softmax, input_grad, weight_grad, filter_eps, threads)
    call.run()
    copy_all(aside)


cpdef copy_all(list pairs):
    """From the second to the first array of each pair; see `_memory.copy_into`."""
    cdef Py_ssize_t i
    for i in range(len(pairs)):
        _memory.copy_into(<cnp.ndarray>(<tuple>pairs[i])[0], <cnp.ndarray>(<tuple>pairs[i])[1])


def loss_and_gradients(
    cnp.ndarray input, cnp.ndarray weight, cnp.ndarray target, int64_t start, int64_t ignored, reduction,
    const double[::1] grad_loss, cnp.ndarray loss, cnp.ndarray input_grad, cnp.ndarray weight_grad,
    Py_ssize_t workspace, double filter_eps, int threads
):
    """The loss into `loss` (accumulators' dtype; shape () or (BT,)), and both gradients (None: not wanted): new arrays.

    `grad_loss` holds one number, or one for each row. Logits for which there is room in the workspace and in the memory of
    `weight_grad` are cached between the passes (6 BT V H flops), others are computed twice (8 BT V H).
    """
    cdef Py_ssize_t vocab = cnp.PyArray_DIM(weight, 0), total = cnp.PyArray_DIM(target, 0), i
    cdef int acc_size = kernels_for(input).acc_size
    cdef bint is_double = acc_size == 8
    cdef bint is_mean = reduction == "mean", is_each = reduction == "none"
    cdef list plans = [], of_statistics
    cdef bint with_input = input_grad is not None, with_weight = weight_grad is not None
    cdef bint is_buffered = with_weight and not holds_sums(weight_grad, acc_size)
    cdef cnp.ndarray logits_max, sum_exp, predicted, grad, memory
    cdef cnp.dtype real_dtype
    cdef Schedule schedule
    cdef Gradient gradients
    cdef Rows rows = Rows(target, start, vocab, ignored=ignored), rows_of_gradient
    cdef double each, sum = 0, error = 0, y, t, last = 0
    cdef Py_ssize_t begin
    cdef ag_fpenv mode
    if not workspace:
        workspace = default_workspace(input, weight, with_input, with_weight)
    real_dtype = _float64 if is_double else _float32
    logits_max, sum_exp = _memory.zeros(total, real_dtype), _memory.zeros(total, real_dtype)
    predicted, grad = _memory.zeros(total, real_dtype), _memory.zeros(total, real_dtype)
    for begin in range(0, total, ROWS_PER_CHECK):
        mode = ag_fpenv_enter()
        for i in range(begin, min(begin + ROWS_PER_CHECK, total)):
            if rows.counts(i):
                each = grad_loss[i if grad_loss.shape[0] > 1 else 0] / (rows.count if is_mean else 1)
                set_number(cnp.PyArray_DATA(grad), i, is_double, each)
        ag_fpenv_leave(mode)
        _tasks.check_signals(&last)
    rows_of_gradient = Rows(target, start, vocab, None, grad, logits_max, sum_exp)

    if rows_of_gradient.count == rows.count:
        plans = plans_of_gradient(
            input, weight, rows.count, True, with_input, with_weight, is_buffered, workspace, True,
            cnp.PyArray_NBYTES(weight_grad) if with_weight and cnp.PyArray_IS_C_CONTIGUOUS(weight_grad) else 0
        )
    if plans:
        schedule = new_schedule(
            input, weight, plans[0], _memory.workspace(bytes_of(plans)), rows_of_gradient, threads
        )
        schedule.set_statistics(logits_max, sum_exp, predicted, None)
        schedule.set_gradient(None, input_grad, weight_grad, filter_eps)
        schedule.work()
    else:
        of_statistics = plans_of_statistics(input, weight, rows.count, workspace)
        plans = plans_of_gradient(
            input, weight, rows_of_gradient.count, True, with_input, with_weight, is_buffered, workspace
        )
        memory = _memory.workspace(bytes_of(of_statistics + plans))
        if of_statistics:
            schedule = new_schedule(input, weight, of_statistics[0], memory, rows, threads)
            schedule.set_statistics(logits_max, sum_exp, predicted, None)
            schedule.work()
        gradients = Gradient.__new__(Gradient)
        gradients.prepare(
            input, weight, plans, memory, rows_of_gradient, None, input_grad, weight_grad, filter_eps, threads
        )
        gradients.run()

    # Kahan's sum
    for begin in range(0, total, ROWS_PER_CHECK):
        mode = ag_fpenv_enter()
        for i in range(begin, min(begin + ROWS_PER_CHECK, total)):
            each = 0
            if rows.counts(i):
                each = log(number(cnp.PyArray_DATA(sum_exp), i, is_double)) - (
                    number(cnp.PyArray_DATA(predicted), i, is_double)
                    - number(cnp.PyArray_DATA(logits_max), i, is_double)
                )
            if is_each:
                set_number(cnp.PyArray_DATA(loss), i, is_double, each)
            y = each - error
            t = sum + y
            error = (t - sum) - y if t - t == 0 else 0
            sum = t
        ag_fpenv_leave(mode)
        _tasks.check_signals(&last)
    mode = ag_fpenv_enter()
    if not is_each:
        if is_mean:
            sum = sum / rows.count if rows.count else NAN
        set_number(cnp.PyArray_DATA(loss), 0, is_double, sum)
    ag_fpenv_leave(mode)


# ---- probabilities and losses ----------------------------------------------------------------------------------------

ctypedef struct Probabilities:
    const ag_linear_kernels *kernels
    ag_variant variant
    ag_matrix logits
    ag_matrix out
    const void *maxima
    const void *sums
    bint is_double
    Py_ssize_t n
    Py_ssize_t parts                  # of a row
    Py_ssize_t part_size


cdef void probabilities_of_part(void *context, Py_ssize_t task, int thread) noexcept nogil:
    cdef const Probabilities *p = <const Probabilities *>context
    cdef char[SEGMENT * 8] raw
    cdef char[SEGMENT * 8] values
    cdef const ag_matrix *logits = &p.logits
    cdef int itemsize = ag_itemsize[<int>logits.dtype]
    cdef Py_ssize_t row = task // p.parts, begin = task % p.parts * p.part_size, end = min(begin + p.part_size, p.n), count
    cdef double maximum = number(p.maxima, row, p.is_double), total = number(p.sums, row, p.is_double)
    cdef const char *source
    while begin < end:
        count = min(SEGMENT, end - begin)
        source = logits.data + row * logits.row_stride + begin * logits.step
        if logits.step != itemsize or logits.swapped:
            ag_copy_block(raw, 0, itemsize, source, 0, logits.step, 1, count, itemsize, logits.swapped)
            source = raw
        if itemsize == 2:
            ag_widen(p.variant, logits.dtype, source, <float *>values, count)
            source = values
        p.kernels.probabilities(values, source, maximum, total, count)
        convert_segment(p.variant, p.kernels.acc_size, values, &p.out, row, begin, count)
        begin += count


def probabilities(
    cnp.ndarray logits, cnp.ndarray logits_max, cnp.ndarray sum_exp, cnp.ndarray out, int threads
):
    """``exp(logits - logits_max) / sum_exp`` of every row into `out`, which overlaps no input.

    The vectors are contiguous, of one dtype, float32 or float64.
    """
    cdef Probabilities p
    cdef double last = 0
    cdef int status
    cdef Py_ssize_t rows = cnp.PyArray_DIM(logits, 0)
    p.kernels, p.variant = kernels_for(logits), _cpu.active()
    p.logits, p.out, p.n = matrix_of(logits), matrix_of(out), cnp.PyArray_DIM(logits, 1)
    p.maxima, p.sums = cnp.PyArray_DATA(logits_max), cnp.PyArray_DATA(sum_exp)
    p.is_double = dtype_of(logits_max) == AG_FLOAT64
    p.part_size = align_up(min(max(p.n, 1), PART_ELEMENTS), SEGMENT)
    p.parts = ceil_div(p.n, p.part_size)
    threads = _threads.choose_num_threads(<double>rows * p.n, threads)
    with nogil:
        status = _tasks.run_tasks(probabilities_of_part, &p, rows * p.parts, threads, True, &last)
    if status != SUCCESS:
        raise MemoryError
    _threads.mark_team_used()


def losses(cnp.ndarray sum_exp not None, cnp.ndarray predicted not None, cnp.ndarray loss not None):
    """``log(sum_exp) - predicted``, in float64 and rounded once, into `loss`, a vector of any floating dtype and layout.

    The others are contiguous vectors of one dtype, float32 or float64.
    """
    cdef const void *sums = cnp.PyArray_DATA(sum_exp)
    cdef const void *logits = cnp.PyArray_DATA(predicted)
    cdef bint is_double = dtype_of(sum_exp) == AG_FLOAT64
    cdef Py_ssize_t begin = 0, end = cnp.PyArray_DIM(loss, 0), stop, count, i
    cdef ag_variant variant = _cpu.active()
    cdef double[SEGMENT] values
    cdef ag_matrix to = matrix_of(loss)
    cdef ag_fpenv mode
    cdef double last = 0
    with nogil:
        while begin < end:
            mode = ag_fpenv_enter()
            stop = min(begin + ROWS_PER_CHECK, end)
            while begin < stop:
                count = min(SEGMENT, stop - begin)
                for i in range(count):
                    values[i] = log(number(sums, begin + i, is_double)) - number(logits, begin + i, is_double)
                convert_segment(variant, 8, <char *>values, &to, 0, begin, count)
                begin += count
            ag_fpenv_leave(mode)
            _tasks.check_signals(&last)


def statistics(
    cnp.ndarray input, cnp.ndarray weight, cnp.ndarray target, int64_t start, int64_t end, bint with_logits, int threads
):
    """The six results of fused_linear_online_max_sum; `target` is contiguous."""
    cdef cnp.npy_intp[2] shape = [cnp.PyArray_DIM(input, 0), cnp.PyArray_DIM(weight, 0)]
    cdef cnp.npy_intp bytes = ceil_div(shape[0], 8)
    cdef int dtype = dtype_of(input)
    cdef bint is_double = dtype == AG_FLOAT64
    cdef Rows rows = Rows(target, start, end - start)
    cdef cnp.dtype acc_dtype = _float64 if is_double else _float32
    cdef cnp.ndarray logits_max = _memory.empty(1, shape, acc_dtype), sum_exp = _memory.empty(1, shape, acc_dtype)
    cdef cnp.ndarray predicted = _memory.zeros(shape[0], acc_dtype)
    cdef cnp.ndarray mask = _memory.zeros(bytes, _uint8)
    cdef cnp.ndarray masked_target = _memory.zeros(shape[0], _int64 if cnp.PyArray_ITEMSIZE(target) == 8 else _int32)
    cdef cnp.ndarray logits = _memory.empty(2, shape, <cnp.dtype>_dtypes[dtype]) if with_logits else None
    cdef uint8_t *bits = <uint8_t *>cnp.PyArray_DATA(mask)
    cdef char *places = cnp.PyArray_BYTES(masked_target)
    cdef char *logit = cnp.PyArray_BYTES(predicted)
    cdef const char *largest = cnp.PyArray_BYTES(logits_max)
    cdef Py_ssize_t i
    cdef int64_t place
    cdef Py_ssize_t begin
    cdef double last = 0
    cdef list plans = plans_of_statistics(
        input, weight, rows.count,
        default_workspace(input, weight, False, False, 0 if logits is None else cnp.PyArray_NBYTES(logits))
    )
    cdef Schedule schedule
    cdef ag_fpenv mode
    if plans:
        schedule = new_schedule(input, weight, plans[0], _memory.workspace(bytes_of(plans)), rows, threads)
        schedule.set_statistics(logits_max, sum_exp, predicted, logits)
        schedule.work()
    for begin in range(0, shape[0], ROWS_PER_CHECK):
        mode = ag_fpenv_enter()
        for i in range(begin, min(begin + ROWS_PER_CHECK, shape[0])):
            place = rows.row_of_weight(i)
            if place < 0:
                bits[i // 8] |= 1 << (i % 8)
                continue
            if rows.is_wide:
                (<int64_t *>places)[i] = place
            else:
                (<int32_t *>places)[i] = <int32_t>place
            if is_double:
                (<double *>logit)[i] -= (<const double *>largest)[i]
            else:
                (<float *>logit)[i] -= (<const float *>largest)[i]
        ag_fpenv_leave(mode)
        _tasks.check_signals(&last)
    return logits_max, sum_exp, predicted, mask, masked_target, logits
