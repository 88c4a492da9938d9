"""Communicators of mpi4py: calls on buffers, in place."""

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

    _comm: MPI.Comm

    def __init__(self, comm: MPI.Comm, name: str, operator: str):
        if comm == MPI.COMM_NULL or comm.Is_inter():
            got = "MPI.COMM_NULL" if comm == MPI.COMM_NULL else "an intercommunicator"
            raise ParamTypeError(f"{name}: expected an intracommunicator, got {got}", operator=operator)
        self._comm = comm
        self.rank, self.size = comm.Get_rank(), comm.Get_size()

    def allreduce(self, array: NDArray, op: Operation) -> None:
        self._comm.Allreduce(MPI.IN_PLACE, array, _OPERATIONS[op])

    def allgather(self, array: NDArray) -> NDArray:
        result = np.empty((self.size, *array.shape), array.dtype)
        self._comm.Allgather(array, result)
        return result

    def start_allreduce(self, array: NDArray, op: Operation) -> Callable[[], object]:
        return self._comm.Iallreduce(MPI.IN_PLACE, array, _OPERATIONS[op]).Wait

    def exchange(self, matrix: NDArray) -> NDArray:
        columns = matrix.shape[1]
        ranges = [vocab_range(len(matrix), rank, self.size) for rank in range(self.size)]
        own = ranges[self.rank][1] - ranges[self.rank][0]
        result = np.empty((self.size, own, columns), matrix.dtype)
        self._comm.Alltoallv(
            (matrix, [(stop - start) * columns for start, stop in ranges]), (result, [own * columns] * self.size)
        )
        return result
