"""Plans of the linear operators: how a problem is cut, in which order it is traversed, and where its buffers lie.

The packed sweep cuts a problem into chunks of rows and blocks of the vocabulary:

  blocks outside   all chunks of a block, then the next block. The sums of input_grad stay open from block to block.
  chunks outside   all blocks of a chunk, then the next chunk. input_grad is complete with the chunk, and the sums of
                   weight_grad stay open.

If a gradient has more than `MAX_UNCOMPENSATED_SUMS` partial sums, the workspace also holds their compensation. A cut whose
buffers exceed the workspace is no plan.

The other sweeps pack nothing. Their sums over the longer side, or over the features, have one partial sum for each task and
are always compensated. `_linear_candidates` chooses the sweep.

A plan follows from the problem, the kernels and the number of bytes allowed, and the order of every sum follows from the plan.
Sizes of caches, threads and load do not change it.
"""

from libc.stdint cimport int64_t, uint8_t
from libc.string cimport memset

from ascend_grad cimport _cpu
from ascend_grad._kernels cimport AG_BFLOAT16, ag_dtype, ag_itemsize, ag_sum
from ascend_grad._linear_kernels cimport (
    AG_MAX_STREAMED_STEP,
    AG_TILE,
    ag_linear_kernels,
    ag_linear_kernels_of,
    ag_more,
)
from ascend_grad._linear_problem cimport Problem, acc_size_of, holds_sums, is_rounded_by_kernels
from ascend_grad._memory cimport ALIGNMENT, SIZE_LIMIT, Arena, align_up, arena_alloc, ceil_div

cdef enum:
    # Most partial sums that are added without compensation if the workspace has space for it.
    FEW_SUMS = 16
    # Most partial sums that are added without compensation in any workspace; part of the promised accuracy.
    MAX_UNCOMPENSATED_SUMS = 64

# Most rows of a chunk. Measured; the curve is flat. A panel of as many rows fits into any L2.
cdef Py_ssize_t CHUNK_ROWS = 1008
# Most vocabulary entries of a block. Measured; the curve is flat.
cdef Py_ssize_t BLOCK_VOCAB = 960
# Most rows with which X is the right operand of the logits. Packing it is cheap then, and packing W is not. Measured.
cdef Py_ssize_t MAX_RIGHT_ROWS = 256
# Least features for each row with which X is the right operand on a matrix unit. Measured.
cdef Py_ssize_t UNIT_FEATURES_PER_ROW = 4
# Most panels of W for which rows of X that cannot be read in place are gathered for each panel again. For more panels, they
# are copied once.
cdef Py_ssize_t GATHERED_PANELS = 4
# Most elements of P of a chunk and a block if one side is short. Such a P fits into most last-level caches.
cdef Py_ssize_t P_ELEMENTS = 1 << 20
# Most vocabulary entries that are packed again for each chunk at next to no cost. Measured.
cdef Py_ssize_t FEW_CLASSES = 64
# Bytes of a chunk of few classes (packed rows and columns of X, and logits) that it may have beyond CHUNK_ROWS rows. The pages
# of more bytes are fresh in each call. Measured.
cdef Py_ssize_t FEW_CLASSES_BYTES = 4 << 20
# Cost of packing one element, in floating-point operations of the products. Measured.
cdef double PACK_COST = 75.0
# Cost of moving to the next row of a matrix while packing, in the same unit. Measured.
cdef double ROW_COST = 5000.0
# Cost of adding to one element of a result, in the same unit. Measured.
cdef double ADD_COST = 40.0

# ---- constants of the sweeps that pack nothing ----
# Number of tasks, if the problem is large enough.
cdef Py_ssize_t UNPACKED_TASKS = 32
# Most streamed rows of a task, so that a sum over them is one chain (AG_CHAIN).
cdef Py_ssize_t MAX_STREAMED_ROWS = 1248
# Least floating-point operations of a task, if the problem is large enough.
cdef double MIN_TASK_FLOPS = 1 << 18
# Most floating-point operations of a task, so that signals are checked in time.
cdef double MAX_TASK_FLOPS = 1 << 30
# Most bytes that are streamed at a time, so that the first product leaves them in L2 for the second.
cdef Py_ssize_t STREAMED_BYTES = 512 << 10
# Rows that are streamed at a time if fewer rows fit into STREAMED_BYTES.
cdef Py_ssize_t STREAMED_STEP = 48
# Features of a task are a multiple of this number.
cdef Py_ssize_t FEATURE_GRANULE = 256


