"""One row chunk of a shard's problem: its computations before, between and after the two collective operations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import arrays, ops
from .ranges import vocab_range


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
    sums : ndarray, shape (rows, 2)
        The sum of exponentials and the target's logit of each row: first this rank's part, then the sum over ranks.
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

    def find_statistics(self) -> None:
        """Compute the row maxima and sums of this rank's logits."""
        rows = len(self.maxima)
        if self._problem.weight.shape[0]:
            self._compute_statistics()
        else:
            self._largest = np.full(rows, -np.inf, self.maxima.dtype)
            self._elsewhere, self._place = np.ones(rows, np.bool_), np.zeros(rows, self._problem.target.dtype)
        # NaN becomes -inf: engines disagree on max(NaN, number). The sum of exponentials is NaN in any case.
        self.maxima[...] = np.where(np.isnan(self._largest), -np.inf, self._largest)

    @abstractmethod
    def _compute_statistics(self) -> None:
        """Set the row maxima, the sums and the rows whose target is on another rank, if the weight has rows."""

    def relate_to_global_maxima(self) -> None:
        """Rescale the sums from this rank's row maxima to the row maxima of the whole vocabulary."""
        sums, predicted = self.sums.T
        # Rows whose logits are all -inf on this rank but not on every rank: this rank adds nothing to their sums.
        nothing = (self._largest == -np.inf) & (self.maxima != -np.inf)
        with np.errstate(all="ignore"):
            shift = self._largest - self.maxima
            sums *= np.exp(shift)
            predicted += shift
        sums[nothing], predicted[nothing] = 0, -np.inf
        predicted[self._elsewhere] = 0

    @abstractmethod
    def finish(self) -> None:
        """Compute the losses and the gradients from the statistics of the whole vocabulary."""


class HostChunk(RowChunk):
    """One chunk of the rows of a shard in host memory.

    Parameters
    ----------
    problem, statistics
        As in `RowChunk`.
    gradients : ChunkGradients
        The arrays that receive the gradients.
    caches_logits : bool
        Whether this rank's logits of these rows stay in memory until their gradients are computed.
    """

    def __init__(
        self, problem: ChunkProblem, statistics: ChunkStatistics, gradients: ChunkGradients, caches_logits: bool
    ):
        super().__init__(problem, statistics)
        self._gradients, self._caches_logits = gradients, caches_logits
        self._logits: NDArray | None = None

    def _compute_statistics(self) -> None:
        problem = self._problem
        found = ops.fused_linear_online_max_sum(
            problem.input,
            problem.weight,
            problem.target,
            problem.start,
            problem.start + len(problem.weight),
            return_logits=self._caches_logits,
            **problem.execution,
        )
        self._largest, self.sums[:, 0], self.sums[:, 1] = found[:3]
        self._elsewhere, self._place = arrays.unpacked(found.target_mask, len(self.maxima)), found.masked_target
        self._logits = found.vocab_parallel_logits

    def finish(self) -> None:
        logits, gradients = self._logits, self._gradients
        self._losses[...], softmax = ops.fused_cross_entropy_loss_with_max_sum(
            self.maxima,
            *self.sums.T,
            vocab_parallel_logits=logits,
            out=None if logits is None else (None, logits),
            **self._problem.execution,
        )
        if gradients.input_grad is None and gradients.weight_grad is None:
            return
        for block in range(gradients.vocab_blocks):
            entries = slice(*vocab_range(len(self._problem.weight), block, gradients.vocab_blocks))
            self._add_gradients(entries, None if softmax is None else softmax[:, entries])

    def _add_gradients(self, entries: slice, softmax: NDArray | None) -> None:
        """Compute the gradients through one vocabulary block of this rank, and add them to the totals.

        The first vocabulary block overwrites the input gradient; the first row chunk overwrites the weight gradient.
        """
        problem, gradients = self._problem, self._gradients
        input_grad = gradients.input_grad
        weight_grad = None if gradients.weight_grad is None else gradients.weight_grad[entries]
        adds_input, adds_weight = entries.start > 0, gradients.adds_weight_grad
        elsewhere = self._elsewhere | (self._place < entries.start) | (self._place >= entries.stop)
        parts = ops.fused_linear_cross_entropy_loss_grad(
            problem.grad,
            problem.input,
            problem.weight[entries],
            elsewhere,
            np.where(elsewhere, 0, self._place - entries.start),
            logits_max=self.maxima,
            sum_exp_logits=self.sums[:, 0],
            softmax=softmax,
            output_mask=(input_grad is not None, weight_grad is not None),
            out=(_output(input_grad, adds_input), _output(weight_grad, adds_weight)),
            **problem.gradient_options,
            **problem.execution,
        )
        for total, part, adds in zip((input_grad, weight_grad), parts, (adds_input, adds_weight)):
            if adds and total is not None:
                total += part


def _output(total: NDArray | None, adds: bool) -> NDArray | None:
    """Return the array for a part of a total: a new one if the part will be added, otherwise the total itself."""
    return None if total is None else np.empty_like(total) if adds else total
