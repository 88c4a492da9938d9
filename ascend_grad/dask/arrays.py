"""Which dask arrays are taken, and how a call on them is validated before any of their blocks exists."""

from __future__ import annotations

import math
from typing import Any

import dask.array as da
import numpy as np
from numpy.typing import NDArray

from .._call import Call, Operator
from .._dispatch import checked_backend, chosen, prepared
from ..arguments import check_class, shown
from ..errors import ParamInvalidError, ParamTypeError


def as_dask(value: object, name: str, operator: Operator) -> da.Array:
    """A dask array whose blocks are NumPy's; an array of NumPy's becomes one of one chunk."""
    if isinstance(value, np.ndarray):
        check_class(type(value), name, operator.name)
        return da.from_array(np.asarray(value), chunks=-1)
    if not isinstance(value, da.Array):
        message = f"{name}: expected an array of dask or NumPy, got {shown(value)}"
        raise ParamTypeError(message, operator=operator.name)
    if type(value._meta) is not np.ndarray:
        kind = type(value._meta)
        message = f"{name}: expected blocks of numpy.ndarray, got {kind.__module__}.{kind.__qualname__}"
        raise ParamTypeError(message, operator=operator.name)
    if any(math.isnan(length) for length in value.shape):
        message = f"{name}: expected known chunk sizes (compute_chunk_sizes() finds them), got shape {value.shape}"
        raise ParamInvalidError(message, operator=operator.name)
    return value


def check_one_chunk(array: da.Array, axis: int, name: str, operator: Operator) -> None:
    """Refuse an array that is cut along an axis which a block has to hold as a whole."""
    if array.numblocks[axis] > 1:
        message = (
            f"{name}: expected one chunk along axis {axis} (rechunk({{{axis}: -1}}) makes one), "
            f"got {array.numblocks[axis]}"
        )
        raise ParamInvalidError(message, operator=operator.name)


def stand_in(shape: tuple[int, ...], dtype: np.dtype) -> NDArray:
    """What the checks of an operator look at in the place of an array that is yet to be computed."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def validated(operator: Operator, values: dict[str, Any], num_threads: int | None) -> Call:
    """The call that all blocks together are, with stand-ins for its arrays."""
    call, _, _ = prepared(operator, [values[name] for name in operator.parameters], None, "cpu", num_threads)
    return call


def backend_of_blocks(backend: str | None, operator: Operator) -> str | None:
    """The backend that blocks ask for: threads of a scheduler know nothing of `use_backend` in the caller's context."""
    if backend is not None:
        return checked_backend(backend, operator.name)
    choice = chosen.get()
    return None if choice is None else choice.name
