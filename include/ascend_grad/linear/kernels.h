/* The kernels of one kind of arithmetic and one instruction set, and their table. Body header, see ../base.h; the manual is
 * linear.h.
 *
 * Expects AG_ISA, AG_LANES, AG_DTYPE (the kind: f32, f64, dot, amx or bfmmla) with AG_IS_F64 and AG_IS_DOT, AG_MR, and
 * AG_UNIT: AG_AMX, AG_BFMMLA or 0.
 */

#define K(name) AG_KERNEL_NAME(name)
#define MR AG_MR
#define NV (AG_UNIT ? 2 : 3) /* vectors in a row of a panel */
#define NR (NV * VL)  /* width of a panel; a multiple of MR, so that panels of P split into tiles of either product */

#if AG_IS_F64
#define VL (AG_LANES / 2)
#define V f64v
#define LANES i64v
#define acc_t double
#define elem_t double
#define PAIR 1
#define V_(name) AG_CONCAT2(ag_v_f64, AG_CONCAT2(name, AG_ISA))
#else
#define VL AG_LANES
#define V f32v
#define LANES i32v
#define acc_t float
#define V_(name) AG_CONCAT2(ag_v_f32, AG_CONCAT2(name, AG_ISA))
#if AG_IS_DOT
#define elem_t uint32_t
#define PAIR 2
#else
#define elem_t float
#define PAIR 1
#endif
#endif

/* Packed elements along a sum that lie side by side: in rows of left operands, and in columns of right operands. On matrix
 * units a step is MR values long, so that a panel of P is one step. */
#define GRANULE (AG_UNIT ? MR / PAIR : 1)
#define ROW_GROUP (AG_UNIT == AG_AMX ? 16 : AG_UNIT == AG_BFMMLA ? 2 : 1)
#define COLUMN_GROUP (AG_UNIT == AG_BFMMLA ? 2 : 1)

/* Kinds of pairs use unpacked kernels of float32, as tiles are float32. */
#if AG_IS_DOT
#define SUMS(name) AG_CONCAT3(name, f32, AG_ISA)
#else
#define SUMS(name) K(name)
#endif

#include "pack.h"
#include "compensation.h"
#if AG_UNIT == AG_AMX
#include "gemm_amx.h"
#include "gemm_unit.h"
#elif AG_UNIT == AG_BFMMLA
#include "gemm_bfmmla.h"
#include "gemm_unit.h"
#else
#include "gemm.h"
#endif
#include "logits.h"
#include "epilogue.h"
#include "max_sum.h"
#include "top_k.h"
#include "tasks.h"
#if !AG_UNIT
#include "skinny_rows.h"
#include "skinny_logits.h"
#endif
#if !AG_IS_DOT
#include "skinny_grads.h"
#include "skinny_epilogue.h"
#include "skinny_loss.h"
#include "skinny_top_k.h"
#include "sparse.h"
#elif !AG_UNIT
#include "skinny_pairs.h"
#endif

static AG_UNUSED const ag_linear_kernels K(ag_linear) = {
    .mr = MR,
    .nr = NR,
    .vector = VL,
    .pair = PAIR,
    .granule = GRANULE,
    .reads_runs = AG_UNIT == AG_AMX,
    .column_group = COLUMN_GROUP,
    .element_size = sizeof(elem_t),
    .acc_size = sizeof(acc_t),
    .caches_exp = !AG_IS_F64 && (AG_LANES >= 8 || AG_IS_NEON),
    .speed = AG_IS_F64 ? 0.5 : AG_UNIT == AG_AMX ? 8 : AG_IS_DOT ? 2 : 1,
    /* Measured, but for BFMMLA. */
#if AG_LANES == 4
    .max_unpacked_rows = 32 / PAIR,
    .max_unpacked_statistics = 32 / PAIR,
#else
    .max_unpacked_rows = AG_UNIT ? 12 : 32,
    .max_unpacked_statistics = AG_UNIT ? 3 : VL * 3 / 4,
#endif
    .pack_left = K(pack_left),
#if AG_UNIT == AG_BFMMLA
    .pack_right = K(pack_left), /* both operands have the same layout */
#else
    .pack_right = K(pack_right),
#endif
    .pack_columns = K(pack_columns),
    .tiles = K(tiles),
    .merge_max_sum = K(merge_max_sum),
    .merge_top_k = K(merge_top_k),
    .input_grad = K(input_grad),
    .weight_grad = K(weight_grad),
    .sum_p = K(sum_p),
    .probabilities = K(probabilities),
/* Few rows do not fill a matrix unit. */
#if AG_UNIT == AG_AMX
    .dot_products = AG_CONCAT3(dot_products, dot, AG_ISA),
#elif AG_UNIT == AG_BFMMLA
    .dot_products = SUMS(dot_products),
#else
    .dot_products = K(dot_products),
#endif
/* Intel's dot products have half the rate of AMD's (../foreach_isa.h), so that CPUs with AMX keep to float32 here. */
#if AG_IS_DOT && !AG_UNIT
    .sum_rows = K(sum_rows),
    .combine = SUMS(combine),
    .write_rows = K(write_rows),
#else
    .sum_rows = SUMS(sum_rows),
    .combine = SUMS(combine),
    .write_rows = SUMS(write_rows),
#endif
    .tile_to_logits = SUMS(tile_to_logits),
    .tile_to_gradient = SUMS(tile_to_gradient),
    .tile_to_max_sum = SUMS(tile_to_max_sum),
    .tile_to_top_k = SUMS(tile_to_top_k),
    .join_top_k = SUMS(join_top_k),
    .columns_to_logits = SUMS(columns_to_logits),
    .columns_to_gradient = SUMS(columns_to_gradient),
    .columns_to_max_sum = SUMS(columns_to_max_sum),
    .columns_to_loss = SUMS(columns_to_loss),
    .columns_to_product = SUMS(columns_to_product),
    .sum_tile = SUMS(sum_tile),
    .losses = SUMS(losses),
    .add_numbers = v_f64_add_numbers,
    .sparse_pitch = SUMS(sparse_pitch),
    .sparse_check = SUMS(sparse_check),
    .sparse_logits = SUMS(sparse_logits),
    .sparse_sums = SUMS(sparse_sums),
};

#undef AG_BY_DTYPE
#undef K
#undef SUMS
#undef MR
#undef NV
#undef NR
#undef VL
#undef V
#undef LANES
#undef V_
#undef acc_t
#undef elem_t
#undef PAIR
#undef GRANULE
#undef ROW_GROUP
#undef COLUMN_GROUP
