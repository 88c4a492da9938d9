"""Copies of arrays between the host and a device, and within the device.

Copies pass through page-locked memory in chunks: the host fills one chunk while earlier ones are in flight, and empties
one half while the other is filled.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ... import _acl, arrays
from .array import DeviceArray
from .queue import Queue

#: Page-locked bytes of one thread, and the largest chunk that is copied at once.
STAGING_BYTES = 16 << 20
CHUNK_BYTES = 1 << 20


def chunks(array: NDArray, itemsize: int) -> Iterator[NDArray]:
    """Iterate over the array in views of at most `CHUNK_BYTES` (of ``itemsize`` each), in C order."""
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
    """Iterate over `chunks` of these rows, None for all; no copy is larger than one chunk, or one row."""
    if rows is None:
        yield from chunks(array, itemsize)
        return
    row_bytes = max(array.size // max(array.shape[0], 1) * itemsize, 1)
    step = max(CHUNK_BYTES // row_bytes, 1)
    for begin in range(0, rows.size, step):
        yield from chunks(array[rows[begin : begin + step]], itemsize)


def runs(rows: NDArray) -> Iterator[tuple[int, int, int]]:
    """Iterate over runs of neighbours in ascending row numbers: position in ``rows``, first row, number of rows."""
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    begins = [0, *breaks.tolist()]
    for begin, end in zip(begins, [*begins[1:], rows.size]):
        yield begin, int(rows[begin]), end - begin


class _PendingCopy(NamedTuple):
    """A chunk of a result in flight to the host: its place in the staging memory, and its target."""

    offset: int
    source: DeviceArray
    source_offset: int
    target: NDArray


class Transfers(Queue):
    """Copies on the stream of a session, which says where memory comes from and when the stream is done."""

    def __init__(self, device: int):
        self.device = device
        self._staging: _acl.HostMemory | None = None
        self._bytes: NDArray = np.empty(0, np.uint8)
        self._head = 0  # the first byte of the staging memory that no copy in flight uses

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for everything that was put on the stream."""

    @abstractmethod
    def keep(self, *results: DeviceArray | None) -> None:
        """Let these arrays outlive the call."""

    @abstractmethod
    def keep_alive(self, array: DeviceArray) -> DeviceArray:
        """Keep an array alive until the end of the call, whatever becomes of other references."""

    @abstractmethod
    def cleared(self, array: DeviceArray) -> DeviceArray:
        """Fill a new array with zeros, and return it."""

    def free_staging(self) -> None:
        """Let go of the staging memory, when no copy is in flight."""
        self._head = 0
        self._bytes = np.empty(0, np.uint8)
        self._staging = None

    def put(self, array: Any, dtype: np.dtype | None = None, rows: NDArray | None = None) -> DeviceArray:
        """Copy an array of the host, or rows of it, to the device, in this dtype; arrays of the device stay there."""
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
        """Return the array, or a copy on the device whose elements lie next to one another."""
        if array.storage.is_contiguous:
            return array
        return self.keep_alive(array.storage.contiguous_copy())

    def copied(self, array: DeviceArray) -> DeviceArray:
        """Copy an array within the device."""
        result = self.empty(array.shape, array.dtype)
        if array.size:
            array = self.contiguous(array)
            _acl.copy_within(
                self.memory_of(result), 0, self.memory_of(array), array.first_byte, array.nbytes, self.stream
            )
        return result

    def permuted(self, array: DeviceArray, axes: tuple[int, ...]) -> DeviceArray:
        result = self.empty(tuple(array.shape[axis] for axis in axes), array.dtype)
        self.launch("inplace_copy", result, array.transposed(axes))
        return result

    def reshaped(self, array: DeviceArray, shape: tuple[int, ...]) -> DeviceArray:
        return self.contiguous(array).reshaped(shape)

    def gathered(self, array: DeviceArray, rows: NDArray) -> DeviceArray:
        """Copy these rows (ascending) of an array on the device next to one another."""
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
        """Make an array of ``count`` rows that has the rows of an array in these places, and zeros elsewhere."""
        result = self.cleared(self.empty((count, *array.shape[1:]), array.dtype))
        row_bytes = array.nbytes // max(array.shape[0], 1)
        if array.size:
            source, target = self.memory_of(array), self.memory_of(result)
            for position, row, length in runs(rows):
                _acl.copy_within(target, row * row_bytes, source, position * row_bytes, length * row_bytes, self.stream)
        return result

    def values(self, array: NDArray | DeviceArray) -> NDArray:
        """Return the values of a small array on the host, copied back at most once."""
        if not isinstance(array, DeviceArray):
            return array
        if array.cache.values is not None:
            return array.cache.values
        result = np.empty(array.shape, array.dtype)
        self.fetch([(array, result)])
        array.remember(result)
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
            self._copy_from_staging(ready)  # the chunks of this window arrive meanwhile
            self.synchronize()
            ready = window
        self._copy_from_staging(ready)

    def _windows(self, pairs: Iterable[tuple[DeviceArray, NDArray]]) -> Iterator[list[_PendingCopy]]:
        """Iterate over groups of chunks that fill one half of the staging memory, then the other."""
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
        """Copy chunks that have arrived in the staging memory to their targets."""
        with np.errstate(all="ignore"):
            for arrival in arrivals:
                values = self._view(arrival.offset, arrival.target.shape, arrival.source.dtype)
                np.copyto(arrival.target, values, casting="unsafe")

    def _reserve(self) -> None:
        """Allocate the staging memory, unless there is some."""
        if self._staging is None:
            self._staging = _acl.HostMemory(STAGING_BYTES, self.device)
            self._bytes = np.frombuffer(memoryview(self._staging), np.uint8)

    def _reserve_staging(self, nbytes: int) -> int:
        """Return the staging memory's next free offset, waiting for earlier copies if it is full."""
        self._reserve()
        if self._head + nbytes > self._bytes.size:
            self.synchronize()
        begin = self._head
        self._head += -(-nbytes // 64) * 64
        return begin

    def _view(self, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> NDArray:
        """Return a part of the staging memory as an array."""
        count = int(np.prod(shape, dtype=np.int64))
        return self._bytes[offset : offset + count * dtype.itemsize].view(dtype).reshape(shape)
