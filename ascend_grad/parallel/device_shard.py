"""One rank's part of a problem on a device.

Matrices stay on the device. A few numbers for each token are copied to the host and combined over the ranks there, as
for arrays of the host.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import arrays, ops
from .._call import Call
from ..backends.ascend.array import DeviceArray
from ..backends.ascend.backend import copy_to_device_of
from ..results import LinearCrossEntropy
from .agreement import Attempt
from .block import Block
from .communicators import Collectives
from .device_sums import DeviceMatrixSum, device_matrix_sum
from .shard import Shard
from .sums import Share


class DeviceShard(Shard):
    """This rank's part of a problem, like `Shard`, in memory of a device.

    The argument `weight_grad` is the `DeviceMatrixSum` for the weight's gradient, or None.
    """

    memory = "on a device"

    def _allocate(self, share: Share, weight_grad: Any) -> None:
        self.device_target: DeviceArray = self._a[self._names[2]]
        self._weight_sum: DeviceMatrixSum | None = weight_grad
        if self.wanted[0]:
            result_dtype = self.accumulator if share is False else self.dtype
            rows, features = self.input.shape
            self.input_sum = device_matrix_sum(
                self._ranks, rows, features, result_dtype, share, self._a["deterministic"], self.input
            )

    def _prepare_weight_grad(self) -> None:
        """Do nothing: the operator allocates the weight's gradient."""

    def _block(self, rows: slice) -> DeviceBlock:
        return DeviceBlock(self, rows, caches_logits=False)

    def add_gradients(self, input_grad: DeviceArray | None, weight_grad: DeviceArray | None) -> None:
        """Store the gradients of the only row block."""
        if input_grad is not None:
            self.input_sum.put(input_grad)
        if weight_grad is not None and self._weight_sum is not None:
            self._weight_sum.put(weight_grad)
        self._weight_grad = weight_grad

    def _complete_weight_grad(self) -> None:
        if self.wanted[1] and self._weight_grad is None and self._weight_sum is None:  # no tokens or no vocabulary
            self._weight_grad = np.zeros(self.weight.shape, self.dtype)

    def convert_results(self, result: LinearCrossEntropy, attempt: Attempt, ranks: Collectives) -> LinearCrossEntropy:
        """Return the results as arrays on the device, or raise on every rank if one of them failed."""

        def put() -> list[Any]:
            return [self.to_device(each) if isinstance(each, np.ndarray) else each for each in result]

        there = attempt.run(put)
        attempt.share(ranks)
        assert there is not None  # otherwise share() has raised
        return LinearCrossEntropy(*self._call.in_library(there))

    def to_device(self, array: NDArray) -> Any:
        """Return a copy on the input's device."""
        return copy_to_device_of(array, self.input)


class DeviceBlock(Block):
    """The only row block of a shard on a device."""

    _shard: DeviceShard

    def _compute_statistics(self) -> None:
        shard, count = self._shard, len(self.maxima)
        found: Any = ops.fused_linear_online_max_sum(
            shard.input,
            shard.weight,
            shard.device_target,
            shard.start,
            shard.start + shard.weight.shape[0],
            **shard.execution,
        )
        self._largest, self.sums[:, 0], self.sums[:, 1] = (each.numpy() for each in found[:3])
        self._elsewhere = arrays.unpacked(found.target_mask.numpy(), count)
        self._found = found

    def finish(self) -> None:
        shard = self._shard
        maxima, exponentials, predicted = (
            shard.to_device(np.ascontiguousarray(each)) for each in (self.maxima, *self.sums.T)
        )
        losses: Any = ops.fused_cross_entropy_loss_with_max_sum(maxima, exponentials, predicted, **shard.execution)[0]
        shard.losses[...] = losses.numpy()
        if not (any(shard.wanted) and shard.weight.shape[0]):
            return
        gradients: Any = ops.fused_linear_cross_entropy_loss_grad(
            shard.to_device(shard.grad),
            shard.input,
            shard.weight,
            self._found.target_mask,
            self._found.masked_target,
            logits_max=maxima,
            sum_exp_logits=exponentials,
            output_mask=shard.wanted,
            **shard.products,
            **shard.execution,
        )
        shard.add_gradients(*gradients)


def make_shard(call: Call, *arguments: Any) -> Shard:
    """Return a `Shard`, or a `DeviceShard` for arrays on a device, made with these arguments."""
    return (Shard if call.device is None else DeviceShard)(call, *arguments)
