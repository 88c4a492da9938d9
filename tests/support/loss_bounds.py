"""Expected results of losses of rows, computed without the library's arithmetic, and the allowed errors.

The formulas are computed in the precisions of `ascend_grad.bounds`.

Losses start from logits z with errors of at most d, E the largest d of a row: d is 4 eps |z| for given logits that a
temperature divides, 0 for others, and `transformed` has the d of a linear layer. With the distances D = max z - z, the
log-sum L = log sum exp(-D), the probabilities p, C = 32 + n growth and R = eps (C (1 - exp(-L)) + sum p D + 4 L)

- lse: E + R + 4 eps |max z|; negative log-probabilities: d + E + R + 4 eps (D + L);
- entropy: sum p ((exp(2 E) - 1) (D + L) + 2 E exp(2 E)) + eps sum p D (C + D) + R;
- a probability: exp(d + E) - 1 + (C + D) eps of the value;
- a sum of such terms, as losses and their gradients are: the sum of the errors, plus C eps of the sum of magnitudes;
- a product of the Hessian and a vector: the same for its terms p v and p sum p v, as in the gradient of a softmax.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ascend_grad.bounds import Expected, Precision


class Statistics(NamedTuple):
    """Statistics of rows of logits, of shape (rows,) or (rows, V), each with the bound on its error."""

    lse: Expected
    negative_log_prob: Expected
    prob: Expected
    entropy: Expected


def _products(weight, values):
    """Return products, where a weight of 0 gives 0 whatever the value is."""
    return np.where(weight == 0, 0, weight * values)


def statistics(p: Precision, z: np.ndarray, error: np.ndarray) -> Statistics:
    """Return the statistics of logits of at least one entry, whose errors are at most `error`."""
    n, rows = z.shape[-1], np.arange(len(z))
    constant = p.constant(n)
    largest = z.argmax(-1)
    distance = z[rows, largest][:, None] - z
    exponential = np.exp(-distance)
    total = exponential.sum(-1)
    others = exponential.copy()
    others[rows, largest] -= 1  # 0, or NaN
    rest = others.sum(-1)
    log_sum = np.log1p(rest)
    prob = exponential / total[:, None]
    moment = _products(prob, distance).sum(-1)
    most = error.max(-1)
    rounding = p.eps * (constant * rest / total + moment + 4 * log_sum) + n * p.normal
    lse = z[rows, largest] + log_sum
    negative_log_prob = log_sum[:, None] + distance
    nll_error = error + (most + rounding)[:, None] + 4 * p.eps * negative_log_prob
    growth = np.expm1(2 * most)
    entropy_error = _products(prob, growth[:, None] * negative_log_prob).sum(-1) + 2 * most * (1 + growth)
    entropy_error += p.eps * _products(prob, distance * (constant + distance)).sum(-1) + rounding
    entropy_error += p.normal * np.minimum(distance, 1000).sum(-1)  # exponentials below it may become 0
    prob_error = prob * (np.expm1(error + most[:, None]) + (constant + np.minimum(distance, 20000)) * p.eps) + p.normal
    return Statistics(
        Expected(lse, most + rounding + 4 * p.eps * np.abs(z[rows, largest])),
        Expected(negative_log_prob, nll_error),
        Expected(prob, prob_error),
        Expected(log_sum + moment, entropy_error),
    )


def given_statistics(
    p: Precision, z: np.ndarray, error: np.ndarray, lse: np.ndarray, entropy: np.ndarray
) -> Statistics:
    """Return the statistics of logits relative to an lse and an entropy that are given, and have no errors."""
    negative_log_prob = lse[:, None] - z
    nll_error = error + 4 * p.eps * (np.abs(lse)[:, None] + np.abs(z))
    prob = np.exp(-negative_log_prob)
    prob_error = prob * (np.expm1(nll_error) + p.constant(z.shape[-1]) * p.eps) + p.normal
    exact = np.zeros(len(z))
    return Statistics(
        Expected(lse, exact),
        Expected(negative_log_prob, nll_error),
        Expected(prob, prob_error),
        Expected(entropy, exact),
    )


class LossTerms(NamedTuple):
    """Hold the terms of each row's loss, in the wide format."""

    #: Targets, shape (rows, K), -1 for one that adds nothing, and their probabilities.
    entries: np.ndarray
    prob: np.ndarray
    #: Weights of the classes, shape (V,), and of the rows, shape (rows,).
    class_weight: np.ndarray
    token_weight: np.ndarray
    #: Options of the loss that are numbers, in the wide format.
    options: Mapping[str, Any]

    @property
    def square_scale(self) -> Any:
        return self.options["lse_square_scale"]

    def one_hot(self) -> np.ndarray:
        """Return the weight of each entry in the cross-entropy without the smoothing, shape (rows, V)."""
        result = np.zeros((len(self.entries), len(self.class_weight)), self.class_weight.dtype)
        rows, k = np.nonzero(self.entries >= 0)
        places = self.entries[rows, k]
        np.add.at(result, (rows, places), self.prob[rows, k] * self.class_weight[places])
        return (1 - self.options["label_smoothing"]) * result

    def smoothed(self) -> np.ndarray:
        """Return the weight of each entry by the smoothing, shape (V,)."""
        return self.options["label_smoothing"] / max(len(self.class_weight), 1) * self.class_weight


