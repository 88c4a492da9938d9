"""The packed sweep: chunks of rows and blocks of the vocabulary are packed and multiplied.

For each pair of a chunk and a block, tiles of logits are computed and turned into statistics, or into tiles of P that both
other products read. The state of the sweep is the selected pair. Every phase has a separate description, on the stack of the
calling thread.
"""

from libc.stdint cimport int64_t

from ascend_grad cimport _tasks
from ascend_grad._kernels cimport AG_FLOAT32, ag_convert, ag_dtype, ag_itemsize, ag_variant
from ascend_grad._linear_grid cimport Grid, Part, grid_of, part_of
from ascend_grad._linear_kernels cimport (
    AG_FROM_LOGITS,
    AG_FROM_PRODUCT,
    AG_FROM_SOFTMAX,
    AG_TO_GRADIENT,
    AG_TO_MAX_SUM,
    AG_TO_TOP_K,
    ag_linear_block,
    ag_linear_kernels,
    ag_linear_result,
    ag_linear_source,
    ag_matrix,
    ag_rows,
)
from ascend_grad._linear_packing cimport Operand, pack
from ascend_grad._linear_plan cimport (
    Plan,
    logits_of_block,
    logits_of_pair,
    elements,
    packed_columns,
    packed_input,
    rounds_input_grad,
    rounds_weight_grad,
    sums_all_of_weight_grad,
)
from ascend_grad._linear_problem cimport SEGMENT, convert_segment, has_dense_rows
from ascend_grad._linear_results cimport finish_statistics
from ascend_grad._linear_run cimport new_block, rows_of, select_chunk
from ascend_grad._linear_top_k cimport finish_top_k, top_k_of
from ascend_grad._memory cimport ALIGNMENT, align_up, aligned, ceil_div

# Most columns of the logits for which a matrix unit reads its left operand in place. Tiles of rows that are not aligned load
# slower than packed ones, which matters if they are loaded often. Measured.
cdef Py_ssize_t MAX_UNIT_COLUMNS = 256
# Rows of a task that merges statistics: at most, and a multiple of a vector's lanes.
cdef Py_ssize_t MERGED_ROWS = 1024
cdef Py_ssize_t MERGED_TOGETHER = 32
# Tasks of each thread that merge statistics, if there are enough rows.
cdef Py_ssize_t MERGES = 4
# Rows of a task that merges lists of the largest logits.
cdef Py_ssize_t LISTS_PER_TASK = 32
# Most rows of a task that converts sums.
cdef Py_ssize_t CONVERTED_ROWS = 64
# Most elements of a task that converts sums, so that signals are checked in time.
cdef Py_ssize_t CONVERTED_ELEMENTS = 1 << 20


ctypedef struct Packed:
    # The selected chunk and block.
    const Run *run
    ag_linear_block block
    Py_ssize_t chunk                  # number of the selected chunk; -1: none
    char *x_rows                      # memory for the packed rows of the chunk; NULL: they are never packed
    bint packs_left                   # whether the left operand of the logits is packed, and not read in place


cdef void run_packed(const Run *run) noexcept nogil:
    """Run a plan of packed chunks and blocks."""
    cdef Packed s
    s.run, s.block, s.chunk, s.x_rows = run, new_block(run), -1, NULL
    s.block.packed.p, s.block.packed.p_pairs, s.block.packed.skipped = run.at.p, run.at.p_pairs, run.at.skipped
    s.block.packed.panel_max, s.block.packed.panel_sum = run.at.panel_max, run.at.panel_sum
    s.block.packed.panel_rest, s.block.packed.panel_more = run.at.panel_rest, run.at.panel_more
    s.block.packed.w_columns, s.block.packed.weight_is_left = run.at.w_columns, run.plan.weight_is_left
    s.block.packed.caches_exp = run.plan.work.caches_exp
    place_sums(&s)
    if run.plan.caches_logits:
        run_with_logits_of_chunks(&s)
    elif run.plan.work.top_k:
        run_top_k(&s)
    elif run.plan.cached_blocks:
        run_with_logits_of_blocks(&s)
    elif run.plan.work.with_statistics:
        run_statistics(&s)
    else:
        run_gradients(&s)
    if run.plan.work.with_input_grad and run.input_sums != NULL and not s.block.input_grad.rounded_to:
        convert_sums(run, &run.p.input_grad, 0, run.p.rows.total, run.input_sums, run.p.hidden * run.plan.kernels.acc_size)


