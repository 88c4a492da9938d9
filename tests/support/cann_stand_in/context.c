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

static int64_t process_options[OPTIONS];

static int valid_option(const char *function, int option)
{
    int code = si_enter(function);
    if (code == OK && (option < 0 || option >= OPTIONS))
        code = si_misuse(INVALID_PARAM, "option %d", option);
    return code;
}

int aclrtSetSysParamOpt(int option, int64_t value)
{
    int code = valid_option("aclrtSetSysParamOpt", option);
    if (code == OK)
        process_options[option] = value;
    return si_leave(code);
}

int aclrtGetSysParamOpt(int option, int64_t *value)
{
    int code = valid_option("aclrtGetSysParamOpt", option);
    if (code == OK)
        *value = process_options[option];
    return si_leave(code);
}

static int option_context(const char *function, int option, struct si_context **context)
{
    int code = valid_option(function, option);
    return code ? code : si_need_context(context);
}

int aclrtCtxSetSysParamOpt(int option, int64_t value)
{
    struct si_context *context;
    int code = option_context("aclrtCtxSetSysParamOpt", option, &context);
    if (code == OK && (value < 0 || value > 3))
        code = si_misuse(PARAM_INVALID, "option %d set to %lld", option, (long long)value);
    if (code == OK) {
        context->options[option] = value;
        context->is_set[option] = true;
    }
    return si_leave(code);
}

int aclrtCtxGetSysParamOpt(int option, int64_t *value)
{
    struct si_context *context;
    int code = option_context("aclrtCtxGetSysParamOpt", option, &context);
    if (code == OK && !value)
        code = si_misuse(INVALID_PARAM, "NULL");
    if (code == OK && !context->is_set[option])
        code = si_fail(OPTION_NOT_SET, "option %d was never set in this context", option); /* asking is no misuse */
    if (code == OK)
        *value = context->options[option];
    return si_leave(code);
}
