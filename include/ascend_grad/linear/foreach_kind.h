/* Instantiation of kernels.h with multiply-adds in float32 and in float64, for one instruction set: a body for
 * ../foreach_isa.h. */

#if AG_DEFINES_KERNELS

/* Rows of a tile, which is three vectors wide. The accumulators take 24 of the 32 registers of AVX-512, 18 of 32 of NEON and
 * 12 of 16 otherwise (9 for float64 before AVX2, where a tile is 6 wide). */
#define AG_MR (AG_IS_AVX512 ? 8 : AG_IS_NEON ? 6 : AG_IS_F64 && !AG_IS_AVX2 ? 3 : 4)
#define AG_IS_DOT 0
#define AG_UNIT 0

#define AG_DTYPE f32
#define AG_IS_F64 0
#include "kernels.h"
#undef AG_DTYPE
#undef AG_IS_F64

#define AG_DTYPE f64
#define AG_IS_F64 1
#include "kernels.h"
#undef AG_DTYPE
#undef AG_IS_F64

#undef AG_IS_DOT
#undef AG_UNIT
#undef AG_MR

AG_KERNEL_LINKAGE const ag_linear_kernels *AG_ISA_NAME(ag_linear_kernels)(ag_dtype dtype)
{
    return dtype == AG_FLOAT64 ? &AG_ISA_NAME(ag_linear_f64) : &AG_ISA_NAME(ag_linear_f32);
}

#else
const ag_linear_kernels *AG_ISA_NAME(ag_linear_kernels)(ag_dtype dtype);
#endif
