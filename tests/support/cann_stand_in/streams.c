/* Test double of the Ascend runtime: contexts, and streams whose work is really done later, on separate threads. */
#define _GNU_SOURCE
#include "stand_in.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct si_stream {
    struct si_context *context;
    int slot;
    uint64_t after[SLOTS]; /* by slot: what comes next on this stream is in order behind the work up to this number */
    struct si_work *first, *last; /* the first one is being done */
    bool stop;
    int error; /* of work that has failed; the next wait returns it */
    pthread_t thread;
    struct si_stream *next;
};

static struct si_stream *streams;
/* Work is numbered from 1 on, by the slot of its stream. A slot is used again, its numbers go on. */
static uint64_t queued[SLOTS], done[SLOTS];
static bool taken[SLOTS];
static void *primary[MAX_DEVICES];
static struct si_context primary_contexts[MAX_DEVICES];
static _Thread_local void *current;

/* --- contexts ----------------------------------------------------------------------------------------------------- */

void si_set_context(void *handle) { current = handle; }
void *si_current_context(void) { return current; }

void *si_primary_context(int device)
{
    primary_contexts[device].device = device;
    primary_contexts[device].primary = true;
    /* not a counted handle: nobody creates or destroys it */
    return primary[device] = &primary_contexts[device];
}

bool si_primary_is_active(int device) { return primary[device] != NULL; }

static struct si_context *context_of(void *handle)
{
    for (int i = 0; i < MAX_DEVICES; i++)
        if (handle && handle == primary[i])
            return handle;
    return si_handle_get(handle, KIND_CONTEXT);
}

bool si_is_context(void *handle) { return context_of(handle) != NULL; }

int si_need_context(struct si_context **context)
{
    *context = NULL;
    if (!si_initialised())
        return si_misuse(UNINITIALIZE, "aclInit comes first");
    if (!(*context = context_of(current)))
        return si_misuse(CONTEXT_NULL, "no aclrtSetDevice on this thread");
    return OK;
}

/* --- streams ------------------------------------------------------------------------------------------------------ */

static void *work_through(void *argument)
{
    struct si_stream *stream = argument;
    bool idle = true;
    si_lock();
    for (;;) {
        while (!stream->first && !stream->stop) {
            idle = true;
            si_wait();
        }
        if (!stream->first)
            break;
        struct si_work *work = stream->first;
        int delay = idle ? si_delay() : 0;
        idle = false;
        si_unlock();
        if (delay > 0)
            usleep((useconds_t)delay);
        if (work->error == OK)
            work->run(work);
        si_lock();
        if (work->error)
            stream->error = work->error;
        done[stream->slot]++;
        stream->first = work->next;
        if (!stream->first)
            stream->last = NULL;
        free(work->data);
        free(work);
        si_notify();
    }
    si_unlock();
    return NULL;
}

int si_stream_new(struct si_context *context, void **handle)
{
    int slot = 0;
    while (slot < SLOTS && taken[slot])
        slot++;
    if (slot == SLOTS)
        return si_fail(MEMORY_ALLOCATION, "more than %d streams", SLOTS);
    struct si_stream *stream = si_allocate(1, sizeof *stream);
    stream->context = context;
    stream->slot = slot;
    if (pthread_create(&stream->thread, NULL, work_through, stream)) {
        free(stream);
        return si_fail(MEMORY_ALLOCATION, "no thread");
    }
    taken[slot] = true;
    stream->next = streams;
    streams = stream;
    *handle = si_handle_new(KIND_STREAM, stream);
    return OK;
}

int si_stream_of(void *handle, struct si_stream **stream)
{
    struct si_context *context;
    int code = si_need_context(&context);
    if (code)
        return code;
    if (!handle)
        return si_misuse(PARAM_INVALID, "the default stream (NULL) is not for threads of a library");
    if (!(*stream = si_handle_get(handle, KIND_STREAM)))
        return si_misuse(INVALID_HANDLE, "not a stream: %s", si_handle_state(handle, KIND_STREAM));
    if ((*stream)->context != context)
        return si_misuse(STREAM_CONTEXT, "the stream belongs to another context (device %d; current: %d)",
                         (*stream)->context->device, context->device);
    return OK;
}

/* The error of work that has failed on this stream since the last wait. */
static int take_error(struct si_stream *stream)
{
    int code = stream->error;
    stream->error = OK;
    return code ? si_fail(code, "the work of an operator has failed, a fault was injected here") : OK;
}

