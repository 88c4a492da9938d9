"""The operators on arrays: each function puts one call on the stream of a queue and returns its results.

Functions of a `Queue` serve calls on arrays of the host, of the device and on tensors: `Queue.put` makes each argument
one that the device can read. Functions of a `Session` also read values on the host. The results are arrays of the
device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import _aclnn
from ..._call import Call
from . import determinism, quirks
from .array import DeviceArray, Origin
from .queue import Queue
from .session import Session

FLOAT32 = np.dtype(np.float32)
UINT8 = np.dtype(np.uint8)

Results = tuple[DeviceArray | None, ...]


def launch(queue: Queue, prepare: Callable[..., _aclnn.Plan], *arguments: Any) -> None:
    """Prepare and launch one operator; arrays among the arguments become the device's tensors meanwhile."""
    tensors: list[_aclnn.Tensor] = []
    plan = None
    try:
        converted = []
        for argument in arguments:
            if isinstance(argument, DeviceArray):
                code = _aclnn.DTYPES[argument.dtype.name]
                shape, layout = quirks.shape_for_device(argument.shape), quirks.layout_for_device(argument)
                tensor = _aclnn.Tensor(queue.memory_of(argument), shape, code, layout)
                tensors.append(tensor)
                converted.append(tensor)
            else:
                converted.append(argument)
        with determinism.guard(queue):
            plan = prepare(*converted)
            size = plan.workspace_size
            workspace = queue.workspace(size) if size else None
            plan.launch(workspace, queue.stream)
    finally:
        if plan is not None:
            plan.close()
        for tensor in tensors:
            tensor.close()


# ---- row-wise --------------------------------------------------------------------------------------------------------


def row_gradient(queue: Queue, call: Call) -> Results:
    """Compute the gradient of a softmax or log-softmax."""
    dtype = quirks.computing_dtype(call)
    grad_output, output = (queue.put(array, dtype) for array in call.arrays)
    out = queue.empty(grad_output.shape, grad_output.dtype)
    launch(queue, getattr(_aclnn, call.operator.name), grad_output, output, call.arguments["dim"], out)
    return (out,)


def row(queue: Queue, call: Call) -> Results:
    """Compute a softmax or log-softmax."""
    input = queue.put(call.arrays[0], quirks.computing_dtype(call))
    out = queue.empty(input.shape, input.dtype)
    launch(queue, getattr(_aclnn, call.operator.name), input, call.arguments["dim"], out)
    return (out,)


def masked(queue: Queue, call: Call) -> Results:
    """Compute a scaled masked softmax, or its gradient."""
    dtype = quirks.computing_dtype(call)
    *floats, mask = call.arrays
    inputs = [queue.put(array, dtype) for array in floats]
    out = queue.empty(inputs[0].shape, inputs[0].dtype)
    scale = call.arguments["scale"]
    launch(queue, getattr(_aclnn, call.operator.name), *inputs, queue.put(mask), scale, out)
    return (out,)


# ---- linear ----------------------------------------------------------------------------------------------------------


def _gradient(session: Session, call: Call) -> Results:
    names = "grad", "input", "weight", "target_mask", "masked_target", "logits_max", "sum_exp_logits", "softmax"
    input_grad, weight_grad = gradient(session, *(call.arguments[name] for name in names))
    first, second = call.arguments["output_mask"]
    return input_grad if first else None, weight_grad if second else None


def gradient(
    session: Session, grad, input, weight, target_mask, masked_target, logits_max, sum_exp_logits, softmax
) -> tuple[DeviceArray, DeviceArray]:
    """Compute the fused gradient of the rows whose ``grad`` is not 0; the other rows are left out (`quirks`)."""
    count, extent = input.shape[0], weight.shape[0]
    rows = quirks.rows_with_gradient(session, grad)
    if rows is not None and not rows.size:
        return session.zeros(input.shape, input.dtype), session.zeros(weight.shape, weight.dtype)
    arguments = (
        session.put(grad, rows=rows),
        session.put(input, rows=rows),
        session.put(weight),
        quirks.mask_bits(session, target_mask, count, rows),
        quirks.safe_targets(session, masked_target, target_mask, extent, rows),
        None if softmax is not None else session.put(logits_max, rows=rows),
        None if softmax is not None else session.put(sum_exp_logits, rows=rows),
        None if softmax is None else quirks.writable_copy(session, softmax, rows),
    )
    input_grad, weight_grad = launch_gradient(session, *arguments)
    return (input_grad if rows is None else session.scattered(input_grad, rows, count)), weight_grad


