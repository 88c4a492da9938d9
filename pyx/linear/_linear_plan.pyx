"""Plans of the linear operators: how a problem is cut, in which order it is traversed, and where its buffers lie.

A problem is cut into chunks of rows, blocks of the vocabulary and, where even one panel of all features would take too much
memory, slices of the hidden dimension. A sweep has

  blocks outside   all chunks of a block, then the next block: sums of input_grad stay open from block to block
  chunks outside   all blocks of a chunk, then the next chunk: input_grad is complete with the chunk, sums of weight_grad stay
                   open

and is repeated for every slice where not even the compensation of one chunk (block) and all features fits.

More than `MAX_UNCOMPENSATED_SUMS` partial sums of anything have memory for their compensation. That is part of the layout:
a cut whose layout exceeds the workspace is no plan. Where no sweep has room for both gradients, each gets a plan of its own.

Where one side is short (few rows, few words), packing would cost more than the products: a skinny plan packs nothing. Its
tasks are ranges of the longer side, which is streamed past the shorter one, or, where that would be few tasks, of the features.
Sums over the longer side (logits, where tasks are features) have a partial sum for each task, and these are always compensated.

Where statistics and gradients are computed in one call, logits are cached in between: those of a chunk and all blocks (chunks
outside), or of all chunks and as many blocks as there is room for (blocks outside), in the workspace and in the memory of
weight_grad, whose rows are written later.

All of this follows from the problem, the kernels and the number of bytes allowed, and the order of every sum follows from it:
sizes of caches, threads and load have no say.
"""

from libc.string cimport memset

from ascend_grad._linear_kernels cimport AG_RESIDENT, AG_STREAMED, AG_TERMS, AG_TILE, ag_linear_kernels
from ascend_grad._memory cimport ALIGNMENT, SIZE_LIMIT, Arena, align_up, arena_alloc, ceil_div

# Partial sums that are added up without compensation: where there is room for it, and at most.
cdef enum:
    FEW_SUMS = 16
    MAX_UNCOMPENSATED_SUMS = 64

# Sizes that were measured; the curves are flat. A panel of so many rows or words fits into any L2, a block of P into most L3.
cdef Py_ssize_t CHUNK_ROWS = 1008
cdef Py_ssize_t BLOCK_VOCAB = 960
cdef Py_ssize_t P_ELEMENTS = 1 << 20
# Rows of a chunk from which on it pays to cache its logits.
cdef Py_ssize_t MIN_ROWS_TO_CACHE_LOGITS = 288
# Features from which on it pays to cache logits of blocks: with fewer, computing them again is no slower than reading them.
cdef Py_ssize_t MIN_HIDDEN_TO_CACHE_LOGITS = 48
# What packing an element, going to the next row of a matrix, and adding to an element of a result cost, in floating-point
# operations of the products.
cdef double PACK_COST = 75.0
cdef double ROW_COST = 5000.0
cdef double ADD_COST = 40.0
# Skinny plans: tasks where there are many, and most streamed rows of a task, which a sum takes in one chain (AG_CHAIN).
cdef Py_ssize_t SKINNY_TASKS = 32
cdef Py_ssize_t SKINNY_CHAIN = 1248
# Ranges of the features are tasks where ranges of rows or words would be fewer than this; of so few rows always; of rows and
# words up to MANY_RESIDENT and AG_TERMS, where there are so many features for each.
cdef Py_ssize_t FEW_TASKS = 8
cdef Py_ssize_t FEW_STREAMED = 48
cdef Py_ssize_t MANY_RESIDENT = 128
cdef Py_ssize_t FEATURES_PER_ROW = 8
# Features from which on logits of pairs pay without packing for all of AG_RESIDENT rows: adding up lanes is little of them.
cdef Py_ssize_t LONG_ROWS = 512
# Floating-point operations of a task: at least, where there are as many, and at most, so that signals are checked in time.
# Bytes that are streamed at a time, which the first product leaves in L2 for the second, and rows, where so few do not fit.
# Features that tasks have multiples of.
cdef double SKINNY_LEAST_FLOPS = 1 << 18
cdef double SKINNY_FLOPS = 1 << 30
cdef Py_ssize_t SKINNY_BYTES = 512 << 10
cdef Py_ssize_t SKINNY_STEP = 48
cdef Py_ssize_t SKINNY_FEATURES = 256


