/* The row-wise kernels of one dtype and one instruction set, as a table. Body header, see base.h; the manual is
 * rowwise.h.
 *
 * This header expects AG_ISA, AG_LANES, and the dtype in memory: AG_DTYPE (f32, f16, bf16 or f64), AG_IS_F32,
 * AG_IS_F64. It defines, until its end:
 *
 *   VL           lanes of a vector of the compute type
 *   V, MASKV     vectors of the compute type, and of masks
 *   V_(name)     functions of V
 *   K(name)      names of the kernels and their helpers
 */

#define AG_LOAD AG_CONCAT3(ag_v, AG_DTYPE, AG_CONCAT2(load, AG_ISA))
#define AG_STORE AG_CONCAT3(ag_v, AG_DTYPE, AG_CONCAT2(store, AG_ISA))
#define AG_STORE_NT AG_CONCAT3(ag_v, AG_DTYPE, AG_CONCAT2(stream, AG_ISA))
#define AG_LOAD_TWO AG_CONCAT3(ag_v, AG_DTYPE, AG_CONCAT2(load_two, AG_ISA))
#define AG_STORE_TWO AG_CONCAT3(ag_v, AG_DTYPE, AG_CONCAT2(store_two, AG_ISA))
#define AG_STORE_NT_TWO AG_CONCAT3(ag_v, AG_DTYPE, AG_CONCAT2(stream_two, AG_ISA))
#define AG_LOAD_PARTIAL AG_CONCAT3(ag_v, AG_DTYPE, AG_CONCAT2(load_partial, AG_ISA))
#define AG_STORE_PARTIAL AG_CONCAT3(ag_v, AG_DTYPE, AG_CONCAT2(store_partial, AG_ISA))
#define AG_ROUND AG_CONCAT3(ag_v, AG_DTYPE, AG_CONCAT2(round_f64, AG_ISA)) /* of 16 bits */

/* The size of an element in memory, the compute type, and its vectors. */
#if AG_IS_F64
#define AG_SIZE 8
#define VL (AG_LANES / 2)
#define compute_t double
#define V f64v
#define MASKV i64v
#define V_(name) AG_CONCAT2(ag_v_f64, AG_CONCAT2(name, AG_ISA))
#else
#if AG_IS_F32
#define AG_SIZE 4
#else
#define AG_SIZE 2
#endif
#define VL AG_LANES
#define compute_t float
#define V f32v
#define MASKV i32v
#define V_(name) AG_CONCAT2(ag_v_f32, AG_CONCAT2(name, AG_ISA))
#endif

#define K(name) AG_KERNEL_NAME(ag_row_##name)
#if AG_IS_F64
#define K_COMPUTE(name) K(name)
#else
#define K_COMPUTE(name) AG_CONCAT3(ag_row_##name, f32, AG_ISA) /* helpers that depend on the compute type alone */
#endif
#define AG_SUM_BLOCK (16 * VL)
/* Elements of a step of non-temporal stores: whole cache lines, and at least a pair of vectors. */
#define AG_LINES (2 * VL * AG_SIZE < 64 ? 64 / AG_SIZE : 2 * VL)

#include "ops.h"
#include "sums.h"
#include "narrow.h"
#include "rows.h"
#include "columns.h"
#include "loss_kernels.h"

/* ---- entry points: the loops with a constant operator ------------------------------------------------------------ */

