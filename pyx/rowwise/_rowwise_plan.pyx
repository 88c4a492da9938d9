"""Plans of the row-wise operators: the description of a problem, the order of its rows, and its division into tasks.

`describe` reduces the arrays of a call to a `Problem`: one reduced dimension, and the others sorted by stride, largest
first, and coalesced if the strides of all operands allow it. A plan says which layout kernels see:

  ROWS     every operand has unit stride along the reduced dimension: kernels read and write rows in place
  COLUMNS  every operand has unit stride along another dimension: kernels process blocks of columns in place
  ROW_TILES, COLUMN_TILES
           blocks of rows or columns are gathered into a small buffer, computed there, and scattered; if the
           operands order the axes differently, a block may be a box, of whole cache lines of every operand

Its tasks are whole blocks, or splits of blocks. The functions here make one plan each; `_rowwise_candidates` chooses
among them.

The plan does not change results: rowwise.h fixes the order of every sum, so that results are the same bits for any
layout, plan and number of threads.
"""

from cpython.pyport cimport PY_SSIZE_T_MAX
from libc.stdint cimport uint8_t
from libc.string cimport memset

from ascend_grad cimport _cpu
from ascend_grad._kernels cimport AG_FLOAT32, AG_FLOAT64, ag_dim, ag_dtype, ag_itemsize, ag_rounded_to_float32
from ascend_grad._memory cimport ALIGNMENT, align_up, ceil_div, magnitude
from ascend_grad._rowwise_kernels cimport (
    AG_PACKED_COLUMNS,
    AG_SEGMENT,
    ag_row_kernels,
    ag_row_op,
    ag_tile,
)
from ascend_grad._views cimport View, size_of

cdef enum:
    CACHED_TILE_BYTES = 4 << 20      # most bytes of all tiles for which inputs are gathered once for all phases
    SPREAD_TILE_BYTES = 64 << 20      # the same for a block of spread elements
    SPREAD = 3                        # least stride, in elements, of spread elements: their lines hold little else
    TASK_ELEMENTS = 1 << 15           # elements of a task, approximately
    SMALL_SHARE = 8                   # times as many elements as a small operand has in memory are read from it
    BOX_BYTES = 64                    # least contiguous bytes of an operand in a box: a cache line
    # Least rows, and most bytes of a row, of an input that is expanded: one thread expands it before the others begin.
    MANY_ROWS = 16
    EXPANDED_BYTES = 128 << 10

# ---- the problem -----------------------------------------------------------------------------------------------------

cdef void describe_operand(Operand *operand, const View *view, int dim, const Py_ssize_t *shape) noexcept nogil:
    """Fill in an operand. Axes on which it has length 1 get stride 0, by which masks are broadcast."""
    cdef int axis, k = 0
    operand.data = view.data
    operand.itemsize = view.itemsize
    operand.dtype = <ag_dtype>view.dtype
    operand.swapped = view.swapped
    operand.dim_stride = operand.itemsize
    for axis in range(view.ndim):
        if axis == dim:
            if shape[axis] > 1:
                operand.dim_stride = view.strides[axis]
        elif shape[axis] > 1:
            operand.strides[k] = view.strides[axis] if view.shape[axis] > 1 else 0
            k += 1


cdef bint is_small(const Problem *p, int which, int axes) noexcept nogil:
    """Return whether most elements of an operand are the same in memory, so that its layout hardly matters."""
    cdef const Operand *operand = &p.operands[which]
    cdef Py_ssize_t elements = p.n if operand.dim_stride else 1
    cdef int axis
    for axis in range(axes):
        if operand.strides[axis]:
            elements *= p.shape[axis]
    return elements <= p.rows * p.n // SMALL_SHARE


