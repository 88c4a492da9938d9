"""Statistics and gradients of a part of a vocabulary: by a backend of the host, or by the operators of a device."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .. import _linear_python, arrays
from .._dispatch import prepared
from ..backends import reference
from ..backends.ascend.array import DeviceArray
from ..backends.ascend.calls import copy_to_device_of
from ..operators import functions, losses
from ..operators.table import FUSED_LINEAR_ONLINE_MAX_SUM
from .row_losses import Problem, RowArrays, upstream_of_rows
from .row_statistics import PartStatistics, RowStatistics, empty_part

#: The arrays for the gradients by name, None for those that are not requested.
Results: TypeAlias = dict[str, NDArray | None]


class HostBackend(NamedTuple):
    """A backend of the host, which computes with this rank's rows of the weight."""

    is_reference: bool
    #: Limit of the workspace, 0 for the default.
    workspace_bytes: int
    #: Number of threads, 0 for the default.
    threads: int

    @property
    def caches_logits(self) -> bool:
        """Return whether gradients can be computed from the logits that `statistics` returns."""
        return not self.is_reference

    def statistics(self, problem: Problem, logits: NDArray | None) -> PartStatistics:
        """Compute the statistics of the logits of a problem whose weight has rows.

        `logits` (rows, entries) receives the logits of the rows that are not ignored; None: they are not requested.
        """
        arguments = problem.input, problem.weight, problem.target, problem.options
        if self.is_reference:
            return PartStatistics(*reference.part_statistics(*arguments))
        found = _linear_python.part_statistics(*arguments, logits, self.workspace_bytes, self.threads)
        return PartStatistics(*found)

    def gradients(
        self, problem: Problem, statistics: RowStatistics, rows: RowArrays, results: Results, logits: NDArray | None
    ) -> None:
        """Write gradients, from statistics of the whole vocabulary. `logits` None: they are computed again."""
        arguments = problem.input, problem.weight, problem.target, problem.options, statistics.numbers
        weights = np.ascontiguousarray(rows.target_weights)
        if self.is_reference:
            reference.part_gradients(*arguments, weights, results)
            return
        _linear_python.part_gradients(
            *arguments, statistics.target_logits, weights, results, logits, self.workspace_bytes, self.threads
        )

    def top_k(
        self, input: NDArray, weight: NDArray, k: int, options: dict[str, Any]
    ) -> tuple[NDArray, NDArray, NDArray]:
        """Return the k largest logits of each row, their rows of `weight`, and the sum of the other exponentials.

        The logits are not yet divided by the temperature. The sum leaves out the largest one. If a logit is NaN or
        positive infinite, the sum is NaN.
        """
        if self.is_reference:
            return reference.part_top_k(input, weight, k, options)
        rows, dtype = len(input), arrays.accumulator_dtype(input.dtype)
        logits, index, rest = np.empty((rows, k), dtype), np.empty((rows, k), np.int64), np.empty(rows)
        _linear_python.part_top_k(input, weight, k, options, logits, index, rest, self.workspace_bytes, self.threads)
        return logits, index, rest


class DeviceBackend(NamedTuple):
    """The operators of a device. They return statistics in float32, and gradients that are rounded to 16 bits."""

    #: `backend` and `num_threads` of each operator.
    execution: dict[str, Any]
    workspace_bytes: int | None

    @property
    def caches_logits(self) -> bool:
        """Return False: the operators return no logits that gradients could be computed from."""
        return False

    def statistics(self, problem: Problem, logits: NDArray | None) -> PartStatistics:
        """Compute the same statistics as `HostBackend.statistics`, of one target of each row, without the moments."""
        input, weight, target, start, end, _ = statistics_arguments(problem)
        found = functions.fused_linear_online_max_sum(
            input, weight, _beside(target, input), start, end, **self.execution
        )
        maxima, sums, predicted = (arrays.host_values(each).astype(np.float64) for each in found[:3])
        part = empty_part(len(maxima), 1)
        part.numbers[0], part.numbers[1] = maxima, sums - 1
        with np.errstate(all="ignore"):
            logits_of_targets = np.where(maxima == -np.inf, -np.inf, maxima + predicted)
        part.target_logits[:, 0] = np.where(_is_here(problem), logits_of_targets, 0)
        return part

    def gradients(
        self, problem: Problem, statistics: RowStatistics, rows: RowArrays, results: Results, logits: NDArray | None
    ) -> None:
        """Write the same gradients as `HostBackend.gradients`."""
        requested = [results["input_grad"] is not None, results["weight_grad"] is not None]
        for found, result in zip(self.found_gradients(problem, statistics, rows, requested), results.values()):
            if result is not None:
                result[...] = found

    def found_gradients(
        self, problem: Problem, statistics: RowStatistics, rows: RowArrays, output_mask: list[bool]
    ) -> tuple[Any, Any]:
        """Return the gradients of the input and of the weight. One that is not requested is None."""
        of_target, of_lse = upstream_of_rows(problem.options, rows)
        is_here, input, lse = _is_here(problem), problem.input, statistics.lse
        target = np.where(is_here, problem.target, problem.start).astype(problem.target.dtype)
        # The entry of a target that is on another rank is none of this rank's.
        grad_lse, grad_log_prob = np.where(is_here, of_lse, of_lse + of_target), np.where(is_here, -of_target, 0)
        found = losses.linear_cross_entropy_backward(
            input,
            problem.weight,
            _beside(target, input),
            lse=_beside(lse.astype(np.float32), input),
            reduction="sum",
            ignore_index=-1,  # rows without upstream gradients are left out
            grad_lse=_beside(grad_lse.astype(np.float32), input),
            grad_log_prob=_beside(grad_log_prob.astype(np.float32), input),
            vocab_start_index=problem.start,
            output_mask=output_mask,
            workspace_bytes=self.workspace_bytes,
            filter_eps=problem.options["filter_eps"],
            **self.execution,
        )
        return found[:2]


def _beside(array: NDArray, matrix: NDArray | DeviceArray) -> Any:
    """Return an array in the memory that a matrix is in: itself, or a copy on the device."""
    return copy_to_device_of(np.array(array), matrix) if isinstance(matrix, DeviceArray) else array


def statistics_arguments(problem: Problem) -> list[Any]:
    """Return the arguments of the device's operator for statistics."""
    bounds = problem.start, problem.start + problem.weight.shape[0]
    return [problem.input, problem.weight, problem.target, *bounds, False]


def is_on_device(problem: Problem, execution: dict[str, Any]) -> bool:
    """Return whether a device computes the statistics of this problem, whose arrays are on the host."""
    _, _, explanation = prepared(FUSED_LINEAR_ONLINE_MAX_SUM, statistics_arguments(problem), None, **execution)
    return explanation.backend not in ("cpu", "reference")


def _is_here(problem: Problem) -> NDArray:
    """Return whether the target of each row is among this rank's entries."""
    place = np.subtract(problem.target, problem.start, dtype=np.int64)
    return (place >= 0) & (place < problem.weight.shape[0])
