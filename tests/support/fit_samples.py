"""Samples of classes for the tests of `ascend_grad.objectives` and `ascend_grad.sklearn`."""

from __future__ import annotations

import numpy as np
from samples import generator


def classified(rows: int, features: int, classes: int, dtype: str = "float64") -> tuple[np.ndarray, np.ndarray]:
    """Make features, and classes that depend on them and on chance."""
    random = generator("classified", rows, features, classes)
    X = random.normal(size=(rows, features))
    scores = X @ random.normal(size=(features, classes)) + random.normal(size=classes)
    return X.astype(dtype), (scores + random.gumbel(size=scores.shape)).argmax(axis=1)


def log_loss(scores: np.ndarray, y: np.ndarray) -> float:
    """Return the mean loss of scores before the softmax, in float64."""
    scores = scores.astype(np.float64)
    lse = np.log(np.exp(scores - scores.max(axis=1, keepdims=True)).sum(axis=1)) + scores.max(axis=1)
    return float(np.mean(lse - scores[np.arange(len(y)), y]))
