"""The largest logits of each row: lists, log-probabilities, and the sweep for few rows.

The results hold the lists until the last logits are computed: `top_values` the logits, which become log-probabilities then.
The packed sweep merges panels into them. The sweep for few rows streams the vocabulary as `_linear_vocab_streamed` does. Its
tasks have separate lists, which are merged in the order of the vocabulary, as early as this is possible. So entries and sums do
not depend on threads.
"""

from libc.math cimport INFINITY, NAN, log1p
from libc.stdint cimport int64_t
from libc.string cimport memset

from ascend_grad cimport _tasks
from ascend_grad._kernels cimport ag_bounded_factor, ag_fpenv, ag_fpenv_enter, ag_fpenv_leave, ag_sum_total
from ascend_grad._linear_kernels cimport (
    AG_TILE,
    ag_linear_block,
    ag_list_order,
    ag_list_order_complete,
    ag_list_order_has_next,
    ag_list_order_release,
    ag_list_order_try,
    ag_rows,
)
from ascend_grad._linear_plan cimport Plan
from ascend_grad._linear_problem cimport (
    ROWS_PER_CHECK,
    acc_size_of,
    bound_transform,
    largest_bias,
    number,
    round_bias,
    set_number,
)
from ascend_grad._linear_run cimport new_block, rows_of, select_chunk
from ascend_grad._memory cimport ceil_div

# Rows of a task that computes log-probabilities.
cdef Py_ssize_t FINISHED_ROWS = 256
# Rows of a task that merges the lists of tasks.
cdef Py_ssize_t JOINED_ROWS = 4


cdef void describe_top_k(Problem *p) noexcept nogil:
    """Limit scale, softcap and temperature, and record whether products are transformed."""
    bound_transform(p)
    p.temperature = ag_bounded_factor(p.temperature, acc_size_of(p.dtype) == 8)
    p.transform.is_needed = p.bias != NULL or p.transform.scale != 1 or p.transform.softcap > 0


cdef double temperature_of(const Problem *p, Py_ssize_t row) noexcept nogil:
    if p.temperatures == NULL:
        return p.temperature
    return ag_bounded_factor(p.temperatures[row], acc_size_of(p.dtype) == 8)


cdef ag_top_k lists_at(const Run *run, void *values, int64_t *indices, ag_sum *rest) noexcept nogil:
    cdef ag_top_k lists
    lists.k, lists.scale, lists.scales = run.p.top_k, 1 / run.p.temperature, run.p.scales
    lists.values, lists.indices, lists.rest, lists.floors = values, indices, rest, run.at.lists.floors
    return lists


cdef ag_top_k top_k_of(const Run *run) noexcept nogil:
    """Return the lists of all rows of a call."""
    return lists_at(run, run.p.top_values, run.p.top_indices, run.sums)


cdef void clear_lists(
    Py_ssize_t rows, Py_ssize_t k, bint is_double, void *values, int64_t *indices, ag_sum *rest
) noexcept nogil:
    """Make the lists of some rows empty. An empty entry is -inf, and its index -1."""
    cdef Py_ssize_t i
    for i in range(rows * k):
        set_number(values, i, is_double, -INFINITY)
        indices[i] = -1
    memset(rest, 0, rows * sizeof(ag_sum))


