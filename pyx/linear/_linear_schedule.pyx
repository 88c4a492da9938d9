"""Schedules of linear problems, without Python: plans, workspace, and the sweeps of the plans.

1. `choose_plans` (in `_linear_candidates`) chooses one sweep, or one for each gradient.
2. Each sweep has a separate file, which runs phases of tasks on the team of the call. Tasks and the order of all sums
   depend on the problem and the plan alone, so results are the same bits for any number of threads.
3. Rows whose gradient is zero, or whose target is ignored, are not active. Chunks hold only the active rows.

The caller owns the workspace. It calls `prepare`, allocates `workspace_size` bytes, calls `place_workspace` and `run`.
"""

from libc.math cimport INFINITY
from libc.string cimport memset

from ascend_grad cimport _cpu, _tasks, _threads
from ascend_grad._kernels cimport ag_dtype, ag_itemsize
from ascend_grad._linear_candidates cimport choose_plans, follows_rows, is_empty, least_workspace
from ascend_grad._linear_features cimport run_features
from ascend_grad._linear_kernels cimport ag_loss_row
from ascend_grad._linear_packed cimport run_packed
from ascend_grad._linear_plan cimport (
    PACKED,
    ROWS_STREAMED,
    VOCAB_STREAMED,
    Buffers,
    Work,
    flops,
    kernels_for,
    layout,
    rounds_input_grad,
    work_of,
)
from ascend_grad._linear_problem cimport (
    ROWS_PER_CHECK,
    VECTOR_PADDING,
    acc_size_of,
    clear_inactive_rows,
    clear_rows,
    holds_sums,
    set_number,
)
from ascend_grad._linear_rows_streamed cimport run_rows_streamed
from ascend_grad._linear_run cimport Run
from ascend_grad._linear_top_k cimport begin_top_k, run_top_k_streamed
from ascend_grad._linear_vocab_streamed cimport run_vocab_streamed
from ascend_grad._memory cimport ALIGNMENT, SIZE_LIMIT, Arena, aligned, arena_alloc, ceil_div
from ascend_grad._tasks cimport Team
from ascend_grad.status cimport PARAM_INVALID, SUCCESS, Status

# Least bytes of the default workspace.
cdef Py_ssize_t DEFAULT_WORKSPACE = 64 << 20
# Bytes of a problem's matrices for each byte of the default workspace, in large problems.
cdef Py_ssize_t WORKSPACE_SHARE = 4
# Floating-point operations of one thread per nanosecond, for the choice of threads.
cdef double RATE = 40.0
# Nanoseconds that the statistics of a row take beyond its products. Measured.
cdef double TIME_OF_ROW = 6.0


cdef Py_ssize_t usual_workspace(const Problem *p) noexcept nogil:
    """Return the bytes that plans may take by default if that is enough, from the sizes of inputs and results."""
    cdef Py_ssize_t itemsize = ag_itemsize[<int>p.dtype], bytes = 0
    cdef Py_ssize_t x = p.rows.total * p.hidden * itemsize // WORKSPACE_SHARE
    cdef Py_ssize_t w = p.vocab * p.hidden * itemsize // WORKSPACE_SHARE
    if p.softmax.data != NULL:
        bytes = p.rows.total * p.vocab * ag_itemsize[<int>p.softmax.dtype]
    elif p.logits.data != NULL:
        bytes = p.rows.total * p.vocab * ag_itemsize[<int>p.logits.dtype]
    bytes = x * (1 + p.with_input_grad) + w * (1 + p.with_weight_grad) + bytes // WORKSPACE_SHARE
    return max(DEFAULT_WORKSPACE, bytes)


cdef Py_ssize_t default_workspace(const Problem *p) noexcept nogil:
    """Return the bytes that plans may take by default."""
    return max(usual_workspace(p), least_workspace_of(p))


cdef Py_ssize_t least_workspace_of(const Problem *p) noexcept nogil:
    """Return the bytes of a workspace from which on there are plans, whichever rows are active."""
    cdef Work work = work_of(p)
    work.rows = p.rows.total
    return least_workspace(kernels_for(p.dtype), &work)


