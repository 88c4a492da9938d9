"""Conversion of statistics to results: sums of exponentials, targets, losses and probabilities.

Loops over all rows of a call run in the floating-point mode of the kernels, and check signals at intervals.
"""

from libc.math cimport INFINITY, NAN, log
from libc.stdint cimport int32_t, int64_t, uint8_t

from ascend_grad cimport _cpu, _tasks, _threads
from ascend_grad._kernels cimport (
    AG_FLOAT64,
    AG_NEARLY_CERTAIN,
    ag_copy_block,
    ag_fpenv,
    ag_fpenv_enter,
    ag_fpenv_leave,
    ag_itemsize,
    ag_one_minus_prob,
    ag_row_statistics,
    ag_sum,
    ag_sum_add,
    ag_sum_total,
    ag_widen,
)
from ascend_grad._linear_kernels cimport (
    ag_dense_row_finish, ag_loss_row, ag_loss_row_finish, ag_loss_targets, ag_matrix, ag_targets_of_row
)
from ascend_grad._linear_problem cimport (
    ROWS_PER_CHECK,
    SEGMENT,
    acc_size_of,
    convert_segment,
    entry_of_row,
    is_active,
    number,
    set_number,
)
from ascend_grad._memory cimport align_up, ceil_div

# Least rows of a task that finishes statistics, which then takes longer than the begin of a phase, and tasks of each thread.
cdef Py_ssize_t FINISHED_ROWS = 256
cdef Py_ssize_t FINISHES = 4
# Most elements of a task that computes probabilities.
cdef Py_ssize_t PROBABILITIES_PER_TASK = 1 << 16


cdef void compute_coefficients(const Problem *p, Py_ssize_t i) noexcept nogil:
    """Compute 1 - p of the target of row i, or the coefficients of its gradient; see `finish_row`."""
    cdef bint is_double = acc_size_of(p.dtype) == 8
    cdef double complement
    cdef ag_row_statistics row
    cdef ag_loss_targets targets
    row.max, row.rest = number(p.logits_max, i, is_double), p.rest[i]
    if p.complement != NULL:
        complement = -1
        if entry_of_row(&p.rows, i) >= 0:
            complement = ag_one_minus_prob(&row, number(p.predicted, i, is_double))
        set_number(p.complement, i, is_double, complement if complement < 1 - AG_NEARLY_CERTAIN else -1)
    if p.prob.data != NULL:
        finish_dense_row(p, i, row.max, row.rest)
    elif p.is_general:
        targets = ag_targets_of_row(p.targets, i)
        ag_loss_row_finish(
            &p.loss_rows[i], &targets, p.target_logits + i * targets.count, row.max, row.rest, p.transform.scale,
            p.label_smoothing, p.vocab, p.class_weight, p.class_sum, p.class_scale
        )


cdef void finish_dense_row(const Problem *p, Py_ssize_t i, double maximum, double rest) noexcept nogil:
    """Compute the coefficients of the gradient of row i from its statistics, if its targets are dense."""
    cdef ag_loss_row *row = &p.loss_rows[i]
    cdef bint is_certain = 1 / (1 + rest) > AG_NEARLY_CERTAIN
    ag_dense_row_finish(
        row, row.weight * p.class_scale, sum_dense_weights(p, i, row.argmax) if is_certain else 0,
        row.argmax if is_certain else -1, maximum, rest, p.transform.scale, p.class_scale
    )


