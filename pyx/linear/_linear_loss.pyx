"""The loss and its gradients, in one pass over the logits if these can be cached, otherwise in two.

The caller owns the memory. It fills in the first fields of a `Loss` and its options, calls `describe_loss` and `prepare_loss`, allocates
`loss_workspace_size` bytes, calls `place_loss_workspace` and `run_loss`.

Options that only scale a row's upstream gradient, and a bias, leave the kernels as they are. With any other option `Problem.is_general` is
set: the kernels then make P of the coefficients of `ag_loss_row`, which `finish_row` computes from the statistics.

If a vocabulary is split over ranks, each rank has a part. It computes the statistics of its part with one `Loss`. The
caller combines the statistics of all ranks, and computes the gradients of the part with another `Loss`.
"""

from libc.math cimport INFINITY, NAN, isfinite
from libc.stdint cimport int64_t
from libc.string cimport memset

from ascend_grad cimport _tasks
from ascend_grad._kernels cimport (
    AG_FLOAT64,
    AG_SUM_LANES,
    ag_bounded_factor,
    ag_entropy,
    ag_fpenv,
    ag_fpenv_enter,
    ag_fpenv_leave,
    ag_log_sum,
    ag_log_sum_exp,
    ag_negative_log_prob,
    ag_row_statistics,
    ag_scaled_weight,
    ag_smoothed_sum,
    ag_sum,
    ag_sums_total_of_all,
)
from ascend_grad._linear_kernels cimport (
    AG_ELSEWHERE, ag_dense_row_finish, ag_linear_kernels, ag_loss_row, ag_loss_row_finish, ag_loss_targets, ag_targets_of_row
)
from ascend_grad._linear_plan cimport kernels_for
from ascend_grad._linear_problem cimport (
    ROWS_PER_CHECK,
    VECTOR_PADDING,
    Problem,
    acc_size_of,
    bound_transform,
    count_active_rows,
    entry_of_row,
    is_active,
    largest_bias,
    number,
    round_bias,
    set_number,
)
from ascend_grad._linear_results cimport sum_dense_weights
from ascend_grad._linear_schedule cimport (
    Schedule,
    has_plans,
    place_workspace,
    prepare,
    run,
    workspace_bound,
    workspace_size,
)
from ascend_grad._loss_options cimport (
    REDUCTION_NONE,
    LossOptions,
    first_target,
    grad_loss_of,
    has_output_grads,
    has_outputs,
    has_square,
    has_target_grads,
    has_upstream,
    is_dense,
    needs_entropy,
    number_of,
    prob_at,
    round_class_weights,
    set_denominators,
    smoothing_term,
    target_at,
    temperature_of,
    token_weight_of,
    upstream_of,
    write_log_prob,
    write_nothing,
    write_number,
    write_outputs,
    write_reduced,
)
from ascend_grad._memory cimport Arena, arena_alloc, ceil_div

# ---- vectors ---------------------------------------------------------------------------------------------------------

cdef inline bint with_gradients(const Loss *x) noexcept nogil:
    return x.p.with_input_grad or x.p.with_weight_grad or x.with_bias_grad


cdef inline bint has_statistics(const Loss *x) noexcept nogil:
    """Return whether the caller gives the statistics, so that only gradients are computed."""
    return x.lse != NULL or x.whole.max != NULL