# ---- orders ----------------------------------------------------------------------------------------------------------

cdef void run_statistics(Packed *s) noexcept nogil:
    """Compute the maximum, the sum of exponentials and the target's logit of every active row."""
    cdef Py_ssize_t b, c
    for b in range(s.run.plan.blocks):
        for c in range(s.run.plan.chunks):
            select_pair(s, b, c)
            pack_pair(s, b, c, True, False)
            add_statistics(s, AG_TO_MAX_SUM)
    finish_statistics(s.run, 0, s.run.p.rows.total)


cdef void run_top_k(Packed *s) noexcept nogil:
    """Compute the largest logits of every row, and their log-probabilities."""
    cdef Py_ssize_t b, c
    s.block.top_k = top_k_of(s.run)
    for b in range(s.run.plan.blocks):
        for c in range(s.run.plan.chunks):
            select_pair(s, b, c)
            pack_pair(s, b, c, True, False)
            add_statistics(s, AG_TO_TOP_K)
    finish_top_k(s.run)


cdef void run_gradients(Packed *s) noexcept nogil:
    """Compute gradients from the caller's softmax, or from logits that are computed again."""
    cdef const Plan *plan = s.run.plan
    cdef ag_linear_source source = AG_FROM_PRODUCT if plan.work.with_logits else AG_FROM_SOFTMAX
    cdef Py_ssize_t outer, inner, b, c
    for outer in range(plan.chunks if plan.chunks_outside else plan.blocks):
        for inner in range(plan.blocks if plan.chunks_outside else plan.chunks):
            b, c = (inner, outer) if plan.chunks_outside else (outer, inner)
            select_pair(s, b, c)
            pack_pair(s, b, c, plan.work.with_logits, True)
            add_gradients(s, b, c, source)


cdef void run_with_logits_of_blocks(Packed *s) noexcept nogil:
    """Compute statistics, then gradients, of all blocks and chunks. The logits of the first blocks are cached."""
    cdef Py_ssize_t b, c
    cdef bint is_cached
    for b in range(s.run.plan.blocks):
        s.block.packed.caches_logits = b < s.run.plan.cached_blocks
        for c in range(s.run.plan.chunks):
            select_pair(s, b, c)
            pack_pair(s, b, c, True, False)
            add_statistics(s, AG_TO_MAX_SUM)
    finish_statistics(s.run, 0, s.run.p.rows.total)
    s.chunk = -1  # the chunk is selected again, to read its statistics
    for b in range(s.run.plan.blocks):
        is_cached = b < s.run.plan.cached_blocks
        for c in range(s.run.plan.chunks):
            select_pair(s, b, c)
            pack_pair(s, b, c, not is_cached, True)
            add_gradients(s, b, c, AG_FROM_LOGITS if is_cached else AG_FROM_PRODUCT)


cdef void run_with_logits_of_chunks(Packed *s) noexcept nogil:
    """Compute statistics and gradients of a chunk before the next one. All logits of the chunk are cached."""
    cdef const Plan *plan = s.run.plan
    cdef Py_ssize_t b, c
    cdef bint is_one_block = plan.blocks == 1
    s.block.packed.caches_logits = True
    for c in range(plan.chunks):
        for b in range(plan.blocks):
            select_pair(s, b, c)
            pack_input(s, b == 0, plan.work.with_weight_grad and b == 0)
            pack_weight(s, True, plan.work.with_input_grad and is_one_block)
            add_statistics(s, AG_TO_MAX_SUM)
        finish_statistics(s.run, s.run.at.chunk_starts[c], s.run.at.chunk_starts[c + 1])
        s.chunk = -1  # the chunk is selected again, to read its statistics
        for b in range(plan.blocks):
            select_pair(s, b, c)
            pack_weight(s, False, plan.work.with_input_grad and not is_one_block)
            add_gradients(s, b, c, AG_FROM_LOGITS)


# ---- the selected pair -----------------------------------------------------------------------------------------------