int si_stream_wait(void *handle)
{
    struct si_stream *stream;
    int code = si_stream_of(handle, &stream);
    if (code)
        return code;
    /* Work that comes later, from another thread, need not be waited for. */
    for (struct si_work *last = stream->last; last;) {
        struct si_work *work = stream->first;
        while (work && work != last)
            work = work->next;
        if (!work)
            break;
        si_wait();
    }
    return take_error(stream);
}

int si_stream_destroy(void *handle)
{
    struct si_stream *stream;
    int code = si_stream_of(handle, &stream);
    if (code)
        return code;
    if (stream->first)
        si_violation("the stream still has work queued (%s)", stream->first->name);
    stream->stop = true;
    si_handle_drop(handle);
    si_notify();
    pthread_t thread = stream->thread;
    si_unlock();
    pthread_join(thread, NULL);
    si_lock();
    struct si_stream **place = &streams;
    while (*place != stream)
        place = &(*place)->next;
    *place = stream->next;
    taken[stream->slot] = false;
    free(stream);
    return OK;
}

static bool meet(struct si_range a, struct si_range b)
{
    return (a.written || b.written) && (const char *)a.start < (const char *)b.start + b.bytes &&
           (const char *)b.start < (const char *)a.start + a.bytes;
}

const char *si_conflict(struct si_range range, const struct si_stream *user)
{
    for (struct si_stream *stream = streams; stream; stream = stream->next)
        for (struct si_work *work = stream == user ? NULL : stream->first; work; work = work->next)
            for (int i = 0; i < work->range_count && !(user && work->number <= user->after[stream->slot]); i++)
                if (meet(range, work->ranges[i]))
                    return work->name;
    return NULL;
}

void si_queue(struct si_stream *stream, struct si_work *work)
{
    for (int i = 0; i < work->range_count; i++) {
        const char *other = si_conflict(work->ranges[i], stream);
        if (other)
            si_violation("uses memory that work on another stream uses (%s)", other);
    }
    work->error = strncmp(work->name, "aclnn", 5) == 0 ? si_fault_of_work() : OK;
    work->next = NULL;
    work->number = ++queued[stream->slot];
    if (stream->last)
        stream->last->next = work;
    else
        stream->first = work;
    stream->last = work;
    si_notify();
}

/* --- the order between streams ------------------------------------------------------------------------------------ */

void si_mark(const struct si_stream *stream, struct si_mark *mark)
{
    mark->slot = stream->slot;
    mark->number = queued[stream->slot];
    memcpy(mark->after, stream->after, sizeof mark->after);
    mark->after[mark->slot] = mark->number;
}

bool si_is_reached(const struct si_mark *mark) { return done[mark->slot] >= mark->number; }

static void wait_for_mark(struct si_work *work)
{
    si_lock();
    while (!si_is_reached(work->data))
        si_wait();
    si_unlock();
}

void si_queue_wait(struct si_stream *stream, const struct si_mark *mark)
{
    struct si_work *work = si_allocate(1, sizeof *work);
    struct si_mark *data = si_allocate(1, sizeof *data);
    *data = *mark;
    *work = (struct si_work){.run = wait_for_mark, .data = data, .name = "aclrtStreamWaitEvent"};
    si_queue(stream, work);
    for (int slot = 0; slot < SLOTS; slot++)
        if (stream->after[slot] < mark->after[slot])
            stream->after[slot] = mark->after[slot];
}

bool si_stream_is_idle(const struct si_stream *stream) { return !stream->first; }
int si_stream_device(const struct si_stream *stream) { return stream->context->device; }
int si_stream_slot(const struct si_stream *stream) { return stream->slot; }

int si_device_wait(int device)
{
    int code = OK;
    for (struct si_stream *stream = streams; stream; stream = stream->next) {
        while (stream->context->device == device && stream->first)
            si_wait();
        int error = stream->context->device == device ? take_error(stream) : OK;
        code = code ? code : error;
    }
    return code;
}

int64_t si_in_flight(void)
{
    int64_t count = 0;
    for (struct si_stream *stream = streams; stream; stream = stream->next)
        for (struct si_work *work = stream->first; work; work = work->next)
            count++;
    return count;
}

void si_streams_after_fork(void) { streams = NULL; }
