/* Kernels of the row-wise softmax gradients and their forward operators, called by pyx/rowwise/_rowwise_python.pyx.
 *
 * What they compute (g grad_output, y output, x input; sums and maxima along the reduced dimension)
 *
 *   softmax backward                 (g - sum(g*y)) * y
 *   log-softmax backward             g - sum(g) * exp(y)
 *   scaled masked softmax backward   0 where mask, else (g - sum(g*y)) * y * scale
 *   softmax                          exp(x - max) / sum(exp(x - max))
 *   log-softmax                      (x - max) - log(sum(exp(x - max)))
 *   scaled masked softmax            the softmax of (-10000 where mask, else x * scale)
 *   cross-entropy                    factor * exp((x - max) * scale) - smoothing * class weight, and sums (loss.h)
 *
 * Types
 *
 *   in memory                    arithmetic   sums      rounded
 *   float32                      float32      float64   once, at the end
 *   float16, bfloat16            float32      float64   once, at the end, to nearest even
 *   float64                      float64      float64 (compensated over segments)
 *
 * Layouts. Row kernels need unit stride along the reduced dimension. Column kernels need unit stride across it; their
 * tile is `n` rows by up to AG_MAX_COLUMNS columns. Addresses need no alignment. Other layouts are gathered into tiles
 * first (strided.h).
 *
 * Splits. A row (or block of columns) that is too long for one task is split along n; a split is one or more segments.
 * The maxima and sums of splits are computed first, then combined in order, then the results are written.
 *
 * The order of a row sum. It is part of the result's definition: the same for rows and columns, for any strides,
 * neighbours, chunking and number of threads. VL is the number of lanes of the compute type. Term k of a row belongs to
 * segment k / (128 VL) and to sum block k / (16 VL). In its block it is term (k / VL) % 16 of lane k % VL.
 *
 *   - the at most 16 terms of a lane in a sum block are added in order, in the compute type;
 *   - the lane adds its sum blocks in order, in float64;
 *   - the lanes of a segment are added by halves: j with j + VL/2, then j + VL/4, ...;
 *   - segments are added in order with a compensated sum (Neumaier 1974).
 *
 * So no float32 accumulator takes more than 16 terms, and the error of a sum does not grow with n. Products are rounded
 * before they are added (no fused multiply-add in sums): narrow rows keep them in a buffer, and must give the same
 * bits.
 *
 * Alternatives. One long sum per lane has an error a hundred times larger at n = 2**20. Folding every term into float64
 * doubles the arithmetic, by its conversions. A softmax caches the exponentials of a row for its results if they take
 * up to 16 KiB, which mostly stay in L1. Exponentials of longer rows are computed twice, which costs less than a memory
 * pass.
 *
 * Files: ops.h has the formulas of the operators; sums.h, rows.h, narrow.h and columns.h the loops; write_row.h the loop
 * that writes a row; loss_kernels.h the kernels of the cross-entropy; kernels.h the entry points and the table for one
 * dtype and instruction set; foreach_dtype.h all dtypes.
 */
#ifndef ASCEND_GRAD_ROWWISE_H
#define ASCEND_GRAD_ROWWISE_H

#include <assert.h>
#include <math.h>

#include "../base.h"
#include "../loss.h"
#include "../simd.h"
#include "../sums.h"

/* ---- the operators ----------------------------------------------------------------------------------------------- */

typedef enum { AG_BACKWARD, AG_FORWARD } ag_direction;

/* The use of an operand: it is not read, or read by the results alone, or also by the row sum (and maximum). */
typedef enum { AG_NOT_READ, AG_IN_RESULT, AG_IN_SUM } ag_use;

/* X(member of ag_row_op, name, direction, use of the second input, use of the mask, column kernels: 1 or 0)
 *
 * A backward operator subtracts the row sum from its first input, a forward one subtracts the maximum of the logits and
 * sums up exponentials. A mask that the sum reads takes part in the logits. The formulas are in ops.h. */