cdef void select_pair(Packed *s, Py_ssize_t b, Py_ssize_t c) noexcept nogil:
    """Select block b and chunk c."""
    cdef const Run *run = s.run
    cdef const Plan *plan = run.plan
    cdef Py_ssize_t place = c if plan.packed_chunks > 1 else 0
    s.block.vocab.start = b * plan.vocab
    s.block.vocab.size = min(plan.vocab, plan.work.vocab - b * plan.vocab)
    s.block.packed.logits = cached_logits(run, b, c)
    if run.at.x_rows != NULL:
        s.x_rows = run.at.x_rows + place * packed_input(plan)
    if run.at.x_columns != NULL:
        s.block.packed.x_columns = run.at.x_columns + place * packed_columns(plan, plan.rows)
    if c != s.chunk and not run.team.is_cancelled:
        select_chunk(run, c, &s.block.chunk)
        s.chunk = c
    select_operands(s)


cdef void select_operands(Packed *s) noexcept nogil:
    """Set the operands of the logits of the selected pair."""
    cdef const Run *run = s.run
    cdef const ag_linear_kernels *kernels = run.plan.kernels
    cdef ag_rows *left = &s.block.packed.left
    cdef char *packed_left
    if run.plan.weight_is_left:
        left[0] = rows_of(&run.p.weight, NULL, s.block.vocab.start, s.block.vocab.size)
        packed_left, s.block.packed.right = run.at.w_rows, s.x_rows
    else:
        left[0] = rows_of(&run.p.input, s.block.chunk.row_numbers, 0, s.block.chunk.rows)
        packed_left, s.block.packed.right = s.x_rows, run.at.w_rows
    s.packs_left = packed_left != NULL and not is_in_place(kernels, left)
    if kernels.granule > 1:
        if not run.plan.weight_is_left and run.p.vocab > MAX_UNIT_COLUMNS:
            s.packs_left = True
        s.block.packed.left_tiles = packed_left if s.packs_left else NULL
        if left.numbers != NULL and left.count:
            left.start, left.numbers = left.numbers[0], NULL
    elif s.packs_left:
        left.numbers, left.matrix.data, left.matrix.swapped = NULL, packed_left, False
        left.matrix.step = kernels.element_size // kernels.pair
        left.matrix.row_stride = elements(kernels, run.p.hidden) * kernels.element_size
        if left.matrix.step == 4:
            left.matrix.dtype = AG_FLOAT32


cdef bint is_in_place(const ag_linear_kernels *kernels, const ag_rows *left) noexcept nogil:
    """Return whether kernels read the rows of a left operand where they lie."""
    cdef int itemsize = ag_itemsize[<int>left.matrix.dtype]
    cdef int64_t first = left.start
    if itemsize != kernels.element_size // kernels.pair or left.matrix.step != itemsize or left.matrix.swapped:
        return False
    if kernels.granule == 1:
        return True
    if left.numbers != NULL and left.count:
        first = left.numbers[0]
        if left.numbers[left.count - 1] - first != left.count - 1:
            return False
    return kernels.reads_runs and first + left.count >= kernels.mr


cdef char *cached_logits(const Run *run, Py_ssize_t b, Py_ssize_t c) noexcept nogil:
    """Return the address of the cached logits of a pair, or NULL if they are not cached."""
    cdef const Plan *plan = run.plan
    cdef Py_ssize_t of_block, behind = b - plan.blocks_in_weight_grad
    cdef char *first
    if plan.work.top_k:  # of the pair alone, and some of them
        return run.at.logits
    if plan.caches_logits:
        return run.at.logits + logits_of_pair(plan) * b
    if b >= plan.cached_blocks:
        return NULL
    of_block = logits_of_block(plan)
    if behind < 0:  # at the end of weight_grad
        first = aligned(run.p.weight_grad.data + plan.work.weight_grad_bytes - ALIGNMENT + 1)
    else:
        first = run.at.logits
    return first + behind * of_block + of_block // plan.chunks * c


cdef void pack_pair(Packed *s, Py_ssize_t b, Py_ssize_t c, bint logits, bint gradients) noexcept nogil:
    """Pack the operands of block b and chunk c, unless they are packed already."""
    cdef const Plan *plan = s.run.plan
    if c == 0 or (plan.chunks_outside and plan.blocks > 1):
        pack_weight(s, logits, gradients and plan.work.with_input_grad)
    if b == 0 or (plan.packed_chunks < plan.chunks and not plan.chunks_outside):
        pack_input(s, logits, gradients and plan.work.with_weight_grad)


