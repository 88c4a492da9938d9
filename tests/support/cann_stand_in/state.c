/* Test double of the Ascend runtime: calls, faults, violations, counters and handles. See stand_in.h. */
#define _GNU_SOURCE
#include "stand_in.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { TEXT = 512, FUNCTIONS = 1024, FAULTS = 64 };
enum { HANDLE_STEP = 16, HANDLES = 1 << 24 };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static bool forked, was_initialised;

static char soc[64] = "Ascend910B2";
static int delay_us = 200, device_count = 2, default_device = -1;
static bool varying;
static int64_t memory_limit = (int64_t)4 << 30, initialisations;
static bool finalised;
static const char *report_path;

void si_lock(void) { pthread_mutex_lock(&mutex); }
void si_unlock(void) { pthread_mutex_unlock(&mutex); }
void si_wait(void) { pthread_cond_wait(&changed, &mutex); }
void si_notify(void) { pthread_cond_broadcast(&changed); }
const char *si_soc(void) { return soc; }
int si_delay(void) { return delay_us; }
bool si_varying(void) { return varying; }
int64_t si_memory_limit(void) { return memory_limit; }
int si_device_count(void) { return si_variant.has_devices ? device_count : 0; }

int si_default_device(void) { return default_device; }

/* What the first aclInit's file says: '"default_device":"0"'. Nothing else of it matters here. */
void si_configure(const char *path)
{
    char text[4096] = "";
    FILE *file = path && *path ? fopen(path, "r") : NULL;
    if (file) {
        text[fread(text, 1, sizeof text - 1, file)] = 0;
        fclose(file);
    }
    const char *found = strstr(text, "\"default_device\"");
    default_device = found ? atoi(found + strcspn(found, "0123456789")) : -1;
}

bool si_initialised(void) { return initialisations > 0 && !finalised; }

int64_t si_initialisations(int change)
{
    initialisations += change;
    was_initialised |= initialisations > 0;
    finalised = initialisations == 0;
    return initialisations;
}

/* --- messages and violations -------------------------------------------------------------------------------------- */

static _Thread_local char message[TEXT], taken[TEXT];
static _Thread_local const char *current_function = "";
static char *violations;
static size_t violations_length;
static int64_t violation_count;

static void keep_message(int code, const char *format, va_list arguments)
{
    int used = snprintf(message, TEXT, "%s: ", current_function);
    used += vsnprintf(message + used, (size_t)(TEXT - used), format, arguments);
    if (used < TEXT)
        snprintf(message + used, (size_t)(TEXT - used), " [%d, test double]", code);
}

int si_fail(int code, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    keep_message(code, format, arguments);
    va_end(arguments);
    return code;
}

static void keep_violation(const char *format, va_list arguments)
{
    char line[TEXT];
    int used = snprintf(line, TEXT, "%s: ", current_function);
    vsnprintf(line + used, (size_t)(TEXT - used), format, arguments);
    violation_count++;
    if (violations_length > 1 << 20)
        return;
    size_t length = strlen(line);
    char *larger = realloc(violations, violations_length + length + 2);
    if (!larger)
        abort();
    violations = larger;
    memcpy(violations + violations_length, line, length);
    violations_length += length;
    violations[violations_length++] = '\n';
    violations[violations_length] = 0;
}

void si_violation(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    keep_violation(format, arguments);
    va_end(arguments);
}

int si_misuse(int code, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    keep_message(code, format, arguments);
    va_end(arguments);
    va_start(arguments, format);
    keep_violation(format, arguments);
    va_end(arguments);
    return code;
}

/* Get and clear. The text is gone with the thread's next call, as it may be on the device. */
const char *si_take_message(void)
{
    if (!*message)
        return NULL;
    memcpy(taken, message, TEXT);
    *message = 0;
    return taken;
}

/* --- calls and faults --------------------------------------------------------------------------------------------- */

static struct {
    const char *name;
    int64_t calls;
} functions[FUNCTIONS];
static int function_count;
static int64_t all_calls;

static struct fault {
    char function[64];
    int64_t countdown; /* calls until it strikes */
    bool lasting;
    int code;
} faults[FAULTS];
static int fault_count;
static struct fault work_fault; /* of the work of an operator; a code of 0: none */

static int64_t *calls_of(const char *name)
{
    for (int i = 0; i < function_count; i++)
        if (strcmp(functions[i].name, name) == 0)
            return &functions[i].calls;
    if (function_count == FUNCTIONS)
        abort();
    functions[function_count].name = strdup(name);
    functions[function_count].calls = 0;
    return &functions[function_count++].calls;
}

static int fault_of(const char *name, bool counted)
{
    int code = 0;
    for (int i = 0; i < fault_count;) {
        struct fault *fault = &faults[i];
        bool concerned = strcmp(fault->function, name) == 0 || (counted && strcmp(fault->function, "*") == 0);
        bool strikes = concerned && --fault->countdown <= 0;
        if (strikes)
            code = fault->code;
        if (strikes && !fault->lasting)
            *fault = faults[--fault_count];
        else
            i++;
    }
    return code;
}

