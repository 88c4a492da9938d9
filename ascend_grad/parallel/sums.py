"""Sums over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .agreement import Attempt
from .communicators import Collectives
from .ranges import vocab_range

#: What a rank gets of a sum of matrices: all of it, the rows that `vocab_range` cuts for it, or only what it had.
Share = Literal[True, "scatter", False]


def sum_vector(ranks: Collectives, vector: NDArray, deterministic: bool) -> None:
    """In place; `deterministic`: in the order of the ranks, whatever the engine does."""
    if deterministic:
        vector[...] = np.add.reduce(ranks.allgather(vector), axis=0)
    else:
        ranks.allreduce(vector, "sum")


class MatrixSum:
    """The sum of a matrix of each rank. The caller writes its own into `matrix`, then asks for `result`.

    Parameters
    ----------
    ranks : Collectives
        Whose matrices are summed.
    rows, columns : int
        Their shape.
    dtype : dtype
        In which numbers travel and are added: float32 or float64.
    share : True, "scatter" or False
        What this rank gets.
    deterministic : bool
        Add in the order of the ranks.
    """

    def __init__(
        self, ranks: Collectives, rows: int, columns: int, dtype: DTypeLike, share: Share, deterministic: bool
    ):
        self._ranks, self._share, self._deterministic = ranks, share, deterministic
        # One number more, which says whether a rank failed.
        self._buffer = np.zeros(rows * columns + 1, dtype)
        self.matrix = self._buffer[:-1].reshape(rows, columns)
        self._begun = 0
        self._waits: list[Callable[[], object]] = []
        #: Whether rows can be summed while others are still computed.
        self.overlaps = share is True and not deterministic and ranks.size > 1

    def start(self, rows: slice) -> None:
        """Begin to sum rows that are complete. All ranks start the same ones; nobody looks at them before `result`."""
        end = rows.stop * self.matrix.shape[1]
        if self.overlaps and self._begun < end < self.matrix.size:  # the last rows travel with the last number
            self._waits.append(self._ranks.start_allreduce(self._buffer[self._begun : end], "sum"))
            self._begun = end

    def result(self, attempt: Attempt) -> NDArray:
        """This rank's share of the sum, or an exception on every rank if one of them failed."""
        if self._share is True and not self._deterministic:
            self._buffer[-1] = attempt.failed
            self._waits.append(self._ranks.start_allreduce(self._buffer[self._begun :], "sum"))
            for wait in self._waits:
                wait()
            attempt.settle(self._ranks, self._buffer[-1])
            return self.matrix
        attempt.share(self._ranks)
        if self._share is False or self._ranks.size == 1:
            return self.matrix
        own = np.add.reduce(self._ranks.exchange(self.matrix), axis=0)
        if self._share is True:
            self._spread(own)
            return self.matrix
        return own

    def _spread(self, own: NDArray) -> None:
        """Give the sums of this rank's rows to all others."""
        rows, size = len(self.matrix), self._ranks.size
        padded = np.zeros((-(-rows // size), self.matrix.shape[1]), own.dtype)
        padded[: len(own)] = own
        for rank, part in enumerate(self._ranks.allgather(padded)):
            start, stop = vocab_range(rows, rank, size)
            self.matrix[start:stop] = part[: stop - start]