def losses(p: Precision, rows: Statistics, terms: LossTerms) -> tuple[Expected, Expected]:
    """Return the cross-entropy and the term of the squared lse of each row."""
    (nll, nll_error), constant = rows.negative_log_prob, p.constant(rows.prob.values.shape[-1])
    weights = np.abs(terms.one_hot()), np.abs(terms.smoothed())
    signed = _products(terms.one_hot(), nll).sum(-1) + _products(terms.smoothed(), nll).sum(-1)
    size = sum(_products(each, nll).sum(-1) for each in weights)
    error = sum(_products(each, nll_error).sum(-1) for each in weights) + constant * p.eps * size
    lse, lse_error = rows.lse
    square = terms.square_scale * lse**2
    of_square = abs(terms.square_scale) * (2 * np.abs(lse) + lse_error) * lse_error + 8 * p.eps * np.abs(square)
    r = terms.token_weight
    return (
        Expected(_products(r, signed), _products(np.abs(r), error)),
        Expected(_products(r, square) if terms.square_scale else 0 * r, _products(np.abs(r), of_square)),
    )


def gradient_of_logits(
    p: Precision, rows: Statistics, terms: LossTerms, grad_loss, grad_square, grad_lse, grad_log_prob, grad_entropy
) -> Expected:
    """Return the gradient with respect to the logits, for upstream gradients of shape (rows,).

    `grad_loss` and `grad_square` belong to the two results of `losses`, the others to the outputs of these names.
    `grad_log_prob` has the shape of the targets, and 0 for those that add nothing.
    """
    column = (slice(None), None)
    constant, of_loss = p.constant(rows.prob.values.shape[-1]), grad_loss * terms.token_weight
    (prob, prob_error), (lse, lse_error) = rows.prob, rows.lse
    one_hot, smoothed = of_loss[column] * terms.one_hot(), of_loss[column] * terms.smoothed()
    of_target, targets_size = np.zeros_like(one_hot), np.zeros_like(one_hot)
    for row, k in np.argwhere((terms.entries >= 0) & (grad_log_prob != 0)):
        of_target[row, terms.entries[row, k]] += grad_log_prob[row, k]
        targets_size[row, terms.entries[row, k]] += np.abs(grad_log_prob[row, k])
    of_square = 2 * grad_square * terms.token_weight * terms.square_scale
    square = _products(of_square, lse)
    parts = one_hot.sum(-1), smoothed.sum(-1), square, grad_lse, -grad_log_prob.sum(-1)
    a, a_size = sum(parts), sum(np.abs(part) for part in parts) + np.abs(grad_log_prob).sum(-1)
    a_error = _products(np.abs(of_square), lse_error) + constant * p.eps * a_size
    (nll, nll_error), (entropy, entropy_error) = rows.negative_log_prob, rows.entropy
    spread, b = entropy[column] - nll, -grad_entropy[column]
    size = np.abs(one_hot) + np.abs(smoothed) + targets_size
    error = np.abs(a)[column] * prob_error + a_error[column] * prob + constant * p.eps * size
    # 0 * infinity: an entry of probability 0 adds nothing to the entropy.
    of_spread = prob_error * np.abs(spread) + prob * (nll_error + entropy_error[column])
    of_spread += 8 * p.eps * prob * (np.abs(nll) + np.abs(entropy)[column])
    error += _products(np.abs(b), np.where(prob == 0, p.normal * (1 + np.abs(np.where(prob == 0, 0, nll))), of_spread))
    values = a[column] * prob - one_hot - smoothed + of_target + _products(b, _products(prob, spread))
    return Expected(values, np.where(prob < p.largest / 4, error + p.smallest, np.inf))


def _curvature(p: Precision, rows: Statistics, terms: LossTerms, grad_loss, grad_square) -> tuple[Expected, Expected]:
    """Return the factors of ``diag(p) - p p^T`` and of ``p p^T`` in the Hessian of each row, shape (rows, 1)."""
    of_loss, (lse, lse_error) = grad_loss * terms.token_weight, rows.lse
    of_square = 2 * grad_square * terms.token_weight * terms.square_scale
    parts = of_loss * terms.one_hot().sum(-1), of_loss * terms.smoothed().sum(), _products(of_square, lse)
    constant = p.constant(rows.prob.values.shape[-1])
    error = _products(np.abs(of_square), lse_error) + constant * p.eps * sum(np.abs(part) for part in parts)
    column = (slice(None), None)
    return (
        Expected(sum(parts)[column], error[column]),
        Expected(of_square[column], 8 * p.eps * np.abs(of_square)[column]),
    )


def _product(first: Expected, second: Expected) -> Expected:
    error = first.bound * (np.abs(second.values) + second.bound) + np.abs(first.values) * second.bound
    return Expected(first.values * second.values, error)


