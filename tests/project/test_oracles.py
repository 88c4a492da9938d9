"""Test the checkers of the tests: they accept right results and find wrong ones."""

from __future__ import annotations

import numpy as np
import oracles
import pytest
from samples import (
    BFLOAT16,
    DTYPES,
    GUARD,
    OPERATORS,
    Layout,
    allocated,
    assert_guarded,
    assert_identical,
    bytes_inside,
    laid_out,
    random_problem,
)


@pytest.mark.parametrize("name", ["float16", "float32", "float64"])
def test_half_an_ulp(name):
    values = np.array([1.0, 1.5, 2.0, 1023.0, 6.2e-5, 1e-7, 0.0], name)
    spacing = np.spacing(values).astype(np.longdouble)
    np.testing.assert_array_equal(oracles.half_ulp(values.astype(np.longdouble), np.dtype(name)), spacing / 2)


def test_half_an_ulp_of_bfloat16():
    assert oracles.half_ulp(np.array([1.0, 2.0, 2.0**-126, 2.0**-130]), BFLOAT16).tolist() == [
        2.0**-8,
        2.0**-7,
        2.0**-134,
        2.0**-134,
    ]


@pytest.mark.parametrize("operator", OPERATORS)
def test_oracles_know_right_from_wrong(operator, dtype):
    problem = random_problem(operator, (1, 2, 3, 40), DTYPES[dtype])
    expected = oracles.expected(operator, problem.arrays, **problem.settings)
    right = expected.values.astype(np.float64).astype(DTYPES[dtype])
    assert np.max(oracles.errors(right, expected)) <= 1
    at = np.unravel_index(np.argmax(np.abs(expected.values)), right.shape)
    for wrong in (right[at] * DTYPES[dtype].type(1 + 2**-6), np.nan, np.inf):
        spoilt = right.copy()
        spoilt[at] = wrong
        errors = oracles.errors(spoilt, expected)
        assert errors[at] > 1
        assert np.sum(errors > 1) == 1


def test_oracles_know_nan_and_infinity():
    expected = oracles.Expected(np.array([np.nan, np.inf, -np.inf]), np.zeros(3))
    assert oracles.errors(np.array([np.nan, np.inf, -np.inf]), expected).tolist() == [0, 0, 0]
    assert oracles.errors(np.array([0, -np.inf, np.nan]), expected).tolist() == [np.inf] * 3


def test_values_beyond_the_range_are_infinite():
    g = np.array([[200.0, -200.0]], np.float32)
    y = np.array([[500.0, 500.0]], np.float32)
    values, bound = oracles.expected("softmax_backward", (g, y), out_dtype=np.dtype(np.float16))
    assert values.tolist() == [[np.inf, -np.inf]]
    assert np.isfinite(bound).all()


def test_overflow_of_the_accumulator_is_no_claim():
    g = np.array([[3e38, 1, 2]], np.float32)
    bound = oracles.expected("softmax_backward", (g, g)).bound
    assert np.isinf(bound).all()


@pytest.mark.parametrize(
    "layout", [Layout((0, 1), (1, 1)), Layout((1, 0), (-2, 3), 5), Layout((0, 1), (1, -1), 2, swapped=True)]
)
def test_layouts_and_guards(layout, dtype):
    values = np.arange(12.0).reshape(3, 4).astype(DTYPES[dtype])
    assert_identical(laid_out(values, layout), values)
    view, buffer = allocated((3, 4), DTYPES[dtype], layout)
    view[...] = values
    assert_guarded(view, buffer)
    inside = bytes_inside(view, buffer)
    assert inside.sum() == values.nbytes
    for outside in np.flatnonzero(~inside)[:: max(inside.size // 7, 1)]:
        buffer[outside] ^= 1
        with pytest.raises(AssertionError, match="outside"):
            assert_guarded(view, buffer)
        buffer[outside] = GUARD


def test_identical_means_bits():
    assert_identical(np.array([1, 2], ">f4"), np.array([1, 2], np.float32))
    for other in (np.array([0.0, -0.0]), np.array([0.0], np.float32), np.array([[0.0]]), np.array([1e-300])):
        with pytest.raises(AssertionError):
            assert_identical(np.array([0.0]), other)
    with pytest.raises(AssertionError, match="1 of 2 elements differ, first at 1"):
        assert_identical(np.array([0.0, -0.0]), np.zeros(2))