int si_fault_of_work(void)
{
    if (!work_fault.code || --work_fault.countdown > 0)
        return OK;
    int code = work_fault.code;
    work_fault.code = OK;
    return code;
}

int si_enter(const char *function)
{
    si_lock();
    current_function = function;
    memset(taken, '?', TEXT - 1);
    bool counted = strcmp(function, "aclGetRecentErrMsg") != 0 && strcmp(function, "aclrtGetSocName") != 0;
    ++*calls_of(function);
    all_calls += counted;
    if (forked)
        return si_misuse(DRV_INTERNAL, "called in a child of fork()");
    int code = fault_of(function, counted);
    return code ? si_fail(code, "a fault was injected here") : OK;
}

int si_leave(int code)
{
    current_function = "";
    si_unlock();
    return code;
}

/* --- statistics --------------------------------------------------------------------------------------------------- */

static struct {
    const char *name;
    int64_t value;
} statistics[] = {
    {"launches", 0},      {"deterministic_launches", 0}, {"deterministic_plans", 0}, {"batch_invariant_plans", 0}, {"synchronizations", 0},
    {"mallocs", 0},       {"host_mallocs", 0},           {"copies_h2h", 0},          {"copies_h2d", 0},
    {"copies_d2h", 0},    {"copies_d2d", 0},             {"bytes_h2h", 0},           {"bytes_h2d", 0},
    {"bytes_d2h", 0},     {"bytes_d2d", 0},              {"memsets", 0},             {"peak_device_bytes", 0},
    {"event_waits", 0},
};
enum { STATISTICS = sizeof statistics / sizeof *statistics };

int64_t *si_statistic(const char *name)
{
    for (int i = 0; i < STATISTICS; i++)
        if (strcmp(statistics[i].name, name) == 0)
            return &statistics[i].value;
    return NULL;
}

static int64_t counter(const char *name)
{
    if (strcmp(name, "tensors") == 0)
        return si_handle_live(KIND_TENSOR);
    if (strcmp(name, "executors") == 0)
        return si_handle_live(KIND_EXECUTOR);
    if (strcmp(name, "streams") == 0)
        return si_handle_live(KIND_STREAM);
    if (strcmp(name, "contexts") == 0)
        return si_handle_live(KIND_CONTEXT); /* the explicit ones: si_primary_context does not count */
    if (strcmp(name, "events") == 0)
        return si_handle_live(KIND_EVENT);
    if (strcmp(name, "arguments") == 0)
        return si_handle_live(KIND_ARGUMENT);
    if (strcmp(name, "in_flight") == 0)
        return si_in_flight();
    if (strcmp(name, "initialisations") == 0)
        return initialisations;
    if (strcmp(name, "violations") == 0)
        return violation_count;
    int64_t *statistic = si_statistic(name);
    return statistic ? *statistic : si_memory_counter(name);
}

/* --- handles ------------------------------------------------------------------------------------------------------ */

static char *handle_base; /* addresses that nobody can read */
static struct {
    void *object;
    enum si_kind kind, was;
} * handle_table;
static int64_t handle_count = 1, handles_live[KIND_ARGUMENT + 1];

static const char *const kind_names[] = {"nothing", "tensor", "executor", "stream", "context", "event", "argument"};

void *si_handle_new(enum si_kind kind, void *object)
{
    if (handle_count == HANDLES)
        abort();
    handle_table[handle_count].object = object;
    handle_table[handle_count].kind = handle_table[handle_count].was = kind;
    handles_live[kind]++;
    return handle_base + HANDLE_STEP * handle_count++;
}

static int64_t index_of(const void *handle)
{
    intptr_t distance = (intptr_t)handle - (intptr_t)handle_base;
    return distance <= 0 || distance % HANDLE_STEP || distance / HANDLE_STEP >= handle_count ? 0
                                                                                               : distance / HANDLE_STEP;
}

void *si_handle_get(const void *handle, enum si_kind kind)
{
    int64_t i = index_of(handle);
    return i && handle_table[i].kind == kind ? handle_table[i].object : NULL;
}

void si_handle_drop(const void *handle)
{
    int64_t i = index_of(handle);
    handles_live[handle_table[i].kind]--;
    handle_table[i].kind = KIND_NONE;
    handle_table[i].object = NULL;
}

const char *si_handle_state(const void *handle, enum si_kind kind)
{
    static _Thread_local char text[64];
    int64_t i = index_of(handle);
    if (!handle)
        return "NULL";
    if (!i)
        return "an address that was never given out";
    if (handle_table[i].kind == KIND_NONE)
        snprintf(text, sizeof text, "a %s that was used up or destroyed", kind_names[handle_table[i].was]);
    else
        snprintf(text, sizeof text, "a %s, not a %s", kind_names[handle_table[i].kind], kind_names[kind]);
    return text;
}

