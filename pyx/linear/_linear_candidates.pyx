"""Candidates: the kinds of plans that a linear problem may have, and the choice among them.

If rows or vocabulary entries are few, packing costs more than the products. Other sweeps pack nothing: a task takes a range
of the longer side, which is streamed past the shorter side. If there would be few such tasks, a task takes a range of the
features. If no sweep has space for both gradients, each gradient gets a separate sweep.

If statistics and gradients are computed together, logits are cached between them, unless computing them again takes less time.
With chunks outside, the logits of a chunk and all blocks are cached. With blocks outside, the logits of all chunks and of as
many blocks as fit are cached, in the workspace and in the memory of weight_grad, whose rows are written later.

The choice follows from the problem, the kernels and the number of bytes allowed, as the plans do. Every candidate makes plans
for some problems. The first candidate that is FINAL is chosen, or else the cheapest one. If costs are equal, the first one is
chosen.
"""

from ascend_grad._linear_kernels cimport AG_TERMS, ag_linear_kernels
from ascend_grad._linear_plan cimport (
    PACKED,
    Plan,
    Plans,
    Work,
    cache_blocks,
    cost,
    cut,
    cut_features,
    cut_streamed,
    flops,
    has_few_classes,
    logits_of_block,
    logits_of_pair,
    nbytes,
    new_plan,
    preferred_rows,
    preferred_vocab,
    search,
    with_gradients,
)
from ascend_grad._memory cimport SIZE_LIMIT

# Least rows of a chunk whose logits are cached. Measured.
cdef Py_ssize_t MIN_ROWS_TO_CACHE_LOGITS = 288
# Bytes that stay in a cache between statistics and gradients, so that caching them costs next to nothing. Measured.
cdef double CACHED_FOR_FREE = 3 << 20
# Cost of storing and reading again a byte beyond them, in floating-point operations of float32 products. Measured.
cdef double COST_OF_CACHED_BYTE = 32.0
# Cost of an exponential and a division, which cached exponentials save for each logit, in the same unit. Measured.
cdef double COST_OF_EXP = 25.0
# Number of tasks below which ranges of the features become the tasks instead.
cdef Py_ssize_t FEW_TASKS = 8
# Most rows of the longer side for which ranges of the features are the tasks.
cdef Py_ssize_t FEW_STREAMED = 48
# Most features with which more rows are not packed if the rows are streamed. Measured.
cdef Py_ssize_t FEW_FEATURES = 48
# Most features with which statistics of 5/3 of `max_unpacked_statistics` entries are not packed if rows are streamed. Measured.
cdef Py_ssize_t STREAMED_FEATURES = 200
# Least features for each row of the longer side for which ranges of the features are the tasks.
cdef Py_ssize_t FEATURES_PER_ROW = 8


cdef enum Verdict:
    UNFIT                             # the candidate is not for this problem, or exceeds the workspace
    POSSIBLE
    FINAL                             # the candidate is chosen, whatever later candidates cost


ctypedef Verdict (*maker)(
    const ag_linear_kernels *kernels, const Work *work, Py_ssize_t workspace, Plans *plans
) noexcept nogil

ctypedef struct Candidate:
    const char *name
    maker make


cdef inline bint with_loss(const Work *work) noexcept nogil:
    """Return whether statistics and gradients are computed together."""
    return work.with_statistics and with_gradients(work)


