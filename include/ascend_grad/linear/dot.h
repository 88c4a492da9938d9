/* Instantiation of kernels.h with dot products of pairs of bfloat16: the AG_BF16_DOT_BODY of ../foreach_isa.h. */

#define AG_MR 8
#define AG_DTYPE dot
#define AG_UNIT 0
#include "pairs.h"
