"""Schedules of the fused linear cross-entropy operators on the CPU; the kernels are those of linear_cross_entropy.h.

1. `Blocking` cuts a problem to the caches and to the workspace: blocks of the vocabulary, chunks of rows, and, where
   even one panel of the full width would not fit, slices of the hidden dimension.
2. `Schedule` walks them, blocks outside, chunks inside. A block is packed once; a chunk once, too, where all of them fit
   (else again for every block). For each pair, tiles of P are made and read by both products.
3. Every step is a round of units that the threads of a team take one by one. Units and the order of all sums depend on shapes
   alone, so results are the same bits for any number of threads.

Rows whose gradient is zero (or whose target is ignored) are left out when a chunk is selected: chunks hold the others,
packed together.

The public functions at the end take the common case straight from Python objects, and answer None to all others.
"""

import numpy as np

from cython.parallel cimport parallel, prange, threadid

cimport numpy as cnp
from libc.math cimport INFINITY, NAN, log
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memset

from ascend_grad cimport _cpu, _memory, _openmp, _threads
from ascend_grad._dtypes cimport dtype_of
from ascend_grad._kernels cimport (
    AG_BFLOAT16,
    AG_FLOAT32,
    AG_FLOAT64,
    AG_FROM_LOGITS,
    AG_FROM_PRODUCT,
    AG_FROM_SOFTMAX,
    AG_TO_GRADIENT,
    AG_TO_LOGITS,
    AG_TO_MAX_SUM,
    ag_copy_block,
    ag_dtype,
    ag_fpenv,
    ag_fpenv_enter,
    ag_fpenv_leave,
    ag_itemsize,
    ag_lce_block,
    ag_lce_kernels,
    ag_lce_kernels_of,
    ag_lce_result,
    ag_lce_source,
    ag_matrix,
    ag_round,
    ag_team,
    ag_team_join,
    ag_team_meet,
    ag_team_next,
    ag_team_start,
    ag_variant,
    ag_widen,
)

from .arrays import FLOATING_DTYPES
from .contract import DEFAULT_WORKSPACE_BYTES, MAX_THREADS
from .results import LinearCrossEntropy, OnlineMaxSum

cnp.import_array()

cdef extern from "Python.h":
    int PyErr_CheckSignals() except -1

cdef tuple _dtypes = FLOATING_DTYPES  # in the order of ag_dtype
cdef cnp.dtype _float32 = np.dtype(np.float32)
cdef cnp.dtype _float64 = np.dtype(np.float64)
cdef cnp.dtype _uint8 = np.dtype(np.uint8)
cdef Py_ssize_t _default_workspace = DEFAULT_WORKSPACE_BYTES
cdef int _max_threads = MAX_THREADS
cdef object _named_statistics = OnlineMaxSum._make
cdef object _named_gradients = LinearCrossEntropy._make

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
# At most so many are added up without.
cdef Py_ssize_t MOST_SUMS = 64
# Rows of a chunk from which on it pays to keep its logits.
cdef Py_ssize_t KEPT_ROWS = 288
# More than any memory has.
cdef Py_ssize_t MOST_BYTES = 1 << 58
# Flops in a nanosecond of one thread, for the choice of threads.
cdef double RATE = 40.0


cdef inline Py_ssize_t divided(Py_ssize_t n, Py_ssize_t by) noexcept nogil:
    return (n + by - 1) // by


cdef inline Py_ssize_t rounded(Py_ssize_t n, Py_ssize_t to) noexcept nogil:
    return divided(n, to) * to


cdef inline Py_ssize_t times(Py_ssize_t a, Py_ssize_t b) noexcept nogil:
    """The product of sizes. What is no size any more stays far from overflowing, even in a sum of several."""
    return MOST_BYTES if a and b > MOST_BYTES // a else a * b


cdef const ag_lce_kernels *kernels_for(cnp.ndarray array):
    return ag_lce_kernels_of(_cpu.active(), <ag_dtype>dtype_of(array))


cdef ag_matrix matrix_of(cnp.ndarray array):
    """A two-dimensional array for the kernels."""
    cdef ag_matrix result
    result.data = <char *>cnp.PyArray_DATA(array)
    result.dtype = <ag_dtype>dtype_of(array)
    result.row_stride = cnp.PyArray_STRIDE(array, 0)
    # A dimension of one element may have any stride.
    result.step = cnp.PyArray_STRIDE(array, 1) if cnp.PyArray_DIM(array, 1) > 1 else ag_itemsize[<int>result.dtype]
    result.swapped = cnp.PyArray_ISBYTESWAPPED(array)
    return result


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
        self.count = 0
        for i in range(self.total):
            self.count += self.counts(i)

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

    cdef int clear_absent(self, cnp.ndarray out) except -1:
        """Zeros in the rows that do not count."""
        cdef Py_ssize_t i
        cdef uint8_t[::1] is_absent
        if self.count < self.total:
            absent = np.empty(self.total, np.uint8)
            is_absent = absent
            for i in range(self.total):
                is_absent[i] = not self.counts(i)
            out[absent.view(np.bool_)] = 0
        return 0


# ---- blocking --------------------------------------------------------------------------------------------------------


