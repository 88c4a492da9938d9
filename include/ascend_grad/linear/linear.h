/* Blocked kernels of the fused linear cross-entropy operators: the manual.
 *
 * X (BT, H) input, W (V, H) weight, P (BT, V) the gradient with respect to the logits:
 *
 *   logits = X W^T        P = (exp(logits - max) / sum - one_hot) * grad        dX = P W        dW = P^T X
 *
 * A sweep (in Cython, pyx/linear) iterates over chunks of the rows and blocks of the vocabulary, so that memory holds P of
 * one chunk and one block at a time. For each pair it packs the operands. Tiles of logits are computed and turned into tiles
 * of P while they are in L1, and both other products read P. An ag_linear_block describes the pair.
 *
 * Kinds of arithmetic
 *   kind  values in memory             products            accumulators   element (of packed data)
 *   f32   float32, float16, bfloat16   fused multiply-add  float32        float
 *   f64   float64                      fused multiply-add  float64        double
 *   dot   bfloat16                     pairs (VDPBF16PS)   float32        two bfloat16 that follow each other along the sum
 *   amx   bfloat16                     AMX (TDPBF16PS)     float32        the same; see gemm_amx.h
 *   bfmmla bfloat16                    BFMMLA              float32        the same; see gemm_bfmmla.h
 * Packing widens float16, and bfloat16 if the CPU lacks such products. A bfloat16 problem rounds P to bfloat16 in either
 * kind.
 *
 * Layouts. A tile is MR x NR. NR is three vectors wide (two on matrix units) and a multiple of MR; u is the number of packed
 * elements along the sum.
 *   left       rows with any stride       left operand of the logits: rows of X where they lie. Rows that are strided, swapped or
 *                                         widened are gathered for each product, or copied once to [BT][u of H]
 *   right      [V / NR][u of H][NR]       right operand of the logits: rows of W
 *   p          [V / NR][rows][NR values]  left operand of dX, written by the tiles of logits. rows: BT rounded up to MR. The
 *                                         product reads a row along the sum; rows have a constant distance
 *   p_pairs    [V / NR][rows / 2][NR]     left operand of dW, dot only: an element holds the same column of two rows. Other
 *                                         kinds read the columns of p, which lie side by side
 *   w_columns  [H / NR][u of V][<= NR]    right operand of dX; the last panel is one, two or three vectors wide
 *   x_columns  [H / NR][u of BT][<= NR]   right operand of dW
 *   logits     [V / NR][rows][NR]         cached logits, if they are read twice. Chunks follow one another, then blocks, in
 *                                         the workspace or at the end of the memory of dW. A bfloat16 loss without options caches
 *                                         exponentials relative to the maximum of row and panel, times 2**15, in float16. A
 *                                         tile of them is followed by MR maxima
 *
 * Logits of few rows. If rows are few, W is the left operand of the logits, and X is packed as the right one
 * (weight_is_left); on matrix units only if rows are long. NR rows and NR vocabulary entries are computed as [entries][rows]
 * and transposed to NR / MR tiles. The order of a sum is the same in either case. The last panel of the logits is one, two or
 * three vectors wide.
 *
 * Unpacked products. Nothing is packed if X or W has at most `max_unpacked_rows` rows, for statistics alone at most
 * `max_unpacked_statistics`; twice as many if packing widens. More vocabulary entries are not packed if they have few features,
 * in statistics also if they have up to 200.
 * These rows are called resident, the rows of the other matrix streamed. A tile of at most AG_TILE logits is computed from rows
 * in place and becomes P. It is multiplied with the same streamed rows, which are still in L2. The gradient of the streamed
 * matrix is written once. The gradient of the resident matrix has a partial sum for each task.
 * If vocabulary entries are few, a tile is entries x rows, so that lanes are full for any number of entries. A loss whose P is
 * (softmax - one_hot) * grad then makes statistics and P of the same exponentials. Each lane adds up its own row, in the order of
 * the entries, so that these sums do not depend on other rows.
 * If both sides are short, tasks are ranges of the features, and both gradients are written once. Products of bfloat16 are dot
 * products of pairs if the CPU has them (amx: only the logits). A pair is two features in logits, and two rows in gradients.
 * Otherwise, and if ranges of features are short, bfloat16 is widened while it is read.
 *
 * Matrix units have tiles of MR x MR (amx: 32 x 32, bfmmla: 8 x 8) and take MR / 2 elements along a sum at a time, so that
 * sums are filled up with zeros. Their left operands hold G elements of a row side by side: 16 in amx, 2 in bfmmla.
 *   left_tiles [BT / MR][u of H / G][MR][G], unless AMX reads a run of rows in place
 *   p_pairs    [V / MR][rows / 2 / G][MR of V][G]
 * In bfmmla, right operands are like left ones, and rows of P are split after 4 values:
 *   right      [V / 8][u of H / 2][8][2]
 *   p          [V / 8][rows / 8][2][8 rows][4 values]
 *   w_columns  [H / 8][u of V / 2][4 or 8][2]
 *   x_columns  [H / 8][u of BT / 2][4 or 8][2]
 *
 * Files: pack.h has packing, gemm.h products, gemm_unit.h products on matrix units, with gemm_amx.h and gemm_bfmmla.h for
 * the instructions, compensation.h compensated sums, epilogue.h and max_sum.h the conversion of logits, tasks.h the tasks of the packed
 * sweep. logits.h has what all epilogues share, row by row: the transformation of products to logits, further statistics,
 * and the gradient of the general loss, whose formulas are in loss_row.h. top_k.h and skinny_top_k.h have the largest logits
 * of each row. skinny_rows.h, skinny_logits.h, skinny_grads.h, skinny_pairs.h, skinny_epilogue.h and skinny_loss.h have the unpacked
 * products.
 * sparse.h and sparse_rows.h have the products with sparse rows.
 * kernels.h makes the table for one kind of arithmetic and one instruction set. foreach_kind.h includes it for float32 and
 * float64; dot.h, amx.h and bfmmla.h include it by pairs.h, for pairs of bfloat16.
 *
 * Order of sums. A sum runs in one accumulator for at most AG_CHAIN terms, or AG_P_CHAIN if one operand is P and no pairs are
 * used. Chains are combined with compensation (Knuth's two-sum). Blocks and chunks add partial sums to a result, with
 * compensation if memory for it is given. A plan gives this memory if there are more than 64 partial sums. The order depends
 * on shapes and on the bytes of the workspace, so results do not depend on the number of threads.
 *
 * With sparse rows, the nonzeros of a row are added in their order, those with even and those with odd places in a sum each.
 * Both sums are added, and then the bias. The gradient of the weight adds the nonzeros of a feature row by row, in one sum.
 *
 * Statistics of a row. A packed logit is the sum of its terms in the order of the features: in chains of equal length, at most
 * AG_CHAIN (AG_AMX_CHAIN) terms, that are combined with compensation. Maximum and sum of exponentials of a panel are computed
 * together: vectors are added, then the halves of the sum, again and again. Panels are merged one after another, in the order
 * of the vocabulary: an earlier sum is multiplied by exp(old maximum - new maximum), and the panel's sum by exp(its maximum -
 * new maximum). So the bits of packed statistics depend on the row and the weight alone, not on chunks, blocks and tasks.
 * Unpacked products of many features add up lanes, and merge longer steps of the vocabulary for each task. In the packed
 * order, products of 1 to 32 rows took 1.2 to 9 times as long, as W has to be transposed. Measured.
 *
 * Floating-point mode. Kernels compute in the mode that they find; the caller enters the mode of fpenv.h.
 *
 * No BLAS is used, since its thread pool would compete with the team of the call, and P would go to memory between the
 * products. P is not packed, since both products can read the layout in which the tiles of logits write it.
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
#include "loss_row.h"

enum {
    AG_CHAIN = 1280,                     /* most terms of a sum in one accumulator */
    AG_P_CHAIN = 256,                    /* the same with P, whose term of the target may exceed all others */
    AG_AMX_CHAIN = 8192,                 /* the same on AMX, which adds 32 terms at a time: see gemm_amx.h */
    AG_PREFETCH_DISTANCE = 8,            /* packed elements between the prefetch of an operand and its use */
    AG_FETCH = 256,                      /* most values of a row that are gathered at a time */
    AG_MAX_UNPACKED_ROWS = 64,           /* most resident rows of the unpacked products that stream the other matrix */
    AG_MAX_STREAMED_STEP = 384,          /* most streamed rows that such a product takes at a time */
    AG_TILE = AG_MAX_UNPACKED_ROWS * 48, /* most elements of its tile of logits */
    AG_TERMS = 256                       /* most rows of either side if tasks are ranges of the features */
};

