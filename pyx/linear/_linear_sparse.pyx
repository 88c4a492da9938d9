"""The loss of a linear layer whose input is sparse, and the gradients of weight and bias, without Python.

The weight is transposed once. Rows are then computed in blocks: their logits, from the nonzeros (`sparse.h`); losses,
outputs and P, by the phases of `cross_entropy`, which overwrite the logits; what P and the nonzeros add to the gradient of
the weight, transposed as well. Sums of many rows in float32 are added to totals in float64 from time to time, as their
rounding errors would add up.

If features have several nonzeros each, the rows are cut into parts. The number of parts does not depend on the threads. One
thread computes a part and adds to the sums of that part alone. The sums of all parts are merged in the order of the parts.
If there is only one part, the threads share every block, and each thread adds to a range of the features, so that the order
of a sum is that of the rows.

The product of the Hessian and a vector takes the same steps. The vector is transposed like the weight, the changes of the
logits along it are computed like the logits, and P is the product of the Hessian with respect to the logits and the changes.

The caller owns the memory. It fills in the first fields of a `SparseLoss`, calls `fits_memory`, `are_starts_valid` and
`prepare_sparse`, allocates `sparse_workspace_size` bytes, calls `place_sparse_workspace` and `run_sparse`.
"""

from libc.stdint cimport int32_t, int64_t
from libc.string cimport memset

from ascend_grad cimport _cpu, _tasks, _threads
from ascend_grad._cross_entropy_rows cimport CrossEntropy, scale_of_all
from ascend_grad._cross_entropy_schedule cimport (
    loss_workspace_size,
    place_loss_workspace,
    plan_of,
    prepare_loss,
    set_factors,
)
from ascend_grad._cross_entropy_tasks cimport run_phases
from ascend_grad._kernels cimport (
    AG_FLOAT64,
    AG_SUM_LANES,
    ag_dim,
    ag_fpenv,
    ag_fpenv_enter,
    ag_fpenv_leave,
    ag_itemsize,
    ag_sum_add_sum,
    ag_sums_total_of_all,
)
from ascend_grad._linear_kernels cimport AG_SPARSE_OUTSIDE, AG_SPARSE_UNSORTED, ag_sparse_task
from ascend_grad._linear_plan cimport kernels_for
from ascend_grad._linear_problem cimport Problem as LinearProblem
from ascend_grad._linear_problem cimport VECTOR_PADDING, bound_transform, largest_bias, round_bias
from ascend_grad._loss_options cimport (
    REDUCTION_NONE,
    LossOptions,
    is_dense,
    is_ignored,
    set_denominators,
    target_at,
    write_reduced,
)
from ascend_grad._memory cimport ALIGNMENT, SIZE_LIMIT, Arena, arena_alloc, ceil_div
from ascend_grad._rowwise_plan cimport B, Problem, describe
from ascend_grad._tasks cimport Team
from ascend_grad._views cimport copy_3d, View

cdef enum:
    BLOCK_BYTES = 1 << 20             # bytes of the nonzeros and the logits of a block, about, which then stay in L2
    LEAST_BLOCK = 64                  # rows of the smallest block, of which all blocks but the last have a multiple
    PART_BLOCK_BYTES = 1 << 17        # likewise of a block that one thread computes
    MOST_PARTS = 8                    # most parts of the rows
    PART_ROWS = 256                   # least rows of a part
    PART_BYTES = 12 << 20             # most bytes of the sums and totals of all parts, whose memory is kept for later calls
    LOSS_BYTES = 3 << 20              # what the loss of a small block takes at most, in the least workspace
    FEATURES = 512                    # features that are transposed together
    BIAS_ROWS = 1 << 10               # rows whose P is added up together
    FOLD_ROWS = 512                   # least rows whose sums in float32 are added to totals together
    FOLD_NONZEROS = 4                 # least nonzeros of a feature, on average, among these rows
    SAMPLES = 1 << 14                 # nonzeros whose features decide how features are cut
    BINS = 1 << 10                    # ranges of features that are counted
    MERGED = 256                      # sums that are merged together

# Nanoseconds of one thread, as measured, for the number of threads.
cdef double NS_OF_NONZERO = 1.5           # and once more for each cache line of classes
cdef double NS_OF_LOGIT = 1.0
cdef double NS_OF_WEIGHT = 0.5
# Nanoseconds that one byte of the sums of a part takes, and the most of the time of the nonzeros that all of them may take.
cdef double NS_OF_PART = 0.1
cdef double MOST_OF_PARTS = 1 / 6.0

# Plans ask whether a loss has a vector, and never read it.
cdef char any_address = 0


