"""The largest error of every operator, in units of the bound that the library promises (`ascend_grad.bounds`).

The values are difficult ones: sums that cancel, sums that only grow, subnormal, huge and tiny values. Rows have up to
2**20 elements, along the last dim and along the first. Every row-wise call is also made with a float32 result, which
shows the kernels' own error. The rounding of a 16-bit result is subtracted from its error.

The formulas of the linear operators share no code with the kernels. Their bounds use the constants of `bounds`; c
depends on the kind of values:

- a product ``A @ B``, such as the logits: c eps (|A| @ |B|), and the errors of A in the product;
- a softmax entry P that is recomputed: P (exp(e) - 1 + s eps), where e is the error of the exponent, the logits' bound
  and c eps |max|, and s depends on the source of maximum and sum;
- bfloat16: an addition for P, which is rounded before the products;
- the sum of exponentials: a multiple of eps, and the exponential of the logits' bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import ml_dtypes
import numpy as np

import ascend_grad as ag
from ascend_grad import _cpu, bounds
from ascend_grad.bounds import ANY, CENTRED, FORMULAS, ONE_SIGN, Precision, half_ulp, precision_of, widen

from .case import BACKWARD, DTYPES, FORWARD, GRADIENT, MASKED, MASKED_BACKWARD, MAX_SUM, WHOLE, numpy_dtype
from .results import Worst

ROWWISE = (*BACKWARD, MASKED_BACKWARD, *FORWARD, MASKED[1])
STORED = f"{GRADIENT}, stored"
LINEAR = (f"{GRADIENT}, recomputed", STORED, MAX_SUM, WHOLE)
#: Elements of the rows.
LENGTHS = (1, 2, 3, 10, 16, 31, 64, 100, 257, 1000, 4096, 2**16, 2**20)
#: The factor of the masked operators. It is not a power of two, so that multiplying by it rounds.
SCALE = 0.3
#: Shapes (BT, V, H): two near the edges of tiles, and three with one long dimension.
SHAPES = ((33, 257, 65), (129, 1000, 48), (3, 5000, 5), (5000, 5, 3), (7, 49, 5000))
#: Shapes for float32 alone, as their oracle takes long.
HUGE_SHAPES = ((10_000_000, 2, 1), (2, 10_000_000, 1))
#: Kinds of values of linear problems.
KINDS = ("centred", "positive", "constant", "cancelling", "far from zero", "peaked")


class Expected(NamedTuple):
    """Values, the bounds of their errors (infinite if nothing is promised), and the rounding of a 16-bit result."""

    values: np.ndarray
    bound: np.ndarray
    rounding: np.ndarray


class Problem(NamedTuple):
    """A call, what it should return, and where its values come from, for each row or for all."""

    call: Callable[[], Iterator[tuple[np.ndarray, Expected]]]
    kinds: list[str]
    length: int


def expected(values: np.ndarray, bound: np.ndarray, dtype: np.dtype) -> Expected:
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


def measure(operator: str, dtype: str) -> list[Worst]:
    """Find the largest error of an operator for one dtype, with each CPU variant of this machine."""
    worst: dict[str, Worst] = {}
    before = _cpu.variant()
    try:
        for problem in rowwise_problems(operator, dtype) if operator in ROWWISE else linear_problems(operator, dtype):
            for variant in _cpu.supported_variants():
                _cpu.force_variant(variant)
                for result, right in problem.call():
                    found = errors(result, right).reshape(len(problem.kinds), -1).max(-1)
                    row = int(found.argmax())
                    if variant not in worst or found[row] > worst[variant].error:
                        error = float(f"{found[row]:.3g}")
                        worst[variant] = Worst(operator, dtype, variant, error, problem.kinds[row], problem.length)
    finally:
        _cpu.force_variant(before)
    return list(worst.values())


def pairs() -> list[tuple[str, str]]:
    """Return the arguments for all calls of `measure`."""
    return [(operator, dtype) for operator in (*ROWWISE, *LINEAR) for dtype in DTYPES]


# ---- row-wise operators ----------------------------------------------------------------------------------------------


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


def expected_rows(operator: str, inputs: tuple[np.ndarray, ...]) -> Expected:
    """Compute the expected results of a call with rows along the last axis."""
    p = precision_of(inputs[0].dtype)
    settings = {"scale": SCALE} if operator in MASKED else {}
    with np.errstate(all="ignore"):
        rows = (a if a.dtype == bool else widen(a, p.wide) for a in inputs)
        return expected(*FORMULAS[operator](p, *rows, **settings), inputs[0].dtype)


def rowwise_problems(operator: str, dtype: str) -> Iterator[Problem]:
    """Make calls with rows along the last dim and, unless the operator has no dim, along the first."""
    function = getattr(ag, operator)
    for n in LENGTHS:
        kinds, inputs = samples(operator, n, dtype)
        right, columns = expected_rows(operator, inputs), [np.ascontiguousarray(a.T) for a in inputs]

        def call(inputs=inputs, columns=columns, right=right) -> Iterator[tuple[np.ndarray, Expected]]:
            shape, own = inputs[0].shape, inputs[0].dtype
            for result_dtype in dict.fromkeys((own, np.dtype(precision_of(own).dtype))):
                last = SCALE if operator in MASKED else -1
                yield function(*inputs, last, out=np.empty(shape, result_dtype), backend="cpu"), right
                if operator not in MASKED:
                    out = np.empty(columns[0].shape, result_dtype)
                    yield function(*columns, 0, out=out, backend="cpu").T, right

        yield Problem(call, kinds, n)


# ---- linear operators ------------------------------------------------------------------------------------------------


class Layer(NamedTuple):
    """The operands of a linear operator, as the oracle takes them, and the constant of the bound."""

    p: Precision
    dtype: np.dtype
    constant: int
    x: np.ndarray
    weight: np.ndarray
    target: np.ndarray
    grad: np.ndarray

    def product(self, a: np.ndarray, b: np.ndarray, a_error: np.ndarray | None = None) -> bounds.Expected:
        """Return a product and the bound on its error, for an ``a`` with errors, rounded before the product."""
        relative = self.constant * self.p.eps
        if a_error is not None and self.dtype.name == "bfloat16":
            relative += bounds.BFLOAT16_P
        size = relative * np.abs(a) + (0 if a_error is None else a_error)
        return bounds.Expected(a @ b, size @ np.abs(b) + self.p.normal)


def layer(kind: str, shape: tuple[int, int, int], dtype_name: str) -> Layer:
    """Make a linear layer with values of a kind, rounded to the dtype."""
    dtype, random = numpy_dtype(dtype_name), np.random.default_rng(shape)
    p, (rows, vocabulary, width) = precision_of(dtype), shape
    normal, weight = random.standard_normal((rows, width)), random.standard_normal((vocabulary, width)) / np.sqrt(width)
    signs = np.where(np.arange(rows)[:, None] + np.arange(width) & 1, 1.0, -1.0)
    uniform, weights = random.random((rows, width)), 4 * random.random((vocabulary, width)) / width
    constant, *arrays = {
        "centred": (CENTRED, normal, 1.5 * weight),
        "positive": (ONE_SIGN, uniform, weights),
        "constant": (ANY, np.full((rows, width), 1 / 3), np.full((vocabulary, width), 1 / 7)),
        "cancelling": (ANY, 100 * signs * (1 + uniform / 64), (1 + weights / 64) / width),
        "far from zero": (ANY, 10 + uniform, -(20 + weights) / width),
        "peaked": (ANY, normal, 15 * weight),
    }[kind]
    target = random.integers(0, vocabulary, rows)
    grad = (random.random(rows) + 0.1 if kind == "positive" else random.standard_normal(rows)).astype(p.dtype)
    x, weight = (array.astype(dtype).astype(p.wide) for array in arrays)
    return Layer(p, dtype, constant, x, weight, target, grad)


def linear_expected(operator: str, s: Layer) -> tuple[list[Expected], Callable]:
    """Return the expected results of a linear operator, and the call."""
    p, rows, real = s.p, np.arange(len(s.x)), np.dtype(s.p.dtype)
    x, weight = s.x.astype(s.dtype), s.weight.astype(s.dtype)
    z, error = s.product(s.x, s.weight.T)
    largest, largest_error = z.max(1), error.max(1)
    below = z - largest[:, None]
    total, predicted = np.exp(below).sum(1), below[rows, s.target]
    predicted_error = error[rows, s.target]
    if operator == MAX_SUM:
        spread = np.expm1(error + largest_error[:, None])
        total_error = (np.exp(below) * spread).sum(1) + bounds.SUM * p.eps * total
        predicted_error = predicted_error + largest_error + p.eps * np.abs(predicted)
        right = [
            expected(largest, largest_error + p.eps * np.abs(largest) + p.normal, real),
            expected(total, total_error + p.normal, real),
            expected(predicted, predicted_error + p.normal, real),
        ]
        return right, lambda: ag.fused_linear_online_max_sum(x, weight, s.target, 0, len(weight), backend="cpu")[:3]
    call: Callable[[], tuple]
    if operator == WHOLE:
        logarithm = np.log(total)
        bound = predicted_error + 2 * largest_error + p.normal
        bound += p.eps * (20 + s.constant * (1 + 4 * logarithm + 4 * np.abs(predicted)))
        exponent, statistics_error = error + 2 * largest_error[:, None], bounds.SOFTMAX_AND_STATISTICS
        softmax, size = np.exp(below) / total[:, None], np.abs(largest)
        losses = [expected(logarithm - predicted, bound, real)]
        call = lambda: ag.linear_cross_entropy(  # noqa: E731
            x, weight, s.target, reduction="none", grad_loss=s.grad, backend="cpu"
        )
    else:
        # The formula uses maximum and sum, or the softmax, as the call gets them, rounded.
        given = {"logits_max": largest.astype(real), "sum_exp_logits": total.astype(real)}
        wide, over = (value.astype(p.wide) for value in given.values())
        softmax, size = np.exp(z - wide[:, None]) / over[:, None], np.abs(wide)
        exponent, statistics_error, losses = error, bounds.SOFTMAX, []
        if operator == STORED:
            given = {"softmax": (np.exp(below) / total[:, None]).astype(real)}
            softmax = given["softmax"].astype(p.wide)
            s = s._replace(constant=max(s.constant, ONE_SIGN))
        arguments = s.grad, x, weight, np.zeros(len(x), bool), s.target
        call = lambda: ag.fused_linear_cross_entropy_loss_grad(*arguments, **given, backend="cpu")  # noqa: E731
    # The relative error of a softmax entry comes from its exponent and from the statistics.
    relative = np.expm1(exponent + s.constant * p.eps * size[:, None]) + statistics_error * p.eps
    softmax_error = 0 * softmax if operator == STORED else softmax * relative + p.normal
    if operator == WHOLE and s.dtype == ml_dtypes.bfloat16:
        softmax_error += bounds.cached_exp_error(softmax)
    tile, grad = softmax.copy(), s.grad.astype(p.wide)[:, None]
    tile[rows, s.target] -= 1
    tile, tile_error = tile * grad, softmax_error * np.abs(grad)
    gradients = s.product(tile, s.weight, tile_error), s.product(tile.T, s.x, tile_error.T)
    return [*losses, *(expected(*gradient, s.dtype) for gradient in gradients)], call


def linear_problems(operator: str, dtype: str) -> Iterator[Problem]:
    """Make calls of all kinds of values and shapes."""
    shapes = [(shape, kind) for shape in SHAPES for kind in KINDS]
    if dtype == "float32":
        shapes += [(shape, "positive") for shape in HUGE_SHAPES]
    for shape, kind in shapes:
        with np.errstate(all="ignore"):
            right, call = linear_expected(operator, layer(kind, shape, dtype))

        def results(call=call, right=right) -> Iterator[tuple[np.ndarray, Expected]]:
            yield from zip(call(), right)

        yield Problem(results, [f"{kind}, {' × '.join(map(str, shape))}"], max(shape))
