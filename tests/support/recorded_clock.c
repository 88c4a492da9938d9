/* When a computing thread reads the clock by which it checks signals: preloaded into a process, it records the time
 * that the thread had used at each read. For tests, on Linux. */
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static __thread double *reads;
static __thread long count, room;

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
    return (int)syscall(SYS_clock_gettime, clock, time);
}
