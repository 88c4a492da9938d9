"""Split problems over ranks, and join the results of the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from linear_samples import WHOLE, LinearProblem, problem_of

from ascend_grad import parallel
from ascend_grad.results import LinearCrossEntropy


def whole(shape: tuple[int, int, int], dtype: str, **how: Any) -> LinearProblem:
    """Return a problem whose ids start at 0."""
    problem = problem_of(WHOLE, shape, dtype, **how)
    a = problem.arguments
    target = np.where(a["target"] == a["ignore_index"], a["ignore_index"], a["target"] - a["vocab_start_index"])
    return problem.replaced(target=target, vocab_start_index=0)


def even_cuts(count: int, size: int) -> list[int]:
    return [0, *(parallel.vocab_range(count, rank, size)[1] for rank in range(size))]


def options_of(problem: LinearProblem) -> dict[str, Any]:
    return {name: problem.arguments[name] for name in ("reduction", "ignore_index", "grad_loss")}


def rank_of(comm: Any) -> int:
    return comm.rank() if callable(comm.rank) else comm.rank


def called(function: Callable, arrays: Sequence[Any], options: dict[str, Any], put: Callable | None) -> Any:
    """Call the function on arrays that `put` converts, and return its results as arrays on the host."""
    if put is None:
        return function(*arrays, **options)
    if isinstance(options.get("grad_loss"), np.ndarray):
        options = options | {"grad_loss": put(options["grad_loss"])}
    results = function(*map(put, arrays), **options)
    return LinearCrossEntropy(*(None if each is None else each.numpy() for each in results))


def vocabulary_rank(
    problem: LinearProblem, cuts: Sequence[int], comm: Any, put: Callable | None = None, **options: Any
) -> LinearCrossEntropy:
    """Call the function with the vocabulary entries of this rank."""
    a, rank = problem.arguments, rank_of(comm)
    return called(
        parallel.linear_cross_entropy,
        (a["input"], a["weight"][cuts[rank] : cuts[rank + 1]], a["target"]),
        {"comm": comm, "num_threads": 1} | options_of(problem) | options,
        put,
    )


def tokens_rank(
    problem: LinearProblem,
    cuts: Sequence[int],
    comm: Any,
    entries: slice = slice(None),
    put: Callable | None = None,
    **options: Any,
) -> LinearCrossEntropy:
    """Call the function with the tokens of this rank."""
    rank = rank_of(comm)
    rows = slice(cuts[rank], cuts[rank + 1])
    a, given = problem.arguments, options_of(problem)
    if isinstance(given.get("grad_loss"), np.ndarray):
        given["grad_loss"] = given["grad_loss"][rows]
    return called(
        parallel.data_parallel_linear_cross_entropy,
        (a["input"][rows], a["weight"][entries], a["target"][rows]),
        {"comm": comm, "num_threads": 1} | given | options,
        put,
    )


def joined(parts: Sequence[np.ndarray | None]) -> np.ndarray | None:
    return None if parts[0] is None else np.concatenate(parts)


def of_vocabulary(results: Sequence[LinearCrossEntropy], share: Any = True) -> list[LinearCrossEntropy]:
    """Return results of the whole problem by rank, from results of ranks that split the vocabulary."""
    weight_grad = joined([each.weight_grad for each in results])
    inputs = [each.input_grad for each in results]
    if inputs[0] is not None and share == "scatter":
        inputs = [np.concatenate(inputs)] * len(results)
    elif inputs[0] is not None and share is False:
        inputs = [sum(each.astype(np.float64) for each in inputs)] * len(results)
    return [LinearCrossEntropy(each.loss, own, weight_grad) for each, own in zip(results, inputs)]


def of_tokens(results: Sequence[LinearCrossEntropy], reduction: str, share: Any = True) -> list[LinearCrossEntropy]:
    """Return results of the whole problem by rank, from results of ranks that split the tokens."""
    losses = [each.loss for each in results]
    if reduction == "none":
        losses = [np.concatenate(losses)] * len(results)
    weights = [each.weight_grad for each in results]
    if weights[0] is not None and share == "scatter":
        weights = [np.concatenate(weights)] * len(results)
    input_grad = joined([each.input_grad for each in results])
    return [LinearCrossEntropy(loss, input_grad, weight) for loss, weight in zip(losses, weights)]
