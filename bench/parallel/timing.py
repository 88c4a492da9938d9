"""Measurement of the time that communication takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

from numpy.typing import NDArray

from ascend_grad.parallel.communicators import Collectives, Operation


class TimedCollectives(Collectives):
    """The operations of an engine, with the time that this rank spends in them, including waits for late ranks.

    Attributes
    ----------
    seconds : float
        The time so far.
    """

    def __init__(self, engine: Collectives):
        self._engine = engine
        self.rank, self.size = engine.rank, engine.size
        self.takes_npu_tensors, self.required_device = engine.takes_npu_tensors, engine.required_device
        self.seconds = 0.0

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = perf_counter()
        yield
        self.seconds += perf_counter() - start

    def allreduce(self, array: NDArray, op: Operation) -> None:
        with self._timed():
            self._engine.allreduce(array, op)

    def allgather(self, array: NDArray, out: NDArray | None = None) -> NDArray:
        with self._timed():
            return self._engine.allgather(array, out)

    def start_allreduce(self, array: NDArray, op: Operation) -> Callable[[], object]:
        with self._timed():
            wait = self._engine.start_allreduce(array, op)

        def timed_wait() -> None:
            with self._timed():
                wait()

        return timed_wait

    def exchange(self, matrix: NDArray, out: NDArray) -> None:
        with self._timed():
            self._engine.exchange(matrix, out)
