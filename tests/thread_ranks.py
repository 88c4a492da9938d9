"""A test double of a communicator: the ranks are threads of this process. It is stricter than engines are.

Sums are added in an order that changes from call to call, arrays are compared over the ranks, and a rank that is left
waiting gets an error soon.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

#: Seconds after which ranks that wait for another one give up.
PATIENCE = 30


class Group:
    """What the ranks share."""

    def __init__(self, size: int):
        self.size = size
        self._barrier = threading.Barrier(size, timeout=PATIENCE)
        self._calls: list[Any] = [None] * size
        self._random = np.random.default_rng(0)
        self.order = np.arange(size)
        #: The operations so far, as every rank called them: name and shape.
        self.operations: list[tuple[str, tuple[int, ...]]] = []

    def meet(self, rank: int, name: str, array: np.ndarray) -> list[np.ndarray]:
        """What every rank gave to its call of this name."""
        assert array.flags.c_contiguous
        assert array.dtype in (np.float32, np.float64, np.uint8)
        self._calls[rank] = name, array.shape, array.dtype, array.copy()
        if self._barrier.wait() == 0:
            self.order = self._random.permutation(self.size)
            self.operations.append((name, array.shape))
        calls = list(self._calls)
        self._barrier.wait()
        assert all(call[:3] == calls[0][:3] for call in calls), [call[:3] for call in calls]
        return [call[3] for call in calls]


class ThreadRank:
    """The communicator of one rank."""

    def __init__(self, group: Group, rank: int):
        self.group, self.rank, self.size = group, rank, group.size

    def allreduce(self, array, op):
        parts = self.group.meet(self.rank, op, array)
        if op == "max":
            assert not np.isnan(parts).any()  # of which engines make what they like
            array[...] = np.max(parts, axis=0)
        else:
            assert op == "sum"
            array[...] = parts[self.group.order[0]]
            for rank in self.group.order[1:]:
                with np.errstate(all="ignore"):
                    array += parts[rank]

    def allgather(self, array):
        return np.stack(self.group.meet(self.rank, "allgather", array))


def in_threads(*works: Callable[[], Any]) -> list[Any]:
    """Each in a thread of its own: what it returned or raised."""
    results: list[Any] = [None] * len(works)

    def run(i: int) -> None:
        try:
            results[i] = works[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,), name=f"rank {i}", daemon=True) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
        assert not thread.is_alive()
    return results


def on_ranks(size: int, work: Callable[[ThreadRank], Any], group: Group | None = None) -> list[Any]:
    """What `work` returns on every rank, or raises."""
    group = group or Group(size)
    return in_threads(*(lambda rank=rank: work(ThreadRank(group, rank)) for rank in range(size)))


def on_grid(
    vocabulary_ranks: int, token_ranks: int, work: Callable[[ThreadRank, ThreadRank], Any]
) -> dict[tuple[int, int], Any]:
    """The same on a grid, of `work(vocab_comm, comm)`; by the rank in the vocabulary and that in the tokens."""
    rows = [Group(vocabulary_ranks) for _ in range(token_ranks)]
    columns = [Group(token_ranks) for _ in range(vocabulary_ranks)]
    places = [(v, t) for v in range(vocabulary_ranks) for t in range(token_ranks)]
    results = in_threads(*(lambda v=v, t=t: work(ThreadRank(rows[t], v), ThreadRank(columns[v], t)) for v, t in places))
    return dict(zip(places, results))


def returned(results: list[Any]) -> list[Any]:
    """The results, where nothing was raised."""
    for each in results:
        if isinstance(each, BaseException):
            raise each
    return results
