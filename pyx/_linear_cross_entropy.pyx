"""Schedules of the fused linear cross-entropy operators on the CPU; the kernels are those of linear_cross_entropy.h.

1. `Blocking` cuts a problem to the caches and to the workspace: blocks of the vocabulary, chunks of rows, and, where
   even one panel of the full width would not fit, slices of the hidden dimension.
2. `Schedule` walks them, blocks outside, chunks inside. A block is packed once; a chunk once, too, where all of them fit
   (else again for every block). For each pair, tiles of P are made and read by both products.
3. Every step is a round of units that `prange` spreads over the threads. Units and the order of all sums depend on shapes
   alone, so results are the same bits for any number of threads.

Rows whose gradient is zero are left out when a chunk is selected: chunks hold the other rows, packed together.
"""

import numpy as np

from cython.parallel cimport prange

cimport numpy as cnp
from libc.stdint cimport int64_t, uint8_t, uintptr_t
from libc.string cimport memset

from ascend_grad cimport _cpu, _openmp, _threads
from ascend_grad._kernels cimport (
    AG_BFLOAT16,
    AG_FLOAT64,
    AG_FROM_LOGITS,
    AG_FROM_PRODUCT,
    AG_FROM_SOFTMAX,
    AG_TO_GRADIENT,
    AG_TO_LOGITS,
    AG_TO_MAX_SUM,
    ag_copy_block,
    ag_dtype,
    ag_itemsize,
    ag_lce_block,
    ag_lce_kernels,
    ag_lce_kernels_of,
    ag_lce_result,
    ag_lce_source,
    ag_matrix,
    ag_round,
    ag_variant,
    ag_widen,
)

from .arrays import FLOATING_DTYPES, native

cnp.import_array()

cdef extern from "Python.h":
    int PyErr_CheckSignals() except -1

# Sizes that were measured; the curves are flat. A block of P of AREA elements stays in the last cache.
cdef Py_ssize_t ROWS = 1008
cdef Py_ssize_t VOCAB = 960
cdef Py_ssize_t AREA = 1 << 20
# Panels that a unit keeps in the second cache, and units of a round.
cdef Py_ssize_t PANELS = 4
cdef Py_ssize_t UNITS = 32
# Rows that a unit of the other rounds takes.
cdef Py_ssize_t SOME_ROWS = 1024
# Partial sums from which on the rounding errors of additions to a result are kept.
cdef Py_ssize_t MANY_SUMS = 16
# Sum of exponentials of so many rows are carried in float64 at a time.
cdef Py_ssize_t MAX_SUM_ROWS = 1 << 19
# Flops in a nanosecond of one thread, for the choice of threads.
cdef double RATE = 40.0


cdef inline Py_ssize_t divided(Py_ssize_t n, Py_ssize_t by) noexcept nogil:
    return (n + by - 1) // by


cdef inline Py_ssize_t rounded(Py_ssize_t n, Py_ssize_t to) noexcept nogil:
    return divided(n, to) * to


cdef const ag_lce_kernels *kernels_for(cnp.ndarray array):
    return ag_lce_kernels_of(_cpu.active(), <ag_dtype><int>FLOATING_DTYPES.index(native(array.dtype)))


cdef ag_matrix matrix_of(cnp.ndarray array):
    """A two-dimensional array for the kernels."""
    cdef ag_matrix result
    result.data = <char *>cnp.PyArray_DATA(array)
    result.dtype = <ag_dtype><int>FLOATING_DTYPES.index(native(array.dtype))
    result.row_stride = cnp.PyArray_STRIDE(array, 0)
    # A dimension of one element may have any stride.
    result.step = cnp.PyArray_STRIDE(array, 1) if cnp.PyArray_DIM(array, 1) > 1 else ag_itemsize[<int>result.dtype]
    result.swapped = not array.dtype.isnative
    return result


# ---- blocking --------------------------------------------------------------------------------------------------------


