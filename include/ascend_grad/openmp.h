/* Keep OpenMP's runtime library from hanging in children of a fork, and from ending the process if the system refuses
 * threads.
 *
 * libgomp keeps the threads of a team for the next team of the same calling thread (its pool). After a fork the child
 * has only the thread that forked, whose pool lists threads that do not exist: the next team would wait for them forever.
 * Before a fork, this module therefore frees the pool of the thread that forks, whichever library has started the pool.
 * Parent and child then start new threads when they need a team. The runtime of LLVM and Intel does this itself, in the child.
 *
 * A thread whose pool cannot be freed never starts a team in the child. That is a thread that forks within a team, or
 * in a libgomp older than GCC 9. It is also the main thread of a child that loads this library after the fork, if
 * OpenMP was loaded before.
 *
 * Both runtimes end the process if they cannot create a thread. So as many threads as a team adds to a pool are first
 * created and ended here. The process can still end if others take the system's last threads in between, or if another
 * library has shrunk the pool.
 */
#ifndef ASCEND_GRAD_OPENMP_H
#define ASCEND_GRAD_OPENMP_H

#include "cpu.h"

#ifdef _OPENMP

#include <ctype.h>
#include <fcntl.h>
#include <limits.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "glibc.h"
#include "team.h"

enum {
    AG_OMP_PAUSE_HARD = 2,
    AG_POOL_IS_LOST = -1,
    AG_PF_FORKNOEXEC = 0x40 /* Linux's mark of a process that has executed no program since it was forked */
};

/* Nanoseconds for which no larger team is tried after the system has refused threads. */
static const double AG_REFUSAL_TIME = 1e9;

/* Functions that not every runtime has are looked up at import. If the module was linked to them, the loader would refuse it
 * where another library has already loaded an older libgomp. */
static int (*ag_omp_pause)(int kind); /* omp_pause_resource_all; NULL in libgomp before GCC 9 */
static int ag_is_kmp;                 /* whether the runtime is the one of LLVM and Intel */

static __thread int ag_pool;         /* threads in the pool of this thread, 0 if unknown; or AG_POOL_IS_LOST */
static __thread int ag_child_pool;   /* what ag_pool becomes in the child of the current fork */
static int ag_main_pool_is_lost;     /* whether the main thread of this process must not start a team */
static int ag_place_cores;           /* cores of OpenMP's places, which it reads once; 0: it has no places */
static size_t ag_stack_size;         /* bytes of the stacks of OpenMP's threads; 0: as for all threads */
static _Atomic double ag_refused_at; /* time of the last refusal of threads; 0: none */

/* Return whether the calling thread can have no team. */
static int ag_pool_is_lost(void)
{
    return ag_pool == AG_POOL_IS_LOST || (ag_main_pool_is_lost && syscall(SYS_gettid) == getpid());
}

static void ag_before_fork(void)
{
    ag_child_pool = 0;
    if (ag_pool_is_lost()) {
        ag_child_pool = AG_POOL_IS_LOST;
    } else if (!ag_is_kmp) {
        if (!ag_omp_pause || ag_omp_pause(AG_OMP_PAUSE_HARD) != 0) {
            ag_child_pool = AG_POOL_IS_LOST;
        } else {
            ag_pool = 0;
        }
    }
}

static void ag_after_fork_in_child(void)
{
    ag_pool = ag_child_pool;
    ag_main_pool_is_lost = 0;
}

/* The folder of this package's modules, and whether libgomp was loaded before the first one. */
typedef struct {
    char folder[PATH_MAX];
    size_t length;
    int was_loaded;
} ag_objects;

/* Set the folder of the modules from the object that has this code, and stop there. */
static int ag_find_folder(struct dl_phdr_info *object, size_t size, void *objects)
{
    (void)size;
    ag_objects *to = objects;
    const ElfW(Addr) here = (ElfW(Addr))&ag_main_pool_is_lost - object->dlpi_addr;
    const char *name = strrchr(object->dlpi_name, '/');
    int is_own = 0;
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *segment = &object->dlpi_phdr[i];
        is_own |= segment->p_type == PT_LOAD && here - segment->p_vaddr < segment->p_memsz;
    }
    if (!is_own) return 0;
    to->length = name ? (size_t)(name + 1 - object->dlpi_name) : 0;
    if (to->length >= sizeof to->folder) to->length = 0;
    memcpy(to->folder, object->dlpi_name, to->length);
    return 1;
}

/* Note whether an object is libgomp, and stop there or at the first module: objects are listed in the order of loading. */
static int ag_find_libgomp(struct dl_phdr_info *object, size_t size, void *objects)
{
    (void)size;
    ag_objects *to = objects;
    const char *name = strrchr(object->dlpi_name, '/');
    if (to->length && strncmp(object->dlpi_name, to->folder, to->length) == 0) return 1;
    return to->was_loaded = name && strncmp(name, "/libgomp", 8) == 0;
}

/* Return whether this process is the child of a fork and has not executed a program since. */
static int ag_is_forked(void)
{
    char text[512];
    unsigned flags = 0;
    const int file = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
    const ssize_t length = file < 0 ? 0 : read(file, text, sizeof text - 1);
    if (file >= 0) close(file);
    text[length > 0 ? length : 0] = 0;
    const char *name_end = strrchr(text, ')'); /* the name of the program may contain anything */
    return name_end && sscanf(name_end + 1, " %*c %*d %*d %*d %*d %*d %u", &flags) == 1 && flags & AG_PF_FORKNOEXEC;
}

