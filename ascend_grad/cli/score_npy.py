"""Scores of rows in a ``.npy`` file, a chunk of rows at a time."""

from __future__ import annotations

from contextlib import ExitStack
from time import perf_counter

from .npy_files import checked_targets, new_npy, open_array
from .score_job import Likelihood, ScoreJob, Scorer, chunk_rows


def run(job: ScoreJob) -> None:
    """Write each result to its file, and a line about it to stdout."""
    targets = dict(zip(job.results, checked_targets(list(job.results.values()), job.sources)))
    with ExitStack() as stack:
        hidden = stack.enter_context(open_array(job.hidden, job.raw_dtype))
        scorer = Scorer(job, hidden.placeholder)

        start, likelihood = perf_counter(), Likelihood()
        count, rows = hidden.shape[0], chunk_rows(hidden.placeholder, job.top_k)
        results = {}
        for name, target in targets.items():
            spec = scorer.specs[name]
            results[name] = stack.enter_context(new_npy(target, spec.shape, spec.dtype, False))
        progress = stack.enter_context(job.bar(total=count))
        for begin in range(0, count, rows):
            chunk = slice(begin, min(begin + rows, count))
            values = scorer.compute(hidden.read((chunk, *hidden.whole[1:])), scorer.target[chunk], scorer.specs)
            for name, result in results.items():
                with result.written((chunk, *result.whole[1:])) as array:
                    array[...] = values[name]
            if scorer.targets is not None:
                likelihood.add(values["log_prob"], scorer.scored(chunk.start, chunk.stop))
            progress.update(chunk.stop - chunk.start)
    seconds = perf_counter() - start
    for name, path in job.results.items():
        result = results[name]
        print(
            f"{path}: {result.dtype} {result.shape}, computed and written in {seconds:.2f} s "
            f"(backend {scorer.backends[name]})"
        )
    if job.targets is not None:
        print(likelihood.describe(job.targets))