cdef void describe_loss(Loss *x) noexcept nogil:
    """Set the rows of the problem, and the fields that say what the kernels have to compute."""
    cdef const LossOptions *o = &x.o
    cdef bint is_scaled = o.temperatures != NULL or o.temperature != 1
    x.p.rows.total = x.p.rows.active = o.rows
    x.p.rows.target, x.p.rows.is_wide, x.p.rows.start, x.p.rows.size = o.target, o.is_wide, o.first_entry, x.p.vocab
    x.p.rows.can_ignore, x.p.rows.ignored, x.p.rows.token_weight = not is_dense(o), o.ignore_index, o.token_weight
    x.o.is_double = x.p.dtype == AG_FLOAT64
    # Upstream gradients of outputs count whatever the token weight is.
    x.p.rows.with_outputs = has_outputs(o) or has_output_grads(o)
    x.p.transform.scale, x.p.transform.softcap = o.logit_scale, o.softcap
    bound_transform(&x.p)
    is_scaled = is_scaled or x.p.transform.scale != 1 or x.p.transform.softcap > 0
    x.p.transform.is_needed = x.bias != NULL or is_scaled
    x.p.is_general = (
        is_scaled or o.label_smoothing > 0 or has_square(o) or o.class_weight != NULL
        or o.target_prob != NULL or is_dense(o) or x.lse != NULL or x.is_part
    )
    x.p.with_moments = needs_entropy(o) or o.label_smoothing > 0 or is_dense(o) or x.with_more
    x.p.with_more = x.p.with_moments or o.outputs.predicted != NULL or o.outputs.correct != NULL
    x.p.label_smoothing, x.p.class_weight = o.label_smoothing, o.class_weight if o.label_smoothing > 0 else NULL
    x.p.class_sum, x.p.class_scale = x.p.vocab, 1
    if is_dense(o):
        # Smoothed probabilities take the part of smoothing. A share does not become 0, as in the loss of logits.
        x.p.rows.target, x.p.label_smoothing, x.p.class_weight = NULL, 0, o.class_weight
        x.p.kept, x.p.share = 1 - o.label_smoothing, ag_scaled_weight(o.label_smoothing / x.p.vocab, 1, x.o.is_double)


cdef Py_ssize_t place_vectors(Loss *x, char *base) noexcept nogil:
    """Place the vectors of a loss in memory that begins at `base`, and return their bytes. NULL only measures the bytes."""
    cdef Problem *p = &x.p
    cdef Py_ssize_t acc = acc_size_of(p.dtype), rows = p.rows.total, count = rows * x.o.target_count
    cdef Arena arena
    arena.base, arena.used = base, 0
    x.grad = arena_alloc(&arena, rows * acc)
    p.logits_max = arena_alloc(&arena, rows * acc)
    p.sum_exp = arena_alloc(&arena, rows * acc)
    p.predicted = arena_alloc(&arena, rows * acc)
    p.rest = <double *>arena_alloc(&arena, rows * sizeof(double))
    if not p.is_general:
        p.complement = arena_alloc(&arena, rows * acc)
    if p.is_general or p.with_more:
        p.loss_rows = <ag_loss_row *>arena_alloc(&arena, rows * sizeof(ag_loss_row))
    p.targets.count = x.o.target_count
    p.targets.grad_log_prob = x.o.grad_log_prob if x.o.target_prob != NULL else NULL
    if p.is_general:
        p.targets.entries = <int64_t *>arena_alloc(&arena, count * sizeof(int64_t))
        p.targets.weights = <double *>arena_alloc(&arena, count * sizeof(double))
        p.target_logits = <double *>arena_alloc(&arena, count * sizeof(double))
    if x.o.target_prob != NULL:
        x.row_targets = <int64_t *>arena_alloc(&arena, rows * sizeof(int64_t))
    if x.bias != NULL:
        p.transform.bias = arena_alloc(&arena, (p.vocab + VECTOR_PADDING) * acc)
    if p.class_weight != NULL:
        p.class_weight_values = arena_alloc(&arena, (p.vocab + VECTOR_PADDING) * acc)
    if x.with_bias_grad:
        p.bias_sums = <double *>arena_alloc(&arena, p.vocab * sizeof(double))
    return arena.used


cdef Py_ssize_t vectors_size(const Loss *x) noexcept nogil:
    """Return the bytes of the vectors of a loss, at an aligned address."""
    cdef Loss copy = x[0]
    return place_vectors(&copy, NULL)


