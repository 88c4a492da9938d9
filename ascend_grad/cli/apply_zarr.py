"""Row-wise operators on Zarr arrays, a row of chunks at a time."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from time import perf_counter

import numpy as np

from ..operators import table
from .apply_job import Job
from .errors import CommandError
from .new_zarr import Layout, new_zarr
from .zarr_grid import Grid
from .zarr_inputs import ZarrInput, digest_of_states, is_zarr
from .zarr_results import Encoder, Part, check_complete, checked_zarr_target


def run(job: Job) -> None:
    """Write a Zarr array with the chunks of the first input, and a line about it to stdout."""
    _check_sources(job)
    inputs = [ZarrInput(source, job.raw_dtype_of(name)) for name, source in job.sources.items()]
    arrays = {name: each.stand_in for name, each in zip(job.sources, inputs)}
    job.check_raw_dtype({name: array.dtype for name, array in arrays.items()})
    call, backend = job.validated(arrays)
    (spec,) = call.specs
    assert spec is not None
    shape, dtype = spec.shape, job.out_dtype or spec.dtype
    (path,) = job.results.values()
    target = checked_zarr_target(path, list(job.sources.values()))

    encoder = Encoder(path, inputs[0].format, dtype)
    grid, axis, start = encoder.grid, job.reduced_axis(call), perf_counter()
    description = job.description() | {"shape": shape, "chunks": grid.lengths}
    layout = Layout(encoder.metadata, grid, description, grid.number_of_boxes(axis))
    for _ in _parts(inputs, grid, axis):  # reports errors of the inputs before anything is written
        pass
    with job.bar(desc=job.operator.name, total=math.prod(shape) * dtype.itemsize) as progress:

        def done(parts: Iterable[Part]) -> Iterator[Part]:
            """Yield parts, and tell the progress bar of each that is done."""
            for part in parts:
                yield part
                progress.update(math.prod(part.lengths) * dtype.itemsize)

        parts, computed = done(_parts(inputs, grid, axis)), 0
        if os.path.lexists(target):
            check_complete(path, target, layout, parts)
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


def _parts(inputs: list[ZarrInput], grid: Grid, axis: int) -> Iterator[Part]:
    """Yield the parts of a result, each with the state that its inputs have now."""
    for number, box in enumerate(grid.boxes(axis)):
        yield Part(number, box, digest_of_states(each.states(box) for each in inputs))


def _check_sources(job: Job) -> None:
    if job.operator not in table.ROWWISE:
        raise CommandError(f"{job.operator.name}: Zarr arrays are for row-wise operators")
    other = next(source for source in job.sources.values() if is_zarr(source))
    for source in job.sources.values():
        if not is_zarr(source):
            raise CommandError(f"{source}: expected a Zarr array, as {other} is one")
