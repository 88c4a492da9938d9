"""The reference backend: every formula in plain NumPy and float64. It is specification, fallback and oracle."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from .. import arrays
from .._call import Call, ResultSpec
from .._rowwise_python import MASKED_LOGIT
from ..operators.table import LINEAR, LOSSES
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


def _factor_limits(dtype):
    """Return the least and the largest temperature and cap of logits. Others count as the nearest one."""
    largest = 2.0**500 if dtype.type is np.float64 else 2.0**60  # of either byte order
    return 1 / largest, largest


def _logits(x, weight, bias, logit_scale, softcap, temperature):
    """Return the logits of rows, and their derivatives with respect to the products."""
    products = _wide(x) @ weight.T
    if bias is not None:
        products = products + _wide(bias)
    least, largest = _factor_limits(x.dtype)
    logit_scale = np.clip(logit_scale, -largest, largest)
    temperature = np.clip(temperature, least, largest)[:, None]
    if softcap is None:
        return logit_scale * products / temperature, np.broadcast_to(logit_scale / temperature, products.shape)
    softcap = np.clip(softcap, least, largest)
    value = np.tanh(logit_scale * products / softcap)
    return softcap * value / temperature, logit_scale / temperature * (1 - value**2)


class _Loss:
    """The rows and targets of a loss of a linear layer, with its denominators."""

    def __init__(
        self, input, weight, target, reduction, ignore_index, grad_loss, vocab_start_index, token_weight, class_weight,
        target_prob, label_smoothing, lse_square_scale, temperature, denominator, bias, logit_scale, softcap, **_
    ):  # fmt: skip
        tokens = len(input)
        self.input, self.weight, self.logit_options = input, _wide(weight), (bias, logit_scale, softcap)
        ids = target.astype(np.int64) if target.ndim == 2 else target.astype(np.int64)[:, None]
        is_target = ids != ignore_index
        self.counted = is_target.any(axis=-1)
        self.entries = np.where(is_target, ids - vocab_start_index, -1)
        self.prob = np.where(is_target, 1.0 if target_prob is None else _wide(target_prob), 0)
        self.classes = np.ones(len(weight)) if class_weight is None else _wide(class_weight)
        self.token_weight = np.where(self.counted, 1.0 if token_weight is None else _wide(token_weight), 0)
        self.temperature = np.broadcast_to(_wide(np.asarray(temperature)), tokens)
        self.grad = np.broadcast_to(np.asarray(grad_loss, np.float64), tokens)
        self.label_smoothing, self.lse_square_scale = label_smoothing, lse_square_scale
        self.over = self.over_square = np.float64(1 if denominator is None else denominator)
        if reduction != "mean":
            self.over = self.over_square = np.float64(1)
        elif denominator is None:
            self.over = self.over_square = self.token_weight.sum()
            if class_weight is not None and target_prob is None:
                of_class = (
                    np.where(self.counted, self.classes[self.entries[:, 0]], 0) if len(weight) else np.zeros(tokens)
                )
                self.over = np.sum(self.token_weight * of_class, where=self.token_weight != 0)
            if not self.over or (lse_square_scale and not self.over_square):
                # A mean over a sum of weights of 0 is NaN, and has no gradient.
                self.over = self.over_square = np.float64(0)
        self.input_grad, self.weight_grad = np.zeros(input.shape), np.zeros(weight.shape)
        self.bias_grad = np.zeros(len(weight))

    def chunks(self):
        """Yield the rows that are not ignored in chunks, with their logits and derivatives of logits."""
        bias, logit_scale, softcap = self.logit_options
        for rows in _chunks(np.flatnonzero(self.counted), len(self.weight)):
            temperature = self.temperature[rows]
            yield rows, *_logits(self.input[rows], self.weight, bias, logit_scale, softcap, temperature)

    def of_rows(self, rows):
        """Return targets and terms of some rows."""
        terms = loss_reference.Terms(self.classes, self.token_weight[rows], self.label_smoothing, self.lse_square_scale)
        return loss_reference.Targets(self.entries[rows], self.prob[rows]), terms

    def add_gradients(self, rows, row, slope, upstream):
        """Add the gradients of some rows. `upstream` are gradients of outputs; a row without any gradient is absent."""
        targets, terms = self.of_rows(rows)
        grad = np.where(self.token_weight[rows] != 0, self.grad[rows], 0) if self.over else np.zeros(rows.size)
        present = grad != 0
        for each in upstream:
            present |= np.asarray(each) != 0
        nothing = np.zeros(rows.size)
        if not (upstream or self.lse_square_scale):
            # The gradient of the loss is the last factor, so that an infinite one leaves no differences of infinities.
            ones = np.ones(rows.size)
            p = loss_reference.gradient(row, targets, terms._replace(token_weight=ones), ones, nothing)
            scaled = np.where(grad == 0, 0, grad * terms.token_weight)
            p *= (scaled / self.over if self.over else nothing)[:, None]
        else:
            of_loss = np.where(grad == 0, 0, grad / self.over) if self.over else nothing
            of_square = np.where(grad == 0, 0, grad / self.over_square) if self.over_square else nothing
            p = loss_reference.gradient(row, targets, terms, of_loss, of_square, *upstream)
        p = (p * slope)[present]
        rows = rows[present]
        self.input_grad[rows] = p @ self.weight
        self.weight_grad += p.T @ _wide(self.input[rows])
        self.bias_grad += p.sum(axis=0)


def linear_cross_entropy(vocab_start_index, lse_square_scale, reduction, **arguments):
    """Compute the loss, its gradients and all outputs, row by row."""
    loss = _Loss(
        vocab_start_index=vocab_start_index, lse_square_scale=lse_square_scale, reduction=reduction, **arguments
    )
    tokens = len(loss.input)
    losses, squares = np.zeros(tokens), np.zeros(tokens)
    lse, log_prob, entropy = np.zeros((3, tokens))
    predicted, correct = np.full(tokens, -1), 0
    for rows, z, slope in loss.chunks():
        row = loss_reference.RowStatistics(z)
        targets, terms = loss.of_rows(rows)
        losses[rows], squares[rows] = loss_reference.losses(row, targets, terms)
        lse[rows], entropy[rows], predicted[rows] = row.lse, row.entropy, row.predicted + vocab_start_index
        log_prob[rows] = -row.negative_log_prob(targets.entries)[:, 0]
        correct += int(np.count_nonzero(row.predicted == targets.entries[:, 0]))
        loss.add_gradients(rows, row, slope, ())
    total = losses + squares
    if reduction != "none":
        square = np.sum(squares) / loss.over_square if lse_square_scale else 0
        total = np.asarray(np.sum(losses) / loss.over + square if loss.over else np.nan)
    gradients = loss.input_grad, loss.weight_grad, loss.bias_grad
    return total, *gradients, lse, log_prob, entropy, predicted, np.asarray(correct)


class _GivenStatistics(NamedTuple):
    """Hold statistics of rows that the caller gives, with the attributes of `loss_reference.RowStatistics`."""

    distance: np.ndarray
    lse: np.ndarray
    moment: np.ndarray
    rest: np.ndarray


def linear_cross_entropy_backward(lse, entropy, grad_lse, grad_log_prob, grad_entropy, **arguments):
    """Compute the gradients of the loss and of its outputs."""
    loss = _Loss(**arguments)
    lse, entropy, grad_lse, grad_log_prob, grad_entropy = (
        np.zeros(len(loss.input)) if each is None else _wide(each)
        for each in (lse, entropy, grad_lse, grad_log_prob, grad_entropy)
    )
    for rows, z, slope in loss.chunks():
        given = np.where(np.isfinite(lse[rows]), lse[rows], np.nan)  # no probability follows from an infinite one
        row = _GivenStatistics(given[:, None] - z, given, entropy[rows], np.zeros(rows.size))
        loss.add_gradients(rows, row, slope, (grad_lse[rows], grad_log_prob[rows], grad_entropy[rows]))
    return loss.input_grad, loss.weight_grad, loss.bias_grad


class _PartOfLoss(_Loss):
    """The rows and targets of a loss, with the logits of a part of its vocabulary."""

    def __init__(self, input, weight, target, options):
        super().__init__(input, weight, target, **{**options, "reduction": "none", "denominator": None})
        self.entries = np.where(self.entries < len(weight), np.maximum(self.entries, -1), -1)

    def set_whole(self, options, target_weights):
        """Set the numbers of the whole vocabulary, which gradients need."""
        self.over, self.over_square = map(np.float64, options["denominators"])
        self.vocabulary, self.class_sum, self.target_weights = options["vocab"], options["class_sum"], target_weights

    def of_rows(self, rows):
        targets, terms = super().of_rows(rows)
        terms = terms._replace(vocabulary=self.vocabulary, class_sum=self.class_sum)
        return targets._replace(weights=self.target_weights[rows]), terms


def part_statistics(input, weight, target, options):
    """Compute the statistics of a part of a vocabulary, as `_linear_python.part_statistics` returns them."""
    with np.errstate(all="ignore"):
        loss = _PartOfLoss(input, weight, target, options)
        numbers, argmax = np.zeros((4, len(input))), np.zeros(len(input), np.int64)
        logits = np.zeros(loss.entries.shape)
        for rows, z, _ in loss.chunks():
            row, entries = loss_reference.RowStatistics(z), loss.entries[rows]
            numbers[:, rows] = row.max, row.rest, row.moment, loss_reference.deficit(row, loss.classes)
            argmax[rows] = row.predicted
            logits[rows] = np.where(entries < 0, 0, np.take_along_axis(z, np.maximum(entries, 0), axis=-1))
    return numbers, argmax, logits


def part_gradients(input, weight, target, options, numbers, target_weights, results):
    """Compute the gradients of a part of a vocabulary, as `_linear_python.part_gradients` does."""
    upstream = [options[name] for name in ("grad_lse", "grad_log_prob", "grad_entropy")]
    with np.errstate(all="ignore"):
        loss = _PartOfLoss(input, weight, target, options)
        loss.set_whole(options, target_weights)
        for rows, z, slope in loss.chunks():
            maximum, rest, moment, _ = numbers[:, rows]
            row = _GivenStatistics(maximum[:, None] - z, maximum + np.log1p(rest), moment, rest)
            of_outputs = [np.zeros(rows.size) if each is None else each[rows] for each in upstream]
            loss.add_gradients(rows, row, slope, of_outputs if any(each is not None for each in upstream) else ())
        for name, result in results.items():
            if result is not None:
                arrays.round_into(result, getattr(loss, name))


def part_top_k(input, weight, k, options):
    """Compute the largest logits of a part of a vocabulary, as `HostBackend.top_k` returns them."""
    weight, ones = _wide(weight), np.ones(len(input))
    logits, index, rest = np.empty((len(input), k)), np.empty((len(input), k), np.int64), np.empty(len(input))
    temperature = ones * np.clip(_wide(np.asarray(options["temperature"])), *_factor_limits(input.dtype))
    with np.errstate(all="ignore"):
        for rows in _chunks(np.arange(len(input)), len(weight)):
            z, _ = _logits(input[rows], weight, options["bias"], options["logit_scale"], options["softcap"], ones[rows])
            index[rows] = np.argsort(-z, axis=-1, kind="stable")[:, :k]
            logits[rows] = np.take_along_axis(z, index[rows], axis=-1)
            others = loss_reference.RowStatistics(z / temperature[rows, None]).rest
            rest[rows] = np.where(np.isneginf(z).all(axis=-1), 0, others)
    return logits, index, rest


def linear_top_k(input, weight, k, temperature, bias, logit_scale, softcap, **_):
    weight = _wide(weight)
    ones = np.ones(len(input))
    divisor = ones * np.clip(_wide(np.asarray(temperature)), *_factor_limits(input.dtype))
    log_prob = np.empty((len(input), k))
    index = np.empty((len(input), k), np.int64)
    for rows in _chunks(np.arange(len(input)), len(weight)):
        # Logits are compared before the temperature divides them.
        logits, _ = _logits(input[rows], weight, bias, logit_scale, softcap, ones[rows])
        all_of_row = log_softmax(logits / divisor[rows, None])
        # The sort is stable, so that the lower index comes first. A row of NaN has the indices 0 to k - 1.
        unknown = np.isnan(all_of_row).any(-1)
        index[rows] = np.argsort(np.where(unknown[:, None], 0, -logits), axis=-1, kind="stable")[:, :k]
        log_prob[rows] = np.take_along_axis(all_of_row, index[rows], axis=-1)
        log_prob[rows[unknown]] = np.nan
    return log_prob, index


_LINEAR_FORMULAS = {
    formula.__name__: formula
    for formula in (
        fused_linear_cross_entropy_loss_grad,
        fused_linear_online_max_sum,
        fused_cross_entropy_loss_with_max_sum,
        linear_cross_entropy,
        linear_cross_entropy_backward,
        linear_top_k,
    )
}


def _run_linear(call: Call) -> tuple[np.ndarray | None, ...]:
    with np.errstate(all="ignore"):
        values = _LINEAR_FORMULAS[call.operator.name](**call.arguments)
    results = []
    for value, spec, out in zip(values, call.specs, call.outs):
        result = None if spec is None else _result(spec, out)
        if result is not None and result.dtype.kind == "i":
            result[...] = value
        elif result is not None:
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
    if denominators[0] == 0 or (denominators[1] == 0 and np.any(square != 0)):
        return np.asarray(np.nan), 0.0, 0.0  # a mean over a sum of weights of 0 has no gradient
    total = np.sum(loss) / np.float64(denominators[0])
    if np.any(square != 0):
        total = total + np.sum(square) / np.float64(denominators[1])
    return np.asarray(total), *denominators


def cross_entropy(
    input, target, dim, reduction, ignore_index, class_weight, token_weight, target_prob, label_smoothing,
    lse_square_scale, temperature, denominator, grad_loss, grad_lse, grad_log_prob, grad_entropy, outputs, return_grad,
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
    scale = np.clip(scale, *_factor_limits(input.dtype))
    classes = np.ones(vocabulary) if class_weight is None else class_weight.astype(np.float64)

    live = np.flatnonzero(~np.all(ignored, axis=-1))
    targets = loss_reference.Targets(targets.entries[live], targets.prob[live])
    terms = loss_reference.Terms(classes, tokens[live], label_smoothing, lse_square_scale)
    logits = _rows(input, dim).reshape(count, vocabulary)[live]
    row = loss_reference.RowStatistics(logits / scale[live, None]) if vocabulary else None
    results = {"loss": np.zeros(count), "lse": np.zeros(count), "log_prob": np.zeros(count),
               "entropy": np.zeros(count), "predicted": np.full(count, -1)}  # fmt: skip
    square = np.zeros(count)
    if row is not None:
        results["loss"][live], square[live] = loss_reference.losses(row, targets, terms)
        results["log_prob"][live] = -row.negative_log_prob(targets.entries)[:, 0]  # of a single target
        results["lse"][live], results["entropy"][live], results["predicted"][live] = row.lse, row.entropy, row.predicted
    results["correct"] = np.asarray(np.sum(results["predicted"][live] == entries[live, 0]))
    counts = tokens[live]
    if target_prob is None:
        counts = np.where(counts == 0, 0, counts * classes[targets.entries[:, 0]])
    results["loss"], *denominators = _reduced(results["loss"], square, reduction, counts, tokens[live], denominator)
    if return_grad:
        gradient = np.zeros((count, vocabulary))
        divided = [upstream[live] / each if each else np.zeros(live.size) for each in denominators]
        of_outputs = [
            _of_rows(0 if each is None else each, count)[live] for each in (grad_lse, grad_log_prob, grad_entropy)
        ]
        if row is not None:
            has_none = (upstream[live] == 0) | (tokens[live] == 0) | (denominators[0] == 0)
            absent = has_none & np.all([each == 0 for each in of_outputs], axis=0)
            divided = [np.where(has_none, 0, each) for each in divided]
            found = loss_reference.gradient(row, targets, terms, *divided, *of_outputs) / scale[live, None]
            gradient[live] = np.where(absent[:, None], 0, found)
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
