/* Vectors of every instruction set of this architecture: the functions of simd/, by the short names of simd/names.h. */
#ifndef ASCEND_GRAD_SIMD_H
#define ASCEND_GRAD_SIMD_H

#include <math.h>

#include "base.h"
#include "foreach_isa.h"
#include "simd/names.h"
#include "sums.h"

#define AG_ISA_BODY "simd/vec.h"
#include "foreach_isa.h"
#define AG_ISA_BODY "simd/convert.h"
#include "foreach_isa.h"
#define AG_ISA_BODY "simd/math.h"
#include "foreach_isa.h"

#endif
