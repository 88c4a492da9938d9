from ascend_grad._kernels cimport ag_dtype
from ascend_grad._rowwise_kernels cimport AG_FORWARD, AG_NOT_READ, ag_row_kernels, ag_row_op, ag_row_ops, ag_tile
from ascend_grad._views cimport View

cdef enum:
    MAX_AXES = 8
    # Operands of a problem.
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

cdef enum Layout:
    ROWS
    COLUMNS
    ROW_TILES
    COLUMN_TILES

ctypedef struct Plan:
    # How a problem is cut into tasks. A block is a number of rows, or of columns; a split is a part of it along n.
    const ag_row_kernels *kernels
    Layout layout
    bint by_columns                   # COLUMNS or COLUMN_TILES
    bint gathers                      # ROW_TILES or COLUMN_TILES
    bint transposes                   # ... and adjacent elements of some operand belong to different rows
    bint nontemporal                  # results bypass the cache
    int threads
    Py_ssize_t blocks
    Py_ssize_t block_size             # rows, or columns
    Py_ssize_t blocks_per_index       # COLUMNS: of one outer index
    bint is_split                     # tasks are splits, in several phases, not whole blocks
    Py_ssize_t splits                 # of a block
    Py_ssize_t split_size             # elements; a multiple of the segment
    Py_ssize_t segments               # of a row
    bint[OPERANDS] direct             # operands that kernels read or write in place although others are gathered
    ag_dtype tile_dtype               # of the gathered ones: the problem's, or the compute type where out has another
    int tile_itemsize
    # Where the second input, the mask, and values on their way to or from the tile's dtype lie in a thread's tiles. The
    # first input lies at their beginning, and the results in its place.
    Py_ssize_t second_tile
    Py_ssize_t mask_tile
    Py_ssize_t converted_tile
    Py_ssize_t tiles_size             # of one thread, or of one task
    bint caches_inputs                # tasks have tiles of their own, which hold their inputs from phase to phase


cdef inline bint has_b(ag_row_op op) noexcept nogil:
    return ag_row_ops[<int>op].b != AG_NOT_READ


cdef inline bint has_mask(ag_row_op op) noexcept nogil:
    return ag_row_ops[<int>op].mask != AG_NOT_READ


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
cdef Layout choose_layout(const Problem *p, const ag_row_kernels *kernels) noexcept nogil
cdef ag_dtype choose_tile_dtype(const Problem *p) noexcept nogil
cdef Plan make_plan(const Problem *p, ag_dtype tile_dtype, const ag_row_kernels *kernels, int threads) noexcept nogil
cdef Py_ssize_t row_pitch(const Plan *plan, Py_ssize_t rows, Py_ssize_t length) noexcept nogil