#define AG_FOREACH_ROW_OP(X)                                                                                           \
    X(AG_SOFTMAX_BACKWARD, softmax_backward, AG_BACKWARD, AG_IN_SUM, AG_NOT_READ, 1)                                   \
    X(AG_LOG_SOFTMAX_BACKWARD, log_softmax_backward, AG_BACKWARD, AG_IN_RESULT, AG_NOT_READ, 1)                        \
    X(AG_SCALED_MASKED_SOFTMAX_BACKWARD, scaled_masked_softmax_backward, AG_BACKWARD, AG_IN_SUM, AG_IN_RESULT, 0)      \
    X(AG_SOFTMAX, softmax, AG_FORWARD, AG_NOT_READ, AG_NOT_READ, 1)                                                    \
    X(AG_LOG_SOFTMAX, log_softmax, AG_FORWARD, AG_NOT_READ, AG_NOT_READ, 1)                                            \
    X(AG_SCALED_MASKED_SOFTMAX, scaled_masked_softmax, AG_FORWARD, AG_NOT_READ, AG_IN_SUM, 0)

/* Row sums of the cross-entropy, which is no member of the list above, as its kernels have other arguments (loss_kernels.h).
 * The first four come first, as `is_loss` asks for them:
 * X(member, name, direction, use of the second input, use of the mask, column kernels: 1 or 0). A plan for one of the
 * first four describes the whole operator. The second and the third never process columns. The third and the fourth have
 * probabilities of all classes as second input; the columns of the fourth have at most AG_DENSE_STRIP_ROWS rows. */
#define AG_FOREACH_LOSS_SUM(X)                                                                                         \
    X(AG_LOSS_EXP, exp, AG_FORWARD, AG_NOT_READ, AG_NOT_READ, 1)                                                       \
    X(AG_LOSS_EXP_OF_ROWS, exp_of_rows, AG_FORWARD, AG_NOT_READ, AG_NOT_READ, 0)                                       \
    X(AG_LOSS_EXP_OF_DENSE, exp_of_dense, AG_FORWARD, AG_IN_SUM, AG_NOT_READ, 0)                                       \
    X(AG_LOSS_DENSE_STRIPS, dense_strips, AG_FORWARD, AG_IN_SUM, AG_NOT_READ, 1)                                       \
    X(AG_LOSS_REST, rest, AG_FORWARD, AG_NOT_READ, AG_NOT_READ, 1)                                                     \
    X(AG_LOSS_MOMENT, moment, AG_FORWARD, AG_NOT_READ, AG_NOT_READ, 0)                                                 \
    X(AG_LOSS_DEFICIT, deficit, AG_FORWARD, AG_NOT_READ, AG_NOT_READ, 0)                                               \
    X(AG_LOSS_WEIGHTED_DEFICIT, weighted_deficit, AG_FORWARD, AG_IN_SUM, AG_NOT_READ, 0)

#define AG_MEMBER(op, ...) op,
typedef enum {
    AG_FOREACH_ROW_OP(AG_MEMBER) AG_ROW_OP_COUNT,
    AG_BEFORE_LOSS_SUMS = AG_ROW_OP_COUNT - 1,
    AG_FOREACH_LOSS_SUM(AG_MEMBER) AG_ROW_SUM_COUNT
} ag_row_op;
#undef AG_MEMBER

typedef struct {
    const char *name;
    ag_direction direction;
    ag_use b, mask;
    int has_columns;
} ag_row_op_traits;

#define AG_TRAITS(op, name, direction, b, mask, has_columns) {#name, direction, b, mask, has_columns},
static const ag_row_op_traits ag_row_ops[AG_ROW_SUM_COUNT] = {AG_FOREACH_ROW_OP(AG_TRAITS)
                                                                  AG_FOREACH_LOSS_SUM(AG_TRAITS)};
#undef AG_TRAITS

