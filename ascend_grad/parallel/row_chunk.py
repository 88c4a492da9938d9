"""One row chunk of a shard's problem: its computations before, between and after the two collective operations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _linear_python
from .._dispatch import prepared
from ..operators import functions
from ..operators.table import FUSED_LINEAR_ONLINE_MAX_SUM
from .part_backend import PartBackend
from .ranges import vocab_range
from .row_statistics import PartStatistics, RowStatistics, comparable_maxima, empty_part, write_summands


@dataclass(frozen=True)
class ChunkProblem:
    """The tokens of a row chunk and this rank's rows of the weight. A chunk only reads them.

    Attributes
    ----------
    input, weight, target : ndarray, or DeviceArray on a device
        The tokens' features and target ids, and this rank's rows of the weight.
    start : int
        The id of the first row of `weight`.
    grad : ndarray, shape (rows,)
        The upstream gradient of each row's loss.
    gradient_options, execution : dict
        Arguments of the operator for gradients, and arguments of every operator.
    """

    input: Any
    weight: Any
    target: Any
    start: int
    grad: NDArray
    gradient_options: dict[str, Any]
    execution: dict[str, Any]


@dataclass(frozen=True)
class ChunkStatistics:
    """Views of a chunk's rows in the shard's arrays, which the chunk writes.

    Attributes
    ----------
    maxima : ndarray, shape (rows,)
        The largest logit of each row: first of this rank, then, once the caller has reduced them, of all ranks.
    sums : ndarray, shape (rows, columns)
        The statistics of each row that are sums: first this rank's part, then the sum over ranks.
    losses : ndarray, shape (rows,)
        The loss of each row.
    """

    maxima: NDArray
    sums: NDArray
    losses: NDArray


@dataclass(frozen=True)
class ChunkGradients:
    """The arrays that receive a chunk's gradients.

    Attributes
    ----------
    input_grad : ndarray or None
        The chunk's rows of the input gradient; None if it is not requested.
    weight_grad : ndarray or None
        The gradient of all rows of the weight; None if it is not requested.
    adds_weight_grad : bool
        True if earlier chunks have written `weight_grad`, so that this one is added.
    vocab_blocks : int
        Number of vocabulary blocks to compute the gradients in.
    """

    input_grad: NDArray | None
    weight_grad: NDArray | None
    adds_weight_grad: bool
    vocab_blocks: int


class RowChunk(ABC):
    """One chunk of a shard's rows.

    Parameters
    ----------
    problem : ChunkProblem
        The tokens and the weight.
    statistics : ChunkStatistics
        The arrays that receive the row statistics and the losses.
    """

    def __init__(self, problem: ChunkProblem, statistics: ChunkStatistics):
        self._problem = problem
        self.maxima, self.sums, self._losses = statistics.maxima, statistics.sums, statistics.losses

    @abstractmethod
    def find_statistics(self) -> None:
        """Compute the statistics of this rank's logits, and write the row maxima."""

    @abstractmethod
    def relate_to_global_maxima(self) -> None:
        """Write the sums of this rank relative to the row maxima of the whole vocabulary."""

    @abstractmethod
    def finish(self) -> None:
        """Compute the losses and the gradients from the statistics of the whole vocabulary."""


