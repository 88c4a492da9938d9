"""Types of arrays: their library, the conversion of its arrays to NumPy's, and of results to arrays of the library.

A library is recognised by the protocols of its arrays: the C exchange API of DLPack, ``__dlpack__``,
``__array_namespace__``. No library is imported for that. Arrays of torch and JAX have properties that DLPack drops or
does not describe, so these libraries have separate classes.
"""

import sys

import numpy as np

cimport cython
cimport numpy as cnp
from cpython.dict cimport PyDict_GetItemWithError
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport int32_t, int64_t, uintptr_t

from ascend_grad cimport _dlpack, _memory
from ascend_grad._memory cimport MAX_RANK

from ._dlpack import OtherDeviceError
from ._dtypes import BFLOAT16
from .arrays import AbstractDeviceArray
from .errors import BackendUnavailableError, ParamTypeError

cnp.import_array()


cdef class ArrayType:
    """The library of a type of arrays, and the conversions of its arrays. Subclasses override what differs.

    Attributes
    ----------
    library : str or None
        The name of the library. If it is None, results are arrays of NumPy, unless other arguments have a library.
    is_plain : bool
        True if `view` runs only compiled code, which cannot change another argument of the call.
    """

    cpdef cnp.ndarray view(self, object value, str name, str operator):
        """Return a NumPy array over the memory of an array of this type, or None if NumPy has to convert it."""
        view = self.view_anywhere(value, name, operator)
        if isinstance(view, AbstractDeviceArray):
            raise on_another_device(value, None, name, operator)
        return view

    cpdef object view_anywhere(self, object value, str name, str operator):
        """Return `view`, or an array of a backend if a tensor is on the backend's device."""
        return None

    cdef cnp.ndarray empty(self, int ndim, const cnp.npy_intp *shape, cnp.dtype dtype):
        """Return a new array for a result that `own` converts."""
        return _memory.empty(ndim, shape, dtype)

    cdef object own(self, cnp.ndarray array):
        """Return a result as an array of the library, over the same memory."""
        return array

    cdef int mark_written(self, object value) except -1:
        """Tell the library that the elements of an array change."""
        return 0


cdef class DLPackType(ArrayType):
    """A type of arrays with DLPack: by the C exchange API if `api` is not NULL, otherwise by ``__dlpack__``.

    `from_dlpack` is the library's function that imports arrays. If it is None and `api` is NULL, results are arrays of
    NumPy.
    """

    cpdef object view_anywhere(self, object value, str name, str operator):
        self.check(value, name, operator)
        try:
            return self.read(value)
        except MemoryError:
            raise
        except OtherDeviceError as error:
            return self.view_on_device(value, error, name, operator)
        except Exception as error:  # the other library may raise anything
            return self.view_after_error(value, error, name, operator)

    cdef int check(self, object value, str name, str operator) except -1:
        """Refuse arrays whose memory does not hold their values."""
        return 0

    cdef cnp.ndarray read(self, object value):
        """Return a NumPy array over the memory of an array of this type."""
        return _dlpack.array_of(value, False) if self.api == NULL else _dlpack.array_through(self.api, value)

    cdef object view_on_device(self, object value, object error, str name, str operator):
        """Return an array of a backend over the memory of an array on a device, or raise an error."""
        raise on_another_device(value, str(error), name, operator) from None

    cdef object view_after_error(self, object value, object error, str name, str operator):
        """Return a view of an array that the library does not export, or raise an error with the reason."""
        if isinstance(error, BufferError) and hasattr(type(value), "__array__"):
            return None
        raise not_converted(value, error, name, operator) from error

    cdef object own(self, cnp.ndarray array):
        if self.api != NULL:
            return _dlpack.object_through(self.api, array)
        if self.from_dlpack is None:
            return array
        exported = _dlpack.Exported()
        (<_dlpack.Exported>exported).array = array
        return self.from_dlpack(exported)