cdef inline Py_ssize_t times(Py_ssize_t a, Py_ssize_t b) noexcept nogil:
    """The product of sizes, at most `SIZE_LIMIT`."""
    return SIZE_LIMIT if a and b > SIZE_LIMIT // a else a * b


cdef class Plan:
    """One sweep, or one for every slice."""

    cdef Py_ssize_t preferred_rows(self) noexcept:
        """Rows of a chunk where memory is plenty. Where one side is short, the other is long."""
        cdef Py_ssize_t rows = self.problem.rows, vocab = self.problem.vocab, most = CHUNK_ROWS
        if rows > CHUNK_ROWS and vocab <= BLOCK_VOCAB:
            most = max(most, P_ELEMENTS // align_up(vocab, self.kernels.nr))
        return align_up(min(rows, most), self.kernels.mr)

    cdef Py_ssize_t preferred_vocab(self) noexcept:
        cdef Py_ssize_t rows = self.problem.rows, vocab = self.problem.vocab, most = BLOCK_VOCAB
        if rows <= CHUNK_ROWS:
            most = max(most, P_ELEMENTS // align_up(rows, self.kernels.nr))
        return align_up(min(vocab, most), self.kernels.nr)

    cdef bint cut(self, Py_ssize_t rows, Py_ssize_t vocab, Py_ssize_t hidden) noexcept:
        """Cut into equal parts that are no larger than these; whether that fits into the workspace."""
        cdef const Problem *problem = &self.problem
        cdef Py_ssize_t mr = self.kernels.mr, nr = self.kernels.nr
        self.rows = align_up(ceil_div(problem.rows, ceil_div(problem.rows, rows)), mr)
        self.chunks = ceil_div(problem.rows, self.rows)
        self.vocab = align_up(ceil_div(problem.vocab, ceil_div(problem.vocab, vocab)), nr)
        self.blocks = ceil_div(problem.vocab, self.vocab)
        self.hidden, self.slices = problem.hidden, 1
        if hidden < problem.hidden:
            self.hidden = align_up(ceil_div(problem.hidden, ceil_div(problem.hidden, hidden)), nr)
            self.slices = ceil_div(problem.hidden, self.hidden)
        for self.compensate_beyond in (FEW_SUMS, MAX_UNCOMPENSATED_SUMS):
            self.packed_chunks = self.chunks
            if self.slices == 1 and not self.chunks_outside and self.bytes() <= self.workspace:
                return True
            self.packed_chunks = 1
            if self.bytes() <= self.workspace:
                return True
        return False

    cdef bint search(self) noexcept:
        """The cheapest cut of this sweep that fits; whether there is one."""
        cdef Py_ssize_t mr = self.kernels.mr, nr = self.kernels.nr, total = max(self.problem.hidden, 1)
        cdef Py_ssize_t most = self.preferred_vocab(), rows = self.preferred_rows(), vocab, hidden
        cdef Py_ssize_t best_rows = 0, best_vocab = 0, best_hidden = 0
        # So large are blocks that leave input_grad few partial sums.
        cdef Py_ssize_t large = align_up(ceil_div(self.problem.vocab, MAX_UNCOMPENSATED_SUMS), nr)
        cdef double cost, least = -1
        if self.cut(rows, most, total):
            return True
        while True:
            vocab = max(most, large) if self.problem.with_input_grad else most
            while True:
                hidden = total
                while not self.cut(rows, vocab, hidden) and hidden > nr:
                    hidden = align_up(hidden // 2, nr)
                if self.bytes() <= self.workspace:
                    cost = self.cost()
                    if least < 0 or cost < least:
                        least, best_rows, best_vocab, best_hidden = cost, rows, vocab, hidden
                if vocab <= nr:
                    break
                vocab = most if vocab > most else align_up(vocab // 2, nr)
            if rows <= mr:
                break
            rows = align_up(rows // 2, mr)
        return least >= 0 and self.cut(best_rows, best_vocab, best_hidden)

    cdef bint recomputes(self) noexcept nogil:
        """Whether P is computed anew for every slice: another chunk (or block) comes before the next slice."""
        return self.by_slice and (self.blocks if self.chunks_outside else self.chunks) > 1

    cdef void cache_blocks(self) noexcept:
        """Cache the logits of as many blocks as there is room for, of the first ones in the memory of weight_grad.

        There they lie at its end, in the order of the blocks. Logits that are still to be read have to begin behind the rows
        of weight_grad that are written by then: both bounds are linear in the number of the block, so that the first and the
        last block decide.
        """
        cdef Py_ssize_t logits_bytes = self.logits_of_block(), room = max(self.problem.weight_grad_bytes - ALIGNMENT, 0)
        cdef Py_ssize_t written = max(times(self.vocab, self.problem.weight_grad_bytes // self.problem.vocab), 1), most, left
        most = min(max(room - written, 0) // logits_bytes, max(room - logits_bytes, 0) // written)
        if self.chunks == 1 or self.problem.buffers_weight_grad:  # else the first chunk writes where others' logits are
            most += 1
        self.blocks_in_weight_grad = min(min(most, room // logits_bytes), self.blocks)
        left = max(self.workspace - self.bytes() - ALIGNMENT, 0) // logits_bytes
        self.cached_blocks = self.blocks_in_weight_grad + min(self.blocks - self.blocks_in_weight_grad, left)

    cdef double passes_of_logits(self) noexcept:
        """How often they are computed."""
        if self.cached_blocks:
            return 2 - <double>self.cached_blocks / self.blocks
        return self.slices if self.recomputes() else 1

    cdef void cut_streamed(self) noexcept:
        """Tasks of what is many, which is streamed in steps."""
        cdef const Problem *problem = &self.problem
        cdef Py_ssize_t streamed = max(self.rows, self.vocab), resident = min(self.rows, self.vocab), steps, most
        cdef bint with_gradient = problem.with_input_grad or problem.with_weight_grad
        cdef double flops
        self.tasks_of = OF_WORDS if self.rows <= self.vocab else OF_ROWS
        flops = self.flops() / streamed  # of a row
        most = min(AG_TILE // resident, AG_STREAMED) // 16 * 16
        self.step = SKINNY_BYTES // times(self.hidden, problem.itemsize) // 8 * 8
        if not with_gradient or not 8 <= self.step < SKINNY_STEP:  # nothing, or too much, would be left in L2
            self.step = min(max(self.step, SKINNY_STEP), most)
        if not self.adds_tasks() and flops * streamed > SKINNY_LEAST_FLOPS * SKINNY_TASKS:
            self.step = min(self.step, max(streamed // SKINNY_TASKS, 1))
        self.step = min(self.step, max(<Py_ssize_t>(SKINNY_FLOPS / flops) // 8 * 8, 8))
        self.step = align_up(ceil_div(streamed, ceil_div(streamed, self.step)), 8)
        self.pitch = align_up(self.step, 16)
        flops *= self.step
        steps = max(ceil_div(streamed, SKINNY_TASKS * self.step), <Py_ssize_t>(SKINNY_LEAST_FLOPS / flops))
        if self.adds_tasks():  # partial sums shall be few beside the rows that they are made from
            steps = max(steps, ceil_div(4 * resident, self.step))
        most = min(SKINNY_CHAIN // self.step, <Py_ssize_t>(SKINNY_FLOPS / flops))
        self.tasks = ceil_div(streamed, max(min(steps, most), 1) * self.step)
        self.task_size = align_up(ceil_div(streamed, self.tasks), self.step)
        self.tasks = ceil_div(streamed, self.task_size)

    cdef void cut_features(self) noexcept:
        """Tasks of the features of all rows and words."""
        cdef double flops
        cdef Py_ssize_t least
        self.tasks_of = OF_FEATURES
        flops = self.flops() / self.hidden
        least = max(ceil_div(self.hidden, SKINNY_TASKS), <Py_ssize_t>(SKINNY_LEAST_FLOPS / flops))
        self.pitch = align_up(self.vocab, 16)
        self.task_size = align_up(min(least, max(<Py_ssize_t>(SKINNY_FLOPS / flops), 1)), SKINNY_FEATURES)
        self.tasks = ceil_div(self.hidden, self.task_size)

    # -- costs

    cdef double flops(self) noexcept:
        """Those that take as long, where memory is the limit: at least 8 terms for every element."""
        cdef double logits = self.problem.with_logits * self.passes_of_logits()
        cdef double products = logits + self.problem.with_input_grad + self.problem.with_weight_grad
        cdef Py_ssize_t rows = self.chunks * self.rows, vocab = self.blocks * self.vocab
        if self.tasks_of == OF_WORDS:
            rows = max(rows, 8)
        elif self.tasks_of == OF_ROWS:
            vocab = max(vocab, 8)
        elif self.tasks_of == OF_FEATURES:
            return 2 * products * max(rows * vocab, 4 * (rows + vocab)) * self.hidden
        return 2 * products * rows * vocab * max(self.problem.hidden, 8)

    cdef double cost(self) noexcept:
        """In floating-point operations, about."""
        cdef const Problem *problem = &self.problem
        cdef double x = <double>problem.rows * problem.hidden, w = <double>problem.vocab * problem.hidden
        cdef double sweeps = self.passes_of_logits()
        # How often X and W are packed, for the logits and for the other products.
        cdef double x_times = self.blocks, w_times = self.chunks
        if self.slices == 1:
            if self.chunks_outside or self.packed_chunks == self.chunks:
                x_times = 1
            if not self.chunks_outside:
                w_times = 1
        cdef double packed = x * x_times * (problem.with_logits * sweeps + problem.with_weight_grad)
        packed += w * w_times * (problem.with_logits * sweeps + problem.with_input_grad)
        cdef double added = x * self.blocks * problem.with_input_grad + w * self.chunks * problem.with_weight_grad
        return self.flops() + (PACK_COST + ROW_COST / max(self.hidden, 1)) * packed + ADD_COST * added

    # -- partial sums

    cdef bint compensates_logits(self) noexcept:
        return self.problem.with_logits and self.slices > self.compensate_beyond

    cdef bint compensates_input_grad(self) noexcept:
        return self.problem.with_input_grad and self.blocks > self.compensate_beyond

    cdef bint compensates_weight_grad(self) noexcept:
        return self.problem.with_weight_grad and self.chunks > self.compensate_beyond

    # -- for tests

    @property
    def nbytes(self):
        return self.bytes()

    @property
    def products(self):
        """Names of what is computed by matrix products."""
        chosen = self.problem.with_logits, self.problem.with_input_grad, self.problem.with_weight_grad
        return {name for name, is_chosen in zip(("logits", "input_grad", "weight_grad"), chosen) if is_chosen}

    @property
    def compensated(self):
        """Names of the products whose partial sums have compensation."""
        chosen = self.compensates_logits(), self.compensates_input_grad(), self.compensates_weight_grad()
        return {name for name, is_chosen in zip(("logits", "input_grad", "weight_grad"), chosen) if is_chosen}

    # -- memory

    cdef Py_ssize_t logits_of_block(self) noexcept nogil:
        """Bytes of the logits of a block and all chunks."""
        return times(self.rows * self.vocab * self.kernels.acc_size, self.chunks)

    cdef Py_ssize_t packed_rows(self, Py_ssize_t n) noexcept nogil:
        """Bytes of n packed rows of X or W, for the logits."""
        return times(n * self.kernels.element_size, ceil_div(self.hidden, self.kernels.pair))

    cdef Py_ssize_t packed_columns(self, Py_ssize_t n) noexcept nogil:
        """Bytes of the packed columns of n rows, for the other products."""
        return times(
            ceil_div(n, self.kernels.pair) * self.kernels.element_size, align_up(self.hidden, self.kernels.vector)
        )

    cdef Py_ssize_t sums_hidden(self) noexcept nogil:
        """Features that a row of sums in the workspace has."""
        return self.hidden if self.by_slice else self.problem.hidden

    cdef bint sums_whole_weight_grad(self) noexcept nogil:
        """Whether the sums of all words stay open, not only those of a block."""
        return self.chunks_outside and self.chunks > 1

    cdef bint adds_tasks(self) noexcept nogil:
        """Whether one of the products is added up over the tasks of a skinny plan."""
        return (
            (self.tasks_of == OF_WORDS and self.problem.with_input_grad)
            or (self.tasks_of == OF_ROWS and self.problem.with_weight_grad)
        )

    cdef Py_ssize_t sums_pitch(self) noexcept nogil:
        """Accumulators from row to row of the partial sums of a skinny plan: an odd number of cache lines, so that rows do
        not displace each other from L1."""
        cdef Py_ssize_t line = ALIGNMENT // self.kernels.acc_size
        return (ceil_div(self.problem.hidden, line) | 1) * line

    cdef Py_ssize_t skinny_layout(self, char *base, Buffers *at) noexcept:
        cdef const Problem *problem = &self.problem
        cdef Py_ssize_t acc = self.kernels.acc_size, rows = self.rows
        cdef Py_ssize_t resident = self.vocab if self.tasks_of == OF_ROWS else self.rows
        cdef Arena arena
        arena.base, arena.used = base, 0
        memset(at, 0, sizeof(Buffers))
        at.starts = <int64_t *>arena_alloc(&arena, (self.chunks + 1) * sizeof(int64_t))
        if self.tasks_of != OF_ROWS:  # there every task selects its own
            at.row_numbers = <int64_t *>arena_alloc(&arena, rows * sizeof(int64_t))
            at.target = <int64_t *>arena_alloc(&arena, rows * sizeof(int64_t))
            at.grad = arena_alloc(&arena, rows * acc)
            at.max = arena_alloc(&arena, rows * acc)
            at.sum = arena_alloc(&arena, rows * acc)
        if self.tasks_of == OF_WORDS and problem.with_statistics:
            at.panel_max = arena_alloc(&arena, times(self.tasks, align_up(rows, self.kernels.mr) * acc))
            at.panel_sum = arena_alloc(&arena, times(self.tasks, align_up(rows, self.kernels.mr) * acc))
        if self.tasks_of == OF_WORDS and self.caches_logits:
            at.logits = arena_alloc(&arena, times(ceil_div(self.vocab, self.step), rows * self.pitch * acc))
        if self.tasks_of == OF_FEATURES and problem.with_logits:
            at.logits = arena_alloc(&arena, times(self.tasks, rows * self.pitch * acc))
        if self.tasks_of == OF_FEATURES:
            at.p = arena_alloc(&arena, rows * self.pitch * acc)
        if self.adds_tasks():
            at.partial_sums = arena_alloc(&arena, times(times(self.tasks, resident), self.sums_pitch() * acc))
        return arena.used

    cdef Py_ssize_t layout(self, char *base, Buffers *at) noexcept:
        """Place every buffer in memory that begins at `base`; the bytes used. With NULL they are measured alone."""
        if self.tasks_of != OF_BLOCKS:
            return self.skinny_layout(base, at)
        cdef const Problem *problem = &self.problem
        cdef Py_ssize_t acc = self.kernels.acc_size, panels = self.vocab // self.kernels.nr
        cdef Py_ssize_t tile = self.rows * self.vocab  # far below the limit: both were measured
        cdef Py_ssize_t x_rows = problem.with_logits * self.packed_rows(self.rows)
        cdef Py_ssize_t w_rows = problem.with_logits * self.packed_rows(self.vocab)
        cdef Py_ssize_t x_columns = problem.with_weight_grad * self.packed_columns(self.rows)
        cdef Py_ssize_t w_columns = problem.with_input_grad * self.packed_columns(self.vocab)
        cdef Py_ssize_t sums = times(self.sums_hidden(), acc), words = self.vocab
        cdef Arena arena
        arena.base, arena.used = base, 0
        memset(at, 0, sizeof(Buffers))
        at.starts = <int64_t *>arena_alloc(&arena, (self.chunks + 1) * sizeof(int64_t))
        at.row_numbers = <int64_t *>arena_alloc(&arena, self.rows * sizeof(int64_t))
        at.target = <int64_t *>arena_alloc(&arena, self.rows * sizeof(int64_t))
        at.grad = arena_alloc(&arena, self.rows * acc)
        at.max = arena_alloc(&arena, self.rows * acc)
        at.sum = arena_alloc(&arena, self.rows * acc)
        if self.slices > 1:
            # Rows are packed for the logits, columns after them.
            at.x_rows = at.x_columns = arena_alloc(&arena, max(x_rows, x_columns))
            at.w_rows = at.w_columns = arena_alloc(&arena, max(w_rows, w_columns))
        else:
            at.x_rows = arena_alloc(&arena, times(self.packed_chunks, x_rows))
            at.x_columns = arena_alloc(&arena, times(self.packed_chunks, x_columns))
            at.w_rows = arena_alloc(&arena, w_rows)
            at.w_columns = arena_alloc(&arena, w_columns)
        if problem.with_statistics:
            at.panel_max = arena_alloc(&arena, panels * self.rows * acc)
            at.panel_sum = arena_alloc(&arena, panels * self.rows * acc)
        if problem.with_input_grad or problem.with_weight_grad:
            at.p = arena_alloc(&arena, tile * self.kernels.element_size // self.kernels.pair)
            if self.kernels.pair > 1:
                at.p_pairs = arena_alloc(&arena, tile * self.kernels.element_size // self.kernels.pair)
            at.skipped = <uint8_t *>arena_alloc(&arena, panels * (self.rows // self.kernels.mr))
        if self.caches_logits:
            at.logits = arena_alloc(&arena, times(tile * acc, self.blocks))
        elif self.cached_blocks:
            at.logits = arena_alloc(&arena, times(self.logits_of_block(), self.cached_blocks - self.blocks_in_weight_grad))
        elif self.slices > 1 and problem.with_logits:
            at.logits = arena_alloc(&arena, tile * acc)
            if self.compensates_logits():
                at.logits_compensation = arena_alloc(&arena, tile * acc)
        if self.compensates_input_grad():
            at.input_compensation = arena_alloc(
                &arena, times(self.rows * (1 if self.chunks_outside else self.chunks), sums)
            )
        if self.sums_whole_weight_grad():
            words *= self.blocks
        if problem.buffers_weight_grad:
            at.weight_sums = arena_alloc(&arena, times(words, sums))
        if self.compensates_weight_grad():
            at.weight_compensation = arena_alloc(&arena, times(words, sums))
        return arena.used

    cdef Py_ssize_t bytes(self) noexcept:
        """What the workspace takes, but for its alignment."""
        cdef Buffers ignored
        return self.layout(NULL, &ignored) + ALIGNMENT


cdef Plan new_plan(const ag_linear_kernels *kernels, const Problem *problem, Py_ssize_t workspace, bint chunks_outside):
    plan = <Plan>Plan.__new__(Plan)
    plan.kernels, plan.problem, plan.workspace = kernels, problem[0], workspace
    plan.chunks_outside = chunks_outside
    return plan


cdef Plan skinny_plan(const ag_linear_kernels *kernels, const Problem *problem, Py_ssize_t workspace, bint caches_logits):
    """The plan that packs nothing; None where that does not pay, or without the space for it.

    It follows from all rows, whether they count or not: fewer that count do not need more space.
    """
    cdef Py_ssize_t rows = problem.total_rows, vocab = problem.vocab, hidden = problem.hidden
    cdef Py_ssize_t streamed = max(rows, vocab), resident = min(rows, vocab)
    cdef bint gradients = problem.with_input_grad or problem.with_weight_grad
    cdef bint is_long = kernels.pair > 1 and hidden >= LONG_ROWS
    cdef Plan plan
    if not hidden or not vocab:
        return None
    plan = new_plan(kernels, problem, workspace, False)
    plan.rows, plan.vocab, plan.hidden = rows, vocab, hidden
    plan.chunks = plan.blocks = plan.slices = plan.packed_chunks = 1
    plan.caches_logits = caches_logits
    if streamed <= FEW_STREAMED:
        plan.cut_features()
    elif resident <= (AG_RESIDENT if is_long and not gradients else kernels.resident):
        plan.cut_streamed()
        if plan.tasks < FEW_TASKS and streamed <= AG_TERMS and hidden >= FEATURES_PER_ROW * streamed:
            plan.cut_features()
    elif (
        # Packing pays soon where products are pairs, or registers few.
        kernels.resident == AG_RESIDENT and resident <= MANY_RESIDENT and streamed <= AG_TERMS
        and hidden >= FEATURES_PER_ROW * streamed
    ):
        plan.cut_features()
    else:
        return None
    return plan if plan.bytes() <= workspace else None


cdef Plan plan_of_one(const ag_linear_kernels *kernels, const Problem *problem, Py_ssize_t workspace):
    """The cheapest plan for statistics, or for one gradient."""
    cdef Plan plan = new_plan(kernels, problem, workspace, False), other
    cdef bint fits = plan.search()
    if not (problem.with_input_grad or problem.with_weight_grad):
        return plan if fits else None
    if fits and plan.rows >= plan.problem.rows:
        return plan
    other = new_plan(kernels, problem, workspace, True)
    if other.search() and (not fits or other.cost() < plan.cost()):
        return other
    if not fits:
        plan = new_plan(kernels, problem, workspace, problem.with_input_grad)
        plan.by_slice = True
        fits = plan.search()
    return plan if fits else None


cdef list plans_of(const ag_linear_kernels *kernels, const Problem *problem, Py_ssize_t workspace):
    """The plans that compute a problem, one after another in the same workspace."""
    cdef Plan plan, other, first, second
    cdef Problem part
    cdef list plans
    plan = skinny_plan(kernels, problem, workspace, False)
    if plan is not None:
        return [plan]
    if not (problem.with_input_grad and problem.with_weight_grad):
        plans = [plan_of_one(kernels, problem, workspace)]
    else:
        plan = new_plan(kernels, problem, workspace, False)
        if plan.cut(plan.preferred_rows(), plan.preferred_vocab(), problem.hidden):
            return [plan]
        plans = [plan] if plan.search() else []
        other = new_plan(kernels, problem, workspace, True)
        if other.search() and (not plans or other.cost() < plan.cost()):
            plan, plans = other, [other]
        part = problem[0]
        part.with_weight_grad = part.buffers_weight_grad = False
        first = plan_of_one(kernels, &part, workspace)
        part.with_weight_grad, part.buffers_weight_grad = True, problem.buffers_weight_grad
        part.with_input_grad = False
        second = plan_of_one(kernels, &part, workspace)
        if first is not None and second is not None and (not plans or first.cost() + second.cost() < plan.cost()):
            plans = [first, second]
    if not plans or None in plans:
        raise MemoryError(f"a workspace of {workspace} bytes is too small for any plan")
    return plans


cdef Plan plan_with_logits(const ag_linear_kernels *kernels, const Problem *problem, Py_ssize_t workspace):
    """The cheapest plan of both passes that caches logits in between; None where there is no room, or they are computed as
    fast as read. For few rows or words nothing is packed."""
    cdef Plan plan = skinny_plan(kernels, problem, workspace, True), other
    if plan is not None:
        return plan
    plan = plan_with_logits_of_chunks(kernels, problem, workspace)
    if plan is not None and plan.chunks == 1:
        return plan
    other = plan_with_logits_of_blocks(kernels, problem, workspace)
    return plan if other is None or (plan is not None and plan.cost() <= other.cost()) else other


cdef Plan plan_with_logits_of_chunks(const ag_linear_kernels *kernels, const Problem *problem, Py_ssize_t workspace):
    """Both passes over a chunk before the next one: each chunk packs the weight, and a chunk of few rows is no gain."""
    cdef Plan plan = new_plan(kernels, problem, workspace, True)
    cdef Py_ssize_t rows = plan.preferred_rows(), vocab = plan.preferred_vocab()
    plan.caches_logits = True
    while not plan.cut(rows, vocab, problem.hidden):
        rows -= kernels.mr
        if rows < MIN_ROWS_TO_CACHE_LOGITS:
            return None
    return plan if plan.chunks == 1 or plan.rows >= MIN_ROWS_TO_CACHE_LOGITS else None


cdef Plan plan_with_logits_of_blocks(const ag_linear_kernels *kernels, const Problem *problem, Py_ssize_t workspace):
    """Each pass over all blocks and chunks; logits of blocks for which there is no room are computed twice."""
    cdef Plan plan = new_plan(kernels, problem, workspace, False)
    if problem.hidden < MIN_HIDDEN_TO_CACHE_LOGITS or not plan.search() or plan.slices > 1:
        return None
    plan.cache_blocks()
    return plan if plan.cached_blocks else None


cdef Py_ssize_t bytes_of(list plans) except -1:
    """What a workspace takes that serves these plans in turn."""
    cdef Py_ssize_t most = 0
    cdef Plan plan
    for plan in plans:
        most = max(most, plan.bytes())
    return most
