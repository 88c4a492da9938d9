/* The caches and the cores of the machine. (foreach_isa.h tells which kernels it can execute.) */
#ifndef ASCEND_GRAD_CPU_H
#define ASCEND_GRAD_CPU_H

#include <sched.h>
#include <stdio.h>
#include <unistd.h>

#include "base.h"

/* Open a file in which Linux describes the cache `index` of CPU 0, or return NULL. */
static AG_UNUSED FILE *ag_open_cache(int index, const char *name)
{
    char path[80];
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/%s", index, name);
    return fopen(path, "r");
}

/* Open a file that describes the data (or unified) cache of a level, or return NULL. */
static AG_UNUSED FILE *ag_open_data_cache(int level, const char *name)
{
    for (int index = 0; index < 8; index++) {
        char type[16] = "";
        int found = 0;
        FILE *file = ag_open_cache(index, "level");
        if (!file) break;
        if (fscanf(file, "%d", &found) != 1) found = 0;
        fclose(file);
        if (found != level || !(file = ag_open_cache(index, "type"))) continue;
        if (fscanf(file, "%15s", type) != 1) type[0] = 0;
        fclose(file);
        if (type[0] != 'I') return ag_open_cache(index, name);
    }
    return NULL;
}

/* Return the bytes of the data (or unified) cache of a level, as Linux describes CPU 0, or `fallback` if it does not.
 * (sysconf reads cpuid, which may describe the host's cache in a virtual machine.) */
static AG_UNUSED long ag_cache_size(int level, long fallback)
{
    long kib = 0;
    FILE *file = ag_open_data_cache(level, "size");
    if (!file) return fallback;
    if (fscanf(file, "%ldK", &kib) != 1) kib = 0;
    fclose(file);
    return kib > 0 ? kib * 1024 : fallback;
}

/* Return how many caches of a level the machine has, if all are shared by as many CPUs as the one of CPU 0; at least 1. */
static AG_UNUSED int ag_cache_count(int level)
{
    const long cpus = sysconf(_SC_NPROCESSORS_ONLN);
    long sharers = 0, first, last;
    FILE *file = ag_open_data_cache(level, "shared_cpu_list"); /* such as 0-7,64-71 */
    if (!file) return 1;
    while (fscanf(file, "%ld", &first) == 1) {
        last = first;
        int next = getc(file);
        if (next == '-') {
            if (fscanf(file, "%ld", &last) != 1) last = first;
            next = getc(file);
        }
        sharers += last - first + 1;
        if (next != ',') break;
    }
    fclose(file);
    return sharers > 0 && cpus > sharers ? (int)((cpus + sharers - 1) / sharers) : 1;
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
