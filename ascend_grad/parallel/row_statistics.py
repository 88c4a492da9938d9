"""Statistics of rows of logits over a vocabulary that is split over ranks, and the losses and outputs made of them.

This module has the same formulas as ``include/ascend_grad/loss.h``. Sums have terms of one sign, and the sum of
exponentials leaves out one entry that has the maximum. So losses near 0 and probabilities near 1 also keep their digits
over ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class PartStatistics(NamedTuple):
    """Statistics of this rank's logits."""

    #: Maximum, rest, moment and deficit of each row, as in ``ag_row_statistics``: float64, shape (4, BT).
    numbers: NDArray
    #: This rank's entry with the first maximum of each row: int64, shape (BT,).
    argmax: NDArray
    #: Logits of the targets, 0 for a target on another rank: float64, shape (BT, targets of a row).
    target_logits: NDArray


def empty_part(rows: int, targets: int) -> PartStatistics:
    """Return the statistics of a rank without vocabulary entries."""
    numbers = np.zeros((4, rows))
    numbers[0], numbers[1] = -np.inf, -1
    return PartStatistics(numbers, np.zeros(rows, np.int64), np.zeros((rows, targets)))


def comparable_maxima(part: PartStatistics) -> NDArray:
    """Return this rank's maxima without NaN, which becomes -inf: transports disagree on max(NaN, number).

    The rest of such a row is NaN on this rank, and so it is on every rank after the sum.
    """
    maximum = part.numbers[0]
    return np.where(np.isnan(maximum), -np.inf, maximum)


#: Columns of the sums over ranks before the targets' columns.
NUMBERS = 4


def write_summands(part: PartStatistics, maxima: NDArray, class_sum: float, out: NDArray) -> None:
    """Write this rank's summands of the statistics relative to the maxima of all ranks.

    The columns of `out` are the rest, the number of ranks that have the maximum (NaN if a logit is), the moment, the
    deficit, and the logits of the targets. `class_sum` is the sum of the class weights of this rank's entries.
    """
    maximum, rest, moment, deficit = part.numbers
    with np.errstate(all="ignore"):
        distance = maxima - maximum
        scale, leads = np.exp(-distance), maximum == maxima
        out[:, 0] = np.where(leads, rest, scale * (1 + rest))
        out[:, 1] = np.where(np.isnan(maximum), np.nan, leads)
        out[:, 2] = np.where(leads, moment, scale * (moment + distance * (1 + rest)))
        out[:, 3] = np.where(leads, deficit, deficit + distance * class_sum)
    # The logits of a row are all -inf on this rank but not on every rank: this rank adds nothing to the exponentials.
    nothing = (maximum == -np.inf) & ~leads
    out[nothing, :3], out[nothing, 3] = 0, deficit[nothing]
    out[:, NUMBERS : NUMBERS + part.target_logits.shape[1]] = part.target_logits


def candidates(part: PartStatistics, maxima: NDArray, start: int, vocabulary: int) -> NDArray:
    """Return numbers whose maximum over the ranks tells the predicted entry of each row, as `predicted` reads it.

    A number is the negative id of this rank's first entry with the maximum of all ranks, and -inf for none. The
    lowest id wins. The first NaN of a rank has `vocabulary` added, and so wins against all entries that are not NaN.
    `start` is the id of this rank's first entry.
    """
    maximum = part.numbers[0]
    found = np.where((maximum == maxima) | np.isnan(maximum), -(part.argmax + float(start)), -np.inf)
    return np.where(np.isnan(maximum), found + vocabulary, found)


def predicted(first: NDArray, vocabulary: int) -> NDArray:
    """Return the ids of the predicted entries, from the maxima of `candidates` over all ranks."""
    return np.where(first > 0, vocabulary - first, -first)


class RowStatistics:
    """Statistics of rows over the whole vocabulary.

    Parameters
    ----------
    maxima : ndarray, shape (BT,)
        The maxima over all ranks.
    sums : ndarray, shape (BT, columns)
        The sums over all ranks of what `write_summands` writes.
    targets : int
        Number of targets of a row.
    """

    def __init__(self, maxima: NDArray, sums: NDArray, targets: int):
        maxima, sums = np.asarray(maxima, np.float64), np.asarray(sums, np.float64)
        rest, leaders, moment, deficit = sums[:, :NUMBERS].T
        # Each rank with the maximum leaves out one entry, of which all but one count.
        rest = np.where(np.isinf(maxima), np.nan, rest + np.maximum(leaders - 1, 0))
        #: As `PartStatistics.numbers`.
        self.numbers = np.stack([maxima, rest, moment, deficit])
        self._has_nan = np.isnan(leaders)
        self.target_logits = np.ascontiguousarray(sums[:, NUMBERS : NUMBERS + targets])

    @property
    def log_sum(self) -> NDArray:
        return np.log1p(self.numbers[1])

    @property
    def lse(self) -> NDArray:
        """Return the lse of each row. It is the maximum if that is infinite, unless a logit is NaN."""
        maxima = self.numbers[0]
        return np.where(np.isinf(maxima) & ~self._has_nan, maxima, maxima + self.log_sum)

    @property
    def entropy(self) -> NDArray:
        return self.log_sum + self.numbers[2] / (1 + self.numbers[1])

    def negative_log_prob(self, entries: object = None) -> NDArray:
        """Return the negative log-probabilities of the targets, shape (BT, targets of a row)."""
        return self.log_sum[:, None] + (self.numbers[0][:, None] - self.target_logits)

    def deficits(self, class_weight: object) -> NDArray:
        """Return the sum of ``c_v (max - z_v)`` of each row."""
        return self.numbers[3]


def statistics_of_lse(lse: NDArray, entropy: NDArray | None, targets: int) -> RowStatistics:
    """Return statistics for gradients alone, from the lse and the entropy of each row.

    The sum of exponentials relative to the lse is 1. No target counts as nearly certain.
    """
    sums = np.zeros((len(lse), NUMBERS + targets))
    sums[:, 1], sums[:, NUMBERS:] = 1, -np.inf
    if entropy is not None:
        sums[:, 2] = entropy
    return RowStatistics(lse, sums, targets)
