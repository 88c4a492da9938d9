"""The module of Liger Kernel, with its signature."""

from __future__ import annotations

from typing import Literal

import torch

from .. import linear

__all__ = ["LigerFusedLinearCrossEntropyLoss"]

_NAME = "compat.liger.LigerFusedLinearCrossEntropyLoss"
_NAMES = linear.Names(_NAME, "_input", "lin_weight", class_weight="ce_weight")


class LigerFusedLinearCrossEntropyLoss(torch.nn.Module):
    """The cross-entropy loss of a linear layer, like ``liger_kernel.transformers.LigerFusedLinearCrossEntropyLoss``.

    Call it with the weight first: ``loss(lin_weight, _input, target, bias=None)``.

    Parameters
    ----------
    ce_weight : torch.Tensor, shape (V,), optional
        A weight for each class.
    ignore_index : int, default -100
        Rows with this target have no loss and no gradient.
    lse_square_scale, label_smoothing : float, default 0.0
        Only 0 is supported.
    reduction : {"mean", "sum", "none"}, default "mean"
        As in `ascend_grad.torch.linear_cross_entropy`, but the mean is 0 if every row is ignored.
    softcap : None
        Not supported.
    return_z_loss : bool, default False
        Only False is supported.
    accum_dtype : torch.dtype, optional
        None or float32: sums are in float32 or better.
    use_token_scaling, return_token_accuracy, return_predicted_tokens : bool, default False
        Only False is supported.

    Raises
    ------
    NotImplementedError
        A keyword is not supported.

    Examples
    --------
    >>> import torch
    >>> from ascend_grad.torch.compat.liger import LigerFusedLinearCrossEntropyLoss
    >>> loss = LigerFusedLinearCrossEntropyLoss()
    >>> loss(torch.zeros(8, 3), torch.zeros(2, 3), torch.tensor([7, -100]))
    tensor(2.0794)
    """

    def __init__(
        self,
        ce_weight: torch.Tensor | None = None,
        ignore_index: int = linear.IGNORE_INDEX,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: Literal["mean", "sum", "none"] = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ):
        linear.refuse(
            _NAME,
            lse_square_scale=lse_square_scale or None,
            label_smoothing=label_smoothing or None,
            softcap=softcap,
            return_z_loss=return_z_loss or None,
            accum_dtype=None if accum_dtype == torch.float32 else accum_dtype,
            use_token_scaling=use_token_scaling or None,
            return_token_accuracy=return_token_accuracy or None,
            return_predicted_tokens=return_predicted_tokens or None,
        )
        super().__init__()
        self.ce_weight = ce_weight
        self.ignore_index = ignore_index
        self.reduction = reduction

    def forward(
        self, lin_weight: torch.Tensor, _input: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute the loss.

        Parameters
        ----------
        lin_weight : torch.Tensor, shape (V, H)
            The layer's weight, of the dtype of `_input`.
        _input : torch.Tensor, shape (BT, H)
            The layer's input.
        target : torch.Tensor of int64 or int32, shape (BT,)
            The class of each row, in [0, V), or `ignore_index`. On an Ascend NPU another value
            is no error: the row's loss and gradient of `_input` and all of that of `lin_weight` are NaN.
        bias : None
            Not supported.

        Returns
        -------
        torch.Tensor
            The loss, float32, or float64 if `_input` is float64.
        """
        linear.refuse(_NAME, bias=bias)
        return linear.unrounded_loss(
            _input, lin_weight, target, self.reduction, self.ignore_index, linear.Options(weight=self.ce_weight),
            names=_NAMES, zero_if_empty=True,
        ).loss  # fmt: skip
