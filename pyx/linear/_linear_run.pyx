"""Functions that all sweeps share: descriptions of blocks for the kernels, and the selection of rows."""

from libc.string cimport memset

from ascend_grad cimport _tasks
from ascend_grad._kernels cimport AG_BFLOAT16
from ascend_grad._linear_kernels cimport ag_chunk, ag_linear_block
from ascend_grad._linear_problem cimport ROWS_PER_CHECK, select_rows


cdef ag_linear_block new_block(const Run *run) noexcept nogil:
    """Return an `ag_linear_block` with the fields that are equal for all chunks and blocks."""
    cdef ag_linear_block block
    memset(&block, 0, sizeof(block))
    block.hidden, block.tile_pitch = run.p.hidden, run.plan.pitch
    block.gradient.softmax = run.p.softmax
    block.gradient.round_to_bfloat16 = run.p.dtype == AG_BFLOAT16
    block.gradient.filter_eps = run.p.filter_eps
    block.statistics.max, block.statistics.sum = run.p.logits_max, run.sums
    block.statistics.predicted, block.statistics.logits = run.p.predicted, run.p.logits
    block.transform, block.rows, block.targets = run.p.transform, run.p.loss_rows, run.p.targets
    block.statistics.with_more, block.statistics.with_moments = run.p.with_more, run.p.with_moments
    block.statistics.target_logits = run.p.target_logits
    block.gradient.complement, block.gradient.is_general = run.p.complement, run.p.is_general
    block.gradient.class_weight = run.p.class_weight_values
    block.gradient.prob, block.gradient.kept, block.gradient.share = run.p.prob, run.p.kept, run.p.share
    if run.plan.work.with_rest:
        block.statistics.rest = run.p.rest
    return block


cdef void select_chunk(const Run *run, Py_ssize_t index, ag_chunk *chunk) noexcept nogil:
    """Select the active rows of a chunk, and copy their elements of the caller's vectors.

    The first time, chunks are selected in order, since each begins where the previous one ended.
    """
    cdef Py_ssize_t i = 0 if index == 0 else run.at.chunk_starts[index], n = 0
    run.at.chunk_starts[index] = i
    while i < run.p.rows.total and n < run.plan.rows and not _tasks.is_cancelled(run.team, 0):
        n = select_rows(
            &run.p.rows, &i, min(i + ROWS_PER_CHECK, run.p.rows.total), n, run.plan.rows, run.plan.kernels.acc_size,
            &run.at.chunk
        )
    run.at.chunk_starts[index + 1] = i
    chunk.rows, chunk.row_numbers, chunk.target = n, run.at.chunk.row_numbers, run.at.chunk.target
    chunk.grad, chunk.max, chunk.sum = run.at.chunk.grad, run.at.chunk.max, run.at.chunk.sum
