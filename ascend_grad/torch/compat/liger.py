"""The cross-entropy losses of Liger Kernel, with their signatures."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar, overload

import torch

from ...arguments import integer, real_number, shown, truth_value
from ...errors import ParamInvalidError, ParamTypeError
from .. import cross_entropy, positions
from .. import linear_loss as linear
from ..loss import check_options
from ..loss_operators import IGNORE_INDEX
from ..operators import accumulator
from ..outputs import Computed
from ..tensors import check_tensors

__all__ = [
    "CrossEntropyOutput",
    "LigerCrossEntropyFunction",
    "LigerCrossEntropyLoss",
    "LigerFusedLinearCrossEntropyFunction",
    "LigerFusedLinearCrossEntropyLoss",
    "LigerFusedLinearScaledCrossEntropyFunction",
    "liger_cross_entropy",
    "liger_fused_linear_cross_entropy",
]


class CrossEntropyOutput(NamedTuple):
    """The loss and the requested results of a function of this module. Other results are None."""

    # As in `ascend_grad.LossResult`, a result that may be None has the type Any, too.
    #: The loss. That of a linear layer is float32, or float64 if the input is float64; that of logits has their dtype.
    loss: torch.Tensor
    #: The term of the squared lse in the loss, in the dtype of the input, without a gradient.
    z_loss: torch.Tensor | Any = None
    #: The mean of ``predicted == target`` over the rows that are not ignored, float32, NaN if every row is ignored; the
    #: rows' numbers without a reduction.
    token_accuracy: torch.Tensor | Any = None
    #: The class with the largest logit of each row, int64; -1 for ignored rows.
    predicted_tokens: torch.Tensor | Any = None


_P = ParamSpec("_P")
_R = TypeVar("_R")


def _arguments_of(
    function: Callable[Concatenate[Any, _P], Any], input: str = "input"
) -> Callable[[Callable[..., _R]], Callable[_P, _R]]:
    """Return a decorator that gives a function the signature of another one, without its first parameter.

    `input` is the name of the parameter after that.
    """

    def decorate(decorated: Any) -> Any:
        of_function = inspect.signature(function)
        _, first, *others = of_function.parameters.values()
        decorated.__signature__ = of_function.replace(parameters=[first.replace(name=input), *others])
        return decorated

    return decorate


def _check_kinds(operator: str, accum_dtype: object = None, **flags: object) -> None:
    for name, value in flags.items():
        truth_value(value, name, operator)
    if not (accum_dtype is None or isinstance(accum_dtype, torch.dtype)):
        message = f"accum_dtype: expected None or a torch.dtype, got {shown(accum_dtype)}"
        raise ParamTypeError(message, operator=operator)


#: Settings of the modules that are options of the losses.
_OF_LOSSES = ("ignore_index", "lse_square_scale", "label_smoothing", "reduction", "softcap")


class _Loss(torch.nn.Module):
    """A module whose attributes are settings of a loss."""

    def __init__(self, operator: str, weight_name: str, weight: torch.Tensor | None, **settings: Any):
        super().__init__()
        setattr(self, weight_name, weight)
        for name, value in settings.items():
            setattr(self, name, value)
        self._names = tuple(settings)
        _check_kinds(operator, **{name: value for name, value in settings.items() if name not in _OF_LOSSES})
        check_options(operator, **{name: settings[name] for name in _OF_LOSSES})

    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}


def _outputs(with_lse: bool, with_predicted: bool) -> tuple[Literal["lse", "predicted"], ...]:
    """Return the names of the outputs that the requested results are computed from."""
    return (*(("lse",) if with_lse else ()), *(("predicted",) if with_predicted else ()))


def _results(
    found: Computed,
    input: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    reduction: str,
    square_scale: float | None,
    with_accuracy: bool,
    with_predicted: bool,
    scaling: torch.Tensor | None = None,
) -> CrossEntropyOutput:
    """Return the loss with the requested results. `scaling` has a factor for each row."""
    z_loss = accuracy = None
    counted = target != ignore_index
    if square_scale is not None:
        squares = square_scale * found["lse"].detach() ** 2
        squares = squares if scaling is None else squares * scaling
        if reduction != "none":
            squares = squares.sum()
        if reduction == "mean":
            squares = squares / counted.sum().clamp(min=1)
        z_loss = squares.to(input.dtype)
    if with_accuracy:
        correct = ((found["predicted"] == target) & counted).to(torch.float32)
        accuracy = correct if reduction == "none" else correct.sum() / counted.sum()
    return CrossEntropyOutput(found["loss"], z_loss, accuracy, found["predicted"] if with_predicted else None)


def _loss_alone_or_all(result: CrossEntropyOutput) -> torch.Tensor | CrossEntropyOutput:
    return result if any(each is not None for each in result[1:]) else result.loss


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
    _check_kinds(
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
        "outputs": _outputs(return_z_loss, return_token_accuracy or return_predicted_tokens),
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
    return _results(
        found, input, target, ignore_index, reduction, lse_square_scale if return_z_loss else None,
        return_token_accuracy, return_predicted_tokens, probabilities
    )  # fmt: skip


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
    _check_kinds(
        operator,
        return_z_loss=return_z_loss,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
    )
    check_tensors(operator, **{input_name: input}, target=target)
    if input.dim() != 2:
        message = f"{input_name}: expected shape (BT, V), got {tuple(input.shape)}"
        raise ParamInvalidError(message, operator=operator)
    logits = input
    if softcap is not None:
        cap = real_number(softcap, "softcap", operator)
        if not 0 < cap < float("inf"):
            raise ParamInvalidError(f"softcap: expected a positive finite number, got {cap}", operator=operator)
        logits = cap * torch.tanh(input.to(accumulator(input)) / cap)
    options = {"class_weight": weight, "label_smoothing": label_smoothing, "lse_square_scale": lse_square_scale}
    outputs = _outputs(return_z_loss, return_token_accuracy or return_predicted_tokens)
    found = cross_entropy.unrounded_loss(
        logits, target, options, ignore_index, reduction, outputs, operator=operator, input_name=input_name
    )
    if reduction == "mean":
        found["loss"] = torch.where((target != ignore_index).any(), found["loss"], 0)
    found["loss"] = found["loss"].to(input.dtype)
    return _results(
        found, input, target, ignore_index, reduction, lse_square_scale if return_z_loss else None,
        return_token_accuracy, return_predicted_tokens
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
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> CrossEntropyOutput: ...


@_arguments_of(_fused_loss)
def liger_fused_linear_cross_entropy(*arguments: Any, **settings: Any) -> torch.Tensor | CrossEntropyOutput:
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
    return _loss_alone_or_all(_fused_loss(_FUSED_NAMES, *arguments, **settings))


_FUSED_NAMES = linear.Names(
    "compat.liger.liger_fused_linear_cross_entropy", weight="weight", class_weight="ce_weight", bias="bias"
)


class LigerFusedLinearCrossEntropyLoss(_Loss):
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
        return _loss_alone_or_all(
            _fused_loss(_MODULE_NAMES, _input, lin_weight, target, bias, self.ce_weight, **self._settings())
        )


_MODULE_NAMES = linear.Names(
    "compat.liger.LigerFusedLinearCrossEntropyLoss", "_input", "lin_weight", class_weight="ce_weight", bias="bias"
)


class LigerFusedLinearCrossEntropyFunction:
    """The loss of `liger_fused_linear_cross_entropy` with all results in a tuple.

    Like the class with the same name in Liger Kernel, it is used by its method `apply` alone.
    """

    @staticmethod
    @_arguments_of(_fused_loss, "_input")
    def apply(*arguments: Any, **settings: Any) -> tuple[torch.Tensor, Any, Any, Any]:
        """Compute the loss of a linear layer.

        The arguments are as in `liger_fused_linear_cross_entropy`.

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

    Like the class with the same name in Liger Kernel, it is used by its method `apply` alone.
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
        options = {"temperature": temperature, "outputs": ("entropy",) if return_entropy else ()}
        found = linear.unrounded_loss(_input, weight, target, "none", ignore_index, options, names=names)
        return (found["loss"], found["entropy"]) if return_entropy else found["loss"]


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

    Notes
    -----
    With `softcap`, the bounded logits are stored in float32 (float64 if `input` is float64).

    Examples
    --------
    >>> import torch
    >>> from ascend_grad.torch.compat.liger import liger_cross_entropy
    >>> liger_cross_entropy(torch.zeros(2, 8), torch.tensor([7, -100]), return_token_accuracy=True).token_accuracy
    tensor(0.)
    """
    operator = "compat.liger.liger_cross_entropy"
    linear.refuse(operator, size_average=size_average, reduce=reduce)
    return _loss_alone_or_all(
        _loss_of_logits(
            (operator, "input"), input, target, weight, ignore_index, lse_square_scale, label_smoothing, reduction,
            softcap, return_z_loss, return_token_accuracy, return_predicted_tokens
        )
    )  # fmt: skip


class LigerCrossEntropyLoss(_Loss):
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
        return _loss_alone_or_all(
            _loss_of_logits((_LOGITS_MODULE, "_input"), _input, target, self.weight, **self._settings())
        )


_LOGITS_MODULE = "compat.liger.LigerCrossEntropyLoss"


class LigerCrossEntropyFunction:
    """The loss of `liger_cross_entropy` with all results in a tuple.

    Like the class with the same name in Liger Kernel, it is used by its method `apply` alone.
    """

    @staticmethod
    @_arguments_of(_loss_of_logits, "_input")
    def apply(*arguments: Any, **settings: Any) -> tuple[torch.Tensor, Any, Any, Any]:
        """Compute the loss of logits.

        The arguments are as in `liger_cross_entropy`, without `size_average` and `reduce`.

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
