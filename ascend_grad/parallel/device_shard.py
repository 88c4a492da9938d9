"""One rank's part of a problem on a device.

Matrices stay on the device. A few numbers for each token are copied to the host and combined over the ranks there, as
for arrays of the host.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import arrays
from .._call import Call
from ..backends.ascend.array import DeviceArray
from ..backends.ascend.backend import copy_to_device_of
from ..errors import ParamInvalidError
from ..operators import functions
from ..operators.ranks import given_over_ranks
from ..operators.results import LossResult, loss_result
from .agreement import Attempt
from .communicators import Collectives
from .device_sums import DeviceMatrixSum, device_matrix_sum
from .option_shard import OptionShard
from .row_chunk import ChunkProblem, ChunkStatistics, RowChunk
from .shard import Shard
from .sums import Share, VectorSums


class DeviceShard(Shard):
    """This rank's part of a problem, like `Shard`, in memory of a device.

    The argument `weight_grad` is the `DeviceMatrixSum` for the weight's gradient, or None.
    """

    memory = "on a device"

    def _allocate_rows(self, rows: int) -> None:
        """Allocate the arrays with some numbers for each row, in the dtype of the device's statistics."""
        self._maxima = np.zeros(rows, self.accumulator)
        #: Columns: each row's sum of exponentials, and the logit of its target.
        self._sums = np.zeros((rows, 2), self.accumulator)
        self._sums_of_ranks = VectorSums(self._ranks, self._sums.size, self.accumulator, self._a["deterministic"])
        self._losses = np.empty(rows, self.accumulator)
        self._grad = np.zeros(rows, self.accumulator)

    def _allocate(self, share: Share, weight_grad: Any) -> None:
        self._device_target: DeviceArray = self._a[self._names[2]]
        self._weight_sum: DeviceMatrixSum | None = weight_grad
        if self.wanted[0]:
            result_dtype = self.accumulator if share is False else self.dtype
            rows, features = self.input.shape
            self.input_sum = device_matrix_sum(
                self._ranks, rows, features, result_dtype, share, self._a["deterministic"], self.input
            )

    def _prepare_weight_grad(self) -> None:
        """Do nothing: the operator allocates the weight's gradient."""

    def _solve_chunk(self, attempt: Attempt, rows: slice) -> None:
        """Compute the losses and the gradients of all rows, which are one chunk on a device."""
        problem = ChunkProblem(
            input=self.input,
            weight=self.weight,
            target=self._device_target,
            start=self.start,
            grad=self._grad,
            gradient_options=self._gradient_options,
            execution=self._execution,
        )
        chunk = DeviceChunk(problem, self._statistics(rows), self.wanted)
        self._run_chunk(attempt, chunk)
        attempt.run(lambda: self._store_gradients(*chunk.gradients))

    def _store_gradients(self, input_grad: DeviceArray | None, weight_grad: DeviceArray | None) -> None:
        if input_grad is not None:
            self.input_sum.put(input_grad)
        if weight_grad is not None and self._weight_sum is not None:
            self._weight_sum.put(weight_grad)
        self._weight_grad = weight_grad

    def _complete_weight_grad(self) -> None:
        if self.wanted[1] and self._weight_grad is None and self._weight_sum is None:  # no tokens or no vocabulary
            self._weight_grad = np.zeros(self.weight.shape, self.dtype)

    def convert_results(self, result: LossResult, attempt: Attempt, ranks: Collectives) -> LossResult:
        """Return the results as arrays on the device, or raise on every rank if one of them failed."""

        def put() -> list[Any]:
            return [copy_to_device_of(each, self.input) if isinstance(each, np.ndarray) else each for each in result]

        there = attempt.run(put)
        attempt.share(ranks)
        assert there is not None  # otherwise share() has raised
        return loss_result(result._fields, self._call.in_library(there))


class DeviceChunk(RowChunk):
    """All rows of a shard on a device.

    Parameters
    ----------
    problem, statistics
        As in `RowChunk`.
    output_mask : list of bool
        Whether the gradients of the input and of the weight are requested.

    Attributes
    ----------
    gradients : tuple
        The gradients on the device; each is None if it is not requested or if the weight has no rows.
    """

    def __init__(self, problem: ChunkProblem, statistics: ChunkStatistics, output_mask: list[bool]):
        super().__init__(problem, statistics)
        self._output_mask = output_mask
        self.gradients: tuple[DeviceArray | None, DeviceArray | None] = None, None

    def find_statistics(self) -> None:
        rows = len(self.maxima)
        if self._problem.weight.shape[0]:
            self._compute_statistics()
        else:
            self._largest, self._elsewhere = np.full(rows, -np.inf, self.maxima.dtype), np.ones(rows, np.bool_)
        # NaN becomes -inf: engines disagree on max(NaN, number). The sum of exponentials is NaN in any case.
        self.maxima[...] = np.where(np.isnan(self._largest), -np.inf, self._largest)

    def relate_to_global_maxima(self) -> None:
        sums, predicted = self.sums.T
        # Rows whose logits are all -inf on this rank but not on every rank: this rank adds nothing to their sums.
        nothing = (self._largest == -np.inf) & (self.maxima != -np.inf)
        with np.errstate(all="ignore"):
            shift = self._largest - self.maxima
            sums *= np.exp(shift)
            predicted += shift
        sums[nothing], predicted[nothing] = 0, -np.inf
        predicted[self._elsewhere] = 0

    def _to_device(self, array: NDArray) -> Any:
        """Return a copy on the input's device."""
        return copy_to_device_of(array, self._problem.input)

    def _compute_statistics(self) -> None:
        """Set the row maxima, the sums and the rows whose target is on another rank."""
        problem = self._problem
        found: Any = functions.fused_linear_online_max_sum(
            problem.input,
            problem.weight,
            problem.target,
            problem.start,
            problem.start + problem.weight.shape[0],
            **problem.execution,
        )
        self._largest, self.sums[:, 0], self.sums[:, 1] = (each.numpy() for each in found[:3])
        self._elsewhere = arrays.unpacked(found.target_mask.numpy(), len(self.maxima))
        self._found = found

    def finish(self) -> None:
        problem = self._problem
        maxima, exponentials, predicted = (
            self._to_device(np.ascontiguousarray(each)) for each in (self.maxima, *self.sums.T)
        )
        losses: Any = functions.fused_cross_entropy_loss_with_max_sum(
            maxima, exponentials, predicted, **problem.execution
        )[0]
        self._losses[...] = losses.numpy()
        if not (any(self._output_mask) and problem.weight.shape[0]):
            return
        gradients: Any = functions.fused_linear_cross_entropy_loss_grad(
            self._to_device(problem.grad),
            problem.input,
            problem.weight,
            self._found.target_mask,
            self._found.masked_target,
            logits_max=maxima,
            sum_exp_logits=exponentials,
            output_mask=self._output_mask,
            **problem.gradient_options,
            **problem.execution,
        )
        self.gradients = tuple(gradients)


def make_shard(call: Call, *arguments: Any) -> Shard:
    """Return a shard made with these arguments: on a device, with options of the loss, or neither."""
    given = given_over_ranks(call.arguments)
    if call.device is None:
        return (OptionShard if given else Shard)(call, *arguments)
    for name in given:
        message = f"{name}: over ranks, losses of arrays on a device have no options (pass arrays on the host)"
        raise ParamInvalidError(message, operator=call.operator.name)
    return DeviceShard(call, *arguments)