int64_t si_handle_live(enum si_kind kind) { return handles_live[kind]; }
void *si_handle_garbage(void) { return handle_base + HANDLE_STEP * (int64_t)(HANDLES - 1) + 1; }

/* --- control interface -------------------------------------------------------------------------------------------- */

void stand_in_fail(const char *function, int64_t nth, int code)
{
    si_lock();
    if (fault_count == FAULTS)
        abort();
    struct fault *fault = &faults[fault_count++];
    snprintf(fault->function, sizeof fault->function, "%s", function);
    fault->countdown = nth > 0 ? nth : -nth;
    fault->lasting = nth <= 0;
    fault->code = code;
    si_unlock();
}

void stand_in_fail_work(int64_t nth, int code)
{
    si_lock();
    work_fault = (struct fault){.countdown = nth, .code = code};
    si_unlock();
}

int stand_in_faults_left(void)
{
    si_lock();
    int left = fault_count + (work_fault.code != OK);
    si_unlock();
    return left;
}

int64_t stand_in_calls(const char *function)
{
    si_lock();
    int64_t calls = strcmp(function, "*") == 0 ? all_calls : *calls_of(function);
    si_unlock();
    return calls;
}

int64_t stand_in_counter(const char *name)
{
    si_lock();
    int64_t value = counter(name);
    si_unlock();
    return value;
}

int64_t stand_in_violations(char *text, size_t size)
{
    si_lock();
    if (size)
        snprintf(text, size, "%s", violations ? violations : "");
    int64_t count = violation_count;
    si_unlock();
    return count;
}

void stand_in_reset(void)
{
    si_lock();
    fault_count = 0;
    work_fault.code = OK;
    for (int i = 0; i < function_count; i++)
        functions[i].calls = 0;
    all_calls = 0;
    for (int i = 0; i < STATISTICS; i++)
        statistics[i].value = 0;
    *si_statistic("peak_device_bytes") = si_memory_counter("device_bytes");
    violation_count = 0;
    violations_length = 0;
    if (violations)
        *violations = 0;
    si_unlock();
}

void stand_in_set_soc(const char *name)
{
    si_lock();
    snprintf(soc, sizeof soc, "%s", name);
    si_unlock();
}

void stand_in_set_memory(int64_t bytes)
{
    si_lock();
    memory_limit = bytes;
    si_unlock();
}

void stand_in_set_varying(int whether) { varying = whether; }

void stand_in_set_delay(int microseconds)
{
    si_lock();
    delay_us = microseconds;
    si_unlock();
}

/* --- start, fork and end of the process --------------------------------------------------------------------------- */

static void after_fork(void)
{
    forked |= was_initialised; /* who forks before has no device yet, and may get one in the child */
    mutex = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    changed = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    si_streams_after_fork();
}

static void faults_from(char *text)
{
    char function[64];
    long long nth;
    int code, used;
    while (text && sscanf(text, "%63[^:]:%lld:%d%n", function, &nth, &code, &used) == 3) {
        stand_in_fail(function, nth, code);
        text += used;
        if (*text == ',')
            text++;
    }
}

__attribute__((constructor)) static void start(void)
{
    handle_base = mmap(NULL, (size_t)HANDLES * HANDLE_STEP, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    handle_table = mmap(NULL, HANDLES * sizeof *handle_table, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (handle_base == MAP_FAILED || handle_table == MAP_FAILED)
        abort();
    const char *text;
    if ((text = getenv("CANN_STAND_IN_SOC")))
        stand_in_set_soc(text);
    if ((text = getenv("CANN_STAND_IN_DEVICES")))
        device_count = atoi(text);
    if (device_count > MAX_DEVICES)
        device_count = MAX_DEVICES;
    if ((text = getenv("CANN_STAND_IN_MEMORY")))
        memory_limit = atoll(text);
    if ((text = getenv("CANN_STAND_IN_DELAY")))
        delay_us = atoi(text);
    if ((text = getenv("CANN_STAND_IN_VARYING")))
        varying = atoi(text);
    report_path = getenv("CANN_STAND_IN_REPORT");
    faults_from(getenv("CANN_STAND_IN_FAIL"));
    pthread_atfork(NULL, NULL, after_fork);
}

__attribute__((destructor)) static void end(void)
{
    static const char *const reported[] = {
        "tensors",    "executors",  "streams",    "contexts",        "device_allocations", "host_allocations",
        "in_flight",  "launches",   "mallocs",    "initialisations", "violations",         "copies_h2d",
        "copies_d2h", "copies_d2d", "copies_h2h",
    };
    if (!report_path || forked)
        return;
    FILE *file = fopen(report_path, "a");
    if (!file)
        return;
    si_lock();
    for (size_t i = 0; i < sizeof reported / sizeof *reported; i++)
        fprintf(file, "%s %lld\n", reported[i], (long long)counter(reported[i]));
    for (const char *line = violations; line && *line;) {
        const char *newline = strchr(line, '\n');
        fprintf(file, "violation %.*s\n", (int)(newline - line), line);
        line = newline + 1;
    }
    si_unlock();
    fclose(file);
}