#define AG_ROW_FUNCTIONS(op, name)                                                                                     \
    static void K(name##_rows)(const ag_tile *tile) { K(rows)(op, tile); }                                             \
    static double K(name##_split_max)(const ag_tile *tile)                                                             \
    {                                                                                                                  \
        return K(max_logit)(op, tile->a, tile->mask, tile->n, V_(set1)((compute_t)tile->scale));                       \
    }                                                                                                                  \
    static double K(name##_split_sum)(const ag_tile *tile, double max)                                                 \
    {                                                                                                                  \
        return K(segment_sum)(op, tile->a, tile->b, tile->mask, tile->n, V_(set1)((compute_t)tile->scale),             \
                              V_(set1)((compute_t)max), NULL);                                                         \
    }                                                                                                                  \
    static void K(name##_split_write)(const ag_tile *tile, double max, double sum)                                     \
    {                                                                                                                  \
        const compute_t shift = K(shift_of)(op, max, sum), factor = K(factor_of)(op, sum);                             \
        K(write_results)(op, 0, tile->a, tile->b, tile->mask, tile->out, tile->n, V_(set1)((compute_t)tile->scale),    \
                         &shift, &factor, NULL, tile->nontemporal, NULL);                                              \
        if (tile->nontemporal) v_fence();                                                                              \
    }

#define AG_COLUMN_FUNCTIONS_0(op, name)
#define AG_COLUMN_FUNCTIONS_1(op, name)                                                                                \
    AG_NOINLINE void K(name##_add)(const ag_tile *tile, K(scratch) s)                                                  \
    {                                                                                                                  \
        K(columns_sum)(op, tile, s.max, s.partial, s.sums);                                                            \
    }                                                                                                                  \
    AG_NOINLINE void K(name##_write)(const ag_tile *tile, const compute_t *shift, const compute_t *factor,             \
                                     ptrdiff_t repeats)                                                                \
    {                                                                                                                  \
        K(columns_write)(op, tile, shift, factor, repeats);                                                            \
    }                                                                                                                  \
    AG_NOINLINE void K(name##_strips)(const ag_tile *tile) { K(strips)(op, tile); }                                    \
    static void K(name##_columns)(const ag_tile *tile, void *memory)                                                   \
    {                                                                                                                  \
        K(columns)(op, K(name##_add), K(name##_write), K(name##_strips), tile, memory);                                \
    }                                                                                                                  \
    static void K(name##_columns_max)(const ag_tile *tile, double *max, void *memory)                                  \
    {                                                                                                                  \
        K(columns_max)(tile, K(scratch_layout)(memory).shift, max);                                                    \
    }                                                                                                                  \
    static void K(name##_columns_sum)(const ag_tile *tile, const double *max, double *sum, void *memory)               \
    {                                                                                                                  \
        const K(scratch) s = K(scratch_layout)(memory);                                                                \
        K(prepare_max)(op, tile, max, s.max);                                                                          \
        K(name##_add)(tile, s);                                                                                        \
        for (ptrdiff_t c = 0; c < tile->rows; c++) sum[c] = s.sums[c];                                                 \
    }                                                                                                                  \
    static void K(name##_columns_write)(const ag_tile *tile, const double *max, const double *sum, void *memory)       \
    {                                                                                                                  \
        K(write_prepared)(op, K(name##_write), tile, max, sum, K(scratch_layout)(memory));                             \
    }

#define AG_FUNCTIONS(op, name, direction, b, mask, has_columns)                                                        \
    AG_ROW_FUNCTIONS(op, name)                                                                                         \
    AG_COLUMN_FUNCTIONS_##has_columns(op, name)
AG_FOREACH_ROW_OP(AG_FUNCTIONS)

#define AG_COLUMN_ENTRIES_0(name)
#define AG_COLUMN_ENTRIES_1(name)                                                                                      \
    .columns = K(name##_columns), .columns_max = K(name##_columns_max), .columns_sum = K(name##_columns_sum),          \
    .columns_write = K(name##_columns_write),
#define AG_ENTRIES(op, name, direction, b, mask, has_columns)                                                          \
    [op] = {.segment = AG_SEGMENT(VL),                                                                                 \
            .strip_rows = AG_STRIP_ROWS(VL),                                                                           \
            .rows = K(name##_rows),                                                                                    \
            .split_max = K(name##_split_max),                                                                          \
            .split_sum = K(name##_split_sum),                                                                          \
            .split_write = K(name##_split_write),                                                                      \
            AG_COLUMN_ENTRIES_##has_columns(name)},

static const ag_row_kernels K(table)[AG_ROW_OP_COUNT] AG_UNUSED = {AG_FOREACH_ROW_OP(AG_ENTRIES)};

#undef AG_ROW_FUNCTIONS
#undef AG_COLUMN_FUNCTIONS_0
#undef AG_COLUMN_FUNCTIONS_1
#undef AG_FUNCTIONS
#undef AG_COLUMN_ENTRIES_0
#undef AG_COLUMN_ENTRIES_1
#undef AG_ENTRIES
#undef AG_LOAD
#undef AG_STORE
#undef AG_STORE_NT
#undef AG_LOAD_TWO
#undef AG_STORE_TWO
#undef AG_STORE_NT_TWO
#undef AG_LOAD_PARTIAL
#undef AG_STORE_PARTIAL
#undef AG_ROUND
#undef AG_SIZE
#undef VL
#undef compute_t
#undef V
#undef MASKV
#undef V_
#undef K
#undef K_COMPUTE
#undef AG_SUM_BLOCK
#undef AG_MAX_NARROW_ROW
#undef AG_MAX_NARROW_ROW_OF
#undef AG_LINES
