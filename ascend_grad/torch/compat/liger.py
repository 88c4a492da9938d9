"""The fused linear losses of Liger Kernel, with their signatures."""

from __future__ import annotations

from typing import Literal, NamedTuple, cast

import torch

from ...arguments import integer, shown, truth_value
from ...errors import ParamInvalidError, ParamTypeError
from .. import linear
from ..outputs import Computed

__all__ = [
    "CrossEntropyOutput",
    "LigerFusedLinearCrossEntropyLoss",
    "LigerFusedLinearScaledCrossEntropyFunction",
    "liger_fused_linear_cross_entropy",
]


class CrossEntropyOutput(NamedTuple):
    """The loss and the requested results of `liger_fused_linear_cross_entropy`. Other results are None."""

    #: The loss, float32, or float64 if the input is float64.
    loss: torch.Tensor
    #: The term of the squared lse in the loss, without a gradient.
    z_loss: torch.Tensor | None = None
    #: The mean of ``predicted == target`` over the rows that are not ignored; the rows' numbers without a reduction.
    token_accuracy: torch.Tensor | None = None
    #: The class with the largest logit of each row, int64; -1 for ignored rows.
    predicted_tokens: torch.Tensor | None = None


class _Settings(NamedTuple):
    """The options of `liger_fused_linear_cross_entropy`."""

    ignore_index: int
    lse_square_scale: float
    label_smoothing: float
    reduction: Literal["mean", "sum", "none"]
    softcap: float | None
    return_z_loss: bool
    accum_dtype: torch.dtype | None
    use_token_scaling: bool
    return_token_accuracy: bool
    return_predicted_tokens: bool


def _check_settings(operator: str, settings: _Settings) -> None:
    for name in "return_z_loss", "use_token_scaling", "return_token_accuracy", "return_predicted_tokens":
        truth_value(getattr(settings, name), name, operator)
    if not (settings.accum_dtype is None or isinstance(settings.accum_dtype, torch.dtype)):
        expected = f"None or a torch.dtype, got {shown(settings.accum_dtype)}"
        raise ParamTypeError(f"accum_dtype: expected {expected}", operator=operator)


def _loss(
    names: linear.Names,
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    ce_weight: torch.Tensor | None,
    settings: _Settings,
) -> torch.Tensor | CrossEntropyOutput:
    if settings.accum_dtype not in (None, torch.float32) and settings.accum_dtype != getattr(input, "dtype", None):
        linear.refuse(names.operator, accum_dtype=settings.accum_dtype)
    requested = ["lse"] if settings.return_z_loss else []
    if settings.return_token_accuracy or settings.return_predicted_tokens:
        requested.append("predicted")
    options = linear.Options(
        linear_bias=bias,
        weight=ce_weight,
        label_smoothing=settings.label_smoothing,
        lse_square_scale=settings.lse_square_scale,
        softcap=settings.softcap,
        outputs=tuple(requested),
    )
    probabilities = None
    if settings.use_token_scaling:
        probabilities = _target_probabilities(names, input, weight, target, settings.ignore_index, options)
    if probabilities is not None and settings.reduction == "mean":
        found = _scaled_mean(names, input, weight, target, settings.ignore_index, options, probabilities)
    else:
        found = linear.unrounded_loss(
            input, weight, target, settings.reduction, settings.ignore_index,
            options._replace(token_weight=probabilities), names=names, zero_if_empty=True,
        )  # fmt: skip
    result = CrossEntropyOutput(found.loss)
    counted = target != settings.ignore_index
    if settings.return_z_loss:
        squares = settings.lse_square_scale * cast(torch.Tensor, found.lse).detach() ** 2
        squares = squares if probabilities is None else squares * probabilities
        result = result._replace(z_loss=_reduced(squares, counted, settings.reduction))
    if settings.return_token_accuracy:
        correct = ((found.predicted == target) & counted).to(torch.float32)
        how: Literal["mean", "none"] = "none" if settings.reduction == "none" else "mean"
        result = result._replace(token_accuracy=_reduced(correct, counted, how))
    if settings.return_predicted_tokens:
        result = result._replace(predicted_tokens=found.predicted)
    is_alone = not (settings.return_z_loss or settings.return_token_accuracy or settings.return_predicted_tokens)
    return result.loss if is_alone else result


