/* The instruction sets that kernels are compiled for. This is their only list; intrinsics are in simd/.
 *
 * Included without AG_ISA_BODY, this header names the variants and says which of them the CPU can execute. If
 * AG_ISA_BODY is defined, as a path from here in quotes, that body header is included once per instruction set of the
 * architecture. Each time these macros are defined:
 *
 *   AG_ISA               ending of all names that the body defines, see AG_ISA_NAME
 *   AG_LANES             float32 lanes of a vector
 *   AG_INLINE_LARGE      attributes of functions that compile to many instructions
 *   AG_IS_AVX512, AG_IS_AVX2, AG_IS_SSE2, AG_IS_NEON    at most one of them is 1
 *
 * AG_BF16_DOT_BODY, AG_AMX_BODY and AG_BFMMLA_BODY name bodies that are included only for instruction sets with a dot
 * product of bfloat16, with AMX, and with BFMMLA. They get the AG_ISA and AG_LANES of the set that they extend. All names of
 * bodies are undefined at the end. Only the functions of a body may use its instruction set. Everything else is compiled for
 * the baseline, so that one object file serves every CPU of an architecture.
 */
#ifndef ASCEND_GRAD_FOREACH_ISA_H
#define ASCEND_GRAD_FOREACH_ISA_H

#include "base.h"
#if defined(AG_X86_64)
#include <cpuid.h>
#elif defined(AG_AARCH64)
#include <sys/auxv.h>
#endif

/* Lanes of the only instruction set that kernels are compiled for, or 0 for all sets. Tests build one set, to save
 * time. */
#ifndef AG_ONLY_LANES
#define AG_ONLY_LANES 0
#endif
#define AG_COMPILES(lanes) (AG_ONLY_LANES == 0 || AG_ONLY_LANES == (lanes))

/* The kernels that a translation unit defines. By default it defines all of them for itself. With AG_KERNEL_LANES=n it
 * defines the kernels with n lanes (none, if n is 0) for other units to link, and declares the others. setup.py
 * compiles each instruction set in a separate process, so that cores share the work. A body header defines its kernels
 * if AG_DEFINES_KERNELS.
 */
#if defined(AG_KERNEL_LANES)
#define AG_DEFINES_KERNELS (AG_KERNEL_LANES == AG_LANES)
#define AG_KERNEL_LINKAGE
#else
#define AG_DEFINES_KERNELS 1
#define AG_KERNEL_LINKAGE static AG_UNUSED
#endif

/* Variants of the kernels, worst first on each architecture: X(member of ag_variant, name). */
#define AG_FOREACH_VARIANT(X)                                                                                          \
    X(AG_VARIANT_BASELINE, "baseline")                                                                                 \
    X(AG_VARIANT_AVX2, "avx2")                                                                                         \
    X(AG_VARIANT_AVX512, "avx512")                                                                                     \
    X(AG_VARIANT_AVX512_BF16, "avx512_bf16")                                                                           \
    X(AG_VARIANT_AMX_BF16, "amx_bf16")                                                                                 \
    X(AG_VARIANT_NEON, "neon")                                                                                         \
    X(AG_VARIANT_NEON_BF16, "neon_bf16")

#define AG_MEMBER(member, name) member,
typedef enum { AG_FOREACH_VARIANT(AG_MEMBER) AG_VARIANT_COUNT } ag_variant;
#undef AG_MEMBER

#define AG_NAME(member, name) name,
static const char *const ag_variant_names[AG_VARIANT_COUNT] = {AG_FOREACH_VARIANT(AG_NAME)};
#undef AG_NAME

/* AG_HAS_AMX is defined if the compiler knows the matrix unit AMX. */
#if defined(AG_X86_64) && (defined(AG_EMULATE_AMX) || (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11))
#define AG_HAS_AMX 1
#endif

