"""Test `workspace_size` and `workspace_bytes` of the linear operators, and extreme sizes and values."""

from __future__ import annotations

import functools
import itertools
import tracemalloc

import numpy as np
import pytest
from linear_faults import BT, CALLS, H, V, good_call
from linear_samples import GRADIENT, LOSS, WHOLE, Shape, accumulator, problem_of
from samples import DTYPES, assert_identical

import ascend_grad as ag


def test_workspace_size_knows_shapes_alone(linear):
    """The size does not depend on values, and is returned even if the memory cannot be allocated."""
    case = next(case for case, (operator, _) in CALLS.items() if operator == linear)
    assert isinstance(ag.workspace_size(linear, **good_call(case)), int)
    if linear == LOSS:
        return
    problem = problem_of(linear, Shape(BT, V, H), "float32")
    size = ag.workspace_size(linear, **problem.arguments)
    zeros = {name: np.zeros_like(problem.arguments[name]) for name in ("input", "weight")}
    assert ag.workspace_size(linear, **problem.replaced(**zeros).arguments) == size
    huge = problem.replaced(
        input=np.broadcast_to(np.float32(0), (BT, 2**31)), weight=np.broadcast_to(np.float32(0), (V, 2**31))
    )
    assert ag.workspace_size(linear, **huge.arguments) > 0


