"""One thread's work on one device: a stream, a pool of device memory, page-locked staging, copies.

Calls end with their stream synchronised, so memory that is in a pool, and every array on the device, is idle: it may be
used, or freed, from any thread. Calls on a stream of the caller's (`on_stream`) are the exception: they do not wait.
Their session has a pool of its own, of memory that may be used in the order of that stream. Whatever else uses an
array of theirs waits for the stream first (`Allocation.wait_unless_on`).

Copies pass through page-locked memory in chunks: the host fills one chunk while earlier ones are in flight, and empties
one half while the other is filled.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ... import _acl, arrays
from ...errors import STATUS_CODES, AscendGradError, BackendUnavailableError
from . import runtime
from .array import DeviceArray

#: Bytes that the pool of one thread keeps for later calls.
POOL_BYTES = 1 << 30
POOL_BLOCKS = 64
#: Page-locked bytes of one thread, and the largest chunk that is copied at once.
STAGING_BYTES = 16 << 20
CHUNK_BYTES = 1 << 20

#: Codes of a device whose memory is full.
OUT_OF_MEMORY = (STATUS_CODES["ACL_ERROR_RT_MEMORY_ALLOCATION"], STATUS_CODES["ACL_ERROR_RT_DEVICE_OOM"])


# ---- memory ----------------------------------------------------------------------------------------------------------


def _allocation_size(nbytes: int) -> int:
    """Bytes to ask the device for. Its kernels read and write 32 bytes at a time."""
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
        """The smallest block of at least this size, unless most of it would be wasted."""
        while fitting := [block for block in list(self._blocks) if size <= block.size <= 2 * size]:
            best = min(fitting, key=lambda block: block.size)
            with suppress(ValueError):  # another thread was faster
                self._blocks.remove(best)
                return best
        return None

    def put(self, block: _acl.DeviceMemory) -> None:
        self._blocks.append(block)

    @property
    def is_full(self) -> bool:
        """Whether there is more than the pool's bounds allow."""
        return len(self._blocks) > POOL_BLOCKS or sum(block.size for block in list(self._blocks)) > POOL_BYTES

    def take_all(self) -> list[_acl.DeviceMemory]:
        """All blocks, which are no longer in the pool."""
        taken = []
        with suppress(IndexError):
            while True:
                taken.append(self._blocks.pop(0))
        return taken

    def trim(self) -> None:
        """Free what is beyond the pool's bounds."""
        while self.is_full:
            with suppress(IndexError):
                self._blocks.pop(0).close()

    def empty(self) -> None:
        for block in self.take_all():
            block.close()


#: Held while a thread reads or changes which session an allocation is queued on.
_queues = threading.RLock()  # a signal handler, or the garbage collector, may release memory in the middle


class Allocation:
    """Device memory in use. Released, explicitly or by garbage collection, it goes to a pool."""

    __slots__ = ("__weakref__", "_queued_on", "_shares", "block", "kept")

    is_of_torch = False

    def __init__(self, block: _acl.DeviceMemory, queued_on: Session | None = None):
        self._shares: weakref.WeakSet[Share] | None = None
        self._queued_on = queued_on  # a session that does not wait, whose work may use the memory
        self.block: _acl.DeviceMemory | None = block
        self.kept = False  # whether it outlives the call that allocated it
        _live.add(self)

    def release(self) -> None:
        block, self.block = getattr(self, "block", None), None  # an interrupt may come before the first line above
        if block is None:
            return
        if self._shares is not None:  # this may be a thread of torch, which cannot wait for torch
            _returned.append(block)
            return
        if self._queued_on is not None and self._queued_on.is_pending:  # what comes next on that stream may use it
            self._queued_on.pool.put(block)
            return
        session = getattr(_thread, "sessions", {}).get(block.device)
        if session is None:  # this thread has no pool: back to the device
            block.close()
            return
        session.pool.put(block)
        if not session.busy:
            session.pool.trim()

    def memory(self) -> _acl.DeviceMemory:
        if self.block is None:
            raise BackendUnavailableError("this array's memory was freed when the process began to end")
        if self._shares is not None:
            runtime.wait_for_torch(self.block.device)
        return self.block

    def wait_unless_on(self, session: Session | None) -> None:
        """Wait for the work of a session that uses the memory, unless it is this one."""
        queued = None if session is None or session.waits else session
        while True:
            with _queues:
                other = self._queued_on
                if other is None or other is session:
                    self._queued_on = queued or other
                    return
            other.wait()  # until then, other threads find the session and wait, too
            with _queues:
                if self._queued_on is other:
                    self._queued_on = None

    @property
    def is_shared(self) -> bool:
        """Whether another library has it, too."""
        return bool(self._shares)

    @property
    def was_shared(self) -> bool:
        """Whether another library has it, or had it."""
        return self._shares is not None

    def share(self, array: DeviceArray) -> Share:
        """What another library keeps alive while it uses the memory of this array."""
        self.wait_unless_on(None)
        share = Share(array)
        self._shares = self._shares or weakref.WeakSet()
        self._shares.add(share)
        return share

    __del__ = release


