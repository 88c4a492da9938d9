"""Row-wise operators on the CPU: from arrays to kernels.

1. `describe` reduces the arrays of a call to a `Problem`: one reduced dimension, the others merged as far as every
   operand's strides allow, largest stride first.
2. `Schedule.prepare` chooses how to walk it:
     ROWS     every operand has unit stride along the reduced dimension: kernels read and write in place
     COLUMNS  ... along another dimension: kernels take blocks of columns in place
     ROW_TILES, COLUMN_TILES
              anything else (strides, byte order, a result of another dtype): blocks of rows or columns, as they lie
              closer together, are gathered into a small buffer per thread, computed there, and scattered
   and whether whole rows are the units of work or, where there are too few of them for the threads, pieces of rows: then
   maxima and sums of pieces are taken first, combined in order, and the results written in another round.
3. The units run on a team of threads (`_tasks`). What a unit computes depends on the problem alone (rowwise.h fixes the order
   of every sum), so results are the same bits for any layout, schedule and number of threads.
"""

from cython.parallel cimport prange

cimport numpy as cnp
from libc.math cimport INFINITY
from libc.stdint cimport uint8_t

from ascend_grad cimport _cpu, _memory, _openmp, _tasks, _threads
from ascend_grad._call cimport Call, Result
from ascend_grad._dtypes cimport dtype_of
from ascend_grad._kernels cimport (
    AG_FLOAT32,
    AG_FLOAT64,
    AG_LOG_SOFTMAX,
    AG_LOG_SOFTMAX_BACKWARD,
    AG_MAX_COLUMNS,
    AG_PACKED_COLUMNS,
    AG_SCALED_MASKED_SOFTMAX,
    AG_SCALED_MASKED_SOFTMAX_BACKWARD,
    AG_SCRATCH_BYTES,
    AG_SOFTMAX,
    AG_SOFTMAX_BACKWARD,
    AG_STRIP_COLUMNS,
    ag_copy_3d,
    ag_dim,
    ag_dtype,
    ag_fpenv,
    ag_fpenv_enter,
    ag_fpenv_leave,
    ag_itemsize,
    ag_round,
    ag_rounded_to_float32,
    ag_row_kernels,
    ag_row_op,
    ag_rowwise_kernels,
    ag_stream,
    ag_sum,
    ag_sum_add,
    ag_sum_total,
    ag_tile,
    ag_variant,
    ag_widen,
)
from ascend_grad._memory cimport ALIGNMENT, Arena, align_up, arena_alloc, ceil_div, magnitude
from ascend_grad._overlap cimport overlaps_partly

from .arrays import FLOATING_DTYPES, without_memory

cnp.import_array()

_OPERATORS = {
    "softmax_backward": AG_SOFTMAX_BACKWARD,
    "log_softmax_backward": AG_LOG_SOFTMAX_BACKWARD,
    "scaled_masked_softmax_backward": AG_SCALED_MASKED_SOFTMAX_BACKWARD,
    "softmax": AG_SOFTMAX,
    "log_softmax": AG_LOG_SOFTMAX,
    "scaled_masked_softmax": AG_SCALED_MASKED_SOFTMAX,
}

cdef tuple _dtypes = FLOATING_DTYPES  # in the order of ag_dtype

# ---- the problem -----------------------------------------------------------------------------------------------------

cdef enum:
    MAX_AXES = 8
    A = 0
    B = 1
    MASK = 2
    OUT = 3
    OPERANDS = 4

ctypedef struct Operand:
    char *data
    Py_ssize_t dim_stride             # bytes along the reduced dimension
    Py_ssize_t[MAX_AXES] strides      # bytes along the axes of the rows
    ag_dtype dtype
    int itemsize
    bint swapped

ctypedef struct Problem:
    ag_row_op op
    ag_dtype dtype                    # of the inputs
    Py_ssize_t n                      # length of a row
    Py_ssize_t rows
    int axes                          # of the rows, at least one; slowest first
    Py_ssize_t[MAX_AXES] shape
    Operand[OPERANDS] operands
    double scale


cdef inline bint has_b(ag_row_op op) noexcept nogil:
    return op <= AG_SCALED_MASKED_SOFTMAX_BACKWARD


cdef inline bint has_mask(ag_row_op op) noexcept nogil:
    return op == AG_SCALED_MASKED_SOFTMAX_BACKWARD or op == AG_SCALED_MASKED_SOFTMAX


cdef inline bint is_forward(ag_row_op op) noexcept nogil:
    return op >= AG_SOFTMAX


cdef void describe_operand(Operand *operand, cnp.ndarray array, int dim, const cnp.npy_intp *shape) noexcept:
    """Fill in an operand; axes of length 1 count as broadcast, so that masks and ranks need no other care."""
    cdef int axis, rank = cnp.PyArray_NDIM(array), k = 0
    cdef cnp.npy_intp *strides = cnp.PyArray_STRIDES(array)
    cdef cnp.npy_intp *own = cnp.PyArray_DIMS(array)
    operand.data = cnp.PyArray_BYTES(array)
    operand.itemsize = <int>cnp.PyArray_ITEMSIZE(array)
    operand.dtype = <ag_dtype>dtype_of(array)
    operand.swapped = cnp.PyArray_ISBYTESWAPPED(array)
    operand.dim_stride = operand.itemsize
    for axis in range(rank):
        if axis == dim:
            if shape[axis] > 1:
                operand.dim_stride = strides[axis]
        elif shape[axis] > 1:
            operand.strides[k] = strides[axis] if own[axis] > 1 else 0
            k += 1


