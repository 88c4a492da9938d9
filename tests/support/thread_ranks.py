"""Provide a test double of a communicator, whose ranks are threads of this process.

The double checks more than real engines do. Sums are added in an order that changes from call to call, and arrays are
compared over the ranks. If a rank ends, all ranks that wait for it get an error at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

#: Time after which a waiting rank gives up, in seconds. It is much longer than any call on a busy machine.
PATIENCE = 600


class LeftWaitingError(RuntimeError):
    """Report to a waiting rank that a rank it waits for has ended."""


class Barrier:
    """Let ranks wait for each other. If one rank ends, all waiting ranks raise an error."""

    def __init__(self, size: int):
        self._size = size
        self._arrived = self._round = 0
        self._is_left = False
        self._changed = threading.Condition()

    def wait(self) -> bool:
        """Wait for all ranks, and return whether this rank was the last to arrive."""
        with self._changed:
            current = self._round
            self._arrived += 1
            if self._arrived == self._size:
                self._arrived, self._round = 0, current + 1
                self._changed.notify_all()
                return True
            self._changed.wait_for(lambda: self._round > current or self._is_left, PATIENCE)
            if self._round == current:
                raise LeftWaitingError
            return False

    def leave(self) -> None:
        """End the barrier, so that waiting ranks raise an error."""
        with self._changed:
            self._is_left = True
            self._changed.notify_all()


class Group:
    """Hold the state that the ranks share."""

    def __init__(self, size: int):
        self.size = size
        self.start()
        self._calls: list[Any] = [None] * size
        self._random = np.random.default_rng(0)
        self.order = np.arange(size)
        #: Name and shape of each operation so far. They are the same for all ranks.
        self.operations: list[tuple[str, tuple[int, ...]]] = []

    def start(self) -> None:
        """Begin a run of all ranks, after the ranks of the previous run have ended."""
        self._barrier = Barrier(self.size)

    def meet(self, rank: int, name: str, array: np.ndarray) -> list[np.ndarray]:
        """Return the arrays that all ranks passed to their call of this name."""
        assert array.flags.c_contiguous
        assert array.dtype in (np.float32, np.float64, np.uint8)
        self._calls[rank] = name, array.shape, array.dtype, array.copy()
        if self._barrier.wait():
            self.order = self._random.permutation(self.size)
            self.operations.append((name, array.shape))
        calls = list(self._calls)
        self._barrier.wait()
        assert all(call[:3] == calls[0][:3] for call in calls), [call[:3] for call in calls]
        return [call[3] for call in calls]

    def leave(self) -> None:
        """Make all ranks that wait for this rank, now or later, raise an error."""
        self._barrier.leave()


class ThreadRank:
    """Communicate as one rank of a group of threads."""

    def __init__(self, group: Group, rank: int):
        self.group, self.rank, self.size = group, rank, group.size

    def allreduce(self, array, op):
        parts = self.group.meet(self.rank, op, array)
        if op == "max":
            assert not np.isnan(parts).any()  # engines differ in the treatment of NaN
            array[...] = np.max(parts, axis=0)
        else:
            assert op == "sum"
            array[...] = parts[self.group.order[0]]
            for rank in self.group.order[1:]:
                with np.errstate(all="ignore"):
                    array += parts[rank]

    def allgather(self, array):
        return np.stack(self.group.meet(self.rank, "allgather", array))


def in_threads(*works: Callable[[], Any], groups: Sequence[Sequence[Group]] = ()) -> list[Any]:
    """Run each function in a thread, which leaves its groups at the end, and return the results or exceptions."""
    results: list[Any] = [None] * len(works)

    def run(i: int) -> None:
        try:
            results[i] = works[i]()
        except BaseException as error:
            results[i] = error
        for group in groups[i] if groups else ():
            group.leave()

    threads = [threading.Thread(target=run, args=(i,), name=f"rank {i}", daemon=True) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def on_ranks(size: int, work: Callable[[ThreadRank], Any], group: Group | None = None) -> list[Any]:
    """Run `work` on every rank and return the results or exceptions."""
    group = group or Group(size)
    group.start()
    works = (lambda rank=rank: work(ThreadRank(group, rank)) for rank in range(size))
    return in_threads(*works, groups=[[group]] * size)


def on_grid(
    vocabulary_ranks: int, token_ranks: int, work: Callable[[ThreadRank, ThreadRank], Any]
) -> dict[tuple[int, int], Any]:
    """Run `work(vocab_comm, comm)` on a grid of ranks. Return results by vocabulary rank and token rank."""
    rows = [Group(vocabulary_ranks) for _ in range(token_ranks)]
    columns = [Group(token_ranks) for _ in range(vocabulary_ranks)]
    places = [(v, t) for v in range(vocabulary_ranks) for t in range(token_ranks)]
    works = (lambda v=v, t=t: work(ThreadRank(rows[t], v), ThreadRank(columns[v], t)) for v, t in places)
    results = in_threads(*works, groups=[(rows[t], columns[v]) for v, t in places])
    return dict(zip(places, results))


def returned(results: list[Any]) -> list[Any]:
    """Return the results, or raise the first exception among them."""
    for each in results:
        if isinstance(each, BaseException):
            raise each
    return results
