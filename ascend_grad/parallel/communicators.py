"""Communication between ranks: the protocol for a caller's transport, and the collective operations of the losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ..arguments import shown
from ..errors import ParamTypeError
from .ranges import vocab_range

Operation = Literal["max", "sum"]


@runtime_checkable
class Communicator(Protocol):
    """A group of processes, as one of them sees it. All processes make the same calls in the same order.

    Communicators of mpi4py and torch.distributed need not be wrapped; this protocol is for other transports. Arrays are
    C-contiguous, of float32, float64 or uint8. Their dtype and shape are the same on every rank.
    """

    @property
    def rank(self) -> int:
        """Number of this process, counted from 0."""
        ...

    @property
    def size(self) -> int:
        """Number of processes."""
        ...

    def allreduce(self, array: NDArray, op: Operation) -> None:
        """Combine the arrays of all ranks, element by element, and overwrite each array with the result.

        Parameters
        ----------
        array : ndarray
            This rank's array, which is overwritten.
        op : {"max", "sum"}
            The operation. Arrays for "max" hold no NaN.
        """
        ...

    def allgather(self, array: NDArray) -> NDArray:
        """Return the arrays of all ranks, on every rank.

        Parameters
        ----------
        array : ndarray
            This rank's array.

        Returns
        -------
        ndarray
            The arrays in rank order, along a new first axis.
        """
        ...


class Collectives:
    """The collective operations of the losses, by the methods of a `Communicator`, or of a transport in subclasses.

    Attributes
    ----------
    takes_npu_tensors : bool
        Whether arguments may be tensors of torch_npu in device memory instead of arrays.
    required_device : int or None
        The only device on which matrices can be summed; None if they can also be summed on the host.
    """

    takes_npu_tensors = False
    required_device: int | None = None

    def __init__(self, comm: Communicator):
        self._comm = comm
        self.rank, self.size = comm.rank, comm.size

    def allreduce(self, array: NDArray, op: Operation) -> None:
        self._comm.allreduce(array, op)

    def allgather(self, array: NDArray, out: NDArray | None = None) -> NDArray:
        """Return the arrays of all ranks along a new first axis, in `out` if it is given."""
        found = self._comm.allgather(array)
        expected = (self.size, *array.shape)
        if not isinstance(found, np.ndarray) or found.shape != expected or found.dtype != array.dtype:
            got = f"{found.dtype} of shape {found.shape}" if isinstance(found, np.ndarray) else shown(found)
            raise ParamTypeError(f"comm.allgather: expected {array.dtype} of shape {expected}, got {got}")
        if out is None:
            return found
        out[...] = found
        return out

    def start_allreduce(self, array: NDArray, op: Operation) -> Callable[[], object]:
        """Begin `allreduce`; return a function that waits for its end."""
        self.allreduce(array, op)
        return lambda: None

    def exchange(self, matrix: NDArray, out: NDArray) -> None:
        """Gather from every rank's matrix the rows that `vocab_range` assigns to this rank.

        `out` has the shape (ranks, rows of this rank, columns).
        """
        for rank in range(self.size):
            rows = matrix[slice(*vocab_range(len(matrix), rank, self.size))]
            self.allgather(rows, out if rank == self.rank else None)
