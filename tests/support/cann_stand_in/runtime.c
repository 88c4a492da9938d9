/* Test double of libascendcl.so. See stand_in.h. */
#include "stand_in.h"

#include <stdlib.h>
#include <string.h>

int aclInit(const char *config);
int aclFinalize(void);
int aclFinalizeReference(uint64_t *references);
int aclrtSetDevice(int32_t device);
int aclrtResetDevice(int32_t device);
int aclrtGetDevice(int32_t *device);
int aclrtGetDeviceCount(uint32_t *count);
const char *aclrtGetSocName(void);
const char *aclGetRecentErrMsg(void);
int aclrtCreateStream(void **stream);
int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flag);
int aclrtDestroyStream(void *stream);
int aclrtSynchronizeStream(void *stream);
int aclrtSynchronizeDevice(void);
int aclrtStreamQuery(void *stream, int *status);
int aclrtStreamGetId(void *stream, int32_t *id);
int aclrtMalloc(void **address, size_t bytes, int policy);
int aclrtFree(void *address);
int aclrtMallocHost(void **address, size_t bytes);
int aclrtFreeHost(void *address);
int aclrtMemcpy(void *dst, size_t dst_max, const void *src, size_t bytes, int kind);
int aclrtMemcpyAsync(void *dst, size_t dst_max, const void *src, size_t bytes, int kind, void *stream);
int aclrtMemset(void *address, size_t max, int32_t value, size_t bytes);

/* --- start and end ------------------------------------------------------------------------------------------------ */

int aclInit(const char *config)
{
    int code = si_enter("aclInit");
    if (code == OK && si_variant.init_code)
        code = si_fail(si_variant.init_code, "this variant cannot start");
    if (code == OK && si_initialisations(+1) > 1)
        code = REPEAT_INITIALIZE; /* counted all the same: aclFinalizeReference takes it back */
    else if (code == OK)
        si_configure(config);
    return si_leave(code);
}

int aclFinalize(void)
{
    int fault = si_enter("aclFinalize");
    if (!si_initialised())
        return si_leave(REPEAT_FINALIZE);
    si_violation("ends the device for everybody in the process");
    si_initialisations((int)-si_initialisations(0));
    return si_leave(fault);
}

/* Takes back one aclInit among several; older installations lack it. */
int aclFinalizeReference(uint64_t *references)
{
    int fault = si_enter("aclFinalizeReference");
    if (!si_initialised())
        return si_leave(REPEAT_FINALIZE);
    int64_t left = si_initialisations(-1);
    if (references)
        *references = (uint64_t)left;
    if (left == 0 && si_in_flight())
        si_violation("streams still have work queued");
    return si_leave(fault);
}

const char *aclGetRecentErrMsg(void)
{
    int fault = si_enter("aclGetRecentErrMsg");
    const char *text = fault ? NULL : si_take_message();
    si_leave(OK);
    return text;
}

const char *aclrtGetSocName(void)
{
    int fault = si_enter("aclrtGetSocName");
    const char *name = fault ? NULL : si_soc(); /* answers before aclInit, too, as aclrtGetDeviceCount does */
    si_leave(OK);
    return name;
}

/* --- devices ------------------------------------------------------------------------------------------------------ */

int aclrtGetDeviceCount(uint32_t *count)
{
    int code = si_enter("aclrtGetDeviceCount");
    if (code == OK && !count)
        code = si_misuse(INVALID_PARAM, "NULL");
    if (code == OK && si_variant.device_count_code)
        code = si_fail(si_variant.device_count_code, "no driver");
    if (code == OK)
        *count = (uint32_t)si_device_count();
    return si_leave(code);
}

int aclrtSetDevice(int32_t device)
{
    int code = si_enter("aclrtSetDevice");
    if (code == OK && !si_initialised())
        code = si_misuse(UNINITIALIZE, "aclInit comes first");
    if (code == OK && (device < 0 || device >= si_device_count()))
        code = si_fail(INVALID_DEVICEID, "device %d of %d", device, si_device_count());
    if (code == OK)
        si_set_context(si_primary_context(device));
    return si_leave(code);
}

int aclrtResetDevice(int32_t device)
{
    int fault = si_enter("aclrtResetDevice");
    si_violation("ends device %d for everybody in the process", device);
    si_set_context(NULL);
    return si_leave(fault);
}

int aclrtGetDevice(int32_t *device)
{
    struct si_context *context;
    int code = si_enter("aclrtGetDevice");
    if (code == OK && !device)
        code = si_misuse(INVALID_PARAM, "NULL");
    if (code == OK && !si_initialised())
        code = si_misuse(UNINITIALIZE, "aclInit comes first");
    if (code == OK && !si_current_context() && si_default_device() >= 0)
        *device = si_default_device(); /* of a thread that is bound to none: it has no context all the same */
    else if (code == OK && !si_current_context())
        code = si_fail(CONTEXT_NULL, "no aclrtSetDevice on this thread"); /* asking is no misuse */
    else if (code == OK && (code = si_need_context(&context)) == OK)
        *device = context->device;
    return si_leave(code);
}

/* --- streams ------------------------------------------------------------------------------------------------------ */

int aclrtCreateStream(void **stream)
{
    struct si_context *context;
    int code = si_enter("aclrtCreateStream");
    if (code == OK && !stream)
        code = si_misuse(INVALID_PARAM, "NULL");
    if (code == OK)
        code = si_need_context(&context);
    if (code == OK)
        code = si_stream_new(context, stream);
    return si_leave(code);
}

/* Priorities and flags change nothing here. */
int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flag)
{
    (void)priority, (void)flag;
    return aclrtCreateStream(stream);
}

