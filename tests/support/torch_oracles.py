"""Compute values and gradients of torch's functions in float64, and compare the library's results with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812

#: Allowed relative errors of results: a half unit in the last place, and the errors of float32 or float64 sums.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2**-11 + 1e-5, torch.bfloat16: 2**-8 + 1e-5}


def _composed(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int | None = None,
    **keywords,
) -> torch.Tensor:
    ignored = -100 if ignore_index is None else ignore_index
    return F.cross_entropy(F.linear(input, linear_weight), target, ignore_index=ignored, **keywords)


#: torch's own function, which exists from torch 2.13 on.
linear_cross_entropy = getattr(F, "linear_cross_entropy", _composed)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, *, steps: int = 1) -> None:
    """Check that a value is within `steps` roundings to `dtype` of a float64 value, relative to the largest element."""
    tolerance = steps * TOLERANCES[dtype]
    largest = float(expected.detach().abs().max()) if expected.numel() else 1.0
    torch.testing.assert_close(actual.detach().double(), expected.detach(), rtol=tolerance, atol=tolerance * largest)


def value_and_gradients(
    function: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor], grad_output: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """Return a function's value at copies of these tensors, and its gradients."""
    leaves = [tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_() for tensor in tensors]
    value = function(*leaves)
    return value, *torch.autograd.grad(value, leaves, grad_output)


def pending() -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tensor on a device whose work is not submitted yet, and its values."""
    x = torch.randn(64, 65)
    there = x.to("npu")
    return torch.softmax(there, -1), torch.softmax(x.double(), -1)
