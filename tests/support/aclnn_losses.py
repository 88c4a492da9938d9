"""Compute the device's losses of logits by its operators, and what they promise in float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from acl_client import Acl, softmax

FLOATS = (np.float32, np.float16, ml_dtypes.bfloat16)
EPS = {np.float32: 1e-6, np.float16: 1e-3, ml_dtypes.bfloat16: 8e-3}
IGNORED = -100


def nan(*shape: int, dtype=np.float32) -> np.ndarray:
    return np.full(shape, np.nan, dtype)


def log_softmax(x: np.ndarray) -> np.ndarray:
    shifted = x - x.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def loss_arguments(x, target, weight=None, reduction="mean", ignored=IGNORED, smoothing=0.0) -> tuple:
    """Return the arguments of the loss, with outputs of NaN."""
    rows = len(x) if reduction == "none" else 1
    outputs = (nan(*shape, dtype=x.dtype) for shape in ((rows,), x.shape, (rows,), (len(x),)))
    return x, target, weight, reduction.encode(), ignored, smoothing, 0.0, False, *outputs


def gradient_arguments(grad, log_prob, target, weight=None, reduction="mean", ignored=IGNORED, smoothing=0.0) -> tuple:
    """Return the arguments of the gradient, with an output of NaN."""
    settings = reduction.encode(), ignored, smoothing, 0.0
    return grad, log_prob, target, weight, None, None, *settings, nan(*log_prob.shape, dtype=log_prob.dtype)


def loss(acl: Acl, *arguments, **settings) -> dict[str, np.ndarray]:
    """Compute the loss of the arguments of `loss_arguments`."""
    results = acl.compute("CrossEntropyLoss", *loss_arguments(*arguments, **settings))[-4:]
    return dict(zip(("loss", "log_prob", "z_loss", "lse"), results))


def gradient(acl: Acl, *arguments, **settings) -> np.ndarray:
    """Compute the gradient of the arguments of `gradient_arguments`."""
    return acl.compute("CrossEntropyLossGrad", *gradient_arguments(*arguments, **settings))[-1]


def dense_loss(acl: Acl, x, labels) -> list[np.ndarray]:
    """Compute the loss of probabilities of all classes, and its gradient."""
    outputs = nan(len(x), dtype=x.dtype), nan(*x.shape, dtype=x.dtype)
    return acl.compute("SoftmaxCrossEntropyWithLogits", x, labels, *outputs)[-2:]


def _factors(target, weight, classes: int, ignored: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return which rows count, their targets, and the weights of these."""
    weight = np.ones(classes) if weight is None else weight.astype(float)
    kept = target != ignored
    local = np.where(kept, target, 0)
    return kept, local, np.where(kept, weight[local], 0)


@np.errstate(all="ignore")
def right_loss(x, target, weight, reduction, ignored=IGNORED, smoothing=0.0) -> tuple[np.ndarray, np.ndarray]:
    """Return loss and log-probabilities."""
    rows, classes = x.shape
    log_prob = log_softmax(x.astype(float))
    kept, local, factor = _factors(target, weight, classes, ignored)
    losses = -(1 - smoothing) * factor * log_prob[np.arange(rows), local]
    if smoothing:
        weights = np.ones(classes) if weight is None else weight.astype(float)
        losses -= smoothing / classes * (log_prob * weights).sum(-1)
    losses = np.where(kept, losses, 0)
    if reduction == "none":
        return losses, log_prob
    return losses.sum(keepdims=True) / (factor.sum() if reduction == "mean" else 1), log_prob


@np.errstate(all="ignore")
def right_gradient(grad, log_prob, target, weight, reduction, ignored=IGNORED) -> np.ndarray:
    """Return the gradient from log-probabilities."""
    _, local, factor = _factors(target, weight, log_prob.shape[1], ignored)
    factor = factor * (grad.astype(float) / factor.sum() if reduction == "mean" else grad.astype(float))
    result = np.exp(log_prob.astype(float)) * factor[:, None]
    result[np.arange(len(target)), local] -= factor
    return result


@np.errstate(all="ignore")
def right_dense_loss(x, labels) -> tuple[np.ndarray, np.ndarray]:
    x, labels = x.astype(float), labels.astype(float)
    return -(labels * log_softmax(x)).sum(-1), softmax(x) - labels


def scale_of_loss(x, target, weight, reduction, ignored=IGNORED, smoothing=0.0) -> np.ndarray:
    """Return the sum of the absolute values that the loss is the sum of."""
    absolute = None if weight is None else np.abs(weight)
    summed = "none" if reduction == "none" else "sum"
    scale, _ = right_loss(x, target, absolute, summed, ignored, smoothing)
    if reduction != "mean" or scale > np.finfo(np.float32).max:
        return scale
    _, _, factor = _factors(target, weight, x.shape[1], ignored)
    with np.errstate(all="ignore"):
        return scale / np.abs(factor.sum())


def scale_of_gradient(grad, log_prob, target, weight, reduction, ignored=IGNORED) -> np.ndarray:
    """Return the sum of the absolute values that the gradient is the sum of."""
    arguments = target, weight, reduction, ignored
    factors = right_gradient(grad, np.full_like(log_prob, -np.inf), *arguments)
    return np.abs(right_gradient(grad, log_prob, *arguments)) + np.abs(factors).max(-1, keepdims=True)


def scale_of_dense_loss(x, labels) -> np.ndarray:
    """Return the sum of the absolute values that the loss is the sum of."""
    return right_dense_loss(x, np.abs(labels))[0]


def assert_near(found: np.ndarray, right: np.ndarray, scale: np.ndarray | float) -> None:
    """Compare results with those in float64. `scale` has the sums of absolute values that the results are sums of.

    Where such a sum of finite values is beyond float32, a result may be anything.
    """
    dtype = found.dtype.type
    scale = np.broadcast_to(scale, found.shape)
    compared = ~((scale > np.finfo(np.float32).max) & (scale < np.inf))
    found, right, scale = found.astype(float)[compared], right[compared], scale[compared]
    with np.errstate(all="ignore"):
        right = right.astype(np.float32).astype(dtype).astype(float)
        bound = 2 * EPS[dtype] * np.abs(right) + 2e-6 * scale + 6e-8
        is_near = (np.abs(found - right) <= bound) & np.isfinite(bound)
    assert np.all(is_near | (found == right) | (np.isnan(found) & np.isnan(right)))
