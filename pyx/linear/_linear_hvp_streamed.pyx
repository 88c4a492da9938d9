"""The product of the Hessian and a vector for few classes: one pass over the rows, which packs nothing.

A task streams a range of the rows past the weight and the vector, whose rows follow those of the weight. A tile has the logits
and their changes, (2 V, pitch), and becomes P, (V, pitch). The product has a partial sum for each task.

The Hessian of a row with respect to the logits follows from the probabilities and one number for the row, unless the logits
have a softcap or the loss has a term of the squared lse.
"""

from libc.math cimport fabs
from libc.stdint cimport int64_t
from libc.string cimport memset

from ascend_grad cimport _cpu, _tasks, _threads
from ascend_grad._cross_entropy_rows cimport logit_scale_of
from ascend_grad._kernels cimport ag_bounded_factor, ag_coefficients_of, ag_upstream
from ascend_grad._linear_kernels cimport AG_MAX_STREAMED_STEP, AG_MAX_UNPACKED_ROWS, AG_TILE, ag_linear_block, ag_rows
from ascend_grad._linear_partial_sums cimport combine_partial_sums
from ascend_grad._linear_plan cimport (
    Plan,
    Work,
    cut_streamed,
    flops,
    kernels_for,
    layout,
    nbytes,
    new_plan,
    sums_pitch,
    work_of,
)
from ascend_grad._linear_problem cimport ChunkBuffers, copy_number, select_rows, set_number
from ascend_grad._linear_run cimport Run, new_block, rows_of
from ascend_grad._loss_options cimport (
    class_weight_of,
    grad_loss_of,
    has_square,
    is_dense,
    is_ignored,
    prob_at,
    target_at,
    token_weight_of,
)
from ascend_grad._memory cimport SIZE_LIMIT, aligned
from ascend_grad._tasks cimport Team

# Floating-point operations of this sweep in a nanosecond, on one thread.
cdef double RATE = 20.0
# The factor of logits is in the coefficients of the rows, twice. Within these limits they keep their digits.
cdef double LEAST_FACTOR = 2.0**-20
cdef double LARGEST_FACTOR = 2.0**20


ctypedef struct Pass:
    Run run
    ag_linear_block block             # all classes
    const void *coefficients          # accumulators (BT,)


cdef double factor_of_logits(const LossOptions *o) noexcept nogil:
    """Return the factor of logits, if rows have no temperatures."""
    return logit_scale_of(o) / ag_bounded_factor(o.temperature, o.is_double)


cdef bint is_streamed(const LossOptions *o, Py_ssize_t rows, Py_ssize_t vocab, Py_ssize_t hidden) noexcept nogil:
    """Return whether this sweep computes the products of a loss."""
    return (
        0 < vocab <= AG_MAX_UNPACKED_ROWS and rows > vocab and hidden > 0 and o.temperatures == NULL and o.softcap <= 0
        and not has_square(o) and not is_dense(o) and LEAST_FACTOR <= fabs(factor_of_logits(o)) <= LARGEST_FACTOR
    )


cdef void set_coefficients(
    const LossOptions *o, const double *denominators, Py_ssize_t vocab, void *present, void *coefficients
) noexcept nogil:
    """Set which rows have an upstream gradient, as 1 or 0, and the factor of each row's Hessian.

    The factor has the square of the factor of logits. It may be 0 in rows that are present, as of a class weight of 0: their
    products are 0 or NaN.
    """
    cdef Py_ssize_t row, k
    cdef double kept, smoothed, of_logits = factor_of_logits(o), class_sum = 0
    cdef bint is_present
    cdef ag_upstream others           # none
    memset(&others, 0, sizeof(others))
    for k in range(vocab):
        class_sum += class_weight_of(o, k)
    for row in range(o.rows):
        is_present = not (
            is_ignored(o, row) or token_weight_of(o, row) == 0 or grad_loss_of(o, row) == 0 or denominators[0] == 0
        )
        kept = smoothed = 0
        if is_present:
            for k in range(row * o.target_count, (row + 1) * o.target_count):
                if target_at(o, k) != o.ignore_index:
                    kept += class_weight_of(o, target_at(o, k)) * (1 if o.target_prob == NULL else prob_at(o, k))
            smoothed = token_weight_of(o, row) * (grad_loss_of(o, row) / denominators[0])
            # Without an upstream gradient, as if the divisor is infinite, weights do not count.
            kept = kept * smoothed * (1 - o.label_smoothing) if smoothed != 0 else 0
            smoothed *= o.label_smoothing / vocab
        set_number(present, row, o.is_double, is_present)
        set_number(
            coefficients, row, o.is_double,
            ag_coefficients_of(&others, kept, smoothed, class_sum, 0).a * of_logits * of_logits
        )


