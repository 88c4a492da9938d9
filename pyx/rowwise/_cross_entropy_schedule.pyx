"""Schedules of the cross-entropy of rows, without Python: the losses, outputs beside them, and the gradient.

Kernels compute the maxima and the sums of a block of rows, and later write the gradient of the same block, which is then
still in the cache (`_cross_entropy_tasks`). In between, `finish_rows` computes the losses, the factors of the exponentials,
and the gradients at the targets, which are stored last. A target's logit is read before, as the gradient may overwrite the
input.

The plan is that of a forward row-wise operator (`_rowwise_plan`). Sums that are needed for some options alone have no column
kernels; with such options the problem is described as `plan_of` returns it.

The caller owns the workspace. It fills in the options of a `CrossEntropy`, calls `prepare_loss`, allocates
`loss_workspace_size` bytes, calls `place_loss_workspace` and `run_loss`.
"""

from libc.stdint cimport int64_t
from libc.string cimport memset

from ascend_grad cimport _tasks
from ascend_grad._cross_entropy_rows cimport (
    CrossEntropy,
    Rows,
    cap_of,
    factor_of,
    has_full_results,
    inner_of,
    inverse_of,
    is_transformed,
    logit_scale_of,
    place_rows,
    scale_of_all,
)
from ascend_grad._cross_entropy_tasks cimport run_phases
from ascend_grad._kernels cimport (
    AG_FLOAT64,
    AG_SUM_LANES,
    ag_fpenv,
    ag_fpenv_enter,
    ag_fpenv_leave,
    ag_sum,
    ag_sum_add,
    ag_sum_total,
    ag_sums_total_of_all,
)
from ascend_grad._loss_options cimport (
    REDUCTION_NONE,
    has_output_grads,
    has_outputs,
    has_square,
    is_dense,
    is_ignored,
    needs_entropy,
    round_class_weights,
    set_denominators,
    target_at,
    write_reduced,
)
from ascend_grad._memory cimport ALIGNMENT, Arena, align_up, arena_alloc
from ascend_grad._rowwise_kernels cimport (
    AG_LOSS_DEFICIT,
    AG_LOSS_DENSE_STRIPS,
    AG_LOSS_EXP,
    AG_LOSS_EXP_OF_DENSE,
    AG_LOSS_EXP_OF_ROWS,
    AG_LOSS_WEIGHTED_DEFICIT,
    AG_MAX_LANES,
    AG_STRIP_ROWS,
    ag_row_op,
)
from ascend_grad._rowwise_plan cimport Problem, limit_blocks
from ascend_grad._rowwise_schedule cimport dense_strip_rows, loss_kernels, place_workspace, prepare

cdef enum:
    CACHED_BYTES = 16 << 10           # most bytes of the exponentials of a chunk of rows, which mostly stay in L1
    MAX_CHUNK = 1024                  # most rows of a chunk
    ROWS_PER_CHECK = 1 << 18          # rows between two checks for signals
    MOST_ROWS = 1 << 12               # most rows of a block
    MOST_TARGETS = 1 << 16            # most targets of a block's rows, if it has several rows
    MOST_TOGETHER = 128               # most rows that are finished together
    TARGETS_IN_L1 = 1 << 10           # targets of these rows, whose numbers then stay in L1, or in L2
    TARGETS_IN_L2 = 1 << 13


cdef bint has_one_term(const CrossEntropy *x) noexcept nogil:
    """Return whether rows have one temperature and upstream gradient, and no term but that of their targets.

    They may have label smoothing.
    """
    return not (
        x.o.temperatures != NULL or x.o.grad_losses != NULL or has_square(&x.o) or has_outputs(&x.o)
        or has_output_grads(&x.o) or is_transformed(&x.o) or x.given_lse != NULL
    )


cdef bint is_single_target(const CrossEntropy *x) noexcept nogil:
    """Return whether rows have one target, one weight, and no other term but label smoothing without class weights.

    All their outputs have the shape of the logits.
    """
    return has_one_term(x) and not is_dense(&x.o) and x.o.target_prob == NULL and (
        x.o.label_smoothing == 0 or x.o.class_weight == NULL
    )


cdef bint is_plain(const CrossEntropy *x) noexcept nogil:
    """Return whether rows have weighted targets, and no other term or output."""
    return has_one_term(x) and not has_full_results(x) and x.o.target_prob != NULL and x.o.label_smoothing == 0


cdef bint has_dense_strips(const CrossEntropy *x, Py_ssize_t classes) noexcept nogil:
    """Return whether a kernel of strips computes all results of dense targets, if columns are processed."""
    return (
        is_dense(&x.o) and has_one_term(x) and not has_full_results(x) and x.vector == NULL
        and classes <= dense_strip_rows(x.o.is_double)
    )


