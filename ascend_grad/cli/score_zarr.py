"""Scores of rows of a Zarr array, as Zarr arrays, a part at a time: some chunks that follow one another."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from time import perf_counter
from typing import NamedTuple

from .errors import CommandError
from .new_zarr import Layout, NewArray, new_zarr
from .score_job import Likelihood, ScoreJob, Scorer, chunk_rows
from .zarr_inputs import ArrayFormat, ZarrInput, digest_of_states
from .zarr_results import Encoder, Part, check_complete, checked_zarr_target


class _Result:
    """A result: an array, each of whose chunks has the values of a part of the rows.

    Parameters
    ----------
    job : ScoreJob
        What to compute.
    name : str
        The name of the result.
    hidden : ZarrInput
        HIDDEN, whose format the result has.
    scorer : Scorer
        The checked calls.
    rows : int
        The number of rows of a part.
    """

    def __init__(self, job: ScoreJob, name: str, hidden: ZarrInput, scorer: Scorer, rows: int):
        spec, format = scorer.specs[name], hidden.format
        self.name, self.path, self.backend = name, job.results[name], scorer.backends[name]
        self.target = checked_zarr_target(self.path, job.sources)
        self.shape, self.dtype = spec.shape, spec.dtype
        chunks = (rows, *self.shape[1:])
        names = format.dimension_names and (format.dimension_names[0], *(None for _ in self.shape[1:]))
        self.encoder = Encoder(self.path, ArrayFormat(self.shape, chunks, None, format.zarr_format, names), self.dtype)
        grid = self.encoder.grid
        description = job.description(name) | {"shape": self.shape, "chunks": grid.lengths}
        self.layout = Layout(self.encoder.metadata, grid, description, grid.counts[0])
        self._whole_inputs = digest_of_states(scorer.states(name))
        #: How many parts this run has computed.
        self.computed = 0

    def part(self, number: int, rows: slice, states: list[tuple]) -> Part:
        """Return a part, for the state that its rows of HIDDEN have."""
        box = (rows, *(slice(0, length) for length in self.shape[1:]))
        return Part(number, box, digest_of_states([states, [(self._whole_inputs,)]]))


class _Rows(NamedTuple):
    """Some rows of HIDDEN, which are a part of each result."""

    number: int
    rows: slice
    #: The state of the files that they are in.
    states: list[tuple]


def run(job: ScoreJob) -> None:
    """Write each result as a Zarr array, and a line about it to stdout."""
    hidden = ZarrInput(job.hidden, job.raw_dtype)
    scorer = Scorer(job, hidden.stand_in)
    rows = chunk_rows(hidden.stand_in, job.top_k, hidden.grid.lengths[0])
    results = [_Result(job, name, hidden, scorer, rows) for name in job.results]
    targets = [result.target for result in results]
    for result in results:
        if targets.count(result.target) > 1:
            raise CommandError(f"{result.path}: the array of two results")

    start = perf_counter()
    for _ in _parts(hidden, rows):  # reports errors of the inputs before anything is written
        pass
    complete = [result for result in results if os.path.lexists(result.target)]
    for result in complete:
        parts = (result.part(*part) for part in _parts(hidden, rows))
        check_complete(result.path, result.target, result.layout, parts)
    with ExitStack() as stack:
        new = {
            result: stack.enter_context(new_zarr(result.path, result.target, result.layout))
            for result in results
            if result not in complete
        }
        progress = stack.enter_context(job.bar(total=len(hidden.stand_in)))
        for part in _parts(hidden, rows):
            _write_part(part, hidden, scorer, new)
            progress.update(part.rows.stop - part.rows.start)
    seconds = perf_counter() - start
    for result in results:
        print(
            f"{result.path}: {result.dtype} {result.shape}, {result.computed} of {result.layout.parts} parts computed "
            f"and written in {seconds:.2f} s (backend {result.backend})"
        )
    if job.targets is not None and "log_prob" in job.results:
        print(_likelihood(ZarrInput(job.results["log_prob"], None), scorer, rows).describe(job.targets))


def _parts(hidden: ZarrInput, rows: int) -> Iterator[_Rows]:
    """Yield the parts of HIDDEN, each with the state that its files have now."""
    count, width = hidden.stand_in.shape
    for number, begin in enumerate(range(0, count, rows)):
        part = slice(begin, min(begin + rows, count))
        yield _Rows(number, part, list(hidden.states((part, slice(0, width)))))


def _write_part(rows: _Rows, hidden: ZarrInput, scorer: Scorer, new: dict[_Result, NewArray]) -> None:
    """Compute and write what is not finished of a part."""
    unfinished: dict[_Result, Part] = {}
    for result, array in new.items():
        part = result.part(*rows)
        if array.why_unfinished(part.number, part.inputs, result.layout.grid.keys(part.box)) is not None:
            unfinished[result] = part
    if not unfinished:
        return
    box = (rows.rows, slice(0, hidden.stand_in.shape[1]))
    values = scorer.compute(hidden.read(box), rows.rows.start, [result.name for result in unfinished])
    for result, part in unfinished.items():
        new[result].write(part.number, part.inputs, result.encoder.encode(part.box, values[result.name]))
        result.computed += 1


def _likelihood(log_prob: ZarrInput, scorer: Scorer, rows: int) -> Likelihood:
    """Sum the log-probabilities of a complete result."""
    likelihood = Likelihood()
    for begin in range(0, log_prob.array.shape[0], rows):
        chunk = slice(begin, min(begin + rows, log_prob.array.shape[0]))
        likelihood.add(log_prob.read((chunk,)), scorer.scored(chunk.start, chunk.stop))
    return likelihood
