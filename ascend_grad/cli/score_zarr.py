"""Scores of rows of a Zarr array, as Zarr arrays. dask computes a chunk of rows at a time."""

from __future__ import annotations

from time import perf_counter

import dask.array as da

import ascend_grad.dask as agd

from .errors import CommandError
from .score_job import Likelihood, ScoreJob, Scorer, chunk_rows, is_of_top_k
from .zarr_inputs import ArrayFormat, ZarrInput
from .zarr_results import Result, compute


def run(job: ScoreJob) -> None:
    """Write each result as a Zarr array, and a line about it to stdout."""
    hidden = ZarrInput(job.hidden, job.raw_dtype)
    scorer = Scorer(job, hidden.placeholder)
    rows, (count, width) = chunk_rows(hidden.placeholder, job.top_k, hidden.lengths[0]), hidden.shape
    target = da.from_array(scorer.target, chunks=-1, name=False)
    values: dict[str, da.Array] = {}
    for of_top_k in (False, True):
        names = [name for name in job.results if is_of_top_k(name) == of_top_k]
        # Each call reads HIDDEN by itself. dask may keep all blocks that two calls share until the second one.
        values |= scorer.compute(hidden.blocks((rows, max(width, 1))), target, names, agd)

    start, state = perf_counter(), hidden.state()
    results = {}
    for name, path in job.results.items():
        shape, of_hidden = values[name].shape, hidden.format.dimension_names
        dimension_names = of_hidden and (of_hidden[0], *(None for _ in shape[1:]))
        format = ArrayFormat(shape, (rows, *shape[1:]), None, hidden.format.zarr_format, dimension_names)
        description = job.description(name) | {"state": [state, *scorer.states(name)]}
        results[name] = Result(path, job.sources, values[name], format, description)
        if [result.target for result in results.values()].count(results[name].target) > 1:
            raise CommandError(f"{path}: expected an array for each result, got this one twice")

    computed = dict(zip(results, compute(list(results.values()), 1, job.bar)))
    seconds = perf_counter() - start
    for name, path in job.results.items():
        print(
            f"{path}: {values[name].dtype} {values[name].shape}, {computed[name]} of {values[name].npartitions} parts "
            f"computed and written in {seconds:.2f} s (backend {scorer.backends[name]})"
        )
    if job.targets is not None and "log_prob" in job.results:
        log_prob, likelihood = ZarrInput(job.results["log_prob"], None), Likelihood()
        for begin in range(0, count, rows):
            chunk = slice(begin, min(begin + rows, count))
            likelihood.add(log_prob[(chunk,)], scorer.scored(chunk.start, chunk.stop))
        print(likelihood.describe(job.targets))
