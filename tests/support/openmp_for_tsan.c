/* Preloaded behind the thread sanitizer's library: tells it what a parallel region of OpenMP orders.
 *
 * GCC's libgomp is not instrumented, and its threads start and wait by futexes, which the sanitizer does not know. It
 * would take everything that a region shares with the code around it for a race. What is told here is what OpenMP
 * promises, no more: the code before a region happens before the work of its threads, and that before the code behind
 * it. Threads of one region are left to what they do themselves.
 */
#define _GNU_SOURCE
#include <dlfcn.h>

void __tsan_acquire(void *address);
void __tsan_release(void *address);

typedef void (*region_function)(void *);

typedef struct {
    region_function function;
    void *data;
} region;

static void run(void *pointer)
{
    region *of_all = pointer;
    __tsan_acquire(of_all);
    of_all->function(of_all->data);
    __tsan_release(of_all);
}

void GOMP_parallel(region_function function, void *data, unsigned threads, unsigned flags)
{
    static void (*original)(region_function, void *, unsigned, unsigned);
    region of_all = {function, data};
    if (!original) *(void **)&original = dlsym(RTLD_NEXT, "GOMP_parallel");
    __tsan_release(&of_all);
    original(run, &of_all, threads, flags);
    __tsan_acquire(&of_all);
}
