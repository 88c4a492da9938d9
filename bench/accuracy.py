"""The largest error of every operator, in units of the bound that the library promises.

Oracles are NumPy formulas in float64 (long double for float64 arguments) and share nothing with the kernels. The rows
are chosen to hurt: sums that cancel, sums that only grow, subnormal, huge and tiny values, up to 2**20 in a row, along
the last dim and along the first. With eps = 2**-24 (2**-53 for float64) and n the length of the row, the bounds are

- softmax backward: 32 eps (|g y| + |y| sum|g y|) + (1 + n |y|) 2**-149, with a mask times |scale|, plus one eps;
- log-softmax backward: 32 eps (|g| + exp(y) sum|g|) + 2**-126 (1 + sum|g|);
- softmax: (32 + |x - max|) eps of the value + 2**-126; log-softmax: 32 eps (1 + |x - max| + |log sum|);

for float64 with 32 + n/1024 in place of 32 and its own smallest numbers. A 16-bit result is rounded on top of that, by
half a unit in its last place, which is taken off the error; so that the kernels' own error shows, every call is also
made with a float32 result. Where an intermediate overflows float32 there is no bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import ascend_grad as ag
from ascend_grad import _cpu

from .cases import BACKWARD, DTYPES, FORWARD, MASKED, MASKED_BACKWARD, numpy_dtype
from .results import Worst
from .rivals import MASKED_LOGIT

OPERATORS = (*BACKWARD, MASKED_BACKWARD, *FORWARD, MASKED[1])
LENGTHS = (1, 2, 3, 10, 16, 31, 64, 100, 257, 1000, 4096, 2**16, 2**20)
#: Not a power of two, so that multiplying by it rounds.
SCALE = 0.3


class Format:
    """What bounds depend on: the type of sums and intermediate values."""

    def __init__(self, dtype: str):
        double = dtype == "float64"
        self.compute: Any = np.float64 if double else np.float32
        self.oracle: Any = np.longdouble if double else np.float64
        info = np.finfo(self.compute)
        self.eps = self.oracle(info.eps) / 2
        self.largest = self.oracle(info.max)
        self.normal = self.oracle(info.smallest_normal)
        self.subnormal = self.oracle(info.smallest_subnormal)
        self.growth = 1 / 1024 if double else 0.0

    def constant(self, n: int) -> float:
        return 32 + n * self.growth


# ---- values and bounds, along the last axis --------------------------------------------------------------------------


def _softmax_backward(f: Format, g, y):
    n = g.shape[-1]
    product = g * y
    size = np.abs(product).sum(-1, keepdims=True)
    bound = f.constant(n) * f.eps * (np.abs(product) + np.abs(y) * size) + (1 + n * np.abs(y)) * f.subnormal
    overflow = (np.abs(g) + size) * np.maximum(np.abs(y), 1) >= f.largest
    return (g - product.sum(-1, keepdims=True)) * y, np.where(overflow, np.inf, bound)


def _log_softmax_backward(f: Format, g, y):
    n = g.shape[-1]
    size, power = np.abs(g).sum(-1, keepdims=True), np.exp(y)
    bound = f.constant(n) * f.eps * (np.abs(g) + power * size) + f.normal * (1 + size)
    overflow = np.maximum((np.abs(g) + size) * np.maximum(power, 1), power) >= f.largest
    return g - g.sum(-1, keepdims=True) * power, np.where(overflow, np.inf, bound)


def _scaled_masked_softmax_backward(f: Format, g, y, mask):
    scale = f.oracle(f.compute(SCALE))
    values, bound = _softmax_backward(f, g, y)
    values, bound = values * scale, bound * scale + f.eps * np.abs(values * scale) + f.subnormal
    return np.where(mask, 0, values), np.where(mask, 0, bound)


def _softmax(f: Format, x):
    below = x - x.max(-1, keepdims=True)
    power = np.exp(below)
    values = power / power.sum(-1, keepdims=True)
    return values, (f.constant(x.shape[-1]) + np.abs(below)) * f.eps * values + f.normal


def _log_softmax(f: Format, x):
    below = x - x.max(-1, keepdims=True)
    logarithm = np.log(np.exp(below).sum(-1, keepdims=True))
    bound = f.constant(x.shape[-1]) * f.eps * (1 + np.abs(below) + np.abs(logarithm))
    return below - logarithm, np.where(np.abs(below) + logarithm >= f.largest, np.inf, bound)


def _scaled_masked_softmax(f: Format, x, mask):
    # The scaled logit is rounded: that is part of the formula.
    scaled = (x.astype(f.compute) * f.compute(SCALE)).astype(f.oracle)
    return _softmax(f, np.where(mask, MASKED_LOGIT, scaled))


_ORACLES: dict[str, Callable[..., tuple[np.ndarray, np.ndarray]]] = {
    "softmax_backward": _softmax_backward,
    "log_softmax_backward": _log_softmax_backward,
    "scaled_masked_softmax_backward": _scaled_masked_softmax_backward,
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "scaled_masked_softmax": _scaled_masked_softmax,
}


def half_unit(size: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Half a unit in the last place of ``dtype`` for values of this size."""
    info = ml_dtypes.finfo(dtype)
    exponent = np.maximum(np.frexp(size)[1] - 1, info.minexp)
    return np.ldexp(size.dtype.type(0.5), exponent - info.nmant)


