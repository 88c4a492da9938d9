/* Rounds of work of a team of threads: a leader starts them, all take units one by one, and the leader waits until every unit
 * is done.
 *
 * OpenMP would do this with a parallel loop for every round. Its barriers, where libgomp spins for milliseconds, are no
 * place for that: where another process holds a core, the thread that is waited for may be without one while those that
 * wait keep theirs busy, and each round takes a time slice of the system's. Here nobody waits for a member as such, only for
 * units that somebody has taken: one that has no core just now, or that has not woken yet, keeps nobody from going on. Those
 * that have nothing to do fall asleep after a moment, and their cores are free. Of a team larger than the cores nobody
 * spins, and no more are woken than can run.
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

enum { AG_TEAM_SPINS = 10000 }; /* 0.5 ms or so: sleepers take long to wake, on virtual machines above all */

/* A number that others wait for, and how many of them sleep. */
typedef struct {
    uint32_t value;
    uint32_t sleepers;
} ag_event;

typedef struct {
    int size, cores;     /* members, and how many of them can run at a time */
    int spins;           /* before they sleep */
    int over;            /* no round comes any more */
    ptrdiff_t units;     /* of the round */
    ptrdiff_t left;      /* units that nobody has taken */
    ag_event round;      /* number of the round, of which the first is 1 */
    ag_event done;       /* units of the round that are done */
    int64_t begin;       /* of the round, nanoseconds */
    int64_t elapsed;     /* in all rounds, */
    int64_t busy;        /* and the CPU time that members used in them */
} ag_team;

static AG_UNUSED int64_t ag_nanoseconds(clockid_t clock)
{
    struct timespec time;
    clock_gettime(clock, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static AG_UNUSED int64_t ag_now(void) { return ag_nanoseconds(CLOCK_MONOTONIC); }

/* CPU time of the calling thread */
static AG_UNUSED int64_t ag_thread_time(void) { return ag_nanoseconds(CLOCK_THREAD_CPUTIME_ID); }

/* Wait until the value has (is) or has not (is not) this value. */
static AG_UNUSED void ag_event_await(ag_event *event, uint32_t value, int is, int spins)
{
    uint32_t now;
    for (int spin = 0; spin < spins; spin++) {
        if ((__atomic_load_n(&event->value, __ATOMIC_ACQUIRE) == value) == is) return;
#if defined(AG_X86_64)
        _mm_pause();
#endif
    }
    /* Whoever changes the value looks for sleepers after that, and a sleeper is counted before it looks at the value. */
    __atomic_add_fetch(&event->sleepers, 1, __ATOMIC_SEQ_CST);
    while (((now = __atomic_load_n(&event->value, __ATOMIC_SEQ_CST)) == value) != is) {
        syscall(SYS_futex, &event->value, FUTEX_WAIT_PRIVATE, now, 0, 0, 0);
    }
    __atomic_sub_fetch(&event->sleepers, 1, __ATOMIC_RELAXED);
}

/* Wake so many of those that sleep, after the value was changed. */
static AG_UNUSED void ag_event_wake(ag_event *event, int count)
{
    if (count > 0 && __atomic_load_n(&event->sleepers, __ATOMIC_SEQ_CST)) {
        syscall(SYS_futex, &event->value, FUTEX_WAKE_PRIVATE, count, 0, 0, 0);
    }
}

/* A team of so many members, before any of them starts. */
static AG_UNUSED void ag_team_form(ag_team *team, int size, int cores)
{
    memset(team, 0, sizeof *team);
    team->size = size;
    team->cores = cores;
    team->spins = size <= cores ? AG_TEAM_SPINS : 0;
}

/* The leader starts a round; what its units are was written before. All units of the round before are done. */
static AG_UNUSED void ag_team_start(ag_team *team, ptrdiff_t units)
{
    const ptrdiff_t most = units < team->size ? units : team->size;
    team->units = units;
    team->begin = ag_now();
    __atomic_store_n(&team->done.value, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&team->left, units, __ATOMIC_RELEASE);
    __atomic_add_fetch(&team->round.value, 1, __ATOMIC_SEQ_CST);
    ag_event_wake(&team->round, (int)(most < team->cores ? most : team->cores) - 1);
}

/* The leader says that no round comes any more. */
static AG_UNUSED void ag_team_dissolve(ag_team *team)
{
    team->over = 1;
    __atomic_add_fetch(&team->round.value, 1, __ATOMIC_SEQ_CST);
    ag_event_wake(&team->round, INT_MAX);
}

/* The others wait for a round after this one (0: the first): its number; 0: none comes any more. */
static AG_UNUSED uint32_t ag_team_join(ag_team *team, uint32_t round)
{
    ag_event_await(&team->round, round, 0, team->spins);
    const uint32_t now = __atomic_load_n(&team->round.value, __ATOMIC_ACQUIRE);
    return team->over ? 0 : now;
}

/* The number of a unit of the current round that is the caller's from now on, and that the round waits for; -1 if there are
 * none left. What the round is about may be read only after that. */
static AG_UNUSED ptrdiff_t ag_team_next(ag_team *team)
{
    ptrdiff_t left = __atomic_load_n(&team->left, __ATOMIC_RELAXED);
    while (left > 0) {
        if (__atomic_compare_exchange_n(&team->left, &left, left - 1, 1, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) {
            return team->units - left;
        }
    }
    return -1;
}

/* A unit is done. After that the round may be over, and another one begin. */
static AG_UNUSED void ag_team_finish(ag_team *team)
{
    const uint32_t units = (uint32_t)team->units;
    if (__atomic_add_fetch(&team->done.value, 1, __ATOMIC_SEQ_CST) == units) ag_event_wake(&team->done, 1);
}

/* Whatever units of the round are left, nobody takes them. For the leader. */
static AG_UNUSED void ag_team_cancel(ag_team *team)
{
    const ptrdiff_t rest = __atomic_exchange_n(&team->left, 0, __ATOMIC_RELAXED);
    __atomic_add_fetch(&team->done.value, (uint32_t)rest, __ATOMIC_RELAXED);
}

/* A member has used so much CPU time. */
static AG_UNUSED void ag_team_used(ag_team *team, int64_t nanoseconds)
{
    __atomic_add_fetch(&team->busy, nanoseconds, __ATOMIC_RELAXED);
}

/* The value, which becomes 0. */
static AG_UNUSED int64_t ag_take(int64_t *value) { return __atomic_exchange_n(value, 0, __ATOMIC_RELAXED); }

/* The leader, who has found nothing left to do, waits until all units are done. */
static AG_UNUSED void ag_team_end(ag_team *team)
{
    ag_event_await(&team->done, (uint32_t)team->units, 1, team->spins);
    team->elapsed += ag_now() - team->begin;
}

#endif
