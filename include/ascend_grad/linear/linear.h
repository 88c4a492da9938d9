/* Blocked kernels of the fused linear cross-entropy operators: the manual.
 *
 * X (BT, H) input, W (V, H) weight, P (BT, V) the gradient with respect to the logits:
 *
 *   logits = X W^T        P = (exp(logits - max) / sum - one_hot) * grad        dX = P W        dW = P^T X
 *
 * A schedule (in Cython) iterates over blocks of the vocabulary, and inside of them chunks of rows (or the reverse), so that
 * no more of P than one block and one chunk is ever there; for these it packs the operands, has tiles of logits computed and
 * turned into tiles of P while they are in L1, and has both other products read P from there. All of it is described by an
 * ag_linear_block.
 *
 * Kinds of arithmetic
 *   kind  values in memory             products            accumulators   element (an element of packed data)
 *   f32   float32, float16, bfloat16   fused multiply-add  float32        float
 *   f64   float64                      fused multiply-add  float64        double
 *   dot   bfloat16                     pairs (VDPBF16PS)   float32        two bfloat16 that follow each other along the sum
 * float16 and, without the dot product, bfloat16 are widened while they are packed. A bfloat16 problem rounds P to
 * bfloat16 in either kind.
 *
 * Layouts. A tile is MR x NR, NR three vectors wide and a multiple of MR. u: number of packed elements along the sum.
 *   x_rows     [BT / MR][u of H][MR]      left of the logits; rows beyond BT are zero
 *   w_rows     [V / NR][u of H][NR]       right of the logits
 *   p          [V / NR][rows][NR values]  rows: BT rounded up to MR. Written by the logits' tiles; left of dX: a row is
 *                                         read along the sum, with constant distance between rows
 *   p_pairs    [V / NR][rows / 2][NR]     dot only: the same, elements made of two rows; left of dW. Other kinds read the
 *                                         columns of p, which lie side by side
 *   w_columns  [H / NR][u of V][<= NR]    right of dX; the last panel is one, two or three vectors wide
 *   x_columns  [H / NR][u of BT][<= NR]   right of dW
 *   logits     [V / NR][rows][NR]         only if they are read twice. Those of several chunks follow one another, and so do
 *                                         those of blocks, in the workspace or at the end of the memory of dW
 *
 * Few rows on one side (of X or of W; at most `resident` of the table of kernels, for logits alone of long rows AG_MAX_UNPACKED_ROWS):
 * nothing is packed. The rows of the other side are streamed: tiles of at most AG_TILE values are made from rows in place,
 * become P and are multiplied with the same rows, which are still in L2; the gradient of what is streamed is written once,
 * that of the other side has a partial sum for each task. Where vocabulary entries are few, a tile is vocabulary entries x rows, so that lanes are full
 * with any number of vocabulary entries. Where neither side has many rows, tasks are ranges of the features, and both gradients are
 * written once. Logits of bfloat16 take dot products where there are some;
 * the other products are f32: bfloat16 is widened while it is read.
 *
 * Files: pack.h and gemm.h have packing and products, epilogue.h what tiles of logits become, tasks.h the tasks made of tiles;
 * skinny_rows.h, skinny_logits.h, skinny_grads.h and skinny_epilogue.h the same for few rows; kernels.h the table for one kind
 * of arithmetic and instruction set, foreach_kind.h and dot.h all kinds.
 *
 * Order of sums. A sum runs in one accumulator for at most AG_CHAIN terms; chains are combined with compensation (Knuth's
 * two-sum), and so are the partial sums that blocks and chunks add to a result, where memory for the compensation is
 * given: a plan gives it wherever there are more than 64 of them. All of that depends on shapes alone, so that results do not
 * depend on the number of threads.
 *
 * Floating-point mode. Kernels compute in the mode that they find; who calls them enters the one of fpenv.h.
 *
 * Why not a BLAS: its thread pool fights with this one, and P would go to memory and back between the products.
 * Why not pack P: both products can read the layout in which the first one writes it.
 */
#ifndef ASCEND_GRAD_LINEAR_H
#define ASCEND_GRAD_LINEAR_H

#include <math.h>

#include "../base.h"
#include "../cpu.h"
#include "../fpenv.h"
#include "../simd.h"
#include "../strided.h"
#include "../sums.h"