cdef ag_row_op plan_of(const CrossEntropy *x, Py_ssize_t classes, bint has_other_dtype) noexcept nogil:
    """Return the operator whose plan a loss follows: AG_LOSS_EXP_OF_ROWS if column kernels do not compute all of it.

    Dense targets follow AG_LOSS_EXP_OF_DENSE, or AG_LOSS_DENSE_STRIPS if columns may be processed.
    `has_other_dtype`: the gradient has another dtype than the logits.
    """
    if is_dense(&x.o):
        return AG_LOSS_DENSE_STRIPS if has_dense_strips(x, classes) else AG_LOSS_EXP_OF_DENSE
    if (
        needs_entropy(&x.o) or x.o.outputs.predicted != NULL or x.o.outputs.correct != NULL
        or x.o.temperatures != NULL or is_transformed(&x.o) or x.vector != NULL or x.given_lse != NULL
    ):
        return AG_LOSS_EXP_OF_ROWS
    # The kernel of strips computes label smoothing and results of the shape of the logits. With every instruction set,
    # strips have up to AG_STRIP_ROWS(2) rows.
    if (x.o.label_smoothing != 0 or has_full_results(x)) and (
        has_other_dtype or classes > AG_STRIP_ROWS(2) or not is_single_target(x)
    ):
        return AG_LOSS_EXP_OF_ROWS
    return AG_LOSS_EXP


