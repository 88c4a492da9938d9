/* Test double of the part of libascendcl.so about explicit contexts. */
#include "stand_in.h"

#include <stdlib.h>

int aclrtCreateContext(void **context, int32_t device);
int aclrtDestroyContext(void *context);
int aclrtSetCurrentContext(void *context);
int aclrtGetCurrentContext(void **context);
int aclrtSetSysParamOpt(int option, int64_t value);
int aclrtGetSysParamOpt(int option, int64_t *value);
int aclrtCtxSetSysParamOpt(int option, int64_t value);
int aclrtCtxGetSysParamOpt(int option, int64_t *value);

int aclrtCreateContext(void **handle, int32_t device)
{
    int code = si_enter("aclrtCreateContext");
    if (code == OK && !handle)
        code = si_misuse(INVALID_PARAM, "NULL");
    if (code == OK && !si_initialised())
        code = si_misuse(UNINITIALIZE, "aclInit comes first");
    if (code == OK && (device < 0 || device >= si_device_count()))
        code = si_fail(INVALID_DEVICEID, "device %d of %d", device, si_device_count());
    if (code == OK) {
        struct si_context *context = si_allocate(1, sizeof *context);
        context->device = device;
        *handle = si_handle_new(KIND_CONTEXT, context);
        si_set_context(*handle);
    }
    return si_leave(code);
}

int aclrtDestroyContext(void *handle)
{
    int fault = si_enter("aclrtDestroyContext");
    struct si_context *context = si_handle_get(handle, KIND_CONTEXT);
    if (!context)
        return si_leave(si_misuse(PARAM_INVALID, "not a context: %s", si_handle_state(handle, KIND_CONTEXT)));
    si_handle_drop(handle); /* the memory stays: streams may still name it */
    return si_leave(fault);
}

int aclrtSetCurrentContext(void *handle)
{
    int code = si_enter("aclrtSetCurrentContext");
    if (code == OK && !si_is_context(handle))
        code = si_misuse(PARAM_INVALID, "not a context: %s", si_handle_state(handle, KIND_CONTEXT));
    if (code == OK)
        si_set_context(handle);
    return si_leave(code);
}

int aclrtGetCurrentContext(void **handle)
{
    int code = si_enter("aclrtGetCurrentContext");
    if (code == OK && !handle)
        code = si_misuse(INVALID_PARAM, "NULL");
    if (code == OK && !(*handle = si_current_context()))
        code = si_fail(CONTEXT_NULL, "no aclrtSetDevice on this thread");
    return si_leave(code);
}

/* --- options, of the process and of each context ------------------------------------------------------------------ */

static int64_t options[OPTIONS];

static int option(const char *function, bool of_context, int which, int64_t **place)
{
    struct si_context *context;
    int code = si_enter(function);
    if (code == OK && (which < 0 || which >= OPTIONS))
        code = si_misuse(INVALID_PARAM, "option %d", which);
    if (code == OK && of_context)
        code = si_need_context(&context);
    *place = code ? NULL : of_context ? &context->options[which] : &options[which];
    return code;
}

#define OPTION(name, of_context, type, action)                                                                         \
    int name(int which, int64_t type value)                                                                 \
    {                                                                                                                  \
        int64_t *place;                                                                                                \
        int code = option(#name, of_context, which, &place);                                                \
        if (code == OK)                                                                                                \
            action;                                                                                                    \
        return si_leave(code);                                                                                         \
    }

OPTION(aclrtSetSysParamOpt, false, , *place = value)
OPTION(aclrtGetSysParamOpt, false, *, *value = *place)
OPTION(aclrtCtxSetSysParamOpt, true, , *place = value)
OPTION(aclrtCtxGetSysParamOpt, true, *, *value = *place)
