from libc.stdint cimport uint8_t

from ascend_grad._kernels cimport ag_dtype
from ascend_grad._linear_kernels cimport ag_linear_kernels, ag_more, ag_top_k
from ascend_grad._linear_problem cimport ChunkBuffers, Problem
from ascend_grad._memory cimport align_up, ceil_div


ctypedef enum Sweep:
    # The ways through a problem; each has a separate file.
    PACKED                            # chunks of rows and blocks of the vocabulary are packed
    VOCAB_STREAMED                    # few rows: tasks are ranges of the vocabulary
    ROWS_STREAMED                     # few vocabulary entries: tasks are ranges of the rows
    FEATURES                          # few of both: tasks are ranges of the features


ctypedef struct Work:
    # The data that plans follow from: sizes, and the results to compute.
    Py_ssize_t rows                   # active rows
    Py_ssize_t total_rows             # all rows
    Py_ssize_t vocab
    Py_ssize_t hidden
    int itemsize                      # bytes of an element of input and weight
    bint with_logits                  # logits are computed; otherwise the caller gives the probabilities
    bint with_statistics              # maxima and sums of exponentials are computed
    bint with_rest                    # and the sums without their largest term
    bint with_more                    # and the further statistics of a loss
    bint caches_exp                   # packed sweeps cache exponentials in float16 instead of logits
    bint with_bias_grad               # the columns of P are summed up
    Py_ssize_t top_k                  # number of the largest logits of each row; 0: not requested
    bint with_input_grad
    bint with_weight_grad
    bint buffers_weight_grad          # weight_grad is summed in the workspace, as the result cannot hold accumulators
    Py_ssize_t weight_grad_bytes      # bytes of weight_grad that may hold logits until its rows are written; 0: none


ctypedef struct Plan:
    # One sweep over a problem.
    const ag_linear_kernels *kernels
    Work work
    Py_ssize_t workspace              # bytes that the buffers may take
    Sweep sweep
    Py_ssize_t rows, vocab            # sizes of a chunk (of rows) and of a block (of the vocabulary)
    Py_ssize_t chunks, blocks         # numbers of chunks and blocks
    bint caches_logits                # the logits of one chunk and all blocks are cached between statistics and gradients
    # Fields of PACKED:
    bint weight_is_left               # W is the left operand of the logits, X is packed as the right one
    bint chunks_outside               # all blocks of a chunk, then the next chunk; otherwise the reverse
    Py_ssize_t packed_chunks          # number of chunks that stay packed
    Py_ssize_t cached_blocks          # number of the first blocks, of which the logits of all chunks are cached
    Py_ssize_t blocks_in_weight_grad  # number of cached blocks whose logits lie in the memory of weight_grad
    Py_ssize_t max_uncompensated      # most partial sums that are added without compensation
    # Fields of the other sweeps:
    Py_ssize_t tasks                  # number of tasks
    Py_ssize_t task_size              # vocabulary entries, rows or features of a task
    Py_ssize_t step                   # vocabulary entries or rows that a task streams at a time
    Py_ssize_t pitch                  # accumulators from row to row of a tile


cdef enum:
    MAX_PLANS = 2


ctypedef struct Plans:
    # The sweeps that compute a problem, one after another in the same workspace.
    int count                         # 0: there is nothing to compute, or no candidate fits
    Plan[MAX_PLANS] each
    const char *name                  # name of the chosen candidate


ctypedef struct Buffers:
    # Addresses of the buffers of a sweep in the workspace; NULL for a buffer that it does not need.
    Py_ssize_t *chunk_starts          # (chunks + 1,): first row of each chunk, among all rows
    ChunkBuffers chunk                # (rows,): elements of the caller's vectors, for the active rows of a chunk
    char *x_rows
    char *w_rows
    char *x_columns
    char *w_columns
    char *p
    char *p_pairs
    uint8_t *skipped
    char *panel_max
    char *panel_sum
    char *panel_rest                  # sums without their largest term
    ag_more *panel_more
    double *bias_sums                 # (tasks, vocab), only for ROWS_STREAMED
    char *logits
    ag_top_k lists                    # (tasks, rows, top_k): the largest logits of each task of VOCAB_STREAMED; floors (rows,)
    uint8_t *complete_lists           # (tasks,): see ag_list_order
    char *input_compensation
    char *weight_sums
    char *weight_compensation
    char *partial_sums                # (tasks, rows of the sum, sums_pitch)


cdef inline Py_ssize_t elements(const ag_linear_kernels *kernels, Py_ssize_t n) noexcept nogil:
    """Return the packed elements of n terms of a sum, with those that only fill the last step of a matrix unit."""
    return align_up(ceil_div(n, kernels.pair), kernels.granule)


cdef inline bint with_gradients(const Work *work) noexcept nogil:
    return work.with_input_grad or work.with_weight_grad or work.with_bias_grad


cdef const ag_linear_kernels *kernels_for(ag_dtype dtype) noexcept nogil
cdef bint caches_exp(ag_dtype dtype) noexcept nogil
cdef Work work_of(const Problem *p) noexcept nogil
cdef Plan new_plan(
    const ag_linear_kernels *kernels, const Work *work, Py_ssize_t workspace, bint chunks_outside
) noexcept nogil
cdef bint has_few_classes(const Work *work) noexcept nogil
cdef Py_ssize_t preferred_rows(const Plan *plan) noexcept nogil
cdef Py_ssize_t preferred_vocab(const Plan *plan) noexcept nogil
cdef bint cut(Plan *plan, Py_ssize_t rows, Py_ssize_t vocab) noexcept nogil
cdef bint search(Plan *plan) noexcept nogil
cdef void cache_blocks(Plan *plan) noexcept nogil
cdef void cut_streamed(Plan *plan) noexcept nogil
cdef void cut_features(Plan *plan) noexcept nogil
cdef double cost(const Plan *plan) noexcept nogil
cdef Py_ssize_t layout(const Plan *plan, char *base, Buffers *at) noexcept nogil
cdef double flops(const Plan *plan) noexcept nogil
cdef Py_ssize_t packed_input(const Plan *plan) noexcept nogil
cdef Py_ssize_t packed_columns(const Plan *plan, Py_ssize_t n) noexcept nogil
cdef Py_ssize_t logits_of_pair(const Plan *plan) noexcept nogil
cdef Py_ssize_t logits_of_block(const Plan *plan) noexcept nogil
cdef Py_ssize_t sums_pitch(const Plan *plan) noexcept nogil
cdef bint rounds_input_grad(const Plan *plan, const Problem *p) noexcept nogil
cdef bint rounds_weight_grad(const Plan *plan, const Problem *p) noexcept nogil
cdef bint adds_tasks(const Plan *plan) noexcept nogil
cdef bint sums_all_of_weight_grad(const Plan *plan) noexcept nogil
cdef Py_ssize_t nbytes(const Plan *plan) noexcept nogil
cdef bint compensates_input_grad(const Plan *plan) noexcept nogil
cdef bint compensates_weight_grad(const Plan *plan) noexcept nogil