cdef void set_targets(Loss *x, Py_ssize_t i) noexcept nogil:
    """Write the vocabulary entries of the targets of row i, and their probabilities times class weights."""
    cdef int64_t *entries = <int64_t *>x.p.targets.entries + i * x.o.target_count
    cdef double *weights = <double *>x.p.targets.weights + i * x.o.target_count
    cdef double *logits = x.p.target_logits + i * x.o.target_count
    cdef Py_ssize_t k
    cdef int64_t target
    for k in range(x.o.target_count):
        if x.o.target_prob == NULL:
            entries[k], weights[k] = entry_of_row(&x.p.rows, i), 1
        else:
            target = target_at(&x.o, i * x.o.target_count + k)
            entries[k], weights[k] = -1, 0
            if target != x.p.rows.ignored:
                entries[k], weights[k] = target - x.p.rows.start, prob_at(&x.o, i * x.o.target_count + k)
        # Without statistics no target counts as nearly certain.
        logits[k] = 0 if x.lse == NULL else -INFINITY
        if x.is_part:
            set_target_of_part(x, i, k)
        elif entries[k] >= 0 and x.o.class_weight != NULL:
            weights[k] *= x.o.class_weight[entries[k]]


cdef void set_target_of_part(Loss *x, Py_ssize_t i, Py_ssize_t k) noexcept nogil:
    """Mark target k of row i if it is in another part. Copy its weight and logit from the whole vocabulary, if known."""
    cdef Py_ssize_t at = i * x.o.target_count + k
    cdef int64_t *entry = <int64_t *>x.p.targets.entries + at
    if not 0 <= entry[0] < x.p.vocab:
        entry[0] = AG_ELSEWHERE
    if x.whole.max != NULL:
        (<double *>x.p.targets.weights)[at] = x.whole.target_weights[at]
        x.p.target_logits[at] = x.whole.target_logits[at]


cdef inline bint is_stepped(Py_ssize_t i, double *last_check) noexcept nogil:
    return last_check != NULL and i % ROWS_PER_CHECK == ROWS_PER_CHECK - 1


cdef void set_class_weights(Loss *x, bint is_double) noexcept nogil:
    """Write the class weights that smoothing uses as accumulators, followed by zeros, and set their sum."""
    cdef Py_ssize_t v
    cdef void *values = <void *>x.p.class_weight_values
    x.p.class_scale, x.p.class_sum = round_class_weights(values, x.p.class_weight, x.p.vocab, is_double), 0
    for v in range(x.p.vocab):
        x.p.class_sum += x.p.class_weight[v]
    for v in range(x.p.vocab, x.p.vocab + VECTOR_PADDING):
        set_number(values, v, is_double, 0)


cdef int set_rows(Loss *x, double *last_check) except -1 nogil:
    """Write what the kernels read of the vocabulary and of each row."""
    cdef bint is_double = acc_size_of(x.p.dtype) == 8
    cdef Py_ssize_t i
    cdef ag_fpenv mode = ag_fpenv_enter()
    if x.bias != NULL:
        round_bias(
            <void *>x.p.transform.bias, x.bias, x.p.vocab,
            largest_bias(&x.p, x.o.temperature, x.o.temperatures, x.p.rows.total), is_double
        )
    if x.p.class_weight != NULL:
        set_class_weights(x, is_double)
    if x.whole.max != NULL:
        x.p.class_sum = x.whole.class_sum
    ag_fpenv_leave(mode)
    if x.with_bias_grad:
        memset(x.p.bias_sums, 0, x.p.vocab * sizeof(double))
    if x.o.target_prob != NULL:
        for i in range(x.p.rows.total):
            x.row_targets[i] = first_target(&x.o, i)
            if is_stepped(i, last_check):
                _tasks.check_signals(last_check)
        x.p.rows.target, x.p.rows.is_wide = x.row_targets, True
    if x.p.loss_rows == NULL:
        return 0
    for i in range(x.p.rows.total):
        memset(&x.p.loss_rows[i], 0, sizeof(ag_loss_row))
        x.p.loss_rows[i].inverse_temperature = 1 / ag_bounded_factor(
            temperature_of(&x.o, i), is_double
        )
        if x.p.is_general:
            set_targets(x, i)
        if is_stepped(i, last_check):
            _tasks.check_signals(last_check)
    return 0


