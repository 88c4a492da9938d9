"""Choice of the transport, by the type of the caller's communicator. It is imported only then."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arguments import integer, shown
from ..errors import ParamInvalidError, ParamTypeError
from .communicators import Collectives, Communicator, Operation


class OneProcess:
    """The communicator of a single process."""

    rank, size = 0, 1

    def allreduce(self, array: NDArray, op: Operation) -> None:
        """Leave the array as it is."""

    def allgather(self, array: NDArray) -> NDArray:
        return array[np.newaxis]


def collectives(comm: Any, name: str, operator: str) -> Collectives:
    """Return the collective operations of the communicator `comm`, which the caller passed as the argument `name`.

    It is None, a communicator of mpi4py, a process group of torch.distributed, or any `Communicator`.
    """
    if comm is None:
        return Collectives(OneProcess())
    if isinstance(comm, Collectives):
        return comm
    # A caller who has a communicator of mpi4py or torch.distributed has imported that package.
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and isinstance(comm, mpi.Comm):
        from .mpi import MpiCollectives

        return MpiCollectives(comm, name, operator)
    torch = sys.modules.get("torch.distributed")
    if torch is not None and torch.is_available() and comm is torch.GroupMember.NON_GROUP_MEMBER:
        message = f"{name}: expected a process group that this process is in, got GroupMember.NON_GROUP_MEMBER"
        raise ParamTypeError(message, operator=operator)
    if torch is not None and torch.is_available() and isinstance(comm, torch.ProcessGroup):
        from .process_group import ProcessGroupCollectives

        return ProcessGroupCollectives(comm, name, operator)
    if not isinstance(comm, Communicator):
        expected = "None, a communicator of mpi4py, a torch.distributed.ProcessGroup or an ascend_grad Communicator"
        raise ParamTypeError(f"{name}: expected {expected}, got {shown(comm)}", operator=operator)
    size, rank = integer(comm.size, f"{name}.size", operator), integer(comm.rank, f"{name}.rank", operator)
    if not 0 <= rank < size:
        raise ParamInvalidError(f"{name}.rank: expected an int in [0, {size - 1}], got {rank}", operator=operator)
    return Collectives(comm)
