"""Make problems of the losses in `ascend_grad.torch.compat`, and compare their results with torch's in float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch_oracles import assert_close

B, T, H, V = 3, 6, 5, 11
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    target = torch.randint(0, V, (B, T))
    target[1, 2:4] = -100
    return torch.randn(B, T, H), torch.randn(V, H), target


def check(ours: Callable, right: Callable, tensors: list[torch.Tensor], dtype: torch.dtype) -> None:
    """Compare results and their gradients, for random upstream gradients of all results, with those in float64."""
    leaves = [each.to(dtype).requires_grad_() for each in tensors]
    wide = [each.detach().double().requires_grad_() for each in leaves]
    values, rights = ours(*leaves), right(*wide)
    assert len(values) == len(rights)
    above = [torch.randn_like(each) for each in rights]
    for value, expected in zip(values, rights):
        assert value.shape == expected.shape
        assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert_close(value, expected.detach(), value.dtype, steps=10)
    grads = torch.autograd.grad(values, leaves, [each.to(value.dtype) for each, value in zip(above, values)])
    for grad, expected in zip(grads, torch.autograd.grad(rights, wide, above), strict=True):
        assert grad.dtype == dtype
        assert_close(grad, expected, dtype, steps=20)