int aclrtDestroyStream(void *stream)
{
    int fault = si_enter("aclrtDestroyStream"), code = si_stream_destroy(stream);
    return si_leave(fault ? fault : code);
}

int aclrtSynchronizeStream(void *stream)
{
    int fault = si_enter("aclrtSynchronizeStream"), code = si_stream_wait(stream);
    ++*si_statistic("synchronizations");
    return si_leave(fault ? fault : code);
}

int aclrtSynchronizeDevice(void)
{
    struct si_context *context;
    int fault = si_enter("aclrtSynchronizeDevice"), code = si_need_context(&context);
    if (code == OK)
        code = si_device_wait(context->device);
    ++*si_statistic("synchronizations");
    return si_leave(fault ? fault : code);
}

int aclrtStreamQuery(void *handle, int *status)
{
    struct si_stream *stream;
    int code = si_enter("aclrtStreamQuery");
    if (code == OK)
        code = si_stream_of(handle, &stream);
    if (code == OK)
        *status = si_stream_is_idle(stream) ? 0 : 1; /* complete, not ready */
    return si_leave(code);
}

int aclrtStreamGetId(void *handle, int32_t *id)
{
    int code = si_enter("aclrtStreamGetId");
    struct si_stream *stream = si_handle_get(handle, KIND_STREAM);
    if (code == OK && !stream)
        code = si_misuse(INVALID_HANDLE, "not a stream: %s", si_handle_state(handle, KIND_STREAM));
    if (code == OK)
        *id = si_stream_slot(stream);
    return si_leave(code);
}

/* --- memory ------------------------------------------------------------------------------------------------------- */

int aclrtMalloc(void **address, size_t bytes, int policy)
{
    struct si_context *context;
    int code = si_enter("aclrtMalloc");
    if (code == OK && (!address || policy < 0 || policy > 2))
        code = si_misuse(INVALID_PARAM, "NULL, or policy %d", policy);
    if (code == OK)
        code = si_need_context(&context);
    if (code == OK)
        code = si_device_malloc(context->device, address, bytes);
    return si_leave(code);
}

/* Memory is freed even where a fault is injected. */
static int freed(const char *function, int (*release)(void *), void *address)
{
    struct si_context *context;
    int fault = si_enter(function), code = si_need_context(&context);
    if (code == OK)
        code = release(address);
    return si_leave(fault ? fault : code);
}

int aclrtFree(void *address) { return freed("aclrtFree", si_device_free, address); }

int aclrtMallocHost(void **address, size_t bytes)
{
    struct si_context *context;
    int code = si_enter("aclrtMallocHost");
    if (code == OK && !address)
        code = si_misuse(INVALID_PARAM, "NULL");
    if (code == OK)
        code = si_need_context(&context);
    if (code == OK)
        code = si_host_malloc(address, bytes);
    return si_leave(code);
}

int aclrtFreeHost(void *address) { return freed("aclrtFreeHost", si_host_free, address); }

/* Two ranges that queued work must be done with: a synchronous copy does not wait for streams. */
static void check_race(struct si_range a, struct si_range b)
{
    const char *other = si_conflict(a, NULL);
    if (!other && b.bytes)
        other = si_conflict(b, NULL);
    if (other)
        si_violation("does not wait for the stream, whose work (%s) is not done with this memory", other);
}

int aclrtMemcpy(void *dst, size_t dst_max, const void *src, size_t bytes, int kind)
{
    struct si_context *context;
    int code = si_enter("aclrtMemcpy");
    if (code == OK)
        code = si_need_context(&context);
    if (code == OK)
        code = si_check_copy(dst, dst_max, src, bytes, kind, context->device, false);
    if (code == OK) {
        check_race((struct si_range){dst, bytes, true}, (struct si_range){src, bytes, false});
        memmove(si_reach(dst), si_reach(src), bytes);
    }
    return si_leave(code);
}

struct copy {
    char *dst;
    const char *src;
    size_t bytes;
};

static void copy(struct si_work *work)
{
    const struct copy *copy = work->data;
    memmove(copy->dst, copy->src, copy->bytes);
}

int aclrtMemcpyAsync(void *dst, size_t dst_max, const void *src, size_t bytes, int kind, void *stream_handle)
{
    struct si_stream *stream;
    int code = si_enter("aclrtMemcpyAsync");
    if (code == OK)
        code = si_stream_of(stream_handle, &stream);
    if (code == OK)
        code = si_check_copy(dst, dst_max, src, bytes, kind, si_stream_device(stream), true);
    if (code == OK) {
        struct si_work *work = si_allocate(1, sizeof *work);
        struct copy *data = si_allocate(1, sizeof *data);
        *data = (struct copy){si_reach(dst), si_reach(src), bytes};
        *work = (struct si_work){
            .run = copy, .data = data, .ranges = {{dst, bytes, true}, {src, bytes, false}}, .range_count = 2, .name = "aclrtMemcpyAsync"};
        si_queue(stream, work);
    }
    return si_leave(code);
}

int aclrtMemset(void *address, size_t max, int32_t value, size_t bytes)
{
    struct si_context *context;
    int device, code = si_enter("aclrtMemset");
    if (code == OK)
        code = si_need_context(&context);
    if (code == OK && (!address || bytes == 0 || bytes > max))
        code = si_misuse(PARAM_INVALID, "%zu of %zu bytes at %p", bytes, max, address);
    if (code == OK && (si_place(address, bytes, &device) != PLACE_DEVICE || device != context->device))
        code = si_misuse(PARAM_INVALID, "not within an allocation on device %d", context->device);
    if (code == OK) {
        check_race((struct si_range){address, bytes, true}, (struct si_range){0});
        memset(si_alias(address), value, bytes);
        ++*si_statistic("memsets");
    }
    return si_leave(code);
}
