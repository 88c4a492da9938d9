/* A test of teams of threads without OpenMP and Python, so that the thread sanitizer knows all threads. It is built with it. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "ascend_grad/team.h"

static long checks, failures;

#define CHECK(condition, ...)                                                                                           \
    do {                                                                                                                \
        checks++;                                                                                                       \
        if (!(condition) && failures++ < 20) printf("FAILED %s: ", #condition), printf(__VA_ARGS__), printf("\n");      \
    } while (0)

enum { MAX_THREADS = 64, PHASES = 60, MAX_TASKS = 700 };

typedef struct {
    ag_team team;
    const int *added; /* what each task of the phase adds */
    int sums[MAX_TASKS];
} test_call;

typedef struct {
    test_call *call;
    int thread;
} member;

static void work(test_call *call, int thread)
{
    uint32_t complete = 0;
    for (ptrdiff_t task; (task = ag_team_fetch_task(&call->team, thread)) >= 0; complete++) {
        call->sums[task] += *call->added; /* not atomic: a task has one thread, and phases follow one another */
    }
    if (complete) ag_team_complete_tasks(&call->team, complete);
}

static void *wait_for_phases(void *argument)
{
    const member *m = (const member *)argument;
    uint32_t phase = 0;
    while ((phase = ag_team_wait_phase(&m->call->team, phase))) work(m->call, m->thread);
    return NULL;
}

/* Every task of every phase runs once, and the primary thread sees all results. */
static void test_phases(int threads, int cores)
{
    static test_call call;
    pthread_t ids[MAX_THREADS];
    member members[MAX_THREADS];
    memset(&call, 0, sizeof call);
    ag_team_init(&call.team, threads, cores);
    for (int t = 1; t < threads; t++) {
        members[t] = (member){&call, t};
        pthread_create(&ids[t], NULL, wait_for_phases, &members[t]);
    }
    int expected[MAX_TASKS] = {0};
    for (int phase = 0; phase < PHASES; phase++) {
        const int tasks = 1 + phase * 37 % MAX_TASKS, added = phase;
        call.added = &added;
        ag_team_begin_phase(&call.team, tasks, phase % 2);
        work(&call, 0);
        ag_team_end_phase(&call.team);
        for (int i = 0; i < MAX_TASKS; i++) {
            expected[i] += i < tasks ? added : 0;
            CHECK(call.sums[i] == expected[i], "%d threads, phase %d: task %d is %d", threads, phase, i, call.sums[i]);
        }
    }
    ag_team_shutdown(&call.team);
    for (int t = 1; t < threads; t++) pthread_join(ids[t], NULL);
}

/* Each word that one thread writes often while others wait or fetch is on lines that no other such word shares. */
static void test_lines(void)
{
    const size_t words[] = {offsetof(ag_team, size),     offsetof(ag_team, phase),         offsetof(ag_team, complete),
                            offsetof(ag_team, busy),     offsetof(ag_team, partitions[0]), offsetof(ag_team, partitions[1]),
                            sizeof(ag_team)};
    for (size_t i = 1; i < sizeof words / sizeof *words; i++) {
        CHECK(words[i] / AG_LINE > words[i - 1] / AG_LINE, "words %zu and %zu share a line", i - 1, i);
        CHECK(words[i] % AG_LINE == 0, "word %zu is at byte %zu of a line", i, words[i] % AG_LINE);
    }
}

int main(void)
{
    test_lines();
    for (int threads = 1; threads <= MAX_THREADS; threads *= 2) {
        test_phases(threads, threads < 4 ? threads : 2);
        test_phases(threads, threads);
    }
    printf("teams: %ld checks, %ld failed\n", checks, failures);
    return failures != 0;
}
