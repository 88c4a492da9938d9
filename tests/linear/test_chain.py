"""Test the loss with gradients in one call, as a chain of three calls, and over shards of the vocabulary."""

from __future__ import annotations

import doctest
import itertools
import re
from pathlib import Path

import linear_oracles
import numpy as np
import oracles
import pytest
from linear_samples import (
    GRADIENT,
    LOSS,
    STATISTICS,
    WHOLE,
    LinearProblem,
    Shape,
    accumulator,
    problem_of,
    whole_problem,
)
from samples import DTYPES, assert_identical, generator

import ascend_grad as ag

# ---- shards ----------------------------------------------------------------------------------------------------------


def sharded(x, w, target, grad, bounds, engine, *, stored=False):
    """Compute loss and gradients on shards ``bounds[r] : bounds[r + 1]`` of the vocabulary; sums are all-reduces."""
    shards = [w[start:end] for start, end in itertools.pairwise(bounds)]
    each = [
        engine.call(STATISTICS, x, shard, target, start, start + len(shard), return_logits=stored)
        for shard, start in zip(shards, bounds[:-1], strict=True)
    ]
    largest = np.max([s.logits_max for s in each], 0)
    masks = [np.unpackbits(s.target_mask, count=len(x), bitorder="little") == 1 for s in each]
    total = sum(s.sum_exp_logits * np.exp(s.logits_max - largest) for s in each)
    predicted = sum(
        np.where(mask, 0, s.predicted_logits + s.logits_max - largest) for mask, s in zip(masks, each, strict=True)
    )
    loss, _ = engine.call(LOSS, largest, total, predicted)
    input_grad, weight_grads = 0, []
    for s, shard in zip(each, shards, strict=True):
        mode = {"logits_max": largest, "sum_exp_logits": total}
        if stored:
            _, softmax = engine.call(LOSS, largest, total, predicted, vocab_parallel_logits=s.vocab_parallel_logits)
            mode = {"softmax": softmax}
        outs = tuple(np.empty(a.shape, largest.dtype) for a in (x, shard))
        part, weight_grad = engine.call(GRADIENT, grad, x, shard, s.target_mask, s.masked_target, **mode, out=outs)
        input_grad = input_grad + part
        weight_grads.append(weight_grad)
    return loss, input_grad, np.concatenate(weight_grads)


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("bounds", [(0, 67), (0, 20, 67), (0, 1, 2, 66, 67), (0, 16, 32, 48, 67)], ids=str)
def test_shards_of_the_vocabulary(bounds, stored, dtype, engine):
    random = generator("shards")
    x, w = random.standard_normal((41, 19)), random.standard_normal((67, 19))
    x, w = x.astype(DTYPES[dtype]), w.astype(DTYPES[dtype])
    target = random.integers(0, 67, 41)
    grad = random.standard_normal(41).astype(accumulator(DTYPES[dtype]))
    grad[5] = 0
    results = sharded(x, w, target, grad, bounds, engine, stored=stored)
    arguments = {"input": x, "weight": w, "target": target, "reduction": "none", "grad_loss": grad}
    problem = LinearProblem(WHOLE, arguments, 64)
    loss, *gradients = linear_oracles.expected(problem)
    if stored and DTYPES[dtype].itemsize == 2:
        # The logits were rounded to 16 bits between the calls, which adds this error to the softmax.
        logits = np.abs(x.astype(np.float64) @ w.astype(np.float64).T)
        relative = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype] * logits.max()
        tile = np.broadcast_to(np.abs(grad)[:, None], logits.shape)  # a probability is at most 1
        more = relative * tile @ np.abs(w.astype(np.float64)), relative * tile.T @ np.abs(x.astype(np.float64))
        gradients = [oracles.Expected(e.values, e.bound + m) for e, m in zip(gradients, more, strict=True)]
    # Each shard adds a rounding error.
    engine.assert_solved(problem, results, (loss, *(oracles.Expected(e.values, 2 * e.bound) for e in gradients)))


