"""A queue for tensors of torch_npu: its memory is torch's, and its work goes to torch's current stream.

No value is read on the host, since that would wait. So vectors are tensors, and no row is left out of a call.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import _acl, arrays
from .array import DeviceArray
from .queue import Queue
from .torch_npu import TensorArray, TensorMemory, array_of, tensor_of, torch_dtype

NAN = float("nan")


class TensorRows:
    """The rows of tensors that take part in a call, as `queue.Rows`; ``present`` is None for all rows."""

    is_empty = is_complete = False  # the host does not know

    def __init__(self, queue: TensorQueue, present: Any = None, count: int = 0):
        self._queue, self._present, self._count = queue, present, count

    def put(self, array: Any, otherwise: float | None = None, *, is_overwritten: bool = False) -> DeviceArray:
        tensor, present, torch = self._queue.tensor(array), self._present, self._queue.xp
        if present is not None and tensor.shape[0] < present.shape[0]:
            tensor = torch.concatenate([tensor, tensor])
        if present is not None and otherwise is not None:  # torch.where makes a copy, which may be overwritten
            tensor = torch.where(present if tensor.dim() == 1 else present[:, None], tensor, otherwise)
        return self._queue.put(tensor)

    def put_from(self, rows: TensorRows, array: DeviceArray) -> DeviceArray:
        return self.put(array, 0)

    def put_mask(self, mask: Any, count: int) -> DeviceArray:
        return self._queue.mask_bits(mask, count)

    def of(self, vector: Any) -> Any:
        return vector

    def vector(self, array: Any) -> Any:
        return self._queue.vector(array)

    def restored(self, array: DeviceArray) -> DeviceArray:
        if self._present is None:
            return array
        tensor = tensor_of(array)
        tensor.masked_fill_(~self._present[:, None], 0)
        if tensor.shape[0] > self._count:
            first, second = tensor.split(self._count)
            tensor = first + second
        return self._queue.put(tensor)

    def cleared(self, array: DeviceArray) -> DeviceArray:
        tensor_of(array).masked_fill_(self._present.sum() == 0, 0)
        return array


class TensorQueue(Queue):
    """The queue of one call on tensors.

    torch gives memory out again in the order of the stream, so memory that is dropped may still be in use there.
    """

    def __init__(self, device: int, *, determinism_level: int):
        self.xp: Any = sys.modules["torch"]
        self._npu: Any = sys.modules["torch_npu"].npu
        self.device, self.determinism_level = device, determinism_level
        self._place = self.xp.device("npu", device)
        self._workspace: Any = None

    @property
    def stream(self) -> _acl.AnyStream:
        # torch_npu keeps work back in a queue on the host. Reading the address submits the queue of torch's current
        # device, which is this one. So the address is read right before the work is put on the stream.
        return _acl.borrowed_stream(self._npu.current_stream(self.device).npu_stream, self.device)

    def memory_of(self, array: DeviceArray) -> _acl.DeviceRange:
        memory = array.storage.allocation
        assert isinstance(memory, TensorMemory), "an array without elements has no memory"
        return memory.range

    def workspace(self, nbytes: int) -> _acl.DeviceRange:
        workspace = self.xp.empty(nbytes, dtype=self.xp.uint8, device=self._place)
        self._workspace = workspace  # kept until the next operator has its workspace, or the call ends
        return _acl.borrowed(workspace.data_ptr(), nbytes, self.device)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> TensorArray:
        return array_of(self.xp.empty(shape, dtype=torch_dtype(dtype), device=self._place))

    def tensor(self, array: Any) -> Any:
        """Return the tensor of an argument, or a vector itself."""
        return tensor_of(array) if isinstance(array, DeviceArray) else array

    def put(self, array: Any, dtype: np.dtype | None = None) -> TensorArray:
        if isinstance(array, TensorArray) and dtype in (None, array.dtype):
            return array
        tensor = self.tensor(array)
        return array_of(tensor if dtype is None else tensor.to(torch_dtype(dtype)))

    def permuted(self, array: DeviceArray, axes: tuple[int, ...]) -> TensorArray:
        return array_of(tensor_of(array).permute(axes).contiguous())

    def reshaped(self, array: DeviceArray, shape: tuple[int, ...]) -> TensorArray:
        return array_of(tensor_of(array).contiguous().reshape(shape))  # some operators read no strides

    def from_host(self, array: NDArray, out: TensorArray | None = None) -> TensorArray:
        """Copy an array of the host to the device, or into ``out``.

        If all elements are equal bit by bit, the device fills the memory, and the call does not wait.
        """
        flat = np.ascontiguousarray(array, arrays.native(array.dtype)).reshape(-1)
        bits = flat.view(f"u{flat.itemsize}")
        if out is None:
            out = self.empty(array.shape, flat.dtype)
        if (bits == bits[:1]).all():
            first = flat[:1].tolist()
            out.tensor.fill_(first[0] if first else 0)
        else:
            out.tensor.copy_(self.xp.from_numpy(flat.view(np.uint8)).view(torch_dtype(flat.dtype)).view(array.shape))
        return out

    # ---- vectors, in float32

    def vector(self, array: Any, dtype: Any = None) -> Any:
        dtype = self.xp.float32 if dtype is None else dtype
        if isinstance(array, float):
            return self.xp.full((), float(np.float32(array)), dtype=dtype, device=self._place)
        return self.tensor(array).to(dtype).contiguous()

    def numbers(self, count: int) -> Any:
        return self.xp.arange(count, device=self._place)

    def largest(self, values: Any, places: Any, count: int) -> tuple[Any, Any]:
        places, order = self.xp.sort(places, dim=1)
        # Zeros of either sign are equal, however the device compares them.
        values, order = self.xp.sort(values.gather(1, order) + 0.0, dim=1, descending=True, stable=True)
        return values[:, :count], places.gather(1, order)[:, :count]

    def compact(self, counted: Any) -> TensorRows:
        return TensorRows(self)

    def select(self, present: Any, count: int) -> TensorRows:
        return TensorRows(self, present, count)

    # ---- repairs without a look at values

    def mask_bits(self, mask: Any, count: int) -> TensorArray:
        mask = self.tensor(mask)
        if mask.dtype != self.xp.bool:
            return array_of(mask)
        padded = mask.new_zeros(-(-count // 8) * 8)
        padded[:count].copy_(mask)
        columns = padded.reshape(-1, 8).to(self.xp.uint8)
        result = columns[:, 0]
        for bit in range(1, 8):  # the first row is in the lowest bit
            result = result + columns[:, bit] * (1 << bit)
        return array_of(result)

    def _bools(self, mask: Any, count: int) -> Any:
        """Return a mask of ``count`` rows as bools."""
        if mask.dtype == self.xp.bool:
            return mask
        packed = mask[: -(-count // 8)]
        return self.xp.stack([(packed & (1 << bit)) != 0 for bit in range(8)], dim=1).reshape(-1)[:count]

    def safe_targets(self, grad: Any, target: Any, mask: Any, extent: int) -> tuple[Any, Any]:
        """As `Queue` says. Targets outside of the weight become 0 everywhere, and their gradients NaN."""
        grad, target = self.tensor(grad), self.tensor(target)
        elsewhere = self._bools(self.tensor(mask), target.shape[0])
        inside = (target >= 0) & (target < extent)
        target = self.xp.where(inside & ~elsewhere, target, 0)
        return self.xp.where(inside | elsewhere, grad, NAN), target

    def clear_padding(self, mask: DeviceArray, count: int) -> None:
        if count % 8:
            tensor_of(mask)[-1:].bitwise_and_((1 << count % 8) - 1)


@contextmanager
def on_current_stream(device: int, *, determinism_level: int = 0) -> Iterator[TensorQueue]:
    """Run one call on tensors of a device. Afterwards torch's current device and the thread's context are as before.

    torch's operators end by binding the thread to torch's current device, so the tensors have to be on that device.
    """
    npu: Any = sys.modules["torch_npu"].npu
    with _acl.ContextGuard(), npu.device(device), _acl.DeviceGuard(device):
        yield TensorQueue(device, determinism_level=determinism_level)
