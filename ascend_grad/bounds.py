"""Expected results of the row-wise operators, computed without the library, and the allowed errors.

The formulas are computed in float64, or in `numpy.longdouble` if the arguments are float64. With eps = 2**-24
(2**-53 for float64) and n the length of the row, the bounds are

- softmax backward: 32 eps (|g y| + |y| sum|g y|) + (1 + n |y|) 2**-149, with a mask times |scale|, plus one eps;
- log-softmax backward: 32 eps (|g| + exp(y) sum|g|) + 2**-126 (1 + sum|g|);
- softmax: (32 + |x - max|) eps of the value + 2**-126; log-softmax: 32 eps (1 + |x - max| + |log sum|);

for float64 with 32 + n/1024 instead of 32 and with float64's smallest numbers. The bounds of the linear operators
follow from the constants below: a product ``A @ B`` has errors of at most c eps (|A| @ |B|), where c depends on the
data.

Losses start from logits z with errors of at most d, E the largest d of a row: d is 4 eps |z| for given logits that a
temperature divides, 0 for others, and `transformed` has the d of a linear layer. With the distances D = max z - z, the
log-sum L = log sum exp(-D), the probabilities p, C = 32 + n growth and R = eps (C (1 - exp(-L)) + sum p D + 4 L)

- lse: E + R + 4 eps |max z|; negative log-probabilities: d + E + R + 4 eps (D + L);
- entropy: sum p ((exp(2 E) - 1) (D + L) + 2 E exp(2 E)) + eps sum p D (C + D) + R;
- a probability: exp(d + E) - 1 + (C + D) eps of the value;
- a sum of such terms, as losses and their gradients are: the sum of the errors, plus C eps of the sum of magnitudes.

If an intermediate overflows the accumulator, the bound is infinite. The rounding of a 16-bit result is added. The demo,
the benchmark and the tests use these bounds; the C self-test (`tests/c/`) repeats the row-wise ones for scalar results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

#: The contract's value of a masked logit; not taken from the library, whose results are compared with these formulas.
MASKED_LOGIT = -10000.0

#: The constant c of products of centred values, of random values of one sign (or a stored softmax), and of any values.
CENTRED, ONE_SIGN, ANY = 16, 64, 512
#: Errors in eps: of a softmax from given statistics, of one from the call's own statistics, of a sum of exponentials.
SOFTMAX, SOFTMAX_AND_STATISTICS, SUM = 4, 24, 16
#: Relative error of P for bfloat16, as P is rounded before the products.
BFLOAT16_P = 2.0**-8


class Expected(NamedTuple):
    """Values and the bounds on their errors."""

    values: np.ndarray
    bound: np.ndarray


class Precision(NamedTuple):
    """The accumulator's format: float64 for float64 arguments, float32 for all others."""

    dtype: Any
    wide: Any
    eps: float
    smallest: Any  # the smallest subnormal number; in the wide format for float64
    normal: Any
    largest: float
    growth: float  # increase of the bounds' constant per element of the row

    def constant(self, n: int) -> float:
        return 32 + n * self.growth


SINGLE = Precision(np.float32, np.float64, 2.0**-24, 2.0**-149, 2.0**-126, float(np.finfo(np.float32).max), 0.0)
DOUBLE = Precision(
    np.float64,
    np.longdouble,
    2.0**-53,
    np.longdouble(2) ** -1074,
    np.longdouble(2) ** -1022,
    float(np.finfo(np.float64).max),
    1 / 1024,
)


def precision_of(dtype: object) -> Precision:
    return DOUBLE if dtype == np.float64 else SINGLE


def widen(array: np.ndarray, wide: Any) -> np.ndarray:
    """Return the values in a wider format. The conversion takes two steps, as some formats have no direct one."""
    return np.asarray(array).astype(np.float64).astype(wide)


# ---- the formulas, on rows along the last axis -----------------------------------------------------------------------


def softmax_backward(p: Precision, g, y) -> Expected:
    n = y.shape[-1]
    product = g * y
    total = product.sum(-1, keepdims=True)
    magnitude = np.abs(product).sum(-1, keepdims=True)
    bound = p.constant(n) * p.eps * (np.abs(product) + np.abs(y) * magnitude) + (1 + n * np.abs(y)) * p.smallest
    intermediate = (np.abs(g) + magnitude) * np.maximum(1, np.abs(y))
    return Expected((g - total) * y, np.where(intermediate < p.largest, bound, np.inf))


