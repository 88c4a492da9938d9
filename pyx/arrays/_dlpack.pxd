from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

cimport numpy as cnp


cdef struct DLDevice:
    int32_t device_type
    int32_t device_id


cdef struct DLDataType:
    uint8_t code
    uint8_t bits
    uint16_t lanes


cdef struct DLTensor:
    void *data
    DLDevice device
    int32_t ndim
    DLDataType dtype
    int64_t *shape
    int64_t *strides  # in elements; before DLPack 1.2 it may be NULL, for a C-contiguous array
    uint64_t byte_offset


cdef struct DLManagedTensor:  # the structure before DLPack 1.0
    DLTensor dl_tensor
    void *manager_ctx
    void (*deleter)(DLManagedTensor *) noexcept nogil


cdef struct DLPackVersion:
    uint32_t major
    uint32_t minor


cdef struct DLManagedTensorVersioned:
    DLPackVersion version
    void *manager_ctx
    void (*deleter)(DLManagedTensorVersioned *) noexcept nogil
    uint64_t flags
    DLTensor dl_tensor


cdef struct DLPackExchangeAPI:
    DLPackVersion version
    DLPackExchangeAPI *prev_api  # the table of an earlier version, or NULL
    void *managed_tensor_allocator
    int (*managed_tensor_from_py_object_no_sync)(void *, DLManagedTensorVersioned **) except -1
    int (*managed_tensor_to_py_object_no_sync)(DLManagedTensorVersioned *, void **) except -1
    void *dltensor_from_py_object_no_sync
    void *current_work_stream


cdef const DLPackExchangeAPI *exchange_api(object kind) except? NULL
cdef cnp.ndarray array_through(const DLPackExchangeAPI *api, object value)
cdef cnp.ndarray array_of(object value, bint is_writable)
cdef object object_through(const DLPackExchangeAPI *api, cnp.ndarray array)


cdef class Exported:
    cdef cnp.ndarray array
