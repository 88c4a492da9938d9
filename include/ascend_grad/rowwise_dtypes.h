/* rowwise_body.h for each dtype of the instruction set AG_ISA. Body header, see base.h. */

#define AG_IS_F64 0
#define AG_IS_F32 1
#define AG_DTYPE f32
#include "rowwise_body.h"
#undef AG_DTYPE
#undef AG_IS_F32
#define AG_IS_F32 0
#define AG_DTYPE f16
#include "rowwise_body.h"
#undef AG_DTYPE
#define AG_DTYPE bf16
#include "rowwise_body.h"
#undef AG_DTYPE
#undef AG_IS_F64
#define AG_IS_F64 1
#define AG_DTYPE f64
#include "rowwise_body.h"
#undef AG_DTYPE
#undef AG_IS_F64
#undef AG_IS_F32
