"""The bytes of memory that the first stages of the device's operators ask for."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import _aclnn, arrays
from ..._call import Call
from . import determinism, operators, quirks, session, threads
from .array import DeviceArray
from .array_queue import SelectedRows
from .session import Session


class _AllRows(SelectedRows):
    """All rows of a call, whatever their values: their results are not computed."""

    def __init__(self, queue: WorkspaceCounter, size: int, count: int):
        super().__init__(queue, None if size == count else np.arange(size), count)

    def restored(self, array: DeviceArray) -> DeviceArray:
        return array


class WorkspaceCounter(Session):
    """A session that stops after the first stage of each operator: the device allocates, copies and computes nothing.

    The first stage reads only shapes, dtypes and layouts. So arrays have no memory, and values do not matter. The
    thread is bound to the device by the call of another session, which is running.

    Attributes
    ----------
    nbytes : int
        The most bytes that one of the operators has asked for.
    """

    def __init__(self, running: Session):
        super().__init__(running.device)
        self.determinism_level = running.determinism_level
        self.nbytes = 0

    def run(self, executor: _aclnn.Executor) -> None:
        self.nbytes = max(self.nbytes, executor.workspace_size)

    def memory_of(self, array: DeviceArray) -> Any:
        return None

    def allocate(self, nbytes: int) -> Any:
        return None

    def put(self, array: Any, dtype: np.dtype | None = None, rows: NDArray | None = None) -> DeviceArray:
        if isinstance(array, DeviceArray) and rows is None:
            return array
        shape = array.shape if rows is None else (rows.size, *array.shape[1:])
        return self.empty(shape, arrays.native(array.dtype) if dtype is None else dtype)

    def reshaped(self, array: DeviceArray, shape: tuple[int, ...]) -> DeviceArray:
        return self.empty(shape, array.dtype)

    def copied(self, array: DeviceArray) -> DeviceArray:
        return self.empty(array.shape, array.dtype)

    def values(self, array: NDArray | DeviceArray) -> NDArray:
        return np.ones(array.shape, array.dtype) if isinstance(array, DeviceArray) else array

    def select(self, present: NDArray, count: int) -> SelectedRows:
        return _AllRows(self, present.size, count)

    def safe_targets(self, grad: Any, target: Any, mask: Any, extent: int) -> tuple[Any, Any]:
        return grad, target


def workspace_size(call: Call) -> int:
    """Return the most bytes that an operator of a call asks for. Later operators use the workspace of earlier ones.

    Rows that a call leaves out because of their values count like all others.
    """
    if quirks.is_empty(call):
        return 0
    device = threads.chosen_device() if call.device is None else call.device
    with session.session_on(device).call(determinism_level=determinism.level(call)) as running:
        counter = WorkspaceCounter(running)
        operators.OPERATORS[call.operator.name](counter, call)
    return counter.nbytes
