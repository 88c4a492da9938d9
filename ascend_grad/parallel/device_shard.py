"""One rank's part of a problem on a device.

Matrices stay on the device. A few numbers for each token are copied to the host and combined over the ranks there, as
for arrays of the host.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .._call import Call
from ..backends.ascend.array import DeviceArray
from ..backends.ascend.calls import copy_to_device_of
from ..errors import ParamInvalidError
from .agreement import Attempt
from .communicators import Collectives
from .device_sums import DeviceMatrixSum, device_matrix_sum
from .row_chunk import RowChunk
from .row_losses import RowArrays
from .shard import Shard
from .sums import Share


class DeviceShard(Shard):
    """This rank's part of a problem, like `Shard`, in memory of a device. All rows are one chunk.

    The argument `weight_grad` is the `DeviceMatrixSum` for the weight's gradient, or None.
    """

    memory = "on a device"

    @property
    def _statistics_dtype(self) -> np.dtype:
        return self.accumulator

    def _allocate(self, share: Share, weight_grad: Any) -> None:
        if self._lacking:
            message = "not supported over ranks for arrays on a device; pass arrays on the host"
            raise ParamInvalidError(f"{self._lacking[0]}: {message}", operator=self._operator)
        self.bias_grad = self._rounded_bias_grad = None
        self._weight_sum: DeviceMatrixSum | None = weight_grad
        if self.wanted[0]:
            result_dtype = self.accumulator if share is False else self.dtype
            rows, features = self.input.shape
            self.input_sum = device_matrix_sum(
                self._ranks, rows, features, result_dtype, share, self._a["deterministic"], self.input
            )

    def _prepare_gradients(self) -> None:
        """Do nothing: the operator allocates the weight's gradient."""

    def _new_chunk(self, rows: slice, arrays_of_rows: RowArrays) -> RowChunk:
        return RowChunk(self._problem, arrays_of_rows, self._device_backend)

    def _find_gradients(self, chunk: RowChunk, rows: slice) -> None:
        """Compute the gradients, and pass them to their sums over the ranks."""
        if not (any(self.wanted) and self.weight.shape[0]):
            return
        found: tuple[DeviceArray | None, DeviceArray | None] = self._device_backend.found_gradients(
            self._problem, chunk.statistics, self._rows, self.wanted
        )
        if found[0] is not None:
            self.input_sum.put(found[0])
        if found[1] is not None and self._weight_sum is not None:
            self._weight_sum.put(found[1])
        self._weight_grad = found[1]

    def _complete_gradients(self) -> None:
        if self.wanted[1] and self._weight_grad is None and self._weight_sum is None:  # no tokens or no vocabulary
            self._weight_grad = np.zeros(self.weight.shape, self.dtype)

    def in_library(self, values: dict[str, Any], attempt: Attempt, ranks: Collectives) -> Any:
        """Return the results as arrays on the device, or raise on every rank if one of them failed."""

        def put() -> dict[str, Any]:
            return {
                name: copy_to_device_of(each, self.input) if isinstance(each, np.ndarray) else each
                for name, each in values.items()
            }

        there = attempt.run(put)
        attempt.share(ranks)
        assert there is not None  # otherwise share() has raised
        return super().in_library(there, attempt, ranks)


def make_shard(call: Call, *arguments: Any) -> Shard:
    """Return a shard made with these arguments, on the host or on a device."""
    return (Shard if call.device is None else DeviceShard)(call, *arguments)
