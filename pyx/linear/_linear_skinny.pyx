"""Schedules of the linear operators where rows, words or features are few: nothing is packed.

A task takes a range of what is many, or of the features, from the first product to the last. The kernels are described in
linear/linear.h, the plans in `_linear_plan`.
"""

from cython.parallel cimport threadid
from libc.math cimport INFINITY, NAN
from libc.stdint cimport int64_t
from libc.string cimport memcpy, memset

from ascend_grad._kernels cimport ag_sum, ag_sum_total
from ascend_grad._linear_kernels cimport (
    AG_FROM_LOGITS,
    AG_FROM_PRODUCT,
    AG_FROM_SOFTMAX,
    AG_RESIDENT,
    AG_STREAMED,
    AG_TERMS,
    AG_TILE,
    AG_TO_GRADIENT,
    AG_TO_MAX_SUM,
    ag_linear_block,
    ag_linear_kernels,
    ag_matrix,
    ag_rows,
)
from ascend_grad._linear_plan cimport OF_ROWS, OF_WORDS, Buffers
from ascend_grad._linear_rows cimport SEGMENT, convert_segment, copy_number, number, set_number
from ascend_grad._linear_schedule cimport (
    MERGE,
    SKINNY_EPILOGUE,
    SKINNY_PRODUCTS,
    SKINNY_SUMS,
    SKINNY_TILES,
    Phase,
    Schedule,
)
from ascend_grad._memory cimport align_up, ceil_div

# Features whose partial sums a task combines.
cdef Py_ssize_t FEATURES_PER_TASK = 1024