/* AG_HAS_BFMMLA is defined if the assembler knows the matrix instruction BFMMLA, or if test builds emulate it. */
#if defined(AG_EMULATE_BFMMLA) ||                                                                                      \
    (defined(AG_AARCH64) && (defined(__clang__) ? __clang_major__ >= 11 : __GNUC__ >= 10))
#define AG_HAS_BFMMLA 1
#endif

#if defined(AG_X86_64)
/* Return whether the CPU has AMX with bfloat16. */
static AG_UNUSED int ag_cpu_has_amx(void)
{
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && d & 1u << 22 && d & 1u << 24;
}

/* Return whether the operating system saves the tiles of AMX. */
static AG_UNUSED int ag_system_saves_tiles(void)
{
    const unsigned tiles = 3u << 17, saved = 1u << 27; /* bits of XCR0; CPUID's bit of XGETBV */
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & saved)) return 0;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & tiles) == tiles;
}
#endif

/* Return whether this CPU (and its operating system) can execute the variant. */
static AG_UNUSED int ag_cpu_executes(ag_variant variant)
{
#if defined(AG_EMULATE_BFMMLA)
    if (variant == AG_VARIANT_NEON_BF16) return 1; /* a test build, which emulates the instruction on any CPU */
#endif
#if defined(AG_X86_64)
    unsigned a, b, c, d;
    __builtin_cpu_init();
    switch (variant) {
    case AG_VARIANT_BASELINE:
        return 1;
    case AG_VARIANT_AVX2:
        /* F16C is read from cpuid, as older versions of Clang have no name for it. It needs the same registers as AVX2,
         * and the test for AVX2 includes the operating system's support of them. */
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) &&
               c & bit_F16C;
    case AG_VARIANT_AVX512:
        return ag_cpu_executes(AG_VARIANT_AVX2) && __builtin_cpu_supports("avx512f") &&
               __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vl");
    case AG_VARIANT_AVX512_BF16:
#if defined(AG_EMULATE_BF16)
        return ag_cpu_executes(AG_VARIANT_AVX512); /* a test build, which emulates the dot product of bfloat16 */
#else
        return ag_cpu_executes(AG_VARIANT_AVX512) && __builtin_cpu_supports("avx512bf16");
#endif
    case AG_VARIANT_AMX_BF16:
#if defined(AG_EMULATE_AMX)
        return ag_cpu_executes(AG_VARIANT_AVX512_BF16); /* a test build, which emulates the matrix unit */
#elif defined(AG_HAS_AMX)
        return ag_cpu_executes(AG_VARIANT_AVX512_BF16) && ag_cpu_has_amx() && ag_system_saves_tiles();
#else
        return 0;
#endif
    default:
        return 0;
    }
#elif defined(AG_AARCH64)
#if defined(AG_HAS_BFMMLA)
    if (variant == AG_VARIANT_NEON_BF16) return (getauxval(AT_HWCAP2) & 1ul << 14) != 0; /* HWCAP2_BF16 */
#endif
    return variant == AG_VARIANT_NEON;
#else
    return variant == AG_VARIANT_BASELINE;
#endif
}

/* Return whether the variant is compiled and this CPU can execute it. */
static AG_UNUSED int ag_variant_supported(ag_variant variant)
{
    const int is_avx512 = variant == AG_VARIANT_AVX512 || variant == AG_VARIANT_AVX512_BF16 || variant == AG_VARIANT_AMX_BF16;
    return AG_COMPILES(is_avx512 ? 16 : variant == AG_VARIANT_AVX2 ? 8 : 4) && ag_cpu_executes(variant);
}

