"""Packing of a chunk of X, or of a block of W, in one phase of tasks."""

from libc.stdint cimport int64_t
from libc.string cimport memset

from ascend_grad cimport _tasks
from ascend_grad._linear_kernels cimport ag_linear_kernels
from ascend_grad._linear_plan cimport elements
from ascend_grad._memory cimport align_up, ceil_div

# Most columns that a task packs of its rows, so that signals are checked in time.
cdef Py_ssize_t COLUMNS_PER_TASK = 1 << 15
# Least columns that a task packs of its rows, a multiple of what matrix units read in one step.
cdef Py_ssize_t MIN_COLUMNS = 128
# Most and least rows that a task packs of its columns. The latter is a multiple of what matrix units read in one step.
cdef Py_ssize_t ROWS_PER_TASK = 1024
cdef Py_ssize_t MIN_ROWS = 128
# Least number of tasks that pack rows, or columns, if there are at least as many panels, and for each thread.
cdef Py_ssize_t MIN_TASKS = 8
cdef Py_ssize_t TASKS_PER_THREAD = 4
# Most panels of columns that a task packs.
cdef Py_ssize_t PANELS_TOGETHER = 8
# Rows of a panel that a task packs before it goes on to the next panel, so that their pages stay in the TLB.
cdef Py_ssize_t ROWS_TOGETHER = 16


ctypedef struct Packing:
    # The phase that packs an operand. The tasks of its rows and the tasks of its columns alternate, so that a thread that
    # begins with certain tasks packs the same share of both.
    const ag_linear_kernels *kernels
    const Operand *operand
    Py_ssize_t row_part               # most columns of a part of a tile or panel of rows
    Py_ssize_t row_parts              # number of parts of each tile or panel of rows
    Py_ssize_t row_tasks
    Py_ssize_t tasks
    Py_ssize_t column_part            # most rows of a part of a panel of columns
    Py_ssize_t column_parts           # number of parts of each panel of columns
    Py_ssize_t panels_together        # number of panels of columns of a task


cdef void pack(const ag_linear_kernels *kernels, const Operand *operand, Team *team) noexcept nogil:
    """Pack the rows of an operand, its columns, or both: whatever has an address."""
    cdef Packing packing
    cdef Py_ssize_t panels = ceil_div(operand.hidden, kernels.nr), parts, row_panels
    cdef Py_ssize_t wanted = TASKS_PER_THREAD * team.team.size
    packing.kernels, packing.operand, packing.row_tasks = kernels, operand, 0
    if operand.rows != NULL:
        row_panels = ceil_div(operand.count, kernels.mr if operand.is_left else kernels.nr)
        parts = max(ceil_div(wanted, max(row_panels, 1)), 1)
        packing.row_part = min(align_up(max(ceil_div(operand.hidden, parts), 1), MIN_COLUMNS), COLUMNS_PER_TASK)
        packing.row_parts = max(1, ceil_div(operand.hidden, packing.row_part))
        packing.row_tasks = row_panels * packing.row_parts
    packing.tasks = packing.row_tasks
    if operand.columns != NULL:
        parts = max(ceil_div(wanted, max(panels, 1)), 1) if wanted > MIN_TASKS else 1
        packing.column_part = min(align_up(max(ceil_div(operand.count, parts), 1), MIN_ROWS), ROWS_PER_TASK)
        packing.column_parts = ceil_div(operand.count, packing.column_part)
        packing.panels_together = min(
            max(panels * packing.column_parts // max(MIN_TASKS, wanted), 1), PANELS_TOGETHER
        )
        packing.tasks += ceil_div(panels, packing.panels_together) * packing.column_parts
    _tasks.run_phase(team, pack_part, &packing, packing.tasks, True)


cdef void pack_part(const void *context, Py_ssize_t task, int thread) noexcept nogil:
    cdef const Packing *packing = <const Packing *>context
    cdef Py_ssize_t before = task * packing.row_tasks // packing.tasks  # tasks of rows among the earlier ones
    if (task + 1) * packing.row_tasks // packing.tasks > before:
        pack_rows(packing, before)
    else:
        pack_columns(packing, task - before)


cdef void pack_rows(const Packing *packing, Py_ssize_t task) noexcept nogil:
    """Pack one part of a tile of the left operand, or of a panel of the right one."""
    cdef const ag_linear_kernels *kernels = packing.kernels
    cdef const Operand *operand = packing.operand
    cdef Py_ssize_t width = kernels.mr if operand.is_left else kernels.nr
    cdef Py_ssize_t first = task // packing.row_parts * width, begin = task % packing.row_parts * packing.row_part
    cdef Py_ssize_t pitch = elements(kernels, operand.hidden)
    # Packed elements of a column lie side by side, except in a left operand that is a copy of its rows.
    cdef bint is_copy = operand.is_left and kernels.granule == 1
    cdef Py_ssize_t at = first * pitch + begin // kernels.pair * (1 if is_copy else width)
    cdef const int64_t *numbers = NULL
    if operand.row_numbers != NULL:
        numbers = operand.row_numbers + first
    (kernels.pack_left if operand.is_left else kernels.pack_right)(
        <char *>operand.rows + at * kernels.element_size, pitch, &operand.matrix,
        numbers, operand.start + first, min(width, operand.count - first), begin, min(packing.row_part, operand.hidden - begin)
    )


cdef void pack_columns(const Packing *packing, Py_ssize_t task) noexcept nogil:
    """Pack one part of the rows of adjacent panels of columns."""
    cdef const ag_linear_kernels *kernels = packing.kernels
    cdef const Operand *operand = packing.operand
    cdef Py_ssize_t nr = kernels.nr, panel, n, at, rows_here
    cdef Py_ssize_t first = task // packing.column_parts * packing.panels_together
    cdef Py_ssize_t last = min(first + packing.panels_together, ceil_div(operand.hidden, nr))
    cdef Py_ssize_t begin = task % packing.column_parts * packing.column_part
    cdef Py_ssize_t end = min(begin + packing.column_part, operand.count)
    cdef const int64_t *numbers = NULL
    while begin < end:
        if operand.row_numbers != NULL:
            numbers = operand.row_numbers + begin
        rows_here = min(ROWS_TOGETHER, end - begin)
        for panel in range(first, last):
            n = min(nr, operand.hidden - panel * nr)
            at = panel * nr * elements(kernels, operand.count) + begin // kernels.pair * align_up(n, kernels.vector)
            kernels.pack_columns(
                <char *>operand.columns + at * kernels.element_size, &operand.matrix,
                numbers, operand.start + begin, rows_here, panel * nr, n
            )
        begin += rows_here
    if end == operand.count:
        for panel in range(first, last):
            clear_filling(operand, kernels, panel)


cdef void clear_filling(const Operand *operand, const ag_linear_kernels *kernels, Py_ssize_t panel) noexcept nogil:
    """Clear the elements behind the last row of a panel of columns, which only fill the last step of a matrix unit."""
    cdef Py_ssize_t width = align_up(min(<Py_ssize_t>kernels.nr, operand.hidden - panel * kernels.nr), kernels.vector)
    cdef Py_ssize_t first = align_up(ceil_div(operand.count, kernels.pair), kernels.column_group)
    cdef Py_ssize_t all = elements(kernels, operand.count)
    memset(
        <char *>operand.columns + (panel * kernels.nr * all + first * width) * kernels.element_size, 0,
        (all - first) * width * kernels.element_size
    )
