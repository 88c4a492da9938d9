# What the C headers offer, for Cython.

from libc.stdint cimport int64_t, uint8_t, uint32_t

cdef extern from "ascend_grad/cpu.h" nogil:
    long ag_cache_size(int level, long fallback)
    int ag_affinity_cores()

cdef extern from "ascend_grad/foreach_isa.h" nogil:
    ctypedef enum ag_variant:
        AG_VARIANT_BASELINE
        AG_VARIANT_COUNT
    const char *const ag_variant_names[]
    int ag_variant_supported(ag_variant variant)
    ag_variant ag_best_variant()

cdef extern from "ascend_grad/fpenv.h" nogil:
    ctypedef int ag_fpenv
    ag_fpenv ag_fpenv_enter()
    void ag_fpenv_leave(ag_fpenv mode)
    double ag_rounded_to_float32(double x)

cdef extern from "ascend_grad/rowwise/rowwise.h" nogil:
    ctypedef enum ag_dtype:
        AG_FLOAT32
        AG_FLOAT16
        AG_BFLOAT16
        AG_FLOAT64
    const int ag_itemsize[]

    # The operators, by number: their list is in the header.
    ctypedef enum ag_row_op:
        AG_SOFTMAX_BACKWARD
        AG_LOG_SOFTMAX_BACKWARD
        AG_SCALED_MASKED_SOFTMAX_BACKWARD
        AG_SOFTMAX
        AG_LOG_SOFTMAX
        AG_SCALED_MASKED_SOFTMAX
        AG_ROW_OP_COUNT

    ctypedef enum ag_direction:
        AG_FORWARD

    ctypedef enum ag_use:
        AG_NOT_READ

    ctypedef struct ag_row_op_traits:
        const char *name
        ag_direction direction
        ag_use b
        ag_use mask
        int has_columns
    const ag_row_op_traits ag_row_ops[]

    enum:
        AG_MAX_COLUMNS
        AG_PACKED_COLUMNS
        AG_SCRATCH_BYTES
        AG_STRIP_COLUMNS

    ctypedef struct ag_tile:
        const char *a
        const char *b
        const uint8_t *mask
        char *out
        Py_ssize_t a_stride
        Py_ssize_t b_stride
        Py_ssize_t mask_stride
        Py_ssize_t out_stride
        Py_ssize_t rows
        Py_ssize_t n
        double scale
        int nontemporal
        int fits_l2

    ctypedef struct ag_row_kernels:
        Py_ssize_t segment
        Py_ssize_t strip_rows
        void (*rows)(const ag_tile *tile) noexcept nogil
        double (*split_max)(const ag_tile *tile) noexcept nogil
        double (*split_sum)(const ag_tile *tile, double max) noexcept nogil
        void (*split_write)(const ag_tile *tile, double max, double sum) noexcept nogil
        void (*columns)(const ag_tile *tile, void *memory) noexcept nogil
        void (*columns_max)(const ag_tile *tile, double *max, void *memory) noexcept nogil
        void (*columns_sum)(const ag_tile *tile, const double *max, double *sum, void *memory) noexcept nogil
        void (*columns_write)(const ag_tile *tile, const double *max, const double *sum, void *memory) noexcept nogil

    const ag_row_kernels *ag_rowwise_kernels(ag_variant variant, ag_dtype dtype, ag_row_op op)


cdef extern from "ascend_grad/sums.h" nogil:
    ctypedef struct ag_sum:
        double sum
        double compensation

    void ag_sum_add(ag_sum *total, double x)
    double ag_sum_total(ag_sum total)

cdef extern from "ascend_grad/strided.h" nogil:
    void ag_copy_block(char *to, Py_ssize_t to_row, Py_ssize_t to_step, const char *source, Py_ssize_t from_row,
                       Py_ssize_t from_step, Py_ssize_t rows, Py_ssize_t n, int itemsize, int swapped)

    ctypedef struct ag_dim:
        Py_ssize_t length
        Py_ssize_t to
        Py_ssize_t from_ "from"

    void ag_copy_3d(ag_variant variant, char *to, const char *source, ag_dim x, ag_dim y, ag_dim z, int itemsize,
                    int swapped)
    void ag_widen(ag_variant variant, ag_dtype dtype, const char *source, float *to, Py_ssize_t n)
    void ag_round(ag_variant variant, int from_double, const void *source, ag_dtype dtype, char *to, Py_ssize_t n)
    void ag_stream_add(ag_variant variant, const float *a, const float *b, float *out, Py_ssize_t n,
                       int nontemporal)

cdef extern from "ascend_grad/team.h" nogil:
    ctypedef struct ag_team:
        int size
        int64_t begin
        int64_t idle
        int64_t end
    int64_t ag_team_now()
    void ag_team_form(ag_team *team, int size, int cores)
    void ag_team_start(ag_team *team, Py_ssize_t units)
    void ag_team_dissolve(ag_team *team)
    uint32_t ag_team_join(ag_team *team, uint32_t round)
    Py_ssize_t ag_team_next(ag_team *team)
    void ag_team_finish(ag_team *team)
    void ag_team_cancel(ag_team *team)
    void ag_team_end(ag_team *team)

