"""Zarr arrays as inputs: what is checked of them, and their blocks for dask."""

from __future__ import annotations

import hashlib
import importlib
import itertools
import os
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .errors import CommandError, listed, reason
from .npy_files import meaning, require_regular_file

if TYPE_CHECKING:
    import dask.array as da
    import zarr

#: The attribute of a result that describes its computation and its inputs, as JSON.
ATTRIBUTE = "ascend_grad"
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
    """An array in a local directory, which raises `CommandError` if it cannot be used.

    `raw_dtype` is as in `open_array`.
    """

    def __init__(self, path: str, raw_dtype: np.dtype | None):
        self.path, self.array = path, open_zarr(path)
        try:
            self.shape: tuple[int, ...] = self.array.shape
            self.dtype: np.dtype = self.array.dtype
            self.ndim = len(self.shape)
            #: The lengths of a file: of a shard, or of a chunk.
            self.lengths: tuple[int, ...] = self.array.shards or self.array.chunks
            #: Shape and dtype, for the checks of an operator.
            self.placeholder: NDArray = np.broadcast_to(np.zeros((), self.dtype), self.shape)
            _ = [length // n for length, n in zip(self.shape, self.lengths)]
        except Exception as error:  # zarr accepts metadata with numbers that no array can have
            raise _unusable(path, error) from error
        self.dtype = meaning(self.dtype, raw_dtype, path)
        self.placeholder = self.placeholder.view(self.dtype)

    @property
    def format(self) -> ArrayFormat:
        """Return the array's format."""
        metadata = self.array.metadata
        names = getattr(metadata, "dimension_names", None)
        return ArrayFormat(self.shape, self.array.chunks, self.array.shards, metadata.zarr_format, names)

    def __getitem__(self, box: tuple[slice, ...]) -> NDArray:
        try:
            return np.asarray(self.array[(..., *box)]).view(self.dtype)
        except MemoryError:
            raise
        except Exception as error:  # decompressors may raise anything
            where = ", ".join(f"{axis.start}:{axis.stop}" for axis in box)
            raise CommandError(f"{self.path}: cannot be read at [{where}]: {reason(error)}") from error

    def blocks(self, lengths: tuple[int, ...]) -> da.Array:
        """Return the array as one of dask, in blocks of these lengths. Each of them is read when it is needed."""
        from dask.array import from_array

        chunks = tuple(min(n, max(length, 1)) for n, length in zip(lengths, self.shape))
        return from_array(self, chunks, name=False, meta=np.empty((0,) * self.ndim, self.dtype))

    def state(self) -> str:
        """Return a digest of name, size and time of modification of each file, after checks of all of them.

        A chunk that is not there is one of fill values. It is refused where there are none, and in a result of this
        command, all chunks of which are written.
        """
        digest = hashlib.blake2b(digest_size=32)
        compressors: tuple = self.array.compressors if self.array.shards is None else ()
        is_blosc = bool(compressors) and type(compressors[-1]).__name__ in ("Blosc", "BloscCodec")
        metadata = [name for name in _METADATA if os.path.lexists(os.path.join(self.path, name))]
        box = tuple(slice(0, length) for length in self.shape)
        for name in (*metadata, *chunk_keys(self.array, box)):
            path = os.path.join(self.path, name)
            try:
                status = os.stat(path)
            except FileNotFoundError:
                if ATTRIBUTE in self.array.attrs:
                    why = "ascend-grad had written all chunks"
                    raise CommandError(f"{self.path}: chunk {name} is missing, and {why}") from None
                if self.array.metadata.fill_value is None:
                    raise CommandError(f"{self.path}: chunk {name} is missing, and there is no fill value") from None
                continue
            if not stat.S_ISREG(status.st_mode):
                raise CommandError(f"{path}: expected a regular file")
            if status.st_size == 0:  # zarr takes an empty shard for fill values
                raise CommandError(f"{path}: the file is empty")
            if is_blosc and name not in _METADATA:
                _check_blosc(path, status.st_size)
            digest.update(f"{name} {status.st_size} {status.st_mtime_ns}\n".encode())
        return digest.hexdigest()


def chunk_keys(array: zarr.Array, box: tuple[slice, ...]) -> Iterator[str]:
    """Yield the keys of the files that a box touches, which are their paths below the array."""
    lengths = array.shards or array.chunks
    cells = (range(part.start // n, -(-part.stop // n)) for part, n in zip(box, lengths))
    return map(array.metadata.encode_chunk_key, itertools.product(*cells))


def is_zarr(path: str) -> bool:
    """Return whether a path names a Zarr array, or a group of them."""
    return any(os.path.lexists(os.path.join(path, name)) for name in _METADATA)


def require_packages(path: str) -> None:
    """Raise `CommandError` if a package that Zarr arrays need is not installed."""
    try:
        for name in ("zarr", "dask.array"):
            importlib.import_module(name)
    except ImportError as error:
        raise CommandError(f"{path}: needs zarr and dask (pip install zarr 'dask[array]'): {error}") from error


@contextmanager
def unstable_dtypes() -> Iterator[None]:
    """Ignore the warning that zarr's third format has no final name for raw elements: the user has chosen them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have a Zarr V3 specification")
        yield


def open_zarr(path: str, mode: Literal["r", "r+"] = "r") -> zarr.Array:
    """Open an array, or raise `CommandError` if there is none. zarr.open would wait for a pipe, or fill the memory."""
    import zarr

    for name in _METADATA:
        file = os.path.join(path, name)
        if os.path.lexists(file):
            size = require_regular_file(file).st_size
            if size > _METADATA_LIMIT:
                raise CommandError(f"{file}: expected at most {_METADATA_LIMIT} bytes of metadata, got {size}")
    store = zarr.storage.LocalStore(path, read_only=mode == "r")
    try:
        with unstable_dtypes():
            node = zarr.open(store, mode=mode)
            if isinstance(node, zarr.Array):
                return node
            members = node.members(max_depth=None)
            names = sorted(os.path.join(path, name) for name, member in members if isinstance(member, zarr.Array))
    except MemoryError:
        raise
    except Exception as error:  # zarr may raise anything for damaged metadata
        raise _unusable(path, error) from error
    arrays = f"name one of its arrays: {listed(names)}" if names else "it has no arrays"
    raise CommandError(f"{path}: expected a Zarr array, got a group; {arrays}")


def _check_blosc(path: str, size: int) -> None:
    """Raise `CommandError` if a chunk is shorter, or longer, than Blosc made it: decompressing reads behind its end."""
    with open(path, "rb") as file:
        written = int.from_bytes(file.read(16)[12:], "little")
    if written != size:
        raise CommandError(f"{path}: a damaged chunk: expected {written} bytes, got {size}")


def _unusable(path: str, error: Exception) -> CommandError:
    return CommandError(f"{path}: expected a Zarr array of numbers: {reason(error)}")
