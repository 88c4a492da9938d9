"""Compare losses whose targets are probabilities of all classes with torch's own, and their gradients with autograd."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional

import ascend_grad as ag
import ascend_grad.torch as agt

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def problem(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and probabilities that add up to 1 over the classes."""
    random = torch.Generator().manual_seed(sum(shape))
    x = 3 * torch.randn(shape, generator=random, dtype=torch.float64)
    q = torch.rand(shape, generator=random, dtype=torch.float64)
    return x.to(dtype).requires_grad_(), (q / q.sum(1 if len(shape) > 1 else 0, keepdim=True)).to(dtype)


@pytest.mark.parametrize("shape", [(7,), (5, 1), (40, 9), (3, 300), (4, 6, 5, 2), (2, 70, 33)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
@pytest.mark.parametrize("has_weight", [False, True])
def test_the_loss_and_its_gradient_are_those_of_torch(shape, reduction, label_smoothing, has_weight):
    x, q = problem(shape)
    weight = torch.linspace(0.5, 2, x.shape[1 if x.dim() > 1 else 0], dtype=torch.float64) if has_weight else None
    options = {"reduction": reduction, "label_smoothing": label_smoothing, "weight": weight}
    found, right = agt.cross_entropy(x, q, **options), functional.cross_entropy(x, q, **options)
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-14)
    upstream = torch.linspace(-1, 1, right.numel(), dtype=torch.float64).reshape(right.shape) + 0.5
    ours, theirs = (torch.autograd.grad(each, x, upstream)[0] for each in (found, right))
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize(("dtype", "of_target"), list(itertools.product(DTYPES, DTYPES)))
def test_dtypes_and_strides(dtype, of_target):
    x, q = problem((30, 50))
    steps = x.detach().to(dtype).t().contiguous().t().requires_grad_()
    found = agt.cross_entropy(steps, q.to(of_target).flip(0).flip(0))
    right = functional.cross_entropy(steps.double(), q.to(of_target).double())
    error = 1e-2 if dtype.itemsize == 2 else 1e-5
    torch.testing.assert_close(found.double(), right, rtol=error, atol=0)
    ours, theirs = (torch.autograd.grad(each, steps)[0] for each in (found, right))
    torch.testing.assert_close(ours, theirs, rtol=error, atol=error / 50)


def test_gradcheck_with_outputs_and_options():
    x, q = problem((4, 5))
    options = {"temperature": torch.linspace(0.5, 2, 4), "lse_square_scale": 0.1, "token_weight": torch.rand(4)}

    def function(x):
        result = agt.cross_entropy(x, q, outputs=("lse", "entropy"), reduction="none", **options)
        return result.loss, result.lse, result.entropy

    assert torch.autograd.gradcheck(function, x)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("rows", [(12,), ()])
def test_linear(reduction, rows):
    random = torch.Generator().manual_seed(1)
    x, w, b = (
        torch.randn(size, generator=random, dtype=torch.float64, requires_grad=True)
        for size in ((*rows, 5), (9, 5), (9,))
    )
    q = torch.rand((*rows, 9), generator=random, dtype=torch.float64)
    q = q / q.sum(-1, keepdim=True)
    options = {"reduction": reduction, "label_smoothing": 0.1, "weight": torch.linspace(0.5, 1, 9, dtype=torch.float64)}
    found = agt.linear_cross_entropy(x, w, q, linear_bias=b, **options)
    right = functional.cross_entropy(x @ w.T + b, q, **options)
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-14)
    for ours, theirs in zip(*(torch.autograd.grad(each.sum(), (x, w, b)) for each in (found, right))):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-14)
    result = agt.linear_cross_entropy(x, w, q, outputs=("lse",), reduction=reduction)
    (gradient,) = torch.autograd.grad(result.loss.sum() + result.lse.sum(), x)
    z = x @ w.T
    (right,) = torch.autograd.grad(functional.cross_entropy(z, q, reduction=reduction).sum() + z.logsumexp(-1).sum(), x)
    torch.testing.assert_close(gradient, right, rtol=1e-10, atol=1e-13)


def test_a_compiled_loss():
    x, q = problem((6, 8), torch.float32)
    torch.library.opcheck(
        torch.ops.ascend_grad.cross_entropy,
        agt.loss_operators.CROSS_ENTROPY.arguments(
            {
                **agt.loss_operators.NUMBERS,
                "input": x,
                "target": q,
                "dim": 1,
                "reduction": "mean",
                "ignore_index": -100,
                "input_grad": True,
                "outputs": [],
            }
        ),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_what_is_refused():
    x, q = problem((4, 5))
    w = torch.zeros(5, 5, dtype=torch.float64)
    for function, arguments in ((agt.cross_entropy, (x,)), (agt.linear_cross_entropy, (x, w))):
        with pytest.raises(NotImplementedError, match="target: the loss has no gradient for it"):
            function(*arguments, q.clone().requires_grad_())
        with pytest.raises(ag.ParamInvalidError, match=r"target: expected shape \(4, 5\), as floating targets"):
            function(*arguments, q[:, :4])
        with pytest.raises(
            ag.ParamInvalidError, match="outputs: expected no output of a single target, as target holds"
        ):
            function(*arguments, q, outputs=("log_prob",))
