"""Memory of a device: idle blocks in pools, and blocks in use.

Calls end with their stream synchronised, so memory that is in a pool, and every array on the device, is idle. It may be
used, or freed, from any thread. Calls on the caller's stream do not wait. Their session has a separate pool, whose
memory may be used in the order of that stream. Whatever else uses an array of such a call waits for the stream first
(`Allocation.wait_unless_on`).

Memory that is released while the call which allocated it is running serves later work of that call, in the order of the
stream. So a call needs no more memory than its arrays that are alive at the same time.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress
from typing import Protocol

from ... import _acl
from ...errors import BackendUnavailableError
from . import runtime, threads

#: Maximum number of bytes, and of blocks, that the pool of one thread keeps for later calls.
POOL_BYTES = 1 << 30
POOL_BLOCKS = 64


def allocation_size(nbytes: int) -> int:
    """Return the bytes to ask the device for. Its kernels read and write 32 bytes at a time."""
    granularity = 512 if nbytes < 1 << 20 else 1 << 17
    return -(-(nbytes + 64) // granularity) * granularity


class Pool:
    """Idle device memory, least recently used first.

    The only changes are single operations on a list, which are atomic: other threads may empty the pool, and a
    garbage-collected array may release its memory at any point.
    """

    def __init__(self) -> None:
        self._blocks: list[_acl.DeviceMemory] = []

    def take(self, size: int) -> _acl.DeviceMemory | None:
        """Take the smallest block of at least this size out of the pool, unless most of it would be wasted."""
        while fitting := [block for block in list(self._blocks) if size <= block.size <= 2 * size]:
            best = min(fitting, key=lambda block: block.size)
            with suppress(ValueError):  # another thread has taken the block
                self._blocks.remove(best)
                return best
        return None

    def put(self, block: _acl.DeviceMemory) -> None:
        """Add an idle block."""
        self._blocks.append(block)

    @property
    def is_full(self) -> bool:
        """Return whether the blocks exceed the pool's bounds."""
        return len(self._blocks) > POOL_BLOCKS or sum(block.size for block in list(self._blocks)) > POOL_BYTES

    def take_all(self) -> list[_acl.DeviceMemory]:
        """Take all blocks out of the pool."""
        taken = []
        with suppress(IndexError):
            while True:
                taken.append(self._blocks.pop(0))
        return taken

    def trim(self) -> None:
        """Free the least recently used blocks until the rest is within the pool's bounds."""
        while self.is_full:
            with suppress(IndexError):
                self._blocks.pop(0).close()

    def empty(self) -> None:
        """Free all blocks."""
        for block in self.take_all():
            block.close()


class Owner(Protocol):
    """A `session.Session` as its memory sees it.

    Attributes
    ----------
    waits : bool
        Whether calls wait for their work.
    pool : Pool
        The idle memory.
    """

    waits: bool
    pool: Pool

    @property
    def busy(self) -> bool:
        """Return whether a call is running."""

    @property
    def is_pending(self) -> bool:
        """Return whether the stream may have work that nobody has waited for."""

    def wait(self) -> None:
        """Wait for everything on the stream, on any thread."""


#: Lock that is held while a thread reads or changes which session an allocation is queued on. A signal handler, or the
#: garbage collector, may release memory in the middle.
_queues = threading.RLock()
#: The allocations of all threads.
live: weakref.WeakSet[Allocation] = weakref.WeakSet()
#: Blocks that torch has given back. What torch does with them may not be done yet.
_returned: list[_acl.DeviceMemory] = []


class Allocation:
    """Device memory in use, which goes to a pool when it is released, explicitly or by garbage collection.

    Attributes
    ----------
    block : _acl.DeviceMemory, optional
        The memory, until it is released.
    kept : bool
        Whether the memory outlives the call that allocated it.
    of_call : Pool, optional
        While the call that allocated the memory is running: the pool of its later work, which takes released memory.
    """

    __slots__ = ("__weakref__", "_queued_on", "_shares", "block", "kept", "of_call")

    is_of_torch = False

    def __init__(self, block: _acl.DeviceMemory, queued_on: Owner | None = None, of_call: Pool | None = None):
        self._shares: weakref.WeakSet[Share] | None = None
        self._queued_on = queued_on  # the session that does not wait and whose work may use the memory, if any
        self.of_call = of_call
        self.block: _acl.DeviceMemory | None = block
        self.kept = False
        live.add(self)

    def release(self) -> None:
        """Give the memory to the pool of the stream that may still use it, of this thread, or back to the device."""
        block, self.block = getattr(self, "block", None), None  # an interrupt may come before __init__ sets it
        if block is None:
            return
        if self._shares is not None:  # a thread of torch that drops the array cannot wait for torch
            _returned.append(block)
            return
        if self.of_call is not None:
            self.of_call.put(block)
            return
        if self._queued_on is not None and self._queued_on.is_pending:  # later work on that stream may use the block
            self._queued_on.pool.put(block)
            return
        session: Owner | None = threads.thread.sessions.get(block.device)
        if session is None:  # a thread without a pool frees the block
            block.close()
            return
        session.pool.put(block)
        if not session.busy:
            session.pool.trim()

    def memory(self) -> _acl.DeviceMemory:
        """Return the memory. If torch also has the memory, wait until torch is done with it."""
        if self.block is None:
            raise BackendUnavailableError("the memory of this array was freed when the process began to end")
        if self._shares is not None:
            runtime.wait_for_torch(self.block.device)
        return self.block

    def wait_unless_on(self, session: Owner | None) -> None:
        """Wait for the work of a session that uses the memory, unless it is this one."""
        queued = None if session is None or session.waits else session
        while True:
            with _queues:
                other = self._queued_on
                if other is None or other is session:
                    self._queued_on = queued or other
                    return
            other.wait()  # other threads still find the session meanwhile, and also wait
            with _queues:
                if self._queued_on is other:
                    self._queued_on = None

    @property
    def is_shared(self) -> bool:
        """Return whether another library also has the memory."""
        return bool(self._shares)

    @property
    def was_shared(self) -> bool:
        """Return whether another library has the memory, or had it."""
        return self._shares is not None

    def share(self, array: object) -> Share:
        """Return the object that another library keeps alive while it uses the memory of this array."""
        self.wait_unless_on(None)
        share = Share(array)
        self._shares = self._shares or weakref.WeakSet()
        self._shares.add(share)
        return share

    def free(self) -> None:
        """Give the memory back to the device at once; nothing may use it any more."""
        block, self.block = self.block, None
        if block is not None:
            block.close()

    __del__ = release


class Share:
    """An array that another library has: it lives as long as this does."""

    __slots__ = ("__weakref__", "_array")

    def __init__(self, array: object):
        self._array = array


def take_returned(device: int) -> list[_acl.DeviceMemory]:
    """Take the blocks of a device that torch has given back, when torch is done with them."""
    taken = []
    for block in list(_returned):
        with suppress(ValueError):  # another thread has taken the block
            if block.device == device:
                _returned.remove(block)
                taken.append(block)
    if taken:
        runtime.wait_for_torch(device)
    return taken


def free_returned() -> None:
    """Free the blocks that torch has given back, when torch is done with them."""
    for device in {block.device for block in list(_returned)}:
        for block in take_returned(device):
            block.close()