def test_a_row_lives_in_exactly_one_shard(backend):
    x, w = np.ones((50, 3)), np.ones((30, 3))
    target = generator("owners").integers(0, 30, 50)
    masks = []
    for start, end in itertools.pairwise((0, 7, 7, 19, 30)):
        shard = w[start:end] if end > start else w[:1]
        statistics = ag.fused_linear_online_max_sum(x, shard, target, start, end, backend=backend)
        masks.append(np.unpackbits(statistics.target_mask, bitorder="little"))
        here = (target >= start) & (target < end)
        assert np.array_equal(statistics.masked_target, np.where(here, target - start, 0))
        assert not np.any(masks[-1][50:])  # bits beyond the last row are 0
    assert np.all(sum(1 - mask[:50] for mask in masks) == 1)


# ---- one call is the chain of three ----------------------------------------------------------------------------------


def test_one_call_equals_the_chain(dtype, engine):
    for shape in (Shape(3, 256, 17), Shape(41, 67, 19), Shape(97, 1500, 33)):
        check_chain(whole_problem(shape, dtype, reduction="none"), dtype, engine)


def check_chain(problem: LinearProblem, dtype: str, engine) -> None:
    arguments = problem.arguments
    x, w, target, grad = (arguments[name] for name in ("input", "weight", "target", "grad_loss"))
    loss, input_grad, weight_grad = engine.solve(problem)
    start = arguments["vocab_start_index"]
    statistics = engine.call(STATISTICS, x, w, target, start, start + len(w))
    losses, _ = engine.call(LOSS, *statistics[:3])
    counted = target != arguments["ignore_index"]
    gradients = engine.call(
        GRADIENT,
        np.where(counted, grad, 0).astype(grad.dtype),
        *(x, w, statistics.target_mask, statistics.masked_target),
        logits_max=statistics.logits_max,
        sum_exp_logits=statistics.sum_exp_logits,
    )
    tolerance = {"float32": 1e-5, "float64": 1e-13}.get(dtype, 2**-6 if dtype == "bfloat16" else 2**-9)
    chain = np.where(counted, losses, 0), *gradients
    for result, right in zip((loss, input_grad, weight_grad), chain, strict=True):
        result, right = result.astype(np.float64), right.astype(np.float64)
        np.testing.assert_allclose(result, right, rtol=tolerance, atol=tolerance * np.abs(right).max(initial=0))


# ---- options of the whole loss ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_reductions(reduction, dtype, engine):
    for shape in ((1, 1, 1), (9, 50, 18), (41, 67, 19), (70, 1100, 50)):
        problem = problem_of(WHOLE, shape, dtype, reduction=reduction)
        engine.assert_solved(problem, engine.solve(problem))


def test_nothing_but_ignored_rows(dtype, engine):
    x, w = np.full((5, 3), np.nan).astype(DTYPES[dtype]), np.ones((4, 3), DTYPES[dtype])
    for target in (np.full(5, -100), np.full(5, -100, np.int32)):
        for reduction, loss in (("mean", np.nan), ("sum", 0.0), ("none", np.zeros(5))):
            problem = LinearProblem(WHOLE, {"input": x, "weight": w, "target": target, "reduction": reduction})
            result = engine.solve(problem)
            np.testing.assert_array_equal(result.loss, loss)
            assert result.loss.dtype == accumulator(DTYPES[dtype])
            assert_identical(result.input_grad, np.zeros_like(x))
            assert_identical(result.weight_grad, np.zeros_like(w))
    none = engine.solve(LinearProblem(WHOLE, {"input": x[:0], "weight": w, "target": target[:0]}))
    assert np.isnan(none.loss)
    assert_identical(none.weight_grad, np.zeros_like(w))


