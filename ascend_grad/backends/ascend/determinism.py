"""Deterministic results of the device's operators: an option of the context, set while an operator is prepared.

The option belongs to a context, which all threads of a device share. So it is set for one operator at a time, and then
restored. An operator reads it in its first stage. Others that are prepared at the same time lose speed alone.

torch_npu sets the same option, from a thread that submits what its queue on the host holds. It remembers what it has
set. So the queue is emptied first: what torch sets in between would be restored to the value before.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from ... import _acl
from ..._call import Call
from . import runtime
from .array import DeviceArray

#: Choice of `ascend_grad.npu.use_deterministic` in this context: None, or an object whose ``value`` is a bool or None.
requested: ContextVar[Any] = ContextVar("ascend_grad_deterministic", default=None)

_lock = threading.RLock()  # a signal handler may call an operator while the lock is held


def is_asked_for(call: Call) -> bool:
    """Return whether a call has to be deterministic: by the choice of this context, or by torch's for its tensors."""
    choice = requested.get()
    if choice is not None and choice.value:
        return True
    torch: Any = sys.modules.get("torch")
    return (
        torch is not None
        and torch.are_deterministic_algorithms_enabled()
        and any(isinstance(each, DeviceArray) and each.storage.is_of_torch for each in call.arguments.values())
    )


@contextmanager
def _in_force(device: int) -> Iterator[None]:
    runtime.empty_queue_of_torch(device)
    with _lock, _acl.DeterministicGuard():
        yield


def guard(device: int, is_deterministic: bool) -> AbstractContextManager[None]:
    """Return the block in which an operator of a call is prepared and launched."""
    return _in_force(device) if is_deterministic else nullcontext()
