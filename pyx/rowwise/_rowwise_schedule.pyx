"""Schedules of row-wise problems, without Python: number of threads, kernels, workspace, phases.

The tasks of a plan (`_rowwise_plan`) run on a team of threads (`_tasks`). Tasks that are whole blocks run in one phase.
Splits need several: first the maxima and sums of splits are computed, each combined in order, then the results are
written. A small problem runs without a schedule, by `compute_at_once`.

The caller owns the workspace. It calls `prepare`, allocates `workspace_size` bytes, calls `place_workspace` and `run`.
"""

from libc.math cimport INFINITY
from libc.stdint cimport uint8_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from ascend_grad cimport _cpu, _openmp, _tasks, _threads
from ascend_grad._kernels cimport (
    AG_FLOAT32,
    AG_FLOAT64,
    ag_convert,
    ag_dim,
    ag_dtype,
    ag_fpenv,
    ag_fpenv_enter,
    ag_fpenv_leave,
    ag_itemsize,
    ag_sum,
    ag_sum_add,
    ag_sum_total,
    ag_variant,
)
from ascend_grad._memory cimport ALIGNMENT, Arena, align_up, aligned, arena_alloc, ceil_div, magnitude
from ascend_grad._rowwise_candidates cimport COPIED, choose_plan, is_computed_at_once, is_copied, is_plain
from ascend_grad._rowwise_costs cimport plain_time
from ascend_grad._rowwise_expanded cimport convert_inputs, expand_rows, place_expanded
from ascend_grad._rowwise_plan cimport (
    MASK,
    MAX_AXES,
    OUT,
    ROWS,
    A,
    Axes,
    B,
    Layout,
    Operand,
    Plan,
    Problem,
    box_dims,
    choose_tile_dtype,
    columns_at,
    has_b,
    has_mask,
    is_forward,
    is_loss,
    offset_of,
    row_pitch,
    rows_of,
    tile_at,
)
from ascend_grad._rowwise_kernels cimport (
    AG_SCRATCH_BYTES,
    AG_SOFTMAX,
    ag_loss_kernels,
    ag_row_kernels,
    ag_rowwise_kernels,
    ag_rowwise_loss_kernels,
    ag_tile,
)
from ascend_grad._tasks cimport Team
from ascend_grad._views cimport copy_3d
from ascend_grad.status cimport BAD_ALLOC, SUCCESS, Status

cdef enum:
    COMBINED_SUMS = 1 << 11           # sums of segments that one thread combines while a team begins a phase. Estimated
    MOST_COMBINED_SUMS = 1 << 15      # most sums of a task of several rows, so that signals are checked in time
    COMBINATIONS = 4                  # tasks of each thread that combine sums, if there are as many rows

cdef Py_ssize_t SCRATCH_BYTES = align_up(AG_SCRATCH_BYTES, ALIGNMENT)

# ---- kernels in place ------------------------------------------------------------------------------------------------

cdef void compute_rows(const Problem *p, const ag_row_kernels *kernels, Py_ssize_t begin, Py_ssize_t end,
                       bint nontemporal) noexcept nogil:
    """Compute whole rows in place. Each call of the kernel gets consecutive rows with constant strides."""
    cdef Py_ssize_t row = begin, last = p.shape[p.axes - 1]
    cdef ag_tile tile
    tile.nontemporal = nontemporal
    while row < end:
        tile_at(p, row, &tile)
        tile.rows = min(end - row, last - row % last)
        kernels.rows(&tile)
        row += tile.rows


