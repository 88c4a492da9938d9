"""Sums over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .. import arrays
from .agreement import Attempt
from .communicators import Collectives
from .ranges import vocab_range

#: A rank's share of a sum of matrices: the whole sum, the rows that `vocab_range` assigns to it, or its own summand.
Share = Literal[True, "scatter", False]


class VectorSums:
    """Sums over the ranks of one vector (or a matrix of few columns) per rank, in place.

    Parameters
    ----------
    ranks : Collectives
        The ranks whose vectors are summed.
    size : int
        Maximum number of elements of a vector.
    dtype : dtype
        The vectors' dtype.
    deterministic : bool
        Add in rank order, whatever the transport's order.
    """

    def __init__(self, ranks: Collectives, size: int, dtype: DTypeLike, deterministic: bool):
        self._ranks = ranks
        self._gathered = np.empty(ranks.size * size, dtype) if deterministic else None

    def add(self, vector: NDArray) -> None:
        if self._gathered is None:
            self._ranks.allreduce(vector, "sum")
            return
        parts = self._gathered[: self._ranks.size * vector.size].reshape(self._ranks.size, *vector.shape)
        _add(self._ranks.allgather(vector, parts), vector)


def _add(parts: NDArray, out: NDArray) -> None:
    """Add along the first axis, in order. The caller's `np.errstate` for infinities and overflow has no influence."""
    with np.errstate(all="ignore"):
        np.add.reduce(parts, axis=0, out=out)


class MatrixSum:
    """The sum of one matrix per rank. The caller writes this rank's matrix into `matrix`, then calls `result`.

    All memory is allocated at once: a rank that lacks it can tell the others before they wait for it.

    Parameters
    ----------
    ranks : Collectives
        The ranks whose matrices are summed.
    rows, columns : int
        The matrices' shape.
    dtype : dtype
        The dtype in which numbers are transferred and added: float32 or float64.
    result_dtype : dtype
        The result's dtype; the result is rounded once.
    share : True, "scatter" or False
        This rank's share of the sum.
    deterministic : bool
        Add in rank order.
    """

    def __init__(
        self,
        ranks: Collectives,
        rows: int,
        columns: int,
        dtype: np.dtype,
        result_dtype: np.dtype,
        share: Share,
        deterministic: bool,
    ):
        self._ranks, self._share, self._deterministic = ranks, share, deterministic
        self._size = rows * columns
        # The additional last element says whether a rank failed.
        self._buffer = self._zeros(self._size + 1, dtype)
        self.matrix = self._buffer[:-1].reshape(rows, columns)
        self._begun = 0
        self._waits: list[Callable[[], object]] = []
        #: True if rows can be summed while other rows are still computed.
        self.overlaps = share is True and not deterministic and ranks.size > 1
        start, stop = vocab_range(rows, ranks.rank, ranks.size)
        own, most = stop - start, -(-rows // ranks.size)
        if self._is_cut:
            #: The sums of this rank's rows, padded to the same number of rows on all ranks if they are gathered.
            self._own = self._zeros((most if share is True else own, columns), dtype)
            self._own_rows = own
            #: Data received from all ranks: first their summands of this rank's rows, then the sums of their rows.
            self._received = self._empty(ranks.size * most * columns, dtype)
        #: The result, if its dtype is not the dtype of the sum.
        self._rounded: Any = None
        if result_dtype != dtype:
            self._rounded = self._empty((own if share == "scatter" else rows, columns), result_dtype)

    # -- operations on host memory, which a subclass for another memory overrides --

    def _zeros(self, shape: int | tuple[int, int], dtype: np.dtype) -> Any:
        return np.zeros(shape, dtype)

    def _empty(self, shape: int | tuple[int, int], dtype: np.dtype) -> Any:
        return np.empty(shape, dtype)

    def _add(self, parts: Any, out: Any) -> None:
        _add(parts, out)

    def _round(self, out: Any, values: Any) -> None:
        arrays.round_into(out, values)

    # -- operations for every kind of memory --

    @property
    def _is_cut(self) -> bool:
        """Return whether each rank adds only the rows that `vocab_range` assigns to it."""
        return self._ranks.size > 1 and (self._share == "scatter" or (self._share is True and self._deterministic))

    def start(self, rows: slice) -> None:
        """Begin the sum of complete rows; only if `overlaps`. All ranks start the same rows; `result` waits for it."""
        end = rows.stop * self.matrix.shape[1]
        if self._begun < end < self._size:  # result() sums the last rows with the last element
            self._waits.append(self._ranks.start_allreduce(self._buffer[self._begun : end], "sum"))
            self._begun = end

    def result(self, attempt: Attempt) -> Any:
        """Return this rank's share of the sum, or raise on every rank if one of them failed so far.

        An exception after the last collective operation is kept in `attempt`.
        """
        complete = self._sum(attempt)

        def round_sum() -> Any:
            found = complete()
            if self._rounded is None:
                return found
            self._round(self._rounded, found)
            return self._rounded

        return attempt.run(round_sum)

    def _sum(self, attempt: Attempt) -> Callable[[], Any]:
        """Run all collective operations; return a function that computes the share from their results."""
        if self._share is True and not self._deterministic:
            self._buffer[-1] = float(attempt.failed)
            self._waits.append(self._ranks.start_allreduce(self._buffer[self._begun :], "sum"))
            for wait in self._waits:
                wait()
            failures = 1.0 if attempt.failed else attempt.run(lambda: float(self._buffer[-1]))
            attempt.settle(self._ranks, failures or 0.0)
            return lambda: self.matrix
        attempt.share(self._ranks)
        if not self._is_cut:
            return lambda: self.matrix
        size, (rows, columns) = self._ranks.size, self.matrix.shape
        own = self._own[: self._own_rows]
        parts = self._received[: size * self._own_rows * columns].reshape(size, *own.shape)
        self._ranks.exchange(self.matrix, parts)

        def add() -> Any:
            self._add(parts, own)
            return own

        if self._share == "scatter":
            return add
        attempt.run(add)
        all_sums = self._ranks.allgather(self._own, self._received.reshape(size, *self._own.shape))
        attempt.share(self._ranks)

        def join() -> Any:
            for rank, sums in enumerate(all_sums):
                start, stop = vocab_range(rows, rank, size)
                self.matrix[start:stop] = sums[: stop - start]
            return self.matrix

        return join
