"""Compare tokens that are split over ranks with the undivided problem.

The tokens are split alone, or together with the vocabulary on a grid of ranks.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel_samples import even_cuts, of_tokens, of_vocabulary, tokens_rank, whole
from samples import DTYPES, assert_identical
from thread_ranks import Group, on_grid, on_ranks, returned

from ascend_grad import parallel

REDUCTIONS = ("mean", "sum", "none")
SHARES = (True, "scatter")


def solve(problem, cuts, group=None, **options):
    return returned(on_ranks(len(cuts) - 1, lambda comm: tokens_rank(problem, cuts, comm, **options), group))


def check(engine, problem, cuts, share=True, **options):
    results = solve(problem, cuts, reduce_weight_grad=share, **options)
    for each in of_tokens(results, problem.arguments["reduction"], share):
        engine.assert_solved(problem, each)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_every_dtype(default_engine, dtype, size, share, deterministic, reduction):
    problem = whole((50, 33, 17), dtype, reduction=reduction)
    check(default_engine, problem, even_cuts(50, size), share, deterministic=deterministic)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    ("shape", "cuts"),
    [
        ((40, 19, 8), [0, 1, 39, 40]),
        ((1, 12, 5), [0, 0, 1, 1]),
        ((0, 4, 3), [0, 0, 0]),
        ((5, 0, 3), [0, 2, 5]),
        ((5, 4, 0), [0, 2, 5]),
    ],
)
@pytest.mark.parametrize("share", SHARES)
def test_edges(default_engine, shape, cuts, reduction, share):
    check(default_engine, whole(shape, "float32", reduction=reduction), cuts, share)


def test_the_mean_is_over_the_tokens_of_all_ranks(default_engine):
    """The mean is over the tokens of all ranks, not a mean of the ranks' means.

    In this problem one rank has a single token that is not ignored, and one rank has none.
    """
    problem = whole((12, 9, 4), "float64")
    target = np.full(12, -7)
    target[3], target[8:] = 5, [0, 1, 2, 3]
    check(default_engine, problem.replaced(target=target), [0, 2, 7, 12])


def test_all_tokens_are_ignored():
    problem = whole((9, 20, 4), "float32").replaced(target=np.full(9, -7))
    for loss, input_grad, weight_grad in solve(problem, [0, 4, 9]):
        assert np.isnan(loss)
        assert not input_grad.any()
        assert not weight_grad.any()


def test_the_same_bits(dtype):
    problem, cuts = whole((61, 37, 19), dtype), [0, 20, 33, 61]
    group = Group(3)
    runs = [solve(problem, cuts, group, deterministic=True) for _ in range(4)]
    for run in runs:
        for rank, (loss, input_grad, weight_grad) in enumerate(run):
            assert_identical(loss, runs[0][0].loss)
            assert_identical(input_grad, runs[0][rank].input_grad)
            assert_identical(weight_grad, runs[0][0].weight_grad)


def test_operations():
    group = Group(2)
    solve(whole((9, 5, 3), "float32"), [0, 4, 9], group)
    assert group.operations == [("allgather", (1024,)), ("sum", (2,)), ("sum", (16,))]


@pytest.mark.parametrize("mask", [(True, True), (True, False), (False, True), (False, False)])
def test_gradients_that_are_not_asked_for(mask):
    problem = whole((9, 20, 4), "float32")
    for each, full in zip(solve(problem, [0, 4, 9], output_mask=mask), solve(problem, [0, 4, 9])):
        assert_identical(each.loss, full.loss)
        assert (each.input_grad is not None, each.weight_grad is not None) == mask


# ---- tokens and vocabulary on a grid ---------------------------------------------------------------------------------


def check_grid(engine, problem, entries, rows, share=True, **options):
    def work(vocab_comm, comm):
        own = slice(entries[vocab_comm.rank], entries[vocab_comm.rank + 1])
        return tokens_rank(
            problem, rows, comm, own, vocab_comm=vocab_comm, vocab_start_index=own.start, vocab_size=entries[-1],
            reduce_weight_grad=share, **options,
        )  # fmt: skip

    ranks = on_grid(len(entries) - 1, len(rows) - 1, work)
    returned(list(ranks.values()))
    reduction = problem.arguments["reduction"]
    columns = [
        of_tokens([ranks[v, t] for t in range(len(rows) - 1)], reduction, share) for v in range(len(entries) - 1)
    ]
    for row in zip(*columns):
        for each in of_vocabulary(row):
            engine.assert_solved(problem, each)
    return ranks


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_two_by_two(default_engine, dtype, share, reduction, deterministic):
    problem = whole((25, 33, 9), dtype, reduction=reduction)
    check_grid(default_engine, problem, [0, 20, 33], [0, 10, 25], share, deterministic=deterministic)


@st.composite
def grids(draw):
    shape = draw(st.integers(0, 30)), draw(st.integers(0, 30)), draw(st.integers(0, 12))
    dtype, reduction = draw(st.sampled_from(sorted(DTYPES))), draw(st.sampled_from(REDUCTIONS))

    def cuts(count, most):
        size = draw(st.integers(1, most))
        return [0, *sorted(draw(st.lists(st.integers(0, count), min_size=size - 1, max_size=size - 1))), count]

    return whole(shape, dtype, reduction=reduction), cuts(shape[1], 3), cuts(shape[0], 3)


@given(grids(), st.sampled_from(SHARES), st.booleans())
@settings(max_examples=60)
def test_any_grid(default_engine, drawn, share, deterministic):
    problem, entries, rows = drawn
    check_grid(default_engine, problem, entries, rows, share, deterministic=deterministic)


def test_a_grid_of_one_process(default_engine):
    problem = whole((9, 20, 4), "float32")
    a = problem.arguments
    result = parallel.data_parallel_linear_cross_entropy(
        a["input"], a["weight"], a["target"], comm=None, ignore_index=-7, grad_loss=0.7
    )
    default_engine.assert_solved(problem, result)