/* Scale of cached exponentials, which are at most 1. */
#define AG_EXP_SCALE 0x1p15f

/* Matrix units: values of AG_UNIT, which is 0 for kinds of vector arithmetic. */
#define AG_AMX 1
#define AG_BFMMLA 2

/* A matrix of the caller, with any strides (in bytes) and either byte order. */
typedef struct {
    char *data;
    ptrdiff_t row_stride, step;
    ag_dtype dtype;
    int swapped;
} ag_matrix;

/* Rows of a matrix: the listed ones, or start, start + 1, ... */
typedef struct {
    ag_matrix matrix;
    const int64_t *numbers; /* numbers of the rows; NULL: they begin at start */
    int64_t start;
    ptrdiff_t count;
} ag_rows;

/* The sums of a gradient over chunks or blocks: rows of accumulators with unit stride. Strides are in bytes. */
typedef struct {
    char *data;
    ptrdiff_t row_stride;
    char *compensation; /* rounding errors of the additions, or NULL; row 0 is the first of the chunk or block */
    ptrdiff_t compensation_stride;
    int add;            /* whether the sums hold earlier terms */
    int last;           /* whether these terms are the last: the compensation is then applied */
    ag_dtype rounded_to; /* AG_FLOAT16 or AG_BFLOAT16: these terms are all, and rows of this dtype receive them; otherwise 0 */
} ag_sums;

