"""Row-wise operators on Zarr arrays, a row of chunks at a time."""

from __future__ import annotations

import itertools
import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from ..arrays import BFLOAT16
from .apply_job import ZARR_METADATA, Job, cut, cut_index, storage_of
from .chunks import grid_boxes
from .errors import CommandError
from .new_directories import Piece, fill_directory
from .npy_files import RAW, MappedArray, meaning_of_raw, open_array, parse_source

if TYPE_CHECKING:
    import zarr


def run(job: Job) -> None:
    """Write a Zarr array with the chunks of the first input, and a line about it to stdout."""
    path = job.result_path()
    inputs = [_opened(job, source, path) for source in job.sources.values()]
    first = inputs[0]
    if not isinstance(first, _ZarrArray):
        source = next(iter(job.sources.values()))
        raise CommandError(f"{source}: expected a Zarr array, since another input is one, got a {storage_of(source)}")
    arrays = {name: each.stand_in() for name, each in zip(job.sources, inputs)}
    job.check_raw_dtype(array.dtype for array in arrays.values())
    call, backend = job.validated(arrays)
    (spec,) = call.specs
    assert spec is not None
    shape, dtype = spec.shape, job.out_dtype or spec.dtype

    grid = first.cells
    parts = {
        ", ".join(f"{part.start}:{part.stop}" for part in box): box
        for box in grid_boxes(shape, job.reduced_axis(call), grid)
    }
    function = job.function(backend)
    start = perf_counter()
    with job.bar(desc=job.operator.name, total=math.prod(shape) * dtype.itemsize) as progress:

        def prepare(directory: str) -> None:
            _create_like(first.array, directory, dtype)

        def compute(directory: str, name: str) -> None:
            box = parts[name]
            out = np.empty([part.stop - part.start for part in box], dtype)
            function(*(each.read(box) for each in inputs), out=out)
            _open(directory, "r+")[(..., *box)] = out.view(RAW) if dtype == BFLOAT16 else out
            progress.update(out.nbytes)

        pieces = {
            name: Piece(
                [file for each in inputs for file in each.files(box)],
                [first.array.metadata.encode_chunk_key(cell) for cell in _cells(box, grid)],
                math.prod(part.stop - part.start for part in box) * dtype.itemsize,
            )
            for name, box in parts.items()
        }
        description = job.description() | {"shape": shape, "cells": grid, "zarr": first.array.metadata.zarr_format}
        computed = fill_directory(path, description, pieces, prepare, compute, progress)
    print(
        f"{path}: {dtype} {shape}, {computed} of {len(parts)} parts computed and written in "
        f"{perf_counter() - start:.2f} s (backend {backend})"
    )


class _ZarrArray:
    """A Zarr array as an input."""

    def __init__(self, path: str, array: zarr.Array, raw_dtype: np.dtype | None):
        self.path, self.array = path, array
        self.dtype = array.dtype
        if self.dtype == RAW:
            self.dtype = meaning_of_raw(raw_dtype, path)
        #: The part of the array that is a file.
        self.cells: tuple[int, ...] = array.shards or array.chunks

    def stand_in(self) -> NDArray:
        """Shape and dtype, for the checks of an operator."""
        return np.broadcast_to(np.zeros((), self.dtype), self.array.shape)

    def read(self, box: tuple[slice, ...]) -> NDArray:
        """The part that belongs to a box."""
        return np.asarray(self.array[cut_index(self.array.shape, box)]).view(self.dtype)

    def files(self, box: tuple[slice, ...]) -> list[str]:
        """The files which that part is in."""
        whole = tuple(slice(0, 1) if length == 1 else part for length, part in zip(self.array.shape, box))
        keys = [self.array.metadata.encode_chunk_key(cell) for cell in _cells(whole, self.cells)]
        return [os.path.join(self.path, name) for name in (*ZARR_METADATA, *keys)]


class _File:
    """A single file as an input."""

    def __init__(self, path: str, mapped: MappedArray):
        self.path, self.array = path, mapped.array

    def stand_in(self) -> NDArray:
        return self.array

    def read(self, box: tuple[slice, ...]) -> NDArray:
        return cut(self.array, box)

    def files(self, box: tuple[slice, ...]) -> list[str]:
        return [self.path]


def _opened(job: Job, source: str, path: str) -> _ZarrArray | _File:
    storage = storage_of(source)
    if storage == "directory":
        raise CommandError(f"{source}: expected a Zarr array or a file, since another input is a Zarr array")
    if storage == "Zarr array":
        return _ZarrArray(source, _open(source, "r"), job.raw_dtype)
    temporary = job.temporary or os.path.dirname(os.path.realpath(path))
    parsed = parse_source(source)
    return _File(parsed.path, open_array(parsed, job.raw_dtype, temporary, job.bar))


def _open(path: str, mode: Literal["r", "r+"]) -> zarr.Array:
    try:
        import zarr
    except ImportError as error:
        raise CommandError(f"{path}: needs zarr (pip install 'ascend-grad[zarr]'): {error}") from error
    try:
        with _unstable_dtypes():
            return zarr.open_array(path, mode=mode)
    except OSError:
        raise
    except Exception as error:  # whatever zarr raises of a group, and of damaged metadata
        raise CommandError(f"{path}: not a Zarr array that can be used: {error}") from error


def _create_like(model: zarr.Array, directory: str, dtype: np.dtype) -> None:
    """A new Zarr array of the shape, the chunks and the format of another one."""
    import zarr

    with _unstable_dtypes():
        zarr.create_array(
            directory,
            shape=model.shape,
            dtype=RAW if dtype == BFLOAT16 else dtype,
            chunks=model.chunks,
            shards=model.shards,
            zarr_format=model.metadata.zarr_format,
            dimension_names=getattr(model.metadata, "dimension_names", None),
        )


@contextmanager
def _unstable_dtypes() -> Iterator[None]:
    """Without the warning that zarr's third format has no final name for raw elements: the user has chosen them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have a Zarr V3 specification")
        yield


def _cells(box: tuple[slice, ...], grid: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The cells of a grid that a box touches."""
    return itertools.product(*(range(part.start // n, -(-part.stop // n)) for part, n in zip(box, grid)))
