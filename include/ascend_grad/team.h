/* Phases of a team of threads: the primary thread begins a phase, all threads fetch tasks one by one, and the primary
 * thread waits at the end of the phase until every task is complete.
 *
 * OpenMP would do this with a parallel loop for every phase. Its barriers, where libgomp spins for milliseconds, do not
 * suit: where another process holds a core, the thread that is waited for may be without one while those that wait keep
 * theirs busy, and each phase takes a scheduler tick. Here no thread waits for another one as such, only for tasks that
 * some thread has fetched: one that has no core just now, or that is not awake yet, delays nothing. Threads without a
 * task sleep after a moment, and their cores are free. Where there are more threads than cores, they never spin, and no
 * more of them are woken than can run.
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

enum { AG_SPIN_LIMIT = 10000 }; /* 0.5 ms or so: threads that sleep take long to wake, on virtual machines above all */

/* A number that threads wait for, and how many of them sleep. */
typedef struct {
    uint32_t value;
    uint32_t sleepers;
} ag_event;

typedef struct {
    int size, cores;     /* threads, and how many of them can run at a time */
    int spin_limit;      /* spins before a thread sleeps */
    int is_shut_down;    /* no further phases */
    ptrdiff_t tasks;     /* of the phase */
    ptrdiff_t unfetched; /* tasks that no thread has fetched */
    ag_event phase;      /* number of the phase, of which the first is 1 */
    ag_event complete;   /* tasks of the phase that are complete */
    int64_t begin;       /* of the phase, nanoseconds */
    int64_t elapsed;     /* in all phases, */
    int64_t busy;        /* and the CPU time of all threads in them */
} ag_team;

static AG_UNUSED int64_t ag_clock_ns(clockid_t clock)
{
    struct timespec time;
    clock_gettime(clock, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static AG_UNUSED int64_t ag_monotonic_ns(void) { return ag_clock_ns(CLOCK_MONOTONIC); }

/* CPU time of the calling thread */
static AG_UNUSED int64_t ag_thread_ns(void) { return ag_clock_ns(CLOCK_THREAD_CPUTIME_ID); }

/* Wait until the value equals (is) or differs from (is not) this value. */
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

/* Wake so many of the sleeping threads, after the value was changed. */
static AG_UNUSED void ag_event_wake(ag_event *event, int count)
{
    if (count > 0 && __atomic_load_n(&event->sleepers, __ATOMIC_SEQ_CST)) {
        syscall(SYS_futex, &event->value, FUTEX_WAKE_PRIVATE, count, 0, 0, 0);
    }
}

/* A team of so many threads, before any of them starts. */
static AG_UNUSED void ag_team_init(ag_team *team, int size, int cores)
{
    memset(team, 0, sizeof *team);
    team->size = size;
    team->cores = cores;
    team->spin_limit = size <= cores ? AG_SPIN_LIMIT : 0;
}

/* For the primary thread: begin a phase, whose tasks were described before. Those of the last one are complete. */
static AG_UNUSED void ag_team_begin_phase(ag_team *team, ptrdiff_t tasks)
{
    const ptrdiff_t most = tasks < team->size ? tasks : team->size;
    team->tasks = tasks;
    team->begin = ag_monotonic_ns();
    __atomic_store_n(&team->complete.value, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&team->unfetched, tasks, __ATOMIC_RELEASE);
    __atomic_add_fetch(&team->phase.value, 1, __ATOMIC_SEQ_CST);
    ag_event_wake(&team->phase, (int)(most < team->cores ? most : team->cores) - 1);
}

/* For the primary thread: there will be no further phases. */
static AG_UNUSED void ag_team_shutdown(ag_team *team)
{
    __atomic_store_n(&team->is_shut_down, 1, __ATOMIC_RELAXED); /* a late thread may still be reading it */
    __atomic_add_fetch(&team->phase.value, 1, __ATOMIC_SEQ_CST);
    ag_event_wake(&team->phase, INT_MAX);
}

/* For the other threads: wait for a phase after this one (0: the first). Its number; 0 after the last phase. */
static AG_UNUSED uint32_t ag_team_wait_phase(ag_team *team, uint32_t phase)
{
    ag_event_wait(&team->phase, phase, 0, team->spin_limit);
    const uint32_t now = __atomic_load_n(&team->phase.value, __ATOMIC_ACQUIRE);
    return __atomic_load_n(&team->is_shut_down, __ATOMIC_RELAXED) ? 0 : now;
}

/* The number of a task of the current phase, which the caller has to complete; -1 if none are left. What describes the
 * phase may be read only after that. */
static AG_UNUSED ptrdiff_t ag_team_fetch_task(ag_team *team)
{
    ptrdiff_t left = __atomic_load_n(&team->unfetched, __ATOMIC_RELAXED);
    while (left > 0) {
        if (__atomic_compare_exchange_n(&team->unfetched, &left, left - 1, 1, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) {
            return team->tasks - left;
        }
    }
    return -1;
}

/* A task is complete. After that the phase may end, and another one begin. */
static AG_UNUSED void ag_team_complete_task(ag_team *team)
{
    const uint32_t tasks = (uint32_t)team->tasks;
    if (__atomic_add_fetch(&team->complete.value, 1, __ATOMIC_SEQ_CST) == tasks) ag_event_wake(&team->complete, 1);
}

/* For the primary thread: tasks of the phase that no thread has fetched are dropped. */
static AG_UNUSED void ag_team_cancel_phase(ag_team *team)
{
    const ptrdiff_t left = __atomic_exchange_n(&team->unfetched, 0, __ATOMIC_RELAXED);
    __atomic_add_fetch(&team->complete.value, (uint32_t)left, __ATOMIC_RELAXED);
}

/* A thread has used so much CPU time for the phase. */
static AG_UNUSED void ag_team_add_busy(ag_team *team, int64_t nanoseconds)
{
    __atomic_add_fetch(&team->busy, nanoseconds, __ATOMIC_RELAXED);
}

/* The value, which becomes 0. */
static AG_UNUSED int64_t ag_take(int64_t *value) { return __atomic_exchange_n(value, 0, __ATOMIC_RELAXED); }

/* For the primary thread, when no task is left to fetch: wait until all are complete. */
static AG_UNUSED void ag_team_end_phase(ag_team *team)
{
    ag_event_wait(&team->complete, (uint32_t)team->tasks, 1, team->spin_limit);
    team->elapsed += ag_monotonic_ns() - team->begin;
}

#endif
