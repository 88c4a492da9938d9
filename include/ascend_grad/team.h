/* Rounds of work of a team of threads: a leader starts them, all take units one by one, and meet at the end.
 *
 * OpenMP would do this with a parallel loop for every round. Its barriers, where libgomp spins for milliseconds, are no
 * place for that: where another process holds a core, the thread that is waited for may be without one while those that
 * wait keep theirs busy, and each round takes a time slice of the system's. Here those that wait fall asleep after a moment,
 * and their cores are free.
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

typedef struct {
    uint32_t round;             /* number of the round, of which the first is 1 */
    uint32_t here;              /* arrivals at the end of rounds, of all rounds together */
    int over;                   /* no round comes any more */
    ptrdiff_t next;             /* unit of the round that nobody has taken */
    int64_t begin, first, last; /* nanoseconds: of the round, and when the first and the last member arrived */
} ag_team;

static AG_UNUSED int64_t ag_team_now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* Wait until *counter, which only grows, has passed `value`. */
static AG_UNUSED void ag_team_await(uint32_t *counter, uint32_t value)
{
    uint32_t now;
    for (int spin = 0; spin < AG_TEAM_SPINS; spin++) {
        if ((int32_t)(__atomic_load_n(counter, __ATOMIC_ACQUIRE) - value) >= 0) return;
#if defined(AG_X86_64)
        _mm_pause();
#endif
    }
    while ((int32_t)((now = __atomic_load_n(counter, __ATOMIC_ACQUIRE)) - value) < 0) {
        syscall(SYS_futex, counter, FUTEX_WAIT_PRIVATE, now, 0, 0, 0);
    }
}

static AG_UNUSED void ag_team_wake(uint32_t *counter) { syscall(SYS_futex, counter, FUTEX_WAKE_PRIVATE, INT_MAX, 0, 0, 0); }

/* The leader starts a round, or says that none comes any more. All members have left the one before. */
static AG_UNUSED void ag_team_start(ag_team *team, int over)
{
    team->next = 0;
    team->over = over;
    team->begin = ag_team_now();
    __atomic_add_fetch(&team->round, 1, __ATOMIC_RELEASE);
    ag_team_wake(&team->round);
}

/* The others wait for a round. 0: none comes any more. */
static AG_UNUSED int ag_team_join(ag_team *team, uint32_t round)
{
    ag_team_await(&team->round, round);
    return !team->over;
}

/* The number of a unit that is the caller's; from the number of units on there are none left. */
static AG_UNUSED ptrdiff_t ag_team_next(ag_team *team) { return __atomic_fetch_add(&team->next, 1, __ATOMIC_RELAXED); }

/* Whatever units of the round are left, nobody takes them. */
static AG_UNUSED void ag_team_end(ag_team *team, ptrdiff_t units) { __atomic_store_n(&team->next, units, __ATOMIC_RELAXED); }

/* All `size` members wait for each other at the end of a round. */
static AG_UNUSED void ag_team_meet(ag_team *team, uint32_t round, int size)
{
    const int64_t now = ag_team_now();
    const uint32_t all = round * (uint32_t)size;
    /* Stamped before the arrival, which lets the others go on. Of two at the same time both may be the first, or none the
     * last; nobody has waited then. */
    const uint32_t before = __atomic_load_n(&team->here, __ATOMIC_RELAXED);
    if (before == all - (uint32_t)size) __atomic_store_n(&team->first, now, __ATOMIC_RELAXED);
    if (before == all - 1) __atomic_store_n(&team->last, now, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&team->here, 1, __ATOMIC_ACQ_REL) == all) {
        ag_team_wake(&team->here);
    } else {
        ag_team_await(&team->here, all);
    }
}

#endif
