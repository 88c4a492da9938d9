"""Deterministic results of the device's operators: an option of the context, set while an operator is prepared.

The option belongs to a context, which all threads of a device share. So it is set for one operator at a time, and then
restored. An operator reads it in its first stage. Other operators that are prepared at the same time only lose speed.

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

#: Levels of the option: equal calls give equal bits; equal rows do, whatever other rows the call has.
DETERMINISTIC, BATCH_INVARIANT = 1, 3

#: Choice of `ascend_grad.npu.use_deterministic` in this context: None, or an object whose ``value`` is None, a
#: bool or "batch".
requested: ContextVar[Any] = ContextVar("ascend_grad_deterministic", default=None)

_lock = threading.RLock()  # a signal handler may call an operator while the lock is held


def level(call: Call) -> int:
    """Return the level that a call asks for, by the choice of this context or by torch's for its tensors; 0: none."""
    choice = requested.get()
    if choice is not None and choice.value:
        return BATCH_INVARIANT if choice.value == "batch" else DETERMINISTIC
    torch: Any = sys.modules.get("torch")
    is_of_torch = (
        torch is not None
        and torch.are_deterministic_algorithms_enabled()
        and any(isinstance(each, DeviceArray) and each.storage.is_of_torch for each in call.arguments.values())
    )
    return DETERMINISTIC if is_of_torch else 0


@contextmanager
def _in_force(device: int, level: int) -> Iterator[None]:
    runtime.empty_queue_of_torch(device)
    with _lock, _acl.DeterministicGuard(level):
        yield


def guard(device: int, level: int) -> AbstractContextManager[None]:
    """Return the block in which an operator of a call is prepared and launched."""
    return _in_force(device, level) if level else nullcontext()
