from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

cdef extern from "ascend_grad/acl/runtime.h" nogil:
    ctypedef int ag_acl_error
    ctypedef int32_t ag_aclnn_status
    ctypedef void *ag_acl_stream
    ctypedef void *ag_acl_context
    ctypedef struct ag_acl_tensor:
        pass
    ctypedef struct ag_acl_executor:
        pass
    ctypedef struct ag_acl_scalar:
        pass
    ctypedef struct ag_acl_integers:
        pass

    enum:
        AG_ACL_SUCCESS
        AG_ACL_HOST_TO_DEVICE
        AG_ACL_DEVICE_TO_HOST
        AG_ACL_DEVICE_TO_DEVICE
        AG_ACL_HUGE_FIRST
        AG_ACL_DETERMINISTIC
        AG_ACL_FORMAT_ND
        AG_ACL_SYMBOL_COUNT

    ctypedef struct ag_acl_functions:
        ag_acl_error (*aclInit)(const char *config) noexcept nogil
        ag_acl_error (*aclFinalizeReference)(uint64_t *count) noexcept nogil
        const char *(*aclGetRecentErrMsg)() noexcept nogil
        ag_acl_error (*aclrtGetDeviceCount)(uint32_t *count) noexcept nogil
        const char *(*aclrtGetSocName)() noexcept nogil
        ag_acl_error (*aclrtSetDevice)(int32_t device) noexcept nogil
        ag_acl_error (*aclrtGetDevice)(int32_t *device) noexcept nogil
        ag_acl_error (*aclrtGetCurrentContext)(ag_acl_context *context) noexcept nogil
        ag_acl_error (*aclrtSetCurrentContext)(ag_acl_context context) noexcept nogil
        ag_acl_error (*aclrtCtxGetSysParamOpt)(int option, int64_t *value) noexcept nogil
        ag_acl_error (*aclrtCtxSetSysParamOpt)(int option, int64_t value) noexcept nogil
        ag_acl_error (*aclrtCreateStream)(ag_acl_stream *stream) noexcept nogil
        ag_acl_error (*aclrtDestroyStream)(ag_acl_stream stream) noexcept nogil
        ag_acl_error (*aclrtSynchronizeStream)(ag_acl_stream stream) noexcept nogil
        ag_acl_error (*aclrtMalloc)(void **pointer, size_t size, int policy) noexcept nogil
        ag_acl_error (*aclrtFree)(void *pointer) noexcept nogil
        ag_acl_error (*aclrtMallocHost)(void **pointer, size_t size) noexcept nogil
        ag_acl_error (*aclrtFreeHost)(void *pointer) noexcept nogil
        ag_acl_error (*aclrtMemset)(void *pointer, size_t max, int32_t value, size_t size) noexcept nogil
        ag_acl_error (*aclrtMemcpyAsync)(
            void *to, size_t max, const void *source, size_t size, int kind, ag_acl_stream stream
        ) noexcept nogil
        ag_acl_tensor *(*aclCreateTensor)(
            const int64_t *dims, uint64_t rank, int dtype, const int64_t *strides, int64_t offset, int format,
            const int64_t *storage_dims, uint64_t storage_rank, void *data
        ) noexcept nogil
        ag_acl_error (*aclDestroyTensor)(const ag_acl_tensor *tensor) noexcept nogil
        ag_acl_error (*aclDestroyAclOpExecutor)(ag_acl_executor *executor) noexcept nogil
        ag_acl_scalar *(*aclCreateScalar)(void *value, int dtype) noexcept nogil
        ag_acl_error (*aclDestroyScalar)(const ag_acl_scalar *scalar) noexcept nogil
        ag_acl_integers *(*aclCreateIntArray)(const int64_t *values, uint64_t count) noexcept nogil
        ag_acl_error (*aclDestroyIntArray)(const ag_acl_integers *integers) noexcept nogil

    ctypedef struct ag_acl_symbol:
        const char *name
        size_t offset
        int required

    const ag_acl_symbol[] ag_acl_symbols

ctypedef ag_acl_error (*destroyer)(void *handle) noexcept nogil

cdef ag_acl_functions table
cdef int check(ag_acl_error code, str call) except -1
cdef str recent_message()
cdef void destroy(destroyer function, void *handle, str call) noexcept


cdef class DeviceRange:
    cdef void *address
    cdef readonly size_t size
    cdef readonly int device
    cdef object __weakref__


cdef class DeviceMemory(DeviceRange):
    pass


cdef class HostMemory:
    cdef void *address
    cdef readonly size_t size
    cdef readonly int device


cdef class AnyStream:
    cdef ag_acl_stream handle
    cdef readonly int device


cdef class Stream(AnyStream):
    pass
