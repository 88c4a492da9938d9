# Cython's declarations of the linear kernels; the manual is linear/linear.h.

from libc.stdint cimport int64_t, uint8_t

from ascend_grad._kernels cimport ag_dtype, ag_sum, ag_upstream, ag_variant

cdef extern from "ascend_grad/linear/linear.h" nogil:
    ctypedef struct ag_matrix:
        char *data
        Py_ssize_t row_stride
        Py_ssize_t step
        ag_dtype dtype
        int swapped

    enum:
        AG_MAX_UNPACKED_ROWS
        AG_MAX_STREAMED_STEP
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
        char *compensation
        Py_ssize_t compensation_stride
        int add
        int last
        ag_dtype rounded_to

    ctypedef enum ag_linear_source:
        AG_FROM_PRODUCT
        AG_FROM_LOGITS
        AG_FROM_SOFTMAX

    ctypedef enum ag_linear_result:
        AG_TO_GRADIENT
        AG_TO_MAX_SUM
        AG_TO_TOP_K

    ctypedef struct ag_chunk:
        Py_ssize_t rows
        const int64_t *row_numbers
        const int64_t *target
        const void *max
        const void *sum
        const void *grad

    ctypedef struct ag_vocab_block:
        Py_ssize_t size
        int64_t start

    ctypedef struct ag_loss_row:
        double inverse_temperature
        double grad_loss
        ag_upstream upstream
        double moment
        double deficit
        double weight
        int64_t argmax
        double a
        double b
        double s
        double kept_loss
        double mean_gap
        double certain_grad
        int64_t certain

    int64_t AG_ELSEWHERE

    ctypedef struct ag_loss_targets:
        Py_ssize_t count
        const int64_t *entries
        const double *weights
        const double *grad_log_prob

    ag_loss_targets ag_targets_of_row(ag_loss_targets all, Py_ssize_t i)
    void ag_dense_row_finish(ag_loss_row *row, double weight, double others, int64_t certain, double max, double rest,
                             double logit_scale, double class_scale)
    void ag_loss_row_finish(ag_loss_row *row, const ag_loss_targets *targets, const double *logits, double max, double rest,
                            double logit_scale, double label_smoothing, Py_ssize_t vocab, const double *class_weight,
                            double class_sum, double class_scale)

    ctypedef struct ag_logit_transform:
        int is_needed
        const void *bias
        double scale
        double softcap

    ctypedef struct ag_gradient_rule:
        ag_matrix softmax
        int round_to_bfloat16
        double filter_eps
        const void *complement
        int is_general
        const void *class_weight
        ag_matrix prob
        double kept
        double share

    ctypedef struct ag_statistics:
        void *max
        ag_sum *sum
        double *rest
        void *predicted
        ag_matrix logits
        int with_more
        int with_moments
        double *target_logits

    ctypedef struct ag_more:
        double moment
        double deficit
        double weight
        int64_t argmax

    ctypedef struct ag_top_k:
        Py_ssize_t k
        double scale
        const double *scales
        void *values
        int64_t *indices
        ag_sum *rest
        void *floors

    ctypedef struct ag_list_order:
        Py_ssize_t tasks
        Py_ssize_t merged
        int is_held
        uint8_t *is_complete

    bint ag_list_order_try(ag_list_order *order)
    void ag_list_order_release(ag_list_order *order)
    void ag_list_order_complete(ag_list_order *order, Py_ssize_t task)
    bint ag_list_order_has_next(const ag_list_order *order)

    enum:
        AG_SPARSE_OUTSIDE
        AG_SPARSE_UNSORTED

    ctypedef struct ag_sparse_rows:
        const void *values
        const void *indices
        int is_wide
        const int64_t *starts
        int64_t features
        int is_unsorted

    ctypedef struct ag_sparse_task:
        Py_ssize_t classes
        Py_ssize_t pitch
        Py_ssize_t row
        Py_ssize_t row_end
        Py_ssize_t first_row
        void *p
        const void *weight
        const void *bias
        void *sums
        int64_t feature
        int64_t feature_end

    ctypedef struct ag_packed:
        int weight_is_left
        ag_rows left
        void *left_tiles
        void *right
        void *x_columns
        void *w_columns
        void *p
        void *p_pairs
        void *logits
        uint8_t *skipped
        int caches_logits
        int caches_exp
        void *panel_max
        void *panel_sum
        void *panel_rest
        ag_more *panel_more

    ctypedef struct ag_linear_block:
        ag_chunk chunk
        ag_vocab_block vocab
        Py_ssize_t hidden
        ag_logit_transform transform
        ag_loss_row *rows
        ag_loss_targets targets
        ag_gradient_rule gradient
        ag_statistics statistics
        ag_top_k top_k
        ag_packed packed
        Py_ssize_t tile_pitch
        ag_sums input_grad
        ag_sums weight_grad

    ctypedef struct ag_linear_kernels:
        int mr
        int nr
        int vector
        int pair
        int granule
        int reads_runs
        int column_group
        int element_size
        int acc_size
        int caches_exp
        double speed
        int max_unpacked_rows
        int max_unpacked_statistics
        void (*pack_left)(void *to, Py_ssize_t pitch, const ag_matrix *source, const int64_t *rows, int64_t start, Py_ssize_t count,
                          Py_ssize_t first, Py_ssize_t n) noexcept nogil
        void (*pack_right)(void *to, Py_ssize_t pitch, const ag_matrix *source, const int64_t *rows, int64_t start, Py_ssize_t count,
                           Py_ssize_t first, Py_ssize_t n) noexcept nogil
        void (*pack_columns)(void *to, const ag_matrix *source, const int64_t *rows, int64_t start, Py_ssize_t count,
                             Py_ssize_t first, Py_ssize_t n) noexcept nogil
        void (*tiles)(const ag_linear_block *block, ag_linear_source source, ag_linear_result result, Py_ssize_t panel,
                      Py_ssize_t panel_end, Py_ssize_t tile, Py_ssize_t tile_end) noexcept nogil
        void (*merge_max_sum)(const ag_linear_block *block, Py_ssize_t row, Py_ssize_t row_end) noexcept nogil
        void (*merge_top_k)(const ag_linear_block *block, Py_ssize_t row, Py_ssize_t row_end) noexcept nogil
        void (*input_grad)(const ag_linear_block *block, Py_ssize_t panel, Py_ssize_t panel_end, Py_ssize_t tile,
                           Py_ssize_t tile_end) noexcept nogil
        void (*weight_grad)(const ag_linear_block *block, Py_ssize_t panel, Py_ssize_t panel_end, Py_ssize_t tile,
                            Py_ssize_t tile_end) noexcept nogil
        void (*sum_p)(const ag_linear_block *block, Py_ssize_t panel, Py_ssize_t panel_end, double *sums) noexcept nogil
        void (*probabilities)(void *to, const void *logits, double max, double sum, Py_ssize_t n) noexcept nogil
        void (*dot_products)(const ag_rows *resident, const ag_rows *streamed, Py_ssize_t first, Py_ssize_t n, void *p,
                             Py_ssize_t pitch) noexcept nogil
        void (*sum_rows)(Py_ssize_t resident, const ag_rows *streamed, Py_ssize_t first, Py_ssize_t n, const void *p,
                         Py_ssize_t pitch, void *sums, Py_ssize_t sums_pitch, int add) noexcept nogil
        void (*combine)(const void *source, Py_ssize_t count, Py_ssize_t stride, Py_ssize_t n, void *to) noexcept nogil
        void (*write_rows)(ag_variant variant, const ag_rows *resident, const ag_rows *to, Py_ssize_t first, Py_ssize_t n,
                           const void *p, Py_ssize_t r_stride, Py_ssize_t s_stride, int nontemporal) noexcept nogil
        void (*tile_to_logits)(const ag_linear_block *block, void *tile) noexcept nogil
        void (*tile_to_gradient)(const ag_linear_block *block, void *tile) noexcept nogil
        void (*tile_to_max_sum)(const ag_linear_block *block, const void *tile, void *max, ag_sum *sum, double *rest,
                                ag_more *more) noexcept nogil
        void (*tile_to_top_k)(const ag_linear_block *block, const void *tile) noexcept nogil
        void (*join_top_k)(const ag_top_k *source, const ag_top_k *to, Py_ssize_t row, Py_ssize_t row_end) noexcept nogil
        void (*columns_to_logits)(const ag_linear_block *block, void *tile) noexcept nogil
        void (*columns_to_gradient)(const ag_linear_block *block, void *tile) noexcept nogil
        void (*columns_to_max_sum)(const ag_linear_block *block, const void *tile, void *max, double *sum) noexcept nogil
        void (*columns_to_loss)(const ag_linear_block *block, void *tile, void *sum_exp, int with_gradient) noexcept nogil
        void (*columns_to_product)(const ag_linear_block *block, void *tile) noexcept nogil
        void (*sum_tile)(const ag_linear_block *block, const void *tile, double *sums) noexcept nogil
        void (*losses)(const double *rest, const void *predicted, const void *max, Py_ssize_t n, double *to) noexcept nogil
        void (*add_numbers)(ag_sum *sums, const double *x, Py_ssize_t n) noexcept nogil
        Py_ssize_t (*sparse_pitch)(Py_ssize_t classes) noexcept nogil
        int (*sparse_check)(const ag_sparse_rows *x, Py_ssize_t row, Py_ssize_t row_end) noexcept nogil
        void (*sparse_logits)(const ag_sparse_rows *x, const ag_sparse_task *task) noexcept nogil
        void (*sparse_sums)(const ag_sparse_rows *x, const ag_sparse_task *task) noexcept nogil

    const ag_linear_kernels *ag_linear_kernels_of(ag_variant variant, ag_dtype dtype)
