"""An array in device memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from ... import _acl, _dlpack, arrays
from ...arrays import AbstractDeviceArray
from ...errors import BackendUnavailableError
from . import runtime


class Memory(Protocol):
    """The memory of an array on the device: a `pool.Allocation`, or a `torch_npu.TensorMemory`.

    Attributes
    ----------
    kept : bool
        Whether the memory outlives the call that allocated it.
    """

    kept: bool

    @property
    def is_of_torch(self) -> bool:
        """Return whether the memory belongs to a tensor."""

    @property
    def is_shared(self) -> bool:
        """Return whether another library also has the memory."""

    @property
    def was_shared(self) -> bool:
        """Return whether another library has the memory, or had it."""

    def memory(self) -> _acl.DeviceRange:
        """Return the memory. If torch also has the memory, wait until torch is done with it."""

    def share(self, array: DeviceArray) -> object:
        """Return the object that another library keeps alive while it uses the memory of this array."""


class Origin(NamedTuple):
    """The call that made a target mask and masked targets together.

    Wherever the mask's bit is 0, the target is in [0, extent), so the values need no second check.
    """

    token: object
    extent: int


class Layout(NamedTuple):
    """The places of an array's elements in memory that another library allocated; all numbers count elements."""

    strides: tuple[int, ...]
    offset: int
    #: The number of elements that fit into the memory.
    storage_size: int
    #: True if the strides make the array C-contiguous.
    is_contiguous: bool


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a C-contiguous array, in elements."""
    strides = [1]
    for length in shape[:0:-1]:
        strides.append(strides[-1] * max(length, 1))
    return tuple(reversed(strides[: len(shape)]))


class Storage:
    """The memory of an array, and the places of its elements there.

    Attributes
    ----------
    allocation : Memory, optional
        The memory; None if the array has no elements.
    layout : Layout, optional
        The places of the elements; None if they are C-contiguous from the beginning of the memory.
    """

    __slots__ = ("allocation", "layout")

    def __init__(self) -> None:
        self.allocation: Memory | None = None
        self.layout: Layout | None = None

    @property
    def is_shared(self) -> bool:
        """Return whether another library may write into the memory, so that nothing is remembered of the values."""
        return self.allocation is not None and self.allocation.is_shared

    @property
    def is_of_torch(self) -> bool:
        """Return whether the memory belongs to a tensor."""
        return self.allocation is not None and self.allocation.is_of_torch

    @property
    def is_contiguous(self) -> bool:
        """Return whether the elements lie next to one another, in C order."""
        return self.layout is None or self.layout.is_contiguous

    def contiguous_copy(self) -> DeviceArray:
        """Return a copy on the device whose elements lie next to one another."""
        assert self.layout is not None, "memory that a session allocates is contiguous"
        memory: Any = self.allocation
        return memory.contiguous()

    def keep(self) -> None:
        """Let the memory outlive the call that allocated it."""
        if self.allocation is not None:
            self.allocation.kept = True


class HostCache:
    """Remember on the host what is known about the values of an array on the device.

    Attributes
    ----------
    values : ndarray, optional
        The same values on the host.
    origin : Origin, optional
        The call that made a mask and masked targets together.
    packed : DeviceArray, optional
        A vector of bools as bits.
    """

    __slots__ = ("_bits", "_repaired", "origin", "packed", "values")

    def __init__(self) -> None:
        self.values: NDArray | None = None
        self.origin: Origin | None = None
        self.packed: DeviceArray | None = None
        self._bits: int | None = None
        self._repaired: tuple[DeviceArray, DeviceArray] | None = None

    def forget_values(self) -> None:
        """Forget everything about values, which another library may change from now on."""
        self.values = self.origin = self.packed = self._repaired = None

    def set_bits(self, count: int) -> None:
        """Set the number of bits of a packed mask that belong to rows; the device leaves the rest undefined."""
        self._bits = count

    def clear_padding(self, values: NDArray) -> None:
        """Clear the bits that the device leaves undefined in a copy of the values."""
        if self._bits is not None:
            arrays.clear_padding(values, self._bits)

    def repaired_for(self, mask: object) -> DeviceArray | None:
        """Return the targets as this mask needs them, if they are on the device already."""
        repaired = self._repaired
        return None if repaired is None or repaired[0] is not mask else repaired[1]

    def remember_repaired(self, mask: DeviceArray, targets: DeviceArray) -> None:
        """Keep the targets as this mask needs them, instead of those for the mask before."""
        self._repaired = mask, targets


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

    ``torch.from_dlpack`` makes a tensor of torch_npu that shares the array's memory. Writing to the tensor also changes
    the array. In the last byte of a packed mask, bits beyond the last target are undefined in the tensor, and 0 in the
    result of ``numpy()``. (Proven on a test double; it has not run on hardware yet.)
    """

    __slots__ = ("__weakref__", "_copy_to_host", "_device", "_dtype", "_shape", "cache", "storage")

    KIND = "an array of ascend_grad.npu.asarray"
    TO_DEVICE = "ascend_grad.npu.asarray"
    TO_HOST = "numpy()"

    #: NumPy's operators do not accept these arrays.
    __array_ufunc__ = None

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype, device: int, copy_to_host: Callable[[DeviceArray], NDArray]
    ):
        self._copy_to_host = copy_to_host
        self._shape = shape
        self._dtype = dtype
        self._device = device
        self.storage, self.cache = Storage(), HostCache()

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
        """Return the number of elements."""
        size = 1
        for n in self.shape:
            size *= n
        return size

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def numpy(self) -> NDArray:
        """Return a copy on the host: a new C-contiguous array.

        Raises
        ------
        BackendUnavailableError
            In a process that was forked after the array was made.
        AclError
            If the copy fails.
        """
        return self._copy_to_host(self)

    @property
    def first_byte(self) -> int:
        """Return the offset of its first element in its memory."""
        layout = self.storage.layout
        return 0 if layout is None else layout.offset * self.dtype.itemsize

    def _view(self, shape: tuple[int, ...], layout: Layout | None) -> DeviceArray:
        """Return an array over the same memory, for work of the call that is running."""
        view = DeviceArray(shape, self.dtype, self.device, self._copy_to_host)
        view.storage.allocation, view.storage.layout = self.storage.allocation, layout
        return view

    def transposed(self, axes: tuple[int, ...]) -> DeviceArray:
        """Return a view with its axes in this order. `Storage.contiguous_copy` does not copy such a view."""
        layout = self.storage.layout or Layout(_contiguous_strides(self.shape), 0, self.size, True)
        strides = tuple(layout.strides[axis] for axis in axes)
        shape = tuple(self.shape[axis] for axis in axes)
        return self._view(shape, layout._replace(strides=strides, is_contiguous=False))

    def rows(self, begin: int, end: int) -> DeviceArray:
        """Return a view of some rows of an array."""
        layout = self.storage.layout or Layout(_contiguous_strides(self.shape), 0, self.size, True)
        offset = layout.offset + begin * layout.strides[0]
        return self._view((end - begin, *self.shape[1:]), layout._replace(offset=offset))

    def reshaped(self, shape: tuple[int, ...]) -> DeviceArray:
        """Return a view of a C-contiguous array in another shape."""
        layout = self.storage.layout
        return self._view(shape, layout and layout._replace(strides=_contiguous_strides(shape)))

    def host_values(self) -> NDArray:
        """Return the values on the host, read-only, copied back at most once."""
        values = self.cache.values
        if values is None:
            values = self.numpy()
            self.remember(values)
        return values

    def remember(self, values: NDArray) -> None:
        """Keep these values, which are the array's and are never changed from now on."""
        values.flags.writeable = False
        if not self.storage.is_shared:
            self.cache.values = values

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the device in the words of DLPack.

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
        allocation, layout = self.storage.allocation, self.storage.layout
        strides = None if layout is None else [step * self.dtype.itemsize for step in layout.strides]
        if allocation is not None:
            owner = allocation.share(self)
            address = _acl.address_of(allocation.memory()) + self.first_byte
            self.cache.forget_values()
        like = np.lib.stride_tricks.as_strided(np.empty(1, self.dtype), self.shape, strides)
        return _dlpack.capsule_on_device(owner, like, address, self.device)

    def is_known_below(self, extent: int, mask: object) -> bool:
        origin = self.cache.origin
        if origin is None or not isinstance(mask, DeviceArray):
            return False
        return mask.cache.origin is origin and origin.extent <= extent

    def __array__(self, dtype=None, copy=None) -> NoReturn:
        raise TypeError("an array on the device is not copied to the host implicitly; call its numpy()")

    def __repr__(self) -> str:
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype}, device={self.device})"

    def __reduce__(self):
        raise TypeError("an array on the device cannot be pickled; pickle its numpy()")

    def __bool__(self) -> NoReturn:
        raise TypeError("an array on the device has no truth value")
