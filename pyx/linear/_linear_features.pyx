"""The sweep for few rows and few vocabulary entries: each task takes a range of the features, and packs nothing.

One tile (rows, pitch) holds all logits. It is the sum over the tasks, always compensated. Both gradients are written once.
"""

from libc.math cimport INFINITY
from libc.string cimport memset

from ascend_grad cimport _tasks
from ascend_grad._kernels cimport ag_sum
from ascend_grad._linear_kernels cimport AG_TERMS, ag_linear_block, ag_loss_row, ag_more, ag_rows
from ascend_grad._linear_partial_sums cimport sum_columns
from ascend_grad._linear_plan cimport Plan
from ascend_grad._linear_problem cimport copy_number, set_number
from ascend_grad._linear_results cimport finish_statistics
from ascend_grad._linear_run cimport new_block, rows_of, select_chunk


ctypedef struct Tile:
    # The tile of all active rows and vocabulary entries.
    const Run *run
    ag_linear_block block
    bint is_combined                  # the logits of the tasks were added up


cdef void run_features(const Run *run) noexcept nogil:
    """Run a plan whose tasks are ranges of the features."""
    cdef const Plan *plan = run.plan
    cdef Tile tile
    tile.run, tile.block, tile.is_combined = run, new_block(run), not plan.work.with_logits
    tile.block.vocab.start, tile.block.vocab.size = 0, run.p.vocab
    select_chunk(run, 0, &tile.block.chunk)
    if plan.work.with_logits:
        _tasks.run_phase(run.team, multiply_features, &tile, plan.tasks, False)
    if plan.work.with_statistics:
        _tasks.run_phase(run.team, find_statistics, &tile, 1, False)
        finish_statistics(run, 0, run.p.rows.total)
        select_chunk(run, 0, &tile.block.chunk)  # the chunk is selected again, to read its statistics
        tile.is_combined = True
    if plan.work.with_input_grad or plan.work.with_weight_grad or plan.work.with_bias_grad:
        _tasks.run_phase(run.team, make_gradient, &tile, 1, False)
        _tasks.run_phase(run.team, write_features, &tile, plan.tasks, False)


cdef void multiply_features(const void *context, Py_ssize_t task, int thread) noexcept nogil:
    """Compute what one range of the features adds to the logits."""
    cdef const Tile *tile = <const Tile *>context
    cdef const Run *run = tile.run
    cdef const Plan *plan = run.plan
    cdef Py_ssize_t first = task * plan.task_size, n = min(plan.task_size, run.p.hidden - first), pitch = plan.pitch
    cdef ag_rows rows = rows_of(&run.p.input, tile.block.chunk.row_numbers, 0, tile.block.chunk.rows)
    cdef ag_rows entries = rows_of(&run.p.weight, NULL, 0, run.p.vocab)
    cdef char *to = run.at.logits + task * plan.rows * pitch * plan.kernels.acc_size
    memset(to, 0, tile.block.chunk.rows * pitch * plan.kernels.acc_size)
    plan.kernels.dot_products(&rows, &entries, first, n, to, pitch)


cdef void combine_logits(const Tile *tile) noexcept nogil:
    """Add up the logits of all tasks, unless that was done before."""
    cdef const Run *run = tile.run
    cdef Py_ssize_t pitch = run.plan.pitch
    if not tile.is_combined:
        run.plan.kernels.combine(
            run.at.logits, run.plan.tasks, run.plan.rows * pitch, tile.block.chunk.rows * pitch, run.at.p
        )
        if tile.block.transform.is_needed:
            run.plan.kernels.tile_to_logits(&tile.block, run.at.p)


cdef void find_statistics(const void *context, Py_ssize_t task, int thread) noexcept nogil:
    """Compute the statistics of all rows; a phase of one task."""
    cdef const Tile *tile = <const Tile *>context
    cdef const Run *run = tile.run
    cdef ag_sum[AG_TERMS] sum
    cdef double[AG_TERMS] rest
    cdef ag_more[AG_TERMS] more
    cdef ag_loss_row *row
    cdef void *max = run.at.chunk.max
    cdef int acc = run.plan.kernels.acc_size
    cdef Py_ssize_t i
    combine_logits(tile)
    for i in range(tile.block.chunk.rows):
        set_number(max, i, acc == 8, -INFINITY)
        sum[i].sum, sum[i].compensation, rest[i] = 0, 0, -1
        more[i].moment, more[i].deficit, more[i].weight, more[i].argmax = 0, 0, 0, 0
    run.plan.kernels.tile_to_max_sum(
        &tile.block, run.at.p, max, sum, rest if run.plan.work.with_rest else NULL,
        more if run.plan.work.with_more else NULL
    )
    for i in range(tile.block.chunk.rows):
        copy_number(run.p.logits_max, tile.block.chunk.row_numbers[i], max, i, acc)
        run.sums[tile.block.chunk.row_numbers[i]] = sum[i]
        if run.plan.work.with_rest:
            run.p.rest[tile.block.chunk.row_numbers[i]] = rest[i]
        if run.plan.work.with_more:
            row = &run.p.loss_rows[tile.block.chunk.row_numbers[i]]
            row.moment, row.deficit, row.weight = more[i].moment, more[i].deficit, more[i].weight
            row.argmax = more[i].argmax


cdef void make_gradient(const void *context, Py_ssize_t task, int thread) noexcept nogil:
    """Turn all logits into P; a phase of one task."""
    cdef const Tile *tile = <const Tile *>context
    combine_logits(tile)
    tile.run.plan.kernels.tile_to_gradient(&tile.block, tile.run.at.p)
    if tile.run.plan.work.with_bias_grad:
        sum_columns(&tile.block, tile.run.at.p, tile.run.plan.kernels.acc_size == 8, tile.run.p.bias_sums)


cdef void write_features(const void *context, Py_ssize_t task, int thread) noexcept nogil:
    """Write one range of the features of both gradients."""
    cdef const Tile *tile = <const Tile *>context
    cdef const Run *run = tile.run
    cdef const Plan *plan = run.plan
    cdef Py_ssize_t first = task * plan.task_size, n = min(plan.task_size, run.p.hidden - first)
    cdef ag_rows rows = rows_of(&run.p.input, tile.block.chunk.row_numbers, 0, tile.block.chunk.rows)
    cdef ag_rows entries = rows_of(&run.p.weight, NULL, 0, run.p.vocab), results
    if plan.work.with_input_grad:
        results = rows_of(&run.p.input_grad, tile.block.chunk.row_numbers, 0, tile.block.chunk.rows)
        plan.kernels.write_rows(run.variant, &entries, &results, first, n, run.at.p, 1, plan.pitch, False)
    if plan.work.with_weight_grad:
        results = rows_of(&run.p.weight_grad, NULL, 0, run.p.vocab)
        plan.kernels.write_rows(run.variant, &rows, &results, first, n, run.at.p, plan.pitch, 1, False)