cdef bint describe(
    Problem *p, ag_row_op op, cnp.ndarray a, cnp.ndarray b, cnp.ndarray mask, cnp.ndarray out, int dim, double scale
) noexcept:
    """Fill in a problem; False where there is nothing to compute. Unused arrays are given as `a`."""
    cdef int rank = cnp.PyArray_NDIM(a), axis, k, i, axes = 0, used
    cdef cnp.npy_intp *shape = cnp.PyArray_DIMS(a)
    cdef Py_ssize_t[MAX_AXES] reach
    cdef Py_ssize_t length
    cdef Operand *operand
    if cnp.PyArray_SIZE(a) == 0:
        return False
    p.op = op
    p.dtype = <ag_dtype>dtype_of(a)
    p.scale = scale if p.dtype == AG_FLOAT64 else ag_rounded_to_float32(scale)
    p.n = shape[dim] if rank else 1
    p.rows = cnp.PyArray_SIZE(a) // p.n
    describe_operand(&p.operands[A], a, dim, shape)
    p.operands[B] = p.operands[MASK] = p.operands[A]
    if has_b(op):
        describe_operand(&p.operands[B], b, dim, shape)
    if has_mask(op):
        describe_operand(&p.operands[MASK], mask, dim, shape)
    describe_operand(&p.operands[OUT], out, dim, shape)
    for axis in range(rank):
        if axis != dim and shape[axis] > 1:
            p.shape[axes] = shape[axis]
            axes += 1
    # Sort by stride, largest first, so that neighbours in memory become neighbours here.
    for axis in range(axes):
        reach[axis] = 0
        for i in range(OPERANDS):
            if i != MASK:
                reach[axis] = max(reach[axis], magnitude(p.operands[i].strides[axis]))
    for axis in range(1, axes):
        k = axis
        while k > 0 and reach[k - 1] < reach[k]:
            reach[k - 1], reach[k] = reach[k], reach[k - 1]
            p.shape[k - 1], p.shape[k] = p.shape[k], p.shape[k - 1]
            for i in range(OPERANDS):
                operand = &p.operands[i]
                operand.strides[k - 1], operand.strides[k] = operand.strides[k], operand.strides[k - 1]
            k -= 1
    # Merge an axis into the one before it where every operand steps through both as through one.
    used = 0
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
    return True


cdef inline void tile_at(const Problem *p, Py_ssize_t row, ag_tile *tile) noexcept nogil:
    """A tile that starts at a row; its strides lead along the last axis."""
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


cdef inline Py_ssize_t offset_of(const Problem *p, const Operand *operand, Py_ssize_t row) noexcept nogil:
    """Bytes from an operand's first row to this one."""
    cdef Py_ssize_t offset = 0
    cdef int axis = p.axes - 1
    while axis > 0:
        offset += row % p.shape[axis] * operand.strides[axis]
        row //= p.shape[axis]
        axis -= 1
    return offset + row * operand.strides[0]


# ---- the schedule ----------------------------------------------------------------------------------------------------

cdef enum Layout:
    ROWS
    COLUMNS
    ROW_TILES
    COLUMN_TILES

# What an element costs about on one thread, in nanoseconds.
cdef double FORWARD_COST = 0.45
cdef double BACKWARD_COST = 0.2

cdef enum Round:
    WHOLE
    PIECE_MAX
    COMBINE_MAX
    PIECE_SUM
    COMBINE_SUM
    PIECE_WRITE

cdef enum:
    TILE_BYTES = 128 << 10            # of one operand in the compute type
    LONG_TILE_BYTES = 4 << 20         # the same, where a cache line holds elements of several rows
    KEPT_BYTES = 16 << 20             # of all tiles, up to which inputs are gathered once for all rounds
    TILE_ROWS = 16                    # rows that a gathered piece has where rows are long
    MAX_TILE_ROWS = 1 << 14
    FEW_ROWS = 8                      # rows up to which lanes of the column kernels would be empty
    SHORT_ROW = 8                     # elements of a row from which on it is computed where it lies, gaps beside it or not
    SMALL_BLOCK = 256                 # elements of an outer index up to which several are gathered for the column kernels
    UNIT_ELEMENTS = 1 << 15           # of a unit of work, about
    LARGE_UNIT = 1 << 19              # elements that take a considerable part of a millisecond
    LONG_ROW = 1 << 22                # elements from which a row (or block of columns) is too long to be one unit

cdef Py_ssize_t SCRATCH_BYTES = align_up(AG_SCRATCH_BYTES, ALIGNMENT)


cdef bint all_native(const Problem *p) noexcept nogil:
    """Whether kernels can read and write the operands' elements as they are."""
    return not (
        p.operands[A].swapped
        or (has_b(p.op) and p.operands[B].swapped)
        or p.operands[OUT].swapped
        or p.operands[OUT].dtype != p.dtype
    )


cdef inline bint is_used(const Problem *p, int operand) noexcept nogil:
    return (operand != B or has_b(p.op)) and (operand != MASK or has_mask(p.op))


cdef bint is_direct(const Problem *p, int which, ag_dtype dtype, bint by_columns) noexcept nogil:
    """Whether kernels for this dtype can read or write an operand in place, any rows of it together."""
    cdef const Operand *operand = &p.operands[which]
    if p.axes > 1 or operand.swapped or (which != MASK and operand.dtype != dtype) or (which == MASK and by_columns):
        return False
    return (operand.strides[0] if by_columns else operand.dim_stride) == operand.itemsize


