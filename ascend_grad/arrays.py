"""Definitions about arrays for the whole library: dtypes, classes, the interface of device arrays, masks, rounding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np

from ._dtypes import BFLOAT16, FLOATING_DTYPES

SINGLE, DOUBLE = np.dtype(np.float32), np.dtype(np.float64)

_ORDINARY = (*FLOATING_DTYPES, np.dtype(np.int64), np.dtype(np.int32))

FLOATING_NAMES = "float32, float16, bfloat16 or float64"


def native(dtype: np.dtype) -> np.dtype:
    """Return the dtype in this machine's byte order, without metadata."""
    for known in _ORDINARY:  # most arrays' dtypes are these very objects
        if dtype is known:
            return dtype
    try:
        plain = dtype.newbyteorder("=")
    except TypeError:  # text of variable width has no byte order
        return dtype
    for known in FLOATING_DTYPES:
        if known == plain:
            return known
    return plain


def accumulator_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype of sums and unrounded results: float64 for float64, otherwise float32."""
    return DOUBLE if native(dtype) is DOUBLE else SINGLE


#: Classes of arrays with other arithmetic than ndarray define one of these: NumPy's two protocols, or the product, if a
#: class is older than the protocols (masked arrays, matrices). ``__array_finalize__`` and ``__array_wrap__`` do not
#: count: they only copy attributes to views and slices.
_ARITHMETIC = ("__array_ufunc__", "__array_function__", "__mul__")


def has_own_arithmetic(kind: type) -> bool:
    """Return whether arrays of this class have more than elements: a mask, a unit, or a different product."""
    return (
        kind is not np.ndarray
        and issubclass(kind, np.ndarray)
        and any(getattr(kind, name) is not getattr(np.ndarray, name) for name in _ARITHMETIC)
    )


def classes_within(value: object) -> Iterator[type]:
    """Yield the classes of the arrays in nested sequences, which NumPy converts to elements whatever their class."""
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, range, memoryview)):
        kinds = set(map(type, value))
        yield from (kind for kind in kinds if issubclass(kind, np.ndarray))
        if any(issubclass(kind, Sequence) for kind in kinds):
            for entry in value:
                yield from classes_within(entry)


class AbstractDeviceArray(ABC):
    """The interface of arrays that are not in host memory, for any backend."""

    __slots__ = ()

    #: The name of such an array in messages, with its article.
    KIND: str
    #: The call that copies an array to the device, in messages.
    TO_DEVICE: str
    #: The call that copies such an array to the host, in messages.
    TO_HOST: str
    #: True if checks read values. Otherwise the backend handles invalid values.
    IS_READ = True
    #: True if results can be written into such an array.
    CAN_BE_OUT = False

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]: ...

    @property
    @abstractmethod
    def dtype(self) -> np.dtype: ...

    @property
    @abstractmethod
    def device(self) -> int:
        """Number of the device."""

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @abstractmethod
    def host_values(self) -> np.ndarray:
        """Return the values on the host, read-only and copied at most once. For arrays with one element per row."""

    def in_library(self) -> object:
        """Return this array as an array of the library that it belongs to."""
        return self

    def unreadable_array(self) -> np.ndarray:
        """Return an array of the same address, layout and dtype, whose elements must not be read."""
        raise TypeError(f"results cannot be written into {self.KIND}")

    def is_known_below(self, extent: int, mask: object) -> bool:
        """Return whether values at mask 0 are known to be in [0, extent), so that checks need not read them."""
        return False


def host_values(array: np.ndarray | AbstractDeviceArray) -> np.ndarray:
    """Return the values of an array on the host or on a device."""
    return array.host_values() if isinstance(array, AbstractDeviceArray) else array


def wide(values: object) -> np.ndarray:
    """Return numbers, on the host or on a device, as a contiguous array of float64."""
    if isinstance(values, AbstractDeviceArray):
        values = values.host_values()
    with np.errstate(all="ignore"):
        return np.require(values, np.float64, ["C", "A"])


def counted(mask: np.ndarray, count: int) -> np.ndarray:
    """Return the part of a mask for ``count`` rows. A packed mask may have any number of further bytes."""
    return mask if mask.dtype == np.bool_ else mask[: -(-count // 8)]


def unpacked(mask: np.ndarray, count: int) -> np.ndarray:
    """Return a mask of ``count`` rows as bools. It has a bool per row, or a bit per row, the lowest bit first."""
    if mask.dtype == np.bool_:
        return mask
    packed = np.ascontiguousarray(counted(mask, count))
    return np.unpackbits(packed, bitorder="little", count=count).view(np.bool_)


def clear_padding(mask: np.ndarray, count: int) -> None:
    """Set the bits of a packed mask beyond the last of ``count`` rows to 0."""
    if count % 8:
        mask[-1] &= np.uint8((1 << count % 8) - 1)


def round_into(out: np.ndarray, values: np.ndarray) -> None:
    """Write float64 ``values`` into ``out``, rounding once, to nearest even.

    ml_dtypes converts float64 to bfloat16 by way of float32, which rounds twice. Rounding to odd in the
    first step makes the second one exact (Boldo and Melquiond, 2008).
    """
    with np.errstate(all="ignore"):
        if native(out.dtype) != BFLOAT16 or values.dtype != np.float64:
            out[...] = values
            return
        nearest = np.asarray(values, np.float32)
        bits = np.array(nearest, ndmin=1).view(np.uint32).reshape(nearest.shape)
        wide = nearest.astype(np.float64)
        inexact = np.isfinite(values) & (wide != values)
        # Rounding to odd: if the magnitude increased, step back towards zero; then set the last bit.
        away = inexact & (np.abs(wide) > np.abs(values))
        odd = np.where(inexact, (bits - away.astype(np.uint32)) | np.uint32(1), bits).astype(np.uint32)
        out[...] = np.array(odd, ndmin=1).view(np.float32).reshape(nearest.shape)


def with_axis_innermost(array: np.ndarray, axis: int) -> np.ndarray:
    """Return an array without memory of the shape of another one, whose elements along an axis are side by side."""
    shape = (*array.shape[:axis], *array.shape[axis + 1 :], array.shape[axis])
    return np.moveaxis(without_memory(shape, array.dtype), -1, axis)


def without_memory(shape: tuple[int, ...], dtype: np.dtype, strides: tuple[int, ...] | None = None) -> np.ndarray:
    """Return an array over the memory of one element, with these strides, or by default with C-contiguous strides."""
    if strides is None:
        steps = [dtype.itemsize] * len(shape)
        for axis in range(len(shape) - 1, 0, -1):
            steps[axis - 1] = steps[axis] * max(shape[axis], 1)
        strides = tuple(steps)
    return np.lib.stride_tricks.as_strided(np.empty(1, dtype), shape, strides)
