"""The operators on tensors of torch_npu: as `operators`, but no value is read on the host, since that would wait.

Operators of torch repair the device's differences from the contract (`quirks`), in the order of the same stream:

- Q2: a row whose ``grad`` is 0 gets zeros for its numbers (and a sum of 1), and its ``input_grad`` is set to 0. So is
  ``weight_grad`` if no row is left. One difference remains: a row of ``weight_grad`` may be NaN if the weight has an
  infinity there.
- Q3: bools are packed. Q5: the bits of ``target_mask`` beyond the last row are cleared.
- Q4 and Q9: targets become rows of the weight. A target outside of the weight, which the contract makes an error,
  becomes 0, and the row's loss and ``grad`` become NaN.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ..._call import Call
from .array import DeviceArray
from .operators import ROWWISE, Results, call_loss, call_statistics, launch_gradient, loss, statistics
from .torch_npu import TorchQueue, tensor_of

NAN = float("nan")


def _bits(mask: Any, count: int) -> Any:
    """Unpack a mask of ``count`` rows from bits to bools."""
    torch: Any = sys.modules["torch"]
    packed = mask[: -(-count // 8)]
    return torch.stack([(packed & (1 << bit)) != 0 for bit in range(8)], dim=1).reshape(-1)[:count]


def _packed(mask: Any) -> Any:
    """Pack a mask of bools into bits, the first row in the lowest one (Q3)."""
    count = mask.shape[0]
    padded = mask.new_zeros(-(-count // 8) * 8)
    padded[:count].copy_(mask)
    columns = padded.reshape(-1, 8).to(sys.modules["torch"].uint8)
    result = columns[:, 0]
    for bit in range(1, 8):
        result = result + columns[:, bit] * (1 << bit)
    return result


def _gradient(queue: TorchQueue, call: Call) -> Results:
    torch: Any = sys.modules["torch"]
    a = {name: tensor_of(each) if isinstance(each, DeviceArray) else each for name, each in call.arguments.items()}
    mask, target, (count, extent) = a["target_mask"], a["masked_target"], (call.dims["BT"], call.dims["V"])
    is_packed = mask.dtype != torch.bool
    elsewhere = _bits(mask, count) if is_packed else mask
    inside = (target >= 0) & (target < extent)
    target = torch.where(inside & ~elsewhere, target, 0)
    grad = torch.where(inside | elsewhere, a["grad"], NAN)
    mask = mask if is_packed else _packed(mask)
    results = gradient(
        queue, grad, a["input"], a["weight"], mask, target, a["logits_max"], a["sum_exp_logits"], a["softmax"]
    )
    return tuple(result if asked else None for result, asked in zip(results, a["output_mask"]))


def gradient(
    queue: TorchQueue,
    grad: Any,
    input: Any,
    weight: Any,
    target_mask: Any,
    masked_target: Any,
    logits_max: Any,
    sum_exp_logits: Any,
    softmax: Any,
) -> tuple[DeviceArray, DeviceArray]:
    """Compute the fused gradient of tensors whose targets are rows of the weight."""
    torch: Any = sys.modules["torch"]
    present = grad != 0
    rows = present[:, None]
    if softmax is None:
        logits_max, sum_exp_logits = torch.where(present, logits_max, 0), torch.where(present, sum_exp_logits, 1)
    else:  # Q1: the operator overwrites the softmax, and torch.where makes a copy
        logits_max, sum_exp_logits, softmax = None, None, torch.where(rows, softmax, 0)
    tensors = (
        grad, torch.where(rows, input, 0), weight, target_mask, masked_target, logits_max, sum_exp_logits, softmax
    )  # fmt: skip
    arrays = [None if each is None else queue.array(each) for each in tensors]
    input_grad, weight_grad = (tensor_of(each) for each in launch_gradient(queue, *arrays))
    weight_grad.masked_fill_(present.sum() == 0, 0)
    return queue.array(torch.where(rows, input_grad, 0)), queue.array(weight_grad)


def _statistics(queue: TorchQueue, call: Call) -> Results:
    results = call_statistics(queue, call)
    count, mask = call.dims["BT"], results[3]
    if mask is not None and count % 8:  # Q5: the device leaves the other bits undefined
        tensor_of(mask)[-1:].bitwise_and_((1 << count % 8) - 1)
    return results


def _linear_cross_entropy(queue: TorchQueue, call: Call) -> Results:
    """Compute the chain of the three operators on all rows; the upstream gradient of ignored rows is 0."""
    torch: Any = sys.modules["torch"]
    a, extent = call.arguments, call.dims["V"]
    input, weight, start = a["input"], a["weight"], a["vocab_start_index"]
    target = tensor_of(a["target"]).long()
    counted = target != a["ignore_index"]
    places = target - start
    inside = (target >= start) & (places < extent)
    places = torch.where(inside & counted, places, 0)
    shard = statistics(queue, input, weight, queue.array(places), 0, extent, False)
    logits_max, sum_exp_logits, predicted, mask, masked_target, _ = shard
    losses = tensor_of(loss(queue, logits_max, sum_exp_logits, predicted, None)[0])
    losses = torch.where(counted, torch.where(inside, losses, NAN), 0)
    number = counted.sum().to(torch.float32)
    gradients: tuple[DeviceArray | None, ...] = (None, None)
    if a["return_grad"]:
        above = a["grad_loss"]
        if isinstance(above, DeviceArray):
            upstream = tensor_of(above).to(losses.dtype)
        else:
            upstream = losses.new_full((), float(np.float32(above)))
        if a["reduction"] == "mean":
            upstream = upstream / number
        grad = torch.where(counted, torch.where(inside, upstream, NAN), 0)
        arrays: tuple[Any, ...] = input, weight, mask, masked_target, logits_max, sum_exp_logits, None
        gradients = gradient(queue, grad, *(None if each is None else tensor_of(each) for each in arrays))
    if a["reduction"] != "none":
        losses = losses.sum()
    if a["reduction"] == "mean":
        losses = losses / number
    chosen = (each if asked else None for each, asked in zip(gradients, a["output_mask"]))
    others = (None,) * (len(call.specs) - 3)  # a device computes calls without outputs
    return queue.array(losses), *chosen, *others


OPERATORS: dict[str, Callable[[TorchQueue, Call], Results]] = {
    **ROWWISE,
    "fused_linear_cross_entropy_loss_grad": _gradient,
    "fused_linear_online_max_sum": _statistics,
    "fused_cross_entropy_loss_with_max_sum": call_loss,
    "linear_cross_entropy": _linear_cross_entropy,
}
