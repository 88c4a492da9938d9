"""Row-wise operators on Zarr arrays, in blocks that dask computes."""

from __future__ import annotations

import math
from functools import partial
from time import perf_counter

import ascend_grad as ag

from ..dask.losses import cross_entropy
from ..dask.rowwise import blockwise
from ..operators import table
from .apply_job import Job
from .errors import CommandError
from .zarr_inputs import ArrayFormat, ZarrInput, is_zarr
from .zarr_results import Result, compute

#: Bytes of a block of the result: little memory, and much work compared with the cost of a task.
BLOCK_BYTES = 2**24
#: Bytes of the blocks that are computed at a time, but for a single one that has more.
MEMORY_BYTES = 2**28


def run(job: Job) -> None:
    """Write each result as a Zarr array with the chunks of the first input, and a line about it to stdout."""
    _check_sources(job)
    if job.operator is table.CROSS_ENTROPY:
        _run_cross_entropy(job)
    else:
        _run_rowwise(job)


def _run_cross_entropy(job: Job) -> None:
    """Write the loss of each row, the gradient and every output to separate Zarr arrays."""
    if "correct" in job.results or job.settings["reduction"] != "none":
        raise CommandError("cross_entropy: Zarr arrays need --reduction none, without --correct-out")
    inputs = {name: ZarrInput(source, job.raw_dtype_of(name)) for name, source in job.sources.items()}
    arrays = {name: each.placeholder for name, each in inputs.items()}
    job.check_raw_dtype({name: array.dtype for name, array in arrays.items()})
    call, backend = job.validated(arrays)
    first, axis, start = inputs["input"], job.reduced_axis(call), perf_counter()
    lengths = _block_lengths(first.shape, first.lengths, axis, first.dtype.itemsize)
    rows = (*lengths[:axis], *lengths[axis + 1 :])
    # Arrays of classes are whole, and the axis of several targets of a row.
    cells = {name: () if name == "class_weight" else rows for name in inputs} | {"input": lengths}
    blocks = {name: each.blocks((*cells[name], *each.shape[len(cells[name]) :])) for name, each in inputs.items()}
    values = cross_entropy(**blocks, **job.settings, backend=backend, num_threads=job.num_threads)
    names = first.format.dimension_names
    of_rows = names and (*names[:axis], *names[axis + 1 :])
    state = [each.state() for each in inputs.values()]
    results = {}
    for name, path in job.results.items():
        array = getattr(values, name)
        format = first.format
        if array.ndim < len(lengths):
            format = ArrayFormat(array.shape, tuple(max(n, 1) for n in rows), None, format.zarr_format, of_rows)
        description = job.description() | {"result": name, "outputs": None, "return_grad": None, "state": state}
        results[name] = Result(path, list(job.sources.values()), array, format, description)
        if [result.target for result in results.values()].count(results[name].target) > 1:
            raise CommandError(f"{path}: expected an array for each result, got this one twice")
    computed = compute(list(results.values()), 1, partial(job.bar, desc=job.operator.name))
    for result, count in zip(results.values(), computed):
        print(
            f"{result.path}: {result.values.dtype} {result.values.shape}, {count} of {result.values.npartitions} parts "
            f"computed and written in {perf_counter() - start:.2f} s (backend {backend})"
        )


def _run_rowwise(job: Job) -> None:
    """Write the result of a row-wise operator."""
    inputs = {name: ZarrInput(source, job.raw_dtype_of(name)) for name, source in job.sources.items()}
    arrays = {name: each.placeholder for name, each in inputs.items()}
    job.check_raw_dtype({name: array.dtype for name, array in arrays.items()})
    call, backend = job.validated(arrays)
    (spec,), (path,), start = call.specs, job.results.values(), perf_counter()
    assert spec is not None
    first, dtype = next(iter(inputs.values())), job.out_dtype or spec.dtype

    lengths = _block_lengths(first.shape, first.lengths, job.reduced_axis(call), dtype.itemsize)
    block_bytes = math.prod(lengths) * sum(each.dtype.itemsize for each in (*inputs.values(), first))
    threads = job.num_threads or ag.get_num_threads()
    workers = max(1, min(threads, MEMORY_BYTES // block_bytes))
    blocks = {name: each.blocks(lengths) for name, each in inputs.items()}
    values = blockwise(job.operator, call.arguments | blocks, backend, threads // workers, job.out_dtype)
    description = job.description() | {"state": [each.state() for each in inputs.values()]}
    result = Result(path, list(job.sources.values()), values, first.format, description)
    (computed,) = compute([result], workers, partial(job.bar, desc=job.operator.name))
    print(
        f"{path}: {dtype} {spec.shape}, {computed} of {values.npartitions} parts computed and written in "
        f"{perf_counter() - start:.2f} s (backend {backend})"
    )


def _block_lengths(shape: tuple[int, ...], cell: tuple[int, ...], dim: int, itemsize: int) -> tuple[int, ...]:
    """Return the lengths of blocks of whole cells, which are whole along ``dim``."""
    lengths = [max(length, 1) if axis == dim else n for axis, (n, length) in enumerate(zip(cell, shape))]
    for axis in reversed(range(len(shape))):
        if axis != dim:
            wanted = BLOCK_BYTES // (math.prod(lengths) * itemsize)
            lengths[axis] *= max(1, min(wanted, -(-shape[axis] // lengths[axis])))
    return tuple(lengths)


def _check_sources(job: Job) -> None:
    if job.operator not in (*table.ROWWISE, table.CROSS_ENTROPY):
        raise CommandError(f"{job.operator.name}: expected a row-wise operator or cross_entropy for Zarr arrays")
    other = next(source for source in job.sources.values() if is_zarr(source))
    for source in job.sources.values():
        if not is_zarr(source):
            raise CommandError(f"{source}: expected a Zarr array, like {other}")
