/* kernels.h with pairs of bfloat16, and the function that returns the kernels. Expects, and undefines, AG_MR, AG_DTYPE and
 * AG_UNIT. */

#if AG_DEFINES_KERNELS

#define AG_IS_F64 0
#define AG_IS_DOT 1
#include "kernels.h"
#undef AG_IS_F64
#undef AG_IS_DOT

AG_KERNEL_LINKAGE const ag_linear_kernels *AG_ISA_NAME(AG_CONCAT3(ag_linear, AG_DTYPE, kernels))(void)
{
    return &AG_KERNEL_NAME(ag_linear);
}

#else
const ag_linear_kernels *AG_ISA_NAME(AG_CONCAT3(ag_linear, AG_DTYPE, kernels))(void);
#endif

#undef AG_MR
#undef AG_DTYPE
#undef AG_UNIT
