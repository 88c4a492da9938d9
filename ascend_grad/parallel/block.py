"""One row block of a shard's problem: its computations before, between and after the two collective operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .. import arrays, ops
from .ranges import vocab_range

if TYPE_CHECKING:
    from .shard import Shard


class Block:
    """One block of a shard's rows.

    Parameters
    ----------
    shard : Shard
        The problem, which also receives the results.
    rows : slice
        The rows of the block.
    caches_logits : bool
        Whether this rank's logits of these rows stay in memory until their gradients are computed.

    Attributes
    ----------
    maxima : ndarray, shape (rows,)
        The largest logit of each row: first of this rank, then, once the caller has reduced them, of all ranks.
    sums : ndarray, shape (rows, 2)
        The sum of exponentials and the target's logit of each row: first this rank's part, then the sum over ranks.
    """

    def __init__(self, shard: Shard, rows: slice, caches_logits: bool):
        self._shard, self._rows, self._caches_logits = shard, rows, caches_logits
        self.maxima, self.sums = shard.maxima[rows], shard.sums[rows]
        self._logits: NDArray | None = None

    def find_statistics(self) -> None:
        """Compute the row maxima and sums of this rank's logits."""
        shard, count = self._shard, len(self.maxima)
        if shard.weight.shape[0]:
            self._compute_statistics()
        else:
            self._largest = np.full(count, -np.inf, self.maxima.dtype)
            self._elsewhere, self._place = np.ones(count, np.bool_), np.zeros_like(shard.target[self._rows])
        # NaN becomes -inf: engines disagree on max(NaN, number). The sum of exponentials is NaN in any case.
        self.maxima[...] = np.where(np.isnan(self._largest), -np.inf, self._largest)

    def _compute_statistics(self) -> None:
        shard = self._shard
        found = ops.fused_linear_online_max_sum(
            shard.input[self._rows],
            shard.weight,
            shard.target[self._rows],
            shard.start,
            shard.start + len(shard.weight),
            return_logits=self._caches_logits,
            **shard.execution,
        )
        self._largest, self.sums[:, 0], self.sums[:, 1] = found[:3]
        self._elsewhere, self._place = arrays.unpacked(found.target_mask, len(self.maxima)), found.masked_target
        self._logits = found.vocab_parallel_logits

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

    def finish(self) -> None:
        """Compute the losses and the gradients from the statistics of the whole vocabulary."""
        shard, logits = self._shard, self._logits
        shard.losses[self._rows], softmax = ops.fused_cross_entropy_loss_with_max_sum(
            self.maxima,
            *self.sums.T,
            vocab_parallel_logits=logits,
            out=None if logits is None else (None, logits),
            **shard.execution,
        )
        if shard.input_sum is None and shard.weight_total is None:
            return
        for part in range(shard.slices):
            words = slice(*vocab_range(len(shard.weight), part, shard.slices))
            self._add_gradients(words, None if softmax is None else softmax[:, words])

    def _add_gradients(self, words: slice, softmax: NDArray | None) -> None:
        """Compute the gradients through one slice of this rank's vocabulary, and add them to the totals.

        The first slice overwrites the input gradient; the first row block overwrites the weight gradient.
        """
        shard, rows = self._shard, self._rows
        input_grad = None if shard.input_sum is None else shard.input_sum.matrix[rows]
        weight_grad = None if shard.weight_total is None else shard.weight_total[words]
        adds_input, adds_weight = words.start > 0, rows.start > 0
        elsewhere = self._elsewhere | (self._place < words.start) | (self._place >= words.stop)
        parts = ops.fused_linear_cross_entropy_loss_grad(
            shard.grad[rows],
            shard.input[rows],
            shard.weight[words],
            elsewhere,
            np.where(elsewhere, 0, self._place - words.start),
            logits_max=self.maxima,
            sum_exp_logits=self.sums[:, 0],
            softmax=softmax,
            output_mask=(input_grad is not None, weight_grad is not None),
            out=(_place(input_grad, adds_input), _place(weight_grad, adds_weight)),
            **shard.products,
            **shard.execution,
        )
        for total, part, adds in zip((input_grad, weight_grad), parts, (adds_input, adds_weight)):
            if adds and total is not None:
                total += part


def _place(total: NDArray | None, adds: bool) -> NDArray | None:
    """Return the array for a part of a total: a new one if the part will be added, otherwise the total itself."""
    return None if total is None else np.empty_like(total) if adds else total