cdef void coalesce_dims(Problem *p, int axes) noexcept nogil:
    """Sort the axes of the rows by stride, and coalesce them to as few axes as possible."""
    cdef int axis, k, i, used = 0
    cdef Py_ssize_t[MAX_AXES] nearest, farthest
    cdef Py_ssize_t length, stride
    cdef bint[OPERANDS] ignored
    cdef Operand *operand
    # Sort by stride, largest first, so that adjacent rows are close in memory. If operands disagree, the axis with the
    # smallest stride in any of them is innermost, so that a tile has whole cache lines of every operand. Only operands
    # that take much memory count.
    for i in range(OPERANDS):
        ignored[i] = i == MASK or is_small(p, i, axes)
    for axis in range(axes):
        nearest[axis] = farthest[axis] = 0
        for i in range(OPERANDS):
            stride = magnitude(p.operands[i].strides[axis])
            if not ignored[i] and stride:
                nearest[axis] = min(nearest[axis], stride) if nearest[axis] else stride
                farthest[axis] = max(farthest[axis], stride)
    for axis in range(1, axes):
        k = axis
        while k > 0 and (
            nearest[k - 1] < nearest[k] or (nearest[k - 1] == nearest[k] and farthest[k - 1] < farthest[k])
        ):
            nearest[k - 1], nearest[k] = nearest[k], nearest[k - 1]
            farthest[k - 1], farthest[k] = farthest[k], farthest[k - 1]
            p.shape[k - 1], p.shape[k] = p.shape[k], p.shape[k - 1]
            for i in range(OPERANDS):
                operand = &p.operands[i]
                operand.strides[k - 1], operand.strides[k] = operand.strides[k], operand.strides[k - 1]
            k -= 1
    # Coalesce an axis with the previous one if in every operand the previous stride is the axis' stride times its
    # length.
    for axis in range(1, axes):
        length = p.shape[axis]
        for i in range(OPERANDS):
            if p.operands[i].strides[used] != p.operands[i].strides[axis] * length:
                break
        else:
            p.shape[used] *= length
            for i in range(OPERANDS):
                p.operands[i].strides[used] = p.operands[i].strides[axis]
            continue
        used += 1
        p.shape[used] = length
        for i in range(OPERANDS):
            p.operands[i].strides[used] = p.operands[i].strides[axis]
    p.axes = used + 1
    if axes == 0:
        p.shape[0] = 1
        for i in range(OPERANDS):
            p.operands[i].strides[0] = 0


cdef void coalesce_alone(const Problem *p, const Operand *operand, Axes *axes) noexcept nogil:
    """Coalesce the axes of the rows for one operand."""
    cdef int axis
    axes.count = 0
    for axis in range(p.axes):
        if axes.count and axes.strides[axes.count - 1] == operand.strides[axis] * p.shape[axis]:
            axes.shape[axes.count - 1] *= p.shape[axis]
        else:
            axes.shape[axes.count] = p.shape[axis]
            axes.count += 1
        axes.strides[axes.count - 1] = operand.strides[axis]


cdef bint describe(
    Problem *p, ag_row_op op, const View *a, const View *b, const View *mask, const View *out, int dim, double scale
) noexcept nogil:
    """Fill in a problem; return False if its arrays are empty. Views that the operator does not use are not read.

    The mask of a cross-entropy has no memory: the offset of a row in it is the row's number in C order.
    """
    cdef int axis, axes = 0
    cdef const Py_ssize_t *shape = a.shape
    cdef Py_ssize_t size = size_of(a)
    if size == 0:
        return False
    p.op, p.is_transformed = op, False
    p.dtype = <ag_dtype>a.dtype
    p.scale = scale if p.dtype == AG_FLOAT64 else ag_rounded_to_float32(scale)
    p.n = shape[dim] if a.ndim else 1
    p.rows = size // p.n
    describe_operand(&p.operands[A], a, dim, shape)
    p.operands[B] = p.operands[MASK] = p.operands[A]
    if has_b(op):
        describe_operand(&p.operands[B], b, dim, shape)
    if has_mask(op) or is_loss(op):
        describe_operand(&p.operands[MASK], mask, dim, shape)
    describe_operand(&p.operands[OUT], out, dim, shape)
    for axis in range(a.ndim):
        if axis != dim and shape[axis] > 1:
            p.shape[axes] = shape[axis]
            axes += 1
    coalesce_dims(p, axes)
    p.expands = False
    for axis in range(OPERANDS):
        p.is_expanded[axis] = is_used(p, axis) and axis != OUT and not is_loss(op) and is_worth_expanding(p, axis)
        if p.is_expanded[axis]:
            expand(p, axis)
    return True