cdef Py_ssize_t rows_together(Py_ssize_t targets) noexcept nogil:
    """Return how many rows are finished together: at least a vector of rows, unless their targets exceed L2."""
    cdef Py_ssize_t vector = min(<Py_ssize_t>AG_MAX_LANES // 2, TARGETS_IN_L2 // targets)
    return max(<Py_ssize_t>1, max(vector, min(<Py_ssize_t>MOST_TOGETHER, TARGETS_IN_L1 // targets)))


cdef void prepare_loss(CrossEntropy *x, const Problem *p, int threads) noexcept nogil:
    """Fill in the schedule of a loss whose arguments are given, without a workspace."""
    cdef Py_ssize_t row_bytes = align_up(p.n, AG_MAX_LANES) * (8 if p.dtype == AG_FLOAT64 else 4)
    cdef Py_ssize_t most
    cdef Rows r
    cdef Arena arena
    cdef Problem transformed = p[0]
    transformed.is_transformed, transformed.inner, transformed.cap = is_transformed(&x.o), inner_of(&x.o), cap_of(&x.o)
    # Whole cache lines of a block of columns, if possible.
    most = max(<Py_ssize_t>1, min(<Py_ssize_t>MOST_ROWS, MOST_TARGETS // max(<Py_ssize_t>1, x.o.target_count)))
    if most > 64:
        most = most // 64 * 64
    prepare(&x.s, &transformed, threads, NULL)
    limit_blocks(&x.s.plan, &x.s.p, most)
    x.kernels = loss_kernels(&x.s)
    x.is_single_target, x.is_plain = is_single_target(x), is_plain(x)
    x.needs_deficit = x.o.label_smoothing != 0 and not is_dense(&x.o)  # dense targets have smoothed weights
    x.needs_moment = needs_entropy(&x.o)
    x.deficit_sum = AG_LOSS_DEFICIT if x.o.class_weight == NULL else AG_LOSS_WEIGHTED_DEFICIT
    x.chunk = max(<Py_ssize_t>1, min(min(<Py_ssize_t>MAX_CHUNK, most), CACHED_BYTES // row_bytes))
    x.cached_bytes = 0
    x.slot_bits = 1
    while <Py_ssize_t>1 << x.slot_bits < 2 * x.o.target_count:
        x.slot_bits += 1
    x.buffered = x.s.plan.block_size
    if x.s.plan.is_split:
        x.buffered = p.rows
    elif not x.s.plan.by_columns:
        if not x.s.plan.gathers:
            x.buffered = min(x.buffered, x.chunk)
        if (x.return_grad or has_full_results(x)) and row_bytes <= CACHED_BYTES:
            x.cached_bytes = x.chunk * row_bytes + AG_MAX_LANES * sizeof(double)
    # Not a multiple of 4 KiB, as the numbers of all targets of a row would then share a few lines of L1.
    x.pitch = x.buffered + 8 if x.buffered % 64 == 0 else x.buffered
    x.together = min(x.buffered, rows_together(max(<Py_ssize_t>1, x.o.target_count)))
    place_rows(x, &r, &arena, NULL)
    x.buffer_size = arena.used


cdef Py_ssize_t place_loss_workspace(CrossEntropy *x, char *base) noexcept nogil:
    """Place the workspace in memory that begins at `base`, and return its bytes. NULL only measures the bytes."""
    cdef Arena arena
    arena.base, arena.used = base, align_up(place_workspace(&x.s, base), ALIGNMENT)
    x.buffers = arena_alloc(&arena, x.buffer_size * (1 if x.s.plan.is_split else x.s.plan.threads))
    x.kernel_weight = x.loss_terms = x.square_terms = x.further_sums = NULL
    if (is_dense(&x.o) or x.vector != NULL) and x.s.plan.is_split:
        x.further_sums = <double *>arena_alloc(&arena, 2 * x.s.plan.segments * x.s.p.rows * sizeof(double))
    x.predicted = x.o.outputs.predicted
    if x.o.class_weight != NULL and (x.needs_deficit or is_dense(&x.o)):
        x.kernel_weight = arena_alloc(&arena, x.s.p.n * (8 if x.o.is_double else 4))
    if x.o.reduction != REDUCTION_NONE or x.o.loss == NULL:
        x.loss_terms = <double *>arena_alloc(&arena, x.o.rows * sizeof(double))
        if has_square(&x.o):
            x.square_terms = <double *>arena_alloc(&arena, x.o.rows * sizeof(double))
    if x.predicted == NULL and x.o.outputs.correct != NULL:
        x.predicted = <int64_t *>arena_alloc(&arena, x.o.rows * sizeof(int64_t))
    return arena.used


cdef Py_ssize_t loss_workspace_size(CrossEntropy *x) noexcept nogil:
    """Return the bytes to allocate for the workspace, at any alignment."""
    return place_loss_workspace(x, NULL) + ALIGNMENT


cdef int reduce_losses(CrossEntropy *x, double *last_check) except -1 nogil:
    """Add up the losses of the rows, and count the rows whose target is predicted."""
    cdef ag_sum[AG_SUM_LANES] losses, squares
    cdef Py_ssize_t begin = 0, end, row
    cdef int64_t correct = 0
    memset(losses, 0, sizeof(losses))
    memset(squares, 0, sizeof(squares))
    while begin < x.o.rows:
        end = min(begin + ROWS_PER_CHECK, x.o.rows)
        if x.loss_terms != NULL:
            x.kernels.add_numbers(losses, &x.loss_terms[begin], end - begin)
        if x.square_terms != NULL:
            x.kernels.add_numbers(squares, &x.square_terms[begin], end - begin)
        if x.o.outputs.correct != NULL:
            for row in range(begin, end):
                correct += x.predicted[row] == target_at(&x.o, row) and not is_ignored(&x.o, row)
        begin = end
        if last_check != NULL:
            _tasks.check_signals(last_check)
    if x.o.outputs.correct != NULL:
        x.o.outputs.correct[0] = correct
    if x.o.loss != NULL and x.o.reduction != REDUCTION_NONE:
        write_reduced(&x.o, x.denominators, ag_sums_total_of_all(losses), ag_sums_total_of_all(squares))
    return 0


cdef void set_class_weights(CrossEntropy *x) noexcept nogil:
    """Set the sum of the class weights, and the kernels' class weights if they read any."""
    cdef Py_ssize_t v
    cdef ag_sum total
    cdef ag_fpenv mode
    x.class_sum, x.class_scale = <double>x.s.p.n, 1
    if x.o.class_weight == NULL:
        return
    mode = ag_fpenv_enter()
    total.sum = total.compensation = 0
    for v in range(x.s.p.n):
        ag_sum_add(&total, x.o.class_weight[v])
    x.class_sum = ag_sum_total(total)
    if x.kernel_weight != NULL:
        x.class_scale = round_class_weights(x.kernel_weight, x.o.class_weight, x.s.p.n, x.o.is_double)
    ag_fpenv_leave(mode)


cdef void set_factors(CrossEntropy *x) noexcept nogil:
    """Set what all rows have in common, but for the denominators."""
    set_class_weights(x)
    x.scale, x.inverse_temperature = scale_of_all(x), inverse_of(&x.o, x.o.temperature)
    x.outer_slope = logit_scale_of(&x.o) / factor_of(&x.o)


cdef int run_loss(CrossEntropy *x, bint default_threads, double *last_check) except -1 nogil:
    """Compute the loss in its workspace; see `_tasks.run_team` for the arguments."""
    set_factors(x)
    set_denominators(&x.o, x.denominators, last_check)
    _tasks.run_team(
        run_phases, x, x.s.plan.threads, default_threads, x.s.plan.threads * x.s.plan.cost, last_check
    )
    return reduce_losses(x, last_check)


cdef void finish_without_rows(CrossEntropy *x) noexcept nogil:
    """Write the results of a loss that has no rows."""
    set_denominators(&x.o, x.denominators, NULL)  # this and reduce_losses raise nothing, as signals are not checked
    reduce_losses(x, NULL)
