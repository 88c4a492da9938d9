"""Define arrays of imaginary libraries, which offer DLPack in several ways, and count exports and deletions.

The structures follow ``dlpack.h`` version 1.3, independently of the library.
"""

from __future__ import annotations

import ctypes
import types
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from samples import BFLOAT16

READ_ONLY, IS_COPIED = 1, 2

#: Type codes and bits of DLPack, by NumPy's dtypes.
TYPES = {
    np.dtype(np.bool_): (6, 8),
    np.dtype(np.uint8): (1, 8),
    np.dtype(np.uint16): (1, 16),
    np.dtype(np.int32): (0, 32),
    np.dtype(np.int64): (0, 64),
    np.dtype(np.float16): (2, 16),
    np.dtype(np.float32): (2, 32),
    np.dtype(np.float64): (2, 64),
    BFLOAT16: (4, 16),
    np.dtype(np.complex64): (5, 64),
}


class Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Legacy(ctypes.Structure):
    _fields_ = (("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", Deleter))


class Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    )


_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_rename = ctypes.pythonapi.PyCapsule_SetName
_rename.restype, _rename.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)

LEGACY, VERSIONED, USED, API = b"dltensor", b"dltensor_versioned", b"used", b"dlpack_exchange_api"

#: Exported arrays that are not deleted, by address.
live: dict[int, Any] = {}
#: Addresses that were deleted although they were not alive.
wrongly_deleted: list[int] = []


@Deleter
def _delete(address: int) -> None:
    if live.pop(address, None) is None:
        wrongly_deleted.append(address)


def handed_out(array: np.ndarray, kind: type, **spoiled: Any) -> int:
    """Return the address of a managed tensor over an array, some of whose fields may be spoiled."""
    managed = kind(deleter=_delete)
    tensor = managed.tensor
    tensor.data, tensor.device_type, tensor.ndim, tensor.lanes = array.ctypes.data, 1, array.ndim, 1
    tensor.code, tensor.bits = TYPES[array.dtype]
    shape = (ctypes.c_int64 * array.ndim)(*array.shape)
    strides = (ctypes.c_int64 * array.ndim)(*(step // array.itemsize for step in array.strides))
    tensor.shape, tensor.strides = ctypes.cast(shape, type(tensor.shape)), ctypes.cast(strides, type(tensor.strides))
    if kind is Versioned:
        managed.major, managed.minor = 1, 1
    for name, value in spoiled.items():
        target = tensor if name in dict(Tensor._fields_) else managed
        if name in ("shape", "strides") and value is not None:
            value = ctypes.cast((ctypes.c_int64 * len(value))(*value), type(tensor.shape))
        setattr(target, name, value)
    address = ctypes.addressof(managed)
    live[address] = managed, shape, strides, array, spoiled
    return address


class Plain:
    """Export an array by the protocol from DLPack 1.0 on. The array's library cannot own results."""

    def __init__(self, array: np.ndarray, **spoiled: Any):
        self.array, self.spoiled = array, spoiled

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        assert max_version >= (1, 0)
        return _new(handed_out(self.array, Versioned, **self.spoiled), VERSIONED, None)


class Old(Plain):
    """Export an array by the protocol from before DLPack 1.0, which has no keywords. Its library cannot own results."""

    def __dlpack__(self):  # type: ignore[override]
        return _new(handed_out(self.array, Legacy, **self.spoiled), LEGACY, None)


class Received:
    """Own a managed tensor, and delete it together with the array over its memory."""

    def __init__(self, address: int):
        self.address = address
        self.managed = Versioned.from_address(address)

    def __del__(self) -> None:
        self.managed.deleter(self.address)


def received(address: int) -> np.ndarray:
    """Return an array over the memory of a managed tensor. The array owns the tensor."""
    owner = Received(address)
    tensor = owner.managed.tensor
    (dtype,) = (dtype for dtype, code in TYPES.items() if code == (tensor.code, tensor.bits))
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(step * dtype.itemsize for step in tensor.strides[: tensor.ndim])
    size = dtype.itemsize + sum((n - 1) * step for n, step in zip(shape, strides)) if 0 not in shape else 0
    memory = (ctypes.c_char * size).from_address(tensor.data + tensor.byte_offset)
    memory.owner = owner  # type: ignore[attr-defined]
    return np.ndarray(shape, dtype, memory, 0, strides)


class Own(Plain):
    """Offer a namespace, as arrays of the array API standard do."""

    came_by_dlpack = False

    def __array_namespace__(self, api_version=None):
        return namespace


def from_dlpack(value: Any) -> Own:
    """Return an array of the library over another array's memory."""
    assert value.__dlpack_device__() == (1, 0)
    capsule = value.__dlpack__(max_version=(1, 1))
    address = _pointer(capsule, VERSIONED)
    _rename(capsule, USED)
    result = Own(received(address))
    result.came_by_dlpack = True
    return result


namespace = types.ModuleType("own_arrays.numpy")
namespace.from_dlpack = from_dlpack  # type: ignore[attr-defined]


_FROM_OBJECT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
_TO_OBJECT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))


class ExchangeAPI(ctypes.Structure):
    pass


ExchangeAPI._fields_ = (
    ("major", ctypes.c_uint32),
    ("minor", ctypes.c_uint32),
    ("previous", ctypes.POINTER(ExchangeAPI)),
    ("allocator", ctypes.c_void_p),
    ("from_object", _FROM_OBJECT),
    ("to_object", _TO_OBJECT),
    ("borrow", ctypes.c_void_p),
    ("stream", ctypes.c_void_p),
)


@_FROM_OBJECT
def _from_object(value: int, result) -> int:
    given = ctypes.cast(value, ctypes.py_object).value
    result[0] = None if given.spoiled.get("missing") else handed_out(given.array, Versioned, **given.spoiled)
    return 0


@_TO_OBJECT
def _to_object(address: int, result) -> int:
    own = Exchanged(received(address))
    own.came_by_dlpack = True
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(own))
    result[0] = id(own)
    return 0


_api = ExchangeAPI(1, 3, None, None, _from_object, _to_object, None, None)
#: An exchange API of a future version, which refers to the present one.
_newer_api = ExchangeAPI(2, 0, ctypes.pointer(_api))


class Exchanged:
    """Export an array only by the C exchange API."""

    __dlpack_c_exchange_api__: ClassVar = _new(ctypes.addressof(_api), API, None)
    came_by_dlpack = False

    def __init__(self, array: np.ndarray, **spoiled: Any):
        self.array, self.spoiled = array, spoiled

    def __dlpack__(self, **_):
        raise AssertionError("the C exchange API is there")


class Newer(Exchanged):
    __dlpack_c_exchange_api__: ClassVar = _new(ctypes.addressof(_newer_api), API, None)


#: The library of an array with the C exchange API is known by the class's module.
Exchanged.__module__ = Newer.__module__ = "exchanged_arrays.core"

#: Classes that make an array of a library from a NumPy array.
MAKERS: dict[str, Callable[..., Any]] = {maker.__name__: maker for maker in (Plain, Old, Own, Exchanged, Newer)}
#: The libraries that can own results.
LIBRARIES: dict[str, Callable[..., Any]] = {"own_arrays": Own, "exchanged_arrays": Exchanged}
