"""The largest error of every row-wise operator, in units of the bound that the library promises (`bounds`).

The rows are difficult ones: sums that cancel, sums that only grow, subnormal, huge and tiny values. They have up to
2**20 elements, along the last dim and along the first. The rounding of a 16-bit result is subtracted from its error.
Every call is also made with a float32 result, which shows the kernels' own error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import ml_dtypes
import numpy as np

import ascend_grad as ag
from ascend_grad import _cpu
from ascend_grad.bounds import FORMULAS, half_ulp, precision_of, widen

from ..dtypes import DTYPES, numpy_dtype
from ..results import Worst
from .cases import BACKWARD, FORWARD, MASKED, MASKED_BACKWARD

OPERATORS = (*BACKWARD, MASKED_BACKWARD, *FORWARD, MASKED[1])
#: Elements of the rows.
LENGTHS = (1, 2, 3, 10, 16, 31, 64, 100, 257, 1000, 4096, 2**16, 2**20)
#: The factor of the masked operators. It is not a power of two, so that multiplying by it rounds.
SCALE = 0.3


class Expected(NamedTuple):
    """Values, the bounds of their errors (infinite if nothing is promised), and the rounding of a 16-bit result."""

    values: np.ndarray
    bound: np.ndarray
    rounding: np.ndarray


def expected(operator: str, inputs: tuple[np.ndarray, ...]) -> Expected:
    """Compute the expected results of a call with rows along the last axis."""
    dtype = inputs[0].dtype
    p = precision_of(dtype)
    settings = {"scale": SCALE} if operator in MASKED else {}
    with np.errstate(all="ignore"):
        rows = (a if a.dtype == bool else widen(a, p.wide) for a in inputs)
        values, bound = FORMULAS[operator](p, *rows, **settings)
        reach = np.abs(values) + bound
        # Results that may exceed the largest number of their type are not compared.
        finite = reach < float(ml_dtypes.finfo(dtype).max)
        return Expected(values, np.where(finite, bound, np.inf), half_ulp(np.where(finite, reach, 0), dtype))


def errors(result: np.ndarray, expected: Expected) -> np.ndarray:
    """Return errors in units of the bound. NaN and infinity are infinite errors if the bound is finite."""
    values, bound, rounding = expected
    with np.errstate(all="ignore"):
        error = np.abs(result.astype(values.dtype) - values)
        if result.itemsize == 2:
            error -= rounding
        ratio = np.where(error <= 0, 0, error / bound)
    return np.where(np.isinf(bound), 0, np.where(np.isnan(ratio), np.inf, ratio))


# ---- difficult rows --------------------------------------------------------------------------------------------------


def gradient_rows(n: int, dtype: np.dtype) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Make gradients, and factors used as the output of a softmax, by kind of values."""
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
    """Make logits, also used as the output of a log-softmax, by kind of values."""
    huge = float(ml_dtypes.finfo(dtype).max)
    underflow = float(np.log(np.finfo(precision_of(dtype).dtype).smallest_normal))
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
    """Return the kinds of values, and inputs with one row of length n of each kind. Masked inputs have rank 4."""
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
    """Compute the rows along the last dim and, unless the operator has no dim, along the first, as rows again."""
    function = getattr(ag, operator)
    dtype = inputs[0].dtype
    for result_dtype in dict.fromkeys((dtype, np.dtype(precision_of(dtype).dtype))):
        out = np.empty(inputs[0].shape, result_dtype)
        if operator in MASKED:
            yield function(*inputs, SCALE, out=out, backend="cpu")
        else:
            yield function(*inputs, -1, out=out, backend="cpu")
            columns = [np.ascontiguousarray(a.T) for a in inputs]
            yield function(*columns, 0, out=np.empty(columns[0].shape, result_dtype), backend="cpu").T


def measure(operator: str, dtype: str) -> list[Worst]:
    """Find the largest error of an operator for one dtype, with each CPU variant of this machine."""
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
    """Return the arguments for all calls of `measure`."""
    return [(operator, dtype) for operator in OPERATORS for dtype in DTYPES]
