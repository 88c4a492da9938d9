"""The sweep for few rows: each task streams a range of the vocabulary past all rows, and packs nothing.

A tile of logits is (rows, pitch). The gradient of the weight is complete with each step; the gradient of the input has a
partial sum for each task.
"""

from libc.math cimport INFINITY
from libc.string cimport memcpy, memset

from ascend_grad cimport _tasks
from ascend_grad._kernels cimport ag_sum, ag_sum_total
from ascend_grad._linear_kernels cimport (
    AG_FROM_LOGITS,
    AG_FROM_PRODUCT,
    AG_FROM_SOFTMAX,
    AG_MAX_UNPACKED_ROWS,
    AG_TILE,
    AG_TO_GRADIENT,
    AG_TO_MAX_SUM,
    ag_linear_block,
    ag_linear_result,
    ag_linear_source,
    ag_more,
    ag_rows,
)
from ascend_grad._linear_partial_sums cimport combine_partial_sums, sum_columns
from ascend_grad._linear_plan cimport Plan, sums_pitch
from ascend_grad._linear_problem cimport set_number, use_nontemporal_stores
from ascend_grad._linear_results cimport finish_statistics
from ascend_grad._linear_run cimport new_block, rows_of, select_chunk
from ascend_grad._memory cimport align_up


ctypedef struct Pass:
    # The phase that computes statistics, or gradients, for each range of the vocabulary.
    const Run *run
    ag_linear_block block             # all active rows
    ag_linear_source source
    ag_linear_result result
    bint nontemporal                  # stores of weight_grad bypass the caches


cdef void run_vocab_streamed(const Run *run) noexcept nogil:
    """Run a plan whose tasks are ranges of the vocabulary."""
    cdef const Plan *plan = run.plan
    cdef Pass each
    each.run, each.block = run, new_block(run)
    each.nontemporal = use_nontemporal_stores(
        &run.p.weight_grad, run.p.vocab, run.p.hidden, run.team.team.size
    )
    each.source = AG_FROM_PRODUCT if plan.work.with_logits else AG_FROM_SOFTMAX
    select_chunk(run, 0, &each.block.chunk)
    if plan.work.with_statistics:
        each.result = AG_TO_MAX_SUM
        _tasks.run_phase(run.team, stream_vocab, &each, plan.tasks, False)
        merge_tasks(run, &each.block)
        finish_statistics(run, 0, run.p.rows.total)
        select_chunk(run, 0, &each.block.chunk)  # the chunk is selected again, to read its statistics
        each.source = AG_FROM_LOGITS
    if plan.work.with_input_grad or plan.work.with_weight_grad or plan.work.with_bias_grad:
        each.result = AG_TO_GRADIENT
        _tasks.run_phase(run.team, stream_vocab, &each, plan.tasks, False)
    if plan.work.with_input_grad:
        combine_partial_sums(
            run, &run.p.input_grad, each.block.chunk.row_numbers, each.block.chunk.rows, plan.rows
        )