cdef bint is_shared(const Problem *p, int which) noexcept nogil:
    """Return whether all rows of an operand are the same row in memory."""
    cdef int axis
    for axis in range(p.axes):
        if p.operands[which].strides[axis]:
            return False
    return p.rows > 1


cdef bint is_worth_expanding(const Problem *p, int which) noexcept nogil:
    """Return whether an input is one row for all rows, which kernels cannot read in place."""
    cdef const Operand *operand = &p.operands[which]
    if p.rows < MANY_ROWS or not is_shared(p, which):
        return False
    if operand.dim_stride == operand.itemsize and not operand.swapped and (
        which == MASK or choose_tile_dtype(p) == operand.dtype
    ):
        return False
    return p.n * sizeof(double) <= EXPANDED_BYTES


cdef void expand(Problem *p, int which) noexcept nogil:
    """Replace an input by its one row in the workspace, which is placed and filled in by the schedule."""
    cdef Operand *operand = &p.operands[which]
    p.expands = True
    p.sources[which] = operand[0]
    if which != MASK:
        operand.dtype = choose_tile_dtype(p)
        operand.itemsize = ag_itemsize[<int>operand.dtype]
    operand.data, operand.dim_stride, operand.swapped = NULL, operand.itemsize, False


cdef void tile_at(const Problem *p, Py_ssize_t row, ag_tile *tile) noexcept nogil:
    """Fill in a tile that starts at a row, with the strides of the last axis, but without a number of rows."""
    cdef Py_ssize_t rest = row, index
    cdef Py_ssize_t[OPERANDS] offset
    cdef int axis = p.axes - 1, i
    for i in range(OPERANDS):
        offset[i] = 0
    while axis >= 0:
        index = rest % p.shape[axis] if axis else rest
        rest = rest // p.shape[axis]
        if index:
            for i in range(OPERANDS):
                offset[i] += index * p.operands[i].strides[axis]
        axis -= 1
    axis = p.axes - 1
    tile.a = p.operands[A].data + offset[A]
    tile.b = p.operands[B].data + offset[B]
    tile.mask = <const uint8_t *>p.operands[MASK].data + offset[MASK]
    tile.out = p.operands[OUT].data + offset[OUT]
    tile.a_stride = p.operands[A].strides[axis]
    tile.b_stride = p.operands[B].strides[axis]
    tile.mask_stride = p.operands[MASK].strides[axis]
    tile.out_stride = p.operands[OUT].strides[axis]
    tile.n = p.n
    tile.scale = p.scale


cdef Py_ssize_t offset_of(const Problem *p, const Operand *operand, Py_ssize_t row) noexcept nogil:
    """Return the bytes from an operand's first row to this row."""
    cdef Py_ssize_t offset = 0
    cdef int axis = p.axes - 1
    while axis > 0:
        offset += row % p.shape[axis] * operand.strides[axis]
        row //= p.shape[axis]
        axis -= 1
    return offset + row * operand.strides[0]


cdef void columns_at(const Problem *p, Py_ssize_t row, Py_ssize_t columns, ag_tile *tile) noexcept nogil:
    """Fill in a tile of columns in place; `row` is the number of its first column."""
    tile_at(p, row, tile)
    tile.a_stride = p.operands[A].dim_stride
    tile.b_stride = p.operands[B].dim_stride
    tile.out_stride = p.operands[OUT].dim_stride
    tile.rows = columns


# ---- the layout ------------------------------------------------------------------------------------------------------

