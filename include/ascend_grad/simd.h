/* The vectors of simd_body.h for every instruction set of this architecture. */
#ifndef ASCEND_GRAD_SIMD_H
#define ASCEND_GRAD_SIMD_H

#include <math.h>

#include "base.h"
#include "simd_names.h"

#define AG_TARGET_AVX2 "avx2,fma,f16c"
#if defined(__clang__)
#define AG_TARGET_AVX512 "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"
#define AG_TARGET_AVX512_BF16 "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16"
#else
#define AG_TARGET_AVX512 "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"
#define AG_TARGET_AVX512_BF16 "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,prefer-vector-width=512"
#endif

/* On aarch64 the baseline is NEON. */
#define AG_ISA baseline
#define AG_LANES 4
#include "simd_body.h"
#undef AG_ISA
#undef AG_LANES

#if defined(AG_X86_64)

AG_TARGET_BEGIN(AG_TARGET_AVX2)
#define AG_ISA avx2
#define AG_LANES 8
#include "simd_body.h"
#undef AG_ISA
#undef AG_LANES
AG_TARGET_END

AG_TARGET_BEGIN(AG_TARGET_AVX512)
#define AG_ISA avx512
#define AG_LANES 16
#include "simd_body.h"
#undef AG_ISA
#undef AG_LANES
AG_TARGET_END

#endif

#endif
