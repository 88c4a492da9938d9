/* Test double of the part of libascendcl.so about events: marks in a stream that others wait for. See stand_in.h. */
#define _GNU_SOURCE
#include "stand_in.h"

#include <stdlib.h>
#include <time.h>

struct event {
    struct si_mark mark; /* number 0, which is always reached: not recorded yet */
    double seconds;
};

int aclrtCreateEvent(void **event);
int aclrtCreateEventWithFlag(void **event, uint32_t flag);
int aclrtCreateEventExWithFlag(void **event, uint32_t flag);
int aclrtDestroyEvent(void *event);
int aclrtRecordEvent(void *event, void *stream);
int aclrtResetEvent(void *event, void *stream);
int aclrtQueryEventStatus(void *event, int *status);
int aclrtQueryEventWaitStatus(void *event, int *status);
int aclrtSynchronizeEvent(void *event);
int aclrtStreamWaitEvent(void *stream, void *event);
int aclrtEventElapsedTime(float *milliseconds, void *first, void *last);

static int event_of(void *handle, struct event **event)
{
    *event = si_handle_get(handle, KIND_EVENT);
    return *event ? OK : si_misuse(INVALID_HANDLE, "not an event: %s", si_handle_state(handle, KIND_EVENT));
}

static int event_and_stream(void *event_handle, void *stream_handle, struct event **event, struct si_stream **stream)
{
    int code = event_of(event_handle, event);
    return code ? code : si_stream_of(stream_handle, stream);
}

int aclrtCreateEventExWithFlag(void **event, uint32_t flag)
{
    struct si_context *context;
    int code = si_enter("aclrtCreateEventExWithFlag");
    (void)flag;
    if (code == OK && !event)
        code = si_misuse(INVALID_PARAM, "NULL");
    if (code == OK)
        code = si_need_context(&context);
    if (code == OK)
        *event = si_handle_new(KIND_EVENT, si_allocate(1, sizeof(struct event)));
    return si_leave(code);
}

int aclrtCreateEventWithFlag(void **event, uint32_t flag) { return aclrtCreateEventExWithFlag(event, flag); }
int aclrtCreateEvent(void **event) { return aclrtCreateEventExWithFlag(event, 0); }

int aclrtDestroyEvent(void *handle)
{
    struct event *event;
    int fault = si_enter("aclrtDestroyEvent"), code = event_of(handle, &event);
    if (code == OK) {
        si_handle_drop(handle);
        free(event);
    }
    return si_leave(fault ? fault : code);
}

int aclrtRecordEvent(void *event_handle, void *stream_handle)
{
    struct event *event;
    struct si_stream *stream;
    struct timespec now;
    int code = si_enter("aclrtRecordEvent");
    if (code == OK && (code = event_and_stream(event_handle, stream_handle, &event, &stream)) == OK) {
        si_mark(stream, &event->mark);
        clock_gettime(CLOCK_MONOTONIC, &now);
        event->seconds = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
    }
    return si_leave(code);
}

int aclrtResetEvent(void *event_handle, void *stream_handle)
{
    struct event *event;
    struct si_stream *stream;
    int code = si_enter("aclrtResetEvent");
    if (code == OK)
        code = event_and_stream(event_handle, stream_handle, &event, &stream);
    return si_leave(code); /* an event that is recorded once more is another one here anyway */
}

int aclrtQueryEventStatus(void *handle, int *status)
{
    struct event *event;
    int code = si_enter("aclrtQueryEventStatus");
    if (code == OK && (code = event_of(handle, &event)) == OK)
        *status = si_is_reached(&event->mark); /* 1: complete */
    return si_leave(code);
}

int aclrtQueryEventWaitStatus(void *handle, int *status)
{
    struct event *event;
    int code = si_enter("aclrtQueryEventWaitStatus");
    if (code == OK && (code = event_of(handle, &event)) == OK)
        *status = 0; /* complete: nobody waits for the event itself */
    return si_leave(code);
}

int aclrtSynchronizeEvent(void *handle)
{
    struct event *event;
    int fault = si_enter("aclrtSynchronizeEvent"), code = event_of(handle, &event);
    if (code == OK) {
        struct si_mark mark = event->mark;
        while (!si_is_reached(&mark))
            si_wait();
    }
    ++*si_statistic("synchronizations");
    return si_leave(fault ? fault : code);
}

int aclrtStreamWaitEvent(void *stream_handle, void *event_handle)
{
    struct event *event;
    struct si_stream *stream;
    int code = si_enter("aclrtStreamWaitEvent");
    if (code == OK && (code = event_and_stream(event_handle, stream_handle, &event, &stream)) == OK)
        si_queue_wait(stream, &event->mark);
    ++*si_statistic("event_waits");
    return si_leave(code);
}

/* From when the events were put on their streams, not from when these came to them. */
int aclrtEventElapsedTime(float *milliseconds, void *first_handle, void *last_handle)
{
    struct event *first, *last;
    int code = si_enter("aclrtEventElapsedTime");
    if (code == OK && (code = event_of(first_handle, &first)) == OK && (code = event_of(last_handle, &last)) == OK)
        *milliseconds = (float)(1000 * (last->seconds - first->seconds));
    return si_leave(code);
}
