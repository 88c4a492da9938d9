"""One row chunk of a shard's problem: its computations before, between and after the collective operations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .part_backend import DeviceBackend, HostBackend
from .ranges import vocab_range
from .row_losses import Problem, RowArrays, write_losses, write_outputs
from .row_statistics import (
    RowStatistics,
    candidates,
    comparable_maxima,
    empty_part,
    statistics_of_lse,
    write_summands,
)


@dataclass(frozen=True)
class ChunkGradients:
    """The arrays that receive a chunk's gradients.

    Attributes
    ----------
    totals : dict of (ndarray or None)
        ``input_grad``, the chunk's rows of the input gradient; ``weight_grad`` and ``bias_grad``, the gradients of all
        rows of the weight and of the bias. None: not requested.
    adds : bool
        True if earlier chunks have written the gradients of weight and bias, so that this chunk's are added.
    vocab_blocks : int
        Number of vocabulary blocks to compute the gradients in.
    """

    totals: dict[str, NDArray | None]
    adds: bool
    vocab_blocks: int


class RowChunk:
    """One chunk of a shard's rows.

    Parameters
    ----------
    problem : Problem
        The chunk's tokens and this rank's rows of the weight.
    rows : RowArrays
        The chunk's rows of the arrays that receive statistics and results.
    backend : HostBackend or DeviceBackend
        The backend that computes the chunk.
    logits : ndarray, shape (rows, entries), or None
        Memory for this rank's logits until their gradients are computed. None: they are computed twice.
    """

    def __init__(
        self, problem: Problem, rows: RowArrays, backend: HostBackend | DeviceBackend, logits: NDArray | None = None
    ):
        self._problem, self.rows, self.backend, self._logits = problem, rows, backend, logits
        self._entries: int = problem.weight.shape[0]

    def find_statistics(self) -> None:
        """Compute the statistics of this rank's logits, and write the row maxima."""
        rows, targets = self.rows.target_weights.shape
        self._part = empty_part(rows, targets)
        if self._entries:
            self._part = self.backend.statistics(self._problem, self._logits)
        self.rows.maxima[...] = comparable_maxima(self._part)

    def find_candidates(self) -> None:
        """Find this rank's candidates for the predicted entries. A rank without vocabulary entries has none."""
        self.rows.first[...] = -np.inf
        if self._entries:
            vocabulary = self._problem.options["vocab"]
            self.rows.first[...] = candidates(self._part, self.rows.maxima, self._problem.start, vocabulary)

    def relate_to_global_maxima(self) -> None:
        """Write the sums of this rank relative to the row maxima of the whole vocabulary."""
        write_summands(self._part, self.rows.maxima, self._problem.options["own_class_sum"], self.rows.sums)

    def finish(self) -> None:
        """Compute losses and outputs from the statistics of the whole vocabulary."""
        with np.errstate(all="ignore"):
            self.statistics = RowStatistics(self.rows.maxima, self.rows.sums, self.rows.target_weights.shape[1])
            write_losses(self._problem.options, self.statistics, self.rows)
            write_outputs(self._problem.options["vocab"], self.statistics, self.rows)

    def take_statistics(self, lse: NDArray, entropy: NDArray | None) -> None:
        """Use statistics that the caller gives instead of the logits'."""
        self.statistics = statistics_of_lse(lse, entropy, self.rows.target_weights.shape[1])

    def find_gradients(self, gradients: ChunkGradients) -> None:
        """Compute the gradients of this rank's logits, if gradients are requested."""
        if not self._entries or all(each is None for each in gradients.totals.values()):
            return
        for block in range(gradients.vocab_blocks):
            self._add_gradients(gradients, slice(*vocab_range(self._entries, block, gradients.vocab_blocks)))

    def _add_gradients(self, gradients: ChunkGradients, entries: slice) -> None:
        """Add the gradients through one vocabulary block of this rank to the totals.

        The first vocabulary block overwrites the input gradient; the first row chunk overwrites the other gradients.
        """
        totals = {
            name: total[entries] if total is not None and name != "input_grad" else total
            for name, total in gradients.totals.items()
        }
        adds = {name: entries.start > 0 if name == "input_grad" else gradients.adds for name in totals}
        parts = {
            name: np.empty_like(total) if adds[name] and total is not None else total for name, total in totals.items()
        }
        logits = None if self._logits is None else self._logits[:, entries]
        self.backend.gradients(self._problem.entries(entries), self.statistics, self.rows, parts, logits)
        for name, total in totals.items():
            if adds[name] and total is not None:
                with np.errstate(all="ignore"):
                    total += parts[name]
