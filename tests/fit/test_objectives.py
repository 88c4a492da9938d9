"""Test the boosting objectives against the formulas of the packages, in NumPy."""

from __future__ import annotations

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
        np.testing.assert_allclose(hess[0, 0], 1.5 * 2 * p[0, 1], rtol=1e-6)


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
    with pytest.raises(ag.ParamInvalidError, match="target"):
        objective(y, scores)


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
