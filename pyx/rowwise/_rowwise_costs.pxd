from ascend_grad._rowwise_plan cimport OPERANDS, Plan, Problem

cdef enum:
    # The terms of an estimate: each is counted, and has a time in `NANOSECONDS`.
    KERNELS                           # nanoseconds of arithmetic
    LINES_L2                          # cache lines of operands, in L2
    LINES_L3
    LINES_MEMORY
    JUMPS                             # runs of adjacent lines of operands beyond L2
    TILE_LINES_L2                     # cache lines of tiles that exceed L1
    TILE_LINES_L3                     # cache lines of tiles that exceed L2
    LOOPS                             # inner loops of copies
    MOVED_LINES                       # cache lines copied from unit stride to unit stride
    STRIDED                           # elements copied from or to another stride
    SHORT_ROWS                        # elements copied between short adjacent rows and columns
    STEP_BYTES                        # bytes, with the gaps, that permutes read to copy from a step of a few elements
    TRANSPOSED                        # elements copied by transposing blocks, weighted by their size
    TURNED                            # elements copied one by one between operands and tiles of another order
    CONVERTED                         # elements converted to or from the dtype of the tile
    TASKS
    COPIES                            # copies of tiles
    PHASES                            # starts of phases for a team
    TERMS

ctypedef struct Extent:
    # The cache lines that a range of an operand touches.
    double runs                       # runs of adjacent cache lines
    double lines                      # cache lines

ctypedef struct Memory:
    # The cache lines of each operand, and the cache level or memory that holds all operands together.
    Extent[OPERANDS] extents
    int level                         # LINES_L2, LINES_L3 or LINES_MEMORY

cdef Memory memory_of(const Problem *p, int threads) noexcept nogil
cdef double plain_time(const Problem *p) noexcept nogil
cdef double cost_of(const Problem *p, const Memory *memory, const Plan *plan) noexcept nogil
