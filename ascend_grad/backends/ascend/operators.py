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

    The losses come back to the host if they are added up, or if some rows are ignored.
    """
    a = call.arguments
    target = session.values(a["target"])
    counted = target != a["ignore_index"]
    number = int(np.count_nonzero(counted))
    rows = None if number == target.size else np.flatnonzero(counted)
    losses: DeviceArray | None = None
    gradients: tuple[DeviceArray | None, ...] = (None, None)
    if number:
        input, weight = session.put(a["input"], rows=rows), session.put(a["weight"])
        inside = quirks.places(session, a["target"], rows, a["vocab_start_index"])
        shard = statistics(session, input, weight, inside, 0, call.dims["V"], False)
        logits_max, sum_exp_logits, predicted, mask, masked_target, _ = shard
        losses, _ = loss(session, logits_max, sum_exp_logits, predicted, None)
        if a["return_grad"]:
            grad = _upstream(session, a, counted, number)
            first, second = gradient(
                session, grad, input, weight, mask, masked_target, logits_max, sum_exp_logits, None
            )  # fmt: skip
            gradients = (first if rows is None else session.scattered(first, rows, target.size), second)
    elif a["return_grad"]:
        gradients = tuple(spec and session.zeros(spec.shape, spec.dtype) for spec in call.specs[1:3])
    chosen = (array if spec is not None else None for array, spec in zip(gradients, call.specs[1:3]))
    others = (None,) * (len(call.specs) - 3)  # a device computes calls without outputs
    return _reduced(session, losses, counted, a["reduction"]), *chosen, *others


def _reduced(session: Session, losses: DeviceArray | None, counted: NDArray, reduction: str) -> DeviceArray | NDArray:
    """Return the loss, from the losses of the rows that are not ignored; None stands for no such row."""
    if losses is not None and reduction == "none" and losses.size == counted.size:
        return losses
    all_losses = np.zeros(counted.size, np.float32)
    if losses is not None:
        there = np.empty(losses.shape, np.float32)
        session.fetch([(losses, there)])
        all_losses[counted] = there
    if reduction == "none":
        return all_losses
    with np.errstate(all="ignore"):
        total = np.sum(all_losses, dtype=np.float64)
        return np.asarray(total / np.float64(np.count_nonzero(counted)) if reduction == "mean" else total)


def _upstream(session: Session, arguments: dict[str, Any], counted: NDArray, number: int) -> NDArray:
    """Return the upstream gradient of each row that is not ignored."""
    grad = arguments["grad_loss"]
    if not isinstance(grad, float):
        values = session.values(grad)
        if values.ndim:
            return values[counted].astype(np.float32)
        grad = float(values)
    return np.full(number, grad / number if arguments["reduction"] == "mean" else grad, np.float32)


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
}
