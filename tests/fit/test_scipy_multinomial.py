"""Test the objective for optimisers of SciPy: values, gradients, and fits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from samples import generator
from scipy import sparse
from scipy.optimize import approx_fprime, minimize
from scipy.special import log_softmax

import ascend_grad as ag
from ascend_grad import objectives
from ascend_grad.objectives import scipy_multinomial

N, FEATURES, K = 80, 3, 4


def problem(dtype: str = "float64") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = generator("scipy_multinomial", dtype)
    X = random.normal(size=(N, FEATURES))
    y = (X @ random.normal(size=(FEATURES, K)) + random.gumbel(size=(N, K))).argmax(axis=1)
    return X.astype(dtype), y, random.random(N)


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"l2": 0.3},
    {"fit_intercept": False, "l2": 0.1},
    {"reference_class": True},
    {"reference_class": True, "fit_intercept": False, "l2": 0.2},
    {"n_classes": K + 2},
)


def formula(w: np.ndarray, X: np.ndarray, y: np.ndarray, weight: np.ndarray, options: dict[str, Any]) -> float:
    classes = options.get("n_classes", K)
    first = int(options.get("reference_class", False))
    count = (classes - first) * FEATURES
    coef = np.vstack([np.zeros((first, FEATURES)), w[:count].reshape(-1, FEATURES)])
    intercept = np.append(np.zeros(first), w[count:]) if options.get("fit_intercept", True) else np.zeros(classes)
    log_p = log_softmax(X @ coef.T + intercept, axis=1)[np.arange(N), y]
    return -(weight @ log_p) / weight.sum() + options.get("l2", 0) / 2 * np.sum(coef**2)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_values(options, weighted, dtype):
    X, y, weight = problem(dtype)
    found = scipy_multinomial(X, y, sample_weight=weight if weighted else None, **options)
    w = generator("point", len(found.x0)).normal(size=len(found.x0))
    wide = X.astype(np.float64), y, weight if weighted else np.ones(N), options
    tolerance = 1e-12 if dtype == "float64" else 1e-5
    assert found.fun(w) == pytest.approx(formula(w, *wide), rel=tolerance)
    gradient = found.jac(w)
    assert gradient.dtype == np.float64
    np.testing.assert_allclose(gradient, approx_fprime(w, formula, 1e-7, *wide), atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_products_of_the_hessian(options, weighted, dtype):
    X, y, weight = problem(dtype)
    found = scipy_multinomial(X, y, sample_weight=weight if weighted else None, **options)
    exact = scipy_multinomial(X.astype(np.float64), y, sample_weight=weight if weighted else None, **options)
    w, p = generator("product", len(found.x0)).normal(size=(2, len(found.x0)))
    product = found.hessp(w, p)
    assert product.dtype == np.float64
    difference = (exact.jac(w + 1e-5 * p) - exact.jac(w - 1e-5 * p)) / 2e-5
    np.testing.assert_allclose(product, difference, atol=1e-9 if dtype == "float64" else 1e-6)


@pytest.mark.parametrize("method", ["trust-ncg", "Newton-CG"])
@pytest.mark.parametrize("reference_class", [False, True])
def test_a_fit_with_second_derivatives(method, reference_class):
    X, y, weight = problem()
    found = scipy_multinomial(X, y, sample_weight=weight, l2=1e-2, reference_class=reference_class)
    first, second = (
        minimize(found.fun, found.x0, jac=found.jac, method=each, **further).x
        for each, further in (
            ("L-BFGS-B", {"options": {"ftol": 0, "gtol": 1e-9}}),
            (method, {"hessp": found.hessp, "tol": 1e-10}),
        )
    )
    # The intercepts are known up to a constant.
    for one, other in zip(found.unpack(first), found.unpack(second)):
        np.testing.assert_allclose(one - one.mean(axis=0), other - other.mean(axis=0), atol=1e-5)


@pytest.mark.parametrize("reference_class", [False, True])
def test_a_fit(reference_class):
    X, y, _ = problem()
    found = scipy_multinomial(X, y, l2=1e-3, reference_class=reference_class)
    fit = minimize(found.fun, found.x0, jac=found.jac, method="L-BFGS-B", options={"ftol": 0, "gtol": 1e-8})
    assert np.abs(found.jac(fit.x)).max() < 1e-7
    coef, intercept = found.unpack(fit.x)
    assert coef.shape == (K, FEATURES)
    # The intercepts have no penalty, so that the mean probability of each class is the share of its samples.
    np.testing.assert_allclose(ag.softmax(X @ coef.T + intercept).mean(axis=0), np.bincount(y) / N, atol=1e-6)
    if reference_class:
        assert not np.any(coef[0])
        assert intercept[0] == 0


def test_both_results_are_computed_once(monkeypatch):
    calls = []
    monkeypatch.setattr(
        objectives, "linear_cross_entropy", lambda *a, **k: calls.append(1) or ag.linear_cross_entropy(*a, **k)
    )
    X, y, _ = problem()
    found = scipy_multinomial(X, y)
    point = found.x0.copy()
    first = found.fun(point), found.jac(point)
    assert len(calls) == 1
    first[1][:] = 0  # the caller may change its gradient
    assert np.any(found.jac(point))
    point += 1  # the same array with other numbers
    point[0] = 3
    assert found.fun(point) != first[0]
    assert len(calls) == 2


def test_integers_become_float64():
    X = np.arange(6).reshape(3, 2)
    found = scipy_multinomial(X, [0, 1, 1])
    assert found.unpack(found.x0)[0].dtype == np.float64
    assert found.fun(found.x0) == pytest.approx(np.log(2))


@pytest.mark.parametrize(
    ("X", "y", "name"),
    [
        (np.zeros(3), np.zeros(3, int), "X"),
        (np.zeros((3, 2), complex), np.zeros(3, int), "X"),
        (np.zeros((3, 2)), np.zeros(2, int), "y"),
        (np.zeros((3, 2)), np.zeros(3), "y"),
        (np.zeros((3, 2)), np.array([0, -100, 1]), "y"),
        (np.zeros((0, 2)), np.zeros(0, int), "y"),
        (np.ma.masked_array(np.zeros((3, 2))), np.zeros(3, int), "X"),
        (sparse.coo_array(np.zeros((3, 2))), np.zeros(3, int), "X"),
    ],
)
def test_refused(X, y, name):
    with pytest.raises(ag.ParamInvalidError, match=f"scipy_multinomial: {name}: expected"):
        scipy_multinomial(X, y)


@pytest.mark.parametrize(
    "options",
    [
        {"n_classes": 3.0},
        {"n_classes": 0},
        {"l2": -1},
        {"l2": np.nan},
        {"l2": np.inf},
        {"sample_weight": np.full(N, np.inf)},
        {"l2": "1"},
        {"sample_weight": np.zeros(N)},
        {"sample_weight": np.full(N, "1")},
        {"sample_weight": np.ones(N, complex)},
    ],
    ids=str,
)
def test_refused_options(options):
    X, y, _ = problem()
    with pytest.raises(ag.ParamInvalidError, match=f"^scipy_multinomial: {next(iter(options))}: expected"):
        scipy_multinomial(X, y, **options)


def test_no_features():
    found = scipy_multinomial(np.zeros((4, 0)), [0, 1, 0, 1])
    assert found.fun(found.x0) == pytest.approx(np.log(2))


def test_labels_beyond_the_classes_are_refused():
    with pytest.raises(
        ag.ParamInvalidError, match=r"^scipy_multinomial: y: expected integer classes in \[0, 2\), got 2$"
    ):
        scipy_multinomial(np.zeros((3, 2)), [0, 1, 2], n_classes=2)


def test_wrong_weights_and_vectors_are_refused():
    X, y, _ = problem()
    with pytest.raises(ag.ParamInvalidError, match="scipy_multinomial: sample_weight: expected shape"):
        scipy_multinomial(X, y, sample_weight=np.ones(3))
    found = scipy_multinomial(X, y, sample_weight=[1] * len(y))
    assert found.fun([0.0] * len(found.x0)) == pytest.approx(np.log(K))
    for call in (found.fun, found.jac, lambda w: found.hessp(w, found.x0), found.unpack):
        with pytest.raises(ag.ParamInvalidError, match="scipy_multinomial: w: expected shape"):
            call(np.zeros(len(found.x0) + 1))
    with pytest.raises(ag.ParamInvalidError, match="scipy_multinomial: p: expected shape"):
        found.hessp(found.x0, np.zeros(1))


@pytest.mark.parametrize("dtype", ["float64", "float32", "int64"])
@pytest.mark.parametrize("kind", ["csr_array", "csr_matrix"])
def test_sparse_features(dtype, kind):
    X, y, weight = problem()
    X = np.where(np.abs(X) < 0.7, 0, 3 * X).astype(dtype)
    options: dict[str, Any] = {"l2": 0.3, "sample_weight": weight, "reference_class": True}
    found, right = scipy_multinomial(getattr(sparse, kind)(X), y, **options), scipy_multinomial(X, y, **options)
    w, p = generator("point", len(right.x0)).normal(size=(2, len(right.x0)))
    tolerance = 1e-5 if dtype == "float32" else 1e-12
    assert found.fun(w) == pytest.approx(right.fun(w), rel=tolerance)
    np.testing.assert_allclose(found.jac(w), right.jac(w), atol=tolerance)
    np.testing.assert_allclose(found.hessp(w, p), right.hessp(w, p), atol=tolerance)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_products_of_the_hessian_of_sparse_features(options, weighted):
    X, y, weight = problem()
    X[np.abs(X) < 0.7] = 0
    found = scipy_multinomial(sparse.csr_array(X), y, sample_weight=weight if weighted else None, **options)
    w, p = generator("product", len(found.x0)).normal(size=(2, len(found.x0)))
    difference = (found.jac(w + 1e-5 * p) - found.jac(w - 1e-5 * p)) / 2e-5
    np.testing.assert_allclose(found.hessp(w, p), difference, atol=1e-9)


@pytest.mark.parametrize("method", ["trust-ncg", "Newton-CG"])
def test_a_fit_of_sparse_features_with_second_derivatives(method):
    X, y, weight = problem()
    X[np.abs(X) < 0.7] = 0
    fits = []
    for features in (X, sparse.csr_array(X)):
        found = scipy_multinomial(features, y, sample_weight=weight, l2=1e-2)
        fit = minimize(found.fun, found.x0, jac=found.jac, hessp=found.hessp, method=method, tol=1e-10)
        fits.append(found.unpack(fit.x)[0])
    np.testing.assert_allclose(fits[1], fits[0], atol=1e-7)


@pytest.mark.parametrize("scale", [2.0**-140, 2.0**-20, 2.0**20, 2.0**140])
@pytest.mark.parametrize("is_sparse", [False, True])
def test_vectors_beyond_float32(is_sparse, scale):
    """The product is linear in the vector, which float32 data do not limit to the range of float32."""
    X, y, _ = problem("float32")
    found = scipy_multinomial(sparse.csr_array(X) if is_sparse else X, y, l2=0.1)
    w, p = generator("product", len(found.x0)).normal(size=(2, len(found.x0)))
    np.testing.assert_array_equal(found.hessp(w, p * scale), found.hessp(w, p) * scale)
    assert not found.hessp(w, 0 * p).any()
    for value in (np.inf, np.nan):
        p[0] = value
        assert not np.isfinite(found.hessp(w, p)).all()


@pytest.mark.parametrize("dtype", ["float16", "longdouble", "uint64", "bool"])
@pytest.mark.parametrize("is_sparse", [False, True])
def test_other_numbers_become_float64(is_sparse, dtype):
    """Large values of the features and of the coefficients do not overflow, as they would in float16."""
    X, y, _ = problem()
    X = np.abs(30_000 * X).clip(0, 65_000).astype(dtype)
    if is_sparse and dtype == "float16":  # which SciPy's own constructors refuse
        rows = sparse.csr_array(X.astype(np.float32))
        rows.data = rows.data.astype(dtype)
    else:
        rows = sparse.csr_array(X) if is_sparse else X
    found, right = scipy_multinomial(rows, y), scipy_multinomial(X.astype(np.float64), y)
    w, p = generator("point", len(right.x0)).normal(size=(2, len(right.x0)))
    assert found.unpack(1e6 * w)[0].dtype == np.float64
    w *= 1e-4
    assert found.fun(w) == pytest.approx(right.fun(w))
    np.testing.assert_allclose(found.jac(w), right.jac(w), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found.hessp(w, p), right.hessp(w, p), rtol=1e-9, atol=1e-9)