cdef bint all_native(const Problem *p) noexcept nogil:
    """Return whether kernels can read and write the elements without swapping bytes or converting dtypes."""
    return not (
        p.operands[A].swapped
        or (has_b(p.op) and (p.operands[B].swapped or p.operands[B].dtype != p.dtype))
        or p.operands[OUT].swapped
        or p.operands[OUT].dtype != p.dtype
    )


cdef bint is_used(const Problem *p, int operand) noexcept nogil:
    return (operand != B or has_b(p.op)) and (operand != MASK or has_mask(p.op))


cdef bint is_direct(const Problem *p, const Plan *plan, int which) noexcept nogil:
    """Return whether kernels can read or write the rows of every block of a gathering plan in an operand, in place."""
    cdef const Operand *operand = &p.operands[which]
    cdef const Axes *axes = &plan.axes[which]
    if p.is_transformed or operand.swapped or axes.count > 1 or (plan.is_boxed and not is_shared(p, which)):
        return False
    if (which == MASK and plan.by_columns) or (which != MASK and operand.dtype != plan.tile_dtype):
        return False
    return (axes.strides[0] if plan.by_columns else operand.dim_stride) == operand.itemsize


cdef bint is_constant(const Problem *p, const Plan *plan, int which) noexcept nogil:
    """Return whether tiles have only the first element of each column of an operand, as all are equal.

    Kernels then process single rows of a tile, which suits wide blocks. Results overwrite the first input, if they are
    scattered.
    """
    if p.n == 1 or p.operands[which].dim_stride or plan.direct[which] or p.is_transformed or is_loss(p.op):
        return False
    return plan.by_columns and plan.block_size > AG_PACKED_COLUMNS and (which == B or plan.direct[OUT])


cdef bint are_dense_rows(const Problem *p) noexcept nogil:
    """Return whether the rows of every operand follow each other without gaps."""
    cdef int i
    for i in range(OPERANDS):
        if is_used(p, i) and (p.axes > 1 or p.operands[i].strides[0] != p.n * p.operands[i].itemsize):
            return False
    return True


cdef bint use_nontemporal_stores(const Problem *p, Layout layout, int threads) noexcept nogil:
    """Return whether stores should bypass the caches: the arrays fill most of L3, and no input is overwritten."""
    cdef const Operand *out = &p.operands[OUT]
    cdef Py_ssize_t nbytes = p.rows * p.n * out.itemsize * (3 if has_b(p.op) else 2)
    if nbytes < _cpu.shared_cache_size(threads) // 8 * 5 or out.data == p.operands[A].data or out.data == p.operands[B].data:
        return False
    if layout == COLUMNS:
        # A block of columns has to start on a cache line in every row: non-temporal stores of partial lines are slow.
        return p.shape[p.axes - 1] <= AG_PACKED_COLUMNS or out.dim_stride % 64 == 0
    return layout == ROWS


cdef bint is_transposed(const Problem *p) noexcept nogil:
    """Return whether adjacent elements of some operand in memory belong to different rows."""
    cdef int i, last = p.axes - 1
    cdef const Operand *operand
    if p.shape[last] == 1:
        return False
    for i in range(OPERANDS):
        operand = &p.operands[i]
        if is_used(p, i) and magnitude(operand.dim_stride) >= 64 and (
            magnitude(operand.strides[last]) < magnitude(operand.dim_stride)
        ):
            return True
    return False


cdef bint axes_disagree(const Problem *p) noexcept nogil:
    """Return whether an operand has the axes of the rows in another order than the problem."""
    cdef int i, axis
    cdef const Operand *operand
    for i in range(OPERANDS):
        operand = &p.operands[i]
        for axis in range(1, p.axes):
            if is_used(p, i) and operand.strides[axis - 1] and (
                magnitude(operand.strides[axis - 1]) < magnitude(operand.strides[axis])
            ):
                return True
    return False


# ---- the plan --------------------------------------------------------------------------------------------------------

