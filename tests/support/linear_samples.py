"""Make ordinary and adversarial problems for the linear operators, of BT tokens, V entries and H features."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from samples import DTYPES, Layout, generator, laid_out

from ascend_grad.bounds import ANY, CENTRED, ONE_SIGN

GRADIENT = "fused_linear_cross_entropy_loss_grad"
STATISTICS = "fused_linear_online_max_sum"
LOSS = "fused_cross_entropy_loss_with_max_sum"
WHOLE = "linear_cross_entropy"
#: The operators that a device has or is given as a chain.
LINEAR = (GRADIENT, STATISTICS, LOSS, WHOLE)
#: An operator that only the host computes. Its indices have separate tests.
TOP_K = "linear_top_k"
#: Options of the logits that it compares.
LOGIT_OPTIONS = ("bias", "logit_scale", "softcap")
#: Operators that have no problems here, but separate tests: `test_loss_backward`.
WITHOUT_PROBLEMS = (
    "linear_cross_entropy_backward",
    "linear_cross_entropy_hvp",
    "linear_cross_entropy_hessian",
)

MODES = ("recomputed", "stored")


class Shape(NamedTuple):
    BT: int
    V: int
    H: int


def shapes(*sizes: tuple[int, int, int]) -> list[Shape]:
    return [Shape(*each) for each in sizes]


#: Sizes around the edges of vectors, tiles and chains, in every dimension.
SHAPES = shapes(
    (1, 1, 1), (1, 2, 3), (2, 1, 2), (3, 256, 17), (4, 7, 0), (7, 48, 2), (8, 49, 15), (9, 47, 16), (15, 95, 31),
    (16, 97, 32), (17, 131, 33), (31, 15, 47), (32, 16, 48), (33, 24, 49), (48, 480, 63), (63, 31, 64),
    (64, 33, 65), (65, 129, 96), (97, 64, 97), (3, 2500, 5), (2500, 5, 3), (5, 3, 2500),
)  # fmt: skip


@dataclass(frozen=True)
class LinearProblem:
    """Hold one call: the operator, its arguments by name, and the constant of the bound that holds for such data."""

    operator: str
    arguments: dict[str, Any]
    constant: float = ANY

    def replaced(self, **arguments: Any) -> LinearProblem:
        return replace(self, arguments=self.arguments | arguments)

    def mapped(self, function) -> LinearProblem:
        """Return the same call with every array replaced by the function's value."""
        arguments = {name: function(a) if isinstance(a, np.ndarray) else a for name, a in self.arguments.items()}
        return replace(self, arguments=arguments)

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        return {name: value for name, value in self.arguments.items() if isinstance(value, np.ndarray)}

    @property
    def dtype(self) -> np.dtype:
        return self.arguments["logits_max" if self.operator == LOSS else "input"].dtype

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: array.shape for name, array in self.arrays.items()}


def in_layout(problem: LinearProblem, layout: Layout) -> LinearProblem:
    """Return the problem with read-only arrays in this layout. Vectors have the layout of the matrices' rows."""
    row = Layout((0,), layout.steps[1:], layout.shift, layout.swapped)
    return problem.mapped(lambda array: laid_out(array, layout if array.ndim == 2 else row, readonly=True))


def accumulator(dtype) -> np.dtype:
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


class Data(NamedTuple):
    """Hold float64 values of input (BT, H), weight (V, H) and grad (BT,), and the constant of the bound."""

    x: np.ndarray
    w: np.ndarray
    grad: np.ndarray
    constant: float


def _alternating(*shape: int) -> np.ndarray:
    return np.where(np.indices(shape).sum(0) % 2, 1.0, -1.0)


def _centred(random, shape, dtype):
    x, w = random.standard_normal((shape.BT, shape.H)), random.standard_normal((shape.V, shape.H))
    return Data(x, 1.5 * w / np.sqrt(max(shape.H, 1)), random.standard_normal(shape.BT), CENTRED)


def _positive(random, shape, dtype):
    x, w = random.random((shape.BT, shape.H)), random.random((shape.V, shape.H))
    return Data(x, 4 * w / max(shape.H, 1), 0.1 + random.random(shape.BT), ONE_SIGN)


def _constant(random, shape, dtype):
    return Data(*(np.full(each, value) for each, value in _sizes(shape, 1 / 3, 1 / 7, 1 / 3)), ANY)


def _sizes(shape, x, w, grad):
    return (((shape.BT, shape.H), x), ((shape.V, shape.H), w), ((shape.BT,), grad))


