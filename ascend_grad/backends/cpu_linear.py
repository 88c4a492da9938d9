"""The linear operators on the CPU: rows selected and results allocated around the schedules of `_linear_cross_entropy`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from .. import _linear_cross_entropy, _memory, arrays
from ..contract import DEFAULT_WORKSPACE_BYTES, Call, ResultSpec

#: Rows that are counted together when some are left out.
_WINDOW = 4096


class _Rows:
    """The rows that count, in chunks; `gather` makes (target, grad, max, sum) of some row numbers."""

    def __init__(self, total: int, active: np.ndarray | None, gather: Callable[[np.ndarray], tuple]):
        self._gather = gather
        self._active = None if active is None or active.all() else active
        self._total = total
        if self._active is None:
            self.count = total
        else:
            counts = np.add.reduceat(self._active, np.arange(0, total, _WINDOW), dtype=np.int64)
            self._before = np.concatenate([[0], np.cumsum(counts)])  # active rows before each window
            self.count = int(self._before[-1])

    @property
    def absent(self) -> np.ndarray:
        return np.empty(0, np.int64) if self._active is None else np.flatnonzero(~self._active)

    def _numbers(self, begin: int, end: int) -> np.ndarray:
        """The active rows of rank begin to end."""
        if self._active is None:
            return np.arange(begin, end, dtype=np.int64)
        first = int(np.searchsorted(self._before, begin, "right")) - 1
        last = int(np.searchsorted(self._before, end, "left"))
        found = np.flatnonzero(self._active[first * _WINDOW : last * _WINDOW]) + first * _WINDOW
        return found[begin - self._before[first] : end - self._before[first]].astype(np.int64)

    def chunks(self, size: int) -> Iterator[tuple]:
        for begin in range(0, self.count, size):
            numbers = self._numbers(begin, min(begin + size, self.count))
            yield numbers, *self._gather(numbers)


def _fresh(spec: ResultSpec) -> np.ndarray:
    return _memory.empty(spec.shape, spec.dtype)


def _overlaps_an_input(call: Call, out: np.ndarray) -> bool:
    return any(arrays.may_overlap(out, array) for array in call.inputs)


def _results(call: Call) -> list[np.ndarray | None]:
    """Where to compute: the caller's arrays, or fresh ones, also aside of an `out` that overlaps an input."""
    return [
        None
        if spec is None
        else _fresh(spec)
        if out is None
        else _fresh(ResultSpec(spec.shape, arrays.native(out.dtype)))
        if _overlaps_an_input(call, out)
        else out
        for spec, out in zip(call.specs, call.outs)
    ]


def _delivered(call: Call, results: list[np.ndarray | None]) -> tuple:
    """The results, those that were computed aside in the caller's arrays."""
    for result, out in zip(results, call.outs):
        if out is not None and result is not out:
            out[...] = result
    return tuple(result if out is None else out for result, out in zip(results, call.outs))


def _picked(array: np.ndarray, numbers: np.ndarray, dtype) -> np.ndarray:
    return np.ascontiguousarray(array[numbers], dtype)


def _gradient(call: Call, num_threads: int | None) -> tuple:
    a = call.arguments
    real = arrays.accumulator_dtype(a["input"].dtype)
    grad, mask, target = a["grad"], a["target_mask"], a["masked_target"]

    def gather(numbers):
        if mask.dtype == np.bool_:
            elsewhere = mask[numbers]
        else:
            elsewhere = (mask[numbers >> 3] >> (numbers & 7).astype(np.uint8)) & 1 != 0
        rows = np.where(elsewhere, -1, target[numbers]).astype(np.int64)
        statistics = (
            None if a[name] is None else _picked(a[name], numbers, real) for name in ("logits_max", "sum_exp_logits")
        )
        return rows, _picked(grad, numbers, real), *statistics

    results = _results(call)
    _linear_cross_entropy.gradient(
        a["input"],
        a["weight"],
        _Rows(len(grad), grad != 0, gather),
        a["softmax"],
        *results,
        a["workspace_bytes"],
        a["filter_eps"],
        num_threads,
    )
    return _delivered(call, results)


def _max_sum(call: Call, num_threads: int | None) -> tuple:
    a = call.arguments
    target, start, end = a["target"], a["vocab_start_index"], a["vocab_end_index"]
    masked = (target < start) | (target >= end)
    logits_max, sum_exp, predicted, _, masked_target, logits = (
        None if spec is None else _fresh(spec) for spec in call.specs
    )
    masked_target[...] = np.where(masked, 0, target - np.asarray(start, np.int64))
    predicted.fill(0)

    def gather(numbers):
        return np.where(masked[numbers], -1, masked_target[numbers]).astype(np.int64), None, None, None

    _linear_cross_entropy.max_sum(
        a["input"],
        a["weight"],
        _Rows(len(target), None, gather),
        logits_max,
        sum_exp,
        predicted,
        logits,
        DEFAULT_WORKSPACE_BYTES,
        num_threads,
    )
    np.subtract(predicted, logits_max, out=predicted, where=~masked)
    return logits_max, sum_exp, predicted, np.packbits(masked, bitorder="little"), masked_target, logits


