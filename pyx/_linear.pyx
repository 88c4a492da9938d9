"""Schedules of the fused linear cross-entropy operators on the CPU; the kernels are those of linear.h.

1. `Plan` (in `_linear_plan`) cuts a problem to the workspace: blocks of the vocabulary, chunks of rows, and, where even one
   panel of the full width would not fit, slices of the hidden dimension.
2. `Schedule` walks them as the plan says. For each pair of a chunk and a block, tiles of P are made and read by both products.
3. Every step is a round of units that the threads of a team take one by one. Units and the order of all sums depend on shapes
   alone, so results are the same bits for any number of threads.
4. The walk needs no Python: the interpreter's lock is free from the first round to the last. The calling thread takes it
   now and then, between two units, to look at signals; after an exception the rounds that are left do nothing.

Few rows or few words (`walk_skinny`): a task takes a range of what is many, or of the features, from the first product to the
last, and nothing is packed.

Rows whose gradient is zero (or whose target is ignored) are left out when a chunk is selected: chunks hold the others,
packed together.
"""

import numpy as np

cimport cython
from cython.parallel cimport parallel, threadid

cimport numpy as cnp
from libc.math cimport INFINITY, NAN, log
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memset

from ascend_grad cimport _cpu, _memory, _openmp, _tasks, _threads
from ascend_grad._dtypes cimport dtype_of
from ascend_grad._kernels cimport (
    AG_BFLOAT16,
    AG_FLOAT32,
    AG_FLOAT64,
    AG_FROM_LOGITS,
    AG_FROM_PRODUCT,
    AG_FROM_SOFTMAX,
    AG_STREAMED,
    AG_RESIDENT,
    AG_TERMS,
    AG_TILE,
    AG_TO_GRADIENT,
    AG_TO_LOGITS,
    AG_TO_MAX_SUM,
    ag_copy_block,
    ag_dtype,
    ag_fpenv,
    ag_fpenv_enter,
    ag_fpenv_leave,
    ag_itemsize,
    ag_linear_block,
    ag_linear_kernels,
    ag_linear_kernels_of,
    ag_linear_result,
    ag_linear_source,
    ag_matrix,
    ag_round,
    ag_rows,
    ag_team,
    ag_team_cancel,
    ag_team_dissolve,
    ag_team_end,
    ag_team_finish,
    ag_team_form,
    ag_team_join,
    ag_team_next,
    ag_team_start,
    ag_variant,
    ag_widen,
)
from ascend_grad._linear_plan cimport (
    OF_BLOCKS,
    OF_ROWS,
    OF_WORDS,
    Buffers,
    Plan,
    Problem,
    bytes_of,
    plan_with_logits,
    plans_of,
)
from ascend_grad._memory cimport ALIGNMENT, align_up, ceil_div

from ._dtypes import FLOATING_DTYPES

cnp.import_array()

cdef extern from "Python.h":
    int PyErr_CheckSignals() except -1

cdef tuple _dtypes = FLOATING_DTYPES  # in the order of ag_dtype
cdef cnp.dtype _float32 = np.dtype(np.float32)
cdef cnp.dtype _float64 = np.dtype(np.float64)
cdef cnp.dtype _int32 = np.dtype(np.int32)
cdef cnp.dtype _int64 = np.dtype(np.int64)
cdef cnp.dtype _uint8 = np.dtype(np.uint8)

# What a call may take to work in where nobody says: so much, or this share of the bytes of its matrices where that is more.
cdef Py_ssize_t DEFAULT_WORKSPACE = 64 << 20
cdef Py_ssize_t WORKSPACE_SHARE = 4
# Panels that a unit keeps in the second cache, and units of a round.
cdef Py_ssize_t PANELS = 4
cdef Py_ssize_t UNITS = 32
# Most that a unit does, so that signals are looked at in time: floating-point operations, elements that are rounded.
cdef Py_ssize_t UNIT_FLOPS = 1 << 28
cdef Py_ssize_t UNIT_ELEMENTS = 1 << 20
cdef Py_ssize_t PART_COLUMNS = 1 << 15
# Features whose partial sums a unit of a skinny plan combines.
cdef Py_ssize_t COMBINED = 1024
# Rows that a unit of the other rounds takes, and rows of the caller between two looks at signals.
cdef Py_ssize_t SOME_ROWS = 1024
cdef Py_ssize_t ROWS_PER_CHECK = 1 << 18
# Flops in a nanosecond of one thread, for the choice of threads.
cdef double RATE = 40.0


cdef const ag_linear_kernels *kernels_for(cnp.ndarray array):
    return ag_linear_kernels_of(_cpu.active(), <ag_dtype>dtype_of(array))


cdef ag_matrix matrix_of(cnp.ndarray array):
    """A matrix for the kernels; a vector is one of one row."""
    cdef ag_matrix result
    cdef int last = cnp.PyArray_NDIM(array) - 1
    result.data = <char *>cnp.PyArray_DATA(array)
    result.dtype = <ag_dtype>dtype_of(array)
    result.row_stride = cnp.PyArray_STRIDE(array, 0) if last else 0
    # A dimension of one element may have any stride.
    result.step = cnp.PyArray_STRIDE(array, last) if cnp.PyArray_DIM(array, last) > 1 else ag_itemsize[<int>result.dtype]
    result.swapped = cnp.PyArray_ISBYTESWAPPED(array)
    return result


cdef inline double number(const void *values, Py_ssize_t i, bint is_double) noexcept nogil:
    return (<const double *>values)[i] if is_double else (<const float *>values)[i]


cdef inline void set_number(void *values, Py_ssize_t i, bint is_double, double value) noexcept nogil:
    if is_double:
        (<double *>values)[i] = value
    else:
        (<float *>values)[i] = <float>value


cdef inline void copy_number(char *to, Py_ssize_t n, const char *source, Py_ssize_t i, int itemsize) noexcept nogil:
    if itemsize == 8:
        (<uint64_t *>to)[n] = (<const uint64_t *>source)[i]
    else:
        (<uint32_t *>to)[n] = (<const uint32_t *>source)[i]


cdef enum:
    PIECE = 256  # values of a row that are rounded at a time


cdef void round_piece(
    ag_variant variant, int real, const char *source, const ag_matrix *to, Py_ssize_t row, Py_ssize_t begin, Py_ssize_t n
) noexcept nogil:
    """Accumulators to columns [begin, begin + n) of a row, of any dtype and layout."""
    cdef char[PIECE * 8] buffer
    cdef int itemsize = ag_itemsize[<int>to.dtype]
    cdef bint is_dense = to.step == itemsize and not to.swapped
    cdef char *target = to.data + row * to.row_stride + begin * to.step
    if to.dtype != (AG_FLOAT64 if real == 8 else AG_FLOAT32):
        ag_round(variant, real == 8, source, to.dtype, target if is_dense else buffer, n)
        if is_dense:
            return
        source = buffer
    ag_copy_block(target, 0, to.step, source, 0, itemsize, 1, n, itemsize, to.swapped)


cdef bint is_flat(const ag_matrix *to, int real, Py_ssize_t n) noexcept nogil:
    """Whether rows of n elements follow one another, in a dtype that accumulators are rounded to."""
    cdef int itemsize = ag_itemsize[<int>to.dtype]
    return itemsize != real and to.step == itemsize and to.row_stride == n * itemsize and not to.swapped


# ---- rows ------------------------------------------------------------------------------------------------------------