class HostChunk(RowChunk):
    """One chunk of the rows of a shard in host memory.

    A device may compute it all the same, with its own operators: they return sums of exponentials in float32.

    Parameters
    ----------
    problem, statistics
        As in `RowChunk`.
    gradients : ChunkGradients
        The arrays that receive the gradients.
    options : dict
        The options of `PartBackend`, with the number of entries of the whole vocabulary.
    backend : PartBackend
        The backend, unless a device computes this chunk.
    caches_logits : bool
        Whether this rank's logits of these rows stay in memory until their gradients are computed.
    """

    def __init__(
        self,
        problem: ChunkProblem,
        statistics: ChunkStatistics,
        gradients: ChunkGradients,
        options: dict[str, Any],
        backend: PartBackend,
        caches_logits: bool,
    ):
        super().__init__(problem, statistics)
        self._gradients, self._options, self._backend = gradients, options, backend
        self._caches_logits = caches_logits and not backend.is_reference
        self._logits: NDArray | None = None
        self._is_on_device = False

    def find_statistics(self) -> None:
        place = np.subtract(self._problem.target, self._problem.start, dtype=np.int64)
        self._is_here = (place >= 0) & (place < len(self._problem.weight))
        #: The target's row of the weight, 0 for a target that is on another rank or ignored.
        self._place = np.where(self._is_here, place, 0)
        self._part = empty_part(len(self.maxima), 1)
        if len(self._problem.weight):
            self._part = self._found_statistics()
        self.maxima[...] = comparable_maxima(self._part)

    def _found_statistics(self) -> PartStatistics:
        """Compute the statistics of this rank's logits, if it has rows of the weight."""
        problem = self._problem
        input, weight, target = problem.input, problem.weight, problem.target
        bounds = problem.start, problem.start + len(weight)
        arguments = [input, weight, target, *bounds, False]
        _, _, explanation = prepared(FUSED_LINEAR_ONLINE_MAX_SUM, arguments, None, **problem.execution)
        self._is_on_device = explanation.backend not in ("cpu", "reference")
        if not self._is_on_device:
            if self._caches_logits:
                self._logits = np.empty((len(input), len(weight)), self._losses.dtype)
            return self._backend.statistics(input, weight, target, self._options, self._logits)
        found = functions.fused_linear_online_max_sum(input, weight, target, *bounds, **problem.execution)
        part = empty_part(len(self.maxima), 1)
        part.numbers[0], part.numbers[1] = found.logits_max, found.sum_exp_logits
        part.numbers[1] -= 1
        with np.errstate(all="ignore"):
            logits = np.where(part.numbers[0] == -np.inf, -np.inf, part.numbers[0] + found.predicted_logits)
        part.target_logits[:, 0] = np.where(self._is_here, logits, 0)
        return part

    def relate_to_global_maxima(self) -> None:
        write_summands(self._part, self.maxima, 0.0, self.sums)

    def finish(self) -> None:
        with np.errstate(all="ignore"):
            self._rows = RowStatistics(self.maxima, self.sums, 1)
            self._losses[...] = self._rows.negative_log_prob()[:, 0]
            vectors = self.maxima, 1 + self._rows.numbers[1], self._problem.grad
            #: The operator's arguments for each row: the maximum, the sum of exponentials, and the upstream gradient.
            self._accumulators = [each.astype(self._losses.dtype) for each in vectors]
        gradients = self._gradients
        if not len(self._problem.weight) or (gradients.input_grad is None and gradients.weight_grad is None):
            return
        if self._logits is not None:
            self._make_probabilities(self._logits)
        for block in range(gradients.vocab_blocks):
            self._add_gradients(slice(*vocab_range(len(self._problem.weight), block, gradients.vocab_blocks)))

    def _make_probabilities(self, logits: NDArray) -> None:
        """Turn the cached logits of targets into p - 1, with the digits of 1 - p, and the other logits into p."""
        maxima, sums, _ = self._accumulators
        _linear_python.probabilities(logits, maxima, sums, logits, self._backend.threads)
        with np.errstate(all="ignore"):
            complement = self._rows.one_minus_prob()[:, 0]
            logits[self._is_here, self._place[self._is_here]] = -complement[self._is_here]

    def _add_gradients(self, entries: slice) -> None:
        """Add the gradients through one vocabulary block of this rank to the totals.

        The first vocabulary block overwrites the input gradient; the first row chunk overwrites the weight gradient.
        """
        gradients = self._gradients
        input_grad = gradients.input_grad
        weight_grad = None if gradients.weight_grad is None else gradients.weight_grad[entries]
        adds = {"input_grad": entries.start > 0, "weight_grad": gradients.adds_weight_grad}
        totals = {"input_grad": input_grad, "weight_grad": weight_grad}
        parts = {name: _output(total, adds[name]) for name, total in totals.items()}
        if self._logits is not None or self._is_on_device:
            self._compute_by_operator(entries, parts)
        else:
            self._compute_by_backend(entries, parts)
        for name, total in totals.items():
            if adds[name] and total is not None:
                total += parts[name]

    def _compute_by_backend(self, entries: slice, parts: dict[str, NDArray | None]) -> None:
        """Compute the gradients through one vocabulary block from logits that are computed again."""
        problem = self._problem
        options = {"vocab_start_index": problem.start + entries.start, "class_sum": 0.0, "denominators": (1.0, 1.0)}
        self._backend.gradients(
            problem.input,
            problem.weight[entries],
            problem.target,
            self._options | options,
            self._rows,
            np.ones((len(self.maxima), 1)),
            parts | {"bias_grad": None},
        )

    def _compute_by_operator(self, entries: slice, parts: dict[str, NDArray | None]) -> None:
        """Compute the gradients through one vocabulary block from the cached probabilities, or on a device."""
        problem, (maxima, sums, grad) = self._problem, self._accumulators
        # Cached probabilities have the targets subtracted.
        elsewhere = (
            ~self._is_here | (self._place < entries.start) | (self._place >= entries.stop) | (self._logits is not None)
        )
        functions.fused_linear_cross_entropy_loss_grad(
            grad,
            problem.input,
            problem.weight[entries],
            elsewhere,
            np.where(elsewhere, 0, self._place - entries.start),
            logits_max=maxima,
            sum_exp_logits=sums,
            softmax=None if self._logits is None else self._logits[:, entries],
            output_mask=[part is not None for part in parts.values()],
            out=tuple(parts.values()),
            **problem.gradient_options,
            **problem.execution,
        )


def _output(total: NDArray | None, adds: bool) -> NDArray | None:
    """Return the array for a part of a total: a new one if the part will be added, otherwise the total itself."""
    return None if total is None else np.empty_like(total) if adds else total
