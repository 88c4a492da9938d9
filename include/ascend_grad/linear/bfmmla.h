/* kernels.h with the matrix instruction BFMMLA and pairs of bfloat16: a body for AG_BFMMLA_BODY of ../foreach_isa.h. */

#define AG_MR 8
#define AG_DTYPE bfmmla
#define AG_UNIT AG_BFMMLA
#include "pairs.h"
