"""The largest errors of the linear operators, in units of the bounds that the library promises.

The formulas share no code with the kernels. The bounds use the constants of `bounds`; c depends on the kind of values:

- a product ``A @ B``, such as the logits: c eps (|A| @ |B|);
- a softmax entry P that is recomputed: its error P (c eps (|X| @ |W.T| + |max|) + s eps) is added in the products,
  where s depends on the source of maximum and sum;
- bfloat16: an addition for P, which is rounded before the products;
- the sum of exponentials: a multiple of eps, and the exponential of the logits' bound.

A 16-bit result is also rounded, by half a unit in its last place, which is subtracted from the error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

import ascend_grad as ag
from ascend_grad import _cpu, bounds
from ascend_grad.bounds import ANY, CENTRED, ONE_SIGN, Precision, half_ulp, precision_of

from ..dtypes import DTYPES, numpy_dtype
from ..results import Worst
from ..rowwise.accuracy import Expected, errors
from .cases import GRADIENT, MAX_SUM, WHOLE

OPERATORS = (f"{GRADIENT}, recomputed", f"{GRADIENT}, stored", MAX_SUM, WHOLE)
#: Shapes (BT, V, H): two near the edges of tiles, and three with one long dimension.
SHAPES = ((33, 257, 65), (129, 1000, 48), (3, 5000, 5), (5000, 5, 3), (7, 49, 5000))
#: Shapes for float32 alone, as their oracle takes long.
HUGE_SHAPES = ((10_000_000, 2, 1), (2, 10_000_000, 1))


class Problem(NamedTuple):
    """Values that the dtype can represent, in the wide type of the oracle, and the constant of the bound."""

    f: Precision
    dtype: np.dtype
    constant: int
    x: np.ndarray
    weight: np.ndarray
    target: np.ndarray
    grad: np.ndarray

    def narrow(self) -> tuple[np.ndarray, np.ndarray]:
        """Return input and weight in the dtype of the call."""
        return self.x.astype(self.dtype), self.weight.astype(self.dtype)


def _data(kind: str, random: np.random.Generator, shape: tuple[int, int, int]) -> tuple[int, np.ndarray, np.ndarray]:
    rows, vocabulary, width = shape
    x, weight = random.standard_normal((rows, width)), random.standard_normal((vocabulary, width)) / np.sqrt(width)
    signs = np.where(np.arange(rows)[:, None] + np.arange(width) & 1, 1.0, -1.0)
    positive = random.random((rows, width)), 4 * random.random((vocabulary, width)) / width
    return {
        "centred": (CENTRED, x, 1.5 * weight),
        "positive": (ONE_SIGN, *positive),
        "constant": (ANY, np.full((rows, width), 1 / 3), np.full((vocabulary, width), 1 / 7)),
        "cancelling": (ANY, 100 * signs * (1 + positive[0] / 64), (1 + positive[1] / 64) / width),
        "far from zero": (ANY, 10 + positive[0], -(20 + positive[1]) / width),
        "peaked": (ANY, x, 15 * weight),
    }[kind]


KINDS = ("centred", "positive", "constant", "cancelling", "far from zero", "peaked")


def problem(kind: str, shape: tuple[int, int, int], dtype_name: str) -> Problem:
    """Make a problem with values of a kind, rounded to the dtype."""
    dtype = numpy_dtype(dtype_name)
    f = precision_of(dtype)
    random = np.random.default_rng(shape)
    constant, x, weight = _data(kind, random, shape)
    target = random.integers(0, shape[1], shape[0])
    grad = (random.random(shape[0]) + 0.1 if kind == "positive" else random.standard_normal(shape[0])).astype(f.dtype)
    return Problem(
        f, dtype, constant, x.astype(dtype).astype(f.wide), weight.astype(dtype).astype(f.wide), target, grad
    )


# ---- values and bounds -----------------------------------------------------------------------------------------------


class _Logits(NamedTuple):
    """Logits with the bounds of their errors (BT, V), and the maxima, their bounds, and sums of exponentials (BT)."""

    logits: np.ndarray
    error: np.ndarray
    maximum: np.ndarray
    maximum_error: np.ndarray
    total: np.ndarray


def _logits(p: Problem) -> _Logits:
    logits = p.x @ p.weight.T
    error = p.constant * p.f.eps * (np.abs(p.x) @ np.abs(p.weight).T) + p.f.normal
    maximum = logits.max(1)
    return _Logits(logits, error, maximum, error.max(1), np.exp(logits - maximum[:, None]).sum(1))


def _expected(p: Problem, values: np.ndarray, bound: np.ndarray, dtype: np.dtype) -> Expected:
    return Expected(values, bound + p.f.normal, half_ulp(np.abs(values) + bound, dtype))


def _gradients(p: Problem, softmax: np.ndarray, error: np.ndarray, grad: np.ndarray) -> tuple[Expected, Expected]:
    grad = grad.astype(p.f.wide)[:, None]
    tile = softmax.copy()
    tile[np.arange(len(tile)), p.target] -= 1
    tile *= grad
    error = error * np.abs(grad)
    # The relative error of P comes from the products' sums, and for bfloat16 also the rounding of P.
    relative = p.constant * p.f.eps + (bounds.BFLOAT16_P if p.dtype.name == "bfloat16" else 0)
    size = relative * np.abs(tile) + error
    return (
        _expected(p, tile @ p.weight, size @ np.abs(p.weight), p.dtype),
        _expected(p, tile.T @ p.x, size.T @ np.abs(p.x), p.dtype),
    )


def _recomputed(p: Problem) -> tuple[Sequence[Expected], Callable]:
    found = _logits(p)
    # The formula uses maximum and sum as the call gets them, rounded.
    maximum, total = (value.astype(p.f.dtype) for value in (found.maximum, found.total))
    wide = maximum.astype(p.f.wide)[:, None]
    softmax = np.exp(found.logits - wide) / total.astype(p.f.wide)[:, None]
    exponent = found.error + p.constant * p.f.eps * np.abs(wide)
    error = softmax * (np.expm1(exponent) + bounds.SOFTMAX * p.f.eps) + p.f.normal
    x, weight = p.narrow()
    mask = np.zeros(len(x), bool)
    return _gradients(p, softmax, error, p.grad), lambda: ag.fused_linear_cross_entropy_loss_grad(
        p.grad, x, weight, mask, p.target, logits_max=maximum, sum_exp_logits=total, backend="cpu"
    )


def _stored(p: Problem) -> tuple[Sequence[Expected], Callable]:
    found = _logits(p)
    softmax = (np.exp(found.logits - found.maximum[:, None]) / found.total[:, None]).astype(p.f.dtype)
    x, weight = p.narrow()
    mask = np.zeros(len(x), bool)
    wide = softmax.astype(p.f.wide)
    p = p._replace(constant=max(p.constant, ONE_SIGN))
    return _gradients(p, wide, np.zeros_like(wide), p.grad), lambda: ag.fused_linear_cross_entropy_loss_grad(
        p.grad, x, weight, mask, p.target, softmax=softmax, backend="cpu"
    )


def _max_sum(p: Problem) -> tuple[Sequence[Expected], Callable]:
    found, rows = _logits(p), np.arange(len(p.x))
    below = found.logits - found.maximum[:, None]
    spread = np.expm1(found.error + found.maximum_error[:, None])
    total_error = (np.exp(below) * spread).sum(1) + bounds.SUM * p.f.eps * found.total
    predicted, real = below[rows, p.target], np.dtype(p.f.dtype)
    predicted_error = found.error[rows, p.target] + found.maximum_error + p.f.eps * np.abs(predicted)
    expected = (
        _expected(p, found.maximum, found.maximum_error + p.f.eps * np.abs(found.maximum), real),
        _expected(p, found.total, total_error, real),
        _expected(p, predicted, predicted_error, real),
    )
    x, weight = p.narrow()
    return expected, lambda: ag.fused_linear_online_max_sum(x, weight, p.target, 0, len(weight), backend="cpu")[:3]


def _whole(p: Problem) -> tuple[Sequence[Expected], Callable]:
    found, rows = _logits(p), np.arange(len(p.x))
    below = found.logits - found.maximum[:, None]
    predicted, logarithm = below[rows, p.target], np.log(found.total)
    loss = logarithm - predicted
    bound = found.error[rows, p.target] + 2 * found.maximum_error
    bound += p.constant * p.f.eps * (1 + 4 * logarithm + 4 * np.abs(predicted))
    bound += 20 * p.f.eps
    exponent = found.error + 2 * found.maximum_error[:, None] + p.constant * p.f.eps * np.abs(found.maximum)[:, None]
    softmax = np.exp(below) / found.total[:, None]
    error = softmax * (np.expm1(exponent) + bounds.SOFTMAX_AND_STATISTICS * p.f.eps) + p.f.normal
    expected = (_expected(p, loss, bound, np.dtype(p.f.dtype)), *_gradients(p, softmax, error, p.grad))
    x, weight = p.narrow()
    return expected, lambda: ag.linear_cross_entropy(
        x, weight, p.target, reduction="none", grad_loss=p.grad, backend="cpu"
    )


_FORMULAS: dict[str, Callable[[Problem], tuple[Sequence[Expected], Callable]]] = dict(
    zip(OPERATORS, (_recomputed, _stored, _max_sum, _whole))
)


def measure(operator: str, dtype: str) -> list[Worst]:
    """Find the largest error of an operator for one dtype, with each CPU variant of this machine."""
    worst: dict[str, Worst] = {}
    before = _cpu.variant()
    problems = [(shape, kind) for shape in SHAPES for kind in KINDS]
    if dtype == "float32":
        problems += [(shape, kind) for shape in HUGE_SHAPES for kind in ("positive",)]
    try:
        for shape, kind in problems:
            with np.errstate(all="ignore"):
                right, call = _FORMULAS[operator](problem(kind, shape, dtype))
                for variant in _cpu.supported_variants():
                    _cpu.force_variant(variant)
                    error = max(float(errors(got, expected).max()) for got, expected in zip(call(), right))
                    if variant not in worst or error > worst[variant].error:
                        where = f"{kind}, {' × '.join(map(str, shape))}"
                        worst[variant] = Worst(operator, dtype, variant, float(f"{error:.3g}"), where, max(shape))
    finally:
        _cpu.force_variant(before)
    return list(worst.values())


def pairs() -> list[tuple[str, str]]:
    """Return the arguments for all calls of `measure`."""
    return [(operator, dtype) for operator in OPERATORS for dtype in DTYPES]
