"""The state of each thread: the device that it has chosen, and its sessions."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from ... import _acl
from . import runtime

Member = TypeVar("Member")


class _Thread(threading.local):
    """The state of one thread."""

    def __init__(self) -> None:
        #: The device that was set; None if no device was set.
        self.device = runtime.DEVICE
        #: The thread's sessions by device. Each is a `session.Session`, a class above this module.
        self.sessions: dict[int, Any] = {}
        #: The sessions on the caller's streams, by device and the stream's address.
        self.streams: dict[tuple[int, int], Any] = {}
        #: The session on the stream that `session.on_stream` has set, or None.
        self.on_stream: Any = None


thread = _Thread()
#: The sessions of all threads.
sessions: weakref.WeakSet[Any] = weakref.WeakSet()


def members_of(group: weakref.WeakSet[Member]) -> list[Member]:
    """Return the members of a set that other threads may change at the same time."""
    while True:
        with suppress(RuntimeError):
            return list(group)


def chosen_device() -> int:
    """Return the device of this thread's calls: the one that was set, else the one that it is bound to, else 0."""
    if thread.device is not None:
        return thread.device
    state = runtime.state()
    bound = _acl.bound_device() if state.usable else None
    return bound if bound is not None and bound < state.device_count else 0


def choose_device(device: int) -> None:
    """Set the device of this thread's calls."""
    thread.device = device


@contextmanager
def device_chosen(device: int | None) -> Iterator[None]:
    """Set the device of this thread's calls for a block; None leaves it as it is."""
    outer = thread.device
    if device is not None:
        thread.device = device
    try:
        yield
    finally:
        thread.device = outer