cdef class Blocking:
    """How many rows, rows of weight and hidden columns are worked on at a time, and the memory that this takes."""

    cdef const ag_lce_kernels *kernels
    cdef Py_ssize_t input_rows, total_rows, total_vocab, total_hidden
    cdef bint with_logits, with_input_grad, with_weight_grad, with_max_sum, buffered, kept
    cdef readonly Py_ssize_t rows, vocab, hidden     # of a chunk, a block, a slice
    cdef readonly Py_ssize_t chunks, blocks, slices
    cdef readonly Py_ssize_t slots                   # chunks that are kept packed
    cdef Py_ssize_t workspace

    def __init__(
        self, cnp.ndarray input, Py_ssize_t rows, Py_ssize_t vocab, Py_ssize_t hidden, Py_ssize_t workspace,
        bint with_logits, bint with_input_grad, bint with_weight_grad, bint with_max_sum, bint buffered, bint kept=False
    ):
        """What is to be computed; whether weight_grad needs accumulators beside it; whether all logits are kept."""
        cdef Py_ssize_t nr, most
        self.kernels = kernels_for(input)
        self.total_rows, self.total_vocab, self.total_hidden = rows, vocab, hidden
        self.input_rows = cnp.PyArray_DIM(input, 0)
        self.with_logits, self.with_input_grad = with_logits, with_input_grad
        self.with_weight_grad, self.with_max_sum, self.buffered = with_weight_grad, with_max_sum, buffered
        self.kept, self.workspace = kept, workspace
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
        self.hidden, self.chunks = hidden, 1
        while kept and self.bytes() > workspace and self.rows > nr:
            self.rows -= nr
        while self.bytes() > workspace and not kept:
            if max(self.rows, self.vocab) > 2 * nr:
                if self.rows > self.vocab:
                    self.rows = rounded(self.rows // 2, nr)
                else:
                    self.vocab = rounded(self.vocab // 2, nr)
            elif self.hidden > 4 * nr:
                self.hidden = rounded(self.hidden // 2, nr)
            else:
                break
        self.cut()
        if with_input_grad and self.blocks > MOST_SUMS and not self.compensates_input_grad():
            # Without room for what additions to it lose: larger blocks, fewer additions.
            before = self.rows, self.vocab
            self.vocab = rounded(divided(vocab, MOST_SUMS), nr)
            while self.bytes() > workspace and self.rows > 2 * nr:
                self.rows -= nr
            if self.bytes() > workspace:
                self.rows, self.vocab = before
            self.cut()

    cdef void cut(self):
        """Equal parts that are no larger."""
        cdef Py_ssize_t nr = self.kernels.nr
        self.chunks = divided(self.total_rows, self.rows)
        self.rows = rounded(divided(self.total_rows, self.chunks), nr)
        self.blocks = divided(self.total_vocab, self.vocab)
        self.vocab = rounded(divided(self.total_vocab, self.blocks), nr)
        self.slices = divided(self.total_hidden, self.hidden) if self.total_hidden else 1
        self.slots = 1
        if not self.kept and self.slices == 1:
            if self.bytes() + (self.chunks - 1) * self.chunk_bytes() <= self.workspace:
                self.slots = self.chunks

    cdef Py_ssize_t packed_rows(self, Py_ssize_t n):
        """Bytes of n packed rows of X or W, for the logits."""
        return times(
            rounded(n, self.kernels.nr) * self.kernels.unit_size, divided(self.hidden, self.kernels.pair)
        )

    cdef Py_ssize_t packed_columns(self, Py_ssize_t n):
        """Bytes of the packed columns of n rows, for the other products."""
        return times(
            divided(n, self.kernels.pair) * self.kernels.unit_size, rounded(self.hidden, self.kernels.vector)
        )

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
        total = self.chunk_bytes() + self.row_bytes() + (self.chunks + 1) * sizeof(int64_t) + 20 * 64
        total += self.with_logits * self.packed_rows(self.vocab) + self.with_input_grad * self.packed_columns(self.vocab)
        if self.with_max_sum:
            total += 2 * self.panels() * self.rows * real
        if self.with_input_grad or self.with_weight_grad:
            total += self.kernels.pair * self.p_bytes()
            total += self.panels() * (self.rows // self.kernels.mr)
        if self.kept:
            total += times(self.rows * real, self.total_vocab + self.vocab)
        elif is_sliced and self.with_logits:
            total += self.rows * self.vocab * real
        if self.with_weight_grad:
            # What additions to the gradient lose; the gradient itself where the result cannot hold it.
            total += self.sums_bytes() * (self.buffered + self.compensates_weight_grad())
        return total

    cdef bint sums_whole_weight_grad(self):
        """Whether sums of it wait for the next chunk, not only those of a block."""
        return self.kept and self.rows < self.total_rows

    cdef Py_ssize_t sums_bytes(self):
        cdef Py_ssize_t rows = self.total_vocab if self.sums_whole_weight_grad() else self.vocab
        return times(times(rows, self.total_hidden), self.kernels.real_size)

    cdef bint compensates_weight_grad(self):
        return self.total_rows > MANY_SUMS * self.rows

    cpdef bint compensates_input_grad(self):
        """Whether there is need of memory for what additions to it lose, and room."""
        cdef Py_ssize_t size = times(times(self.input_rows, self.total_hidden), self.kernels.real_size)
        return self.with_input_grad and self.blocks > MANY_SUMS and size <= self.spare()

    cpdef bint is_worthwhile(self):
        """Whether keeping the logits is possible, and cheaper than computing them twice: each chunk packs the weight."""
        return self.bytes() <= self.workspace and (self.chunks == 1 or self.rows >= KEPT_ROWS)

    cdef Py_ssize_t size(self):
        """The workspace."""
        return self.bytes() + (self.slots - 1) * self.chunk_bytes()

    cdef Py_ssize_t spare(self):
        """What is left of it."""
        return self.workspace - self.size()

    cdef double flops(self):
        cdef int products = self.with_logits + self.with_input_grad + self.with_weight_grad
        return 2.0 * products * self.total_rows * <double>self.total_vocab * max(self.total_hidden, 8)


def workspace_bound(
    input, Py_ssize_t rows, Py_ssize_t vocab, Py_ssize_t hidden, Py_ssize_t workspace, bint with_logits,
    bint with_input_grad, bint with_weight_grad, bint with_max_sum, bint buffered, bint kept=False
):
    """Bytes of the workspace, whichever rows are left out. The smallest blocking can exceed what was asked for."""
    cdef Blocking blocking
    cdef Py_ssize_t largest
    if not rows or not vocab or not (with_logits or hidden):
        return 0
    blocking = Blocking(
        input, rows, vocab, hidden, workspace, with_logits, with_input_grad, with_weight_grad, with_max_sum, buffered,
        kept
    )
    largest = blocking.size()
    if blocking.blocks > 1 or blocking.chunks > 1:
        largest = max(largest, workspace)  # fewer rows may take more
    return min(largest, workspace) if kept else largest  # logits are not kept where this is not enough


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
    ROUND_ROWS


cdef class Schedule:
    """One call at work: its memory, and the block and chunk that the units of the current round belong to."""

    cdef const ag_lce_kernels *kernels
    cdef ag_lce_block block
    cdef ag_matrix input, weight
    cdef Blocking blocking
    cdef int threads
    cdef bint chosen                  # by this library, not by the caller
    cdef int members                  # of the team that there is
    cdef bint awake                   # the round before was one of the team
    cdef ag_team team
    cdef Round which
    cdef Py_ssize_t units
    cdef object method, error
    cdef tuple arguments
    cdef list keep                    # arrays whose memory is in use
    cdef char *memory                 # of the workspace, from what is not taken yet
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
    # of the chunks: where each begins among all rows, and the memory of all that are kept packed
    cdef int64_t *starts
    cdef int chunk
    cdef char *x_rows
    cdef char *x_columns
    cdef char *kept_logits
    # results, and what they are rounded from
    cdef void *sum_exp
    cdef cnp.ndarray input_grad, weight_grad, input_sums
    cdef char *weight_sums
    cdef char *weight_low             # NULL: additions are not compensated

    def __init__(self, cnp.ndarray input, cnp.ndarray weight, Blocking blocking, cnp.ndarray memory, int threads):
        cdef Py_ssize_t rows = blocking.rows
        cdef int real = blocking.kernels.real_size
        cdef char *data
        cdef ag_lce_block *block
        self.kernels = blocking.kernels
        self.blocking = blocking
        self.variant = _cpu.active()
        memset(&self.block, 0, sizeof(self.block))
        self.input, self.weight = matrix_of(input), matrix_of(weight)
        self.block.round_to_bfloat16 = self.input.dtype == AG_BFLOAT16
        self.threads, self.chosen = _threads.choose(blocking.flops() / RATE, threads), threads == 0
        self.members = 1
        self.awake = False
        self.chunk = -1
        self.keep = [input, weight, memory]
        data = cnp.PyArray_BYTES(memory)
        self.memory = data + (64 - <uintptr_t>data % 64) % 64

        block = &self.block
        self.starts = <int64_t *>self.take((blocking.chunks + 1) * sizeof(int64_t))
        self.starts[0] = 0
        block.row_numbers = <const int64_t *>self.take(rows * sizeof(int64_t))
        block.target = <const int64_t *>self.take(rows * sizeof(int64_t))
        block.grad = self.take(rows * real)
        block.max = self.take(rows * real)
        block.sum = self.take(rows * real)
        block.w_rows = self.take(blocking.with_logits * blocking.packed_rows(blocking.vocab))
        block.w_columns = self.take(blocking.with_input_grad * blocking.packed_columns(blocking.vocab))
        self.x_rows = <char *>self.take(blocking.slots * blocking.with_logits * blocking.packed_rows(rows))
        self.x_columns = <char *>self.take(blocking.slots * blocking.with_weight_grad * blocking.packed_columns(rows))
        if blocking.with_max_sum:
            block.panel_max = self.take(blocking.panels() * rows * real)
            block.panel_sum = self.take(blocking.panels() * rows * real)
        if blocking.with_input_grad or blocking.with_weight_grad:
            block.p = self.take(blocking.p_bytes())
            if self.kernels.pair > 1:
                block.p_pairs = self.take(blocking.p_bytes())
            block.skipped = <uint8_t *>self.take(blocking.panels() * (rows // self.kernels.mr))
        if blocking.kept:
            block.keep_logits = True
            self.kept_logits = <char *>self.take(rows * blocking.blocks * blocking.vocab * real)
        elif blocking.slices > 1 and blocking.with_logits:
            block.logits = self.take(rows * blocking.vocab * real)
        self.set_slice(0)

    cdef void *take(self, Py_ssize_t size):
        cdef void *result = self.memory
        self.memory += rounded(size, 64)
        return result

    # -- rounds

    def work(self, method, *arguments):
        """Call the method on this thread, while the others of a team wait for its rounds."""
        if self.threads == 1:
            _openmp.record_team()
            method(*arguments)
        else:
            self.method, self.arguments, self.error = method, arguments, None
            memset(&self.team, 0, sizeof(self.team))
            with nogil, parallel(num_threads=self.threads):
                _openmp.record_team()
                if threadid() == 0:
                    self.lead(_openmp.team_size())
                else:
                    self.follow(_openmp.team_size())
            error, self.method, self.arguments, self.error = self.error, None, None, None  # no cycle stays
            if error is not None:
                raise error
        _threads.finished()

    cdef void lead(self, int members) noexcept with gil:
        self.members = members
        try:
            self.method(*self.arguments)
        except BaseException as error:
            self.error = error
        ag_team_start(&self.team, True)

    cdef void follow(self, int members) noexcept nogil:
        cdef uint32_t round = 1
        while ag_team_join(&self.team, round):
            self.take_part(round, members)
            round += 1

    cdef void take_part(self, uint32_t round, int members) noexcept nogil:
        cdef Py_ssize_t u = ag_team_next(&self.team)
        while u < self.units:
            self.unit(self.which, u)
            u = ag_team_next(&self.team)
        ag_team_meet(&self.team, round, members)

    cdef int run(self, Round which, Py_ssize_t units) except -1:
        """A round."""
        cdef Py_ssize_t u
        if self.members == 1 or units == 1 or (self.chosen and _threads.is_disturbed()):
            self.awake = False
            with nogil:
                for u in range(units):
                    self.unit(which, u)
        elif units > 0:
            self.which, self.units = which, units
            with nogil:
                ag_team_start(&self.team, False)
                self.take_part(self.team.round, self.members)
            # Not where some may have little to do; and whoever has to wake first is late without any disturbance.
            if units > 2 * self.members and self.awake:
                _threads.took(self.team.last - self.team.begin, self.team.last - self.team.first)
            self.awake = True
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
        cdef int real = self.kernels.real_size
        cdef Py_ssize_t first = u * SOME_ROWS // 16, last = min((u + 1) * SOME_ROWS // 16, self.rounded_rows)
        cdef Py_ssize_t n = self.rounded_n, row, begin, piece
        cdef const ag_matrix *to = &self.rounded_to
        cdef const char *source
        if is_flat(to, real, n) and self.rounded_stride == n * real:  # short rows need not be rounded one by one
            source = self.rounded_from + first * self.rounded_stride
            ag_round(self.variant, real == 8, source, to.dtype, to.data + first * to.row_stride, (last - first) * n)
            return
        for row in range(first, last):
            source = self.rounded_from + row * self.rounded_stride
            for piece in range(divided(n, PIECE)):
                begin = piece * PIECE
                round_piece(self.variant, real, source + begin * real, to, row, begin, min(PIECE, n - begin))

    cdef int round_to(
        self, cnp.ndarray out, Py_ssize_t first, const char *sums, Py_ssize_t stride, Py_ssize_t rows
    ) except -1:
        """Rows [first, first + rows) of out from rows of accumulators."""
        self.rounded_to = matrix_of(out)
        self.rounded_to.data += first * self.rounded_to.row_stride
        self.rounded_from, self.rounded_stride = sums, stride
        self.rounded_rows, self.rounded_n = rows, cnp.PyArray_DIM(out, 1)
        return self.run(ROUND_ROWS, divided(rows, SOME_ROWS // 16))

    # -- blocks and chunks

    cdef int set_slice(self, Py_ssize_t index) except -1:
        """The part of the hidden dimension that is packed next."""
        cdef Py_ssize_t begin = index * self.blocking.hidden
        self.block.hidden_start = begin
        self.block.hidden_size = min(self.blocking.hidden, self.blocking.total_hidden - begin)
        return 0

    cdef int set_block(self, Py_ssize_t index) except -1:
        cdef Py_ssize_t begin = index * self.blocking.vocab
        self.block.vocab_start = begin
        self.block.vocab = min(self.blocking.vocab, self.blocking.total_vocab - begin)
        if self.blocking.kept:
            self.block.logits = self.kept_logits + self.blocking.rows * begin * self.kernels.real_size
        return 0

    cdef int set_chunk(self, Rows rows, Py_ssize_t index) except -1:
        """Select the rows of a chunk, unless it is the one selected."""
        cdef Py_ssize_t i = self.starts[index], n = 0, slot = index if self.blocking.slots > 1 else 0
        cdef int real = self.kernels.real_size
        cdef int64_t *row_numbers = <int64_t *>self.block.row_numbers
        cdef int64_t *target = <int64_t *>self.block.target
        self.block.x_rows = self.x_rows + slot * self.blocking.packed_rows(self.blocking.rows)
        self.block.x_columns = self.x_columns + slot * self.blocking.packed_columns(self.blocking.rows)
        if index == self.chunk:
            return 0
        with nogil:
            while i < rows.total and n < self.blocking.rows:
                if rows.counts(i):
                    row_numbers[n] = i
                    target[n] = rows.row_of_weight(i)
                    if rows.grad != NULL:
                        memcpy(<char *>self.block.grad + n * real, rows.grad + i * real, real)
                    if rows.maximum != NULL:
                        memcpy(<char *>self.block.max + n * real, rows.maximum + i * real, real)
                        memcpy(<char *>self.block.sum + n * real, rows.sum + i * real, real)
                    n += 1
                i += 1
        self.starts[index + 1] = i
        self.block.rows = n
        self.chunk = <int>index
        return 0

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
            self.block.hidden_size * self.kernels.nr * self.kernels.unit_size // self.kernels.pair
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

    cdef int make_logits(self) except -1:
        """Logits of the block and the chunk into memory, summed over slices of the hidden dimension."""
        cdef Py_ssize_t index
        for index in range(self.blocking.slices):
            self.set_slice(index)
            self.pack_weight(True, False)
            self.pack_input(True, False)
            self.block.add_logits = index > 0
            self.run_tiles(AG_FROM_PRODUCT, AG_TO_LOGITS)
        return 0

    # -- statistics of the logits

    cdef int begin_statistics(
        self, Py_ssize_t total, cnp.ndarray logits_max, cnp.ndarray sum_exp, cnp.ndarray predicted, cnp.ndarray logits
    ) except -1:
        """Where the statistics go: contiguous arrays (BT,) of the accumulators' dtype; None or contiguous (BT, V)."""
        cdef cnp.ndarray running_sum = sum_exp if self.kernels.real_size == 8 else np.empty(total, _float64)
        self.keep.append((logits_max, sum_exp, running_sum, predicted, logits))
        logits_max.fill(-np.inf)
        running_sum.fill(0)
        self.block.running_max = cnp.PyArray_DATA(logits_max)
        self.block.running_sum = <double *>cnp.PyArray_DATA(running_sum)
        self.block.predicted = cnp.PyArray_DATA(predicted)
        self.sum_exp = cnp.PyArray_DATA(sum_exp)
        if logits is not None:
            self.block.logits_out = matrix_of(logits)
        return 0

    cdef int add_statistics(self) except -1:
        """Those of the current block and chunk, which are packed unless the hidden dimension is sliced."""
        if self.blocking.slices > 1:
            self.make_logits()
            self.run_tiles(AG_FROM_LOGITS, AG_TO_MAX_SUM)
        else:
            self.run_tiles(AG_FROM_PRODUCT, AG_TO_MAX_SUM)
        return self.run(MERGE, divided(self.block.rows, SOME_ROWS))

    cdef int end_statistics(self, Rows rows, Py_ssize_t begin, Py_ssize_t end) except -1:
        """Of rows [begin, end). A sum relative to -inf would be of NaN; a row that does not count has none."""
        cdef Py_ssize_t i
        cdef ag_lce_block *block = &self.block
        cdef ag_fpenv mode = ag_fpenv_enter()
        for i in range(begin, end):
            if self.kernels.real_size == 8:
                if (<double *>block.running_max)[i] == -INFINITY and rows.counts(i):
                    block.running_sum[i] = NAN
            else:
                if (<float *>block.running_max)[i] == -INFINITY and rows.counts(i):
                    block.running_sum[i] = NAN
                (<float *>self.sum_exp)[i] = <float>block.running_sum[i]
        ag_fpenv_leave(mode)
        return 0

    def max_sum(
        self, Rows rows, cnp.ndarray logits_max, cnp.ndarray sum_exp, cnp.ndarray predicted, cnp.ndarray logits
    ):
        """Maximum, sum of exponentials relative to it, and the target's logit, of every row that counts."""
        cdef Py_ssize_t b, c
        cdef bint is_packed = self.blocking.slices == 1
        self.begin_statistics(rows.total, logits_max, sum_exp, predicted, logits)
        for b in range(self.blocking.blocks):
            self.set_block(b)
            if is_packed:
                self.pack_weight(True, False)
            for c in range(self.blocking.chunks):
                self.set_chunk(rows, c)
                if is_packed and (b == 0 or self.blocking.slots < self.blocking.chunks):
                    self.pack_input(True, False)
                self.add_statistics()
        self.end_statistics(rows, 0, rows.total)

    # -- gradients

    cdef int begin_gradient(
        self, Rows rows, cnp.ndarray softmax, cnp.ndarray input_grad, cnp.ndarray weight_grad, double filter_eps
    ) except -1:
        """Where the gradients go (None: not wanted): arrays that overlap no input."""
        cdef Py_ssize_t hidden = self.blocking.total_hidden
        cdef int real = self.kernels.real_size
        cdef Blocking blocking = self.blocking
        cdef ag_lce_block *block = &self.block
        dtype = _float64 if real == 8 else _float32
        self.input_grad, self.weight_grad, self.input_sums = input_grad, weight_grad, None
        block.filter_eps = filter_eps
        if softmax is not None:
            block.softmax = matrix_of(softmax)
        if weight_grad is not None:
            block.weight_grad.row_stride = block.weight_grad.low_stride = hidden * real
            if blocking.buffered:
                self.weight_sums = <char *>self.take(blocking.sums_bytes())
            else:
                self.weight_sums = cnp.PyArray_BYTES(weight_grad)
                block.weight_grad.row_stride = cnp.PyArray_STRIDE(weight_grad, 0)
            if blocking.compensates_weight_grad():
                self.weight_low = <char *>self.take(blocking.sums_bytes())
        if input_grad is not None:
            if holds_sums(input_grad, real):
                self.input_sums = input_grad
            else:
                self.input_sums = np.empty((rows.total, hidden), dtype)
            block.input_grad.data = cnp.PyArray_BYTES(self.input_sums)
            block.input_grad.row_stride = cnp.PyArray_STRIDE(self.input_sums, 0)
            if blocking.compensates_input_grad():
                low = np.empty((rows.total, hidden), dtype)
                self.keep.append(low)
                block.input_grad.low = cnp.PyArray_BYTES(low)
                block.input_grad.low_stride = hidden * real
        return 0

    cdef int add_gradients(self, Py_ssize_t b, Py_ssize_t c, ag_lce_source source) except -1:
        """Those of block b and chunk c, which are the current ones, and packed unless the hidden dimension is sliced."""
        cdef Blocking blocking = self.blocking
        cdef ag_lce_block *block = &self.block
        cdef bint with_input = self.input_grad is not None, with_weight = self.weight_grad is not None
        cdef Py_ssize_t s, start = block.vocab_start if blocking.sums_whole_weight_grad() else 0
        if with_weight:
            block.weight_grad.data = self.weight_sums + block.weight_grad.row_stride * (
                start if blocking.buffered else block.vocab_start
            )
            if self.weight_low != NULL:
                block.weight_grad.low = self.weight_low + start * block.weight_grad.low_stride
        block.add_input_grad, block.last_input_grad = b > 0, b == blocking.blocks - 1
        block.add_weight_grad, block.last_weight_grad = c > 0, c == blocking.chunks - 1
        if source == AG_FROM_PRODUCT and blocking.slices > 1:
            self.make_logits()
            source = AG_FROM_LOGITS
        self.run_tiles(source, AG_TO_GRADIENT)
        for s in range(blocking.slices):
            if blocking.slices > 1:
                self.set_slice(s)
                self.pack_weight(False, with_input)
                self.pack_input(False, with_weight)
            self.run_products()
        if with_weight and blocking.buffered and block.last_weight_grad:
            self.round_to(
                self.weight_grad, block.vocab_start, block.weight_grad.data, block.weight_grad.row_stride, block.vocab
            )
        return 0

    cdef int end_gradient(self, Rows rows) except -1:
        if self.input_grad is None:
            return 0
        if self.input_sums is not self.input_grad:
            self.round_to(
                self.input_grad, 0, self.block.input_grad.data, self.block.input_grad.row_stride, rows.total
            )
        return rows.clear_absent(self.input_grad)

    def gradient(
        self, Rows rows, cnp.ndarray softmax, cnp.ndarray input_grad, cnp.ndarray weight_grad, double filter_eps
    ):
        """Both gradients, the softmax given or computed anew."""
        cdef Py_ssize_t b, c
        cdef bint is_packed = self.blocking.slices == 1, with_logits = softmax is None
        self.begin_gradient(rows, softmax, input_grad, weight_grad, filter_eps)
        for b in range(self.blocking.blocks):
            self.set_block(b)
            if is_packed:
                self.pack_weight(with_logits, input_grad is not None)
            for c in range(self.blocking.chunks):
                self.set_chunk(rows, c)
                if is_packed and (b == 0 or self.blocking.slots < self.blocking.chunks):
                    self.pack_input(with_logits, weight_grad is not None)
                self.add_gradients(b, c, AG_FROM_PRODUCT if with_logits else AG_FROM_SOFTMAX)
        self.end_gradient(rows)

    def statistics_and_gradient(
        self, Rows rows, cnp.ndarray logits_max, cnp.ndarray sum_exp, cnp.ndarray predicted, cnp.ndarray input_grad,
        cnp.ndarray weight_grad, double filter_eps
    ):
        """Both passes over a chunk before the next one, its logits kept in between. `rows` reads these statistics."""
        cdef Py_ssize_t b, c
        cdef Blocking blocking = self.blocking
        cdef bint with_input = input_grad is not None, with_weight = weight_grad is not None, is_one = blocking.blocks == 1
        self.begin_statistics(rows.total, logits_max, sum_exp, predicted, None)
        self.begin_gradient(rows, None, input_grad, weight_grad, filter_eps)
        for c in range(blocking.chunks):
            self.set_chunk(rows, c)
            self.pack_input(True, with_weight)
            for b in range(blocking.blocks):
                self.set_block(b)
                self.pack_weight(True, with_input and is_one)
                self.add_statistics()
            self.end_statistics(rows, self.starts[c], self.starts[c + 1])
            self.chunk = -1  # select it again, to read them
            self.set_chunk(rows, c)
            for b in range(blocking.blocks):
                self.set_block(b)
                if not is_one:
                    self.pack_weight(False, with_input)
                self.add_gradients(b, c, AG_FROM_LOGITS)
        self.end_gradient(rows)


cpdef bint holds_sums(cnp.ndarray out, int real):
    """Whether the kernels can add up in the result itself."""
    cdef ag_matrix matrix = matrix_of(out)
    return (
        ag_itemsize[<int>matrix.dtype] == real and not matrix.swapped and matrix.step == real
        and <uintptr_t>matrix.data % real == 0 and matrix.row_stride % real == 0
    )


cdef int clear(cnp.ndarray array) except -1:
    if array is not None:
        array.fill(0)
    return 0


# ---- operators -------------------------------------------------------------------------------------------------------


cdef Blocking blocking_of_statistics(cnp.ndarray input, cnp.ndarray weight, Rows rows, Py_ssize_t workspace):
    """None where there is nothing to do."""
    if not rows.count:
        return None
    return Blocking(
        input, rows.count, cnp.PyArray_DIM(weight, 0), cnp.PyArray_DIM(weight, 1), workspace, True, False, False, True,
        False
    )


cdef Blocking blocking_of_gradient(
    cnp.ndarray input, cnp.ndarray weight, Rows rows, bint with_logits, cnp.ndarray input_grad, cnp.ndarray weight_grad,
    Py_ssize_t workspace, bint keeps_logits=False
):
    """None where there is nothing to do. With logits to be kept, it has room for statistics, too."""
    cdef Py_ssize_t vocab = cnp.PyArray_DIM(weight, 0), hidden = cnp.PyArray_DIM(weight, 1)
    cdef bint with_input = input_grad is not None, with_weight = weight_grad is not None
    if not rows.count or not vocab or not hidden or not (with_input or with_weight):
        return None
    return Blocking(
        input, rows.count, vocab, hidden, workspace, with_logits, with_input, with_weight, keeps_logits,
        with_weight and not holds_sums(weight_grad, kernels_for(input).real_size), keeps_logits
    )


cdef cnp.ndarray memory_for(Blocking first, Blocking second=None):
    """One workspace that serves these in turn."""
    cdef cnp.npy_intp size = 64
    if first is not None:
        size += first.size()
    if second is not None:
        size = max(size, second.size() + 64)
    return _memory.fresh(1, &size, _uint8)


cdef int run_gradient(
    cnp.ndarray input, cnp.ndarray weight, Blocking blocking, cnp.ndarray memory, Rows rows, cnp.ndarray softmax,
    cnp.ndarray input_grad, cnp.ndarray weight_grad, double filter_eps, int threads
) except -1:
    """`Schedule.gradient`, or zeros where there is nothing to do."""
    if blocking is None:
        clear(input_grad)
        clear(weight_grad)
        return 0
    schedule = Schedule(input, weight, blocking, memory, threads)
    schedule.work(schedule.gradient, rows, softmax, input_grad, weight_grad, filter_eps)
    return 0


def gradient(
    cnp.ndarray input, cnp.ndarray weight, Rows rows, cnp.ndarray softmax, cnp.ndarray input_grad,
    cnp.ndarray weight_grad, Py_ssize_t workspace, double filter_eps, int threads
):
    """Both gradients: see `Schedule.gradient`."""
    cdef Blocking blocking = blocking_of_gradient(
        input, weight, rows, softmax is None, input_grad, weight_grad, workspace
    )
    run_gradient(
        input, weight, blocking, memory_for(blocking), rows, softmax, input_grad, weight_grad, filter_eps, threads
    )


cdef double number(const void *values, Py_ssize_t i, bint is_double) noexcept nogil:
    return (<const double *>values)[i] if is_double else (<const float *>values)[i]


cdef void set_number(void *values, Py_ssize_t i, bint is_double, double value) noexcept nogil:
    if is_double:
        (<double *>values)[i] = value
    else:
        (<float *>values)[i] = <float>value


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
    cdef int real = kernels_for(input).real_size
    cdef bint is_double = real == 8
    cdef bint is_mean = reduction == "mean", is_each = reduction == "none"
    cdef Blocking blocking = None, of_statistics = None
    cdef cnp.ndarray logits_max, sum_exp, predicted, grad, memory
    cdef Rows rows = Rows(target, start, vocab, ignored=ignored), rows_of_gradient
    cdef double each, sum = 0, error = 0, y, t
    cdef ag_fpenv mode
    logits_max, sum_exp, predicted, grad = np.zeros((4, total), _float64 if is_double else _float32)
    mode = ag_fpenv_enter()
    for i in range(total):
        if rows.counts(i):
            each = grad_loss[i if grad_loss.shape[0] > 1 else 0] / (rows.count if is_mean else 1)
            set_number(cnp.PyArray_DATA(grad), i, is_double, each)
    ag_fpenv_leave(mode)
    rows_of_gradient = Rows(target, start, vocab, None, grad, logits_max, sum_exp)

    if rows_of_gradient.count == rows.count:
        blocking = blocking_of_gradient(input, weight, rows, True, input_grad, weight_grad, workspace, True)
    if blocking is not None and blocking.is_worthwhile():
        schedule = Schedule(input, weight, blocking, memory_for(blocking), threads)
        schedule.work(
            schedule.statistics_and_gradient, rows_of_gradient, logits_max, sum_exp, predicted, input_grad, weight_grad,
            filter_eps
        )
    else:
        of_statistics = blocking_of_statistics(input, weight, rows, workspace)
        blocking = blocking_of_gradient(input, weight, rows_of_gradient, True, input_grad, weight_grad, workspace)
        memory = memory_for(of_statistics, blocking)
        if of_statistics is not None:
            schedule = Schedule(input, weight, of_statistics, memory, threads)
            schedule.work(schedule.max_sum, rows, logits_max, sum_exp, predicted, None)
        run_gradient(
            input, weight, blocking, memory, rows_of_gradient, None, input_grad, weight_grad, filter_eps, threads
        )

    mode = ag_fpenv_enter()
    for i in range(total):
        each = 0
        if rows.counts(i):
            each = log(number(cnp.PyArray_DATA(sum_exp), i, is_double)) - (
                number(cnp.PyArray_DATA(predicted), i, is_double) - number(cnp.PyArray_DATA(logits_max), i, is_double)
            )
        if is_each:
            set_number(cnp.PyArray_DATA(loss), i, is_double, each)
        # Kahan's sum
        y = each - error
        t = sum + y
        error = (t - sum) - y if t - t == 0 else 0
        sum = t
    if not is_each:
        if is_mean:
            sum = sum / rows.count if rows.count else NAN
        set_number(cnp.PyArray_DATA(loss), 0, is_double, sum)
    ag_fpenv_leave(mode)


# ---- probabilities ---------------------------------------------------------------------------------------------------


cdef void probabilities_of_row(
    const ag_lce_kernels *kernels, ag_variant variant, const ag_matrix *logits, double maximum, double total,
    const ag_matrix *out, Py_ssize_t row, Py_ssize_t n
) noexcept nogil:
    cdef char[PIECE * 8] raw
    cdef char[PIECE * 8] values
    cdef int itemsize = ag_itemsize[<int>logits.dtype]
    cdef Py_ssize_t piece, begin, count
    cdef const char *source
    for piece in range(divided(n, PIECE)):
        begin = piece * PIECE
        count = min(PIECE, n - begin)
        source = logits.data + row * logits.row_stride + begin * logits.step
        if logits.step != itemsize or logits.swapped:
            ag_copy_block(raw, 0, itemsize, source, 0, logits.step, 1, count, itemsize, logits.swapped)
            source = raw
        if itemsize == 2:
            ag_widen(variant, logits.dtype, source, <float *>values, count)
            source = values
        kernels.probabilities(values, source, maximum, total, count)
        round_piece(variant, kernels.real_size, values, out, row, begin, count)


def probabilities(
    cnp.ndarray logits, cnp.ndarray logits_max, cnp.ndarray sum_exp, cnp.ndarray out, int threads
):
    """``exp(logits - logits_max) / sum_exp`` of every row into `out`, which overlaps no input.

    The vectors are contiguous, of one dtype, float32 or float64.
    """
    cdef const ag_lce_kernels *kernels = kernels_for(logits)
    cdef ag_matrix source = matrix_of(logits), target = matrix_of(out)
    cdef Py_ssize_t rows = cnp.PyArray_DIM(logits, 0), n = cnp.PyArray_DIM(logits, 1), row
    cdef const void *maxima = cnp.PyArray_DATA(logits_max)
    cdef const void *sums = cnp.PyArray_DATA(sum_exp)
    cdef bint is_double = dtype_of(logits_max) == AG_FLOAT64
    cdef ag_variant variant = _cpu.active()
    cdef int team = _threads.choose(<double>rows * n, threads)
    if rows and n:
        for row in prange(rows, nogil=True, num_threads=team, schedule="dynamic", chunksize=16):
            _openmp.record_team()
            probabilities_of_row(
                kernels, variant, &source, number(maxima, row, is_double), number(sums, row, is_double), &target, row, n
            )
    _threads.finished()
    PyErr_CheckSignals()


def losses(cnp.ndarray sum_exp not None, cnp.ndarray predicted not None, cnp.ndarray loss not None):
    """``log(sum_exp) - predicted`` into `loss`: contiguous vectors, the first two of one dtype, float32 or float64."""
    cdef const void *sums = cnp.PyArray_DATA(sum_exp)
    cdef const void *logits = cnp.PyArray_DATA(predicted)
    cdef void *results = cnp.PyArray_DATA(loss)
    cdef bint is_double = dtype_of(sum_exp) == AG_FLOAT64, to_double = dtype_of(loss) == AG_FLOAT64
    cdef Py_ssize_t i
    cdef ag_fpenv mode
    with nogil:
        mode = ag_fpenv_enter()
        for i in range(cnp.PyArray_DIM(loss, 0)):
            set_number(results, i, to_double, log(number(sums, i, is_double)) - number(logits, i, is_double))
        ag_fpenv_leave(mode)


def statistics(
    cnp.ndarray input, cnp.ndarray weight, cnp.ndarray target, int64_t start, int64_t end, bint with_logits, int threads
):
    """The six results of fused_linear_online_max_sum; `target` is contiguous."""
    cdef cnp.npy_intp[2] shape = [cnp.PyArray_DIM(input, 0), cnp.PyArray_DIM(weight, 0)]
    cdef cnp.npy_intp bytes = divided(shape[0], 8)
    cdef int dtype = dtype_of(input)
    cdef bint is_double = dtype == AG_FLOAT64
    cdef Rows rows = Rows(target, start, end - start)
    cdef cnp.dtype real = _float64 if is_double else _float32
    cdef cnp.ndarray logits_max = _memory.fresh(1, shape, real), sum_exp = _memory.fresh(1, shape, real)
    cdef cnp.ndarray predicted = _memory.fresh(1, shape, real)
    cdef cnp.ndarray mask = np.zeros(bytes, np.uint8), masked_target = np.zeros(shape[0], f"i{target.itemsize}")
    cdef cnp.ndarray logits = _memory.fresh(2, shape, <cnp.dtype>_dtypes[dtype]) if with_logits else None
    cdef uint8_t *bits = <uint8_t *>cnp.PyArray_DATA(mask)
    cdef char *places = cnp.PyArray_BYTES(masked_target)
    cdef char *logit = cnp.PyArray_BYTES(predicted)
    cdef const char *largest = cnp.PyArray_BYTES(logits_max)
    cdef Py_ssize_t i
    cdef int64_t place
    cdef Blocking blocking
    cdef ag_fpenv mode
    predicted.fill(0)
    blocking = blocking_of_statistics(input, weight, rows, _default_workspace)
    if blocking is not None:
        schedule = Schedule(input, weight, blocking, memory_for(blocking), threads)
        schedule.work(schedule.max_sum, rows, logits_max, sum_exp, predicted, logits)
    mode = ag_fpenv_enter()
    for i in range(shape[0]):
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
    return logits_max, sum_exp, predicted, mask, masked_target, logits


# ---- the common case -------------------------------------------------------------------------------------------------


cdef cnp.ndarray plain(object array, int ndim):
    """The array, if it is exactly an ndarray of so many dimensions, contiguous, aligned and native; else None."""
    if (
        not cnp.PyArray_CheckExact(array) or cnp.PyArray_NDIM(<cnp.ndarray>array) != ndim
        or not cnp.PyArray_IS_C_CONTIGUOUS(<cnp.ndarray>array) or not cnp.PyArray_ISALIGNED(<cnp.ndarray>array)
        or cnp.PyArray_ISBYTESWAPPED(<cnp.ndarray>array)
    ):
        return None
    return <cnp.ndarray>array


cdef cnp.ndarray plain_vector(object array, int dtype, Py_ssize_t n):
    """`plain` of one dimension, this dtype and length."""
    cdef cnp.ndarray result = plain(array, 1)
    return None if result is None or dtype_of(result) != dtype or cnp.PyArray_DIM(result, 0) != n else result


cdef cnp.ndarray plain_target(object array, Py_ssize_t n):
    cdef cnp.ndarray result = plain(array, 1)
    if result is None or not cnp.PyArray_ISSIGNED(result) or cnp.PyArray_DIM(result, 0) != n:
        return None
    return result if cnp.PyArray_ITEMSIZE(result) in (4, 8) else None


cdef bint are_plain_matrices(object input, object weight):
    cdef cnp.ndarray x = plain(input, 2), w = plain(weight, 2)
    return (
        x is not None and w is not None and dtype_of(x) >= 0 and cnp.PyArray_TYPE(x) == cnp.PyArray_TYPE(w)
        and cnp.PyArray_DIM(x, 1) == cnp.PyArray_DIM(w, 1)
    )


cdef bint overlap(cnp.ndarray a, cnp.ndarray b):
    """Of contiguous arrays."""
    cdef const char *x = cnp.PyArray_BYTES(a)
    cdef const char *y = cnp.PyArray_BYTES(b)
    return x < y + cnp.PyArray_NBYTES(b) and y < x + cnp.PyArray_NBYTES(a)


cdef cnp.ndarray plain_out(object out, cnp.ndarray like, tuple inputs):
    """A plain matrix of this shape and dtype that can be written to and overlaps none of the inputs; else None."""
    cdef cnp.ndarray result = plain(out, 2)
    if (
        result is None or not cnp.PyArray_ISWRITEABLE(result) or dtype_of(result) != dtype_of(like)
        or not cnp.PyArray_SAMESHAPE(result, like)
    ):
        return None
    for each in inputs:
        if each is not None and overlap(result, <cnp.ndarray>each):
            return None
    return result


cdef int threads_of(object num_threads) except -2:
    """The number asked for, 0 for none, -1 for what the general way has to look at."""
    if num_threads is None:
        return 0
    return num_threads if type(num_threads) is int and 1 <= num_threads <= _max_threads else -1


cdef bint asks_for_both(object output_mask):
    return type(output_mask) is tuple and len(output_mask) == 2 and output_mask[0] is True and output_mask[1] is True


def common_gradient(
    grad, input, weight, target_mask, masked_target, label_smoothing, logits_max, sum_exp_logits, softmax, output_mask,
    workspace_bytes, filter_eps, out, num_threads
):
    """The gradients where all arguments are as plain as can be; else None."""
    cdef cnp.ndarray g, mask, target, maximum = None, total = None, p = None, input_grad, weight_grad
    cdef int dtype, real, threads = threads_of(num_threads)
    cdef Py_ssize_t n, vocab, i
    cdef Rows rows
    cdef tuple inputs
    if (
        workspace_bytes is not None or threads < 0 or not are_plain_matrices(input, weight)
        or type(label_smoothing) is not float or label_smoothing != 0 or type(filter_eps) is not float
        or filter_eps != 0 or not asks_for_both(output_mask)
    ):
        return None
    n, vocab = cnp.PyArray_DIM(<cnp.ndarray>input, 0), cnp.PyArray_DIM(<cnp.ndarray>weight, 0)
    dtype = dtype_of(<cnp.ndarray>input)
    real = AG_FLOAT64 if dtype == AG_FLOAT64 else AG_FLOAT32
    g, target, mask = plain_vector(grad, real, n), plain_target(masked_target, n), plain(target_mask, 1)
    if g is None or target is None or mask is None:
        return None
    if cnp.PyArray_TYPE(mask) == cnp.NPY_BOOL:
        if cnp.PyArray_DIM(mask, 0) != n:
            return None
    elif cnp.PyArray_TYPE(mask) != cnp.NPY_UINT8 or cnp.PyArray_DIM(mask, 0) < divided(n, 8):
        return None
    if softmax is not None:
        p = plain(softmax, 2)
        if (
            p is None or dtype_of(p) != real or cnp.PyArray_DIM(p, 0) != n or cnp.PyArray_DIM(p, 1) != vocab
        ):
            return None
    else:
        maximum, total = plain_vector(logits_max, real, n), plain_vector(sum_exp_logits, real, n)
        if maximum is None or total is None:
            return None
    if out is not None:
        if type(out) is not tuple or len(out) != 2:
            return None
        inputs = (g, input, weight, mask, target, maximum, total, p)  # those that were looked at
        input_grad, weight_grad = plain_out(out[0], input, inputs), plain_out(out[1], weight, inputs)
        if input_grad is None or weight_grad is None or overlap(input_grad, weight_grad):
            return None
    rows = Rows(target, 0, vocab, mask, g, maximum, total)
    for i in range(n):
        if not rows.is_masked(i) and rows.row_of_weight(i) < 0:
            return None
    if out is None:
        input_grad = _memory.empty_like(input, <cnp.dtype>_dtypes[dtype])
        weight_grad = _memory.empty_like(weight, <cnp.dtype>_dtypes[dtype])
    gradient(input, weight, rows, p, input_grad, weight_grad, _default_workspace, 0.0, threads)
    return (input_grad, weight_grad) if out is None else out


def common_statistics(input, weight, target, vocab_start_index, vocab_end_index, return_logits, num_threads):
    """The statistics where all arguments are as plain as can be; else None."""
    cdef cnp.ndarray t
    cdef int threads = threads_of(num_threads)
    cdef Py_ssize_t vocab
    if (
        threads < 0 or not are_plain_matrices(input, weight) or type(vocab_start_index) is not int
        or type(vocab_end_index) is not int or type(return_logits) is not bool
    ):
        return None
    t = plain_target(target, cnp.PyArray_DIM(<cnp.ndarray>input, 0))
    vocab = cnp.PyArray_DIM(<cnp.ndarray>weight, 0)
    if (
        t is None or not vocab or not 0 <= vocab_start_index <= vocab_end_index < 2**63
        or vocab_end_index - vocab_start_index > vocab
    ):
        return None
    return _named_statistics(statistics(input, weight, t, vocab_start_index, vocab_end_index, return_logits, threads))


def common_loss(
    logits_max, sum_exp_logits, predicted_logits, label_smoothing, vocab_parallel_logits, out, num_threads
):
    """The loss, and the softmax where logits are given, where all arguments are as plain as can be; else None."""
    cdef cnp.ndarray maximum = plain(logits_max, 1), total, predicted, logits, loss, softmax = None
    cdef int real, threads = threads_of(num_threads)
    cdef cnp.npy_intp n
    if (
        out is not None or threads < 0 or maximum is None or type(label_smoothing) is not float or label_smoothing != 0
    ):
        return None
    real, n = dtype_of(maximum), cnp.PyArray_DIM(maximum, 0)
    total, predicted = plain_vector(sum_exp_logits, real, n), plain_vector(predicted_logits, real, n)
    if real not in (AG_FLOAT32, AG_FLOAT64) or total is None or predicted is None:
        return None
    if vocab_parallel_logits is not None:
        logits = plain(vocab_parallel_logits, 2)
        if (
            logits is None or dtype_of(logits) < 0 or cnp.PyArray_DIM(logits, 0) != n
            or (dtype_of(logits) == AG_FLOAT64) != (real == AG_FLOAT64)
        ):
            return None
        softmax = _memory.empty_like(logits, <cnp.dtype>_dtypes[real])
        probabilities(logits, maximum, total, softmax, threads)
    loss = _memory.fresh(1, &n, <cnp.dtype>_dtypes[real])
    losses(total, predicted, loss)
    return loss, softmax


def common_loss_and_gradients(
    input, weight, target, reduction, ignore_index, grad_loss, vocab_start_index, return_grad, output_mask,
    workspace_bytes, filter_eps, num_threads
):
    """Loss and gradients where all arguments are as plain as can be; else None."""
    cdef cnp.ndarray t, loss, input_grad = None, weight_grad = None
    cdef int dtype, threads = threads_of(num_threads)
    cdef Py_ssize_t n, vocab, i
    cdef Rows rows
    if (
        workspace_bytes is not None or threads < 0 or not are_plain_matrices(input, weight)
        or type(reduction) is not str or reduction not in ("mean", "sum", "none") or type(ignore_index) is not int
        or not -2**63 <= ignore_index < 2**63 or (grad_loss is not None and type(grad_loss) is not float)
        or type(vocab_start_index) is not int or not 0 <= vocab_start_index < 2**62 or return_grad is not True
        or not asks_for_both(output_mask) or type(filter_eps) is not float or filter_eps != 0
    ):
        return None
    n, vocab = cnp.PyArray_DIM(<cnp.ndarray>input, 0), cnp.PyArray_DIM(<cnp.ndarray>weight, 0)
    dtype = dtype_of(<cnp.ndarray>input)
    t = plain_target(target, n)
    if t is None:
        return None
    rows = Rows(t, vocab_start_index, vocab, ignored=ignore_index)
    for i in range(n):
        if rows.counts(i) and rows.row_of_weight(i) < 0:
            return None
    input_grad = _memory.empty_like(input, <cnp.dtype>_dtypes[dtype])
    weight_grad = _memory.empty_like(weight, <cnp.dtype>_dtypes[dtype])
    loss = np.empty((n,) if reduction == "none" else (), _float64 if dtype == AG_FLOAT64 else _float32)
    loss_and_gradients(
        input, weight, t, vocab_start_index, ignore_index, reduction, np.array([1.0 if grad_loss is None else grad_loss]),
        loss, input_grad, weight_grad, _default_workspace, 0.0, threads
    )
    return _named_gradients((loss, input_grad, weight_grad))
