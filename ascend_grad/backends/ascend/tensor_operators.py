"""The operators on tensors of torch_npu: as `operators`, but no value is read on the host, since that would wait.

Operators of torch repair the device's differences from the contract (`quirks`), in the order of the same stream:

- Q2: a row whose ``grad`` is 0 gets zeros for its numbers (and a sum of 1), and its ``input_grad`` is set to 0. So is
  ``weight_grad`` if no row is left. One difference remains: a row of ``weight_grad`` may be NaN if the weight has an
  infinity there.
- Q3: bools are packed. Q5: the bits of ``target_mask`` beyond the last row are cleared.
- Q4 and Q9: targets become rows of the weight. A target outside of the weight, which the contract makes an error,
  becomes 0, and the row's loss, log-probability and ``grad`` become NaN.

Losses, weights and upstream gradients are float32.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    input_grad.masked_fill_(~rows, 0)
    return queue.array(input_grad), queue.array(weight_grad)


def _statistics(queue: TorchQueue, call: Call) -> Results:
    results = call_statistics(queue, call)
    count, mask = call.dims["BT"], results[3]
    if mask is not None and count % 8:  # Q5: the device leaves the other bits undefined
        tensor_of(mask)[-1:].bitwise_and_((1 << count % 8) - 1)
    return results


class _Rows:
    """The rows of a loss: their targets, their weights, and the denominator of a mean.

    Attributes
    ----------
    places : torch.Tensor
        The row of the weight that each target stands for; 0 for ignored rows and for targets outside of the weight.
    """

    def __init__(self, call: Call):
        torch: Any = sys.modules["torch"]
        self._arguments = a = call.arguments
        target, start = tensor_of(a["target"]).long(), a["vocab_start_index"]
        places = target - start
        self._counted = target != a["ignore_index"]
        self._inside = (target >= start) & (places < call.dims["V"])
        self.places = torch.where(self._inside & self._counted, places, 0)
        self._weights = self._all_weights()
        self._over: Any = 1.0
        if a["reduction"] == "mean":
            weights = self._counted if self._weights is None else self._weights
            self._over = weights.sum().to(torch.float32) if a["denominator"] is None else a["denominator"]

    def _all_weights(self) -> Any:
        """Return the weight of each row's loss in float32, 0 for ignored rows; None stands for no weights."""
        torch: Any = sys.modules["torch"]
        token, of_class = self._arguments["token_weight"], self._arguments["class_weight"]
        if token is None and of_class is None:
            return None
        weights = self._counted.to(torch.float32) if token is None else self.without_ignored(_float32(token))
        if of_class is not None:  # a row of weight 0 adds nothing, whatever its class
            weights = torch.where(weights == 0, 0, weights * _float32(of_class)[self.places])
        return weights

    def weighted(self, numbers: Any) -> Any:
        """Multiply numbers by the weights of the rows. The result is 0 for rows of weight 0, whatever the number."""
        if self._weights is None:
            return numbers
        return sys.modules["torch"].where(self._weights == 0, 0, numbers * self._weights)

    def divided(self, numbers: Any, otherwise: float) -> Any:
        """Divide numbers by the denominator. `otherwise` is the result where the denominator is 0."""
        if isinstance(self._over, float):
            return numbers / self._over
        return sys.modules["torch"].where(self._over == 0, otherwise, numbers / self._over)

    def upstream(self) -> Any:
        """Return the upstream gradient of each row's loss, or one number for all rows."""
        torch: Any = sys.modules["torch"]
        grad, over = self._arguments["grad_loss"], self._over
        if isinstance(grad, DeviceArray):
            grad = self.divided(_float32(grad), 0)
        else:
            # The quotient of two numbers of the host may lie within the range of float32, even if neither does.
            number = np.float32(grad / over if isinstance(over, float) else grad)
            grad = torch.full((), float(number), dtype=torch.float32, device=self.places.device)
            grad = grad if isinstance(over, float) else self.divided(grad, 0)
        # A gradient of 0 stays 0, whatever the weight is.
        return torch.where(grad == 0, 0, self.weighted(grad))

    def without_ignored(self, numbers: Any) -> Any:
        """Return numbers of the rows, 0 for ignored rows."""
        return sys.modules["torch"].where(self._counted, numbers, 0)

    def of_targets(self, numbers: Any) -> Any:
        """Return numbers of the rows' targets: 0 for ignored rows, NaN for targets outside of the weight."""
        return self.without_ignored(sys.modules["torch"].where(self._inside, numbers, NAN))


def _is_infinite(tensor: Any) -> Any:
    return (tensor == float("inf")) | (tensor == float("-inf"))


def _float32(array: DeviceArray) -> Any:
    return tensor_of(array).to(sys.modules["torch"].float32)


