"""The interface of an operator to the stream that it is put on.

There are two kinds. A `session.Session` has memory and a stream of the library's own (or a stream of the caller's); a
`torch_npu.TorchQueue` uses memory and stream of torch.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from ... import _acl
from .array import DeviceArray


class Queue(Protocol):
    """One call's place in the order of a stream."""

    @property
    def device(self) -> int:
        """Return the device that the work is done on."""

    @property
    def is_deterministic(self) -> bool:
        """Return whether equal calls have to give equal bits."""

    @property
    def stream(self) -> _acl.AnyStream:
        """Return the stream. It is read right before work is put on it."""

    def memory_of(self, array: DeviceArray) -> _acl.DeviceRange:
        """Return the memory of an array, for work on the stream."""

    def workspace(self, nbytes: int) -> _acl.DeviceRange:
        """Return memory for the work of one operator."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> DeviceArray:
        """Make an array for a result."""

    def put(self, array: Any, dtype: np.dtype | None = None) -> DeviceArray:
        """Return an array that the operator can read, in this dtype."""
