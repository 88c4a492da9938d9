"""Consume and produce legacy DLPack capsules, by ctypes."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_uint8, c_uint16, c_uint64, c_void_p

EXT_DEVICE = 12


class DLTensor(ctypes.Structure):
    _fields_ = (
        *(("data", c_void_p), ("device_type", c_int32), ("device_id", c_int32), ("ndim", c_int32)),
        *(("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16)),
        *(("shape", POINTER(c_int64)), ("strides", POINTER(c_int64)), ("byte_offset", c_uint64)),
    )


Deleter = ctypes.CFUNCTYPE(None, c_void_p)


class DLManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", DLTensor), ("context", c_void_p), ("deleter", Deleter))


def _function(name: str, result, *arguments):
    function = getattr(ctypes.pythonapi, name)
    function.restype, function.argtypes = result, arguments
    return function


_new = _function("PyCapsule_New", ctypes.py_object, c_void_p, c_char_p, c_void_p)
_pointer = _function("PyCapsule_GetPointer", c_void_p, ctypes.py_object, c_char_p)
_rename = _function("PyCapsule_SetName", ctypes.c_int, ctypes.py_object, c_char_p)


def capsule_of(managed: DLManagedTensor) -> object:
    """Return a capsule over a structure, which lives until its deleter is called."""
    return _new(ctypes.addressof(managed), b"dltensor", None)


class Consumer:
    """Consume a capsule, and hold it until `close`."""

    def __init__(self, capsule: object):
        self._address = _pointer(capsule, b"dltensor")
        _rename(capsule, b"used_dltensor")
        self._managed = DLManagedTensor.from_address(self._address)
        self.tensor = self._managed.tensor

    def numbers(self, name: str) -> tuple[int, ...]:
        """Return a shape, or strides, as a tuple."""
        return tuple(getattr(self.tensor, name)[: self.tensor.ndim])

    def close(self) -> None:
        self._managed.deleter(self._address)