cdef void pack_weight(Packed *s, bint rows, bint columns) noexcept nogil:
    """Pack rows or columns, or both, of the selected block of the weight."""
    cdef Operand operand
    operand.matrix, operand.row_numbers, operand.is_left = s.run.p.weight, NULL, s.run.plan.weight_is_left
    operand.start, operand.count, operand.hidden = s.block.vocab.start, s.block.vocab.size, s.block.hidden
    operand.rows = s.run.at.w_rows if rows and (s.packs_left or not operand.is_left) else NULL
    operand.columns = s.block.packed.w_columns if columns else NULL
    pack(s.run.plan.kernels, &operand, s.run.team)


cdef void pack_input(Packed *s, bint rows, bint columns) noexcept nogil:
    """Pack rows or columns, or both, of the selected chunk of the input."""
    cdef Operand operand
    operand.matrix, operand.row_numbers = s.run.p.input, s.block.chunk.row_numbers
    operand.is_left = not s.run.plan.weight_is_left
    operand.start, operand.count, operand.hidden = 0, s.block.chunk.rows, s.block.hidden
    operand.rows = s.x_rows if rows and (s.packs_left or not operand.is_left) else NULL
    operand.columns = s.block.packed.x_columns if columns else NULL
    pack(s.run.plan.kernels, &operand, s.run.team)


# ---- tiles of logits -------------------------------------------------------------------------------------------------

ctypedef struct Tiles:
    # The phase that computes tiles of logits, or loads them, and runs their epilogue.
    const ag_linear_kernels *kernels
    const ag_linear_block *block
    ag_linear_source source
    ag_linear_result result
    Grid grid


cdef void compute_tiles(const void *context, Py_ssize_t task, int thread) noexcept nogil:
    cdef const Tiles *tiles = <const Tiles *>context
    cdef Part part = part_of(&tiles.grid, task)
    tiles.kernels.tiles(
        tiles.block, tiles.source, tiles.result, part.panel, part.panel_end, part.tile, part.tile_end
    )


cdef void run_tiles(Packed *s, ag_linear_source source, ag_linear_result result) noexcept nogil:
    """Compute or load the tiles of the selected pair, and turn them into statistics or into P."""
    cdef Tiles tiles
    cdef Py_ssize_t multiple = 1
    tiles.kernels, tiles.block, tiles.source, tiles.result = s.run.plan.kernels, &s.block, source, result
    if source == AG_FROM_PRODUCT and s.block.packed.weight_is_left:  # tasks begin at panels of X
        multiple = tiles.kernels.nr // tiles.kernels.mr
    tiles.grid = grid_of(
        tiles.kernels, s.block.vocab.size, s.block.chunk.rows, s.block.hidden, s.run.team.team.size, multiple
    )
    # A thread begins with the panels that it has packed.
    _tasks.run_phase(s.run.team, compute_tiles, &tiles, tiles.grid.tasks, True)


ctypedef struct Merge:
    # The phase that merges results of panels into results of rows.
    void (*kernel)(const ag_linear_block *block, Py_ssize_t row, Py_ssize_t row_end) noexcept nogil
    const ag_linear_block *block
    Py_ssize_t rows_per_task


cdef void merge_rows(const void *context, Py_ssize_t task, int thread) noexcept nogil:
    cdef const Merge *merge = <const Merge *>context
    cdef Py_ssize_t row = task * merge.rows_per_task
    merge.kernel(merge.block, row, min(row + merge.rows_per_task, merge.block.chunk.rows))


cdef Py_ssize_t merged_rows(const Packed *s) noexcept nogil:
    """Return the rows of a task that merges statistics."""
    cdef int threads = s.run.team.team.size
    cdef Py_ssize_t rows = ceil_div(s.block.chunk.rows, MERGES * threads) if threads > 1 else MERGED_ROWS
    return min(align_up(max(rows, <Py_ssize_t>1), MERGED_TOGETHER), MERGED_ROWS)