cdef double sum_dense_weights(const Problem *p, Py_ssize_t i, int64_t without) noexcept nogil:
    """Return the sum of the weights of all entries of row i but one, -1 for none, if its targets are dense."""
    cdef const ag_matrix *prob = &p.prob
    cdef int itemsize = ag_itemsize[<int>prob.dtype]
    cdef double[SEGMENT] raw
    cdef float[SEGMENT] floats
    cdef Py_ssize_t begin = 0, count, k
    cdef double weight
    cdef ag_sum total
    total.sum = total.compensation = 0
    while begin < p.vocab:
        count = min(<Py_ssize_t>SEGMENT, p.vocab - begin)
        ag_copy_block(
            <char *>raw, 0, itemsize, prob.data + i * prob.row_stride + begin * prob.step, 0, prob.step, 1, count, itemsize,
            prob.swapped
        )
        if itemsize == 2:
            ag_widen(_cpu.active(), prob.dtype, <char *>raw, floats, count)
        for k in range(count):
            if begin + k == without:
                continue
            if itemsize == 8:
                weight = raw[k] if p.dtype == AG_FLOAT64 else <float>raw[k]
            else:
                weight = floats[k] if itemsize == 2 else (<float *>raw)[k]
            weight = p.kept * weight + p.share
            ag_sum_add(&total, weight if p.class_weight == NULL else weight * p.class_weight[begin + k])
        begin += count
    return ag_sum_total(total)


ctypedef struct Finish:
    # The phase that finishes the statistics of rows.
    const Run *run
    Py_ssize_t begin, end
    Py_ssize_t rows                   # rows of a task


cdef void finish_rows(const void *context, Py_ssize_t task, int thread) noexcept nogil:
    cdef const Finish *finish = <const Finish *>context
    cdef const Run *run = finish.run
    cdef int acc_size = run.plan.kernels.acc_size
    cdef bint is_double = acc_size == 8, is_loss = run.p.rest != NULL
    cdef Py_ssize_t i, first = finish.begin + task * finish.rows
    cdef double sum_exp
    for i in range(first, min(first + finish.rows, finish.end)):
        sum_exp = ag_sum_total(run.sums[i])
        if number(run.p.logits_max, i, is_double) == -INFINITY and is_active(&run.p.rows, i, acc_size):
            sum_exp = NAN
        set_number(run.p.sum_exp, i, is_double, sum_exp)
        if is_loss:
            finish_row(run.p, i, sum_exp)


cdef void finish_statistics(const Run *run, Py_ssize_t begin, Py_ssize_t end) noexcept nogil:
    """Write the sums of exponentials of rows [begin, end), and what gradients of a loss read.

    The sum is NaN if all logits of the row are -inf, and 0 if the row is not active.
    """
    cdef Finish finish
    cdef int threads = run.team.team.size
    finish.run, finish.begin, finish.end = run, begin, end
    finish.rows = max(FINISHED_ROWS, ceil_div(end - begin, FINISHES * threads))
    finish.rows = min(finish.rows, <Py_ssize_t>ROWS_PER_CHECK)
    _tasks.run_phase(run.team, finish_rows, &finish, ceil_div(end - begin, finish.rows), True)