def log_softmax_backward(p: Precision, g, y) -> Expected:
    n = y.shape[-1]
    exponential = np.exp(y)
    magnitude = np.abs(g).sum(-1, keepdims=True)
    bound = p.constant(n) * p.eps * (np.abs(g) + exponential * magnitude) + p.normal * (1 + magnitude)
    intermediate = np.abs(g) + magnitude * np.maximum(1, exponential) + exponential
    return Expected(g - g.sum(-1, keepdims=True) * exponential, np.where(intermediate < p.largest, bound, np.inf))


def scaled_masked_softmax_backward(p: Precision, g, y, mask, scale) -> Expected:
    inner, bound = softmax_backward(p, g, y)
    scale = widen(np.asarray(p.dtype(scale)), p.wide)
    values = inner * scale
    bound = bound * np.abs(scale) + p.eps * np.abs(values) + p.smallest
    bound = np.where((np.abs(inner) + bound < p.largest) & (np.abs(values) + bound < p.largest), bound, np.inf)
    return Expected(np.where(mask, 0, values), np.where(mask, 0, bound))


def softmax(p: Precision, x) -> Expected:
    n = x.shape[-1]
    shifted = x - x.max(-1, keepdims=True, initial=-np.inf)
    exponential = np.exp(shifted)
    values = exponential / exponential.sum(-1, keepdims=True)
    # The value is 0 far below this distance from the maximum, so larger distances need no larger bound.
    distance = np.minimum(np.abs(shifted), 20000)
    return Expected(values, (p.constant(n) + distance) * p.eps * values + p.normal)


def log_softmax(p: Precision, x) -> Expected:
    n = x.shape[-1]
    shifted = x - x.max(-1, keepdims=True, initial=-np.inf)
    logarithm = np.log(np.exp(shifted).sum(-1, keepdims=True))
    bound = p.constant(n) * p.eps * (1 + np.abs(shifted) + np.abs(logarithm))
    return Expected(shifted - logarithm, np.where(np.abs(shifted) + logarithm < p.largest, bound, np.inf))


def scaled_masked_softmax(p: Precision, x, mask, scale) -> Expected:
    # The scaled logit is rounded to the accumulator's format, as this rounding is part of the formula.
    scaled = (x.astype(p.dtype) * p.dtype(scale)).astype(p.wide)
    return softmax(p, np.where(mask, MASKED_LOGIT, scaled))


FORMULAS: dict[str, Callable[..., Expected]] = {
    formula.__name__: formula
    for formula in (
        softmax_backward,
        log_softmax_backward,
        scaled_masked_softmax_backward,
        softmax,
        log_softmax,
        scaled_masked_softmax,
    )
}


def half_ulp(magnitude: np.ndarray, dtype) -> np.ndarray:
    """Return half the distance between neighbouring values of ``dtype`` at this magnitude."""
    info = ml_dtypes.finfo(dtype)
    normal = np.isfinite(magnitude) & (magnitude >= 2.0**info.minexp)
    exponent = np.where(normal, np.frexp(np.where(normal, magnitude, 1))[1] - 1, info.minexp)
    return np.ldexp(magnitude.dtype.type(1), exponent - info.nmant - 1)


# ---- losses of rows --------------------------------------------------------------------------------------------------


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
    label_smoothing: float
    lse_square_scale: float

    def one_hot(self) -> np.ndarray:
        """Return the weight of each entry in the cross-entropy without the smoothing, shape (rows, V)."""
        result = np.zeros((len(self.entries), len(self.class_weight)), self.class_weight.dtype)
        rows, k = np.nonzero(self.entries >= 0)
        places = self.entries[rows, k]
        np.add.at(result, (rows, places), self.prob[rows, k] * self.class_weight[places])
        return (1 - self.label_smoothing) * result

    def smoothed(self) -> np.ndarray:
        """Return the weight of each entry by the smoothing, shape (V,)."""
        return self.label_smoothing / max(len(self.class_weight), 1) * self.class_weight