cdef void add_statistics(Packed *s, ag_linear_result result) noexcept nogil:
    """Merge the selected pair, which is packed, into the statistics or the lists of its rows."""
    cdef Merge merge
    run_tiles(s, AG_FROM_PRODUCT, result)
    merge.block = &s.block
    if result == AG_TO_TOP_K:
        merge.kernel, merge.rows_per_task = s.run.plan.kernels.merge_top_k, LISTS_PER_TASK
    else:
        merge.kernel, merge.rows_per_task = s.run.plan.kernels.merge_max_sum, merged_rows(s)
    _tasks.run_phase(s.run.team, merge_rows, &merge, ceil_div(s.block.chunk.rows, merge.rows_per_task), False)


# ---- gradients -------------------------------------------------------------------------------------------------------

ctypedef struct Products:
    # The phase that multiplies P: first the tasks of input_grad, then the tasks of weight_grad.
    const ag_linear_kernels *kernels
    const ag_linear_block *block
    Grid input_grad, weight_grad


cdef void multiply(const void *context, Py_ssize_t task, int thread) noexcept nogil:
    cdef const Products *products = <const Products *>context
    cdef Part part
    if task < products.input_grad.tasks:
        part = part_of(&products.input_grad, task)
        products.kernels.input_grad(products.block, part.panel, part.panel_end, part.tile, part.tile_end)
    else:
        part = part_of(&products.weight_grad, task - products.input_grad.tasks)
        products.kernels.weight_grad(products.block, part.panel, part.panel_end, part.tile, part.tile_end)


cdef void run_products(Packed *s) noexcept nogil:
    """Multiply P of the selected pair with the weight, and with the input."""
    cdef Products products
    cdef const ag_linear_block *block = &s.block
    products.kernels, products.block = s.run.plan.kernels, block
    products.input_grad.tasks = products.weight_grad.tasks = 0
    if s.run.plan.work.with_input_grad:
        products.input_grad = grid_of(
            products.kernels, block.hidden, block.chunk.rows, block.vocab.size, s.run.team.team.size, 1
        )
    if s.run.plan.work.with_weight_grad:
        products.weight_grad = grid_of(
            products.kernels, block.hidden, block.vocab.size, block.chunk.rows, s.run.team.team.size, 1
        )
    # In partitions, so that many threads do not wait for the number of the next task.
    _tasks.run_phase(
        s.run.team, multiply, &products, products.input_grad.tasks + products.weight_grad.tasks, True
    )


ctypedef struct ColumnSums:
    # The phase that adds the columns of P to the gradient with respect to the bias: a task for each panel.
    const ag_linear_kernels *kernels
    const ag_linear_block *block
    double *sums


cdef void sum_panel(const void *context, Py_ssize_t task, int thread) noexcept nogil:
    cdef const ColumnSums *x = <const ColumnSums *>context
    x.kernels.sum_p(x.block, task, task + 1, x.sums)


cdef void sum_columns(Packed *s) noexcept nogil:
    """Add the columns of P of the selected pair to the sums of its vocabulary entries."""
    cdef ColumnSums x
    x.kernels, x.block, x.sums = s.run.plan.kernels, &s.block, s.run.p.bias_sums + s.block.vocab.start
    _tasks.run_phase(s.run.team, sum_panel, &x, ceil_div(s.block.vocab.size, x.kernels.nr), False)


cdef void place_sums(Packed *s) noexcept nogil:
    """Set the row strides of the sums of both gradients, and the address of the sums of input_grad."""
    cdef const Run *run = s.run
    cdef Py_ssize_t row_bytes = run.p.hidden * run.plan.kernels.acc_size
    s.block.input_grad.compensation_stride = s.block.weight_grad.compensation_stride = row_bytes
    if run.input_sums != NULL and not rounds_input_grad(run.plan, run.p):
        s.block.input_grad.data, s.block.input_grad.row_stride = run.input_sums, row_bytes
    else:
        s.block.input_grad.data, s.block.input_grad.row_stride = run.p.input_grad.data, run.p.input_grad.row_stride
        s.block.input_grad.rounded_to = run.p.input_grad.dtype if rounds_input_grad(run.plan, run.p) else <ag_dtype>0
    s.block.weight_grad.row_stride = row_bytes
    if not buffers_weight_grad(run):
        s.block.weight_grad.row_stride = run.p.weight_grad.row_stride
        s.block.weight_grad.rounded_to = run.p.weight_grad.dtype if rounds_weight_grad(run.plan, run.p) else <ag_dtype>0