def _cancelling(random, shape, dtype):
    """Make values whose products are large, of either sign, and have small sums."""
    x = 100 * _alternating(shape.BT, shape.H) * (1 + random.random((shape.BT, shape.H)) / 64)
    w = (1 + random.random((shape.V, shape.H)) / 64) / max(shape.H, 1)
    return Data(x, w, _alternating(shape.BT), ANY)


def _negative(random, shape, dtype):
    """Make logits of about -200. A 0 that is read beyond the last vocabulary entry would be the maximum."""
    x, w, grad, _ = _positive(random, shape, dtype)
    return Data(10 + x, -(20 + 4 * w) / max(shape.H, 1), grad, ANY)


def _peaked(random, shape, dtype):
    x, w, grad, _ = _centred(random, shape, dtype)
    return Data(x, 15 * w, grad, ANY)


def _tiny(random, shape, dtype):
    x, w, grad, _ = _centred(random, shape, dtype)
    smallest = float(ml_dtypes.finfo(dtype).smallest_subnormal)
    return Data(100 * smallest * x, 1000 * smallest * w, grad, ANY)


def _huge(random, shape, dtype):
    """Make values whose input gradients are above the range of 16 bits, and whose weight gradients are far below."""
    x, w, grad, _ = _centred(random, shape, dtype)
    large = float(ml_dtypes.finfo(dtype).max) ** 0.5
    return Data(x / large, large * w, grad, ANY)


def _magnitudes(random, shape, dtype):
    decades = np.log10(float(ml_dtypes.finfo(dtype).max)) / 4

    def values(*size):
        return random.choice([-1.0, 1.0], size) * 10 ** random.uniform(-decades, decades, size)

    x = values(shape.BT, shape.H)
    w = values(shape.V, shape.H)
    w /= max(np.abs(x @ w.T).max(initial=0) / 20, 1)
    return Data(x, w, values(shape.BT), ANY)


KINDS = {
    "centred": _centred,
    "positive": _positive,
    "constant": _constant,
    "cancelling": _cancelling,
    "negative": _negative,
    "peaked": _peaked,
    "tiny": _tiny,
    "huge": _huge,
    "magnitudes": _magnitudes,
}


