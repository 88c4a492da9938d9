/* Test double of what torch_npu asks of libascendcl.so and of the libraries beside it. See stand_in.h.
 *
 * A dozen questions are answered. The functions at the end are there because torch_npu is linked with them; they fail. */
#define _GNU_SOURCE
#include "stand_in.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct package_version {
    char version[128], major[64], minor[64], release[64], patch[64], reserved[128];
};

struct pointer_attributes {
    uint32_t device;
    int location;
    uint32_t page_size, reserved[4];
};

enum { ON_DEVICE = 1, NOT_REGISTERED = 2, ON_HOST = 0 };

int aclsysGetCANNVersion(int package, struct package_version *version);
int aclsysGetVersionStr(const char *package, char *version);
int aclrtGetMemInfo(int kind, size_t *unused, size_t *total);
int aclrtPointerGetAttributes(const void *address, struct pointer_attributes *attributes);
int aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active);
int aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer);
int aclrtDeviceEnablePeerAccess(int32_t peer, uint32_t flags);
int aclrtDeviceGetBareTgid(int32_t *pid);
int aclrtSetOpWaitTimeout(uint32_t seconds);
int aclrtSetOpExecuteTimeOut(uint32_t seconds);
int aclrtSetDeviceSatMode(int mode);
int aclSetCompileopt(int option, const char *value);
size_t aclGetCompileoptSize(int option);
int aclGetCompileopt(int option, char *value, size_t size);
void aclAppLog(int level, const char *function, const char *file, uint32_t line, const char *format, ...);

int aclsysGetCANNVersion(int package, struct package_version *version)
{
    int code = si_enter("aclsysGetCANNVersion");
    (void)package;
    if (code == OK)
        *version = (struct package_version){"8.5.0", "8", "5", "0", "", ""};
    return si_leave(code);
}

int aclsysGetVersionStr(const char *package, char *version)
{
    int code = si_enter("aclsysGetVersionStr");
    (void)package;
    if (code == OK)
        strcpy(version, "8.5.0");
    return si_leave(code);
}

int aclrtGetMemInfo(int kind, size_t *unused, size_t *total)
{
    struct si_context *context;
    int code = si_enter("aclrtGetMemInfo");
    (void)kind;
    if (code == OK && (code = si_need_context(&context)) == OK) {
        *total = (size_t)si_memory_limit();
        *unused = *total - (size_t)si_memory_counter("device_bytes");
    }
    return si_leave(code);
}

int aclrtPointerGetAttributes(const void *address, struct pointer_attributes *attributes)
{
    int device, code = si_enter("aclrtPointerGetAttributes");
    if (code == OK) {
        enum si_place place = si_place(address, 1, &device);
        int location = place == PLACE_DEVICE ? ON_DEVICE : place == PLACE_LOCKED ? ON_HOST : NOT_REGISTERED;
        *attributes = (struct pointer_attributes){.device = (uint32_t)(device < 0 ? 0 : device), .location = location};
    }
    return si_leave(code);
}

int aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active)
{
    int code = si_enter("aclrtGetPrimaryCtxState");
    if (code == OK && (device < 0 || device >= si_device_count()))
        code = si_fail(INVALID_DEVICEID, "device %d of %d", device, si_device_count());
    if (code == OK) {
        *active = si_primary_is_active(device);
        if (flags)
            *flags = 0;
    }
    return si_leave(code);
}

int aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer)
{
    int code = si_enter("aclrtDeviceCanAccessPeer");
    if (code == OK)
        *can = device != peer;
    return si_leave(code);
}

int aclrtDeviceEnablePeerAccess(int32_t peer, uint32_t flags)
{
    struct si_context *context;
    int code = si_enter("aclrtDeviceEnablePeerAccess");
    (void)flags;
    if (code == OK && (code = si_need_context(&context)) == OK)
        si_allow_peer(context->device, peer);
    return si_leave(code);
}

int aclrtDeviceGetBareTgid(int32_t *pid)
{
    *pid = getpid();
    return OK;
}

