"""Test that results of every operator, dtype and CPU variant are within the documented bounds."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import oracles
import pytest
from samples import (
    BACKWARD,
    DTYPES,
    MASKED,
    OPERATORS,
    UNMASKED,
    Problem,
    adversarial_problem,
    assert_identical,
    generator,
    native_copy,
    random_problem,
)

import ascend_grad as ag
from ascend_grad.operators import table

#: Sizes around the edges of vectors, of float32 chains and of column blocks.
SIZES = (1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 97, 255, 256, 257, 1000, 2047, 2048, 2049, 5000)


@functools.lru_cache(maxsize=256)
def expected(operator: str, n: int, dtype: str, out_dtype=None, kinds=None) -> oracles.Expected:
    problem = adversarial_problem(operator, n, dtype, kinds)
    return oracles.expected(operator, problem.arrays, **problem.settings, out_dtype=out_dtype)


def test_adversarial_rows(operator, dtype, engine):
    engine.over(SIZES, lambda n: check_adversarial_rows(operator, dtype, n, engine))


def check_adversarial_rows(operator: str, dtype: str, n: int, engine) -> None:
    problem = adversarial_problem(operator, n, dtype)
    last = engine(problem)
    engine.assert_within(expected(operator, n, dtype), problem, last)
    accumulator = oracles.precision_of(problem.dtype).dtype
    if problem.dtype != accumulator:
        unrounded = engine(problem, out=np.empty(problem.shape, accumulator))
        engine.assert_within(expected(operator, n, dtype, accumulator), problem, unrounded)
    if operator in MASKED:
        return
    # The same rows are given as columns of a matrix, and as columns of two matrices, the second in reverse order.
    first = problem.replaced(*(np.ascontiguousarray(a.T) for a in problem.arrays), axis=0)
    assert_same_values(engine(first).T, last)
    middle = problem.replaced(*(np.stack([a, a[::-1]]).swapaxes(1, 2).copy() for a in problem.arrays), axis=1)
    assert_same_values(engine(middle)[0].T, last)
    assert_same_values(engine(middle)[1].T, last[::-1])


def assert_same_values(got: np.ndarray, expected: np.ndarray) -> None:
    """Check that two arrays are identical except for the sign and payload of NaN."""
    got, expected = native_copy(got), native_copy(expected)
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(got), nan)
    assert_identical(np.where(nan, 0, got), np.where(nan, 0, expected))


def test_a_million_elements_in_a_row(operator, dtype, cpu_engine):
    n, kinds = 2**20, ("positive", "constant")
    problem = adversarial_problem(operator, n, dtype, kinds)
    last = cpu_engine(problem)
    cpu_engine.assert_within(expected(operator, n, dtype, kinds=kinds), problem, last)
    if operator in UNMASKED:
        columns = problem.replaced(*(np.ascontiguousarray(a.T) for a in problem.arrays), axis=0)
        assert_same_values(cpu_engine(columns).T, last)


def test_a_million_small_terms_beside_a_large_one(cpu_engine):
    """A million terms of 2**-66 beside a 1 are not lost.

    The sum of a segment, which has at most 1024 terms, would be lost if it were added to 1 in float64.
    """
    n = 2**20
    g, y = np.full((1, n), 2.0**-66), np.zeros((1, n))
    g[0, 0] = 1
    problem = random_problem("log_softmax_backward", (1, n), np.dtype(np.float64), 1).replaced(g, y)
    columns = problem.replaced(g.T.copy(), y.T.copy(), axis=0)
    for result in (cpu_engine(problem)[0], cpu_engine(columns)[:, 0]):
        assert np.abs(result[1:] + (1 + 2.0**-46)).max() <= 2.0**-51


@pytest.mark.parametrize("operator", UNMASKED)
def test_columns(operator, dtype, engine):
    def check(shape: tuple[int, int]) -> None:
        problem = random_problem(operator, shape, DTYPES[dtype], axis=0)
        engine.assert_right(problem, engine(problem))

    engine.over(list(itertools.product((2, 17, 40), [*SIZES[1:-1:2], 4100])), check)


@pytest.mark.parametrize("operator", MASKED)
def test_masks_and_scales(operator, dtype, engine):
    for scale in (1.0, 0.1, -2.5, 0.0, 1e-30, 1e30, 3):
        problem = random_problem(operator, (2, 3, 5, 37), DTYPES[dtype]).replaced(scale=scale)
        *rest, mask = problem.arrays
        for heads in ((1, 1), (1, 3), (2, 1), (2, 3)):
            part = mask[: heads[0], : heads[1]].copy()
            whole = problem.replaced(*rest, np.broadcast_to(part, mask.shape))
            result = engine(problem.replaced(*rest, part))
            engine.assert_right(whole, result)
            assert_identical(engine(whole), result)


@pytest.mark.parametrize("real", [np.float32, np.float64])
def test_exponentials_that_underflow(real, cpu_engine):
    """Exponentials in float32 are normal or 0, as subnormal numbers are slow. In float64 they underflow gradually."""
    info = np.finfo(real)
    near = []
    for least in (info.smallest_normal, info.smallest_subnormal / np.longdouble(2)):
        edge = real(np.log(np.longdouble(least)))
        near.append(edge)
        for end in (-np.inf, 0):
            x = edge
            for _ in range(5):
                x = np.nextafter(x, real(end))
                near.append(x)
    x = np.array([0, *near, *np.linspace(1.3 * near[0], 0.9 * near[0], 1001), -10000, -np.inf], real)
    g = np.zeros_like(x)
    g[0] = 1
    got = -ag.log_softmax_backward(g, x)[1:]
    exact = np.exp(x[1:].astype(np.longdouble))
    is_normal = exact >= info.smallest_normal
    if real == np.float32:
        np.testing.assert_array_equal(got[~is_normal], 0)
    assert np.all(
        np.abs(got - exact)
        <= 2 * info.eps * exact
        + np.where(is_normal, 0, info.smallest_subnormal)
        + np.where(is_normal | (real == np.float64), 0, exact)
    )


@pytest.mark.parametrize("packed", [True, False])
def test_nan_does_not_depend_on_threads(packed, cpu_engine):
    """Rows with NaN of both signs have the same bits for any number of threads, in row blocks and in the remainder."""
    for n, turn in itertools.product((*range(1, 9), 10, 20, 40, 50, 64, 100, 2500), range(3)):
        first, second = ((n // 3, n // 2), (n - 1, n // 2), (n - 1, 0))[turn]
        x = np.zeros((1003, n if packed else n + 3), np.float32)[:, :n]
        x[:, first] = np.nan
        x[:, second] = -np.nan
        for function in (ag.softmax, ag.log_softmax):
            expected = function(x, num_threads=1)
            for threads in (2, 3, 4):
                assert_identical(function(x, num_threads=threads), expected)


def test_rows_of_a_few_elements(operator, dtype, engine):
    """Short rows, of which several are computed at a time, have the bits of a row that is computed separately."""

    def check(size: tuple[int, int]) -> None:
        problem = random_problem(operator, (1, 1, *size) if operator in MASKED else size, DTYPES[dtype])
        result = engine(problem)
        engine.assert_right(problem, result)
        last = problem.replaced(*(array[..., -1:, :] for array in problem.arrays))
        assert_identical(engine(last), result[..., -1:, :])

    engine.over(list(itertools.product((7, 300, 1074), (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 15, 17, 31))), check)


# ---- NaN and infinity ------------------------------------------------------------------------------------------------


def test_special_values_propagate(operator, dtype, engine):
    """NaN and infinity propagate from any array, and from the start, the middle and the end of a row."""

    def check(n: int) -> None:
        places = list(itertools.product((np.nan, np.inf, -np.inf), range(2), (0, n // 2, n - 1)))
        shape = (1, 1, len(places), n) if operator in MASKED else (len(places), n)
        problem = random_problem(operator, shape, DTYPES[dtype])
        floats = [array for array in problem.arrays if array.dtype != bool]
        for row, (special, which, at) in enumerate(places):
            floats[which % len(floats)][..., row, at] = special
        result = engine(problem)
        engine.assert_right(problem, result)
        if operator in UNMASKED:
            turned = problem.replaced(*(np.ascontiguousarray(a.T) for a in problem.arrays), axis=0)
            assert_same_values(engine(turned).T, result)

    engine.over([1, 2, 17, 64, 257, 1000], check)


def test_special_values_propagate_between_threads(operator, dtype, cpu_engine):
    """NaN and infinity propagate in a few long rows, which threads compute in splits."""
    n = 20_011
    problem = random_problem(operator, (1, 1, 7, n) if operator in MASKED else (7, n), DTYPES[dtype])
    floats = [array for array in problem.arrays if array.dtype != bool]
    for row, at in enumerate((0, 1, n // 2, n // 2 + 1, n - 2, n - 1)):
        floats[row % len(floats)][..., row, at] = (np.nan, np.inf, -np.inf)[row % 3]
    turned = [problem]
    if operator in UNMASKED:
        turned.append(problem.replaced(*(np.ascontiguousarray(a.T) for a in problem.arrays), axis=0))
    for problem in turned:
        result = cpu_engine(problem, num_threads=2)
        cpu_engine.assert_right(problem, result)
        assert_same_values(result, cpu_engine(problem, num_threads=1))


def test_rows_without_a_finite_logit_are_nan(dtype, engine):
    for operator in ("softmax", "log_softmax"):
        problem = Problem(operator, (np.full((2, 19), -np.inf).astype(DTYPES[dtype]),), {"axis": -1})
        assert np.isnan(engine(problem).astype(np.float32)).all()


def test_a_masked_row_is_uniform(dtype, engine):
    x = np.full((1, 1, 2, 64), np.nan).astype(DTYPES[dtype])
    result = engine(Problem("scaled_masked_softmax", (x, np.ones(x.shape, bool)), {"scale": 2.0}))
    assert_identical(result, np.full(x.shape, 1 / 64).astype(DTYPES[dtype]))


def test_masked_gradients_are_positive_zeros(dtype, engine):
    problem = random_problem("scaled_masked_softmax_backward", (1, 2, 7, 33), DTYPES[dtype])
    g, y, mask = problem.arrays
    for special in (np.nan, np.inf, -np.inf, -1.0):
        g[mask] = special
        result = engine(problem.replaced(g, y, mask, scale=-1.0))
        assert_identical(result[mask], np.zeros(mask.sum(), DTYPES[dtype]))


def test_scales_beyond_the_finite(dtype, engine):
    for scale in (np.nan, np.inf, -np.inf, 1e300):
        problem = random_problem("scaled_masked_softmax_backward", (1, 1, 3, 20), DTYPES[dtype]).replaced(scale=scale)
        result = engine(problem).astype(np.float64)
        mask = problem.arrays[-1]
        assert np.all(result[mask] == 0)
        if not (dtype == "float64" and scale == 1e300):
            assert not np.isfinite(result[~mask]).any()
        assert np.isnan(result[~mask]).all() == np.isnan(scale)


# ---- known values ----------------------------------------------------------------------------------------------------

WORKED = {
    "softmax_backward": [[-28, -37], [-26, -70], [-48, -66], [-66, -93]],
    "log_softmax_backward": np.arange(8).reshape(4, 2) - [12, 16] * np.exp([[1, 1], [1, 2], [2, 2], [3, 3]]),
}


@pytest.mark.parametrize("operator", WORKED)
def test_worked_values(operator, dtype, engine):
    g = np.arange(8.0).reshape(4, 2).astype(DTYPES[dtype])
    y = np.array([[1, 1], [1, 2], [2, 2], [3, 3]]).astype(DTYPES[dtype])
    problem = Problem(operator, (g, y), {"axis": 0})
    result = engine(problem)
    engine.assert_right(problem, result)
    tolerance = {"float32": 1e-6, "float64": 1e-14, "float16": 2**-10, "bfloat16": 2**-7}[dtype]
    np.testing.assert_allclose(result.astype(np.float64), WORKED[operator], rtol=tolerance)


def test_worked_values_with_a_mask(dtype, engine):
    g = np.arange(1.0, 17).reshape(2, 2, 2, 2).astype(DTYPES[dtype])
    mask = np.tile([True, True, False, False], 4).reshape(g.shape)
    result = engine(Problem("scaled_masked_softmax_backward", (g, g, mask), {"scale": 1.0}))
    kept = [-66, -84, -742, -840, -2794, -3036, -6990, -7440]
    assert_identical(result[~mask], np.array(kept, np.float64).astype(DTYPES[dtype]))
    assert_identical(result[mask], np.zeros(8, DTYPES[dtype]))


FORWARD = {"softmax_backward": "softmax", "log_softmax_backward": "log_softmax"} | {
    "scaled_masked_softmax_backward": "scaled_masked_softmax"
}


@pytest.mark.parametrize(
    ("operator", "axis"), [(name, axis) for name in BACKWARD for axis in range(4) if name in UNMASKED or axis == 3]
)
def test_gradients_are_finite_differences_of_the_forward_twins(operator, axis, backend):
    forward, backward = (getattr(ag, name) for name in (FORWARD[operator], operator))
    random = generator(operator, axis)
    shape = (2, 3, 4, 5)
    x, weights = random.standard_normal((2, *shape))
    settings = {"backend": backend}
    more = ()
    if operator in MASKED:
        more, settings = (random.random(shape) < 0.3,), settings | {"scale": 1.3}
    else:
        settings |= {"axis": axis}
    step = 1e-5
    numeric = np.empty(shape)
    for index in np.ndindex(shape):
        up, down = x.copy(), x.copy()
        up[index] += step
        down[index] -= step
        numeric[index] = np.sum(weights * (forward(up, *more, **settings) - forward(down, *more, **settings)))
    numeric /= 2 * step
    analytic = backward(weights, forward(x, *more, **settings), *more, **settings)
    np.testing.assert_allclose(analytic, numeric, rtol=1e-7, atol=1e-8)


def test_every_operator_is_tested():
    assert set(OPERATORS) == {operator.name for operator in table.ROWWISE}
