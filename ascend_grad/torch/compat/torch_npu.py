"""The three fused operators with torch_npu's signatures, for tensors on the CPU and on an Ascend NPU.

Code that was written for the device runs with these functions on any machine. Signatures, results and their meaning
agree with torch_npu 2.13.0; each function's notes list the differences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...errors import AscendGradError
from ...operators.signatures import documented
from ..fused import (
    fused_cross_entropy_loss_with_max_sum,
    fused_linear_cross_entropy_loss_grad,
    fused_linear_online_max_sum,
)
from ..linear_loss import refuse
from ..tensors import TENSORS

__all__ = [
    "npu_fused_cross_entropy_loss_with_max_sum",
    "npu_fused_linear_cross_entropy_loss_with_max_sum_backward",
    "npu_fused_linear_online_max_sum",
]

_WORDS = TENSORS._replace(module="torch_npu")


def _call(name: str, function: Callable, *arguments: Any, **keywords: Any) -> Any:
    """Call a function. Its errors name the operator `name`."""
    try:
        return function(*arguments, **keywords)
    except AscendGradError as error:
        error.operator = name
        raise


@documented(_WORDS, like=fused_linear_online_max_sum)
def npu_fused_linear_online_max_sum(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    return_logits: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | Any]:
    """Compute statistics of the logits of one vocabulary shard, like ``torch_npu.npu_fused_linear_online_max_sum``.

    Notes
    -----
    Differences from torch_npu: the CPU takes float32 and float64 as well, and any H. The end of the shard is exclusive,
    as on the device, although torch_npu's document says inclusive. Bits of `target_mask` beyond BT may differ. Backward
    through the results is an error; torch_npu warns and leaves gradients out.

    Examples
    --------
    >>> import torch
    >>> from ascend_grad.torch.compat import torch_npu
    >>> x, w, target = torch.eye(2).half(), torch.zeros(4, 2).half(), torch.tensor([0, 3])
    >>> *_, masked_target, logits = torch_npu.npu_fused_linear_online_max_sum(x, w, target, 0, 4)
    >>> masked_target, logits
    (tensor([0, 3]), None)
    """
    name = "compat.torch_npu.npu_fused_linear_online_max_sum"
    bounds = vocab_start_index, vocab_end_index
    statistics = _call(name, fused_linear_online_max_sum, input, weight, target, *bounds, return_logits=return_logits)
    logits_max, sum_exp_logits, predicted_logits, target_mask, masked_target, logits = statistics
    return logits_max, sum_exp_logits, predicted_logits, target_mask, masked_target, logits


@documented(_WORDS, like=fused_cross_entropy_loss_with_max_sum)
def npu_fused_cross_entropy_loss_with_max_sum(
    logits_max: torch.Tensor,
    sum_exp_logits: torch.Tensor,
    predicted_logits: torch.Tensor,
    *,
    label_smoothing: float | None = 0.0,
    input: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    vocab_parallel_logits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | Any]:
    """Compute the cross-entropy loss of each row, like ``torch_npu.npu_fused_cross_entropy_loss_with_max_sum``.

    Parameters
    ----------
    label_smoothing : float, default 0.0
        Must be 0, or None.
    input, weight : None
        Not supported: torch_npu documents only None.

    Raises
    ------
    NotImplementedError
        `input` or `weight` is given.

    Notes
    -----
    Differences from torch_npu: the CPU takes float64 as well. Backward through the results is an error; torch_npu warns
    and leaves gradients out.

    Examples
    --------
    >>> import torch
    >>> from ascend_grad.torch.compat import torch_npu
    >>> torch_npu.npu_fused_cross_entropy_loss_with_max_sum(torch.zeros(1), torch.full((1,), 4.0), torch.zeros(1))
    (tensor([1.3863]), None)
    """
    name = "compat.torch_npu.npu_fused_cross_entropy_loss_with_max_sum"
    refuse(name, input=input, weight=weight)
    return _call(
        name,
        fused_cross_entropy_loss_with_max_sum,
        logits_max,
        sum_exp_logits,
        predicted_logits,
        0.0 if label_smoothing is None else label_smoothing,
        vocab_parallel_logits=vocab_parallel_logits,
    )


@documented(_WORDS, like=fused_linear_cross_entropy_loss_grad)
def npu_fused_linear_cross_entropy_loss_with_max_sum_backward(
    grad: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    target_mask: torch.Tensor,
    masked_target: torch.Tensor,
    label_smoothing: float = 0.0,
    logits_max: torch.Tensor | None = None,
    sum_exp_logits: torch.Tensor | None = None,
    softmax: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute gradients like ``torch_npu.npu_fused_linear_cross_entropy_loss_with_max_sum_backward``.

    Notes
    -----
    Differences from torch_npu: `softmax` keeps its values; the device overwrites them. A `masked_target` outside of the
    weight's rows is an error for tensors on the CPU; for tensors on an Ascend NPU it makes NaN. A row whose `grad` is 0
    adds nothing to either result, even if it holds NaN. The CPU takes float32 and float64 as well, and any size of the
    vocabulary.

    Examples
    --------
    >>> import torch
    >>> from ascend_grad.torch.compat import torch_npu
    >>> x, w, target = torch.eye(2), torch.zeros(4, 2), torch.tensor([0, 3])
    >>> maximum, total, _, mask, local, _ = torch_npu.npu_fused_linear_online_max_sum(x, w, target, 0, 4)
    >>> _, weight_grad = torch_npu.npu_fused_linear_cross_entropy_loss_with_max_sum_backward(
    ...     torch.ones(2), x, w, mask, local, 0.0, maximum, total
    ... )
    >>> weight_grad.T
    tensor([[-0.7500,  0.2500,  0.2500,  0.2500],
            [ 0.2500,  0.2500,  0.2500, -0.7500]])
    """
    return _call(
        "compat.torch_npu.npu_fused_linear_cross_entropy_loss_with_max_sum_backward",
        fused_linear_cross_entropy_loss_grad,
        grad,
        input,
        weight,
        target_mask,
        masked_target,
        label_smoothing,
        logits_max,
        sum_exp_logits,
        softmax,
    )