cdef inline Py_ssize_t times(Py_ssize_t a, Py_ssize_t b) noexcept nogil:
    """Return the product of two sizes, at most `SIZE_LIMIT`."""
    return SIZE_LIMIT if a and b > SIZE_LIMIT // a else a * b


cdef const ag_linear_kernels *kernels_for(ag_dtype dtype) noexcept nogil:
    """Return the kernels for inputs of this dtype, in the active variant."""
    return ag_linear_kernels_of(_cpu.active(), dtype)


cdef bint caches_exp(ag_dtype dtype) noexcept nogil:
    """Return whether losses without options may cache exponentials.

    Gradients in float16 would double their error: rounding an exponential costs as much as rounding the result.
    """
    return dtype == AG_BFLOAT16 and kernels_for(dtype).caches_exp


cdef Work work_of(const Problem *p) noexcept nogil:
    """Return the sizes and results of a problem whose active rows were counted."""
    cdef Work work
    work.rows, work.total_rows, work.vocab, work.hidden = p.rows.active, p.rows.total, p.vocab, p.hidden
    work.itemsize = ag_itemsize[<int>p.dtype]
    work.with_statistics, work.with_logits = p.with_statistics, p.with_statistics or p.softmax.data == NULL
    work.with_rest, work.with_more = p.with_statistics and p.rest != NULL, p.with_statistics and p.with_more
    work.caches_exp = caches_exp(p.dtype) and not p.is_general
    work.with_bias_grad = p.bias_sums != NULL
    work.with_input_grad, work.with_weight_grad = p.with_input_grad, p.with_weight_grad
    work.top_k = p.top_k
    work.buffers_weight_grad = p.with_weight_grad and not holds_sums(&p.weight_grad, acc_size_of(p.dtype))
    work.weight_grad_bytes = p.weight_grad_bytes
    return work


cdef Plan new_plan(
    const ag_linear_kernels *kernels, const Work *work, Py_ssize_t workspace, bint chunks_outside
) noexcept nogil:
    """Return a plan of the packed sweep without sizes."""
    cdef Plan plan
    memset(&plan, 0, sizeof(plan))
    plan.kernels, plan.work, plan.workspace = kernels, work[0], workspace
    plan.sweep, plan.chunks_outside = PACKED, chunks_outside
    plan.weight_is_left = work.total_rows <= MAX_RIGHT_ROWS and work.total_rows <= work.vocab
    if kernels.granule > 1:  # products are short, so that transposing their tiles may take longer than packing W
        plan.weight_is_left = plan.weight_is_left and UNIT_FEATURES_PER_ROW * work.total_rows <= work.hidden
    return plan


cdef bint has_few_classes(const Work *work) noexcept nogil:
    """Return whether a chunk may pack the whole weight, so that short chunks cost no more than long ones."""
    return work.vocab <= FEW_CLASSES


# ---- cuts of the packed sweep ----------------------------------------------------------------------------------------