class Expected(NamedTuple):
    """Values, the bounds of their errors (infinite: nothing is promised), and what a 16-bit result may add to those."""

    values: np.ndarray
    bound: np.ndarray
    rounding: np.ndarray


def expected(operator: str, inputs: tuple[np.ndarray, ...]) -> Expected:
    """What a call has to answer for rows along the last axis."""
    dtype = inputs[0].dtype
    f = Format(str(dtype))
    with np.errstate(all="ignore"):
        values, bound = _ORACLES[operator](f, *(a if a.dtype == bool else a.astype(f.oracle) for a in inputs))
        reach = np.abs(values) + bound
        # Beyond the largest number of the result's type there is nothing to compare.
        finite = reach < float(ml_dtypes.finfo(dtype).max)
        return Expected(values, np.where(finite, bound, np.inf), half_unit(np.where(finite, reach, 0), dtype))


def errors(result: np.ndarray, expected: Expected) -> np.ndarray:
    """Errors in units of the bound; NaN and infinity are infinite errors where a bound is."""
    values, bound, rounding = expected
    with np.errstate(all="ignore"):
        error = np.abs(result.astype(values.dtype) - values)
        if result.itemsize == 2:
            error -= rounding
        ratio = np.where(error <= 0, 0, error / bound)
    return np.where(np.isinf(bound), 0, np.where(np.isnan(ratio), np.inf, ratio))


# ---- rows that hurt --------------------------------------------------------------------------------------------------


