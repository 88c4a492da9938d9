"""The loss of verl's fused kernels, with its signature."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from ...errors import ParamInvalidError
from .. import linear_loss as linear
from ..loss_operators import IGNORE_INDEX
from ..tensors import check_tensors

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["LinearCrossEntropy", "linear_cross_entropy"]

_NAME = "compat.verl.linear_cross_entropy"
_NAMES = linear.Names(_NAME, "hidden", "weight", "labels")


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    temperature: float | torch.Tensor = 1.0,
    reduction: Literal["none", "sum", "mean"] = "none",
    dist_process_group: ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the log-probability of each label and the entropy of each token, like verl's ``linear_cross_entropy``.

    ``logprobs, entropy = linear_cross_entropy(hidden, weight, labels)`` are of the logits ``hidden @ weight.T``.

    Parameters
    ----------
    hidden : torch.Tensor, shape (..., H)
        The input of the language model's last layer.
    weight : torch.Tensor, shape (V, H)
        The layer's weight, of the dtype of `hidden`.
    labels : torch.Tensor of int64 or int32, of any shape with as many elements as tokens
        The label of each token, in order, in [0, V), or -100: such a token has log-probability 0 and entropy 0, and is
        not in the mean.
    temperature : float or torch.Tensor, of any shape with as many elements as tokens, default 1.0
        The divisor of the logits, above 0: one number, or one for each token.
    reduction : {"none", "sum", "mean"}, default "none"
        Whether the log-probabilities are returned for each token, or their sum or mean, in lower or upper case. The
        entropy is never reduced.
    dist_process_group : None
        Not supported.

    Returns
    -------
    logprobs : torch.Tensor, shape (tokens,) or ()
        The log-probabilities of the tokens in order, or their sum or mean; float32, or float64 if `hidden` is float64.
    entropy : torch.Tensor, shape (tokens,)
        The entropy of each token in nats, in the dtype of `logprobs`.

    Raises
    ------
    NotImplementedError
        `dist_process_group` is given.
    ParamInvalidError
        161002: a dtype, a shape or a value is not as described (a dtype or a kind: its subclass `ParamTypeError`).

    Notes
    -----
    Both results are differentiable with respect to `hidden` and `weight`.

    Examples
    --------
    >>> import torch
    >>> from ascend_grad.torch.compat.verl import linear_cross_entropy
    >>> linear_cross_entropy(torch.zeros(2, 3), torch.zeros(8, 3), torch.tensor([7, 0]), temperature=0.5)
    (tensor([-2.0794, -2.0794]), tensor([2.0794, 2.0794]))
    """
    linear.refuse(_NAME, dist_process_group=dist_process_group)
    check_tensors(_NAME, hidden=hidden, labels=labels)
    if hidden.dim() < 1:
        raise ParamInvalidError("hidden: expected at least one dimension, got a tensor without any", operator=_NAME)
    tokens = hidden.shape[:-1].numel()
    if labels.numel() != tokens:
        expected = f"{tokens} elements, one for each token of hidden"
        raise ParamInvalidError(f"labels: expected {expected}, got shape {tuple(labels.shape)}", operator=_NAME)
    if isinstance(temperature, torch.Tensor) and temperature.dim() > 0:
        if temperature.numel() != tokens:
            expected = f"{tokens} elements, one for each label"
            message = f"temperature: expected {expected}, got shape {tuple(temperature.shape)}"
            raise ParamInvalidError(message, operator=_NAME)
        temperature = temperature.reshape(-1)
    found = linear.unrounded_loss(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        labels.reshape(-1),
        cast(Any, reduction.lower() if isinstance(reduction, str) else reduction),
        IGNORE_INDEX,
        {"temperature": temperature, "outputs": ("entropy",)},
        names=_NAMES,
    )
    return -found["loss"], found["entropy"]


class LinearCrossEntropy:
    """The class with the same name in verl, which is used only by its method `apply`."""

    apply = staticmethod(linear_cross_entropy)
