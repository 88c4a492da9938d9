"""The cross-entropy losses of linear layers of Liger Kernel, with their signatures."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

from ....arguments import integer, shown, truth_value
from ....errors import ParamInvalidError
from ... import linear_loss as linear
from ... import positions
from ...loss_operators import IGNORE_INDEX
from ...outputs import Computed
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


def _fused_loss(
    names: linear.Names,
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    ce_weight: torch.Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> CrossEntropyOutput:
    """Compute the loss of a linear layer."""
    check_kinds(
        names.operator,
        accum_dtype,
        return_z_loss=return_z_loss,
        use_token_scaling=use_token_scaling,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
    )
    if accum_dtype not in (None, torch.float32) and accum_dtype != getattr(input, "dtype", None):
        linear.refuse(names.operator, accum_dtype=accum_dtype)
    options = {
        "bias": bias,
        "class_weight": ce_weight,
        "label_smoothing": label_smoothing,
        "lse_square_scale": lse_square_scale,
        "softcap": softcap,
        "outputs": outputs_of(return_z_loss, return_token_accuracy or return_predicted_tokens),
    }
    probabilities = None
    if use_token_scaling:
        probabilities = _target_probabilities(names, input, weight, target, ignore_index, options)
    if probabilities is not None and reduction == "mean":
        found = _scaled_mean(names, input, weight, target, ignore_index, options, probabilities)
    else:
        options = {**options, "token_weight": probabilities}
        found = linear.unrounded_loss(
            input, weight, target, reduction, ignore_index, options, names=names, zero_if_empty=True
        )
    return results_of(
        found, input, target, ignore_index, reduction, lse_square_scale if return_z_loss else None,
        return_token_accuracy, return_predicted_tokens, probabilities
    )  # fmt: skip


def _target_probabilities(
    names: linear.Names,
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    options: dict[str, Any],
) -> torch.Tensor:
    """Return the probability of each target, without a gradient."""
    alone = {"bias": options["bias"], "softcap": options["softcap"], "outputs": ("log_prob",)}
    with torch.no_grad():
        found = linear.unrounded_loss(input, weight, target, "sum", ignore_index, alone, names=names)
    return found["log_prob"].exp()


def _scaled_mean(
    names: linear.Names,
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    options: dict[str, Any],
    probabilities: torch.Tensor,
) -> Computed:
    """Return the mean of losses that are multiplied by probabilities; divisors do not contain the probabilities.

    The cross-entropy is divided by the class weights of the targets, and the squared lse by the number of rows.
    """
    counted = target != ignore_index
    of_row = of_square = probabilities / counted.sum()
    if (class_weight := options["class_weight"]) is not None:
        check_tensors(names.operator, **{names.input: input, names.class_weight: class_weight})
        linear.check_shape(names.operator, names.class_weight, class_weight, weight.shape[:1], "one for each class")
        of_target = class_weight.to(probabilities.dtype)[torch.where(counted, target, 0)] * counted
        of_row = probabilities / of_target.sum()
    return positions.summed_loss(input, weight, target, ignore_index, options, of_row, of_square, names=names)


@overload
def liger_fused_linear_cross_entropy(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    ce_weight: torch.Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
    softcap: float | None = None,
    return_z_loss: Literal[False] = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: Literal[False] = False,
    return_predicted_tokens: Literal[False] = False,
) -> torch.Tensor: ...


@overload
@arguments_of(_fused_loss)
def liger_fused_linear_cross_entropy(*arguments: Any, **settings: Any) -> CrossEntropyOutput: ...


@arguments_of(_fused_loss)
def liger_fused_linear_cross_entropy(*arguments: Any, **settings: Any) -> torch.Tensor | CrossEntropyOutput:
    """Compute the cross-entropy loss of a linear layer, like Liger Kernel's ``liger_fused_linear_cross_entropy``.

    The logits are ``input @ weight.T``, and the loss of a row is ``logsumexp(row) - row[target]``. By default,
    ``loss = liger_fused_linear_cross_entropy(input, weight, target)`` is the mean over the rows that are not ignored.

    Parameters
    ----------
    input : torch.Tensor, shape (BT, H)
        The layer's input.
    weight : torch.Tensor, shape (V, H)
        The layer's weight, of the dtype of `input`.
    target : torch.Tensor of int64 or int32, shape (BT,)
        The class of each row, in [0, V), or `ignore_index`. On an Ascend NPU another value
        is no error: the row's loss and gradient of `input` and all of that of `weight` are NaN.
    bias : torch.Tensor, shape (V,), optional
        The layer's bias.
    ce_weight : torch.Tensor, shape (V,), optional
        A weight for each class. A mean of the cross-entropy is divided by the sum of the targets' weights.
    ignore_index : int, default -100
        Rows with this target have no loss and no gradient.
    lse_square_scale : float, default 0.0
        The factor of the squared logarithm of the sum of the exponentials (z-loss), which is added to the loss. Its
        mean is divided by the number of rows that are not ignored.
    label_smoothing : float, default 0.0
        The share of the loss that goes to all classes, from 0 to 1.
    reduction : {"mean", "sum", "none"}, default "mean"
        As in `ascend_grad.torch.linear_cross_entropy`, but the mean is 0 if every row is ignored.
    softcap : float, optional
        The bound of the logits, above 0: they are ``softcap * tanh(logits / softcap)``.
    return_z_loss : bool, default False
        Whether to return the part of the loss that `lse_square_scale` adds.
    accum_dtype : torch.dtype, optional
        None, float32 or the dtype of `input`: sums are in float32 or better.
    use_token_scaling : bool, default False
        Whether the loss of each row is multiplied by its target's probability, which is taken as a constant. Divisors
        of a mean do not change.
    return_token_accuracy, return_predicted_tokens : bool, default False
        Whether to return the accuracy and the predicted classes.

    Returns
    -------
    torch.Tensor or CrossEntropyOutput
        The loss, float32, or float64 if `input` is float64. If another result is requested, the loss and the requested
        results are fields of a named tuple. The loss alone has a gradient.

    Raises
    ------
    NotImplementedError
        `accum_dtype` is wider than the accumulator, or `ce_weight` requires grad.
    ParamInvalidError
        161002: a dtype, a shape or a value is not as described (a dtype or a kind: its subclass `ParamTypeError`).

    Examples
    --------
    >>> import torch
    >>> from ascend_grad.torch.compat.liger import liger_fused_linear_cross_entropy
    >>> liger_fused_linear_cross_entropy(
    ...     torch.zeros(2, 3), torch.zeros(8, 3), torch.tensor([7, -100]), return_predicted_tokens=True
    ... ).predicted_tokens
    tensor([ 0, -1])
    """
    return loss_alone_or_all(_fused_loss(_FUSED_NAMES, *arguments, **settings))


_FUSED_NAMES = linear.Names(
    "compat.liger.liger_fused_linear_cross_entropy", weight="weight", class_weight="ce_weight", bias="bias"
)


class LigerFusedLinearCrossEntropyLoss(LossModule):
    """The cross-entropy loss of a linear layer, like ``liger_kernel.transformers.LigerFusedLinearCrossEntropyLoss``.

    Call it with the weight first: ``loss(lin_weight, _input, target, bias=None)``.

    Parameters
    ----------
    ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap
        As in `liger_fused_linear_cross_entropy`.
    return_z_loss, accum_dtype, use_token_scaling, return_token_accuracy, return_predicted_tokens
        As in `liger_fused_linear_cross_entropy`.

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
        ignore_index: int = IGNORE_INDEX,
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
        super().__init__(
            _MODULE_NAMES.operator,
            "ce_weight",
            ce_weight,
            ignore_index=ignore_index,
            lse_square_scale=lse_square_scale,
            label_smoothing=label_smoothing,
            reduction=reduction,
            softcap=softcap,
            return_z_loss=return_z_loss,
            accum_dtype=accum_dtype,
            use_token_scaling=use_token_scaling,
            return_token_accuracy=return_token_accuracy,
            return_predicted_tokens=return_predicted_tokens,
        )

    def forward(
        self, lin_weight: torch.Tensor, _input: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor | CrossEntropyOutput:
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
        bias : torch.Tensor, shape (V,), optional
            The layer's bias.

        Returns
        -------
        torch.Tensor or CrossEntropyOutput
            As from `liger_fused_linear_cross_entropy`.
        """
        return loss_alone_or_all(
            _fused_loss(_MODULE_NAMES, _input, lin_weight, target, bias, self.ce_weight, **self._settings())
        )


_MODULE_NAMES = linear.Names(
    "compat.liger.LigerFusedLinearCrossEntropyLoss", "_input", "lin_weight", class_weight="ce_weight", bias="bias"
)


class LigerFusedLinearCrossEntropyFunction:
    """The loss of `liger_fused_linear_cross_entropy` with all results in a tuple.

    Like the class with the same name in Liger Kernel, it is used only by its method `apply`.
    """

    @staticmethod
    @arguments_of(_fused_loss, "_input")
    def apply(*arguments: Any, **settings: Any) -> tuple[torch.Tensor, Any, Any, Any]:
        """Compute a layer's loss: ``loss, z_loss, token_accuracy, predicted_tokens = apply(_input, weight, target)``.

        Parameters
        ----------
        _input, weight, target, bias, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap
            As in `liger_fused_linear_cross_entropy`.
        return_z_loss, accum_dtype, use_token_scaling, return_token_accuracy, return_predicted_tokens
            As in `liger_fused_linear_cross_entropy`.

        Returns
        -------
        loss, z_loss, token_accuracy, predicted_tokens
            The fields of `CrossEntropyOutput`, None where not requested.

        Examples
        --------
        >>> import torch
        >>> from ascend_grad.torch.compat.liger import LigerFusedLinearCrossEntropyFunction
        >>> LigerFusedLinearCrossEntropyFunction.apply(torch.zeros(1, 3), torch.zeros(8, 3), torch.tensor([7]))
        (tensor(2.0794), None, None, None)
        """
        return tuple(_fused_loss(_FUNCTION_NAMES, *arguments, **settings))


_FUNCTION_NAMES = linear.Names(
    "compat.liger.LigerFusedLinearCrossEntropyFunction", "_input", "weight", class_weight="ce_weight", bias="bias"
)


class LigerFusedLinearScaledCrossEntropyFunction:
    """Negative log-probabilities of tokens with a temperature, and their entropies, for reinforcement learning.

    Like the class with the same name in Liger Kernel, it is used only by its method `apply`.
    """

    @overload
    @staticmethod
    def apply(
        _input: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        temperature: float | torch.Tensor = 1.0,
        ignore_index: int = IGNORE_INDEX,
        m_tiles_per_cluster: int = 1,
        return_entropy: Literal[False] = False,
    ) -> torch.Tensor: ...

    @overload
    @staticmethod
    def apply(
        _input: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        temperature: float | torch.Tensor = 1.0,
        ignore_index: int = IGNORE_INDEX,
        m_tiles_per_cluster: int = 1,
        return_entropy: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    @staticmethod
    def apply(
        _input: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        temperature: float | torch.Tensor = 1.0,
        ignore_index: int = IGNORE_INDEX,
        m_tiles_per_cluster: int = 1,
        return_entropy: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute negative log-probabilities, ``nll = apply(_input, weight, target)``, and on request entropies.

        Parameters
        ----------
        _input : torch.Tensor, shape (BT, H)
            The input of the language model's last layer.
        weight : torch.Tensor, shape (V, H)
            The layer's weight, of the dtype of `_input`.
        target : torch.Tensor of int64 or int32, shape (BT,)
            The class of each row, in [0, V), or `ignore_index`.
        temperature : float or torch.Tensor, shape (BT,), default 1.0
            The divisor of the logits, above 0.
        ignore_index : int, default -100
            Results of rows with this target are 0.
        m_tiles_per_cluster : int, default 1
            A positive number, without an effect: it chooses a schedule of Liger's kernel.
        return_entropy : bool, default False
            Whether to also return the entropy.

        Returns
        -------
        nll : torch.Tensor, shape (BT,)
            The negative log-probabilities, float32, or float64 if `_input` is float64.
        entropy : torch.Tensor, shape (BT,)
            Only with `return_entropy`: the entropies in nats. Both results are differentiable.

        Examples
        --------
        >>> import torch
        >>> from ascend_grad.torch.compat.liger import LigerFusedLinearScaledCrossEntropyFunction
        >>> LigerFusedLinearScaledCrossEntropyFunction.apply(torch.zeros(1, 3), torch.zeros(8, 3), torch.tensor([7]))
        tensor([2.0794])
        """
        name = "compat.liger.LigerFusedLinearScaledCrossEntropyFunction"
        if integer(m_tiles_per_cluster, "m_tiles_per_cluster", name) < 1:
            message = f"m_tiles_per_cluster: expected a positive int, got {shown(m_tiles_per_cluster)}"
            raise ParamInvalidError(message, operator=name)
        return_entropy = truth_value(return_entropy, "return_entropy", name)
        names = linear.Names(name, "_input", "weight")
        options = {"temperature": temperature, "outputs": ("entropy",) if return_entropy else ()}
        found = linear.unrounded_loss(_input, weight, target, "none", ignore_index, options, names=names)
        return (found["loss"], found["entropy"]) if return_entropy else found["loss"]