cdef Py_ssize_t least_workspace_of_sizes(
    ag_dtype dtype, Py_ssize_t rows, Py_ssize_t vocab, Py_ssize_t hidden, bint with_logits, bint with_statistics,
    bint with_input_grad, bint with_weight_grad, bint buffers_weight_grad, bint is_loss, Py_ssize_t top_k
) noexcept nogil:
    """Return the least workspace for these sizes; see `Work`."""
    cdef Work work
    work.rows = work.total_rows = rows
    work.vocab, work.hidden, work.itemsize = vocab, hidden, ag_itemsize[<int>dtype]
    work.with_logits, work.with_statistics = with_logits, with_statistics
    work.with_input_grad, work.with_weight_grad = with_input_grad, with_weight_grad
    work.buffers_weight_grad, work.weight_grad_bytes = with_weight_grad and buffers_weight_grad, 0
    work.top_k = top_k
    # Losses compute more than gradients and statistics. The least workspace is the same for all losses.
    work.with_rest = work.with_more = with_statistics and is_loss
    work.with_bias_grad = is_loss and (with_input_grad or with_weight_grad)
    work.caches_exp = False
    return least_workspace(kernels_for(dtype), &work)


cdef void prepare(Schedule *s, const Problem *p, Py_ssize_t workspace_bytes) noexcept nogil:
    """Choose the plans of a problem whose active rows were counted. `workspace_bytes` 0: the default."""
    cdef Work work = work_of(p)
    cdef Py_ssize_t least
    memset(s, 0, sizeof(Schedule))
    s.p, s.variant = p[0], _cpu.active()
    s.workspace_bytes = min(workspace_bytes, SIZE_LIMIT) if workspace_bytes else usual_workspace(p)
    s.is_empty = is_empty(&work)
    s.plans = choose_plans(kernels_for(p.dtype), &work, s.workspace_bytes)
    if not has_plans(s) and not workspace_bytes:
        # Computing the least workspace takes a microsecond, which calls save if a plan fits.
        least = least_workspace_of(p)
        if least > s.workspace_bytes:
            s.workspace_bytes = least
            s.plans = choose_plans(kernels_for(p.dtype), &work, least)


cdef bint has_plans(const Schedule *s) noexcept nogil:
    """Return whether the problem can be solved within the workspace."""
    return s.is_empty or s.plans.count > 0


cdef Py_ssize_t place_sums(Schedule *s, Arena *arena, bint is_packed) noexcept nogil:
    """Place what the plans do not count: sums for all rows of the call."""
    cdef int acc_size = acc_size_of(s.p.dtype)
    if s.p.bias != NULL:
        s.p.transform.bias = arena_alloc(arena, (s.p.vocab + VECTOR_PADDING) * acc_size)
    if s.p.temperatures != NULL:
        s.p.scales = <double *>arena_alloc(arena, s.p.rows.total * sizeof(double))
    if s.p.with_statistics:
        s.sums = <ag_sum *>arena_alloc(arena, s.p.rows.total * sizeof(ag_sum))
    if is_packed and s.p.with_input_grad and not holds_sums(&s.p.input_grad, acc_size):
        s.input_sums = arena_alloc(arena, s.p.rows.total * s.p.hidden * acc_size)
    return arena.used


cdef Py_ssize_t place_workspace(Schedule *s, char *base) noexcept nogil:
    """Place the workspace in memory that begins at `base`, and return its bytes. NULL only measures the bytes."""
    cdef Py_ssize_t most = 0
    cdef bint is_packed = False
    cdef Buffers ignored
    cdef Arena arena
    cdef int i
    arena.base, arena.used = base, 0
    for i in range(s.plans.count):
        most = max(most, layout(&s.plans.each[i], NULL, &ignored))
        if s.plans.each[i].sweep == PACKED and s.plans.each[i].work.with_input_grad:
            is_packed = is_packed or not rounds_input_grad(&s.plans.each[i], &s.p)
    place_sums(s, &arena, is_packed)
    s.buffers = arena_alloc(&arena, most)
    return arena.used


cdef Py_ssize_t workspace_size(Schedule *s) noexcept nogil:
    """Return the bytes to allocate for the workspace, at any alignment."""
    cdef Py_ssize_t used = place_workspace(s, NULL)
    return used + ALIGNMENT if used else 0


cdef Py_ssize_t workspace_bound(Schedule *s) noexcept nogil:
    """Return the most bytes of a workspace for this problem, whichever of its rows are active.

    Plans for fewer active rows may be other ones, which take all of the workspace.
    """
    cdef Schedule copy = s[0]
    cdef Arena arena
    if s.is_empty or not follows_rows(&s.plans):
        return workspace_size(s)
    arena.base, arena.used = NULL, 0
    return place_sums(&copy, &arena, True) + s.workspace_bytes + ALIGNMENT


# ---- runs ------------------------------------------------------------------------------------------------------------

