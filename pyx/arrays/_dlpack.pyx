"""DLPack: conversion of other libraries' arrays to NumPy arrays over the same memory, and of NumPy arrays to theirs.

Arrays are exchanged through the C exchange API if their type offers one, else through capsules, of DLPack 1.0 and later
or of earlier versions. NumPy's own reader does not know bfloat16, and takes longer than a small call.

The .pxd file declares the structures of ``dlpack.h``, version 1.3.
"""

cimport cython
cimport numpy as cnp
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New, PyCapsule_SetName
from cpython.ref cimport Py_INCREF
from libc.stdint cimport UINTPTR_MAX, int64_t, uintptr_t
from libc.stdlib cimport free, malloc

from ascend_grad._memory cimport MAX_RANK
from ascend_grad._views cimport View, is_addressable

from ._dtypes import BFLOAT16

cnp.import_array()

cdef extern from *:
    """
    #if PY_VERSION_HEX >= 0x030D0000
    #define ag_interpreter_ends Py_IsFinalizing
    #else
    #define ag_interpreter_ends _Py_IsFinalizing
    #endif
    """
    bint ag_interpreter_ends() noexcept nogil

cdef extern from "Python.h":
    const int64_t PY_SSIZE_T_MAX
    bint Py_IsInitialized() noexcept nogil
    void Py_DECREF(PyObject *)

cdef extern from "numpy/arrayobject.h":
    int PyArray_SetBaseObject(cnp.ndarray arr, object base) except -1

cdef enum:  # constants of dlpack.h
    MAJOR = 1
    MINOR = 3
    CPU = 1
    CUDA_HOST = 3
    ROCM_HOST = 11
    EXT_DEVICE = 12  # the device type under which torch_npu exchanges arrays
    READ_ONLY = 1
    IS_COPIED = 2

cdef enum DataTypeCode:
    INT = 0
    UINT = 1
    FLOAT = 2
    BFLOAT = 4
    COMPLEX = 5
    BOOL = 6

cdef const char *LEGACY = "dltensor"
cdef const char *VERSIONED = "dltensor_versioned"
cdef tuple VERSION = (MAJOR, MINOR)

cdef int _bfloat16_number = BFLOAT16.num
cdef char _nothing  # the address of arrays without elements; for NULL, NumPy would allocate memory

_DEVICES = {
    2: "cuda", 4: "opencl", 7: "vulkan", 8: "metal", 9: "vpi", 10: "rocm", 12: "ext_dev", 13: "cuda_managed",
    14: "oneapi", 15: "webgpu", 16: "hexagon", 17: "maia", 18: "trainium"
}


class OtherDeviceError(BufferError):
    """Raised for an array whose memory is not the host's; its text is the name of the device."""


# ---- dtypes ----------------------------------------------------------------------------------------------------------


cdef int number_of(DLDataType dtype) noexcept:
    """Return NumPy's number of a dtype, or -1 if NumPy does not have the dtype."""
    if dtype.lanes != 1:
        return -1
    if dtype.code == FLOAT:
        if dtype.bits == 32:
            return cnp.NPY_FLOAT32
        if dtype.bits == 64:
            return cnp.NPY_FLOAT64
        return cnp.NPY_FLOAT16 if dtype.bits == 16 else -1
    if dtype.code == BFLOAT:
        return _bfloat16_number if dtype.bits == 16 else -1
    if dtype.code == BOOL:
        return cnp.NPY_BOOL if dtype.bits == 8 else -1
    if dtype.code == INT:
        if dtype.bits == 64:
            return cnp.NPY_INT64
        if dtype.bits == 32:
            return cnp.NPY_INT32
        return cnp.NPY_INT16 if dtype.bits == 16 else cnp.NPY_INT8 if dtype.bits == 8 else -1
    if dtype.code == UINT:
        if dtype.bits == 8:
            return cnp.NPY_UINT8
        if dtype.bits == 16:
            return cnp.NPY_UINT16
        return cnp.NPY_UINT32 if dtype.bits == 32 else cnp.NPY_UINT64 if dtype.bits == 64 else -1
    if dtype.code == COMPLEX:
        return cnp.NPY_COMPLEX64 if dtype.bits == 64 else cnp.NPY_COMPLEX128 if dtype.bits == 128 else -1
    return -1


