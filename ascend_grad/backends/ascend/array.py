"""An array in device memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from ...arrays import AbstractDeviceArray

if TYPE_CHECKING:
    from .session import Allocation


class Origin(NamedTuple):
    """What is known of a target mask and the masked targets that one call made together.

    Wherever the mask's bit is 0, the target is in [0, extent), so the values need no second check.
    """

    token: object
    extent: int


class DeviceArray(AbstractDeviceArray):
    """An array on an Ascend NPU, made by `asarray` or by a call on such arrays. It cannot be changed.

    Attributes
    ----------
    shape : tuple of int
        The lengths of its axes.
    dtype : numpy.dtype
        The type of its elements.
    ndim, size, nbytes : int
        The numbers of its axes, its elements and their bytes.
    device : int
        The device in whose memory it is.

    Notes
    -----
    Its memory is released to the pool of the thread that drops the last reference. It is never copied to the host
    unasked: NumPy's functions refuse it, and ``numpy()`` gives a copy.
    """

    __slots__ = (
        "__weakref__", "_allocation", "_bits", "_copy_to_host", "_device", "_dtype", "_host", "_origin", "_packed",
        "_repaired", "_shape",
    )  # fmt: skip

    MAKER = "ascend_grad.npu.asarray"

    #: NumPy's operators leave these arrays alone.
    __array_ufunc__ = None

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype, device: int, copy_to_host: Callable[[DeviceArray], NDArray]
    ):
        self._allocation: Allocation | None = None  # None: no elements, no memory
        self._copy_to_host = copy_to_host
        self._origin: Origin | None = None
        self._host: NDArray | None = None  # the same values on the host, where they are known there
        self._bits: int | None = None  # of a packed mask: how many bits count, the device leaves the rest undefined
        self._packed: DeviceArray | None = None  # of a vector of bools: the same as bits
        self._repaired: tuple[DeviceArray, DeviceArray] | None = None  # of targets: a mask, and they as it wants them
        self._shape = shape
        self._dtype = dtype
        self._device = device

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def dtype(self) -> np.dtype:
        return self._dtype

    @property
    def device(self) -> int:
        return self._device

    @property
    def size(self) -> int:
        """The number of elements."""
        size = 1
        for n in self.shape:
            size *= n
        return size

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def numpy(self) -> NDArray:
        """A copy on the host: a new C-contiguous array.

        Raises
        ------
        BackendUnavailableError
            In a process that was forked after the array was made.
        AclError
            If the copy fails.
        """
        return self._copy_to_host(self)

    def host_values(self) -> NDArray:
        if self._host is None:
            self.cache_host_values(self.numpy())
        assert self._host is not None
        return self._host

    def cache_host_values(self, values: NDArray) -> None:
        """Cache these values, which are the array's and are never changed."""
        values.flags.writeable = False
        self._host = values

    def is_known_below(self, extent: int, mask: object) -> bool:
        origin = self._origin
        return (
            origin is not None and isinstance(mask, DeviceArray) and mask._origin is origin and origin.extent <= extent
        )

    def __array__(self, dtype=None, copy=None) -> NoReturn:
        raise TypeError("an array on the device is not copied to the host unasked: call its numpy()")

    def __repr__(self) -> str:
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype}, device={self.device})"

    def __reduce__(self):
        raise TypeError("an array on the device cannot be pickled: pickle its numpy()")

    def __bool__(self) -> NoReturn:
        raise TypeError("an array on the device has no truth value")
