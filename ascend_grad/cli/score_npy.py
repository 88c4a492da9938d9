"""Scores of rows in a ``.npy`` file, through memory maps, a chunk of rows at a time."""

from __future__ import annotations

from contextlib import ExitStack
from time import perf_counter

from .npy_files import checked_targets, new_npy, open_array
from .score_job import Likelihood, ScoreJob, Scorer, chunk_rows


def run(job: ScoreJob) -> None:
    """Write each result to its file, and a line about it to stdout."""
    targets = dict(zip(job.results, checked_targets(list(job.results.values()), job.sources)))
    hidden = open_array(job.hidden, job.raw_dtype)
    scorer = Scorer(job, hidden.array)

    start, likelihood = perf_counter(), Likelihood()
    count, rows = len(hidden.array), chunk_rows(hidden.array, job.top_k)
    with ExitStack() as stack:
        results = {}
        for name, target in targets.items():
            spec = scorer.specs[name]
            results[name] = stack.enter_context(new_npy(target, spec.shape, spec.dtype, False))
        progress = stack.enter_context(job.bar(total=count))
        for begin in range(0, count, rows):
            chunk = slice(begin, min(begin + rows, count))
            values = scorer.compute(hidden.array[chunk], begin, scorer.specs)
            for name, result in results.items():
                result.array[chunk] = values[name]
            if scorer.targets is not None:
                likelihood.add(values["log_prob"], scorer.scored(chunk.start, chunk.stop))
            for mapped in (hidden, *results.values()):
                mapped.release()
            progress.update(chunk.stop - chunk.start)
    seconds = perf_counter() - start
    for name, path in job.results.items():
        array = results[name].array
        print(
            f"{path}: {array.dtype} {array.shape}, computed and written in {seconds:.2f} s "
            f"(backend {scorer.backends[name]})"
        )
    if job.targets is not None:
        print(likelihood.describe(job.targets))
