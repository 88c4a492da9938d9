"""Faults: ways to spoil one argument of a good call, and what is then raised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import ascend_grad as ag

NULL, INVALID, TYPE = ag.ParamNullptrError, ag.ParamInvalidError, ag.ParamTypeError
CODES = {NULL: 161001, INVALID: 161002, TYPE: 161002}


class Fault(NamedTuple):
    stage: str
    argument: str
    label: str
    spoil: Callable[[Any], Any]
    raises: type[ag.AscendGradError]
    blamed: str  # the argument that the message names

    def __str__(self) -> str:
        return f"{self.argument} {self.label}"


class Hostile:
    """An object whose every conversion fails."""

    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("not today")

    def __float__(self):
        raise RuntimeError("not today")


def constant(value: object) -> Callable[[Any], Any]:
    return lambda _: value


def as_dtype(dtype) -> Callable[[Any], Any]:
    return lambda x: np.zeros(np.shape(x), dtype)


def self_overlapping(x: np.ndarray) -> np.ndarray:
    """Rows that start within the row before."""
    memory = np.zeros(sum(x.shape), x.dtype)
    return np.lib.stride_tricks.as_strided(memory, x.shape, [x.itemsize] * x.ndim)


def read_only(x: np.ndarray) -> np.ndarray:
    x = np.array(x)
    x.flags.writeable = False
    return x


FOREIGN_DTYPES = {
    "int32": np.int32,
    "uint16": np.uint16,
    "complex64": np.complex64,
    "object": object,
    "text": "U3",
    "swapped int": ">i4",
    "raw bytes": "V2",
    "date": "M8[s]",
    "record": [("value", "f4")],
    "float8": ml_dtypes.float8_e4m3fn,
} | ({"long double": np.longdouble} if np.dtype(np.longdouble) != np.float64 else {})


def outcome(function: Callable[..., object], *args: object, **arguments: object) -> ag.AscendGradError:
    with pytest.raises(ag.AscendGradError) as caught:
        function(*args, **arguments)
    return caught.value


def faults_of_settings() -> list[Fault]:
    faults = [
        Fault("settings", "num_threads", label, constant(value), kind, "num_threads")
        for label, value, kind in (
            ("zero", 0, INVALID),
            ("negative", -1, INVALID),
            ("too many", 1025, INVALID),
            ("huge", 2**40, INVALID),
            ("beyond 64 bits", 2**70, INVALID),
            ("fraction", 1.5, TYPE),
            ("text", "2", TYPE),
            ("list", [2], TYPE),
        )
    ]
    faults += [
        Fault("settings", "backend", label, constant(value), INVALID, "backend")
        for label, value in (
            ("unknown", "gpu"),
            ("empty", ""),
            ("capitals", "CPU"),
            ("number", 3),
            ("array", np.array(["cpu", "auto"])),
        )
    ]
    return faults