/* The source of a tile of logits, and the result of its epilogue. */
typedef enum { AG_FROM_PRODUCT, AG_FROM_LOGITS, AG_FROM_SOFTMAX } ag_linear_source;
typedef enum { AG_TO_GRADIENT, AG_TO_MAX_SUM, AG_TO_TOP_K } ag_linear_result;

/* Rows of X that are computed together. acc_t is the accumulator of the kind. */
typedef struct {
    ptrdiff_t rows;
    const int64_t *row_numbers;   /* (rows,) numbers of the rows in the caller's arrays */
    const int64_t *target;        /* (rows,) the target's row of W, -1 for none */
    const void *max, *sum, *grad; /* acc_t (rows,), for AG_TO_GRADIENT */
} ag_chunk;

/* Rows of W that are computed together. */
typedef struct {
    ptrdiff_t size;
    int64_t start; /* number of the first row */
} ag_vocab_block;

/* The logits z = softcap * tanh(scale * u / softcap) / temperature of the products u = x W^T + bias. Without a softcap,
 * z = scale * u / temperature. The temperatures are in the rows of the loss. Without these rows the temperature is 1. */
typedef struct {
    int is_needed;    /* otherwise z = x W^T */
    const void *bias; /* acc_t (V,) and a vector of padding, or NULL */
    double scale;
    double softcap;   /* 0: none */
} ag_logit_transform;

/* Parameters of the conversion of logits to P. */
typedef struct {
    ag_matrix softmax;     /* (BT, V) probabilities, or logits if is_general, for AG_FROM_SOFTMAX */
    int round_to_bfloat16; /* whether P is rounded */
    double filter_eps;     /* a tile of P is skipped if all of its magnitudes are smaller; 0: no tile is skipped */
    const void *complement; /* acc_t (BT,), by row numbers: 1 - p of nearly certain targets, otherwise -1; NULL: not known */
    int is_general;        /* whether P is made of the coefficients of ag_loss_row */
    const void *class_weight; /* acc_t (V,) and a vector of padding: see ag_scaled_weight; NULL: all are 1 */
    ag_matrix prob;           /* (BT, V) probabilities q of all classes, of any dtype; data is NULL without dense targets. */
    double kept, share;       /* With them, (kept q + share) times the class weight stands for the class weight. */
} ag_gradient_rule;

/* The results of AG_TO_MAX_SUM. */
typedef struct {
    void *max;        /* acc_t (BT,) */
    ag_sum *sum;      /* (BT,) */
    double *rest;     /* (BT,): the sum without one element that equals the maximum, -1 for no elements; NULL: not requested */
    void *predicted;  /* acc_t (BT,): the target's logit */
    ag_matrix logits; /* (BT, V); data is NULL if they are not requested */
    int with_more;    /* whether argmax of ag_more is computed, and merged into the rows of the loss */
    int with_moments; /* whether the other fields of ag_more are computed and merged as well */
    double *target_logits; /* (BT, targets of a row): the logits of all targets; NULL: not requested */
} ag_statistics;

