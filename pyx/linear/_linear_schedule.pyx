"""Schedules of the linear operators on the CPU; the kernels are those of linear/linear.h.

1. `Plan` (in `_linear_plan`) cuts a problem to the workspace: blocks of the vocabulary, chunks of rows, and, where even one
   panel of the full width would not fit, slices of the hidden dimension.
2. `Schedule` runs the plan. For each pair of a chunk and a block, tiles of P are made and read by both products.
3. Every step is a phase of tasks that the threads of a team fetch one by one. Tasks and the order of all sums depend on shapes
   alone, so results are the same bits for any number of threads.
4. A run needs no Python: the interpreter's lock is free from the first phase to the last. The calling thread takes it
   now and then, between two tasks, to check signals; after an exception the phases that are left do nothing.

Rows whose gradient is zero (or whose target is ignored) are left out when a chunk is selected: chunks hold the others,
packed together.
"""

from cython.parallel cimport parallel, threadid

cimport numpy as cnp
from libc.math cimport INFINITY, NAN
from libc.stdint cimport int64_t, uint32_t
from libc.string cimport memset

from ascend_grad cimport _cpu, _memory, _openmp, _tasks, _threads
from ascend_grad._kernels cimport (
    AG_BFLOAT16,
    ag_convert,
    ag_fpenv,
    ag_fpenv_enter,
    ag_fpenv_leave,
    ag_monotonic_ns,
    ag_sum,
    ag_sum_total,
    ag_take,
    ag_team_add_busy,
    ag_team_begin_phase,
    ag_team_cancel_phase,
    ag_team_complete_task,
    ag_team_end_phase,
    ag_team_fetch_task,
    ag_team_init,
    ag_team_shutdown,
    ag_team_wait_phase,
    ag_thread_ns,
)
from ascend_grad._linear_kernels cimport (
    AG_FROM_LOGITS,
    AG_FROM_PRODUCT,
    AG_FROM_SOFTMAX,
    AG_TO_GRADIENT,
    AG_TO_LOGITS,
    AG_TO_MAX_SUM,
    ag_linear_block,
    ag_linear_result,
    ag_linear_source,
    ag_matrix,
)
from ascend_grad._linear_plan cimport OF_BLOCKS, Plan
from ascend_grad._linear_rows cimport (
    ROWS_PER_CHECK,
    SEGMENT,
    Rows,
    convert_segment,
    holds_sums,
    is_flat,
    is_streamed,
    matrix_of,
    number,
    set_number,
)
from ascend_grad._linear_tasks cimport Grid, grid_of
from ascend_grad._memory cimport ALIGNMENT, align_up, ceil_div

import numpy as np

cnp.import_array()

cdef cnp.dtype _float32 = np.dtype(np.float32)
cdef cnp.dtype _float64 = np.dtype(np.float64)

# Most elements that a task converts, so that signals are checked in time.
cdef Py_ssize_t MAX_TASK_ELEMENTS = 1 << 20
cdef Py_ssize_t PART_COLUMNS = 1 << 15
# Panels of columns that a task packs together, at most, unless that leaves fewer tasks; how many rows of each in turn.
cdef Py_ssize_t MIN_PACK_TASKS = 8
cdef Py_ssize_t PANELS_TOGETHER = 8
cdef Py_ssize_t ROWS_TOGETHER = 16
# Rows that a task of the other phases takes.
cdef Py_ssize_t ROWS_PER_TASK = 1024
# Flops in a nanosecond of one thread, for the choice of threads.
cdef double RATE = 40.0