cdef int code_of(cnp.ndarray array) noexcept:
    """Return DLPack's type code of a result's dtype."""
    if cnp.PyArray_TYPE(array) == _bfloat16_number:
        return BFLOAT
    if cnp.PyArray_ISFLOAT(array):
        return FLOAT
    if cnp.PyArray_TYPE(array) == cnp.NPY_BOOL:
        return BOOL
    return INT if cnp.PyArray_ISSIGNED(array) else UINT


# ---- from other libraries --------------------------------------------------------------------------------------------


@cython.final
@cython.freelist(8)
cdef class Managed:
    """The owner of a tensor that another library handed out; it deletes the tensor with the last array over it."""

    cdef DLManagedTensorVersioned *versioned
    cdef DLManagedTensor *legacy

    def __dealloc__(self):
        if self.versioned != NULL and self.versioned.deleter != NULL:
            self.versioned.deleter(self.versioned)
        if self.legacy != NULL and self.legacy.deleter != NULL:
            self.legacy.deleter(self.legacy)


cdef object numbers(const int64_t *values, int count):
    """Return a shape or strides as a tuple for messages, or None."""
    return None if values == NULL else tuple([values[i] for i in range(count)])


cdef object beyond_the_address_space(const DLTensor *tensor):
    got = f"shape {numbers(tensor.shape, tensor.ndim)}, strides {numbers(tensor.strides, tensor.ndim)}"
    return BufferError(f"expected elements within the address space, got {got}, byte offset {tensor.byte_offset}")


cdef cnp.ndarray array_over(Managed owner, const DLTensor *tensor, bint is_writable):
    cdef cnp.npy_intp[MAX_RANK] shape, strides
    cdef cnp.npy_intp step = tensor.dtype.bits // 8
    cdef int64_t most = PY_SSIZE_T_MAX // max(step, 1)
    cdef int number = number_of(tensor.dtype), axis
    cdef bint is_empty = False
    cdef View view
    if tensor.device.device_type not in (CPU, CUDA_HOST, ROCM_HOST):
        name = _DEVICES.get(tensor.device.device_type, f"device type {tensor.device.device_type}")
        raise OtherDeviceError(f"{name}:{tensor.device.device_id}")
    if number < 0:
        dtype = tensor.dtype
        raise BufferError(f"NumPy has no dtype for DLPack's ({dtype.code}, {dtype.bits} bits, {dtype.lanes} lanes)")
    if not 0 <= tensor.ndim <= MAX_RANK:
        raise BufferError(f"expected at most {MAX_RANK} dimensions, got {tensor.ndim}")
    if tensor.ndim and tensor.shape == NULL:
        raise BufferError("its shape is missing")
    for axis in range(tensor.ndim):
        is_empty = is_empty or tensor.shape[axis] == 0
    view.data, view.ndim, view.itemsize = <char *>tensor.data, tensor.ndim, <int>step
    view.shape, view.strides = <const Py_ssize_t *>shape, <const Py_ssize_t *>strides
    for axis in range(tensor.ndim - 1, -1, -1):
        shape[axis] = tensor.shape[axis]
        strides[axis] = step
        # Strides of dimensions of length 1, and of arrays without elements, may have any value and are ignored.
        if tensor.strides != NULL and shape[axis] > 1 and not is_empty:
            if not -most <= tensor.strides[axis] <= most:
                raise beyond_the_address_space(tensor)
            strides[axis] = tensor.strides[axis] * view.itemsize
        step *= max(shape[axis], 1)  # overflows only if the whole size does, which is_addressable refuses
    if is_empty:
        view.data = &_nothing
    elif view.data == NULL:
        raise BufferError("its elements have no memory")
    elif tensor.byte_offset > UINTPTR_MAX - <uintptr_t>view.data:
        raise beyond_the_address_space(tensor)
    else:
        view.data += tensor.byte_offset
    if not is_addressable(&view):
        raise beyond_the_address_space(tensor)
    cdef cnp.ndarray array = cnp.PyArray_New(
        cnp.ndarray, tensor.ndim, shape, number, strides, view.data, 0,
        cnp.NPY_ARRAY_WRITEABLE if is_writable else 0, None
    )
    Py_INCREF(owner)  # the next call steals this reference
    PyArray_SetBaseObject(array, owner)
    return array


