"""Expected results of the row-wise operators, computed without the library, and the allowed errors.

The formulas are computed in float64, or in `numpy.longdouble` if the arguments are float64. With eps = 2**-24
(2**-53 for float64) and n the length of the row, the bounds are

- softmax backward: 32 eps (|g y| + |y| sum|g y|) + (1 + n |y|) 2**-149, with a mask times |scale|, plus one eps;
- log-softmax backward: 32 eps (|g| + exp(y) sum|g|) + 2**-126 (1 + sum|g|);
- softmax: (32 + |x - max|) eps of the value + 2**-126; log-softmax: 32 eps (1 + |x - max| + |log sum|);

for float64 with 32 + n/1024 instead of 32 and with float64's smallest numbers. The bounds of the linear operators
follow from the constants below: a product ``A @ B`` has errors of at most c eps (|A| @ |B|), where c depends on the
data.

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
#: Errors of a softmax that a linear loss without options in bfloat16 makes of exponentials cached in float16, relative
#: to the entry and to the row's largest probability.
CACHED_EXP, SMALL_CACHED_EXP = 2.0**-11, 2.0**-40


class Expected(NamedTuple):
    """Values and the bounds on their errors."""

    values: np.ndarray
    bound: np.ndarray


def cached_exp_error(softmax: np.ndarray) -> np.ndarray:
    """Return the errors of rows of a softmax that are made of exponentials cached in float16."""
    return CACHED_EXP * softmax + SMALL_CACHED_EXP * softmax.max(-1, keepdims=True, initial=0)


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