cdef class Schedule:
    """One plan at work: its memory, and the block and chunk that the tasks of the current phase belong to."""

    cdef int prepare(
        self, cnp.ndarray input, cnp.ndarray weight, Plan plan, cnp.ndarray memory, Rows rows, int threads
    ) except -1:
        cdef ag_linear_block *block = &self.block
        # What came before checks signals at intervals of its own, the last of which may not have been over.
        _tasks.handle_signals()
        self.last_check = _tasks.now()
        self.kernels = plan.kernels
        self.plan = plan
        self.rows = rows
        self.variant = _cpu.active()
        memset(block, 0, sizeof(self.block))
        self.input, self.weight = matrix_of(input), matrix_of(weight)
        block.round_to_bfloat16 = self.input.dtype == AG_BFLOAT16
        self.threads, self.chosen = _threads.choose_num_threads(plan.flops() / RATE, threads), threads == 0
        self.chunk = -1
        self.keep = [input, weight, memory]
        _memory.check_layout(
            plan.layout(_memory.aligned(cnp.PyArray_BYTES(memory)), &self.at) + ALIGNMENT, memory
        )
        block.row_numbers, block.target = self.at.row_numbers, self.at.target
        block.grad, block.max, block.sum = self.at.grad, self.at.max, self.at.sum
        block.w_rows, block.w_columns = self.at.w_rows, self.at.w_columns
        block.panel_max, block.panel_sum = self.at.panel_max, self.at.panel_sum
        block.p, block.p_pairs, block.skipped = self.at.p, self.at.p_pairs, self.at.skipped
        block.logits, block.logits_compensation = self.at.logits, self.at.logits_compensation
        block.cache_logits, block.tile_pitch = plan.caches_logits, plan.pitch
        self.set_slice(0)
        return 0

    # -- phases

    cdef int work(self) except -1:
        """Run the plan on this thread, while the others of a team wait for its phases."""
        cdef int threads = 1 if self.chosen and _threads.is_oversubscribed() else self.threads
        self.at.starts[0] = 0
        ag_team_init(&self.team, threads, 1 if threads == 1 else _threads.usable_cores())
        if threads == 1:
            _openmp.record_team()
            with nogil:
                self.run_all()
        else:
            with nogil, parallel(num_threads=threads):
                _openmp.record_team()
                if threadid() == 0:
                    self.team.size = _openmp.team_size()  # there may be fewer than asked for
                    self.run_all()
                    self.end_of_phases = ag_monotonic_ns()
                    ag_team_shutdown(&self.team)
                else:
                    self.worker_loop()
            if self.chosen:
                _threads.record_team_times(ag_monotonic_ns() - self.end_of_phases, ag_take(&self.team.busy))
        _threads.mark_team_used()
        error, self.error = self.error, None  # no cycle stays
        if error is not None:
            raise error
        if self.with_input_grad and self.rows.count < self.rows.total:
            with nogil:
                self.rows.clear_absent(&self.input_out, self.plan.problem.hidden)
        return 0

    cdef void worker_loop(self) noexcept nogil:
        cdef uint32_t phase = ag_team_wait_phase(&self.team, 0)
        while phase:
            self.run_tasks(False)
            phase = ag_team_wait_phase(&self.team, phase)

    cdef void run_tasks(self, bint is_primary) noexcept nogil:
        cdef ag_fpenv mode = ag_fpenv_enter()
        cdef int64_t begin = ag_thread_ns()
        cdef Py_ssize_t u = ag_team_fetch_task(&self.team)
        while u >= 0:
            self.run_task(self.phase, u)
            ag_team_complete_task(&self.team)
            if is_primary and self.is_interrupted():
                ag_team_cancel_phase(&self.team)
            u = ag_team_fetch_task(&self.team)
        ag_team_add_busy(&self.team, ag_thread_ns() - begin)
        ag_fpenv_leave(mode)

    cdef bint is_interrupted(self) noexcept nogil:
        """Whether a signal's handler has raised, checked at intervals. For the calling thread."""
        if not self.is_over and _tasks.is_check_due(&self.last_check):
            self.check_signals()
        return self.is_over

    cdef void check_signals(self) noexcept with gil:
        try:
            _tasks.handle_signals()
        except BaseException as error:
            self.error, self.is_over = error, True

    cdef void run_phase(self, Phase phase, Py_ssize_t tasks) noexcept nogil:
        """Run so many tasks, by the team or serially."""
        cdef Py_ssize_t u
        cdef ag_fpenv mode
        if self.is_over or not tasks:
            return
        if self.team.size == 1 or tasks == 1 or (self.chosen and _threads.is_oversubscribed()):
            mode = ag_fpenv_enter()
            for u in range(tasks):
                self.run_task(phase, u)
                if self.is_interrupted():
                    break
            ag_fpenv_leave(mode)
            return
        self.phase = phase
        ag_team_begin_phase(&self.team, tasks)
        self.run_tasks(True)
        ag_team_end_phase(&self.team)
        if self.chosen:
            _threads.record_team_times(ag_take(&self.team.elapsed), ag_take(&self.team.busy))

    cdef void run_task(self, Phase phase, Py_ssize_t u) noexcept nogil:
        if phase == PACK_BLOCK:
            self.pack_block(u)
        elif phase == PACK_CHUNK:
            self.pack_chunk(u)
        elif phase == TILES:
            self.make_tiles(u)
        elif phase == MERGE:
            self.kernels.merge_max_sum(
                &self.block, u * ROWS_PER_TASK, min((u + 1) * ROWS_PER_TASK, self.block.rows)
            )
        elif phase == PRODUCTS:
            self.multiply(u)
        else:
            self.convert_rows(u)

    cdef void pack_columns(
        self, void *to, const ag_matrix *source, const int64_t *rows, int64_t start, Py_ssize_t count, Py_ssize_t u
    ) noexcept nogil:
        """Adjacent panels of columns; task u packs one part of their rows."""
        cdef Py_ssize_t nr = self.kernels.nr, pair = self.kernels.pair, panel, n, at, _step, rows_here
        cdef const int64_t *numbers = NULL
        cdef Py_ssize_t first = u // self.column_parts * self.panels_together, part = u % self.column_parts
        cdef Py_ssize_t last = min(first + self.panels_together, ceil_div(self.block.hidden_size, nr))
        cdef Py_ssize_t begin = part * ROWS_PER_TASK, end = min(begin + ROWS_PER_TASK, count)
        for _step in range(ceil_div(end - begin, ROWS_TOGETHER)):  # all panels of some rows: their pages are at hand
            rows_here = min(ROWS_TOGETHER, end - begin)
            if rows != NULL:
                numbers = rows + begin
            for panel in range(first, last):
                n = min(nr, self.block.hidden_size - panel * nr)
                at = panel * nr * ceil_div(count, pair) + begin // pair * align_up(n, self.kernels.vector)
                self.kernels.pack_columns(
                    <char *>to + at * self.kernels.element_size, source, numbers, start + begin, rows_here,
                    self.block.hidden_start + panel * nr, n
                )
            begin += rows_here

    cdef void pack_block(self, Py_ssize_t u) noexcept nogil:
        cdef Py_ssize_t nr = self.kernels.nr, panel = u // self.row_parts, part = u % self.row_parts, begin, elements
        if u < self.weight_panel_tasks:
            begin = part * PART_COLUMNS
            elements = panel * ceil_div(self.block.hidden_size, self.kernels.pair) + begin // self.kernels.pair
            self.kernels.pack_panel(
                <char *>self.block.w_rows + elements * nr * self.kernels.element_size, &self.weight, NULL,
                self.block.vocab_start + panel * nr, min(nr, self.block.vocab - panel * nr),
                self.block.hidden_start + begin, min(PART_COLUMNS, self.block.hidden_size - begin)
            )
        else:
            self.pack_columns(
                self.block.w_columns, &self.weight, NULL, self.block.vocab_start, self.block.vocab,
                u - self.weight_panel_tasks
            )

    cdef void pack_chunk(self, Py_ssize_t u) noexcept nogil:
        cdef Py_ssize_t mr = self.kernels.mr, tile = u // self.row_parts, part = u % self.row_parts, begin, elements
        if u < self.input_tile_tasks:
            begin = part * PART_COLUMNS
            elements = tile * ceil_div(self.block.hidden_size, self.kernels.pair) + begin // self.kernels.pair
            self.kernels.pack_tile(
                <char *>self.block.x_rows + elements * mr * self.kernels.element_size, &self.input,
                self.block.row_numbers + tile * mr, 0, min(mr, self.block.rows - tile * mr),
                self.block.hidden_start + begin, min(PART_COLUMNS, self.block.hidden_size - begin)
            )
        else:
            self.pack_columns(
                self.block.x_columns, &self.input, self.block.row_numbers, 0, self.block.rows, u - self.input_tile_tasks
            )

    cdef void make_tiles(self, Py_ssize_t u) noexcept nogil:
        cdef Grid *grid = &self.tiles
        cdef Py_ssize_t panel = u % grid.groups * grid.panel_step, tile = u // grid.groups * grid.tile_step
        self.kernels.tiles(
            &self.block, self.source, self.result, panel, min(panel + grid.panel_step, grid.panels), tile,
            min(tile + grid.tile_step, grid.tiles)
        )

    cdef void multiply(self, Py_ssize_t u) noexcept nogil:
        cdef bint is_input = u < self.input_grid.tasks
        cdef Grid *grid = &self.input_grid if is_input else &self.weight_grid
        cdef Py_ssize_t panel, tile
        if not is_input:
            u = u - self.input_grid.tasks
        panel, tile = u % grid.groups * grid.panel_step, u // grid.groups * grid.tile_step
        (self.kernels.input_grad if is_input else self.kernels.weight_grad)(
            &self.block, panel, min(panel + grid.panel_step, grid.panels), tile, min(tile + grid.tile_step, grid.tiles)
        )

    cdef void convert_rows(self, Py_ssize_t u) noexcept nogil:
        """Accumulators to a result of any dtype and layout."""
        cdef int acc_size = self.kernels.acc_size
        cdef Py_ssize_t first = u * self.converted_step, last = min(first + self.converted_step, self.converted_rows)
        cdef Py_ssize_t n = self.converted_n, row, begin, segment
        cdef const ag_matrix *to = &self.converted_to
        cdef const char *source
        if is_flat(to, acc_size, n) and self.converted_stride == n * acc_size:  # short rows need not be converted one by one
            source = self.converted_from + first * self.converted_stride
            ag_convert(self.variant, acc_size == 8, source, to.dtype, to.data + first * to.row_stride, (last - first) * n)
            return
        for row in range(first, last):
            source = self.converted_from + row * self.converted_stride
            for segment in range(ceil_div(n, SEGMENT)):
                begin = segment * SEGMENT
                convert_segment(self.variant, acc_size, source + begin * acc_size, to, row, begin, min(SEGMENT, n - begin))

    cdef void convert_to(
        self, const ag_matrix *out, Py_ssize_t first, Py_ssize_t rows, Py_ssize_t column, Py_ssize_t columns,
        const char *sums, Py_ssize_t stride
    ) noexcept nogil:
        """Rows [first, first + rows), columns [column, column + columns) of out from rows of accumulators."""
        self.converted_to = out[0]
        self.converted_to.data += first * self.converted_to.row_stride + column * self.converted_to.step
        self.converted_from, self.converted_stride = sums, stride
        self.converted_rows, self.converted_n = rows, columns
        self.converted_step = max(1, min(ROWS_PER_TASK // 16, MAX_TASK_ELEMENTS // max(columns, 1)))
        self.run_phase(CONVERT_ROWS, ceil_div(rows, self.converted_step))

    # -- blocks and chunks

    cdef void set_slice(self, Py_ssize_t index) noexcept nogil:
        """The part of the hidden dimension that is packed next."""
        cdef Py_ssize_t begin = index * self.plan.hidden
        self.block.hidden_start = begin
        self.block.hidden_size = min(self.plan.hidden, self.plan.problem.hidden - begin)

    cdef void set_block(self, Py_ssize_t index) noexcept nogil:
        cdef Py_ssize_t begin = index * self.plan.vocab
        self.block.vocab_start = begin
        self.block.vocab = min(self.plan.vocab, self.plan.problem.vocab - begin)
        if self.plan.caches_logits:
            self.block.logits = self.at.logits + self.plan.rows * begin * self.kernels.acc_size

    cdef void set_chunk(self, Py_ssize_t index) noexcept nogil:
        """Select the rows of a chunk, unless it is the one selected. The first time chunks come in order."""
        cdef Py_ssize_t i = self.at.starts[index], n = 0, place = index if self.plan.packed_chunks > 1 else 0
        cdef int acc_size = self.kernels.acc_size
        self.block.x_rows = self.at.x_rows + place * self.plan.packed_rows(self.plan.rows)
        self.block.x_columns = self.at.x_columns + place * self.plan.packed_columns(self.plan.rows)
        if index == self.chunk or self.is_over:
            return
        while i < self.rows.total and n < self.plan.rows and not self.is_interrupted():
            n = self.rows.select(&i, min(i + ROWS_PER_CHECK, self.rows.total), n, self.plan.rows, acc_size, &self.at)
        self.at.starts[index + 1] = i
        self.block.rows = n
        self.chunk = index

    cdef Py_ssize_t column_tasks(self, Py_ssize_t count) noexcept nogil:
        """Cut the columns of so many rows into tasks; how many."""
        cdef Py_ssize_t panels = ceil_div(self.block.hidden_size, self.kernels.nr)
        self.column_parts = ceil_div(count, ROWS_PER_TASK)
        self.panels_together = min(max(panels * self.column_parts // MIN_PACK_TASKS, 1), PANELS_TOGETHER)
        return ceil_div(panels, self.panels_together) * self.column_parts

    cdef void pack_weight(self, bint rows, bint columns) noexcept nogil:
        self.row_parts = max(1, ceil_div(self.block.hidden_size, PART_COLUMNS))
        self.weight_panel_tasks = ceil_div(self.block.vocab, self.kernels.nr) * self.row_parts if rows else 0
        self.run_phase(PACK_BLOCK, self.weight_panel_tasks + (self.column_tasks(self.block.vocab) if columns else 0))

    cdef void pack_input(self, bint rows, bint columns) noexcept nogil:
        self.row_parts = max(1, ceil_div(self.block.hidden_size, PART_COLUMNS))
        self.input_tile_tasks = ceil_div(self.block.rows, self.kernels.mr) * self.row_parts if rows else 0
        self.run_phase(PACK_CHUNK, self.input_tile_tasks + (self.column_tasks(self.block.rows) if columns else 0))

    cdef void run_tiles(self, ag_linear_source source, ag_linear_result result) noexcept nogil:
        self.source, self.result = source, result
        self.tiles = grid_of(self.kernels, self.block.vocab, self.block.rows, self.block.hidden_size)
        self.run_phase(TILES, self.tiles.tasks)

    cdef void run_products(self) noexcept nogil:
        cdef Py_ssize_t hidden = self.block.hidden_size
        self.input_grid.tasks = self.weight_grid.tasks = 0
        if self.with_input_grad:
            self.input_grid = grid_of(self.kernels, hidden, self.block.rows, self.block.vocab)
        if self.with_weight_grad:
            self.weight_grid = grid_of(self.kernels, hidden, self.block.vocab, self.block.rows)
        self.run_phase(PRODUCTS, self.input_grid.tasks + self.weight_grid.tasks)

    cdef void make_logits(self) noexcept nogil:
        """Logits of the block and the chunk into memory, summed over slices of the hidden dimension."""
        cdef Py_ssize_t index
        for index in range(self.plan.slices):
            self.set_slice(index)
            self.pack_weight(True, False)
            self.pack_input(True, False)
            self.block.add_logits, self.block.last_logits = index > 0, index == self.plan.slices - 1
            self.run_tiles(AG_FROM_PRODUCT, AG_TO_LOGITS)

    # -- statistics of the logits

    cdef int set_statistics(
        self, cnp.ndarray logits_max, cnp.ndarray sum_exp, cnp.ndarray predicted, cnp.ndarray logits
    ) except -1:
        """Where the statistics go: contiguous arrays (BT,) of the accumulators' dtype; None or contiguous (BT, V)."""
        cdef cnp.npy_intp total = self.rows.total
        cdef cnp.npy_intp[2] shape = [total, 2]
        cdef cnp.ndarray running_sum = _memory.empty(2, shape, _float64)
        cdef ag_sum *sums = <ag_sum *>cnp.PyArray_DATA(running_sum)
        cdef Py_ssize_t i, begin, end
        self.keep.append((logits_max, sum_exp, running_sum, predicted, logits))
        for begin in range(0, total, ROWS_PER_CHECK):
            end = min(begin + ROWS_PER_CHECK, total)
            for i in range(begin, end):
                set_number(cnp.PyArray_DATA(logits_max), i, self.kernels.acc_size == 8, -INFINITY)
            memset(sums + begin, 0, (end - begin) * sizeof(ag_sum))
            _tasks.check_signals(&self.last_check)
        self.with_statistics = True
        self.block.running_max = cnp.PyArray_DATA(logits_max)
        self.block.running_sum = sums
        self.block.predicted = cnp.PyArray_DATA(predicted)
        self.sum_exp = cnp.PyArray_DATA(sum_exp)
        if logits is not None:
            self.block.logits_out = matrix_of(logits)
        return 0

    cdef void add_statistics(self) noexcept nogil:
        """Those of the current block and chunk, which are packed unless the hidden dimension is sliced."""
        if self.plan.slices > 1:
            self.make_logits()
            self.run_tiles(AG_FROM_LOGITS, AG_TO_MAX_SUM)
        else:
            self.run_tiles(AG_FROM_PRODUCT, AG_TO_MAX_SUM)
        self.run_phase(MERGE, ceil_div(self.block.rows, ROWS_PER_TASK))

    cdef void end_statistics(self, Py_ssize_t begin, Py_ssize_t end) noexcept nogil:
        """Of rows [begin, end). A sum relative to -inf would be of NaN; a row that does not count has none."""
        cdef Py_ssize_t i
        cdef ag_linear_block *block = &self.block
        cdef bint is_double = self.kernels.acc_size == 8
        cdef double sum_exp
        cdef ag_fpenv mode
        while begin < end and not self.is_interrupted():
            mode = ag_fpenv_enter()
            for i in range(begin, min(begin + ROWS_PER_CHECK, end)):
                sum_exp = ag_sum_total(block.running_sum[i])
                if number(block.running_max, i, is_double) == -INFINITY and self.rows.counts(i):
                    sum_exp = NAN
                set_number(self.sum_exp, i, is_double, sum_exp)
            ag_fpenv_leave(mode)
            begin += ROWS_PER_CHECK

    # -- gradients

    cdef int set_gradient(
        self, cnp.ndarray softmax, cnp.ndarray input_grad, cnp.ndarray weight_grad, double filter_eps
    ) except -1:
        """Where the gradients go (None, or not part of the plan: not wanted): arrays that overlap no input.

        `weight_grad` is new and contiguous where the plan caches logits in its memory.
        """
        cdef Plan plan = self.plan
        cdef int acc_size = self.kernels.acc_size
        cdef ag_linear_block *block = &self.block
        block.filter_eps = filter_eps
        if softmax is not None:
            block.softmax = matrix_of(softmax)
        block.input_grad.compensation_stride = block.weight_grad.compensation_stride = plan.sums_hidden() * acc_size
        if plan.problem.with_weight_grad:
            self.keep.append(weight_grad)
            self.with_weight_grad, self.weight_out = True, matrix_of(weight_grad)
            self.streams_weight_grad = is_streamed(weight_grad)
            if plan.blocks_in_weight_grad:
                self.logits_end = _memory.aligned(
                    cnp.PyArray_BYTES(weight_grad) + plan.problem.weight_grad_bytes - _memory.ALIGNMENT + 1
                )
            block.weight_grad.row_stride = (
                plan.sums_hidden() * acc_size if plan.problem.buffers_weight_grad else cnp.PyArray_STRIDE(weight_grad, 0)
            )
        if plan.problem.with_input_grad:
            self.keep.append(input_grad)
            self.with_input_grad, self.input_out = True, matrix_of(input_grad)
            self.streams_input_grad = is_streamed(input_grad)
            if plan.tasks_of == OF_BLOCKS and not holds_sums(input_grad, acc_size):
                self.converts_input_grad = True
                input_grad = _memory.empty_like(input_grad, _float64 if acc_size == 8 else _float32)
                self.keep.append(input_grad)
            block.input_grad.data = cnp.PyArray_BYTES(input_grad)
            block.input_grad.row_stride = cnp.PyArray_STRIDE(input_grad, 0)
        return 0

    cdef void place_sums(self, Py_ssize_t c, Py_ssize_t slice) noexcept nogil:
        """Where the products of the current block, of chunk c and of a slice (or all) are added up."""
        cdef ag_linear_block *block = &self.block
        cdef Py_ssize_t column = slice * self.plan.hidden if self.plan.by_slice else 0
        cdef Py_ssize_t row = 0 if self.plan.chunks_outside else c * self.plan.rows
        cdef Py_ssize_t word = block.vocab_start if self.plan.sums_whole_weight_grad() else 0
        if self.with_input_grad and self.at.input_compensation != NULL:
            block.input_grad.compensation = self.at.input_compensation + row * block.input_grad.compensation_stride
            block.input_grad.compensation_column = column
        if self.with_weight_grad:
            if self.plan.problem.buffers_weight_grad:
                block.weight_grad.data = self.at.weight_sums + word * block.weight_grad.row_stride
                block.weight_grad.column = column
            else:
                block.weight_grad.data = self.weight_out.data + block.vocab_start * block.weight_grad.row_stride
            if self.at.weight_compensation != NULL:
                block.weight_grad.compensation = (
                    self.at.weight_compensation + word * block.weight_grad.compensation_stride
                )
                block.weight_grad.compensation_column = column

    cdef void add_gradients(self, Py_ssize_t b, Py_ssize_t c, Py_ssize_t sweep, ag_linear_source source) noexcept nogil:
        """Those of block b and chunk c, which are the current ones, and packed unless the hidden dimension is sliced."""
        cdef ag_linear_block *block = &self.block
        cdef Py_ssize_t s, column = sweep * self.plan.hidden
        block.add_input_grad, block.last_input_grad = b > 0, b == self.plan.blocks - 1
        block.add_weight_grad, block.last_weight_grad = c > 0, c == self.plan.chunks - 1
        if sweep == 0 or self.plan.recomputes():  # else P is still there
            if source == AG_FROM_PRODUCT and self.plan.slices > 1:
                self.make_logits()
                source = AG_FROM_LOGITS
            self.run_tiles(source, AG_TO_GRADIENT)
        for s in range(sweep if self.plan.by_slice else 0, sweep + 1 if self.plan.by_slice else self.plan.slices):
            if self.plan.slices > 1:
                self.set_slice(s)
                self.pack_weight(False, self.with_input_grad)
                self.pack_input(False, self.with_weight_grad)
            self.place_sums(c, s)
            self.run_products()
        if self.with_weight_grad and self.plan.problem.buffers_weight_grad and block.last_weight_grad:
            self.convert_to(
                &self.weight_out, block.vocab_start, block.vocab, column,
                min(self.plan.sums_hidden(), self.plan.problem.hidden - column), block.weight_grad.data,
                block.weight_grad.row_stride
            )

    # -- iteration orders

    cdef void run_all(self) noexcept nogil:
        if self.plan.caches_logits:
            self.run_with_logits_of_chunks()
        elif self.plan.cached_blocks:
            self.run_with_logits_of_blocks()
        elif self.with_statistics:
            self.run_statistics()
        else:
            self.run_gradient()
        if self.converts_input_grad:
            self.convert_to(
                &self.input_out, 0, self.rows.total, 0, self.plan.problem.hidden, self.block.input_grad.data,
                self.block.input_grad.row_stride
            )

    cdef void run_statistics(self) noexcept nogil:
        """Maximum, sum of exponentials relative to it, and the target's logit, of every row that counts."""
        cdef Py_ssize_t b, c
        for b in range(self.plan.blocks):
            for c in range(self.plan.chunks):
                self.set_pair(b, c, True, False)
                self.add_statistics()
        self.end_statistics(0, self.rows.total)

    cdef void run_gradient(self) noexcept nogil:
        """Both gradients, the softmax given or computed anew."""
        cdef bint with_logits = self.plan.problem.with_logits
        cdef ag_linear_source source = AG_FROM_PRODUCT if with_logits else AG_FROM_SOFTMAX
        cdef Py_ssize_t outer, sweep, inner
        cdef Py_ssize_t b, c
        for outer in range(self.plan.chunks if self.plan.chunks_outside else self.plan.blocks):
            for sweep in range(self.plan.slices if self.plan.by_slice else 1):
                for inner in range(self.plan.blocks if self.plan.chunks_outside else self.plan.chunks):
                    b, c = (inner, outer) if self.plan.chunks_outside else (outer, inner)
                    self.set_pair(b, c, with_logits, True)
                    self.add_gradients(b, c, sweep, source)

    cdef void set_pair(self, Py_ssize_t b, Py_ssize_t c, bint logits, bint gradients) noexcept nogil:
        """Select block b and chunk c, and pack what is not for these products, unless the hidden dimension is sliced."""
        self.set_block(b)
        self.set_chunk(c)
        if b < self.plan.cached_blocks:
            self.block.logits = self.cached_logits(b, c)
        if self.plan.slices > 1:
            return
        if c == 0 or (self.plan.chunks_outside and self.plan.blocks > 1):
            self.pack_weight(logits, gradients and self.with_input_grad)
        if b == 0 or (self.plan.packed_chunks < self.plan.chunks and not self.plan.chunks_outside):
            self.pack_input(logits, gradients and self.with_weight_grad)

    cdef char *cached_logits(self, Py_ssize_t b, Py_ssize_t c) noexcept nogil:
        """Of block b and chunk c: the first blocks' at the end of weight_grad, the others' in the workspace."""
        cdef Py_ssize_t of_block = self.plan.logits_of_block(), behind = b - self.plan.blocks_in_weight_grad
        cdef char *first
        if behind < 0:
            first = self.logits_end + behind * of_block
        else:
            first = self.at.logits + behind * of_block
        return first + of_block // self.plan.chunks * c

    cdef void run_with_logits_of_blocks(self) noexcept nogil:
        """All blocks twice: their logits are there the second time, or are computed anew. `rows` reads these statistics."""
        cdef Py_ssize_t b, c
        cdef bint is_cached
        for b in range(self.plan.blocks):
            self.block.cache_logits = b < self.plan.cached_blocks
            for c in range(self.plan.chunks):
                self.set_pair(b, c, True, False)
                self.add_statistics()
        self.end_statistics(0, self.rows.total)
        self.chunk = -1  # select it again, to read them
        for b in range(self.plan.blocks):
            is_cached = b < self.plan.cached_blocks
            for c in range(self.plan.chunks):
                self.set_pair(b, c, not is_cached, True)
                self.add_gradients(b, c, 0, AG_FROM_LOGITS if is_cached else AG_FROM_PRODUCT)

    cdef void run_with_logits_of_chunks(self) noexcept nogil:
        """Both passes over a chunk before the next one, its logits cached in between. `rows` reads these statistics."""
        cdef Py_ssize_t b, c
        cdef bint is_one = self.plan.blocks == 1
        for c in range(self.plan.chunks):
            self.set_chunk(c)
            self.pack_input(True, self.with_weight_grad)
            for b in range(self.plan.blocks):
                self.set_block(b)
                self.pack_weight(True, self.with_input_grad and is_one)
                self.add_statistics()
            self.end_statistics(self.at.starts[c], self.at.starts[c + 1])
            self.chunk = -1  # select it again, to read them
            self.set_chunk(c)
            for b in range(self.plan.blocks):
                self.set_block(b)
                if not is_one:
                    self.pack_weight(False, self.with_input_grad)
                self.add_gradients(b, c, 0, AG_FROM_LOGITS)
