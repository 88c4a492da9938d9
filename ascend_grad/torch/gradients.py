"""Gradients that functions of autograd return, scaled by an upstream gradient and not to be differentiated again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd import Function

from .tensors import are_readable


def second_order_error(operator: str) -> RuntimeError:
    """Return the error of a gradient that is differentiated."""
    return RuntimeError(f"{operator}: the gradient cannot be differentiated once more (create_graph=True)")


class _Gradients(Function):
    """Return gradients that depend on further tensors. Differentiating them raises."""

    generate_vmap_rule = True

    @staticmethod
    def forward(operator, count, *tensors):
        return tuple(each.view_as(each) for each in tensors[:count])

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.operator = inputs[0]

    @staticmethod
    def backward(ctx, *_):
        raise second_order_error(ctx.operator)


def without_second_order(
    operator: str, gradients: Sequence[torch.Tensor], arguments: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """Make gradients depend on the arguments of a loss, so that differentiating them raises instead of giving 0."""
    if not torch.is_grad_enabled():
        return gradients
    return _Gradients.apply(operator, len(gradients), *gradients, *arguments)


def without_third_order(
    operator: str, gradients: Sequence[torch.Tensor], arguments: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """Add zeros that depend on the arguments of a loss to second derivatives, so that a third order raises.

    Derivatives with respect to the vector of a product do not pass through the zeros.
    """
    if not torch.is_grad_enabled():
        return gradients
    zeros = without_second_order(operator, [torch.zeros_like(each) for each in gradients], arguments)
    return [each + zero for each, zero in zip(gradients, zeros)]


def scaled(gradients: Sequence[torch.Tensor], factor: torch.Tensor, in_place: bool) -> Sequence[torch.Tensor]:
    """Multiply gradients by one number. In place, a multiplication by 1 is skipped if the number is on the CPU."""
    if not in_place or torch.is_grad_enabled() or not are_readable((*gradients, factor)):
        return [gradient * factor for gradient in gradients]
    if not factor.is_cpu or factor.item() != 1:  # reading it from a device would wait
        for gradient in gradients:
            gradient.mul_(factor)
    return gradients
