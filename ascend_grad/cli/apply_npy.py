"""Arrays in ``.npy`` files: row-wise operators box by box, the linear ones in one call."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from time import perf_counter
from typing import TYPE_CHECKING

from numpy.typing import NDArray

from .._call import Call, ResultSpec
from ..operators import table
from .apply_job import Job, fit, takes_out
from .array_file import AddressSpaceError, ArrayFile
from .boxes import boxes
from .errors import CommandError
from .npy_files import checked_targets, new_npy, open_array

if TYPE_CHECKING:
    from tqdm import tqdm
#: Elements of a box if there is little address space. Each array then needs a buffer of up to 64 MiB.
SMALL_BOX_ELEMENTS = 2**23


def run(job: Job, result_options: dict[str, str]) -> None:
    """Write each result to its file, and a line about it to stdout."""
    targets = dict(zip(job.results, checked_targets(list(job.results.values()), list(job.sources.values()))))
    with ExitStack() as files:
        inputs = {
            name: files.enter_context(open_array(path, job.raw_dtype_of(name))) for name, path in job.sources.items()
        }
        job.check_raw_dtype({name: file.dtype for name, file in inputs.items()})
        is_rowwise = job.operator in table.ROWWISE
        arguments = {name: file.placeholder if is_rowwise else file.read(file.whole) for name, file in inputs.items()}
        call, backend = job.validated(arguments)

        start = perf_counter()
        specs = _specs(call, targets, result_options)
        if is_rowwise:
            (target,), (spec,) = targets.values(), specs.values()
            size = (job.out_dtype or spec.dtype).itemsize * call.arrays[0].size
            with job.bar(desc=job.operator.name, total=size) as progress:
                results = {"result": _write_rowwise(job, call, backend, list(inputs.values()), target, progress)}
        else:
            results = _write_linear(job, call, backend, arguments, specs, targets)
    seconds = perf_counter() - start
    for path, result in zip(job.results.values(), results.values()):
        print(f"{path}: {result.dtype} {result.shape}, computed and written in {seconds:.2f} s (backend {backend})")


def _specs(call: Call, targets: Iterable[str], options: dict[str, str]) -> dict[str, ResultSpec]:
    """Return the results that go to files, and refuse targets that do not fit the results of the call."""
    specs = dict(zip(call.operator.results, call.specs))
    for name, option in options.items():
        spec = specs[name]
        if spec is None and name in targets:
            raise CommandError(f"{option}: the call has no result {name}")
        # Numbers of rows, as losses are, may be dropped, but nothing of the size of the logits is made in memory.
        if spec is not None and len(spec.shape) > 1 and name not in ("loss", *targets):
            raise CommandError(f"the call has the result {name}; name a file for it, with {option}")
    return {name: spec for name, spec in specs.items() if name in targets and spec is not None}


def _write_rowwise(
    job: Job, call: Call, backend: str, inputs: list[ArrayFile], target: str, progress: tqdm
) -> ArrayFile:
    """Compute the result of a row-wise operator box by box into a new file."""
    (spec,) = call.specs
    assert spec is not None
    function, fortran_order = job.function(backend), inputs[0].fortran_order
    with new_npy(target, spec.shape, job.out_dtype or spec.dtype, fortran_order) as result:
        for box in _boxes(spec.shape, job.reduced_axis(call), fortran_order, [*inputs, result]):
            with result.written(box) as out:
                function(*(file.read(fit(file.shape, box)) for file in inputs), out=out)
            progress.update(out.nbytes)
    return result


def _boxes(
    shape: tuple[int, ...], dim: int, fortran_order: bool, files: list[ArrayFile]
) -> Iterable[tuple[slice, ...]]:
    """Return boxes that cover the result, small ones if large ones do not fit into the address space."""
    first = next(iter(boxes(shape, dim, fortran_order)))
    try:
        # All of these maps must exist at the same time.
        _ = [file.read(fit(file.shape, first)) for file in files if file.maps(fit(file.shape, first))]
    except AddressSpaceError:
        return boxes(shape, dim, fortran_order, SMALL_BOX_ELEMENTS)
    return boxes(shape, dim, fortran_order)


def _write_linear(
    job: Job,
    call: Call,
    backend: str,
    arguments: dict[str, NDArray],
    specs: dict[str, ResultSpec],
    targets: dict[str, str],
) -> dict[str, ArrayFile]:
    """Compute one call, which keeps within its workspace by itself."""
    function, names = job.function(backend), job.operator.results
    with ExitStack() as files:
        results, out = {}, {}
        for name, spec in specs.items():
            new = new_npy(targets[name], spec.shape, job.out_dtype or spec.dtype, False)
            results[name] = files.enter_context(new)
            out[name] = files.enter_context(results[name].written(results[name].whole))
        if job.operator is table.CROSS_ENTROPY:
            result = function(**arguments, out=out.get("input_grad"))
            for name in out.keys() - {"input_grad"}:
                out[name][...] = getattr(result, name)
        elif takes_out(job.operator):
            function(**arguments, out=tuple(map(out.get, names)))
        else:
            for name, value in zip(names, function(**arguments)):
                if name in out:
                    out[name][...] = value
    return results
