"""The function of cut-cross-entropy, with its signature."""

from __future__ import annotations

from typing import Literal

import torch

from ...arguments import integer, shown
from ...errors import ParamInvalidError
from .. import linear
from ..tensors import check_tensors

__all__ = ["linear_cross_entropy"]

_NAME = "compat.cce.linear_cross_entropy"
_NAMES = linear.Names(_NAME, "e", "c", "targets")


def linear_cross_entropy(
    e: torch.Tensor,
    c: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = linear.IGNORE_INDEX,
    softcap: float | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    shift: bool | int = 0,
    return_lse: bool = False,
    filter_eps: float | Literal["auto"] | None = "auto",
    accum_e_fp32: bool = False,
    accum_c_fp32: bool = False,
    filter_e_grad: bool = True,
    filter_c_grad: bool = True,
    impl: str | None = None,
    vocab_parallel_options: object = None,
) -> torch.Tensor:
    """Compute the cross-entropy loss of a linear layer, like ``cut_cross_entropy.linear_cross_entropy``.

    Parameters
    ----------
    e : torch.Tensor, shape (..., H)
        The layer's input.
    c : torch.Tensor, shape (V, H)
        The layer's weight, of the dtype of `e`.
    targets : torch.Tensor of int64 or int32, shape (...)
        The class of each row of `e`, in [0, V), or `ignore_index`. On an Ascend NPU another value
        is no error: the row's loss and gradient of `e` and all of that of `c` are NaN.
    bias : None
        Not supported.
    ignore_index : int, default -100
        Rows with this target have no loss and no gradient.
    softcap : None
        Not supported.
    reduction : {"mean", "sum", "none"}, default "mean"
        As in `ascend_grad.torch.linear_cross_entropy`: the mean is NaN if every row is ignored.
    shift : bool or int, default 0
        Row i predicts the target at i + shift in the last dimension of `targets`.
    return_lse : bool, default False
        Only False is supported.
    filter_eps : float, "auto" or None, default "auto"
        As in `ascend_grad.fused_linear_cross_entropy_loss_grad`. "auto" and None skip nothing: results are exact.
    accum_e_fp32, accum_c_fp32 : bool, default False
        Ignored: sums are always in float32 or better.
    filter_e_grad, filter_c_grad : bool, default True
        Whether `filter_eps` applies to the gradients of `e` and of `c`: to both or to none.
    impl : None
        Not supported: there is one implementation.
    vocab_parallel_options : None
        Not supported.

    Returns
    -------
    torch.Tensor
        The loss, float32, or float64 if `e` is float64. If `reduction` is "none" it has the shape of `targets`, whose
        last dimension is shorter by `shift`.

    Raises
    ------
    NotImplementedError
        A keyword is not supported.
    ParamInvalidError
        161002: a dtype, a shape or a value is not as described (a dtype or a kind: its subclass `ParamTypeError`).

    Examples
    --------
    >>> import torch
    >>> from ascend_grad.torch.compat.cce import linear_cross_entropy
    >>> linear_cross_entropy(torch.zeros(2, 5, 3), torch.zeros(8, 3), torch.zeros(2, 5, dtype=torch.int64), shift=1)
    tensor(2.0794)
    """
    linear.refuse(
        _NAME,
        bias=bias,
        softcap=softcap,
        return_lse=return_lse or None,
        impl=impl,
        vocab_parallel_options=vocab_parallel_options,
    )
    if filter_eps is None or filter_eps == "auto" or not (filter_e_grad or filter_c_grad):
        filter_eps = 0.0
    if filter_eps and bool(filter_e_grad) != bool(filter_c_grad):
        linear.refuse(_NAME, **({"filter_c_grad": False} if filter_e_grad else {"filter_e_grad": False}))
    check_tensors(_NAME, e=e, targets=targets)
    if e.dim() < 1 or targets.shape != e.shape[:-1]:
        message = f"targets: expected the shape of e but for its last dimension, {tuple(e.shape[:-1])}, got "
        raise ParamInvalidError(f"{message}{tuple(targets.shape)}", operator=_NAME)
    if type(shift) not in (bool, int):
        shift = integer(shift, "shift", _NAME)
    if shift:
        length = targets.shape[-1] if targets.dim() else 0
        if not 0 <= shift < length:
            message = f"shift: expected an int from 0 to below {length}, got {shown(shift)}"
            raise ParamInvalidError(message, operator=_NAME)
        e, targets = e[..., : length - shift, :], targets[..., shift:]
    loss, *_ = linear.unrounded_loss(
        e.reshape(-1, e.shape[-1]), c, targets.reshape(-1), reduction, ignore_index,
        filter_eps=filter_eps, names=_NAMES,
    )  # fmt: skip
    return loss.reshape(targets.shape) if reduction == "none" else loss