# ---- structure -------------------------------------------------------------------------------------------------------

cdef extern from *:
    """
    static void ag_set_flag(int *flag) { __atomic_store_n(flag, 1, __ATOMIC_RELAXED); }
    """
    void set_flag "ag_set_flag"(int *flag) noexcept nogil


cdef bint are_starts_valid(const SparseLoss *s) noexcept nogil:
    """Return whether the nonzeros of the rows follow one another, within those that there are."""
    cdef const int64_t *starts = s.x.starts
    cdef bint descends = starts[0] != 0 or starts[s.rows] > s.nonzeros
    cdef Py_ssize_t i
    for i in range(s.rows):
        descends = descends | (starts[i + 1] < starts[i])
    return not descends


cdef bint check_rows(SparseLoss *s, Py_ssize_t row, Py_ssize_t row_end) noexcept nogil:
    """Return whether all features of some rows exist, and find out whether they are sorted. Threads share the answers."""
    cdef int flags = s.kernels.sparse_check(&s.x, row, row_end)
    if flags & AG_SPARSE_UNSORTED:
        set_flag(&s.x.is_unsorted)
    if flags & AG_SPARSE_OUTSIDE:
        set_flag(&s.is_outside)
    return not flags & AG_SPARSE_OUTSIDE


# ---- workspace -------------------------------------------------------------------------------------------------------

cdef bint fits_memory(const SparseLoss *s) noexcept nogil:
    """Return whether the sizes of all buffers can be computed. Arrays without memory may have any shape."""
    cdef Py_ssize_t most = SIZE_LIMIT // (8 * sizeof(double)), vocab = s.weight.shape[0]
    if vocab > most // LEAST_BLOCK:
        return False
    return s.x.features <= most // kernels_for(s.dtype).sparse_pitch(vocab)


cdef Py_ssize_t transposed_bytes(const SparseLoss *s) noexcept nogil:
    return (s.x.features * s.pitch + VECTOR_PADDING) * s.itemsize


cdef Py_ssize_t logits_bytes(const SparseLoss *s, Py_ssize_t rows) noexcept nogil:
    return (rows * s.weight.shape[0] + VECTOR_PADDING) * s.itemsize


cdef Py_ssize_t fold_rows(
    ag_dtype dtype, Py_ssize_t rows, Py_ssize_t hidden, Py_ssize_t nonzeros, bint with_weight_grad
) noexcept nogil:
    """Return the rows after which sums are added to totals, or 0 if there are no totals."""
    cdef double least = max(<double>FOLD_ROWS, <double>FOLD_NONZEROS * hidden * rows / max(nonzeros, <Py_ssize_t>1))
    return <Py_ssize_t>least if with_weight_grad and dtype != AG_FLOAT64 and least < rows else 0


cdef Py_ssize_t least_sparse_workspace(
    ag_dtype dtype, Py_ssize_t rows, Py_ssize_t vocab, Py_ssize_t hidden, Py_ssize_t nonzeros, bint with_weight_grad
) noexcept nogil:
    """Return the least `workspace_bytes`: the transposed matrices, totals, and a small block."""
    cdef Py_ssize_t itemsize = ag_itemsize[<int>dtype], pitch = kernels_for(dtype).sparse_pitch(vocab), matrix
    cdef Py_ssize_t matrices = 2 if with_weight_grad else 1
    if fold_rows(dtype, rows, hidden, nonzeros, with_weight_grad):
        matrices += 2
    if vocab > SIZE_LIMIT // (LEAST_BLOCK * itemsize) or hidden > SIZE_LIMIT // (4 * itemsize * pitch):
        return SIZE_LIMIT
    matrix = (hidden * pitch + VECTOR_PADDING) * itemsize
    return matrices * matrix + (LEAST_BLOCK * vocab + VECTOR_PADDING) * itemsize + LOSS_BYTES


cdef inline bint has_vector(const SparseLoss *s) noexcept nogil:
    """Return whether the product of the Hessian and a vector is computed, and no loss."""
    return s.vector.data != NULL


cdef inline double products_of(const SparseLoss *s) noexcept nogil:
    """Return the number of products with the nonzeros: logits, their changes along a vector, and sums."""
    return 1 + has_vector(s) + (s.weight_grad.data != NULL)


cdef double time_of_nonzeros(const SparseLoss *s) noexcept nogil:
    """Return the estimated nanoseconds of all products with nonzeros on one thread."""
    cdef double lines = 1 + <double>s.pitch * s.itemsize / 64
    return products_of(s) * NS_OF_NONZERO * lines * s.nonzeros