/* Return why a variant is not supported, or NULL if it is. */
static AG_UNUSED const char *ag_unsupported_reason(ag_variant variant)
{
    if (ag_variant_supported(variant)) return 0;
    if (ag_cpu_executes(variant)) return "this build leaves its kernels out";
#if defined(AG_X86_64)
    switch (variant) {
    case AG_VARIANT_AVX2:
        return "the CPU does not report AVX2, FMA and F16C";
    case AG_VARIANT_AVX512:
        if (!ag_cpu_executes(AG_VARIANT_AVX2)) return ag_unsupported_reason(AG_VARIANT_AVX2);
        return "the CPU does not report AVX512F, AVX512BW, AVX512DQ and AVX512VL";
    case AG_VARIANT_AVX512_BF16:
        if (!ag_cpu_executes(AG_VARIANT_AVX512)) return ag_unsupported_reason(AG_VARIANT_AVX512);
        return "the CPU does not report AVX512_BF16";
    case AG_VARIANT_AMX_BF16:
        if (!ag_cpu_executes(AG_VARIANT_AVX512_BF16)) return ag_unsupported_reason(AG_VARIANT_AVX512_BF16);
        if (!ag_cpu_has_amx()) return "the CPU does not report AMX_TILE and AMX_BF16";
        return ag_system_saves_tiles() ? "the compiler of this build does not know AMX"
                                       : "the operating system does not save the tiles of AMX";
    default:
        break;
    }
#elif defined(AG_AARCH64)
    if (variant == AG_VARIANT_NEON_BF16) {
#if defined(AG_HAS_BFMMLA)
        return "the CPU does not report BF16";
#else
        return "the compiler of this build does not know BFMMLA";
#endif
    }
#endif
    return "this architecture does not have its instructions";
}

/* Return whether a supported variant is slower than the one before it. Intel's CPUs execute one dot product of bfloat16 in
 * a cycle, which is half the rate of AMD's, and widening to float32 took two thirds of the time there. The emulation of
 * BFMMLA is only for tests. */
static AG_UNUSED int ag_variant_is_slow(ag_variant variant)
{
#if defined(AG_EMULATE_BFMMLA)
    if (variant == AG_VARIANT_NEON_BF16) return 1;
#endif
#if defined(AG_X86_64)
    __builtin_cpu_init();
    return variant == AG_VARIANT_AVX512_BF16 && __builtin_cpu_is("intel");
#else
    (void)variant;
    return 0;
#endif
}

/* Return the best variant before `end`. */
static AG_UNUSED ag_variant ag_best_variant(ag_variant end)
{
    ag_variant best = AG_VARIANT_BASELINE;
    for (int v = 0; v < (int)end; v++) {
        if (ag_variant_supported((ag_variant)v) && !ag_variant_is_slow((ag_variant)v)) best = (ag_variant)v;
    }
    return best;
}

