"""Candidates: the kinds of plans that a row-wise problem may have, and the choice among them.

A candidate makes the plans of one layout, of whole blocks, splits or boxes, for several sizes of blocks. The plan with
the least estimated time (`_rowwise_costs`) is chosen; if times are equal, the first one.
"""

from ascend_grad._kernels cimport ag_dtype, ag_itemsize
from ascend_grad._rowwise_costs cimport Memory, cost_of, memory_of
from ascend_grad._rowwise_kernels cimport AG_MAX_COLUMNS, AG_STRIP_COLUMNS, ag_row_kernels
from ascend_grad._rowwise_plan cimport (
    COLUMN_TILES,
    COLUMNS,
    MASK,
    OPERANDS,
    OUT,
    ROW_TILES,
    ROWS,
    A,
    B,
    Layout,
    Plan,
    Problem,
    all_native,
    are_dense_rows,
    axes_disagree,
    choose_tile_dtype,
    cut_boxes,
    cut_columns,
    cut_rows,
    cut_tiles,
    has_columns,
    has_mask,
    is_loss,
    is_used,
    new_plan,
    row_pitch,
)

cdef enum:
    # Sizes of blocks that are tried: 32, 64, ..., 1024 columns, and tiles of 16 KiB, 64 KiB, ..., 1 MiB of rows.
    LEAST_COLUMNS = 32
    LEAST_TILE = 16 << 10
    MOST_TILE = 1 << 20
    LONG_BLOCK = 1 << 22              # elements of a block of several segments from which on it is split
    SMALL = 1 << 15                   # most elements of a problem that one thread computes in one block, if it can
    PLAIN_ROW = 64                    # least elements of a row that is computed in place if it can be

ctypedef struct Candidate:
    const char *name
    Layout layout
    bint is_split
    bint is_boxed


cdef Candidate candidate(const char *name, Layout layout, bint is_split, bint is_boxed=False):
    cdef Candidate made
    made.name, made.layout, made.is_split, made.is_boxed = name, layout, is_split, is_boxed
    return made


cdef enum:
    CANDIDATE_COUNT = 10

cdef Candidate[CANDIDATE_COUNT] CANDIDATES
CANDIDATES[0] = candidate(b"rows in place", ROWS, False)
CANDIDATES[1] = candidate(b"columns in place", COLUMNS, False)
CANDIDATES[2] = candidate(b"rows, gathered", ROW_TILES, False)
CANDIDATES[3] = candidate(b"columns, gathered", COLUMN_TILES, False)
CANDIDATES[4] = candidate(b"rows in place, split", ROWS, True)
CANDIDATES[5] = candidate(b"columns in place, split", COLUMNS, True)
CANDIDATES[6] = candidate(b"rows, gathered, split", ROW_TILES, True)
CANDIDATES[7] = candidate(b"columns, gathered, split", COLUMN_TILES, True)
CANDIDATES[8] = candidate(b"rows, gathered, in boxes", ROW_TILES, False, True)
CANDIDATES[9] = candidate(b"columns, gathered, in boxes", COLUMN_TILES, False, True)

# The index of the only candidate that is chosen if it has plans, for tests, or -1.
cdef int _forced = -1


def names():
    """Return the names of the candidates."""
    cdef int i
    return [(<bytes>CANDIDATES[i].name).decode() for i in range(CANDIDATE_COUNT)]


def force(name=None):
    """Choose plans of this candidate alone for problems for which it has any, or for None of all candidates. For tests."""
    global _forced
    _forced = -1 if name is None else names().index(name)


# ---- which candidates fit --------------------------------------------------------------------------------------------

cdef bint rows_fit(const Problem *p) noexcept nogil:
    """Return whether kernels can read and write rows in place."""
    cdef int i
    for i in range(OPERANDS):
        if is_used(p, i) and p.operands[i].dim_stride != p.operands[i].itemsize:
            return False
    return all_native(p) and not p.is_transformed


cdef bint columns_fit(const Problem *p) noexcept nogil:
    """Return whether kernels can read and write columns in place."""
    cdef int i
    if not has_columns(p.op) or not all_native(p) or p.is_transformed:
        return False
    for i in range(OPERANDS):
        if is_used(p, i) and p.operands[i].strides[p.axes - 1] != p.operands[i].itemsize:
            return False
    return True


cdef bint is_plain(const Problem *p, Layout *layout, const ag_row_kernels *kernels) noexcept nogil:
    """Return whether kernels compute a small problem best in place, and set the layout."""
    cdef Py_ssize_t inner = p.shape[p.axes - 1]
    cdef bint has_few_rows = p.rows < AG_STRIP_COLUMNS or not has_columns(p.op)
    if _forced >= 0 or p.expands:
        return False
    if rows_fit(p) and (p.n >= PLAIN_ROW or p.rows == 1 or (has_few_rows and are_dense_rows(p))):
        layout[0] = ROWS
        return True
    layout[0] = COLUMNS
    return p.n <= kernels.strip_rows and inner >= AG_STRIP_COLUMNS and columns_fit(p)


cdef bint is_computed_at_once(const Problem *p, Layout *layout, const ag_row_kernels *kernels) noexcept nogil:
    """Return whether one thread computes a problem in place without a schedule, and set the layout."""
    return p.rows * p.n <= SMALL and is_plain(p, layout, kernels)


