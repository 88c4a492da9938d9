/* Phases of a team of threads: the primary thread begins a phase, all threads fetch tasks one by one, and the primary
 * thread waits at the end of the phase until every task is complete.
 *
 * An OpenMP parallel loop per phase would do the same, but libgomp spins at its barriers for milliseconds. If another
 * process holds a core, the last thread of a phase may have none while the waiting threads keep theirs busy. Each phase
 * then takes a scheduler tick. Here threads wait only for tasks that a thread has fetched. So a thread that has no
 * core, or is not awake yet, delays nothing. Threads without a task spin briefly, then sleep and free their cores. If
 * there are more threads than cores, threads never spin, and no more of them are woken than can run.
 */
#ifndef ASCEND_GRAD_TEAM_H
#define ASCEND_GRAD_TEAM_H

#include <limits.h>
#include <linux/futex.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base.h"

enum {
    AG_SPIN_LIMIT = 10000, /* spins before a thread sleeps, about 0.5 ms: sleeping threads take long to wake, on virtual
                              machines above all */
    AG_MAX_PARTITIONS = 16, /* parts of a phase's tasks at most; threads share parts if there are more of them */
    AG_LINE = 128           /* bytes that one core may write without taking a cache line from another one: CPUs fetch
                               lines in pairs */
};

/* A truth value that one thread writes while others read it. */
typedef _Atomic int ag_flag;

/* A number that threads wait for, and the count of threads that sleep until it changes. */
typedef struct {
    uint32_t value;
    uint32_t sleepers;
} __attribute__((aligned(AG_LINE))) ag_event;

/* A range of adjacent tasks. */
typedef struct {
    ptrdiff_t unfetched; /* number of tasks that no thread has fetched */
} __attribute__((aligned(AG_LINE))) ag_partition;

/* What the primary thread writes between phases, what threads wait for, what they write at the end of a phase, and each
 * partition lie on separate lines: a thread that completes tasks does not disturb those that wait for the next phase. */
typedef struct {
    int size, cores;     /* number of threads, and how many of them can run at a time */
    int spin_limit;      /* spins before a thread sleeps */
    int is_shut_down;    /* whether no further phase will begin */
    ptrdiff_t tasks;     /* number of tasks of the current phase */
    int partition_count; /* number of its partitions */
    ag_event phase;      /* number of the current phase, starting at 1 */
    ag_event complete;   /* number of tasks of the current phase that are complete */
    int64_t busy __attribute__((aligned(AG_LINE))); /* CPU time of all threads in the phases, in nanoseconds */
    int64_t arrival;     /* when the last thread arrived that has recorded it, of the monotonic clock; 0: none */
    ag_partition partitions[AG_MAX_PARTITIONS];
} ag_team;

