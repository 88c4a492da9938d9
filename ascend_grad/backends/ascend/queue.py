"""The interface of the operators to a device: a queue of work, and arithmetic on the vectors of a call.

`operators` is written once against this interface, which has three implementations:

- `session.Session`: arrays of the host, and `DeviceArray`s. Vectors are float64 on the host, so that values are known.
- `tensor_queue.TensorQueue`: tensors of torch_npu. Vectors are float32 tensors, whose values the host never reads.
- `workspace.WorkspaceCounter`: a session that stops after the first stage of each operator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

import numpy as np

from ... import _acl, _aclnn
from . import determinism, quirks
from .array import DeviceArray

FLOAT32 = np.dtype(np.float32)

#: The results of a call: arrays of the device, vectors of the queue, or None.
Results = tuple[Any, ...]


class Rows(Protocol):
    """The rows of a call that the device computes.

    A session puts only these rows on the device. Tensors keep all rows, and the others are overwritten if necessary.

    Attributes
    ----------
    is_empty : bool
        Whether there are no rows, as far as the host knows.
    is_complete : bool
        Whether these are all rows of the call, each once, as far as the host knows.
    """

    @property
    def is_empty(self) -> bool: ...

    @property
    def is_complete(self) -> bool: ...

    def put(self, array: Any, otherwise: float | None = None, *, is_overwritten: bool = False) -> DeviceArray:
        """Return these rows of an array or vector on the device; other rows that are kept become `otherwise`.

        If the operator overwrites the result, it is never the caller's own array.
        """

    def put_from(self, rows: Any, array: DeviceArray) -> DeviceArray:
        """Return these rows of an operator's result for rows that include them; rows kept without need become 0."""

    def put_mask(self, mask: Any, count: int) -> DeviceArray:
        """Return these rows of a mask of ``count`` rows on the device, as bits."""

    def of(self, vector: Any) -> Any:
        """Return these rows of a vector."""

    def vector(self, array: Any) -> Any:
        """Return an operator's result, or a vector, for these rows as a vector of all rows. None: there are no rows."""

    def restored(self, array: DeviceArray) -> Any:
        """Return a matrix of all rows that has these rows, added up if a row is there twice, and zeros elsewhere."""

    def cleared(self, array: DeviceArray) -> DeviceArray:
        """Return a sum over these rows, which is 0 if there are none."""


class Queue(ABC):
    """One call's place in the order of a stream."""

    #: The device that the work is done on.
    device: int
    #: The level of determinism that the call asks for; 0: none.
    determinism_level: int
    #: The module of the functions on vectors: NumPy or torch.
    xp: Any

    # ---- work and memory

    @property
    @abstractmethod
    def stream(self) -> _acl.AnyStream:
        """Return the stream. It is read right before work is put on it."""

    @abstractmethod
    def memory_of(self, array: DeviceArray) -> _acl.DeviceRange:
        """Return the memory of an array, for work on the stream."""

    @abstractmethod
    def workspace(self, nbytes: int) -> _acl.DeviceRange:
        """Return memory for the work of one operator."""

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> DeviceArray:
        """Make an array for a result. When it is dropped, its memory serves later work of the call."""

    @abstractmethod
    def put(self, array: Any, dtype: np.dtype | None = None) -> DeviceArray:
        """Return an argument, or a vector, as an array that operators can read, in this dtype."""

    def launch(self, operator: str, *arguments: Any) -> None:
        """Run both stages of an operator of `_aclnn`; arrays among the arguments become its tensors meanwhile."""
        tensors: list[_aclnn.Tensor] = []
        executor = None
        try:
            converted = []
            for argument in arguments:
                if isinstance(argument, DeviceArray):
                    code = _aclnn.DTYPES[argument.dtype.name]
                    shape, layout = quirks.shape_for_device(argument.shape), quirks.layout_for_device(argument)
                    argument = _aclnn.Tensor(self.memory_of(argument), shape, code, layout)
                    tensors.append(argument)
                converted.append(argument)
            with determinism.guard(self.device, self.determinism_level):
                executor = getattr(_aclnn, operator)(*converted)
                self.run(executor)
        finally:
            if executor is not None:
                executor.close()
            for tensor in tensors:
                tensor.close()

    @abstractmethod
    def permuted(self, array: DeviceArray, axes: tuple[int, ...]) -> DeviceArray:
        """Copy an array within the device, C-contiguous, with its axes in this order."""

    @abstractmethod
    def reshaped(self, array: DeviceArray, shape: tuple[int, ...]) -> DeviceArray:
        """Return a C-contiguous array in another shape, over the same memory."""

    def run(self, executor: _aclnn.Executor) -> None:
        """Run the second stage of an operator."""
        size = executor.workspace_size
        executor.launch(self.workspace(size) if size else None, self.stream)

    # ---- vectors

    @abstractmethod
    def vector(self, array: Any, dtype: Any = None) -> Any:
        """Return an argument, a number or a vector as a vector of `xp`, in the dtype of the arithmetic by default."""

    @abstractmethod
    def numbers(self, count: int) -> Any:
        """Return the integers from 0 up to ``count - 1`` as a vector."""

    @abstractmethod
    def largest(self, values: Any, places: Any, count: int) -> tuple[Any, Any]:
        """Return ``count`` entries of each row, from the largest value down; of equal ones the lower place is first."""

    @abstractmethod
    def compact(self, counted: Any) -> Rows:
        """Return the rows that a call has to compute. Others may be left out, to save work."""

    @abstractmethod
    def select(self, present: Any, count: int) -> Rows:
        """Return the rows that take part in sums. Others are left out, whatever they hold.

        ``present`` has one entry or two for each of the ``count`` rows: entry ``count + i`` is a second row ``i``.
        """

    # ---- repairs of what the device does differently (`quirks`)

    @abstractmethod
    def mask_bits(self, mask: Any, count: int) -> DeviceArray:
        """Return a mask of ``count`` rows as bits on the device (Q3)."""

    @abstractmethod
    def safe_targets(self, grad: Any, target: Any, mask: Any, extent: int) -> tuple[Any, Any]:
        """Return the row gradients, and targets that are in [0, extent) on masked rows, too (Q4)."""

    @abstractmethod
    def clear_padding(self, mask: DeviceArray, count: int) -> None:
        """Clear the bits of a mask beyond its ``count`` rows, or have them cleared in copies on the host (Q5)."""
