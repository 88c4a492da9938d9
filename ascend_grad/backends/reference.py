"""The reference backend: every formula in plain NumPy and float64. It is specification, fallback and oracle."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from .. import arrays
from .._call import Call, ResultSpec
from .._rowwise_python import MASKED_LOGIT
from ..contract import LINEAR, LOSSES
from . import loss_reference

NAME = "reference"

#: Maximum number of logits that are computed together, so that a large vocabulary needs no (BT, V) array.
CHUNK_ELEMENTS = 1 << 22


def status() -> tuple[bool, str]:
    return True, "plain NumPy in float64; slow, meant for comparison"


# Rows are contiguous along the last axis, so that NumPy sums every row in the same order for any original layout.


def softmax_backward(grad_output, output):
    return (grad_output - np.sum(grad_output * output, axis=-1, keepdims=True)) * output


def log_softmax_backward(grad_output, output):
    return grad_output - np.sum(grad_output, axis=-1, keepdims=True) * np.exp(output)


def scaled_masked_softmax_backward(grad_output, y, mask, scale):
    return np.where(mask, 0.0, softmax_backward(grad_output, y) * scale)


def softmax(input):
    exponential = np.exp(input - np.max(input, axis=-1, keepdims=True))
    return exponential / np.sum(exponential, axis=-1, keepdims=True)


def log_softmax(input):
    shifted = input - np.max(input, axis=-1, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))


def scaled_masked_softmax(x, mask, scale):
    # The product is rounded to scale's dtype, as this rounding is part of the formula.
    scaled = np.asarray(x * scale, scale.dtype).astype(np.float64)
    return softmax(np.where(mask, MASKED_LOGIT, scaled))


# ---- row-wise operators: from calls to rows, from rows to results ----------------------------------------------------

_FORMULAS = {
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


def _rows(array: np.ndarray, dim: int) -> np.ndarray:
    """Return the values in float64 (a mask stays bool) with rows along the last axis. Rank 0 counts as rank 1."""
    wide = array if array.dtype == np.bool_ else array.astype(np.float64)
    return np.ascontiguousarray(np.moveaxis(np.atleast_1d(wide), dim, -1))


def _run_rowwise(call: Call) -> np.ndarray:
    (spec,) = call.specs
    assert spec is not None
    out = _result(spec, call.outs[0])
    dtype = arrays.native(call.arrays[0].dtype)
    if out.size == 0:
        return out
    dim = call.arguments.get("dim", -1)
    settings = {}
    with np.errstate(all="ignore"):
        if "scale" in call.arguments:
            settings["scale"] = arrays.accumulator_dtype(dtype).type(call.arguments["scale"])
        values = _FORMULAS[call.operator.name](*(_rows(array, dim) for array in call.arrays), **settings)
        values = np.moveaxis(values, -1, dim).reshape(out.shape)
    arrays.round_into(out, values)
    return out


# ---- linear operators ------------------------------------------------------------------------------------------------
#
# Everything is computed before anything is written, so an out may overlap the inputs.


def _wide(array: np.ndarray) -> np.ndarray:
    return np.require(array, np.float64, ["C", "A"])  # other layouts are multiplied without BLAS, in another order


def _chunks(rows: np.ndarray, width: int) -> Iterator[np.ndarray]:
    """Yield the row numbers in chunks, so that a chunk's length times `width` stays small."""
    step = max(CHUNK_ELEMENTS // max(width, 1), 1)
    for begin in range(0, rows.size, step):
        yield rows[begin : begin + step]


def fused_linear_cross_entropy_loss_grad(
    grad, input, weight, target_mask, masked_target, logits_max, sum_exp_logits, softmax, **_
):
    """Compute ``P @ weight`` and ``P.T @ input`` for ``P = grad * (softmax - one_hot)``."""
    weight = _wide(weight)
    elsewhere = arrays.unpacked(target_mask, grad.size)
    input_grad, weight_grad = np.zeros(input.shape), np.zeros(weight.shape)
    # A row whose grad is 0 is absent, whatever it holds.
    for rows in _chunks(np.flatnonzero(grad != 0), len(weight)):
        x = _wide(input[rows])
        if softmax is not None:
            p = _wide(softmax[rows])
        else:
            p = np.exp(x @ weight.T - _wide(logits_max[rows])[:, None]) / _wide(sum_exp_logits[rows])[:, None]
        here = np.flatnonzero(~elsewhere[rows])
        p[here, masked_target[rows[here]]] -= 1
        p *= _wide(grad[rows])[:, None]
        input_grad[rows] = p @ weight
        weight_grad += p.T @ x
    return input_grad, weight_grad


def fused_linear_online_max_sum(input, weight, target, vocab_start_index, vocab_end_index, return_logits):
    weight = _wide(weight)
    target = target.astype(np.int64)
    masked = (target < vocab_start_index) | (target >= vocab_end_index)
    masked_target = np.where(masked, vocab_start_index, target) - vocab_start_index
    logits_max, sum_exp_logits, predicted_logits = np.zeros((3, len(input)))
    kept = np.empty((len(input), len(weight)), arrays.native(input.dtype)) if return_logits else None
    for rows in _chunks(np.arange(len(input)), len(weight)):
        logits = _wide(input[rows]) @ weight.T
        logits_max[rows] = np.max(logits, axis=-1)
        shifted = logits - logits_max[rows, None]
        sum_exp_logits[rows] = np.sum(np.exp(shifted), axis=-1)
        predicted_logits[rows] = np.where(masked[rows], 0, shifted[np.arange(rows.size), masked_target[rows]])
        if kept is not None:
            arrays.round_into(kept[rows[0] : rows[-1] + 1], logits)
    packed = np.packbits(masked, bitorder="little")
    return logits_max, sum_exp_logits, predicted_logits, packed, masked_target, kept


def fused_cross_entropy_loss_with_max_sum(
    logits_max, sum_exp_logits, predicted_logits, vocab_parallel_logits, label_smoothing
):
    loss = np.log(_wide(sum_exp_logits)) - _wide(predicted_logits)
    if vocab_parallel_logits is None:
        return loss, None
    softmax = np.exp(_wide(vocab_parallel_logits) - _wide(logits_max)[:, None]) / _wide(sum_exp_logits)[:, None]
    return loss, softmax


def linear_cross_entropy(
    input, weight, target, reduction, ignore_index, grad_loss, vocab_start_index, return_grad, output_mask, **_
):
    """Compute the chain of the three operators on the rows that are not ignored."""
    target = target.astype(np.int64)
    counted = target != ignore_index
    rows = np.flatnonzero(counted)
    end = vocab_start_index + len(weight)
    loss = np.zeros(len(target))
    statistics = np.zeros((3, len(target)))
    if rows.size:
        statistics[:, rows] = fused_linear_online_max_sum(
            input[rows], weight, target[rows], vocab_start_index, end, False
        )[:3]
        maximum, total, predicted = statistics[:, rows]
        loss[rows] = fused_cross_entropy_loss_with_max_sum(maximum, total, predicted, None, 0)[0]
    grad = np.where(counted, np.asarray(grad_loss, np.float64), 0)
    if reduction == "sum":
        loss = np.asarray(np.sum(loss))
    elif reduction == "mean":
        loss = np.asarray(np.sum(loss) / np.float64(rows.size))
        grad = grad / max(rows.size, 1)
    if not return_grad:
        return loss, None, None
    inside = np.where(counted, target, vocab_start_index) - vocab_start_index
    gradients = fused_linear_cross_entropy_loss_grad(
        grad, input, weight, ~counted, inside, statistics[0], statistics[1], None
    )
    return loss, *gradients


_LINEAR_FORMULAS = {
    formula.__name__: formula
    for formula in (
        fused_linear_cross_entropy_loss_grad,
        fused_linear_online_max_sum,
        fused_cross_entropy_loss_with_max_sum,
        linear_cross_entropy,
    )
}


def _run_linear(call: Call) -> tuple[np.ndarray | None, ...]:
    with np.errstate(all="ignore"):
        values = _LINEAR_FORMULAS[call.operator.name](**call.arguments)
    results = []
    for value, spec, out in zip(values, call.specs, call.outs):
        result = None if spec is None else _result(spec, out)
        if result is not None:
            arrays.round_into(result, value)
        results.append(result)
    return tuple(results)


# ---- losses of rows --------------------------------------------------------------------------------------------------


def _of_rows(value: Any, count: int) -> np.ndarray:
    """Return one number for each row, in float64."""
    return np.broadcast_to(np.asarray(1.0 if value is None else value, np.float64).reshape(-1), count)


def _reduced(loss, square, reduction, counts, weights, denominator):
    """Return the loss, and what the gradients of its two terms are divided by."""
    if reduction == "none":
        return loss + square, 1.0, 1.0
    denominators = (1.0, 1.0)
    if reduction == "mean":
        denominators = (np.sum(counts), np.sum(weights)) if denominator is None else (denominator, denominator)
    total = np.sum(loss) / np.float64(denominators[0])
    if np.any(square != 0):
        total = total + np.sum(square) / np.float64(denominators[1])
    return np.asarray(total), *denominators


def cross_entropy(
    input, target, dim, reduction, ignore_index, class_weight, token_weight, target_prob, label_smoothing,
    lse_square_scale, temperature, denominator, grad_loss, outputs, return_grad,
):  # fmt: skip
    """Compute the results by name. All outputs are computed, and the gradient if it is requested."""
    shape = np.moveaxis(np.atleast_1d(input), dim, 0).shape[1:]
    count, vocabulary = math.prod(shape), np.atleast_1d(input).shape[dim]
    entries = target.astype(np.int64).reshape(count, -1 if count else 1)
    prob = np.ones(entries.shape) if target_prob is None else target_prob.astype(np.float64).reshape(entries.shape)
    ignored = entries == ignore_index
    targets = loss_reference.Targets(np.where(ignored, -1, entries), np.where(ignored, 0, prob))
    tokens = _of_rows(token_weight, count)
    scale, upstream = _of_rows(temperature, count), _of_rows(grad_loss, count)
    classes = np.ones(vocabulary) if class_weight is None else class_weight.astype(np.float64)

    live = np.flatnonzero(~np.all(ignored, axis=-1))
    targets = loss_reference.Targets(targets.entries[live], targets.prob[live])
    terms = loss_reference.Terms(classes, tokens[live], label_smoothing, lse_square_scale)
    logits = _rows(input, dim).reshape(count, vocabulary)[live]
    row = loss_reference.RowStatistics(logits / scale[live, None]) if vocabulary else None
    results = {"loss": np.zeros(count), "lse": np.zeros(count), "log_prob": np.zeros(entries.shape),
               "entropy": np.zeros(count), "predicted": np.full(count, -1)}  # fmt: skip
    square = np.zeros(count)
    if row is not None:
        results["loss"][live], square[live] = loss_reference.losses(row, targets, terms)
        log_prob = -row.negative_log_prob(targets.entries)
        results["log_prob"][live] = np.where(targets.entries < 0, 0, log_prob)
        results["lse"][live], results["entropy"][live], results["predicted"][live] = row.lse, row.entropy, row.predicted
    results["correct"] = np.asarray(np.sum(results["predicted"][live] == entries[live, 0]))
    counts = tokens[live] if target_prob is not None else tokens[live] * classes[targets.entries[:, 0]]
    results["loss"], *denominators = _reduced(results["loss"], square, reduction, counts, tokens[live], denominator)
    if return_grad:
        gradient = np.zeros((count, vocabulary))
        divided = [upstream[live] / each if each else np.zeros(live.size) for each in denominators]
        if row is not None:
            absent = (upstream[live] * tokens[live] == 0)[:, None]
            found = loss_reference.gradient(row, targets, terms, *divided) / scale[live, None]
            gradient[live] = np.where(absent, 0, found)
        results["input_grad"] = np.moveaxis(gradient.reshape(*shape, vocabulary), -1, dim).reshape(input.shape)
    return results


def _run_loss(call: Call) -> tuple[np.ndarray | None, ...]:
    with np.errstate(all="ignore"):
        values = cross_entropy(**call.arguments)
    returned = []
    for name, spec, out in zip(call.operator.results, call.specs, call.outs):
        result = None if spec is None else _result(spec, out)
        if result is not None:
            value = values[name].reshape(result.shape)
            if result.dtype == np.int64:
                result[...] = value
            else:
                arrays.round_into(result, value)
        returned.append(result)
    return tuple(returned)


# ---- all ------------------------------------------------------------------------------------------------------------


def _result(spec: ResultSpec, out: np.ndarray | None) -> np.ndarray:
    return np.empty(spec.shape, spec.dtype) if out is None else out


def run(call: Call, threads: int) -> Any:
    if call.operator in LOSSES:
        return _run_loss(call)
    return _run_linear(call) if call.operator in LINEAR else _run_rowwise(call)
