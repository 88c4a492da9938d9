"""Zarr arrays as results: where they go, their chunks and files, and the check of one that is complete."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..arrays import BFLOAT16
from .errors import CommandError, reason
from .new_zarr import REPLACE_ADVICE, Layout, written_array
from .npy_files import RAW
from .zarr_grid import Box, Grid
from .zarr_inputs import ArrayFormat, unstable_dtypes


class Part(NamedTuple):
    """Name a box of a result, which is computed at a time."""

    number: int
    box: Box
    #: The digest of the state of the files that it is computed from.
    inputs: str

    @property
    def lengths(self) -> list[int]:
        return [side.stop - side.start for side in self.box]


class Encoder:
    """Encode the parts of a new Zarr array, and keep none of them."""

    def __init__(self, path: str, format: ArrayFormat, dtype: np.dtype):
        import zarr

        self._path = path
        self._files: dict = {}
        self._stored = RAW if dtype == BFLOAT16 else dtype
        with unstable_dtypes(), self._encoding():
            self._array = zarr.create_array(
                zarr.storage.MemoryStore(self._files),
                dtype=self._stored,
                # All chunks are written, so that one that is missing was lost.
                config={"write_empty_chunks": True},
                **format._asdict(),
            )
        self.metadata = {name: content.to_bytes() for name, content in self._files.items()}
        self.grid = Grid.of(self._array)

    def encode(self, box: Box, values: NDArray) -> dict[str, bytes]:
        """Return the chunks of a part, by their keys."""
        with self._encoding():
            self._array[(..., *box)] = values.view(self._stored)
        return {key: self._files.pop(key).to_bytes() for key in self.grid.keys(box)}

    @contextmanager
    def _encoding(self) -> Iterator[None]:
        try:
            yield
        except MemoryError:
            raise
        except Exception as error:  # such as a chunk that is larger than a compressor takes
            raise CommandError(f"{self._path}: cannot be encoded as the first input is: {reason(error)}") from error


def checked_zarr_target(path: str, sources: list[str]) -> str:
    """Return where a result goes; links are followed to its directory, and by themselves to what is there."""
    if path.endswith(".npy"):
        raise CommandError(f"{path}: ends in .npy, but the result of Zarr arrays is a Zarr array")
    target = os.path.realpath(path)
    if os.path.islink(path.rstrip("/")) and not os.path.lexists(target):
        raise CommandError(f"{path}: is a link to nothing")
    parent = os.path.dirname(target)
    if not os.path.isdir(parent):
        raise CommandError(f"{path}: there is no directory {parent}")
    for source in sources:
        folder = os.path.realpath(source)
        if os.path.commonpath([parent, folder]) == folder:
            raise CommandError(f"{path}: lies in the input {source}; inputs are not changed")
    return target


def check_complete(path: str, target: str, layout: Layout, parts: Iterable[Part]) -> None:
    """Raise `CommandError` unless the result is there, and is what was written from these inputs."""
    array = written_array(path, target, layout)
    for part in parts:
        why = array.why_unfinished(part.number, part.inputs, layout.grid.keys(part.box))
        if why is not None:
            where = ", ".join(f"{side.start}:{side.stop}" for side in part.box)
            raise CommandError(f"{path}: is there already, and [{where}] {why}; {REPLACE_ADVICE}")