cdef void compute_strips(const Problem *p, const ag_row_kernels *kernels) noexcept nogil:
    """Compute all columns in place, if they are so short that the kernels need no scratch memory."""
    cdef Py_ssize_t inner = p.shape[p.axes - 1], block
    cdef ag_tile tile
    tile.nontemporal, tile.fits_l2 = False, True
    for block in range(p.rows // inner):
        columns_at(p, block * inner, inner, &tile)
        kernels.columns(&tile, NULL)


# ---- dense copies ----------------------------------------------------------------------------------------------------

cdef void copy_rows(const Problem *p, int which, char *rows, bint to_operand, ag_variant variant) noexcept nogil:
    """Copy all rows of an operand to adjacent rows without gaps, or from them."""
    cdef const Operand *operand = &p.operands[which]
    cdef int last = p.axes - 1
    cdef ag_dim outer, inner, elements
    cdef Py_ssize_t row = 0, block
    cdef char *at
    outer.length, outer.from_, outer.to = 1, 0, 0
    inner.length, inner.from_, inner.to = p.shape[last], operand.strides[last], p.n * operand.itemsize
    elements.length, elements.from_, elements.to = p.n, operand.dim_stride, operand.itemsize
    if p.axes > 1:
        outer.length, outer.from_, outer.to = p.shape[last - 1], operand.strides[last - 1], inner.length * inner.to
    block = outer.length * inner.length
    while row < p.rows:
        at = operand.data + offset_of(p, operand, row)
        if to_operand:
            copy_3d(
                variant, at, rows, reverse(outer), reverse(inner), reverse(elements), operand.itemsize, operand.swapped
            )
        else:
            copy_3d(variant, rows, at, outer, inner, elements, operand.itemsize, operand.swapped)
        rows += block * inner.to
        row += block


cdef void copy_input(const Problem *p, int which, ag_dtype dtype, char *rows, ag_variant variant) noexcept nogil:
    """Copy all rows of an input of a small problem to adjacent rows of a dtype."""
    cdef double[COPIED] copied
    if p.operands[which].dtype == dtype:
        copy_rows(p, which, rows, False, variant)
        return
    copy_rows(p, which, <char *>copied, False, variant)
    convert_inputs(variant, p.operands[which].dtype, <char *>copied, dtype, rows, p.rows * p.n)


cdef void compute_copies(const Problem *p) noexcept nogil:
    """Compute a small problem in dense copies of its rows."""
    cdef double[COPIED] a, b, mask
    cdef ag_variant variant = _cpu.active()
    cdef ag_dtype dtype = choose_tile_dtype(p)
    cdef ag_tile tile
    copy_input(p, A, dtype, <char *>a, variant)
    tile.a = tile.b = tile.out = <char *>a
    tile.mask = <const uint8_t *>mask
    tile.a_stride = tile.b_stride = tile.out_stride = p.n * ag_itemsize[<int>dtype]
    tile.mask_stride = p.n
    if has_b(p.op):
        copy_input(p, B, dtype, <char *>b, variant)
        tile.b = <char *>b
    if has_mask(p.op):
        copy_rows(p, MASK, <char *>mask, False, variant)
    tile.rows, tile.n, tile.scale, tile.nontemporal = p.rows, p.n, p.scale, False
    kernels_of(p, dtype).rows(&tile)
    if p.operands[OUT].dtype != dtype:
        ag_convert(variant, dtype == AG_FLOAT64, <char *>a, p.operands[OUT].dtype, <char *>b, p.rows * p.n)
        tile.out = <char *>b
    copy_rows(p, OUT, tile.out, True, variant)


# ---- the schedule ----------------------------------------------------------------------------------------------------

cdef const ag_row_kernels *kernels_of(const Problem *p, ag_dtype dtype) noexcept nogil:
    """Return the kernels of tiles of a dtype. The cross-entropy takes the maxima of a softmax."""
    return ag_rowwise_kernels(_cpu.active(), dtype, AG_SOFTMAX if is_loss(p.op) else p.op)


cdef double serial_time(const Problem *p, Plan *serial) noexcept nogil:
    """Return the estimated nanoseconds of one thread, and set its plan, which has no blocks if none is needed."""
    cdef ag_dtype dtype = choose_tile_dtype(p)
    cdef const ag_row_kernels *kernels = kernels_of(p, dtype)
    cdef Layout layout
    serial.blocks = 0
    if is_plain(p, &layout, kernels) or is_copied(p):
        return plain_time(p)
    serial[0] = choose_plan(p, dtype, kernels, 1)
    return serial.cost


cdef int threads_of(const Problem *p, int asked) noexcept nogil:
    """Return the number of threads of calls that follow one another. `asked` is the caller's number, or 0."""
    cdef Plan serial
    return _threads.expected_threads(0 if asked else serial_time(p, &serial), asked)


cdef int choose_threads(const Problem *p, int asked, Plan *serial) noexcept nogil:
    """Choose the number of threads for a problem. `asked` is the caller's number, or 0 for the default.

    `serial` becomes the plan of one thread if it was made for the choice; otherwise it has no blocks.
    """
    cdef double cost = 0
    cdef int threads
    serial.blocks = 0
    if not asked:
        cost = serial_time(p, serial)
    threads = _threads.choose_num_threads(cost, asked)
    return threads if asked or not _threads.is_oversubscribed() else 1


cdef bint compute_at_once(const Problem *p, int threads) noexcept nogil:
    """Solve a problem that is too small for a schedule and return True; return False if it needs a schedule."""
    cdef const ag_row_kernels *kernels = kernels_of(p, p.dtype)
    cdef Layout layout
    cdef ag_fpenv mode
    cdef bint is_in_place = is_computed_at_once(p, &layout, kernels)
    if threads > 1 or not (is_in_place or is_copied(p)):
        return False
    mode = ag_fpenv_enter()
    if not is_in_place:
        compute_copies(p)
    elif layout == ROWS:
        compute_rows(p, kernels, 0, p.rows, False)
    else:
        compute_strips(p, kernels)
    ag_fpenv_leave(mode)
    _openmp.record_team(1)
    return True


cdef void prepare(Schedule *s, const Problem *p, int threads, const Plan *serial) noexcept nogil:
    """Fill in a schedule without a workspace. `serial`: see `choose_threads`, or NULL."""
    cdef ag_dtype dtype = choose_tile_dtype(p)
    memset(s, 0, sizeof(Schedule))
    s.p = p[0]
    s.variant = _cpu.active()
    if threads == 1 and serial != NULL and serial.blocks:
        s.plan = serial[0]
    else:
        s.plan = choose_plan(p, dtype, kernels_of(p, dtype), threads)
    if s.plan.blocks * s.plan.splits == 1:
        s.plan.threads = 1
    s.rows = min(p.rows, s.plan.wave * s.plan.block_size)


cdef const ag_loss_kernels *loss_kernels(const Schedule *s) noexcept nogil:
    return ag_rowwise_loss_kernels(s.variant, s.plan.tile_dtype)


cdef Py_ssize_t dense_strip_rows(bint is_double) noexcept nogil:
    """Return how long columns with dense targets can be in a kernel that computes float64 if `is_double`, else float32."""
    return ag_rowwise_loss_kernels(_cpu.active(), AG_FLOAT64 if is_double else AG_FLOAT32).dense_strip_rows


cdef Py_ssize_t place_workspace(Schedule *s, char *base) noexcept nogil:
    """Place the workspace in memory that begins at `base`, and return its bytes. NULL only measures the bytes."""
    cdef const Plan *plan = &s.plan
    cdef Py_ssize_t row_bytes = s.rows * sizeof(double)
    cdef Py_ssize_t owners = plan.wave * plan.splits if plan.caches_inputs else plan.threads
    cdef Arena arena
    arena.base, arena.used = base, 0
    place_expanded(&s.p, &arena)
    s.scratch = arena_alloc(&arena, plan.threads * SCRATCH_BYTES if plan.by_columns else 0)
    s.tiles = arena_alloc(&arena, owners * plan.tiles_size)
    if plan.is_split:
        s.sums = <double *>arena_alloc(&arena, plan.segments * row_bytes)
        s.sum = <double *>arena_alloc(&arena, row_bytes)
        if is_forward(s.p.op):
            s.maxima = <double *>arena_alloc(&arena, plan.splits * row_bytes)
            s.max = <double *>arena_alloc(&arena, row_bytes)
    return arena.used


cdef Py_ssize_t workspace_size(Schedule *s) noexcept nogil:
    """Return the bytes to allocate for the workspace, at any alignment."""
    cdef Py_ssize_t used = place_workspace(s, NULL)
    return used + ALIGNMENT if used else 0


cdef char *scratch_of(const Schedule *s, int thread) noexcept nogil:
    return s.scratch + thread * SCRATCH_BYTES


cdef char *tiles_of(const Schedule *s, Py_ssize_t task, int thread) noexcept nogil:
    return s.tiles + (task if s.plan.caches_inputs else thread) * s.plan.tiles_size


# ---- tasks -----------------------------------------------------------------------------------------------------------
# A task is computed by one thread, whose number `thread` chooses its buffers.

cdef void whole_block(const Schedule *s, Py_ssize_t block, int thread) noexcept nogil:
    """Compute a block of whole rows, or a block of whole columns."""
    cdef Py_ssize_t begin, end
    cdef char *tiles = tiles_of(s, block, thread)
    cdef ag_tile tile
    rows_of(&s.plan, &s.p, block, &begin, &end)
    if s.plan.by_columns:
        column_tile(s, block, 0, s.p.n, tiles, &tile)
        s.plan.kernels.columns(&tile, scratch_of(s, thread))
        scatter_columns(s, block, 0, s.p.n, tiles, &tile)
    elif s.plan.gathers:
        gather(s, begin, end, 0, s.p.n, tiles, &tile)
        s.plan.kernels.rows(&tile)
        scatter(s, begin, end, 0, s.p.n, tiles, &tile)
    else:
        compute_rows(&s.p, s.plan.kernels, begin, end, s.plan.nontemporal)


cdef void split_max(const Schedule *s, Py_ssize_t task, int thread) noexcept nogil:
    cdef Py_ssize_t block = s.first_block + task // s.plan.splits, split = task % s.plan.splits
    cdef Py_ssize_t k = split * s.plan.split_size, length = min(s.plan.split_size, s.p.n - k)
    cdef Py_ssize_t begin = block * s.plan.block_size, end = min(begin + s.plan.block_size, s.p.rows), row
    cdef ag_tile tile
    if s.plan.by_columns:
        row = column_tile(s, block, k, length, tiles_of(s, task, thread), &tile)
        s.plan.kernels.columns_max(&tile, &s.maxima[split * s.rows + row - s.first_row], scratch_of(s, thread))
        return
    row_tile(s, begin, end, k, length, tiles_of(s, task, thread), &tile)
    for row in range(begin, end):
        s.maxima[split * s.rows + row - s.first_row] = s.plan.kernels.split_max(&tile)
        tile.a += tile.a_stride
        tile.mask += tile.mask_stride


cdef void split_sum(const Schedule *s, Py_ssize_t task, int thread) noexcept nogil:
    cdef Py_ssize_t block = s.first_block + task // s.plan.splits, split = task % s.plan.splits
    cdef Py_ssize_t segment = split * (s.plan.split_size // s.plan.kernels.segment)
    cdef Py_ssize_t last = min(s.plan.segments, segment + s.plan.split_size // s.plan.kernels.segment)
    cdef Py_ssize_t begin = block * s.plan.block_size, end = min(begin + s.plan.block_size, s.p.rows)
    cdef Py_ssize_t row, k, length
    cdef double max = 0.0
    cdef const double *columns_max = NULL
    cdef ag_tile tile
    while segment < last:
        k = segment * s.plan.kernels.segment
        length = min(s.plan.kernels.segment, s.p.n - k)
        if s.plan.by_columns:
            row = column_tile(s, block, k, length, tiles_of(s, task, thread), &tile)
            if is_forward(s.p.op):
                columns_max = &s.max[row - s.first_row]
            s.plan.kernels.columns_sum(
                &tile, columns_max, &s.sums[segment * s.rows + row - s.first_row], scratch_of(s, thread)
            )
        else:
            row_tile(s, begin, end, k, length, tiles_of(s, task, thread), &tile)
            for row in range(begin, end):
                if is_forward(s.p.op):
                    max = s.max[row - s.first_row]
                s.sums[segment * s.rows + row - s.first_row] = s.plan.kernels.split_sum(&tile, max)
                tile.a += tile.a_stride
                tile.b += tile.b_stride
                tile.mask += tile.mask_stride
        segment += 1


cdef void split_write(const Schedule *s, Py_ssize_t task, int thread) noexcept nogil:
    cdef Py_ssize_t block = s.first_block + task // s.plan.splits, split = task % s.plan.splits
    cdef Py_ssize_t k = split * s.plan.split_size, length = min(s.plan.split_size, s.p.n - k)
    cdef Py_ssize_t begin = block * s.plan.block_size, end = min(begin + s.plan.block_size, s.p.rows), row
    cdef double max = 0.0
    cdef const double *columns_max = NULL
    cdef char *tiles = tiles_of(s, task, thread)
    cdef ag_tile tile, part
    if s.plan.by_columns:
        row = column_tile(s, block, k, length, tiles, &tile)
        if is_forward(s.p.op):
            columns_max = &s.max[row - s.first_row]
        s.plan.kernels.columns_write(&tile, columns_max, &s.sum[row - s.first_row], scratch_of(s, thread))
        scatter_columns(s, block, k, length, tiles, &tile)
        return
    row_tile(s, begin, end, k, length, tiles, &tile)
    part = tile
    for row in range(begin, end):
        if is_forward(s.p.op):
            max = s.max[row - s.first_row]
        s.plan.kernels.split_write(&part, max, s.sum[row - s.first_row])
        part.a += part.a_stride
        part.b += part.b_stride
        part.mask += part.mask_stride
        part.out += part.out_stride
    if s.plan.gathers:
        scatter(s, begin, end, k, length, tiles, &tile)


cdef void combine(const Schedule *s, Py_ssize_t task) noexcept nogil:
    """Combine the maxima, or the sums, of the rows of a task."""
    cdef Py_ssize_t row
    for row in range(task * s.combined, min((task + 1) * s.combined, s.to_combine)):
        if s.phase == COMBINE_MAX:
            combine_max(s, row)
        else:
            combine_sum(s, row)


cdef void combine_sum(const Schedule *s, Py_ssize_t row) noexcept nogil:
    """Add up the sums of the segments of a row, counted from the first one of the wave, in order."""
    cdef ag_sum total
    cdef Py_ssize_t segment
    total.sum = total.compensation = 0.0
    for segment in range(s.plan.segments):
        ag_sum_add(&total, s.sums[segment * s.rows + row])
    s.sum[row] = ag_sum_total(total)


cdef void combine_max(const Schedule *s, Py_ssize_t row) noexcept nogil:
    cdef double best = -INFINITY
    cdef Py_ssize_t split
    for split in range(s.plan.splits):
        if s.maxima[split * s.rows + row] > best:
            best = s.maxima[split * s.rows + row]
    s.max[row] = best


# ---- tiles -----------------------------------------------------------------------------------------------------------
# A tile is in place, or gathered into the thread's or task's buffer, where the results overwrite the first input, or
# the second tile if the first input is transformed.

cdef Py_ssize_t column_tile(
    const Schedule *s, Py_ssize_t block, Py_ssize_t k, Py_ssize_t length, char *tiles, ag_tile *tile
) noexcept nogil:
    """Fill in a tile of a block of columns, `length` rows from k on, and return the number of its first column."""
    cdef Py_ssize_t begin, end
    rows_of(&s.plan, &s.p, block, &begin, &end)
    if s.plan.gathers:
        gather(s, begin, end, k, length, tiles, tile)
        tile.fits_l2 = True
        return begin
    columns_at(&s.p, begin, end - begin, tile)
    tile.a += k * tile.a_stride
    tile.b += k * tile.b_stride
    tile.out += k * tile.out_stride
    tile.n = length
    tile.nontemporal = s.plan.nontemporal
    tile.fits_l2 = (
        not s.plan.is_split and 2 * length * tile.rows * s.p.operands[A].itemsize <= _cpu.cache_size(2)
    )
    return begin


cdef void scatter_columns(
    const Schedule *s, Py_ssize_t block, Py_ssize_t k, Py_ssize_t length, char *tiles, const ag_tile *tile
) noexcept nogil:
    cdef Py_ssize_t begin, end
    if s.plan.gathers:
        rows_of(&s.plan, &s.p, block, &begin, &end)
        scatter(s, begin, end, k, length, tiles, tile)


cdef void row_tile(
    const Schedule *s, Py_ssize_t begin, Py_ssize_t end, Py_ssize_t k, Py_ssize_t length, char *tiles, ag_tile *tile
) noexcept nogil:
    """Fill in a tile of elements k .. k+length of rows begin .. end (of row `begin` alone, if it is in place)."""
    if s.plan.gathers:
        gather(s, begin, end, k, length, tiles, tile)
        return
    tile_at(&s.p, begin, tile)
    tile.rows = 1
    tile.n = length
    tile.nontemporal = s.plan.nontemporal
    tile.a += k * s.p.operands[A].dim_stride
    tile.b += k * s.p.operands[B].dim_stride
    tile.mask += k * s.p.operands[MASK].dim_stride
    tile.out += k * s.p.operands[OUT].dim_stride


cdef void gather(
    const Schedule *s, Py_ssize_t begin, Py_ssize_t end, Py_ssize_t k, Py_ssize_t length, char *tiles, ag_tile *tile
) noexcept nogil:
    """Fill in a tile of elements k .. k+length of rows begin .. end: dense copies, or operands in place."""
    cdef Py_ssize_t rows = end - begin, pitch = row_pitch(&s.plan, rows, length)
    tile.a = gather_operand(s, A, begin, end, k, length, pitch, tiles, tiles, &tile.a_stride)
    tile.b = tile.a
    tile.b_stride = 0
    if has_b(s.p.op):
        tile.b = gather_operand(
            s, B, begin, end, k, length, pitch, tiles + s.plan.second_tile, tiles, &tile.b_stride
        )
    tile.mask = <const uint8_t *>tile.a
    tile.mask_stride = 0
    if has_mask(s.p.op):
        tile.mask = <const uint8_t *>gather_operand(
            s, MASK, begin, end, k, length, pitch, tiles + s.plan.mask_tile, tiles, &tile.mask_stride
        )
    if s.plan.direct[OUT]:
        tile.out = address_of(s, OUT, begin, k, &tile.out_stride)
    else:
        tile.out = tiles + s.plan.second_tile if s.p.is_transformed else tiles
        tile.out_stride = pitch * s.plan.tile_itemsize
    tile.rows = rows
    tile.n = length
    tile.scale = s.p.scale
    tile.nontemporal = False


cdef char *address_of(const Schedule *s, int which, Py_ssize_t row, Py_ssize_t k, Py_ssize_t *stride) noexcept nogil:
    """Return the address of element k of a row of a direct operand, and set the stride of its tile."""
    cdef const Operand *operand = &s.p.operands[which]
    cdef Py_ssize_t row_stride = s.plan.axes[which].strides[0]
    stride[0] = operand.dim_stride if s.plan.by_columns else row_stride
    return operand.data + row * row_stride + k * operand.dim_stride


cdef char *gather_operand(
    const Schedule *s, int which, Py_ssize_t begin, Py_ssize_t end, Py_ssize_t k, Py_ssize_t length, Py_ssize_t pitch,
    char *to, char *tiles, Py_ssize_t *stride
) noexcept nogil:
    """Return the address of a dense copy in the tile's dtype (masks stay bytes), or of the operand if it is direct."""
    cdef const Operand *operand = &s.p.operands[which]
    cdef bint converts = which != MASK and operand.dtype != s.plan.tile_dtype
    if s.plan.direct[which]:
        return address_of(s, which, begin, k, stride)
    stride[0] = pitch if which == MASK else pitch * s.plan.tile_itemsize
    if s.plan.constant[which]:
        stride[0], length = 0, 1
    if s.plan.caches_inputs and s.phase != (SPLIT_MAX if is_forward(s.p.op) else SPLIT_SUM):
        return to  # gathered in the first phase
    copy_elements(s, which, begin, end, k, length, pitch, tiles + s.plan.converted_tile if converts else to, False)
    if converts:
        convert_inputs(
            s.variant, operand.dtype, tiles + s.plan.converted_tile, s.plan.tile_dtype, to,
            pitch * (length if s.plan.by_columns else end - begin)
        )
    if which == A and s.p.is_transformed:
        loss_kernels(s).transform(to, pitch * (end - begin), s.p.inner, s.p.cap)
    return to


cdef void scatter(
    const Schedule *s, Py_ssize_t begin, Py_ssize_t end, Py_ssize_t k, Py_ssize_t length, char *tiles, const ag_tile *tile
) noexcept nogil:
    """Copy the results of gathered rows to the result array, rounded once to its dtype."""
    cdef const Operand *out = &s.p.operands[OUT]
    cdef Py_ssize_t rows = end - begin, pitch = row_pitch(&s.plan, rows, length)
    cdef char *dense = tile.out
    if s.plan.direct[OUT]:
        return
    if s.p.is_transformed and s.p.cap > 0:
        loss_kernels(s).apply_slopes(tile.a, tile.out, pitch * rows, s.p.cap)
    if out.dtype != s.plan.tile_dtype:
        dense = tiles + s.plan.converted_tile
        ag_convert(
            s.variant, s.plan.tile_dtype == AG_FLOAT64, tile.out, out.dtype, dense,
            pitch * (length if s.plan.by_columns else rows)
        )
    copy_elements(s, OUT, begin, end, k, length, pitch, dense, True)


cdef void copy_elements(
    const Schedule *s, int which, Py_ssize_t begin, Py_ssize_t end, Py_ssize_t k, Py_ssize_t length, Py_ssize_t pitch,
    char *dense, bint to_operand
) noexcept nogil:
    """Copy elements k .. k+length of rows begin .. end of an operand from, or to, a dense tile of the operand's dtype."""
    cdef const Operand *operand = &s.p.operands[which]
    cdef const Axes *axes = &s.plan.axes[which]
    cdef int itemsize = operand.itemsize, axis, i
    cdef Py_ssize_t row_step = itemsize if s.plan.by_columns else pitch * itemsize
    cdef Py_ssize_t row = begin, rows, index, whole, rest
    cdef ag_dim[MAX_AXES] dims
    cdef ag_dim elements
    cdef char *at
    elements.length, elements.from_ = length, operand.dim_stride
    elements.to = pitch * itemsize if s.plan.by_columns else itemsize
    if s.plan.is_boxed:
        axis = box_dims(&s.plan, &s.p, operand, begin, row_step, dims)
        at = operand.data + k * operand.dim_stride + offset_of(&s.p, operand, begin)
        copy_box(s, operand, at, dense, dims, axis, elements, to_operand)
        return
    while row < end:
        # The next block has whole inner axes, as many as fit, and a part of the axis before them.
        axis, index, whole = axes.count - 1, row, 1
        while axis > 0 and index % axes.shape[axis] == 0 and whole * axes.shape[axis] <= end - row:
            whole *= axes.shape[axis]
            index //= axes.shape[axis]
            axis -= 1
        dims[0].length = min((end - row) // whole, axes.shape[axis] - index % axes.shape[axis])
        dims[0].from_, dims[0].to = axes.strides[axis], whole * row_step
        rest = whole
        for i in range(axis + 1, axes.count):
            rest //= axes.shape[i]
            dims[i - axis].length, dims[i - axis].from_, dims[i - axis].to = axes.shape[i], axes.strides[i], rest * row_step
        at = operand.data + k * operand.dim_stride + offset_of(&s.p, operand, row)
        rows = whole * dims[0].length
        copy_box(s, operand, at, dense + (row - begin) * row_step, dims, axes.count - axis, elements, to_operand)
        row += rows


cdef void copy_box(
    const Schedule *s, const Operand *operand, char *at, char *dense, ag_dim *dims, int count, ag_dim elements,
    bint to_operand
) noexcept nogil:
    """Copy a box of rows, whose `count` dimensions are sorted here, from an operand (`at`), or to it, if `to_operand`."""
    cdef ag_dim outer, inner, t
    cdef Py_ssize_t boxes = 1, box, rest, from_, to
    cdef int i, j
    cdef bint by_stride, is_before
    # The two longest dimensions come first, and are copied together with the elements of rows. In boxes they are the
    # dimensions that are nearest in the operand and in a tile of columns, as both may be contiguous.
    for i in range(min(count, 2)):
        by_stride = s.plan.is_boxed and (i == 0 or s.plan.by_columns)
        for j in range(i + 1, count):
            if by_stride and dims[i].length > 1 and dims[j].length > 1:
                is_before = (
                    dims[j].to < dims[i].to if i else magnitude(dims[j].from_) < magnitude(dims[i].from_)
                )
            else:
                is_before = dims[j].length > dims[i].length
            if is_before:
                t = dims[i]
                dims[i], dims[j] = dims[j], t
    inner = dims[0]
    outer.length, outer.from_, outer.to = 1, 0, 0
    if count > 1:
        outer = dims[1]
    for i in range(2, count):
        boxes *= dims[i].length
    for box in range(boxes):
        rest, from_, to = box, 0, 0
        for i in range(2, count):
            from_ += rest % dims[i].length * dims[i].from_
            to += rest % dims[i].length * dims[i].to
            rest //= dims[i].length
        if to_operand:
            copy_3d(
                s.variant, at + from_, dense + to, reverse(outer), reverse(inner), reverse(elements), operand.itemsize,
                operand.swapped
            )
        else:
            copy_3d(s.variant, dense + to, at + from_, outer, inner, elements, operand.itemsize, operand.swapped)


cdef inline ag_dim reverse(ag_dim dim) noexcept nogil:
    """Return a dimension whose source and destination are exchanged."""
    cdef ag_dim back
    back.length, back.from_, back.to = dim.length, dim.to, dim.from_
    return back


# ---- phases ----------------------------------------------------------------------------------------------------------

cdef void run_task(const void *schedule, Py_ssize_t index, int thread) noexcept nogil:
    cdef const Schedule *s = <const Schedule *>schedule
    if s.phase == WHOLE_BLOCKS:
        whole_block(s, index, thread)
    elif s.phase == SPLIT_MAX:
        split_max(s, index, thread)
    elif s.phase == SPLIT_SUM:
        split_sum(s, index, thread)
    elif s.phase == SPLIT_WRITE:
        split_write(s, index, thread)
    else:
        combine(s, index)


cdef void run_phase(Schedule *s, Team *team, Phase phase, Py_ssize_t tasks) noexcept nogil:
    s.phase = phase
    _tasks.run_phase(team, run_task, s, tasks, not s.plan.nontemporal)


cdef void run_combination(Schedule *s, Team *team, Phase phase, Py_ssize_t rows) noexcept nogil:
    """Combine the maxima, or the sums, of the segments of these rows of the wave."""
    cdef Py_ssize_t most = max(MOST_COMBINED_SUMS // s.plan.segments, <Py_ssize_t>1)
    s.phase, s.to_combine, s.combined = phase, rows, min(ceil_div(rows, COMBINATIONS * s.plan.threads), most)
    if rows * s.plan.segments <= COMBINED_SUMS:
        s.combined = rows
    _tasks.run_phase(team, run_task, s, ceil_div(rows, s.combined), True)


cdef void run_phases(void *schedule, Team *team) noexcept nogil:
    """Run the phases of a schedule; the program of a team."""
    cdef Schedule *s = <Schedule *>schedule
    cdef Py_ssize_t blocks, tasks, rows
    if not s.plan.is_split:
        run_phase(s, team, WHOLE_BLOCKS, s.plan.blocks)
        return
    while s.first_block < s.plan.blocks:
        blocks = min(s.plan.wave, s.plan.blocks - s.first_block)
        tasks, s.first_row = blocks * s.plan.splits, s.first_block * s.plan.block_size
        rows = min(s.rows, s.p.rows - s.first_row)
        if is_forward(s.p.op):
            run_phase(s, team, SPLIT_MAX, tasks)
            run_combination(s, team, COMBINE_MAX, rows)
        run_phase(s, team, SPLIT_SUM, tasks)
        run_combination(s, team, COMBINE_SUM, rows)
        run_phase(s, team, SPLIT_WRITE, tasks)
        s.first_block += blocks


cdef int run(Schedule *s, bint default_threads, double *last_check) except -1 nogil:
    """Solve the problem in its workspace; see `_tasks.run_team` for the arguments."""
    if s.p.expands:
        expand_rows(&s.p, s.variant)
    return _tasks.run_team(
        run_phases, s, s.plan.threads, default_threads, s.plan.threads * s.plan.cost, last_check
    )


cdef Status solve(const Problem *p, int num_threads) noexcept nogil:
    """Solve a problem in a workspace that is allocated here, for callers without the interpreter's lock.

    Signals are not checked.
    """
    cdef Plan serial
    cdef int threads = choose_threads(p, num_threads, &serial)
    cdef Schedule schedule
    cdef char *memory = NULL
    cdef Py_ssize_t nbytes
    if compute_at_once(p, threads):
        return SUCCESS
    prepare(&schedule, p, threads, &serial)
    nbytes = workspace_size(&schedule)
    if nbytes:
        memory = <char *>malloc(nbytes)
        if memory == NULL:
            return BAD_ALLOC
        place_workspace(&schedule, aligned(memory))
    run(&schedule, num_threads == 0, NULL)  # raises nothing, as signals are not checked
    free(memory)
    return SUCCESS
