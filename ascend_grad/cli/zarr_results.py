"""Zarr arrays as results, which dask computes and writes block by block, in a directory where a later run goes on.

The hidden directory ``.NAME.ascend-grad-part`` is next to the result and holds the array, which gets its name when all
of its chunks are there. An attribute of the array says what is computed, and from what. A block is finished if all of
its chunks are there: zarr gives a chunk its name when it is written, and chunks of fill values are also written.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import dask.array as da
import numpy as np
import zarr
from dask.base import compute_as_if_collection
from dask.highlevelgraph import HighLevelGraph
from numpy.typing import NDArray
from tqdm.dask import TqdmCallback

from ..arrays import BFLOAT16
from .errors import CommandError, reason, writing
from .npy_files import RAW, sync_directory
from .zarr_inputs import ATTRIBUTE, ArrayFormat, chunk_keys, is_zarr, open_zarr, unstable_dtypes

if TYPE_CHECKING:
    from tqdm import tqdm


class Result:
    """A new Zarr array.

    Parameters
    ----------
    path : str
        Its name.
    sources : sequence of str
        The inputs, which are not changed.
    values : dask.array.Array
        Its values, in blocks of one or more whole files of the array.
    format : ArrayFormat
        How it is divided into files.
    description : dict
        What decides on the values, as JSON takes it.
    """

    def __init__(
        self, path: str, sources: Sequence[str], values: da.Array, format: ArrayFormat, description: dict[str, Any]
    ):
        self.path, self.values = path, values
        self.target = _checked_target(path, sources)
        self._format, self._description = format, description
        self._stored = RAW if values.dtype == BFLOAT16 else values.dtype
        parent, name = os.path.split(self.target)
        self._outer = os.path.join(parent, f".{name}.ascend-grad-part")
        # A level more than is needed: in a Zarr group, an array that is not complete is no member of the group.
        self._inner = os.path.join(self._outer, name)
        self._array: zarr.Array = None

    def is_complete(self) -> bool:
        """Return whether the result is there already; raise `CommandError` if something else has its name."""
        if not os.path.lexists(self.target):
            return False
        try:
            self._array = open_zarr(self.target)
        except CommandError:
            self._array = None
        if self._array is None or ATTRIBUTE not in self._array.attrs:
            raise CommandError(f"{self.path}: exists, and was not written by this command")
        advice = "name another result, or remove this one"
        self._check_description(self.path, advice)
        if self.unfinished():
            raise CommandError(f"{self.path}: exists, and lacks a chunk; {advice}")
        return True

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Open the array that is not complete, and give it its name at the end of the block.

        If the block fails, what was finished remains in the hidden directory, and nothing if nothing was.
        """
        with _locked(self.path, self._outer, self._inner):
            if os.path.lexists(self.target):
                raise CommandError(f"{self.path}: another run has written it")
            self._open()
            try:
                yield
                with writing(self.path):
                    _sync(self._inner)
                    if os.path.lexists(self.target):  # renaming would replace an empty directory
                        raise CommandError(f"{self.path}: was created by another process, and is not replaced")
                    os.rename(self._inner, self.target)
            except BaseException:
                if len(self.unfinished()) == self.values.npartitions:
                    shutil.rmtree(self._inner)
                raise
        sync_directory(os.path.dirname(self.target))

    def unfinished(self) -> list[tuple[int, ...]]:
        """Return the indices of the blocks that lack a chunk."""
        return [
            index
            for index in np.ndindex(self.values.numblocks)
            if not all(map(self._has, chunk_keys(self._array, self._box(index))))
        ]

    def written(self) -> da.Array:
        """Return a dask array. Computing one of its blocks writes the block of the result with the same index."""
        empty = np.empty((0,) * self.values.ndim)
        return self.values.map_blocks(self._write, name=f"write-{self.target}", dtype=empty.dtype, meta=empty)

    def _write(self, block: NDArray, block_id: tuple[int, ...]) -> NDArray:
        with self._encoding():
            self._array[(..., *self._box(block_id))] = np.asarray(block).view(self._stored)
        return np.empty((0,) * self.values.ndim)

    def _open(self) -> None:
        if is_zarr(self._inner):
            with _all_chunks():
                self._array = open_zarr(self._inner, "r+")
            self._check_description(self._inner, f"remove {self._outer} to start again")
            return
        with self._encoding(), _all_chunks():
            self._array = zarr.create_array(
                zarr.storage.LocalStore(self._inner),
                dtype=self._stored,
                attributes={ATTRIBUTE: json.dumps(self._description)},
                overwrite=True,
                **self._format._asdict(),
            )

    def _check_description(self, where: str, advice: str) -> None:
        """Raise `CommandError` if an array was computed from something else."""
        try:
            before = json.loads(self._array.attrs[ATTRIBUTE])
            differing = [name for name, value in self._description.items() if _differ(before.get(name), value)]
        except Exception as error:
            raise CommandError(f"{where}: a damaged attribute {ATTRIBUTE}; {advice}") from error
        if "state" in differing[:1]:
            raise CommandError(f"{where}: was started with inputs that have changed since; {advice}")
        for name in differing:
            old, new = json.dumps(before.get(name)), json.dumps(self._description[name])
            raise CommandError(f"{where}: was started with {name} {old}, not {new}; {advice}")

    def _box(self, index: tuple[int, ...]) -> tuple[slice, ...]:
        """Return the part of the result that a block is."""
        sides = zip(index, self.values.chunksize, self.values.shape)
        return tuple(slice(i * n, min((i + 1) * n, length)) for i, n, length in sides)

    def _has(self, key: str) -> bool:
        """Return whether a chunk is there. A file that is empty is what a crash of the machine may leave."""
        try:
            return os.stat(os.path.join(self._array.store.root, key)).st_size > 0
        except OSError:
            return False

    @contextmanager
    def _encoding(self) -> Iterator[None]:
        try:
            with writing(self.path):
                yield
        except (MemoryError, CommandError):
            raise
        except Exception as error:  # such as a chunk that is larger than a compressor takes
            raise CommandError(f"{self.path}: cannot be encoded like the first input: {reason(error)}") from error


