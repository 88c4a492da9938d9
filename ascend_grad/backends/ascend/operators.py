"""The operators: each function puts one call on a queue, and returns its results.

A result is an array of the device, a vector of the queue, or None. The functions serve every `Queue`, as arguments go
through `Queue.put` or `Queue.vector`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..._call import Call
from . import limits, linear_blocks, quirks, runtime
from .array import DeviceArray, Origin
from .cross_entropy import cross_entropy, cross_entropy_hvp
from .queue import FLOAT32, Queue, Results
from .tokens import NAN, Tokens
from .top_k import linear_top_k

UINT8 = np.dtype(np.uint8)
INF = float("inf")


# ---- operators of the device -----------------------------------------------------------------------------------------


def _row(queue: Queue, call: Call) -> Results:
    """Compute a softmax, a log-softmax, or the gradient of one."""
    inputs = [queue.put(array, quirks.computing_dtype(call)) for array in call.arrays]
    out = queue.empty(inputs[0].shape, inputs[0].dtype)
    queue.launch(call.operator.name, *inputs, call.arguments["axis"], out)
    return (out,)


def _masked(queue: Queue, call: Call) -> Results:
    """Compute a scaled masked softmax, or its gradient."""
    *floats, mask = call.arrays
    inputs = [queue.put(array, quirks.computing_dtype(call)) for array in floats]
    out = queue.empty(inputs[0].shape, inputs[0].dtype)
    queue.launch(call.operator.name, *inputs, queue.put(mask), call.arguments["scale"], out)
    return (out,)


def _linear_gradient(queue: Queue, call: Call) -> Results:
    a = call.arguments
    mask = a["target_mask"]
    grad, target = queue.safe_targets(a["grad"], a["masked_target"], mask, call.dims["V"])
    statistics = a["logits_max"], a["sum_exp_logits"], a["softmax"]
    return gradient(queue, a["output_mask"], grad, a["input"], a["weight"], mask, target, *statistics)


def gradient(
    queue: Queue,
    output_mask: tuple[bool, bool],
    grad: Any,
    input: Any,
    weight: Any,
    target_mask: Any,
    masked_target: Any,
    logits_max: Any,
    sum_exp_logits: Any,
    softmax: Any = None,
) -> Results:
    """Compute the fused gradient of rows whose ``grad`` is not 0; other rows may hold anything (Q2).

    Vectors may be twice as long as ``input``, as in `Queue.select`.
    """
    rows = queue.select(queue.vector(grad) != 0, input.shape[0])
    if rows.is_empty:
        return tuple(
            rows.cleared(queue.empty(x.shape, x.dtype)) if wanted else None
            for x, wanted in zip((input, weight), output_mask)
        )
    inputs = [
        rows.put(grad),
        rows.put(input, 0),
        queue.put(weight),
        rows.put_mask(target_mask, grad.shape[0]),
        rows.put(masked_target),
        None if softmax is not None else rows.put(logits_max, 0),
        None if softmax is not None else rows.put(sum_exp_logits, 1),
        None if softmax is None else rows.put(softmax, 0, is_overwritten=True),  # Q1
    ]
    input_grad, weight_grad = (queue.empty(each.shape, each.dtype) for each in inputs[1:3] if each is not None)
    queue.launch("fused_linear_cross_entropy_loss_grad", *inputs, input_grad, weight_grad)
    return rows.restored(input_grad) if output_mask[0] else None, rows.cleared(weight_grad) if output_mask[1] else None


def _online_max_sum(queue: Queue, call: Call) -> Results:
    names = "input", "weight", "target", "vocab_start_index", "vocab_end_index", "return_logits"
    results = statistics(queue, *(call.arguments[name] for name in names))
    queue.clear_padding(results[3], call.dims["BT"])
    return results


def statistics(
    queue: Queue, input: Any, weight: Any, target: Any, start: int, end: int, return_logits: bool
) -> Results:
    """Compute the online max sum; mask and masked targets share an origin."""
    input, weight, target = (queue.put(array) for array in (input, weight, target))
    count = input.shape[0]
    logits_max, sum_exp_logits, predicted_logits = (queue.empty((count,), FLOAT32) for _ in range(3))
    target_mask = queue.empty((-(-count // 8),), UINT8)
    masked_target = queue.empty((count,), target.dtype)
    logits = queue.empty((count, weight.shape[0]), input.dtype) if return_logits else None
    results = logits_max, sum_exp_logits, predicted_logits, target_mask, masked_target, logits
    queue.launch("fused_linear_online_max_sum", input, weight, target, start, end, *results)
    target_mask.cache.origin = masked_target.cache.origin = Origin(object(), end - start)
    return results


def _loss(queue: Queue, call: Call) -> Results:
    names = "logits_max", "sum_exp_logits", "predicted_logits", "vocab_parallel_logits"
    return loss(queue, *(call.arguments[name] for name in names))


def loss(queue: Queue, logits_max: Any, sum_exp_logits: Any, predicted_logits: Any, logits: Any = None) -> Results:
    """Compute the loss from statistics, and the probabilities from logits if there are any."""
    inputs = [queue.put(array) for array in (logits_max, sum_exp_logits, predicted_logits)]
    logits = None if logits is None else queue.put(logits)
    result = queue.empty(inputs[0].shape, FLOAT32)
    softmax = None if logits is None else queue.empty(logits.shape, FLOAT32)
    queue.launch("fused_cross_entropy_loss_with_max_sum", *inputs, logits, result, softmax)
    return result, softmax


# ---- chains of them --------------------------------------------------------------------------------------------------


def _upstream(queue: Queue, tokens: Tokens) -> Any:
    """Return the upstream gradient of each token's loss in float32, NaN for targets outside of the weight."""
    return tokens.of_targets(queue.vector(tokens.upstream(tokens.divided_upstream()), queue.xp.float32))