def _loss(call: Call, num_threads: int | None) -> tuple:
    a = call.arguments
    logits_max, sum_exp, predicted = (
        np.ascontiguousarray(a[name], np.float64) for name in ("logits_max", "sum_exp_logits", "predicted_logits")
    )
    loss, softmax = results = _results(call)
    if softmax is not None:
        _linear_cross_entropy.probabilities(a["vocab_parallel_logits"], logits_max, sum_exp, softmax, num_threads)
    arrays.round_into(loss, np.log(sum_exp) - predicted)
    return _delivered(call, results)


def _loss_and_gradients(call: Call, num_threads: int | None) -> tuple:
    a = call.arguments
    input, weight, target = a["input"], a["weight"], a["target"]
    loss, input_grad, weight_grad = (None if spec is None else _fresh(spec) for spec in call.specs)
    counted = target != a["ignore_index"]
    real = arrays.accumulator_dtype(input.dtype)
    logits_max, sum_exp, predicted = np.zeros((3, len(target)), real)
    start = np.asarray(a["vocab_start_index"], np.int64)

    def rows(active, grad, *statistics):
        def gather(numbers):
            return target[numbers] - start, *(
                None if values is None else values[numbers] for values in (grad, *statistics)
            )

        return _Rows(len(target), active, gather)

    _linear_cross_entropy.max_sum(
        input,
        weight,
        rows(counted, None, None, None),
        logits_max,
        sum_exp,
        predicted,
        None,
        a["workspace_bytes"],
        num_threads,
    )
    each = np.zeros(len(target))
    np.log(sum_exp, out=each, where=counted, dtype=np.float64)
    each -= np.where(counted, predicted - logits_max.astype(np.float64), 0)
    grad = np.where(counted, np.asarray(a["grad_loss"], np.float64), 0)
    if a["reduction"] == "none":
        loss[...] = each
    else:
        count = np.count_nonzero(counted)
        if a["reduction"] == "mean":
            grad /= max(count, 1)
        loss[...] = np.sum(each) / np.float64(count if a["reduction"] == "mean" else 1)
    if a["return_grad"]:
        grad = grad.astype(real)
        _linear_cross_entropy.gradient(
            input,
            weight,
            rows(grad != 0, grad, logits_max, sum_exp),
            None,
            input_grad,
            weight_grad,
            a["workspace_bytes"],
            a["filter_eps"],
            num_threads,
        )
    return loss, input_grad, weight_grad


_OPERATORS: dict[str, Callable[[Call, int | None], tuple]] = {
    "fused_linear_cross_entropy_loss_grad": _gradient,
    "fused_linear_online_max_sum": _max_sum,
    "fused_cross_entropy_loss_with_max_sum": _loss,
    "linear_cross_entropy": _loss_and_gradients,
}


def run(call: Call, num_threads: int | None) -> tuple:
    with np.errstate(all="ignore"):
        return _OPERATORS[call.operator.name](call, num_threads)


def workspace_size(call: Call, num_threads: int | None) -> int:
    """Bytes beyond arguments and results, at most, from shapes, dtypes and layouts alone.

    The workspace; an accumulator of input's size where the result cannot be one (16 bits, another dtype, no unit stride);
    a copy of each result whose `out` overlaps an input; some numbers for each row.
    """
    a = call.arguments
    first = call.arrays[0]
    size = sum(
        out.nbytes for out in call.outs if out is not None and any(arrays.may_overlap(out, each) for each in call.inputs)
    )
    if call.operator.name == "fused_cross_entropy_loss_with_max_sum":
        return size + 64 * first.size
    rows, hidden = a["input"].shape
    vocab = len(a["weight"])
    workspace = a.get("workspace_bytes", DEFAULT_WORKSPACE_BYTES)
    needed = 0
    if call.operator.name != "fused_linear_cross_entropy_loss_grad":
        needed = _linear_cross_entropy.workspace_bound(
            a["input"], rows, vocab, hidden, workspace, True, False, False, True, False
        )
    wanted = a.get("output_mask", (False, False)) if a.get("return_grad", True) else (False, False)
    if any(wanted):
        real = arrays.accumulator_dtype(a["input"].dtype).itemsize
        outs = call.outs[-2:]
        if wanted[0]:
            # the accumulator, and what additions to it lose (within a quarter of the workspace)
            size += real * rows * hidden + min(real * rows * hidden, workspace // 4)
        needed = max(
            needed,
            _linear_cross_entropy.workspace_bound(
                a["input"], rows, vocab, hidden, workspace, a.get("softmax") is None, *wanted, False, outs[1] is not None
                or real != a["input"].dtype.itemsize
            ),
        )
    return size + needed + 64 * rows
