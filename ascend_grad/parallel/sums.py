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

#: What a rank gets of a sum of matrices: all of it, the rows that `vocab_range` cuts for it, or only what it had.
Share = Literal[True, "scatter", False]


class VectorSums:
    """Sums of vectors (or of a few of them, side by side) of each rank, in place.

    Parameters
    ----------
    ranks : Collectives
        Whose vectors are summed.
    size : int
        How many numbers there are at most at a time.
    dtype : dtype
        Of the numbers.
    deterministic : bool
        Add in the order of the ranks, whatever the engine does.
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
    """The sum along the first axis, in order. What the caller wants of infinities and overflow has no say."""
    with np.errstate(all="ignore"):
        np.add.reduce(parts, axis=0, out=out)


class MatrixSum:
    """The sum of a matrix of each rank. The caller writes its own into `matrix`, then asks for `result`.

    All that it takes is allocated at once: whoever lacks the memory can say so before others wait for it.

    Parameters
    ----------
    ranks : Collectives
        Whose matrices are summed.
    rows, columns : int
        Their shape.
    dtype : dtype
        In which numbers travel and are added: float32 or float64.
    result_dtype : dtype
        Of the result, which is rounded once.
    share : True, "scatter" or False
        What this rank gets.
    deterministic : bool
        Add in the order of the ranks.
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
        # One number more, which says whether a rank failed.
        self._buffer = self._zeros(self._size + 1, dtype)
        self.matrix = self._buffer[:-1].reshape(rows, columns)
        self._begun = 0
        self._waits: list[Callable[[], object]] = []
        #: Whether rows can be summed while others are still computed.
        self.overlaps = share is True and not deterministic and ranks.size > 1
        start, stop = vocab_range(rows, ranks.rank, ranks.size)
        own, most = stop - start, -(-rows // ranks.size)
        if self._is_cut:
            #: The sums of this rank's rows, with as many rows as each rank has where all of them are gathered.
            self._own = self._zeros((most if share is True else own, columns), dtype)
            self._own_rows = own
            #: What arrives from all ranks: their parts of these rows, then the sums of theirs.
            self._received = self._empty(ranks.size * most * columns, dtype)
        #: The result, if it is not of the dtype of the sum.
        self._rounded: Any = None
        if result_dtype != dtype:
            self._rounded = self._empty((own if share == "scatter" else rows, columns), result_dtype)

    # -- what is done otherwise elsewhere than in memory of the host --

    def _zeros(self, shape: int | tuple[int, int], dtype: np.dtype) -> Any:
        return np.zeros(shape, dtype)

    def _empty(self, shape: int | tuple[int, int], dtype: np.dtype) -> Any:
        return np.empty(shape, dtype)

    def _add(self, parts: Any, out: Any) -> None:
        _add(parts, out)

    def _round(self, out: Any, values: Any) -> None:
        arrays.round_into(out, values)

    # -- the same everywhere --

    @property
    def _is_cut(self) -> bool:
        """Whether each rank adds the rows that `vocab_range` cuts for it."""
        return self._ranks.size > 1 and (self._share == "scatter" or (self._share is True and self._deterministic))

    def start(self, rows: slice) -> None:
        """Where sums overlap: begin with rows that are complete. All ranks start the same ones; `result` has them."""
        end = rows.stop * self.matrix.shape[1]
        if self._begun < end < self._size:  # the last rows travel with the last number
            self._waits.append(self._ranks.start_allreduce(self._buffer[self._begun : end], "sum"))
            self._begun = end

    def result(self, attempt: Attempt) -> Any:
        """This rank's share of the sum, or an exception on every rank if one of them failed so far.

        What fails after the last collective operation is kept in `attempt`.
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
        """All collective operations; what is returned makes the sum of what they left."""
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