def _is_infinite(vector: Any) -> Any:
    return (vector == INF) | (vector == -INF)


def _linear_cross_entropy(queue: Queue, call: Call) -> Results:
    """Compute the chain of the three operators. Losses and statistics become vectors if anything is done with them."""
    if not limits.is_fused(call, runtime.state()):
        return linear_blocks.linear_cross_entropy(queue, call)
    a, xp = call.arguments, queue.xp
    tokens = Tokens(queue, call, call.dims["V"])
    rows = queue.compact(tokens.counted)
    losses: DeviceArray | None = None
    logits_max = sum_exp_logits = predicted = None
    results: dict[str, Any] = {}
    if not rows.is_empty:
        # The ids of a call with one shard start at 0 (Q9). The caller's targets are used unchanged if theirs do.
        is_unchanged = rows.is_complete and not a["vocab_start_index"]
        input, weight = rows.put(a["input"]), queue.put(a["weight"])
        target = queue.put(a["target"]) if is_unchanged else rows.put(tokens.masked_target)
        shard = statistics(queue, input, weight, target, 0, call.dims["V"], False)
        logits_max, sum_exp_logits, predicted, mask, masked_target, _ = shard
        losses, _ = loss(queue, logits_max, sum_exp_logits, predicted)
        if a["return_grad"]:
            grad = rows.of(queue.vector(_upstream(queue, tokens), xp.float32))
            targets = mask, masked_target, logits_max, sum_exp_logits
            input_grad, weight_grad = gradient(queue, (True, True), grad, input, weight, *targets)
            results = {"input_grad": rows.restored(input_grad), "weight_grad": weight_grad}
    elif a["return_grad"]:
        for name, spec in zip(call.operator.results[1:3], call.specs[1:3]):
            results[name] = spec and rows.cleared(queue.empty(spec.shape, spec.dtype))
    is_result = rows.is_complete and tokens.values is None and a["reduction"] == "none"
    if is_result:
        results["loss"] = losses
    else:
        results["loss"] = tokens.reduced(tokens.of_targets(tokens.weighted(rows.vector(losses))))
    if a["outputs"]:
        largest, total, of_target = (rows.vector(each) for each in (logits_max, sum_exp_logits, predicted))
        log_sum = xp.log(total)
        results["lse"] = tokens.without_ignored(xp.where(_is_infinite(largest), largest, largest + log_sum))
        results["log_prob"] = tokens.of_targets(of_target - log_sum)
    return tuple(None if spec is None else results[name] for name, spec in zip(call.operator.results, call.specs))


def _linear_cross_entropy_backward(queue: Queue, call: Call) -> Results:
    """Compute the gradients for upstream gradients of the loss, of the lse and of the log-probabilities.

    With probabilities p, the gradient of a row's logits is ``w (p - [v = t]) + b p``, where b is ``grad_lse``. The
    device computes the two terms as two rows. The target of the second row is masked.
    """
    if not limits.is_fused(call, runtime.state()):
        return linear_blocks.linear_cross_entropy_backward(queue, call)
    a, xp = call.arguments, queue.xp
    tokens = Tokens(queue, call, call.dims["V"])
    masked, places, lse = xp.zeros_like(tokens.counted), tokens.masked_target, queue.vector(a["lse"])
    grad = _upstream(queue, tokens)
    if a["grad_log_prob"] is not None:
        grad = tokens.of_targets(grad - queue.vector(a["grad_log_prob"]))
    lse = xp.where(_is_infinite(lse), NAN, lse)  # no probability follows from an infinite one
    if a["grad_lse"] is not None:
        grad = xp.concatenate([grad, tokens.without_ignored(queue.vector(a["grad_lse"]))])
        masked = xp.concatenate([masked, ~masked])
        places, lse = (xp.concatenate([each, each]) for each in (places, lse))
    grad, lse = queue.vector(grad, xp.float32), queue.vector(lse, xp.float32)
    targets = masked, places, lse, xp.ones_like(lse)
    return *gradient(queue, a["output_mask"], grad, a["input"], a["weight"], *targets), None


OPERATORS: dict[str, Callable[[Queue, Call], Results]] = {
    "softmax_backward": _row,
    "log_softmax_backward": _row,
    "scaled_masked_softmax_backward": _masked,
    "softmax": _row,
    "log_softmax": _row,
    "scaled_masked_softmax": _masked,
    "fused_linear_cross_entropy_loss_grad": _linear_gradient,
    "fused_linear_online_max_sum": _online_max_sum,
    "fused_cross_entropy_loss_with_max_sum": _loss,
    "linear_cross_entropy": _linear_cross_entropy,
    "linear_cross_entropy_backward": _linear_cross_entropy_backward,
    "cross_entropy": cross_entropy,
    "cross_entropy_hvp": cross_entropy_hvp,
    "linear_top_k": linear_top_k,
}