/* The results of AG_TO_TOP_K: a list of the k largest logits of each row, and a sum. Lists begin with k times -inf. */
typedef struct {
    ptrdiff_t k;
    double scale;     /* reciprocal of the temperature */
    const double *scales; /* (BT,): one for each row; NULL: all are `scale` */
    void *values;     /* acc_t (BT, k): logits, from the largest down */
    int64_t *indices; /* (BT, k): their vocabulary entries */
    ag_sum *rest;     /* (BT,): sum of exp((logit - largest) * scale), without one logit that is the largest */
    void *floors;     /* acc_t (BT,): k logits of the row are at least as large; threads share them. NULL: none */
} ag_top_k;

enum {
    AG_SPARSE_OUTSIDE = 1,  /* some feature is not in [0, H) */
    AG_SPARSE_UNSORTED = 2, /* some feature is smaller than the one before it in its row */
};

/* Rows of X in the format CSR, whose structure was checked. A feature may occur several times in a row. */
typedef struct {
    const void *values;    /* (nonzeros,) accumulators */
    const void *indices;   /* (nonzeros,) their features, int32 or int64 */
    int is_wide;           /* the features are int64 */
    const int64_t *starts; /* (BT + 1,) the first nonzero of each row, and the number of nonzeros */
    int64_t features;      /* H */
    int is_unsorted;       /* the features of some row do not increase */
} ag_sparse_rows;

/* Rows [row, row_end) of X, and what a product with their nonzeros reads and writes. Arrays end with a vector of padding. */
typedef struct {
    ptrdiff_t classes, pitch;
    ptrdiff_t row, row_end;
    ptrdiff_t first_row;           /* the row of X that is the first of P */
    void *p;                       /* (rows, classes) logits, or P */
    const void *weight;            /* (H, pitch) the weight, transposed */
    const void *bias;              /* (pitch,) or NULL */
    void *sums;                    /* (H, pitch) the gradient of the weight, transposed */
    int64_t feature, feature_end;  /* the features that are added to */
} ag_sparse_task;

/* The lists of tasks, which are merged in the order of the vocabulary while later tasks run. */
typedef struct {
    ptrdiff_t tasks;
    ptrdiff_t merged;     /* number of the first tasks whose lists are merged; the thread that holds the order changes it */
    int is_held;          /* whether a thread merges */
    uint8_t *is_complete; /* (tasks,) */
} ag_list_order;

/* Return whether the calling thread may merge lists, which it then has to release. */
static AG_UNUSED int ag_list_order_try(ag_list_order *order) { return !__atomic_exchange_n(&order->is_held, 1, __ATOMIC_ACQUIRE); }

static AG_UNUSED void ag_list_order_release(ag_list_order *order) { __atomic_store_n(&order->is_held, 0, __ATOMIC_RELEASE); }

static AG_UNUSED void ag_list_order_complete(ag_list_order *order, ptrdiff_t task)
{
    __atomic_store_n(&order->is_complete[task], 1, __ATOMIC_RELEASE);
}

/* Return whether the next list to merge is complete. */
static AG_UNUSED int ag_list_order_has_next(const ag_list_order *order)
{
    return order->merged < order->tasks && __atomic_load_n(&order->is_complete[order->merged], __ATOMIC_ACQUIRE);
}

/* Statistics of some logits of a row, beside their maximum and sum: see ag_loss_row. */
typedef struct {
    double moment, deficit;
    double weight; /* sum of the class weights */
    int64_t argmax;
} ag_more;

/* Packed operands and tiles of one chunk and one block. */
typedef struct {
    int weight_is_left;     /* whether W is the left operand of the logits, and X the right one */
    ag_rows left;           /* rows of the left operand, read in place or gathered */
    void *left_tiles;       /* tiles of the left operand, on matrix units that cannot read its rows in place; otherwise NULL */
    void *right;            /* panels of the right operand */
    void *x_columns, *w_columns, *p, *p_pairs, *logits;
    uint8_t *skipped;            /* [V / NR][rows / MR] tiles of P that are skipped */
    int caches_logits;           /* whether AG_TO_MAX_SUM stores its tiles in `logits` */
    int caches_exp;              /* whether `logits` holds exponentials in float16 instead */
    void *panel_max, *panel_sum; /* acc_t [V / NR][rows]: AG_TO_MAX_SUM and AG_TO_TOP_K write them, merges read them */
    void *panel_rest;            /* the same of `rest` */
    ag_more *panel_more;         /* [V / NR][rows] */
} ag_packed;