class Share:
    """An array that another library has: it lives as long as this does."""

    __slots__ = ("__weakref__", "_array")

    def __init__(self, array: DeviceArray):
        self._array = array


# ---- layout of copies ------------------------------------------------------------------------------------------------


def chunks(array: NDArray, itemsize: int) -> Iterator[NDArray]:
    """The array in views of at most `CHUNK_BYTES` (of ``itemsize`` each), in C order."""
    array = np.asarray(array)  # rows of a numpy.matrix are matrices again
    if array.size * itemsize <= CHUNK_BYTES:
        yield array
        return
    if array.flags.c_contiguous:
        array = array.reshape(-1)
    row_bytes = array.size // array.shape[0] * itemsize
    if row_bytes > CHUNK_BYTES:
        for row in array:
            yield from chunks(row, itemsize)
        return
    step = CHUNK_BYTES // row_bytes
    for begin in range(0, array.shape[0], step):
        yield array[begin : begin + step]


def chunks_of_rows(array: NDArray, itemsize: int, rows: NDArray | None) -> Iterator[NDArray]:
    """`chunks` of these rows of the array, None for all; never a copy of more than one chunk, or one row."""
    if rows is None:
        yield from chunks(array, itemsize)
        return
    row_bytes = max(array.size // max(array.shape[0], 1) * itemsize, 1)
    step = max(CHUNK_BYTES // row_bytes, 1)
    for begin in range(0, rows.size, step):
        yield from chunks(array[rows[begin : begin + step]], itemsize)


def runs(rows: NDArray) -> Iterator[tuple[int, int, int]]:
    """Ascending row numbers as runs of neighbours: position of the first in ``rows``, its number, how many."""
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    begins = [0, *breaks.tolist()]
    for begin, end in zip(begins, [*begins[1:], rows.size]):
        yield begin, int(rows[begin]), end - begin


class _PendingCopy(NamedTuple):
    """A chunk of a result in flight to the host: where it is in the staging memory, and where it goes from there."""

    offset: int
    source: DeviceArray
    source_offset: int
    target: NDArray


# ---- sessions --------------------------------------------------------------------------------------------------------


class _Frame:
    """Lives as long as the call that made it, however that ends."""

    __slots__ = ("__weakref__",)


class Session:
    """What one thread holds on one device, or on a stream of the caller's there, whose address is given.

    Attributes
    ----------
    waits : bool
        Whether calls wait for their work. Those on a stream of the caller's do not: memory that is released goes to the
        session's pool, for work that comes later on the same stream.
    """

    def __init__(self, device: int, handle: int | None = None):
        self.device = device
        self.waits = handle is None
        self._handle = handle
        self.pool = Pool()
        self._frame: Any = None  # reference to the frame of the call that is running
        self._stream: _acl.AnyStream | None = None
        self._staging: _acl.HostMemory | None = None
        self._bytes: NDArray = np.empty(0, np.uint8)
        self._head = 0  # where the free part of the staging memory begins
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
            if array is not None and array._allocation is not None:
                array._allocation.kept = True

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
            if allocation.kept:
                continue
            block, allocation.block = allocation.block, None
            if block is not None:
                block.close()

    def close(self) -> None:
        """Free everything, when nothing is in flight."""
        with suppress(AscendGradError):
            self.wait()
        self._pending = False
        self._head = 0
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
        self._bytes = np.empty(0, np.uint8)
        self._staging = None
        self.pool.empty()

    __del__ = close

    # ---- memory

    def _trim(self) -> None:
        """Free what is beyond the bounds of the pool, when it is idle."""
        if self.pool.is_full:
            if not self.waits:
                self.synchronize()
            self.pool.trim()

    def memory_of(self, array: DeviceArray) -> _acl.DeviceRange:
        """The memory of an array, for work on the stream."""
        allocation = array._allocation
        assert allocation is not None, "an array without elements has no memory"
        if isinstance(allocation, Allocation):
            allocation.wait_unless_on(self)
        self._has_to_wait = self._has_to_wait or allocation.was_shared
        return allocation.memory()

    def allocate(self, nbytes: int) -> Allocation:
        """Device memory until the end of the call."""
        size = _allocation_size(nbytes)
        for returned in _take_returned(self.device):
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
            result._allocation = self.allocate(result.nbytes)
        return result

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype) -> DeviceArray:
        result = self.empty(shape, dtype)
        if result.size:
            if not self.waits:  # the memory may be in use
                self.synchronize()
            _acl.clear(self.memory_of(result), result.nbytes)
        return result

    # ---- copies

    def put(self, array: Any, dtype: np.dtype | None = None, rows: NDArray | None = None) -> DeviceArray:
        """An array of the host, or rows of it, on the device, in this dtype; arrays that are there stay there."""
        if isinstance(array, DeviceArray):
            return array if rows is None else self.gathered(array, rows)
        dtype = arrays.native(array.dtype) if dtype is None else dtype
        shape = array.shape if rows is None else (rows.size, *array.shape[1:])
        result = self.empty(shape, dtype)
        offset = 0
        if result.size:
            for chunk in chunks_of_rows(array, dtype.itemsize, rows):
                nbytes = chunk.size * dtype.itemsize
                begin = self._reserve_staging(nbytes)
                with np.errstate(all="ignore"):
                    np.copyto(self._view(begin, chunk.shape, dtype), chunk, casting="unsafe")
                assert self._staging is not None
                _acl.copy_in(self.memory_of(result), offset, self._staging, begin, nbytes, self.stream)
                offset += nbytes
        return result

    def contiguous(self, array: DeviceArray) -> DeviceArray:
        """The array, or a copy on the device whose elements lie next to one another."""
        if array.is_contiguous:
            return array
        assert not isinstance(array._allocation, Allocation | None), "what a session allocates is contiguous"
        return self.keep_alive(array._allocation.contiguous())

    def copied(self, array: DeviceArray) -> DeviceArray:
        """A copy of an array on the device."""
        result = self.empty(array.shape, array.dtype)
        if array.size:
            array = self.contiguous(array)
            _acl.copy_within(
                self.memory_of(result), 0, self.memory_of(array), array.first_byte, array.nbytes, self.stream
            )
        return result

    def gathered(self, array: DeviceArray, rows: NDArray) -> DeviceArray:
        """These rows (ascending) of an array on the device, next to one another."""
        result = self.empty((rows.size, *array.shape[1:]), array.dtype)
        row_bytes = array.nbytes // max(array.shape[0], 1)
        if result.size:
            array = self.contiguous(array)
            source, first, target = self.memory_of(array), array.first_byte, self.memory_of(result)
            for position, row, count in runs(rows):
                _acl.copy_within(
                    target, position * row_bytes, source, first + row * row_bytes, count * row_bytes, self.stream
                )
        return result

    def scattered(self, array: DeviceArray, rows: NDArray, count: int) -> DeviceArray:
        """An array of ``count`` rows, zeros, with the given ones in these places."""
        result = self.zeros((count, *array.shape[1:]), array.dtype)
        row_bytes = array.nbytes // max(array.shape[0], 1)
        if array.size:
            source, target = self.memory_of(array), self.memory_of(result)
            for position, row, length in runs(rows):
                _acl.copy_within(target, row * row_bytes, source, position * row_bytes, length * row_bytes, self.stream)
        return result

    def values(self, array: NDArray | DeviceArray) -> NDArray:
        """The values of a small array on the host, copied back at most once."""
        if not isinstance(array, DeviceArray):
            return array
        if array._host is not None:
            return array._host
        result = np.empty(array.shape, array.dtype)
        self.fetch([(array, result)])
        array.cache_host_values(result)
        return result

    def fetch(self, pairs: Iterable[tuple[DeviceArray, NDArray]]) -> None:
        """Copy arrays of the device into arrays of the host, of any layout and dtype."""
        ready: list[_PendingCopy] = []
        for window in self._windows(pairs):
            assert self._staging is not None
            for arrival in window:
                nbytes = arrival.target.size * arrival.source.dtype.itemsize
                _acl.copy_out(
                    self._staging,
                    arrival.offset,
                    self.memory_of(arrival.source),
                    arrival.source_offset,
                    nbytes,
                    self.stream,
                )
            self._copy_from_staging(ready)  # while the next ones arrive
            self.synchronize()
            ready = window
        self._copy_from_staging(ready)

    def _windows(self, pairs: Iterable[tuple[DeviceArray, NDArray]]) -> Iterator[list[_PendingCopy]]:
        """The chunks of all copies in groups that fill one half of the staging memory, then the other."""
        window: list[_PendingCopy] = []
        self._reserve()
        half = self._bytes.size // 2
        begin = used = 0
        for source, target in pairs:
            if not source.size:
                continue
            source = self.contiguous(source)
            offset = source.first_byte
            for chunk in chunks(target, source.dtype.itemsize):
                nbytes = chunk.size * source.dtype.itemsize
                if used + nbytes > half:
                    yield window
                    window, begin, used = [], half - begin, 0
                window.append(_PendingCopy(begin + used, source, offset, chunk))
                used += -(-nbytes // 64) * 64
                offset += nbytes
        if window:
            yield window

    def _copy_from_staging(self, arrivals: list[_PendingCopy]) -> None:
        with np.errstate(all="ignore"):
            for arrival in arrivals:
                values = self._view(arrival.offset, arrival.target.shape, arrival.source.dtype)
                np.copyto(arrival.target, values, casting="unsafe")

    def _reserve(self) -> None:
        if self._staging is None:
            self._staging = _acl.HostMemory(STAGING_BYTES, self.device)
            self._bytes = np.frombuffer(memoryview(self._staging), np.uint8)

    def _reserve_staging(self, nbytes: int) -> int:
        """Where the next chunk goes in the staging memory; waits for the earlier ones when it is full."""
        self._reserve()
        if self._head + nbytes > self._bytes.size:
            self.synchronize()
        begin = self._head
        self._head += -(-nbytes // 64) * 64
        return begin

    def _view(self, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> NDArray:
        """Staging memory as an array."""
        count = int(np.prod(shape, dtype=np.int64))
        return self._bytes[offset : offset + count * dtype.itemsize].view(dtype).reshape(shape)


# ---- threads ---------------------------------------------------------------------------------------------------------

_thread = threading.local()
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
_live: weakref.WeakSet[Allocation] = weakref.WeakSet()
#: Blocks that torch has given back. What it does with them may not be done yet.
_returned: list[_acl.DeviceMemory] = []

Member = TypeVar("Member")


def _snapshot(members: weakref.WeakSet[Member]) -> list[Member]:
    """The members of a set that other threads may change at the same time."""
    while True:
        with suppress(RuntimeError):
            return list(members)


def _take_returned(device: int) -> list[_acl.DeviceMemory]:
    """The blocks of a device that torch has given back, when it is done with them."""
    taken = []
    for block in list(_returned):
        with suppress(ValueError):  # another thread was faster
            if block.device == device:
                _returned.remove(block)
                taken.append(block)
    if taken:
        runtime.wait_for_torch(device)
    return taken


def chosen_device() -> int:
    """The device of this thread's calls: the one that was set, else the one that it is bound to, else the first."""
    device = getattr(_thread, "device", runtime.DEVICE)
    if device is not None:
        return device
    state = runtime.state()
    bound = _acl.bound_device() if state.usable else None
    return bound if bound is not None and bound < state.device_count else 0


def choose_device(device: int) -> None:
    _thread.device = device


@contextmanager
def device_chosen(device: int | None) -> Iterator[None]:
    """A block with this device as that of the thread's calls; None: with the one that it has."""
    outer = getattr(_thread, "device", runtime.DEVICE)
    if device is not None:
        _thread.device = device
    try:
        yield
    finally:
        _thread.device = outer


def session_on(device: int) -> Session:
    """This thread's session. It ends with the thread, which drops it."""
    state = runtime.state()
    if not state.usable:
        raise BackendUnavailableError(f"the device cannot be used: {state.reason}")
    sessions = _thread.__dict__.setdefault("sessions", {})
    session = sessions.get(device)
    if session is None:
        session = sessions[device] = Session(device)
        _sessions.add(session)
    # A signal handler may call in the middle of a call: it gets a session of its own, for that call.
    return Session(device) if session.busy else session


def session_for_arrays(device: int) -> Session:
    """The session for calls of this thread on arrays of a device: that of the caller's stream, if there is one."""
    session: Session | None = getattr(_thread, "on_stream", None)
    return session if session is not None and session.device == device and not session.busy else session_on(device)


def _streams() -> dict[tuple[int, int], Session]:
    """The sessions of this thread on streams of the caller's, by device and address."""
    return _thread.__dict__.setdefault("streams", {})


@contextmanager
def on_stream(handle: int) -> Iterator[None]:
    """Have calls on arrays of this thread's device put their work on this stream."""
    device = chosen_device()
    session_on(device)  # or what it raises
    session = _streams().get((device, handle))
    if session is None:
        session = _streams()[device, handle] = Session(device, handle)
        _sessions.add(session)
    outer = getattr(_thread, "on_stream", None)
    _thread.on_stream = session
    try:
        yield
    finally:
        _thread.on_stream = outer


def finish_streams() -> None:
    """Wait for what calls of this thread have put on streams of the caller's."""
    error: BaseException | None = None
    for place, session in list(_streams().items()):
        if session.busy:  # the call that a signal has interrupted
            continue
        try:
            blocks = session.finish()
        except BaseException as another:
            error = another
            blocks = []
        if session is not getattr(_thread, "on_stream", None):
            _streams().pop(place, None)
        pool = session_on(session.device).pool
        for block in blocks:
            pool.put(block)
        pool.trim()
    if error is not None:
        raise error


def _empty_pools(device: int | None = None) -> None:
    """Free what the pools of all threads hold; of those for streams of the caller's, this thread's."""
    mine = list(_streams().values())
    for session in _snapshot(_sessions):
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
    if array._bits is not None:
        arrays.clear_padding(result, array._bits)
    return result


def release() -> None:
    """Free what this thread holds, and the pools of all threads."""
    for session in [*_thread.__dict__.get("sessions", {}).values(), *_streams().values()]:
        if not session.busy:
            session.close()
    _empty_pools()
    _free_returned()


def _free_returned() -> None:
    for device in {block.device for block in list(_returned)}:
        for block in _take_returned(device):
            block.close()


@runtime.before_closing
def release_all() -> bool:
    """The process ends: free everything that no running call uses; whether that was all."""
    sessions = _snapshot(_sessions)
    for session in sessions:
        if not session.busy:
            session.close()
    if any(session.busy for session in sessions):
        return False
    with suppress(Exception):  # torch may have ended before
        _free_returned()
    allocations = _snapshot(_live)
    for allocation in allocations:
        if not allocation.is_shared:  # else another library may use it until the process ends
            block, allocation.block = allocation.block, None
            if block is not None:
                block.close()
    return not any(allocation.is_shared for allocation in allocations)
