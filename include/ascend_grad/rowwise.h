/* Row-wise softmax gradients and their forward twins: the kernels behind pyx/_rowwise.pyx.
 *
 * What they compute (g grad_output, y output, x input; sums and maxima along the reduced dimension)
 *
 *   softmax backward                 (g - sum(g*y)) * y
 *   log-softmax backward             g - sum(g) * exp(y)
 *   scaled masked softmax backward   0 where mask, else (g - sum(g*y)) * y * scale
 *   softmax                          exp(x - max) / sum(exp(x - max))
 *   log-softmax                      (x - max) - log(sum(exp(x - max)))
 *   scaled masked softmax            the softmax of (-10000 where mask, else x * scale)
 *
 * Types
 *
 *   in memory                    arithmetic   sums      rounded
 *   float32                      float32      float64   once, at the end
 *   float16, bfloat16            float32      float64   once, at the end, to nearest even
 *   float64                      float64      float64 (compensated over segments)
 *
 * Layouts. Rows: unit stride along the reduced dimension. Columns: unit stride across it; a tile is `n` rows by up to
 * AG_MAX_COLUMNS columns. Addresses need no alignment. Everything else is gathered into tiles first (strided.h).
 *
 * The order of a row sum. It is part of the result's definition: the same for rows and columns, for any strides,
 * neighbours, chunking and number of threads. With VL lanes of the compute type, term k of a row of n belongs to
 * segment k / (128 VL); within it, to block k / (16 VL), and in the block to lane k % VL, at place (k / VL) % 16.
 *
 *   - the at most 16 terms of a lane in a block are added in order, in the compute type;
 *   - the lane adds its blocks in order, in float64;
 *   - the lanes of a segment are added by halves: j with j + VL/2, then j + VL/4, ...;
 *   - segments are added in order with a compensated sum (Neumaier 1974).
 *
 * So no float32 accumulator takes more than 16 terms, and the error of a sum does not grow with n. Products are rounded
 * before they are added (no fused multiply-add in sums): narrow rows keep them in a buffer, and must give the same bits.
 *
 * Why not one long sum per lane: at n = 2**20 its error is a hundred times larger. Why not fold every term into float64:
 * the conversions would double the arithmetic. Why a softmax keeps the exponentials of a row until its results are written
 * where they take up to 16 KiB, and computes those of longer rows again: they hardly leave the first cache, and beyond it a
 * second computation costs less than a way through memory.
 */
#ifndef ASCEND_GRAD_ROWWISE_H
#define ASCEND_GRAD_ROWWISE_H

#include <math.h>

#include "base.h"
#include "cpu.h"
#include "simd.h"

typedef enum {
    AG_SOFTMAX_BACKWARD,
    AG_LOG_SOFTMAX_BACKWARD,
    AG_SCALED_MASKED_SOFTMAX_BACKWARD,
    AG_SOFTMAX,
    AG_LOG_SOFTMAX,
    AG_SCALED_MASKED_SOFTMAX,
    AG_OP_COUNT
} ag_row_op;

/* Elements of a segment, for VL lanes of the compute type. */
#define AG_SEGMENT(VL) (128 * (VL))
/* Rows up to which the sums of columns stay in registers: what the other way keeps of each, the lanes of its sums, would be
 * more than its elements. Never more than a block. */
#define AG_STRIP_ROWS(VL) (16 * (VL) < 64 ? 16 * (VL) : 64)

enum {
    AG_MAX_COLUMNS = 1024,   /* columns of a tile at most */
    AG_PACKED_COLUMNS = 128, /* columns up to which packed rows are taken together */
    AG_STRIP_COLUMNS = 64,   /* packed columns from which on there is no use in that where rows are few */
    AG_MAX_LANES = 16,
    AG_MAX_AHEAD = 128 << 10, /* bytes of rows for which the next ones are asked for: two longer ones fit no second cache */
    AG_SCRATCH_VALUES = AG_MAX_LANES * AG_PACKED_COLUMNS + AG_MAX_COLUMNS + AG_MAX_LANES,
    AG_SCRATCH_BYTES = 12 * AG_MAX_LANES * AG_MAX_COLUMNS + 8 * (2 * AG_MAX_COLUMNS + 3 * AG_SCRATCH_VALUES)
};