cdef class Blocking:
    """How many rows, rows of weight and hidden columns are worked on at a time, and the memory that this takes."""

    cdef const ag_lce_kernels *kernels
    cdef Py_ssize_t total_rows, total_vocab, total_hidden
    cdef bint with_logits, with_input_grad, with_weight_grad, with_max_sum, buffered
    cdef readonly Py_ssize_t rows, vocab, hidden     # of a chunk, a block, a slice
    cdef readonly Py_ssize_t chunks, blocks, slices
    cdef readonly Py_ssize_t slots                   # chunks that are kept packed

    def __init__(
        self, cnp.ndarray input, Py_ssize_t rows, Py_ssize_t vocab, Py_ssize_t hidden, Py_ssize_t workspace,
        bint with_logits, bint with_input_grad, bint with_weight_grad, bint with_max_sum, bint buffered
    ):
        cdef Py_ssize_t nr, most
        self.kernels = kernels_for(input)
        self.total_rows, self.total_vocab, self.total_hidden = rows, vocab, hidden
        self.with_logits, self.with_input_grad = with_logits, with_input_grad
        self.with_weight_grad, self.with_max_sum, self.buffered = with_weight_grad, with_max_sum, buffered
        nr = self.kernels.nr
        # Panels of this many units along the sum take a quarter of the second cache.
        most = max(_cpu.cache_size(2) // 4 // (nr * self.kernels.unit_size) * self.kernels.pair, 4 * nr)
        self.rows, self.vocab = min(ROWS, most), min(VOCAB, most)
        # Where one side is short, the other is long.
        if rows <= self.rows:
            self.rows = rows
            self.vocab = max(self.vocab, AREA // rounded(rows, nr))
        elif vocab <= self.vocab:
            self.vocab = vocab
            self.rows = max(self.rows, AREA // rounded(vocab, nr))
        self.rows = rounded(min(rows, self.rows), nr)
        self.vocab = rounded(min(vocab, self.vocab), nr)
        self.hidden = hidden
        while self.bytes() > workspace:
            if max(self.rows, self.vocab) > 2 * nr:
                if self.rows > self.vocab:
                    self.rows = rounded(self.rows // 2, nr)
                else:
                    self.vocab = rounded(self.vocab // 2, nr)
            elif self.hidden > 4 * nr:
                self.hidden = rounded(self.hidden // 2, nr)
            else:
                break
        # Equal parts.
        self.chunks = divided(rows, self.rows)
        self.rows = rounded(divided(rows, self.chunks), nr)
        self.blocks = divided(vocab, self.vocab)
        self.vocab = rounded(divided(vocab, self.blocks), nr)
        self.slices = divided(hidden, self.hidden) if hidden else 1
        self.slots = 1
        if self.slices == 1 and self.bytes() + (self.chunks - 1) * self.chunk_bytes() <= workspace:
            self.slots = self.chunks

    cdef Py_ssize_t packed_rows(self, Py_ssize_t n):
        """Bytes of n packed rows of X or W, for the logits."""
        return rounded(n, self.kernels.nr) * divided(self.hidden, self.kernels.pair) * self.kernels.unit_size

    cdef Py_ssize_t packed_columns(self, Py_ssize_t n):
        """Bytes of the packed columns of n rows, for the other products."""
        return divided(n, self.kernels.pair) * rounded(self.hidden, self.kernels.vector) * self.kernels.unit_size

    cdef Py_ssize_t chunk_bytes(self):
        return self.with_logits * self.packed_rows(self.rows) + self.with_weight_grad * self.packed_columns(self.rows)

    cdef Py_ssize_t row_bytes(self):
        return self.rows * (2 * sizeof(int64_t) + 3 * self.kernels.real_size)

    cdef Py_ssize_t p_bytes(self):
        return self.rows * self.vocab * self.kernels.unit_size // self.kernels.pair

    cdef Py_ssize_t panels(self):
        return self.vocab // self.kernels.nr

    cdef Py_ssize_t bytes(self):
        """The workspace, without the chunks that are kept beyond the first."""
        cdef Py_ssize_t real = self.kernels.real_size, total
        cdef bint is_sliced = self.hidden < self.total_hidden
        total = self.chunk_bytes() + self.row_bytes() + 16 * 64
        total += self.with_logits * self.packed_rows(self.vocab) + self.with_input_grad * self.packed_columns(self.vocab)
        if self.with_max_sum:
            total += 2 * self.panels() * self.rows * real
        else:
            total += self.kernels.pair * self.p_bytes()
            total += self.panels() * (self.rows // self.kernels.mr)
        if is_sliced and self.with_logits:
            total += self.rows * self.vocab * real
        if self.with_weight_grad:
            # What additions to the gradient lose; the gradient itself where the result cannot hold it.
            total += self.vocab * self.total_hidden * real * (self.buffered + (self.total_rows > MANY_SUMS * self.rows))
        return total


def workspace_bound(
    input, Py_ssize_t rows, Py_ssize_t vocab, Py_ssize_t hidden, Py_ssize_t workspace, bint with_logits,
    bint with_input_grad, bint with_weight_grad, bint with_max_sum, bint buffered
):
    """Bytes of the workspace, whichever rows are left out. The smallest blocking can exceed what was asked for."""
    cdef Blocking blocking
    cdef Py_ssize_t largest
    if not rows or not vocab or not (with_logits or hidden):
        return 0
    blocking = Blocking(
        input, rows, vocab, hidden, workspace, with_logits, with_input_grad, with_weight_grad, with_max_sum, buffered
    )
    largest = blocking.bytes() + (blocking.slots - 1) * blocking.chunk_bytes()
    if blocking.blocks == blocking.chunks == 1:
        return largest  # fewer rows take less
    return max(largest, workspace)


# ---- the schedule ----------------------------------------------------------------------------------------------------

ctypedef struct Grid:
    # tiles x panels, cut into units
    Py_ssize_t panels
    Py_ssize_t tiles
    Py_ssize_t panel_step
    Py_ssize_t tile_step
    Py_ssize_t groups                 # of panels
    Py_ssize_t units


cdef Grid grid_of(Py_ssize_t panels, Py_ssize_t tiles, Py_ssize_t panel_bytes):
    cdef Grid grid
    cdef Py_ssize_t together = max(1, min(PANELS, _cpu.cache_size(2) // 2 // max(panel_bytes, 1)))
    grid.panels, grid.tiles = panels, tiles
    grid.groups = divided(panels, together)
    grid.panel_step = divided(panels, max(grid.groups, 1)) if panels else 1
    grid.groups = divided(panels, grid.panel_step)
    grid.tile_step = max(divided(tiles, max(UNITS // max(grid.groups, 1), 1)), 1)
    grid.units = grid.groups * divided(tiles, grid.tile_step)
    return grid


cdef enum Round:
    PACK_BLOCK
    PACK_CHUNK
    TILES
    MERGE
    PRODUCTS
    ROUND_WEIGHT_GRAD
    ROUND_INPUT_GRAD


cdef class Schedule:
    """One call at work: its memory, and the block and chunk that the units of the current round belong to."""

    cdef const ag_lce_kernels *kernels
    cdef ag_lce_block block
    cdef ag_matrix input, weight
    cdef Blocking blocking
    cdef int threads
    cdef list keep                    # arrays whose memory is in use
    cdef char *memory                 # of the workspace that is not taken yet
    # what the rounds read
    cdef ag_lce_source source
    cdef ag_lce_result result
    cdef Grid tiles, input_grid, weight_grid
    cdef Py_ssize_t weight_panel_units, weight_column_units, input_tile_units
    cdef Py_ssize_t column_parts      # pieces of rows that columns are packed in
    cdef ag_matrix rounded_to
    cdef const char *rounded_from
    cdef Py_ssize_t rounded_rows, rounded_n, rounded_stride
    cdef ag_variant variant

    def __init__(self, cnp.ndarray input, cnp.ndarray weight, Blocking blocking, double flops, num_threads):
        cdef Py_ssize_t total
        self.kernels = blocking.kernels
        self.blocking = blocking
        self.variant = _cpu.active()
        memset(&self.block, 0, sizeof(self.block))
        self.input, self.weight = matrix_of(input), matrix_of(weight)
        self.block.round_to_bfloat16 = self.input.dtype == AG_BFLOAT16
        self.threads = _threads.choose(flops / RATE, 0 if num_threads is None else num_threads)
        self.keep = [input, weight]
        total = blocking.bytes() + (blocking.slots - 1) * blocking.chunk_bytes()
        workspace = np.empty(total + 64, np.uint8)
        self.keep.append(workspace)
        self.memory = <char *>cnp.PyArray_DATA(workspace)
        self.memory += (64 - <uintptr_t>self.memory % 64) % 64

    cdef void *take(self, Py_ssize_t size):
        cdef void *result = self.memory
        self.memory += rounded(size, 64)
        return result

    cdef void *array(self, cnp.ndarray array):
        """The data of a contiguous array, which is kept alive."""
        self.keep.append(array)
        return cnp.PyArray_DATA(array)

    # -- rounds

    cdef int run(self, Round which, Py_ssize_t units) except -1:
        cdef Py_ssize_t u
        if units > 0:
            for u in prange(units, nogil=True, num_threads=self.threads, schedule="dynamic"):
                _openmp.record_team()
                self.unit(which, u)
        PyErr_CheckSignals()
        return 0

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
        else:
            self.round_rows(u)

    cdef void pack_columns(
        self, void *to, const ag_matrix *source, const int64_t *rows, int64_t start, Py_ssize_t count, Py_ssize_t u
    ) noexcept nogil:
        """A panel of columns; unit u packs one piece of its rows."""
        cdef Py_ssize_t nr = self.kernels.nr, panel = u // self.column_parts, part = u % self.column_parts
        cdef Py_ssize_t first = self.block.hidden_start + panel * nr
        cdef Py_ssize_t n = min(nr, self.block.hidden_size - panel * nr)
        cdef Py_ssize_t begin = part * SOME_ROWS, end = min(begin + SOME_ROWS, count)
        cdef Py_ssize_t at = panel * nr * divided(count, self.kernels.pair)
        at += begin // self.kernels.pair * rounded(n, self.kernels.vector)
        if rows != NULL:
            rows += begin
        self.kernels.pack_columns(
            <char *>to + at * self.kernels.unit_size, source, rows, start + begin, end - begin, first, n
        )

    cdef void pack_block(self, Py_ssize_t u) noexcept nogil:
        cdef Py_ssize_t nr = self.kernels.nr, size
        if u < self.weight_panel_units:
            size = nr * divided(self.block.hidden_size, self.kernels.pair) * self.kernels.unit_size
            self.kernels.pack_panel(
                <char *>self.block.w_rows + u * size, &self.weight, NULL, self.block.vocab_start + u * nr,
                min(nr, self.block.vocab - u * nr), self.block.hidden_start, self.block.hidden_size
            )
        else:
            self.pack_columns(
                self.block.w_columns, &self.weight, NULL, self.block.vocab_start, self.block.vocab,
                u - self.weight_panel_units
            )

    cdef void pack_chunk(self, Py_ssize_t u) noexcept nogil:
        cdef Py_ssize_t mr = self.kernels.mr, size
        if u < self.input_tile_units:
            size = mr * divided(self.block.hidden_size, self.kernels.pair) * self.kernels.unit_size
            self.kernels.pack_tile(
                <char *>self.block.x_rows + u * size, &self.input, self.block.row_numbers + u * mr, 0,
                min(mr, self.block.rows - u * mr), self.block.hidden_start, self.block.hidden_size
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
        cdef char[256 * 8] buffer
        cdef ag_matrix *to = &self.rounded_to
        cdef int real = self.kernels.real_size, itemsize = ag_itemsize[<int>to.dtype]
        cdef bint is_same = to.dtype == (AG_FLOAT64 if real == 8 else 0), is_dense = to.step == itemsize and not to.swapped
        cdef Py_ssize_t row, begin, n
        cdef const char *source
        cdef char *target
        for row in range(u * SOME_ROWS // 16, min((u + 1) * SOME_ROWS // 16, self.rounded_rows)):
            for begin in range(0, self.rounded_n, 256):
                n = min(256, self.rounded_n - begin)
                source = self.rounded_from + row * self.rounded_stride + begin * real
                target = to.data + row * to.row_stride + begin * to.step
                if not is_same:
                    ag_round(self.variant, real == 8, source, to.dtype, target if is_dense else buffer, n)
                    source = buffer
                if is_same or not is_dense:
                    ag_copy_block(target, 0, to.step, source, 0, itemsize, 1, n, itemsize, to.swapped)

    cdef int round_to(
        self, cnp.ndarray out, Py_ssize_t first, const char *sums, Py_ssize_t stride, Py_ssize_t rows
    ) except -1:
        """Rows [first, first + rows) of out from rows of accumulators."""
        self.rounded_to = matrix_of(out)
        self.rounded_to.data += first * self.rounded_to.row_stride
        self.rounded_from, self.rounded_stride = sums, stride
        self.rounded_rows, self.rounded_n = rows, cnp.PyArray_DIM(out, 1)
        return self.run(ROUND_INPUT_GRAD, divided(rows, SOME_ROWS // 16))

    # -- blocks and chunks

    cdef int set_slice(self, Py_ssize_t index) except -1:
        """The part of the hidden dimension that is packed next."""
        cdef Py_ssize_t begin = index * self.blocking.hidden
        self.block.hidden_start = begin
        self.block.hidden_size = min(self.blocking.hidden, self.blocking.total_hidden - begin)
        self.block.hidden = self.block.hidden_size
        return 0

    cdef int set_block(self, Py_ssize_t index) except -1:
        cdef Py_ssize_t begin = index * self.blocking.vocab
        self.block.vocab_start = begin
        self.block.vocab = min(self.blocking.vocab, self.blocking.total_vocab - begin)
        return 0

    cdef int set_chunk(self, chunk) except -1:
        """The rows of a chunk, as `select` of its provider returned them."""
        row_numbers, target, grad, maximum, total = chunk
        self.block.rows = len(row_numbers)
        self.block.row_numbers = <const int64_t *>self.address(row_numbers)
        self.block.target = <const int64_t *>self.address(target)
        self.block.grad = self.address(grad)
        self.block.max = self.address(maximum)
        self.block.sum = self.address(total)
        return 0

    cdef void *address(self, array):
        return NULL if array is None else cnp.PyArray_DATA(<cnp.ndarray>array)

    cdef int pack_weight(self, bint rows, bint columns) except -1:
        cdef Py_ssize_t panels = divided(self.block.hidden_size, self.kernels.nr)
        self.weight_panel_units = divided(self.block.vocab, self.kernels.nr) if rows else 0
        self.column_parts = divided(self.block.vocab, SOME_ROWS)
        return self.run(PACK_BLOCK, self.weight_panel_units + (panels * self.column_parts if columns else 0))

    cdef int pack_input(self, bint rows, bint columns) except -1:
        cdef Py_ssize_t panels = divided(self.block.hidden_size, self.kernels.nr)
        self.input_tile_units = divided(self.block.rows, self.kernels.mr) if rows else 0
        self.column_parts = divided(self.block.rows, SOME_ROWS)
        return self.run(PACK_CHUNK, self.input_tile_units + (panels * self.column_parts if columns else 0))

    cdef int run_tiles(self, ag_lce_source source, ag_lce_result result) except -1:
        self.source, self.result = source, result
        self.tiles = grid_of(
            divided(self.block.vocab, self.kernels.nr), divided(self.block.rows, self.kernels.mr),
            self.block.hidden * self.kernels.nr * self.kernels.unit_size // self.kernels.pair
        )
        return self.run(TILES, self.tiles.units)

    cdef int run_products(self) except -1:
        cdef Py_ssize_t panels = divided(self.block.hidden_size, self.kernels.nr)
        cdef Py_ssize_t width = self.kernels.nr * self.kernels.unit_size // self.kernels.pair
        self.input_grid.units = self.weight_grid.units = 0
        if self.block.input_grad.data != NULL:
            self.input_grid = grid_of(panels, divided(self.block.rows, self.kernels.mr), self.block.vocab * width)
        if self.block.weight_grad.data != NULL:
            self.weight_grid = grid_of(panels, divided(self.block.vocab, self.kernels.mr), self.block.rows * width)
        return self.run(PRODUCTS, self.input_grid.units + self.weight_grid.units)

    cdef int sliced_logits(self) except -1:
        """Logits of the block and the chunk, summed over slices of the hidden dimension."""
        cdef Py_ssize_t index
        for index in range(self.blocking.slices):
            self.set_slice(index)
            self.pack_weight(True, False)
            self.pack_input(True, False)
            self.block.add_logits = index > 0
            self.run_tiles(AG_FROM_PRODUCT, AG_TO_LOGITS)
        return 0


cdef bint holds_sums(cnp.ndarray out, int real):
    """Whether the kernels can add up in the result itself."""
    cdef ag_matrix matrix = matrix_of(out)
    return (
        ag_itemsize[<int>matrix.dtype] == real and not matrix.swapped and matrix.step == real
        and <uintptr_t>matrix.data % real == 0 and matrix.row_stride % real == 0
    )


def gradient(
    cnp.ndarray input, cnp.ndarray weight, rows, cnp.ndarray softmax, cnp.ndarray input_grad, cnp.ndarray weight_grad,
    Py_ssize_t workspace, double filter_eps, num_threads
):
    """Both gradients into the given arrays (None: not wanted), which overlap no input.

    `rows` selects the rows that count: `rows.count` of them, in chunks `rows.chunks(size)` of at most that many, each a
    tuple (row_numbers, target, grad, max, sum) of contiguous arrays; `rows.absent` are the numbers of all others.
    """
    cdef Py_ssize_t count = rows.count, vocab = cnp.PyArray_DIM(weight, 0), hidden = cnp.PyArray_DIM(weight, 1)
    cdef Py_ssize_t b, c, s, part
    cdef bint with_logits = softmax is None, with_input = input_grad is not None, with_weight = weight_grad is not None
    cdef bint is_direct, is_first
    cdef Schedule schedule
    cdef Blocking blocking
    cdef ag_lce_block *block
    cdef const ag_lce_kernels *kernels = kernels_for(input)
    cdef char *x_rows
    cdef char *x_columns
    cdef cnp.ndarray sums
    if not count or not vocab or not hidden or not (with_input or with_weight):
        for out in (input_grad, weight_grad):
            if out is not None:
                out[...] = 0
        return
    is_direct = with_weight and holds_sums(weight_grad, kernels.real_size)
    blocking = Blocking(
        input, count, vocab, hidden, workspace, with_logits, with_input, with_weight, False, with_weight and not is_direct
    )
    schedule = Schedule(
        input, weight, blocking, 2.0 * (with_logits + with_input + with_weight) * count * vocab * hidden, num_threads
    )
    block = &schedule.block
    real = np.dtype(np.float64 if kernels.real_size == 8 else np.float32)
    block.filter_eps = filter_eps
    if not with_logits:
        block.softmax = matrix_of(softmax)
    chunks = list(rows.chunks(blocking.rows)) if blocking.chunks == 1 else None

    # Memory: blocks, chunks, P, accumulators.
    block.w_rows = schedule.take(with_logits * blocking.packed_rows(blocking.vocab))
    block.w_columns = schedule.take(with_input * blocking.packed_columns(blocking.vocab))
    block.p = schedule.take(blocking.p_bytes())
    if kernels.pair > 1:
        block.p_pairs = schedule.take(blocking.p_bytes())
    block.skipped = <uint8_t *>schedule.take(blocking.panels() * (blocking.rows // kernels.mr))
    if blocking.slices > 1 and with_logits:
        block.logits = schedule.take(blocking.rows * blocking.vocab * kernels.real_size)
    if with_weight:
        block.weight_grad.row_stride = block.weight_grad.low_stride = hidden * kernels.real_size
        if is_direct:
            block.weight_grad.row_stride = cnp.PyArray_STRIDE(weight_grad, 0)
        else:
            block.weight_grad.data = <char *>schedule.take(blocking.vocab * hidden * kernels.real_size)
        if count > MANY_SUMS * blocking.rows:
            block.weight_grad.low = <char *>schedule.take(blocking.vocab * hidden * kernels.real_size)
    if with_input:
        sums = input_grad if holds_sums(input_grad, kernels.real_size) else np.empty(
            (input_grad.shape[0], hidden), real
        )
        block.input_grad.data = <char *>schedule.array(sums)
        block.input_grad.row_stride = cnp.PyArray_STRIDE(sums, 0)
        if blocking.blocks > MANY_SUMS and input_grad.shape[0] * hidden * kernels.real_size <= workspace // 4:
            block.input_grad.low = <char *>schedule.array(np.empty((input_grad.shape[0], hidden), real))
            block.input_grad.low_stride = hidden * kernels.real_size
    x_rows = <char *>schedule.take(blocking.slots * with_logits * blocking.packed_rows(blocking.rows))
    x_columns = <char *>schedule.take(blocking.slots * with_weight * blocking.packed_columns(blocking.rows))

    schedule.set_slice(0)
    for b in range(blocking.blocks):
        schedule.set_block(b)
        if is_direct:
            block.weight_grad.data = (
                <char *>cnp.PyArray_DATA(weight_grad) + block.vocab_start * block.weight_grad.row_stride
            )
        if blocking.slices == 1:
            schedule.pack_weight(with_logits, with_input)
        block.add_input_grad = b > 0
        c = 0
        for chunk in chunks or rows.chunks(blocking.rows):
            schedule.set_chunk(chunk)
            part = c if blocking.slots > 1 else 0
            block.x_rows = x_rows + part * blocking.packed_rows(blocking.rows)
            block.x_columns = x_columns + part * blocking.packed_columns(blocking.rows)
            is_first = b == 0 or blocking.slots < blocking.chunks
            if blocking.slices == 1 and is_first:
                schedule.pack_input(with_logits, with_weight)
            if not with_logits:
                schedule.run_tiles(AG_FROM_SOFTMAX, AG_TO_GRADIENT)
            elif blocking.slices == 1:
                schedule.run_tiles(AG_FROM_PRODUCT, AG_TO_GRADIENT)
            else:
                schedule.sliced_logits()
                schedule.run_tiles(AG_FROM_LOGITS, AG_TO_GRADIENT)
            block.add_weight_grad = c > 0
            for s in range(blocking.slices):
                if blocking.slices > 1:
                    schedule.set_slice(s)
                    schedule.pack_weight(False, with_input)
                    schedule.pack_input(False, with_weight)
                schedule.run_products()
            c += 1
        if with_weight and not is_direct:
            schedule.round_to(
                weight_grad, block.vocab_start, block.weight_grad.data, block.weight_grad.row_stride, block.vocab
            )
    if with_input:
        if sums is not input_grad:
            schedule.round_to(input_grad, 0, block.input_grad.data, block.input_grad.row_stride, input_grad.shape[0])
        input_grad[rows.absent] = 0
    _threads.finished()


def max_sum(
    cnp.ndarray input, cnp.ndarray weight, rows, cnp.ndarray logits_max, cnp.ndarray sum_exp, cnp.ndarray predicted,
    cnp.ndarray logits, Py_ssize_t workspace, num_threads
):
    """Maximum, sum of exponentials relative to it, and logit of the target (where there is one), of every row that counts.

    The results are contiguous arrays of the accumulators' dtype (BT,); `logits`, unless None, is contiguous, of the dtype
    of input. `rows` as in `gradient`; grad, max and sum of its chunks are None.
    """
    cdef Py_ssize_t count = rows.count, vocab = cnp.PyArray_DIM(weight, 0), hidden = cnp.PyArray_DIM(weight, 1)
    cdef Py_ssize_t b, c, part
    cdef Schedule schedule
    cdef Blocking blocking
    cdef ag_lce_block *block
    cdef const ag_lce_kernels *kernels = kernels_for(input)
    cdef char *x_rows
    if not count:
        return
    blocking = Blocking(input, count, vocab, hidden, workspace, True, False, False, True, False)
    schedule = Schedule(input, weight, blocking, 2.0 * count * vocab * max(hidden, 1), num_threads)
    block = &schedule.block
    block.w_rows = schedule.take(blocking.packed_rows(blocking.vocab))
    block.panel_max = schedule.take(blocking.panels() * blocking.rows * kernels.real_size)
    block.panel_sum = schedule.take(blocking.panels() * blocking.rows * kernels.real_size)
    if blocking.slices > 1:
        block.logits = schedule.take(blocking.rows * blocking.vocab * kernels.real_size)
    x_rows = <char *>schedule.take(blocking.slots * blocking.packed_rows(blocking.rows))
    logits_max.fill(-np.inf)
    running_sum = sum_exp if kernels.real_size == 8 else np.empty(cnp.PyArray_DIM(sum_exp, 0), np.float64)
    running_sum.fill(0)
    block.running_max = schedule.array(logits_max)
    block.running_sum = <double *>schedule.array(running_sum)
    block.predicted = schedule.array(predicted)
    if logits is not None:
        block.logits_out = matrix_of(logits)
    chunks = list(rows.chunks(blocking.rows)) if blocking.chunks == 1 else None

    schedule.set_slice(0)
    for b in range(blocking.blocks):
        schedule.set_block(b)
        if blocking.slices == 1:
            schedule.pack_weight(True, False)
        c = 0
        for chunk in chunks or rows.chunks(blocking.rows):
            schedule.set_chunk(chunk)
            part = c if blocking.slots > 1 else 0
            block.x_rows = x_rows + part * blocking.packed_rows(blocking.rows)
            if blocking.slices > 1:
                schedule.sliced_logits()
                schedule.run_tiles(AG_FROM_LOGITS, AG_TO_MAX_SUM)
            else:
                if b == 0 or blocking.slots < blocking.chunks:
                    schedule.pack_input(True, False)
                schedule.run_tiles(AG_FROM_PRODUCT, AG_TO_MAX_SUM)
            schedule.run(MERGE, divided(block.rows, SOME_ROWS))
            c += 1
    # Where every logit is -inf, the exponentials are those of NaN.
    running_sum[logits_max == -np.inf] = np.nan
    if running_sum is not sum_exp:
        sum_exp[...] = running_sum
    _threads.finished()


# ---- probabilities ---------------------------------------------------------------------------------------------------


cdef void probabilities_of_row(
    const ag_lce_kernels *kernels, ag_variant variant, const ag_matrix *logits, double maximum, double total,
    const ag_matrix *out, Py_ssize_t row, Py_ssize_t n
) noexcept nogil:
    cdef char[256 * 8] raw
    cdef char[256 * 8] values
    cdef int itemsize = ag_itemsize[<int>logits.dtype], out_itemsize = ag_itemsize[<int>out.dtype]
    cdef int real = kernels.real_size
    cdef bint is_same = out.dtype == (AG_FLOAT64 if real == 8 else 0)
    cdef Py_ssize_t begin, count
    cdef const char *source
    cdef char *target
    for begin in range(0, n, 256):
        count = min(256, n - begin)
        source = logits.data + row * logits.row_stride + begin * logits.step
        target = out.data + row * out.row_stride + begin * out.step
        if logits.step != itemsize or logits.swapped:
            ag_copy_block(raw, 0, itemsize, source, 0, logits.step, 1, count, itemsize, logits.swapped)
            source = raw
        if itemsize == 2:
            ag_widen(variant, logits.dtype, source, <float *>values, count)
            source = values
        kernels.probabilities(values, source, maximum, total, count)
        source = values
        if not is_same:
            ag_round(variant, real == 8, values, out.dtype, raw, count)
            source = raw
        ag_copy_block(target, 0, out.step, source, 0, out_itemsize, 1, count, out_itemsize, out.swapped)


def probabilities(
    cnp.ndarray logits, const double[::1] logits_max, const double[::1] sum_exp, cnp.ndarray out, num_threads
):
    """``exp(logits - logits_max) / sum_exp`` of every row into `out`, which overlaps no input."""
    cdef const ag_lce_kernels *kernels = kernels_for(logits)
    cdef ag_matrix source = matrix_of(logits), target = matrix_of(out)
    cdef Py_ssize_t rows = cnp.PyArray_DIM(logits, 0), n = cnp.PyArray_DIM(logits, 1), row
    cdef ag_variant variant = _cpu.active()
    cdef int threads = _threads.choose(<double>rows * n, 0 if num_threads is None else num_threads)
    if rows and n:
        for row in prange(rows, nogil=True, num_threads=threads, schedule="dynamic", chunksize=16):
            _openmp.record_team()
            probabilities_of_row(kernels, variant, &source, logits_max[row], sum_exp[row], &target, row, n)
    _threads.finished()
    PyErr_CheckSignals()
