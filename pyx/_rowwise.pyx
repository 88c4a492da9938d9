"""Row-wise operators on the CPU: from validated calls to kernels.

A call is described and planned (`_rowwise_plan`). A `Schedule` then runs the tasks of the plan on a team of threads
(`_tasks`), in one phase where tasks are whole blocks. Where they are splits, their maxima and sums are computed first,
then combined in order, and the results are written in a last phase.
"""

from cython.parallel cimport prange

cimport numpy as cnp
from libc.math cimport INFINITY
from libc.stdint cimport uint8_t

from ascend_grad cimport _cpu, _memory, _openmp, _tasks, _threads
from ascend_grad._call cimport Call, Result
from ascend_grad._dtypes cimport dtype_of
from ascend_grad._kernels cimport (
    AG_FLOAT64,
    ag_convert,
    ag_copy_3d,
    ag_dim,
    ag_dtype,
    ag_fpenv,
    ag_fpenv_enter,
    ag_fpenv_leave,
    ag_stream_add,
    ag_sum,
    ag_sum_add,
    ag_sum_total,
    ag_variant,
    ag_widen,
)
from ascend_grad._rowwise_kernels cimport (
    AG_MASKED_LOGIT,
    AG_ROW_OP_COUNT,
    AG_SCRATCH_BYTES,
    AG_STRIP_COLUMNS,
    ag_row_kernels,
    ag_row_op,
    ag_row_ops,
    ag_rowwise_kernels,
    ag_tile,
)
from ascend_grad._memory cimport ALIGNMENT, Arena, align_up, arena_alloc, ceil_div
from ascend_grad._overlap cimport overlaps_partly
from ascend_grad._rowwise_plan cimport (
    COLUMNS,
    MASK,
    OUT,
    ROWS,
    A,
    B,
    Layout,
    Operand,
    Plan,
    Problem,
    choose_layout,
    choose_tile_dtype,
    columns_at,
    describe,
    has_b,
    has_mask,
    is_forward,
    make_plan,
    offset_of,
    row_pitch,
    tile_at,
)

from ._dtypes import FLOATING_DTYPES
from .arrays import without_memory

cnp.import_array()

_OPERATORS = {ag_row_ops[op].name.decode(): op for op in range(AG_ROW_OP_COUNT)}

#: The logit of masked positions.
MASKED_LOGIT = float(AG_MASKED_LOGIT)

cdef tuple _dtypes = FLOATING_DTYPES  # in the order of ag_dtype

# What an element costs about on one thread, in nanoseconds.
cdef double FORWARD_COST = 0.45
cdef double BACKWARD_COST = 0.2

cdef enum Phase:
    WHOLE_BLOCKS
    SPLIT_MAX
    COMBINE_MAX
    SPLIT_SUM
    COMBINE_SUM
    SPLIT_WRITE

cdef enum:
    SMALL_PROBLEM = 1 << 15           # elements up to which one thread needs no schedule
    COMBINED_SUMS = 1 << 15           # sums of segments that are worth a thread

cdef Py_ssize_t SCRATCH_BYTES = align_up(AG_SCRATCH_BYTES, ALIGNMENT)

# ---- kernels in place ------------------------------------------------------------------------------------------------

cdef void compute_rows(const Problem *p, const ag_row_kernels *kernels, Py_ssize_t begin, Py_ssize_t end,
                       bint nontemporal) noexcept nogil:
    """Whole rows in place, as many at a time as have constant strides."""
    cdef Py_ssize_t row = begin, last = p.shape[p.axes - 1]
    cdef ag_tile tile
    tile.nontemporal = nontemporal
    while row < end:
        tile_at(p, row, &tile)
        tile.rows = min(end - row, last - row % last)
        kernels.rows(&tile)
        row += tile.rows