cdef bint is_copied(const Problem *p) noexcept nogil:
    """Return whether one thread computes a problem best in dense copies, without a schedule, if it is not plain.

    The problem then takes less time than the choice of a plan.
    """
    cdef int i, itemsize = ag_itemsize[<int>choose_tile_dtype(p)]
    if p.is_transformed or p.expands or is_loss(p.op) or _forced >= 0:
        return False
    for i in range(OPERANDS):
        if is_used(p, i):
            itemsize = max(itemsize, p.operands[i].itemsize)
    return p.rows * p.n * itemsize <= <Py_ssize_t>(COPIED * sizeof(double))


cdef bint fits(const Problem *p, const Candidate *which, const ag_row_kernels *kernels) noexcept nogil:
    """Return whether a candidate may have plans for the problem."""
    if which.is_split and p.n <= kernels.segment:
        return False
    if which.is_boxed and (is_loss(p.op) or not axes_disagree(p)):
        return False
    if which.layout == ROWS:
        return rows_fit(p)
    if which.layout == COLUMNS:
        return columns_fit(p)
    return which.layout == ROW_TILES or (has_columns(p.op) and not p.is_transformed)

# ---- the choice ------------------------------------------------------------------------------------------------------

ctypedef struct Best:
    # The cheapest plan so far, if there is one, and what the problem takes in memory.
    Plan plan
    bint exists
    Memory memory


cdef void compare(Best *best, const Problem *p, Plan *plan) noexcept nogil:
    plan.cost = cost_of(p, &best.memory, plan)
    if not best.exists or plan.cost < best.plan.cost:
        best.plan, best.exists = plan[0], True


cdef void cut(Plan *plan, const Problem *p, Py_ssize_t most) noexcept nogil:
    if plan.is_boxed:
        cut_boxes(plan, p, most)
    else:
        cut_tiles(plan, p, most)


cdef void consider(Best *best, const Problem *p, Plan *plan) noexcept nogil:
    """Compare the plans of a candidate, of which `plan` is the beginning, with the best plan so far."""
    cdef bint is_small = p.rows * p.n <= SMALL and plan.threads == 1
    cdef Py_ssize_t size, most, row_bytes
    if plan.is_split and is_small:
        return
    # A tile that needs no copy is left to the layouts in place. The rows of a loss may have their numbers in another order
    # of axes: layouts in place then compute rows along one axis only, and a tile has more rows.
    if plan.gathers and plan.direct[A] and plan.direct[B] and plan.direct[OUT] and (
        plan.direct[MASK] if has_mask(p.op) else not is_loss(p.op) or p.axes == 1
    ):
        return
    if plan.layout == ROWS:
        cut_rows(plan, p)
        if plan.is_split or plan.segments == 1 or p.n < LONG_BLOCK:
            compare(best, p, plan)
        return
    if plan.layout == ROW_TILES:
        row_bytes = row_pitch(plan, 1, plan.kernels.segment if plan.is_split else p.n) * plan.tile_itemsize
        size = MOST_TILE if is_small else LEAST_TILE
        while size <= MOST_TILE:
            if size >= row_bytes or plan.is_split:
                cut(plan, p, size // row_bytes)
                if size == LEAST_TILE or plan.tiles_size <= 2 * MOST_TILE:
                    compare(best, p, plan)
                if plan.blocks == 1:
                    break
            size *= 4
        return
    most = p.shape[p.axes - 1] if plan.layout == COLUMNS else p.rows
    size = AG_MAX_COLUMNS if is_small else LEAST_COLUMNS
    while size <= AG_MAX_COLUMNS:
        if plan.is_split or plan.segments == 1 or min(size, most) * p.n < LONG_BLOCK:
            if plan.layout == COLUMNS:
                cut_columns(plan, p, size)
                compare(best, p, plan)
            else:
                cut(plan, p, size)
                if plan.tiles_size <= 2 * MOST_TILE:
                    compare(best, p, plan)
        if size >= most:
            break
        size *= 2


cdef Plan choose_plan(const Problem *p, ag_dtype tile_dtype, const ag_row_kernels *kernels, int threads) noexcept nogil:
    """Choose a plan for `kernels`, the kernels of `tile_dtype`, which `choose_tile_dtype` returned."""
    cdef Best best
    cdef Plan plan
    cdef Layout layout
    cdef bint is_at_once = threads == 1 and is_computed_at_once(p, &layout, kernels)
    cdef int i, turn
    best.exists, best.memory = False, memory_of(p, threads)
    for turn in range(2):  # the second turn if the candidate that is forced has no plan; ROW_TILES always has one
        for i in range(CANDIDATE_COUNT):
            if is_at_once and (CANDIDATES[i].layout != layout or CANDIDATES[i].is_split):
                continue
            if (turn or _forced < 0 or i == _forced) and fits(p, &CANDIDATES[i], kernels):
                plan = new_plan(p, tile_dtype, kernels, threads, CANDIDATES[i].layout, CANDIDATES[i].is_boxed)
                plan.is_split = CANDIDATES[i].is_split
                consider(&best, p, &plan)
        if best.exists:
            break
    return best.plan
