"""Arrays of the same values in other layouts: views of new memory, which they fill except for a layout's gaps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

C_ORDER = "C order"
BROADCAST = "broadcast"
BYTE_SWAPPED = "byte-swapped"


def _fortran(values: np.ndarray, axis: int) -> np.ndarray:
    return _permuted(values, range(values.ndim)[::-1])


def _transposed(values: np.ndarray, axis: int) -> np.ndarray:
    """Swap the axis with the previous one in memory."""
    other = axis - 1 if axis else values.ndim - 1
    order = list(range(values.ndim))
    order[axis], order[other] = order[other], order[axis]
    return _permuted(values, order)


def _permuted(values: np.ndarray, order) -> np.ndarray:
    """Return an array whose axes have this order in memory, slowest first."""
    memory = np.empty([values.shape[axis] for axis in order], values.dtype)
    return memory.transpose(np.argsort(order))


def _every_second(values: np.ndarray, axis: int) -> np.ndarray:
    *others, last = values.shape
    return np.empty((*others, 2 * last), values.dtype)[..., ::2]


def _negative(values: np.ndarray, axis: int) -> np.ndarray:
    return np.empty(values.shape, values.dtype)[(slice(None, None, -1),) * values.ndim]


def _column(values: np.ndarray, axis: int) -> np.ndarray:
    return np.empty((*values.shape, 5), values.dtype)[..., 2]


def _broadcast(values: np.ndarray, axis: int) -> np.ndarray:
    """Repeat the values along one axis with stride 0: the one before the operator's axis, or the last if that is 0."""
    repeated = axis - 1 if axis else values.ndim - 1
    shape = list(values.shape)
    shape[repeated] = min(1, shape[repeated])
    memory = np.empty(shape, values.dtype)
    strides = [0 if i == repeated else stride for i, stride in enumerate(memory.strides)]
    # np.broadcast_to would return a read-only array, of which PyTorch warns.
    return np.ndarray(values.shape, values.dtype, memory.view(np.uint8), strides=strides)


def _byte_swapped(values: np.ndarray, axis: int) -> np.ndarray:
    return np.empty(values.shape, values.dtype.newbyteorder())


_EMPTY: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    C_ORDER: lambda values, axis: np.empty(values.shape, values.dtype),
    "Fortran order": _fortran,
    "transposed": _transposed,
    "every second": _every_second,
    "negative steps": _negative,
    "one column of five": _column,
    BROADCAST: _broadcast,
    BYTE_SWAPPED: _byte_swapped,
}

LAYOUTS = tuple(_EMPTY)


def arranged(values: np.ndarray, layout: str, axis: int) -> np.ndarray:
    """Return the values in another layout. Along a broadcast axis, only the values of its last index remain."""
    result = _EMPTY[layout](values, axis)
    # All of the memory is written first, gaps included, so that the system has allocated its pages.
    memory_of(result).fill(0)
    np.copyto(result, values)
    return result


def memory_of(array: np.ndarray) -> np.ndarray:
    """Return the array that owns the memory. A call reads all of it, as gaps are shorter than a cache line."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
