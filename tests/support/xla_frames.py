"""Call the library's function for XLA as compiled programs call it, by ctypes and on any buffers.

The structures follow the documentation of XLA's FFI, independently of the library.
"""

from __future__ import annotations

import ctypes

import numpy as np

from ascend_grad import _xla_rowwise


class Buffer(ctypes.Structure):
    _fields_ = (
        *(("size", ctypes.c_size_t), ("extensions", ctypes.c_void_p), ("dtype", ctypes.c_int)),
        *(("data", ctypes.c_void_p), ("rank", ctypes.c_int64), ("dims", ctypes.POINTER(ctypes.c_int64))),
    )


class Values(ctypes.Structure):
    """Lay out the buffers of arguments or of results as XLA does."""

    _fields_ = (
        *(("struct_size", ctypes.c_size_t), ("extensions", ctypes.c_void_p), ("size", ctypes.c_int64)),
        *(("types", ctypes.POINTER(ctypes.c_int)), ("values", ctypes.POINTER(ctypes.c_void_p))),
    )


class Span(ctypes.Structure):
    _fields_ = (("data", ctypes.c_char_p), ("length", ctypes.c_size_t))


class Scalar(ctypes.Structure):
    _fields_ = (("dtype", ctypes.c_int), ("value", ctypes.c_void_p))


class Attributes(ctypes.Structure):
    _fields_ = (
        *(("struct_size", ctypes.c_size_t), ("extensions", ctypes.c_void_p), ("size", ctypes.c_int64)),
        *(("types", ctypes.POINTER(ctypes.c_int)), ("names", ctypes.POINTER(ctypes.POINTER(Span)))),
        ("values", ctypes.POINTER(ctypes.c_void_p)),
    )


class ErrorArguments(ctypes.Structure):
    _fields_ = (
        *(("size", ctypes.c_size_t), ("extensions", ctypes.c_void_p), ("message", ctypes.c_char_p)),
        ("code", ctypes.c_int),
    )


CreateError = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(ErrorArguments))


class API(ctypes.Structure):
    _fields_ = (
        *(("size", ctypes.c_size_t), ("extensions", ctypes.c_void_p), ("version", ctypes.c_size_t * 3)),
        *(("internal", ctypes.c_void_p), ("create_error", CreateError)),
    )


class CallFrame(ctypes.Structure):
    _fields_ = (
        *(("size", ctypes.c_size_t), ("extensions", ctypes.c_void_p), ("api", ctypes.POINTER(API))),
        *(("context", ctypes.c_void_p), ("stage", ctypes.c_int)),
        *(("args", Values), ("results", Values), ("attributes", Attributes), ("future", ctypes.c_void_p)),
    )


def called_by_xla(array: np.ndarray, dims: tuple[int, ...], address: int | None = None) -> str:
    """Call the softmax as compiled programs call it, on buffers of these dimensions, and return its error message."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(CallFrame))(pointer(_xla_rowwise.handler(), None))
    messages: list[str] = []
    create_error = CreateError(lambda given: messages.append(given[0].message.decode()) or 1)
    buffer = Buffer(
        dtype=11, data=address or array.ctypes.data, rank=len(dims), dims=(ctypes.c_int64 * len(dims))(*dims)
    )
    buffers = Values(size=1, types=(ctypes.c_int * 1)(1), values=(ctypes.c_void_p * 1)(ctypes.addressof(buffer)))
    axis, scale, operator = ctypes.c_int64(-1), ctypes.c_double(1), b"softmax"
    attributes = {
        b"axis": (3, Scalar(5, ctypes.addressof(axis))),
        b"operator": (4, Span(operator, len(operator))),
        b"scale": (3, Scalar(12, ctypes.addressof(scale))),
    }
    names = [Span(name, len(name)) for name in attributes]
    frame = CallFrame(
        api=ctypes.pointer(API(create_error=create_error)),
        args=buffers,
        results=buffers,
        attributes=Attributes(
            size=3,
            types=(ctypes.c_int * 3)(*(kind for kind, _ in attributes.values())),
            names=(ctypes.POINTER(Span) * 3)(*map(ctypes.pointer, names)),
            values=(ctypes.c_void_p * 3)(*(ctypes.addressof(value) for _, value in attributes.values())),
        ),
    )
    function(ctypes.byref(frame))
    return "".join(messages)
