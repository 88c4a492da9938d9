/* Capabilities of the CPU this code runs on: which variants of the kernels it can execute, and its caches. */
#ifndef ASCEND_GRAD_CPU_H
#define ASCEND_GRAD_CPU_H

#include <stdio.h>

#include "base.h"
#if defined(AG_X86_64)
#include <cpuid.h>
#endif

static const char *const ag_variant_names[AG_VARIANT_COUNT] = {"baseline", "avx2", "avx512", "avx512_bf16", "neon"};

#if defined(AG_X86_64)
/* Older Clang has no name for it. Its registers are those of AVX2, which the operating system is asked for. */
static AG_UNUSED int ag_has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;
}
#endif

/* Whether this CPU (and operating system) can execute the variant. */
static AG_UNUSED int ag_variant_supported(ag_variant variant)
{
#if defined(AG_X86_64)
    __builtin_cpu_init();
    switch (variant) {
    case AG_VARIANT_BASELINE:
        return 1;
    case AG_VARIANT_AVX2:
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && ag_has_f16c();
    case AG_VARIANT_AVX512:
        return ag_variant_supported(AG_VARIANT_AVX2) && __builtin_cpu_supports("avx512f") &&
               __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vl");
    case AG_VARIANT_AVX512_BF16:
#if defined(AG_EMULATE_BF16)
        return ag_variant_supported(AG_VARIANT_AVX512); /* a build for tests: other instructions compute the same */
#else
        return ag_variant_supported(AG_VARIANT_AVX512) && __builtin_cpu_supports("avx512bf16");
#endif
    default:
        return 0;
    }
#elif defined(AG_AARCH64)
    return variant == AG_VARIANT_NEON;
#else
    return variant == AG_VARIANT_BASELINE;
#endif
}

static AG_UNUSED ag_variant ag_best_variant(void)
{
#if defined(AG_AARCH64)
    return AG_VARIANT_NEON;
#else
    ag_variant best = AG_VARIANT_BASELINE;
    for (int v = AG_VARIANT_BASELINE; v <= AG_VARIANT_AVX512_BF16; v++) {
        if (ag_variant_supported((ag_variant)v)) best = (ag_variant)v;
    }
    return best;
#endif
}

/* Size in bytes of the data (or unified) cache of a level, as the kernel describes CPU 0; `fallback` where it does not.
 * (In virtual machines cpuid, which sysconf asks, may tell the host's cache.) */
static AG_UNUSED long ag_cache_size(int level, long fallback)
{
    for (int index = 0; index < 8; index++) {
        char path[80], type[16] = "";
        int found = 0;
        long kib = 0;
        FILE *file;
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/level", index);
        if (!(file = fopen(path, "r"))) break;
        if (fscanf(file, "%d", &found) != 1) found = 0;
        fclose(file);
        if (found != level) continue;
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/type", index);
        if (!(file = fopen(path, "r"))) continue;
        if (fscanf(file, "%15s", type) != 1) type[0] = 0;
        fclose(file);
        if (type[0] == 'I') continue;
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/size", index);
        if (!(file = fopen(path, "r"))) continue;
        if (fscanf(file, "%ldK", &kib) != 1) kib = 0;
        fclose(file);
        if (kib > 0) return kib * 1024;
    }
    return fallback;
}

#endif
