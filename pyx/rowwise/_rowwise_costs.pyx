"""Estimated times of row-wise plans.

An estimate adds up what a plan does: the arithmetic of its kernels, the cache lines that its operands and tiles move through
the cache or memory that holds them, the copies into and out of tiles, and the starts of tasks and phases. Each is a count
times a constant of the tables below.
"""

from ascend_grad cimport _cpu
from ascend_grad._kernels cimport AG_FLOAT64, ag_longest_step
from ascend_grad._memory cimport ceil_div, magnitude
from ascend_grad._rowwise_kernels cimport AG_MAX_LANES, AG_PACKED_COLUMNS, AG_SEGMENT, AG_STRIP_COLUMNS
from ascend_grad._rowwise_plan cimport (
    COLUMNS,
    MASK,
    MAX_AXES,
    NARROW_ROW,
    OPERANDS,
    OUT,
    ROWS,
    Operand,
    Plan,
    Problem,
    are_dense_rows,
    has_b,
    is_forward,
    is_loss,
    is_used,
)

# ---- constants, in nanoseconds on one thread -------------------------------------------------------------------------

cdef double[TERMS] NANOSECONDS
NANOSECONDS[KERNELS] = 1
NANOSECONDS[LINES_L2] = 0.3
NANOSECONDS[LINES_L3] = 1.6
NANOSECONDS[LINES_MEMORY] = 4
NANOSECONDS[JUMPS] = 4
NANOSECONDS[TILE_LINES_L2] = 0.7
NANOSECONDS[TILE_LINES_L3] = 2
NANOSECONDS[LOOPS] = 1.3
NANOSECONDS[MOVED_LINES] = 3
NANOSECONDS[STRIDED] = 0.42
NANOSECONDS[SHORT_ROWS] = 0.2
NANOSECONDS[STEP_BYTES] = 0.008       # with vectors of 64 bytes
NANOSECONDS[TRANSPOSED] = 0.28
NANOSECONDS[TURNED] = 1.5
NANOSECONDS[CONVERTED] = 0.1
NANOSECONDS[TASKS] = 60
NANOSECONDS[COPIES] = 90
NANOSECONDS[PHASES] = 2000

ctypedef struct Kernel:
    double short_element              # an element of a short row without a gap to the next row
    double row                        # the start of another row
    double element                    # an element of another row
    double column_element             # an element of a column

# Kernels with vectors of 64 bytes on operands in L1 and L2: by direction, and by dtype in the order of ag_dtype. Measured.
cdef Kernel[4] BACKWARD, FORWARD


cdef void set_kernel(Kernel *kernel, double short_element, double row, double element, double column_element) noexcept:
    kernel.short_element, kernel.row = short_element, row
    kernel.element, kernel.column_element = element, column_element


set_kernel(&BACKWARD[0], 0.7, 4.5, 0.13, 0.22)
set_kernel(&BACKWARD[1], 0.65, 4.5, 0.16, 0.22)
set_kernel(&BACKWARD[2], 0.7, 5, 0.2, 0.28)
set_kernel(&BACKWARD[3], 0.75, 3.5, 0.33, 0.4)
set_kernel(&FORWARD[0], 1.25, 9, 0.27, 0.45)
set_kernel(&FORWARD[1], 1.2, 9, 0.28, 0.47)
set_kernel(&FORWARD[2], 1.2, 10, 0.34, 0.52)
set_kernel(&FORWARD[3], 1.5, 7, 0.75, 0.9)

cdef enum:
    SHORT_LOOP = 8                    # least length of the inner loop of a copy, if it has a longer dimension
    PAGE = 4096                       # bytes of a page, at whose end prefetching ends
    MAX_SHORT_COLUMNS = 16            # most elements of adjacent rows whose copy into columns stays within few lines
    CACHED_EXPONENTIALS = 16 << 10    # most bytes of a row whose exponentials are computed once

# Factor of `element` for rows whose exponentials are computed twice.
cdef double COMPUTED_TWICE = 1.5
# Nanoseconds that the buffers of column kernels take for a block of columns that is no strip.
cdef double SCRATCH = 150
# Nanoseconds that a call of a kernel takes for rows in place: of a softmax or its gradient, and of a cross-entropy.
cdef double CALL = 25
cdef double LOSS_CALL = 400
# Nanoseconds that a cross-entropy takes for a row, or a column, beside its elements: of ids, and of dense targets.
cdef double LOSS_ROW = 14
cdef double LOSS_COLUMN = 3
cdef double DENSE_ROW = 30
cdef double DENSE_COLUMN = 5

