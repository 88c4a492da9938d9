/* Instantiation of kernels.h with dot products of pairs of bfloat16: the AG_BF16_DOT_BODY of ../foreach_isa.h. */

#if AG_DEFINES_KERNELS

#define AG_MR 8
#define AG_DTYPE dot
#define AG_IS_F64 0
#define AG_IS_DOT 1
#define AG_UNIT 0
#include "kernels.h"
#undef AG_MR
#undef AG_DTYPE
#undef AG_IS_F64
#undef AG_IS_DOT
#undef AG_UNIT

AG_KERNEL_LINKAGE const ag_linear_kernels *AG_ISA_NAME(ag_linear_dot_kernels)(void)
{
    return &AG_ISA_NAME(ag_linear_dot);
}

#else
const ag_linear_kernels *AG_ISA_NAME(ag_linear_dot_kernels)(void);
#endif
