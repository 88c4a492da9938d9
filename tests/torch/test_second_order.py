"""Test second derivatives of the loss of logits: products of the Hessian and vectors, by autograd and transforms."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional

import ascend_grad.torch as agt
from ascend_grad.torch.loss_operators import CROSS_ENTROPY, NUMBERS

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # by torch's forward mode

REDUCTIONS = ("mean", "sum", "none")
TOLERANCES = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3}
THIRD = "cross_entropy: the gradient cannot be differentiated once more"


def problem_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0):
    """Make logits, targets with an ignored one, class weights and a vector."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    target = torch.randint(0, shape[1], shape[:1] + shape[2:], generator=generator)
    target.view(-1)[1] = -100
    weight = torch.rand(shape[1], generator=generator, dtype=torch.float64).to(torch.float64)
    return x, target, weight, torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(5, 7), (3, 4, 6)])
def test_double_backward(shape, reduction, dtype):
    """Derivatives with respect to the logits and to the upstream gradient equal the derivatives of PyTorch's loss."""
    x, target, weight, vector = problem_of(shape, dtype)
    above = torch.rand(target.shape if reduction == "none" else (), dtype=torch.float64).requires_grad_()
    found = []
    for function, leaf, classes in (
        (agt.cross_entropy, x, weight.to(torch.float32)),
        (functional.cross_entropy, x.detach().double().requires_grad_(), weight.to(torch.float32).double()),
    ):
        loss = function(leaf, target, weight=classes, reduction=reduction, label_smoothing=0.1)
        (gradient,) = torch.autograd.grad((loss * above).sum(), leaf, create_graph=True)
        found.append((gradient, *torch.autograd.grad((gradient * vector).sum(), (leaf, above))))
    for own, right in zip(*found):
        torch.testing.assert_close(own.double(), right, rtol=0, atol=20 * TOLERANCES[dtype])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"softcap": 2.0, "logit_scale": 0.7},
        {"lse_square_scale": 0.1, "label_smoothing": 0.2},
        {"temperature": torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)},
        {"token_weight": torch.tensor([0.5, 2.0, 0.0], dtype=torch.float64), "denominator": 3.0},
    ],
    ids=str,
)
def test_options_by_finite_differences(options):
    x = problem_of((3, 5), torch.float64)[0]
    target = torch.tensor([0, -100, 4])
    for each in (target, torch.rand(3, 5, dtype=torch.float64)):
        for reduction in REDUCTIONS:

            def loss(x, target=each, reduction=reduction):
                return agt.cross_entropy(x, target, reduction=reduction, **options)

            assert torch.autograd.gradcheck(loss, (x,), check_forward_ad=True)
            assert torch.autograd.gradgradcheck(loss, (x,), check_fwd_over_rev=True)


