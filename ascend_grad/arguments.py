"""Conversion of arguments to the types that calls need, with errors that name the argument."""

from __future__ import annotations

import operator as _operator
import os
import reprlib
import sys
import warnings
from types import FrameType
from typing import TYPE_CHECKING

import numpy as np

from . import arrays
from ._array_types import array_type
from .errors import ParamInvalidError, ParamTypeError

if TYPE_CHECKING:
    from .sparse_arrays import SparseRows

MAX_RANK = 8
#: Maximum number of threads: a runtime that cannot create a thread ends the process.
MAX_THREADS = max(256, os.cpu_count() or 1)
#: Largest integer that fits an index of the compiled code.
MAX_INDEX = sys.maxsize


class _Last(int):
    """The axis -1 as a default, which is told from a -1 that a caller gives."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "-1"


#: The default of an axis.
LAST = _Last(-1)


def axis_named_dim(axis: int, dim: int, function: str) -> int:
    """Return the axis of a call with the keyword `dim`, which is another name of `axis`."""
    if axis is not LAST:
        raise TypeError(f"{function}() got axis and dim, which are two names of one argument")
    return dim


def shown(value: object) -> str:
    """Return a value's text for a message: its type and a shortened representation."""
    try:
        text = reprlib.repr(value)
    except ValueError:  # an int with more digits than Python converts
        text = "of many digits"
    return text if value is None or (type(value) is int and abs(value) < 2**64) else f"{type(value).__name__} {text}"


def warn(message: str) -> None:
    """Warn the caller of the package: at the innermost frame that runs none of its modules."""
    frame: FrameType | None = sys._getframe()
    level = 1
    while frame is not None and str(frame.f_globals.get("__name__")).split(".")[0] == __package__:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)


def refuse_lazy(value: object) -> None:
    """Raise for arrays that dask would compute completely as soon as an element is read."""
    if hasattr(type(value), "__dask_graph__") and value.__dask_graph__() is not None:  # type: ignore[attr-defined]
        advice = "use ascend_grad.dask, or pass its compute()"
        if type(value).__module__.startswith("xarray."):
            advice = "use xarray.apply_ufunc, or pass its compute()"
        raise TypeError(f"dask has not computed it yet; {advice}")


def any_array(value: object, name: str, operator: str | None) -> np.ndarray:
    """Return an argument as a NumPy array of any class."""
    try:
        refuse_lazy(value)
        return np.asanyarray(value)
    except MemoryError:
        raise
    except Exception as error:  # an object's own conversion may raise anything
        _check_dense(value, name, operator)
        raise ParamTypeError(
            f"{name}: expected an array, got {type(value).__name__}, which cannot be converted: {error}",
            operator=operator,
        ) from error


def sparse_rows(value: object, name: str, operator: str) -> SparseRows | None:
    """Return an argument that is a sparse array as its rows, or None."""
    from . import sparse_arrays  # few calls need it

    if not sparse_arrays.is_sparse(value):
        return None
    for part in ("data", "indices", "indptr"):
        check_class(type(getattr(value, part, None)), f"{name}.{part}", operator)
    return sparse_arrays.SparseRows(value, name, operator)


def _check_dense(value: object, name: str, operator: str | None) -> None:
    """Raise for sparse arrays, and name the call that converts them."""
    kind = type(value)
    for method in ("toarray", "todense"):
        if hasattr(kind, method):
            message = f"{name}: expected a dense array, got {kind.__name__}; pass {name}.{method}()"
            raise ParamTypeError(message, operator=operator)


def advice_on_module(value: object) -> str:
    """Return what to pass instead of a layer of torch, or nothing if the value is no such layer."""
    layers = getattr(sys.modules.get("torch.nn"), "Linear", ())
    return "; pass layer.weight" if isinstance(value, layers) else ""


def advice_on_gradient(number: object, name: str) -> str:
    """Return what to pass instead of a number that requires grad, as autograd would not record its conversion."""
    return f"; pass {name}.detach()" if getattr(number, "requires_grad", False) else ""


def check_class(kind: type, name: str, operator: str | None) -> None:
    """Refuse classes of arrays that have more than elements, as conversion would drop the rest."""
    if arrays.has_own_arithmetic(kind):
        expected, advice = "an array whose class has the arithmetic of numpy.ndarray", f"pass numpy.asarray({name})"
        if issubclass(kind, np.ma.MaskedArray):
            expected, advice = "an array without a mask", f"pass {name}.filled(value)"
            if "target" in name:
                advice = f"pass {name}.filled(-100), which ignores masked rows"
        got = f"{kind.__module__}.{kind.__qualname__}; {advice}"
        raise ParamTypeError(f"{name}: expected {expected}, got {got}", operator=operator)


def converted(value: object, name: str, operator: str | None = None) -> np.ndarray:
    """Return an argument as a plain array, which shares the argument's memory if possible."""
    if type(value) is np.ndarray:
        return value
    kind = array_type(value, name, operator)
    view = None if kind is None else kind.view(value, name, operator)
    return converted_by_numpy(value, name, operator) if view is None else view