# ---- memory of torch -------------------------------------------------------------------------------------------------

# Functions of torch's stable C interface (``torch/csrc/inductor/aoti_torch/c/shim.h``). They allocate without torch's
# dispatcher, so that no mode, transform or tracer sees the allocation. They return 0 if they succeed.
ctypedef int32_t (*EmptyStrided)(
    int64_t ndim, const int64_t *shape, const int64_t *strides, int32_t dtype, int32_t device_type,
    int32_t device_index, void **result
) noexcept
ctypedef int32_t (*GetDataPtr)(void *handle, void **result) noexcept

cdef EmptyStrided empty_strided = NULL  # or NULL if this torch has no such interface
cdef GetDataPtr get_data_ptr = NULL
cdef object tensors_of_handles = None  # makes handles tensors; torch's function for one handle leaks a reference

cdef enum:  # numbers of c10::ScalarType and c10::DeviceType
    TORCH_UINT8 = 0
    TORCH_INT32 = 3
    TORCH_INT64 = 4
    TORCH_FLOAT16 = 5
    TORCH_FLOAT32 = 6
    TORCH_FLOAT64 = 7
    TORCH_BFLOAT16 = 15
    TORCH_CPU = 0

cdef object torch_tensor = None  # torch's class
cdef int _bfloat16_number = BFLOAT16.num


cdef int find_torch_allocation(object torch) except -1:
    """Look up the functions that allocate tensors, once. Results are in NumPy's memory if torch lacks one of them."""
    global empty_strided, get_data_ptr, tensors_of_handles, torch_tensor
    if empty_strided != NULL:
        return 0
    import ctypes  # torch has imported it
    try:
        library = ctypes.CDLL(torch._C.__file__)
        addresses = [
            ctypes.cast(getattr(library, name), ctypes.c_void_p).value
            for name in ("aoti_torch_empty_strided", "aoti_torch_get_data_ptr")
        ]
        tensors_of_handles = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs
    except (AttributeError, OSError):
        return 0
    torch_tensor = torch.Tensor
    get_data_ptr = <GetDataPtr><uintptr_t>addresses[1]
    empty_strided = <EmptyStrided><uintptr_t>addresses[0]
    return 0


cdef int32_t torch_dtype(cnp.dtype dtype) noexcept:
    """Return torch's number of a result's dtype, or -1."""
    cdef int number = dtype.num
    if number == cnp.NPY_FLOAT32:
        return TORCH_FLOAT32
    if number == cnp.NPY_FLOAT64:
        return TORCH_FLOAT64
    if number == cnp.NPY_FLOAT16:
        return TORCH_FLOAT16
    if number == _bfloat16_number:
        return TORCH_BFLOAT16
    if number == cnp.NPY_INT64:
        return TORCH_INT64
    if number == cnp.NPY_INT32:
        return TORCH_INT32
    return TORCH_UINT8 if number == cnp.NPY_UINT8 else -1


cdef cnp.ndarray tensor_memory(int ndim, const cnp.npy_intp *shape, cnp.dtype dtype, int32_t number):
    """Return an array over the memory of a new tensor, which is the array's base."""
    cdef int64_t[MAX_RANK] strides
    cdef int64_t count = 1
    cdef void *handle = NULL
    cdef void *data = NULL
    cdef int axis
    for axis in range(ndim - 1, -1, -1):
        strides[axis] = count
        if count > _memory.SIZE_LIMIT // dtype.itemsize // max(shape[axis], 1):
            return _memory.empty(ndim, shape, dtype)  # is empty, or raises
        count *= max(shape[axis], 1)
    if empty_strided(ndim, <const int64_t *>shape, strides, number, TORCH_CPU, 0, &handle):
        raise MemoryError(f"torch cannot allocate {count * dtype.itemsize} bytes for a result")
    cdef int32_t failure = get_data_ptr(handle, &data)
    tensor = tensors_of_handles([PyCapsule_New(handle, NULL, NULL)])[0]  # owns the handle
    if failure or data == NULL:
        return _memory.empty(ndim, shape, dtype)
    _memory.advise_huge_pages(<char *>data, count * dtype.itemsize)
    return _memory.array_over(ndim, shape, dtype, data, tensor, NULL)


