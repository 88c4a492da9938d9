"""Losses and fused operators with torch_npu's signatures, for tensors on the CPU and on an Ascend NPU.

Code that was written for the device runs with these functions on any machine. Signatures, results and their meaning
agree with torch_npu 2.13.0; each function's notes list the differences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.autograd import Function

from ...arguments import shown, truth_value
from ...errors import AscendGradError, BackendUnavailableError, ParamInvalidError, ParamTypeError, rename
from ...operators.signatures import documented
from .. import loss_operators
from ..cross_entropy import unrounded_loss
from ..fused import (
    fused_cross_entropy_loss_with_max_sum,
    fused_linear_cross_entropy_loss_grad,
    fused_linear_online_max_sum,
)
from ..gradients import without_second_order
from ..linear_loss import refuse
from ..operators import accumulator, rowwise
from ..tensors import TENSORS, check_floating, check_tensors

__all__ = [
    "npu_cross_entropy_loss",
    "npu_cross_entropy_loss_backward",
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


# -- the loss of logits --

_LOSS = "compat.torch_npu.npu_cross_entropy_loss"
_LOSS_BACKWARD = "compat.torch_npu.npu_cross_entropy_loss_backward"


def _check_loss(
    operator: str,
    rows: dict[str, torch.Tensor],
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: object,
    **others: torch.Tensor,
) -> None:
    """Check arguments of the loss. `rows` has the logits, or their log-probabilities, by their name."""
    ((name, values),) = rows.items()
    given = {} if weight is None else {"weight": weight}
    check_tensors(operator, **{name: values}, target=target, **given, **others)
    check_floating(operator, target, **{name: values})
    loss_operators.check_target_dtype(operator, "target", target)
    if target.is_floating_point() or target.is_complex():
        raise ParamTypeError(f"target: expected an integer dtype, got {target.dtype}", operator=operator)
    if values.dim() != 2:
        raise ParamInvalidError(f"{name}: expected shape (N, C), got {tuple(values.shape)}", operator=operator)
    loss_operators.refuse_gradients(operator, given)
    loss_operators.check_reduction(operator, reduction)


def _refuse_smoothing_of_gradients(operator: str, label_smoothing: Any) -> None:
    """Refuse label smoothing in a gradient, which the device's kernel would leave unwritten."""
    if label_smoothing != 0:
        hint = "use ascend_grad.torch.cross_entropy"
        message = f"not supported in the gradient, got {shown(label_smoothing)}; {hint}"
        raise NotImplementedError(f"{operator}: label_smoothing: {message}")


def _of_torch_npu(operator: str, *arguments: Any) -> Any:
    """Call torch_npu's function for tensors on an Ascend NPU. Its kernels read only contiguous tensors."""
    name = operator.rpartition(".")[2]
    function = getattr(torch.ops.npu, name, None)
    if function is None:
        message = f"the installed torch_npu has no {name}, which computes tensors on an Ascend NPU"
        raise BackendUnavailableError(message, operator=operator)
    return function(*(each.contiguous() if isinstance(each, torch.Tensor) else each for each in arguments))


def _gradient(
    grad_loss: torch.Tensor,
    log_prob: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: str,
    ignore_index: int,
) -> torch.Tensor:
    """Return the gradient from log-probabilities, which are rounded, so that they are not normalised.

    With a factor `a` for each row, the gradient is ``a (exp(y) - onehot)``. The kernel of the loss takes `y` for the
    logits, and computes ``grad_loss (p - onehot) + grad_lse p``, where ``p = exp(y - lse)``. So `grad_loss` is `a`, and
    `grad_lse` is ``a (exp(lse) - 1)``.
    """
    if log_prob.device.type == "npu":
        tensors = grad_loss, log_prob, target, weight
        return _of_torch_npu(_LOSS_BACKWARD, *tensors, None, None, reduction, ignore_index)
    loss = loss_operators.CROSS_ENTROPY
    ignored, _ = loss_operators.checked_integers(_LOSS_BACKWARD, ignore_index, None)
    numbers, _ = loss_operators.numbers_of(loss.fields, _LOSS_BACKWARD, {})
    classes = loss_operators.class_ids(target)
    problem = {**numbers, "input": log_prob, "target": classes, "dim": 1, "reduction": "none", "ignore_index": ignored}
    statistics = {**problem, "class_weight": weight, "input_grad": False, "outputs": ["lse"]}
    try:
        results = loss_operators.cross_entropy(*loss.arguments(statistics))
        lse = loss.computed(results, ["lse"])["lse"]
        counts, dtype = classes != ignored, accumulator(log_prob)
        factors = counts.to(dtype) if weight is None else weight.to(dtype)[classes.where(counts, 0)].where(counts, 0)
        if reduction == "mean":
            factors = factors / factors.sum()
        upstream = factors * grad_loss.to(dtype)
        problem |= {"grad_loss": upstream, "grad_lse": upstream * lse.expm1(), "input_grad": True, "outputs": []}
        return loss_operators.cross_entropy(*loss.arguments(problem))[1]
    except AscendGradError as error:
        rename(error, _LOSS_BACKWARD, {"input": "log_prob", "class_weight": "weight"})
        raise