/* A piece of a problem: for row kernels `rows` rows of n elements, for column kernels n rows of `rows` columns, the
 * strides leading from one row in memory to the next. No pointer is NULL: where an operator has no second input or no
 * mask, any address and stride 0 do. */
typedef struct {
    const char *a, *b;   /* grad_output and output, or input */
    const uint8_t *mask; /* masked where not zero */
    char *out;
    ptrdiff_t a_stride, b_stride, mask_stride, out_stride; /* bytes */
    ptrdiff_t rows, n;
    double scale;
    int stream; /* results bypass the cache */
    int fits;   /* columns: inputs stay in the second cache from the sum to the result */
} ag_tile;

/* Where the inputs and results of a row of the next group lie; NULL where they are not asked for. */
typedef struct {
    const char *a, *b, *out;
} ag_ahead;

/* The kernels of one operator, dtype and variant. The masked operators have no column kernels. */
typedef struct {
    ptrdiff_t segment;
    ptrdiff_t strip_rows; /* rows up to which at least AG_STRIP_COLUMNS columns, of any number, are taken without `memory` */
    void (*rows)(const ag_tile *tile); /* whole rows */
    /* Pieces of one row (tile->rows is not looked at): its maximum, the sum of one segment, results. */
    double (*piece_max)(const ag_tile *tile);
    double (*piece_sum)(const ag_tile *tile, double max);
    void (*piece_write)(const ag_tile *tile, double max, double sum);
    /* Whole columns, and pieces of them; `memory` is AG_SCRATCH_BYTES of the calling thread, aligned to 8. */
    void (*columns)(const ag_tile *tile, void *memory);
    void (*columns_max)(const ag_tile *tile, double *max, void *memory);
    void (*columns_sum)(const ag_tile *tile, const double *max, double *sum, void *memory);
    void (*columns_write)(const ag_tile *tile, const double *max, const double *sum, void *memory);
} ag_row_kernels;

/* ---- sums over segments --------------------------------------------------------------------------------------------- */

typedef struct {
    double sum, error;
} ag_sum;

AG_INLINE void ag_sum_add(ag_sum *total, double x)
{
    const double sum = total->sum + x;
    total->error += fabs(total->sum) >= fabs(x) ? (total->sum - sum) + x : (x - sum) + total->sum;
    total->sum = sum;
}

/* Which of several NaN a sum passes on depends on the instructions, and must not depend on how rows are taken together. */
AG_INLINE double ag_one_nan(double sum) { return sum == sum ? sum : (double)NAN; }

/* A sum that overflowed stays as it is. Adding +0 makes -0 positive, whichever way it arose. */
AG_INLINE double ag_sum_total(ag_sum total)
{
    return ag_one_nan((isfinite(total.sum) ? total.sum + total.error : total.sum) + 0.0);
}

static AG_UNUSED void ag_sums_add(double *sum, double *error, const double *x, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; i++) {
        ag_sum total = {sum[i], error[i]};
        ag_sum_add(&total, x[i]);
        sum[i] = total.sum;
        error[i] = total.error;
    }
}

static AG_UNUSED void ag_sums_total(double *sum, const double *error, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; i++) {
        const ag_sum total = {sum[i], error[i]};
        sum[i] = ag_sum_total(total);
    }
}

AG_INLINE int ag_tile_is_packed(const ag_tile *tile, ptrdiff_t width, int with_b)
{
    return tile->a_stride == width && (!with_b || tile->b_stride == width);
}

/* ---- every dtype for every instruction set ---------------------------------------------------------------------------- */

#define AG_ISA_BODY "rowwise_dtypes.h"
#include "foreach_isa.h"

static AG_UNUSED const ag_row_kernels *ag_rowwise_kernels(ag_variant variant, ag_dtype dtype, ag_row_op op)
{
    return AG_BY_VARIANT(variant, ag_rowwise_kernels, dtype, op);
}

#endif
