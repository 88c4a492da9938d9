/* The functions of the runtime (libascendcl) and of the operator framework (libnnopbase), as one table of pointers.
 *
 * AG_ACL_FUNCTIONS lists the functions once: whether this library requires the function, its name, its result, its
 * arguments. The table's members and the list of names to look up are made from it. Nothing here is linked: `_acl`
 * fills the table. */
#ifndef ASCEND_GRAD_ACL_RUNTIME_H
#define ASCEND_GRAD_ACL_RUNTIME_H

#include "types.h"

/* clang-format off */
#define AG_ACL_FUNCTIONS(X) \
    X(1, aclInit,                       ag_acl_error,     (const char *config)) \
    X(0, aclFinalizeReference,          ag_acl_error,     (uint64_t *count)) \
    X(0, aclGetRecentErrMsg,            const char *,     (void)) \
    X(1, aclrtGetDeviceCount,           ag_acl_error,     (uint32_t *count)) \
    X(0, aclrtGetSocName,               const char *,     (void)) \
    X(1, aclrtSetDevice,                ag_acl_error,     (int32_t device)) \
    X(0, aclrtGetDevice,                ag_acl_error,     (int32_t *device)) \
    X(0, aclrtGetCurrentContext,        ag_acl_error,     (ag_acl_context *context)) \
    X(0, aclrtSetCurrentContext,        ag_acl_error,     (ag_acl_context context)) \
    X(0, aclrtCtxGetSysParamOpt,        ag_acl_error,     (int option, int64_t *value)) \
    X(0, aclrtCtxSetSysParamOpt,        ag_acl_error,     (int option, int64_t value)) \
    X(1, aclrtCreateStream,             ag_acl_error,     (ag_acl_stream *stream)) \
    X(1, aclrtDestroyStream,            ag_acl_error,     (ag_acl_stream stream)) \
    X(1, aclrtSynchronizeStream,        ag_acl_error,     (ag_acl_stream stream)) \
    X(1, aclrtMalloc,                   ag_acl_error,     (void **pointer, size_t size, int policy)) \
    X(1, aclrtFree,                     ag_acl_error,     (void *pointer)) \
    X(1, aclrtMallocHost,               ag_acl_error,     (void **pointer, size_t size)) \
    X(1, aclrtFreeHost,                 ag_acl_error,     (void *pointer)) \
    X(1, aclrtMemset,                   ag_acl_error,     (void *pointer, size_t max, int32_t value, size_t size)) \
    X(1, aclrtMemcpyAsync,              ag_acl_error,     (void *to, size_t max, const void *from, size_t size, \
                                                           int kind, ag_acl_stream stream)) \
    X(1, aclCreateTensor,               ag_acl_tensor *,  (const int64_t *dims, uint64_t rank, int dtype, \
                                                           const int64_t *strides, int64_t offset, int format, \
                                                           const int64_t *storage_dims, uint64_t storage_rank, \
                                                           void *data)) \
    X(1, aclDestroyTensor,              ag_acl_error,     (const ag_acl_tensor *tensor)) \
    X(0, aclDestroyAclOpExecutor,       ag_acl_error,     (ag_acl_executor *executor)) \
    X(0, aclCreateScalar,               ag_acl_scalar *,  (void *value, int dtype)) \
    X(0, aclDestroyScalar,              ag_acl_error,     (const ag_acl_scalar *scalar)) \
    X(0, aclCreateIntArray,             ag_acl_integers *, (const int64_t *values, uint64_t count)) \
    X(0, aclDestroyIntArray,            ag_acl_error,     (const ag_acl_integers *integers))
/* clang-format on */

typedef struct {
#define AG_MEMBER(required, name, result, arguments) result(*name) arguments;
    AG_ACL_FUNCTIONS(AG_MEMBER)
#undef AG_MEMBER
} ag_acl_functions;

typedef struct {
    const char *name;
    size_t offset; /* of the function's member in ag_acl_functions, in bytes */
    int required;
} ag_acl_symbol;

static const ag_acl_symbol ag_acl_symbols[] = {
#define AG_SYMBOL(required, name, result, arguments) {#name, offsetof(ag_acl_functions, name), required},
    AG_ACL_FUNCTIONS(AG_SYMBOL)
#undef AG_SYMBOL
};

enum { AG_ACL_SYMBOL_COUNT = sizeof ag_acl_symbols / sizeof ag_acl_symbols[0] };

#endif