def test_ignored_rows_do_not_count_whatever_they_hold(dtype, engine):
    problem = problem_of(WHOLE, (41, 67, 19), dtype, reduction="mean")
    target = problem.arguments["target"]
    ignored = target == problem.arguments["ignore_index"]
    assert 0 < ignored.sum() < 41
    expected = engine.solve(problem)
    for junk in (np.nan, np.inf, 0):
        x = problem.arguments["input"].copy()
        x[ignored] = junk
        for result, right in zip(engine.solve(problem.replaced(input=x)), expected, strict=True):
            assert_identical(result, right)
    assert not np.any(expected.input_grad[ignored])
    # A call without these rows has the same results, except for the order of sums.
    kept = problem.replaced(input=problem.arguments["input"][~ignored], target=target[~ignored])
    engine.assert_solved(kept, engine.solve(kept))
    np.testing.assert_allclose(engine.solve(kept).loss, expected.loss, rtol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_what_is_not_asked_for_is_none(reduction, dtype, engine):
    problem = problem_of(WHOLE, (41, 67, 19), dtype, reduction=reduction)
    right = linear_oracles.expected(problem)
    for chosen in ((True, False), (False, True), (False, False)):
        results = engine.solve(problem, output_mask=chosen)
        wanted = right[0], *(e if c else None for e, c in zip(right[1:], chosen, strict=True))
        engine.assert_solved(problem, results, wanted)
        engine.assert_solved(
            problem, engine.solve(problem, output_mask=chosen, return_grad=False), (right[0], None, None)
        )


def test_upstream_gradients(dtype, engine):
    problem = problem_of(WHOLE, (41, 67, 19), dtype, reduction="mean")
    plain = engine.solve(problem.replaced(grad_loss=None))
    for result, right in zip(engine.solve(problem.replaced(grad_loss=1)), plain, strict=True):
        assert_identical(result, right)
    # A power of two changes exponents only. An upstream gradient of 0 makes every row absent.
    double = engine.solve(problem.replaced(grad_loss=2.0))
    assert_identical(double.loss, plain.loss)
    if dtype in ("float32", "float64"):
        assert_identical(double.weight_grad, 2 * plain.weight_grad)
    zero = engine.solve(problem.replaced(grad_loss=0.0))
    assert_identical(zero.loss, plain.loss)
    assert_identical(zero.input_grad, np.zeros_like(zero.input_grad))
    assert_identical(zero.weight_grad, np.zeros_like(zero.weight_grad))


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_the_whole_loss_is_not_filtered(eps, dtype, engine):
    """`filter_eps` changes the gradients only, within the bound of the gradient operator."""
    problem = problem_of(WHOLE, (97, 1500, 33), dtype, reduction="sum", kind="peaked")
    results = engine.solve(problem, filter_eps=eps)
    loss, *gradients = linear_oracles.expected(problem)
    x, w = (np.abs(problem.arguments[name].astype(np.float64)) for name in ("input", "weight"))
    counted = problem.arguments["target"] != problem.arguments["ignore_index"]
    admitted = eps * counted[:, None] * w.sum(0), np.broadcast_to(eps * x[counted].sum(0), w.shape)
    right = [oracles.Expected(e.values, e.bound + more) for e, more in zip(gradients, admitted, strict=True)]
    engine.assert_solved(problem, results, (loss, *right))
    assert_identical(results.loss, engine.solve(problem).loss)


# ---- statistics ------------------------------------------------------------------------------------------------------


def test_statistics_do_not_depend_on_the_logits_being_asked_for(dtype, engine):
    for shape in ((41, 67, 19), (7, 48, 2), (70, 1100, 50)):
        problem = problem_of(STATISTICS, shape, dtype)
        *with_logits, _ = engine.solve(problem)
        *without, nothing = engine.solve(problem.replaced(return_logits=False))
        assert nothing is None
        for result, right in zip(without, with_logits, strict=True):
            assert_identical(result, right)


def test_the_gradient_takes_what_the_statistics_return(dtype, engine):
    """The gradient is 0 if the target's probability is 1, since the one-hot is subtracted at the right place."""
    x, w = np.array([[40.0], [-40.0]]).astype(DTYPES[dtype]), np.array([[1.0], [-1.0]]).astype(DTYPES[dtype])
    statistics = engine.call(STATISTICS, x, w, np.array([0, 1]), 0, 2)
    assert np.all(statistics.sum_exp_logits == 1)
    assert np.all(statistics.predicted_logits == 0)
    problem = LinearProblem(
        GRADIENT,
        {
            "grad": np.ones(2, accumulator(DTYPES[dtype])),
            "input": x,
            "weight": w,
            "target_mask": statistics.target_mask,
            "masked_target": statistics.masked_target,
            "logits_max": statistics.logits_max,
            "sum_exp_logits": statistics.sum_exp_logits,
        },
    )
    for result in engine.solve(problem):
        assert np.all(np.abs(result.astype(np.float64)) < 1e-30)


def test_the_examples_of_the_page():
    page = Path(__file__).parents[2] / "docs" / "linear_cross_entropy.md"
    code = "".join(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE))
    example = doctest.DocTestParser().get_doctest(code, {}, page.name, str(page), 0)
    assert example.examples
    printed: list[str] = []
    assert doctest.DocTestRunner().run(example, out=printed.append).failed == 0, "".join(printed)
