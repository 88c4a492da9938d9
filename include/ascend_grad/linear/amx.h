/* kernels.h with the matrix unit AMX and pairs of bfloat16: a body for AG_AMX_BODY of ../foreach_isa.h. */

#define AG_MR 32
#define AG_DTYPE amx
#define AG_UNIT AG_AMX
#include "pairs.h"
