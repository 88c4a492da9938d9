"""The cross-entropy losses of logits of Liger Kernel, with their signatures."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

from ....errors import ParamInvalidError
from ... import cross_entropy
from ... import linear_loss as linear
from ...loss_operators import IGNORE_INDEX
from ...tensors import check_tensors
from .results import (
    CrossEntropyOutput,
    LossModule,
    arguments_of,
    check_kinds,
    loss_alone_or_all,
    outputs_of,
    results_of,
)


def _loss_of_logits(
    names: tuple[str, str],
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int = IGNORE_INDEX,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> CrossEntropyOutput:
    """Compute the loss of logits. `names` has the names of the function and of the logits."""
    operator, input_name = names
    check_kinds(
        operator,
        return_z_loss=return_z_loss,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
    )
    check_tensors(operator, **{input_name: input}, target=target)
    if input.dim() != 2:
        message = f"{input_name}: expected shape (BT, V), got {tuple(input.shape)}"
        raise ParamInvalidError(message, operator=operator)
    options = {
        "class_weight": weight,
        "label_smoothing": label_smoothing,
        "lse_square_scale": lse_square_scale,
        "softcap": softcap,
    }
    outputs = outputs_of(return_z_loss, return_token_accuracy or return_predicted_tokens)
    found = cross_entropy.unrounded_loss(
        input, target, options, ignore_index, reduction, outputs, operator=operator, input_name=input_name
    )
    if reduction == "mean":
        found["loss"] = torch.where((target != ignore_index).any(), found["loss"], 0)
    found["loss"] = found["loss"].to(input.dtype)
    return results_of(
        found, input, target, ignore_index, reduction, lse_square_scale if return_z_loss else None,
        return_token_accuracy, return_predicted_tokens
    )  # fmt: skip


@overload
def liger_cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: None = None,
    ignore_index: int = IGNORE_INDEX,
    reduce: None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    return_z_loss: Literal[False] = False,
    return_token_accuracy: Literal[False] = False,
    return_predicted_tokens: Literal[False] = False,
) -> torch.Tensor: ...


@overload
def liger_cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: None = None,
    ignore_index: int = IGNORE_INDEX,
    reduce: None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> CrossEntropyOutput: ...


def liger_cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: None = None,
    ignore_index: int = IGNORE_INDEX,
    reduce: None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> torch.Tensor | CrossEntropyOutput:
    """Compute the cross-entropy loss of logits, like Liger Kernel's ``liger_cross_entropy``.

    By default, ``loss = liger_cross_entropy(input, target)`` is the mean of ``logsumexp(row) - row[target]``.

    Parameters
    ----------
    input : torch.Tensor, shape (BT, V)
        The logits; float32, float16, bfloat16 or float64. They keep their values.
    target : torch.Tensor of int64 or int32, shape (BT,)
        The class of each row, in [0, V), or `ignore_index`.
    weight : torch.Tensor, shape (V,), optional
        A weight for each class. A mean of the cross-entropy is divided by the sum of the targets' weights.
    size_average : None
        Not supported. Liger ignores it.
    ignore_index : int, default -100
        As in `liger_fused_linear_cross_entropy`.
    reduce : None
        Not supported. Liger ignores it.
    reduction, label_smoothing, lse_square_scale, softcap
        As in `liger_fused_linear_cross_entropy`.
    return_z_loss, return_token_accuracy, return_predicted_tokens : bool, default False
        As in `liger_fused_linear_cross_entropy`.

    Returns
    -------
    torch.Tensor or CrossEntropyOutput
        The loss in the dtype of `input`. If another result is requested, the loss and the requested results are fields
        of a named tuple. The loss alone has a gradient.

    Raises
    ------
    NotImplementedError
        `size_average` or `reduce` is given, or `weight` requires grad.
    ParamInvalidError
        161002: a dtype, a shape or a value is not as described (a dtype or a kind: its subclass `ParamTypeError`).

    Examples
    --------
    >>> import torch
    >>> from ascend_grad.torch.compat.liger import liger_cross_entropy
    >>> liger_cross_entropy(torch.zeros(2, 8), torch.tensor([7, -100]), return_token_accuracy=True).token_accuracy
    tensor(0.)
    """
    operator = "compat.liger.liger_cross_entropy"
    linear.refuse(operator, size_average=size_average, reduce=reduce)
    return loss_alone_or_all(
        _loss_of_logits(
            (operator, "input"), input, target, weight, ignore_index, lse_square_scale, label_smoothing, reduction,
            softcap, return_z_loss, return_token_accuracy, return_predicted_tokens
        )
    )  # fmt: skip


class LigerCrossEntropyLoss(LossModule):
    """The cross-entropy loss of logits as a module, like ``liger_kernel.transformers.LigerCrossEntropyLoss``.

    Parameters
    ----------
    weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap
        As in `liger_cross_entropy`.
    return_z_loss, return_token_accuracy, return_predicted_tokens
        As in `liger_cross_entropy`.

    Examples
    --------
    >>> import torch
    >>> from ascend_grad.torch.compat.liger import LigerCrossEntropyLoss
    >>> LigerCrossEntropyLoss(reduction="sum")(torch.zeros(2, 8), torch.tensor([7, 0]))
    tensor(4.1589)
    """

    def __init__(
        self,
        weight: torch.Tensor | None = None,
        ignore_index: int = IGNORE_INDEX,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: Literal["mean", "sum", "none"] = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ):
        super().__init__(
            _LOGITS_MODULE,
            "weight",
            weight,
            ignore_index=ignore_index,
            lse_square_scale=lse_square_scale,
            label_smoothing=label_smoothing,
            reduction=reduction,
            softcap=softcap,
            return_z_loss=return_z_loss,
            return_token_accuracy=return_token_accuracy,
            return_predicted_tokens=return_predicted_tokens,
        )

    def forward(self, _input: torch.Tensor, target: torch.Tensor) -> torch.Tensor | CrossEntropyOutput:
        """Compute the loss.

        Parameters
        ----------
        _input : torch.Tensor, shape (BT, V)
            The logits.
        target : torch.Tensor of int64 or int32, shape (BT,)
            The class of each row, in [0, V), or `ignore_index`.

        Returns
        -------
        torch.Tensor or CrossEntropyOutput
            As from `liger_cross_entropy`.
        """
        return loss_alone_or_all(
            _loss_of_logits((_LOGITS_MODULE, "_input"), _input, target, self.weight, **self._settings())
        )


_LOGITS_MODULE = "compat.liger.LigerCrossEntropyLoss"


class LigerCrossEntropyFunction:
    """The loss of `liger_cross_entropy` with all results in a tuple.

    Like the class with the same name in Liger Kernel, it is used only by its method `apply`.
    """

    @staticmethod
    @arguments_of(_loss_of_logits, "_input")
    def apply(*arguments: Any, **settings: Any) -> tuple[torch.Tensor, Any, Any, Any]:
        """Compute the loss of logits: ``loss, z_loss, token_accuracy, predicted_tokens = apply(_input, target, None)``.

        Parameters
        ----------
        _input, target, weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap
            As in `liger_cross_entropy`.
        return_z_loss, return_token_accuracy, return_predicted_tokens
            As in `liger_cross_entropy`.

        Returns
        -------
        loss, z_loss, token_accuracy, predicted_tokens
            The fields of `CrossEntropyOutput`, None where not requested.

        Examples
        --------
        >>> import torch
        >>> from ascend_grad.torch.compat.liger import LigerCrossEntropyFunction
        >>> LigerCrossEntropyFunction.apply(torch.zeros(1, 8), torch.tensor([7]), None)
        (tensor(2.0794), None, None, None)
        """
        names = "compat.liger.LigerCrossEntropyFunction", "_input"
        return tuple(_loss_of_logits(names, *arguments, **settings))