cdef void stream_vocab(const void *context, Py_ssize_t task, int thread) noexcept nogil:
    """Compute statistics, or gradients, of all rows for one range of the vocabulary."""
    cdef const Pass *each = <const Pass *>context
    cdef const Run *run = each.run
    cdef const Plan *plan = run.plan
    cdef ag_linear_block block = each.block
    cdef double[AG_TILE] memory
    cdef void *tile = memory
    cdef ag_sum[AG_MAX_UNPACKED_ROWS] sum
    cdef double[AG_MAX_UNPACKED_ROWS] rest
    cdef ag_more *more = run.at.panel_more
    cdef int acc = plan.kernels.acc_size
    cdef Py_ssize_t hidden = run.p.hidden, rows = block.chunk.rows, pitch = plan.pitch, i
    cdef Py_ssize_t tile_bytes = rows * pitch * acc
    cdef Py_ssize_t begin = task * plan.task_size, end = min(begin + plan.task_size, plan.vocab), entry = begin
    cdef ag_rows resident = rows_of(&run.p.input, block.chunk.row_numbers, 0, rows), streamed, results
    cdef Py_ssize_t panel = task * align_up(rows, plan.kernels.mr) * acc
    cdef char *logits
    cdef char *partial = NULL
    if run.at.partial_sums != NULL:
        partial = run.at.partial_sums + task * plan.rows * sums_pitch(plan) * acc
    memset(tile, 0, tile_bytes)
    if each.result == AG_TO_MAX_SUM:
        for i in range(rows):
            set_number(run.at.panel_max + panel, i, acc == 8, -INFINITY)
            sum[i].sum, sum[i].compensation, rest[i] = 0, 0, -1
        if more != NULL:
            more += panel // acc
            for i in range(rows):
                more[i].moment, more[i].deficit, more[i].weight, more[i].argmax = 0, 0, 0, begin
    while entry < end:
        block.vocab.start, block.vocab.size = entry, min(plan.step, end - entry)
        streamed = rows_of(&run.p.weight, NULL, entry, block.vocab.size)
        logits = run.at.logits + entry // plan.step * tile_bytes if plan.caches_logits else NULL
        if each.source == AG_FROM_PRODUCT:
            plan.kernels.dot_products(&resident, &streamed, 0, hidden, tile, pitch)
            if block.transform.is_needed:
                plan.kernels.tile_to_logits(&block, tile)
            if plan.caches_logits:
                memcpy(logits, tile, tile_bytes)
        elif each.source == AG_FROM_LOGITS:
            memcpy(tile, logits, tile_bytes)
        if each.result == AG_TO_MAX_SUM:
            plan.kernels.tile_to_max_sum(
                &block, tile, run.at.panel_max + panel, sum, rest if plan.work.with_rest else NULL, more
            )
        else:
            plan.kernels.tile_to_gradient(&block, tile)
            if plan.work.with_bias_grad:
                sum_columns(&block, tile, acc == 8, run.p.bias_sums + entry)
            if plan.work.with_input_grad:
                plan.kernels.sum_rows(
                    rows, &streamed, 0, hidden, tile, pitch, partial, sums_pitch(plan), entry > begin
                )
            if plan.work.with_weight_grad:
                results = rows_of(&run.p.weight_grad, NULL, entry, block.vocab.size)
                plan.kernels.write_rows(run.variant, &resident, &results, 0, hidden, tile, pitch, 1, each.nontemporal)
        entry += block.vocab.size
        if _tasks.is_cancelled(run.team, thread):
            return
    if each.result == AG_TO_MAX_SUM:
        for i in range(rows):
            set_number(run.at.panel_sum + panel, i, acc == 8, ag_sum_total(sum[i]))
            if plan.work.with_rest:
                set_number(run.at.panel_rest + panel, i, acc == 8, rest[i])


ctypedef struct Merge:
    # The phase, of one task, that merges the statistics of all tasks.
    const Run *run
    ag_linear_block block


cdef void merge_rows(const void *context, Py_ssize_t task, int thread) noexcept nogil:
    cdef const Merge *merge = <const Merge *>context
    merge.run.plan.kernels.merge_max_sum(&merge.block, 0, merge.block.chunk.rows)


cdef void merge_tasks(const Run *run, const ag_linear_block *block) noexcept nogil:
    """Merge the statistics of all tasks into the statistics of the rows."""
    cdef Merge merge
    merge.run, merge.block = run, block[0]
    merge.block.packed.panel_max, merge.block.packed.panel_sum = run.at.panel_max, run.at.panel_sum
    merge.block.packed.panel_rest, merge.block.packed.panel_more = run.at.panel_rest, run.at.panel_more
    merge.block.vocab.size = run.plan.tasks * run.plan.kernels.nr  # each task counts as a panel
    _tasks.run_phase(run.team, merge_rows, &merge, 1, False)
