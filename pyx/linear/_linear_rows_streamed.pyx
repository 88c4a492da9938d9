"""The sweep for few vocabulary entries: each task streams a range of the rows past the whole weight, and packs nothing.

A tile of logits is (vocabulary entries, pitch), so that vectors are full for any number of entries. Statistics and gradients
of a row are complete in one pass. The gradient of the weight has a partial sum for each task.
"""

from libc.math cimport INFINITY, NAN
from libc.stdint cimport int64_t
from libc.string cimport memset

from ascend_grad cimport _tasks
from ascend_grad._linear_kernels cimport AG_MAX_STREAMED_STEP, AG_TILE, ag_linear_block, ag_rows
from ascend_grad._linear_partial_sums cimport combine_partial_sums
from ascend_grad._linear_plan cimport Plan, sums_pitch
from ascend_grad._linear_problem cimport (
    ChunkBuffers,
    copy_number,
    number,
    select_rows,
    set_number,
    use_nontemporal_stores,
)
from ascend_grad._linear_results cimport finish_row
from ascend_grad._linear_run cimport new_block, rows_of


ctypedef struct Pass:
    # The phase that computes all results, for each range of the rows.
    const Run *run
    ag_linear_block block             # all vocabulary entries
    bint nontemporal                  # stores of input_grad bypass the caches


cdef void run_rows_streamed(const Run *run) noexcept nogil:
    """Run a plan whose tasks are ranges of the rows."""
    cdef Pass each
    cdef Py_ssize_t task, entry
    each.run, each.block = run, new_block(run)
    each.block.vocab.start, each.block.vocab.size = 0, run.p.vocab
    each.nontemporal = use_nontemporal_stores(
        &run.p.input_grad, run.p.rows.total, run.p.hidden, run.team.team.size
    )
    _tasks.run_phase(run.team, stream_rows, &each, run.plan.tasks, False)
    if run.plan.work.with_weight_grad:
        combine_partial_sums(run, &run.p.weight_grad, NULL, run.p.vocab, run.p.vocab)
    if run.plan.work.with_bias_grad and not _tasks.is_cancelled(run.team, 0):
        for task in range(run.plan.tasks):
            for entry in range(run.p.vocab):
                run.p.bias_sums[entry] += run.at.bias_sums[task * run.p.vocab + entry]


cdef void stream_rows(const void *context, Py_ssize_t task, int thread) noexcept nogil:
    """Compute statistics and gradients of the active rows of one range."""
    cdef const Pass *each = <const Pass *>context
    cdef const Run *run = each.run
    cdef const Plan *plan = run.plan
    cdef ag_linear_block block = each.block
    cdef double[AG_TILE] memory
    cdef void *tile = memory
    cdef int64_t[2 * AG_MAX_STREAMED_STEP] numbers
    cdef double[4 * AG_MAX_STREAMED_STEP] values
    cdef double *sums = values + 3 * AG_MAX_STREAMED_STEP
    cdef ChunkBuffers chunk
    cdef int acc = plan.kernels.acc_size
    cdef Py_ssize_t hidden = run.p.hidden, vocab = run.p.vocab, pitch = plan.pitch
    cdef Py_ssize_t row = task * plan.task_size, end = min(row + plan.task_size, run.p.rows.total)
    cdef ag_rows resident = rows_of(&run.p.weight, NULL, 0, vocab), streamed, results
    cdef bint with_gradient = plan.work.with_input_grad or plan.work.with_weight_grad or plan.work.with_bias_grad
    cdef bint is_simple_loss = plan.work.with_rest and not run.p.is_general
    cdef bint add = False
    cdef char *partial = NULL
    if run.at.partial_sums != NULL:
        partial = run.at.partial_sums + task * vocab * sums_pitch(plan) * acc
    chunk.row_numbers, chunk.target = numbers, &numbers[AG_MAX_STREAMED_STEP]
    chunk.grad, chunk.max, chunk.sum = values, values + AG_MAX_STREAMED_STEP, values + 2 * AG_MAX_STREAMED_STEP
    block.chunk.row_numbers, block.chunk.target = chunk.row_numbers, chunk.target
    block.chunk.grad, block.chunk.max, block.chunk.sum = chunk.grad, chunk.max, chunk.sum
    memset(tile, 0, vocab * pitch * acc)
    if plan.work.with_bias_grad:
        memset(run.at.bias_sums + task * vocab, 0, vocab * sizeof(double))
    while row < end and not _tasks.is_cancelled(run.team, thread):
        block.chunk.rows = select_rows(&run.p.rows, &row, end, 0, plan.step, acc, &chunk)
        if not block.chunk.rows:
            break
        streamed = rows_of(&run.p.input, chunk.row_numbers, 0, block.chunk.rows)
        if plan.work.with_logits:
            plan.kernels.dot_products(&resident, &streamed, 0, hidden, tile, pitch)
            if block.transform.is_needed:
                plan.kernels.columns_to_logits(&block, tile)
        if is_simple_loss:
            plan.kernels.columns_to_loss(&block, tile, run.p.sum_exp, with_gradient)
        elif plan.work.with_statistics:
            plan.kernels.columns_to_max_sum(&block, tile, chunk.max, sums)
            keep_statistics(run, &block, &chunk, sums)
        if with_gradient and not is_simple_loss:
            plan.kernels.columns_to_gradient(&block, tile)
        if plan.work.with_bias_grad:
            plan.kernels.sum_tile(&block, tile, run.at.bias_sums + task * vocab)
        if plan.work.with_weight_grad:
            plan.kernels.sum_rows(vocab, &streamed, 0, hidden, tile, pitch, partial, sums_pitch(plan), add)
            add = True
        if plan.work.with_input_grad:
            results = rows_of(&run.p.input_grad, chunk.row_numbers, 0, block.chunk.rows)
            plan.kernels.write_rows(run.variant, &resident, &results, 0, hidden, tile, pitch, 1, each.nontemporal)
    if plan.work.with_weight_grad and not add:
        memset(partial, 0, vocab * sums_pitch(plan) * acc)


cdef void keep_statistics(
    const Run *run, const ag_linear_block *block, const ChunkBuffers *chunk, const double *sums
) noexcept nogil:
    """Write the statistics of the selected rows, to the results and to the vectors that the gradients read."""
    cdef int acc = run.plan.kernels.acc_size
    cdef Py_ssize_t i
    for i in range(block.chunk.rows):
        copy_number(run.p.logits_max, chunk.row_numbers[i], chunk.max, i, acc)
        set_number(chunk.sum, i, acc == 8, NAN if number(chunk.max, i, acc == 8) == -INFINITY else sums[i])
        copy_number(run.p.sum_exp, chunk.row_numbers[i], chunk.sum, i, acc)
        if run.p.rest != NULL:
            finish_row(run.p, chunk.row_numbers[i], number(chunk.sum, i, acc == 8))
