# Cython's declarations of the row-wise kernels in ascend_grad/rowwise/rowwise.h.

from libc.stdint cimport int64_t, uint8_t

from ascend_grad._kernels cimport ag_dtype, ag_sum, ag_variant

cdef extern from "ascend_grad/rowwise/rowwise.h" nogil:
    # The numbers of the operators, in the order of AG_FOREACH_ROW_OP.
    ctypedef enum ag_row_op:
        AG_SOFTMAX_BACKWARD
        AG_LOG_SOFTMAX_BACKWARD
        AG_SCALED_MASKED_SOFTMAX_BACKWARD
        AG_SOFTMAX
        AG_LOG_SOFTMAX
        AG_SCALED_MASKED_SOFTMAX
        AG_ROW_OP_COUNT
        # Sums of the cross-entropy.
        AG_LOSS_EXP
        AG_LOSS_EXP_OF_ROWS
        AG_LOSS_EXP_OF_DENSE
        AG_LOSS_DENSE_STRIPS
        AG_LOSS_REST
        AG_LOSS_MOMENT
        AG_LOSS_DEFICIT
        AG_LOSS_WEIGHTED_DEFICIT

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
        AG_MASKED_LOGIT
        AG_MAX_COLUMNS
        AG_MAX_LANES
        AG_PACKED_COLUMNS
        AG_SCRATCH_BYTES
        AG_STRIP_COLUMNS

    Py_ssize_t AG_STRIP_ROWS(Py_ssize_t lanes) noexcept nogil

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

    Py_ssize_t AG_SEGMENT(Py_ssize_t lanes)

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

    ctypedef struct ag_loss_rows:
        const double *max
        const double *scale
        const double *factor
        const double *smoothing
        const double *slope
        const void *class_weight
        void *cached
        Py_ssize_t pitch
        int is_uniform
        int is_smoothed
        const char *next
        int is_dense
        double kept
        double share
        const double *certain
        const double *at_certain

    ctypedef struct ag_loss_quadratic:
        const double *first
        const double *second
        const double *at_one
        char *to
        const Py_ssize_t *numbers
        Py_ssize_t pitch
        const char *vector
        Py_ssize_t vector_pitch
        double cap
        const double *others
        const double *at_max

    ctypedef struct ag_single_target_columns:
        const void *targets
        int has_wide_targets
        int64_t ignore_index
        const double *class_weight
        const double *token_weight
        double smoothing
        double grad
        double inverse
        int return_grad
        double *losses
        char *prob
        char *hessian
        Py_ssize_t pitch

    ctypedef struct ag_dense_columns:
        double kept
        double share
        const void *class_weight
        double class_scale
        const double *token_weight
        double grad_loss
        double denominator
        double inverse
        int return_grad
        double *losses
        void *memory

    ctypedef struct ag_target_rows:
        Py_ssize_t targets
        Py_ssize_t pitch
        int64_t *entries
        double *logits
        double *slopes
        Py_ssize_t block
        double *weights
        double *exp
        double *equal
        double *max
        double *rest
        double *log_sum
        double *inverse
        double *losses
        double *sums
        double *balance
        double *a
        double *b
        double *s
        double *grad_loss
        double *grad_log_prob
        double *reciprocal
        double *mean_gap
        double *outer
        const double *class_weight

    ctypedef struct ag_loss_kernels:
        void (*rows_max)(const ag_tile *tile, double *max) noexcept nogil
        void (*rows_sum)(const ag_tile *tile, ag_row_op sum, const ag_loss_rows *rows, double *sums) noexcept nogil
        void (*rows_dense)(const ag_tile *tile, const ag_loss_rows *rows, double *deficit, double *below,
                           double *at_max) noexcept nogil
        void (*rows_write)(const ag_tile *tile, const ag_loss_rows *rows) noexcept nogil
        void (*rows_quadratic)(const ag_tile *tile, const ag_loss_rows *rows,
                               const ag_loss_quadratic *quadratic) noexcept nogil
        void (*rows_products)(const ag_tile *tile, const ag_loss_rows *rows, const ag_loss_quadratic *quadratic,
                              double *others, double *at_max) noexcept nogil
        Py_ssize_t (*find)(const char *a, Py_ssize_t n, double value) noexcept nogil
        void (*columns_sum)(const ag_tile *tile, int is_rest, const double *max, double *sums, void *memory) noexcept nogil
        void (*columns_write)(const ag_tile *tile, const ag_loss_rows *rows, void *memory) noexcept nogil
        void (*strips)(const ag_tile *tile, double *max, double *sums) noexcept nogil
        void (*log1p)(const double *x, double *results, Py_ssize_t count) noexcept nogil
        void (*add_numbers)(ag_sum *sums, const double *x, Py_ssize_t n) noexcept nogil
        void (*target_losses)(const ag_target_rows *rows, Py_ssize_t count) noexcept nogil
        void (*target_gradients)(const ag_target_rows *rows, Py_ssize_t count) noexcept nogil
        void (*finish)(const double *rest, const double *max, const double *logits, double scale, double grad, double inverse,
                       double smoothing, double *losses, double *factors, double *at_targets,
                       Py_ssize_t count) noexcept nogil
        void (*single_target_strips)(const ag_tile *tile, const ag_single_target_columns *columns) noexcept nogil
        Py_ssize_t dense_strip_rows
        void (*dense_strips)(const ag_tile *tile, const ag_dense_columns *columns) noexcept nogil
        void (*transform)(char *x, Py_ssize_t n, double inner, double cap) noexcept nogil
        void (*apply_slopes)(const char *z, char *gradient, Py_ssize_t n, double cap) noexcept nogil
        void (*apply_curvature)(const char *z, const char *gradient, const char *vector, char *h, Py_ssize_t n,
                                double cap, double bend) noexcept nogil

    const ag_loss_kernels *ag_rowwise_loss_kernels(ag_variant variant, ag_dtype dtype)
