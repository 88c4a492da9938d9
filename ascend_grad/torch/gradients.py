"""Gradients that functions of autograd return: whether they are differentiated, and errors for orders that are not."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.autograd import Function, forward_ad

from ..operators.options import OUTPUTS
from .loss_operators import ROWS_OF
from .operators import apply, register, register_gradient
from .tensors import are_plain, are_readable, are_transforms_active


def second_order_error(operator: str) -> RuntimeError:
    """Return the error of a gradient that is differentiated."""
    return RuntimeError(f"{operator}: the gradient cannot be differentiated once more (create_graph=True)")


#: Names of tensors for users, where the schemas of the losses have others.
_NAMES = {"class_weight": "weight", **{rows: name for name, rows in ROWS_OF.items()}}


def is_differentiated() -> bool:
    """Return whether the results of a backward pass may be differentiated, in reverse or in forward mode."""
    # The level of forward mode, -1 for none, is a private variable of torch. Without it, the slower path is taken.
    return torch.is_grad_enabled() or getattr(forward_ad, "_current_level", 0) >= 0 or are_transforms_active()


def moving_arguments(
    operator: str, problem: Mapping[str, Any], tangents: Sequence[torch.Tensor | None], differentiable: Collection[str]
) -> dict[str, torch.Tensor]:
    """Return the tangents of a loss's arguments by name, those that are not 0. Refuse tangents of other arguments.

    The tangents have the order of the problem. Outputs have no derivatives in forward mode.
    """
    moving = {name: each for name, each in zip(problem, tangents) if each is not None}
    for name in moving:
        if name not in differentiable:
            message = "the loss has no gradient for it, got a tensor with a tangent of forward-mode differentiation"
            raise NotImplementedError(f"{operator}: {_NAMES.get(name, name)}: {message}")
    outputs = [name for name in problem["outputs"] if OUTPUTS[name].has_gradient or name == "prob"]
    if moving and outputs:
        message = f"forward-mode derivatives of {' and '.join(outputs)} are not supported"
        raise NotImplementedError(f"{operator}: outputs: {message}")
    return moving


class _SecondOrderRaises:
    """Rules of a function of autograd whose context has the name of the operator: differentiating it raises."""

    @staticmethod
    def backward(ctx, *_):
        raise second_order_error(ctx.operator)

    @staticmethod
    def jvp(ctx, *_):
        raise second_order_error(ctx.operator)


class _Gradients(_SecondOrderRaises, Function):
    """Return gradients that depend on further tensors. Differentiating them raises."""

    generate_vmap_rule = True

    @staticmethod
    def forward(operator, count, *tensors):
        return tuple(each.view_as(each) for each in tensors[:count])

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.operator = inputs[0]


def without_second_order(
    operator: str, gradients: Sequence[torch.Tensor], arguments: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """Make gradients depend on the arguments of a loss, so that differentiating them raises instead of giving 0."""
    if not is_differentiated():
        return gradients
    return _Gradients.apply(operator, len(gradients), *gradients, *arguments)


def _zero_vmap(name: str, info: Any, in_dims: tuple, *arguments: Any) -> tuple[torch.Tensor, int | None]:
    return getattr(torch.ops.ascend_grad, name)(*arguments), in_dims[0]


#: An operator, as rules of forward mode cannot call functions of autograd within transforms. It has four arguments of
#: the loss, which may be None.
_ZERO = "zero_without_gradient"
_ARGUMENTS = 4
register(
    _ZERO,
    f"(Tensor like, {', '.join(f'Tensor? argument{i}' for i in range(_ARGUMENTS))}, str operator) -> Tensor",
    lambda like, *_: torch.zeros_like(like),
    lambda like, *_: torch.empty_like(like),
    _zero_vmap,
)


class _Zero(_SecondOrderRaises, Function):
    """Return zeros of the shape of the first tensor, which depend on the others. Differentiating them raises."""

    @staticmethod
    def forward(*arguments):
        if not are_plain(arguments):
            return getattr(torch.ops.ascend_grad, _ZERO)(*arguments)
        return torch.zeros_like(arguments[0])

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.operator = inputs[-1]


register_gradient(_ZERO, _Zero)


def without_third_order(
    operator: str, gradients: Mapping[str, torch.Tensor], arguments: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Add zeros that depend on the arguments of a loss to second derivatives, so that a third order raises.

    Derivatives with respect to the vector of a product do not pass through the zeros.
    """
    if not is_differentiated():
        return dict(gradients)
    depends = [*arguments, *[None] * (_ARGUMENTS - len(arguments))]
    return {
        name: each + apply(_Zero, each.new_zeros(each.shape), *depends, operator) for name, each in gradients.items()
    }


def complete_tangents(
    outputs: Sequence[torch.Tensor], tangents: Mapping[int, torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Return the tangents of all outputs of a function, from the tangents of some outputs by number.

    The other tangents are 0. torch takes None as the tangent of integers only.
    """
    return [
        (torch.zeros_like(each) if tangents.get(i) is None else tangents[i]) if each.is_floating_point() else None
        for i, each in enumerate(outputs)
    ]


def scaled(gradients: Sequence[torch.Tensor], factor: torch.Tensor, in_place: bool) -> Sequence[torch.Tensor]:
    """Multiply gradients by one number. In place, a multiplication by 1 is skipped if the number is on the CPU."""
    if not in_place or torch.is_grad_enabled() or not are_readable((*gradients, factor)):
        return [gradient * factor for gradient in gradients]
    if not factor.is_cpu or factor.item() != 1:  # reading it from a device would wait
        for gradient in gradients:
            gradient.mul_(factor)
    return gradients