cdef double sparse_cost(const SparseLoss *s) noexcept nogil:
    """Return the estimated nanoseconds on one thread."""
    cdef double passes = 1 + has_vector(s), vocab = s.weight.shape[0]
    return (
        time_of_nonzeros(s) + products_of(s) * NS_OF_WEIGHT * vocab * s.x.features + passes * NS_OF_LOGIT * vocab * s.rows
    )


cdef int expected_sparse_threads(const SparseLoss *s, int asked) noexcept nogil:
    """Return the number of threads of calls that follow one another."""
    return _threads.expected_threads(sparse_cost(s), asked)


cdef void set_pitch(SparseLoss *s) noexcept nogil:
    """Set the kernels, and what they prescribe of transposed matrices."""
    s.kernels, s.itemsize = kernels_for(s.dtype), ag_itemsize[<int>s.dtype]
    s.pitch = s.kernels.sparse_pitch(s.weight.shape[0])


cdef int choose_sparse_threads(SparseLoss *s, int asked) noexcept nogil:
    """Choose the number of threads of a call. `asked` is the caller's number, or 0 for the default."""
    set_pitch(s)
    return _threads.choose_num_threads(sparse_cost(s), asked)


cdef void describe_block(SparseLoss *s, CrossEntropy *x, Py_ssize_t rows) noexcept nogil:
    """Describe the loss of as many rows as a block, and choose its plan."""
    cdef Problem p
    cdef View logits, numbers, prob = s.prob
    cdef Py_ssize_t[2] of_numbers
    memset(x, 0, sizeof(CrossEntropy))
    s.shape[0], s.shape[1] = rows, s.weight.shape[0]
    s.strides[0], s.strides[1] = s.shape[1] * s.itemsize, s.itemsize
    of_numbers[0], of_numbers[1] = 1, 0
    x.o = s.o
    x.o.rows, x.o.is_double = rows, s.dtype == AG_FLOAT64
    if has_vector(s):
        x.hessian, x.vector = s.p if s.p != NULL else &any_address, s.changes if s.changes != NULL else &any_address
    else:
        x.return_grad = s.weight_grad.data != NULL or s.with_bias_grad
    x.given_lse, x.given_entropy = s.lse, s.entropy
    logits.data, logits.ndim, logits.shape, logits.strides = s.logits, 2, s.shape, s.strides
    logits.itemsize, logits.dtype, logits.swapped = s.itemsize, s.dtype, False
    numbers = logits
    numbers.data, numbers.strides, numbers.itemsize = NULL, of_numbers, 1
    if not is_dense(&x.o):
        prob = logits
    describe(&p, plan_of(x, s.shape[1], False), &logits, &prob, &numbers, &logits, 1, scale_of_all(x))
    prepare_loss(x, &p, s.threads)


cdef void describe_blocks(SparseLoss *s) noexcept nogil:
    cdef Py_ssize_t rows = s.end - s.begin
    describe_block(s, &s.loss, s.block)
    describe_block(s, &s.last, rows - (ceil_div(rows, s.block) - 1) * s.block)


cdef void place_rows(SparseLoss *s, Arena *arena) noexcept nogil:
    """Place what the rows of a part need, or all rows if there is one part, in memory. No memory: NULL."""
    cdef Py_ssize_t vocab = s.weight.shape[0], of_loss
    cdef char *loss
    s.sums = arena_alloc(arena, transposed_bytes(s)) if s.weight_grad.data != NULL else NULL
    s.totals = NULL
    if s.fold_rows:
        s.totals = <double *>arena_alloc(arena, s.x.features * s.pitch * sizeof(double))
    s.logits = s.p = arena_alloc(arena, logits_bytes(s, s.block))
    s.changes = NULL
    if has_vector(s):
        s.changes = arena_alloc(arena, logits_bytes(s, s.block))
        s.p = arena_alloc(arena, logits_bytes(s, s.block))
    s.bias_sums = s.partial_sums = NULL
    if s.with_bias_grad:
        s.bias_sums = <double *>arena_alloc(arena, vocab * sizeof(double))
        s.partial_sums = <double *>arena_alloc(arena, ceil_div(s.block, BIAS_ROWS) * vocab * sizeof(double))
    describe_blocks(s)                # with the addresses of logits, changes and P
    # Both losses take the same memory, one after the other.
    of_loss = max(loss_workspace_size(&s.loss), loss_workspace_size(&s.last))
    loss = arena_alloc(arena, of_loss)
    if arena.base != NULL:
        place_loss_workspace(&s.loss, loss)
        place_loss_workspace(&s.last, loss)