# ---- operands in memory ----------------------------------------------------------------------------------------------

cdef Extent extent_of(
    const Problem *p, int which, Py_ssize_t rows, Py_ssize_t length, const Py_ssize_t *box
) noexcept nogil:
    """Return what a tile takes in an operand's memory: `length` elements of each of some adjacent rows, or of a box."""
    cdef const Operand *operand = &p.operands[which]
    cdef Py_ssize_t[MAX_AXES + 1] lengths, strides
    cdef Py_ssize_t stride, taken, run = operand.itemsize
    cdef int axis = p.axes - 1, count = 0, k
    cdef Extent extent
    # Sort the dimensions by stride, smallest first.
    for k in range(p.axes + 1):
        if k == 0:
            taken, stride = length, magnitude(operand.dim_stride)
        else:
            taken, stride = box[axis] if box != NULL else min(rows, p.shape[axis]), magnitude(operand.strides[axis])
            rows = ceil_div(rows, p.shape[axis])
            axis -= 1
        if taken == 1 or stride == 0:
            continue
        lengths[count], strides[count] = taken, stride
        count += 1
    for k in range(1, count):
        axis = k
        while axis > 0 and strides[axis] < strides[axis - 1]:
            strides[axis], strides[axis - 1] = strides[axis - 1], strides[axis]
            lengths[axis], lengths[axis - 1] = lengths[axis - 1], lengths[axis]
            axis -= 1
    extent.runs = 1
    for k in range(count):
        if extent.runs == 1 and strides[k] < run + 64:
            run = max(run, (lengths[k] - 1) * strides[k] + run)
        else:
            extent.runs *= lengths[k]
    extent.lines = extent.runs * (run / 64.0 + (1 if extent.runs > 1 else 0.5))
    if count and lengths[0] < SHORT_LOOP and strides[0] < 64 and extent.lines * 64 > _cpu.cache_size(2):
        # Copies run along longer dimensions first, and find the lines again that a short one shares only in L2.
        extent.lines *= min(lengths[0], 64 // strides[0])
    return extent


cdef Memory memory_of(const Problem *p, int threads) noexcept nogil:
    """Return what the operands of a problem take in memory, and in the caches of a team."""
    cdef Memory memory
    cdef double lines = 0
    cdef int i
    for i in range(OPERANDS):
        if is_used(p, i):
            memory.extents[i] = extent_of(p, i, p.rows, p.n, NULL)
            lines += memory.extents[i].lines
    if lines * 64 <= _cpu.cache_size(2):
        memory.level = LINES_L2
    else:
        memory.level = LINES_L3 if lines * 64 <= _cpu.shared_cache_size(threads) else LINES_MEMORY
    return memory

# ---- kernels ---------------------------------------------------------------------------------------------------------

cdef double vector_ratio(const Plan *plan) noexcept nogil:
    """Return how many vectors of the kernels have the bytes of the longest vectors."""
    cdef Py_ssize_t lanes = plan.kernels.segment // AG_SEGMENT(1)
    return (AG_MAX_LANES // 2 if plan.tile_dtype == AG_FLOAT64 else AG_MAX_LANES) / <double>lanes


cdef bint are_packed(const Problem *p, Py_ssize_t width) noexcept nogil:
    """Return whether columns of this width follow each other without gaps in every operand, so that vectors span several."""
    cdef int i
    for i in range(OPERANDS):
        if is_used(p, i) and i != MASK and p.operands[i].dim_stride != width * p.operands[i].itemsize:
            return False
    return True


cdef double kernel_time(const Problem *p, const Plan *plan) noexcept nogil:
    """Return the nanoseconds of the arithmetic of all rows."""
    cdef Kernel kernel = FORWARD[<int>plan.tile_dtype] if is_forward(p.op) else BACKWARD[<int>plan.tile_dtype]
    cdef Py_ssize_t lanes = plan.kernels.segment // AG_SEGMENT(1), columns, width = plan.block_size
    cdef bint is_dense = are_dense_rows(p) if plan.layout == ROWS else True
    cdef double slower = vector_ratio(plan), time
    if plan.by_columns:
        columns = width
        if plan.layout == COLUMNS and not (width <= AG_PACKED_COLUMNS and are_packed(p, width)):
            columns = ceil_div(width, lanes) * lanes + (lanes if width % lanes else 0)  # partial vectors are slow
        time = kernel.column_element * slower * p.n * p.rows * columns / width
        if p.n > plan.kernels.strip_rows or width < AG_STRIP_COLUMNS:
            time += SCRATCH * plan.blocks * plan.splits
    else:
        time = kernel.element * slower * p.n
        if is_forward(p.op) and (plan.is_split or p.n * plan.tile_itemsize > CACHED_EXPONENTIALS):
            time *= COMPUTED_TWICE
        time = p.rows * (kernel.row * plan.splits + time)
        if is_dense and p.n <= NARROW_ROW and not plan.is_split:
            time = min(time, kernel.short_element * slower * p.n * p.rows)
        if plan.layout == ROWS and not is_dense:  # a call of the kernel computes rows along one axis
            time += p.rows * kernel.row + (LOSS_CALL if is_loss(p.op) else CALL) * p.rows / p.shape[p.axes - 1]
    if is_loss(p.op) and has_b(p.op):
        time += p.rows * (DENSE_COLUMN if plan.by_columns else DENSE_ROW)
    elif is_loss(p.op):
        time += p.rows * (LOSS_COLUMN if plan.by_columns else LOSS_ROW)
    return time


# ---- copies ----------------------------------------------------------------------------------------------------------

cdef double copies_of_box(const Plan *plan, const Problem *p) noexcept nogil:
    """Return how many copies take as long as that of a box: each has two axes of the rows, and the axes take one."""
    cdef Py_ssize_t longest = 1, next = 1, rows = 1, length
    cdef int axis
    for axis in range(p.axes):
        length = plan.box[axis]
        rows *= length
        if length > longest:
            longest, next = length, longest
        else:
            next = max(next, length)
    return 1 + rows / <double>(longest * next)


cdef void count_copies(
    const Problem *p, const Plan *plan, int which, double elements, Py_ssize_t rows, Py_ssize_t length, double *counts
) noexcept nogil:
    """Count one copy of all elements of an operand between memory and tiles of `rows` rows of `length` elements."""
    cdef const Operand *operand = &p.operands[which]
    cdef int last = plan.axes[which].count - 1, axis
    cdef Py_ssize_t across = magnitude(plan.axes[which].strides[last]), along = magnitude(operand.dim_stride), stride
    cdef Py_ssize_t row_count = min(rows, plan.axes[which].shape[last])
    cdef double slower = vector_ratio(plan)
    cdef bint is_last = True          # the nearest rows of the operand are adjacent in a tile of columns
    if plan.is_boxed:
        across, row_count = magnitude(operand.strides[p.axes - 1]), plan.box[p.axes - 1]
        for axis in reversed(range(p.axes - 1)):
            stride = magnitude(operand.strides[axis])
            if plan.box[axis] > 1 and stride and (row_count == 1 or across == 0 or stride < across):
                across, row_count, is_last = stride, plan.box[axis], False
            elif across and stride == across * row_count:
                row_count *= plan.box[axis]
    # The inner loop leads to the next row if that is the smaller stride; loops over equal elements go where the tile does.
    cdef bint by_rows = row_count > 1 and (length == 1 or (across < along if across and along else plan.by_columns))
    cdef Py_ssize_t run = row_count if by_rows else length
    stride = across if by_rows else along
    if plan.by_columns and 3 <= length <= MAX_SHORT_COLUMNS and along == operand.itemsize and across == length * along:
        counts[SHORT_ROWS] += elements
        return
    if run < SHORT_LOOP:  # the copy has another inner loop, of strided elements
        counts[STRIDED] += elements
        counts[LOOPS] += elements / max(<Py_ssize_t>SHORT_LOOP, max(row_count, length))
        return
    counts[LOOPS] += elements / run
    if (by_rows != plan.by_columns and row_count > 1 and length > 1) or (plan.by_columns and not is_last):
        if stride == operand.itemsize and min(row_count, length) >= 4 and not operand.swapped:
            counts[TRANSPOSED] += elements * operand.itemsize / 4
            if (along if by_rows else across) >= PAGE:  # every cache line of a transposed block is in another page
                counts[JUMPS] += elements * operand.itemsize / 64
        elif not plan.by_columns and length * plan.tile_itemsize <= 64:
            counts[STRIDED] += elements  # the lines of a tile's rows stay in L1
        else:
            counts[TURNED] += elements
    elif stride <= 2 * operand.itemsize and not operand.swapped:
        counts[MOVED_LINES] += elements * operand.itemsize / 64
    elif which != OUT and not operand.swapped and stride % operand.itemsize == 0 and (
        stride // operand.itemsize <= ag_longest_step(_cpu.active(), operand.itemsize, run)
    ):
        counts[STEP_BYTES] += elements * stride * slower
    else:
        counts[STRIDED] += elements


# ---- the estimate ----------------------------------------------------------------------------------------------------

cdef void count_terms(const Problem *p, const Memory *memory, const Plan *plan, double *counts) noexcept nogil:
    """Count the terms of a plan."""
    cdef Py_ssize_t rows = plan.block_size, length = plan.split_size if plan.is_split else p.n
    cdef double tiles = <double>plan.blocks * plan.splits, elements = <double>p.rows * p.n, tile_bytes = 0, share, copies = 1
    cdef Py_ssize_t copied
    cdef int phases = (3 if is_forward(p.op) else 2) if plan.is_split else 1
    cdef int passes = 3 if is_forward(p.op) else 2, times, i, level = memory.level
    cdef Extent[OPERANDS] extents
    cdef const Py_ssize_t *box = NULL
    if plan.is_boxed:
        box = &plan.box[0]
        copies = copies_of_box(plan, p)
    for i in range(TERMS):
        counts[i] = 0
    for i in range(OPERANDS):
        if is_used(p, i):
            extents[i] = memory.extents[i] if tiles == 1 else extent_of(p, i, rows, length, box)
            if i != OUT and i != MASK:
                tile_bytes += extents[i].lines * 64
    counts[KERNELS] = kernel_time(p, plan)
    counts[TASKS] = tiles * phases
    if plan.threads > 1:
        counts[PHASES] = phases * ceil_div(plan.blocks, plan.wave)
    for i in range(OPERANDS):
        if not is_used(p, i):
            continue
        if i == OUT:
            times = 1 if plan.nontemporal else 2
        elif plan.gathers:
            times = 1 if plan.caches_inputs else phases
        elif plan.layout == ROWS and not plan.is_split:
            # Kernels in place read a block once for each pass, unless L2 holds it.
            times = passes if level != LINES_L2 and tile_bytes / rows > _cpu.cache_size(2) / 2 else 1
        else:
            times = passes if level != LINES_L2 and tile_bytes > _cpu.cache_size(2) / 2 else 1
        counts[level] += extents[i].lines * tiles * times
        if level != LINES_L2:
            counts[JUMPS] += extents[i].runs * tiles * times
        if plan.gathers and not plan.direct[i]:
            counts[COPIES] += tiles * times * copies
            copied = 1 if plan.constant[i] else length
            share = copied / <double>length
            count_copies(p, plan, i, elements * share * (1 if i == OUT else times), rows, copied, counts)
            if i != MASK and p.operands[i].dtype != plan.tile_dtype:
                counts[CONVERTED] += elements * share
    if plan.gathers:
        tile_bytes = plan.tiles_size * (plan.wave * plan.splits if plan.caches_inputs else 1.0)
        if tile_bytes > _cpu.cache_size(1) / 2:
            counts[TILE_LINES_L2 if tile_bytes <= _cpu.cache_size(2) / 2 else TILE_LINES_L3] = (
                (passes + 1) * tiles * plan.tiles_size / 64
            )


cdef double plain_time(const Problem *p) noexcept nogil:
    """Return the estimated nanoseconds of a problem in place on one thread, without a plan."""
    cdef const Kernel *kernel = &FORWARD[<int>p.dtype] if is_forward(p.op) else &BACKWARD[<int>p.dtype]
    return <double>p.rows * (p.n * kernel.column_element + (LOSS_ROW if is_loss(p.op) else 0))


cdef double cost_of(const Problem *p, const Memory *memory, const Plan *plan) noexcept nogil:
    """Return the estimated nanoseconds of a plan on its threads."""
    cdef double[TERMS] counts
    cdef double time = 0
    cdef Py_ssize_t tasks = (plan.wave if plan.is_split else plan.blocks) * plan.splits
    cdef int term
    count_terms(p, memory, plan, counts)
    for term in range(TERMS):
        if term != PHASES:
            time += counts[term] * NANOSECONDS[term]
    # The last tasks of a phase leave threads idle.
    time *= ceil_div(tasks, plan.threads) / <double>tasks
    return time + counts[PHASES] * NANOSECONDS[PHASES]
