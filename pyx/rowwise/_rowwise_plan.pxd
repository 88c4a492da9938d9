from ascend_grad._kernels cimport ag_dim, ag_dtype
from ascend_grad._rowwise_kernels cimport (
    AG_FORWARD,
    AG_LOSS_DENSE_STRIPS,
    AG_NOT_READ,
    AG_ROW_OP_COUNT,
    ag_row_kernels,
    ag_row_op,
    ag_row_ops,
    ag_tile,
)
from ascend_grad._views cimport View

cdef enum:
    MAX_AXES = 8
    # Indices of the operands of a problem: inputs, mask, result.
    A = 0
    B = 1
    MASK = 2
    OUT = 3
    OPERANDS = 4
    NARROW_ROW = 64                   # most elements of a row that shares vectors with the next, without a gap

ctypedef struct Operand:
    char *data
    Py_ssize_t dim_stride             # bytes along the reduced dimension
    Py_ssize_t[MAX_AXES] strides      # bytes along the axes of the rows
    ag_dtype dtype
    int itemsize
    bint swapped

ctypedef struct Problem:
    ag_row_op op
    ag_dtype dtype                    # dtype of the inputs; probabilities of classes may have another one
    Py_ssize_t n                      # length of a row
    Py_ssize_t rows
    int axes                          # number of axes that index the rows, at least one
    Py_ssize_t[MAX_AXES] shape        # lengths of these axes, slowest first
    Operand[OPERANDS] operands
    bint expands                      # whether any operand is expanded
    bint[OPERANDS] is_expanded        # inputs of one row for all rows, which the workspace holds as kernels read it
    Operand[OPERANDS] sources         # the inputs that are expanded, in the caller's memory
    double scale
    bint is_transformed               # gathered tiles hold cap tanh(inner x) of inputs x, or inner x if cap is 0
    double inner
    double cap

ctypedef struct Axes:
    # The axes that index the rows, as few as the strides of one operand allow.
    int count
    Py_ssize_t[MAX_AXES] shape        # lengths, slowest first
    Py_ssize_t[MAX_AXES] strides      # bytes

cdef enum Layout:
    ROWS
    COLUMNS
    ROW_TILES
    COLUMN_TILES

ctypedef struct Plan:
    # The tasks of a problem. A block is a range of rows, or of columns; a split is a part of a block along n.
    const ag_row_kernels *kernels
    Layout layout
    bint by_columns                   # layout is COLUMNS or COLUMN_TILES
    bint gathers                      # layout is ROW_TILES or COLUMN_TILES
    bint transposes                   # gathers, and adjacent elements of some operand belong to different rows
    bint nontemporal                  # stores of results bypass the cache
    int threads
    Py_ssize_t blocks                 # number of blocks
    Py_ssize_t block_size             # rows, or columns, of a block
    Py_ssize_t blocks_per_index       # blocks of one index of the outer axes (COLUMNS only)
    bint is_boxed                     # blocks are boxes, ranges of every axis of the rows, instead of ranges of rows
    Py_ssize_t[MAX_AXES] box          # most indices of a box along each axis of the rows (boxes only)
    bint is_split                     # tasks are splits, in several phases, instead of whole blocks
    Py_ssize_t splits                 # number of splits of a block
    Py_ssize_t split_size             # elements of a split along n, a multiple of the segment
    Py_ssize_t segments               # number of segments of a row
    Axes[OPERANDS] axes               # of each operand, if the plan gathers
    bint[OPERANDS] direct             # operands that kernels read or write in place although others are gathered
    bint[OPERANDS] constant           # gathered operands of equal columns, of whose elements tiles have the first
    ag_dtype tile_dtype               # dtype of gathered tiles, see choose_tile_dtype
    int tile_itemsize
    # Offsets, in a thread's tiles, of the second input, the mask, and values of another dtype than the tile's. The
    # first input is at offset 0, and the results overwrite it, or if it is transformed the second tile, element by element.
    Py_ssize_t second_tile
    Py_ssize_t mask_tile
    Py_ssize_t converted_tile
    Py_ssize_t tiles_size             # bytes of the tiles of one thread, or of one task
    bint caches_inputs                # every task has tiles of its own, which hold its inputs from phase to phase
    double cost                       # estimated nanoseconds
    Py_ssize_t wave                   # blocks whose phases run together: all, unless inputs are cached wave by wave


cdef inline bint has_b(ag_row_op op) noexcept nogil:
    return ag_row_ops[<int>op].b != AG_NOT_READ


cdef inline bint has_mask(ag_row_op op) noexcept nogil:
    return ag_row_ops[<int>op].mask != AG_NOT_READ


cdef inline bint is_loss(ag_row_op op) noexcept nogil:
    """Return whether the mask of a problem holds numbers of rows, as the cross-entropy has arrays of one number per row."""
    return AG_ROW_OP_COUNT <= op <= AG_LOSS_DENSE_STRIPS


cdef inline bint has_columns(ag_row_op op) noexcept nogil:
    return ag_row_ops[<int>op].has_columns


cdef inline bint is_forward(ag_row_op op) noexcept nogil:
    return ag_row_ops[<int>op].direction == AG_FORWARD


cdef bint describe(
    Problem *p, ag_row_op op, const View *a, const View *b, const View *mask, const View *out, int dim, double scale
) noexcept nogil
cdef void tile_at(const Problem *p, Py_ssize_t row, ag_tile *tile) noexcept nogil
cdef void columns_at(const Problem *p, Py_ssize_t row, Py_ssize_t columns, ag_tile *tile) noexcept nogil
cdef Py_ssize_t offset_of(const Problem *p, const Operand *operand, Py_ssize_t row) noexcept nogil
cdef bint all_native(const Problem *p) noexcept nogil
cdef bint is_used(const Problem *p, int operand) noexcept nogil
cdef bint are_dense_rows(const Problem *p) noexcept nogil
cdef ag_dtype choose_tile_dtype(const Problem *p) noexcept nogil
cdef Plan new_plan(
    const Problem *p, ag_dtype tile_dtype, const ag_row_kernels *kernels, int threads, Layout layout, bint is_boxed
) noexcept nogil
cdef void cut_rows(Plan *plan, const Problem *p) noexcept nogil
cdef void cut_columns(Plan *plan, const Problem *p, Py_ssize_t columns) noexcept nogil
cdef void cut_tiles(Plan *plan, const Problem *p, Py_ssize_t most) noexcept nogil
cdef void limit_blocks(Plan *plan, const Problem *p, Py_ssize_t most) noexcept nogil
cdef bint axes_disagree(const Problem *p) noexcept nogil
cdef void cut_boxes(Plan *plan, const Problem *p, Py_ssize_t most) noexcept nogil
cdef void rows_of(
    const Plan *plan, const Problem *p, Py_ssize_t block, Py_ssize_t *begin, Py_ssize_t *end
) noexcept nogil
cdef int box_dims(
    const Plan *plan, const Problem *p, const Operand *operand, Py_ssize_t begin, Py_ssize_t row_step, ag_dim *dims
) noexcept nogil
cdef Py_ssize_t row_pitch(const Plan *plan, Py_ssize_t rows, Py_ssize_t length) noexcept nogil
