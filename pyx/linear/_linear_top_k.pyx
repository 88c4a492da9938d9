"""The largest logits of each row: the vocabulary is computed block by block, and each block is merged into candidates.

A block of logits is written to a buffer of accumulators, together with its statistics. A phase over the rows then merges both
into the running ones. Every logit is computed once, and memory holds the logits of one chunk and one block.
"""

import numpy as np

cimport numpy as cnp
from libc.math cimport INFINITY, exp, log1p
from libc.stdint cimport int64_t
from libc.string cimport memset

from ascend_grad cimport _memory, _tasks, _threads
from ascend_grad._dtypes cimport dtype_of
from ascend_grad._kernels cimport AG_FLOAT32, AG_FLOAT64, ag_dtype
from ascend_grad._linear_kernels cimport ag_loss_row
from ascend_grad._linear_problem cimport Problem, acc_size_of, matrix_of, number, set_number
from ascend_grad._linear_schedule cimport (
    Schedule,
    has_plans,
    place_workspace,
    prepare,
    run,
    threads_of,
    workspace_bound,
    workspace_size,
)
from ascend_grad._memory cimport ALIGNMENT, Arena, align_up, arena_alloc, ceil_div
from ascend_grad._views cimport View, view_of

cnp.import_array()

cdef extern from "ascend_grad/linear/top_k.h" nogil:
    void ag_top_k_merge_f32(double *values, int64_t *indices, Py_ssize_t k, const float *logits, Py_ssize_t n, int64_t start)
    void ag_top_k_merge_f64(double *values, int64_t *indices, Py_ssize_t k, const double *logits, Py_ssize_t n, int64_t start)

# Most rows of a chunk, as in the packed sweep.
cdef Py_ssize_t CHUNK_ROWS = 1008
# Most logits of a chunk and a block.
cdef Py_ssize_t BLOCK_LOGITS = 2 << 20
# Vocabulary entries of a block are a multiple of this number.
cdef Py_ssize_t BLOCK_GRANULE = 960
# Elements behind vectors over the vocabulary, the most lanes of a vector.
cdef Py_ssize_t PADDING = 16
# Rows of a task that merges a block.
cdef Py_ssize_t ROWS_PER_TASK = 16

cdef cnp.dtype _uint8 = np.dtype(np.uint8)


ctypedef struct TopK:
    # A call, its memory, and the selected chunk and block.
    Problem p                         # of all rows and vocabulary entries
    Py_ssize_t k
    double temperature
    const double *temperatures        # (BT,) or NULL: all are `temperature`
    const double *bias                # (V,) or NULL
    Py_ssize_t rows, vocab            # most rows of a chunk, most entries of a block
    # Memory.
    char *logits                      # accumulators (rows, vocab)
    char *chunk_max                   # accumulators (rows,), likewise the next two
    char *chunk_sum
    char *chunk_predicted
    double *chunk_rest                # (rows,)
    int64_t *no_targets               # (rows,)
    ag_loss_row *loss_rows            # (BT,)
    char *bias_values                 # accumulators (V + PADDING,)
    double *max                       # (BT,): running maximum
    double *rest                      # (BT,): running sum of exponentials without the maximum
    double *values                    # (BT, k): candidates in descending order
    int64_t *indices                  # (BT, k)
    Py_ssize_t first_row, row_count, first_entry, entry_count


cdef Py_ssize_t place(TopK *x, char *base) noexcept nogil:
    """Place the memory of a call, and return its bytes. NULL only measures the bytes."""
    cdef Py_ssize_t acc = acc_size_of(x.p.dtype), rows = x.p.rows.total
    cdef Arena arena
    arena.base, arena.used = base, 0
    x.logits = arena_alloc(&arena, x.rows * x.vocab * acc)
    x.chunk_max = arena_alloc(&arena, x.rows * acc)
    x.chunk_sum = arena_alloc(&arena, x.rows * acc)
    x.chunk_predicted = arena_alloc(&arena, x.rows * acc)
    x.chunk_rest = <double *>arena_alloc(&arena, x.rows * sizeof(double))
    x.no_targets = <int64_t *>arena_alloc(&arena, x.rows * sizeof(int64_t))
    x.max = <double *>arena_alloc(&arena, rows * sizeof(double))
    x.rest = <double *>arena_alloc(&arena, rows * sizeof(double))
    x.values = <double *>arena_alloc(&arena, rows * x.k * sizeof(double))
    if x.p.transform.is_needed:
        x.loss_rows = <ag_loss_row *>arena_alloc(&arena, rows * sizeof(ag_loss_row))
    if x.bias != NULL:
        x.bias_values = arena_alloc(&arena, (x.p.vocab + PADDING) * acc)
    return arena.used