class _CrossEntropyLoss(Function):
    """The loss and the rounded log-probabilities, from which backward computes the gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(input, target, weight, of_input, reduction, ignore_index, label_smoothing):
        if input.device.type == "npu":
            return _of_torch_npu(_LOSS, input, target, weight, reduction, ignore_index, label_smoothing)
        options = {"class_weight": weight, "label_smoothing": label_smoothing}
        loss = unrounded_loss(input, target, options, ignore_index, reduction, operator=_LOSS)["loss"]
        log_prob = rowwise("log_softmax", input, 1, None)
        return loss.to(input.dtype).reshape(-1), log_prob, input.new_empty(0), input.new_empty(0)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, target, weight, of_input, *ctx.settings, _ = inputs
        _, log_prob, _, lse_for_zloss = output
        ctx.mark_non_differentiable(log_prob, lse_for_zloss)
        ctx.save_for_backward(log_prob, target, weight, of_input)

    @staticmethod
    def backward(ctx, grad_loss, *_):
        *tensors, of_input = ctx.saved_tensors
        gradient = _gradient(grad_loss.detach(), *tensors, *ctx.settings)
        return *without_second_order(_LOSS, [gradient], [grad_loss, of_input]), *[None] * 6


def npu_cross_entropy_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale_for_zloss: float = 0.0,
    return_zloss: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the cross-entropy loss of logits and their log-probabilities, like ``torch_npu.npu_cross_entropy_loss``.

    ``loss, log_prob, _, _ = npu_cross_entropy_loss(input, target)`` is the mean of ``logsumexp(row) - row[target]``.
    The loss has a gradient with respect to `input`.

    Parameters
    ----------
    input : torch.Tensor, shape (N, C)
        The logits; float32, float16 or bfloat16, on the CPU also float64.
    target : torch.Tensor of int64, shape (N,)
        The class of each row, in [0, C), or `ignore_index`. On the CPU of any integer dtype.
    weight : torch.Tensor of float32, shape (C,), optional
        A weight for each class. A mean is divided by the sum of the targets' weights.
    reduction : {"mean", "sum", "none"}, default "mean"
        Whether the loss is the mean of the rows' losses, their sum, or one number for each row.
    ignore_index : int, default -100
        The target of rows that have no loss.
    label_smoothing : float, default 0.0
        The share of the loss that goes to all classes, from 0 to 1. It must be 0 if `input` requires grad.
    lse_square_scale_for_zloss : float, default 0.0
        Must be 0: the z-loss is not supported, neither here nor by torch_npu.
    return_zloss : bool, default False
        Must be False.

    Returns
    -------
    loss : torch.Tensor, shape (1,) or (N,)
        The loss in the dtype of `input`: one number for each row if `reduction` is "none".
    log_prob : torch.Tensor, shape (N, C)
        The log-softmax of the rows, rounded to the dtype of `input`. It has no gradient.
    zloss, lse_for_zloss : torch.Tensor, shape (0,)
        Empty tensors.

    Raises
    ------
    NotImplementedError
        The z-loss is requested, `label_smoothing` is not 0 and `input` requires grad, or `weight` requires grad.
    ParamInvalidError
        161002: an argument is not as described (a dtype or kind: its subclass `ParamTypeError`).
    BackendUnavailableError
        A tensor is neither on the CPU nor on a usable Ascend NPU, or the installed torch_npu lacks the function.

    Notes
    -----
    Results and gradients are rounded as on the device: the gradient is computed from the rounded log-probabilities.
    For bfloat16 its relative error grows with their size, to 1 % at a log-probability of -5.
    `ascend_grad.torch.cross_entropy` computes gradients from the logits.

    Tensors on an Ascend NPU are computed by torch_npu's own function. Its errors are a RuntimeError.

    Examples
    --------
    >>> import torch
    >>> from ascend_grad.torch.compat import torch_npu
    >>> logits = torch.zeros(2, 4, requires_grad=True)
    >>> loss, log_prob, _, _ = torch_npu.npu_cross_entropy_loss(logits, torch.tensor([0, 3]))
    >>> loss.backward()
    >>> loss.detach(), logits.grad[0]
    (tensor([1.3863]), tensor([-0.3750,  0.1250,  0.1250,  0.1250]))
    """
    if lse_square_scale_for_zloss != 0:
        refuse(_LOSS, lse_square_scale_for_zloss=lse_square_scale_for_zloss)
    if truth_value(return_zloss, "return_zloss", _LOSS):
        refuse(_LOSS, return_zloss=return_zloss)
    _check_loss(_LOSS, {"input": input}, target, weight, reduction)
    of_input = None
    if input.requires_grad and torch.is_grad_enabled():
        _refuse_smoothing_of_gradients(_LOSS, label_smoothing)
        of_input = input[:0].clone()  # depends on the logits, and does not keep their memory until backward
    return _CrossEntropyLoss.apply(input, target, weight, of_input, reduction, ignore_index, label_smoothing)


