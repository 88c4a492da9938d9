"""Test several upstream gradients in one backward call, by torch's older batching.

The options `is_grads_batched`, `vectorize` and `check_batched_grad` use the older batching. It is independent of
`torch.vmap` and of the transforms of `torch.func`.
"""

from __future__ import annotations

import pytest
import torch
from torch_oracles import assert_close, linear_cross_entropy

import ascend_grad.torch as agt

#: Older versions of torch warn of a deprecated function that their own batching calls.
pytestmark = pytest.mark.filterwarnings("ignore:Please use `torch.vmap`:FutureWarning")

MASK = torch.arange(20).reshape(1, 1, 4, 5) % 3 == 0
TARGET = torch.tensor([1, 2, -100, 6])
CLASS_WEIGHT = torch.arange(7, dtype=torch.float64)

#: Each name maps to this library's function, torch's function, and the shape of the argument.
ROWWISE = {
    "softmax": (lambda x: agt.softmax(x, 0), lambda x: torch.softmax(x, 0), (4, 3)),
    "log_softmax": (agt.log_softmax, lambda x: torch.log_softmax(x, -1), (4, 3)),
    "softmax of a scalar": (agt.softmax, lambda x: torch.softmax(x, -1), ()),
    "scaled_masked_softmax": (
        lambda x: agt.scaled_masked_softmax(x, MASK, 0.5),
        lambda x: torch.softmax((0.5 * x).masked_fill(MASK, -10000.0), -1),
        (2, 1, 4, 5),
    ),
    # Both tensors depend on x, so that both gradients are tested. Halving and a change of sign round in no dtype.
    "softmax_backward": (
        lambda x: agt.softmax_backward(x, -x / 2, 0),
        lambda x: (x - (x * -x / 2).sum(0, keepdim=True)) * -x / 2,
        (4, 3),
    ),
    "log_softmax_backward": (
        lambda x: agt.log_softmax_backward(x, -x / 2),
        lambda x: x - x.sum(-1, keepdim=True) * torch.exp(-x / 2),
        (4, 3),
    ),
    "softmax_backward of the output alone": (
        lambda x: agt.softmax_backward(torch.ones_like(x), x, 0),
        lambda x: (1 - x.sum(0, keepdim=True)) * x,
        (4, 3),
    ),
    "scaled_masked_softmax_backward": (
        lambda x: agt.scaled_masked_softmax_backward(x, -x / 2, MASK, 0.5),
        lambda x: ((x - (x * -x / 2).sum(-1, keepdim=True)) * -x / 4).masked_fill(MASK, 0),
        (2, 1, 4, 5),
    ),
}


def cut_cross_entropy(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor, **keywords) -> torch.Tensor:
    return agt.compat.cce.linear_cross_entropy(x, w, target, **keywords)


def liger(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor, *, weight=None, **keywords) -> torch.Tensor:
    return agt.compat.liger.LigerFusedLinearCrossEntropyLoss(weight, **keywords)(w, x, target)


LOSSES = {
    "linear_cross_entropy": (agt.linear_cross_entropy, {}),
    "a weight for each class": (agt.linear_cross_entropy, {"weight": CLASS_WEIGHT}),
    "label smoothing": (agt.linear_cross_entropy, {"weight": CLASS_WEIGHT, "label_smoothing": 0.1}),
    "cut cross-entropy": (cut_cross_entropy, {}),
    "Liger": (liger, {}),
    "Liger, a weight for each class": (liger, {"weight": CLASS_WEIGHT}),
}


def batched(value: torch.Tensor, tensors: list[torch.Tensor], **keywords) -> tuple[torch.Tensor, ...]:
    """Return the gradients of a value for three upstream gradients, computed in one batched call."""
    above = torch.linspace(-1, 2, 3 * value.numel(), dtype=value.dtype).reshape(3, *value.shape)
    return torch.autograd.grad(value, tensors, above, is_grads_batched=True, **keywords)


@pytest.mark.parametrize("name", ROWWISE)
def test_rowwise(name: str):
    ours, torchs, shape = ROWWISE[name]
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    for keywords in ({}, {"create_graph": True}):
        (grad,), (right,) = batched(ours(x), [x], **keywords), batched(torchs(x), [x], **keywords)
        assert_close(grad, right, x.dtype, steps=10)
    second, right_second = (torch.autograd.grad((each**2).sum(), x)[0] for each in (grad, right))
    assert_close(second, right_second, x.dtype, steps=100)
    assert_close(
        torch.autograd.functional.jacobian(ours, x, vectorize=True),
        torch.autograd.functional.jacobian(torchs, x),
        x.dtype,
        steps=10,
    )
    assert_close(
        torch.autograd.functional.hessian(lambda x: (ours(x) ** 2).sum(), x, vectorize=True),
        torch.autograd.functional.hessian(lambda x: (torchs(x) ** 2).sum(), x),
        x.dtype,
        steps=100,
    )
    assert torch.autograd.gradcheck(ours, x, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(ours, x, check_batched_grad=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ROWWISE)
def test_rowwise_forward(name: str, dtype: torch.dtype):
    ours, torchs, shape = ROWWISE[name]
    x = torch.randn(3, *shape).to(dtype)
    assert_close(torch._vmap_internals._vmap(ours)(x), torch.stack([torchs(each.double()) for each in x]), dtype)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str, reduction: str):
    loss, keywords = LOSSES[name]
    x, w = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in [(4, 3), (7, 3)])

    def ours(x, w):
        return loss(x, w, TARGET, reduction=reduction, **keywords)

    def torchs(x, w):
        return linear_cross_entropy(x, w, TARGET, reduction=reduction, **keywords)

    value, right = ours(x, w), torchs(x, w)
    # Backward computes the gradients again if it is called with create_graph.
    for more in ({"retain_graph": True}, {"create_graph": True}):
        for grad, expected in zip(batched(value, [x, w], **more), batched(right, [x, w], **more), strict=True):
            assert_close(grad, expected, x.dtype, steps=10)
    found = [torch.autograd.functional.jacobian(ours, (x, w), vectorize=True), torch.func.jacrev(ours, (0, 1))(x, w)]
    for jacobians in found:
        for each, expected in zip(jacobians, torch.autograd.functional.jacobian(torchs, (x, w)), strict=True):
            assert_close(each, expected, x.dtype, steps=10)
    assert torch.autograd.gradcheck(ours, (x, w), check_batched_grad=True)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_losses_of_other_dtypes(dtype: torch.dtype, reduction: str):
    x, w = (torch.randn(shape).to(dtype).requires_grad_() for shape in [(4, 3), (7, 3)])
    wide = [each.detach().double().requires_grad_() for each in (x, w)]
    grads = batched(agt.linear_cross_entropy(x, w, TARGET, reduction=reduction), [x, w])
    rights = batched(linear_cross_entropy(*wide, TARGET, reduction=reduction), wide)
    for grad, right in zip(grads, rights, strict=True):
        assert grad.dtype == dtype
        assert_close(grad, right, dtype, steps=6)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_second_order_of_the_loss(reduction: str, strategy: str):
    x, w = torch.randn(4, 3, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)

    def hessian(function) -> torch.Tensor:
        return torch.autograd.functional.hessian(
            lambda x, w: function(x, w, TARGET, reduction=reduction).sum(),
            (x, w),
            vectorize=True,
            outer_jacobian_strategy=strategy,
        )

    for found, right in zip(hessian(agt.linear_cross_entropy), hessian(linear_cross_entropy), strict=True):
        for own, expected in zip(found, right, strict=True):
            assert_close(own, expected, torch.float64, steps=20)