cdef TopK described(cnp.ndarray input, cnp.ndarray weight, Py_ssize_t k, dict options):
    """Describe a call. Elements of arrays are not read."""
    cdef TopK x
    cdef View view
    cdef Py_ssize_t most
    memset(&x, 0, sizeof(x))
    x.p.dtype, x.k = <ag_dtype>dtype_of(input), k
    view = view_of(input)
    x.p.input = matrix_of(&view)
    view = view_of(weight)
    x.p.weight = matrix_of(&view)
    x.p.rows.total, x.p.vocab, x.p.hidden = cnp.PyArray_DIM(input, 0), cnp.PyArray_DIM(weight, 0), cnp.PyArray_DIM(weight, 1)
    x.temperature = 1
    if isinstance(options["temperature"], float):
        x.temperature = options["temperature"]
    elif options["temperature"].size:
        x.temperatures = <const double *>cnp.PyArray_DATA(<cnp.ndarray>options["temperature"])
    if options["bias"] is not None:
        x.bias = <const double *>cnp.PyArray_DATA(<cnp.ndarray>options["bias"])
    x.p.transform.scale, x.p.transform.softcap = options["logit_scale"], options["softcap"] or 0
    x.p.transform.is_needed = (
        x.bias != NULL or x.temperatures != NULL or x.temperature != 1 or x.p.transform.scale != 1
        or x.p.transform.softcap > 0
    )
    x.rows = max(min(x.p.rows.total, CHUNK_ROWS), 1)
    most = max(BLOCK_LOGITS // align_up(x.rows, 16) // BLOCK_GRANULE, 1) * BLOCK_GRANULE
    x.vocab = min(x.p.vocab, most)
    return x


cdef Problem problem_of_pair(const TopK *x) noexcept nogil:
    """Return the problem of the statistics and logits of the selected chunk and block."""
    cdef Problem p = x.p
    cdef int acc = acc_size_of(p.dtype)
    p.rows.total = p.rows.active = x.row_count
    p.rows.target, p.rows.is_wide = x.no_targets, True  # rows.size is 0: no row has a vocabulary entry
    p.vocab = x.entry_count
    p.input.data += x.first_row * p.input.row_stride
    p.weight.data += x.first_entry * p.weight.row_stride
    p.with_statistics = True
    p.logits_max, p.sum_exp, p.predicted, p.rest = x.chunk_max, x.chunk_sum, x.chunk_predicted, x.chunk_rest
    p.logits.data, p.logits.dtype = x.logits, AG_FLOAT64 if acc == 8 else AG_FLOAT32
    p.logits.row_stride, p.logits.step, p.logits.swapped = x.vocab * acc, acc, 0
    if x.loss_rows != NULL:
        p.loss_rows = x.loss_rows + x.first_row
    if x.bias != NULL:
        p.transform.bias = x.bias_values + x.first_entry * acc
    return p


cdef void prepare_unplaced(TopK *x, Schedule *schedule) noexcept nogil:
    """Choose the schedule of the selected chunk and block before there is memory."""
    cdef double any_address = 0  # plans ask whether there is memory for these, and do not read it
    cdef Problem p = problem_of_pair(x)
    p.rest, p.logits.data = &any_address, <char *>&any_address
    prepare(schedule, &p, 0)


cdef void begin(TopK *x) noexcept nogil:
    """Initialise the running statistics, and copy what the kernels read of the vocabulary and of each row."""
    cdef Py_ssize_t i
    for i in range(x.p.rows.total):
        x.max[i], x.rest[i] = -INFINITY, -1
        if x.loss_rows != NULL:
            memset(&x.loss_rows[i], 0, sizeof(ag_loss_row))
            x.loss_rows[i].inverse_temperature = 1 / (x.temperature if x.temperatures == NULL else x.temperatures[i])
    for i in range(x.p.vocab + PADDING if x.bias != NULL else 0):
        set_number(x.bias_values, i, x.p.dtype == AG_FLOAT64, x.bias[i] if i < x.p.vocab else 0)
    memset(x.no_targets, 0, x.rows * sizeof(int64_t))


cdef void merge_rows(const void *context, Py_ssize_t task, int thread) noexcept nogil:
    """Merge the selected block into the statistics and candidates of some rows of the selected chunk."""
    cdef const TopK *x = <const TopK *>context
    cdef bint is_double = x.p.dtype == AG_FLOAT64
    cdef Py_ssize_t i, row
    cdef double max, rest
    cdef char *logits
    for i in range(task * ROWS_PER_TASK, min((task + 1) * ROWS_PER_TASK, x.row_count)):
        row, logits = x.first_row + i, x.logits + i * x.vocab * acc_size_of(x.p.dtype)
        max, rest = number(x.chunk_max, i, is_double), x.chunk_rest[i]
        if max > x.max[row] or max != max:
            x.rest[row] = rest + (1 + x.rest[row]) * exp(x.max[row] - max)
            x.max[row] = max
        elif max > -INFINITY:
            x.rest[row] += (1 + rest) * exp(max - x.max[row])
        if is_double:
            ag_top_k_merge_f64(
                x.values + row * x.k, x.indices + row * x.k, x.k, <const double *>logits, x.entry_count, x.first_entry
            )
        else:
            ag_top_k_merge_f32(
                x.values + row * x.k, x.indices + row * x.k, x.k, <const float *>logits, x.entry_count, x.first_entry
            )


cdef int run_pair(const TopK *x, int num_threads, double *last_check) except -1:
    """Compute the selected chunk and block, and merge them."""
    cdef Problem p = problem_of_pair(x)
    cdef Schedule schedule
    cdef cnp.ndarray memory
    cdef int threads
    prepare(&schedule, &p, 0)
    memory = _memory.workspace(workspace_size(&schedule))
    place_workspace(&schedule, _memory.aligned(cnp.PyArray_BYTES(memory)))
    threads = _threads.choose_num_threads(<double>x.row_count * x.entry_count, num_threads)
    with nogil:
        run(&schedule, num_threads, last_check)
        _tasks.run_tasks(merge_rows, x, ceil_div(x.row_count, ROWS_PER_TASK), threads, num_threads == 0, last_check)
    return 0


cdef void write(const TopK *x, void *log_prob) noexcept nogil:
    """Write the log-probabilities of the candidates."""
    cdef Py_ssize_t i, j
    for i in range(x.p.rows.total):
        for j in range(x.k):
            set_number(
                log_prob, i * x.k + j, x.p.dtype == AG_FLOAT64, (x.values[i * x.k + j] - x.max[i]) - log1p(x.rest[i])
            )


def top_k(
    cnp.ndarray input, cnp.ndarray weight, Py_ssize_t k, dict options, cnp.ndarray log_prob, cnp.ndarray indices,
    int num_threads
):
    """Compute the k largest log-probabilities of each row (accumulators) and their entries, into new arrays (BT, k).

    `options` has the temperature, a number or a vector, and `bias`, `logit_scale` and `softcap`. Vectors are of float64.
    """
    cdef TopK x = described(input, weight, k, options)
    cdef cnp.npy_intp size = place(&x, NULL) + ALIGNMENT
    cdef cnp.ndarray memory = _memory.empty(1, &size, _uint8)
    cdef double last_check = 0
    place(&x, _memory.aligned(cnp.PyArray_BYTES(memory)))
    x.indices = <int64_t *>cnp.PyArray_DATA(indices)
    begin(&x)
    while x.first_entry < x.p.vocab:
        x.entry_count = min(x.vocab, x.p.vocab - x.first_entry)
        x.first_row = 0
        while x.first_row < x.p.rows.total:
            x.row_count = min(x.rows, x.p.rows.total - x.first_row)
            run_pair(&x, num_threads, &last_check)
            x.first_row += x.row_count
        x.first_entry += x.entry_count
    write(&x, cnp.PyArray_DATA(log_prob))


def top_k_bound(cnp.ndarray input, cnp.ndarray weight, Py_ssize_t k, dict options):
    """Return the most bytes that `top_k` allocates."""
    cdef TopK x = described(input, weight, k, options)
    cdef Py_ssize_t most = 0, size = place(&x, NULL), rows, entries
    cdef Schedule schedule
    # The last chunk and the last block may be shorter than the others.
    for rows in (x.rows, x.p.rows.total % x.rows):
        for entries in (x.vocab, x.p.vocab % x.vocab):
            x.row_count, x.entry_count = rows, entries
            prepare_unplaced(&x, &schedule)
            most = max(most, workspace_bound(&schedule))
    return size + most + ALIGNMENT


def chosen_for_top_k(cnp.ndarray input, cnp.ndarray weight, Py_ssize_t k, dict options, int num_threads):
    """Return the plan and the number of threads of the first chunk and block of `top_k`."""
    cdef TopK x = described(input, weight, k, options)
    cdef Schedule schedule
    x.row_count, x.entry_count = min(x.rows, x.p.rows.total), x.vocab
    prepare_unplaced(&x, &schedule)
    name = (<bytes>schedule.plans.name).decode() if has_plans(&schedule) and not schedule.is_empty else "nothing to compute"
    return name, threads_of(&schedule, num_threads)