cdef double set_grad_of_row(Loss *x, Py_ssize_t i) noexcept nogil:
    """Set the upstream gradients of an active row, and return what `Rows.grad` holds of it."""
    cdef double weight = token_weight_of(&x.o, i), grad_output = grad_loss_of(&x.o, i), grad = 0, square = 0
    # A row of weight 0 has no gradient, whatever its upstream gradient is. Neither has a row whose upstream gradient is 0.
    cdef bint is_present = weight != 0 and grad_output != 0
    if is_present and x.denominators[0] != 0:
        grad = grad_output / x.denominators[0]
        if x.o.token_weight != NULL:
            grad *= weight
    if not x.p.is_general:
        return grad
    if is_present and has_square(&x.o) and x.denominators[1] != 0:
        square = grad_output * weight * x.o.lse_square_scale / x.denominators[1]
    x.p.loss_rows[i].grad_loss, x.p.loss_rows[i].upstream = grad, upstream_of(&x.o, i, square)
    return grad != 0 or has_upstream(&x.p.loss_rows[i].upstream) or has_target_grads(&x.o, i)


cdef void set_products(void *values, Py_ssize_t begin, Py_ssize_t end, bint is_double, double value,
                       const double *weights) noexcept nogil:
    """Set accumulators [begin, end) to one number times their weights, 0 for a weight of 0. NULL: all weights are 1."""
    cdef Py_ssize_t i
    cdef double product
    cdef double *wide = <double *>values
    cdef float *narrow = <float *>values
    # Each loop has one type and no other branch, so that it is computed in vectors.
    if weights == NULL and is_double:
        for i in range(begin, end):
            wide[i] = value
    elif weights == NULL:
        for i in range(begin, end):
            narrow[i] = <float>value
    elif is_double:
        for i in range(begin, end):
            product = value * weights[i]
            wide[i] = product if weights[i] != 0 else 0
    else:
        for i in range(begin, end):
            product = value * weights[i]
            narrow[i] = <float>(product if weights[i] != 0 else 0)


cdef int set_grad(Loss *x, double *last_check) except -1 nogil:
    """Write the upstream gradient of each row, 0 for rows that are not active."""
    cdef int acc_size = acc_size_of(x.p.dtype)
    cdef Py_ssize_t part, begin, end, i
    cdef double grad, of_all = 0
    cdef bint is_one_number = not (x.o.grad_losses != NULL or x.p.is_general or x.denominators[0] == 0)
    cdef bint is_double = acc_size == 8, are_all_active = x.p.rows.active == x.p.rows.total
    cdef bint is_product = is_one_number and are_all_active and (x.o.token_weight == NULL or x.o.grad_loss != 0)
    cdef ag_fpenv mode = ag_fpenv_enter()
    if is_one_number and x.p.rows.total:
        of_all = x.o.grad_loss / x.denominators[0]
    ag_fpenv_leave(mode)
    for part in range(ceil_div(x.p.rows.total, ROWS_PER_CHECK)):
        begin = part * ROWS_PER_CHECK
        end = min(begin + ROWS_PER_CHECK, x.p.rows.total)
        mode = ag_fpenv_enter()
        if is_product:
            set_products(x.grad, begin, end, is_double, of_all, x.o.token_weight)
        else:
            for i in range(begin, end):
                grad = 0
                if are_all_active or is_active(&x.p.rows, i, acc_size):
                    if not is_one_number:
                        grad = set_grad_of_row(x, i)
                    elif x.o.token_weight == NULL:
                        grad = of_all
                    elif x.o.token_weight[i] != 0 and x.o.grad_loss != 0:
                        grad = of_all * x.o.token_weight[i]
                set_number(x.grad, i, is_double, grad)
        for i in range(begin, end if has_statistics(x) else begin):
            set_given_statistics(x, i, is_double)
        ag_fpenv_leave(mode)
        if last_check != NULL:
            _tasks.check_signals(last_check)
    return 0