def compute(results: Sequence[Result], workers: int, bar: Callable[..., tqdm]) -> list[int]:
    """Compute and write results that are not there yet, and return how many blocks of each were computed.

    Parameters
    ----------
    results : sequence of Result
    workers : int
        How many blocks are computed at a time.
    bar : callable
        Makes the progress bar.

    Raises
    ------
    CommandError
        If another run is at work on a result or began it from something else, or something cannot be read or written.
    """
    new = [result for result in results if not result.is_complete()]
    unfinished: dict[Result, list[tuple[int, ...]]] = {result: [] for result in results}
    with ExitStack() as stack:
        for result in new:
            stack.enter_context(result.opened())
            unfinished[result] = result.unfinished()
        arrays = [result.written() for result in new]
        keys = [(array.name, *index) for result, array in zip(new, arrays) for index in unfinished[result]]
        if keys:
            graph = HighLevelGraph.merge(*(array.dask for array in arrays))
            stack.enter_context(TqdmCallback(tqdm_class=partial(bar, unit=" tasks", unit_scale=False)))
            # At the end, the pool waits for tasks that are at work, also where the computation is interrupted.
            pool = stack.enter_context(ThreadPoolExecutor(workers))
            compute_as_if_collection(da.Array, graph, keys, scheduler="threads", pool=pool)
    return [len(unfinished[result]) for result in results]


@contextmanager
def _all_chunks() -> Iterator[None]:
    """Let arrays that are opened in the block write all chunks, so that one that is missing was not written."""
    with zarr.config.set({"array.write_empty_chunks": True}), unstable_dtypes():
        yield


def _differ(before: Any, value: Any) -> bool:
    return json.dumps(before) != json.dumps(value)


def _checked_target(path: str, sources: Sequence[str]) -> str:
    """Return where a result goes; links are followed to its directory, and by themselves to what is there."""
    if path.endswith(".npy"):
        raise CommandError(f"{path}: ends in .npy, but the result of Zarr arrays is a Zarr array")
    target = os.path.realpath(path)
    if os.path.islink(path.rstrip("/")) and not os.path.lexists(target):
        raise CommandError(f"{path}: is a broken link")
    parent = os.path.dirname(target)
    if not os.path.isdir(parent):
        raise CommandError(f"{path}: there is no directory {parent}")
    for source in sources:
        folder = os.path.realpath(source)
        if os.path.commonpath([parent, folder]) == folder:
            raise CommandError(f"{path}: is inside the input {source}; inputs are not changed")
    return target


@contextmanager
def _locked(path: str, outer: str, inner: str) -> Iterator[None]:
    """Make the hidden directory, or take the one that is there, unless another run is at work in it."""
    with ExitStack() as stack:
        with writing(path):
            with suppress(FileExistsError):
                os.mkdir(outer, 0o700)  # no other user can write there
            status = os.lstat(outer)
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise CommandError(
                    f"{outer}: expected a directory that only this user can access; remove it to start again"
                )
            file = stack.enter_context(open(os.path.join(outer, "lock"), "ab"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CommandError(f"{path}: another run is writing it") from None
            except OSError:  # such as on a file system without locks
                _clean(outer, inner)
                raise
        try:
            yield
        finally:
            _clean(outer, inner)


def _clean(outer: str, inner: str) -> None:
    """Remove the hidden directory if no array is in it."""
    if not is_zarr(inner):
        shutil.rmtree(outer)


def _sync(folder: str) -> None:
    """Write an array to the disk, without files of chunks that a killed run began."""
    for directory, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(directory, name)
            if name.endswith(".partial"):
                os.unlink(path)
                continue
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_directory(directory)
