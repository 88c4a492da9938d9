"""Compute expected values of the linear operators and bounds on errors, in float64 (longdouble for float64).

The bound for a product A @ B of K terms is ``constant * eps * (|A| @ |B|)``, however large K is. The constant depends
on the data (`ascend_grad.bounds`).
"""

from __future__ import annotations

from typing import NamedTuple

import loss_oracle
import ml_dtypes
import numpy as np
from linear_samples import GRADIENT, LOGIT_OPTIONS, LOSS, STATISTICS, TOP_K, WHOLE, LinearProblem
from oracles import Expected, Precision, half_ulp, precision_of, rounded_once, widen
from samples import BFLOAT16

from ascend_grad import bounds


class Sizes(NamedTuple):
    """Hold the numbers from which the bounds of one problem are computed."""

    p: Precision
    constant: float
    bfloat16: bool
    device_dtype: np.dtype | None = None  # a device rounds tiles and logits to this dtype

    @property
    def eps(self) -> float:
        return self.constant * self.p.eps


def bits_of(mask: np.ndarray, count: int) -> np.ndarray:
    if mask.dtype == bool:
        return np.array(mask)
    rows = np.arange(count)
    return (mask[rows // 8] >> (rows % 8).astype(np.uint8)) & 1 == 1


def product(s: Sizes, a: np.ndarray, a_error: np.ndarray, b: np.ndarray) -> Expected:
    """Return a @ b and the bound on its error. The elements of `a` have the errors `a_error`."""
    # Bounds are computed in float64, for which NumPy has fast products.
    b_size = np.abs(b).astype(np.float64)
    magnitude = np.abs(a).astype(np.float64) @ b_size
    bound = s.eps * magnitude + a_error.astype(np.float64) @ b_size
    if s.bfloat16:
        bound += bounds.BFLOAT16_P * magnitude  # the kernel rounds a before the product
    if s.device_dtype is not None:
        info = ml_dtypes.finfo(s.device_dtype)
        bound += 2 * float(info.eps) * magnitude
        bound += float(info.smallest_subnormal) * (1 + np.abs(b).sum(0, keepdims=True))
        # A tile or a result beyond the largest number of 16 bits is infinite.
        largest = np.maximum(np.abs(a).max(1, initial=0)[:, None], magnitude + bound)
        bound = np.where(largest < float(info.max) / 2, bound, np.inf)
    # Subnormal elements of a and b, and subnormal terms, may become 0.
    bound += float(s.p.normal) * (a.shape[1] + np.abs(a).sum(1, keepdims=True) + np.abs(b).sum(0, keepdims=True))
    # A product of NaN or infinity with 0 has no bound.
    bound = np.where((magnitude < s.p.largest / 4) & ~np.isnan(bound), bound, np.inf)
    return Expected(loss_oracle.matrix_product(a, b), bound)


def logits_of(s: Sizes, x: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits, and the bound on their error."""
    magnitude = np.abs(x).astype(np.float64) @ np.abs(w).T.astype(np.float64)
    bound = s.eps * magnitude + float(s.p.normal) * (1 + x.shape[1])
    logits = loss_oracle.matrix_product(x, w.T)
    if s.device_dtype is not None:
        bound = bound + half_ulp(np.abs(logits) + bound, s.device_dtype)
        bound = np.where(np.abs(logits) + bound < float(ml_dtypes.finfo(s.device_dtype).max) / 2, bound, np.inf)
    # An infinite or NaN logit is exact.
    return logits, np.where(np.isfinite(logits), np.where(magnitude < s.p.largest / 4, bound, np.inf), 0)


def both_gradients(s, x, w, grad, p, p_error, onehot) -> tuple[Expected, Expected]:
    """Compute both gradients from the softmax and its error. A row whose upstream gradient is 0 is absent."""
    present = grad != 0
    tile = np.where(present[:, None], (p - onehot) * grad[:, None], 0)
    error = np.where(present[:, None], p_error * np.abs(grad)[:, None], 0)
    overflow = np.abs(tile) + error >= s.p.largest / 4
    error = np.where(overflow, np.inf, error)
    x = np.where(present[:, None], x, 0)
    first = product(s, tile, error, w)
    # Results of an absent row are exactly 0, without subnormal numbers.
    first = Expected(np.where(present[:, None], first.values, 0), np.where(present[:, None], first.bound, 0))
    return first, product(s, np.ascontiguousarray(tile.T), np.ascontiguousarray(error.T), x)


def recomputed(s, x, w, largest, total) -> tuple[np.ndarray, np.ndarray]:
    """Compute the softmax from each row's largest logit and sum of exponentials, and the bound on its error."""
    logits, logits_error = logits_of(s, x, w)
    shifted = logits - largest[:, None]
    p = np.exp(shifted) / total[:, None]
    exponent = logits_error + s.eps * np.abs(largest)[:, None]
    # An exponential below the smallest normal number may become 0.
    error = p * (np.expm1(exponent) + bounds.SOFTMAX * s.p.eps) + float(s.p.normal) / np.abs(total)[:, None]
    return p, np.where(np.exp(shifted + exponent) < s.p.largest / 4, error, np.inf)


def gradients(
    s, *, grad, input, weight, target_mask, masked_target, logits_max=None, sum_exp_logits=None, softmax=None
):
    elsewhere = bits_of(target_mask, len(grad))
    onehot = np.zeros((len(input), len(weight)), s.p.wide)
    here = np.flatnonzero(~elsewhere)
    onehot[here, masked_target[here]] = 1
    if softmax is None:
        p, error = recomputed(s, input, weight, logits_max, sum_exp_logits)
    else:
        p, error = softmax, np.zeros_like(softmax)
    return both_gradients(s, input, weight, grad, p, error, onehot)


def statistics(s, *, input, weight, target, vocab_start_index, vocab_end_index, return_logits=False):
    logits, error = logits_of(s, input, weight)
    largest = logits.max(-1, initial=-np.inf)
    largest_error = error.max(-1, initial=0)
    shifted = logits - largest[:, None]
    exponential = np.exp(shifted)
    total = exponential.sum(-1)
    spread = np.expm1(error + largest_error[:, None])
    total_error = (exponential * spread).sum(-1) + bounds.SUM * s.p.eps * total + float(s.p.normal) * len(weight)
    masked = (target < vocab_start_index) | (target >= vocab_end_index)
    inside = np.where(masked, 0, target - vocab_start_index)
    rows = np.arange(len(input))
    predicted = np.where(masked, 0, shifted[rows, inside])
    predicted_error = np.where(masked, 0, error[rows, inside] + largest_error + s.p.eps * np.abs(predicted))
    packed = np.pad(masked, (0, -len(input) % 8)).reshape(-1, 8) @ 2 ** np.arange(8)
    return (
        Expected(largest, largest_error + s.p.eps * np.abs(largest)),
        Expected(total, total_error),
        Expected(predicted, predicted_error),
        Expected(packed.astype(s.p.wide), np.zeros(packed.shape)),
        Expected(inside.astype(s.p.wide), np.zeros(inside.shape)),
        Expected(logits, error) if return_logits else None,
    )


def loss_and_softmax(s, *, logits_max, sum_exp_logits, predicted_logits, vocab_parallel_logits=None):
    logarithm = np.log(sum_exp_logits)
    loss = Expected(logarithm - predicted_logits, 4 * s.p.eps * (1 + np.abs(logarithm) + np.abs(predicted_logits)))
    if vocab_parallel_logits is None:
        return loss, None
    shifted = vocab_parallel_logits - logits_max[:, None]
    softmax = np.exp(shifted) / sum_exp_logits[:, None]
    return loss, Expected(softmax, (32 + np.abs(shifted)) * s.p.eps * softmax + s.p.normal)


def whole(
    s,
    *,
    input,
    weight,
    target,
    reduction="mean",
    ignore_index=-100,
    grad_loss=1.0,
    vocab_start_index=0,
    return_grad=True,
):
    counted = target != ignore_index
    n = int(counted.sum())
    inside = np.where(counted, target - vocab_start_index, 0)
    if len(weight) == 0:  # all rows are ignored, as if there were one class without targets
        loss, first, second = whole(
            s,
            input=input,
            weight=np.zeros((1, input.shape[1]), s.p.wide),
            target=np.zeros_like(target),
            reduction=reduction,
            ignore_index=0,
            return_grad=return_grad,
        )
        return loss, first, second and Expected(second.values[:0], second.bound[:0])
    logits, error = logits_of(s, input, weight)
    largest, largest_error = logits.max(-1, initial=-np.inf), error.max(-1, initial=0)
    shifted = logits - largest[:, None]
    total = np.exp(shifted).sum(-1)
    rows = np.arange(len(input))
    losses = np.where(counted, np.log(total) - shifted[rows, inside], 0)
    bound = (
        error[rows, inside] + 2 * largest_error + s.p.eps * (20 + 4 * np.log(total) + 4 * np.abs(shifted[rows, inside]))
    )
    bound = np.where(counted, bound, 0)
    scale = widen(grad_loss, s.p.wide)
    if reduction == "none":
        loss, grad = Expected(losses, bound), np.where(counted, scale, 0)
    else:
        over = n if reduction == "mean" else 1
        with np.errstate(all="ignore"):
            loss = Expected(
                losses.sum() / s.p.wide(over), (bound.sum() + s.eps * np.abs(losses).sum()) / s.p.wide(over)
            )
        grad = np.where(counted, scale / max(over, 1), s.p.wide(0))
    loss = Expected(np.asarray(loss.values), np.asarray(loss.bound))
    if not return_grad:
        return loss, None, None
    p = np.exp(shifted) / total[:, None]
    exponent = error + 2 * largest_error[:, None] + s.eps * np.abs(largest)[:, None]
    p_error = p * (np.expm1(exponent) + bounds.SOFTMAX_AND_STATISTICS * s.p.eps) + float(s.p.normal)
    if s.bfloat16:
        p_error += bounds.cached_exp_error(p)
    onehot = np.zeros_like(p)
    onehot[rows, inside] = 1
    return loss, *both_gradients(s, input, weight, grad, p, p_error, onehot)


def capped(s: Sizes, products, error, *, bias=None, logit_scale=1.0, softcap=None) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits of products before the temperature divides them, and the bound on their error."""
    if bias is None and logit_scale == 1 and softcap is None:
        return products, error
    size = np.abs(products) + (0 if bias is None else np.abs(widen(bias, s.p.wide)))
    logits, _ = loss_oracle.logits_of(products, bias=bias, logit_scale=logit_scale, softcap=softcap)
    error = abs(logit_scale) * (error + 4 * s.p.eps * size) + 8 * s.p.eps * np.abs(logits)
    return logits, np.where(np.isfinite(logits), error, 0)


def top_k(s, *, input, weight, k, temperature=1.0, bias=None, logit_scale=1.0, softcap=None):
    """Compute the k largest log-probabilities. The bound of the indices is infinite: `assert_top_k` checks them."""
    products = logits_of(s, input, weight)
    logits, error = capped(s, *products, bias=bias, logit_scale=logit_scale, softcap=softcap)
    limit = 2.0**500 if s.p.eps == 2.0**-53 else 2.0**60
    temperature = np.clip(np.asarray(temperature, np.float64).reshape(-1, 1), 1 / limit, limit)
    shifted = (logits - logits.max(-1, keepdims=True, initial=-np.inf)) / temperature
    rest = np.exp(shifted)
    np.put_along_axis(rest, logits.argmax(-1)[:, None], 0, axis=-1)
    log_sum = np.log1p(rest.sum(-1, keepdims=True))
    rest /= np.exp(log_sum)
    unknown = np.isnan(shifted - log_sum).any(-1, keepdims=True)
    index = np.argsort(np.where(unknown, 0, -logits), axis=-1, kind="stable")[:, :k]
    log_prob = np.where(unknown, np.nan, np.take_along_axis(shifted, index, -1) - log_sum)
    # The j-th largest of all logits is off by at most the largest error of a logit.
    spread = error.max(-1, keepdims=True, initial=0) / temperature
    # An exponential below the smallest normal number may become 0. Differences are rounded before they are divided.
    log_sum_error = bounds.SUM * -np.expm1(-log_sum) + 4 * (rest * np.abs(shifted)).sum(
        -1, where=rest > 0, keepdims=True
    )
    bound = 3 * spread + s.p.eps * (4 * np.abs(log_prob) + log_sum_error) + float(s.p.normal) * len(weight)
    bound = np.where(np.isfinite(log_prob), bound, 0)
    return Expected(log_prob, bound), Expected(index, np.full(index.shape, np.inf))


def logits_of_problem(problem: LinearProblem) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits that are compared, and the bound on their error."""
    s = sizes_of(problem)
    options = {name: problem.arguments[name] for name in LOGIT_OPTIONS if name in problem.arguments}
    with np.errstate(all="ignore"):
        products = logits_of(s, *(widen(problem.arguments[name], s.p.wide) for name in ("input", "weight")))
        return capped(s, *products, **options)


def assert_top_k(results: tuple[np.ndarray, np.ndarray], logits: np.ndarray, error: np.ndarray) -> None:
    """Check the indices: that no logit outside is larger than the logits inside, beyond the errors of both."""
    log_prob, index = results
    assert index.dtype == np.int64
    for row, (values, entries) in enumerate(zip(log_prob, index, strict=True)):
        if np.isnan(values).any():
            assert np.isnan(values).all()
            assert entries.tolist() == list(range(len(entries)))
            continue
        assert len({*entries.tolist()}) == len(entries)
        assert np.all(values[:-1] >= values[1:])
        largest = float(np.max(error[row]))
        chosen = logits[row][entries]
        assert np.all(chosen[:-1] >= chosen[1:] - 2 * largest)
        others = np.delete(logits[row], entries)
        if others.size:
            assert chosen[-1] >= others.max() - 2 * largest


_ORACLES = {
    GRADIENT: gradients,
    STATISTICS: statistics,
    LOSS: loss_and_softmax,
    WHOLE: whole,
    TOP_K: top_k,
}


def sizes_of(problem: LinearProblem) -> Sizes:
    return Sizes(precision_of(problem.dtype), problem.constant, problem.dtype == BFLOAT16)


def expected(problem: LinearProblem) -> tuple[Expected | None, ...]:
    """Return values and bounds of a problem's results before they are rounded to their dtypes."""
    return _expected(problem, sizes_of(problem))


def _expected(problem: LinearProblem, s: Sizes) -> tuple[Expected | None, ...]:
    arguments = {
        name: widen(a, s.p.wide) if isinstance(a, np.ndarray) and a.dtype.kind not in "biu" else a
        for name, a in problem.arguments.items()
    }
    with np.errstate(all="ignore"):
        return _ORACLES[problem.operator](s, **arguments)


def for_result(expected: Expected, dtype: np.dtype, result: np.ndarray) -> Expected:
    """Return values and bounds of a problem of this dtype after rounding to the dtype of the result."""
    if result.dtype.kind in "iu":
        return expected
    with np.errstate(all="ignore"):
        return rounded_once(expected, precision_of(dtype), result.dtype.newbyteorder("="))


def claimed_of_a_device(expected: tuple[Expected | None, ...], problem: LinearProblem) -> tuple[Expected | None, ...]:
    """Return the values with the bounds of a device, which rounds more often.

    A device rounds the tile of the gradient and the logits of the online max sum to 16 bits, also in float16. It rounds
    a result to 16 bits before the conversion to another dtype.
    """
    s = sizes_of(problem)._replace(device_dtype=problem.arguments["input"].dtype if problem.operator != LOSS else None)
    looser = _expected(problem, s)
    return tuple(
        None if given is None or wide is None else Expected(given.values, np.maximum(given.bound, wide.bound))
        for given, wide in zip(expected, looser, strict=True)
    )
