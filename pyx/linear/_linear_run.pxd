from libc.stdint cimport int64_t

from ascend_grad._kernels cimport ag_sum, ag_variant
from ascend_grad._linear_kernels cimport ag_chunk, ag_linear_block, ag_matrix, ag_rows
from ascend_grad._linear_plan cimport Buffers, Plan
from ascend_grad._linear_problem cimport Problem
from ascend_grad._tasks cimport Team


ctypedef struct Run:
    # One plan with its problem, team and buffers. Sweeps only read it, and have separate structs for their state.
    const Problem *p
    const Plan *plan
    ag_variant variant
    Team *team
    Buffers at
    ag_sum *sums                      # (BT,): sums of exponentials, relative to the current maxima; NULL without statistics
    char *input_sums                  # (BT, H) accumulators of input_grad; NULL if kernels write the result


cdef ag_linear_block new_block(const Run *run) noexcept nogil
cdef void select_chunk(const Run *run, Py_ssize_t index, ag_chunk *chunk) noexcept nogil


cdef inline ag_rows rows_of(
    const ag_matrix *matrix, const int64_t *numbers, int64_t start, Py_ssize_t count
) noexcept nogil:
    """Return `count` rows of a matrix: the listed ones, or if `numbers` is NULL, the rows from `start` on."""
    cdef ag_rows rows
    rows.matrix, rows.numbers, rows.start, rows.count = matrix[0], numbers, start, count
    return rows
