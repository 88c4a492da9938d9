"""Test that teams of many more threads than cores give the same bits as one thread, with every schedule."""

from __future__ import annotations

import numpy as np
import pytest
from linear_samples import GRADIENT, LOSS, STATISTICS, WHOLE, Shape, problem_of
from samples import DTYPES, assert_identical, random_problem

import ascend_grad as ag
from ascend_grad import _cpu, _openmp, _rowwise_candidates

pytestmark = pytest.mark.skipif(not _openmp.VERSION, reason="built without OpenMP")

COUNTS = (8, 16, 64)

#: Sweeps that pack with W and with X on the left, with one and several chunks and blocks, and sweeps that pack nothing.
LINEAR_SHAPES = {
    "packed": Shape(300, 1100, 70),
    "few rows": Shape(65, 3000, 96),
    "several chunks": Shape(2100, 1300, 20),
    "vocabulary streamed": Shape(7, 9001, 40),
    "rows streamed": Shape(9001, 5, 40),
    "features": Shape(9, 20, 9000),
}
HOW = {
    "recomputed": (GRADIENT, {"mode": "recomputed"}),
    "stored": (GRADIENT, {"mode": "stored"}),
    "statistics": (STATISTICS, {}),
    "loss": (LOSS, {}),
    "whole": (WHOLE, {"reduction": "mean"}),
}
#: Shapes and dims of row-wise problems that every candidate has plans for, or most of them.
ROWWISE_SHAPES = {"rows": ((40, 9001), 1), "columns": ((9001, 40), 0), "middle": ((6, 3001, 35), 1)}


def assert_same(results, expected) -> None:
    for result, right in zip(results, expected, strict=True):
        if right is not None:
            assert_identical(result, right)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", LINEAR_SHAPES)
@pytest.mark.parametrize("how", HOW)
def test_linear_schedules(how, shape, dtype):
    operator, settings = HOW[how]
    problem = problem_of(operator, LINEAR_SHAPES[shape], dtype, **settings)
    call = getattr(ag, operator)
    expected = call(**problem.arguments, num_threads=1, backend="cpu")
    for count in COUNTS:
        assert_same(call(**problem.arguments, num_threads=count, backend="cpu"), expected)
        assert _openmp.last_team_size() == count


@pytest.mark.parametrize("top_k", [1, 5])
@pytest.mark.parametrize("shape", ["packed", "vocabulary streamed"])
def test_largest_logits(shape, top_k):
    rows, vocab, hidden = LINEAR_SHAPES[shape]
    random = np.random.default_rng(3)
    x, weight = (random.standard_normal((n, hidden), np.float32) for n in (rows, vocab))
    expected = ag.linear_top_k(x, weight, top_k, num_threads=1, backend="cpu")
    for count in COUNTS:
        assert_same(ag.linear_top_k(x, weight, top_k, num_threads=count, backend="cpu"), expected)


@pytest.mark.parametrize("candidate", _rowwise_candidates.names())
@pytest.mark.parametrize("shape", ROWWISE_SHAPES)
@pytest.mark.parametrize("operator", ["softmax", "log_softmax_backward"])
def test_rowwise_schedules(operator, shape, candidate):
    problem = random_problem(operator, ROWWISE_SHAPES[shape][0], DTYPES["float32"], ROWWISE_SHAPES[shape][1])
    call = getattr(ag, operator)
    expected = call(*problem.arrays, **problem.settings, num_threads=1, backend="cpu")
    _rowwise_candidates.force(candidate)
    try:
        for count in COUNTS:
            assert_identical(call(*problem.arrays, **problem.settings, num_threads=count, backend="cpu"), expected)
    finally:
        _rowwise_candidates.force(None)


@pytest.mark.parametrize("candidate", _rowwise_candidates.names())
@pytest.mark.parametrize("shape", ROWWISE_SHAPES)
def test_cross_entropy_schedules(shape, candidate):
    shape, axis = ROWWISE_SHAPES[shape]
    random = np.random.default_rng(4)
    x = random.standard_normal(shape, np.float32)
    target = random.integers(0, shape[axis], shape[:axis] + shape[axis + 1 :])

    def compute(count: int):
        return ag.cross_entropy(x, target, axis, label_smoothing=0.1, num_threads=count, backend="cpu")

    expected = compute(1)
    _rowwise_candidates.force(candidate)
    try:
        for count in COUNTS:
            assert_same(compute(count), expected)
    finally:
        _rowwise_candidates.force(None)


def test_the_number_of_l3_caches_changes_nothing():
    """Non-temporal stores depend on all L3 caches of a team. Their results do not."""
    problem = random_problem("softmax_backward", (300, 2000), DTYPES["float32"], 1)
    expected = ag.softmax_backward(*problem.arrays, **problem.settings, num_threads=1, backend="cpu")
    for count in (1, 8):
        _cpu.force_cache_sizes((2**15, 2**20, 2**21), count)
        result = ag.softmax_backward(*problem.arrays, **problem.settings, num_threads=8, backend="cpu")
        assert_identical(result, expected)
    _cpu.force_cache_sizes()
