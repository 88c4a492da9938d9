"""An array in device memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from ... import _acl, _dlpack
from ...arrays import AbstractDeviceArray
from ...errors import BackendUnavailableError
from . import runtime

if TYPE_CHECKING:
    from .session import Allocation
    from .torch_npu import TensorMemory


class Origin(NamedTuple):
    """What is known of a target mask and the masked targets that one call made together.

    Wherever the mask's bit is 0, the target is in [0, extent), so the values need no second check.
    """

    token: object
    extent: int


class Layout(NamedTuple):
    """Where the elements of an array are in memory that another library allocated; all numbers count elements."""

    strides: tuple[int, ...]
    offset: int
    #: How many there is room for.
    room: int
    #: Whether the strides are those of a C-contiguous array.
    is_contiguous: bool


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

    ``torch.from_dlpack`` makes a tensor of torch_npu of it, which shares its memory. What is written into the tensor
    is in the array, too. Of a packed mask the tensor has the last byte as the device left it: bits beyond the last
    target are undefined there, and 0 in what ``numpy()`` gives. (Proven on a test double; it has not run on hardware
    yet.)
    """

    __slots__ = (
        "__weakref__", "_allocation", "_bits", "_copy_to_host", "_device", "_dtype", "_host", "_layout", "_origin",
        "_packed", "_repaired", "_shape",
    )  # fmt: skip

    KIND = "an array of ascend_grad.npu.asarray"
    TO_DEVICE = "ascend_grad.npu.asarray"
    TO_HOST = "numpy()"

    #: NumPy's operators leave these arrays alone.
    __array_ufunc__ = None

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype, device: int, copy_to_host: Callable[[DeviceArray], NDArray]
    ):
        self._allocation: Allocation | TensorMemory | None = None  # None: no elements, no memory
        self._layout: Layout | None = None  # None: C-contiguous from the beginning of the memory
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

    @property
    def is_shared(self) -> bool:
        """Whether another library may write into its memory, so that nothing is remembered of its values."""
        return self._allocation is not None and self._allocation.is_shared

    @property
    def is_memory_of_torch(self) -> bool:
        """Whether its memory is that of a tensor."""
        return self._allocation is not None and self._allocation.is_of_torch

    @property
    def is_contiguous(self) -> bool:
        return self._layout is None or self._layout.is_contiguous

    @property
    def first_byte(self) -> int:
        """Where its first element is in its memory."""
        return 0 if self._layout is None else self._layout.offset * self.dtype.itemsize

    def host_values(self) -> NDArray:
        values = self._host
        if values is None:
            values = self.numpy()
            self.cache_host_values(values)
        return values

    def cache_host_values(self, values: NDArray) -> None:
        """Cache these values, which are the array's and are never changed."""
        values.flags.writeable = False
        if not self.is_shared:
            self._host = values

    def __dlpack_device__(self) -> tuple[int, int]:
        """The device in the words of DLPack.

        Returns
        -------
        tuple of int
            12, as which torch_npu knows its devices, and the number.
        """
        return _dlpack.dlpack_device(self.device)

    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: object = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """Give the memory to another library, which shares it.

        Parameters
        ----------
        stream : object
            Not needed: the work of every call is done when it returns.
        max_version : object
            Not needed: the capsule is one of before DLPack 1.0, which torch_npu takes.
        dl_device : tuple of int, optional
            The device of the array, or None.
        copy : bool, optional
            Not True.

        Returns
        -------
        PyCapsule
            The array lives until the other library is done with it.

        Raises
        ------
        BufferError
            A copy, or another device, is asked for.
        BackendUnavailableError
            In a process that was forked after the array was made.
        """
        if copy or (dl_device is not None and tuple(dl_device) != self.__dlpack_device__()):
            raise BufferError("expected to share the memory of the array's device, not a copy or another device")
        state = runtime.state()
        if not state.usable:
            raise BackendUnavailableError(f"the device cannot be used: {state.reason}")
        owner: object = self
        address = 0
        strides = None if self._layout is None else [step * self.dtype.itemsize for step in self._layout.strides]
        if self._allocation is not None:
            owner = self._allocation.share(self)
            address = _acl.address_of(self._allocation.memory()) + self.first_byte
            self._host = self._origin = self._packed = self._repaired = None
        like = np.lib.stride_tricks.as_strided(np.empty(1, self.dtype), self.shape, strides)
        return _dlpack.capsule_on_device(owner, like, address, self.device)

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