/* One chunk of rows, one block of the vocabulary, and the memory that their tasks read and write. */
typedef struct {
    ag_chunk chunk;
    ag_vocab_block vocab;
    ptrdiff_t hidden;
    ag_logit_transform transform;
    ag_loss_row *rows;       /* (BT,), by row numbers; NULL if nothing below needs them */
    ag_loss_targets targets; /* of all rows, if rows is not NULL: entries and weights (BT, count) */
    ag_gradient_rule gradient;
    ag_statistics statistics;
    ag_top_k top_k;
    ag_packed packed;
    ptrdiff_t tile_pitch; /* accumulators from row to row of a tile of an unpacked product; a multiple of every VL */
    ag_sums input_grad;   /* (BT, H), by row numbers */
    ag_sums weight_grad;  /* (rows of the block, H) */
} ag_linear_block;

typedef struct {
    int mr, nr;
    int vector; /* elements of a vector */
    int pair;   /* terms of a packed element */
    int granule; /* packed elements along a sum are a multiple of this number */
    int reads_runs; /* a matrix unit reads rows of the left operand in place, if they follow one another and are at least mr */
    int column_group; /* packed elements of a column that pack_columns stores side by side */
    int element_size; /* bytes of a packed element */
    int acc_size; /* bytes of an accumulator */
    int caches_exp; /* whether losses without options may cache exponentials, because conversions to float16 are instructions */
    double speed; /* floating-point operations of products in the time of one of float32, approximately */
    int max_unpacked_rows; /* most resident rows for which unpacked gradients are faster than packed ones */
    int max_unpacked_statistics; /* the same for only statistics; both are at most half of AG_MAX_UNPACKED_ROWS */
    /* Pack a tile (MR rows) of the left operand of the logits, a panel (NR rows) of the right one, or a panel (n columns) of
     * x_columns or w_columns. */
    void (*pack_left)(void *to, ptrdiff_t pitch, const ag_matrix *from, const int64_t *rows, int64_t start,
                      ptrdiff_t count, ptrdiff_t first, ptrdiff_t n);
    void (*pack_right)(void *to, ptrdiff_t pitch, const ag_matrix *from, const int64_t *rows, int64_t start,
                       ptrdiff_t count, ptrdiff_t first, ptrdiff_t n);
    void (*pack_columns)(void *to, const ag_matrix *from, const int64_t *rows, int64_t start, ptrdiff_t count,
                         ptrdiff_t first, ptrdiff_t n);
    /* Compute tiles [tile, tile_end) of panels [panel, panel_end) of the logits or of P. */
    void (*tiles)(const ag_linear_block *block, ag_linear_source source, ag_linear_result result, ptrdiff_t panel,
                  ptrdiff_t panel_end, ptrdiff_t tile, ptrdiff_t tile_end);
    /* Merge the panels' statistics into the statistics of rows [row, row_end). */
    void (*merge_max_sum)(const ag_linear_block *block, ptrdiff_t row, ptrdiff_t row_end);
    /* Merge the panels' statistics and logits into the lists of rows [row, row_end). */
    void (*merge_top_k)(const ag_linear_block *block, ptrdiff_t row, ptrdiff_t row_end);
    /* Add tiles [tile, tile_end) of rows of X (of W), panels [panel, panel_end) of H, to the gradient. */
    void (*input_grad)(const ag_linear_block *block, ptrdiff_t panel, ptrdiff_t panel_end, ptrdiff_t tile,
                       ptrdiff_t tile_end);
    void (*weight_grad)(const ag_linear_block *block, ptrdiff_t panel, ptrdiff_t panel_end, ptrdiff_t tile,
                        ptrdiff_t tile_end);
    /* Add the columns of P of panels [panel, panel_end) of the block to `sums`, one for each vocabulary entry of the block. */
    void (*sum_p)(const ag_linear_block *block, ptrdiff_t panel, ptrdiff_t panel_end, double *sums);
    /* Compute to[c] = exp(logits[c] - max) / sum of accumulators, perhaps in place. */
    void (*probabilities)(void *to, const void *logits, double max, double sum, ptrdiff_t n);
    /* The unpacked products; skinny_rows.h and its siblings describe them. */
    void (*dot_products)(const ag_rows *resident, const ag_rows *streamed, ptrdiff_t first, ptrdiff_t n, void *p,
                         ptrdiff_t pitch);
    void (*sum_rows)(ptrdiff_t resident, const ag_rows *streamed, ptrdiff_t first, ptrdiff_t n, const void *p,
                     ptrdiff_t pitch, void *sums, ptrdiff_t sums_pitch, int add);
    void (*combine)(const void *from, ptrdiff_t count, ptrdiff_t stride, ptrdiff_t n, void *to);
    void (*write_rows)(ag_variant variant, const ag_rows *resident, const ag_rows *to, ptrdiff_t first, ptrdiff_t n,
                       const void *p, ptrdiff_t r_stride, ptrdiff_t s_stride, int nontemporal);
    void (*tile_to_logits)(const ag_linear_block *block, void *tile);
    void (*tile_to_gradient)(const ag_linear_block *block, void *tile);
    void (*tile_to_max_sum)(const ag_linear_block *block, const void *tile, void *max, ag_sum *sum, double *rest,
                            ag_more *more);
    void (*tile_to_top_k)(const ag_linear_block *block, const void *tile);
    void (*join_top_k)(const ag_top_k *from, const ag_top_k *to, ptrdiff_t row, ptrdiff_t row_end);
    void (*columns_to_logits)(const ag_linear_block *block, void *tile);
    void (*columns_to_gradient)(const ag_linear_block *block, void *tile);
    void (*columns_to_max_sum)(const ag_linear_block *block, const void *tile, void *max, double *sum);
    void (*columns_to_loss)(const ag_linear_block *block, void *tile, void *sum_exp, int with_gradient);
    void (*columns_to_product)(const ag_linear_block *block, void *tile);
    void (*sum_tile)(const ag_linear_block *block, const void *tile, double *sums);
    /* Compute the losses of n rows from their statistics, in float64. */
    void (*losses)(const double *rest, const void *predicted, const void *max, ptrdiff_t n, double *to);
    /* Add n numbers to AG_SUM_LANES sums, number i to sum i % AG_SUM_LANES. */
    void (*add_numbers)(ag_sum *sums, const double *x, ptrdiff_t n);
    /* Sparse rows, see sparse.h: the pitch of transposed weights; the logits of rows; the gradient of the weight. */
    ptrdiff_t (*sparse_pitch)(ptrdiff_t classes);
    int (*sparse_check)(const ag_sparse_rows *x, ptrdiff_t row, ptrdiff_t row_end); /* flags of the rows' features */
    void (*sparse_logits)(const ag_sparse_rows *x, const ag_sparse_task *task);
    void (*sparse_sums)(const ag_sparse_rows *x, const ag_sparse_task *task);
} ag_linear_kernels;