def test_functions_and_transforms_of_second_order():
    x, target, _, vector = problem_of((3, 4), torch.float64)
    x = x.detach()

    def own(x):
        return agt.cross_entropy(x, target, label_smoothing=0.1)

    def right(x):
        return functional.cross_entropy(x, target, label_smoothing=0.1)

    hessian = torch.autograd.functional.hessian(right, x)
    for found in (
        torch.autograd.functional.hessian(own, x),
        torch.autograd.functional.hessian(own, x, vectorize=True),
        torch.func.jacrev(torch.func.grad(own))(x),
    ):
        torch.testing.assert_close(found, hessian)
    for function in (torch.autograd.functional.hvp, torch.autograd.functional.vhp):
        torch.testing.assert_close(function(own, x, vector), function(right, x, vector))
    several = torch.stack([x, 2 * x, -x])

    def penalty(function):
        return torch.func.grad(lambda x: torch.func.grad(function)(x).square().sum())

    torch.testing.assert_close(*(torch.vmap(penalty(function))(several) for function in (own, right)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_forward_mode(reduction, dtype):
    x, target, weight, vector = problem_of((3, 4), dtype)
    x, vector, func = x.detach(), vector.to(dtype), torch.func

    def results(function, x, vector):
        loss = lambda x: function(x, target, weight=weight.to(x.dtype), reduction=reduction)  # noqa: E731
        total = lambda x: loss(x).sum()  # noqa: E731
        with torch.no_grad():
            in_no_grad = func.jvp(loss, (x,), (vector,))
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x.clone().requires_grad_(), vector)
            (gradient,) = torch.autograd.grad(total(dual), dual)
            without_transforms = forward_ad.unpack_dual(gradient).tangent
        return {
            "jvp": func.jvp(loss, (x,), (vector,)),
            "jvp without gradients": in_no_grad,
            "forward over reverse": func.jvp(func.grad(total), (x,), (vector,)),
            "without transforms": without_transforms,
            "forward over forward": func.jvp(lambda x: func.jvp(loss, (x,), (vector,))[1], (x,), (vector,)),
            "reverse over forward": func.grad(lambda x: func.jvp(total, (x,), (vector,))[1])(x),
            "hessian": func.hessian(total)(x),
            "batch": torch.vmap(func.hessian(total))(torch.stack([x, -x])),
        }

    found, right = results(agt.cross_entropy, x, vector), results(functional.cross_entropy, x.double(), vector.double())
    for name, value in right.items():
        own = torch.utils._pytree.tree_map(torch.Tensor.double, found[name])
        torch.testing.assert_close(own, value, rtol=0, atol=30 * TOLERANCES[dtype], msg=lambda t, n=name: f"{n}: {t}")


def test_forward_mode_with_an_output_or_an_option_raises():
    x, target, weight, _ = problem_of((3, 4), torch.float64)
    x = x.detach()
    for name in ("lse", "entropy", "log_prob", "prob"):
        with pytest.raises(NotImplementedError, match=f"outputs: forward-mode derivatives of {name} are not supported"):
            torch.func.jvp(lambda x, name=name: agt.cross_entropy(x, target, outputs=(name,)).loss, (x,), (x,))
    with pytest.raises(NotImplementedError, match="cross_entropy: weight: the loss has no gradient for it"):
        torch.func.jvp(lambda weight: agt.cross_entropy(x, target, weight=weight), (weight,), (weight,))
    outputs = ("predicted", "correct", "hessian_diag")
    for function in (
        lambda x: agt.cross_entropy(x, target, outputs=outputs).loss,
        lambda x: agt.cross_entropy(x, target),
    ):
        _, tangent = torch.func.jvp(function, (x,), (x,))
        torch.testing.assert_close(
            tangent, torch.func.jvp(lambda x: functional.cross_entropy(x, target), (x,), (x,))[1]
        )


def test_a_gradient_penalty_trains():
    x, target, _, _ = problem_of((6, 5), torch.float64)
    layer = [torch.nn.Linear(5, 4, dtype=torch.float64) for _ in range(2)]
    layer[1].load_state_dict(layer[0].state_dict())
    for function, each in zip((agt.cross_entropy, functional.cross_entropy), layer):
        leaf = x.detach().requires_grad_()
        loss = function(each(leaf), target % 4)
        (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
        (loss + gradient.square().sum()).backward()
    torch.testing.assert_close(layer[0].weight.grad, layer[1].weight.grad)


def test_the_third_order_raises():
    x, target, _, vector = problem_of((3, 4), torch.float64)
    (gradient,) = torch.autograd.grad(agt.cross_entropy(x, target), x, create_graph=True)
    (product,) = torch.autograd.grad((gradient * vector).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=THIRD):
        product.sum().backward()
    x, func = x.detach(), torch.func
    for reduction in ("mean", "none"):
        loss = lambda x, reduction=reduction: agt.cross_entropy(x, target, reduction=reduction).sum()  # noqa: E731
        for third in (
            func.jacfwd(func.hessian(loss)),
            func.jacrev(func.hessian(loss)),
            func.jacfwd(func.jacfwd(func.jacfwd(loss))),
            func.jacrev(func.jacfwd(func.jacfwd(loss))),
            func.jacfwd(func.jacrev(func.jacfwd(loss))),
        ):
            with pytest.raises(RuntimeError, match=THIRD):
                third(x)


def test_gradients_of_outputs_raise():
    x, target, _, _ = problem_of((3, 4), torch.float64)
    for name in ("lse", "entropy", "log_prob", "prob"):
        found = agt.cross_entropy(x, target, outputs=(name,))
        (gradient,) = torch.autograd.grad(getattr(found, name).sum() + found.loss, x, create_graph=True)
        with pytest.raises(RuntimeError, match=THIRD):
            gradient.sum().backward()


def test_the_registered_product():
    x, target, weight, vector = problem_of((5, 9), torch.float64)
    given = {"input": x.detach(), "target": target % 9, "class_weight": weight, "dim": 1, "reduction": "mean"}
    given |= {"ignore_index": -100, "input_grad": False, "outputs": []}
    arguments = [*CROSS_ENTROPY.arguments({**NUMBERS, **given}), vector]
    operator = torch.ops.ascend_grad.cross_entropy_hvp.default
    torch.library.opcheck(operator, arguments)
    # The Hessian is symmetric.
    above = torch.rand(5, 9, dtype=torch.float64)
    (found,) = torch.autograd.grad(operator(*arguments[:-1], vector.requires_grad_()), vector, above)
    torch.testing.assert_close(found, operator(*arguments[:-1], above))
    of_vector = lambda vector: operator(*arguments[:-1], vector)  # noqa: E731
    torch.testing.assert_close(torch.func.jvp(of_vector, (vector.detach(),), (above,))[1], of_vector(above))
    with pytest.raises(RuntimeError, match=THIRD):
        torch.func.jvp(lambda x: operator(x, *arguments[1:]), (above,), (above,))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("loss", ["cross_entropy", "linear_cross_entropy"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # by torch.compile itself
def test_compiled_second_derivatives(loss, backend):
    """A compiled function, and a compiled step after an eager loss, have the second derivatives."""
    x, target, _, _ = problem_of((6, 4), torch.float64)
    x, weight = x.detach(), torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def own(weight):
        if loss == "cross_entropy":
            return agt.cross_entropy(x @ weight.T, target)
        return agt.linear_cross_entropy(x, weight + 0, target)

    grad = torch.func.grad

    def penalty(weight):
        return grad(lambda weight: grad(own)(weight).square().sum())(weight)

    def step(loss, weight):
        (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
        return loss + gradient.square().sum()

    torch.testing.assert_close(torch.compile(penalty, backend=backend)(weight), penalty(weight))
    leaves = [weight.clone().requires_grad_() for _ in range(2)]
    for function, leaf in zip((step, torch.compile(step, backend=backend)), leaves):
        function(own(leaf), leaf).backward()
    torch.testing.assert_close(leaves[1].grad, leaves[0].grad)
