"""Types of arrays: their library, the conversion of its arrays to NumPy's, and of results to arrays of the library.

A library is recognised by the protocols of its arrays: the C exchange API of DLPack, ``__dlpack__``,
``__array_namespace__``. No library is imported for that. Arrays of torch and JAX have properties that DLPack drops or
does not describe, so they are treated specially.
"""

import sys

import numpy as np

cimport cython
cimport numpy as cnp
from cpython.dict cimport PyDict_GetItemWithError
from cpython.object cimport PyObject

from ascend_grad cimport _dlpack, _memory

from ._dlpack import OtherDeviceError
from .arrays import AbstractDeviceArray
from .errors import BackendUnavailableError, ParamTypeError

cnp.import_array()


@cython.final
cdef class ArrayType:
    """The library of a type of arrays, and the functions that convert them.

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
        if self is NUMPY:
            return None
        if self.is_torch:
            if self.refused is not None:
                refuse(name, operator, "a tensor that computes as torch.Tensor does", self.refused)
            if value.requires_grad:
                expected = "a tensor that does not require grad (ascend_grad.torch takes those, detach() drops it)"
                refuse(name, operator, expected, "one that does")
            if self.is_neg(value):
                expected = "a tensor whose elements are as in memory (resolve_neg() makes one)"
                refuse(name, operator, expected, "one with the negative bit set")
        try:
            return _dlpack.array_of(value, self.is_torch) if self.api == NULL else _dlpack.array_through(self.api, value)
        except MemoryError:
            raise
        except OtherDeviceError as error:
            if self.is_torch:
                return device_tensor(value, name, operator)
            raise on_another_device(value, str(error), name, operator) from None
        except Exception as error:  # the other library may raise anything
            if self.is_torch:
                if value.device.type != "cpu":
                    return device_tensor(value, name, operator)
                explain(value, name, operator)
            elif self.is_jax:
                explain_of_jax(value, name, operator)
            elif isinstance(error, BufferError) and hasattr(type(value), "__array__"):
                return None
            reason = str(error).partition("\n")[0]  # the other lines are a C++ stack trace
            message = f"{name}: expected an array, got {type(value).__name__}, which does not convert: {reason}"
            raise ParamTypeError(message, operator=operator) from error

    cdef object own(self, cnp.ndarray array):
        """Return a result as an array of the library, over the same memory."""
        if self.api != NULL:
            return _dlpack.object_through(self.api, array)
        if self.from_dlpack is None:
            return array
        exported = _dlpack.Exported()
        # JAX copies arrays that do not begin at a cache line, and rounds 64-bit values unless these are enabled.
        (<_dlpack.Exported>exported).array = _memory.at_aligned_address(array) if self.is_jax else array
        if self.is_jax and cnp.PyArray_ITEMSIZE(array) == 8:
            jax = sys.modules["jax"]
            with (jax if hasattr(jax, "enable_x64") else jax.experimental).enable_x64(True):  # it moved in JAX 0.8
                return self.from_dlpack(exported)
        return self.from_dlpack(exported)


cdef ArrayType NUMPY = ArrayType()
NUMPY.library = "numpy"

cdef ArrayType UNNAMED = ArrayType()

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
        message = f"{name}: expected an array, got {type(value).__name__}, which does not say what it is: {error}"
        raise ParamTypeError(message, operator=operator) from error


cpdef bint is_on_device(object value) except -1:
    """Return whether a value is an array of a backend, or a tensor that converts to one."""
    if isinstance(value, AbstractDeviceArray):
        return True
    return isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ())) and value.device.type in DEVICE_TENSORS


cdef ArrayType look_up(object value):
    cdef ArrayType result
    kind = type(value)
    if not hasattr(kind, "__dlpack__"):
        return None
    torch = sys.modules.get("torch")
    result = ArrayType()
    result.api = _dlpack.exchange_api(kind)
    result.is_torch = isinstance(value, getattr(torch, "Tensor", ()))
    if result.is_torch:
        result.library, result.refused, result.is_neg = "torch", own_arithmetic(kind, torch.Tensor), torch.Tensor.is_neg
        result.from_dlpack, result.mark_written = torch.from_dlpack, torch.autograd.graph.increment_version
    elif result.api != NULL:
        owner = next(base for base in kind.__mro__ if "__dlpack_c_exchange_api__" in vars(base))
        result.library = owner.__module__.partition(".")[0]
    elif hasattr(kind, "__array_namespace__"):
        namespace = value.__array_namespace__()
        result.library, result.from_dlpack = namespace.__name__.partition(".")[0], namespace.from_dlpack
        if result.library == NUMPY.library:
            return UNNAMED
        result.is_jax = result.library == "jax"
    else:
        return UNNAMED
    if result.api != NULL:
        result.is_plain = result.is_torch and kind in (torch.Tensor, torch.nn.Parameter)
        # Entries are never replaced, as other threads read them without holding a reference.
        result = _known.setdefault(kind, result)
    return result


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


cdef object on_another_device(object value, object device, str name, str operator):
    device = getattr(value, "device", device)  # torch's own name, if it has one
    message = f"{name}: expected an array on the CPU, got one on device {device}"
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
        refuse(name, operator, "a tensor of one shape", "a nested tensor")
    if value.device.type not in ("cpu", *DEVICE_TENSORS):
        raise on_another_device(value, None, name, operator)
    if str(value.layout) != "torch.strided":
        refuse(name, operator, "a dense tensor (to_dense() makes one)", f"layout {value.layout}")
    if value.is_quantized:
        expected = "a tensor that is not quantised (dequantize() makes one)"
        refuse(name, operator, expected, f"dtype {value.dtype}")
    if str(value.dtype).startswith("torch.float8"):
        refuse(name, operator, "a dtype that NumPy has, or bfloat16", f"{value.dtype}")
    if is_wrapped(value):
        expected = "a tensor with memory (ascend_grad.torch is for what torch.vmap and torch.func transform)"
        refuse(name, operator, expected, f"one that a transform wraps, of shape {tuple(value.shape)}")


cdef object explain_of_jax(object value, str name, str operator):
    """Raise an error with the reason why NumPy cannot read an array of JAX, if the reason is known."""
    jax = sys.modules["jax"]
    if isinstance(value, jax.core.Tracer):
        expected = "an array that has values (ascend_grad.jax is for what JAX traces: jit, grad, vmap)"
        refuse(name, operator, expected, f"a tracer of shape {value.shape}")
    if value.is_deleted():
        refuse(name, operator, "an array that has memory", "one that was deleted or donated")
    if len(value.devices()) > 1:
        expected = "an array on one device (jax.device_put copies it there)"
        refuse(name, operator, expected, f"one on {len(value.devices())} devices")


cdef int mark_written(object value) except -1:
    """Tell the library of an array that its elements change, which torch's autograd has to know."""
    cdef ArrayType kind = array_type(value, "out", None)
    if kind.mark_written is not None:
        kind.mark_written(value)
    return 0
