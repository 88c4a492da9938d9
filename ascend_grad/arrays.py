"""Arrays as the whole library understands them: dtypes, classes, what an array on a device offers, masks, rounding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np

from ._dtypes import BFLOAT16, FLOATING_DTYPES

SINGLE, DOUBLE = np.dtype(np.float32), np.dtype(np.float64)

_ORDINARY = (*FLOATING_DTYPES, np.dtype(np.int64), np.dtype(np.int32))

FLOATING_NAMES = "float32, float16, bfloat16 or float64"


def native(dtype: np.dtype) -> np.dtype:
    """The dtype in the byte order of this machine, without metadata."""
    for known in _ORDINARY:  # an ordinary array's dtype is the very object
        if dtype is known:
            return dtype
    try:
        plain = dtype.newbyteorder("=")
    except TypeError:  # text of variable width, for one, has no byte order
        return dtype
    for known in FLOATING_DTYPES:
        if known == plain:
            return known
    return plain


def accumulator_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype that carries sums and unrounded results: float64 for float64, else float32."""
    return DOUBLE if native(dtype) is DOUBLE else SINGLE


#: A class of arrays that computes otherwise than ndarray does defines one of these: NumPy's two protocols for that, and
#: the product, which classes older than the protocols define (masked arrays, matrices). What a class does where it is
#: viewed or sliced (``__array_finalize__``, ``__array_wrap__``) only carries attributes along.
_ARITHMETIC = ("__array_ufunc__", "__array_function__", "__mul__")


def has_own_arithmetic(kind: type) -> bool:
    """Whether arrays of this class are more than their elements: they have a mask, a unit, a product of their own."""
    return (
        kind is not np.ndarray
        and issubclass(kind, np.ndarray)
        and any(getattr(kind, name) is not getattr(np.ndarray, name) for name in _ARITHMETIC)
    )


def classes_within(value: object) -> Iterator[type]:
    """The classes of the arrays in nested sequences: converting those takes arrays apart whatever they are."""
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, range, memoryview)):
        kinds = set(map(type, value))
        yield from (kind for kind in kinds if issubclass(kind, np.ndarray))
        if any(issubclass(kind, Sequence) for kind in kinds):
            for entry in value:
                yield from classes_within(entry)


class AbstractDeviceArray(ABC):
    """An array that is not in the host's memory, as the contract needs it, of any backend."""

    __slots__ = ()

    #: The name of such an array in messages, with its article.
    KIND: str
    #: The call that copies an array to the device, in messages.
    TO_DEVICE: str
    #: The call that copies such an array to the host, in messages.
    TO_HOST: str
    #: Whether checks read values. If not, the backend takes care of values that are not valid.
    IS_READ = True
    #: Whether results can be written into such an array.
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
        """Return the number of the device."""

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @abstractmethod
    def host_values(self) -> np.ndarray:
        """Return the values on the host, read-only, copied back at most once. Meant for one element a row."""

    def in_library(self) -> object:
        """Return the array as one of the library that it belongs to."""
        return self

    def unreadable_array(self) -> np.ndarray:
        """Return an array of the same address, layout and dtype, whose elements must not be read."""
        raise TypeError(f"results cannot be written into {self.KIND}")

    def is_known_below(self, extent: int, mask: object) -> bool:
        """Return whether the values are known to be in [0, extent) wherever the mask is 0, without reading them."""
        return False


def host_values(array: np.ndarray | AbstractDeviceArray) -> np.ndarray:
    """The values of an array, wherever it is."""
    return array.host_values() if isinstance(array, AbstractDeviceArray) else array


def counted(mask: np.ndarray, count: int) -> np.ndarray:
    """The part of a mask that says something of ``count`` rows: the bytes behind it may be many."""
    return mask if mask.dtype == np.bool_ else mask[: -(-count // 8)]


def unpacked(mask: np.ndarray, count: int) -> np.ndarray:
    """A mask of ``count`` rows as bools: one bool per row, or one bit of a byte, the lowest first."""
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
        # One step towards zero where rounding went away from it; then set the last bit.
        away = inexact & (np.abs(wide) > np.abs(values))
        odd = np.where(inexact, (bits - away.astype(np.uint32)) | np.uint32(1), bits).astype(np.uint32)
        out[...] = np.array(odd, ndmin=1).view(np.float32).reshape(nearest.shape)


def without_memory(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """What a fresh C-contiguous array looks like: its strides, over the memory of one element."""
    strides = [dtype.itemsize] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * max(shape[axis], 1)
    return np.lib.stride_tricks.as_strided(np.empty(1, dtype), shape, strides)
