"""Process groups of torch.distributed, over tensors that share the arrays' memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ..errors import ParamTypeError
from .communicators import Collectives, Operation
from .ranges import vocab_range

_OPERATIONS = {"max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM}


class ProcessGroupCollectives(Collectives):
    """The collective operations of a group that takes tensors of the CPU."""

    _group: dist.ProcessGroup

    def __init__(self, group: dist.ProcessGroup, name: str, operator: str):
        kinds = [device.type for device in group._device_types]
        if "cpu" not in kinds:
            expected = "a process group that takes tensors of the CPU (gloo)"
            message = f"{name}: expected {expected}, got one for {', '.join(kinds)}"
            raise ParamTypeError(message, operator=operator)
        self._group = group
        self.rank, self.size = group.rank(), group.size()

    def allreduce(self, array: NDArray, op: Operation) -> None:
        self.start_allreduce(array, op)()

    def allgather(self, array: NDArray) -> NDArray:
        result = np.empty((self.size, *array.shape), array.dtype)
        if array.size:
            dist.all_gather([_flat(part) for part in result], _flat(array), self._group)
        return result

    def start_allreduce(self, array: NDArray, op: Operation) -> Callable[[], object]:
        return dist.all_reduce(_flat(array), _OPERATIONS[op], self._group, async_op=True).wait

    def exchange(self, matrix: NDArray) -> NDArray:
        columns = matrix.shape[1]
        ranges = [vocab_range(len(matrix), rank, self.size) for rank in range(self.size)]
        own = ranges[self.rank][1] - ranges[self.rank][0]
        result = np.empty((self.size, own, columns), matrix.dtype)
        dist.all_to_all_single(
            _flat(result),
            _flat(matrix),
            [own * columns] * self.size,
            [(stop - start) * columns for start, stop in ranges],
            self._group,
        )
        return result


def _flat(array: NDArray) -> torch.Tensor:
    return torch.from_numpy(array.reshape(-1))