cdef bint are_dense_rows(const Problem *p) noexcept nogil:
    """Whether rows follow one another without gaps, in every operand."""
    cdef int i
    for i in range(OPERANDS):
        if is_used(p, i) and (p.axes > 1 or p.operands[i].strides[0] != p.n * p.operands[i].itemsize):
            return False
    return True


cdef Layout choose_layout(const Problem *p) noexcept nogil:
    cdef int i, last = p.axes - 1, across = 0
    cdef Py_ssize_t itemsize = p.operands[A].itemsize, inner = p.shape[last]
    cdef bint native = all_native(p), rows = native, columns = native and not has_mask(p.op), packed = True
    for i in range(OPERANDS):
        if not is_used(p, i):
            continue
        if p.operands[i].dim_stride != p.operands[i].itemsize:
            rows = False
        if p.operands[i].strides[last] != itemsize:
            columns = False
        if p.operands[i].dim_stride != inner * itemsize:
            packed = False
        across += 1 if magnitude(p.operands[i].strides[last]) < magnitude(p.operands[i].dim_stride) else -1
    if rows and (p.n >= SHORT_ROW or p.rows == 1 or has_mask(p.op)):
        return ROWS
    if rows and are_dense_rows(p) and (p.n > 1 or p.rows < SMALL_BLOCK):  # many rows of one element are as good as columns
        return ROWS
    if columns and (inner >= 32 or packed) and (p.n * inner >= SMALL_BLOCK or p.rows == inner):
        return COLUMNS
    if has_mask(p.op) or p.rows < FEW_ROWS:
        return ROW_TILES
    # What inputs can be read in place decides, then how most operands lie.
    if rows:
        return COLUMN_TILES
    for i in range(2):
        if is_direct(p, A, p.dtype, i == 0) and (not has_b(p.op) or is_direct(p, B, p.dtype, i == 0)) and (
            p.operands[OUT].dtype == p.dtype or p.operands[A].itemsize >= 4
        ):
            return COLUMN_TILES if i == 0 else ROW_TILES
    return COLUMN_TILES if across > 0 else ROW_TILES


cdef bint worth_streaming(const Problem *p, Layout layout) noexcept nogil:
    """Whether results should bypass the cache: the arrays fill most of it, and results go elsewhere than an input was read."""
    cdef const Operand *out = &p.operands[OUT]
    cdef Py_ssize_t nbytes = p.rows * p.n * out.itemsize * (3 if has_b(p.op) else 2)
    if nbytes < _cpu.cache_size(3) // 8 * 5 or out.data == p.operands[A].data or out.data == p.operands[B].data:
        return False
    if layout == COLUMNS:
        # A block of columns has to start on a cache line in every row, or in none: parts of lines are slow to stream.
        return p.shape[p.axes - 1] <= AG_PACKED_COLUMNS or out.dim_stride % 64 == 0
    return layout == ROWS


cdef void compute_rows(const Problem *p, const ag_row_kernels *kernels, Py_ssize_t begin, Py_ssize_t end, bint stream) noexcept nogil:
    """Whole rows in place, in runs along the last axis."""
    cdef Py_ssize_t row = begin, last = p.shape[p.axes - 1]
    cdef ag_tile tile
    tile.stream = stream
    while row < end:
        tile_at(p, row, &tile)
        tile.rows = min(end - row, last - row % last)
        kernels.rows(&tile)
        row += tile.rows


cdef inline void columns_at(const Problem *p, Py_ssize_t row, Py_ssize_t columns, ag_tile *tile) noexcept nogil:
    """A tile of columns in place; `row` is the number of the first one."""
    tile_at(p, row, tile)
    tile.a_stride = p.operands[A].dim_stride
    tile.b_stride = p.operands[B].dim_stride
    tile.out_stride = p.operands[OUT].dim_stride
    tile.rows = columns


