"""The loss and its gradients, in one pass over the logits if these can be cached, otherwise in two.

The caller owns the memory. It fills in the first fields of a `Loss`, calls `prepare_loss`, allocates `loss_workspace_size`
bytes, calls `place_loss_workspace` and `run_loss`.
"""

from libc.math cimport NAN
from libc.string cimport memset

from ascend_grad cimport _tasks
from ascend_grad._kernels cimport ag_fpenv, ag_fpenv_enter, ag_fpenv_leave
from ascend_grad._linear_problem cimport (
    ROWS_PER_CHECK,
    acc_size_of,
    count_active_rows,
    is_active,
    set_number,
)
from ascend_grad._linear_results cimport sum_losses
from ascend_grad._linear_schedule cimport (
    has_plans,
    place_workspace,
    prepare,
    run,
    workspace_bound,
    workspace_size,
)
from ascend_grad._memory cimport Arena, arena_alloc, ceil_div


cdef Py_ssize_t place_vectors(Problem *p, char *base, void **grad) noexcept nogil:
    """Place the vectors of a loss in memory that begins at `base`, and return their bytes. NULL only measures the bytes."""
    cdef Py_ssize_t size = p.rows.total * acc_size_of(p.dtype)
    cdef Arena arena
    arena.base, arena.used = base, 0
    grad[0] = arena_alloc(&arena, size)
    p.logits_max = arena_alloc(&arena, size)
    p.sum_exp = arena_alloc(&arena, size)
    p.predicted = arena_alloc(&arena, size)
    return arena.used


cdef Py_ssize_t vectors_size(const Problem *p) noexcept nogil:
    """Return the bytes of the vectors of a loss, at an aligned address."""
    cdef Problem copy = p[0]
    cdef void *grad
    return place_vectors(&copy, NULL, &grad)


cdef int set_grad(Loss *x, double *last_check) except -1 nogil:
    """Write the upstream gradient of each row, 0 for rows that are not active."""
    cdef int acc_size = acc_size_of(x.p.dtype)
    cdef Py_ssize_t part, begin, i
    cdef double grad, count = x.p.rows.active if x.reduction == REDUCTION_MEAN else 1
    cdef ag_fpenv mode
    for part in range(ceil_div(x.p.rows.total, ROWS_PER_CHECK)):
        begin = part * ROWS_PER_CHECK
        mode = ag_fpenv_enter()
        for i in range(begin, min(begin + ROWS_PER_CHECK, x.p.rows.total)):
            grad = 0
            if is_active(&x.p.rows, i, acc_size):
                grad = x.grad_loss[i if x.has_grad_for_each_row else 0] / count
            set_number(x.grad, i, acc_size == 8, grad)
        ag_fpenv_leave(mode)
        if last_check != NULL:
            _tasks.check_signals(last_check)
    return 0


cdef Problem statistics_of(const Loss *x) noexcept nogil:
    """Return the problem of the statistics alone."""
    cdef Problem p = x.p
    p.with_statistics, p.with_input_grad, p.with_weight_grad = True, False, False
    return p


cdef Problem gradients_of(const Loss *x, bint with_statistics) noexcept nogil:
    """Return the problem of the gradients, with the statistics in the same pass or from an earlier one.

    Its active rows are those whose upstream gradient is not zero.
    """
    cdef Problem p = x.p
    p.with_statistics = with_statistics
    p.rows.can_ignore, p.rows.grad, p.rows.max, p.rows.sum = False, x.grad, x.p.logits_max, x.p.sum_exp
    if not with_statistics:
        p.weight_grad_bytes = 0
    return p


cdef inline bint with_gradients(const Problem *p) noexcept nogil:
    return p.with_input_grad or p.with_weight_grad


cdef int prepare_loss(Loss *x, Py_ssize_t workspace_bytes, double *last_check) except -1 nogil:
    """Choose how to compute a loss. `workspace_bytes` 0: the default."""
    cdef int acc_size = acc_size_of(x.p.dtype)
    cdef Problem statistics, gradients
    cdef Py_ssize_t active
    place_vectors(&x.p, x.vectors, &x.grad)
    count_active_rows(&x.p.rows, acc_size, last_check)
    set_grad(x, last_check)
    gradients = gradients_of(x, True)
    count_active_rows(&gradients.rows, acc_size, last_check)
    x.is_one_pass = False
    if with_gradients(&x.p) and gradients.rows.active == x.p.rows.active:
        prepare(&x.first, &gradients, workspace_bytes)
        x.is_one_pass = x.first.plans.count > 0
    if not x.is_one_pass:
        active = gradients.rows.active
        statistics, gradients = statistics_of(x), gradients_of(x, False)
        gradients.rows.active = active
        prepare(&x.first, &statistics, workspace_bytes)
        prepare(&x.second, &gradients, workspace_bytes)
    return 0


cdef bint has_loss_plans(const Loss *x) noexcept nogil:
    """Return whether the loss can be computed within the workspace."""
    return x.is_one_pass or (has_plans(&x.first) and has_plans(&x.second))


cdef Py_ssize_t loss_workspace_size(Loss *x) noexcept nogil:
    """Return the bytes to allocate for the workspace, at any alignment."""
    cdef Py_ssize_t size = workspace_size(&x.first)
    return size if x.is_one_pass else max(size, workspace_size(&x.second))


cdef Py_ssize_t loss_workspace_bound(const Problem *p, Py_ssize_t workspace_bytes) noexcept nogil:
    """Return the most bytes of vectors and workspace of a loss, whichever of its rows are active.

    `workspace_bytes` 0: the default.
    """
    cdef Loss x
    cdef Schedule schedule
    cdef Problem part
    cdef Py_ssize_t most
    memset(&x, 0, sizeof(x))
    x.p = p[0]
    x.p.rows.active = x.p.rows.total
    part = statistics_of(&x)
    prepare(&schedule, &part, workspace_bytes)
    most = workspace_bound(&schedule)
    if with_gradients(p) and p.hidden:
        part = gradients_of(&x, False)
        prepare(&schedule, &part, workspace_bytes)
        most = max(most, workspace_bound(&schedule))
        part = gradients_of(&x, True)
        # If the logits of all rows cannot be cached, those of fewer rows may be.
        prepare(&schedule, &part, workspace_bytes)
        most = max(most, workspace_bound(&schedule))
    return most + vectors_size(p)


cdef void place_loss_workspace(Loss *x, char *base) noexcept nogil:
    """Place the workspace in memory that begins at `base`. Both passes use the same memory."""
    place_workspace(&x.first, base)
    if not x.is_one_pass:
        place_workspace(&x.second, base)


cdef int run_loss(Loss *x, int num_threads, double *last_check) except -1 nogil:
    """Compute the loss and the gradients. `num_threads` 0: the default. `last_check`: see `_tasks.run_team`."""
    cdef bint is_double = acc_size_of(x.p.dtype) == 8
    cdef double total
    cdef ag_fpenv mode
    run(&x.first, num_threads, last_check)
    if not x.is_one_pass:
        run(&x.second, num_threads, last_check)
    sum_losses(
        &x.p.rows, is_double, x.p.logits_max, x.p.sum_exp, x.p.predicted,
        x.loss if x.reduction == REDUCTION_NONE else NULL, &total, last_check
    )
    if x.reduction != REDUCTION_NONE:
        mode = ag_fpenv_enter()
        if x.reduction == REDUCTION_MEAN:
            total = total / x.p.rows.active if x.p.rows.active else NAN
        set_number(x.loss, 0, is_double, total)
        ag_fpenv_leave(mode)
    return 0
