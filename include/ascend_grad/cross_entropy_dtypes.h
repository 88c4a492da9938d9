/* cross_entropy_body.h with multiply-adds in float32 and in float64, for the instruction set AG_ISA of AG_LANES, with
 * tiles of AG_MR_F32 and AG_MR_F64 rows. Body header, see base.h; undefines what it expects.
 */

#define AG_IS_DOT 0
#define AG_IS_F64 0
#define AG_DTYPE f32
#define AG_MR AG_MR_F32
#include "cross_entropy_body.h"
#undef AG_IS_F64
#undef AG_DTYPE
#undef AG_MR
#define AG_IS_F64 1
#define AG_DTYPE f64
#define AG_MR AG_MR_F64
#include "cross_entropy_body.h"
#undef AG_IS_F64
#undef AG_IS_DOT
#undef AG_DTYPE
#undef AG_MR
#undef AG_MR_F32
#undef AG_MR_F64
#undef AG_ISA
#undef AG_LANES
