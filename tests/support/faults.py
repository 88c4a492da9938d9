"""Define faults: ways to spoil one argument of a good call, with the exception that each fault raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    blamed: str  # the message names this argument

    def __str__(self) -> str:
        return f"{self.argument} {self.label}"


class Case(NamedTuple):
    """Describe one way to call an operator.

    `good_call` returns good arguments, without rows if `empty`. `stages` are in the order of the operator's checks.
    """

    operator: str
    good_call: Callable[..., dict[str, Any]]
    faults: Callable[..., list[Fault]]
    stages: tuple[str, ...]


@contextmanager
def about(subject: object) -> Iterator[None]:
    """Add the subject to the notes of exceptions that the block raises."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"about: {subject}")
        raise


class Hostile:
    """Fail whenever NumPy converts the object to an array."""

    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("not today")

    def __float__(self):
        raise RuntimeError("not today")


class WithUnit(np.ndarray):
    """Refuse NumPy's functions, as classes of arrays with units do."""

    def __array_function__(self, *args, **kwargs):
        return NotImplemented


class Scaled(np.ndarray):
    """Replace the multiplication of arrays by one of the class's own."""

    def __mul__(self, other):
        return NotImplemented


class Recorded(np.ndarray):
    """Refuse NumPy's ufuncs."""

    def __array_ufunc__(self, *args, **kwargs):
        return NotImplemented


class Noted(np.ndarray):
    """Pass an attribute on to views and results. Arithmetic ignores the attribute, so no call refuses such an array."""

    note = ""

    def __array_finalize__(self, other):
        self.note = getattr(other, "note", "")

    def __array_wrap__(self, array, context=None, return_scalar=False):
        return super().__array_wrap__(array, context, return_scalar)


#: Ways to give an array a meaning beyond its elements. np.matrix is listed apart, as it always has two axes.
MEANINGS = {
    "masked": np.ma.array,
    "masked in part": lambda x: np.ma.array(x, mask=np.arange(np.size(x)).reshape(np.shape(x)) % 2 == 0),
    **{kind.__name__: lambda x, kind=kind: np.asarray(x).view(kind) for kind in (WithUnit, Scaled, Recorded)},
}
MEANINGS_IN_TWO_AXES = MEANINGS | {"matrix": lambda x: np.asarray(x).view(np.matrix)}

NOT_AN_INT = {
    "fraction": 1.5,
    "text": "1",
    "None": None,
    "list": [2],
    "array": np.array([1, 2]),
    "bool": True,
    "false": False,
    "numpy bool": np.True_,
    "array of a bool": np.array(True),
    "masked": np.ma.array(1),
    "masked out": np.ma.array(1, mask=True),
    "hostile": Hostile(),
}
NOT_A_NUMBER = {
    "text": "2.0",
    "numpy text": np.str_("2.0"),
    "bytes": b"2",
    "None": None,
    "complex": 0j,
    "numpy complex": np.complex64(1),
    "complex array": np.array(1j),
    "array": np.zeros(2),
    "array of one": np.ones(1),
    "list": [0.0],
    "bool": True,
    "numpy bool": np.False_,
    "array of a bool": np.array(False),
    "masked": np.ma.array(0.0),
    "masked out": np.ma.masked,
    "with a unit": np.array(0.0).view(WithUnit),
    "hostile": Hostile(),
}


def constant(value: object) -> Callable[[Any], Any]:
    return lambda _: value


def as_dtype(dtype) -> Callable[[Any], Any]:
    return lambda x: np.zeros(np.shape(x), dtype)


def self_overlapping(x: np.ndarray) -> np.ndarray:
    """Return an array whose rows overlap."""
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


#: Dtypes of FOREIGN_DTYPES that forward operators and losses convert.
CONVERTED = ("int32", "uint16", "swapped int")


def assert_refused_beside(value: object, array: object, message: str) -> None:
    """Assert that an array of a wrong kind is refused as each argument of a call, beside a right one."""
    for pair in ((value, array), (array, value)):
        error = outcome(ag.softmax_backward, *pair)
        assert type(error) is TYPE
        assert error.code == 161002
        assert message in str(error)


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
            *((label, value, TYPE) for label, value in NOT_AN_INT.items() if value is not None),
        )
    ]
    faults += [
        Fault("settings", "backend", label, constant(value), kind, "backend")
        for label, value, kind in (
            ("unknown", "gpu", INVALID),
            ("empty", "", INVALID),
            ("capitals", "CPU", INVALID),
            ("number", 3, TYPE),
            ("array", np.array(["cpu", "auto"]), TYPE),
        )
    ]
    return faults
