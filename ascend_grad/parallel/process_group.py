"""Collective operations by torch.distributed, on tensors that share the arrays' memory or on copies on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ..errors import ParamTypeError
from .communicators import Collectives, Operation
from .ranges import vocab_range

_OPERATIONS = {"max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM}
_UFUNCS = {"max": np.maximum, "sum": np.add}


class ProcessGroupCollectives(Collectives):
    """The collective operations of a process group that takes tensors of the CPU, or of Ascend NPUs, or both.

    Arguments are arrays, or tensors on an NPU, which stay there. If the group takes no tensors of the CPU (hccl alone),
    arrays are copied through memory of torch's current device; they are then a few numbers for each token.
    """

    _group: dist.ProcessGroup

    def __init__(self, group: dist.ProcessGroup, name: str, operator: str):
        kinds = [device.type for device in group._device_types]
        if not {"cpu", "npu"}.intersection(kinds):
            expected = "a process group for tensors on the CPU (gloo) or on Ascend NPUs (hccl)"
            message = f"{name}: expected {expected}, got one for {', '.join(kinds)}"
            raise ParamTypeError(message, operator=operator)
        self._group = group
        self.rank, self.size = group.rank(), group.size()
        self.takes_npu_tensors = "npu" in kinds
        self._device = torch.device("cpu")
        if "cpu" not in kinds:
            npu: Any = torch.npu  # set by torch_npu
            self.required_device = npu.current_device()
            self._device = torch.device("npu", self.required_device)

    def allreduce(self, array: NDArray | torch.Tensor, op: Operation) -> None:
        self.start_allreduce(array, op)()

    def allgather(self, array: Any, out: Any = None) -> Any:
        if out is None:
            out = np.empty((self.size, *array.shape), array.dtype)
        here = _flat(out)
        if here.numel():
            there = torch.empty_like(here, device=self._device) if here.is_cpu and self._passes_device else here
            dist.all_gather(list(there.view(self.size, -1)), self._moved(_flat(array)), self._group)
            _copy_back(there, here)
        return out

    def start_allreduce(self, array: NDArray | torch.Tensor, op: Operation) -> Callable[[], object]:
        here = _flat(array)
        if here.dtype == torch.float64 and self._passes_device:  # hccl does not reduce float64
            with np.errstate(all="ignore"):
                _UFUNCS[op].reduce(self.allgather(array), axis=0, out=array)
            return lambda: None
        there = self._moved(here)
        work = dist.all_reduce(there, _OPERATIONS[op], self._group, async_op=True)

        def wait() -> None:
            work.wait()
            _copy_back(there, here)

        return wait

    def exchange(self, matrix: Any, out: Any) -> None:
        columns = matrix.shape[1]
        ranges = [vocab_range(len(matrix), rank, self.size) for rank in range(self.size)]
        start, stop = ranges[self.rank]
        if (len(matrix) < self.size or not columns) and self.takes_npu_tensors:  # avoids tensors without memory
            everything = out.new_empty((self.size, *matrix.shape)) if isinstance(out, torch.Tensor) else None
            out[...] = self.allgather(matrix, everything)[:, start:stop]
            return
        dist.all_to_all_single(
            _flat(out),
            _flat(matrix),
            [(stop - start) * columns] * self.size,
            [(stop - start) * columns for start, stop in ranges],
            self._group,
        )

    @property
    def _passes_device(self) -> bool:
        """Return whether arrays are copied through memory of a device."""
        return self.required_device is not None

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the CPU on the device that the group takes, and other tensors unchanged."""
        return tensor.to(self._device) if tensor.is_cpu else tensor


def _flat(array: NDArray | torch.Tensor) -> torch.Tensor:
    """Return the elements as a one-dimensional tensor in the same memory."""
    flat = array.reshape(-1)
    return flat if isinstance(flat, torch.Tensor) else torch.from_numpy(flat)


def _copy_back(there: torch.Tensor, here: torch.Tensor) -> None:
    if there is not here:
        here.copy_(there)
