"""Tasks of `linear_cross_entropy`, which workers compute on the NumPy arrays of a chunk of tokens or on sums."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

import ascend_grad as ag

from ..arrays import accumulator_dtype, native
from ..inspection import bound_call
from ..results import LinearCrossEntropy


def count(target: NDArray, ignore_index: int) -> int:
    """Return the number of tokens that are not ignored."""
    return int(np.count_nonzero(target != ignore_index))


def loss_and_gradients(
    input: NDArray,
    weight: NDArray,
    target: NDArray,
    grad_loss: float | NDArray,
    count: int | None,
    *,
    reduction: Literal["sum", "none"],
    **settings: Any,
) -> tuple[NDArray, NDArray | None, NDArray | None]:
    """Compute the loss and gradients of a chunk. A summed loss is in float64, the weight's gradient is unrounded.

    For a mean, ``count`` is the number of tokens of all chunks that are not ignored; otherwise it is None.
    """
    if count is not None:
        grad_loss = grad_loss / count if count else 0.0
    gradients = settings["output_mask"] if settings["return_grad"] else (False, False)
    is_unrounded = accumulator_dtype(input.dtype) == native(input.dtype)
    if is_unrounded or not gradients[1] or not len(weight):
        result = ag.linear_cross_entropy(
            input,
            weight,
            target,
            grad_loss=grad_loss,
            reduction=reduction,
            **settings,
        )
    else:
        result = _with_unrounded_weight_grad(input, weight, target, grad_loss, gradients, reduction, settings)
    return np.asarray(result[0], None if reduction == "none" else np.float64), result[1], result[2]


def _with_unrounded_weight_grad(
    input: NDArray,
    weight: NDArray,
    target: NDArray,
    grad_loss: float | NDArray,
    output_mask: tuple[bool, bool],
    reduction: str,
    settings: dict[str, Any],
) -> LinearCrossEntropy:
    """Compute loss and gradients of 16-bit arrays by three operators, as the last one takes an `out` of float32."""
    arguments = settings | {"reduction": reduction, "grad_loss": grad_loss}
    bound_call("linear_cross_entropy", (input, weight, target), arguments)  # checks the targets, above all
    execution = {name: settings[name] for name in ("backend", "num_threads")}
    start = settings["vocab_start_index"]
    statistics = ag.fused_linear_online_max_sum(input, weight, target, start, start + len(weight), **execution)
    loss, _ = ag.fused_cross_entropy_loss_with_max_sum(*statistics[:3], **execution)
    counts = target != settings["ignore_index"]
    with np.errstate(over="ignore"):
        grad = np.where(counts, grad_loss, 0).astype(loss.dtype)
    loss = np.where(counts, loss, 0).astype(loss.dtype)
    input_grad, weight_grad = ag.fused_linear_cross_entropy_loss_grad(
        grad,
        input,
        weight,
        statistics.target_mask,
        statistics.masked_target,
        logits_max=statistics.logits_max,
        sum_exp_logits=statistics.sum_exp_logits,
        output_mask=output_mask,
        workspace_bytes=settings["workspace_bytes"],
        filter_eps=settings["filter_eps"],
        out=(None, np.empty(weight.shape, loss.dtype)),
        **execution,
    )
    return LinearCrossEntropy(loss if reduction == "none" else loss.sum(dtype=np.float64), input_grad, weight_grad)


def add(first: Any, second: Any) -> Any:
    """Add the results of two chunks, or two sums of results."""
    with np.errstate(all="ignore"):
        return first + second


def reduced(total: NDArray, count: int | None, dtype: np.dtype) -> NDArray:
    """Return the loss from the sum over all chunks; the mean over no tokens is NaN."""
    with np.errstate(all="ignore"):
        return np.asarray(total if count is None else np.divide(total, count), dtype)


def rounded(weight_grad: NDArray, dtype: np.dtype) -> NDArray:
    """Round the weight's gradient to the weight's dtype."""
    with np.errstate(all="ignore"):
        return weight_grad.astype(dtype, copy=False)