def launch_gradient(queue: Queue, *inputs: DeviceArray | None) -> tuple[DeviceArray, DeviceArray]:
    """Launch the fused gradient on arrays that the device can read."""
    _, input, weight, *_ = inputs
    assert input is not None
    assert weight is not None
    input_grad, weight_grad = (queue.empty(each.shape, each.dtype) for each in (input, weight))
    launch(queue, _aclnn.fused_linear_cross_entropy_loss_grad, *inputs, input_grad, weight_grad)
    return input_grad, weight_grad


def call_statistics(queue: Queue, call: Call) -> Results:
    """Compute a call of the online max sum."""
    a = call.arguments
    return statistics(
        queue, a["input"], a["weight"], a["target"], a["vocab_start_index"], a["vocab_end_index"], a["return_logits"]
    )


def statistics(queue: Queue, input, weight, target, start: int, end: int, return_logits: bool) -> Results:
    """Compute the online max sum; mask and masked targets share an origin."""
    input, weight, target = (queue.put(array) for array in (input, weight, target))
    count = input.shape[0]
    logits_max, sum_exp_logits, predicted_logits = (queue.empty((count,), FLOAT32) for _ in range(3))
    target_mask = queue.empty((-(-count // 8),), UINT8)
    masked_target = queue.empty((count,), target.dtype)
    logits = queue.empty((count, weight.shape[0]), input.dtype) if return_logits else None
    results = logits_max, sum_exp_logits, predicted_logits, target_mask, masked_target, logits
    launch(queue, _aclnn.fused_linear_online_max_sum, input, weight, target, start, end, *results)
    target_mask.known.origin = masked_target.known.origin = Origin(object(), end - start)
    target_mask.known.set_bits(count)
    return results


def call_loss(queue: Queue, call: Call) -> Results:
    """Compute a call of the loss from statistics."""
    names = "logits_max", "sum_exp_logits", "predicted_logits", "vocab_parallel_logits"
    return loss(queue, *(call.arguments[name] for name in names))


def loss(
    queue: Queue, logits_max, sum_exp_logits, predicted_logits, vocab_parallel_logits
) -> tuple[DeviceArray, DeviceArray | None]:
    """Compute the loss from statistics, and the probabilities from logits if there are any."""
    inputs = [queue.put(array) for array in (logits_max, sum_exp_logits, predicted_logits)]
    logits = None if vocab_parallel_logits is None else queue.put(vocab_parallel_logits)
    result = queue.empty(inputs[0].shape, FLOAT32)
    softmax = None if logits is None else queue.empty(logits.shape, FLOAT32)
    launch(queue, _aclnn.fused_cross_entropy_loss_with_max_sum, *inputs, logits, result, softmax)
    return result, softmax


def _linear_cross_entropy(session: Session, call: Call) -> tuple[DeviceArray | NDArray | None, ...]:
    """Compute the chain of the three operators on the rows that are not ignored; intermediate results stay there.

    The losses come back to the host if they are added up or weighted, or if some rows are ignored. So do the statistics
    if outputs are requested.
    """
    a = call.arguments
    target = session.values(a["target"])
    counted = target != a["ignore_index"]
    number = int(np.count_nonzero(counted))
    rows = None if number == target.size else np.flatnonzero(counted)
    weights = _weights(session, a, target, counted)
    over = _denominator(a, weights, number)
    losses: DeviceArray | None = None
    statistics_of_rows: tuple[DeviceArray | None, ...] = (None, None, None)
    gradients: tuple[DeviceArray | None, ...] = (None, None)
    if number:
        input, weight = session.put(a["input"], rows=rows), session.put(a["weight"])
        inside = quirks.places(session, a["target"], rows, a["vocab_start_index"])
        shard = statistics(session, input, weight, inside, 0, call.dims["V"], False)
        logits_max, sum_exp_logits, predicted, mask, masked_target, _ = shard
        statistics_of_rows = logits_max, sum_exp_logits, predicted
        losses, _ = loss(session, logits_max, sum_exp_logits, predicted, None)
        if a["return_grad"]:
            grad = _upstream(session, a, counted, weights, over)
            first, second = gradient(
                session, grad, input, weight, mask, masked_target, logits_max, sum_exp_logits, None
            )  # fmt: skip
            gradients = (first if rows is None else session.scattered(first, rows, target.size), second)
    elif a["return_grad"]:
        gradients = tuple(spec and session.zeros(spec.shape, spec.dtype) for spec in call.specs[1:3])
    total = _reduced(session, losses, counted, weights, a["reduction"], over)
    results: dict[str, DeviceArray | NDArray | None] = dict(zip(call.operator.results, (total, *gradients)))
    if a["outputs"]:
        results |= _outputs(session, statistics_of_rows, counted)
    return tuple(None if spec is None else results[name] for name, spec in zip(call.operator.results, call.specs))


def _linear_cross_entropy_backward(session: Session, call: Call) -> tuple[NDArray | DeviceArray | None, ...]:
    """Compute the gradients for upstream gradients of the loss, of the lse and of the log-probabilities.

    With probabilities p, the gradient of the logits of a row is ``w (p - [v = t]) + b p``, where b is ``grad_lse``. The
    device computes the two terms as two rows; the target of the second row is masked.
    """
    a = call.arguments
    target = session.values(a["target"])
    counted = target != a["ignore_index"]
    weights = _weights(session, a, target, counted)
    over = _denominator(a, weights, int(np.count_nonzero(counted)))
    of_target, of_all = np.zeros((2, target.size))
    of_target[counted] = _upstream(session, a, counted, weights, over)
    if a["grad_log_prob"] is not None:
        of_target[counted] -= _numbers(session, a["grad_log_prob"])[counted]
    if a["grad_lse"] is not None:
        of_all[counted] = _numbers(session, a["grad_lse"])[counted]
    first, second = np.flatnonzero(of_target), np.flatnonzero(of_all)
    rows = np.concatenate([first, second])
    if not rows.size:
        return *(None if spec is None else session.zeros(spec.shape, spec.dtype) for spec in call.specs[:2]), None
    masked = np.arange(rows.size) >= first.size
    grad = np.concatenate([of_target[first], of_all[second]]).astype(np.float32)
    place = np.where(masked, 0, target[rows].astype(np.int64) - a["vocab_start_index"]).astype(target.dtype)
    lse = _numbers(session, a["lse"])[rows].astype(np.float32)
    lse[np.isinf(lse)] = np.nan  # no probability follows from it
    input, weight = session.put(a["input"], rows=rows), session.put(a["weight"])
    input_grad, weight_grad = gradient(session, grad, input, weight, masked, place, lse, np.ones_like(lse), None)
    keeps_input, keeps_weight = a["output_mask"]
    sums = _sum_of_rows(session, input_grad, first, second, target.size) if keeps_input else None
    return sums, weight_grad if keeps_weight else None, None


def _sum_of_rows(
    session: Session, gradients: DeviceArray, first: NDArray, second: NDArray, count: int
) -> NDArray | DeviceArray:
    """Return the sums of the gradients of two lists of rows, in their places among ``count`` rows.

    If a row is in both lists, the sums are computed on the host, and not yet rounded.
    """
    if not np.intersect1d(first, second).size:
        return session.scattered(gradients, np.concatenate([first, second]), count)
    there = np.empty(gradients.shape, gradients.dtype)
    session.fetch([(gradients, there)])
    total = np.zeros((count, there.shape[1]))
    total[first] = there[: first.size]
    total[second] += there[first.size :].astype(np.float64)
    return total


def _numbers(session: Session, array: NDArray | DeviceArray) -> NDArray:
    """Return the values of a vector in float64."""
    return session.values(array).astype(np.float64)


def _weights(session: Session, arguments: dict[str, Any], target: NDArray, counted: NDArray) -> NDArray | None:
    """Return the weight of each row's loss in float64, 0 for ignored rows; None stands for no weights."""
    token, of_class = arguments["token_weight"], arguments["class_weight"]
    if token is None and of_class is None:
        return None
    weights = counted.astype(np.float64)
    if token is not None:
        weights[counted] = _numbers(session, token)[counted]
    if of_class is not None:
        counted = counted & (weights != 0)  # a row of weight 0 adds nothing, whatever its class
        places = target[counted].astype(np.int64) - arguments["vocab_start_index"]
        weights[counted] *= _numbers(session, of_class)[places]
    return weights


def _denominator(arguments: dict[str, Any], weights: NDArray | None, number: int) -> float:
    """Return the divisor of losses and gradients."""
    if arguments["reduction"] != "mean":
        return 1.0
    if arguments["denominator"] is not None:
        return arguments["denominator"]
    return float(number if weights is None else np.sum(weights))


def _fetched(session: Session, array: DeviceArray | None, counted: NDArray) -> NDArray:
    """Return numbers of the rows that are not ignored as numbers of all rows, 0 for the others."""
    all_rows = np.zeros(counted.size, np.float32)
    if array is not None:
        there = np.empty(array.shape, np.float32)
        session.fetch([(array, there)])
        all_rows[counted] = there
    return all_rows


def _outputs(
    session: Session, statistics_of_rows: tuple[DeviceArray | None, ...], counted: NDArray
) -> dict[str, DeviceArray | NDArray | None]:
    """Return the outputs of each row that follow from the statistics."""
    logits_max, sum_exp, predicted = (
        _fetched(session, each, counted).astype(np.float64) for each in statistics_of_rows
    )
    log_sum = np.log(np.where(counted, sum_exp, 1))
    lse = np.where(np.isinf(logits_max), logits_max, logits_max + log_sum)
    return {"lse": lse, "log_prob": predicted - log_sum}


def _reduced(
    session: Session, losses: DeviceArray | None, counted: NDArray, weights: NDArray | None, reduction: str, over: float
) -> DeviceArray | NDArray:
    """Return the loss, from the losses of the rows that are not ignored; None stands for no such row."""
    if weights is None and losses is not None and reduction == "none" and losses.size == counted.size:
        return losses
    all_losses = _fetched(session, losses, counted)
    with np.errstate(all="ignore"):
        if weights is not None:
            all_losses = np.where(weights == 0, 0, weights * all_losses)
        if reduction == "none":
            return all_losses
        total = np.sum(all_losses, dtype=np.float64)
        return np.asarray(total / np.float64(over) if over else np.nan)


def _upstream(
    session: Session, arguments: dict[str, Any], counted: NDArray, weights: NDArray | None, over: float
) -> NDArray:
    """Return the upstream gradient of each row that is not ignored."""
    grad = arguments["grad_loss"]
    values = np.asarray(grad) if isinstance(grad, float) else session.values(grad)
    of_rows = (np.broadcast_to(values, counted.shape)[counted]).astype(np.float64)
    of_rows = of_rows / over if over else np.zeros_like(of_rows)
    if weights is not None:
        of_rows = np.where((weights[counted] == 0) | (of_rows == 0), 0, of_rows * weights[counted])
    return of_rows.astype(np.float32)


#: The row-wise operators. No repair of theirs reads values, so that these functions serve every queue.
ROWWISE = {
    "softmax_backward": row_gradient,
    "log_softmax_backward": row_gradient,
    "scaled_masked_softmax_backward": masked,
    "softmax": row,
    "log_softmax": row,
    "scaled_masked_softmax": masked,
}
OPERATORS: dict[str, Callable[[Session, Call], tuple[DeviceArray | NDArray | None, ...]]] = {
    **ROWWISE,
    "fused_linear_cross_entropy_loss_grad": _gradient,
    "fused_linear_online_max_sum": call_statistics,
    "fused_cross_entropy_loss_with_max_sum": call_loss,
    "linear_cross_entropy": _linear_cross_entropy,
    "linear_cross_entropy_backward": _linear_cross_entropy_backward,
}
