"""Accept dask arrays, and validate calls on them before any block is computed.

Each block is compared with the dtype and shape that its array declares, once the block is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import dask.array as da
import numpy as np
from dask.base import tokenize
from dask.layers import ArrayBlockIdDep, ArrayChunkShapeDep
from numpy.typing import NDArray

from .._call import Call, Operator
from .._dispatch import backend_choice, checked_backend, prepared
from ..arguments import MAX_INDEX, check_class, shown
from ..arrays import has_own_arithmetic, native
from ..errors import ParamInvalidError, ParamTypeError
from ..operators.signatures import Words, options_like

_ERRORS = """
AscendGradError
    As the function of `ascend_grad`. Values are checked when their block is computed.
ParamInvalidError
    161002: chunk sizes are unknown, or there are several chunks along an axis that has to be in one. A computed block
    has another dtype or shape than its array declares; the message names the block's index.
"""
_PARAMETERS = """
backend : {"auto", "cpu", "npu", "reference"}, optional
    The backend that computes the blocks. Default: the one set by `use_backend` at the time of this call; if there is
    none, the process that computes a block chooses.
num_threads : int or None, default 1
    Number of threads for each block. The default is 1 since the scheduler computes one block per core at a time. None
    is the default of `ascend_grad.softmax_backward`. The result does not depend on it.
"""
WORDS = Words("dask.array.Array", errors=_ERRORS, parameters=_PARAMETERS, module="agd")


def keywords_of(function: Callable) -> dict[str, Any]:
    """Return the keyword arguments of a function for NumPy's arrays as that for dask's arrays has them."""
    return options_like(function, ("out", "dim")) | {"num_threads": 1}


def as_dask_arrays(values: dict[str, Any], names: Iterable[str], operator: Operator) -> dict[str, da.Array]:
    """Return the named arguments as dask arrays; the first one that is None raises the operator's error for it."""
    given = {name: values[name] for name in names if values[name] is not None}
    if any(values[name] is None for name in operator.array_names):
        validated(operator, values | dict.fromkeys(given, placeholder((), np.dtype(np.float32))), None)
    return {name: as_dask(value, name, operator) for name, value in given.items()}


def as_dask(value: object, name: str, operator: Operator) -> da.Array:
    """Return a dask array whose blocks are NumPy arrays, each checked as soon as it is computed.

    A NumPy array becomes a dask array of one chunk.
    """
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
        message = f"{name}: expected known chunk sizes, got shape {value.shape}; pass {name}.compute_chunk_sizes()"
        raise ParamInvalidError(message, operator=operator.name)
    if value.nbytes > MAX_INDEX:
        message = f"{name}: expected at most {MAX_INDEX} bytes, got shape {value.shape} of dtype {value.dtype}"
        raise ParamInvalidError(message, operator=operator.name)
    return _with_checked_blocks(value, name, operator)


def _with_checked_blocks(array: da.Array, name: str, operator: Operator) -> da.Array:
    """Return the array with a check of each block's dtype and shape, which dask does not check."""
    axes = tuple(range(array.ndim))
    return da.blockwise(
        _checked_block,
        axes,
        *(array, axes, ArrayBlockIdDep(array.chunks), axes, ArrayChunkShapeDep(array.chunks), axes),
        name=f"{operator.name}-{name}-{tokenize(array.name)}",
        dtype=array.dtype,
        meta=array._meta,
        align_arrays=False,
        expected=array.dtype,
        argument=name,
        operator=operator.name,
    )


def _checked_block(
    block: Any, index: tuple[int, ...], shape: tuple[int, ...], *, expected: np.dtype, argument: str, operator: str
) -> Any:
    """Check that a block has the class, shape and dtype that its array declares, and return it."""
    kind = type(block)
    if not isinstance(block, (np.ndarray, np.generic)) or has_own_arithmetic(kind):
        got = f"{kind.__module__}.{kind.__qualname__}"
        raise ParamTypeError(f"{argument}: expected numpy.ndarray as block {index}, got {got}", operator=operator)
    if block.shape != shape or native(block.dtype) != native(expected):
        error = ParamInvalidError if block.shape != shape else ParamTypeError
        declared = f"shape {shape} and dtype {expected} of block {index}, as the array declares"
        got = f"shape {block.shape} and dtype {block.dtype}"
        raise error(f"{argument}: expected {declared}, got {got}", operator=operator)
    return block


def check_one_chunk(array: da.Array, axis: int, name: str, operator: Operator) -> None:
    """Refuse an array with several chunks along an axis that each block has to contain completely."""
    if array.numblocks[axis] > 1:
        message = (
            f"{name}: expected one chunk along axis {axis}, got {array.numblocks[axis]}; "
            f"pass {name}.rechunk({{{axis}: -1}})"
        )
        raise ParamInvalidError(message, operator=operator.name)


def placeholder(shape: tuple[int, ...], dtype: np.dtype) -> NDArray:
    """Return an array that an operator's checks can read instead of an array that is not computed yet.

    Its elements are values that operators take: 0 for integers, otherwise 1.
    """
    return np.broadcast_to(np.zeros((), dtype) if dtype.kind in "iu" else np.ones((), dtype), shape)


def validated(operator: Operator, values: dict[str, Any], num_threads: int | None) -> Call:
    """Check the call that all blocks together make, with placeholders for its arrays, and return it."""
    call, _, _ = prepared(operator, [values[name] for name in operator.parameters], None, "cpu", num_threads)
    return call


def backend_of_blocks(backend: str | None, operator: Operator) -> str | None:
    """Return the backend for the blocks. A scheduler's threads do not see `use_backend` of the caller's context."""
    if backend is not None:
        return checked_backend(backend, operator.name)
    choice = backend_choice.get()
    return None if choice is None else choice.value
