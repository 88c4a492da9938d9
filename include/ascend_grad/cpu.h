/* The caches and the cores of the machine. (foreach_isa.h tells which kernels it can execute.) */
#ifndef ASCEND_GRAD_CPU_H
#define ASCEND_GRAD_CPU_H

#include <sched.h>
#include <stdio.h>

#include "base.h"

/* Return the bytes of the data (or unified) cache of a level, as Linux describes CPU 0, or `fallback` if it does not.
 * (sysconf reads cpuid, which may describe the host's cache in a virtual machine.) */
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

/* Return how many cores the calling thread may run on, at least 1. (Needs _GNU_SOURCE, which Python.h defines.) */
#ifdef CPU_ALLOC
static AG_UNUSED int ag_affinity_cores(void)
{
    /* Linux refuses a set that is shorter than its own, so longer ones are tried. */
    for (int size = CPU_SETSIZE; size <= 1 << 20; size *= 2) {
        cpu_set_t *set = CPU_ALLOC(size);
        int cores = 0;
        if (!set) break;
        if (sched_getaffinity(0, CPU_ALLOC_SIZE(size), set) == 0) cores = CPU_COUNT_S(CPU_ALLOC_SIZE(size), set);
        CPU_FREE(set);
        if (cores > 0) return cores;
    }
    return 1;
}
#endif

#endif