cdef void compute_strips(const Problem *p, const ag_row_kernels *kernels) noexcept nogil:
    """All columns in place, where their kernels need no memory."""
    cdef Py_ssize_t inner = p.shape[p.axes - 1], block
    cdef ag_tile tile
    tile.nontemporal = False
    tile.fits_l2 = True
    for block in range(p.rows // inner):
        columns_at(p, block * inner, inner, &tile)
        kernels.columns(&tile, NULL)


# ---- the schedule ----------------------------------------------------------------------------------------------------

cdef class Schedule:
    """The tasks of one problem, and the memory that they need."""

    cdef Problem p
    cdef Plan plan
    cdef ag_variant variant
    cdef Phase phase
    cdef double last_check        # when signals were last checked
    cdef bint default_threads     # nobody asked for their number: one will do while other processes keep cores busy
    cdef cnp.ndarray memory       # of all that follows
    cdef char *scratch            # (threads, SCRATCH_BYTES), for column kernels
    cdef char *tiles              # (tasks or threads, tiles_size)
    cdef double *maxima           # (splits, rows)
    cdef double *sums             # (segments, rows)
    cdef double *max              # (rows,)
    cdef double *sum              # (rows,)

    cdef void prepare(self, const Problem *p, int threads) noexcept:
        cdef ag_dtype dtype = choose_tile_dtype(p)
        self.p = p[0]
        self.variant = _cpu.active()
        self.plan = make_plan(p, dtype, ag_rowwise_kernels(self.variant, dtype, p.op), threads)

    cdef Py_ssize_t place_workspace(self, char *base) noexcept:
        """Place the workspace in memory that begins at `base`; the bytes used. With NULL they are measured alone."""
        cdef const Plan *plan = &self.plan
        cdef Py_ssize_t row_bytes = self.p.rows * sizeof(double)
        cdef Py_ssize_t owners = plan.blocks * plan.splits if plan.caches_inputs else plan.threads
        cdef Arena arena
        arena.base, arena.used = base, 0
        self.scratch = arena_alloc(&arena, plan.threads * SCRATCH_BYTES if plan.by_columns else 0)
        self.tiles = arena_alloc(&arena, owners * plan.tiles_size)
        if plan.is_split:
            self.sums = <double *>arena_alloc(&arena, plan.segments * row_bytes)
            self.sum = <double *>arena_alloc(&arena, row_bytes)
            if is_forward(self.p.op):
                self.maxima = <double *>arena_alloc(&arena, plan.splits * row_bytes)
                self.max = <double *>arena_alloc(&arena, row_bytes)
        return arena.used

    cdef Py_ssize_t bytes(self) noexcept:
        """What the workspace takes."""
        cdef Py_ssize_t used = self.place_workspace(NULL)
        return used + ALIGNMENT if used else 0

    cdef int allocate(self) except -1:
        cdef Py_ssize_t nbytes = self.bytes()
        cdef char *base
        if nbytes:
            self.memory = _memory.workspace(nbytes)
            base = _memory.aligned(cnp.PyArray_BYTES(self.memory))
            _memory.check_layout(self.place_workspace(base) + ALIGNMENT, self.memory)
        return 0

    cdef char *scratch_of(self, int thread) noexcept nogil:
        return self.scratch + thread * SCRATCH_BYTES

    cdef char *tiles_of(self, Py_ssize_t task, int thread) noexcept nogil:
        return self.tiles + (task if self.plan.caches_inputs else thread) * self.plan.tiles_size

    # -- tasks: what one thread computes at a time; `thread` chooses its buffer --

    cdef void whole(self, Py_ssize_t block, int thread) noexcept nogil:
        """A block of whole rows, or a block of whole columns."""
        cdef Py_ssize_t begin = block * self.plan.block_size
        cdef Py_ssize_t end = min(begin + self.plan.block_size, self.p.rows)
        cdef char *tiles = self.tiles_of(block, thread)
        cdef ag_tile tile
        if self.plan.by_columns:
            self.column_tile(block, 0, self.p.n, tiles, &tile)
            self.plan.kernels.columns(&tile, self.scratch_of(thread))
            self.scatter_columns(block, 0, self.p.n, tiles, &tile)
        elif self.plan.gathers:
            self.gather(begin, end, 0, self.p.n, tiles, &tile)
            self.plan.kernels.rows(&tile)
            self.scatter(begin, end, 0, self.p.n, tiles, &tile)
        else:
            compute_rows(&self.p, self.plan.kernels, begin, end, self.plan.nontemporal)

    cdef void split_max(self, Py_ssize_t task, int thread) noexcept nogil:
        cdef Py_ssize_t block = task // self.plan.splits, split = task % self.plan.splits
        cdef Py_ssize_t k = split * self.plan.split_size, length = min(self.plan.split_size, self.p.n - k)
        cdef Py_ssize_t begin = block * self.plan.block_size, end = min(begin + self.plan.block_size, self.p.rows), row
        cdef ag_tile tile
        if self.plan.by_columns:
            row = self.column_tile(block, k, length, self.tiles_of(task, thread), &tile)
            self.plan.kernels.columns_max(&tile, &self.maxima[split * self.p.rows + row], self.scratch_of(thread))
            return
        self.row_tile(begin, end, k, length, self.tiles_of(task, thread), &tile)
        for row in range(begin, end):
            self.maxima[split * self.p.rows + row] = self.plan.kernels.split_max(&tile)
            tile.a += tile.a_stride
            tile.mask += tile.mask_stride

    cdef void split_sum(self, Py_ssize_t task, int thread) noexcept nogil:
        cdef Py_ssize_t block = task // self.plan.splits, split = task % self.plan.splits
        cdef Py_ssize_t segment = split * (self.plan.split_size // self.plan.kernels.segment)
        cdef Py_ssize_t last = min(self.plan.segments, segment + self.plan.split_size // self.plan.kernels.segment)
        cdef Py_ssize_t begin = block * self.plan.block_size, end = min(begin + self.plan.block_size, self.p.rows)
        cdef Py_ssize_t row, k, length
        cdef double max = 0.0
        cdef const double *columns_max = NULL
        cdef ag_tile tile
        while segment < last:
            k = segment * self.plan.kernels.segment
            length = min(self.plan.kernels.segment, self.p.n - k)
            if self.plan.by_columns:
                row = self.column_tile(block, k, length, self.tiles_of(task, thread), &tile)
                if is_forward(self.p.op):
                    columns_max = &self.max[row]
                self.plan.kernels.columns_sum(
                    &tile, columns_max, &self.sums[segment * self.p.rows + row], self.scratch_of(thread)
                )
            else:
                self.row_tile(begin, end, k, length, self.tiles_of(task, thread), &tile)
                for row in range(begin, end):
                    if is_forward(self.p.op):
                        max = self.max[row]
                    self.sums[segment * self.p.rows + row] = self.plan.kernels.split_sum(&tile, max)
                    tile.a += tile.a_stride
                    tile.b += tile.b_stride
                    tile.mask += tile.mask_stride
            segment += 1

    cdef void split_write(self, Py_ssize_t task, int thread) noexcept nogil:
        cdef Py_ssize_t block = task // self.plan.splits, split = task % self.plan.splits
        cdef Py_ssize_t k = split * self.plan.split_size, length = min(self.plan.split_size, self.p.n - k)
        cdef Py_ssize_t begin = block * self.plan.block_size, end = min(begin + self.plan.block_size, self.p.rows), row
        cdef double max = 0.0
        cdef const double *columns_max = NULL
        cdef char *tiles = self.tiles_of(task, thread)
        cdef ag_tile tile, part
        if self.plan.by_columns:
            row = self.column_tile(block, k, length, tiles, &tile)
            if is_forward(self.p.op):
                columns_max = &self.max[row]
            self.plan.kernels.columns_write(&tile, columns_max, &self.sum[row], self.scratch_of(thread))
            self.scatter_columns(block, k, length, tiles, &tile)
            return
        self.row_tile(begin, end, k, length, tiles, &tile)
        part = tile
        for row in range(begin, end):
            if is_forward(self.p.op):
                max = self.max[row]
            self.plan.kernels.split_write(&part, max, self.sum[row])
            part.a += part.a_stride
            part.b += part.b_stride
            part.mask += part.mask_stride
            part.out += part.out_stride
        if self.plan.gathers:
            self.scatter(begin, end, k, length, tiles, &tile)

    cdef void combine_sum(self, Py_ssize_t row) noexcept nogil:
        """The sum of a row from those of its segments, in order."""
        cdef ag_sum total
        cdef Py_ssize_t segment
        total.sum = total.compensation = 0.0
        for segment in range(self.plan.segments):
            ag_sum_add(&total, self.sums[segment * self.p.rows + row])
        self.sum[row] = ag_sum_total(total)

    cdef void combine_max(self, Py_ssize_t row) noexcept nogil:
        cdef double best = -INFINITY
        cdef Py_ssize_t split
        for split in range(self.plan.splits):
            if self.maxima[split * self.p.rows + row] > best:
                best = self.maxima[split * self.p.rows + row]
        self.max[row] = best

    # -- tiles: in place, or gathered into this thread's buffer in the compute type, where results take a's place --

    cdef void columns_of(self, Py_ssize_t block, Py_ssize_t *begin, Py_ssize_t *end) noexcept nogil:
        """The numbers, among all rows of the problem, of a block's columns. In place they have one outer index."""
        cdef Py_ssize_t inner = self.p.shape[self.p.axes - 1], index
        if self.plan.gathers:
            begin[0] = block * self.plan.block_size
            end[0] = min(begin[0] + self.plan.block_size, self.p.rows)
        else:
            index = block // self.plan.blocks_per_index
            begin[0] = index * inner + block % self.plan.blocks_per_index * self.plan.block_size
            end[0] = min(begin[0] + self.plan.block_size, (index + 1) * inner)

    cdef Py_ssize_t column_tile(
        self, Py_ssize_t block, Py_ssize_t k, Py_ssize_t length, char *tiles, ag_tile *tile
    ) noexcept nogil:
        """A block of columns, `length` rows from k on; returns the number of its first column."""
        cdef Py_ssize_t begin, end
        self.columns_of(block, &begin, &end)
        if self.plan.gathers:
            self.gather(begin, end, k, length, tiles, tile)
            tile.fits_l2 = True
            return begin
        columns_at(&self.p, begin, end - begin, tile)
        tile.a += k * tile.a_stride
        tile.b += k * tile.b_stride
        tile.out += k * tile.out_stride
        tile.n = length
        tile.nontemporal = self.plan.nontemporal
        tile.fits_l2 = (
            not self.plan.is_split and 2 * length * tile.rows * self.p.operands[A].itemsize <= _cpu.cache_size(2)
        )
        return begin

    cdef void scatter_columns(
        self, Py_ssize_t block, Py_ssize_t k, Py_ssize_t length, char *tiles, const ag_tile *tile
    ) noexcept nogil:
        cdef Py_ssize_t begin, end
        if self.plan.gathers:
            self.columns_of(block, &begin, &end)
            self.scatter(begin, end, k, length, tiles, tile)

    cdef void row_tile(
        self, Py_ssize_t begin, Py_ssize_t end, Py_ssize_t k, Py_ssize_t length, char *tiles, ag_tile *tile
    ) noexcept nogil:
        """Elements k .. k+length of rows begin .. end (of one row, where they are used in place)."""
        if self.plan.gathers:
            self.gather(begin, end, k, length, tiles, tile)
            return
        tile_at(&self.p, begin, tile)
        tile.rows = 1
        tile.n = length
        tile.nontemporal = self.plan.nontemporal
        tile.a += k * self.p.operands[A].dim_stride
        tile.b += k * self.p.operands[B].dim_stride
        tile.mask += k * self.p.operands[MASK].dim_stride
        tile.out += k * self.p.operands[OUT].dim_stride

    cdef Py_ssize_t regular_rows(self, Py_ssize_t row, Py_ssize_t end, ag_dim *outer, ag_dim *inner) noexcept nogil:
        """How many rows from `row` on, before `end`, have constant strides in two dimensions, whose lengths are set."""
        cdef int axis = self.p.axes - 1
        cdef Py_ssize_t last = self.p.shape[axis], at = row % last
        outer.length = 1
        inner.length = min(end - row, last - at)
        if at == 0 and axis > 0 and end - row >= 2 * last:
            outer.length = min((end - row) // last, self.p.shape[axis - 1] - row // last % self.p.shape[axis - 1])
        return outer.length * inner.length

    cdef void gather(
        self, Py_ssize_t begin, Py_ssize_t end, Py_ssize_t k, Py_ssize_t length, char *tiles, ag_tile *tile
    ) noexcept nogil:
        """Elements k .. k+length of rows begin .. end: dense copies, or in place."""
        cdef Py_ssize_t rows = end - begin, pitch = row_pitch(&self.plan, rows, length)
        tile.a = self.gather_operand(A, begin, end, k, length, pitch, tiles, tiles, &tile.a_stride)
        tile.b = tile.a
        tile.b_stride = 0
        if has_b(self.p.op):
            tile.b = self.gather_operand(
                B, begin, end, k, length, pitch, tiles + self.plan.second_tile, tiles, &tile.b_stride
            )
        tile.mask = <const uint8_t *>tile.a
        tile.mask_stride = 0
        if has_mask(self.p.op):
            tile.mask = <const uint8_t *>self.gather_operand(
                MASK, begin, end, k, length, pitch, tiles + self.plan.mask_tile, tiles, &tile.mask_stride
            )
        if self.plan.direct[OUT]:
            tile.out = self.address_of(OUT, begin, k, &tile.out_stride)
        else:
            tile.out = tiles
            tile.out_stride = pitch * self.plan.tile_itemsize
        tile.rows = rows
        tile.n = length
        tile.scale = self.p.scale
        tile.nontemporal = False

    cdef char *address_of(self, int which, Py_ssize_t row, Py_ssize_t k, Py_ssize_t *stride) noexcept nogil:
        """Where element k of a row of a direct operand lies."""
        cdef const Operand *operand = &self.p.operands[which]
        stride[0] = operand.dim_stride if self.plan.by_columns else operand.strides[0]
        return operand.data + row * operand.strides[0] + k * operand.dim_stride

    cdef char *gather_operand(
        self, int which, Py_ssize_t begin, Py_ssize_t end, Py_ssize_t k, Py_ssize_t length, Py_ssize_t pitch,
        char *to, char *tiles, Py_ssize_t *stride
    ) noexcept nogil:
        """A dense copy in the tile's dtype (masks stay bytes), or the operand itself."""
        cdef const Operand *operand = &self.p.operands[which]
        cdef bint widen = which != MASK and operand.dtype != self.plan.tile_dtype
        if self.plan.direct[which]:
            return self.address_of(which, begin, k, stride)
        stride[0] = pitch if which == MASK else pitch * self.plan.tile_itemsize
        if self.plan.caches_inputs and self.phase != (SPLIT_MAX if is_forward(self.p.op) else SPLIT_SUM):
            return to  # there since the first phase
        self.copy(operand, begin, end, k, length, pitch, tiles + self.plan.converted_tile if widen else to, False)
        if widen:
            ag_widen(
                self.variant, operand.dtype, tiles + self.plan.converted_tile, <float *>to,
                pitch * (length if self.plan.by_columns else end - begin)
            )
        return to

    cdef void scatter(
        self, Py_ssize_t begin, Py_ssize_t end, Py_ssize_t k, Py_ssize_t length, char *tiles, const ag_tile *tile
    ) noexcept nogil:
        """Put the results of gathered rows where they belong, rounded once."""
        cdef const Operand *out = &self.p.operands[OUT]
        cdef Py_ssize_t rows = end - begin, pitch = row_pitch(&self.plan, rows, length)
        cdef char *dense = tile.out
        if self.plan.direct[OUT]:
            return
        if out.dtype != self.plan.tile_dtype:
            dense = tiles + self.plan.converted_tile
            ag_convert(
                self.variant, self.plan.tile_dtype == AG_FLOAT64, tile.out, out.dtype, dense,
                pitch * (length if self.plan.by_columns else rows)
            )
        self.copy(out, begin, end, k, length, pitch, dense, True)

    cdef void copy(
        self, const Operand *operand, Py_ssize_t begin, Py_ssize_t end, Py_ssize_t k, Py_ssize_t length,
        Py_ssize_t pitch, char *dense, bint to_operand
    ) noexcept nogil:
        """Elements k .. k+length of rows begin .. end to, or from, a dense tile of the operand's dtype."""
        cdef int axis = self.p.axes - 1, itemsize = operand.itemsize
        cdef Py_ssize_t row_step = itemsize if self.plan.by_columns else pitch * itemsize
        cdef Py_ssize_t step = pitch * itemsize if self.plan.by_columns else itemsize
        cdef Py_ssize_t outer_stride = operand.strides[axis - 1] if axis else 0
        cdef Py_ssize_t row = begin, count
        cdef ag_dim outer, inner, elements
        cdef char *source
        cdef char *to
        elements.length = length
        while row < end:
            count = self.regular_rows(row, end, &outer, &inner)
            source = operand.data + k * operand.dim_stride + offset_of(&self.p, operand, row)
            to = dense + (row - begin) * row_step
            outer.from_, inner.from_, elements.from_ = outer_stride, operand.strides[axis], operand.dim_stride
            outer.to, inner.to, elements.to = self.p.shape[axis] * row_step, row_step, step
            if to_operand:
                source, to = to, source
                outer.from_, outer.to = outer.to, outer.from_
                inner.from_, inner.to = inner.to, inner.from_
                elements.from_, elements.to = elements.to, elements.from_
            ag_copy_3d(self.variant, to, source, outer, inner, elements, itemsize, operand.swapped)
            row += count

    # -- phases --

    cdef void task(self, Py_ssize_t index, int thread) noexcept nogil:
        if self.phase == WHOLE_BLOCKS:
            self.whole(index, thread)
        elif self.phase == SPLIT_MAX:
            self.split_max(index, thread)
        elif self.phase == COMBINE_MAX:
            self.combine_max(index)
        elif self.phase == SPLIT_SUM:
            self.split_sum(index, thread)
        elif self.phase == COMBINE_SUM:
            self.combine_sum(index)
        else:
            self.split_write(index, thread)

    cdef int run(self, Phase phase, Py_ssize_t tasks) except -1:
        """All tasks of a phase."""
        cdef int threads = self.plan.threads
        cdef _tasks.Times times
        self.phase = phase
        if self.default_threads and _threads.is_oversubscribed():
            threads = 1
        if phase == COMBINE_MAX or phase == COMBINE_SUM:
            # A team would cost more than a few additions.
            threads = <int>min(<Py_ssize_t>threads, ceil_div(tasks * self.plan.segments, COMBINED_SUMS))
        _tasks.run_timed(run_task, <void *>self, tasks, threads, self.plan.nontemporal, &self.last_check, &times)
        if threads > 1 and self.default_threads:
            _threads.record_team_times(times.elapsed, times.busy)
        return 0

    cdef int run_all(self) except -1:
        cdef Py_ssize_t tasks = self.plan.blocks * self.plan.splits
        if not self.plan.is_split:
            return self.run(WHOLE_BLOCKS, self.plan.blocks)
        if is_forward(self.p.op):
            self.run(SPLIT_MAX, tasks)
            self.run(COMBINE_MAX, self.p.rows)
        self.run(SPLIT_SUM, tasks)
        self.run(COMBINE_SUM, self.p.rows)
        return self.run(SPLIT_WRITE, tasks)


cdef void run_task(void *schedule, Py_ssize_t index, int thread) noexcept nogil:
    (<Schedule>schedule).task(index, thread)


# ---- entry points ----------------------------------------------------------------------------------------------------

cdef int compute_problem(Problem *p, int asked) except -1:
    cdef double cost = <double>p.rows * p.n * (FORWARD_COST if is_forward(p.op) else BACKWARD_COST)
    cdef int threads = _threads.choose_num_threads(cost, asked)
    cdef Schedule schedule
    cdef ag_fpenv mode
    if asked == 0 and threads > 1 and _threads.is_oversubscribed():
        threads = 1
    cdef const ag_row_kernels *kernels = ag_rowwise_kernels(_cpu.active(), p.dtype, p.op)
    cdef Layout layout = choose_layout(p, kernels)
    if threads == 1 and p.rows * p.n <= SMALL_PROBLEM and (
        layout == ROWS or (layout == COLUMNS and p.n <= kernels.strip_rows and p.shape[p.axes - 1] >= AG_STRIP_COLUMNS)
    ):
        # The schedule would cost as much as the work, and so would releasing the interpreter's lock.
        mode = ag_fpenv_enter()
        if layout == ROWS:
            compute_rows(p, kernels, 0, p.rows, False)
        else:
            compute_strips(p, kernels)
        ag_fpenv_leave(mode)
        _openmp.record_team()
        return 0
    schedule = Schedule.__new__(Schedule)
    schedule.default_threads = asked == 0
    schedule.prepare(p, threads)
    schedule.allocate()
    schedule.run_all()
    _threads.mark_team_used()
    return 0


cdef bint describe_call(Problem *p, Call call, cnp.ndarray out) except -1:
    """`describe` a validated call whose result goes to `out`."""
    cdef cnp.ndarray a = call.values[0], b = a, mask = a
    cdef double scale = 1.0
    cdef ag_row_op op
    if call.operator.row_op < 0:
        call.operator.row_op = _OPERATORS[call.operator.name]
    op = <ag_row_op>call.operator.row_op
    cdef int dim = cnp.PyArray_NDIM(a) - 1 if has_mask(op) else call.axis
    if has_b(op):
        b = call.values[1]
    if has_mask(op):
        mask = call.values[1 + has_b(op)]
        scale = call.values[2 + has_b(op)]
    return describe(p, op, a, b, mask, out, dim, scale)


cdef object compute(Call call, int threads):
    """The result of a validated call."""
    cdef Result result = call.operator.result_specs[0]
    cdef cnp.ndarray given = call.first_out, out = given
    cdef Problem p
    cdef int i
    if given is None:
        out = result.allocate(call)
    else:
        for i in range(call.operator.array_count):
            if overlaps_partly(given, <cnp.ndarray>call.values[i]):
                out = new_like(given)
                break
    if describe_call(&p, call, out):
        compute_problem(&p, threads)
    if given is not None and out is not given:
        _memory.copy_into(given, out)
        return given
    return out


cdef cnp.ndarray new_like(cnp.ndarray given):
    """Where a result is computed that overlaps an input, before it is copied to its place."""
    return _memory.empty_like(given, <cnp.dtype>_dtypes[dtype_of(given)])


cdef Py_ssize_t workspace_bound(Call call, int threads) except -1:
    """Bytes that `compute` allocates at most beyond the result, by shapes, dtypes and layouts alone."""
    cdef Problem p
    cdef Py_ssize_t most = 0, aside = 0
    cdef cnp.ndarray out = call.first_out
    cdef Schedule schedule = Schedule.__new__(Schedule)
    if out is None:
        out = without_memory(call.specs[0].shape, call.specs[0].dtype)
    elif any([overlaps_partly(out, each) for each in call.arrays]):
        aside = cnp.PyArray_NBYTES(out)
        out = without_memory((<object>out).shape, _dtypes[dtype_of(out)])
    if not describe_call(&p, call, out):
        return aside
    for count in [threads] if threads else [1, _threads.default_threads()]:
        schedule.prepare(&p, count)
        most = max(most, schedule.bytes())
    return aside + most


def stream_add(float[::1] a, float[::1] b, float[::1] out, bint nontemporal, int num_threads):
    """out = a + b: the memory traffic of a backward operator without its arithmetic, for benchmarks."""
    cdef Py_ssize_t block = 1 << 14, blocks = ceil_div(a.shape[0], 1 << 14), index
    cdef ag_variant variant = _cpu.active()
    for index in prange(blocks, nogil=True, num_threads=num_threads, schedule="dynamic"):
        ag_stream_add(
            variant, &a[index * block], &b[index * block], &out[index * block],
            min(block, a.shape[0] - index * block), nontemporal
        )