/* Return the bytes that OMP_STACKSIZE or GOMP_STACKSIZE set, a number of KiB or with a unit; 0 if they set none. */
static size_t ag_stack_size_of(const char *text)
{
    char *end;
    unsigned long long size;
    int shift = 10;
    if (!text) return 0;
    size = strtoull(text, &end, 10);
    if (end == text) return 0;
    while (isspace((unsigned char)*end)) end++;
    if (*end) {
        const char *units = "BKMG", *unit = strchr(units, toupper((unsigned char)*end));
        if (!unit) return 0;
        shift = (int)(unit - units) * 10;
    }
    return size <= ULLONG_MAX >> shift ? (size_t)(size << shift) : 0;
}

/* Return a function of OpenMP's library, or NULL. */
static void *ag_find_in_openmp(const char *name)
{
    Dl_info found;
    void *library = NULL;
    if (dladdr((void *)omp_get_max_threads, &found)) library = dlopen(found.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    return library ? dlsym(library, name) : NULL;
}

/* Prepare for forks, and read what later calls need. Called once, at import. */
static void ag_openmp_init(void)
{
    *(void **)&ag_omp_pause = ag_find_in_openmp("omp_pause_resource_all");
    ag_is_kmp = ag_find_in_openmp("__kmpc_fork_call") != NULL;
    ag_stack_size = ag_stack_size_of(getenv("OMP_STACKSIZE"));
    if (!ag_stack_size) ag_stack_size = ag_stack_size_of(getenv("GOMP_STACKSIZE"));
    for (int place = 0; place < omp_get_num_places(); place++) ag_place_cores += omp_get_place_num_procs(place);
    if (!ag_is_kmp && ag_is_forked()) {
        ag_objects objects = {.length = 0};
        dl_iterate_phdr(ag_find_folder, &objects);
        dl_iterate_phdr(ag_find_libgomp, &objects);
        ag_main_pool_is_lost = objects.was_loaded;
    }
    pthread_atfork(ag_before_fork, NULL, ag_after_fork_in_child);
}

static void *ag_wait_at_gate(void *gate)
{
    pthread_mutex_lock((pthread_mutex_t *)gate);
    pthread_mutex_unlock((pthread_mutex_t *)gate);
    return NULL;
}

/* Return whether the system creates `count` threads that exist at the same time. They end before the function returns. */
static int ag_can_create_threads(int count)
{
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
    pthread_t *threads = (pthread_t *)malloc((size_t)count * sizeof *threads);
    pthread_attr_t attributes;
    int created = 0;
    if (!threads) return 0;
    pthread_attr_init(&attributes);
    if (ag_stack_size) pthread_attr_setstacksize(&attributes, ag_stack_size); /* OpenMP ignores a wrong size, too */
    pthread_mutex_lock(&gate);
    while (created < count && pthread_create(&threads[created], &attributes, ag_wait_at_gate, &gate) == 0) created++;
    pthread_mutex_unlock(&gate);
    for (int i = 0; i < created; i++) pthread_join(threads[i], NULL);
    pthread_attr_destroy(&attributes);
    free(threads);
    return created == count;
}

/* Return whether the calling thread may try to start a team of `threads` threads. */
static int ag_may_start_team(int threads)
{
    if (threads == 1) return 1;
    if (ag_pool_is_lost()) return 0;
    return threads <= ag_pool || ag_refused_at == 0 || (double)ag_coarse_ns() - ag_refused_at > AG_REFUSAL_TIME;
}

/* Return whether a team of `threads` threads will start. Threads that the pool of the calling thread lacks are created
 * for a trial. A team within a team has no pool. */
static int ag_can_start_team(int threads)
{
    const int pool = omp_in_parallel() || ag_pool < 1 ? 1 : ag_pool;
    if (!ag_may_start_team(threads)) return 0;
    if (omp_get_active_level() >= omp_get_max_active_levels()) return 1; /* the team has the calling thread alone */
    if (threads <= pool || ag_can_create_threads(threads - pool)) return 1;
    ag_refused_at = (double)ag_coarse_ns();
    return 0;
}

/* Record the number of threads that were requested for the calling thread's last team. Its pool has as many from then on,
 * or fewer if OpenMP limits teams (OMP_THREAD_LIMIT, OMP_DYNAMIC): then no more are created for the next team either. */
static void ag_record_pool(int threads)
{
    if (threads > 1 && !omp_in_parallel()) ag_pool = threads;
}

/* Return the number of threads with which OpenMP starts a team of fewer threads. libgomp ends the threads of its pool that a
 * smaller team does not need, and the next larger team creates them again. If they are awake and have cores, they rather join
 * the smaller team, without work. */
static int ag_threads_to_start(int threads, int cores, int are_awake)
{
    return threads < ag_pool && ag_pool <= cores && are_awake && !omp_in_parallel() ? ag_pool : threads;
}

/* Return how many cores the calling thread's team may run on. OpenMP may have bound the calling thread to one of them: its
 * threads then run on the cores of its places. Otherwise the threads of a team have the affinity of the calling thread. */
static int ag_usable_cores(void)
{
    if (omp_get_proc_bind() == omp_proc_bind_false) return ag_affinity_cores();
    const int cores = omp_get_num_procs();
    return ag_place_cores > 0 && ag_place_cores < cores ? ag_place_cores : cores;
}

#else

#define omp_get_max_threads() 1
#define omp_get_thread_limit() 1
#define omp_get_num_threads() 1
#define omp_in_parallel() 0
#define ag_openmp_init()
#define ag_may_start_team(threads) 1
#define ag_can_start_team(threads) 1
#define ag_record_pool(threads)
#define ag_threads_to_start(threads, cores, are_awake) (threads)
#define ag_usable_cores() ag_affinity_cores()

#endif

#endif