/* ---- instantiation: every kind of arithmetic for every instruction set --------------------------------------------------- */

#define AG_ISA_BODY "linear/foreach_kind.h"
#define AG_BF16_DOT_BODY "linear/dot.h"
#define AG_AMX_BODY "linear/amx.h"
#define AG_BFMMLA_BODY "linear/bfmmla.h"
#include "../foreach_isa.h"

/* Return the kernels for inputs of this dtype. */
static AG_UNUSED const ag_linear_kernels *ag_linear_kernels_of(ag_variant variant, ag_dtype dtype)
{
#if defined(AG_HAS_BFMMLA) && AG_COMPILES(4)
    if (variant == AG_VARIANT_NEON_BF16 && dtype == AG_BFLOAT16) return ag_linear_bfmmla_kernels_baseline();
#endif
#if defined(AG_X86_64) && AG_COMPILES(16)
#if defined(AG_HAS_AMX)
    if (variant == AG_VARIANT_AMX_BF16 && dtype == AG_BFLOAT16) return ag_linear_amx_kernels_avx512();
#endif
    if (variant == AG_VARIANT_AVX512_BF16 && dtype == AG_BFLOAT16) return ag_linear_dot_kernels_avx512();
#endif
    return AG_BY_VARIANT(variant, ag_linear_kernels, dtype);
}

#endif