enum {
    AG_CHAIN = 1280, /* terms of a sum in one accumulator */
    AG_PREFETCH_DISTANCE = 8,    /* elements along the sum that operands are prefetched ahead of their use */
    AG_FETCH = 256,  /* values of a row that are gathered at once */
    AG_MAX_UNPACKED_ROWS = 64,        /* most rows that may be few, for the products that pack nothing */
    AG_MAX_STREAMED_STEP = 384,       /* most rows of the other matrix that they take at a time, */
    AG_TILE = AG_MAX_UNPACKED_ROWS * 48, /* and most products of both */
    AG_TERMS = 256           /* most rows whose sum is written as one row */
};

/* A matrix as the caller has it: any strides (in bytes), either byte order. */
typedef struct {
    char *data;
    ptrdiff_t row_stride, step;
    ag_dtype dtype;
    int swapped;
} ag_matrix;

/* Rows of a matrix: those that are listed, or start, start + 1, ... */
typedef struct {
    ag_matrix matrix;
    const int64_t *numbers; /* or NULL */
    int64_t start;
    ptrdiff_t count;
} ag_rows;

/* A gradient while it is summed over chunks or blocks: rows of accumulators, of unit stride. Strides are in bytes. */
typedef struct {
    char *data;
    ptrdiff_t row_stride;
    char *compensation; /* rounding errors of the additions (Neumaier), or NULL; row 0 is the chunk's, or the block's */
    ptrdiff_t compensation_stride;
    int add;            /* whether there is a sum to add to */
    int last;           /* whether nothing is added afterwards: the compensation is applied */
} ag_sums;

/* The source and the result of tiles of logits. */
typedef enum { AG_FROM_PRODUCT, AG_FROM_LOGITS, AG_FROM_SOFTMAX } ag_linear_source;
typedef enum { AG_TO_GRADIENT, AG_TO_MAX_SUM } ag_linear_result;

/* Rows of X that are computed together. acc_t is the kind's accumulator. */
typedef struct {
    ptrdiff_t rows;
    const int64_t *row_numbers;   /* (rows,) their numbers in the caller's arrays */
    const int64_t *target;        /* (rows,) rows of W, -1 for none */
    const void *max, *sum, *grad; /* acc_t (rows,), for AG_TO_GRADIENT */
} ag_chunk;

/* Rows of W that are computed together. */
typedef struct {
    ptrdiff_t size;
    int64_t start; /* the first of them */
} ag_vocab_block;

/* How P is made of logits. */
typedef struct {
    ag_matrix softmax;     /* for AG_FROM_SOFTMAX: (BT, V) */
    int round_to_bfloat16; /* whether P is rounded */
    double filter_eps;     /* tiles of P whose elements are all smaller are skipped; 0: none */
} ag_gradient_rule;

/* The results of AG_TO_MAX_SUM. */
typedef struct {
    void *max;        /* acc_t (BT,) */
    ag_sum *sum;      /* (BT,) */
    void *predicted;  /* acc_t (BT,): the target's logit */
    ag_matrix logits; /* (BT, V); data is NULL if they are not requested */
} ag_statistics;

/* Packed operands and tiles of one chunk and one block. */
typedef struct {
    void *x_rows, *w_rows, *x_columns, *w_columns, *p, *p_pairs, *logits;
    uint8_t *skipped;            /* [V / NR][rows / MR] tiles of P that are skipped */
    int caches_logits;           /* whether AG_TO_MAX_SUM stores them in `logits` */
    void *panel_max, *panel_sum; /* acc_t [V / NR][rows], from AG_TO_MAX_SUM for merge_max_sum */
} ag_packed;

/* One chunk of rows, one block of the vocabulary, and all that tasks read and write for them. */
typedef struct {
    ag_chunk chunk;
    ag_vocab_block vocab;
    ptrdiff_t hidden;
    ag_gradient_rule gradient;
    ag_statistics statistics;
    ag_packed packed;
    ptrdiff_t tile_pitch; /* distance of rows of a tile of the products that pack nothing: a multiple of any vector */
    ag_sums input_grad;   /* (BT, H): row i is row_numbers[i] */
    ag_sums weight_grad;  /* (rows of the block, H) */
} ag_linear_block;

