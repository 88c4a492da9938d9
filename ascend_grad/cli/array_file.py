"""Arrays in files: their boxes are read into buffers and written from them; large boxes are mapped."""

from __future__ import annotations

import errno
import math
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .errors import CommandError, address_space, reading, writing

#: Bytes of the largest box that gets a buffer. A larger one is mapped: it takes address space for all of the file from
#: its first element to its last one, but no anonymous memory, as its pages are the file's.
BUFFER_BYTES = 2**26
#: Bytes of a file that are mapped at a time to copy a box that is apart in the file to or from a buffer.
WINDOW_BYTES = 2**24


class AddressSpaceError(CommandError):
    """A part of a file does not fit into the address space."""


class _Part(NamedTuple):
    """Describe a box of a file's array."""

    sides: list[range]
    #: The position of its first element in the file, in bytes.
    begin: int
    #: The bytes of the file from its first element to the end of its last one.
    span: int
    #: The bytes of its elements.
    size: int

    @property
    def lengths(self) -> list[int]:
        return [len(side) for side in self.sides]


class ArrayFile:
    """Hold an open file with an array.

    Parameters
    ----------
    path : str
        The file's name, for messages.
    descriptor : int
        The open file. Maps of it remain when it is closed.
    offset : int
        The position of the first element, in bytes.
    shape, dtype
        The array.
    fortran_order : bool
        Whether the first axis is the one of consecutive elements, and not the last.
    """

    def __init__(
        self, path: str, descriptor: int, offset: int, shape: tuple[int, ...], dtype: np.dtype, fortran_order: bool
    ):
        self._path, self._descriptor, self._offset = path, descriptor, offset
        self.shape, self.dtype = shape, dtype
        #: False where both orders are the same.
        self.fortran_order = fortran_order and 0 not in shape and sum(length > 1 for length in shape) > 1
        self.whole = tuple(slice(0, length) for length in shape)
        #: Shape and dtype, for the checks of an operator.
        self.placeholder: NDArray = np.broadcast_to(np.zeros((), dtype), shape)
        self._outwards = range(len(shape)) if self.fortran_order else range(len(shape) - 1, -1, -1)
        stride, strides = dtype.itemsize, [0] * len(shape)
        for axis in self._outwards:
            strides[axis] = stride
            stride *= shape[axis]
        self._strides = tuple(strides)
        self._memory = np.empty(0, np.uint8)

    def read(self, box: tuple[slice, ...]) -> NDArray:
        """Return the elements of a box: a copy, which is valid until the next call, or a read-only map if many."""
        part = self._part_of(box)
        if self.maps(box):
            return self._mapped(part, mmap.ACCESS_READ)
        buffer = self._buffer(part)
        if part.span > part.size:
            for window, inside in self._windows(part):
                buffer[inside] = self._mapped(window, mmap.ACCESS_READ)
            return buffer
        view, offset = self._memory.data[: part.size], part.begin
        with reading(self._path):
            while view:
                count = os.preadv(self._descriptor, [view], offset)
                if not count:
                    raise CommandError(f"{self._path}: was truncated meanwhile, to {offset} bytes or less")
                view, offset = view[count:], offset + count
        return buffer

    @contextmanager
    def written(self, box: tuple[slice, ...]) -> Iterator[NDArray]:
        """Give the block an array of undefined values to fill, which are the elements of a box at its end."""
        part = self._part_of(box)
        if self.maps(box):
            yield self._mapped(part, mmap.ACCESS_WRITE)
            return
        buffer = self._buffer(part)
        yield buffer
        if part.span > part.size:
            for window, inside in self._windows(part):
                self._mapped(window, mmap.ACCESS_WRITE)[...] = buffer[inside]
            return
        view, offset = self._memory.data[: part.size], part.begin
        with writing(self._path):
            while view:
                count = os.pwritev(self._descriptor, [view], offset)
                view, offset = view[count:], offset + count

    def maps(self, box: tuple[slice, ...]) -> bool:
        """Return whether a box is too large for a buffer."""
        return self._part_of(box).size > BUFFER_BYTES

    def _part_of(self, box: tuple[slice, ...]) -> _Part:
        return self._part([range(*side.indices(length)) for side, length in zip(box, self.shape)])

    def _part(self, sides: list[range]) -> _Part:
        begin = self._offset + sum(side.start * stride for side, stride in zip(sides, self._strides))
        size = math.prod(map(len, sides)) * self.dtype.itemsize
        last = sum((len(side) - 1) * stride for side, stride in zip(sides, self._strides))
        return _Part(sides, begin, last + self.dtype.itemsize if size else 0, size)

    def _buffer(self, part: _Part) -> NDArray:
        """Return an array for a box. All of them share their memory: new memory would take time for its pages."""
        if len(self._memory) < part.size:
            self._memory = np.empty(part.size, np.uint8)
        return np.ndarray(part.lengths, self.dtype, self._memory, order="F" if self.fortran_order else "C")

    def _windows(self, part: _Part) -> Iterator[tuple[_Part, tuple]]:
        """Yield boxes that cover a box, and their places in it: short parts of the file, or consecutive in it."""
        windows = [part]
        while windows:
            window = windows.pop()
            if window.span <= max(window.size, WINDOW_BYTES):
                places = (slice(w.start - p.start, w.stop - p.start) for w, p in zip(window.sides, part.sides))
                yield window, (..., *places)
                continue
            axis = next(axis for axis in reversed(self._outwards) if len(window.sides[axis]) > 1)
            side, step = window.sides[axis], max(1, WINDOW_BYTES // self._strides[axis])
            sides = [side[start : start + step] for start in range(0, len(side), step)]
            windows += [self._part([*window.sides[:axis], s, *window.sides[axis + 1 :]]) for s in reversed(sides)]

    def _mapped(self, part: _Part, access: int) -> NDArray:
        """Map the part of the file that a box is in."""
        before = part.begin % mmap.ALLOCATIONGRANULARITY
        try:
            memory = mmap.mmap(self._descriptor, before + part.span, access=access, offset=part.begin - before)
        except ValueError as error:  # raised for a file that is too short
            raise CommandError(f"{self._path}: was truncated meanwhile: {error}") from error
        except OSError as error:
            message = f"{self._path}: cannot map {part.span} bytes: {error.strerror}"
            if error.errno == errno.ENOMEM:
                raise AddressSpaceError(f"{message}{address_space()}") from error
            raise CommandError(message) from error
        return np.ndarray(part.lengths, self.dtype, memory, before, self._strides)