cdef extern from "ascend_grad/linear/linear.h" nogil:
    ctypedef struct ag_matrix:
        char *data
        Py_ssize_t row_stride
        Py_ssize_t step
        ag_dtype dtype
        int swapped

    enum:
        AG_RESIDENT
        AG_STREAMED
        AG_TILE
        AG_TERMS

    ctypedef struct ag_rows:
        ag_matrix matrix
        const int64_t *numbers
        int64_t start
        Py_ssize_t count

    ctypedef struct ag_sums:
        char *data
        Py_ssize_t row_stride
        Py_ssize_t column
        char *compensation
        Py_ssize_t compensation_stride
        Py_ssize_t compensation_column

    ctypedef enum ag_linear_source:
        AG_FROM_PRODUCT
        AG_FROM_LOGITS
        AG_FROM_SOFTMAX

    ctypedef enum ag_linear_result:
        AG_TO_GRADIENT
        AG_TO_LOGITS
        AG_TO_MAX_SUM

    ctypedef struct ag_linear_block:
        Py_ssize_t rows
        Py_ssize_t vocab
        Py_ssize_t hidden_size
        Py_ssize_t hidden_start
        int64_t vocab_start
        const int64_t *row_numbers
        void *x_rows
        void *w_rows
        void *x_columns
        void *w_columns
        void *p
        void *p_pairs
        void *logits
        const void *max
        const void *sum
        const void *grad
        const int64_t *target
        ag_matrix softmax
        int round_to_bfloat16
        double filter_eps
        uint8_t *skipped
        int add_logits
        int last_logits
        void *logits_compensation
        int keep_logits
        Py_ssize_t tile_pitch
        Py_ssize_t tile_pitch
        void *panel_max
        void *panel_sum
        void *predicted
        void *running_max
        ag_sum *running_sum
        ag_matrix logits_out
        ag_sums input_grad
        ag_sums weight_grad
        int add_input_grad
        int add_weight_grad
        int last_input_grad
        int last_weight_grad

    ctypedef struct ag_linear_kernels:
        int mr
        int nr
        int vector
        int pair
        int element_size
        int acc_size
        void (*pack_tile)(void *to, const ag_matrix *source, const int64_t *rows, int64_t start, Py_ssize_t count,
                          Py_ssize_t first, Py_ssize_t n) noexcept nogil
        void (*pack_panel)(void *to, const ag_matrix *source, const int64_t *rows, int64_t start, Py_ssize_t count,
                           Py_ssize_t first, Py_ssize_t n) noexcept nogil
        void (*pack_columns)(void *to, const ag_matrix *source, const int64_t *rows, int64_t start, Py_ssize_t count,
                             Py_ssize_t first, Py_ssize_t n) noexcept nogil
        void (*tiles)(const ag_linear_block *block, ag_linear_source source, ag_linear_result result, Py_ssize_t panel,
                      Py_ssize_t panel_end, Py_ssize_t tile, Py_ssize_t tile_end) noexcept nogil
        void (*merge_max_sum)(const ag_linear_block *block, Py_ssize_t row, Py_ssize_t row_end) noexcept nogil
        void (*input_grad)(const ag_linear_block *block, Py_ssize_t panel, Py_ssize_t panel_end, Py_ssize_t tile,
                           Py_ssize_t tile_end) noexcept nogil
        void (*weight_grad)(const ag_linear_block *block, Py_ssize_t panel, Py_ssize_t panel_end, Py_ssize_t tile,
                            Py_ssize_t tile_end) noexcept nogil
        void (*probabilities)(void *to, const void *logits, double max, double sum, Py_ssize_t n) noexcept nogil
        void (*dot_products)(const ag_rows *resident, const ag_rows *streamed, Py_ssize_t first, Py_ssize_t n, void *p,
                             Py_ssize_t pitch) noexcept nogil
        void (*sum_rows)(Py_ssize_t resident, const ag_rows *streamed, Py_ssize_t first, Py_ssize_t n, const void *p,
                         Py_ssize_t pitch, void *sums, Py_ssize_t sums_pitch, int add) noexcept nogil
        void (*combine)(const void *source, Py_ssize_t count, Py_ssize_t stride, Py_ssize_t n, void *to) noexcept nogil
        void (*write_rows)(ag_variant variant, const ag_rows *resident, const ag_rows *to, Py_ssize_t first, Py_ssize_t n,
                           const void *p, Py_ssize_t r_stride, Py_ssize_t s_stride, int nontemporal) noexcept nogil
        void (*tile_to_gradient)(const ag_linear_block *block, void *tile) noexcept nogil
        void (*tile_to_max_sum)(const ag_linear_block *block, const void *tile, void *max, ag_sum *sum) noexcept nogil
        void (*columns_to_gradient)(const ag_linear_block *block, void *tile) noexcept nogil
        void (*columns_to_max_sum)(const ag_linear_block *block, const void *tile, void *max, double *sum) noexcept nogil

    const ag_linear_kernels *ag_linear_kernels_of(ag_variant variant, ag_dtype dtype)