cdef void set_given_statistics(Loss *x, Py_ssize_t i, bint is_double) noexcept nogil:
    """Set the statistics of row i: the whole vocabulary's, or the given lse with a sum of exponentials of 1."""
    cdef ag_loss_targets targets = ag_targets_of_row(x.p.targets, i)
    cdef double maximum, rest = 0
    cdef Py_ssize_t vocab = x.p.vocab
    if x.is_part:
        maximum, rest, vocab = x.whole.max[i], x.whole.rest[i], x.whole.vocab
        x.p.loss_rows[i].moment, x.p.loss_rows[i].deficit = x.whole.moment[i], x.whole.deficit[i]
    else:
        maximum = x.lse[i] if isfinite(x.lse[i]) else NAN  # no probability follows from an infinite one
        x.p.loss_rows[i].moment = number_of(x.entropy, i)
    set_number(x.p.logits_max, i, is_double, maximum)
    set_number(x.p.sum_exp, i, is_double, 1 + rest)
    if is_dense(&x.o):
        ag_dense_row_finish(
            &x.p.loss_rows[i], sum_dense_weights(&x.p, i, -1), 0, -1, maximum, rest, x.p.transform.scale, x.p.class_scale
        )
        return
    ag_loss_row_finish(
        &x.p.loss_rows[i], &targets, x.p.target_logits + i * targets.count, maximum, rest, x.p.transform.scale,
        x.p.label_smoothing, vocab, x.p.class_weight, x.p.class_sum, x.p.class_scale
    )


# ---- passes ----------------------------------------------------------------------------------------------------------

cdef Problem statistics_of(const Loss *x) noexcept nogil:
    """Return the problem of only the statistics."""
    cdef Problem p = x.p
    p.with_statistics, p.with_input_grad, p.with_weight_grad, p.bias_sums = True, False, False, NULL
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


cdef int prepare_loss(Loss *x, Py_ssize_t workspace_bytes, double *last_check) except -1 nogil:
    """Choose how to compute a loss. `workspace_bytes` 0: the default."""
    cdef int acc_size = acc_size_of(x.p.dtype)
    cdef Problem statistics, gradients
    cdef Py_ssize_t active
    place_vectors(x, x.vectors)
    set_rows(x, last_check)
    count_active_rows(&x.p.rows, acc_size, last_check)
    if x.is_part:
        x.denominators[0] = x.denominators[1] = 1
        if x.whole.max != NULL:
            x.denominators = x.whole.denominators
    else:
        set_denominators(&x.o, x.denominators, last_check)
    set_grad(x, last_check)
    gradients = gradients_of(x, True)
    count_active_rows(&gradients.rows, acc_size, last_check)
    x.is_one_pass = False
    if with_gradients(x) and gradients.rows.active == x.p.rows.active and not has_statistics(x):
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
    return x.is_one_pass or ((has_statistics(x) or has_plans(&x.first)) and has_plans(&x.second))


cdef Py_ssize_t loss_workspace_size(Loss *x) noexcept nogil:
    """Return the bytes to allocate for the workspace, at any alignment."""
    cdef Py_ssize_t size = 0 if has_statistics(x) else workspace_size(&x.first)
    return size if x.is_one_pass else max(size, workspace_size(&x.second))


# Plans ask whether a loss has some of its vectors, and never read them.
cdef double any_address = 0


cdef Loss without_vectors(const Loss *x) noexcept nogil:
    """Return a loss whose rows are all active, for plans before there is memory for its vectors."""
    cdef Loss copy = x[0]
    copy.p.rows.active = copy.p.rows.total
    copy.p.rest = &any_address
    copy.p.bias_sums = &any_address if x.with_bias_grad else NULL
    return copy


cdef void loss_schedule(const Loss *x, Py_ssize_t workspace_bytes, Schedule *schedule, bint *is_one_pass) noexcept nogil:
    """Choose the schedule of the gradients of a loss whose rows are all active, or of its statistics without gradients."""
    cdef Loss copy = without_vectors(x)
    cdef Problem part = gradients_of(&copy, not has_statistics(x))
    prepare(schedule, &part, workspace_bytes)
    is_one_pass[0] = schedule.plans.count > 0
    if not is_one_pass[0] and not schedule.is_empty and with_gradients(x):
        part = gradients_of(&copy, False)
        prepare(schedule, &part, workspace_bytes)