def values_of(kind: str, shape: Shape, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Return input and weight in this dtype, grad in the accumulator's dtype, and the constant of the bound."""
    random = generator("linear", kind, shape, str(dtype))
    x, w, grad, constant = KINDS[kind](random, shape, dtype)
    with np.errstate(all="ignore"):
        return x.astype(dtype), w.astype(dtype), grad.astype(accumulator(dtype)), constant


def statistics_of(x: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the logits in float64, and each row's largest logit and sum in the accumulator's dtype."""
    logits = x.astype(np.float64) @ w.astype(np.float64).T
    largest = logits.max(-1, initial=-np.inf)
    largest = np.where(np.isfinite(largest), largest, 0).astype(accumulator(x.dtype))
    total = np.exp(logits - largest[:, None]).sum(-1) if logits.size else np.ones(len(x))
    return logits, largest, total.astype(accumulator(x.dtype))


@functools.lru_cache(maxsize=128)
def gradient_problem(
    shape: Shape, dtype_name: str, mode: str = "recomputed", kind: str = "centred", mask: str = "bool"
) -> LinearProblem:
    """Make a problem of the gradients.

    A tenth of the rows has the upstream gradient 0. About a third of the targets, or all if the data is positive, is in
    other shards.
    """
    dtype = DTYPES[dtype_name]
    shape = Shape(*shape)
    random = generator(shape, dtype_name, kind)
    x, w, grad, constant = values_of(kind, shape, dtype)
    logits, largest, total = statistics_of(x, w)
    if shape.BT > 4:
        grad[random.random(shape.BT) < 0.1] = 0
    elsewhere = random.random(shape.BT) < (1 if kind == "positive" or shape.V == 0 else 0.3)
    target = random.integers(0, max(shape.V, 1), shape.BT)
    target[elsewhere] = random.integers(-(2**31), 2**31, elsewhere.sum())
    arguments: dict[str, Any] = {
        "grad": grad,
        "input": x,
        "weight": w,
        "target_mask": elsewhere if mask == "bool" else np.packbits(elsewhere, bitorder="little"),
        "masked_target": target,
    }
    # The sum includes logits of other shards.
    total = total * (1 + random.random(shape.BT)).astype(total.dtype)
    if mode == "stored":
        constant = max(constant, ONE_SIGN)  # entries of P have one sign, except at the target
        softmax = np.exp(logits - largest[:, None]) / total[:, None]
        arguments["softmax"] = softmax.astype(total.dtype)
    else:
        arguments |= {"logits_max": largest, "sum_exp_logits": total}
    return frozen(LinearProblem(GRADIENT, arguments, constant))


@functools.lru_cache(maxsize=128)
def statistics_problem(
    shape: Shape, dtype_name: str, kind: str = "centred", return_logits: bool = True
) -> LinearProblem:
    """Make a statistics problem. The last quarter of the entries has no id, and some targets are in other shards."""
    dtype = DTYPES[dtype_name]
    shape = Shape(*shape)
    random = generator(shape, dtype_name, kind)
    x, w, _, constant = values_of(kind, shape, dtype)
    start, size = 1000, shape.V - shape.V // 4
    arguments = {
        "input": x,
        "weight": w,
        "target": start + random.integers(-(size // 3) - 1, size + size // 3 + 1, shape.BT),
        "vocab_start_index": start,
        "vocab_end_index": start + size,
        "return_logits": return_logits,
    }
    return frozen(LinearProblem(STATISTICS, arguments, constant))


@functools.lru_cache(maxsize=128)
def loss_problem(shape: Shape, dtype_name: str, logits: bool = True) -> LinearProblem:
    dtype = DTYPES[dtype_name]
    shape = Shape(*shape)
    random = generator(shape, dtype_name)
    x, w, *_ = values_of("centred", shape, dtype)
    values, largest, total = statistics_of(x, w)
    arguments = {
        "logits_max": largest,
        "sum_exp_logits": total,
        "predicted_logits": (-3 * random.random(shape.BT)).astype(largest.dtype),
        "vocab_parallel_logits": values.astype(dtype) if logits else None,
    }
    return frozen(LinearProblem(LOSS, arguments))


@functools.lru_cache(maxsize=128)
def whole_problem(shape: Shape, dtype_name: str, kind: str = "centred", reduction: str = "mean") -> LinearProblem:
    """Make a problem of the whole loss. A sixth of the rows is ignored, and ids start at 100."""
    dtype = DTYPES[dtype_name]
    shape = Shape(*shape)
    random = generator(shape, dtype_name, kind, "whole")
    x, w, grad, constant = values_of(kind, shape, dtype)
    target = 100 + random.integers(0, max(shape.V, 1), shape.BT)
    target[random.random(shape.BT) < (1 / 6 if shape.V else 1)] = -7
    arguments = {
        "input": x,
        "weight": w,
        "target": target,
        "reduction": reduction,
        "ignore_index": -7,
        "grad_loss": grad if reduction == "none" else 0.7,
        "vocab_start_index": 100,
    }
    return frozen(LinearProblem(WHOLE, arguments, constant))


@functools.lru_cache(maxsize=128)
def top_k_problem(
    shape: Shape,
    dtype_name: str,
    kind: str = "centred",
    k: int = 4,
    temperature: float | str = 1.0,
    bias: str | None = None,
    **options: float,
) -> LinearProblem:
    """Make a problem of the largest log-probabilities; `k` is limited to the vocabulary.

    `temperature` and `bias` may be names of dtypes: of one number for each row, or for each entry.
    """
    shape = Shape(*shape)
    x, w, _, constant = values_of(kind, shape, DTYPES[dtype_name])
    random = generator("logit options", shape)
    arguments = {"input": x, "weight": w, "k": min(k, shape.V), "temperature": temperature, **options}
    if isinstance(temperature, str):
        arguments["temperature"] = (0.25 + 3 * random.random(shape.BT)).astype(DTYPES[temperature])
    if bias is not None:
        arguments["bias"] = random.standard_normal(shape.V).astype(DTYPES[bias])
    return frozen(LinearProblem(TOP_K, arguments, constant))


PROBLEMS = {
    GRADIENT: gradient_problem,
    STATISTICS: statistics_problem,
    LOSS: loss_problem,
    WHOLE: whole_problem,
    TOP_K: top_k_problem,
}


def problem_of(operator: str, shape: tuple[int, int, int], dtype_name: str, **how: Any) -> LinearProblem:
    return PROBLEMS[operator](Shape(*shape), dtype_name, **how)


def frozen(problem: LinearProblem) -> LinearProblem:
    for array in problem.arrays.values():
        array.flags.writeable = False
    return problem