def losses(p: Precision, rows: Statistics, terms: LossTerms) -> tuple[Expected, Expected]:
    """Return the cross-entropy and the term of the squared lse of each row."""
    (nll, nll_error), constant = rows.negative_log_prob, p.constant(rows.prob.values.shape[-1])
    weights = np.abs(terms.one_hot()), np.abs(terms.smoothed())
    signed = _products(terms.one_hot(), nll).sum(-1) + _products(terms.smoothed(), nll).sum(-1)
    size = sum(_products(each, nll).sum(-1) for each in weights)
    error = sum(_products(each, nll_error).sum(-1) for each in weights) + constant * p.eps * size
    lse, lse_error = rows.lse
    square = terms.lse_square_scale * lse**2
    of_square = abs(terms.lse_square_scale) * (2 * np.abs(lse) + lse_error) * lse_error + 8 * p.eps * np.abs(square)
    r = terms.token_weight
    return (
        Expected(_products(r, signed), _products(np.abs(r), error)),
        Expected(_products(r, square) if terms.lse_square_scale else 0 * r, _products(np.abs(r), of_square)),
    )


def gradient_of_logits(
    p: Precision, rows: Statistics, terms: LossTerms, grad_loss, grad_square, grad_lse, grad_log_prob, grad_entropy
) -> Expected:
    """Return the gradient with respect to the logits, for upstream gradients of shape (rows,).

    `grad_loss` and `grad_square` belong to the two results of `losses`, the others to the outputs of these names.
    """
    column = (slice(None), None)
    constant, of_loss = p.constant(rows.prob.values.shape[-1]), grad_loss * terms.token_weight
    (prob, prob_error), (lse, lse_error) = rows.prob, rows.lse
    one_hot, smoothed = of_loss[column] * terms.one_hot(), of_loss[column] * terms.smoothed()
    of_target = np.zeros_like(one_hot)
    here = np.flatnonzero(terms.entries[:, 0] >= 0)
    of_target[here, terms.entries[here, 0]] = grad_log_prob[here]
    of_square = 2 * grad_square * terms.token_weight * terms.lse_square_scale
    square = _products(of_square, lse)
    parts = one_hot.sum(-1), smoothed.sum(-1), square, grad_lse, -grad_log_prob
    a, a_size = sum(parts), sum(np.abs(part) for part in parts)
    a_error = _products(np.abs(of_square), lse_error) + constant * p.eps * a_size
    (nll, nll_error), (entropy, entropy_error) = rows.negative_log_prob, rows.entropy
    spread, b = entropy[column] - nll, -grad_entropy[column]
    size = np.abs(one_hot) + np.abs(smoothed) + np.abs(of_target)
    error = np.abs(a)[column] * prob_error + a_error[column] * prob + constant * p.eps * size
    # 0 * infinity: an entry of probability 0 adds nothing to the entropy.
    of_spread = prob_error * np.abs(spread) + prob * (nll_error + entropy_error[column])
    of_spread += 8 * p.eps * prob * (np.abs(nll) + np.abs(entropy)[column])
    error += _products(np.abs(b), np.where(prob == 0, p.normal * (1 + np.abs(np.where(prob == 0, 0, nll))), of_spread))
    values = a[column] * prob - one_hot - smoothed + of_target + _products(b, _products(prob, spread))
    return Expected(values, np.where(prob < p.largest / 4, error + p.smallest, np.inf))


class Logits(NamedTuple):
    """Logits of a linear layer and their derivatives with respect to the products, each with the bound on its error."""

    z: Expected
    slope: Expected


def transformed(p: Precision, products: Expected, bias, logit_scale, softcap, temperature) -> Logits:
    """Return the logits of products, for a bias of shape (V,) and temperatures of shape (rows,)."""
    u = products.values + bias
    scaled = logit_scale * u
    error = abs(logit_scale) * (products.bound + 4 * p.eps * (np.abs(products.values) + np.abs(bias)))
    error += 4 * p.eps * np.abs(scaled)
    temperature = temperature[:, None]
    if softcap is None:
        z = scaled / temperature
        slope = np.broadcast_to(logit_scale / temperature, z.shape)
        return Logits(
            Expected(z, error / temperature + 4 * p.eps * np.abs(z)), Expected(slope, 4 * p.eps * np.abs(slope))
        )
    value = np.tanh(scaled / softcap)
    value_error = np.minimum(error / softcap, 2) + 16 * p.eps * np.abs(value)
    z, slope = softcap * value / temperature, logit_scale / temperature * (1 - value**2)
    slope_error = np.abs(logit_scale / temperature) * (2 * value_error + 16 * p.eps)
    return Logits(
        Expected(z, softcap / temperature * value_error + 4 * p.eps * np.abs(z)), Expected(slope, slope_error)
    )