def hessian_diagonal(p: Precision, rows: Statistics, terms: LossTerms, grad_loss, grad_square) -> Expected:
    """Return the diagonal of the Hessian with respect to the logits. The arguments are as in `gradient_of_logits`."""
    a, second = _curvature(p, rows, terms, grad_loss, grad_square)
    prob, constant = rows.prob, p.constant(rows.prob.values.shape[-1])
    parts = _product(a, _product(prob, Expected(1 - prob.values, prob.bound))), _product(second, _product(prob, prob))
    rounding = constant * p.eps * (np.abs(a.values) + np.abs(second.values)) * prob.values
    return Expected(parts[0].values + parts[1].values, parts[0].bound + parts[1].bound + rounding + p.smallest)


def hessian_product(
    p: Precision, rows: Statistics, terms: LossTerms, grad_loss, grad_square, vector: Expected
) -> Expected:
    """Return the product of the Hessian with respect to the logits and a vector of shape (rows, V).

    The other arguments are as in `gradient_of_logits`.
    """
    a, second = _curvature(p, rows, terms, grad_loss, grad_square)
    prob, constant = rows.prob, p.constant(rows.prob.values.shape[-1])
    size = np.abs(vector.values)
    terms_of_mean = _product(prob, vector)
    mean_size = (prob.values * size).sum(-1, keepdims=True)
    mean = Expected(
        terms_of_mean.values.sum(-1, keepdims=True),
        terms_of_mean.bound.sum(-1, keepdims=True) + constant * p.eps * mean_size,
    )
    spread = Expected(vector.values - mean.values, vector.bound + mean.bound)
    parts = _product(a, _product(prob, spread)), _product(second, _product(prob, mean))
    rounding = np.abs(a.values) * (size + mean_size) + np.abs(second.values) * mean_size
    error = parts[0].bound + parts[1].bound + constant * p.eps * prob.values * rounding + p.smallest
    # Intermediate values that overflow have no bound.
    largest = np.maximum(1, np.abs(a.values) + np.abs(second.values)) * (size.max(-1, keepdims=True) + mean.bound)
    return Expected(parts[0].values + parts[1].values, np.where(largest < p.largest / 4, error, np.inf))


class Logits(NamedTuple):
    """Logits of a linear layer and their derivatives with respect to the products, each with the bound on its error.

    `bend` has the second derivatives, or is None if all are 0.
    """

    z: Expected
    slope: Expected
    bend: Expected | None = None


def transformed(p: Precision, products: Expected, bias, logit_scale, softcap, temperature) -> Logits:
    """Return the logits of products, for a bias of shape (V,) and temperatures of shape (rows,)."""
    u = products.values + bias
    scaled = logit_scale * u
    error = abs(logit_scale) * (products.bound + 4 * p.eps * (np.abs(products.values) + np.abs(bias)))
    error += 4 * p.eps * np.abs(scaled) + (0 if logit_scale == 1 else p.smallest)
    temperature = temperature[:, None]
    if softcap is None:
        z = scaled / temperature
        slope = np.broadcast_to(logit_scale / temperature, z.shape)
        return Logits(
            Expected(z, error / temperature + 4 * p.eps * np.abs(z)), Expected(slope, 4 * p.eps * np.abs(slope))
        )
    value = np.tanh(scaled / softcap)
    value_error = np.minimum(error / softcap, 2) + 16 * p.eps * np.abs(value) + 4 * p.smallest
    z, slope = softcap * value / temperature, logit_scale / temperature * (1 - value**2)
    slope_error = np.abs(logit_scale / temperature) * (2 * value_error + 16 * p.eps)
    bend = _product(
        Expected(-2 * logit_scale / softcap * value, 2 * abs(logit_scale) / softcap * value_error),
        Expected(slope, slope_error),
    )
    return Logits(
        Expected(z, softcap / temperature * value_error + 4 * p.eps * np.abs(z)),
        Expected(slope, slope_error),
        Expected(bend.values, bend.bound + 8 * p.eps * np.abs(bend.values)),
    )


def of_products(
    p: Precision, hessian: Expected, gradient: Expected, logits: Logits, vector: Expected | None
) -> Expected:
    """Return the product of the Hessian with respect to the products and a vector; its diagonal if the vector is None.

    `hessian` is the product of the Hessian with respect to the logits and the vector times the slope, or its diagonal,
    and `gradient` the gradient with respect to the logits.
    """
    first = _product(hessian, logits.slope)
    if vector is None:
        first = _product(first, logits.slope)
    second = Expected(0 * first.values, 0 * first.bound)
    if logits.bend is not None:
        second = _product(gradient, logits.bend)
        if vector is not None:
            second = _product(second, vector)
    values = first.values + second.values
    rounding = 8 * p.eps * (np.abs(first.values) + np.abs(second.values)) + 4 * p.smallest
    return Expected(values, first.bound + second.bound + rounding)


def sloped(p: Precision, logits: Logits, vector: Expected) -> Expected:
    """Return the changes of the logits along changes of the products."""
    moved = _product(vector, logits.slope)
    return Expected(moved.values, moved.bound + 4 * p.eps * np.abs(moved.values) + p.smallest)