cdef Py_ssize_t loss_workspace_bound(const Loss *x, Py_ssize_t workspace_bytes) noexcept nogil:
    """Return the most bytes of vectors and workspace of a loss, whichever of its rows are active.

    `workspace_bytes` 0: the default.
    """
    cdef Loss copy = without_vectors(x)
    cdef Schedule schedule
    cdef Problem part
    cdef Py_ssize_t most = 0
    if not has_statistics(x):
        part = statistics_of(&copy)
        prepare(&schedule, &part, workspace_bytes)
        most = workspace_bound(&schedule)
    if with_gradients(x):
        part = gradients_of(&copy, False)
        prepare(&schedule, &part, workspace_bytes)
        most = max(most, workspace_bound(&schedule))
    if with_gradients(x) and not has_statistics(x):
        part = gradients_of(&copy, True)
        # If the logits of all rows cannot be cached, the logits of fewer rows may be cached.
        prepare(&schedule, &part, workspace_bytes)
        most = max(most, workspace_bound(&schedule))
    return most + vectors_size(x)


cdef void place_loss_workspace(Loss *x, char *base) noexcept nogil:
    """Place the workspace in memory that begins at `base`. Both passes use the same memory."""
    if not has_statistics(x):
        place_workspace(&x.first, base)
    if not x.is_one_pass:
        place_workspace(&x.second, base)


# ---- results ---------------------------------------------------------------------------------------------------------

cdef enum:
    LOSSES = 256                      # rows whose losses are computed at a time, a multiple of AG_SUM_LANES


cdef ag_row_statistics statistics_of_row(const Loss *x, Py_ssize_t i) noexcept nogil:
    cdef ag_row_statistics row
    row.max, row.rest = number(x.p.logits_max, i, acc_size_of(x.p.dtype) == 8), x.p.rest[i]
    row.moment = row.deficit = 0
    if x.p.loss_rows != NULL:
        row.moment, row.deficit = x.p.loss_rows[i].moment, x.p.loss_rows[i].deficit * x.p.class_scale
    return row


cdef double general_loss(const Loss *x, Py_ssize_t i, const ag_row_statistics *row) noexcept nogil:
    """Return the cross-entropy of a row, without its token weight."""
    cdef Py_ssize_t k
    cdef double weight, loss = 0
    if is_dense(&x.o):
        weight = x.p.loss_rows[i].weight * x.p.class_scale
        return row.deficit if weight == 0 else ag_smoothed_sum(ag_log_sum(row), weight, row.deficit)
    for k in range(i * x.o.target_count, (i + 1) * x.o.target_count):
        weight = x.p.targets.weights[k]
        # With a smoothing of 1 a finite weight counts as 0, whatever the logit is.
        if x.p.targets.entries[k] >= 0 and weight != 0 and (x.p.label_smoothing < 1 or not isfinite(weight)):
            loss += weight * ag_negative_log_prob(row, x.p.target_logits[k])
    if x.p.label_smoothing > 0:
        loss = (1 - x.p.label_smoothing) * loss
        loss += smoothing_term(&x.o, x.p.vocab, ag_log_sum(row), x.p.class_sum, row.deficit)
    return loss


cdef void write_row_outputs(const Loss *x, Py_ssize_t i, bint is_counted) noexcept nogil:
    """Write the results of row i beside its loss."""
    cdef ag_row_statistics row = statistics_of_row(x, i)
    cdef int64_t predicted = -1
    cdef Py_ssize_t k
    if not is_counted:
        write_nothing(&x.o, i)
    else:
        predicted = x.p.loss_rows[i].argmax if x.p.with_more else 0
        write_outputs(&x.o, i, ag_log_sum_exp(&row), ag_entropy(&row))
        for k in range(i * x.o.target_count, (i + 1) * x.o.target_count if x.o.outputs.log_prob != NULL else 0):
            if x.o.target_prob == NULL:
                write_log_prob(&x.o, k, -ag_negative_log_prob(&row, number(x.p.predicted, i, x.o.is_double)))
            else:
                write_log_prob(&x.o, k, -ag_negative_log_prob(&row, x.p.target_logits[k]))
    if x.o.outputs.predicted != NULL:
        x.o.outputs.predicted[i] = predicted + x.p.rows.start if is_counted else -1
    if x.o.outputs.correct != NULL and is_counted and predicted == entry_of_row(&x.p.rows, i):
        x.o.outputs.correct[0] += 1