def _linear_cross_entropy(queue: TorchQueue, call: Call) -> Results:
    """Compute the chain of the three operators on all rows; the upstream gradient of ignored rows is 0."""
    a, input, weight = call.arguments, call.arguments["input"], call.arguments["weight"]
    rows = _Rows(call)
    shard = statistics(queue, input, weight, queue.array(rows.places), 0, call.dims["V"], False)
    losses = tensor_of(loss(queue, shard[0], shard[1], shard[2], None)[0])
    losses = rows.of_targets(rows.weighted(losses))
    if a["reduction"] != "none":
        losses = rows.divided(losses.sum(), NAN)
    results: dict[str, DeviceArray] = {"loss": queue.array(losses)}
    tensors: list[Any] = [None if each is None else tensor_of(each) for each in shard]
    logits_max, sum_exp_logits, predicted, mask, masked_target, _ = tensors
    if a["return_grad"]:
        grad, input, weight = rows.of_targets(rows.upstream()), tensor_of(input), tensor_of(weight)
        results["input_grad"], results["weight_grad"] = gradient(
            queue, grad, input, weight, mask, masked_target, logits_max, sum_exp_logits, None
        )
    if a["outputs"]:
        log_sum = sum_exp_logits.log()
        lse = sys.modules["torch"].where(_is_infinite(logits_max), logits_max, logits_max + log_sum)
        results["lse"] = queue.array(rows.without_ignored(lse))
        results["log_prob"] = queue.array(rows.of_targets(predicted - log_sum))
    return tuple(results.get(name) for name in call.operator.results)


def _linear_cross_entropy_backward(queue: TorchQueue, call: Call) -> Results:
    """Compute the gradients for upstream gradients of the loss, of the lse and of the log-probabilities.

    If the lse has a gradient, there are two rows for each row of the call, as in `operators`.
    """
    torch: Any = sys.modules["torch"]
    a = call.arguments
    input, weight, lse = tensor_of(a["input"]), tensor_of(a["weight"]), _float32(a["lse"])
    lse = torch.where(_is_infinite(lse), NAN, lse)  # no probability follows from an infinite one
    rows, count = _Rows(call), call.dims["BT"]
    grad, places = rows.upstream(), rows.places
    if a["grad_log_prob"] is not None:
        grad = grad - _float32(a["grad_log_prob"])
    grad, is_second = rows.of_targets(grad), torch.zeros_like(places, dtype=torch.bool)
    if a["grad_lse"] is not None:
        grad = torch.cat([grad, rows.without_ignored(_float32(a["grad_lse"]))])
        is_second = torch.cat([is_second, ~is_second])
        input, places, lse = (torch.cat([each, each]) for each in (input, places, lse))
    input_grad, weight_grad = gradient(
        queue, grad, input, weight, _packed(is_second), places, lse, torch.ones_like(lse), None
    )
    if a["grad_lse"] is not None:
        first, second = tensor_of(input_grad).split(count)
        input_grad = queue.array(first + second)
    return input_grad, weight_grad, None


def _outside(call: Call) -> NDArray:
    """Return which rows have targets that are outside of the weight, and neither masked nor ignored."""
    a = call.arguments
    if call.operator.name == "fused_linear_cross_entropy_loss_grad":
        target, mask, start = a["masked_target"].host_values(), a["target_mask"].host_values(), 0
        present = ~mask if mask.dtype == bool else np.unpackbits(mask, count=target.size, bitorder="little") == 0
    else:
        target, start = a["target"].host_values(), a["vocab_start_index"]
        present = target != a["ignore_index"]
    return present & ~((target >= start) & (target < start + call.dims["V"]))


def without_elements(call: Call, compute: Callable[[Call], tuple[NDArray | None, ...]]) -> tuple[NDArray | None, ...]:
    """Compute a call without elements by a function of the host that takes no targets outside of the weight.

    Rows that have such targets become NaN, as on the device.
    """
    if "input_grad" not in call.operator.results:
        return compute(call)
    a, outside = call.arguments, _outside(call)
    if "target" in a:
        others = {"target": np.where(outside, a["ignore_index"], a["target"].host_values().astype(np.int64))}
    else:
        others = {"grad": np.where(outside, np.float32(0), a["grad"].host_values())}
    results = dict(zip(call.operator.results, compute(call.with_arguments(a | others))))
    extent = call.dims["V"]
    lse = np.log(extent) if extent else -np.inf
    for name, value in {"loss": NAN, "input_grad": NAN, "log_prob": NAN, "lse": lse}.items():
        result = results.get(name)
        if result is not None and outside.any():
            result[outside if result.ndim else ()] = value
    return tuple(results.values())


OPERATORS: dict[str, Callable[[TorchQueue, Call], Results]] = {
    **ROWWISE,
    "fused_linear_cross_entropy_loss_grad": _gradient,
    "fused_linear_online_max_sum": _statistics,
    "fused_cross_entropy_loss_with_max_sum": call_loss,
    "linear_cross_entropy": _linear_cross_entropy,
    "linear_cross_entropy_backward": _linear_cross_entropy_backward,
}