cdef object tensor_under(cnp.ndarray array):
    """Return the tensor whose memory an array by `tensor_memory` has, or None."""
    base = None if array.base == NULL else <object>array.base
    return base if torch_tensor is not None and isinstance(base, torch_tensor) else None


@cython.final
cdef class TorchType(DLPackType):
    """A class of torch's tensors.

    `overriding` is the name of the class if it overrides torch's functions, else None.
    """

    def __init__(self, object kind):
        torch = sys.modules["torch"]
        self.library, self.from_dlpack = "torch", torch.from_dlpack
        find_torch_allocation(torch)
        self.overriding, self.is_neg = own_arithmetic(kind, torch.Tensor), torch.Tensor.is_neg
        self.increment_version = torch.autograd.graph.increment_version

    cdef int check(self, object value, str name, str operator) except -1:
        if self.overriding is not None:
            advice = f"; pass {name}.to_local() or {name}.full_tensor()" if hasattr(value, "full_tensor") else ""
            expected = "a tensor whose class does not override torch's functions"
            refuse(name, operator, expected, f"{self.overriding}{advice}")
        if value.requires_grad:
            got = f"one that does; use ascend_grad.torch, or pass {name}.detach()"
            refuse(name, operator, "a tensor that does not require grad", got)
        if self.is_neg(value):
            got = f"one that has it; pass {name}.resolve_neg()"
            refuse(name, operator, "a tensor without the negative bit", got)
        return 0

    cdef cnp.ndarray read(self, object value):
        # Memory of tensors may be written, although torch's capsules before DLPack 1.0 do not say it.
        return _dlpack.array_of(value, True) if self.api == NULL else _dlpack.array_through(self.api, value)

    cdef cnp.ndarray empty(self, int ndim, const cnp.npy_intp *shape, cnp.dtype dtype):
        """Return a new array in memory of a tensor, since torch resizes and frees storages with its own memory only."""
        cdef int32_t number = torch_dtype(dtype)
        if empty_strided == NULL or number < 0:
            return _memory.empty(ndim, shape, dtype)
        return tensor_memory(ndim, shape, dtype, number)

    cdef object own(self, cnp.ndarray array):
        cdef cnp.ndarray copy
        tensor = tensor_under(array)
        if tensor is None:  # not from `empty`
            copy = self.empty(cnp.PyArray_NDIM(array), cnp.PyArray_DIMS(array), array.dtype)
            tensor = tensor_under(copy)
            if tensor is None:
                return DLPackType.own(self, array)
            _memory.copy_into(copy, array)
        return tensor

    cdef object view_on_device(self, object value, object error, str name, str operator):
        return device_tensor(value, name, operator)

    cdef object view_after_error(self, object value, object error, str name, str operator):
        if value.device.type != "cpu":
            return device_tensor(value, name, operator)
        explain(value, name, operator)
        raise not_converted(value, error, name, operator) from error

    cdef int mark_written(self, object value) except -1:
        """Increment the tensor's version, which torch's autograd compares."""
        self.increment_version(value)
        return 0


