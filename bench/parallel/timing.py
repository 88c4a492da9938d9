"""Measurement of the time that communication takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

from numpy.typing import NDArray

from ascend_grad.parallel.communicators import Collectives, Operation


class TimedCollectives(Collectives):
    """The operations of an transport, with the time that this rank spends in them, including waits for late ranks.

    Attributes
    ----------
    seconds : float
        The time so far.
    """

    def __init__(self, transport: Collectives):
        self._transport = transport
        self.rank, self.size = transport.rank, transport.size
        self.takes_npu_tensors, self.required_device = transport.takes_npu_tensors, transport.required_device
        self.seconds = 0.0

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = perf_counter()
        yield
        self.seconds += perf_counter() - start

    def allreduce(self, array: NDArray, op: Operation) -> None:
        with self._timed():
            self._transport.allreduce(array, op)

    def allgather(self, array: NDArray, out: NDArray | None = None) -> NDArray:
        with self._timed():
            return self._transport.allgather(array, out)

    def start_allreduce(self, array: NDArray, op: Operation) -> Callable[[], object]:
        with self._timed():
            wait = self._transport.start_allreduce(array, op)

        def timed_wait() -> None:
            with self._timed():
                wait()

        return timed_wait

    def exchange(self, matrix: NDArray, out: NDArray) -> None:
        with self._timed():
            self._transport.exchange(matrix, out)
