"""Arrays in ``.npy`` files, through memory maps: row-wise operators box by box, the linear ones in one call."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from time import perf_counter
from typing import TYPE_CHECKING

from numpy.typing import NDArray

from .. import contract
from .._call import Call, ResultSpec
from .apply_job import Job, cut, takes_out
from .boxes import boxes
from .errors import CommandError
from .npy_files import MappedArray, check_raw_dtype, checked_targets, new_npy, open_array

if TYPE_CHECKING:
    from tqdm import tqdm

#: Mapped pages are given back each time this much of the result is done.
RELEASED_BYTES = 2**26


def run(job: Job, result_options: dict[str, str]) -> None:
    """Write each result to its file, and a line about it to stdout."""
    targets = dict(zip(job.results, checked_targets(list(job.results.values()), list(job.sources.values()))))
    inputs = {name: open_array(source, job.raw_dtype) for name, source in job.sources.items()}
    arguments = {name: mapped.array for name, mapped in inputs.items()}
    check_raw_dtype(next(iter(job.sources.values())), job.raw_dtype, [array.dtype for array in arguments.values()])
    call, backend = job.validated(arguments)

    start = perf_counter()
    specs = _specs(call, targets, result_options)
    if job.operator in contract.ROWWISE:
        (target,), (spec,) = targets.values(), specs.values()
        size = (job.out_dtype or spec.dtype).itemsize * call.arrays[0].size
        with job.bar(desc=job.operator.name, total=size) as progress:
            results = {"result": _write_rowwise(job, call, backend, list(inputs.values()), target, progress)}
    else:
        results = _write_linear(job, call, backend, arguments, specs, targets)
    seconds = perf_counter() - start
    for path, result in zip(job.results.values(), results.values()):
        print(
            f"{path}: {result.array.dtype} {result.array.shape}, computed and written in {seconds:.2f} s "
            f"(backend {backend})"
        )


def _specs(call: Call, targets: Iterable[str], options: dict[str, str]) -> dict[str, ResultSpec]:
    """Return the results that go to files, and refuse targets that do not fit the results of the call."""
    specs = dict(zip(call.operator.results, call.specs))
    for name, option in options.items():
        spec = specs[name]
        if spec is None and name in targets:
            raise CommandError(f"{option}: the call makes no {name}")
        # Rows of numbers may be dropped, but nothing of the size of the logits is made in memory.
        if spec is not None and len(spec.shape) > 1 and name not in targets:
            raise CommandError(f"the call makes {name}: name a file for it, with {option}")
    return {name: spec for name, spec in specs.items() if name in targets and spec is not None}


def _write_rowwise(
    job: Job, call: Call, backend: str, inputs: list[MappedArray], target: str, progress: tqdm
) -> MappedArray:
    """Compute the result of a row-wise operator box by box into a new file."""
    (spec,) = call.specs
    assert spec is not None
    function, unreleased = job.function(backend), 0
    fortran_order = bool(call.arrays[0].flags.fnc)
    with new_npy(target, spec.shape, job.out_dtype or spec.dtype, fortran_order) as result:
        for box in boxes(spec.shape, job.reduced_axis(call), fortran_order):
            out = cut(result.array, box)
            function(*(cut(mapped.array, box) for mapped in inputs), out=out)
            progress.update(out.nbytes)
            unreleased += out.nbytes
            if unreleased >= RELEASED_BYTES:
                for mapped in (*inputs, result):
                    mapped.release()
                unreleased = 0
    return result


def _write_linear(
    job: Job,
    call: Call,
    backend: str,
    arguments: dict[str, NDArray],
    specs: dict[str, ResultSpec],
    targets: dict[str, str],
) -> dict[str, MappedArray]:
    """Compute one call, which keeps within its workspace by itself."""
    function, names = job.function(backend), job.operator.results
    with ExitStack() as files:
        results = {
            name: files.enter_context(new_npy(targets[name], spec.shape, job.out_dtype or spec.dtype, False))
            for name, spec in specs.items()
        }
        if takes_out(job.operator):
            function(**arguments, out=tuple(results[name].array if name in results else None for name in names))
        else:
            for name, value in zip(names, function(**arguments)):
                if name in results:
                    results[name].array[...] = value
    return results
