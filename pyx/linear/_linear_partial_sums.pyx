"""Gradients that are sums over the tasks of a sweep: one phase adds up the partial sums, with compensation."""

from libc.stdint cimport int64_t

from ascend_grad cimport _tasks
from ascend_grad._linear_kernels cimport ag_linear_block, ag_matrix
from ascend_grad._linear_plan cimport sums_pitch
from ascend_grad._linear_problem cimport SEGMENT, convert_segment, number
from ascend_grad._memory cimport ceil_div

# Most features of a row that a task combines.
cdef Py_ssize_t FEATURES_PER_TASK = 1024


cdef void sum_columns(const ag_linear_block *block, const void *tile, bint is_double, double *sums) noexcept nogil:
    """Add the columns of a tile of P to the gradient with respect to the bias. Lanes are vocabulary entries."""
    cdef Py_ssize_t i, c
    for i in range(block.chunk.rows):
        for c in range(block.vocab.size):
            sums[c] += number(tile, i * block.tile_pitch + c, is_double)


ctypedef struct Combination:
    # The phase that adds up partial sums.
    const Run *run
    ag_matrix out
    const int64_t *row_numbers        # numbers of the rows of out; NULL: 0, 1, ...
    Py_ssize_t rows                   # rows to combine
    Py_ssize_t task_rows              # rows that the partial sums of a task have space for


cdef void combine_partial_sums(
    const Run *run, const ag_matrix *out, const int64_t *row_numbers, Py_ssize_t rows, Py_ssize_t task_rows
) noexcept nogil:
    """Add up the partial sums of all tasks, and write them to rows of a result."""
    cdef Combination combination
    combination.run, combination.out, combination.row_numbers = run, out[0], row_numbers
    combination.rows, combination.task_rows = rows, task_rows
    _tasks.run_phase(
        run.team, combine_row, &combination, rows * ceil_div(run.p.hidden, FEATURES_PER_TASK), False
    )


cdef void combine_row(const void *context, Py_ssize_t task, int thread) noexcept nogil:
    """Add up a range of the features of one row."""
    cdef const Combination *x = <const Combination *>context
    cdef const Run *run = x.run
    cdef int acc = run.plan.kernels.acc_size
    cdef char[SEGMENT * 8] buffer
    cdef Py_ssize_t row = task % x.rows, begin = task // x.rows * FEATURES_PER_TASK, n
    cdef Py_ssize_t end = min(begin + FEATURES_PER_TASK, run.p.hidden), pitch = sums_pitch(run.plan)
    while begin < end:
        n = min(<Py_ssize_t>SEGMENT, end - begin)
        run.plan.kernels.combine(
            run.at.partial_sums + (row * pitch + begin) * acc, run.plan.tasks, x.task_rows * pitch, n, buffer
        )
        convert_segment(
            run.variant, acc, buffer, &x.out, row if x.row_numbers == NULL else x.row_numbers[row], begin, n
        )
        begin += n
