"""Row-wise operators on Zarr arrays, a row of chunks at a time."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import contract
from ..arrays import BFLOAT16
from .apply_job import Job
from .errors import CommandError, reason
from .new_zarr import REPLACE_ADVICE, Layout, new_zarr, written_array
from .npy_files import RAW
from .zarr_grid import Box, Grid
from .zarr_inputs import ZarrInput, is_zarr, unstable_dtypes

if TYPE_CHECKING:
    import zarr


class _Part(NamedTuple):
    """Name a box of the result, which is computed at a time."""

    number: int
    box: Box
    #: The digest of the state of the files that it is computed from.
    inputs: str

    @property
    def lengths(self) -> list[int]:
        return [side.stop - side.start for side in self.box]


def run(job: Job) -> None:
    """Write a Zarr array with the chunks of the first input, and a line about it to stdout."""
    _check_sources(job)
    inputs = [ZarrInput(source, job.raw_dtype) for source in job.sources.values()]
    arrays = {name: each.stand_in for name, each in zip(job.sources, inputs)}
    job.check_raw_dtype(array.dtype for array in arrays.values())
    call, backend = job.validated(arrays)
    (spec,) = call.specs
    assert spec is not None
    shape, dtype = spec.shape, job.out_dtype or spec.dtype
    (path,) = job.results.values()
    target = _target(path, list(job.sources.values()))

    encoder = _Encoder(path, inputs[0].array, dtype)
    grid, axis, start = encoder.grid, job.reduced_axis(call), perf_counter()
    description = job.description() | {"shape": shape, "chunks": grid.lengths}
    layout = Layout(encoder.metadata, grid, description, grid.number_of_boxes(axis))
    for _ in _parts(inputs, grid, axis):  # reports errors of the inputs before anything is written
        pass
    with job.bar(desc=job.operator.name, total=math.prod(shape) * dtype.itemsize) as progress:

        def done(parts: Iterable[_Part]) -> Iterator[_Part]:
            """Yield parts, and tell the progress bar of each that is done."""
            for part in parts:
                yield part
                progress.update(math.prod(part.lengths) * dtype.itemsize)

        parts, computed = done(_parts(inputs, grid, axis)), 0
        if os.path.lexists(target):
            _check_complete(path, target, layout, parts)
        else:
            function = job.function(backend)
            with new_zarr(path, target, layout) as result:
                for part in parts:
                    if result.why_unfinished(part.number, part.inputs, grid.keys(part.box)) is not None:
                        out = np.empty(part.lengths, dtype)
                        function(*(each.read(part.box) for each in inputs), out=out)
                        result.write(part.number, part.inputs, encoder.encode(part.box, out))
                        computed += 1
    print(
        f"{path}: {dtype} {shape}, {computed} of {layout.parts} parts computed and written in "
        f"{perf_counter() - start:.2f} s (backend {backend})"
    )


def _parts(inputs: list[ZarrInput], grid: Grid, axis: int) -> Iterator[_Part]:
    """Yield the parts of a result, each with the state that its inputs have now."""
    for number, box in enumerate(grid.boxes(axis)):
        digest = hashlib.blake2b(digest_size=32)
        for position, each in enumerate(inputs):
            for state in each.states(box):
                digest.update(f"{position} {state}\n".encode())
        yield _Part(number, box, digest.hexdigest())


def _check_complete(path: str, target: str, layout: Layout, parts: Iterable[_Part]) -> None:
    """Raise `CommandError` unless the result is there, and is what was written from these inputs."""
    array = written_array(path, target, layout)
    for part in parts:
        why = array.why_unfinished(part.number, part.inputs, layout.grid.keys(part.box))
        if why is not None:
            where = ", ".join(f"{side.start}:{side.stop}" for side in part.box)
            raise CommandError(f"{path}: is there already, and [{where}] {why}; {REPLACE_ADVICE}")


class _Encoder:
    """Encode the parts of a new Zarr array with shape, chunks and format of another one, and keep none of them."""

    def __init__(self, path: str, model: zarr.Array, dtype: np.dtype):
        import zarr

        self._path = path
        self._files: dict = {}
        self._stored = RAW if dtype == BFLOAT16 else dtype
        with unstable_dtypes(), self._encoding():
            self._array = zarr.create_array(
                zarr.storage.MemoryStore(self._files),
                shape=model.shape,
                dtype=self._stored,
                chunks=model.chunks,
                shards=model.shards,
                zarr_format=model.metadata.zarr_format,
                dimension_names=getattr(model.metadata, "dimension_names", None),
                # All chunks are written, so that one that is missing was lost.
                config={"write_empty_chunks": True},
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


def _check_sources(job: Job) -> None:
    if job.operator not in contract.ROWWISE:
        raise CommandError(f"{job.operator.name}: Zarr arrays are for row-wise operators")
    other = next(source for source in job.sources.values() if is_zarr(source))
    for source in job.sources.values():
        if not is_zarr(source):
            raise CommandError(f"{source}: expected a Zarr array, as {other} is one")


def _target(path: str, sources: list[str]) -> str:
    """Return where the result goes; links are followed to its directory, and by themselves to what is there."""
    if path.endswith(".npy"):
        raise CommandError(f"{path}: names a file, and the result of Zarr arrays is one")
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