cdef int begin_top_k(const Problem *p, ag_sum *rest, double *last_check) except -1 nogil:
    """Round the bias, set the scales, and make the lists of all rows empty. `last_check` NULL: signals are not checked."""
    cdef int acc_size = acc_size_of(p.dtype)
    cdef Py_ssize_t begin = 0, rows, row
    cdef ag_fpenv mode
    if p.bias != NULL:
        mode = ag_fpenv_enter()
        round_bias(
            <void *>p.transform.bias, p.bias, p.vocab,
            largest_bias(p, p.temperature, p.temperatures, p.rows.total), acc_size == 8
        )
        ag_fpenv_leave(mode)
    while begin < p.rows.total:
        rows = min(max(ROWS_PER_CHECK // p.top_k, 1), p.rows.total - begin)
        clear_lists(
            rows, p.top_k, acc_size == 8, <char *>p.top_values + begin * p.top_k * acc_size,
            p.top_indices + begin * p.top_k, rest + begin
        )
        for row in range(begin, begin + rows if p.temperatures != NULL else begin):
            p.scales[row] = 1 / temperature_of(p, row)
        begin += rows
        if last_check != NULL:
            _tasks.check_signals(last_check)
    return 0


# ---- log-probabilities -----------------------------------------------------------------------------------------------

cdef void number_missing(int64_t *indices, Py_ssize_t known, Py_ssize_t k) noexcept nogil:
    """Set the indices of the last k - `known` entries, whose logits are -inf, to the lowest that the others do not have."""
    cdef Py_ssize_t i
    cdef int64_t candidate = 0
    cdef bint is_there
    while known < k:
        is_there = False
        for i in range(known):
            is_there = is_there or indices[i] == candidate
        if not is_there:
            indices[known] = candidate
            known += 1
        candidate += 1


cdef void finish_row(const Run *run, Py_ssize_t row) noexcept nogil:
    """Turn the logits of a row's list into log-probabilities, unless the caller requests logits and the sum.

    They are NaN if a logit of the row is NaN or infinite, or if all are -inf. The indices are 0 to k - 1 then.
    """
    cdef bint is_double = run.plan.kernels.acc_size == 8
    cdef Py_ssize_t k = run.p.top_k, i, known = 0
    cdef void *values = <char *>run.p.top_values + row * k * run.plan.kernels.acc_size
    cdef int64_t *indices = run.p.top_indices + row * k
    cdef double largest = number(values, 0, is_double), log_sum = log1p(ag_sum_total(run.sums[row]))
    cdef double temperature = temperature_of(run.p, row)
    if run.p.top_rest != NULL:
        run.p.top_rest[row] = ag_sum_total(run.sums[row])
    elif log_sum != log_sum or largest == -INFINITY:
        for i in range(k):
            set_number(values, i, is_double, NAN)
            indices[i] = i
        return
    for i in range(k):
        if indices[i] >= 0:
            known += 1
        if run.p.top_rest == NULL:
            set_number(values, i, is_double, (number(values, i, is_double) - largest) / temperature - log_sum)
    number_missing(indices, known, k)


cdef void finish_rows(const void *context, Py_ssize_t task, int thread) noexcept nogil:
    cdef const Run *run = <const Run *>context
    cdef Py_ssize_t row = task * FINISHED_ROWS, end = min(row + FINISHED_ROWS, run.p.rows.total)
    while row < end:
        finish_row(run, row)
        row += 1


cdef void finish_top_k(const Run *run) noexcept nogil:
    """Turn the lists of all rows into results."""
    _tasks.run_phase(run.team, finish_rows, run, ceil_div(run.p.rows.total, FINISHED_ROWS), False)


# ---- the sweep for few rows ------------------------------------------------------------------------------------------

ctypedef struct Streamed:
    # The phases of the sweep. Its block is all rows.
    const Run *run
    ag_linear_block block
    ag_list_order *order


cdef ag_top_k lists_of_task(const Run *run, Py_ssize_t task) noexcept nogil:
    cdef Py_ssize_t rows = task * run.plan.rows, entries = rows * run.p.top_k
    return lists_at(
        run, <char *>run.at.lists.values + entries * run.plan.kernels.acc_size, run.at.lists.indices + entries,
        run.at.lists.rest + rows
    )


cdef void stream_vocab(const void *context, Py_ssize_t task, int thread) noexcept nogil:
    """Compute the lists of all rows for one range of the vocabulary."""
    cdef const Streamed *each = <const Streamed *>context
    cdef const Run *run = each.run
    cdef const Plan *plan = run.plan
    cdef ag_linear_block block = each.block
    cdef double[AG_TILE] tile
    cdef Py_ssize_t rows = block.chunk.rows, entry = task * plan.task_size
    cdef Py_ssize_t end = min(entry + plan.task_size, plan.vocab)
    cdef ag_rows resident = rows_of(&run.p.input, block.chunk.row_numbers, 0, rows), streamed
    block.top_k = lists_of_task(run, task)
    clear_lists(
        rows, run.p.top_k, plan.kernels.acc_size == 8, block.top_k.values, block.top_k.indices, block.top_k.rest
    )
    memset(tile, 0, rows * plan.pitch * plan.kernels.acc_size)
    while entry < end and not _tasks.is_cancelled(run.team, thread):
        block.vocab.start, block.vocab.size = entry, min(plan.step, end - entry)
        streamed = rows_of(&run.p.weight, NULL, entry, block.vocab.size)
        plan.kernels.dot_products(&resident, &streamed, 0, run.p.hidden, tile, plan.pitch)
        if block.transform.is_needed:
            plan.kernels.tile_to_logits(&block, tile)
        plan.kernels.tile_to_top_k(&block, tile)
        entry += block.vocab.size
    ag_list_order_complete(each.order, task)
    join_complete_lists(each)


cdef void join_task(const Streamed *each, Py_ssize_t task, Py_ssize_t row, Py_ssize_t row_end) noexcept nogil:
    """Merge the lists of one range of the vocabulary."""
    cdef ag_top_k to = top_k_of(each.run), source = lists_of_task(each.run, task)
    each.run.plan.kernels.join_top_k(&source, &to, row, row_end)


cdef void join_complete_lists(const Streamed *each) noexcept nogil:
    """Merge the lists of complete tasks that follow the merged ones, unless another thread does so."""
    if not ag_list_order_try(each.order):
        return
    while ag_list_order_has_next(each.order):
        join_task(each, each.order.merged, 0, each.block.chunk.rows)
        each.order.merged += 1
    ag_list_order_release(each.order)


cdef void join_lists(const void *context, Py_ssize_t task, int thread) noexcept nogil:
    """Merge the remaining lists that ranges of the vocabulary have of some rows."""
    cdef const Streamed *each = <const Streamed *>context
    cdef Py_ssize_t row = task * JOINED_ROWS, i
    for i in range(each.order.merged, each.order.tasks):
        join_task(each, i, row, min(row + JOINED_ROWS, each.block.chunk.rows))


cdef void run_top_k_streamed(const Run *run) noexcept nogil:
    """Run a plan whose tasks are ranges of the vocabulary."""
    cdef Streamed each
    cdef ag_list_order order
    cdef Py_ssize_t row
    each.run, each.block, each.order = run, new_block(run), &order
    order.tasks, order.merged, order.is_held, order.is_complete = run.plan.tasks, 0, False, run.at.complete_lists
    memset(order.is_complete, 0, order.tasks)
    select_chunk(run, 0, &each.block.chunk)
    for row in range(each.block.chunk.rows):
        set_number(run.at.lists.floors, row, run.plan.kernels.acc_size == 8, -INFINITY)
    _tasks.run_phase(run.team, stream_vocab, &each, run.plan.tasks, False)
    if order.merged < order.tasks:
        _tasks.run_phase(run.team, join_lists, &each, ceil_div(each.block.chunk.rows, JOINED_ROWS), False)
    finish_top_k(run)