def converted_by_numpy(value: object, name: str, operator: str | None = None) -> np.ndarray:
    """Return an argument without DLPack as a plain array: NumPy's own, a buffer, a sequence, or ``__array__``."""
    array = any_array(value, name, operator)
    check_class(type(array), name, operator)
    if array.dtype == object:
        _check_dense(value, name, operator)
        if hasattr(type(value), "to_numpy"):  # a table
            got = f"{type(value).__name__} of objects; pass the numeric columns by to_numpy()"
            raise ParamTypeError(f"{name}: expected numbers, got {got}", operator=operator)
    if array.dtype != object:  # a recursive list gives an object array
        for kind in arrays.classes_within(value):
            check_class(kind, name, operator)
    elif not (hasattr(value, "dtype") or hasattr(type(value), "__float__")):  # later checks refuse these
        got = f"{shown(value)}{advice_on_module(value)}"
        raise ParamTypeError(f"{name}: expected an array of numbers, got {got}", operator=operator)
    return np.asarray(array)


def _is_one_number(value: object) -> bool:
    """Return False for arrays with axes, truth values, complex numbers and text, of any library.

    They may have conversions that would take an array of one element, or truth values as 0 and 1.
    """
    if isinstance(value, (bool, str, bytes)) or arrays.has_own_arithmetic(type(value)):
        return False
    dtype = str(getattr(value, "dtype", ""))
    return getattr(value, "ndim", 0) == 0 and "bool" not in dtype and "complex" not in dtype


def integer(value: object, name: str, operator: str | None = None, expected: str = "an int") -> int:
    """Return an argument as an int. Bools are refused, although Python's bool is an int."""
    if type(value) is int:  # among them a number that torch traces as a symbol, which lacks attributes
        return value
    try:
        if not _is_one_number(value):
            raise TypeError("not an integer")
        refuse_lazy(value)
        return _operator.index(value)  # type: ignore[arg-type]
    except MemoryError:
        raise
    except Exception as error:  # an object's own conversion may raise anything
        raise ParamTypeError(f"{name}: expected {expected}, got {shown(value)}", operator=operator) from error


def real_number(value: object, name: str, operator: str, expected: str = "a real number") -> float:
    """Return an argument as one real number. NaN and infinities are accepted, bools are refused."""
    # Numbers that torch traces as symbols are among these, and lack attributes.
    if type(value) is float:
        return value
    if type(value) is int and abs(value) < 2**1023:  # larger ones may overflow, which is told below
        return float(value)
    advice = ""
    try:
        scalar = value[()] if isinstance(value, np.ndarray) else value
        is_number = (
            _is_one_number(value)
            and _is_one_number(scalar)  # an element of an array of objects, or text
            and (hasattr(type(scalar), "__float__") or hasattr(type(scalar), "__index__"))
        )
        if is_number:
            advice = advice_on_gradient(scalar, name)
            is_number = not advice
    except MemoryError:
        raise
    except Exception as error:  # an object's own attributes may raise anything
        raise ParamTypeError(f"{name}: expected {expected}, got {shown(value)}: {error}", operator=operator) from error
    if not is_number:
        raise ParamTypeError(f"{name}: expected {expected}, got {shown(value)}{advice}", operator=operator)
    try:
        refuse_lazy(scalar)
        return float(scalar)  # type: ignore[arg-type]
    except OverflowError:
        message = f"{name}: expected a number that float64 can hold, got a larger one"
        raise ParamInvalidError(message, operator=operator) from None
    except Exception as error:  # an object's own conversion may raise anything
        raise ParamTypeError(f"{name}: expected {expected}, got {shown(value)}: {error}", operator=operator) from error


def truth_value(value: object, name: str, operator: str | None = None, expected: str = "True or False") -> bool:
    """Return an argument as a bool. Other types are refused."""
    if not isinstance(value, (bool, np.bool_)):
        raise ParamTypeError(f"{name}: expected {expected}, got {shown(value)}", operator=operator)
    return bool(value)


def pair_of_truth_values(value: object, name: str, operator: str) -> tuple[bool, bool]:
    """Return an argument as two bools. It is a tuple, list or vector of bools."""
    is_vector = isinstance(value, np.ndarray) and value.ndim and not arrays.has_own_arithmetic(type(value))
    entries: tuple = tuple(value) if isinstance(value, (tuple, list)) or is_vector else ()  # type: ignore[arg-type]
    if len(entries) != 2 or not all(type(entry) in (bool, np.bool_) for entry in entries):
        raise ParamTypeError(f"{name}: expected two of True or False, got {shown(value)}", operator=operator)
    return bool(entries[0]), bool(entries[1])


def thread_count(num_threads: object, operator: str | None = None) -> int:
    """Return the number of threads that a caller requested, 0 for the default."""
    if num_threads is None:
        return 0
    expected = f"None or an int in [1, {MAX_THREADS}]"
    count = integer(num_threads, "num_threads", operator, expected)
    if not 1 <= count <= MAX_THREADS:
        raise ParamInvalidError(f"num_threads: expected {expected}, got {shown(count)}", operator=operator)
    return count