def test_a_workspace_is_kept_to():
    """A call takes at most the workspace, accumulators of the size of `input`, and some numbers for each row."""
    rows, hidden = 1000, 40
    for case in ("recomputed", "stored", "whole"):
        operator, how = CALLS[case]
        for dtype in DTYPES:
            problem = problem_of(operator, Shape(rows, 500, hidden), dtype, **how)
            sums = accumulator(DTYPES[dtype]).itemsize * rows * hidden
            for nbytes in (2**22, 2**24, 2**27):
                size = ag.workspace_size(operator, **problem.arguments, workspace_bytes=nbytes)
                assert size <= nbytes + sums + min(sums, nbytes // 4) + 64 * rows
            default = ag.workspace_size(operator, **problem.arguments)
            assert default <= 2**26 + 2 * sums + 64 * rows


def allocated(function, **arguments) -> int:
    """Return the most bytes that a call allocates beyond its results."""
    function(**arguments)
    tracemalloc.start()
    try:
        results = function(**arguments)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return peak - sum(result.nbytes for result in results if result is not None)


@pytest.mark.parametrize("rows", [60, 220, 280])
def test_workspace_size_covers_losses_of_fewer_rows(rows):
    """The size is enough for fewer active rows, whose plans differ: their logits, for example, may be cached."""
    arguments = {
        "input": np.ones((280, 8), np.float32),
        "weight": np.ones((3640, 8), np.float32),
        "target": np.where(np.arange(280) < rows, 0, -100),
        "workspace_bytes": 7 << 20,
    }
    assert allocated(ag.linear_cross_entropy, **arguments) <= ag.workspace_size(WHOLE, **arguments) + 2**14


def test_workspace_size_covers_gradients_of_fewer_rows():
    """The size is enough for 420 active rows, which take one larger sweep for both gradients, not one for each."""
    problem = problem_of(GRADIENT, Shape(600, 200, 8000), "float32", mode="stored")
    grad = problem.arguments["grad"].copy()
    grad[420:] = 0
    arguments = problem.replaced(grad=grad).arguments | {"workspace_bytes": 22 << 20}
    size = ag.workspace_size(GRADIENT, **arguments)
    assert allocated(ag.fused_linear_cross_entropy_loss_grad, **arguments) <= size + 2**14


def test_workspace_size_covers_sums_of_losses_of_fewer_rows():
    """The size is enough for fewer active rows, whose logits are cached and whose input_grad is summed elsewhere."""
    arguments = {
        "input": np.ones((20_000, 64), np.float16),
        "weight": np.ones((20_600, 64), np.float16),
        "target": np.where(np.arange(20_000) < 100, 0, -100),
        "workspace_bytes": 22 << 20,
    }
    assert allocated(ag.linear_cross_entropy, **arguments) <= ag.workspace_size(WHOLE, **arguments) + 2**14


def test_workspace_size_covers_the_vectors_of_a_loss():
    x, w, target = np.ones((200_000, 1)), np.ones((2, 1)), np.zeros(200_000, int)
    arguments = {"input": x, "weight": w, "target": target, "return_grad": False}
    assert allocated(ag.linear_cross_entropy, **arguments) <= ag.workspace_size(WHOLE, **arguments) + 2**14


def test_the_default_workspace_is_a_share_of_large_problems():
    x, w = (np.broadcast_to(np.float32(1), (rows, 4096)) for rows in (8192, 10**5))
    target = np.zeros(8192, int)
    share = 2 * (x.nbytes + w.nbytes) // 4
    assert 2**26 < share <= ag.workspace_size(WHOLE, x, w, target) <= share + 64 * 8192
    assert ag.workspace_size(WHOLE, x, w, target, workspace_bytes=2**26) <= 2**26 + 64 * 8192
    one = ag.workspace_size(WHOLE, x, w, target, output_mask=(False, True))
    assert one <= (x.nbytes + 2 * w.nbytes) // 4 + 64 * 8192
    small = ag.workspace_size(WHOLE, x[:100], w[:1000], target[:100])
    assert small <= 2**26 + 64 * 100


def test_copies_of_overlapping_results_are_in_the_workspace():
    arguments = dict(problem_of(GRADIENT, Shape(100, 50, 40), "float32").arguments)
    x, w = (arguments[name].copy() for name in ("input", "weight"))
    arguments |= {"input": x, "weight": w}

    def size(*outs):
        return ag.workspace_size(GRADIENT, **arguments, out=outs)

    fresh = np.empty_like(x), np.empty_like(w)
    assert size(x, None) - size(fresh[0], None) == x.nbytes
    assert size(x, w) - size(*fresh) == x.nbytes + w.nbytes
    assert size(fresh[0], w) - size(*fresh) == w.nbytes


def test_workspace_size_of_extreme_calls():
    for features in (0, 3, 3000):
        x, w = np.zeros((2, features)), np.zeros((4, features))
        size = ag.workspace_size("linear_cross_entropy", x, w, np.zeros(2, int), workspace_bytes=2**63 - 1)
        assert 0 < size < 2**20
    vector = np.broadcast_to(np.float32(1), 2**50)
    assert ag.workspace_size("fused_cross_entropy_loss_with_max_sum", vector, vector, vector) >= 2**50
    vector = np.broadcast_to(np.float32(1), 2**58)
    with pytest.raises(MemoryError, match="exceeds the address space"):
        ag.workspace_size("fused_cross_entropy_loss_with_max_sum", vector, vector, vector)
    # Neither the vocabulary nor the set of active rows has an element.
    x, target = np.zeros((4, 6), np.float32), np.zeros(4, int)
    assert ag.workspace_size("linear_cross_entropy", x, x[:0], target, ignore_index=0) >= 0
    assert np.isnan(ag.linear_cross_entropy(x, x[:0], target, ignore_index=0).loss)


def test_sizes_near_the_end_of_integers():
    """Rows without a stride may have 2**58 elements. A panel of such rows exceeds every `workspace_bytes`."""
    x, w = (np.broadcast_to(np.float32(0), (rows, 2**58)) for rows in (3, 5))
    arguments = {"input": x, "weight": w, "target": np.zeros(3, int), "return_grad": False}
    for nbytes in (2**22, 2**40):
        with pytest.raises(ag.ParamInvalidError, match="workspace_bytes: expected an int of at least"):
            ag.workspace_size(WHOLE, **arguments, workspace_bytes=nbytes)
    assert ag.workspace_size(WHOLE, **arguments) > 2**40


@pytest.mark.parametrize("case", ["recomputed", "stored", "whole"])
def test_the_least_workspace_is_told_and_enough(case, dtype, default_engine):
    """A call takes the least `workspace_bytes`. With fewer bytes, its error names the least, on every backend."""
    operator, how = CALLS[case]
    problem = problem_of(operator, Shape(140, 150, 30_000), dtype, **how)
    least = ag.workspace_size(operator, **problem.arguments, workspace_bytes=0)
    assert 2**22 <= least < 2**25  # 2**22 with the small tiles of NEON
    default_engine.assert_solved(problem, default_engine.solve(problem, workspace_bytes=least))
    for backend, fewer in itertools.product(("cpu", "reference"), (least - 1, 2**22 - 1, -1)):
        expected = f"workspace_bytes: expected an int of at least {least}, "
        with pytest.raises(ag.ParamInvalidError, match=expected) as caught:
            getattr(ag, operator)(**problem.arguments, workspace_bytes=fewer, backend=backend)
        assert caught.value.code == 161002


def test_the_default_is_the_least_workspace_where_that_is_more():
    least, features = 0, 150_000
    while least <= 2**26:  # with the small tiles of AVX2 and NEON after further steps
        features *= 2
        x, w = (np.broadcast_to(np.full(features, 2.0**-9, np.float32), (rows, features)) for rows in (70, 100))
        arguments = {"input": x, "weight": w, "target": np.arange(70), "return_grad": False}
        least = ag.workspace_size(WHOLE, **arguments, workspace_bytes=0)
    assert ag.workspace_size(WHOLE, **arguments) >= least
    results = [ag.linear_cross_entropy(**arguments, workspace_bytes=nbytes).loss for nbytes in (None, least)]
    assert_identical(*results)
    assert results[0] == pytest.approx(np.log(100), rel=1e-6)


def test_the_least_workspace_of_small_problems_is_that_of_the_contract():
    problem = problem_of(WHOLE, Shape(BT, V, H), "float32")
    assert ag.workspace_size(WHOLE, **problem.arguments, workspace_bytes=0) == 2**22
    for function in (ag.linear_cross_entropy, functools.partial(ag.explain, WHOLE)):  # `explain` and calls refuse 0
        with pytest.raises(ag.ParamInvalidError, match="workspace_bytes: expected an int of at least"):
            function(**problem.arguments, workspace_bytes=0)


@pytest.mark.parametrize("start", [2**63 - 20, 2**63 - 21, 2**63 - 40])
def test_the_largest_ids_of_all(start):
    x, w = np.eye(3, 4), np.random.default_rng(0).standard_normal((20, 4))
    target = np.array([start, start + 5, start])
    results = [
        ag.linear_cross_entropy(x, w, target, vocab_start_index=start, reduction="sum", backend=backend)
        for backend in ("cpu", "reference")
    ]
    for own, right in zip(*results, strict=True):
        np.testing.assert_allclose(own, right, rtol=1e-12, atol=1e-14)


def test_overflow_is_no_warning():
    """A loss that overflows is inf in any layout, without a warning under any `np.errstate`."""
    x = np.zeros((200, 2), np.float32)
    x[:, 0] = 1e37
    w = np.array([[1, 0], [0, 0]], np.float32)
    with np.errstate(all="raise"):
        for rows in (x, x[::-1]):
            assert ag.linear_cross_entropy(rows, w, np.ones(200, int), reduction="sum").loss == np.inf


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_loss_of_any_totals(dtype):
    """The loss takes any sums without a warning under any `np.errstate`, with equal bits in either byte order."""
    random = np.random.default_rng(0)
    real = accumulator(DTYPES[dtype])
    logits = random.standard_normal((23, 37)).astype(DTYPES[dtype])
    largest, predicted = random.standard_normal((2, 23)).astype(real)
    total = random.uniform(1, 9, 23).astype(real)
    total[:4] = 0, -1, np.inf, np.nan
    swapped = [a.astype(a.dtype.newbyteorder()) for a in (largest, total, predicted)]
    for given in (None, logits):
        with np.errstate(all="raise"):
            loss, softmax = ag.fused_cross_entropy_loss_with_max_sum(
                largest, total, predicted, vocab_parallel_logits=given
            )
            apart, softmax_apart = ag.fused_cross_entropy_loss_with_max_sum(*swapped, vocab_parallel_logits=given)
        assert_identical(apart, loss)
        assert (softmax is None) == (softmax_apart is None) == (given is None)
        if given is not None:
            assert_identical(softmax_apart, softmax)
    with np.errstate(all="ignore"):
        expected = np.log(total.astype(np.float64)) - predicted
    np.testing.assert_allclose(loss, expected, rtol=4 * np.finfo(real).eps, atol=4 * np.finfo(real).eps)
