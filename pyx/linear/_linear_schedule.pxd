cimport numpy as cnp
from libc.stdint cimport int64_t

from ascend_grad._kernels cimport ag_team, ag_variant
from ascend_grad._linear_kernels cimport (
    ag_linear_block,
    ag_linear_kernels,
    ag_linear_result,
    ag_linear_source,
    ag_matrix,
)
from ascend_grad._linear_plan cimport Buffers, Plan
from ascend_grad._linear_rows cimport Rows
from ascend_grad._linear_tasks cimport Grid


cdef enum Phase:
    PACK_BLOCK
    PACK_CHUNK
    TILES
    MERGE
    PRODUCTS
    CONVERT_ROWS
    SKINNY_TILES
    SKINNY_EPILOGUE
    SKINNY_PRODUCTS
    SKINNY_SUMS


cdef class Schedule:
    cdef const ag_linear_kernels *kernels
    cdef ag_linear_block block
    cdef ag_matrix input, weight
    cdef Plan plan
    cdef Rows rows
    cdef int threads
    cdef bint chosen                  # by this library, not by the caller
    cdef ag_team team
    cdef Phase phase
    cdef double last_check            # when signals were last checked
    cdef int64_t end_of_phases        # nanoseconds; after that the team shuts down
    cdef bint is_over                 # phases do nothing any more
    cdef object error                 # and why
    cdef list keep                    # arrays whose memory is in use
    cdef Buffers at
    # what the phases read
    cdef ag_linear_source source
    cdef ag_linear_result result
    cdef Grid tiles, input_grid, weight_grid
    cdef Py_ssize_t weight_panel_tasks, input_tile_tasks
    cdef Py_ssize_t row_parts         # parts of the hidden dimension that rows are packed in
    cdef Py_ssize_t column_parts      # parts of the rows that columns are packed in
    cdef Py_ssize_t panels_together   # panels of columns that a task packs
    cdef bint streams_input_grad, streams_weight_grad
    cdef ag_matrix converted_to
    cdef const char *converted_from
    cdef Py_ssize_t converted_rows, converted_n, converted_stride, converted_step
    cdef ag_variant variant
    cdef Py_ssize_t chunk             # the one selected
    # what is wanted, and where it goes
    cdef bint with_statistics, with_input_grad, with_weight_grad
    cdef void *sum_exp
    cdef ag_matrix input_out, weight_out
    cdef bint converts_input_grad       # its sums lie elsewhere
    cdef char *logits_end             # of logits that are cached in the memory of weight_grad

    cdef int prepare(
        self, cnp.ndarray input, cnp.ndarray weight, Plan plan, cnp.ndarray memory, Rows rows, int threads
    ) except -1
    cdef int work(self) except -1
    cdef void worker_loop(self) noexcept nogil
    cdef void run_tasks(self, bint is_primary) noexcept nogil
    cdef bint is_interrupted(self) noexcept nogil
    cdef void check_signals(self) noexcept with gil
    cdef void run_phase(self, Phase phase, Py_ssize_t tasks) noexcept nogil
    cdef void run_task(self, Phase phase, Py_ssize_t u) noexcept nogil
    cdef void pack_columns(
        self, void *to, const ag_matrix *source, const int64_t *rows, int64_t start, Py_ssize_t count, Py_ssize_t u
    ) noexcept nogil
    cdef void pack_block(self, Py_ssize_t u) noexcept nogil
    cdef void pack_chunk(self, Py_ssize_t u) noexcept nogil
    cdef void make_tiles(self, Py_ssize_t u) noexcept nogil
    cdef void multiply(self, Py_ssize_t u) noexcept nogil
    cdef void convert_rows(self, Py_ssize_t u) noexcept nogil
    cdef void convert_to(
        self, const ag_matrix *out, Py_ssize_t first, Py_ssize_t rows, Py_ssize_t column, Py_ssize_t columns,
        const char *sums, Py_ssize_t stride
    ) noexcept nogil
    cdef void set_slice(self, Py_ssize_t index) noexcept nogil
    cdef void set_block(self, Py_ssize_t index) noexcept nogil
    cdef void set_chunk(self, Py_ssize_t index) noexcept nogil
    cdef Py_ssize_t column_tasks(self, Py_ssize_t count) noexcept nogil
    cdef void pack_weight(self, bint rows, bint columns) noexcept nogil
    cdef void pack_input(self, bint rows, bint columns) noexcept nogil
    cdef void run_tiles(self, ag_linear_source source, ag_linear_result result) noexcept nogil
    cdef void run_products(self) noexcept nogil
    cdef void make_logits(self) noexcept nogil
    cdef int set_statistics(
        self, cnp.ndarray logits_max, cnp.ndarray sum_exp, cnp.ndarray predicted, cnp.ndarray logits
    ) except -1
    cdef void add_statistics(self) noexcept nogil
    cdef void end_statistics(self, Py_ssize_t begin, Py_ssize_t end) noexcept nogil
    cdef int set_gradient(
        self, cnp.ndarray softmax, cnp.ndarray input_grad, cnp.ndarray weight_grad, double filter_eps
    ) except -1
    cdef void place_sums(self, Py_ssize_t c, Py_ssize_t slice) noexcept nogil
    cdef void add_gradients(self, Py_ssize_t b, Py_ssize_t c, Py_ssize_t sweep, ag_linear_source source) noexcept nogil
    cdef void run_all(self) noexcept nogil
    cdef void run_statistics(self) noexcept nogil
    cdef void run_gradient(self) noexcept nogil
    cdef void set_pair(self, Py_ssize_t b, Py_ssize_t c, bint logits, bint gradients) noexcept nogil
    cdef char *cached_logits(self, Py_ssize_t b, Py_ssize_t c) noexcept nogil
    cdef void run_with_logits_of_chunks(self) noexcept nogil
    cdef void run_with_logits_of_blocks(self) noexcept nogil