def _target_probabilities(
    names: linear.Names,
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    options: linear.Options,
) -> torch.Tensor:
    """Return the probability of each target, without a gradient."""
    alone = linear.Options(linear_bias=options.linear_bias, softcap=options.softcap, outputs=("log_prob",))
    with torch.no_grad():
        found = linear.unrounded_loss(input, weight, target, "sum", ignore_index, alone, names=names)
    return cast(torch.Tensor, found.log_prob).exp()


def _scaled_mean(
    names: linear.Names,
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    options: linear.Options,
    probabilities: torch.Tensor,
) -> Computed:
    """Return the mean of losses that are multiplied by probabilities; divisors do not contain the probabilities.

    The cross-entropy is divided by the class weights of the targets, and the squared lse by the number of rows.
    """
    counted = target != ignore_index
    rows = counted.sum()
    if options.weight is None:
        of_row, of_square = probabilities / rows, None
    else:
        of_target = options.weight.to(probabilities.dtype)[torch.where(counted, target, 0)] * counted
        of_row, of_square = probabilities / of_target.sum(), probabilities / rows
    if of_square is None or not options.lse_square_scale:
        return linear.unrounded_loss(
            input, weight, target, "sum", ignore_index, options._replace(token_weight=of_row), names=names
        )
    changed = options._replace(
        token_weight=of_row, lse_square_scale=0.0, outputs=tuple(dict.fromkeys((*options.outputs, "lse")))
    )
    found = linear.unrounded_loss(input, weight, target, "sum", ignore_index, changed, names=names)
    squares = options.lse_square_scale * cast(torch.Tensor, found.lse) ** 2 * of_square
    return found._replace(loss=found.loss + torch.where(counted, squares, 0).sum())


def _reduced(values: torch.Tensor, counted: torch.Tensor, reduction: str) -> torch.Tensor:
    """Reduce numbers of rows, which are 0 for ignored rows. A mean over no rows is 0."""
    if reduction == "none":
        return values
    return values.sum() if reduction == "sum" else values.sum() / counted.sum().clamp(min=1)


def liger_fused_linear_cross_entropy(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
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
) -> torch.Tensor | CrossEntropyOutput:
    """Compute the cross-entropy loss of a linear layer, like Liger Kernel's ``liger_fused_linear_cross_entropy``.

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
    settings = _Settings(
        ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss, accum_dtype,
        use_token_scaling, return_token_accuracy, return_predicted_tokens
    )  # fmt: skip
    names = linear.Names(
        "compat.liger.liger_fused_linear_cross_entropy", weight="weight", class_weight="ce_weight", bias="bias"
    )
    _check_settings(names.operator, settings)
    return _loss(names, input, weight, target, bias, ce_weight, settings)


class LigerFusedLinearCrossEntropyLoss(torch.nn.Module):
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
        super().__init__()
        self.ce_weight = ce_weight
        self.settings = _Settings(
            ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss, accum_dtype,
            use_token_scaling, return_token_accuracy, return_predicted_tokens
        )  # fmt: skip
        _check_settings(_MODULE_NAMES.operator, self.settings)

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
        return _loss(_MODULE_NAMES, _input, lin_weight, target, bias, self.ce_weight, self.settings)


_MODULE_NAMES = linear.Names(
    "compat.liger.LigerFusedLinearCrossEntropyLoss", "_input", "lin_weight", class_weight="ce_weight", bias="bias"
)


class LigerFusedLinearScaledCrossEntropyFunction:
    """Negative log-probabilities of tokens with a temperature, and their entropies, for reinforcement learning.

    Like the class with the same name in Liger Kernel, it is used by its method `apply` alone.
    """

    @staticmethod
    def apply(
        _input: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        temperature: float = 1.0,
        ignore_index: int = linear.IGNORE_INDEX,
        m_tiles_per_cluster: int = 1,
        return_entropy: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute the negative log-probability of each target, and on request the entropy of each row.

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
            Whether to return the entropy, too.

        Returns
        -------
        nll : torch.Tensor, shape (BT,)
            The negative log-probabilities, float32, or float64 if `_input` is float64.
        entropy : torch.Tensor, shape (BT,)
            With `return_entropy` alone: the entropies in nats. Both results are differentiable.

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
        options = linear.Options(temperature=temperature, outputs=("entropy",) if return_entropy else ())
        found = linear.unrounded_loss(_input, weight, target, "none", ignore_index, options, names=names)
        return found.loss if found.entropy is None else (found.loss, found.entropy)
