"""One thread's work on one device: calls on a stream, with a pool of device memory and page-locked staging memory."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import _acl
from ...errors import STATUS_CODES, AscendGradError, BackendUnavailableError
from . import pool, runtime
from .array import DeviceArray
from .pool import Allocation, Pool
from .threads import chosen_device, members_of, sessions, thread
from .transfers import Transfers

#: Codes of a device whose memory is full.
OUT_OF_MEMORY = (STATUS_CODES["ACL_ERROR_RT_MEMORY_ALLOCATION"], STATUS_CODES["ACL_ERROR_RT_DEVICE_OOM"])


class _Frame:
    """Lives as long as the call that made it, however that ends."""

    __slots__ = ("__weakref__",)


class Session(Transfers):
    """What one thread holds on one device, or on a stream of the caller's there, whose address is given.

    Attributes
    ----------
    waits : bool
        Whether calls wait for their work. Those on a stream of the caller's do not: memory that is released goes to the
        session's pool, for work that comes later on the same stream.
    """

    def __init__(self, device: int, handle: int | None = None):
        super().__init__(device)
        self.waits = handle is None
        self._handle = handle
        self.pool = Pool()
        self._frame: Any = None  # reference to the frame of the call that is running
        self._stream: _acl.AnyStream | None = None
        self._pending = False  # whether anything was put on the stream since it was synchronised
        self.is_deterministic = False  # of the call that is running
        self._has_to_wait = False  # for the end of the call that is running, since torch may use the memory, too
        self._allocations: list[Allocation] = []  # of the call that is running, as what follows
        self._alive: list[object] = []

    @property
    def busy(self) -> bool:
        """Whether a call is running. An interrupt may end one at any point, so nothing has to be reset for that."""
        return self._frame is not None and self._frame() is not None

    @property
    def is_pending(self) -> bool:
        """Whether work may be on the stream that nobody has waited for."""
        return self._pending

    @contextmanager
    def call(self, *, is_deterministic: bool = False) -> Iterator[Session]:
        """The frame of one call: the thread is bound to the device, and nothing is left behind."""
        with _acl.DeviceGuard(self.device):
            frame = _Frame()
            self._frame = weakref.ref(frame)
            self._has_to_wait = self.waits
            self.is_deterministic = is_deterministic
            try:
                yield self
                if self._has_to_wait:
                    self.synchronize()
            except BaseException:
                self._recover()
                raise
            finally:
                self._alive = []
                allocations, self._allocations = self._allocations, []
                for allocation in allocations:
                    if not allocation.kept:
                        allocation.release()
                del frame
                self._trim()

    def keep(self, *results: DeviceArray | None) -> None:
        """These arrays outlive the call. They are complete, where calls wait."""
        if self.waits:
            self.synchronize()
        for array in results:
            if array is not None:
                array.known.keep_memory()

    def keep_alive(self, array: DeviceArray) -> DeviceArray:
        """Keep an array alive until the end of the call, whatever becomes of other references."""
        self._alive.append(array)
        return array

    @property
    def stream(self) -> _acl.AnyStream:
        if self._stream is None:
            if self._handle is None:
                self._stream = _acl.Stream(self.device)
            else:
                self._stream = _acl.borrowed_stream(self._handle, self.device)
        self._pending = True
        return self._stream

    def synchronize(self) -> None:
        """Wait for everything that was put on the stream; the staging memory is free then."""
        if self._pending and self._stream is not None:
            self._stream.synchronize()
        self._pending = False
        self._head = 0

    def wait(self) -> None:
        """Wait for everything on the stream, on any thread."""
        stream = self._stream
        if self._pending and stream is not None and not _acl.is_detached():
            with _acl.DeviceGuard(self.device):
                stream.synchronize()

    def finish(self) -> list[_acl.DeviceMemory]:
        """Wait for everything on the stream, outside of a call; the blocks of the pool, which are idle then."""
        with _acl.DeviceGuard(self.device):
            try:
                self.synchronize()
            except BaseException:
                self._recover()
                raise
        return self.pool.take_all()

    def _recover(self) -> None:
        """After a failure: nothing may be in flight when memory is released."""
        interrupt: BaseException | None = None
        failures = 0
        while failures < 2:
            try:
                self.synchronize()
                break
            except AscendGradError:
                failures += 1
            except BaseException as another:  # an interrupt has to wait for the device
                interrupt = another
        else:
            self._abandon_stream()
        if interrupt is not None:
            raise interrupt

    def _abandon_stream(self) -> None:
        """The stream is of no use any more, and what it worked on is not to be used again."""
        self._pending = False
        self._head = 0
        self.close()
        for allocation in self._allocations:
            if not allocation.kept:
                allocation.free()

    def close(self) -> None:
        """Free everything, when nothing is in flight."""
        with suppress(AscendGradError):
            self.wait()
        self._pending = False
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
        self.free_staging()
        self.pool.empty()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # then names of modules are gone, and what is held frees itself
            self.close()

    # ---- memory

    def _trim(self) -> None:
        """Free what is beyond the bounds of the pool, when it is idle."""
        if self.pool.is_full:
            if not self.waits:
                self.synchronize()
            self.pool.trim()

    def memory_of(self, array: DeviceArray) -> _acl.DeviceRange:
        """The memory of an array, for work on the stream."""
        allocation = array.known.allocation
        assert allocation is not None, "an array without elements has no memory"
        if isinstance(allocation, Allocation):
            allocation.wait_unless_on(self)
        self._has_to_wait = self._has_to_wait or allocation.was_shared
        return allocation.memory()

    def allocate(self, nbytes: int) -> Allocation:
        """Device memory until the end of the call."""
        size = pool.allocation_size(nbytes)
        for returned in pool.take_returned(self.device):
            self.pool.put(returned)
        block = self.pool.take(size)
        if block is None and not self.waits:
            block = session_on(self.device).pool.take(size)  # which is idle
        if block is None:
            try:
                block = _acl.DeviceMemory(size, self.device)
            except AscendGradError as error:
                if error.code not in OUT_OF_MEMORY:
                    raise
                # The pools of other threads are emptied first; then once more.
                _empty_pools(self.device)
                block = _acl.DeviceMemory(size, self.device)
        allocation = Allocation(block, None if self.waits else self)
        self._allocations.append(allocation)
        return allocation

    def workspace(self, nbytes: int) -> _acl.DeviceRange:
        """Memory for an operator's work."""
        return self.allocate(nbytes).memory()

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> DeviceArray:
        result = DeviceArray(shape, dtype, self.device, to_host)
        if result.size:
            result.known.allocation = self.allocate(result.nbytes)
        return result

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype) -> DeviceArray:
        result = self.empty(shape, dtype)
        if result.size:
            if not self.waits:  # the memory may be in use
                self.synchronize()
            _acl.clear(self.memory_of(result), result.nbytes)
        return result


