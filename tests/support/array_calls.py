"""Call operators with arrays of another library, and with the same arrays of NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from linear_samples import problem_of
from samples import DTYPES, random_problem

import ascend_grad as ag

#: Makes an array of another library from one of NumPy.
Make = Callable[[np.ndarray], Any]


def rowwise_results(make: Make, operator: str, dtype: str, shape: tuple[int, ...], backend: str) -> tuple[Any, Any]:
    """Return a row-wise operator's result for arrays of the library, and for arrays of NumPy."""
    problem = random_problem(operator, shape, DTYPES[dtype])
    function = getattr(ag, operator)
    expected = function(*problem.arrays, **problem.settings, backend=backend)
    return function(*map(make, problem.arrays), **problem.settings, backend=backend), expected


def linear_results(make: Make, operator: str, dtype: str) -> tuple[Any, Any]:
    """Return a linear operator's results for arrays of the library, and for arrays of NumPy."""
    problem = problem_of(operator, (19, 33, 21), dtype)
    function = getattr(ag, operator)
    results, expected = function(**problem.mapped(make).arguments), function(**problem.arguments)
    assert type(results) is type(expected)
    return results, expected