#define ACCEPTED(name, ...)                                                                                            \
    int name(__VA_ARGS__)                                                                                              \
    {                                                                                                                  \
        return si_leave(si_enter(#name));                                                                              \
    }
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
ACCEPTED(aclrtSetOpWaitTimeout, uint32_t seconds)
ACCEPTED(aclrtSetOpExecuteTimeOut, uint32_t seconds)
ACCEPTED(aclrtSetDeviceSatMode, int mode)
ACCEPTED(aclSetCompileopt, int option, const char *value)
#pragma GCC diagnostic pop

/* What the 910B answers for the one option that is asked for: operators are not compiled when they are called. */
size_t aclGetCompileoptSize(int option) { return (void)option, sizeof "disable"; }

int aclGetCompileopt(int option, char *value, size_t size)
{
    (void)option;
    snprintf(value, size, "disable");
    return OK;
}

/* With CANN_STAND_IN_LOG set, torch_npu's own log (ASCEND_GLOBAL_LOG_LEVEL) names the functions that it misses. */
void aclAppLog(int level, const char *function, const char *file, uint32_t line, const char *format, ...)
{
    (void)level, (void)file, (void)line;
    if (!getenv("CANN_STAND_IN_LOG"))
        return;
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "%s: ", function);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
}

/* --- what fails --------------------------------------------------------------------------------------------------- */

enum { FEATURE_NOT_SUPPORTED = 207000, OP_LOAD_FAILED = 100024 };

#define REFUSED(name, code)                                                                                            \
    int name(void);                                                                                                    \
    int name(void)                                                                                                     \
    {                                                                                                                  \
        int fault = si_enter(#name);                                                                                   \
        return si_leave(fault ? fault : si_fail(code, "not in the test double"));                                      \
    }
#define NOTHING(name) /* done: there is no object that could be destroyed */                                           \
    int name(void);                                                                                                    \
    int name(void)                                                                                                     \
    {                                                                                                                  \
        return OK;                                                                                                     \
    }
#define NO_OBJECT(name)                                                                                                \
    void *name(void);                                                                                                  \
    void *name(void)                                                                                                   \
    {                                                                                                                  \
        return NULL;                                                                                                   \
    }

/* The older interface of operators, which torch_npu falls back to where an operator is absent. */
NO_OBJECT(aclCreateDataBuffer)
NO_OBJECT(aclCreateTensorDesc)
NO_OBJECT(aclopCreateAttr)
NO_OBJECT(aclGetTensorDescDimV2)
NOTHING(aclDestroyDataBuffer)
NOTHING(aclDestroyTensorDesc)
NOTHING(aclopDestroyAttr)
REFUSED(aclGetTensorDescFormat, OP_LOAD_FAILED)
REFUSED(aclGetTensorDescNumDims, OP_LOAD_FAILED)
REFUSED(aclGetTensorDescType, OP_LOAD_FAILED)
REFUSED(aclSetTensorDescName, OP_LOAD_FAILED)
REFUSED(aclSetTensorFormat, OP_LOAD_FAILED)
REFUSED(aclSetTensorPlaceMent, OP_LOAD_FAILED)
REFUSED(aclSetTensorShape, OP_LOAD_FAILED)
REFUSED(aclopCompileAndExecute, OP_LOAD_FAILED)
REFUSED(aclopSetAttrBool, OP_LOAD_FAILED)
REFUSED(aclopSetAttrDataType, OP_LOAD_FAILED)
REFUSED(aclopSetAttrFloat, OP_LOAD_FAILED)
REFUSED(aclopSetAttrInt, OP_LOAD_FAILED)
REFUSED(aclopSetAttrListBool, OP_LOAD_FAILED)
REFUSED(aclopSetAttrListFloat, OP_LOAD_FAILED)
REFUSED(aclopSetAttrListInt, OP_LOAD_FAILED)
REFUSED(aclopSetAttrListListInt, OP_LOAD_FAILED)
REFUSED(aclopSetAttrString, OP_LOAD_FAILED)

REFUSED(aclGetDeviceCapability, FEATURE_NOT_SUPPORTED)
REFUSED(aclmdlFinalizeDump, FEATURE_NOT_SUPPORTED)
REFUSED(aclmdlInitDump, FEATURE_NOT_SUPPORTED)
REFUSED(aclmdlSetDump, FEATURE_NOT_SUPPORTED)
REFUSED(aclrtBinaryGetFunction, FEATURE_NOT_SUPPORTED)
REFUSED(aclrtBinaryLoadFromData, FEATURE_NOT_SUPPORTED)
REFUSED(aclrtFreePhysical, FEATURE_NOT_SUPPORTED)
REFUSED(aclrtGetFunctionAddr, FEATURE_NOT_SUPPORTED)
REFUSED(aclrtMallocPhysical, FEATURE_NOT_SUPPORTED)
REFUSED(aclrtMapMem, FEATURE_NOT_SUPPORTED)
REFUSED(aclrtMemExportToShareableHandle, FEATURE_NOT_SUPPORTED)
REFUSED(aclrtMemImportFromShareableHandle, FEATURE_NOT_SUPPORTED)
REFUSED(aclrtMemSetPidToShareableHandle, FEATURE_NOT_SUPPORTED)
REFUSED(aclrtProcessReport, FEATURE_NOT_SUPPORTED)
REFUSED(aclrtReleaseMemAddress, FEATURE_NOT_SUPPORTED)
REFUSED(aclrtReserveMemAddress, FEATURE_NOT_SUPPORTED)
REFUSED(aclrtUnmapMem, FEATURE_NOT_SUPPORTED)
REFUSED(rtDevBinaryRegister, FEATURE_NOT_SUPPORTED)
REFUSED(rtFunctionRegister, FEATURE_NOT_SUPPORTED)
REFUSED(rtGetC2cCtrlAddr, FEATURE_NOT_SUPPORTED)
REFUSED(rtKernelLaunch, FEATURE_NOT_SUPPORTED)
REFUSED(MsprofGetHashId, FEATURE_NOT_SUPPORTED)
REFUSED(MsprofRegisterCallback, FEATURE_NOT_SUPPORTED)
REFUSED(MsprofReportAdditionalInfo, FEATURE_NOT_SUPPORTED)
REFUSED(MsprofReportApi, FEATURE_NOT_SUPPORTED)
REFUSED(MsprofReportCompactInfo, FEATURE_NOT_SUPPORTED)
REFUSED(MsprofSysCycleTime, FEATURE_NOT_SUPPORTED)