cdef ag_dtype choose_tile_dtype(const Problem *p) noexcept nogil:
    """Return the dtype of the kernels: the first input's, or its compute type if another operand has another dtype.

    Transformed inputs also have the compute type.
    """
    if p.operands[OUT].dtype == p.dtype and p.operands[B].dtype == p.dtype and not p.is_transformed:
        return p.dtype
    return AG_FLOAT64 if p.dtype == AG_FLOAT64 else AG_FLOAT32


cdef Plan new_plan(
    const Problem *p, ag_dtype tile_dtype, const ag_row_kernels *kernels, int threads, Layout layout, bint is_boxed
) noexcept nogil:
    """Begin a plan of whole blocks or boxes for `kernels`, the kernels of `tile_dtype`, which `choose_tile_dtype` returned."""
    cdef Plan plan
    cdef int operand
    cdef bint packs                   # rows are copied without the gaps between them, as only the last vector of a tile is partial
    memset(&plan, 0, sizeof(Plan))
    plan.kernels = kernels
    plan.threads = threads
    plan.layout, plan.is_boxed = layout, is_boxed
    plan.by_columns = layout == COLUMNS or layout == COLUMN_TILES
    plan.gathers = layout == ROW_TILES or layout == COLUMN_TILES
    plan.nontemporal = use_nontemporal_stores(p, layout, threads)
    plan.tile_dtype = tile_dtype
    plan.tile_itemsize = ag_itemsize[<int>tile_dtype]
    plan.segments = ceil_div(p.n, kernels.segment)
    plan.transposes = plan.gathers and is_transposed(p)
    plan.splits = 1
    plan.split_size = p.n
    packs = layout == ROW_TILES and p.n <= NARROW_ROW and p.n % (kernels.segment // AG_SEGMENT(1))
    if plan.gathers:
        for operand in range(OPERANDS):
            coalesce_alone(p, &p.operands[operand], &plan.axes[operand])
            plan.direct[operand] = is_direct(p, &plan, operand) and not (
                packs and plan.axes[operand].strides[0] != p.n * p.operands[operand].itemsize
            )
    return plan


cdef void cut_splits(Plan *plan, const Problem *p) noexcept nogil:
    # Gathered splits have one segment. Splits in place have more segments, as long as there are enough per thread.
    plan.split_size = plan.kernels.segment
    if not plan.gathers:
        plan.split_size *= max(1, min(32, plan.segments * plan.blocks // (8 * plan.threads)))
    plan.splits = ceil_div(p.n, plan.split_size)


cdef void cut_rows(Plan *plan, const Problem *p) noexcept nogil:
    """Cut rows in place: a task has adjacent rows, or a split of one row.

    There are several tasks per thread, to balance threads that other processes slow down.
    """
    plan.block_size = 1 if plan.is_split else max(
        1, min(max(TASK_ELEMENTS // p.n, p.rows // (32 * plan.threads)), ceil_div(p.rows, 4 * plan.threads))
    )
    plan.blocks = plan.wave = ceil_div(p.rows, plan.block_size)
    if plan.is_split:
        cut_splits(plan, p)


cdef void cut_columns(Plan *plan, const Problem *p, Py_ssize_t columns) noexcept nogil:
    """Cut columns in place into blocks of at most this many columns."""
    cdef Py_ssize_t inner = p.shape[p.axes - 1]
    plan.block_size = min(inner, columns)
    plan.blocks_per_index = ceil_div(inner, plan.block_size)
    plan.blocks = plan.wave = p.rows // inner * plan.blocks_per_index
    if plan.is_split:
        cut_splits(plan, p)


cdef void cut_tiles(Plan *plan, const Problem *p, Py_ssize_t most) noexcept nogil:
    """Cut gathered rows, or columns, into blocks of at most `most`."""
    plan.block_size = max(1, min(most, p.rows))
    plan.blocks = plan.wave = ceil_div(p.rows, plan.block_size)
    if plan.is_split:
        cut_splits(plan, p)
    place_tiles(plan, p)
    if plan.is_split:
        cut_waves(plan, p)


cdef void lengthen_box(Plan *plan, const Problem *p, const Operand *operand) noexcept nogil:
    """Lengthen a box until an operand has `BOX_BYTES` contiguous bytes in it, if that is possible."""
    cdef Py_ssize_t run = operand.itemsize, stride, nearest, length
    cdef int axis, found
    while run < BOX_BYTES:
        found, nearest, length = -1, magnitude(operand.dim_stride), p.n
        if length == 1 or nearest < run:
            nearest = PY_SSIZE_T_MAX
        for axis in range(p.axes):
            stride = magnitude(operand.strides[axis])
            if p.shape[axis] > 1 and run <= stride < nearest:
                found, nearest = axis, stride
        if nearest >= BOX_BYTES:
            return
        if found >= 0:
            length = min(p.shape[found], ceil_div(BOX_BYTES, nearest))
            plan.box[found] = max(plan.box[found], length)
        run = nearest * length


cdef void cut_boxes(Plan *plan, const Problem *p, Py_ssize_t most) noexcept nogil:
    """Cut the rows into boxes that have whole cache lines of every operand, of about `most` rows or more."""
    cdef Py_ssize_t rows = 1, length
    cdef int axis, i
    for axis in range(p.axes):
        plan.box[axis] = 1
    for i in range(OPERANDS):
        if is_used(p, i):
            lengthen_box(plan, p, &p.operands[i])
    for axis in range(p.axes):
        rows *= plan.box[axis]
    plan.blocks = 1
    for axis in reversed(range(p.axes)):
        length = min(p.shape[axis], max(<Py_ssize_t>1, most // rows) * plan.box[axis])
        rows = rows // plan.box[axis] * length
        plan.box[axis] = length
        plan.blocks *= ceil_div(p.shape[axis], length)
    plan.block_size, plan.wave = rows, plan.blocks
    place_tiles(plan, p)


cdef void rows_of(
    const Plan *plan, const Problem *p, Py_ssize_t block, Py_ssize_t *begin, Py_ssize_t *end
) noexcept nogil:
    """Set the range of a block's rows, or columns, which are numbered as rows of the problem.

    A block of columns in place has one index of the outer axes. Of a box, `begin` is the first row, and `end - begin`
    the number of rows.
    """
    cdef Py_ssize_t rows = 1, inner = p.shape[p.axes - 1], count, index
    cdef int axis
    if not plan.is_boxed and plan.layout != COLUMNS:
        begin[0] = block * plan.block_size
        end[0] = min(begin[0] + plan.block_size, p.rows)
        return
    if not plan.is_boxed:
        index = block // plan.blocks_per_index
        begin[0] = index * inner + block % plan.blocks_per_index * plan.block_size
        end[0] = min(begin[0] + plan.block_size, (index + 1) * inner)
        return
    inner = 1
    begin[0] = 0
    for axis in reversed(range(p.axes)):
        count = ceil_div(p.shape[axis], plan.box[axis])
        index = block % count * plan.box[axis]
        block //= count
        begin[0] += index * inner
        rows *= min(plan.box[axis], p.shape[axis] - index)
        inner *= p.shape[axis]
    end[0] = begin[0] + rows


cdef int box_dims(
    const Plan *plan, const Problem *p, const Operand *operand, Py_ssize_t begin, Py_ssize_t row_step, ag_dim *dims
) noexcept nogil:
    """Set the dimensions of a box, whose first row is `begin`, in an operand and in a tile of `row_step` bytes a row.

    Return how many there are, as adjacent ones are coalesced.
    """
    cdef Py_ssize_t length
    cdef int axis, count = 0
    for axis in reversed(range(p.axes)):
        length = min(plan.box[axis], p.shape[axis] - begin % p.shape[axis])
        if count and dims[count - 1].from_ * dims[count - 1].length == operand.strides[axis]:
            dims[count - 1].length *= length
        else:
            dims[count].length, dims[count].from_, dims[count].to = length, operand.strides[axis], row_step
            count += 1
        row_step *= length
        begin //= p.shape[axis]
    return count


cdef void limit_blocks(Plan *plan, const Problem *p, Py_ssize_t most) noexcept nogil:
    """Divide gathered blocks, and blocks of columns, that have more than `most` rows or columns, unless they are split."""
    cdef Py_ssize_t inner = p.shape[p.axes - 1]
    if plan.layout == ROWS or plan.is_split or plan.block_size <= most:
        return
    plan.block_size = most
    if plan.layout == COLUMNS:
        plan.blocks_per_index = ceil_div(inner, most)
        plan.blocks = p.rows // inner * plan.blocks_per_index
        return
    plan.blocks = ceil_div(p.rows, most)
    place_tiles(plan, p)


cdef bint is_spread(const Problem *p, int which) noexcept nogil:
    """Return whether no elements of an operand are close to each other in memory."""
    cdef const Operand *operand = &p.operands[which]
    cdef Py_ssize_t least = SPREAD * operand.itemsize
    cdef int axis
    for axis in range(p.axes):
        if p.shape[axis] > 1 and magnitude(operand.strides[axis]) < least:
            return False
    return magnitude(operand.dim_stride) >= least


cdef void cut_waves(Plan *plan, const Problem *p) noexcept nogil:
    """Cut the blocks of splits into waves, whose inputs are gathered once for all phases, if the inputs of a block fit.

    A loss has one wave.
    """
    cdef Py_ssize_t nbytes = plan.splits * plan.tiles_size
    cdef Py_ssize_t wave = min(plan.blocks, CACHED_TILE_BYTES // nbytes) if nbytes else plan.blocks
    if wave == 0 and nbytes <= SPREAD_TILE_BYTES and is_spread(p, A) and (not has_b(p.op) or is_spread(p, B)):
        wave = 1
    plan.caches_inputs = wave >= (plan.blocks if is_loss(p.op) else 1)
    if plan.caches_inputs:
        plan.wave = ceil_div(plan.blocks, ceil_div(plan.blocks, wave))


cdef Py_ssize_t row_pitch(const Plan *plan, Py_ssize_t rows, Py_ssize_t length) noexcept nogil:
    """Return the elements between the starts of adjacent rows in memory of a gathered tile.

    The tile holds element k of its row r at index r * row_pitch + k, or k * row_pitch + r for column kernels.
    """
    if plan.by_columns:
        return rows
    # Elements of adjacent rows that are copied together should not map to one set of L1.
    return align_up(length, 16) + 16 if plan.transposes and length >= 64 else length


cdef void place_tiles(Plan *plan, const Problem *p) noexcept nogil:
    """Set the offsets and the size of the tiles of a thread or task. Tiles that are not needed have no size."""
    cdef Py_ssize_t length = plan.split_size if plan.is_split else p.n, count, size = 0
    cdef const Operand *out = &p.operands[OUT]
    plan.constant[A], plan.constant[B] = is_constant(p, plan, A), is_constant(p, plan, B)
    count = row_pitch(plan, plan.block_size, length) * (length if plan.by_columns else plan.block_size)
    if not (plan.direct[A] and plan.direct[OUT]):
        size = align_up(count * plan.tile_itemsize, ALIGNMENT)
    plan.second_tile = size
    if (has_b(p.op) and not plan.direct[B]) or p.is_transformed:
        size += align_up(count * plan.tile_itemsize, ALIGNMENT)
    plan.mask_tile = size
    if has_mask(p.op) and not plan.direct[MASK]:
        size += align_up(count, ALIGNMENT)
    plan.converted_tile = size
    if plan.tile_dtype != p.dtype or plan.tile_dtype != out.dtype or plan.tile_dtype != p.operands[B].dtype:
        size += align_up(count * max(max(p.operands[A].itemsize, p.operands[B].itemsize), out.itemsize), ALIGNMENT)
    plan.tiles_size = size
