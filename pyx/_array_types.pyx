"""Types of arrays: the library that one belongs to, how its arrays become NumPy's, and how results become its own.

A library is recognised by what its arrays offer: the C exchange API of DLPack, ``__dlpack__``, ``__array_namespace__``.
Nothing is imported for it. Of torch and JAX more is known: what DLPack drops, or does not say.
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
    """What is known of a type of arrays.

    Attributes
    ----------
    library : str or None
        The library by name; None where results for such arrays are NumPy's, and may be for those of any library.
    is_plain : bool
        Whether `view` runs compiled code alone, which cannot change another argument of the call.
    """

    cpdef cnp.ndarray view(self, object value, str name, str operator):
        """An array over the memory of such a one; None where NumPy has to convert it."""
        view = self.view_anywhere(value, name, operator)
        if isinstance(view, AbstractDeviceArray):
            raise on_another_device(value, None, name, operator)
        return view

    cpdef object view_anywhere(self, object value, str name, str operator):
        """The same; of a tensor on a device that a backend knows, an array of that backend."""
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
        except Exception as error:  # whatever the other library raises
            if self.is_torch:
                if value.device.type != "cpu":
                    return device_tensor(value, name, operator)
                explain(value, name, operator)
            elif self.is_jax:
                explain_of_jax(value, name, operator)
            elif isinstance(error, BufferError) and hasattr(type(value), "__array__"):
                return None
            reason = str(error).partition("\n")[0]  # what follows is a trace of C++
            message = f"{name}: expected an array, got {type(value).__name__}, which does not convert: {reason}"
            raise ParamTypeError(message, operator=operator) from error

    cdef object own(self, cnp.ndarray array):
        """A result as an array of the library, over the same memory."""
        if self.api != NULL:
            return _dlpack.object_through(self.api, array)
        if self.from_dlpack is None:
            return array
        exported = _dlpack.Exported()
        # JAX copies what does not begin at a cache line, and rounds what has 64 bits unless they are switched on.
        (<_dlpack.Exported>exported).array = _memory.at_aligned_address(array) if self.is_jax else array
        if self.is_jax and cnp.PyArray_ITEMSIZE(array) == 8:
            jax = sys.modules["jax"]
            with (jax if hasattr(jax, "enable_x64") else jax.experimental).enable_x64(True):  # moved in JAX 0.8
                return self.from_dlpack(exported)
        return self.from_dlpack(exported)


cdef ArrayType NUMPY = ArrayType()
NUMPY.library = "numpy"

cdef ArrayType UNNAMED = ArrayType()

#: Those with the C exchange API, by class. Such classes are few and stay.
cdef dict _known = {}


cdef ArrayType known_array_type(object value):
    """The type of an array whose like has come before and offers the C exchange API, else None."""
    cdef PyObject *known = PyDict_GetItemWithError(_known, type(value))
    return None if known is NULL else <ArrayType>known


cpdef ArrayType array_type(object value, str name, str operator):
    """The type of an array that offers DLPack, or is NumPy's; None for numbers, sequences, buffers and the like."""
    cdef ArrayType result = known_array_type(value)
    if result is not None:
        return result
    try:
        return NUMPY if isinstance(value, np.ndarray) else look_up(value)
    except MemoryError:
        raise
    except Exception as error:  # whatever the classes of the argument raise
        message = f"{name}: expected an array, got {type(value).__name__}, which does not say what it is: {error}"
        raise ParamTypeError(message, operator=operator) from error


cpdef bint is_on_device(object value) except -1:
    """Whether this is an array of a backend, or a tensor that becomes one."""
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
        result = _known.setdefault(kind, result)  # never replaced: other threads read entries without a reference
    return result


# ---- what DLPack does not say of tensors -----------------------------------------------------------------------------


cdef object own_arithmetic(object kind, object tensor):
    """The name of a class of tensors that are more than their elements, else None."""
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
    device = getattr(value, "device", device)  # torch has names of its own
    message = f"{name}: expected an array on the CPU, got one on device {device}"
    return BackendUnavailableError(message, operator=operator)


cdef bint is_wrapped(object tensor) except -1:
    """Whether a transform of functions, such as torch.vmap, holds a tensor within this one. torch has no public name for it."""
    functorch = getattr(sys.modules["torch"]._C, "_functorch", None)
    return hasattr(functorch, "is_functorch_wrapped_tensor") and functorch.is_functorch_wrapped_tensor(tensor)


#: By the type of a torch device: the function that makes a backend's array of a tensor there, of its name, and of the
#: operator. Backends add theirs when they are imported.
DEVICE_TENSORS = {}


cdef object device_tensor(object tensor, str name, str operator):
    """The array of a backend over the memory of a tensor on its device."""
    function = DEVICE_TENSORS.get(tensor.device.type)
    explain(tensor, name, operator)
    if function is None:
        raise on_another_device(tensor, None, name, operator)
    return function(tensor, name, operator)


cdef object explain(object value, str name, str operator):
    """Raise what says best why a tensor has no memory that NumPy or a device could read, if it is known."""
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
    """The same of an array of JAX."""
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
    """Tell the library of an array that its elements change; torch's autograd wants to know."""
    cdef ArrayType kind = array_type(value, "out", None)
    if kind.mark_written is not None:
        kind.mark_written(value)
    return 0