def gradient_rows(n: int, dtype: np.dtype) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Gradients, and factors that stand for the output of a softmax."""
    info = ml_dtypes.finfo(dtype)
    tiny, huge = float(info.smallest_subnormal), float(info.max)
    random = np.random.default_rng(n)
    normal, uniform = random.standard_normal(n), random.random(n)
    probabilities = np.exp(normal) / np.exp(normal).sum()
    sign = np.resize([1.0, -1.0], n)
    spread = random.uniform(-1, 1, (2, n)) * np.log(huge) / 3
    return {
        "random": (random.standard_normal(n), probabilities),
        "constants": (np.full(n, 0.1), np.full(n, 0.7)),
        "growing sums": (uniform, random.random(n)),
        "cancellation": (1000 * sign + uniform, np.full(n, 0.3)),
        "subnormal factors": (normal, tiny * np.floor(1000 * uniform)),
        "subnormal gradients": (tiny * np.floor(1000 * uniform), random.random(n)),
        "huge": (huge**0.6 * normal, huge**0.1 * uniform),
        "tiny": (huge**-0.5 * normal, huge**-0.4 * uniform),
        "all magnitudes": (sign * np.exp(spread[0]), np.exp(spread[1])),
    }


def logit_rows(n: int, dtype: np.dtype) -> dict[str, np.ndarray]:
    """Logits, which also stand for the output of a log-softmax."""
    huge = float(ml_dtypes.finfo(dtype).max)
    underflow = float(np.log(np.finfo(Format(str(dtype)).compute).smallest_normal))
    random = np.random.default_rng(n)
    normal, uniform = random.standard_normal(n), random.random(n)
    return {
        "random": normal - np.log(np.exp(normal).sum()),
        "constants": np.full(n, -np.log(n + 1.0)),
        "growing sums": -uniform,
        "cancellation": np.resize([20.0, -20.0, 0.1], n),
        "subnormal powers": underflow + 10 * normal,
        "subnormal": float(ml_dtypes.finfo(dtype).smallest_subnormal) * np.floor(1000 * uniform),
        "huge": huge / 4 * (uniform - 1),
        "far from zero": 800 + normal,
        "all magnitudes": -np.exp(uniform * np.log(-underflow)),
    }


def samples(operator: str, n: int, dtype_name: str) -> tuple[list[str], tuple[np.ndarray, ...]]:
    """Kinds of values, and one row of length n of each; with a mask, in four dimensions."""
    dtype = numpy_dtype(dtype_name)
    gradients, logits = gradient_rows(n, dtype), logit_rows(n, dtype)
    rows: dict[str, tuple[np.ndarray, ...]]
    if operator == "log_softmax_backward":
        rows = {f"{a}, {b}": (gradients[a][0], logits[b]) for a, b in zip(gradients, logits, strict=True)}
    elif operator in (*BACKWARD, MASKED_BACKWARD):
        rows = dict(gradients)
    else:
        rows = {name: (row,) for name, row in logits.items()}
    arrays = tuple(np.stack(column).astype(dtype) for column in zip(*rows.values()))
    if operator in MASKED:
        mask = np.random.default_rng(n).random(arrays[0].shape) < 0.3
        arrays = tuple(a[None, None] for a in (*arrays, mask))
    return list(rows), arrays


def _results(operator: str, inputs: tuple[np.ndarray, ...]) -> Iterator[np.ndarray]:
    """The rows computed along the last dim, and, where an operator has the choice, along the first."""
    function = getattr(ag, operator)
    dtype = inputs[0].dtype
    for result_dtype in dict.fromkeys((dtype, np.dtype(Format(str(dtype)).compute))):
        out = np.empty(inputs[0].shape, result_dtype)
        if operator in MASKED:
            yield function(*inputs, SCALE, out=out, backend="cpu")
        else:
            yield function(*inputs, -1, out=out, backend="cpu")
            columns = [np.ascontiguousarray(a.T) for a in inputs]
            yield function(*columns, 0, out=np.empty(columns[0].shape, result_dtype), backend="cpu").T


def measure(operator: str, dtype: str) -> list[Worst]:
    """The largest error of an operator for one dtype, with each CPU variant of this machine."""
    worst: dict[str, Worst] = {}
    before = _cpu.variant()
    try:
        for n in LENGTHS:
            names, inputs = samples(operator, n, dtype)
            right = expected(operator, inputs)
            for variant in _cpu.supported_variants():
                _cpu.force_variant(variant)
                for result in _results(operator, inputs):
                    by_row = errors(result, right).max(-1).ravel()
                    row = int(by_row.argmax())
                    if variant not in worst or by_row[row] > worst[variant].error:
                        error = float(f"{by_row[row]:.3g}")
                        worst[variant] = Worst(operator, dtype, variant, error, names[row], n)
    finally:
        _cpu.force_variant(before)
    return list(worst.values())


def pairs() -> list[tuple[str, str]]:
    """What `measure` is to be called with."""
    return [(operator, dtype) for operator in OPERATORS for dtype in DTYPES]