cdef void compute_losses(const Loss *x, Py_ssize_t first, Py_ssize_t count, double *losses, double *squares) noexcept nogil:
    """Compute the losses of at most LOSSES rows, 0 for inactive rows and for rows of weight 0.

    A general loss also has the squares of lse, in `squares`.
    """
    cdef int acc_size = acc_size_of(x.p.dtype)
    cdef bint are_all_active = x.p.rows.active == x.p.rows.total
    cdef Py_ssize_t i
    cdef double weight, product, squared
    cdef const double *weights = x.o.token_weight
    cdef ag_row_statistics row
    if not x.p.is_general:
        kernels_for(x.p.dtype).losses(
            x.p.rest + first, <const char *>x.p.predicted + first * acc_size,
            <const char *>x.p.logits_max + first * acc_size, count, losses
        )
        if are_all_active:
            for i in range(count if weights != NULL else 0):
                product = losses[i] * weights[first + i]
                losses[i] = product if weights[first + i] != 0 else 0
            return
    for i in range(count):
        weight = 0
        if are_all_active or is_active(&x.p.rows, first + i, acc_size):
            weight = token_weight_of(&x.o, first + i)
        squares[i] = 0
        if weight == 0:
            losses[i] = 0
            continue
        if x.p.is_general:
            row = statistics_of_row(x, first + i)
            losses[i] = general_loss(x, first + i, &row)
            if has_square(&x.o):
                squared = x.o.lse_square_scale * ag_log_sum_exp(&row) ** 2
                squares[i] = weight * squared if squared != 0 else 0
        losses[i] *= weight


cdef int write_losses(Loss *x, double *last_check) except -1 nogil:
    """Compute the losses and outputs of all rows, and write them or the reduced loss."""
    cdef Py_ssize_t part, first, end, i, count
    cdef bint with_square = has_square(&x.o)
    cdef double[LOSSES] losses, squares
    cdef ag_sum[AG_SUM_LANES] sums, square_sums
    cdef const ag_linear_kernels *kernels = kernels_for(x.p.dtype)
    cdef ag_fpenv mode
    memset(sums, 0, sizeof(sums))
    memset(square_sums, 0, sizeof(square_sums))
    if x.o.outputs.correct != NULL:
        x.o.outputs.correct[0] = 0
    for part in range(ceil_div(x.p.rows.total, ROWS_PER_CHECK)):
        first, end = part * ROWS_PER_CHECK, min((part + 1) * ROWS_PER_CHECK, x.p.rows.total)
        mode = ag_fpenv_enter()
        while first < end:
            count = min(<Py_ssize_t>LOSSES, end - first)
            compute_losses(x, first, count, losses, squares)
            if x.o.reduction == REDUCTION_NONE:
                for i in range(count):
                    write_number(&x.o, x.o.loss, first + i, losses[i] + (squares[i] if with_square else 0))  # -0 becomes +0
            else:
                kernels.add_numbers(sums, losses, count)
                if with_square:
                    kernels.add_numbers(square_sums, squares, count)
            if x.p.rows.with_outputs:
                for i in range(first, first + count):
                    write_row_outputs(x, i, is_active(&x.p.rows, i, acc_size_of(x.p.dtype)))
            first += count
        ag_fpenv_leave(mode)
        if last_check != NULL:
            _tasks.check_signals(last_check)
    if x.o.reduction != REDUCTION_NONE:
        write_reduced(&x.o, x.denominators, ag_sums_total_of_all(sums), ag_sums_total_of_all(square_sums))
    return 0


cdef int run_loss(Loss *x, int num_threads, double *last_check) except -1 nogil:
    """Compute the loss and the gradients. `num_threads` 0: the default. `last_check`: see `_tasks.run_team`."""
    if not has_statistics(x):
        run(&x.first, num_threads, last_check)
    if not x.is_one_pass:
        run(&x.second, num_threads, last_check)
    return 0 if x.o.loss == NULL else write_losses(x, last_check)