@documented(TENSORS._replace(errors=""), like=npu_cross_entropy_loss)
def npu_cross_entropy_loss_backward(
    grad_loss: torch.Tensor,
    log_prob: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    grad_zloss: torch.Tensor | None = None,
    lse_for_zloss: torch.Tensor | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale_for_zloss: float = 0.0,
) -> torch.Tensor:
    """Compute the gradient of the loss of logits, like ``torch_npu.npu_cross_entropy_loss_backward``.

    ``npu_cross_entropy_loss_backward(grad_loss, log_prob, target)`` is the gradient with respect to the logits. That of
    a row is ``(exp(log_prob) - [class = target]) * grad_loss * weight[target]``. For a mean it is divided by the sum of
    the targets' weights.

    Parameters
    ----------
    grad_loss : torch.Tensor, shape () or (1,); with `reduction` "none" shape (N,)
        The upstream gradient of the loss.
    log_prob : torch.Tensor, shape (N, C)
        The second result of `npu_cross_entropy_loss`. Rows need not be normalised.
    grad_zloss, lse_for_zloss : torch.Tensor, shape (0,), optional
        Must be None or empty: the z-loss is not supported.
    label_smoothing, lse_square_scale_for_zloss : float, default 0.0
        Must be 0.

    Returns
    -------
    torch.Tensor, shape (N, C)
        The gradient with respect to the logits, in the dtype of `log_prob`. It cannot be differentiated once more.

    Raises
    ------
    NotImplementedError
        `label_smoothing` or an argument of the z-loss is given, or `weight` requires grad.

    Notes
    -----
    On the CPU, an ignored row has the gradient 0 whatever it holds; on the device, NaN stays NaN.

    Examples
    --------
    >>> import torch
    >>> from ascend_grad.torch.compat import torch_npu
    >>> log_prob = torch.tensor([[0.25, 0.75]]).log()
    >>> torch_npu.npu_cross_entropy_loss_backward(torch.ones(1), log_prob, torch.tensor([1]))
    tensor([[ 0.2500, -0.2500]])
    """
    for name, each in {"grad_zloss": grad_zloss, "lse_for_zloss": lse_for_zloss}.items():
        if not isinstance(each, torch.Tensor) or each.numel():
            refuse(_LOSS_BACKWARD, **{name: each})
    if lse_square_scale_for_zloss != 0:
        refuse(_LOSS_BACKWARD, lse_square_scale_for_zloss=lse_square_scale_for_zloss)
    _refuse_smoothing_of_gradients(_LOSS_BACKWARD, label_smoothing)
    _check_loss(_LOSS_BACKWARD, {"log_prob": log_prob}, target, weight, reduction, grad_loss=grad_loss)
    shapes = [(len(log_prob),)] if reduction == "none" else [(), (1,)]
    if grad_loss.shape not in shapes:
        expected = f"shape {shapes[-1]}, as reduction is {reduction!r}"
        message = f"grad_loss: expected {expected}, got {tuple(grad_loss.shape)}"
        raise ParamInvalidError(message, operator=_LOSS_BACKWARD)
    check_floating(_LOSS_BACKWARD, grad_loss=grad_loss)
    gradient = _gradient(grad_loss.detach(), log_prob.detach(), target, weight, reduction, ignore_index)
    return without_second_order(_LOSS_BACKWARD, [gradient], [grad_loss, log_prob])[0]