cdef double serial_time(const Schedule *s) noexcept nogil:
    """Return the approximate nanoseconds that one thread takes."""
    cdef double time = 0
    cdef int i
    for i in range(s.plans.count):
        time += flops(&s.plans.each[i]) / RATE
        if s.plans.each[i].work.with_statistics:
            time += TIME_OF_ROW * s.plans.each[i].work.rows
    return time


cdef int threads_of(const Schedule *s, int asked) noexcept nogil:
    """Return the number of threads if such calls follow one another. `asked` is the caller's number, or 0."""
    return _threads.expected_threads(serial_time(s), asked)


cdef void run_plans(void *schedule, Team *team) noexcept nogil:
    """Run the sweeps of a schedule, as the program of a team."""
    cdef Schedule *s = <Schedule *>schedule
    cdef Run run
    cdef int i
    for i in range(s.plans.count):
        run.p, run.plan, run.variant, run.team = &s.p, &s.plans.each[i], s.variant, team
        run.sums, run.input_sums = s.sums, s.input_sums
        layout(run.plan, s.buffers, &run.at)
        if run.plan.sweep == PACKED:
            run_packed(&run)
        elif run.plan.sweep == VOCAB_STREAMED and run.plan.work.top_k:
            run_top_k_streamed(&run)
        elif run.plan.sweep == VOCAB_STREAMED:
            run_vocab_streamed(&run)
        elif run.plan.sweep == ROWS_STREAMED:
            run_rows_streamed(&run)
        else:
            run_features(&run)


cdef int begin_statistics(Schedule *s, double *last_check) except -1 nogil:
    """Initialise the statistics: maxima to -inf, sums and targets' logits to 0.

    Tasks that stream rows write the statistics of active rows themselves.
    """
    cdef ag_loss_row *row
    cdef bint is_double = acc_size_of(s.p.dtype) == 8
    cdef bint streams_rows = s.plans.count > 0 and s.plans.each[0].sweep == ROWS_STREAMED
    cdef Py_ssize_t part, begin, end, i
    if streams_rows and s.p.rows.active == s.p.rows.total:
        return 0
    for part in range(ceil_div(s.p.rows.total, ROWS_PER_CHECK)):
        begin = part * ROWS_PER_CHECK
        end = min(begin + ROWS_PER_CHECK, s.p.rows.total)
        for i in range(begin, end):
            set_number(s.p.logits_max, i, is_double, -INFINITY)
            set_number(s.p.predicted, i, is_double, 0)
            if streams_rows:
                set_number(s.p.sum_exp, i, is_double, 0)
            if s.p.rest != NULL:
                s.p.rest[i] = -1
            if s.p.with_more:
                row = &s.p.loss_rows[i]
                row.moment, row.deficit, row.weight, row.argmax = 0, 0, 0, 0
        memset(s.sums + begin, 0, (end - begin) * sizeof(ag_sum))
        if last_check != NULL:
            _tasks.check_signals(last_check)
    return 0


cdef int run(Schedule *s, int num_threads, double *last_check) except -1 nogil:
    """Solve the problem in its workspace. `num_threads` 0: the default. `last_check`: see `_tasks.run_team`."""
    cdef int acc_size = acc_size_of(s.p.dtype)
    cdef double cost = serial_time(s)
    if s.p.top_k:
        begin_top_k(&s.p, s.sums, last_check)
    elif s.p.with_statistics:
        begin_statistics(s, last_check)
    if s.plans.count:
        _tasks.run_team(
            run_plans, s, _threads.choose_num_threads(cost, num_threads), num_threads == 0, cost, last_check
        )
        if s.p.with_input_grad and s.p.rows.active < s.p.rows.total:
            clear_inactive_rows(&s.p.rows, acc_size, &s.p.input_grad, s.p.hidden, last_check)
        return 0
    if s.p.with_input_grad:
        clear_rows(&s.p.input_grad, 0, s.p.rows.total, s.p.hidden, last_check)
    if s.p.with_weight_grad:
        clear_rows(&s.p.weight_grad, 0, s.p.vocab, s.p.hidden, last_check)
    return 0


cdef Status solve(const Problem *p, char *memory, Py_ssize_t nbytes, int num_threads) noexcept nogil:
    """Solve a problem in the caller's memory, without checking signals, for callers without the interpreter's lock."""
    cdef Schedule schedule
    prepare(&schedule, p, 0)
    if not has_plans(&schedule) or workspace_size(&schedule) > nbytes:
        return PARAM_INVALID
    place_workspace(&schedule, aligned(memory))
    run(&schedule, num_threads, NULL)  # raises nothing, as signals are not checked
    return SUCCESS