cdef Py_ssize_t preferred_rows(const Plan *plan) noexcept nogil:
    """Return the rows of a chunk if memory is plenty. If the vocabulary is small, chunks are long.

    With few classes they have only as many bytes as need no fresh pages, but at least CHUNK_ROWS rows.
    """
    cdef Py_ssize_t rows = plan.work.rows, vocab = align_up(plan.work.vocab, plan.kernels.nr), most = CHUNK_ROWS
    cdef Py_ssize_t longest, packed
    if rows > CHUNK_ROWS and plan.work.vocab <= BLOCK_VOCAB:
        longest = P_ELEMENTS // vocab
        if has_few_classes(&plan.work):
            packed = min(times(2 * plan.kernels.element_size, plan.work.hidden), FEW_CLASSES_BYTES)
            longest = min(longest, FEW_CLASSES_BYTES // (packed + vocab * plan.kernels.acc_size))
        most = max(most, longest)
    return align_up(min(rows, most), plan.kernels.mr)


cdef Py_ssize_t preferred_vocab(const Plan *plan) noexcept nogil:
    """Return the vocabulary entries of a block if memory is plenty. If rows are few, blocks are long."""
    cdef Py_ssize_t rows = plan.work.rows, vocab = plan.work.vocab, most = BLOCK_VOCAB
    if rows <= CHUNK_ROWS:
        most = max(most, P_ELEMENTS // align_up(rows, plan.kernels.nr))
    return align_up(min(vocab, most), plan.kernels.nr)


cdef bint cut(Plan *plan, Py_ssize_t rows, Py_ssize_t vocab) noexcept nogil:
    """Cut into equal chunks and blocks of at most these sizes, and return whether the buffers fit into the workspace."""
    cdef const Work *work = &plan.work
    cdef int i
    plan.rows = align_up(ceil_div(work.rows, ceil_div(work.rows, rows)), plan.kernels.mr)
    plan.chunks = ceil_div(work.rows, plan.rows)
    plan.vocab = align_up(ceil_div(work.vocab, ceil_div(work.vocab, vocab)), plan.kernels.nr)
    plan.blocks = ceil_div(work.vocab, plan.vocab)
    for i in range(2):
        plan.max_uncompensated = MAX_UNCOMPENSATED_SUMS if i else FEW_SUMS
        plan.packed_chunks = plan.chunks
        # The gradients of a single block read each packed chunk once.
        if not plan.chunks_outside and (plan.blocks > 1 or work.with_statistics) and nbytes(plan) <= plan.workspace:
            return True
        plan.packed_chunks = 1
        if nbytes(plan) <= plan.workspace:
            return True
    return False


cdef bint search(Plan *plan) noexcept nogil:
    """Find the cheapest cut that fits into the workspace, and return whether there is one."""
    cdef Py_ssize_t mr = plan.kernels.mr, nr = plan.kernels.nr, vocab, best_rows = 0, best_vocab = 0
    cdef Py_ssize_t most = preferred_vocab(plan), rows = preferred_rows(plan)
    # Blocks of this size leave input_grad few partial sums.
    cdef Py_ssize_t large = align_up(ceil_div(plan.work.vocab, MAX_UNCOMPENSATED_SUMS), nr)
    cdef double least = -1
    if cut(plan, rows, most):
        return True
    while True:
        vocab = max(most, large) if plan.work.with_input_grad else most
        while True:
            if cut(plan, rows, vocab) and (least < 0 or cost(plan) < least):
                least, best_rows, best_vocab = cost(plan), rows, vocab
            if vocab <= nr:
                break
            vocab = most if vocab > most else align_up(vocab // 2, nr)
        if rows <= mr:
            break
        rows = align_up(rows // 2, mr)
    return least >= 0 and cut(plan, best_rows, best_vocab)


cdef void cache_blocks(Plan *plan) noexcept nogil:
    """Choose the number of blocks whose logits are cached, the first ones in the memory of weight_grad.

    Cached logits lie at the end of weight_grad, in the order of the blocks. When the gradients of a block are written, the
    logits of later blocks must begin after the rows of weight_grad that are written so far. Both bounds are linear in the
    number of the block, so the first and the last block decide.
    """
    cdef Py_ssize_t logits_bytes = logits_of_block(plan), free = max(plan.work.weight_grad_bytes - ALIGNMENT, 0)
    cdef Py_ssize_t written = max(times(plan.vocab, plan.work.weight_grad_bytes // plan.work.vocab), 1), most, left
    most = min(max(free - written, 0) // logits_bytes, max(free - logits_bytes, 0) // written)
    if plan.chunks == 1 or plan.work.buffers_weight_grad:  # otherwise the first chunk overwrites the logits of later chunks
        most += 1
    plan.blocks_in_weight_grad = min(min(most, free // logits_bytes), plan.blocks)
    left = max(plan.workspace - nbytes(plan) - ALIGNMENT, 0) // logits_bytes
    plan.cached_blocks = plan.blocks_in_weight_grad + min(plan.blocks - plan.blocks_in_weight_grad, left)


# ---- cuts of the sweeps that pack nothing ----------------------------------------------------------------------------

cdef void cut_streamed(Plan *plan) noexcept nogil:
    """Make ranges of the longer side the tasks."""
    cdef const Work *work = &plan.work
    cdef Py_ssize_t streamed = max(plan.rows, plan.vocab), resident = min(plan.rows, plan.vocab), steps, most
    cdef bint with_gradient = with_gradients(work)
    cdef double flops_of_row
    plan.sweep = VOCAB_STREAMED if plan.rows <= plan.vocab else ROWS_STREAMED
    flops_of_row = flops(plan) / streamed
    most = min(AG_TILE // resident, AG_MAX_STREAMED_STEP) // 16 * 16
    plan.step = STREAMED_BYTES // times(work.hidden, work.itemsize) // 8 * 8
    if not with_gradient or not 8 <= plan.step < STREAMED_STEP:  # streamed rows are read once, or L2 holds too few of them
        plan.step = min(max(plan.step, STREAMED_STEP), most)
    if not adds_tasks(plan) and flops_of_row * streamed > MIN_TASK_FLOPS * UNPACKED_TASKS:
        plan.step = min(plan.step, max(streamed // UNPACKED_TASKS, 1))
    plan.step = min(plan.step, max(<Py_ssize_t>(MAX_TASK_FLOPS / flops_of_row) // 8 * 8, 8))
    plan.step = align_up(ceil_div(streamed, ceil_div(streamed, plan.step)), 8)
    plan.pitch = align_up(plan.step, 16)
    flops_of_row *= plan.step
    steps = max(ceil_div(streamed, UNPACKED_TASKS * plan.step), <Py_ssize_t>(MIN_TASK_FLOPS / flops_of_row))
    if adds_tasks(plan):  # partial sums should be few compared with the rows that they are made of
        steps = max(steps, ceil_div(4 * resident, plan.step))
    most = min(MAX_STREAMED_ROWS // plan.step, <Py_ssize_t>(MAX_TASK_FLOPS / flops_of_row))
    plan.tasks = ceil_div(streamed, max(min(steps, most), 1) * plan.step)
    plan.task_size = align_up(ceil_div(streamed, plan.tasks), plan.step)
    plan.tasks = ceil_div(streamed, plan.task_size)


cdef void cut_features(Plan *plan) noexcept nogil:
    """Make ranges of the features, of all rows and vocabulary entries, the tasks."""
    cdef double flops_of_feature
    cdef Py_ssize_t least
    plan.sweep = FEATURES
    flops_of_feature = flops(plan) / plan.work.hidden
    least = max(ceil_div(plan.work.hidden, UNPACKED_TASKS), <Py_ssize_t>(MIN_TASK_FLOPS / flops_of_feature))
    plan.pitch = align_up(plan.vocab, 16)
    plan.task_size = align_up(min(least, max(<Py_ssize_t>(MAX_TASK_FLOPS / flops_of_feature), 1)), FEATURE_GRANULE)
    plan.tasks = ceil_div(plan.work.hidden, plan.task_size)


# ---- costs -----------------------------------------------------------------------------------------------------------

cdef double passes_of_logits(const Plan *plan) noexcept nogil:
    """Return how often the logits are computed, on average over the blocks."""
    return 2 - <double>plan.cached_blocks / plan.blocks if plan.cached_blocks else 1


cdef double flops(const Plan *plan) noexcept nogil:
    """Return the floating-point operations of the products, or the number that takes as long if memory is the limit.

    Memory is the limit if an element is used in fewer than 8 terms.
    """
    cdef double logits = plan.work.with_logits * passes_of_logits(plan)
    cdef double products = logits + plan.work.with_input_grad + plan.work.with_weight_grad
    cdef Py_ssize_t rows = plan.chunks * plan.rows, vocab = plan.blocks * plan.vocab
    if plan.sweep == VOCAB_STREAMED:
        rows = max(rows, 8)
    elif plan.sweep == ROWS_STREAMED:
        vocab = max(vocab, 8)
    elif plan.sweep == FEATURES:
        return 2 * products * max(rows * vocab, 4 * (rows + vocab)) * plan.work.hidden
    return 2 * products * rows * vocab * max(plan.work.hidden, 8)


cdef double cost(const Plan *plan) noexcept nogil:
    """Return the approximate cost of a packed sweep, in floating-point operations of the products."""
    cdef const Work *work = &plan.work
    cdef double x = <double>work.rows * work.hidden, w = <double>work.vocab * work.hidden
    cdef double sweeps = passes_of_logits(plan)
    # The numbers of times that X and W are packed.
    cdef double x_times = 1 if plan.chunks_outside or plan.packed_chunks == plan.chunks else plan.blocks
    cdef double w_times = plan.chunks if plan.chunks_outside else 1
    cdef double packed = x * x_times * (work.with_logits * sweeps + work.with_weight_grad)
    packed += w * w_times * (work.with_logits * sweeps + work.with_input_grad)
    cdef double added = x * plan.blocks * work.with_input_grad + w * plan.chunks * work.with_weight_grad
    return flops(plan) + (PACK_COST + ROW_COST / max(work.hidden, 1)) * packed + ADD_COST * added


# ---- memory ----------------------------------------------------------------------------------------------------------

cdef bint compensates_input_grad(const Plan *plan) noexcept nogil:
    return plan.work.with_input_grad and plan.blocks > plan.max_uncompensated


cdef bint compensates_weight_grad(const Plan *plan) noexcept nogil:
    return plan.work.with_weight_grad and plan.chunks > plan.max_uncompensated


cdef Py_ssize_t logits_of_pair(const Plan *plan) noexcept nogil:
    """Return the bytes of the cached logits of one block and one chunk, or of their exponentials and maxima."""
    cdef Py_ssize_t nr = plan.kernels.nr, acc = plan.kernels.acc_size
    # The factors are far below the limit, as rows and vocabulary entries have preferred sizes.
    return plan.rows * (plan.vocab // nr) * (nr * 2 + acc if plan.work.caches_exp else nr * acc)


cdef Py_ssize_t logits_of_block(const Plan *plan) noexcept nogil:
    """Return the bytes of the cached logits of one block and all chunks."""
    return times(logits_of_pair(plan), plan.chunks)


cdef Py_ssize_t packed_rows(const Plan *plan, Py_ssize_t n) noexcept nogil:
    """Return the bytes of n packed rows of X or W, operands of the logits."""
    return times(n * plan.kernels.element_size, elements(plan.kernels, plan.work.hidden))


cdef Py_ssize_t packed_input(const Plan *plan) noexcept nogil:
    """Return the bytes of the packed rows of a chunk of X, which are whole panels if X is the right operand."""
    return packed_rows(plan, align_up(plan.rows, plan.kernels.nr) if plan.weight_is_left else plan.rows)


cdef Py_ssize_t packed_columns(const Plan *plan, Py_ssize_t n) noexcept nogil:
    """Return the bytes of the packed columns of n rows, operands of the gradients."""
    return times(
        elements(plan.kernels, n) * plan.kernels.element_size, align_up(plan.work.hidden, plan.kernels.vector)
    )


cdef bint sums_all_of_weight_grad(const Plan *plan) noexcept nogil:
    """Return whether later chunks add to the sums of all vocabulary entries, not only to the sums of a block."""
    return plan.chunks_outside and plan.chunks > 1


cdef bint rounds_input_grad(const Plan *plan, const Problem *p) noexcept nogil:
    """Return whether the kernels of a packed sweep round input_grad, so that it needs no sums: one block has all terms."""
    return plan.blocks == 1 and is_rounded_by_kernels(&p.input_grad, plan.kernels.acc_size)


cdef bint rounds_weight_grad(const Plan *plan, const Problem *p) noexcept nogil:
    """Return whether the kernels of a packed sweep round weight_grad: one chunk has all terms."""
    return plan.chunks == 1 and is_rounded_by_kernels(&p.weight_grad, plan.kernels.acc_size)


cdef bint adds_tasks(const Plan *plan) noexcept nogil:
    """Return whether a gradient is the sum over the tasks of a sweep that packs nothing."""
    return (
        (plan.sweep == VOCAB_STREAMED and plan.work.with_input_grad)
        or (plan.sweep == ROWS_STREAMED and plan.work.with_weight_grad)
    )


cdef Py_ssize_t sums_pitch(const Plan *plan) noexcept nogil:
    """Return the accumulators from row to row of the tasks' partial sums.

    It is an odd number of cache lines, so that rows do not displace each other from L1.
    """
    cdef Py_ssize_t line = ALIGNMENT // plan.kernels.acc_size
    return (ceil_div(plan.work.hidden, line) | 1) * line


cdef void place_chunk(Arena *arena, const Plan *plan, ChunkBuffers *chunk) noexcept nogil:
    cdef Py_ssize_t acc = plan.kernels.acc_size
    chunk.row_numbers = <int64_t *>arena_alloc(arena, plan.rows * sizeof(int64_t))
    chunk.target = <int64_t *>arena_alloc(arena, plan.rows * sizeof(int64_t))
    chunk.grad = arena_alloc(arena, plan.rows * acc)
    chunk.max = arena_alloc(arena, plan.rows * acc)
    chunk.sum = arena_alloc(arena, plan.rows * acc)


cdef void place_panel_statistics(Arena *arena, const Plan *plan, Buffers *at, Py_ssize_t count) noexcept nogil:
    """Place what a loss computes of each row and panel beside maximum and sum."""
    if plan.work.with_rest:
        at.panel_rest = arena_alloc(arena, times(count, plan.kernels.acc_size))
    if plan.work.with_more:
        at.panel_more = <ag_more *>arena_alloc(arena, times(count, sizeof(ag_more)))


cdef void place_unpacked(Arena *arena, const Plan *plan, Buffers *at) noexcept nogil:
    """Place the buffers of a sweep that packs nothing."""
    cdef Py_ssize_t acc = plan.kernels.acc_size, rows = plan.rows
    cdef Py_ssize_t panel = align_up(rows, plan.kernels.mr) * acc, tile = rows * plan.pitch * acc, lists
    if plan.sweep != ROWS_STREAMED:  # there, every task selects its own rows
        place_chunk(arena, plan, &at.chunk)
    if plan.sweep == VOCAB_STREAMED and plan.work.with_statistics and not plan.work.top_k:
        at.panel_max = arena_alloc(arena, times(plan.tasks, panel))
        at.panel_sum = arena_alloc(arena, times(plan.tasks, panel))
        place_panel_statistics(arena, plan, at, times(plan.tasks, panel // acc))
    if plan.sweep == VOCAB_STREAMED and plan.caches_logits:
        at.logits = arena_alloc(arena, times(ceil_div(plan.vocab, plan.step), tile))
    if plan.work.top_k:
        lists = times(plan.tasks, rows * plan.work.top_k)
        at.lists.values = arena_alloc(arena, times(lists, acc))
        at.lists.indices = <int64_t *>arena_alloc(arena, times(lists, sizeof(int64_t)))
        at.lists.rest = <ag_sum *>arena_alloc(arena, times(plan.tasks, rows * sizeof(ag_sum)))
        at.lists.floors = arena_alloc(arena, rows * acc)
        at.complete_lists = <uint8_t *>arena_alloc(arena, plan.tasks)
    if plan.sweep == FEATURES and plan.work.with_logits:
        at.logits = arena_alloc(arena, times(plan.tasks, tile))
    if plan.sweep == FEATURES:
        at.p = arena_alloc(arena, tile)
    if plan.sweep == ROWS_STREAMED and plan.work.with_bias_grad:
        at.bias_sums = <double *>arena_alloc(arena, times(times(plan.tasks, plan.vocab), sizeof(double)))
    if adds_tasks(plan):
        rows = plan.vocab if plan.sweep == ROWS_STREAMED else plan.rows
        at.partial_sums = arena_alloc(arena, times(times(plan.tasks, rows), sums_pitch(plan) * acc))


cdef void place_packed(Arena *arena, const Plan *plan, Buffers *at) noexcept nogil:
    """Place the buffers of the packed sweep."""
    cdef const Work *work = &plan.work
    cdef Py_ssize_t acc = plan.kernels.acc_size, panels = plan.vocab // plan.kernels.nr
    cdef Py_ssize_t tile = plan.rows * plan.vocab  # far below the limit, as both have preferred sizes
    cdef Py_ssize_t p_bytes = tile * plan.kernels.element_size // plan.kernels.pair
    cdef Py_ssize_t sums = times(work.hidden, acc), entries = plan.vocab
    place_chunk(arena, plan, &at.chunk)
    if work.with_logits:
        # Vector kernels read left operands in place, or gather them.
        if plan.weight_is_left or plan.kernels.granule > 1 or work.vocab > GATHERED_PANELS * plan.kernels.nr:
            at.x_rows = arena_alloc(arena, times(plan.packed_chunks, packed_input(plan)))
        if not plan.weight_is_left or plan.kernels.granule > 1:
            at.w_rows = arena_alloc(arena, packed_rows(plan, plan.vocab))
    if work.with_weight_grad:
        at.x_columns = arena_alloc(arena, times(plan.packed_chunks, packed_columns(plan, plan.rows)))
    if work.with_input_grad:
        at.w_columns = arena_alloc(arena, packed_columns(plan, plan.vocab))
    if work.with_statistics:
        at.panel_max = arena_alloc(arena, panels * plan.rows * acc)
        at.panel_sum = arena_alloc(arena, panels * plan.rows * acc)
        place_panel_statistics(arena, plan, at, panels * plan.rows)
    if with_gradients(work):
        at.p = arena_alloc(arena, p_bytes)
        if plan.kernels.pair > 1:
            at.p_pairs = arena_alloc(arena, p_bytes)
        at.skipped = <uint8_t *>arena_alloc(arena, panels * (plan.rows // plan.kernels.mr))
    if plan.caches_logits:
        at.logits = arena_alloc(arena, times(logits_of_pair(plan), plan.blocks))
    elif work.top_k:
        at.logits = arena_alloc(arena, tile * acc)
    elif plan.cached_blocks:
        at.logits = arena_alloc(arena, times(logits_of_block(plan), plan.cached_blocks - plan.blocks_in_weight_grad))
    if compensates_input_grad(plan):
        at.input_compensation = arena_alloc(arena, times(plan.rows * (1 if plan.chunks_outside else plan.chunks), sums))
    if sums_all_of_weight_grad(plan):
        entries *= plan.blocks
    if work.buffers_weight_grad:
        at.weight_sums = arena_alloc(arena, times(entries, sums))
    if compensates_weight_grad(plan):
        at.weight_compensation = arena_alloc(arena, times(entries, sums))


cdef Py_ssize_t layout(const Plan *plan, char *base, Buffers *at) noexcept nogil:
    """Place all buffers in memory that begins at `base`, and return their bytes. NULL only measures the bytes."""
    cdef Arena arena
    arena.base, arena.used = base, 0
    memset(at, 0, sizeof(Buffers))
    at.chunk_starts = <Py_ssize_t *>arena_alloc(&arena, (plan.chunks + 1) * sizeof(Py_ssize_t))
    if plan.sweep == PACKED:
        place_packed(&arena, plan, at)
    else:
        place_unpacked(&arena, plan, at)
    return arena.used


cdef Py_ssize_t nbytes(const Plan *plan) noexcept nogil:
    """Return the bytes of a workspace for a plan, at any alignment."""
    cdef Buffers ignored
    return layout(plan, NULL, &ignored) + ALIGNMENT