cdef Py_ssize_t rows_of_part(const SparseLoss *s) noexcept nogil:
    return ceil_div(ceil_div(s.rows, s.parts), <Py_ssize_t>LEAST_BLOCK) * LEAST_BLOCK


cdef void place_parts(SparseLoss *s, Arena *arena) noexcept nogil:
    """Place the parts in memory, and what each needs."""
    cdef Py_ssize_t part, rows = rows_of_part(s)
    cdef SparseLoss measured
    cdef SparseLoss *one = &measured
    s.each = <SparseLoss *>arena_alloc(arena, s.parts * sizeof(SparseLoss))
    for part in range(s.parts):
        if arena.base != NULL:
            one = &s.each[part]
        one[0] = s[0]
        one.each, one.threads = NULL, 1
        one.begin, one.end = part * rows, min(s.rows, (part + 1) * rows)
        place_rows(one, arena)


cdef Py_ssize_t place_sparse_workspace(SparseLoss *s, char *base) noexcept nogil:
    """Place the workspace in memory that begins at `base`, and return its bytes. NULL only measures the bytes."""
    cdef Arena arena
    cdef Py_ssize_t vocab = s.weight.shape[0]
    arena.base, arena.used = base, 0
    s.transposed = arena_alloc(&arena, transposed_bytes(s))
    s.transposed_vector = arena_alloc(&arena, transposed_bytes(s)) if has_vector(s) else NULL
    s.cuts = <int64_t *>arena_alloc(&arena, (s.threads + 1) * sizeof(int64_t))
    s.bias_values = s.vector_bias_values = NULL
    if s.bias != NULL:
        s.bias_values = arena_alloc(&arena, (vocab + VECTOR_PADDING) * s.itemsize)
    if s.vector_bias != NULL:
        s.vector_bias_values = arena_alloc(&arena, (vocab + VECTOR_PADDING) * s.itemsize)
    s.begin, s.end, s.each = 0, s.rows, NULL
    if s.parts > 1:
        place_parts(s, &arena)
    else:
        place_rows(s, &arena)
    return arena.used


cdef Py_ssize_t sparse_workspace_size(SparseLoss *s) noexcept nogil:
    """Return the bytes to allocate for the workspace, at any alignment."""
    return place_sparse_workspace(s, NULL) + ALIGNMENT


