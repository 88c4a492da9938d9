/* When a computing thread reads the clock by which it checks signals: preloaded into a process, it records the time
 * that the thread had used at each read. It also counts how often all threads read the clocks of their CPU time. For
 * tests, on Linux. */
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static __thread double *reads;
static __thread long count, room;
static long cpu_time_reads;

/* Return how often the clocks of the threads' CPU time were read since the last call. */
long take_cpu_time_reads(void) { return __atomic_exchange_n(&cpu_time_reads, 0, __ATOMIC_SEQ_CST); }

/* From now on the reads of this thread are recorded, none for NULL. How many there were. */
long record_reads(double *times, long size)
{
    long recorded = count;
    reads = times, room = times ? size : 0, count = 0;
    return recorded;
}

int clock_gettime(clockid_t clock, struct timespec *time)
{
    if (clock == CLOCK_MONOTONIC_COARSE && reads) {
        struct timespec used;
        syscall(SYS_clock_gettime, CLOCK_THREAD_CPUTIME_ID, &used);
        if (count < room) reads[count] = used.tv_sec + 1e-9 * used.tv_nsec;
        count++;
    }
    if (clock == CLOCK_THREAD_CPUTIME_ID) __atomic_add_fetch(&cpu_time_reads, 1, __ATOMIC_SEQ_CST);
    return (int)syscall(SYS_clock_gettime, clock, time);
}
