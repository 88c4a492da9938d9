"""Test the boosting objectives against the formulas of the packages, in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from samples import generator

import ascend_grad as ag
from ascend_grad.objectives import lightgbm_softmax, xgboost_softmax

N, K = 57, 5


def problem(dtype: type = np.float64, order: str = "C") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return classes, scores and weights; the first row has the weight 0."""
    random = generator("objectives", dtype, order)
    scores = np.asarray(random.normal(0, 3, (N, K)), dtype, order=order)
    weight = random.random(N).astype(np.float32)
    weight[0] = 0
    return random.integers(0, K, N).astype(np.float32), scores, weight


def probabilities(scores: np.ndarray) -> np.ndarray:
    exponentials = np.exp(scores.astype(np.float64) - scores.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


def gradient(y: np.ndarray, scores: np.ndarray) -> np.ndarray:
    return probabilities(scores) - np.eye(K)[y.astype(int)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("weighted", [False, True])
def test_xgboost(dtype, order, weighted):
    y, scores, weight = problem(dtype, order)
    rows = (weight if weighted else np.ones(N))[:, None]
    p = probabilities(scores)
    grad, hess = xgboost_softmax(y, scores, **{"sample_weight": weight} if weighted else {})
    assert grad.dtype == hess.dtype == dtype
    tolerance = 4 * np.finfo(dtype).eps
    np.testing.assert_allclose(grad, rows * gradient(y, scores), rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(hess, np.maximum(rows * 2 * p * (1 - p), 1e-16), rtol=tolerance, atol=tolerance)
    if weighted:
        assert np.all(grad[0] == 0)
        assert np.all(hess[0] == dtype(1e-16))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("weighted", [False, True])
def test_lightgbm(dtype, order, weighted):
    y, scores, weight = problem(dtype, order)
    rows = (weight if weighted else np.ones(N))[:, None]
    p = probabilities(scores)
    grad, hess = lightgbm_softmax(y, scores, *([weight] if weighted else []))
    for result, right in ((grad, rows * gradient(y, scores)), (hess, rows * p * (1 - p) * (K / (K - 1)))):
        assert result.dtype == np.float32
        assert result.flags.f_contiguous
        if dtype == np.float64:  # one rounding, of the last digit
            np.testing.assert_allclose(result, right, rtol=np.finfo(np.float32).eps)
        else:
            np.testing.assert_allclose(result, right, rtol=5e-7, atol=5e-7)


def test_lightgbm_keeps_the_digits_of_almost_certain_classes():
    scores = np.array([[20.0, 0.0, 0.0]])
    p = probabilities(scores)
    for target in (0, 1):
        grad, hess = lightgbm_softmax(np.array([target]), scores)
        np.testing.assert_allclose(grad[0, 0], -2 * p[0, 1] if target == 0 else p[0, 0], rtol=1e-6)
        right = 1.5 * np.array([2 * p[0, 1], p[0, 1], p[0, 1]])  # 1 - p of the first class is the sum of the others
        for dtype, rtol in ((np.float64, 1e-6), (np.float32, 1e-5)):
            hess = lightgbm_softmax(np.array([target]), scores.astype(dtype))[1]
            np.testing.assert_allclose(hess[0], right * (1 - p[0, [1, 1, 1]]), rtol=rtol)


@pytest.mark.parametrize("objective", [xgboost_softmax, lightgbm_softmax])
def test_no_input_is_modified(objective):
    y, scores, weight = problem(order="F")
    copies = y.copy(), scores.copy(), weight.copy()
    objective(y, scores, weight)
    for array, copy in zip((y, scores, weight), copies):
        np.testing.assert_array_equal(array, copy)


@pytest.mark.parametrize("objective", [xgboost_softmax, lightgbm_softmax])
@pytest.mark.parametrize("label", [-100, -1, K])
def test_labels_outside_of_the_classes_are_refused(objective, label):
    """The label that losses ignore by default is refused, too."""
    y, scores, _ = problem()
    y[3] = label
    with pytest.raises(
        ag.ParamInvalidError, match=rf"^{objective.__name__}: y_true: expected .* \[0, {K}\), got {float(label)}$"
    ):
        objective(y, scores)


@pytest.mark.parametrize("objective", [xgboost_softmax, lightgbm_softmax])
def test_what_is_refused(objective):
    y, scores, weight = problem()
    of_weight = "sample_weight" if objective is xgboost_softmax else "weight"

    def check(error: type[Exception], message: str, y: Any = y, scores: Any = scores, weight: Any = weight) -> None:
        with pytest.raises(error, match=f"^{objective.__name__}: {message}"):
            objective(y, scores, weight)

    for wrong in (0.5, np.nan, np.inf, -(2**62) - 1):
        check(
            ag.ParamInvalidError, r"y_true: expected integer classes in \[0, ", y=np.where(np.arange(len(y)), y, wrong)
        )
    check(ag.ParamInvalidError, "y_true: expected .* got shape", y=y[:-1])
    for wrong in (None, y.astype(str)):
        check(ag.ParamTypeError, "y_true: expected", y=wrong)
    for wrong in (weight[:-1], weight[:1], weight[:, None]):
        check(ag.ParamInvalidError, rf"{of_weight}: expected shape \({len(y)},\)", weight=wrong)
    for wrong in (weight.astype(str), weight.astype(complex)):
        check(ag.ParamTypeError, f"{of_weight}: expected real numbers", weight=wrong)
    check(ag.ParamTypeError, "y_pred: expected an array without a mask", scores=np.ma.masked_array(scores))
    check(ag.ParamTypeError, "y_true: expected an array without a mask", y=np.ma.masked_array(y))


@pytest.mark.parametrize("objective", [xgboost_softmax, lightgbm_softmax])
def test_weights_of_integers_and_of_zero(objective):
    y, scores, _ = problem()
    for one, other in zip(objective(y, scores, np.full(len(y), 3)), objective(y, scores, np.full(len(y), 3.0))):
        np.testing.assert_array_equal(one, other)
    assert np.isfinite(lightgbm_softmax([0], np.zeros((1, 2), np.float16), np.array([3e5]))).all()
    scores[0] = np.inf
    with np.errstate(all="raise"):
        objective(np.zeros(1), np.zeros((1, 2), np.float32), np.array([1e39]))
        grad, _ = objective(y, scores, np.arange(float(len(y))))
    assert not grad[0].any()


@pytest.mark.parametrize("objective", [xgboost_softmax, lightgbm_softmax])
@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_scores_of_one_class_are_refused(objective, shape):
    with pytest.raises(ag.ParamInvalidError, match=rf"{objective.__name__}: y_pred: .* at least 2 classes \(num_class"):
        objective(np.zeros(3), np.zeros(shape))


def test_nothing_heavy_is_imported(run_script):
    """The package does not import the objectives, and these import no library that they serve."""
    run_script(
        """
        import sys
        import ascend_grad
        assert not {"ascend_grad.objectives", "ascend_grad.sklearn"} & set(sys.modules)
        import ascend_grad.objectives
        assert not {"lightgbm", "scipy", "sklearn", "xgboost"} & set(sys.modules)
        """
    )
