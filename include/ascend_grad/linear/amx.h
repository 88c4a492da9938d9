/* kernels.h with the matrix unit AMX and pairs of bfloat16: a body for AG_AMX_BODY of ../foreach_isa.h. */

#if AG_DEFINES_KERNELS

#define AG_MR 32
#define AG_DTYPE amx
#define AG_IS_F64 0
#define AG_IS_DOT 1
#define AG_UNIT AG_AMX
#include "kernels.h"
#undef AG_MR
#undef AG_DTYPE
#undef AG_IS_F64
#undef AG_IS_DOT
#undef AG_UNIT

AG_KERNEL_LINKAGE const ag_linear_kernels *AG_ISA_NAME(ag_linear_amx_kernels)(void)
{
    return &AG_ISA_NAME(ag_linear_amx);
}

#else
const ag_linear_kernels *AG_ISA_NAME(ag_linear_amx_kernels)(void);
#endif
