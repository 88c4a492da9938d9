"""Collective operations by mpi4py, on buffers and in place."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from ..errors import ParamTypeError
from .communicators import Collectives, Operation
from .ranges import vocab_range

_OPERATIONS = {"max": MPI.MAX, "sum": MPI.SUM}


class MpiCollectives(Collectives):
    """The collective operations of an intracommunicator."""

    _intracomm: MPI.Comm

    def __init__(self, comm: MPI.Comm, name: str, operator: str):
        if comm == MPI.COMM_NULL or comm.Is_inter():
            got = "MPI.COMM_NULL" if comm == MPI.COMM_NULL else "an intercommunicator"
            raise ParamTypeError(f"{name}: expected an intracommunicator, got {got}", operator=operator)
        self._intracomm = comm
        self.rank, self.size = comm.Get_rank(), comm.Get_size()

    def allreduce(self, array: NDArray, op: Operation) -> None:
        self._intracomm.Allreduce(MPI.IN_PLACE, array, _OPERATIONS[op])

    def allgather(self, array: NDArray, out: NDArray | None = None) -> NDArray:
        result = np.empty((self.size, *array.shape), array.dtype) if out is None else out
        self._intracomm.Allgather(array, result)
        return result

    def start_allreduce(self, array: NDArray, op: Operation) -> Callable[[], object]:
        return self._intracomm.Iallreduce(MPI.IN_PLACE, array, _OPERATIONS[op]).Wait

    def exchange(self, matrix: NDArray, out: NDArray) -> None:
        columns = matrix.shape[1]
        ranges = [vocab_range(len(matrix), rank, self.size) for rank in range(self.size)]
        own = ranges[self.rank][1] - ranges[self.rank][0]
        self._intracomm.Alltoallv(
            (matrix, [(stop - start) * columns for start, stop in ranges]), (out, [own * columns] * self.size)
        )