typedef struct {
    int mr, nr;
    int vector; /* elements of a vector */
    int pair;   /* terms of a elem_t */
    int element_size; /* bytes of a elem_t */
    int acc_size; /* bytes of an accumulator */
    int max_unpacked_rows; /* rows on one side up to which it pays not to pack */
    /* tile (MR rows) or panel (NR rows) of x_rows or w_rows, one panel (n columns) of x_columns or w_columns */
    void (*pack_tile)(void *to, const ag_matrix *from, const int64_t *rows, int64_t start, ptrdiff_t count,
                      ptrdiff_t first, ptrdiff_t n);
    void (*pack_panel)(void *to, const ag_matrix *from, const int64_t *rows, int64_t start, ptrdiff_t count,
                       ptrdiff_t first, ptrdiff_t n);
    void (*pack_columns)(void *to, const ag_matrix *from, const int64_t *rows, int64_t start, ptrdiff_t count,
                         ptrdiff_t first, ptrdiff_t n);
    /* tiles [tile, tile_end) x [panel, panel_end) of the logits or of P */
    void (*tiles)(const ag_linear_block *block, ag_linear_source source, ag_linear_result result, ptrdiff_t panel,
                  ptrdiff_t panel_end, ptrdiff_t tile, ptrdiff_t tile_end);
    /* merge the panels of the block into the statistics of rows [row, row_end) */
    void (*merge_max_sum)(const ag_linear_block *block, ptrdiff_t row, ptrdiff_t row_end);
    /* tiles [tile, tile_end) of rows (of rows of W) x panels [panel, panel_end) of H */
    void (*input_grad)(const ag_linear_block *block, ptrdiff_t panel, ptrdiff_t panel_end, ptrdiff_t tile,
                       ptrdiff_t tile_end);
    void (*weight_grad)(const ag_linear_block *block, ptrdiff_t panel, ptrdiff_t panel_end, ptrdiff_t tile,
                        ptrdiff_t tile_end);
    /* to[c] = exp(logits[c] - max) / sum, accumulators, in place allowed */
    void (*probabilities)(void *to, const void *logits, double max, double sum, ptrdiff_t n);
    /* Few rows on one side: see skinny_rows.h and its siblings. */
    void (*dot_products)(const ag_rows *resident, const ag_rows *streamed, ptrdiff_t first, ptrdiff_t n, void *p,
                         ptrdiff_t pitch);
    void (*sum_rows)(ptrdiff_t resident, const ag_rows *streamed, ptrdiff_t first, ptrdiff_t n, const void *p,
                     ptrdiff_t pitch, void *sums, ptrdiff_t sums_pitch, int add);
    void (*combine)(const void *from, ptrdiff_t count, ptrdiff_t stride, ptrdiff_t n, void *to);
    void (*write_rows)(ag_variant variant, const ag_rows *resident, const ag_rows *to, ptrdiff_t first, ptrdiff_t n,
                       const void *p, ptrdiff_t r_stride, ptrdiff_t s_stride, int nontemporal);
    void (*tile_to_gradient)(const ag_linear_block *block, void *tile);
    void (*tile_to_max_sum)(const ag_linear_block *block, const void *tile, void *max, ag_sum *sum);
    void (*columns_to_gradient)(const ag_linear_block *block, void *tile);
    void (*columns_to_max_sum)(const ag_linear_block *block, const void *tile, void *max, double *sum);
} ag_linear_kernels;

/* ---- instantiation: every kind of arithmetic for every instruction set --------------------------------------------------- */

#define AG_ISA_BODY "linear/foreach_kind.h"
#define AG_BF16_DOT_BODY "linear/dot.h"
#include "../foreach_isa.h"

/* The kernels for inputs of this dtype. */
static AG_UNUSED const ag_linear_kernels *ag_linear_kernels_of(ag_variant variant, ag_dtype dtype)
{
#if defined(AG_X86_64) && AG_COMPILES(16)
    if (variant == AG_VARIANT_AVX512_BF16 && dtype == AG_BFLOAT16) return ag_linear_dot_kernels_avx512();
#endif
    return AG_BY_VARIANT(variant, ag_linear_kernels, dtype);
}

#endif
