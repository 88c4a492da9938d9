"""Test the estimator: the checks of scikit-learn, and the coefficients of `LogisticRegression`."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from fit_samples import classified
from samples import generator
from scipy import sparse
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.utils import get_tags
from sklearn.utils.estimator_checks import parametrize_with_checks

from ascend_grad.sklearn import SoftmaxRegression

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"C": 0.01},
    {"C": np.inf},
    {"fit_intercept": False},
    {"class_weight": "balanced"},
    {"class_weight": {0: 0.5, 1: 3.0}},
)


# Some data of the checks are not separable by a line, or are separable without a penalty.
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@parametrize_with_checks(
    [
        SoftmaxRegression(),
        SoftmaxRegression(C=0.1, class_weight="balanced", warm_start=True),
        SoftmaxRegression(solver="trust-ncg"),
        SoftmaxRegression(solver="trust-ncg", tol=0, max_iter=20),
    ]
)
def test_checks_of_scikit_learn(estimator, check):
    check(estimator)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("weighted", [False, True])
def test_coefficients(options, classes, dtype, weighted):
    X, y = classified(600, 7, classes, dtype)
    weight = generator("weights").random(len(y)) if weighted else None
    ours, theirs = (
        model(**options, tol=1e-10 if dtype == "float64" else 1e-5, max_iter=1000).fit(X, y, sample_weight=weight)
        for model in (SoftmaxRegression, LogisticRegression)
    )
    tolerance = 1e-6 if dtype == "float64" else 2e-3
    for name in ("coef_", "intercept_"):
        found, right = getattr(ours, name), getattr(theirs, name)
        assert (found.shape, found.dtype) == (right.shape, right.dtype)
        np.testing.assert_allclose(found, right, rtol=tolerance, atol=tolerance)
    assert ours.n_iter_.shape == theirs.n_iter_.shape
    np.testing.assert_array_equal(ours.classes_, theirs.classes_)
    for name in ("decision_function", "predict_proba", *(["predict_log_proba"] if dtype == "float64" else [])):
        found, right = getattr(ours, name)(X), getattr(theirs, name)(X)
        assert (found.shape, found.dtype) == (right.shape, right.dtype)
        np.testing.assert_allclose(found, right, rtol=10 * tolerance, atol=10 * tolerance)
    assert np.mean(ours.predict(X) == theirs.predict(X)) > 0.99
    assert ours.score(X, y) == pytest.approx(theirs.score(X, y), abs=0.01)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_both_solvers_find_the_same_coefficients(options, classes, dtype):
    X, y = classified(600, 7, classes, dtype)
    tolerance = 1e-8 if dtype == "float64" else 1e-5
    first, second = (
        SoftmaxRegression(**options, solver=solver, tol=tolerance, max_iter=1000).fit(X, y)
        for solver in ("lbfgs", "trust-ncg")
    )
    for name in ("coef_", "intercept_"):
        found, right = getattr(second, name), getattr(first, name)
        assert (found.shape, found.dtype) == (right.shape, right.dtype)
        atol = 1e-5 if dtype == "float64" else 5e-3
        if classes > 2:  # without a penalty, they are known up to a constant
            found, right = found - found.mean(axis=0), right - right.mean(axis=0)
        np.testing.assert_allclose(found, right, atol=atol)
    assert 0 < second.n_iter_[0] < 30


def test_the_default_stops_where_logistic_regression_stops():
    X, y = classified(2000, 10, 4)
    ours, theirs = SoftmaxRegression().fit(X, y), LogisticRegression().fit(X, y)
    np.testing.assert_array_equal(ours.n_iter_, theirs.n_iter_)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, atol=1e-9)


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("fit_intercept", [False, True])
def test_a_warm_start(classes, fit_intercept):
    X, y = classified(600, 7, classes)
    model = SoftmaxRegression(fit_intercept=fit_intercept, tol=1e-6, warm_start=True)
    first = model.fit(X, y).n_iter_[0]
    assert model.fit(X, y).n_iter_[0] < min(first, 3)
    with pytest.raises(ValueError, match=f"warm_start: .* {classes} classes and 6 features"):
        model.fit(X[:, :6], y)
    predicted = model.fit(X, y).predict(X)
    for wrong, message in (
        (np.arange(len(y)) % 3, "warm_start: .* 3 classes and 7 features"),
        (0 * y, "got one class"),
    ):
        with pytest.raises(ValueError, match=message):
            model.fit(X, wrong)
        np.testing.assert_array_equal(model.predict(X), predicted)  # by the coefficients of the last fit


def test_names_of_classes():
    X, y = classified(300, 4, 3)
    names = np.array(["red", "green", "blue"])[y]
    model = SoftmaxRegression().fit(X, names)
    assert model.classes_.tolist() == ["blue", "green", "red"]
    assert set(model.predict(X)) <= set(names)
    assert model.score(X, names) > 0.6
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).predict(X), model.predict(X))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["csr_array", "csr_matrix", "csc_array", "coo_matrix"])
@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("solver", ["lbfgs", "trust-ncg"])
def test_sparse_data(dtype, kind, classes, solver):
    X, y = classified(300, 6, classes)
    X[np.abs(X) < 0.7] = 0
    X = X.astype(dtype)
    assert get_tags(SoftmaxRegression(solver=solver)).input_tags.sparse
    rows = getattr(sparse, kind)(X)
    model, dense = (SoftmaxRegression(solver=solver, tol=1e-5).fit(each, y) for each in (rows, X))
    assert model.coef_.dtype == dtype
    np.testing.assert_allclose(model.coef_, dense.coef_, atol=2e-3 if dtype == "float32" else 1e-4)
    np.testing.assert_allclose(model.predict_proba(rows), model.predict_proba(X), rtol=1e-5)


def test_errors():
    X, y = classified(30, 4, 3)
    with pytest.raises(NotFittedError):
        SoftmaxRegression().predict(X)
    with pytest.raises(ValueError, match="at least 2 classes, got one class: red"):
        SoftmaxRegression().fit(X, ["red"] * 30)
    with pytest.raises(ValueError, match="sample_weight: expected a sum above 0"):
        SoftmaxRegression(class_weight=dict.fromkeys(range(3), 0)).fit(X, y)
    for options in ({"C": 0}, {"tol": -1}, {"max_iter": 1.5}, {"class_weight": "even"}, {"solver": "sag"}):
        with pytest.raises(ValueError, match=f"The '{next(iter(options))}' parameter"):
            SoftmaxRegression(**options).fit(X, y)
    for solver in ("lbfgs", "trust-ncg"):
        with pytest.warns(ConvergenceWarning, match=f"(?s){solver} failed to converge .*max_iter=2") as caught:
            SoftmaxRegression(max_iter=2, tol=1e-12, solver=solver).fit(X, y)
        assert solver == "lbfgs" or caught[0].filename == __file__


@pytest.mark.parametrize("seed", range(8))
def test_small_tolerances_warn_of_nothing(seed):
    """A fit whose objective improves by rounding errors only has converged."""
    X, y = classified(200 + 30 * seed, 4 + seed, 2 + seed % 3)
    for solver in ("lbfgs", "trust-ncg"):
        SoftmaxRegression(tol=1e-12, solver=solver).fit(X, y)


@pytest.mark.parametrize("solver", ["lbfgs", "trust-ncg"])
@pytest.mark.parametrize("classes", [2, 3])
def test_no_iteration(solver, classes):
    """The coefficients stay those that the fit starts from, and a warning tells the caller of `fit`."""
    X, y = classified(60, 4, classes)
    model = SoftmaxRegression(solver=solver, max_iter=0)
    with pytest.warns(ConvergenceWarning, match=f"{solver} failed to converge, .* no iteration") as caught:
        model.fit(X, y)
    assert caught[0].filename == __file__
    assert not model.coef_.any()
    assert not model.intercept_.any()
    assert model.n_iter_.tolist() == [0]
    assert np.allclose(model.predict_proba(X), 1 / classes)
    model.set_params(max_iter=50, warm_start=True).fit(X, y)
    coef = model.coef_
    with pytest.warns(ConvergenceWarning):
        model.set_params(max_iter=0).fit(X, y)
    np.testing.assert_array_equal(model.coef_, coef)


@pytest.mark.parametrize("solver", ["lbfgs", "trust-ncg"])
@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_a_tolerance_of_zero(solver, is_sparse):
    """The fit goes on as far as the rounding lets it, and finds finite coefficients."""
    X, y = classified(200, 5, 3)
    right = SoftmaxRegression(tol=1e-9, solver="trust-ncg").fit(X, y)
    model = SoftmaxRegression(tol=0, solver=solver, max_iter=300).fit(sparse.csr_array(X) if is_sparse else X, y)
    np.testing.assert_allclose(model.coef_, right.coef_, atol=1e-4)


@pytest.mark.parametrize("solver", ["lbfgs", "trust-ncg"])
@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_gradient_of_zero_ends_the_fit(solver, is_sparse):
    """Without features that tell the classes apart, the fit ends where it begins, also with a tolerance of 0."""
    X, y = np.zeros((8, 3)), np.arange(8) % 2
    model = SoftmaxRegression(tol=0, solver=solver).fit(sparse.csr_array(X) if is_sparse else X, y)
    assert model.n_iter_.tolist() == [0]
    assert not model.coef_.any()
    assert not model.intercept_.any()


@pytest.mark.parametrize("solver", ["lbfgs", "trust-ncg"])
@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_very_large_features(solver, is_sparse, dtype):
    """Without a penalty, features in another unit give the same probabilities."""
    X, y = classified(300, 4, 3, dtype)
    found = []
    for factor in (1, 2**40):
        rows = sparse.csr_array(factor * X) if is_sparse else factor * X
        model = SoftmaxRegression(C=np.inf, fit_intercept=False, solver=solver, tol=1e-4 * factor, max_iter=300)
        found.append(model.fit(rows, y).predict_proba(rows))
    np.testing.assert_allclose(found[1], found[0], atol=1e-3)
