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
from ...errors import STATUS_CODES, AscendGradError, BackendUnavailableError, ProcessEndingError
from . import pool, runtime
from .array import DeviceArray
from .array_queue import ArrayQueue
from .pool import Allocation, Pool
from .threads import chosen_device, members_of, sessions, thread

#: Codes of a device whose memory is full.
OUT_OF_MEMORY = (STATUS_CODES["ACL_ERROR_RT_MEMORY_ALLOCATION"], STATUS_CODES["ACL_ERROR_RT_DEVICE_OOM"])


class _Frame:
    """An object that lives as long as the call that made it, however the call ends."""

    __slots__ = ("__weakref__",)


class Session(ArrayQueue):
    """The resources of one thread on one device, or on a stream of the caller's there, whose address is given.

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
        self._frame: Any = None  # a weak reference to the frame of the running call
        self._stream: _acl.AnyStream | None = None
        self._pending = False  # whether anything was put on the stream since it was synchronised
        # The fields below belong to the running call.
        self.determinism_level = 0  # what the call asks for
        self._has_to_wait = False  # whether the call waits for its end; torch may use the same memory
        self._allocations: list[weakref.ref[Allocation]] = []  # the memory to release when the call ends
        self._released = Pool()  # memory that the call has released, and that its work may still use
        self._alive: list[object] = []  # arrays to keep alive until the call ends

    @property
    def busy(self) -> bool:
        """Return whether a call is running. An interrupt may end one at any point, so no flag has to be reset."""
        return self._frame is not None and self._frame() is not None

    @property
    def is_pending(self) -> bool:
        """Return whether work may be on the stream that nobody has waited for."""
        return self._pending

    @contextmanager
    def call(self, *, determinism_level: int = 0) -> Iterator[Session]:
        """Run one call: bind the thread to the device, and release everything that the call does not keep."""
        frame: _Frame | None = _Frame()
        self._frame = weakref.ref(frame)
        try:
            # Another thread may have begun to end the process. It first says so, and then looks for busy sessions:
            # either it sees this one, or its message is seen here.
            _check_usable()
            with _acl.DeviceGuard(self.device):
                try:
                    self._has_to_wait = self.waits
                    self.determinism_level = determinism_level
                    yield self
                    if self._has_to_wait:
                        self.synchronize()
                except BaseException:
                    self._recover()
                    raise
                finally:
                    self._alive = []
                    allocations = self._take_allocations()
                    for allocation in allocations:
                        allocation.of_call = None
                        if not allocation.kept:
                            allocation.release()
                    for block in self._released.take_all():
                        self.pool.put(block)
                    frame = None
                    self._trim()
        finally:
            frame = None  # a traceback may keep this function's variables

    def keep(self, *results: DeviceArray | None) -> None:
        """Let these arrays outlive the call. If calls wait, the arrays are complete on return."""
        if self.waits:
            self.synchronize()
        for array in results:
            if array is not None:
                array.storage.keep()

    def keep_alive(self, array: DeviceArray) -> DeviceArray:
        """Keep an array alive until the end of the call, whatever becomes of other references."""
        self._alive.append(array)
        return array

    @property
    def stream(self) -> _acl.AnyStream:
        """Return the stream, for work that is put on it right away."""
        if self._stream is None:
            if self._handle is None:
                self._stream = _acl.Stream(self.device)
            else:
                self._stream = _acl.borrowed_stream(self._handle, self.device)
        self._pending = True
        return self._stream

    def synchronize(self) -> None:
        """Wait for everything that was put on the stream. The staging memory is free afterwards."""
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
        """Wait for everything on the stream, outside of a call, and take the blocks, idle by then, out of the pool."""
        with _acl.DeviceGuard(self.device):
            try:
                self.synchronize()
            except BaseException:
                self._recover()
                raise
        return self.pool.take_all()

    def _recover(self) -> None:
        """Wait for the stream after a failure, since nothing may be in flight when memory is released."""
        interrupt: BaseException | None = None
        failures = 0
        while failures < 2:
            try:
                self.synchronize()
                break
            except AscendGradError:
                failures += 1
            except BaseException as another:  # an interrupt is raised again when the device is done
                interrupt = another
        else:
            self._abandon_stream()
        if interrupt is not None:
            raise interrupt

    def _abandon_stream(self) -> None:
        """Destroy a stream that cannot be waited for, and free the memory that its work may use."""
        self._pending = False
        self._head = 0
        self.close()
        for allocation in self._take_allocations():
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
        self._released.empty()
        self.pool.empty()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # at the exit of Python the fields free their handles, as modules are gone
            self.close()

    # ---- memory

    def _take_allocations(self) -> list[Allocation]:
        """Take the memory that the call has allocated and not released yet."""
        references, self._allocations = self._allocations, []
        return [allocation for each in references if (allocation := each()) is not None]

    def _trim(self) -> None:
        """Free the blocks beyond the bounds of the pool, when they are idle."""
        if self.pool.is_full:
            if not self.waits:
                self.synchronize()
            self.pool.trim()

    def memory_of(self, array: DeviceArray) -> _acl.DeviceRange:
        """Return the memory of an array, for work on the stream."""
        allocation = array.storage.allocation
        assert allocation is not None, "an array without elements has no memory"
        if isinstance(allocation, Allocation):
            allocation.wait_unless_on(self)
        self._has_to_wait = self._has_to_wait or allocation.was_shared
        return allocation.memory()

    def allocate(self, nbytes: int) -> Allocation:
        """Allocate device memory until the end of the call."""
        size = pool.allocation_size(nbytes)
        for returned in pool.take_returned(self.device):
            self.pool.put(returned)
        block = self._released.take(size) or self.pool.take(size)
        if block is None and not self.waits:
            block = session_on(self.device).pool.take(size)  # blocks there are idle
        if block is None:
            try:
                block = _acl.DeviceMemory(size, self.device)
            except AscendGradError as error:
                if error.code not in OUT_OF_MEMORY:
                    raise
                # The device is asked once more when the pools of all threads are empty.
                self.synchronize()
                self._released.empty()
                _empty_pools(self.device)
                block = _acl.DeviceMemory(size, self.device)
        allocation = Allocation(block, None if self.waits else self, self._released)
        self._allocations.append(weakref.ref(allocation))
        return allocation

    def workspace(self, nbytes: int) -> _acl.DeviceRange:
        """Allocate the workspace of an operator. The next operators also use this memory."""
        return self.allocate(nbytes).memory()

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> DeviceArray:
        """Make an array on the device."""
        result = DeviceArray(shape, dtype, self.device, to_host)
        if result.size:
            result.storage.allocation = self.allocate(result.nbytes)
        return result

    def cleared(self, array: DeviceArray) -> DeviceArray:
        """Fill a new array with zeros, and return it."""
        if array.size:
            self.synchronize()  # the stream may still use the memory
            _acl.clear(self.memory_of(array), array.nbytes)
        return array


# ---- the sessions of a thread ----------------------------------------------------------------------------------------


def _check_usable() -> None:
    state = runtime.state()
    if not state.usable:
        kind = ProcessEndingError if state is runtime.ENDING else BackendUnavailableError
        raise kind(f"the device cannot be used: {state.reason}")


def session_on(device: int) -> Session:
    """Return this thread's session on a device. It ends with the thread, which drops it."""
    _check_usable()
    session: Session | None = thread.sessions.get(device)
    if session is None:
        session = thread.sessions[device] = Session(device)
        sessions.add(session)
    # A signal handler that makes a call during another call gets a separate session.
    return Session(device) if session.busy else session


