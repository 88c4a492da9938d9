"""Time fits beside scikit-learn's, and boosting objectives beside NumPy: ``python -m ascend_grad.bench.fit``.

This needs scikit-learn (extra ``sklearn``), threadpoolctl and an otherwise idle machine. A fit is a whole call of
``fit``, and an objective what one boosting round calls.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import ascend_grad as ag
from ascend_grad.objectives import lightgbm_softmax, xgboost_softmax

from . import documents, frameworks, machine
from .case import Case
from .frameworks import Call
from .measure import PAUSE, TOLERATED, DisagreementError, best_of_both, least_in_turns
from .report import fit_blocks
from .results import DEMONSTRATION, NUMPY, OWN, SKLEARN, Results, Row

#: Turns of each side, of which the least time counts.
TURNS = 5
#: Attempts at a case that other processes disturbed.
ATTEMPTS = 3
#: The largest differences of coefficients. Both sides stop at the same tolerance, in float32 after a step more or less.
COEFFICIENTS = {"float64": 1e-6, "float32": 1e-2}
#: The largest differences of gradients and Hessians: some roundings to float32.
DERIVATIVES = 1e-6

#: Samples, classes and features of each fit.
SHAPES = ((10_000, 3, 20), (100_000, 2, 30), (100_000, 10, 50), (20_000, 30, 100), (10_000, 10, 784))
FITS = [Case("SoftmaxRegression", dtype, shape, "fit") for shape in SHAPES for dtype in ("float64", "float32")]
#: Each objective with the dtype of the scores that its library passes.
OBJECTIVES = [
    Case(operator, dtype, shape, "objective")
    for operator, dtype in (("xgboost_softmax", "float32"), ("lightgbm_softmax", "float64"))
    for shape in ((10_000, 3), (100_000, 10), (500_000, 5))
]


def fits(case: Case) -> dict[str, Call]:
    """Prepare the fits of both estimators, which return the coefficients."""
    from sklearn.linear_model import LogisticRegression

    from ascend_grad.sklearn import SoftmaxRegression

    rows, classes, features = case.shape
    random = np.random.default_rng(0)
    X = random.standard_normal((rows, features))
    scores = X @ (random.standard_normal((features, classes)) / features**0.5)
    y = (scores + random.gumbel(size=scores.shape)).argmax(axis=1)
    X = X.astype(case.dtype)
    estimators = {OWN: SoftmaxRegression(), SKLEARN[0]: LogisticRegression()}
    return {name: partial(coefficients, estimator, X, y) for name, estimator in estimators.items()}


def coefficients(estimator: Any, X: np.ndarray, y: np.ndarray) -> np.ndarray:
    return estimator.fit(X, y).coef_


def objectives(case: Case) -> dict[str, Call]:
    """Prepare the objective, its formula in NumPy, and the loops of XGBoost's demonstration of such an objective."""
    rows, classes = case.shape
    random = np.random.default_rng(0)
    y = random.integers(0, classes, rows).astype(np.float32)
    is_xgboost = case.operator == "xgboost_softmax"
    scores = np.asarray(random.standard_normal(case.shape), case.dtype, order="C" if is_xgboost else "F")
    factor = 2.0 if is_xgboost else classes / (classes - 1)
    own: Callable[..., Any] = xgboost_softmax if is_xgboost else lightgbm_softmax
    return {
        OWN: partial(own, y, scores),
        NUMPY[0]: partial(formula, y.astype(int), scores, factor),
        DEMONSTRATION: partial(demonstration, y, scores, factor),
    }


def formula(y: np.ndarray, scores: np.ndarray, factor: float) -> tuple[np.ndarray, np.ndarray]:
    """Compute gradient and Hessian as a NumPy user writes them."""
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    hess = np.maximum(factor * p * (1 - p), 1e-16)
    p[np.arange(len(y)), y] -= 1
    return p, hess


def demonstration(y: np.ndarray, scores: np.ndarray, factor: float) -> tuple[np.ndarray, np.ndarray]:
    """Compute gradient and Hessian in loops over rows and classes, as the demonstration ``custom_softmax.py`` does."""
    grad, hess = np.zeros(scores.shape), np.zeros(scores.shape)
    for row in range(len(scores)):
        exponentials = np.exp(scores[row])
        probabilities = exponentials / np.sum(exponentials)
        for k in range(scores.shape[1]):
            p = float(probabilities[k])
            grad[row, k] = p - 1.0 if k == int(y[row]) else p
            hess[row, k] = max(factor * p * (1.0 - p), 1e-16)
    return grad, hess


def measure(case: Case, num_threads: int) -> Row:
    """Time all sides of a case, after a check that their results are equal."""
    calls = fits(case) if case in FITS else objectives(case)
    tolerance = COEFFICIENTS[case.dtype] if case in FITS else DERIVATIVES
    first: dict[str, float] = {}
    with frameworks.threads(num_threads):
        right = frameworks.as_arrays(calls[OWN]())
        for side, call in calls.items():
            start = time.perf_counter()
            found = frameworks.as_arrays(call())
            first[side] = time.perf_counter() - start
            if not all(np.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in zip(found, right)):
                raise DisagreementError(f"{case.name}: {side} computes other values than {OWN}")
        gc.collect()
        start, others = time.perf_counter(), machine.seconds_of_others()
        seconds = least_in_turns(calls, {}, first, TURNS, PAUSE)
        others = (machine.seconds_of_others() - others) / (time.perf_counter() - start)
    return Row(case, seconds, max(0.0, others))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m ascend_grad.bench.fit", description=__doc__)
    parser.add_argument("--threads", type=int, metavar="N", help="default: as the library")
    parser.add_argument("--filter", default="", metavar="TEXT", help="only cases whose name contains this text")
    parser.add_argument("--keep", action="store_true", help="write the results, and the tables of the documents")
    arguments = parser.parse_args()
    if arguments.keep and arguments.filter:
        parser.error("--keep needs a full run, without --filter")
    threads = arguments.threads or ag.get_num_threads()
    rows = [measure(case, threads) for case in (*FITS, *OBJECTIVES) if arguments.filter in case.name]
    for _ in range(ATTEMPTS - 1):
        rows = [row if row.others <= TOLERATED else best_of_both(row, measure(row.case, threads)) for row in rows]
    results = Results(machine.describe(), threads, {"fit": rows})
    print(documents.machine_block(results), *fit_blocks(rows).values(), sep="\n")
    if arguments.keep:
        documents.keep(documents.file_of("fit", 0), results.to_json())


if __name__ == "__main__":
    main()
