from libc.stdint cimport int64_t, uint8_t

from ascend_grad._linear_kernels cimport ag_linear_kernels


ctypedef enum Tasks:
    # What the tasks of a plan are parts of.
    OF_BLOCKS                         # the general plan: packed blocks and chunks
    OF_WORDS                          # few rows: the words are streamed
    OF_ROWS                           # few words: the rows are streamed
    OF_FEATURES                       # neither many rows nor many words


ctypedef struct Problem:
    # What is to be computed of the rows that count, the words and the features.
    Py_ssize_t rows
    Py_ssize_t total_rows             # those that do not count, too
    Py_ssize_t vocab
    Py_ssize_t hidden
    bint with_logits                  # they are computed; else the probabilities are given
    bint with_input_grad
    bint with_weight_grad
    bint with_statistics              # maxima and sums of exponentials
    bint buffers_weight_grad          # it is added up in the workspace, as the result cannot hold accumulators
    Py_ssize_t weight_grad_bytes      # of memory that may hold logits until its rows are written; 0: none
    int itemsize                      # of input and weight


ctypedef struct Buffers:
    # Where everything lies in the workspace; what is not needed is NULL.
    int64_t *starts                   # where each chunk begins among all rows
    int64_t *row_numbers
    int64_t *target
    char *grad
    char *max
    char *sum
    char *x_rows
    char *w_rows
    char *x_columns
    char *w_columns
    char *p
    char *p_pairs
    uint8_t *skipped
    char *panel_max
    char *panel_sum
    char *logits
    char *logits_compensation
    char *input_compensation
    char *weight_sums
    char *weight_compensation
    char *partial_sums


cdef class Plan:
    cdef const ag_linear_kernels *kernels
    cdef Problem problem
    cdef readonly Py_ssize_t workspace                # bytes that it may take
    cdef readonly Py_ssize_t rows, vocab, hidden      # of a chunk, a block, a slice
    cdef readonly Py_ssize_t chunks, blocks, slices
    cdef readonly bint chunks_outside
    cdef readonly bint by_slice                       # one sweep for every slice
    cdef readonly bint caches_logits                 # of a chunk and all words
    cdef readonly Py_ssize_t cached_blocks            # whose logits are cached, of all chunks: the first ones
    cdef readonly Py_ssize_t blocks_in_weight_grad    # how many of these in its memory
    cdef readonly Py_ssize_t packed_chunks            # that are kept packed
    cdef Py_ssize_t compensate_beyond                 # so many partial sums
    cdef Tasks tasks_of
    cdef readonly Py_ssize_t tasks, task_size         # how many tasks, and rows, words or features of each
    cdef readonly Py_ssize_t step                     # streamed rows at a time
    cdef readonly Py_ssize_t pitch                    # from row to row of a tile

    cdef Py_ssize_t preferred_rows(self) noexcept
    cdef Py_ssize_t preferred_vocab(self) noexcept
    cdef bint cut(self, Py_ssize_t rows, Py_ssize_t vocab, Py_ssize_t hidden) noexcept
    cdef bint search(self) noexcept
    cdef void cache_blocks(self) noexcept
    cdef void cut_streamed(self) noexcept
    cdef void cut_features(self) noexcept
    cdef bint recomputes(self) noexcept nogil
    cdef double passes_of_logits(self) noexcept
    cdef double flops(self) noexcept
    cdef double cost(self) noexcept
    cdef Py_ssize_t logits_of_block(self) noexcept nogil
    cdef Py_ssize_t packed_rows(self, Py_ssize_t n) noexcept nogil
    cdef Py_ssize_t packed_columns(self, Py_ssize_t n) noexcept nogil
    cdef Py_ssize_t sums_hidden(self) noexcept nogil
    cdef bint sums_whole_weight_grad(self) noexcept nogil
    cdef bint compensates_logits(self) noexcept
    cdef bint compensates_input_grad(self) noexcept
    cdef bint compensates_weight_grad(self) noexcept
    cdef bint adds_tasks(self) noexcept nogil
    cdef Py_ssize_t sums_pitch(self) noexcept nogil
    cdef Py_ssize_t skinny_layout(self, char *base, Buffers *at) noexcept
    cdef Py_ssize_t layout(self, char *base, Buffers *at) noexcept
    cdef Py_ssize_t bytes(self) noexcept


cdef Plan skinny_plan(const ag_linear_kernels *kernels, const Problem *problem, Py_ssize_t workspace, bint caches_logits)
cdef list plans_of(const ag_linear_kernels *kernels, const Problem *problem, Py_ssize_t workspace)
cdef Plan plan_with_logits(const ag_linear_kernels *kernels, const Problem *problem, Py_ssize_t workspace)
cdef Py_ssize_t bytes_of(list plans) except -1