def session_for_arrays(device: int) -> Session:
    """Return the session for calls on arrays of a device: on the caller's stream if there is one, else the thread's."""
    session: Session | None = thread.on_stream
    return session if session is not None and session.device == device and not session.busy else session_on(device)


@contextmanager
def on_stream(handle: int) -> Iterator[None]:
    """Put the work of calls on arrays of this thread's device on this stream, for a block."""
    device = chosen_device()
    session_on(device)  # raises if the device cannot be used
    session: Session | None = thread.streams.get((device, handle))
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
    """Wait for the work that calls of this thread have put on streams of the caller's."""
    error: BaseException | None = None
    for place, session in list(thread.streams.items()):
        if session.busy:  # a signal handler has interrupted a call
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
    """Free the blocks in the pools of all threads. Pools for pending streams of the caller's: this thread's only."""
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
    """Copy an array to the host."""
    result = np.empty(array.shape, array.dtype)
    if array.size:
        with session_on(array.device).call() as session:
            session.fetch([(array, result)])
    array.cache.clear_padding(result)
    return result


def release() -> None:
    """Free the resources of this thread, and the pools of all threads."""
    for session in [*thread.sessions.values(), *thread.streams.values()]:
        if not session.busy:
            session.close()
    _empty_pools()
    pool.free_returned()


@runtime.before_closing
def release_all() -> bool:
    """Free everything that no running call uses, at the end of the process, and return whether that was all."""
    everyones = members_of(sessions)
    for session in everyones:
        if not session.busy:
            session.close()
    if any(session.busy for session in everyones):
        return False
    with suppress(Exception):  # torch may have ended before the library
        pool.free_returned()
    allocations = members_of(pool.live)
    for allocation in allocations:
        if not allocation.is_shared:  # another library may use shared memory until the process ends
            allocation.free()
    return not any(allocation.is_shared for allocation in allocations)
