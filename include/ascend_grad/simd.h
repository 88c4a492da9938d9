/* The vectors of simd_body.h for every instruction set of this architecture. */
#ifndef ASCEND_GRAD_SIMD_H
#define ASCEND_GRAD_SIMD_H

#include <math.h>

#include "base.h"
#include "foreach_isa.h"
#include "simd_names.h"

#define AG_ISA_BODY "simd_body.h"
#include "foreach_isa.h"

#endif