cdef class SkinnySchedule(Schedule):
    """The schedule of a plan whose tasks are rows, words or features."""

    cdef void run_task(self, Phase phase, Py_ssize_t u) noexcept nogil:
        if phase == MERGE:
            self.kernels.merge_max_sum(&self.block, 0, self.block.rows)
        elif phase == SKINNY_EPILOGUE:
            self.finish_tile()
        elif phase == SKINNY_PRODUCTS:
            self.write_features(u)
        elif phase == SKINNY_SUMS:
            self.combine_tasks(u)
        elif self.plan.tasks_of == OF_WORDS:
            self.stream_words(u)
        elif self.plan.tasks_of == OF_ROWS:
            self.stream_rows(u)
        else:
            self.multiply_features(u)

    cdef void run_all(self) noexcept nogil:
        if self.plan.tasks_of == OF_ROWS:
            self.run_phase(SKINNY_TILES, self.plan.tasks)
            if self.with_statistics:
                self.end_statistics(0, self.rows.total)
        else:
            self.set_chunk(0)
            self.source = AG_FROM_PRODUCT if self.plan.problem.with_logits else AG_FROM_SOFTMAX
            if self.with_statistics:
                self.result = AG_TO_MAX_SUM
                self.run_pass()
                self.end_statistics(0, self.rows.total)
                self.chunk = -1  # select the rows again, to read them
                self.set_chunk(0)
                self.source = AG_FROM_LOGITS
            if self.with_input_grad or self.with_weight_grad:
                self.result = AG_TO_GRADIENT
                self.run_pass()
        if self.plan.adds_tasks():
            self.combined_rows = self.plan.vocab if self.plan.tasks_of == OF_ROWS else self.block.rows
            self.run_phase(SKINNY_SUMS, self.combined_rows * ceil_div(self.plan.hidden, FEATURES_PER_TASK))

    cdef void run_pass(self) noexcept nogil:
        """Statistics or gradients of a plan whose tasks are words or features."""
        if self.plan.tasks_of == OF_WORDS:
            self.run_phase(SKINNY_TILES, self.plan.tasks)
            if self.result == AG_TO_MAX_SUM:
                self.block.vocab = self.plan.tasks * self.kernels.nr  # as if each task were a panel
                self.run_phase(MERGE, 1)
            return
        if self.source == AG_FROM_PRODUCT:
            self.run_phase(SKINNY_TILES, self.plan.tasks)
        self.run_phase(SKINNY_EPILOGUE, 1)
        if self.result == AG_TO_GRADIENT:
            self.run_phase(SKINNY_PRODUCTS, self.plan.tasks)

    cdef bint gives_up(self) noexcept nogil:
        """Whether a task ends early, since the call is interrupted: where rows are gathered, a task may take long."""
        return self.is_interrupted() if threadid() == 0 else self.is_over

    cdef ag_rows rows_of(
        self, const ag_matrix *matrix, const int64_t *numbers, int64_t start, Py_ssize_t count
    ) noexcept nogil:
        cdef ag_rows result
        result.matrix, result.numbers, result.start, result.count = matrix[0], numbers, start, count
        return result

    cdef void stream_words(self, Py_ssize_t u) noexcept nogil:
        """All rows times a range of words. A tile is (rows, pitch)."""
        cdef const ag_linear_kernels *kernels = self.kernels
        cdef ag_linear_block block = self.block
        cdef double[AG_TILE] memory
        cdef void *tile = memory
        cdef ag_sum[AG_RESIDENT] total
        cdef int acc = kernels.acc_size
        cdef Py_ssize_t hidden = self.plan.hidden, sums_pitch = self.plan.sums_pitch(), pitch = self.plan.pitch
        cdef Py_ssize_t tile_bytes = block.rows * pitch * acc, i
        cdef Py_ssize_t begin = u * self.plan.task_size, end = min(begin + self.plan.task_size, self.plan.vocab), word = begin
        cdef ag_rows rows = self.rows_of(&self.input, block.row_numbers, 0, block.rows), words, results
        cdef char *sums = self.at.partial_sums + u * self.plan.rows * sums_pitch * acc
        cdef char *maxima = self.at.panel_max + u * align_up(block.rows, kernels.mr) * acc
        cdef char *totals = self.at.panel_sum + u * align_up(block.rows, kernels.mr) * acc
        cdef char *logits
        memset(tile, 0, tile_bytes)
        if self.result == AG_TO_MAX_SUM:
            for i in range(block.rows):
                set_number(maxima, i, acc == 8, -INFINITY)
                total[i].sum, total[i].compensation = 0, 0
        while word < end:
            block.vocab_start, block.vocab = word, min(self.plan.step, end - word)
            words = self.rows_of(&self.weight, NULL, word, block.vocab)
            logits = self.at.logits + word // self.plan.step * tile_bytes
            if self.source == AG_FROM_PRODUCT:
                kernels.dot_products(&rows, &words, 0, hidden, tile, pitch)
                if self.plan.caches_logits:
                    memcpy(logits, tile, tile_bytes)
            elif self.source == AG_FROM_LOGITS:
                memcpy(tile, logits, tile_bytes)
            if self.result == AG_TO_MAX_SUM:
                kernels.tile_to_max_sum(&block, tile, maxima, total)
            else:
                kernels.tile_to_gradient(&block, tile)
                if self.plan.problem.with_input_grad:
                    kernels.sum_rows(block.rows, &words, 0, hidden, tile, pitch, sums, sums_pitch, word > begin)
                if self.plan.problem.with_weight_grad:
                    results = self.rows_of(&self.weight_out, NULL, word, block.vocab)
                    kernels.write_rows(
                        self.variant, &rows, &results, 0, hidden, tile, pitch, 1, self.streams_weight_grad
                    )
            word += block.vocab
            if self.gives_up():
                return
        if self.result == AG_TO_MAX_SUM:
            for i in range(block.rows):
                set_number(totals, i, acc == 8, ag_sum_total(total[i]))

    cdef void stream_rows(self, Py_ssize_t u) noexcept nogil:
        """Those of a range of rows that count times all words; statistics and gradients in one pass. A tile is
        (words, pitch)."""
        cdef const ag_linear_kernels *kernels = self.kernels
        cdef ag_linear_block block = self.block
        cdef double[AG_TILE] memory
        cdef void *tile = memory
        cdef int64_t[2 * AG_STREAMED] numbers
        cdef double[4 * AG_STREAMED] values
        cdef double *totals = values + 3 * AG_STREAMED
        cdef int acc = kernels.acc_size
        cdef Py_ssize_t hidden = self.plan.hidden, sums_pitch = self.plan.sums_pitch(), pitch = self.plan.pitch, i
        cdef Py_ssize_t row = u * self.plan.task_size, end = min(row + self.plan.task_size, self.rows.total)
        cdef char *sums = self.at.partial_sums + u * self.plan.vocab * sums_pitch * acc
        cdef ag_rows words = self.rows_of(&self.weight, NULL, 0, self.plan.vocab), rows, results
        cdef bint add = False
        cdef Buffers at
        at.row_numbers, at.target = numbers, &numbers[AG_STREAMED]
        at.grad, at.max, at.sum = <char *>values, <char *>(values + AG_STREAMED), <char *>(values + 2 * AG_STREAMED)
        block.row_numbers, block.target, block.grad, block.max, block.sum = at.row_numbers, at.target, at.grad, at.max, at.sum
        block.vocab_start, block.vocab = 0, self.plan.vocab
        memset(tile, 0, self.plan.vocab * pitch * acc)
        while row < end and not self.gives_up():
            block.rows = self.rows.select(&row, end, 0, self.plan.step, acc, &at)
            if not block.rows:
                break
            rows = self.rows_of(&self.input, at.row_numbers, 0, block.rows)
            if self.plan.problem.with_logits:
                kernels.dot_products(&words, &rows, 0, hidden, tile, pitch)
            if self.with_statistics:
                kernels.columns_to_max_sum(&block, tile, at.max, totals)
                for i in range(block.rows):
                    copy_number(<char *>block.running_max, at.row_numbers[i], at.max, i, acc)
                    block.running_sum[at.row_numbers[i]].sum = totals[i]
                    set_number(
                        at.sum, i, acc == 8, NAN if number(at.max, i, acc == 8) == -INFINITY else totals[i]
                    )
            if not (self.plan.problem.with_input_grad or self.plan.problem.with_weight_grad):
                continue
            kernels.columns_to_gradient(&block, tile)
            if self.plan.problem.with_weight_grad:
                kernels.sum_rows(self.plan.vocab, &rows, 0, hidden, tile, pitch, sums, sums_pitch, add)
                add = True
            if self.plan.problem.with_input_grad:
                results = self.rows_of(&self.input_out, at.row_numbers, 0, block.rows)
                kernels.write_rows(
                    self.variant, &words, &results, 0, hidden, tile, pitch, 1, self.streams_input_grad
                )
        if self.plan.problem.with_weight_grad and not add:
            memset(sums, 0, self.plan.vocab * sums_pitch * acc)

    cdef void multiply_features(self, Py_ssize_t u) noexcept nogil:
        """All rows times all words over a range of features: what one task adds to the logits, (rows, pitch)."""
        cdef int acc = self.kernels.acc_size
        cdef Py_ssize_t first = u * self.plan.task_size, n = min(self.plan.task_size, self.plan.hidden - first)
        cdef ag_rows rows = self.rows_of(&self.input, self.block.row_numbers, 0, self.block.rows)
        cdef ag_rows words = self.rows_of(&self.weight, NULL, 0, self.plan.vocab)
        cdef char *tile = self.at.logits + u * self.plan.rows * self.plan.pitch * acc
        memset(tile, 0, self.block.rows * self.plan.pitch * acc)
        self.kernels.dot_products(&rows, &words, first, n, tile, self.plan.pitch)

    cdef void finish_tile(self) noexcept nogil:
        """The logits of all rows and words become statistics, or P."""
        cdef ag_sum[AG_TERMS] total
        cdef int acc = self.kernels.acc_size
        cdef Py_ssize_t pitch = self.plan.pitch, i
        cdef ag_linear_block *block = &self.block
        block.vocab_start, block.vocab = 0, self.plan.vocab
        if self.source == AG_FROM_PRODUCT:
            self.kernels.combine(self.at.logits, self.plan.tasks, self.plan.rows * pitch, block.rows * pitch, self.at.p)
        if self.result == AG_TO_GRADIENT:
            self.kernels.tile_to_gradient(block, self.at.p)
            return
        for i in range(block.rows):
            set_number(self.at.max, i, acc == 8, -INFINITY)
            total[i].sum, total[i].compensation = 0, 0
        self.kernels.tile_to_max_sum(block, self.at.p, self.at.max, total)
        for i in range(block.rows):
            copy_number(<char *>block.running_max, block.row_numbers[i], self.at.max, i, acc)
            block.running_sum[block.row_numbers[i]] = total[i]

    cdef void write_features(self, Py_ssize_t u) noexcept nogil:
        """A range of features of both gradients."""
        cdef Py_ssize_t first = u * self.plan.task_size, n = min(self.plan.task_size, self.plan.hidden - first)
        cdef const int64_t *numbers = self.block.row_numbers
        cdef ag_rows rows = self.rows_of(&self.input, numbers, 0, self.block.rows)
        cdef ag_rows words = self.rows_of(&self.weight, NULL, 0, self.plan.vocab), results
        if self.plan.problem.with_input_grad:
            results = self.rows_of(&self.input_out, numbers, 0, self.block.rows)
            self.kernels.write_rows(self.variant, &words, &results, first, n, self.at.p, 1, self.plan.pitch, False)
        if self.plan.problem.with_weight_grad:
            results = self.rows_of(&self.weight_out, NULL, 0, self.plan.vocab)
            self.kernels.write_rows(self.variant, &rows, &results, first, n, self.at.p, self.plan.pitch, 1, False)

    cdef void combine_tasks(self, Py_ssize_t u) noexcept nogil:
        """The tasks' partial sums to features of a row of the gradient that is the sum over what was streamed."""
        cdef bint is_weight = self.plan.tasks_of == OF_ROWS
        cdef int acc = self.kernels.acc_size
        cdef char[SEGMENT * 8] buffer
        cdef Py_ssize_t r = u % self.combined_rows, begin = u // self.combined_rows * FEATURES_PER_TASK, n
        cdef Py_ssize_t end = min(begin + FEATURES_PER_TASK, self.plan.hidden), pitch = self.plan.sums_pitch()
        while begin < end:
            n = min(SEGMENT, end - begin)
            self.kernels.combine(
                self.at.partial_sums + (r * pitch + begin) * acc, self.plan.tasks,
                (self.plan.vocab if is_weight else self.plan.rows) * pitch, n, buffer
            )
            convert_segment(
                self.variant, acc, buffer, &self.weight_out if is_weight else &self.input_out,
                r if is_weight else self.block.row_numbers[r], begin, n
            )
            begin += n
