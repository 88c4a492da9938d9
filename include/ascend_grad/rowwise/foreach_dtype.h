/* The kernels of kernels.h for each dtype, compiled for the instruction set AG_ISA, and the choice by dtype and
 * operator. Body header, see base.h. */

#if AG_DEFINES_KERNELS

#define AG_IS_F64 0
#define AG_IS_F32 1
#define AG_DTYPE f32
#include "kernels.h"
#undef AG_DTYPE
#undef AG_IS_F32
#define AG_IS_F32 0
#define AG_DTYPE f16
#include "kernels.h"
#undef AG_DTYPE
#define AG_DTYPE bf16
#include "kernels.h"
#undef AG_DTYPE
#undef AG_IS_F64
#define AG_IS_F64 1
#define AG_DTYPE f64
#include "kernels.h"
#undef AG_DTYPE
#undef AG_IS_F64
#undef AG_IS_F32

AG_KERNEL_LINKAGE const ag_row_kernels *AG_ISA_NAME(ag_rowwise_kernels)(ag_dtype dtype, ag_row_op op)
{
    static const ag_row_kernels *const kernels[AG_DTYPE_COUNT] = {
        [AG_FLOAT32] = AG_ISA_NAME(ag_row_table_f32),
        [AG_FLOAT16] = AG_ISA_NAME(ag_row_table_f16),
        [AG_BFLOAT16] = AG_ISA_NAME(ag_row_table_bf16),
        [AG_FLOAT64] = AG_ISA_NAME(ag_row_table_f64),
    };
    return &kernels[dtype][op];
}

AG_KERNEL_LINKAGE const ag_loss_kernels *AG_ISA_NAME(ag_rowwise_loss_kernels)(ag_dtype dtype)
{
    static const ag_loss_kernels *const kernels[AG_DTYPE_COUNT] = {
        [AG_FLOAT32] = &AG_ISA_NAME(ag_row_loss_table_f32),
        [AG_FLOAT16] = &AG_ISA_NAME(ag_row_loss_table_f16),
        [AG_BFLOAT16] = &AG_ISA_NAME(ag_row_loss_table_bf16),
        [AG_FLOAT64] = &AG_ISA_NAME(ag_row_loss_table_f64),
    };
    return kernels[dtype];
}

#else
const ag_row_kernels *AG_ISA_NAME(ag_rowwise_kernels)(ag_dtype dtype, ag_row_op op);
const ag_loss_kernels *AG_ISA_NAME(ag_rowwise_loss_kernels)(ag_dtype dtype);
#endif