cdef Plan plan_of(const Problem *p) noexcept nogil:
    """Return the plan of a problem whose weight has the rows of the vector, too, beyond its number of classes."""
    cdef Work work = work_of(p)
    cdef Plan plan
    plan = new_plan(kernels_for(p.dtype), &work, SIZE_LIMIT, False)
    plan.rows, plan.vocab, plan.chunks, plan.blocks, plan.packed_chunks = work.total_rows, work.vocab, 1, 1, 1
    cut_streamed(&plan)
    return plan


cdef Py_ssize_t workspace_size(const Plan *plan) noexcept nogil:
    return nbytes(plan)


cdef int threads_of(const Plan *plan, int num_threads) noexcept nogil:
    """Return the number of threads if such calls follow one another."""
    return _threads.expected_threads(flops(plan) / RATE, num_threads)


cdef int run(
    const Problem *p, const Plan *plan, const void *coefficients, const void *bias, double factor, char *workspace,
    int num_threads, double *last_check
) except -1 nogil:
    """Compute the product in the workspace.

    `coefficients` are the factors that `set_coefficients` sets. `bias` is NULL, or (2 V,) accumulators that are added to the
    logits and their changes.
    """
    cdef Pass x
    cdef double cost = flops(plan) / RATE
    memset(&x, 0, sizeof(x))
    x.run.p, x.run.plan, x.run.variant = p, plan, _cpu.active()
    layout(plan, aligned(workspace), &x.run.at)
    x.block = new_block(&x.run)
    x.block.vocab.start, x.block.vocab.size = 0, p.vocab
    x.block.transform.bias, x.block.transform.scale, x.coefficients = bias, factor, coefficients
    return _tasks.run_team(
        run_phases, &x, _threads.choose_num_threads(cost, num_threads), num_threads == 0, cost, last_check
    )


cdef void run_phases(void *context, Team *team) noexcept nogil:
    cdef Pass *x = <Pass *>context
    cdef Py_ssize_t task, entry, vocab = x.run.p.vocab
    x.run.team = team
    _tasks.run_phase(team, stream_rows, x, x.run.plan.tasks, False)
    combine_partial_sums(&x.run, &x.run.p.weight_grad, NULL, vocab, vocab)
    if x.run.p.bias_sums != NULL and not _tasks.is_cancelled(team, 0):
        for task in range(x.run.plan.tasks):
            for entry in range(vocab):
                x.run.p.bias_sums[entry] += x.run.at.bias_sums[task * vocab + entry]


cdef void stream_rows(const void *context, Py_ssize_t task, int thread) noexcept nogil:
    """Compute the product of the rows of one range."""
    cdef const Pass *x = <const Pass *>context
    cdef const Run *run = &x.run
    cdef const Plan *plan = run.plan
    cdef ag_linear_block block = x.block
    cdef double[2 * AG_TILE] memory
    cdef void *tile = memory
    cdef int64_t[2 * AG_MAX_STREAMED_STEP] numbers
    cdef double[AG_MAX_STREAMED_STEP] coefficients
    cdef ChunkBuffers chunk
    cdef int acc = plan.kernels.acc_size
    cdef Py_ssize_t i, hidden = run.p.hidden, vocab = run.p.vocab
    cdef Py_ssize_t row = task * plan.task_size, end = min(row + plan.task_size, run.p.rows.total)
    cdef ag_rows resident = rows_of(&run.p.weight, NULL, 0, 2 * vocab), streamed
    cdef bint add = False
    cdef char *partial = run.at.partial_sums + task * vocab * sums_pitch(plan) * acc
    cdef double *bias_sums = NULL
    memset(&chunk, 0, sizeof(chunk))
    chunk.row_numbers, chunk.target, chunk.grad = numbers, &numbers[AG_MAX_STREAMED_STEP], coefficients
    block.chunk.row_numbers, block.chunk.target, block.chunk.grad = chunk.row_numbers, chunk.target, chunk.grad
    memset(tile, 0, 2 * vocab * plan.pitch * acc)
    if run.p.bias_sums != NULL:
        bias_sums = run.at.bias_sums + task * vocab
        memset(bias_sums, 0, vocab * sizeof(double))
    while row < end and not _tasks.is_cancelled(run.team, thread):
        block.chunk.rows = select_rows(&run.p.rows, &row, end, 0, plan.step, acc, &chunk)
        if not block.chunk.rows:
            break
        # `select_rows` has copied the ones of the rows that are present.
        for i in range(block.chunk.rows):
            copy_number(coefficients, i, x.coefficients, numbers[i], acc)
        streamed = rows_of(&run.p.input, chunk.row_numbers, 0, block.chunk.rows)
        plan.kernels.dot_products(&resident, &streamed, 0, hidden, tile, plan.pitch)
        plan.kernels.columns_to_product(&block, tile)
        if bias_sums != NULL:
            plan.kernels.sum_tile(&block, tile, bias_sums)
        plan.kernels.sum_rows(vocab, &streamed, 0, hidden, tile, plan.pitch, partial, sums_pitch(plan), add)
        add = True
    if not add:
        memset(partial, 0, vocab * sums_pitch(plan) * acc)
