"""What carries numbers between ranks: what a caller has to offer, and what the losses make of it."""

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
    """A group of processes, as one of them sees it. All of them make the same calls in the same order.

    What mpi4py and torch.distributed have need not be wrapped; this is for other engines. Arrays are C-contiguous, of
    float32, float64 or uint8, and of the same dtype, and the same shape, on every rank.
    """

    @property
    def rank(self) -> int:
        """The number of this process, from 0 on."""
        ...

    @property
    def size(self) -> int:
        """The number of processes."""
        ...

    def allreduce(self, array: NDArray, op: Operation) -> None:
        """Combine the arrays of all ranks, element by element, and put the result in the place of each.

        Parameters
        ----------
        array : ndarray
            This rank's array, which becomes the result.
        op : {"max", "sum"}
            How. No array that "max" is called with holds NaN.
        """
        ...

    def allgather(self, array: NDArray) -> NDArray:
        """Give every rank the arrays of all.

        Parameters
        ----------
        array : ndarray
            This rank's array.

        Returns
        -------
        ndarray
            All of them, in the order of the ranks along a new first axis.
        """
        ...


class Collectives:
    """The collective operations of the losses, by those of a `Communicator`. Engines that have more override some.

    Attributes
    ----------
    takes_npu_tensors : bool
        Whether tensors of torch_npu may take the place of arrays, in memory of the device.
    required_device : int or None
        The only device on which matrices can be summed; None: the host can, too.
    """

    takes_npu_tensors = False
    required_device: int | None = None

    def __init__(self, comm: Communicator):
        self._comm = comm
        self.rank, self.size = comm.rank, comm.size

    def allreduce(self, array: NDArray, op: Operation) -> None:
        self._comm.allreduce(array, op)

    def allgather(self, array: NDArray, out: NDArray | None = None) -> NDArray:
        """The arrays of all ranks along a new first axis: in `out` where that is given."""
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
        """Begin `allreduce`; the function that is returned waits for its end."""
        self.allreduce(array, op)
        return lambda: None

    def exchange(self, matrix: NDArray, out: NDArray) -> None:
        """Every rank's rows of this rank, as `vocab_range` cuts them: (ranks, rows of this rank, columns)."""
        for rank in range(self.size):
            rows = matrix[slice(*vocab_range(len(matrix), rank, self.size))]
            self.allgather(rows, out if rank == self.rank else None)
