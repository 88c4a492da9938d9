"""Deterministic results of the device's operators: an option of the context, set while an operator is prepared.

The option belongs to a context, which all threads of a device share. So it is set for one operator at a time, and then
restored. An operator reads it in its first stage. Others that are prepared at the same time lose speed alone.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from ... import _acl
from .array import DeviceArray
from .torch_npu import TensorMemory

#: What `ascend_grad.npu.use_deterministic` chose in this context: None, or an object whose ``value`` is a bool or None.
chosen: ContextVar[Any] = ContextVar("ascend_grad_deterministic", default=None)

_lock = threading.RLock()  # a signal handler may call in the middle of a call


def is_chosen() -> bool:
    choice = chosen.get()
    return choice is not None and bool(choice.value)


def _is_chosen_by_torch(arguments: Iterable[object]) -> bool:
    """Whether tensors of torch are among the arguments, and torch asks for deterministic algorithms."""
    for argument in arguments:
        if isinstance(argument, DeviceArray) and isinstance(argument._allocation, TensorMemory):
            torch: Any = sys.modules["torch"]
            return torch.are_deterministic_algorithms_enabled()
    return False


@contextmanager
def _in_force() -> Iterator[None]:
    with _lock, _acl.DeterministicGuard():
        yield


def guard(arguments: Iterable[object]) -> AbstractContextManager[None]:
    """Return the block in which an operator on these arguments is prepared and launched."""
    return _in_force() if is_chosen() or _is_chosen_by_torch(arguments) else nullcontext()