cdef void choose_block(SparseLoss *s) noexcept nogil:
    """Choose the rows of a block."""
    cdef Py_ssize_t row_bytes = (3 if has_vector(s) else 1) * s.weight.shape[0] * s.itemsize, most = s.rows
    row_bytes += s.nonzeros // max(<Py_ssize_t>1, s.rows) * (s.itemsize + (8 if s.x.is_wide else 4))
    s.block = max(<Py_ssize_t>1, (PART_BLOCK_BYTES if s.parts > 1 else BLOCK_BYTES) // (LEAST_BLOCK * row_bytes)) * LEAST_BLOCK
    if s.parts > 1:
        most = rows_of_part(s)
    s.block = min(s.block, max(<Py_ssize_t>1, most))


cdef Py_ssize_t choose_parts(const SparseLoss *s) noexcept nogil:
    """Return the number of parts of the rows, which does not depend on the threads."""
    cdef Py_ssize_t parts = 1, bytes = 0, least = LEAST_BLOCK
    if s.weight_grad.data != NULL:
        bytes = transposed_bytes(s) + (s.x.features * s.pitch * sizeof(double) if s.fold_rows else 0)
    while (
        parts < MOST_PARTS and s.rows >= 2 * parts * PART_ROWS and 2 * parts * bytes <= PART_BYTES
        and 2 * parts * bytes * NS_OF_PART <= MOST_OF_PARTS * time_of_nonzeros(s)
    ):
        parts *= 2
    # No part is empty, although parts have multiples of these rows.
    while parts > 1 and (parts - 1) * ceil_div(ceil_div(s.rows, parts), least) * least >= s.rows:
        parts //= 2
    return parts


cdef void prepare_sparse(SparseLoss *s, Py_ssize_t workspace_bytes, int threads) noexcept nogil:
    """Choose the number of parts and the number of rows of a block.

    A `workspace_bytes` of 0 stands for the default. `threads` is the number of threads of the team. Parts and blocks, on which
    bits depend, fit the workspace with one thread. Then the team has as many threads as fit it, too.
    """
    set_pitch(s)
    s.threads = 1
    s.fold_rows = fold_rows(s.dtype, s.rows, s.x.features, s.nonzeros, s.weight_grad.data != NULL)
    s.parts = choose_parts(s)
    choose_block(s)
    while workspace_bytes and s.parts > 1 and sparse_workspace_size(s) > workspace_bytes:
        s.parts //= 2
        choose_block(s)
    while workspace_bytes and s.block > LEAST_BLOCK and sparse_workspace_size(s) > workspace_bytes:
        s.block = ceil_div(s.block, 2 * LEAST_BLOCK) * LEAST_BLOCK
    s.threads = threads
    while workspace_bytes and s.threads > 1 and sparse_workspace_size(s) > workspace_bytes:
        s.threads -= 1


ctypedef fused real_t:
    float
    double


# ---- phases ----------------------------------------------------------------------------------------------------------

cdef void transpose_features(
    const SparseLoss *s, const View *matrix, Py_ssize_t first, Py_ssize_t count, char *to
) noexcept nogil:
    """Transpose some features of a matrix (V, H)."""
    cdef Py_ssize_t line = s.pitch * s.itemsize
    cdef ag_dim one, classes, features
    one.length, one.to, one.from_ = 1, 0, 0
    classes.length, classes.to, classes.from_ = matrix.shape[0], s.itemsize, matrix.strides[0]
    features.length, features.to, features.from_ = count, line, matrix.strides[1]
    if s.pitch > matrix.shape[0]:
        memset(to + first * line, 0, count * line)
    copy_3d(
        _cpu.active(), to + first * line, matrix.data + first * matrix.strides[1], one, classes, features, s.itemsize,
        matrix.swapped
    )


cdef void transpose_matrices(const void *context, Py_ssize_t task, int thread) noexcept nogil:
    """Transpose some features of the weight and of the vector."""
    cdef const SparseLoss *s = <const SparseLoss *>context
    cdef Py_ssize_t first = task * FEATURES, count = min(<Py_ssize_t>FEATURES, s.x.features - first)
    transpose_features(s, &s.weight, first, count, s.transposed)
    if has_vector(s):
        transpose_features(s, &s.vector, first, count, s.transposed_vector)
    if s.each == NULL:
        clear_sums(s, first, count)


cdef void clear_sums(const SparseLoss *s, Py_ssize_t first, Py_ssize_t count) noexcept nogil:
    """Set the sums of some features to 0."""
    cdef Py_ssize_t line = s.pitch * s.itemsize
    if s.sums != NULL:
        memset(s.sums + first * line, 0, count * line)
    if s.totals != NULL:
        memset(s.totals + first * s.pitch, 0, count * s.pitch * sizeof(double))


cdef void fold_sums(const SparseLoss *s, Py_ssize_t first, Py_ssize_t end) noexcept nogil:
    """Add the sums of some features to their totals, and set them to 0."""
    cdef float *sums = <float *>s.sums
    cdef Py_ssize_t k
    for k in range(first * s.pitch, end * s.pitch):
        s.totals[k] += sums[k]
        sums[k] = 0


cdef void merge_sums(const SparseLoss *s, real_t *sums, Py_ssize_t first, Py_ssize_t count) noexcept nogil:
    """Replace the sums of some features in `sums`, the first part's array, by the sums over all rows."""
    cdef Py_ssize_t end = (first + count) * s.pitch, begin = first * s.pitch, length, part, k
    cdef const SparseLoss *one
    cdef const real_t *of_part
    cdef const double *totals
    cdef double[MERGED] merged
    while begin < end:
        length = min(<Py_ssize_t>MERGED, end - begin)
        memset(merged, 0, sizeof(merged))
        for part in range(s.parts):
            one = s
            if s.each != NULL:
                one = &s.each[part]
            of_part = <const real_t *>one.sums + begin
            if one.totals != NULL:
                totals = one.totals + begin
                for k in range(length):
                    merged[k] += totals[k]
            for k in range(length):
                merged[k] += of_part[k]
        for k in range(length):
            sums[begin + k] = <real_t>merged[k]
        begin += length


cdef void write_weight_grad(const void *context, Py_ssize_t task, int thread) noexcept nogil:
    """Write the gradient of some features of the weight."""
    cdef const SparseLoss *s = <const SparseLoss *>context
    cdef Py_ssize_t first = task * FEATURES
    cdef Py_ssize_t line = s.pitch * s.itemsize
    cdef char *sums = s.sums if s.each == NULL else s.each[0].sums
    cdef ag_dim one, classes, features
    one.length, one.to, one.from_ = 1, 0, 0
    classes.length, classes.to, classes.from_ = s.weight.shape[0], s.weight_grad.strides[0], s.itemsize
    features.length = min(<Py_ssize_t>FEATURES, s.x.features - first)
    features.to, features.from_ = s.weight_grad.strides[1], line
    if s.dtype == AG_FLOAT64 and s.each != NULL:
        merge_sums(s, <double *>sums, first, features.length)
    elif s.dtype != AG_FLOAT64 and (s.each != NULL or s.totals != NULL):
        merge_sums(s, <float *>sums, first, features.length)
    copy_3d(
        _cpu.active(), s.weight_grad.data + first * s.weight_grad.strides[1], sums + first * line, one, classes,
        features, s.itemsize, False
    )


cdef ag_sparse_task task_of(const SparseLoss *s) noexcept nogil:
    """Return the products of the current block's rows and all features."""
    cdef ag_sparse_task t
    t.classes, t.pitch, t.first_row = s.weight.shape[0], s.pitch, s.first_row
    t.row, t.row_end = s.first_row, s.first_row + s.current.o.rows
    t.p, t.weight, t.bias, t.sums = s.p, s.transposed, s.bias_values, s.sums
    t.feature, t.feature_end = 0, s.x.features
    return t


cdef inline Py_ssize_t rows_of_task(const SparseLoss *s) noexcept nogil:
    """Return the rows whose logits a task computes: there are several tasks for each thread."""
    return max(<Py_ssize_t>16, ceil_div(s.block, 8 * s.threads))


cdef void compute_logits(const void *context, Py_ssize_t task, int thread) noexcept nogil:
    """Compute the logits of some rows of the block, and their changes along the vector."""
    cdef SparseLoss *s = <SparseLoss *>context
    cdef ag_sparse_task t = task_of(s)
    t.row += task * rows_of_task(s)
    t.row_end = min(t.row_end, t.row + rows_of_task(s))
    if not check_rows(s, t.row, t.row_end):
        return
    t.p = s.logits
    s.kernels.sparse_logits(&s.x, &t)
    if has_vector(s):
        t.p, t.weight, t.bias = s.changes, s.transposed_vector, s.vector_bias_values
        s.kernels.sparse_logits(&s.x, &t)


cdef void add_to_sums(const SparseLoss *s, ag_sparse_task *t) noexcept nogil:
    """Add what the rows of a task add to its features."""
    cdef Py_ssize_t end = t.row_end
    while t.row < end:
        if s.totals != NULL:
            t.row_end = min(end, (t.row // s.fold_rows + 1) * s.fold_rows)
        s.kernels.sparse_sums(&s.x, t)
        if s.totals != NULL and t.row_end % s.fold_rows == 0:
            fold_sums(s, t.feature, t.feature_end)
        t.row = t.row_end


cdef void add_gradients(const void *context, Py_ssize_t task, int thread) noexcept nogil:
    """Add what P of the block adds to the gradients: of a range of features, or of the bias from a range of rows."""
    cdef const SparseLoss *s = <const SparseLoss *>context
    cdef ag_sparse_task t = task_of(s)
    cdef Py_ssize_t ranges = s.threads if s.sums != NULL else 0
    if task < ranges:
        t.feature, t.feature_end = s.cuts[task], s.cuts[task + 1]
        if t.feature < t.feature_end:
            add_to_sums(s, &t)
        return
    task -= ranges
    t.row = task * BIAS_ROWS
    t.row_end = min(t.row + BIAS_ROWS, s.current.o.rows)
    cdef double *sums = s.partial_sums + task * t.classes
    if s.dtype == AG_FLOAT64:
        add_rows(<const double *>s.p + t.row * t.classes, t.row_end - t.row, t.classes, sums)
    else:
        add_rows(<const float *>s.p + t.row * t.classes, t.row_end - t.row, t.classes, sums)


cdef void add_rows(const real_t *p, Py_ssize_t rows, Py_ssize_t n, double *sums) noexcept nogil:
    """Set sums to those of the columns of P."""
    cdef Py_ssize_t i, v
    memset(sums, 0, n * sizeof(double))
    for i in range(rows):
        for v in range(n):
            sums[v] += p[i * n + v]


# ---- the program of a team -------------------------------------------------------------------------------------------

cdef void cut_features(SparseLoss *s) noexcept nogil:
    """Cut the features into a range for each thread, of about as many nonzeros. The ranges do not change results."""
    cdef Py_ssize_t[BINS] counts
    cdef int64_t nonzeros = s.x.starts[s.rows], step = max(<int64_t>1, nonzeros // SAMPLES)
    cdef int64_t k = 0, feature, samples = 0, below = 0
    cdef int64_t width = max(<int64_t>1, ceil_div(s.x.features, BINS))
    cdef Py_ssize_t bin, cut = 1
    memset(counts, 0, sizeof(counts))
    while k < nonzeros:
        feature = (<const int64_t *>s.x.indices)[k] if s.x.is_wide else (<const int32_t *>s.x.indices)[k]
        if 0 <= feature < s.x.features:  # features are checked later
            counts[feature // width] += 1
            samples += 1
        k += step
    s.cuts[0] = 0
    for bin in range(BINS):
        below += counts[bin]
        while cut < s.threads and below * s.threads >= cut * samples:
            s.cuts[cut] = min((bin + 1) * width, s.x.features)
            cut += 1
    s.cuts[s.threads] = s.x.features


cdef inline const double *from_row(const double *numbers, Py_ssize_t row) noexcept nogil:
    if numbers == NULL:
        return NULL
    return numbers + row


cdef inline char *result_from(void *results, Py_ssize_t i, int itemsize) noexcept nogil:
    return NULL if results == NULL else <char *>results + i * itemsize


cdef void begin_block(SparseLoss *s, CrossEntropy *x, Py_ssize_t row) noexcept nogil:
    """Make rows from `row` on the rows of a described loss."""
    cdef const LossOptions *o = &s.o
    cdef Py_ssize_t target = row * o.target_count
    if s.current != x:
        x.denominators = s.denominators
        set_factors(x)                # into memory that both losses share
    s.current, s.first_row = x, row
    if is_dense(o):
        x.s.p.operands[B].data = s.prob.data + row * s.prob.strides[0]
    else:
        x.o.target = <const char *>o.target + target * (8 if o.is_wide else 4)
    if o.target_prob != NULL:
        x.o.target_prob = <const char *>o.target_prob + target * (4 if o.has_float_prob else 8)
    x.o.token_weight, x.o.temperatures = from_row(o.token_weight, row), from_row(o.temperatures, row)
    x.o.grad_losses, x.o.grad_lse = from_row(o.grad_losses, row), from_row(o.grad_lse, row)
    x.o.grad_log_prob, x.o.grad_entropy = from_row(o.grad_log_prob, target), from_row(o.grad_entropy, row)
    x.given_lse, x.given_entropy = from_row(s.lse, row), from_row(s.entropy, row)
    if o.reduction == REDUCTION_NONE:
        x.o.loss = result_from(o.loss, row, s.itemsize)
    x.o.outputs.lse = result_from(o.outputs.lse, row, s.itemsize)
    x.o.outputs.log_prob = result_from(o.outputs.log_prob, target, s.itemsize)
    x.o.outputs.entropy = result_from(o.outputs.entropy, row, s.itemsize)
    if o.outputs.predicted != NULL:
        x.predicted = x.o.outputs.predicted = o.outputs.predicted + row


cdef void end_block(SparseLoss *s) noexcept nogil:
    """Add the losses of the block to those before, and the partial sums to the gradient of the bias."""
    cdef CrossEntropy *x = s.current
    cdef Py_ssize_t row, task, v, vocab = s.weight.shape[0]
    cdef ag_fpenv mode = ag_fpenv_enter()
    if x.loss_terms != NULL:
        x.kernels.add_numbers(s.losses, x.loss_terms, x.o.rows)
    if x.square_terms != NULL:
        x.kernels.add_numbers(s.squares, x.square_terms, x.o.rows)
    if x.o.outputs.correct != NULL:
        for row in range(x.o.rows):
            s.correct += x.predicted[row] == target_at(&x.o, row) and not is_ignored(&x.o, row)
    if s.with_bias_grad:
        for task in range(ceil_div(x.o.rows, BIAS_ROWS)):
            for v in range(vocab):
                s.bias_sums[v] += s.partial_sums[task * vocab + v]
    ag_fpenv_leave(mode)


cdef void begin_sums(SparseLoss *s) noexcept nogil:
    """Set to 0 what the rows of a part, or all rows, are added to, except the sums of the features."""
    s.current, s.correct, s.is_outside, s.x.is_unsorted = NULL, 0, 0, 0
    memset(s.losses, 0, sizeof(s.losses))
    memset(s.squares, 0, sizeof(s.squares))
    if s.bias_sums != NULL:
        memset(s.bias_sums, 0, s.weight.shape[0] * sizeof(double))


cdef void run_rows(SparseLoss *s, Team *team) noexcept nogil:
    """Compute the rows of a part, or all rows, block by block."""
    cdef Py_ssize_t row = s.begin, rows, tasks
    while row < s.end and not team.is_cancelled:
        begin_block(s, &s.loss if row + s.block < s.end else &s.last, row)
        rows = s.current.o.rows
        _tasks.run_phase(team, compute_logits, s, ceil_div(rows, rows_of_task(s)), False)
        if s.is_outside:
            return
        run_phases(s.current, team)
        tasks = s.threads if s.sums != NULL else 0
        if s.with_bias_grad:
            tasks += ceil_div(rows, BIAS_ROWS)
        _tasks.run_phase(team, add_gradients, s, tasks, False)
        end_block(s)
        row += rows


cdef void run_part(const void *context, Py_ssize_t task, int thread) noexcept nogil:
    """Compute the rows of a part on this thread. The task of a phase."""
    cdef const SparseLoss *s = <const SparseLoss *>context
    cdef SparseLoss *part = &s.each[task]
    cdef Team serial
    _tasks.begin_nested(&serial, s.team, thread)
    clear_sums(part, 0, s.x.features)
    run_rows(part, &serial)


cdef void begin_parts(SparseLoss *s) noexcept nogil:
    """Set what the parts have in common with the call, and what their rows are added to."""
    cdef Py_ssize_t part
    s.cuts[0], s.cuts[1] = 0, s.x.features  # of the only thread of a part
    for part in range(s.parts):
        s.each[part].denominators[0], s.each[part].denominators[1] = s.denominators[0], s.denominators[1]
        begin_sums(&s.each[part])


cdef void merge_parts(SparseLoss *s) noexcept nogil:
    """Add up what the parts have of the losses, of correct predictions, and of the gradient of the bias."""
    cdef ag_fpenv mode = ag_fpenv_enter()
    cdef const SparseLoss *one
    cdef Py_ssize_t part, v
    cdef int lane
    if s.with_bias_grad:
        s.bias_sums = s.each[0].bias_sums
    for part in range(s.parts):
        one = &s.each[part]
        for lane in range(AG_SUM_LANES):
            ag_sum_add_sum(&s.losses[lane], one.losses[lane])
            ag_sum_add_sum(&s.squares[lane], one.squares[lane])
        s.correct += one.correct
        s.is_outside |= one.is_outside
        for v in range(s.weight.shape[0] if part and s.with_bias_grad else 0):
            s.bias_sums[v] += one.bias_sums[v]
    ag_fpenv_leave(mode)


cdef void run_blocks(void *context, Team *team) noexcept nogil:
    cdef SparseLoss *s = <SparseLoss *>context
    cdef Py_ssize_t tasks = ceil_div(s.x.features, FEATURES)
    s.team = team
    _tasks.run_phase(team, transpose_matrices, s, tasks, False)
    if s.each != NULL:
        _tasks.run_phase(team, run_part, s, s.parts, False)
        merge_parts(s)
    else:
        run_rows(s, team)
    if s.weight_grad.data != NULL and not s.is_outside:
        _tasks.run_phase(team, write_weight_grad, s, tasks, False)


cdef void round_biases(SparseLoss *s) noexcept nogil:
    """Round the bias, and the vector's part of it, as the dense layer does."""
    cdef LinearProblem p
    cdef bint is_double = s.dtype == AG_FLOAT64
    cdef double largest
    memset(&p, 0, sizeof(p))
    p.dtype, p.transform.scale, p.transform.softcap = s.dtype, s.o.logit_scale, s.o.softcap
    bound_transform(&p)
    largest = largest_bias(&p, s.o.temperature, s.o.temperatures, s.rows)
    if s.bias != NULL:
        round_bias(s.bias_values, s.bias, s.weight.shape[0], largest, is_double)
    if s.vector_bias != NULL:
        round_bias(s.vector_bias_values, s.vector_bias, s.weight.shape[0], largest, is_double)


cdef int run_sparse(SparseLoss *s, int asked, double *last_check) except -1 nogil:
    """Compute the loss and the gradients, or the product of the Hessian and the vector.

    What belongs to the bias is left in `bias_sums`. Nothing is complete if `is_outside` is set. `asked`: the threads of the
    caller's choice, or 0.
    """
    set_denominators(&s.o, s.denominators, last_check)
    round_biases(s)
    begin_sums(s)
    if s.each == NULL:
        cut_features(s)
    else:
        begin_parts(s)
    _tasks.run_team(run_blocks, s, s.threads, asked == 0, sparse_cost(s), last_check)
    if s.o.outputs.correct != NULL:
        s.o.outputs.correct[0] = s.correct
    if s.o.loss != NULL and s.o.reduction != REDUCTION_NONE:
        write_reduced(&s.o, s.denominators, ag_sums_total_of_all(s.losses), ag_sums_total_of_all(s.squares))
    return 0