cdef Verdict unpacked(
    const ag_linear_kernels *kernels, const Work *work, Py_ssize_t workspace, Plans *plans
) noexcept nogil:
    """Pack nothing, if one side is short. The choice depends on all rows, so that fewer active rows do not take more space."""
    cdef Py_ssize_t rows = work.total_rows, vocab = work.vocab, hidden = work.hidden
    cdef Py_ssize_t streamed = max(rows, vocab), resident = min(rows, vocab)
    cdef Py_ssize_t most = kernels.max_unpacked_rows if with_gradients(work) else kernels.max_unpacked_statistics
    cdef bint has_many_features = not work.top_k and streamed <= AG_TERMS and hidden >= FEATURES_PER_ROW * streamed
    cdef Plan *plan = &plans.each[0]
    if rows > vocab and hidden <= FEW_FEATURES:  # epilogues, whose lanes are rows, are a large part of the work
        most = max(most, kernels.max_unpacked_rows * 2 // kernels.pair)
    elif work.itemsize * kernels.pair < kernels.element_size:  # packing takes longer, as it widens
        most *= 2
    elif rows > vocab and hidden <= STREAMED_FEATURES and kernels.pair == 1 and not with_gradients(work):
        most = max(most, min(most * 5 // 3, <Py_ssize_t>kernels.max_unpacked_rows))
    if not hidden or resident > most:
        return UNFIT
    if work.top_k and (rows > vocab or streamed <= FEW_STREAMED):  # only VOCAB_STREAMED computes the largest logits
        return UNFIT
    plan[0] = new_plan(kernels, work, workspace, False)
    plan.rows, plan.vocab, plan.caches_logits = rows, vocab, with_loss(work)
    plan.chunks = plan.blocks = plan.packed_chunks = 1
    if streamed <= FEW_STREAMED:
        cut_features(plan)
    else:
        cut_streamed(plan)
        if plan.tasks < FEW_TASKS and has_many_features:
            cut_features(plan)
    plans.count = 1
    return FINAL if nbytes(plan) <= workspace else UNFIT


cdef Verdict logits_of_chunks_cached(
    const ag_linear_kernels *kernels, const Work *work, Py_ssize_t workspace, Plans *plans
) noexcept nogil:
    """Compute statistics and gradients of a chunk before the next one.

    Each chunk packs the weight, so chunks are long unless it has few rows.
    """
    cdef Plan *plan = &plans.each[0]
    cdef Py_ssize_t rows, vocab
    if not with_loss(work):
        return UNFIT
    plan[0] = new_plan(kernels, work, workspace, True)
    rows, vocab = preferred_rows(plan), preferred_vocab(plan)
    plan.caches_logits, plans.count = True, 1
    while not cut(plan, rows, vocab):
        rows -= kernels.mr
        if rows < MIN_ROWS_TO_CACHE_LOGITS:
            return UNFIT
    if plan.chunks > 1 and plan.rows < MIN_ROWS_TO_CACHE_LOGITS:
        return UNFIT
    return FINAL if plan.chunks == 1 or has_few_classes(work) else POSSIBLE


cdef Verdict logits_of_blocks_cached(
    const ag_linear_kernels *kernels, const Work *work, Py_ssize_t workspace, Plans *plans
) noexcept nogil:
    """Compute the statistics of all chunks and blocks before the gradients. Logits that do not fit are computed twice."""
    cdef Plan *plan = &plans.each[0]
    if not with_loss(work):
        return UNFIT
    plan[0] = new_plan(kernels, work, workspace, False)
    if not search(plan):
        return UNFIT
    cache_blocks(plan)
    plans.count = 1
    return POSSIBLE if plan.cached_blocks else UNFIT


cdef Verdict blocks_of_preferred_size(
    const ag_linear_kernels *kernels, const Work *work, Py_ssize_t workspace, Plans *plans
) noexcept nogil:
    """Compute both gradients, if the sizes that are best without a limit fit."""
    cdef Plan *plan = &plans.each[0]
    if not (work.with_input_grad and work.with_weight_grad) or with_loss(work):
        return UNFIT
    plan[0] = new_plan(kernels, work, workspace, False)
    plans.count = 1
    return FINAL if cut(plan, preferred_rows(plan), preferred_vocab(plan)) else UNFIT


cdef Verdict blocks_outside(
    const ag_linear_kernels *kernels, const Work *work, Py_ssize_t workspace, Plans *plans
) noexcept nogil:
    """Compute statistics, or gradients, block by block. A single product over one chunk has no cheaper order."""
    cdef Plan *plan = &plans.each[0]
    if with_loss(work):
        return UNFIT
    plan[0] = new_plan(kernels, work, workspace, False)
    plans.count = 1
    if not search(plan):
        return UNFIT
    if work.with_input_grad and work.with_weight_grad:
        return POSSIBLE
    return FINAL if plan.chunks == 1 or not with_gradients(work) else POSSIBLE


cdef Verdict chunks_outside(
    const ag_linear_kernels *kernels, const Work *work, Py_ssize_t workspace, Plans *plans
) noexcept nogil:
    """Compute gradients chunk by chunk."""
    cdef Plan *plan = &plans.each[0]
    if work.with_statistics:
        return UNFIT
    plan[0] = new_plan(kernels, work, workspace, True)
    plans.count = 1
    return POSSIBLE if search(plan) else UNFIT


cdef Verdict one_sweep_for_each_gradient(
    const ag_linear_kernels *kernels, const Work *work, Py_ssize_t workspace, Plans *plans
) noexcept nogil:
    """Compute one gradient, then the other: each sweep has the whole workspace, but P is made twice."""
    cdef Work part = work[0]
    cdef Plans first, second
    if work.with_statistics or not (work.with_input_grad and work.with_weight_grad):
        return UNFIT
    part.with_weight_grad = part.buffers_weight_grad = part.with_bias_grad = False
    first = best_of(kernels, &part, workspace, &CANDIDATES[FIRST_OF_ONE_GRADIENT], 2)
    part.with_weight_grad, part.buffers_weight_grad, part.with_input_grad = True, work.buffers_weight_grad, False
    part.with_bias_grad = work.with_bias_grad
    second = best_of(kernels, &part, workspace, &CANDIDATES[FIRST_OF_ONE_GRADIENT], 2)
    if not first.count or not second.count:
        return UNFIT
    plans.count, plans.each[0], plans.each[1] = 2, first.each[0], second.each[0]
    return POSSIBLE


cdef enum:
    FIRST_OF_ONE_GRADIENT = 4         # index of the candidates for one gradient
    CANDIDATE_COUNT = 7

cdef Candidate[CANDIDATE_COUNT] CANDIDATES

CANDIDATES[0].name, CANDIDATES[0].make = b"nothing packed", unpacked
CANDIDATES[1].name, CANDIDATES[1].make = b"packed, logits of chunks cached", logits_of_chunks_cached
CANDIDATES[2].name, CANDIDATES[2].make = b"packed, logits of blocks cached", logits_of_blocks_cached
CANDIDATES[3].name, CANDIDATES[3].make = b"packed, blocks of the preferred size", blocks_of_preferred_size
CANDIDATES[4].name, CANDIDATES[4].make = b"packed, blocks outside", blocks_outside
CANDIDATES[5].name, CANDIDATES[5].make = b"packed, chunks outside", chunks_outside
CANDIDATES[6].name, CANDIDATES[6].make = b"packed, one sweep for each gradient", one_sweep_for_each_gradient


cdef double cost_of_cache(const Plan *plan) noexcept nogil:
    """Return the cost of storing logits, or their exponentials, and reading them again; negative if that saves time."""
    cdef double bytes, logits = <double>plan.work.rows * plan.work.vocab
    if plan.caches_logits:  # the chunks use the same memory
        bytes = max(<double>logits_of_pair(plan) * plan.blocks - CACHED_FOR_FREE, 0) * plan.chunks
    else:
        bytes = max(<double>logits_of_block(plan) * plan.cached_blocks - CACHED_FOR_FREE, 0)
        logits = logits * plan.cached_blocks / plan.blocks
    return COST_OF_CACHED_BYTE * bytes - (COST_OF_EXP * logits if plan.work.caches_exp else 0)


cdef double cost_of(const Plans *plans) noexcept nogil:
    """Return the cost of plans, in floating-point operations of products; see `cost`."""
    cdef double total = 0
    cdef int i
    for i in range(plans.count):
        total += cost(&plans.each[i])
    return total


cdef double time_of(const Plans *plans) noexcept nogil:
    """Return the approximate time of packed sweeps, in floating-point operations of float32 products."""
    cdef double total = cost_of(plans)
    cdef const Plan *plan
    cdef int i
    for i in range(plans.count):
        plan = &plans.each[i]
        total += flops(plan) * (1 / plan.kernels.speed - 1)
    return total


cdef bint gains_from_cache(
    const ag_linear_kernels *kernels, const Work *work, Py_ssize_t workspace, const Plans *plans
) noexcept nogil:
    """Return whether a packed sweep that caches logits takes less time than statistics and then gradients."""
    cdef Work part = work[0]
    cdef Plans statistics, gradients
    part.with_input_grad = part.with_weight_grad = part.with_bias_grad = part.buffers_weight_grad = False
    statistics = best_of(kernels, &part, workspace, &CANDIDATES[0], CANDIDATE_COUNT)
    part = work[0]
    part.with_statistics, part.weight_grad_bytes = False, 0
    gradients = best_of(kernels, &part, workspace, &CANDIDATES[0], CANDIDATE_COUNT)
    if not statistics.count or not gradients.count:
        return True
    return time_of(plans) + cost_of_cache(&plans.each[0]) <= time_of(&statistics) + time_of(&gradients)


cdef Plans best_of(
    const ag_linear_kernels *kernels, const Work *work, Py_ssize_t workspace, const Candidate *candidates, int count
) noexcept nogil:
    """Return the plans of the first candidate that is FINAL, or else of the cheapest one; a count of 0 if none fits."""
    cdef Plans best, plans
    cdef Verdict verdict
    cdef int i
    best.count = 0
    for i in range(count):
        plans.count, plans.name = 0, candidates[i].name
        verdict = candidates[i].make(kernels, work, workspace, &plans)
        if verdict == FINAL:
            return plans
        if verdict == POSSIBLE and (not best.count or cost_of(&plans) < cost_of(&best)):
            best = plans
    return best


cdef bint is_empty(const Work *work) noexcept nogil:
    """Return whether there is nothing to compute."""
    if not work.rows or not work.vocab or not (work.with_statistics or with_gradients(work)):
        return True
    return with_gradients(work) and not work.hidden and not work.with_bias_grad


cdef Plans choose_plans(const ag_linear_kernels *kernels, const Work *work, Py_ssize_t workspace) noexcept nogil:
    """Choose the plans that compute a problem.

    Their count is 0 if there is nothing to compute, if statistics and gradients of one call do not gain from cached logits,
    or if the workspace is smaller than `least_workspace`.
    """
    cdef Plans plans
    plans.count = 0
    if is_empty(work):
        return plans
    plans = best_of(kernels, work, workspace, &CANDIDATES[0], CANDIDATE_COUNT)
    if plans.count and with_loss(work) and plans.each[0].sweep == PACKED:
        if not gains_from_cache(kernels, work, workspace, &plans):
            plans.count = 0
    return plans


cdef Py_ssize_t least_of_sweep(const ag_linear_kernels *kernels, const Work *work, bint chunks_outside) noexcept nogil:
    """Return the bytes of the packed sweep whose chunks are tiles and whose blocks are panels."""
    cdef Plan plan = new_plan(kernels, work, -1, chunks_outside)
    cut(&plan, kernels.mr, kernels.nr)
    return nbytes(&plan)


cdef Py_ssize_t least_if_unpacked(const ag_linear_kernels *kernels, const Work *work) noexcept nogil:
    """Return the bytes of the sweep that packs nothing, or SIZE_LIMIT if it is not for this problem."""
    cdef Plans plans
    return nbytes(&plans.each[0]) if unpacked(kernels, work, SIZE_LIMIT, &plans) == FINAL else SIZE_LIMIT


cdef Py_ssize_t least_workspace(const ag_linear_kernels *kernels, const Work *work) noexcept nogil:
    """Return the least bytes for which there are plans, with one sweep for each product if necessary.

    A packed sweep takes at least a tile and a panel of all features, and their sums.
    """
    cdef Work part = work[0]
    cdef Py_ssize_t of_statistics = 0, of_gradients = 0
    if is_empty(work):
        return 0
    if work.with_statistics:
        part.with_input_grad = part.with_weight_grad = part.buffers_weight_grad = part.with_bias_grad = False
        of_statistics = min(least_of_sweep(kernels, &part, False), least_if_unpacked(kernels, &part))
    part.with_statistics, part.with_bias_grad = False, work.with_bias_grad
    if with_gradients(work):
        of_gradients = least_of_sweep(kernels, &part, False)
    if work.with_input_grad:
        part.with_input_grad, part.with_weight_grad, part.buffers_weight_grad = True, False, False
        of_gradients = min(least_of_sweep(kernels, &part, False), least_of_sweep(kernels, &part, True))
    if work.with_weight_grad:
        part.with_input_grad, part.with_weight_grad = False, True
        part.buffers_weight_grad = work.buffers_weight_grad
        of_gradients = max(
            of_gradients, min(least_of_sweep(kernels, &part, False), least_of_sweep(kernels, &part, True))
        )
    if with_gradients(work):
        part.with_input_grad = work.with_input_grad
        of_gradients = min(of_gradients, least_if_unpacked(kernels, &part))
    return max(of_statistics, of_gradients)


cdef bint follows_rows(const Plans *plans) noexcept nogil:
    """Return whether plans for fewer active rows may take more space, as they are cut differently."""
    if plans.count != 1:
        return True
    return plans.each[0].blocks > 1 or plans.each[0].chunks > 1 or plans.each[0].cached_blocks > 0
