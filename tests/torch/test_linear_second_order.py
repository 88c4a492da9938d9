"""Test second derivatives of the loss of a linear layer with respect to weight and bias, by autograd and transforms."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import ascend_grad.torch as agt
from ascend_grad.torch.loss_operators import LINEAR, NUMBERS

REFUSED = "linear_cross_entropy: the gradient cannot be differentiated once more"
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def problem_of(dtype: torch.dtype, shape: tuple[int, int, int] = (7, 5, 4)):
    """Make an input, weight, bias, targets with an ignored one, and vectors of the shapes of weight and bias."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    rows, classes, features = shape
    target = torch.randint(0, classes, (rows,), generator=generator)
    target[1] = -100
    x, weight, bias = normal(rows, features), normal(classes, features), normal(classes)
    return x, weight.requires_grad_(), bias.requires_grad_(), target, normal(classes, features), normal(classes)


def formula(x, weight, target, linear_bias=None, **options):
    return functional.cross_entropy(functional.linear(x, weight, linear_bias), target, **options)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_double_backward(reduction, dtype):
    """Derivatives with respect to weight, bias and the upstream gradient equal the derivatives of PyTorch's loss."""
    x, weight, bias, target, vector, vector_bias = problem_of(dtype)
    found = []
    for function, kind in ((agt.linear_cross_entropy, dtype), (formula, torch.float64)):
        leaves = [each.detach().to(kind).requires_grad_() for each in (weight, bias)]
        above = torch.tensor(0.7, dtype=kind, requires_grad=reduction != "none")
        options = {"reduction": reduction, "label_smoothing": 0.1}
        loss = function(x.to(kind), leaves[0], target, linear_bias=leaves[1], **options)
        gradients = torch.autograd.grad((loss * above).sum(), leaves, create_graph=True)
        total = sum((a * b.to(kind)).sum() for a, b in zip(gradients, (vector, vector_bias)))
        leaves += [above] if reduction != "none" else []
        found.append((*gradients, *torch.autograd.grad(total, leaves)))
    for own, right in zip(*found, strict=True):
        largest = float(right.detach().abs().max())
        torch.testing.assert_close(own.double(), right.double(), rtol=0, atol=TOLERANCES[dtype] * max(largest, 1))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"softcap": 2.0, "logit_scale": 0.7},
        {"lse_square_scale": 0.1, "label_smoothing": 0.2, "reduction": "sum"},
        {"temperature": torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)},
        {"token_weight": torch.tensor([0.5, 2.0, 0.0], dtype=torch.float64), "denominator": 3.0},
    ],
    ids=str,
)
def test_options_by_finite_differences(options):
    x, weight, bias, *_ = problem_of(torch.float64, (3, 5, 2))
    target = torch.tensor([0, -100, 4])
    for each in (target, torch.rand(3, 5, dtype=torch.float64)):

        def loss(weight, bias, target=each):
            return agt.linear_cross_entropy(x, weight, target, linear_bias=bias, **options)

        assert torch.autograd.gradgradcheck(loss, (weight, bias))
    assert torch.autograd.gradgradcheck(
        lambda weight: agt.linear_cross_entropy(x, weight, target, **options), (weight,)
    )


def test_functions_and_transforms_of_second_order():
    x, weight, _, target, vector, _ = problem_of(torch.float64)
    weight = weight.detach()

    def own(weight):
        return agt.linear_cross_entropy(x, weight, target, label_smoothing=0.1)

    def right(weight):
        return formula(x, weight, target, label_smoothing=0.1)

    hessian = torch.autograd.functional.hessian(right, weight)
    for found in (
        torch.autograd.functional.hessian(own, weight),
        torch.autograd.functional.hessian(own, weight, vectorize=True),
        torch.func.jacrev(torch.func.grad(own))(weight),
    ):
        torch.testing.assert_close(found, hessian)
    for function in (torch.autograd.functional.hvp, torch.autograd.functional.vhp):
        torch.testing.assert_close(function(own, weight, vector), function(right, weight, vector))
    several = torch.stack([weight, 2 * weight, -weight])

    def penalty(function):
        return torch.func.grad(lambda weight: torch.func.grad(function)(weight).square().sum())

    torch.testing.assert_close(*(torch.vmap(penalty(function))(several) for function in (own, right)))


def test_what_has_no_second_derivative_raises():
    x, weight, bias, target, vector, _ = problem_of(torch.float64)
    (gradient,) = torch.autograd.grad(agt.linear_cross_entropy(x, weight, target), weight, create_graph=True)
    (product,) = torch.autograd.grad((gradient * vector).sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match=REFUSED):  # the third order
        product.sum().backward()
    found = agt.linear_cross_entropy(x, weight, target, linear_bias=bias, outputs=("lse",))
    (gradient,) = torch.autograd.grad(found.lse.sum() + found.loss, weight, create_graph=True)
    with pytest.raises(RuntimeError, match=REFUSED):  # gradients of outputs
        gradient.sum().backward()
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(agt.linear_cross_entropy(x, weight, target), weight, create_graph=True)
    with pytest.raises(RuntimeError, match=REFUSED):  # an input with a gradient
        gradient.sum().backward()


def test_the_registered_product():
    x, weight, bias, target, vector, vector_bias = problem_of(torch.float64)
    given = {"input": x, "weight": weight.detach(), "bias": bias.detach(), "target": target, "reduction": "mean"}
    given |= {"ignore_index": -100, "outputs": [], "filter_eps": 0.0, **dict.fromkeys(LINEAR.wanted, False)}
    arguments = LINEAR.arguments({**NUMBERS, **given})
    operator = torch.ops.ascend_grad.linear_cross_entropy_hvp.default
    torch.library.opcheck(operator, [*arguments, vector, vector_bias])
    # The Hessian is symmetric.
    above = torch.rand_like(vector), torch.rand_like(vector_bias)
    vectors = vector.requires_grad_(), vector_bias.requires_grad_()
    found = torch.autograd.grad(operator(*arguments, *vectors), vectors, above)
    torch.testing.assert_close(found, operator(*arguments, *above))