#define AG_CHECK(op, name, direction, b, mask, has_columns)                                                            \
    static_assert(!(has_columns) || (mask) == AG_NOT_READ, #name ": column kernels read no mask");
AG_FOREACH_ROW_OP(AG_CHECK)
#undef AG_CHECK

AG_INLINE int ag_is_forward(int op) { return ag_row_ops[op].direction == AG_FORWARD; }
AG_INLINE int ag_reads_b(int op) { return ag_row_ops[op].b != AG_NOT_READ; }
AG_INLINE int ag_sums_b(int op) { return ag_row_ops[op].b == AG_IN_SUM; }
AG_INLINE int ag_is_masked(int op) { return ag_row_ops[op].mask != AG_NOT_READ; }
AG_INLINE int ag_masks_sum(int op) { return ag_row_ops[op].mask == AG_IN_SUM; }

enum { AG_MASKED_LOGIT = -10000 };

/* ---- arguments of the kernels ------------------------------------------------------------------------------------ */

/* Elements of a segment, for VL lanes of the compute type. */
#define AG_SEGMENT(VL) (128 * (VL))
/* Most rows of a strip, for which column kernels keep the sums in registers. In memory, the sums of the lanes would
 * take more bytes than the elements themselves. It is at most the rows of a sum block. */
#define AG_STRIP_ROWS(VL) (16 * (VL) < 64 ? 16 * (VL) : 64)

/* Most rows of columns with dense targets, a sum block. The exponentials of four vectors of columns fit the kernels' memory. */
#define AG_DENSE_STRIP_ROWS(VL) (16 * (VL))

enum {
    AG_MAX_COLUMNS = 1024,   /* most columns of a tile */
    AG_PACKED_COLUMNS = 128, /* most columns of packed rows for which several rows are processed as one */
    AG_STRIP_COLUMNS = 64,   /* least columns of packed rows for which up to AG_STRIP_ROWS rows are a strip */
    AG_MAX_LANES = 16,       /* most float32 lanes of a vector */
    AG_MAX_PREFETCH_BYTES = 128 << 10, /* most bytes of a row that is prefetched: two longer rows do not fit L2 */
    AG_SCRATCH_VALUES = AG_MAX_LANES * AG_PACKED_COLUMNS + AG_MAX_COLUMNS + AG_MAX_LANES,
    AG_SCRATCH_BYTES = 12 * AG_MAX_LANES * AG_MAX_COLUMNS + 8 * (2 * AG_MAX_COLUMNS + 3 * AG_SCRATCH_VALUES)
};

/* Part of a problem: for row kernels `rows` rows of n elements, for column kernels n rows of `rows` columns. A stride
 * is the distance of adjacent rows in memory. No pointer is NULL: if an operator has no second input or no mask, any
 * address with stride 0 serves. */
typedef struct {
    const char *a, *b;   /* the inputs: grad_output and output (backward), or only input (forward) */
    const uint8_t *mask; /* bytes, of which those that are not zero mask an element */
    char *out;
    ptrdiff_t a_stride, b_stride, mask_stride, out_stride; /* bytes */
    ptrdiff_t rows, n;
    double scale;
    int nontemporal; /* whether stores of results bypass the cache */
    int fits_l2;     /* for column kernels: whether inputs stay in L2 from the sum to the result */
} ag_tile;

/* The inputs and the result of a row to prefetch. A NULL pointer is not prefetched. */
typedef struct {
    const char *a, *b, *out;
} ag_prefetch;

/* Parameters of the rows (or columns) of a tile in kernels of the cross-entropy: one number for each. */
typedef struct {
    const double *max;          /* the largest input */
    const double *scale;        /* positive factor of inputs; 0: the row is ignored, and its sums mean nothing */
    const double *factor;       /* factor of the exponentials in the result; if it, `smoothing` and `slope` are 0 in the
                                   compute type, the result is 0 */
    const double *smoothing;    /* what is subtracted from the result, times the class weight */
    const double *slope;        /* factor of the exponentials times their exponents; NULL: 0. Row kernels alone read it */
    const void *class_weight;   /* (n,), in the compute type, as ag_scaled_weight returns them; NULL: ones */
    void *cached;               /* NULL, or memory for rows * pitch + AG_MAX_LANES exponentials in the compute type */
    ptrdiff_t pitch;
    int is_uniform;             /* whether tile->scale is the scale of all rows that are not ignored */
    int is_smoothed;            /* whether `smoothing` is read; column kernels never read it */
    const char *next;           /* NULL, or as many input rows to prefetch into L2, with the stride of the tile */
    /* Dense targets: the tile's second input holds probabilities q of all classes. Then `class_weight` c stands for
     * c (kept q + share) in the result, and `smoothing` is read. */
    int is_dense;
    double kept, share;
    const double *certain;      /* 1: the result is `at_certain` where the exponential is 1; any other number: nowhere */
    const double *at_certain;
} ag_loss_rows;

/* Results that are quadratic in the exponentials e of rows: e (first + e second), and `at_one` where e is 1. Row r is written
 * at `to` + numbers[r] * pitch. It is 0 if the three numbers of the row are.
 *
 * With a vector v for each row, the results are e (first v + second sum_u e_u v_u), and where e is 1,
 * at_one v + second (sum_u e_u v_u - v). */
typedef struct {
    const double *first, *second, *at_one; /* one number for each row; `second` NULL: 0 */
    char *to;
    const ptrdiff_t *numbers;
    ptrdiff_t pitch;                       /* bytes */
    const char *vector;                    /* in the dtype of the tile, row r at numbers[r] * vector_pitch; NULL: none */
    ptrdiff_t vector_pitch;                /* bytes */
    double cap;                            /* factors v by 1 - (z / cap)^2; 0: no factor */
    const double *others, *at_max;         /* results of rows_products: sums of e v where e is not 1, and where it is */
} ag_loss_quadratic;

/* Columns with one target each, a weight and label smoothing, and no other term of the loss: arguments and results of
 * `single_target_strips`. */
typedef struct {
    const void *targets;        /* indices, int64 or int32 */
    int has_wide_targets;       /* whether they are int64 */
    int64_t ignore_index;       /* target of columns that are ignored, whose results are 0 */
    const double *class_weight; /* of each class, or NULL for 1 */
    const double *token_weight; /* of each column, or NULL for 1; columns of weight 0 are ignored */
    double smoothing;           /* the label smoothing */
    double grad, inverse;       /* the upstream gradient, and the reciprocal temperature */
    int return_grad;            /* whether the gradient is written */
    double *losses;
    /* Results of the tile's shape, in its dtype: probabilities and the Hessian's diagonal. NULL: not requested. */
    char *prob, *hessian;
    ptrdiff_t pitch;            /* bytes between rows of `prob` and `hessian` */
} ag_single_target_columns;

/* Columns with dense targets and no other term of the loss: arguments and results of `dense_strips`. */
typedef struct {
    double kept, share;         /* as in ag_loss_rows, like the class weights */
    const void *class_weight;
    double class_scale;         /* see ag_class_scale */
    const double *token_weight; /* of each column, or NULL for 1 */
    double grad_loss;           /* the upstream gradient of the result */
    double denominator;         /* what the sum of the losses is divided by; 0: there is no gradient */
    double inverse;             /* the reciprocal temperature */
    int return_grad;            /* whether the gradient is written */
    double *losses;
    void *memory;               /* AG_SCRATCH_BYTES bytes of the calling thread */
} ag_dense_columns;

/* Rows with any number of targets: parameters and results of `target_losses` and `target_gradients`. Arrays have one number
 * for each row, or for each target of a row. */
typedef struct {
    ptrdiff_t targets;         /* of each row */
    ptrdiff_t pitch;           /* of the next three arrays: target k of row i is element k * pitch + i */
    int64_t *entries;          /* negative for an ignored target. Such numbers of a row are unlike each other */
    double *logits;            /* at the targets; `target_losses` replaces them by distances, `target_gradients` those by
                                  gradients, but for ignored targets and rows without a gradient */
    double *slopes;            /* derivatives of the softcap at the targets; NULL: there is no softcap */
    ptrdiff_t block;           /* the pitch of the next three arrays */
    double *weights;           /* of the targets; 0 for ignored ones */
    double *exp;               /* NULL, or memory for the exponentials of the distances */
    double *equal;             /* sums of the weights of targets that are the same entry; NULL: the kernel computes them */
    double *max, *rest;        /* statistics of loss.h, and the logarithm of 1 + rest */
    double *log_sum;
    double *inverse;           /* factors of the distances from the maximum */
    double *losses, *sums;     /* results of `target_losses`: losses, and sums of weights */
    /* The coefficients of loss.h, the upstream gradients of the loss and of the log-probability, 1 / (1 + rest), `mean_gap`
     * of loss.h, and the factors of the gradients. */
    double *balance, *a, *b, *s, *grad_loss, *grad_log_prob, *reciprocal, *mean_gap, *outer;
    const double *class_weight; /* of each class, or NULL for 1 */
} ag_target_rows;

/* The kernels of the cross-entropy for one dtype and variant. AG_FOREACH_LOSS_SUM lists the sums, whose formulas `term` has in
 * ops.h. `memory` is as below. */
typedef struct {
    void (*rows_max)(const ag_tile *tile, double *max);
    /* Sum up whole rows, or segments of them. AG_LOSS_EXP fills rows->cached. */
    void (*rows_sum)(const ag_tile *tile, ag_row_op sum, const ag_loss_rows *rows, double *sums);
    /* Sum up the weights w = c (kept q + share) of dense targets over whole rows, or segments of them: w_v (max - z_v), and
     * w_v of entries below the maximum and at the maximum. */
    void (*rows_dense)(const ag_tile *tile, const ag_loss_rows *rows, double *deficit, double *below, double *at_max);
    void (*rows_write)(const ag_tile *tile, const ag_loss_rows *rows);
    /* Write results in the dtype of the tile. Like rows_write, it reads rows->cached, but not the tile's result. */
    void (*rows_quadratic)(const ag_tile *tile, const ag_loss_rows *rows, const ag_loss_quadratic *quadratic);
    /* Sum up the products of the exponentials and the vectors over whole rows, or segments of them. It reads rows->cached. */
    void (*rows_products)(const ag_tile *tile, const ag_loss_rows *rows, const ag_loss_quadratic *quadratic, double *others,
                          double *at_max);
    /* Return the index of the first of n elements that equals `value`, or of the first NaN if that is NaN; n for none. */
    ptrdiff_t (*find)(const char *a, ptrdiff_t n, double value);
    /* Column kernels take one scale, tile->scale. They sum up one segment: AG_LOSS_EXP, or AG_LOSS_REST. */
    void (*columns_sum)(const ag_tile *tile, int is_rest, const double *max, double *sums, void *memory);
    void (*columns_write)(const ag_tile *tile, const ag_loss_rows *rows, void *memory);
    void (*strips)(const ag_tile *tile, double *max, double *sums); /* of at most strip_rows rows */
    /* Compute log(1 + x) for x >= 0, with errors of a few units in the last place. */
    void (*log1p)(const double *x, double *results, ptrdiff_t count);
    /* Add n numbers to AG_SUM_LANES sums, number i to sum i % AG_SUM_LANES. */
    void (*add_numbers)(ag_sum *sums, const double *x, ptrdiff_t n);
    /* Compute the losses of `count` rows with any number of targets, then, from what follows from them for the rows, the
     * gradients at the targets. */
    void (*target_losses)(const ag_target_rows *rows, ptrdiff_t count);
    void (*target_gradients)(const ag_target_rows *rows, ptrdiff_t count);
    /* Compute the losses of rows with one target, the factors of their exponentials, and the gradients at the targets, from
     * `rest` of loss.h, the maxima and the targets' logits: without the terms that label smoothing adds for every class.
     * `scale` is the factor of logits, `inverse` the reciprocal temperature that it is rounded from, `grad` the upstream
     * gradient, and `smoothing` the label smoothing. `logits` and `at_targets` may be the same. */
    void (*finish)(const double *rest, const double *max, const double *logits, double scale, double grad, double inverse,
                   double smoothing, double *losses, double *factors, double *at_targets, ptrdiff_t count);
    /* Compute the losses and the gradients of columns of at most strip_rows rows. */
    void (*single_target_strips)(const ag_tile *tile, const ag_single_target_columns *columns);
    /* Compute the losses and the gradients of columns of at most dense_strip_rows rows. */
    ptrdiff_t dense_strip_rows;
    void (*dense_strips)(const ag_tile *tile, const ag_dense_columns *columns);
    /* Replace n logits x by cap tanh(inner x), or by inner x if cap is 0. */
    void (*transform)(char *x, ptrdiff_t n, double inner, double cap);
    /* Multiply gradients with respect to n such logits z by 1 - (z / cap)^2. A gradient of 0 stays 0. */
    void (*apply_slopes)(const char *z, char *gradient, ptrdiff_t n, double cap);
    /* Replace n second derivatives h with respect to such logits z by h s^2 + gradient s bend z / cap, where s is
     * 1 - (z / cap)^2, and `bend` is the second derivative of the cap divided by s z / cap. With a vector v, h are products of
     * the Hessian and s v: they become h s + gradient s bend z / cap v. NULL: no vector. */
    void (*apply_curvature)(const char *z, const char *gradient, const char *vector, char *h, ptrdiff_t n, double cap,
                            double bend);
} ag_loss_kernels;

/* The kernels of one operator, dtype and variant. The column kernels are NULL if the operator has none. */
typedef struct {
    ptrdiff_t segment;    /* elements of a segment */
    ptrdiff_t strip_rows; /* AG_STRIP_ROWS: `columns` needs no `memory` for at most strip_rows rows of at least
                             AG_STRIP_COLUMNS columns, and may then get more than AG_MAX_COLUMNS columns */
    void (*rows)(const ag_tile *tile); /* computes whole rows */
    /* Kernels of a split of one row (tile->rows is not read): the maximum, the sum of one segment, results. */
    double (*split_max)(const ag_tile *tile);
    double (*split_sum)(const ag_tile *tile, double max);
    void (*split_write)(const ag_tile *tile, double max, double sum);
    /* Kernels of whole columns, and of splits of them. `memory` is AG_SCRATCH_BYTES bytes of the calling thread,
     * aligned to 8. */
    void (*columns)(const ag_tile *tile, void *memory);
    void (*columns_max)(const ag_tile *tile, double *max, void *memory);
    void (*columns_sum)(const ag_tile *tile, const double *max, double *sum, void *memory);
    void (*columns_write)(const ag_tile *tile, const double *max, const double *sum, void *memory);
} ag_row_kernels;

/* ---- sums over segments ------------------------------------------------------------------------------------------ */

static AG_UNUSED void ag_sums_add(double *sum, double *compensation, const double *x, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; i++) {
        ag_sum total = {sum[i], compensation[i]};
        ag_sum_add(&total, x[i]);
        sum[i] = total.sum;
        compensation[i] = total.compensation;
    }
}

static AG_UNUSED void ag_sums_total(double *sum, const double *compensation, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; i++) {
        const ag_sum total = {sum[i], compensation[i]};
        sum[i] = ag_sum_total(total);
    }
}

AG_INLINE int ag_tile_is_packed(const ag_tile *tile, ptrdiff_t width, int with_b)
{
    return tile->a_stride == width && (!with_b || tile->b_stride == width);
}

/* ---- every dtype for every instruction set ----------------------------------------------------------------------- */

#define AG_ISA_BODY "rowwise/foreach_dtype.h"
#include "../foreach_isa.h"

static AG_UNUSED const ag_row_kernels *ag_rowwise_kernels(ag_variant variant, ag_dtype dtype, ag_row_op op)
{
    return AG_BY_VARIANT(variant, ag_rowwise_kernels, dtype, op);
}

static AG_UNUSED const ag_loss_kernels *ag_rowwise_loss_kernels(ag_variant variant, ag_dtype dtype)
{
    return AG_BY_VARIANT(variant, ag_rowwise_loss_kernels, dtype);
}

#endif