# ---- the sessions of a thread ----------------------------------------------------------------------------------------


def session_on(device: int) -> Session:
    """This thread's session. It ends with the thread, which drops it."""
    state = runtime.state()
    if not state.usable:
        raise BackendUnavailableError(f"the device cannot be used: {state.reason}")
    session = thread.sessions.get(device)
    if session is None:
        session = thread.sessions[device] = Session(device)
        sessions.add(session)
    # A signal handler may call in the middle of a call: it gets a session of its own, for that call.
    return Session(device) if session.busy else session


def session_for_arrays(device: int) -> Session:
    """The session for calls of this thread on arrays of a device: that of the caller's stream, if there is one."""
    session = thread.on_stream
    return session if session is not None and session.device == device and not session.busy else session_on(device)


@contextmanager
def on_stream(handle: int) -> Iterator[None]:
    """Have calls on arrays of this thread's device put their work on this stream."""
    device = chosen_device()
    session_on(device)  # or what it raises
    session = thread.streams.get((device, handle))
    if session is None:
        session = thread.streams[device, handle] = Session(device, handle)
        sessions.add(session)
    outer = thread.on_stream
    thread.on_stream = session
    try:
        yield
    finally:
        thread.on_stream = outer


def finish_streams() -> None:
    """Wait for what calls of this thread have put on streams of the caller's."""
    error: BaseException | None = None
    for place, session in list(thread.streams.items()):
        if session.busy:  # the call that a signal has interrupted
            continue
        try:
            blocks = session.finish()
        except BaseException as another:
            error = another
            blocks = []
        if session is not thread.on_stream:
            thread.streams.pop(place, None)
        idle = session_on(session.device).pool
        for block in blocks:
            idle.put(block)
        idle.trim()
    if error is not None:
        raise error


def _empty_pools(device: int | None = None) -> None:
    """Free what the pools of all threads hold; of those for streams of the caller's, this thread's."""
    mine = list(thread.streams.values())
    for session in members_of(sessions):
        if device is not None and session.device != device:
            continue
        if session.waits or not session.is_pending:
            session.pool.empty()
        elif session in mine:
            with suppress(AscendGradError):
                session.wait()
                session.pool.empty()


def to_host(array: DeviceArray) -> NDArray:
    """A copy of the array on the host."""
    result = np.empty(array.shape, array.dtype)
    if array.size:
        with session_on(array.device).call() as session:
            session.fetch([(array, result)])
    array.known.clear_padding(result)
    return result


def release() -> None:
    """Free what this thread holds, and the pools of all threads."""
    for session in [*thread.sessions.values(), *thread.streams.values()]:
        if not session.busy:
            session.close()
    _empty_pools()
    pool.free_returned()


@runtime.before_closing
def release_all() -> bool:
    """The process ends: free everything that no running call uses; whether that was all."""
    everyones = members_of(sessions)
    for session in everyones:
        if not session.busy:
            session.close()
    if any(session.busy for session in everyones):
        return False
    with suppress(Exception):  # torch may have ended before
        pool.free_returned()
    allocations = members_of(pool.live)
    for allocation in allocations:
        if not allocation.is_shared:  # else another library may use it until the process ends
            allocation.free()
    return not any(allocation.is_shared for allocation in allocations)
