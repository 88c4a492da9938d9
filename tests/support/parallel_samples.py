"""Split problems over ranks, and join the results of the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from linear_samples import WHOLE, LinearProblem, problem_of
from thread_ranks import Group, on_grid, on_ranks, returned

from ascend_grad import LossResult, parallel
from ascend_grad.operators.results import loss_result

#: The fields of the result of a linear layer's loss.
LAYER = ("loss", "input_grad", "weight_grad")


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
    return loss_result(LAYER, [None if each is None else each.numpy() for each in results])


def vocabulary_rank(
    problem: LinearProblem, cuts: Sequence[int], comm: Any, put: Callable | None = None, **options: Any
) -> LossResult:
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
) -> LossResult:
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


#: Options with one number for each token, or for each vocabulary entry.
OF_TOKENS = ("token_weight", "temperature", "target_prob", "grad_loss", "grad_lse", "grad_log_prob", "grad_entropy")
OF_ENTRIES = ("bias", "class_weight")
#: Results with one number for each token.
BESIDE = ("lse", "log_prob", "entropy", "predicted")


def part_with_options(arguments: dict[str, Any], entries: slice, tokens: slice = slice(None)) -> tuple[list, dict]:
    """Return the arrays and the keywords of one rank, of a whole call whose ids start at 0."""
    a = dict(arguments)
    assert a.pop("vocab_start_index", 0) == 0
    given = [a.pop("input")[tokens], a.pop("weight")[entries], a.pop("target")[tokens]]
    for names, own in ((OF_TOKENS, tokens), (OF_ENTRIES, entries)):
        a |= {name: a[name][own] for name in names if isinstance(a.get(name), np.ndarray)}
    return given, {"num_threads": 1} | a


def with_options(
    arguments: dict[str, Any], cuts: Sequence[int], group: Group | None = None, **options: Any
) -> list[LossResult]:
    """Call the function with options on ranks that split the vocabulary, and return their results."""

    def work(comm):
        given, keywords = part_with_options(arguments, slice(cuts[comm.rank], cuts[comm.rank + 1]))
        return parallel.linear_cross_entropy(*given, comm=comm, **keywords | options)

    return returned(on_ranks(len(cuts) - 1, work, group))


def on_grid_with_options(
    arguments: dict[str, Any], cuts: Sequence[int], rows: Sequence[int], **options: Any
) -> dict[tuple[int, int], LossResult]:
    """Call the function with options on a grid of ranks, and return their results by vocabulary rank and token rank."""

    def work(vocab_comm, comm):
        entries = slice(cuts[vocab_comm.rank], cuts[vocab_comm.rank + 1])
        given, keywords = part_with_options(arguments, entries, slice(rows[comm.rank], rows[comm.rank + 1]))
        return parallel.data_parallel_linear_cross_entropy(
            *given, comm=comm, vocab_comm=vocab_comm, **keywords | options
        )

    results = on_grid(len(cuts) - 1, len(rows) - 1, work)
    returned(list(results.values()))
    return results


def whole_with_options(results: Sequence[LossResult], share: Any = True) -> list[LossResult]:
    """Return results with options of the whole problem by rank, from results of ranks that split the vocabulary."""
    plain = of_vocabulary(results, share)
    bias_grad = joined([each.bias_grad for each in results])
    return [
        each._replace(
            input_grad=one.input_grad,
            weight_grad=one.weight_grad,
            **({"bias_grad": bias_grad} if "bias_grad" in each._fields else {}),
        )
        for each, one in zip(results, plain)
    ]


def whole_of_grid(results: dict[tuple[int, int], LossResult], reduction: str, share: Any = True) -> list[LossResult]:
    """Return results with options of the whole problem by rank, from results of a grid of ranks."""
    entries, tokens = (1 + max(place[axis] for place in results) for axis in (0, 1))
    found = []
    for v, t in results:
        own, line = results[v, t], [results[v, i] for i in range(tokens)]
        names = [name for name in (*BESIDE, "input_grad") if getattr(own, name) is not None]
        if reduction == "none":
            names.append("loss")
        new = {name: np.concatenate([getattr(each, name) for each in line]) for name in names}
        if own.weight_grad is not None:
            places = [(w, i) for w in range(entries) for i in (range(tokens) if share == "scatter" else [t])]
            new["weight_grad"] = np.concatenate([results[place].weight_grad for place in places])
        if own.bias_grad is not None:
            new["bias_grad"] = np.concatenate([results[w, t].bias_grad for w in range(entries)])
        found.append(own._replace(**new))
    return found


def joined(parts: Sequence[np.ndarray | None]) -> np.ndarray | None:
    return None if parts[0] is None else np.concatenate(parts)


def of_vocabulary(results: Sequence[LossResult], share: Any = True) -> list[LossResult]:
    """Return results of the whole problem by rank, from results of ranks that split the vocabulary."""
    weight_grad = joined([each.weight_grad for each in results])
    inputs = [each.input_grad for each in results]
    if inputs[0] is not None and share == "scatter":
        inputs = [np.concatenate(inputs)] * len(results)
    elif inputs[0] is not None and share is False:
        inputs = [sum(each.astype(np.float64) for each in inputs)] * len(results)
    return [loss_result(LAYER, (each.loss, own, weight_grad)) for each, own in zip(results, inputs)]


def of_tokens(results: Sequence[LossResult], reduction: str, share: Any = True) -> list[LossResult]:
    """Return results of the whole problem by rank, from results of ranks that split the tokens."""
    losses = [each.loss for each in results]
    if reduction == "none":
        losses = [np.concatenate(losses)] * len(results)
    weights = [each.weight_grad for each in results]
    if weights[0] is not None and share == "scatter":
        weights = [np.concatenate(weights)] * len(results)
    input_grad = joined([each.input_grad for each in results])
    return [loss_result(LAYER, (loss, input_grad, weight)) for loss, weight in zip(losses, weights)]