cdef int describe_targets(
    const Rows *rows, bint is_double, const void *logits_max, void *predicted, void *mask, bint is_packed, void *entries,
    double *last_check
) except -1 nogil:
    """Write the mask and the row numbers of the targets, and subtract the maxima from the targets' logits.

    `mask` receives 1 for targets that are no rows of the weight; if it is packed, it holds zeros before. `entries` receives
    the target's row of the weight, or 0, in the dtype of the targets.
    """
    cdef uint8_t *bits = <uint8_t *>mask
    cdef Py_ssize_t part, begin, i
    cdef int64_t entry
    cdef bint is_absent
    cdef ag_fpenv mode
    for part in range(ceil_div(rows.total, ROWS_PER_CHECK)):
        begin = part * ROWS_PER_CHECK
        mode = ag_fpenv_enter()
        for i in range(begin, min(begin + ROWS_PER_CHECK, rows.total)):
            entry = entry_of_row(rows, i)
            is_absent = entry < 0
            if not is_packed:
                bits[i] = is_absent
            elif is_absent:
                bits[i // 8] |= 1 << (i % 8)
            if is_absent:
                entry = 0
            else:
                set_number(
                    predicted, i, is_double, number(predicted, i, is_double) - number(logits_max, i, is_double)
                )
            if rows.is_wide:
                (<int64_t *>entries)[i] = entry
            else:
                (<int32_t *>entries)[i] = <int32_t>entry
        ag_fpenv_leave(mode)
        if last_check != NULL:
            _tasks.check_signals(last_check)
    return 0


cdef int write_losses(
    ag_variant variant, bint is_double, const void *sum_exp, const void *predicted, Py_ssize_t rows, const ag_matrix *out,
    double *last_check
) except -1 nogil:
    """Write log(sum_exp) - predicted, computed in float64 and rounded once, to a vector of any dtype and layout."""
    cdef Py_ssize_t begin = 0, end, count, i
    cdef double[SEGMENT] values
    cdef ag_fpenv mode
    while begin < rows:
        mode = ag_fpenv_enter()
        end = min(begin + ROWS_PER_CHECK, rows)
        while begin < end:
            count = min(<Py_ssize_t>SEGMENT, end - begin)
            for i in range(count):
                values[i] = log(number(sum_exp, begin + i, is_double)) - number(predicted, begin + i, is_double)
            convert_segment(variant, 8, <char *>values, out, 0, begin, count)
            begin += count
        ag_fpenv_leave(mode)
        _tasks.check_signals(last_check)
    return 0


cdef int write_doubles(ag_variant variant, const double *values, Py_ssize_t n, const ag_matrix *out) except -1 nogil:
    """Write numbers to a vector of any dtype and layout, rounded once."""
    cdef Py_ssize_t begin = 0
    while begin < n:
        convert_segment(variant, 8, <const char *>(values + begin), out, 0, begin, min(<Py_ssize_t>SEGMENT, n - begin))
        begin += SEGMENT
    return 0


# ---- probabilities ---------------------------------------------------------------------------------------------------

ctypedef struct ProbabilityTasks:
    const Probabilities *p
    Py_ssize_t parts                  # number of parts of a row
    Py_ssize_t part_size


cdef void compute_probabilities(const void *context, Py_ssize_t task, int thread) noexcept nogil:
    cdef const ProbabilityTasks *tasks = <const ProbabilityTasks *>context
    cdef const Probabilities *p = tasks.p
    cdef char[SEGMENT * 8] raw
    cdef char[SEGMENT * 8] values
    cdef const ag_matrix *logits = &p.logits
    cdef int itemsize = ag_itemsize[<int>logits.dtype]
    cdef Py_ssize_t row = task // tasks.parts, begin = task % tasks.parts * tasks.part_size
    cdef Py_ssize_t end = min(begin + tasks.part_size, p.n), count
    cdef double max = number(p.max, row, p.is_double), sum = number(p.sum, row, p.is_double)
    cdef const char *source
    while begin < end:
        count = min(<Py_ssize_t>SEGMENT, end - begin)
        source = logits.data + row * logits.row_stride + begin * logits.step
        if logits.step != itemsize or logits.swapped:
            ag_copy_block(raw, 0, itemsize, source, 0, logits.step, 1, count, itemsize, logits.swapped)
            source = raw
        if itemsize == 2:
            ag_widen(p.variant, logits.dtype, source, <float *>values, count)
            source = values
        p.kernels.probabilities(values, source, max, sum, count)
        convert_segment(p.variant, p.kernels.acc_size, values, &p.out, row, begin, count)
        begin += count


cdef int write_probabilities(const Probabilities *p, int num_threads, double *last_check) except -1 nogil:
    """Write the probabilities, on a team of threads. `num_threads` 0: the default."""
    cdef ProbabilityTasks tasks
    cdef double cost = <double>p.rows * p.n
    tasks.p = p
    tasks.part_size = align_up(min(max(p.n, 1), PROBABILITIES_PER_TASK), SEGMENT)
    tasks.parts = ceil_div(p.n, tasks.part_size)
    return _tasks.run_tasks(
        compute_probabilities, &tasks, p.rows * tasks.parts, _threads.choose_num_threads(cost, num_threads),
        num_threads == 0, cost, last_check
    )
