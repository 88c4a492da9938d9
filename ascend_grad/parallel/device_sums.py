"""Sums over all ranks of matrices on devices, computed on the devices or on the host."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import arrays
from ..backends.ascend import runtime, torch_npu
from ..backends.ascend.array import DeviceArray
from .agreement import Attempt
from .communicators import Collectives
from .sums import MatrixSum, Share


class DeviceMatrixSum(ABC):
    """The sum of one matrix per rank, each on a device. The caller passes this rank's matrix to `put`."""

    #: False: `put` takes all rows at once, so no rows can be started before.
    overlaps = False

    @abstractmethod
    def put(self, matrix: DeviceArray) -> None:
        """Set this rank's matrix, which is 0 by default."""

    @abstractmethod
    def result(self, attempt: Attempt) -> Any:
        """Return the same as `MatrixSum.result`, on the device or on the host."""


class _OnlyMatrix(DeviceMatrixSum):
    """The sum if there is only one rank: its matrix."""

    def __init__(self, ranks: Collectives, rows: int, columns: int, dtype: np.dtype):
        self._ranks, self._shape, self._dtype = ranks, (rows, columns), dtype
        self._matrix: DeviceArray | None = None

    def put(self, matrix: DeviceArray) -> None:
        self._matrix = matrix

    def result(self, attempt: Attempt) -> Any:
        attempt.share(self._ranks)
        return attempt.run(self._result)

    def _result(self) -> DeviceArray | NDArray:
        if self._matrix is None:
            return np.zeros(self._shape, self._dtype)
        return self._matrix if self._matrix.dtype == self._dtype else self._matrix.numpy().astype(self._dtype)


class _StagedSum(DeviceMatrixSum):
    """A sum that is computed on the host, from copies of the matrices."""

    def __init__(self, *arguments: Any):
        self._sum = MatrixSum(*arguments)

    def put(self, matrix: DeviceArray) -> None:
        self._sum.matrix[...] = matrix.numpy()

    def result(self, attempt: Attempt) -> Any:
        return self._sum.result(attempt)


class _TensorSum(MatrixSum):
    """A `MatrixSum` whose memory is tensors of torch_npu."""

    def __init__(self, device: int, *arguments: Any):
        self._torch: Any = sys.modules["torch"]
        self._device = self._torch.device("npu", device)
        super().__init__(*arguments)

    def _zeros(self, shape: int | tuple[int, int], dtype: np.dtype) -> Any:
        return self._torch.zeros(shape, dtype=torch_npu.torch_dtype(dtype), device=self._device)

    def _empty(self, shape: int | tuple[int, int], dtype: np.dtype) -> Any:
        return self._torch.empty(shape, dtype=torch_npu.torch_dtype(dtype), device=self._device)

    def _add(self, parts: Any, out: Any) -> None:
        out.copy_(parts[0])
        for part in parts[1:]:
            out.add_(part)

    def _round(self, out: Any, values: Any) -> None:
        out.copy_(values)


class _NpuSum(DeviceMatrixSum):
    """A sum that is transferred directly between devices."""

    def __init__(self, like: DeviceArray, *arguments: Any):
        self._like = like
        self._sum = _TensorSum(like.device, *arguments)

    def put(self, matrix: DeviceArray) -> None:
        self._sum.matrix.copy_(torch_npu.tensor_of(matrix))

    def result(self, attempt: Attempt) -> Any:
        found = self._sum.result(attempt)

        def complete() -> DeviceArray:
            runtime.wait_for_torch(self._like.device)  # results must be complete when a call returns, for any stream
            return torch_npu.array_like(found, self._like)

        return attempt.run(complete)


def device_matrix_sum(
    ranks: Collectives,
    rows: int,
    columns: int,
    result_dtype: np.dtype,
    share: Share,
    deterministic: bool,
    like: DeviceArray,
) -> DeviceMatrixSum:
    """Return a sum for matrices of this shape.

    Parameters
    ----------
    ranks, rows, columns, result_dtype, share, deterministic
        As in `MatrixSum`. Numbers are transferred and added in the accumulator's dtype.
    like : DeviceArray
        An array on the device that holds the matrices.
    """
    if ranks.size == 1:
        return _OnlyMatrix(ranks, rows, columns, result_dtype)
    sized = ranks, rows, columns, arrays.accumulator_dtype(like.dtype), result_dtype, share, deterministic
    return _NpuSum(like, *sized) if ranks.takes_npu_tensors else _StagedSum(*sized)