cdef bint buffers_weight_grad(const Run *run) noexcept nogil:
    """Return whether weight_grad is summed in the workspace, and converted later."""
    return run.plan.work.buffers_weight_grad and not rounds_weight_grad(run.plan, run.p)


cdef void select_sums(Packed *s, Py_ssize_t b, Py_ssize_t c) noexcept nogil:
    """Set the addresses to which the products of block b and chunk c are added."""
    cdef const Run *run = s.run
    cdef const Plan *plan = run.plan
    cdef ag_linear_block *block = &s.block
    cdef Py_ssize_t row = 0 if plan.chunks_outside else c * plan.rows
    cdef Py_ssize_t entry = block.vocab.start if sums_all_of_weight_grad(plan) else 0
    block.input_grad.add, block.input_grad.last = b > 0, b == plan.blocks - 1
    block.weight_grad.add, block.weight_grad.last = c > 0, c == plan.chunks - 1
    if run.at.input_compensation != NULL:
        block.input_grad.compensation = run.at.input_compensation + row * block.input_grad.compensation_stride
    if run.at.weight_compensation != NULL:
        block.weight_grad.compensation = run.at.weight_compensation + entry * block.weight_grad.compensation_stride
    if buffers_weight_grad(run):
        block.weight_grad.data = run.at.weight_sums + entry * block.weight_grad.row_stride
    else:
        block.weight_grad.data = run.p.weight_grad.data + block.vocab.start * block.weight_grad.row_stride


cdef void add_gradients(Packed *s, Py_ssize_t b, Py_ssize_t c, ag_linear_source source) noexcept nogil:
    """Add the products of block b and chunk c, which are selected and packed, to the gradients."""
    cdef const Plan *plan = s.run.plan
    run_tiles(s, source, AG_TO_GRADIENT)
    if plan.work.with_bias_grad:
        sum_columns(s)
    select_sums(s, b, c)
    run_products(s)
    if plan.work.with_weight_grad and buffers_weight_grad(s.run) and s.block.weight_grad.last:
        convert_sums(
            s.run, &s.run.p.weight_grad, s.block.vocab.start, s.block.vocab.size, s.block.weight_grad.data,
            s.block.weight_grad.row_stride
        )


# ---- conversion ------------------------------------------------------------------------------------------------------

ctypedef struct Conversion:
    # The phase that converts sums to rows of a result of any dtype and layout.
    ag_variant variant
    int acc_size
    ag_matrix to
    const char *source
    Py_ssize_t source_stride
    Py_ssize_t rows, n
    Py_ssize_t step                   # rows of a task


cdef void convert_rows(const void *context, Py_ssize_t task, int thread) noexcept nogil:
    cdef const Conversion *x = <const Conversion *>context
    cdef Py_ssize_t first = task * x.step, last = min(first + x.step, x.rows), row, begin
    cdef const char *source = x.source + first * x.source_stride
    cdef bint is_converted = ag_itemsize[<int>x.to.dtype] != x.acc_size
    if is_converted and has_dense_rows(&x.to, x.n) and x.source_stride == x.n * x.acc_size:
        # All rows are converted at once, as they may be short.
        ag_convert(
            x.variant, x.acc_size == 8, source, x.to.dtype, x.to.data + first * x.to.row_stride, (last - first) * x.n
        )
        return
    for row in range(first, last):
        begin = 0
        while begin < x.n:
            convert_segment(
                x.variant, x.acc_size, x.source + row * x.source_stride + begin * x.acc_size, &x.to, row, begin,
                min(<Py_ssize_t>SEGMENT, x.n - begin)
            )
            begin += SEGMENT


cdef void convert_sums(
    const Run *run, const ag_matrix *out, Py_ssize_t first, Py_ssize_t rows, const char *sums, Py_ssize_t stride
) noexcept nogil:
    """Convert rows of accumulators to rows [first, first + rows) of a result."""
    cdef Conversion x
    x.variant, x.acc_size, x.to = run.variant, run.plan.kernels.acc_size, out[0]
    x.to.data += first * out.row_stride
    x.source, x.source_stride, x.rows, x.n = sums, stride, rows, run.p.hidden
    x.step = max(1, min(CONVERTED_ROWS, CONVERTED_ELEMENTS // max(x.n, 1)))
    _tasks.run_phase(run.team, convert_rows, &x, ceil_div(rows, x.step), False)
