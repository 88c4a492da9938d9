"""The loss of a sparse input and its weight gradient: of this library, by SciPy's products, and of scikit-learn.

A side is a function of the arrays of a problem. Its call returns the loss and the gradient of the weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import ascend_grad as ag

from .. import frameworks
from ..case import Case, numpy_dtype
from ..frameworks import Call
from ..results import CHAIN, NUMPY, OWN, SKLEARN
from .linear import sklearn_loss


class Arrays(NamedTuple):
    """The arrays of one problem: the input in the format CSR, the weight, and the targets."""

    x: Any
    weight: np.ndarray
    target: np.ndarray


def arrays_of(case: Case) -> Arrays:
    """Make the arrays of a problem, for logits of magnitude one or two.

    As words in documents, few features have most of the elements.
    """
    sparse = frameworks.module("scipy.sparse")
    assert sparse is not None
    random, dtype = np.random.default_rng(0), numpy_dtype(case.dtype)
    rows, classes, features = case.shape
    count = case.stored_elements
    places = random.integers(0, rows, count), (features * random.random(count) ** 3).astype(np.int64)
    x = sparse.csr_array((random.random(count) + 0.5, places), (rows, features)).astype(dtype)
    x.sum_duplicates()
    weight = random.standard_normal((classes, features)) * (1.5 / math.sqrt(max(1, count / rows)))
    return Arrays(x, weight.astype(dtype), random.integers(0, classes, rows))


def ascend_grad(a: Arrays) -> Call:
    return lambda: ag.linear_cross_entropy(*a)[::2]


def chain(a: Arrays) -> Call:
    """Prepare SciPy's products with this library's loss of logits between them."""

    def call() -> tuple[Any, np.ndarray]:
        loss, gradient = ag.cross_entropy(a.x @ a.weight.T, a.target)
        return loss, (a.x.T @ gradient).T

    return call


def numpy_formula(a: Arrays) -> Call:
    """Prepare SciPy's products with NumPy's formula between them."""
    rows = np.arange(len(a.target))

    def call() -> tuple[Any, np.ndarray]:
        p = a.x @ a.weight.T
        p -= p.max(axis=1, keepdims=True)
        predicted = p[rows, a.target]
        np.exp(p, out=p)
        total = p.sum(axis=1)
        p /= total[:, None]
        p[rows, a.target] -= 1
        p /= len(rows)
        return np.mean(np.log(total) - predicted, dtype=p.dtype), (a.x.T @ p).T

    return call


def scikit_learn(a: Arrays) -> Call | None:
    return sklearn_loss(*a)


SIDES: dict[str, Callable[[Arrays], Call | None]] = {
    OWN: ascend_grad,
    CHAIN: chain,
    NUMPY[0]: numpy_formula,
    SKLEARN[0]: scikit_learn,
}