static AG_UNUSED int64_t ag_clock_ns(clockid_t clock)
{
    struct timespec time;
    clock_gettime(clock, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static AG_UNUSED int64_t ag_monotonic_ns(void) { return ag_clock_ns(CLOCK_MONOTONIC); }

/* Return nanoseconds of a monotonic clock that is cheap to read and ticks every few milliseconds. */
static AG_UNUSED int64_t ag_coarse_ns(void) { return ag_clock_ns(CLOCK_MONOTONIC_COARSE); }

/* Return the CPU time of the calling thread in nanoseconds. */
static AG_UNUSED int64_t ag_thread_ns(void) { return ag_clock_ns(CLOCK_THREAD_CPUTIME_ID); }

/* Wait until event->value equals `value` (if `is`) or differs from it (if not). */
static AG_UNUSED void ag_event_wait(ag_event *event, uint32_t value, int is, int spin_limit)
{
    uint32_t now;
    for (int spin = 0; spin < spin_limit; spin++) {
        if ((__atomic_load_n(&event->value, __ATOMIC_ACQUIRE) == value) == is) return;
#if defined(AG_X86_64)
        _mm_pause();
#endif
    }
    /* The number of sleepers is read after the value was changed; a sleeper is counted before it reads the value. */
    __atomic_add_fetch(&event->sleepers, 1, __ATOMIC_SEQ_CST);
    while (((now = __atomic_load_n(&event->value, __ATOMIC_SEQ_CST)) == value) != is) {
        syscall(SYS_futex, &event->value, FUTEX_WAIT_PRIVATE, now, 0, 0, 0);
    }
    __atomic_sub_fetch(&event->sleepers, 1, __ATOMIC_RELAXED);
}

/* Wake at most `count` of the threads that sleep on an event whose value was changed. */
static AG_UNUSED void ag_event_wake(ag_event *event, int count)
{
    if (count > 0 && __atomic_load_n(&event->sleepers, __ATOMIC_SEQ_CST)) {
        syscall(SYS_futex, &event->value, FUTEX_WAKE_PRIVATE, count, 0, 0, 0);
    }
}

/* Initialize a team of `size` threads before any of them starts. */
static AG_UNUSED void ag_team_init(ag_team *team, int size, int cores)
{
    memset(team, 0, sizeof *team);
    team->size = size;
    team->cores = cores;
    team->spin_limit = size <= cores ? AG_SPIN_LIMIT : 0;
}

/* Return the first task of a partition. */
static AG_UNUSED ptrdiff_t ag_team_partition_begin(ptrdiff_t tasks, int partition, int partition_count)
{
    return tasks / partition_count * partition + tasks % partition_count * partition / partition_count;
}

/* Begin a phase of `tasks` tasks; called by the primary thread. The caller has described the tasks, and all tasks of
 * the previous phase are complete. With `by_thread`, each thread begins with a range of tasks that is the same in every
 * call of the same size, so that their data may be in its cache; it then helps the others. Otherwise, all threads fetch
 * from the same range. */
static AG_UNUSED void ag_team_begin_phase(ag_team *team, ptrdiff_t tasks, int by_thread)
{
    const ptrdiff_t most = tasks < team->size ? tasks : team->size;
    const int count = !by_thread ? 1 : team->size < AG_MAX_PARTITIONS ? team->size : AG_MAX_PARTITIONS;
    __atomic_store_n(&team->partition_count, count, __ATOMIC_RELAXED); /* a late thread may still be reading it */
    team->tasks = tasks;
    __atomic_store_n(&team->complete.value, 0, __ATOMIC_RELAXED);
    for (int p = 0; p < count; p++) {
        const ptrdiff_t size = ag_team_partition_begin(tasks, p + 1, count) - ag_team_partition_begin(tasks, p, count);
        __atomic_store_n(&team->partitions[p].unfetched, size, __ATOMIC_RELEASE);
    }
    __atomic_add_fetch(&team->phase.value, 1, __ATOMIC_SEQ_CST);
    ag_event_wake(&team->phase, (int)(most < team->cores ? most : team->cores) - 1);
}

/* End the last phase and let all other threads return; called by the primary thread. */
static AG_UNUSED void ag_team_shutdown(ag_team *team)
{
    __atomic_store_n(&team->is_shut_down, 1, __ATOMIC_RELAXED); /* a late thread may still be reading it */
    __atomic_add_fetch(&team->phase.value, 1, __ATOMIC_SEQ_CST);
    ag_event_wake(&team->phase, INT_MAX);
}

/* Wait for a phase later than `phase` (0: the first one); called by the other threads. Return the number of the current
 * phase, or 0 after the shutdown. */
static AG_UNUSED uint32_t ag_team_wait_phase(ag_team *team, uint32_t phase)
{
    ag_event_wait(&team->phase, phase, 0, team->spin_limit);
    const uint32_t now = __atomic_load_n(&team->phase.value, __ATOMIC_ACQUIRE);
    return __atomic_load_n(&team->is_shut_down, __ATOMIC_RELAXED) ? 0 : now;
}

/* Return the number of a task of the current phase, which the caller has to complete, or -1 if none is left. The
 * description of the phase may be read only after a task was fetched. `thread` is the number of the calling thread. */
static AG_UNUSED ptrdiff_t ag_team_fetch_task(ag_team *team, int thread)
{
    const int count = __atomic_load_n(&team->partition_count, __ATOMIC_RELAXED); /* perhaps of the phase before */
    const int first = (int)((int64_t)thread * count / team->size); /* adjacent threads, which may share an L3, share one */
    for (int k = 0; k < count; k++) {
        const int p = (first + k) % count;
        ptrdiff_t *unfetched = &team->partitions[p].unfetched, left = __atomic_load_n(unfetched, __ATOMIC_RELAXED);
        while (left > 0) {
            if (__atomic_compare_exchange_n(unfetched, &left, left - 1, 1, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) {
                /* From here on the phase cannot end, and its description is the current one. */
                return ag_team_partition_begin(team->tasks, p + 1, team->partition_count) - left;
            }
        }
    }
    return -1;
}

/* Count the tasks that a thread has fetched in a phase as complete, once it finds no other one. From then on the phase may
 * end, and another one may begin. */
static AG_UNUSED void ag_team_complete_tasks(ag_team *team, uint32_t count)
{
    const uint32_t tasks = (uint32_t)team->tasks;
    if (__atomic_add_fetch(&team->complete.value, count, __ATOMIC_SEQ_CST) == tasks) ag_event_wake(&team->complete, 1);
}

/* Drop the tasks of the phase that no thread has fetched; called by the primary thread. */
static AG_UNUSED void ag_team_cancel_phase(ag_team *team)
{
    ptrdiff_t left = 0;
    for (int p = 0; p < team->partition_count; p++) {
        left += __atomic_exchange_n(&team->partitions[p].unfetched, 0, __ATOMIC_RELAXED);
    }
    __atomic_add_fetch(&team->complete.value, (uint32_t)left, __ATOMIC_RELAXED);
}

/* Record that the calling thread runs; called by other threads than the primary one when they start. */
static AG_UNUSED void ag_team_arrive(ag_team *team)
{
    __atomic_store_n(&team->arrival, ag_monotonic_ns(), __ATOMIC_RELAXED);
}

/* Add the CPU time that a thread used for the phase, in nanoseconds, to the team's `busy`. */
static AG_UNUSED void ag_team_add_busy(ag_team *team, int64_t nanoseconds)
{
    __atomic_add_fetch(&team->busy, nanoseconds, __ATOMIC_RELAXED);
}

/* Return the value, and set it to 0. */
static AG_UNUSED int64_t ag_take(int64_t *value) { return __atomic_exchange_n(value, 0, __ATOMIC_RELAXED); }

/* Wait until all tasks are complete; called by the primary thread once no task is left to fetch. */
static AG_UNUSED void ag_team_end_phase(ag_team *team)
{
    ag_event_wait(&team->complete, (uint32_t)team->tasks, 1, team->spin_limit);
}

#endif