@cython.final
cdef class JaxType(DLPackType):
    """A class of JAX's arrays. JAX copies imported arrays that do not begin at a cache line."""

    cdef object view_after_error(self, object value, object error, str name, str operator):
        explain_of_jax(value, name, operator)
        raise not_converted(value, error, name, operator) from error

    cdef cnp.ndarray empty(self, int ndim, const cnp.npy_intp *shape, cnp.dtype dtype):
        return _memory.empty_aligned(ndim, shape, dtype)

    cdef object own(self, cnp.ndarray array):
        exported = _dlpack.Exported()
        (<_dlpack.Exported>exported).array = _memory.at_aligned_address(array)
        if cnp.PyArray_ITEMSIZE(array) == 8:  # JAX rounds 64-bit values unless these are enabled
            jax = sys.modules["jax"]
            with (jax if hasattr(jax, "enable_x64") else jax.experimental).enable_x64(True):  # it moved in JAX 0.8
                return self.from_dlpack(exported)
        return self.from_dlpack(exported)


#: The type of NumPy's arrays, which need no conversion.
cdef ArrayType NUMPY = ArrayType()
NUMPY.library = "numpy"

#: The type of arrays that have ``__dlpack__`` alone, which does not tell their library.
cdef ArrayType UNNAMED = DLPackType()

#: Types of arrays with the C exchange API, by class. Such classes are few and are never deleted.
cdef dict _known = {}


cdef ArrayType known_array_type(object value):
    """Return the type of an array from the cache, which has classes with the C exchange API, else None."""
    cdef PyObject *known = PyDict_GetItemWithError(_known, type(value))
    return None if known is NULL else <ArrayType>known


cpdef ArrayType array_type(object value, str name, str operator):
    """Return the type of an array of NumPy or one with DLPack, or None for numbers, sequences, buffers and so on."""
    cdef ArrayType result = known_array_type(value)
    if result is not None:
        return result
    try:
        return NUMPY if isinstance(value, np.ndarray) else look_up(value)
    except MemoryError:
        raise
    except Exception as error:  # methods of the argument may raise anything
        message = f"{name}: expected an array, got {type(value).__name__}, whose type cannot be determined: {error}"
        raise ParamTypeError(message, operator=operator) from error


cpdef bint is_on_device(object value) except -1:
    """Return whether a value is an array of a backend, or a tensor that converts to one."""
    if isinstance(value, AbstractDeviceArray):
        return True
    return isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ())) and value.device.type in DEVICE_TENSORS


cdef ArrayType look_up(object value):
    cdef DLPackType result
    kind = type(value)
    if not hasattr(kind, "__dlpack__"):
        return None
    api = _dlpack.exchange_api(kind)
    if isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ())):
        torch = sys.modules["torch"]
        result = TorchType(kind)
        result.is_plain = api != NULL and kind in (torch.Tensor, torch.nn.Parameter)
    elif api != NULL:
        result = DLPackType()
        owner = next(base for base in kind.__mro__ if "__dlpack_c_exchange_api__" in vars(base))
        result.library = owner.__module__.partition(".")[0]
    elif hasattr(kind, "__array_namespace__"):
        namespace = value.__array_namespace__()
        library = namespace.__name__.partition(".")[0]
        if library == NUMPY.library:
            return UNNAMED
        result = JaxType() if library == "jax" else DLPackType()
        result.library, result.from_dlpack = library, namespace.from_dlpack
    else:
        return UNNAMED
    if api == NULL:
        return result
    result.api = api
    # Entries are never replaced, as other threads read them without holding a reference.
    return _known.setdefault(kind, result)


# ---- properties of tensors that DLPack does not describe -------------------------------------------------------------


cdef object own_arithmetic(object kind, object tensor):
    """Return the name of a class of tensors that overrides torch's functions, else None."""
    functions = tensor.__torch_function__, kind.__torch_function__
    is_plain = getattr(functions[1], "__func__", functions[1]) in (
        getattr(functions[0], "__func__", functions[0]), sys.modules["torch"]._C._disabled_torch_function_impl
    )
    if is_plain and kind.__torch_dispatch__ is tensor.__torch_dispatch__:
        return None
    return f"{kind.__module__}.{kind.__qualname__}"


cdef object refuse(str name, str operator, str expected, object got):
    raise ParamTypeError(f"{name}: expected {expected}, got {got}", operator=operator)


