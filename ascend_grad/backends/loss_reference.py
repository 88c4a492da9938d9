"""Losses of rows of logits and their gradients, in plain NumPy and float64, for the reference backend.

The formulas follow the manual of ``include/ascend_grad/loss.h``: sums leave out one entry that has the maximum, so that
probabilities near 1 keep their distance from 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..operators.options import has_own_divisor


class Terms(NamedTuple):
    """Parameters of the loss of some rows."""

    #: Vocabulary entries of K targets of each row, int64, shape (rows, K); -1 for an entry that adds nothing.
    entries: NDArray
    #: Their probabilities, float64, shape (rows, K); 0 for an entry that adds nothing. A single target has 1.
    prob: NDArray
    #: Weights of the vocabulary's entries, shape (V,).
    class_weight: NDArray
    #: Weights of the rows, shape (rows,).
    token_weight: NDArray
    #: Options of the loss. For logits of a part of the vocabulary, `vocab` and `class_sum` tell of the whole one.
    options: Mapping[str, Any]
    #: Probabilities times class weights if the vocabulary is split; targets in other parts also count.
    weights: NDArray | None = None

    def of(self, rows: NDArray) -> Terms:
        """Return the parameters of some of the rows."""
        weights = None if self.weights is None else self.weights[rows]
        return self._replace(
            entries=self.entries[rows], prob=self.prob[rows], token_weight=self.token_weight[rows], weights=weights
        )

    @property
    def smoothing(self) -> float:
        """Return the share of each class in the loss."""
        return self.options["label_smoothing"] / (self.options.get("vocab") or len(self.class_weight) or 1)

    @property
    def class_sum(self) -> float:
        return self.options.get("class_sum", self.class_weight.sum())

    def target_weights(self) -> NDArray:
        """Return ``(1 - smoothing) q_k c_tk`` for each target, shape (rows, K)."""
        share = 1 - self.options["label_smoothing"]
        if self.weights is not None:
            return share * self.weights
        weights = share * self.prob * self.class_weight[np.maximum(self.entries, 0)]
        return np.where(self.entries < 0, 0, weights)


def _weighted(weight: NDArray, values: NDArray | float) -> NDArray:
    """Return products, where a weight of 0 gives 0 whatever the value is."""
    return np.where(weight == 0, 0, weight * values)


class RowStatistics:
    """Statistics of rows of logits `z`, shape (rows, V) with V > 0."""

    def __init__(self, z: NDArray) -> None:
        rows = np.arange(len(z))
        #: The entry with the largest logit, the first one of several.
        self.predicted = np.argmax(z, axis=-1)
        self.max = z[rows, self.predicted]
        #: max - z, not negative
        self.distance = self.max[:, None] - z
        exponentials = np.exp(-self.distance)
        self.moment = np.sum(np.where(exponentials == 0, 0, exponentials * self.distance), axis=-1)
        at_max = exponentials[rows, self.predicted]
        exponentials[rows, self.predicted] = at_max - 1  # 0, or NaN
        self.rest = np.sum(exponentials, axis=-1)
        self.log_sum = np.log1p(self.rest)
        #: The other results are NaN if the maximum is infinite.
        self.lse = np.where(np.isinf(self.max), self.max, self.max + self.log_sum)
        self.entropy = self.log_sum + self.moment / (1 + self.rest)

    def negative_log_prob(self, entries: NDArray) -> NDArray:
        """Return the negative log-probabilities of entries, shape (rows, K)."""
        return self.log_sum[:, None] + np.take_along_axis(self.distance, np.maximum(entries, 0), axis=-1)

    def deficits(self, class_weight: NDArray) -> NDArray:
        """Return the sum of ``c_v (max - z_v)`` of each row, where a distance of 0 adds nothing whatever its weight is.

        An entry of -inf has an infinite distance even if all are -inf: the entries may be only a part of the
        vocabulary.
        """
        distance = np.where(np.isneginf(self.max)[:, None], np.inf, self.distance)
        return np.sum(np.where(distance == 0, 0, _weighted(class_weight, distance)), axis=-1)


def probabilities(row: Any) -> tuple[NDArray, NDArray]:
    """Return the probabilities p and 1 - p, without cancellation where p is almost 1. `row` is as for `gradient`."""
    p = np.exp(-row.distance) / (1 + row.rest)[:, None]
    return p, (row.rest[:, None] - np.expm1(-row.distance)) / (1 + row.rest)[:, None]


def smoothed_sum(log_sum: NDArray, class_sum: float, deficits: NDArray) -> NDArray:
    """Return the sum of ``c_v (lse - z_v)`` of each row from `RowStatistics.deficits`."""
    # A sum that has an infinite weight is infinite, even if log_sum has been rounded to 0.
    infinite = np.where(np.isfinite(deficits), class_sum, deficits)
    return np.where((log_sum == 0) & np.isinf(class_sum), infinite, class_sum * log_sum + deficits)


def losses(row: Any, terms: Terms) -> tuple[NDArray, NDArray]:
    """Return the cross-entropy and the term of the squared lse of each row, weighted, shape (rows,) each.

    `row` is a `RowStatistics`, or has its methods.
    """
    loss = np.sum(_weighted(terms.target_weights(), row.negative_log_prob(terms.entries)), axis=-1)
    if terms.smoothing:
        loss = loss + terms.smoothing * smoothed_sum(row.log_sum, terms.class_sum, row.deficits(terms.class_weight))
    loss = _weighted(terms.token_weight, loss)
    if not has_own_divisor(terms.options):
        return loss, np.zeros_like(loss)
    square = terms.options["lse_square_scale"] * row.lse * row.lse  # in this order, as the kernels do
    return loss, np.where(square == 0, 0, _weighted(terms.token_weight, square))


def _curvature(row: RowStatistics, terms: Terms, grad_loss: NDArray, grad_square: NDArray) -> tuple[NDArray, NDArray]:
    """Return the factors of ``diag(p) - p p^T`` and of ``p p^T`` in the Hessian, shape (rows, 1). See `gradient`."""
    scaled = _weighted(grad_loss, terms.token_weight)
    a = np.sum(_weighted(scaled[:, None], terms.target_weights()), axis=-1)
    a = a + _weighted(scaled * terms.smoothing, terms.class_sum)
    square = np.zeros_like(a)
    if has_own_divisor(terms.options):
        square = 2 * _weighted(grad_square, terms.token_weight) * terms.options["lse_square_scale"]
        a = a + square * row.lse
    return a[:, None], square[:, None]


def hessian_diagonal(row: RowStatistics, terms: Terms, grad_loss: NDArray, grad_square: NDArray) -> NDArray:
    """Return the diagonal of the Hessian with respect to the logits, shape (rows, V). See `gradient`."""
    a, square = _curvature(row, terms, grad_loss, grad_square)
    p, complement = probabilities(row)
    return p * (a * complement + square * p)


def hessian_product(
    row: RowStatistics, terms: Terms, grad_loss: NDArray, grad_square: NDArray, vector: NDArray
) -> NDArray:
    """Return the product of the Hessian with respect to the logits and a vector, shape (rows, V). See `gradient`."""
    a, square = _curvature(row, terms, grad_loss, grad_square)
    p, _ = probabilities(row)
    # Differences from the element of the maximum are exactly 0 where p is almost 1. An infinite element has none.
    at_max = np.take_along_axis(vector, row.predicted[:, None], axis=-1)
    moved = vector - np.where(np.isinf(at_max), 0, at_max)
    mean = np.sum(p * vector, axis=-1, keepdims=True)
    return p * (a * (moved - np.sum(p * moved, axis=-1, keepdims=True)) + _weighted(square, mean))


def gradient(
    row: Any,
    terms: Terms,
    grad_loss: NDArray,
    grad_square: NDArray,
    grad_lse: NDArray | float = 0.0,
    grad_log_prob: NDArray | float = 0.0,
    grad_entropy: NDArray | float = 0.0,
) -> NDArray:
    """Return the gradient with respect to the logits, shape (rows, V).

    `row` is a `RowStatistics`, or has its attributes. ``grad_loss`` and ``grad_square`` are upstream gradients of the
    two results of `losses`, shape (rows,). The others belong to `lse`, the log-probabilities of the targets, shape
    (rows, K), and the entropy.
    """
    rows, vocabulary = row.distance.shape
    scaled = _weighted(grad_loss, terms.token_weight)
    # log p_t = z_t - lse, so its gradient is one_hot - p.
    weights = _weighted(scaled[:, None], terms.target_weights()) - grad_log_prob
    smoothing = scaled * terms.smoothing
    a = weights.sum(axis=-1) + _weighted(smoothing, terms.class_sum) + grad_lse
    if has_own_divisor(terms.options):
        a = a + 2 * _weighted(grad_square, terms.token_weight) * terms.options["lse_square_scale"] * row.lse
    b = np.broadcast_to(-np.asarray(grad_entropy, np.float64), rows)

    one_hot = np.zeros((rows, vocabulary))
    each, k = np.nonzero(terms.entries >= 0)
    np.add.at(one_hot, (each, terms.entries[each, k]), weights[each, k])
    p, complement = probabilities(row)
    result = np.where(p > 0.5, (a[:, None] - one_hot) - a[:, None] * complement, a[:, None] * p - one_hot)
    if np.any(b):
        result += b[:, None] * _weighted(p, (row.moment / (1 + row.rest))[:, None] - row.distance)
    if terms.smoothing:
        result -= _weighted(smoothing[:, None], terms.class_weight)
    return result
