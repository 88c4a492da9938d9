"""Results, settings and signatures that Liger's losses of logits and of linear layers share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar

import torch

from ....arguments import shown, truth_value
from ....errors import ParamTypeError
from ....operators.options import OPTIONS
from ...loss import check_options
from ...outputs import Computed


class CrossEntropyOutput(NamedTuple):
    """The loss and the requested results of a function of this module. Other results are None."""

    # As in `ascend_grad.LossResult`, a result that may be None has the type Any.
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


def arguments_of(
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


def check_kinds(operator: str, accum_dtype: object = None, **flags: object) -> None:
    for name, value in flags.items():
        truth_value(value, name, operator)
    if not (accum_dtype is None or isinstance(accum_dtype, torch.dtype)):
        message = f"accum_dtype: expected None or a torch.dtype, got {shown(accum_dtype)}"
        raise ParamTypeError(message, operator=operator)


#: Settings of the modules that are arguments of the losses.
_OF_LOSSES = ("ignore_index", "reduction", *OPTIONS)


class LossModule(torch.nn.Module):
    """A module whose attributes are settings of a loss."""

    def __init__(self, operator: str, weight_name: str, weight: torch.Tensor | None, **settings: Any):
        super().__init__()
        setattr(self, weight_name, weight)
        for name, value in settings.items():
            setattr(self, name, value)
        self._names = tuple(settings)
        check_kinds(operator, **{name: value for name, value in settings.items() if name not in _OF_LOSSES})
        check_options(operator, **{name: value for name, value in settings.items() if name in _OF_LOSSES})

    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}


def outputs_of(with_lse: bool, with_predicted: bool) -> tuple[Literal["lse", "predicted"], ...]:
    """Return the names of the outputs that the requested results are computed from."""
    return (*(("lse",) if with_lse else ()), *(("predicted",) if with_predicted else ()))


def results_of(
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


def loss_alone_or_all(result: CrossEntropyOutput) -> torch.Tensor | CrossEntropyOutput:
    loss, *others = result
    return loss if all(each is None for each in others) else result
