from libc.stdint cimport int64_t

from ascend_grad._kernels cimport ag_sum, ag_variant
from ascend_grad._linear_kernels cimport ag_chunk, ag_linear_block, ag_matrix, ag_rows
from ascend_grad._linear_plan cimport Buffers, Plan
from ascend_grad._linear_problem cimport Problem
from ascend_grad._tasks cimport Team


ctypedef struct Run:
    # One plan at work. A sweep reads this, and keeps what it changes in a state of its own.
    const Problem *p
    const Plan *plan
    ag_variant variant
    Team *team
    Buffers at
    ag_sum *sums                      # (BT,): sums of exponentials relative to the maxima so far; NULL without statistics
    char *input_sums                  # (BT, H) accumulators of input_grad, if the result cannot hold them; or NULL


cdef ag_linear_block new_block(const Run *run) noexcept nogil
cdef void select_chunk(const Run *run, Py_ssize_t index, ag_chunk *chunk) noexcept nogil


cdef inline ag_rows rows_of(
    const ag_matrix *matrix, const int64_t *numbers, int64_t start, Py_ssize_t count
) noexcept nogil:
    """Return rows of a matrix: those with these numbers, or if that is NULL, `count` rows from `start` on."""
    cdef ag_rows rows
    rows.matrix, rows.numbers, rows.start, rows.count = matrix[0], numbers, start, count
    return rows
