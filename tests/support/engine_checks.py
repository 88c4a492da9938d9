"""Check the outcomes of `rank_program`, for any engine."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
from parallel_samples import of_tokens, of_vocabulary
from rank_program import GRID, token_cases, vocabulary_cases
from samples import assert_identical

import ascend_grad as ag
from ascend_grad import parallel

PROGRAM = Path(__file__).with_name("rank_program.py")


def outcomes(folder: Path, size: int) -> list[dict[str, Any]]:
    """Read the outcomes of each rank."""
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(size)]


def check_all(engine: Any, folder: Path, size: int) -> None:
    ranks = outcomes(folder, size)
    for name, (problem, _, options) in vocabulary_cases(size).items():
        share = options.get("reduce_input_grad", True)
        for run in range(2):
            for each in of_vocabulary([_result(rank, f"vocabulary {name}", run) for rank in ranks], share):
                engine.assert_solved(problem, each)
        if options.get("deterministic"):
            _check_bits(ranks, f"vocabulary {name}", shared=("loss", "input_grad") if share is True else ("loss",))
    for name, (problem, _, options) in token_cases(size).items():
        reduction, share = problem.arguments["reduction"], options.get("reduce_weight_grad", True)
        for run in range(2):
            for each in of_tokens([_result(rank, f"tokens {name}", run) for rank in ranks], reduction, share):
                engine.assert_solved(problem, each)
        if options.get("deterministic"):
            _check_bits(ranks, f"tokens {name}", shared=("loss", "weight_grad") if share is True else ("loss",))
    if size == 4:
        _check_grid(engine, [rank["grid"] for rank in ranks])
    _check_failures(engine, ranks)


def _result(rank: dict[str, Any], name: str, run: int) -> Any:
    result = rank[name][run]
    if isinstance(result, BaseException):
        raise result
    return result


def _check_bits(ranks: list[dict[str, Any]], name: str, shared: tuple[str, ...]) -> None:
    """Check that both runs give the same bits, and that shared results are the same on all ranks."""
    for rank in ranks:
        first, second = rank[name]
        for one, other in zip(first, second):
            assert_identical(one, other)
        for field in shared:
            assert_identical(getattr(first, field), getattr(ranks[0][name][0], field))


def _check_grid(engine: Any, results: list[Any]) -> None:
    problem = GRID[0]
    for each in results:
        if isinstance(each, BaseException):
            raise each
    columns = [of_tokens(results[words::2], "mean") for words in (0, 1)]
    for row in zip(*columns):
        for each in of_vocabulary(row):
            engine.assert_solved(problem, each)


def _check_failures(engine: Any, ranks: list[dict[str, Any]]) -> None:
    *others, last = ranks
    for name, kind, text in (
        ("bad argument", ag.ParamInvalidError, "filter_eps: expected a finite number that is not negative, got -1.0"),
        ("no memory", MemoryError, "no room"),
        ("Ctrl-C", KeyboardInterrupt, ""),
    ):
        assert type(last[f"failure {name}"]) is kind
        for rank in others:
            error = rank[f"failure {name}"]
            assert type(error) is parallel.RankError
            assert error.rank == len(others)
            assert f"rank {len(others)} failed: {kind.__name__}: " in str(error)
            assert text in str(error)
    for name, text in (
        ("wrong shard", "vocab_size: expected 19, the sum of the rows of all shards, got 20"),
        ("disagreement", f"got mean on rank 0 and sum on rank {len(others)}"),
    ):
        assert {type(rank[f"failure {name}"]) for rank in ranks} == {ag.ParamInvalidError}
        (message,) = {str(rank[f"failure {name}"]) for rank in ranks}
        assert text in message
    assert np.isfinite([rank["failure afterwards"].loss for rank in ranks]).all()