/* Call name##_isa(...) for the instruction set of a variant's kernels. On aarch64 the baseline is NEON. */
#if defined(AG_X86_64) && AG_ONLY_LANES == 8
#define AG_BY_VARIANT(variant, name, ...) ((void)(variant), name##_avx2(__VA_ARGS__))
#elif defined(AG_X86_64) && AG_ONLY_LANES == 16
#define AG_BY_VARIANT(variant, name, ...) ((void)(variant), name##_avx512(__VA_ARGS__))
#elif defined(AG_X86_64) && AG_ONLY_LANES == 0
#define AG_BY_VARIANT(variant, name, ...)                                                                              \
    ((variant) == AG_VARIANT_AVX2 ? name##_avx2(__VA_ARGS__)                                                           \
     : (variant) == AG_VARIANT_BASELINE || (variant) == AG_VARIANT_NEON_BF16 ? name##_baseline(__VA_ARGS__)            \
                                                                             : name##_avx512(__VA_ARGS__))
#else
#define AG_BY_VARIANT(variant, name, ...) ((void)(variant), name##_baseline(__VA_ARGS__))
#endif

/* The compiler's target features for each instruction set. */
#define AG_TARGET_AVX2 "avx2,fma,f16c"
#if defined(__clang__)
#define AG_TARGET_AVX512 "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"
#define AG_TARGET_AVX512_BF16 "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16"
#else
#define AG_TARGET_AVX512 "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"
#define AG_TARGET_AVX512_BF16 "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,prefer-vector-width=512"
#endif
#define AG_TARGET_AMX_BF16 AG_TARGET_AVX512_BF16 ",amx-tile,amx-bf16"

#if defined(AG_X86_64)
#define AG_IS_AVX512 (AG_LANES == 16)
#define AG_IS_AVX2 (AG_LANES == 8)
#define AG_IS_SSE2 (AG_LANES == 4)
#define AG_IS_NEON 0
#else
#define AG_IS_AVX512 0
#define AG_IS_AVX2 0
#define AG_IS_SSE2 0
#if defined(AG_AARCH64)
#define AG_IS_NEON 1
#else
#define AG_IS_NEON 0
#endif
#endif

#endif

#if defined(AG_ISA_BODY) && AG_COMPILES(4)
#define AG_ISA baseline
#define AG_LANES 4
/* Large functions are not inlined for SSE2: their copies would be half of all code, and half of the compile time. */
#if defined(AG_X86_64)
#define AG_INLINE_LARGE AG_NOINLINE
#else
#define AG_INLINE_LARGE AG_INLINE
#endif
#include AG_ISA_BODY
#undef AG_ISA
#undef AG_LANES
#undef AG_INLINE_LARGE
#endif

#if defined(AG_ISA_BODY) && defined(AG_X86_64) && AG_COMPILES(8)
#define AG_INLINE_LARGE AG_INLINE
AG_TARGET_BEGIN(AG_TARGET_AVX2)
#define AG_ISA avx2
#define AG_LANES 8
#include AG_ISA_BODY
#undef AG_ISA
#undef AG_LANES
AG_TARGET_END
#undef AG_INLINE_LARGE
#endif

#if defined(AG_ISA_BODY) && defined(AG_X86_64) && AG_COMPILES(16)
#define AG_INLINE_LARGE AG_INLINE
AG_TARGET_BEGIN(AG_TARGET_AVX512)
#define AG_ISA avx512
#define AG_LANES 16
#include AG_ISA_BODY
#undef AG_ISA
#undef AG_LANES
AG_TARGET_END
#undef AG_INLINE_LARGE
#endif

#if defined(AG_BF16_DOT_BODY) && defined(AG_X86_64) && AG_COMPILES(16)
#if defined(AG_EMULATE_BF16)
AG_TARGET_BEGIN(AG_TARGET_AVX512)
#else
AG_TARGET_BEGIN(AG_TARGET_AVX512_BF16)
#endif
#define AG_ISA avx512
#define AG_LANES 16
#define AG_INLINE_LARGE AG_INLINE
#include AG_BF16_DOT_BODY
#undef AG_ISA
#undef AG_LANES
#undef AG_INLINE_LARGE
AG_TARGET_END
#endif

#if defined(AG_AMX_BODY) && defined(AG_HAS_AMX) && AG_COMPILES(16)
#if defined(AG_EMULATE_AMX)
AG_TARGET_BEGIN(AG_TARGET_AVX512)
#else
AG_TARGET_BEGIN(AG_TARGET_AMX_BF16)
#endif
#define AG_ISA avx512
#define AG_LANES 16
#define AG_INLINE_LARGE AG_INLINE
#include AG_AMX_BODY
#undef AG_ISA
#undef AG_LANES
#undef AG_INLINE_LARGE
AG_TARGET_END
#endif

/* BFMMLA needs no target: it is written in assembler, see linear/gemm_bfmmla.h. */
#if defined(AG_BFMMLA_BODY) && defined(AG_HAS_BFMMLA) && AG_COMPILES(4)
#define AG_ISA baseline
#define AG_LANES 4
#define AG_INLINE_LARGE AG_INLINE
#include AG_BFMMLA_BODY
#undef AG_ISA
#undef AG_LANES
#undef AG_INLINE_LARGE
#endif

#undef AG_ISA_BODY
#undef AG_BF16_DOT_BODY
#undef AG_AMX_BODY
#undef AG_BFMMLA_BODY