@cython.final
cdef class Rows:
    """What the rows of a call hold, as contiguous arrays (BT,), and which of them count.

    A row counts if its `grad` is not zero; without `grad`, if its target is not `ignored` (None: every row). Its row of
    weight is target - start, or none where `mask` is set (bool, or uint8 with eight rows to a byte) or where that is not
    in [0, size).
    """

    cdef readonly Py_ssize_t total, count
    cdef const char *grad
    cdef const char *maximum
    cdef const char *sum
    cdef const char *target
    cdef const uint8_t *mask
    cdef bint is_wide, is_packed, is_double, can_ignore
    cdef int64_t start, size, ignored
    cdef tuple keep

    def __init__(
        self, cnp.ndarray target, int64_t start, int64_t size, cnp.ndarray mask=None, cnp.ndarray grad=None,
        cnp.ndarray maximum=None, cnp.ndarray sum=None, ignored=None
    ):
        cdef Py_ssize_t i
        cdef double last = 0
        self.keep = (target, mask, grad, maximum, sum)
        self.total = cnp.PyArray_DIM(target, 0)
        self.target = cnp.PyArray_BYTES(target)
        self.is_wide = cnp.PyArray_ITEMSIZE(target) == 8
        self.start, self.size = start, size
        self.mask = NULL
        if mask is not None:
            self.mask = <const uint8_t *>cnp.PyArray_DATA(mask)
        self.is_packed = mask is not None and cnp.PyArray_TYPE(mask) != cnp.NPY_BOOL
        self.grad = NULL if grad is None else cnp.PyArray_BYTES(grad)
        self.is_double = grad is not None and cnp.PyArray_ITEMSIZE(grad) == 8
        self.maximum = NULL if maximum is None else cnp.PyArray_BYTES(maximum)
        self.sum = NULL if sum is None else cnp.PyArray_BYTES(sum)
        self.can_ignore = ignored is not None
        self.ignored = ignored if self.can_ignore else 0
        if grad is None and not self.can_ignore:
            self.count = self.total
            return
        for i in range(self.total):
            self.count += self.counts(i)
            if i % ROWS_PER_CHECK == 0:
                _tasks.check_signals(&last)

    cdef int64_t target_of(self, Py_ssize_t i) noexcept nogil:
        return (<const int64_t *>self.target)[i] if self.is_wide else (<const int32_t *>self.target)[i]

    cdef bint counts(self, Py_ssize_t i) noexcept nogil:
        # By its bits: a thread may take subnormal numbers for zero.
        if self.grad != NULL and self.is_double:
            return (<const uint64_t *>self.grad)[i] << 1 != 0
        if self.grad != NULL:
            return <uint32_t>((<const uint32_t *>self.grad)[i] << 1) != 0
        return not (self.can_ignore and self.target_of(i) == self.ignored)

    cdef bint is_masked(self, Py_ssize_t i) noexcept nogil:
        if self.mask == NULL:
            return False
        return (self.mask[i // 8] >> (i % 8)) & 1 if self.is_packed else self.mask[i]

    cdef int64_t row_of_weight(self, Py_ssize_t i) noexcept nogil:
        """-1 for none."""
        cdef int64_t target = self.target_of(i)
        # The difference of any two such numbers fits where there is no sign.
        if self.is_masked(i) or target < self.start or <uint64_t>target - <uint64_t>self.start >= <uint64_t>self.size:
            return -1
        return target - self.start

    cdef Py_ssize_t select(
        self, Py_ssize_t *next, Py_ssize_t end, Py_ssize_t n, Py_ssize_t most, int acc, const Buffers *to
    ) noexcept nogil:
        """What the next rows hold that count, from row `next` on, which moves behind them, beside the `n` that are there;
        how many they are then, at most `most`."""
        cdef Py_ssize_t i = next[0]
        while i < end and n < most:
            if self.counts(i):
                to.row_numbers[n] = i
                to.target[n] = self.row_of_weight(i)
                if self.grad != NULL:
                    copy_number(to.grad, n, self.grad, i, acc)
                if self.maximum != NULL:
                    copy_number(to.max, n, self.maximum, i, acc)
                    copy_number(to.sum, n, self.sum, i, acc)
                n += 1
            i += 1
        next[0] = i
        return n

    cdef int clear_absent(self, const ag_matrix *out, Py_ssize_t n) except -1 nogil:
        """Zeros in the rows of n elements that do not count."""
        cdef Py_ssize_t i
        cdef double last = 0
        for i in range(self.total):
            if not self.counts(i):
                clear_rows(out, i, 1, n, &last)
        return 0


cdef int clear_rows(
    const ag_matrix *out, Py_ssize_t first, Py_ssize_t rows, Py_ssize_t n, double *last
) except -1 nogil:
    """Zeros, whose bytes are 0 in every dtype, in rows of n elements."""
    cdef int itemsize = ag_itemsize[<int>out.dtype]
    cdef Py_ssize_t row, column
    cdef char *to
    for row in range(first, first + rows):
        to = out.data + row * out.row_stride
        if out.step == itemsize:
            memset(to, 0, n * itemsize)
        else:
            for column in range(n):
                memset(to + column * out.step, 0, itemsize)
        _tasks.check_signals(last)
    return 0


# ---- the schedule ----------------------------------------------------------------------------------------------------

ctypedef struct Grid:
    # tiles x panels, cut into units
    Py_ssize_t panels
    Py_ssize_t tiles
    Py_ssize_t panel_step
    Py_ssize_t tile_step
    Py_ssize_t groups                 # of panels
    Py_ssize_t units


cdef Grid grid_of(const ag_linear_kernels *kernels, Py_ssize_t columns, Py_ssize_t rows, Py_ssize_t terms) noexcept nogil:
    """A product of so many rows and columns, whose sums have so many terms."""
    cdef Grid grid
    cdef Py_ssize_t panels = ceil_div(columns, kernels.nr), tiles = ceil_div(rows, kernels.mr)
    cdef Py_ssize_t panel_bytes = terms * kernels.nr * kernels.element_size // kernels.pair
    cdef Py_ssize_t together = max(1, min(PANELS, _cpu.cache_size(2) // 2 // max(panel_bytes, 1)))
    cdef Py_ssize_t most = UNIT_FLOPS // (2 * kernels.mr * kernels.nr * max(terms, 1))
    grid.panels, grid.tiles = panels, tiles
    grid.groups = ceil_div(panels, together)
    grid.panel_step = ceil_div(panels, max(grid.groups, 1)) if panels else 1
    grid.groups = ceil_div(panels, grid.panel_step)
    grid.tile_step = max(min(ceil_div(tiles, max(UNITS // max(grid.groups, 1), 1)), most // grid.panel_step), 1)
    grid.units = grid.groups * ceil_div(tiles, grid.tile_step)
    return grid


cdef enum Round:
    PACK_BLOCK
    PACK_CHUNK
    TILES
    MERGE
    PRODUCTS
    ROUND_ROWS
    SKINNY_TILES
    SKINNY_EPILOGUE
    SKINNY_PRODUCTS
    SKINNY_SUMS


@cython.final
cdef class Schedule:
    """One plan at work: its memory, and the block and chunk that the units of the current round belong to."""

    cdef const ag_linear_kernels *kernels
    cdef ag_linear_block block
    cdef ag_matrix input, weight
    cdef Plan plan
    cdef Rows rows
    cdef int threads
    cdef bint chosen                  # by this library, not by the caller
    cdef ag_team team
    cdef Round which
    cdef double last_check            # when signals were looked at
    cdef bint is_over                 # rounds do nothing any more
    cdef object error                 # and why
    cdef list keep                    # arrays whose memory is in use
    cdef Buffers at
    # what the rounds read
    cdef ag_linear_source source
    cdef ag_linear_result result
    cdef Grid tiles, input_grid, weight_grid
    cdef Py_ssize_t weight_panel_units, input_tile_units
    cdef Py_ssize_t row_parts         # parts of the hidden dimension that rows are packed in
    cdef Py_ssize_t column_parts      # pieces of rows that columns are packed in
    cdef bint streams_input_grad, streams_weight_grad
    cdef Py_ssize_t combined_rows
    cdef ag_matrix rounded_to
    cdef const char *rounded_from
    cdef Py_ssize_t rounded_rows, rounded_n, rounded_stride, rounded_step
    cdef ag_variant variant
    cdef Py_ssize_t chunk             # the one selected
    # what is wanted, and where it goes
    cdef bint with_statistics, with_input_grad, with_weight_grad
    cdef void *sum_exp
    cdef ag_matrix input_out, weight_out
    cdef bint rounds_input_grad       # its sums lie elsewhere

    cdef int prepare(
        self, cnp.ndarray input, cnp.ndarray weight, Plan plan, cnp.ndarray memory, Rows rows, int threads
    ) except -1:
        cdef ag_linear_block *block = &self.block
        # What came before looks in intervals of its own, which may not have been over.
        PyErr_CheckSignals()
        self.last_check = _tasks.now()
        self.kernels = plan.kernels
        self.plan = plan
        self.rows = rows
        self.variant = _cpu.active()
        memset(block, 0, sizeof(self.block))
        self.input, self.weight = matrix_of(input), matrix_of(weight)
        block.round_to_bfloat16 = self.input.dtype == AG_BFLOAT16
        self.threads, self.chosen = _threads.choose(plan.flops() / RATE, threads), threads == 0
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
        block.keep_logits, block.tile_pitch = plan.keeps_logits, plan.pitch
        self.set_slice(0)
        return 0

    # -- rounds

    cdef int work(self) except -1:
        """Walk the plan on this thread, while the others of a team wait for its rounds."""
        self.at.starts[0] = 0
        ag_team_form(&self.team, self.threads, 1 if self.threads == 1 else _threads.cores())
        if self.threads == 1:
            _openmp.record_team()
            with nogil:
                self.walk()
        else:
            with nogil, parallel(num_threads=self.threads):
                _openmp.record_team()
                if threadid() == 0:
                    self.team.size = _openmp.team_size()  # there may be fewer than asked for
                    self.walk()
                    ag_team_dissolve(&self.team)
                else:
                    self.follow()
        _threads.finished()
        error, self.error = self.error, None  # no cycle stays
        if error is not None:
            raise error
        if self.with_input_grad and self.rows.count < self.rows.total:
            with nogil:
                self.rows.clear_absent(&self.input_out, self.plan.problem.hidden)
        return 0

    cdef void follow(self) noexcept nogil:
        cdef uint32_t round = ag_team_join(&self.team, 0)
        while round:
            self.take_part(False)
            round = ag_team_join(&self.team, round)

    cdef void take_part(self, bint is_leader) noexcept nogil:
        cdef ag_fpenv mode = ag_fpenv_enter()
        cdef Py_ssize_t u = ag_team_next(&self.team)
        while u >= 0:
            self.unit(self.which, u)
            ag_team_finish(&self.team)
            if is_leader and self.is_interrupted():
                ag_team_cancel(&self.team)
            u = ag_team_next(&self.team)
        ag_fpenv_leave(mode)

    cdef bint is_interrupted(self) noexcept nogil:
        """Whether a signal's handler has raised; looked at in intervals. For the calling thread."""
        if not self.is_over and _tasks.is_time_to_check(&self.last_check):
            self.look_at_signals()
        return self.is_over

    cdef void look_at_signals(self) noexcept with gil:
        try:
            PyErr_CheckSignals()
        except BaseException as error:
            self.error, self.is_over = error, True

    cdef void run(self, Round which, Py_ssize_t units) noexcept nogil:
        """A round."""
        cdef Py_ssize_t u
        cdef ag_fpenv mode
        if self.is_over or not units:
            return
        if self.team.size == 1 or units == 1 or (self.chosen and _threads.is_disturbed()):
            mode = ag_fpenv_enter()
            for u in range(units):
                self.unit(which, u)
                if self.is_interrupted():
                    break
            ag_fpenv_leave(mode)
            return
        self.which = which
        ag_team_start(&self.team, units)
        self.take_part(True)
        ag_team_end(&self.team)
        if units > 2 * self.team.size:  # else a unit is much of a round
            _threads.took(self.team.end - self.team.begin, self.team.end - self.team.idle)

    cdef void unit(self, Round which, Py_ssize_t u) noexcept nogil:
        if which == PACK_BLOCK:
            self.pack_block(u)
        elif which == PACK_CHUNK:
            self.pack_chunk(u)
        elif which == TILES:
            self.make_tiles(u)
        elif which == MERGE:
            self.kernels.merge_max_sum(
                &self.block, u * SOME_ROWS, min((u + 1) * SOME_ROWS, self.block.rows)
            )
        elif which == PRODUCTS:
            self.multiply(u)
        elif which == ROUND_ROWS:
            self.round_rows(u)
        elif which == SKINNY_EPILOGUE:
            self.finish_tile()
        elif which == SKINNY_PRODUCTS:
            self.write_features(u)
        elif which == SKINNY_SUMS:
            self.combine_tasks(u)
        elif self.plan.tasks_of == OF_WORDS:
            self.stream_words(u)
        elif self.plan.tasks_of == OF_ROWS:
            self.stream_rows(u)
        else:
            self.multiply_features(u)

    cdef void pack_columns(
        self, void *to, const ag_matrix *source, const int64_t *rows, int64_t start, Py_ssize_t count, Py_ssize_t u
    ) noexcept nogil:
        """A panel of columns; unit u packs one piece of its rows."""
        cdef Py_ssize_t nr = self.kernels.nr, panel = u // self.column_parts, part = u % self.column_parts
        cdef Py_ssize_t first = self.block.hidden_start + panel * nr
        cdef Py_ssize_t n = min(nr, self.block.hidden_size - panel * nr)
        cdef Py_ssize_t begin = part * SOME_ROWS, end = min(begin + SOME_ROWS, count)
        cdef Py_ssize_t at = panel * nr * ceil_div(count, self.kernels.pair)
        at += begin // self.kernels.pair * align_up(n, self.kernels.vector)
        if rows != NULL:
            rows += begin
        self.kernels.pack_columns(
            <char *>to + at * self.kernels.element_size, source, rows, start + begin, end - begin, first, n
        )

    cdef void pack_block(self, Py_ssize_t u) noexcept nogil:
        cdef Py_ssize_t nr = self.kernels.nr, panel = u // self.row_parts, part = u % self.row_parts, begin, units
        if u < self.weight_panel_units:
            begin = part * PART_COLUMNS
            units = panel * ceil_div(self.block.hidden_size, self.kernels.pair) + begin // self.kernels.pair
            self.kernels.pack_panel(
                <char *>self.block.w_rows + units * nr * self.kernels.element_size, &self.weight, NULL,
                self.block.vocab_start + panel * nr, min(nr, self.block.vocab - panel * nr),
                self.block.hidden_start + begin, min(PART_COLUMNS, self.block.hidden_size - begin)
            )
        else:
            self.pack_columns(
                self.block.w_columns, &self.weight, NULL, self.block.vocab_start, self.block.vocab,
                u - self.weight_panel_units
            )

    cdef void pack_chunk(self, Py_ssize_t u) noexcept nogil:
        cdef Py_ssize_t mr = self.kernels.mr, tile = u // self.row_parts, part = u % self.row_parts, begin, units
        if u < self.input_tile_units:
            begin = part * PART_COLUMNS
            units = tile * ceil_div(self.block.hidden_size, self.kernels.pair) + begin // self.kernels.pair
            self.kernels.pack_tile(
                <char *>self.block.x_rows + units * mr * self.kernels.element_size, &self.input,
                self.block.row_numbers + tile * mr, 0, min(mr, self.block.rows - tile * mr),
                self.block.hidden_start + begin, min(PART_COLUMNS, self.block.hidden_size - begin)
            )
        else:
            self.pack_columns(
                self.block.x_columns, &self.input, self.block.row_numbers, 0, self.block.rows, u - self.input_tile_units
            )

    cdef void make_tiles(self, Py_ssize_t u) noexcept nogil:
        cdef Grid *grid = &self.tiles
        cdef Py_ssize_t panel = u % grid.groups * grid.panel_step, tile = u // grid.groups * grid.tile_step
        self.kernels.tiles(
            &self.block, self.source, self.result, panel, min(panel + grid.panel_step, grid.panels), tile,
            min(tile + grid.tile_step, grid.tiles)
        )

    cdef void multiply(self, Py_ssize_t u) noexcept nogil:
        cdef bint is_input = u < self.input_grid.units
        cdef Grid *grid = &self.input_grid if is_input else &self.weight_grid
        cdef Py_ssize_t panel, tile
        if not is_input:
            u = u - self.input_grid.units
        panel, tile = u % grid.groups * grid.panel_step, u // grid.groups * grid.tile_step
        (self.kernels.input_grad if is_input else self.kernels.weight_grad)(
            &self.block, panel, min(panel + grid.panel_step, grid.panels), tile, min(tile + grid.tile_step, grid.tiles)
        )

    cdef void round_rows(self, Py_ssize_t u) noexcept nogil:
        """Accumulators to a result of any dtype and layout."""
        cdef int real = self.kernels.acc_size
        cdef Py_ssize_t first = u * self.rounded_step, last = min(first + self.rounded_step, self.rounded_rows)
        cdef Py_ssize_t n = self.rounded_n, row, begin, piece
        cdef const ag_matrix *to = &self.rounded_to
        cdef const char *source
        if is_flat(to, real, n) and self.rounded_stride == n * real:  # short rows need not be rounded one by one
            source = self.rounded_from + first * self.rounded_stride
            ag_round(self.variant, real == 8, source, to.dtype, to.data + first * to.row_stride, (last - first) * n)
            return
        for row in range(first, last):
            source = self.rounded_from + row * self.rounded_stride
            for piece in range(ceil_div(n, PIECE)):
                begin = piece * PIECE
                round_piece(self.variant, real, source + begin * real, to, row, begin, min(PIECE, n - begin))

    cdef void round_to(
        self, const ag_matrix *out, Py_ssize_t first, Py_ssize_t rows, Py_ssize_t column, Py_ssize_t columns,
        const char *sums, Py_ssize_t stride
    ) noexcept nogil:
        """Rows [first, first + rows), columns [column, column + columns) of out from rows of accumulators."""
        self.rounded_to = out[0]
        self.rounded_to.data += first * self.rounded_to.row_stride + column * self.rounded_to.step
        self.rounded_from, self.rounded_stride = sums, stride
        self.rounded_rows, self.rounded_n = rows, columns
        self.rounded_step = max(1, min(SOME_ROWS // 16, UNIT_ELEMENTS // max(columns, 1)))
        self.run(ROUND_ROWS, ceil_div(rows, self.rounded_step))

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
        if self.plan.keeps_logits:
            self.block.logits = self.at.logits + self.plan.rows * begin * self.kernels.acc_size

    cdef void set_chunk(self, Py_ssize_t index) noexcept nogil:
        """Select the rows of a chunk, unless it is the one selected. The first time chunks come in order."""
        cdef Py_ssize_t i = self.at.starts[index], n = 0, place = index if self.plan.packed_chunks > 1 else 0
        cdef int real = self.kernels.acc_size
        self.block.x_rows = self.at.x_rows + place * self.plan.packed_rows(self.plan.rows)
        self.block.x_columns = self.at.x_columns + place * self.plan.packed_columns(self.plan.rows)
        if index == self.chunk or self.is_over:
            return
        while i < self.rows.total and n < self.plan.rows and not self.is_interrupted():
            n = self.rows.select(&i, min(i + ROWS_PER_CHECK, self.rows.total), n, self.plan.rows, real, &self.at)
        self.at.starts[index + 1] = i
        self.block.rows = n
        self.chunk = index

    cdef void pack_weight(self, bint rows, bint columns) noexcept nogil:
        cdef Py_ssize_t panels = ceil_div(self.block.hidden_size, self.kernels.nr)
        self.row_parts = max(1, ceil_div(self.block.hidden_size, PART_COLUMNS))
        self.weight_panel_units = ceil_div(self.block.vocab, self.kernels.nr) * self.row_parts if rows else 0
        self.column_parts = ceil_div(self.block.vocab, SOME_ROWS)
        self.run(PACK_BLOCK, self.weight_panel_units + (panels * self.column_parts if columns else 0))

    cdef void pack_input(self, bint rows, bint columns) noexcept nogil:
        cdef Py_ssize_t panels = ceil_div(self.block.hidden_size, self.kernels.nr)
        self.row_parts = max(1, ceil_div(self.block.hidden_size, PART_COLUMNS))
        self.input_tile_units = ceil_div(self.block.rows, self.kernels.mr) * self.row_parts if rows else 0
        self.column_parts = ceil_div(self.block.rows, SOME_ROWS)
        self.run(PACK_CHUNK, self.input_tile_units + (panels * self.column_parts if columns else 0))

    cdef void run_tiles(self, ag_linear_source source, ag_linear_result result) noexcept nogil:
        self.source, self.result = source, result
        self.tiles = grid_of(self.kernels, self.block.vocab, self.block.rows, self.block.hidden_size)
        self.run(TILES, self.tiles.units)

    cdef void run_products(self) noexcept nogil:
        cdef Py_ssize_t hidden = self.block.hidden_size
        self.input_grid.units = self.weight_grid.units = 0
        if self.with_input_grad:
            self.input_grid = grid_of(self.kernels, hidden, self.block.rows, self.block.vocab)
        if self.with_weight_grad:
            self.weight_grid = grid_of(self.kernels, hidden, self.block.vocab, self.block.rows)
        self.run(PRODUCTS, self.input_grid.units + self.weight_grid.units)

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
        cdef cnp.ndarray running_sum = sum_exp if self.kernels.acc_size == 8 else _memory.fresh(1, &total, _float64)
        cdef double *sums = <double *>cnp.PyArray_DATA(running_sum)
        cdef Py_ssize_t i, begin, end
        self.keep.append((logits_max, sum_exp, running_sum, predicted, logits))
        for begin in range(0, total, ROWS_PER_CHECK):
            end = min(begin + ROWS_PER_CHECK, total)
            for i in range(begin, end):
                set_number(cnp.PyArray_DATA(logits_max), i, self.kernels.acc_size == 8, -INFINITY)
            memset(sums + begin, 0, (end - begin) * sizeof(double))
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
        self.run(MERGE, ceil_div(self.block.rows, SOME_ROWS))

    cdef void end_statistics(self, Py_ssize_t begin, Py_ssize_t end) noexcept nogil:
        """Of rows [begin, end). A sum relative to -inf would be of NaN; a row that does not count has none."""
        cdef Py_ssize_t i
        cdef ag_linear_block *block = &self.block
        cdef ag_fpenv mode
        while begin < end and not self.is_interrupted():
            mode = ag_fpenv_enter()
            for i in range(begin, min(begin + ROWS_PER_CHECK, end)):
                if self.kernels.acc_size == 8:
                    if (<double *>block.running_max)[i] == -INFINITY and self.rows.counts(i):
                        block.running_sum[i] = NAN
                else:
                    if (<float *>block.running_max)[i] == -INFINITY and self.rows.counts(i):
                        block.running_sum[i] = NAN
                    (<float *>self.sum_exp)[i] = <float>block.running_sum[i]
            ag_fpenv_leave(mode)
            begin += ROWS_PER_CHECK

    # -- gradients

    cdef int set_gradient(
        self, cnp.ndarray softmax, cnp.ndarray input_grad, cnp.ndarray weight_grad, double filter_eps
    ) except -1:
        """Where the gradients go (None, or not part of the plan: not wanted): arrays that overlap no input."""
        cdef Plan plan = self.plan
        cdef int real = self.kernels.acc_size
        cdef ag_linear_block *block = &self.block
        block.filter_eps = filter_eps
        if softmax is not None:
            block.softmax = matrix_of(softmax)
        block.input_grad.compensation_stride = block.weight_grad.compensation_stride = plan.sums_hidden() * real
        if plan.problem.with_weight_grad:
            self.keep.append(weight_grad)
            self.with_weight_grad, self.weight_out = True, matrix_of(weight_grad)
            self.streams_weight_grad = is_streamed(weight_grad)
            block.weight_grad.row_stride = (
                plan.sums_hidden() * real if plan.problem.buffers_weight_grad else cnp.PyArray_STRIDE(weight_grad, 0)
            )
        if plan.problem.with_input_grad:
            self.keep.append(input_grad)
            self.with_input_grad, self.input_out = True, matrix_of(input_grad)
            self.streams_input_grad = is_streamed(input_grad)
            if plan.tasks_of == OF_BLOCKS and not holds_sums(input_grad, real):
                self.rounds_input_grad = True
                input_grad = _memory.empty_like(input_grad, _float64 if real == 8 else _float32)
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

    cdef void add_gradients(self, Py_ssize_t b, Py_ssize_t c, Py_ssize_t walk, ag_linear_source source) noexcept nogil:
        """Those of block b and chunk c, which are the current ones, and packed unless the hidden dimension is sliced."""
        cdef ag_linear_block *block = &self.block
        cdef Py_ssize_t s, column = walk * self.plan.hidden
        block.add_input_grad, block.last_input_grad = b > 0, b == self.plan.blocks - 1
        block.add_weight_grad, block.last_weight_grad = c > 0, c == self.plan.chunks - 1
        if walk == 0 or self.plan.recomputes():  # else P is still there
            if source == AG_FROM_PRODUCT and self.plan.slices > 1:
                self.make_logits()
                source = AG_FROM_LOGITS
            self.run_tiles(source, AG_TO_GRADIENT)
        for s in range(walk if self.plan.by_slice else 0, walk + 1 if self.plan.by_slice else self.plan.slices):
            if self.plan.slices > 1:
                self.set_slice(s)
                self.pack_weight(False, self.with_input_grad)
                self.pack_input(False, self.with_weight_grad)
            self.place_sums(c, s)
            self.run_products()
        if self.with_weight_grad and self.plan.problem.buffers_weight_grad and block.last_weight_grad:
            self.round_to(
                &self.weight_out, block.vocab_start, block.vocab, column,
                min(self.plan.sums_hidden(), self.plan.problem.hidden - column), block.weight_grad.data,
                block.weight_grad.row_stride
            )

    # -- walks

    cdef void walk(self) noexcept nogil:
        if self.plan.tasks_of != OF_BLOCKS:
            self.walk_skinny()
        elif self.plan.keeps_logits:
            self.walk_with_logits()
        elif self.with_statistics:
            self.walk_statistics()
        else:
            self.walk_gradient()
        if self.rounds_input_grad:
            self.round_to(
                &self.input_out, 0, self.rows.total, 0, self.plan.problem.hidden, self.block.input_grad.data,
                self.block.input_grad.row_stride
            )

    cdef void walk_statistics(self) noexcept nogil:
        """Maximum, sum of exponentials relative to it, and the target's logit, of every row that counts."""
        cdef Py_ssize_t b, c
        for b in range(self.plan.blocks):
            for c in range(self.plan.chunks):
                self.set_pair(b, c)
                self.add_statistics()
        self.end_statistics(0, self.rows.total)

    cdef void walk_gradient(self) noexcept nogil:
        """Both gradients, the softmax given or computed anew."""
        cdef ag_linear_source source = AG_FROM_PRODUCT if self.plan.problem.with_logits else AG_FROM_SOFTMAX
        cdef Py_ssize_t outer, walk, inner
        cdef Py_ssize_t b, c
        for outer in range(self.plan.chunks if self.plan.chunks_outside else self.plan.blocks):
            for walk in range(self.plan.slices if self.plan.by_slice else 1):
                for inner in range(self.plan.blocks if self.plan.chunks_outside else self.plan.chunks):
                    b, c = (inner, outer) if self.plan.chunks_outside else (outer, inner)
                    self.set_pair(b, c)
                    self.add_gradients(b, c, walk, source)

    cdef void set_pair(self, Py_ssize_t b, Py_ssize_t c) noexcept nogil:
        """Select block b and chunk c, and pack what is not, unless the hidden dimension is sliced."""
        cdef bint with_logits = self.plan.problem.with_logits
        self.set_block(b)
        self.set_chunk(c)
        if self.plan.slices > 1:
            return
        if c == 0 or (self.plan.chunks_outside and self.plan.blocks > 1):
            self.pack_weight(with_logits, self.plan.problem.with_input_grad)
        if b == 0 or (self.plan.packed_chunks < self.plan.chunks and not self.plan.chunks_outside):
            self.pack_input(with_logits, self.plan.problem.with_weight_grad)

    cdef void walk_with_logits(self) noexcept nogil:
        """Both passes over a chunk before the next one, its logits kept in between. `rows` reads these statistics."""
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

    # -- few rows or few words: nothing is packed

    cdef void walk_skinny(self) noexcept nogil:
        if self.plan.tasks_of == OF_ROWS:
            self.run(SKINNY_TILES, self.plan.tasks)
            if self.with_statistics:
                self.end_statistics(0, self.rows.total)
        else:
            self.set_chunk(0)
            self.source = AG_FROM_PRODUCT if self.plan.problem.with_logits else AG_FROM_SOFTMAX
            if self.with_statistics:
                self.result = AG_TO_MAX_SUM
                self.run_skinny()
                self.end_statistics(0, self.rows.total)
                self.chunk = -1  # select the rows again, to read them
                self.set_chunk(0)
                self.source = AG_FROM_LOGITS
            if self.with_input_grad or self.with_weight_grad:
                self.result = AG_TO_GRADIENT
                self.run_skinny()
        if self.plan.adds_tasks():
            self.combined_rows = self.plan.vocab if self.plan.tasks_of == OF_ROWS else self.block.rows
            self.run(SKINNY_SUMS, self.combined_rows * ceil_div(self.plan.hidden, COMBINED))

    cdef void run_skinny(self) noexcept nogil:
        """Statistics or gradients of a plan whose tasks are words or features."""
        if self.plan.tasks_of == OF_WORDS:
            self.run(SKINNY_TILES, self.plan.tasks)
            if self.result == AG_TO_MAX_SUM:
                self.block.vocab = self.plan.tasks * self.kernels.nr  # as if each task were a panel
                self.run(MERGE, 1)
            return
        if self.source == AG_FROM_PRODUCT:
            self.run(SKINNY_TILES, self.plan.tasks)
        self.run(SKINNY_EPILOGUE, 1)
        if self.result == AG_TO_GRADIENT:
            self.run(SKINNY_PRODUCTS, self.plan.tasks)

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
        cdef double[AG_RESIDENT] total
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
                total[i] = 0
        while word < end:
            block.vocab_start, block.vocab = word, min(self.plan.step, end - word)
            words = self.rows_of(&self.weight, NULL, word, block.vocab)
            logits = self.at.logits + word // self.plan.step * tile_bytes
            if self.source == AG_FROM_PRODUCT:
                kernels.dot_products(&rows, &words, 0, hidden, tile, pitch)
                if self.plan.keeps_logits:
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
        if self.result == AG_TO_MAX_SUM:
            for i in range(block.rows):
                set_number(totals, i, acc == 8, total[i])

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
        while row < end:
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
                    block.running_sum[at.row_numbers[i]] = totals[i]
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
        cdef double[AG_TERMS] total
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
            total[i] = 0
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
        cdef char[PIECE * 8] buffer
        cdef Py_ssize_t r = u % self.combined_rows, begin = u // self.combined_rows * COMBINED, n
        cdef Py_ssize_t end = min(begin + COMBINED, self.plan.hidden), pitch = self.plan.sums_pitch()
        while begin < end:
            n = min(PIECE, end - begin)
            self.kernels.combine(
                self.at.partial_sums + (r * pitch + begin) * acc, self.plan.tasks,
                (self.plan.vocab if is_weight else self.plan.rows) * pitch, n, buffer
            )
            round_piece(
                self.variant, acc, buffer, &self.weight_out if is_weight else &self.input_out,
                r if is_weight else self.block.row_numbers[r], begin, n
            )
            begin += n


cdef Schedule new_schedule(
    cnp.ndarray input, cnp.ndarray weight, Plan plan, cnp.ndarray memory, Rows rows, int threads
):
    # A constructor's arguments would travel as a tuple of objects.
    cdef Schedule schedule = Schedule.__new__(Schedule)
    schedule.prepare(input, weight, plan, memory, rows, threads)
    return schedule


cdef bint is_streamed(cnp.ndarray out):
    """Whether a result is so large that it is written past the caches."""
    return cnp.PyArray_NBYTES(out) >= max(_cpu.cache_size(3) // 2, 1 << 20)


cpdef bint holds_sums(cnp.ndarray out, int real):
    """Whether the kernels can add up in the result itself."""
    cdef ag_matrix matrix = matrix_of(out)
    return (
        ag_itemsize[<int>matrix.dtype] == real and not matrix.swapped and matrix.step == real
        and <uintptr_t>matrix.data % real == 0 and matrix.row_stride % real == 0
    )


# ---- operators -------------------------------------------------------------------------------------------------------


cdef Problem problem_of(cnp.ndarray input, cnp.ndarray weight, Py_ssize_t rows, bint with_logits) noexcept:
    cdef Problem problem
    memset(&problem, 0, sizeof(problem))
    problem.rows, problem.with_logits = rows, with_logits
    problem.vocab, problem.hidden = cnp.PyArray_DIM(weight, 0), cnp.PyArray_DIM(weight, 1)
    problem.total_rows, problem.itemsize = cnp.PyArray_DIM(input, 0), cnp.PyArray_ITEMSIZE(input)
    return problem


cpdef Py_ssize_t default_workspace(
    cnp.ndarray input, cnp.ndarray weight, bint with_input_grad, bint with_weight_grad, Py_ssize_t beside=0
):
    """Bytes, from inputs and results: `beside` those of probabilities or logits that a call takes or returns."""
    cdef Py_ssize_t x = cnp.PyArray_NBYTES(input) // WORKSPACE_SHARE, w = cnp.PyArray_NBYTES(weight) // WORKSPACE_SHARE
    return max(DEFAULT_WORKSPACE, x * (1 + with_input_grad) + w * (1 + with_weight_grad) + beside // WORKSPACE_SHARE)


cdef list plans_of_statistics(cnp.ndarray input, cnp.ndarray weight, Py_ssize_t rows, Py_ssize_t workspace):
    """None where there is nothing to do."""
    cdef Problem problem = problem_of(input, weight, rows, True)
    problem.with_statistics = True
    return plans_of(kernels_for(input), &problem, workspace) if rows and problem.vocab else []


cdef list plans_of_gradient(
    cnp.ndarray input, cnp.ndarray weight, Py_ssize_t rows, bint with_logits, bint with_input_grad, bint with_weight_grad,
    bint buffers_weight_grad, Py_ssize_t workspace, bint keeps_logits=False
):
    """None where there is nothing to do, or, with logits to be kept, no plan that does so."""
    cdef const ag_linear_kernels *kernels = kernels_for(input)
    cdef Problem problem = problem_of(input, weight, rows, with_logits)
    problem.with_input_grad, problem.with_weight_grad = with_input_grad, with_weight_grad
    problem.buffers_weight_grad, problem.with_statistics = with_weight_grad and buffers_weight_grad, keeps_logits
    if not rows or not problem.vocab or not problem.hidden or not (with_input_grad or with_weight_grad):
        return []
    if not keeps_logits:
        return plans_of(kernels, &problem, workspace)
    plan = plan_with_logits(kernels, &problem, workspace)
    return [] if plan is None else [plan]


def plans(
    cnp.ndarray input, cnp.ndarray weight, Py_ssize_t rows, Py_ssize_t workspace, bint with_logits, bint with_input_grad,
    bint with_weight_grad, bint buffers_weight_grad, bint keeps_logits=False
):
    """The plans of the statistics (neither gradient) or of the gradients, where so many rows count."""
    if not (with_input_grad or with_weight_grad):
        return plans_of_statistics(input, weight, rows, workspace)
    return plans_of_gradient(
        input, weight, rows, with_logits, with_input_grad, with_weight_grad, buffers_weight_grad, workspace, keeps_logits
    )


def workspace_bound(list plans, Py_ssize_t workspace):
    """Bytes that a workspace takes at most for these plans, or for those of fewer rows, which are cut differently."""
    cdef Plan plan
    for plan in plans:
        if plan.blocks > 1 or plan.chunks > 1 or plan.slices > 1:
            return workspace
    return bytes_of(plans)


@cython.final
cdef class Gradient:
    """One call that is ready to run: nothing is allocated from there on, so that nothing fails after the first result is
    written."""

    cdef list schedules
    cdef Rows rows
    cdef ag_matrix input_grad, weight_grad
    cdef Py_ssize_t vocab, hidden
    cdef bint clears_input_grad, clears_weight_grad

    cdef int prepare(
        self, cnp.ndarray input, cnp.ndarray weight, list plans, cnp.ndarray memory, Rows rows, cnp.ndarray softmax,
        cnp.ndarray input_grad, cnp.ndarray weight_grad, double filter_eps, int threads
    ) except -1:
        """`plans`: none where there is nothing to do but to write zeros."""
        cdef Schedule schedule
        cdef Plan plan
        self.schedules, self.rows = [], rows
        self.vocab, self.hidden = cnp.PyArray_DIM(weight, 0), cnp.PyArray_DIM(weight, 1)
        for plan in plans:
            schedule = new_schedule(input, weight, plan, memory, rows, threads)
            schedule.set_gradient(softmax, input_grad, weight_grad, filter_eps)
            self.schedules.append(schedule)
        if not plans and input_grad is not None:
            self.clears_input_grad, self.input_grad = True, matrix_of(input_grad)
        if not plans and weight_grad is not None:
            self.clears_weight_grad, self.weight_grad = True, matrix_of(weight_grad)
        return 0

    cdef int run(self) except -1:
        cdef Schedule schedule
        cdef double last = 0
        for schedule in self.schedules:
            schedule.work()
        with nogil:
            if self.clears_input_grad:
                clear_rows(&self.input_grad, 0, self.rows.total, self.hidden, &last)
            if self.clears_weight_grad:
                clear_rows(&self.weight_grad, 0, self.vocab, self.hidden, &last)
        return 0


def gradient(
    cnp.ndarray input, cnp.ndarray weight, Rows rows, cnp.ndarray softmax, cnp.ndarray input_grad,
    cnp.ndarray weight_grad, Py_ssize_t workspace, double filter_eps, int threads, list aside
):
    """Both gradients (None: not wanted) into arrays that overlap no input.

    `workspace`: bytes to work in at most, 0 for the default. `aside`: see `copy_all`.
    """
    if not workspace:
        workspace = default_workspace(
            input, weight, input_grad is not None, weight_grad is not None,
            0 if softmax is None else cnp.PyArray_NBYTES(softmax)
        )
    cdef list plans = plans_of_gradient(
        input, weight, rows.count, softmax is None, input_grad is not None, weight_grad is not None,
        weight_grad is not None and not holds_sums(weight_grad, kernels_for(input).acc_size), workspace
    )
    cdef cnp.ndarray memory = _memory.workspace(bytes_of(plans))
    cdef Gradient call = Gradient.__new__(Gradient)
    call.prepare(input, weight, plans, memory, rows, softmax, input_grad, weight_grad, filter_eps, threads)
    call.run()
    copy_all(aside)


cpdef copy_all(list pairs):
    """From the second to the first array of each pair; see `_memory.copy_into`."""
    cdef Py_ssize_t i
    for i in range(len(pairs)):
        _memory.copy_into(<cnp.ndarray>(<tuple>pairs[i])[0], <cnp.ndarray>(<tuple>pairs[i])[1])


def loss_and_gradients(
    cnp.ndarray input, cnp.ndarray weight, cnp.ndarray target, int64_t start, int64_t ignored, reduction,
    const double[::1] grad_loss, cnp.ndarray loss, cnp.ndarray input_grad, cnp.ndarray weight_grad,
    Py_ssize_t workspace, double filter_eps, int threads
):
    """The loss into `loss` (accumulators' dtype; shape () or (BT,)), and both gradients (None: not wanted).

    `grad_loss` holds one number, or one for each row. Where that is cheaper, chunk after chunk of the rows keeps its
    logits in the workspace between the passes (6 BT V H flops), else they are computed twice (8 BT V H).
    """
    cdef Py_ssize_t vocab = cnp.PyArray_DIM(weight, 0), total = cnp.PyArray_DIM(target, 0), i
    cdef int real = kernels_for(input).acc_size
    cdef bint is_double = real == 8
    cdef bint is_mean = reduction == "mean", is_each = reduction == "none"
    cdef list plans = [], of_statistics
    cdef bint with_input = input_grad is not None, with_weight = weight_grad is not None
    cdef bint is_buffered = with_weight and not holds_sums(weight_grad, real)
    cdef cnp.ndarray logits_max, sum_exp, predicted, grad, memory
    cdef cnp.dtype real_dtype
    cdef Schedule schedule
    cdef Gradient gradients
    cdef Rows rows = Rows(target, start, vocab, ignored=ignored), rows_of_gradient
    cdef double each, sum = 0, error = 0, y, t, last = 0
    cdef Py_ssize_t begin
    cdef ag_fpenv mode
    if not workspace:
        workspace = default_workspace(input, weight, with_input, with_weight)
    real_dtype = _float64 if is_double else _float32
    logits_max, sum_exp = _memory.zeros(total, real_dtype), _memory.zeros(total, real_dtype)
    predicted, grad = _memory.zeros(total, real_dtype), _memory.zeros(total, real_dtype)
    for begin in range(0, total, ROWS_PER_CHECK):
        mode = ag_fpenv_enter()
        for i in range(begin, min(begin + ROWS_PER_CHECK, total)):
            if rows.counts(i):
                each = grad_loss[i if grad_loss.shape[0] > 1 else 0] / (rows.count if is_mean else 1)
                set_number(cnp.PyArray_DATA(grad), i, is_double, each)
        ag_fpenv_leave(mode)
        _tasks.check_signals(&last)
    rows_of_gradient = Rows(target, start, vocab, None, grad, logits_max, sum_exp)

    if rows_of_gradient.count == rows.count:
        plans = plans_of_gradient(
            input, weight, rows.count, True, with_input, with_weight, is_buffered, workspace, True
        )
    if plans:
        schedule = new_schedule(
            input, weight, plans[0], _memory.workspace(bytes_of(plans)), rows_of_gradient, threads
        )
        schedule.set_statistics(logits_max, sum_exp, predicted, None)
        schedule.set_gradient(None, input_grad, weight_grad, filter_eps)
        schedule.work()
    else:
        of_statistics = plans_of_statistics(input, weight, rows.count, workspace)
        plans = plans_of_gradient(
            input, weight, rows_of_gradient.count, True, with_input, with_weight, is_buffered, workspace
        )
        memory = _memory.workspace(bytes_of(of_statistics + plans))
        if of_statistics:
            schedule = new_schedule(input, weight, of_statistics[0], memory, rows, threads)
            schedule.set_statistics(logits_max, sum_exp, predicted, None)
            schedule.work()
        gradients = Gradient.__new__(Gradient)
        gradients.prepare(
            input, weight, plans, memory, rows_of_gradient, None, input_grad, weight_grad, filter_eps, threads
        )
        gradients.run()

    # Kahan's sum
    for begin in range(0, total, ROWS_PER_CHECK):
        mode = ag_fpenv_enter()
        for i in range(begin, min(begin + ROWS_PER_CHECK, total)):
            each = 0
            if rows.counts(i):
                each = log(number(cnp.PyArray_DATA(sum_exp), i, is_double)) - (
                    number(cnp.PyArray_DATA(predicted), i, is_double)
                    - number(cnp.PyArray_DATA(logits_max), i, is_double)
                )
            if is_each:
                set_number(cnp.PyArray_DATA(loss), i, is_double, each)
            y = each - error
            t = sum + y
            error = (t - sum) - y if t - t == 0 else 0
            sum = t
        ag_fpenv_leave(mode)
        _tasks.check_signals(&last)
    mode = ag_fpenv_enter()
    if not is_each:
        if is_mean:
            sum = sum / rows.count if rows.count else NAN
        set_number(cnp.PyArray_DATA(loss), 0, is_double, sum)
    ag_fpenv_leave(mode)


# ---- probabilities and losses ----------------------------------------------------------------------------------------

ctypedef struct Probabilities:
    const ag_linear_kernels *kernels
    ag_variant variant
    ag_matrix logits
    ag_matrix out
    const void *maxima
    const void *sums
    bint is_double
    Py_ssize_t n
    Py_ssize_t parts                  # of a row
    Py_ssize_t part_size


cdef void probabilities_of_part(void *context, Py_ssize_t task, int thread) noexcept nogil:
    cdef const Probabilities *p = <const Probabilities *>context
    cdef char[PIECE * 8] raw
    cdef char[PIECE * 8] values
    cdef const ag_matrix *logits = &p.logits
    cdef int itemsize = ag_itemsize[<int>logits.dtype]
    cdef Py_ssize_t row = task // p.parts, begin = task % p.parts * p.part_size, end = min(begin + p.part_size, p.n), count
    cdef double maximum = number(p.maxima, row, p.is_double), total = number(p.sums, row, p.is_double)
    cdef const char *source
    while begin < end:
        count = min(PIECE, end - begin)
        source = logits.data + row * logits.row_stride + begin * logits.step
        if logits.step != itemsize or logits.swapped:
            ag_copy_block(raw, 0, itemsize, source, 0, logits.step, 1, count, itemsize, logits.swapped)
            source = raw
        if itemsize == 2:
            ag_widen(p.variant, logits.dtype, source, <float *>values, count)
            source = values
        p.kernels.probabilities(values, source, maximum, total, count)
        round_piece(p.variant, p.kernels.acc_size, values, &p.out, row, begin, count)
        begin += count


def probabilities(
    cnp.ndarray logits, cnp.ndarray logits_max, cnp.ndarray sum_exp, cnp.ndarray out, int threads
):
    """``exp(logits - logits_max) / sum_exp`` of every row into `out`, which overlaps no input.

    The vectors are contiguous, of one dtype, float32 or float64.
    """
    cdef Probabilities p
    cdef double last = 0
    cdef Py_ssize_t rows = cnp.PyArray_DIM(logits, 0)
    p.kernels, p.variant = kernels_for(logits), _cpu.active()
    p.logits, p.out, p.n = matrix_of(logits), matrix_of(out), cnp.PyArray_DIM(logits, 1)
    p.maxima, p.sums = cnp.PyArray_DATA(logits_max), cnp.PyArray_DATA(sum_exp)
    p.is_double = dtype_of(logits_max) == AG_FLOAT64
    p.part_size = align_up(min(max(p.n, 1), UNIT_ELEMENTS // 16), PIECE)
    p.parts = ceil_div(p.n, p.part_size)
    _tasks.run_tasks(
        probabilities_of_part, &p, rows * p.parts, _threads.choose(<double>rows * p.n, threads), True, &last
    )
    _threads.finished()


def losses(cnp.ndarray sum_exp not None, cnp.ndarray predicted not None, cnp.ndarray loss not None):
    """``log(sum_exp) - predicted``, in float64 and rounded once, into `loss`, a vector of any floating dtype and layout.

    The others are contiguous vectors of one dtype, float32 or float64.
    """
    cdef const void *sums = cnp.PyArray_DATA(sum_exp)
    cdef const void *logits = cnp.PyArray_DATA(predicted)
    cdef bint is_double = dtype_of(sum_exp) == AG_FLOAT64
    cdef Py_ssize_t begin = 0, end = cnp.PyArray_DIM(loss, 0), stop, count, i
    cdef ag_variant variant = _cpu.active()
    cdef double[PIECE] values
    cdef ag_matrix to = matrix_of(loss)
    cdef ag_fpenv mode
    cdef double last = 0
    with nogil:
        while begin < end:
            mode = ag_fpenv_enter()
            stop = min(begin + ROWS_PER_CHECK, end)
            while begin < stop:
                count = min(PIECE, stop - begin)
                for i in range(count):
                    values[i] = log(number(sums, begin + i, is_double)) - number(logits, begin + i, is_double)
                round_piece(variant, 8, <char *>values, &to, 0, begin, count)
                begin += count
            ag_fpenv_leave(mode)
            _tasks.check_signals(&last)


def statistics(
    cnp.ndarray input, cnp.ndarray weight, cnp.ndarray target, int64_t start, int64_t end, bint with_logits, int threads
):
    """The six results of fused_linear_online_max_sum; `target` is contiguous."""
    cdef cnp.npy_intp[2] shape = [cnp.PyArray_DIM(input, 0), cnp.PyArray_DIM(weight, 0)]
    cdef cnp.npy_intp bytes = ceil_div(shape[0], 8)
    cdef int dtype = dtype_of(input)
    cdef bint is_double = dtype == AG_FLOAT64
    cdef Rows rows = Rows(target, start, end - start)
    cdef cnp.dtype real = _float64 if is_double else _float32
    cdef cnp.ndarray logits_max = _memory.fresh(1, shape, real), sum_exp = _memory.fresh(1, shape, real)
    cdef cnp.ndarray predicted = _memory.zeros(shape[0], real)
    cdef cnp.ndarray mask = _memory.zeros(bytes, _uint8)
    cdef cnp.ndarray masked_target = _memory.zeros(shape[0], _int64 if cnp.PyArray_ITEMSIZE(target) == 8 else _int32)
    cdef cnp.ndarray logits = _memory.fresh(2, shape, <cnp.dtype>_dtypes[dtype]) if with_logits else None
    cdef uint8_t *bits = <uint8_t *>cnp.PyArray_DATA(mask)
    cdef char *places = cnp.PyArray_BYTES(masked_target)
    cdef char *logit = cnp.PyArray_BYTES(predicted)
    cdef const char *largest = cnp.PyArray_BYTES(logits_max)
    cdef Py_ssize_t i
    cdef int64_t place
    cdef Py_ssize_t begin
    cdef double last = 0
    cdef list plans = plans_of_statistics(
        input, weight, rows.count,
        default_workspace(input, weight, False, False, 0 if logits is None else cnp.PyArray_NBYTES(logits))
    )
    cdef Schedule schedule
    cdef ag_fpenv mode
    if plans:
        schedule = new_schedule(input, weight, plans[0], _memory.workspace(bytes_of(plans)), rows, threads)
        schedule.set_statistics(logits_max, sum_exp, predicted, logits)
        schedule.work()
    for begin in range(0, shape[0], ROWS_PER_CHECK):
        mode = ag_fpenv_enter()
        for i in range(begin, min(begin + ROWS_PER_CHECK, shape[0])):
            place = rows.row_of_weight(i)
            if place < 0:
                bits[i // 8] |= 1 << (i % 8)
                continue
            if rows.is_wide:
                (<int64_t *>places)[i] = place
            else:
                (<int32_t *>places)[i] = <int32_t>place
            if is_double:
                (<double *>logit)[i] -= (<const double *>largest)[i]
            else:
                (<float *>logit)[i] -= (<const float *>largest)[i]
        ag_fpenv_leave(mode)
        _tasks.check_signals(&last)
    return logits_max, sum_exp, predicted, mask, masked_target, logits