cdef object not_converted(object value, object error, str name, str operator):
    """Return the exception for an array that its library does not export, for the reason in `error`."""
    reason = str(error).partition("\n")[0]  # the other lines are a C++ stack trace
    message = f"{name}: expected an array, got {type(value).__name__}, which cannot be converted: {reason}"
    return ParamTypeError(message, operator=operator)


cdef object on_another_device(object value, object device, str name, str operator):
    device = getattr(value, "device", device)  # torch's own name, if it has one
    is_copied = hasattr(value, "cpu") and getattr(device, "type", "meta") != "meta"
    advice = f"; pass {name}.cpu()" if is_copied else ""
    message = f"{name}: expected an array on the CPU, got one on device {device}{advice}"
    return BackendUnavailableError(message, operator=operator)


cdef bint is_wrapped(object tensor) except -1:
    """Return whether a tensor wraps another one for a function transform such as torch.vmap.

    torch has no public function for that.
    """
    functorch = getattr(sys.modules["torch"]._C, "_functorch", None)
    return hasattr(functorch, "is_functorch_wrapped_tensor") and functorch.is_functorch_wrapped_tensor(tensor)


#: Functions by type of a torch device: each takes a tensor, its argument's name and the operator, and returns an array
#: of a backend. Backends add their functions when they are imported.
DEVICE_TENSORS = {}


cdef object device_tensor(object tensor, str name, str operator):
    """Return an array of a backend over the memory of a tensor on the backend's device."""
    function = DEVICE_TENSORS.get(tensor.device.type)
    explain(tensor, name, operator)
    if function is None:
        raise on_another_device(tensor, None, name, operator)
    return function(tensor, name, operator)


cdef object explain(object value, str name, str operator):
    """Raise an error with the reason why neither NumPy nor a device can read a tensor, if the reason is known."""
    if value.is_nested:
        refuse(name, operator, "a dense tensor", "a nested tensor")
    if value.device.type not in ("cpu", *DEVICE_TENSORS):
        raise on_another_device(value, None, name, operator)
    if str(value.layout) != "torch.strided":
        refuse(name, operator, "a dense tensor", f"layout {value.layout}; pass {name}.to_dense()")
    if value.is_quantized:
        got = f"dtype {value.dtype}; pass {name}.dequantize()"
        refuse(name, operator, "a tensor that is not quantized", got)
    if str(value.dtype).startswith("torch.float8"):
        refuse(name, operator, "float32, float16, bfloat16, float64 or integers", f"{value.dtype}")
    if is_wrapped(value):
        got = f"one of shape {tuple(value.shape)} that torch.vmap or torch.func transforms; use ascend_grad.torch"
        refuse(name, operator, "a tensor with memory", got)


cdef object explain_of_jax(object value, str name, str operator):
    """Raise an error with the reason why NumPy cannot read an array of JAX, if the reason is known."""
    jax = sys.modules["jax"]
    if isinstance(value, jax.core.Tracer):
        got = f"a tracer of shape {value.shape}; use ascend_grad.jax within jit, grad and vmap"
        refuse(name, operator, "an array with values", got)
    if value.is_deleted():
        refuse(name, operator, "an array with memory", "one that was deleted or donated")
    if len(value.devices()) > 1:
        got = f"one on {len(value.devices())} devices; pass jax.device_put({name}, device)"
        refuse(name, operator, "an array on one device", got)


cdef int mark_written(object value) except -1:
    """Tell the library of an array that its elements change."""
    return array_type(value, "out", None).mark_written(value)


def number(array):
    """Return the number in a NumPy array without dimensions, as NumPy's functions do. Other arrays stay as they are."""
    if not cnp.PyArray_CheckExact(array):
        return array
    return cnp.PyArray_ToScalar(cnp.PyArray_DATA(<cnp.ndarray>array), <cnp.ndarray>array)