cdef cnp.ndarray array_of_versioned(DLManagedTensorVersioned *tensor):
    """Return an array that owns a tensor of another library."""
    cdef Managed owner = Managed.__new__(Managed)
    owner.versioned = tensor
    if tensor.version.major != MAJOR:
        raise BufferError(f"expected DLPack {MAJOR}, got {tensor.version.major}.{tensor.version.minor}")
    # A copy is read-only, as values written into it would not reach the array.
    return array_over(owner, &tensor.dl_tensor, not tensor.flags & (READ_ONLY | IS_COPIED))


cdef const DLPackExchangeAPI *exchange_api(object kind) except? NULL:
    """Return the C exchange API of a class of arrays, or NULL if it has none of a known major version."""
    cdef const DLPackExchangeAPI *api
    capsule = getattr(kind, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return NULL
    api = <const DLPackExchangeAPI *>PyCapsule_GetPointer(capsule, "dlpack_exchange_api")
    while api != NULL and api.version.major != MAJOR:
        api = api.prev_api
    return api


cdef cnp.ndarray array_through(const DLPackExchangeAPI *api, object value):
    """Return an array over the memory of another library's array, which it keeps alive."""
    cdef DLManagedTensorVersioned *tensor = NULL
    api.managed_tensor_from_py_object_no_sync(<void *>value, &tensor)
    if tensor == NULL:
        raise BufferError("its exchange API returned no tensor")
    return array_of_versioned(tensor)


cdef cnp.ndarray array_of(object value, bint is_writable):
    """Return an array over the memory of another library's array, by the array's ``__dlpack__``.

    `is_writable` applies to capsules before DLPack 1.0, which do not tell whether memory may be written.
    """
    cdef Managed owner
    cdef void *tensor
    try:
        capsule = value.__dlpack__(max_version=VERSION)
    except TypeError:  # __dlpack__ has no max_version before DLPack 1.0
        capsule = value.__dlpack__()
    if PyCapsule_IsValid(capsule, VERSIONED):
        tensor = PyCapsule_GetPointer(capsule, VERSIONED)
        PyCapsule_SetName(capsule, "used_dltensor_versioned")
        return array_of_versioned(<DLManagedTensorVersioned *>tensor)
    if not PyCapsule_IsValid(capsule, LEGACY):
        raise BufferError(f"expected an unused DLPack capsule, got {type(capsule).__name__}")
    tensor = PyCapsule_GetPointer(capsule, LEGACY)
    PyCapsule_SetName(capsule, "used_dltensor")
    owner = Managed.__new__(Managed)
    owner.legacy = <DLManagedTensor *>tensor
    return array_over(owner, &owner.legacy.dl_tensor, is_writable)


# ---- to other libraries ----------------------------------------------------------------------------------------------


cdef void give_back(void *array) noexcept nogil:
    """Release a reference to an array, on any thread. It is kept if the interpreter has ended or is about to."""
    if Py_IsInitialized() and not ag_interpreter_ends():
        with gil:
            Py_DECREF(<PyObject *>array)


cdef void delete_versioned(DLManagedTensorVersioned *tensor) noexcept nogil:
    give_back(tensor.manager_ctx)
    free(tensor)


cdef void delete_legacy(DLManagedTensor *tensor) noexcept nogil:
    give_back(tensor.manager_ctx)
    free(tensor)


cdef void *allocated(cnp.ndarray array, size_t header) except NULL:
    """Allocate memory for a header, followed by the shape and the strides of an array."""
    cdef void *memory = malloc(header + 2 * <size_t>cnp.PyArray_NDIM(array) * sizeof(int64_t))
    if memory == NULL:
        raise MemoryError
    return memory


cdef void describe(cnp.ndarray array, DLTensor *tensor, int64_t *numbers) noexcept:
    """Fill in a tensor; its shape and its strides are written to ``numbers``."""
    cdef int axis, rank = cnp.PyArray_NDIM(array)
    cdef int itemsize = <int>cnp.PyArray_ITEMSIZE(array)
    tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes = code_of(array), 8 * itemsize, 1
    tensor.device.device_type, tensor.device.device_id = CPU, 0
    tensor.data, tensor.byte_offset = cnp.PyArray_DATA(array), 0
    tensor.ndim, tensor.shape, tensor.strides = rank, numbers, numbers + rank
    for axis in range(rank):
        numbers[axis] = cnp.PyArray_DIMS(array)[axis]
        numbers[rank + axis] = cnp.PyArray_STRIDES(array)[axis] // itemsize


cdef DLManagedTensorVersioned *versioned_of(cnp.ndarray array) except NULL:
    cdef DLManagedTensorVersioned *tensor = <DLManagedTensorVersioned *>allocated(
        array, sizeof(DLManagedTensorVersioned)
    )
    describe(array, &tensor.dl_tensor, <int64_t *>(tensor + 1))
    tensor.version.major, tensor.version.minor, tensor.flags = MAJOR, MINOR, 0
    tensor.deleter, tensor.manager_ctx = delete_versioned, <void *>array
    Py_INCREF(array)
    return tensor


cdef DLManagedTensor *legacy_of(cnp.ndarray array) except NULL:
    cdef DLManagedTensor *tensor = <DLManagedTensor *>allocated(array, sizeof(DLManagedTensor))
    describe(array, &tensor.dl_tensor, <int64_t *>(tensor + 1))
    tensor.deleter, tensor.manager_ctx = delete_legacy, <void *>array
    Py_INCREF(array)
    return tensor


cdef void drop_versioned(object capsule) noexcept:
    """Delete the tensor of a capsule that nobody used; a used capsule has another name."""
    if PyCapsule_IsValid(capsule, VERSIONED):
        delete_versioned(<DLManagedTensorVersioned *>PyCapsule_GetPointer(capsule, VERSIONED))


cdef void drop_legacy(object capsule) noexcept:
    if PyCapsule_IsValid(capsule, LEGACY):
        delete_legacy(<DLManagedTensor *>PyCapsule_GetPointer(capsule, LEGACY))


cdef object object_through(const DLPackExchangeAPI *api, cnp.ndarray array):
    """Return an array of another library over the memory of a NumPy array, which it keeps alive."""
    cdef void *result = NULL
    # The API takes ownership of the tensor, even if it fails.
    api.managed_tensor_to_py_object_no_sync(versioned_of(array), &result)
    if result == NULL:
        raise BufferError("its exchange API returned no array")
    given = <object>result
    Py_DECREF(<PyObject *>result)  # the API's new reference, as `given` has its own
    return given


cdef class Exported:
    """A result, of any dtype including bfloat16, as an object for the ``from_dlpack`` of another library."""

    def __dlpack_device__(self):
        return CPU, 0

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        if copy or (dl_device is not None and tuple(dl_device) != (CPU, 0)):
            raise BufferError("expected to share the host's memory, not a copy or another device")
        if max_version is not None and max_version[0] >= MAJOR:
            return PyCapsule_New(versioned_of(self.array), VERSIONED, drop_versioned)
        return PyCapsule_New(legacy_of(self.array), LEGACY, drop_legacy)


def dlpack_device(int device):
    """Return DLPack's device type and number of an Ascend NPU."""
    return EXT_DEVICE, device


def capsule_on_device(object owner, cnp.ndarray like not None, uintptr_t address, int device):
    """Return a capsule, as before DLPack 1.0, of an array in the memory of an Ascend NPU with the layout of `like`.

    The owner is kept alive until the consumer deletes the tensor.
    """
    cdef DLManagedTensor *tensor = <DLManagedTensor *>allocated(like, sizeof(DLManagedTensor))
    describe(like, &tensor.dl_tensor, <int64_t *>(tensor + 1))
    tensor.dl_tensor.device.device_type, tensor.dl_tensor.device.device_id = EXT_DEVICE, device
    tensor.dl_tensor.data = <void *>address
    tensor.deleter, tensor.manager_ctx = delete_legacy, <void *>owner
    Py_INCREF(owner)
    return PyCapsule_New(tensor, LEGACY, drop_legacy)
