"""Zarr arrays as inputs: what is checked of them, and their parts."""

from __future__ import annotations

import hashlib
import os
import stat
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .apply_job import fit
from .errors import CommandError, listed, reason
from .new_zarr import RECORD
from .npy_files import meaning, require_regular_file
from .zarr_grid import Box, Grid

if TYPE_CHECKING:
    import zarr

#: The files that describe arrays and groups, in the third format and in the second one.
_METADATA = ("zarr.json", ".zarray", ".zgroup", ".zattrs")
#: Maximum bytes of a metadata file: much more than an array needs, and little memory.
_METADATA_LIMIT = 2**26


class ArrayFormat(NamedTuple):
    """Describe how the elements of an array are divided into files."""

    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    shards: tuple[int, ...] | None
    zarr_format: Literal[2, 3]
    dimension_names: tuple[str | None, ...] | None


class ZarrInput:
    """An array in a local directory.

    Parameters
    ----------
    path : str
        The directory.
    raw_dtype : dtype or None
        What elements of two raw bytes mean; None: they are refused.

    Raises
    ------
    CommandError
        If there is no array that can be used.
    """

    def __init__(self, path: str, raw_dtype: np.dtype | None):
        self.path, self.array = path, _open(path)
        try:
            self.dtype: np.dtype = self.array.dtype
            self.grid = Grid.of(self.array)
            #: Shape and dtype, for the checks of an operator.
            self.stand_in: NDArray = np.broadcast_to(np.zeros((), self.dtype), self.array.shape)
            _ = self.grid.counts
        except Exception as error:  # zarr accepts metadata with numbers that no array can have
            raise _unusable(path, error) from error
        self.dtype = meaning(self.dtype, raw_dtype, path)
        self.stand_in = self.stand_in.view(self.dtype)
        compressors = self.array.compressors if self.array.shards is None else ()
        self._is_blosc = type(compressors[-1]).__name__ in ("Blosc", "BloscCodec") if compressors else False
        self._is_result = os.path.lexists(os.path.join(path, RECORD))

    @property
    def format(self) -> ArrayFormat:
        """Return the array's format."""
        metadata = self.array.metadata
        names = getattr(metadata, "dimension_names", None)
        return ArrayFormat(self.array.shape, self.array.chunks, self.array.shards, metadata.zarr_format, names)

    def read(self, box: Box) -> NDArray:
        """Return the part that belongs to a box."""
        part = fit(self.array.shape, box)
        try:
            return np.asarray(self.array[(..., *part)]).view(self.dtype)
        except MemoryError:
            raise
        except Exception as error:  # decompressors may raise anything
            where = ", ".join(f"{axis.start}:{axis.stop}" for axis in part)
            raise CommandError(f"{self.path}: cannot be read at [{where}]: {reason(error)}") from error

    def states(self, box: Box) -> Iterator[tuple[str, int, int] | tuple[str]]:
        """Yield name, size and time of modification of each file that a part is in, and the name of an absent chunk.

        An absent chunk is one of fill values. It is refused where there are none, and in a result of this command, all
        chunks of which are written.
        """
        names = [name for name in _METADATA if os.path.lexists(os.path.join(self.path, name))]
        for name in (*names, *self.grid.keys(fit(self.array.shape, box))):
            path = os.path.join(self.path, name)
            try:
                status = os.stat(path)
            except FileNotFoundError:
                if self._is_result:
                    raise CommandError(
                        f"{self.path}: chunk {name} is missing, and ascend-grad has written all of them ({RECORD})"
                    ) from None
                if self.array.metadata.fill_value is None:
                    raise CommandError(f"{self.path}: chunk {name} is missing, and there is no fill value") from None
                yield (name,)
                continue
            if not stat.S_ISREG(status.st_mode):
                raise CommandError(f"{path}: not a regular file")
            if status.st_size == 0:  # zarr takes an empty shard for fill values
                raise CommandError(f"{path}: an empty file")
            if self._is_blosc and name not in _METADATA:
                _check_blosc(path, status.st_size)
            yield name, status.st_size, status.st_mtime_ns


def digest_of_states(inputs: Iterable[Iterable[tuple]]) -> str:
    """Return the digest of the states of the files of several inputs, which are in order."""
    digest = hashlib.blake2b(digest_size=32)
    for position, states in enumerate(inputs):
        for state in states:
            digest.update(f"{position} {state}\n".encode())
    return digest.hexdigest()


def is_zarr(path: str) -> bool:
    """Return whether a path names a Zarr array, or a group of them."""
    return any(os.path.lexists(os.path.join(path, name)) for name in _METADATA)


@contextmanager
def unstable_dtypes() -> Iterator[None]:
    """Ignore the warning that zarr's third format has no final name for raw elements: the user has chosen them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have a Zarr V3 specification")
        yield


def _open(path: str) -> zarr.Array:
    try:
        import zarr
    except ImportError as error:
        raise CommandError(f"{path}: needs zarr (pip install zarr): {error}") from error
    for name in _METADATA:
        file = os.path.join(path, name)
        if os.path.lexists(file):
            size = require_regular_file(file).st_size
            if size > _METADATA_LIMIT:
                raise CommandError(f"{file}: expected at most {_METADATA_LIMIT} bytes of metadata, got {size}")
    store = zarr.storage.LocalStore(path, read_only=True)
    try:
        with unstable_dtypes():
            node = zarr.open(store, mode="r")
            if isinstance(node, zarr.Array):
                return node
            members = node.members(max_depth=None)
            names = sorted(os.path.join(path, name) for name, member in members if isinstance(member, zarr.Array))
    except MemoryError:
        raise
    except Exception as error:  # zarr may raise anything for damaged metadata
        raise _unusable(path, error) from error
    arrays = f"name one of its arrays: {listed(names)}" if names else "without arrays"
    raise CommandError(f"{path}: expected a Zarr array, got a group; {arrays}")


def _check_blosc(path: str, size: int) -> None:
    """Raise `CommandError` if a chunk is shorter, or longer, than Blosc made it: decompressing reads behind its end."""
    with open(path, "rb") as file:
        written = int.from_bytes(file.read(16)[12:], "little")
    if written != size:
        raise CommandError(f"{path}: a damaged chunk, which had {written} bytes, and has {size}")


def _unusable(path: str, error: Exception) -> CommandError:
    return CommandError(f"{path}: not a Zarr array that can be used: {reason(error)}")