cdef void compute_strips(const Problem *p, const ag_row_kernels *kernels) noexcept nogil:
    """All columns in place, where their kernels need no memory."""
    cdef Py_ssize_t inner = p.shape[p.axes - 1], block
    cdef ag_tile tile
    tile.stream = False
    tile.fits = True
    for block in range(p.rows // inner):
        columns_at(p, block * inner, inner, &tile)
        kernels.columns(&tile, NULL)


cdef class Schedule:
    """How one problem is walked. Units are numbered; `piece` means a part of a row (or of columns) along n."""

    cdef Problem p
    cdef const ag_row_kernels *kernels
    cdef ag_variant variant
    cdef Round round
    cdef double last_check        # when signals were looked at
    cdef Layout form
    cdef bint stream, in_pieces
    cdef int threads
    cdef bint chosen              # that number was: one thread will do while other processes keep cores busy
    cdef Py_ssize_t groups        # groups of rows, or blocks of columns
    cdef Py_ssize_t group_size    # rows of a group, columns of a block
    cdef Py_ssize_t blocks        # COLUMNS: blocks of columns per outer index
    cdef Py_ssize_t pieces        # along n
    cdef Py_ssize_t piece_size    # elements; a multiple of the segment
    cdef Py_ssize_t segments      # along n
    cdef bint by_columns          # COLUMNS or COLUMN_TILES
    cdef bint gathers             # ROW_TILES or COLUMN_TILES
    cdef bint transposes          # ... and adjacent elements of some operand belong to different rows
    cdef bint[OPERANDS] direct    # operands that kernels read or write in place all the same
    cdef ag_dtype tile_dtype      # of the gathered ones: the problem's, or the compute type where out has another
    cdef int tile_itemsize
    # Where the second input, the mask, and values on their way to or from the tile's dtype lie in a thread's tiles. The first
    # input lies at their beginning, and the results in its place.
    cdef Py_ssize_t second_tile, mask_tile, converted_tile
    cdef Py_ssize_t tiles_size    # of one thread, or of one unit
    cdef bint keeps               # every unit has tiles of its own, which keep its inputs from one round to the next
    cdef cnp.ndarray memory       # of all that follows
    cdef char *scratch            # (threads, SCRATCH_BYTES), for column kernels
    cdef char *tiles              # (units or threads, tiles_size)
    cdef double *maxima           # (pieces, rows)
    cdef double *sums             # (segments, rows)
    cdef double *max              # (rows,)
    cdef double *sum              # (rows,)

    cdef Py_ssize_t layout(self, char *base) noexcept:
        """Place the workspace in memory that begins at `base`; the bytes used. With NULL they are measured alone."""
        cdef Py_ssize_t row_bytes = self.p.rows * sizeof(double)
        cdef Arena arena
        arena.base, arena.used = base, 0
        self.scratch = arena_alloc(&arena, self.threads * SCRATCH_BYTES if self.by_columns else 0)
        self.tiles = arena_alloc(&arena, (self.groups * self.pieces if self.keeps else self.threads) * self.tiles_size)
        if self.in_pieces:
            self.sums = <double *>arena_alloc(&arena, self.segments * row_bytes)
            self.sum = <double *>arena_alloc(&arena, row_bytes)
            if is_forward(self.p.op):
                self.maxima = <double *>arena_alloc(&arena, self.pieces * row_bytes)
                self.max = <double *>arena_alloc(&arena, row_bytes)
        return arena.used

    cdef Py_ssize_t bytes(self) noexcept:
        """What the workspace takes."""
        cdef Py_ssize_t used = self.layout(NULL)
        return used + ALIGNMENT if used else 0

    cdef int allocate(self) except -1:
        cdef Py_ssize_t nbytes = self.bytes()
        cdef char *base
        if nbytes:
            self.memory = _memory.workspace(nbytes)
            base = _memory.aligned(cnp.PyArray_BYTES(self.memory))
            _memory.check_layout(self.layout(base) + ALIGNMENT, self.memory)
        return 0

    cdef void prepare(self, int threads) noexcept:
        cdef Problem *p = &self.p
        cdef bint is_double = p.dtype == AG_FLOAT64
        cdef Py_ssize_t inner = p.shape[p.axes - 1], budget, working, inputs, row_bytes
        cdef int operand
        self.variant = _cpu.active()
        self.threads = threads
        self.form = choose_layout(p)
        self.by_columns = self.form == COLUMNS or self.form == COLUMN_TILES
        self.gathers = self.form == ROW_TILES or self.form == COLUMN_TILES
        self.stream = worth_streaming(p, self.form)
        self.tile_dtype = p.dtype
        if p.operands[OUT].dtype != p.dtype:
            self.tile_dtype = AG_FLOAT64 if is_double else AG_FLOAT32
        self.tile_itemsize = ag_itemsize[<int>self.tile_dtype]
        for operand in range(OPERANDS):
            self.direct[operand] = self.gathers and is_direct(p, operand, self.tile_dtype, self.by_columns)
        self.kernels = ag_rowwise_kernels(self.variant, self.tile_dtype, p.op)
        self.segments = ceil_div(p.n, self.kernels.segment)
        self.transposes = self.gathers and self.is_transposed()
        self.pieces = 1
        self.in_pieces = False
        if self.form == ROWS:
            # Neighbouring rows in one hand, but enough units to balance threads that other work slows down.
            self.group_size = max(1, min(max(UNIT_ELEMENTS // p.n, p.rows // (32 * threads)), ceil_div(p.rows, 4 * threads)))
            self.groups = ceil_div(p.rows, self.group_size)
            self.in_pieces = p.n >= LONG_ROW or (threads > 1 and self.groups < 4 * threads and self.segments >= 8)
            if self.in_pieces:
                self.group_size = 1
                self.groups = p.rows
        elif self.form == COLUMNS:
            # Both inputs of a block stay in the second cache between sum and result, unless it would be too narrow.
            inputs = 2 if has_b(p.op) else 1
            working = p.n * p.operands[A].itemsize * inputs
            budget = _cpu.cache_size(2) // 2 // working // 64 * 64
            self.group_size = min(inner, <Py_ssize_t>AG_MAX_COLUMNS)
            if p.n <= self.kernels.strip_rows:
                # Strips need no scratch, and fit the first cache whatever the block.
                self.group_size = min(inner, max(<Py_ssize_t>AG_MAX_COLUMNS, UNIT_ELEMENTS // p.n // 64 * 64))
            if inner > AG_PACKED_COLUMNS:
                if budget >= 256 and p.n > self.kernels.strip_rows:
                    if not self.stream:  # results pass through the cache, too; but short pieces of rows are slow
                        budget = max(min(budget, <Py_ssize_t>512), budget * inputs // (inputs + 1) // 64 * 64)
                    self.group_size = min(self.group_size, budget)
                # Enough blocks for every thread, of whole cache lines.
                while self.group_size > 64 and p.rows // self.group_size < 2 * threads:
                    self.group_size = ceil_div(self.group_size // 2, 32) * 32
            self.blocks = ceil_div(inner, self.group_size)
            self.groups = p.rows // inner * self.blocks
            self.in_pieces = self.segments > 1 and (
                p.n * self.group_size >= LONG_ROW or (threads > 1 and self.groups < 2 * threads)
            )
        elif self.form == COLUMN_TILES:
            self.in_pieces = self.segments > 1
            # Results alone are gathered where the inputs are read in place, in long runs.
            budget = LONG_TILE_BYTES // 8 if self.direct[A] and (self.direct[B] or not has_b(p.op)) else TILE_BYTES
            self.group_size = min(
                <Py_ssize_t>AG_MAX_COLUMNS, budget // (min(p.n, self.kernels.segment) * self.tile_itemsize)
            )
            self.group_size = max(1, min(self.group_size, ceil_div(p.rows, 1 if threads == 1 else 4 * threads)))
            self.groups = ceil_div(p.rows, self.group_size)
        else:
            row_bytes = self.row_pitch(1, p.n) * self.tile_itemsize
            self.group_size = min(<Py_ssize_t>MAX_TILE_ROWS, TILE_BYTES // row_bytes)
            if self.transposes and self.group_size < TILE_ROWS and TILE_ROWS * row_bytes <= LONG_TILE_BYTES:
                self.group_size = TILE_ROWS
            self.in_pieces = self.group_size < TILE_ROWS and (self.group_size < 1 or self.transposes or (
                threads > 1 and p.rows < 4 * threads and self.segments >= 8))
            if self.in_pieces:
                self.group_size = max(1, TILE_BYTES // (self.row_pitch(1, self.kernels.segment) * self.tile_itemsize))
            self.group_size = max(1, min(self.group_size, ceil_div(p.rows, 1 if self.in_pieces else 4 * threads)))
            self.groups = ceil_div(p.rows, self.group_size)
        if self.in_pieces:
            # Gathered pieces are one segment long, the others longer, but enough for every thread.
            self.piece_size = self.kernels.segment
            if not self.gathers:
                self.piece_size *= max(1, min(32, self.segments * self.groups // (8 * threads)))
            self.pieces = ceil_div(p.n, self.piece_size)
        self.tiles_size = 0
        if self.gathers:
            self.place_tiles()
        self.keeps = self.gathers and self.in_pieces and self.groups * self.pieces * self.tiles_size <= KEPT_BYTES

    cdef void place_tiles(self) noexcept:
        """Where the tiles of a thread or unit lie, each only where there is use for it."""
        cdef Problem *p = &self.p
        cdef Py_ssize_t length = self.piece_size if self.in_pieces else p.n, count, size = 0
        cdef const Operand *out = &p.operands[OUT]
        if self.by_columns:
            count = self.row_pitch(self.group_size, length) * length
        else:
            count = self.row_pitch(self.group_size, length) * self.group_size
        if not (self.direct[A] and self.direct[OUT]):
            size = align_up(count * self.tile_itemsize, ALIGNMENT)
        self.second_tile = size
        if has_b(p.op) and not self.direct[B]:
            size += align_up(count * self.tile_itemsize, ALIGNMENT)
        self.mask_tile = size
        if has_mask(p.op) and not self.direct[MASK]:
            size += align_up(count, ALIGNMENT)
        self.converted_tile = size
        if self.tile_dtype != p.dtype or self.tile_dtype != out.dtype:
            size += align_up(count * max(p.operands[A].itemsize, out.itemsize), ALIGNMENT)
        self.tiles_size = size

    cdef char *scratch_of(self, int thread) noexcept nogil:
        return self.scratch + thread * SCRATCH_BYTES

    cdef char *tiles_of(self, Py_ssize_t unit, int thread) noexcept nogil:
        return self.tiles + (unit if self.keeps else thread) * self.tiles_size

    cdef bint is_transposed(self) noexcept nogil:
        """Whether some operand's adjacent elements in memory belong to different rows."""
        cdef int i
        cdef Operand *operand
        for i in range(OPERANDS):
            operand = &self.p.operands[i]
            if is_used(&self.p, i) and self.p.shape[self.p.axes - 1] > 1:
                if magnitude(operand.dim_stride) >= 64 and magnitude(operand.strides[self.p.axes - 1]) < magnitude(operand.dim_stride):
                    return True
        return False

    # -- units: what one thread computes at a time; `thread` chooses its buffer --

    cdef void whole(self, Py_ssize_t group, int thread) noexcept nogil:
        """A group of whole rows, or a block of whole columns."""
        cdef Py_ssize_t begin = group * self.group_size
        cdef Py_ssize_t end = min(begin + self.group_size, self.p.rows)
        cdef char *tiles = self.tiles_of(group, thread)
        cdef ag_tile tile
        if self.by_columns:
            self.column_tile(group, 0, self.p.n, tiles, &tile)
            self.kernels.columns(&tile, self.scratch_of(thread))
            self.scatter_columns(group, 0, self.p.n, tiles, &tile)
        elif self.gathers:
            self.gather(begin, end, 0, self.p.n, tiles, &tile)
            self.kernels.rows(&tile)
            self.scatter(begin, end, 0, self.p.n, tiles, &tile)
        else:
            compute_rows(&self.p, self.kernels, begin, end, self.stream)

    cdef void piece_max(self, Py_ssize_t unit, int thread) noexcept nogil:
        cdef Py_ssize_t group = unit // self.pieces, piece = unit % self.pieces
        cdef Py_ssize_t k = piece * self.piece_size, length = min(self.piece_size, self.p.n - k)
        cdef Py_ssize_t begin = group * self.group_size, end = min(begin + self.group_size, self.p.rows), row
        cdef ag_tile tile
        if self.by_columns:
            row = self.column_tile(group, k, length, self.tiles_of(unit, thread), &tile)
            self.kernels.columns_max(&tile, &self.maxima[piece * self.p.rows + row], self.scratch_of(thread))
            return
        self.row_tile(begin, end, k, length, self.tiles_of(unit, thread), &tile)
        for row in range(begin, end):
            self.maxima[piece * self.p.rows + row] = self.kernels.piece_max(&tile)
            tile.a += tile.a_stride
            tile.mask += tile.mask_stride

    cdef void piece_sum(self, Py_ssize_t unit, int thread) noexcept nogil:
        cdef Py_ssize_t group = unit // self.pieces, piece = unit % self.pieces
        cdef Py_ssize_t segment = piece * (self.piece_size // self.kernels.segment)
        cdef Py_ssize_t last = min(self.segments, segment + self.piece_size // self.kernels.segment)
        cdef Py_ssize_t begin = group * self.group_size, end = min(begin + self.group_size, self.p.rows), row, k, length
        cdef double max = 0.0
        cdef const double *columns_max = NULL
        cdef ag_tile tile
        while segment < last:
            k = segment * self.kernels.segment
            length = min(self.kernels.segment, self.p.n - k)
            if self.by_columns:
                row = self.column_tile(group, k, length, self.tiles_of(unit, thread), &tile)
                if is_forward(self.p.op):
                    columns_max = &self.max[row]
                self.kernels.columns_sum(
                    &tile, columns_max, &self.sums[segment * self.p.rows + row], self.scratch_of(thread)
                )
            else:
                self.row_tile(begin, end, k, length, self.tiles_of(unit, thread), &tile)
                for row in range(begin, end):
                    if is_forward(self.p.op):
                        max = self.max[row]
                    self.sums[segment * self.p.rows + row] = self.kernels.piece_sum(&tile, max)
                    tile.a += tile.a_stride
                    tile.b += tile.b_stride
                    tile.mask += tile.mask_stride
            segment += 1

    cdef void piece_write(self, Py_ssize_t unit, int thread) noexcept nogil:
        cdef Py_ssize_t group = unit // self.pieces, piece = unit % self.pieces
        cdef Py_ssize_t k = piece * self.piece_size, length = min(self.piece_size, self.p.n - k)
        cdef Py_ssize_t begin = group * self.group_size, end = min(begin + self.group_size, self.p.rows), row
        cdef double max = 0.0
        cdef const double *columns_max = NULL
        cdef char *tiles = self.tiles_of(unit, thread)
        cdef ag_tile tile, part
        if self.by_columns:
            row = self.column_tile(group, k, length, tiles, &tile)
            if is_forward(self.p.op):
                columns_max = &self.max[row]
            self.kernels.columns_write(&tile, columns_max, &self.sum[row], self.scratch_of(thread))
            self.scatter_columns(group, k, length, tiles, &tile)
            return
        self.row_tile(begin, end, k, length, tiles, &tile)
        part = tile
        for row in range(begin, end):
            if is_forward(self.p.op):
                max = self.max[row]
            self.kernels.piece_write(&part, max, self.sum[row])
            part.a += part.a_stride
            part.b += part.b_stride
            part.mask += part.mask_stride
            part.out += part.out_stride
        if self.gathers:
            self.scatter(begin, end, k, length, tiles, &tile)

    cdef void combine_sum(self, Py_ssize_t row) noexcept nogil:
        """The sum of a row from those of its segments, in order."""
        cdef ag_sum total
        cdef Py_ssize_t segment
        total.sum = total.error = 0.0
        for segment in range(self.segments):
            ag_sum_add(&total, self.sums[segment * self.p.rows + row])
        self.sum[row] = ag_sum_total(total)

    cdef void combine_max(self, Py_ssize_t row) noexcept nogil:
        cdef double best = -INFINITY
        cdef Py_ssize_t piece
        for piece in range(self.pieces):
            if self.maxima[piece * self.p.rows + row] > best:
                best = self.maxima[piece * self.p.rows + row]
        self.max[row] = best

    # -- tiles: in place, or gathered into this thread's buffer in the compute type, where results take a's place --

    cdef void columns_of(self, Py_ssize_t group, Py_ssize_t *begin, Py_ssize_t *end) noexcept nogil:
        """The numbers, among all rows of the problem, of a block's columns. In place they have one outer index."""
        cdef Py_ssize_t inner = self.p.shape[self.p.axes - 1]
        if self.gathers:
            begin[0] = group * self.group_size
            end[0] = min(begin[0] + self.group_size, self.p.rows)
        else:
            begin[0] = group // self.blocks * inner + group % self.blocks * self.group_size
            end[0] = min(begin[0] + self.group_size, (group // self.blocks + 1) * inner)

    cdef Py_ssize_t column_tile(
        self, Py_ssize_t group, Py_ssize_t k, Py_ssize_t length, char *tiles, ag_tile *tile
    ) noexcept nogil:
        """A block of columns, `length` rows from k on; returns the number of its first column."""
        cdef Py_ssize_t begin, end
        self.columns_of(group, &begin, &end)
        if self.gathers:
            self.gather(begin, end, k, length, tiles, tile)
            tile.fits = True
            return begin
        columns_at(&self.p, begin, end - begin, tile)
        tile.a += k * tile.a_stride
        tile.b += k * tile.b_stride
        tile.out += k * tile.out_stride
        tile.n = length
        tile.stream = self.stream
        tile.fits = not self.in_pieces and 2 * length * tile.rows * self.p.operands[A].itemsize <= _cpu.cache_size(2)
        return begin

    cdef void scatter_columns(
        self, Py_ssize_t group, Py_ssize_t k, Py_ssize_t length, char *tiles, const ag_tile *tile
    ) noexcept nogil:
        cdef Py_ssize_t begin, end
        if self.gathers:
            self.columns_of(group, &begin, &end)
            self.scatter(begin, end, k, length, tiles, tile)

    cdef void row_tile(
        self, Py_ssize_t begin, Py_ssize_t end, Py_ssize_t k, Py_ssize_t length, char *tiles, ag_tile *tile
    ) noexcept nogil:
        """Elements k .. k+length of rows begin .. end (of one row, where they are used in place)."""
        if self.gathers:
            self.gather(begin, end, k, length, tiles, tile)
            return
        tile_at(&self.p, begin, tile)
        tile.rows = 1
        tile.n = length
        tile.stream = self.stream
        tile.a += k * self.p.operands[A].dim_stride
        tile.b += k * self.p.operands[B].dim_stride
        tile.mask += k * self.p.operands[MASK].dim_stride
        tile.out += k * self.p.operands[OUT].dim_stride

    # A gathered tile holds element k of its row r at r * row_pitch + k, or, for column kernels, at k * row_pitch + r.

    cdef Py_ssize_t row_pitch(self, Py_ssize_t rows, Py_ssize_t length) noexcept nogil:
        """Elements from one row in memory to the next."""
        if self.by_columns:
            return rows
        # Elements of adjacent rows that are copied together should not meet in one set of L1.
        return align_up(length, 16) + 16 if self.transposes and length >= 64 else length

    cdef Py_ssize_t stretch(self, Py_ssize_t row, Py_ssize_t end, ag_dim *outer, ag_dim *inner) noexcept nogil:
        """Rows from `row` on, before `end`, that lie in two dimensions with constant strides: how many, and their lengths."""
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
        cdef Py_ssize_t rows = end - begin, pitch = self.row_pitch(rows, length)
        tile.a = self.gather_operand(A, begin, end, k, length, pitch, tiles, tiles, &tile.a_stride)
        tile.b = tile.a
        tile.b_stride = 0
        if has_b(self.p.op):
            tile.b = self.gather_operand(B, begin, end, k, length, pitch, tiles + self.second_tile, tiles, &tile.b_stride)
        tile.mask = <const uint8_t *>tile.a
        tile.mask_stride = 0
        if has_mask(self.p.op):
            tile.mask = <const uint8_t *>self.gather_operand(
                MASK, begin, end, k, length, pitch, tiles + self.mask_tile, tiles, &tile.mask_stride
            )
        if self.direct[OUT]:
            tile.out = self.place(OUT, begin, k, &tile.out_stride)
        else:
            tile.out = tiles
            tile.out_stride = pitch * self.tile_itemsize
        tile.rows = rows
        tile.n = length
        tile.scale = self.p.scale
        tile.stream = False

    cdef char *place(self, int which, Py_ssize_t row, Py_ssize_t k, Py_ssize_t *stride) noexcept nogil:
        """Where element k of a row of a direct operand lies."""
        cdef const Operand *operand = &self.p.operands[which]
        stride[0] = operand.dim_stride if self.by_columns else operand.strides[0]
        return operand.data + row * operand.strides[0] + k * operand.dim_stride

    cdef char *gather_operand(
        self, int which, Py_ssize_t begin, Py_ssize_t end, Py_ssize_t k, Py_ssize_t length, Py_ssize_t pitch,
        char *to, char *tiles, Py_ssize_t *stride
    ) noexcept nogil:
        """A dense copy in the tile's dtype (masks stay bytes), or the operand itself."""
        cdef const Operand *operand = &self.p.operands[which]
        cdef bint widen = which != MASK and operand.dtype != self.tile_dtype
        if self.direct[which]:
            return self.place(which, begin, k, stride)
        stride[0] = pitch if which == MASK else pitch * self.tile_itemsize
        if self.keeps and self.round != (PIECE_MAX if is_forward(self.p.op) else PIECE_SUM):
            return to  # there since the first round
        self.copy(operand, begin, end, k, length, pitch, tiles + self.converted_tile if widen else to, False)
        if widen:
            ag_widen(
                self.variant, operand.dtype, tiles + self.converted_tile, <float *>to,
                pitch * (length if self.by_columns else end - begin)
            )
        return to

    cdef void scatter(
        self, Py_ssize_t begin, Py_ssize_t end, Py_ssize_t k, Py_ssize_t length, char *tiles, const ag_tile *tile
    ) noexcept nogil:
        """Put the results of gathered rows where they belong, rounded once."""
        cdef const Operand *out = &self.p.operands[OUT]
        cdef Py_ssize_t rows = end - begin, pitch = self.row_pitch(rows, length)
        cdef char *dense = tile.out
        if self.direct[OUT]:
            return
        if out.dtype != self.tile_dtype:
            dense = tiles + self.converted_tile
            ag_round(
                self.variant, self.tile_dtype == AG_FLOAT64, tile.out, out.dtype, dense,
                pitch * (length if self.by_columns else rows)
            )
        self.copy(out, begin, end, k, length, pitch, dense, True)

    cdef void copy(
        self, const Operand *operand, Py_ssize_t begin, Py_ssize_t end, Py_ssize_t k, Py_ssize_t length, Py_ssize_t pitch,
        char *dense, bint to_operand
    ) noexcept nogil:
        """Elements k .. k+length of rows begin .. end to, or from, a dense tile of the operand's dtype."""
        cdef int axis = self.p.axes - 1, itemsize = operand.itemsize
        cdef Py_ssize_t row_step = itemsize if self.by_columns else pitch * itemsize
        cdef Py_ssize_t step = pitch * itemsize if self.by_columns else itemsize
        cdef Py_ssize_t row = begin, count
        cdef ag_dim outer, inner, elements
        cdef char *place
        elements.length = length
        while row < end:
            count = self.stretch(row, end, &outer, &inner)
            place = operand.data + k * operand.dim_stride + offset_of(&self.p, operand, row)
            if to_operand:
                outer.to, inner.to, elements.to = operand.strides[axis - 1] if axis else 0, operand.strides[axis], operand.dim_stride
                outer.from_, inner.from_, elements.from_ = self.p.shape[axis] * row_step, row_step, step
                ag_copy_3d(self.variant, place, dense + (row - begin) * row_step, outer, inner, elements, itemsize, operand.swapped)
            else:
                outer.from_, inner.from_, elements.from_ = operand.strides[axis - 1] if axis else 0, operand.strides[axis], operand.dim_stride
                outer.to, inner.to, elements.to = self.p.shape[axis] * row_step, row_step, step
                ag_copy_3d(self.variant, dense + (row - begin) * row_step, place, outer, inner, elements, itemsize, operand.swapped)
            row += count

    # -- rounds of units --

    cdef void unit(self, Py_ssize_t index, int thread) noexcept nogil:
        if self.round == WHOLE:
            self.whole(index, thread)
        elif self.round == PIECE_MAX:
            self.piece_max(index, thread)
        elif self.round == COMBINE_MAX:
            self.combine_max(index)
        elif self.round == PIECE_SUM:
            self.piece_sum(index, thread)
        elif self.round == COMBINE_SUM:
            self.combine_sum(index)
        else:
            self.piece_write(index, thread)

    cdef int run(self, Round round, Py_ssize_t units) except -1:
        """All units of a round."""
        cdef int threads = self.threads
        cdef _tasks.Times times
        self.round = round
        if self.chosen and _threads.is_disturbed():
            threads = 1
        if round == COMBINE_MAX or round == COMBINE_SUM:
            # A team for a few additions would cost more than they.
            threads = <int>min(<Py_ssize_t>threads, ceil_div(units * self.segments, UNIT_ELEMENTS))
        _tasks.run_timed(run_unit, <void *>self, units, threads, self.stream, &self.last_check, &times)
        # Not where some have nothing to do for as long as a large unit takes; and whoever has to wake first is late without
        # any disturbance.
        if threads > 1 and (units > 2 * threads or self.p.rows * self.p.n < LARGE_UNIT * units) and _threads.is_warm():
            _threads.took(times.elapsed, times.waited)
        return 0

    cdef int run_all(self) except -1:
        cdef Py_ssize_t units = self.groups * self.pieces
        if not self.in_pieces:
            return self.run(WHOLE, self.groups)
        if is_forward(self.p.op):
            self.run(PIECE_MAX, units)
            self.run(COMBINE_MAX, self.p.rows)
        self.run(PIECE_SUM, units)
        self.run(COMBINE_SUM, self.p.rows)
        return self.run(PIECE_WRITE, units)


cdef void run_unit(void *schedule, Py_ssize_t index, int thread) noexcept nogil:
    (<Schedule>schedule).unit(index, thread)


# ---- entry points ----------------------------------------------------------------------------------------------------

cdef int compute_problem(Problem *p, int asked) except -1:
    cdef int threads = _threads.choose(<double>p.rows * p.n * (FORWARD_COST if is_forward(p.op) else BACKWARD_COST), asked)
    cdef Schedule schedule
    cdef ag_fpenv mode
    if asked == 0 and threads > 1 and _threads.is_disturbed():
        threads = 1
    cdef const ag_row_kernels *kernels = ag_rowwise_kernels(_cpu.active(), p.dtype, p.op)
    cdef Layout layout = choose_layout(p)
    if threads == 1 and p.rows * p.n <= UNIT_ELEMENTS and (
        layout == ROWS or (layout == COLUMNS and p.n <= kernels.strip_rows and p.shape[p.axes - 1] >= AG_STRIP_COLUMNS)
    ):
        # Small and plain: the schedule would cost as much as the work. Not worth giving up the interpreter's lock.
        mode = ag_fpenv_enter()
        if layout == ROWS:
            compute_rows(p, kernels, 0, p.rows, False)
        else:
            compute_strips(p, kernels)
        ag_fpenv_leave(mode)
        _openmp.record_team()
        return 0
    schedule = Schedule.__new__(Schedule)
    schedule.p = p[0]
    schedule.chosen = asked == 0
    schedule.prepare(threads)
    schedule.allocate()
    schedule.run_all()
    _threads.finished()
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
        out = result.fresh(call)
    else:
        for i in range(call.operator.array_count):
            if overlaps_partly(given, <cnp.ndarray>call.values[i]):
                out = fresh_like(given)
                break
    if describe_call(&p, call, out):
        compute_problem(&p, threads)
    if given is not None and out is not given:
        _memory.copy_into(given, out)
        return given
    return out


cdef cnp.ndarray fresh_like(cnp.ndarray given):
    """Where a result is computed aside of the array that it goes to."""
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
    for count in [threads] if threads else [1, _threads.resolve()]:
        schedule.p = p
        schedule.prepare(count)
        most = max(most, schedule.bytes())
    return aside + most


def stream(float[::1] a, float[::1] b, float[::1] out, bint nontemporal, int num_threads):
    """out = a + b: the traffic of a backward operator without its work, for benchmarks."""
    cdef Py_ssize_t block = 1 << 14, blocks = ceil_div(a.shape[0], 1 << 14), index
    cdef ag_variant variant = _cpu.active()
    for index in prange(blocks, nogil=True, num_threads=num_threads, schedule="dynamic"):
        ag_stream(
            variant, &a[index * block], &b[index * block], &out[index * block],
            min(block, a.shape[0] - index * block), nontemporal
        )
