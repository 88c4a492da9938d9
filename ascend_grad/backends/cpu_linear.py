"""The linear operators on the CPU: results allocated around the schedules of `_linear_cross_entropy`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .. import _linear_cross_entropy, _memory, arrays
from ..contract import Call, ResultSpec


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


def _delivery(call: Call, results: list[np.ndarray | None]) -> tuple[tuple, list[tuple[np.ndarray, np.ndarray]]]:
    """What the call returns, and the pairs of the caller's array and the result that was computed aside of it."""
    pairs = list(zip(results, call.outs))
    returned = tuple(result if out is None else out for result, out in pairs)
    return returned, [(out, each) for each, out in pairs if each is not None and out is not None and each is not out]


def _vector(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Contiguous, aligned, native."""
    with np.errstate(all="ignore"):
        return np.require(array, dtype, ["C", "A"])


def _native_vector(array: np.ndarray) -> np.ndarray:
    return _vector(array, array.dtype.newbyteorder("="))


# Whatever is allocated is allocated before the compiled code begins to write: after that, nothing can fail for memory.


def _gradient(call: Call, threads: int) -> tuple:
    a = call.arguments
    real = arrays.accumulator_dtype(a["input"].dtype)
    input_grad, weight_grad = results = _results(call)
    returned, aside = _delivery(call, results)
    grad, logits_max, sum_exp = (
        None if a[name] is None else _vector(a[name], real) for name in ("grad", "logits_max", "sum_exp_logits")
    )
    _linear_cross_entropy.gradient(
        a["input"],
        a["weight"],
        _linear_cross_entropy.Rows(
            _native_vector(a["masked_target"]),
            0,
            call.dims["V"],
            _vector(arrays.counted(a["target_mask"], call.dims["BT"]), a["target_mask"].dtype),
            grad,
            logits_max,
            sum_exp,
        ),
        a["softmax"],
        input_grad,
        weight_grad,
        a["workspace_bytes"] or 0,
        a["filter_eps"],
        threads,
        aside,
    )
    return returned


def _statistics(call: Call, threads: int) -> tuple:
    a = call.arguments
    return _linear_cross_entropy.statistics(
        a["input"],
        a["weight"],
        _native_vector(a["target"]),
        a["vocab_start_index"],
        a["vocab_end_index"],
        a["return_logits"],
        threads,
    )


def _loss(call: Call, threads: int) -> tuple:
    a = call.arguments
    logits_max, sum_exp, predicted = (
        _native_vector(a[name]) for name in ("logits_max", "sum_exp_logits", "predicted_logits")
    )
    loss, softmax = results = _results(call)
    assert loss is not None
    returned, aside = _delivery(call, results)
    if softmax is not None:
        _linear_cross_entropy.probabilities(a["vocab_parallel_logits"], logits_max, sum_exp, softmax, threads)
    _linear_cross_entropy.losses(sum_exp, predicted, loss)
    _linear_cross_entropy.copy_all(aside)
    return returned


def _loss_and_gradients(call: Call, threads: int) -> tuple:
    a = call.arguments
    loss, input_grad, weight_grad = (None if spec is None else _fresh(spec) for spec in call.specs)
    assert loss is not None
    _linear_cross_entropy.loss_and_gradients(
        a["input"],
        a["weight"],
        _native_vector(a["target"]),
        a["vocab_start_index"],
        a["ignore_index"],
        a["reduction"],
        _vector(np.atleast_1d(a["grad_loss"]), np.dtype(np.float64)),
        loss,
        input_grad,
        weight_grad,
        a["workspace_bytes"] or 0,
        a["filter_eps"],
        threads,
    )
    return loss, input_grad, weight_grad


_OPERATORS: dict[str, Callable[[Call, int], tuple]] = {
    "fused_linear_cross_entropy_loss_grad": _gradient,
    "fused_linear_online_max_sum": _statistics,
    "fused_cross_entropy_loss_with_max_sum": _loss,
    "linear_cross_entropy": _loss_and_gradients,
}


def run(call: Call, num_threads: int | None) -> tuple:
    return _OPERATORS[call.operator.name](call, num_threads or 0)


def workspace_size(call: Call, num_threads: int | None) -> int:
    """Bytes beyond arguments and results, at most, from shapes, dtypes and layouts alone.

    The workspace; an accumulator of input's size where the result cannot be one (16 bits, another dtype, no unit
    stride); a copy of each result whose `out` overlaps an input; some numbers for each row.
    """
    a = call.arguments
    size = sum(out.nbytes for out in call.outs if out is not None and _overlaps_an_input(call, out))
    if call.operator.name == "fused_cross_entropy_loss_with_max_sum":
        return size + 64 * call.arrays[0].size
    (rows, hidden), itemsize = a["input"].shape, a["input"].dtype.itemsize
    first, second = a.get("output_mask", (False, False)) if a.get("return_grad", True) else (False, False)
    workspace = a.get("workspace_bytes")
    if workspace is None:
        given = a.get("softmax")
        beside = (
            given.nbytes if given is not None else rows * len(a["weight"]) * itemsize if a.get("return_logits") else 0
        )
        workspace = _linear_cross_entropy.default_workspace(a["input"], a["weight"], first, second, beside)

    def bound(*choices: bool) -> int:
        plans = _linear_cross_entropy.plans(a["input"], a["weight"], rows, workspace, *choices)
        return _linear_cross_entropy.workspace_bound(plans, workspace)

    passes = []
    if call.operator.name != "fused_linear_cross_entropy_loss_grad":
        passes.append(bound(True, False, False, False))
    if first or second:
        real = arrays.accumulator_dtype(a["input"].dtype).itemsize
        # Whether the weight's gradient is added up in the workspace first.
        buffered = second and (itemsize != real or call.outs[-1] is not None)
        passes.append(bound(a.get("softmax") is None, first, second, buffered))
        if call.operator.name == "linear_cross_entropy":
            # Where all rows' logits cannot be kept, those of fewer rows may be, in the whole workspace.
            keeping = _linear_cross_entropy.plans(
                a["input"], a["weight"], rows, workspace, True, first, second, buffered, True
            )
            passes.append(_linear_cross_entropy.workspace_bound(keeping, workspace) if keeping else workspace)
        out = call.outs[-2]
        holds = itemsize == real if out is None else _linear_cross_entropy.holds_sums(out, real)
        if first and not holds:
            size += real * rows * hidden
    return size + max(passes, default=0) + 64 * rows
