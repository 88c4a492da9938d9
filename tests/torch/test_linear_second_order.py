"""Test second derivatives of the loss of a linear layer, by autograd in reverse and forward mode, and transforms."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional

import ascend_grad.torch as agt
from ascend_grad.torch.loss_operators import LINEAR, NUMBERS

REFUSED = "linear_cross_entropy: the gradient cannot be differentiated once more"
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


#: torch's forward mode warns, and so does its compiler.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]

LEAVES = ("input", "weight", "bias")

OPTIONS = [
    {},
    {"softcap": 2.0, "logit_scale": 0.7},
    {"lse_square_scale": 0.1, "label_smoothing": 0.2, "reduction": "sum"},
    {"temperature": torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64), "reduction": "none"},
    {"token_weight": torch.tensor([0.5, 2.0, 0.0], dtype=torch.float64), "denominator": 3.0},
]


def problem_of(dtype: torch.dtype, shape: tuple[int, int, int] = (7, 5, 4)):
    """Make an input, weight and bias, targets with an ignored one, and vectors of the shapes of the first three."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    rows, classes, features = shape
    shapes = (rows, features), (classes, features), (classes,)
    target = torch.randint(0, classes, (rows,), generator=generator)
    target[1] = -100
    return tuple(normal(*each) for each in shapes), target, tuple(normal(*each) for each in shapes)


def formula(x, weight, target, linear_bias=None, **options):
    return functional.cross_entropy(functional.linear(x, weight, linear_bias), target, **options)


def losses(target, **options):
    """Return functions of input, weight and bias: the loss, and the formula."""
    return [
        lambda x, weight, bias, function=function: function(x, weight, target, linear_bias=bias, **options).sum()
        for function in (agt.linear_cross_entropy, formula)
    ]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("names", [LEAVES, ("input",), ("weight", "bias"), ("input", "bias")], ids=" ".join)
def test_double_backward(names, reduction, dtype):
    """Derivatives with respect to the layer and the upstream gradient equal the derivatives of PyTorch's loss."""
    layer, target, vectors = problem_of(dtype)
    rows = torch.rand(7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = []
    for function, kind in ((agt.linear_cross_entropy, dtype), (formula, torch.float64)):
        each = {name: value.to(kind) for name, value in zip(LEAVES, layer)}
        leaves = [each[name].requires_grad_() for name in names]
        above = (rows if reduction == "none" else rows[0]).clone().requires_grad_()
        x, weight, bias = each.values()
        loss = function(x, weight, target, linear_bias=bias, reduction=reduction, label_smoothing=0.1)
        gradients = torch.autograd.grad((loss * above).sum(), leaves, create_graph=True)
        along = [value.to(kind) for name, value in zip(LEAVES, vectors) if name in names]
        total = sum((a * b).sum() for a, b in zip(gradients, along))
        found.append((*gradients, *torch.autograd.grad(total, [*leaves, above])))
    for own, right in zip(*found, strict=True):
        largest = float(right.detach().abs().max())
        torch.testing.assert_close(own.double(), right.double(), rtol=0, atol=TOLERANCES[dtype] * max(largest, 1))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_by_finite_differences(options):
    layer, _, _ = problem_of(torch.float64, (3, 5, 2))
    layer = tuple(each.requires_grad_() for each in layer)
    for target in (torch.tensor([0, -100, 4]), torch.rand(3, 5, dtype=torch.float64)):

        def loss(x, weight, bias, target=target):
            return agt.linear_cross_entropy(x, weight, target, linear_bias=bias, **options)

        assert torch.autograd.gradcheck(loss, layer, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(loss, layer, check_fwd_over_rev=True)
        assert torch.autograd.gradgradcheck(lambda x, loss=loss: loss(x, *layer[1:]), layer[:1])
        assert torch.autograd.gradgradcheck(lambda w, b, loss=loss: loss(layer[0].detach(), w, b), layer[1:])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_transforms_of_second_order(reduction):
    layer, target, vectors = problem_of(torch.float64, (4, 3, 2))
    own, right = losses(target, label_smoothing=0.1, reduction=reduction)
    every, func = (0, 1, 2), torch.func

    def results(function):
        gradient, product = func.grad(function, every), lambda *layer: func.jvp(function, layer, vectors)[1]
        with torch.no_grad():
            in_no_grad = func.jvp(function, layer, vectors)
        return {
            "jvp": func.jvp(function, layer, vectors),
            "jvp without gradients": in_no_grad,
            "jvp of one": [
                func.jvp(lambda x, i=i: function(*layer[:i], x, *layer[i + 1 :]), layer[i : i + 1], vectors[i : i + 1])
                for i in every
            ],
            "forward over reverse": func.jvp(gradient, layer, vectors),
            "reverse over forward": func.grad(product, every)(*layer),
            "forward over forward": func.jvp(product, layer, vectors),
            "hessian": func.hessian(function, every)(*layer),
            "jacfwd": func.jacfwd(func.jacfwd(function, every), every)(*layer),
            "jacrev": func.jacrev(func.jacrev(function, every), every)(*layer),
            "functional": torch.autograd.functional.hessian(function, layer),
            "vectorized": torch.autograd.functional.hessian(function, layer, vectorize=True),
            "hvp": torch.autograd.functional.hvp(function, layer, vectors),
            "vhp": torch.autograd.functional.vhp(function, layer, vectors),
        }

    found, expected = results(own), results(right)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}")


def test_batches():
    (x, weight, bias), target, vectors = problem_of(torch.float64, (4, 3, 2))
    inputs, weights = torch.stack([x, 2 * x, -x]), torch.stack([weight, -weight, weight / 2])
    own, right = losses(target, reduction="none")

    def results(function):
        def penalty(x, weight):
            gradients = torch.func.grad(function, (0, 1))(x, weight, bias)
            return sum(each.square().sum() for each in gradients)

        gradient = torch.func.grad(penalty, (0, 1))
        product = lambda x, v: torch.func.jvp(lambda x: function(x, weight, bias), (x,), (v,))  # noqa: E731
        return {
            "both": torch.vmap(gradient)(inputs, weights),
            "inputs": torch.vmap(gradient, (0, None))(inputs, weight),
            "weights": torch.vmap(gradient, (None, 0))(x, weights),
            "vectors": torch.vmap(product, (None, 0))(x, torch.stack([vectors[0], 3 * vectors[0]])),
            "hessians": torch.vmap(torch.func.hessian(function), (0, None, None))(inputs, weight, bias),
        }

    for found, expected in zip(results(own).values(), results(right).values(), strict=True):
        torch.testing.assert_close(found, expected)


def test_forward_over_reverse_without_transforms():
    """Backward of dual tensors has the tangents of the gradients, also without a graph of the gradients."""
    layer, target, vectors = problem_of(torch.float64)

    def tangents(function, create_graph):
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(each.clone().requires_grad_(), v) for each, v in zip(layer, vectors)]
            gradients = torch.autograd.grad(function(*duals), duals, create_graph=create_graph)
            return [forward_ad.unpack_dual(each).tangent for each in gradients]

    for reduction in ("mean", "none"):
        own, right = losses(target, reduction=reduction)
        for create_graph in (False, True):
            torch.testing.assert_close(tangents(own, create_graph), tangents(right, create_graph))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_mean_in_float16_does_not_underflow(reduction):
    """The derivative of the loss in a direction is computed in float32."""
    rows = 4096
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(each, generator=generator) / 64 for each in ((rows, 8), (3, 8)))
    target = torch.randint(0, 3, (rows,), generator=generator)
    found = []
    for function, dtype in ((agt.linear_cross_entropy, torch.float16), (formula, torch.float64)):
        given = [each.to(torch.float16).to(dtype) for each in (x, weight)]
        loss = lambda x, w, function=function: function(x, w, target, reduction=reduction).double().mean()  # noqa: E731
        found.append(torch.func.jvp(loss, tuple(given), tuple(given))[1])
    torch.testing.assert_close(*found, rtol=2e-2, atol=0)


def test_empty_sizes():
    for rows, classes, features in ((0, 3, 2), (4, 3, 0)):
        x, w = torch.zeros(rows, features, dtype=torch.float64), torch.zeros(classes, features, dtype=torch.float64)
        bias, target = torch.arange(float(classes), dtype=torch.float64), torch.zeros(rows, dtype=torch.int64)
        for reduction in ("sum", "none"):
            own, right = losses(target, reduction=reduction)
            torch.testing.assert_close(*(torch.func.hessian(each, (0, 1, 2))(x, w, bias) for each in (own, right)))
            along = x, w, bias
            torch.testing.assert_close(*(torch.func.jvp(each, along, along) for each in (own, right)))


def test_layouts_and_further_dimensions():
    (x, weight, bias), target, _ = problem_of(torch.float64, (6, 5, 4))
    turned = x.T.contiguous().T, torch.cat([weight, weight], 1)[:, 4:], torch.stack([bias, bias], 1)[:, 0]
    own, _ = losses(target)
    expected = torch.func.hessian(own, (0, 1, 2))(x, weight, bias)
    torch.testing.assert_close(torch.func.hessian(own, (0, 1, 2))(*turned), expected)
    several = lambda x: agt.linear_cross_entropy(x, weight, target.reshape(2, 3), linear_bias=bias)  # noqa: E731
    found = torch.func.hessian(several)(x.reshape(2, 3, 4))
    torch.testing.assert_close(found.reshape(6, 4, 6, 4), expected[0][0])
    positions = weight.reshape(5, 1, 4).expand(5, 2, 4)  # losses at two positions
    of_positions = lambda x: agt.linear_cross_entropy(x, positions, target[:, None].expand(6, 2))  # noqa: E731
    without_bias = lambda x: agt.linear_cross_entropy(x, weight, target)  # noqa: E731
    torch.testing.assert_close(torch.func.hessian(of_positions)(x), torch.func.hessian(without_bias)(x))


THIRD = {
    "jacfwd of hessian": lambda f: torch.func.jacfwd(torch.func.hessian(f)),
    "jacrev of hessian": lambda f: torch.func.jacrev(torch.func.hessian(f)),
    "reverse alone": lambda f: torch.func.jacrev(torch.func.jacrev(torch.func.grad(f))),
    "forward alone": lambda f: torch.func.jacfwd(torch.func.jacfwd(torch.func.jacfwd(f))),
    "forward in reverse": lambda f: torch.func.jacrev(torch.func.jacfwd(torch.func.jacfwd(f))),
    "reverse in forward": lambda f: torch.func.jacfwd(torch.func.jacrev(torch.func.jacfwd(f))),
    "compiled": lambda f: torch.compile(torch.func.jacrev(torch.func.jacrev(torch.func.grad(f))), backend="eager"),
}


@pytest.mark.parametrize("derivative", THIRD)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("place", [0, 1, 2], ids=LEAVES)
def test_the_third_order_raises(place, reduction, derivative):
    layer, target, _ = problem_of(torch.float64, (3, 3, 2))
    own, _ = losses(target, reduction=reduction)
    function = THIRD[derivative](lambda leaf: own(*layer[:place], leaf, *layer[place + 1 :]))
    with pytest.raises(RuntimeError, match=REFUSED):
        function(layer[place])


def test_what_has_no_second_derivative_raises():
    (x, weight, bias), target, vectors = problem_of(torch.float64)
    weight.requires_grad_()
    (gradient,) = torch.autograd.grad(agt.linear_cross_entropy(x, weight, target), weight, create_graph=True)
    (product,) = torch.autograd.grad((gradient * vectors[1]).sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match=REFUSED):  # the third order
        product.sum().backward()
    found = agt.linear_cross_entropy(x, weight, target, linear_bias=bias, outputs=("lse",))
    (gradient,) = torch.autograd.grad(found.lse.sum() + found.loss, weight, create_graph=True)
    with pytest.raises(RuntimeError, match=REFUSED):  # gradients of outputs
        gradient.sum().backward()
    with_outputs = lambda x: agt.linear_cross_entropy(x, weight, target, outputs=("lse", "correct")).loss  # noqa: E731
    with pytest.raises(NotImplementedError, match="outputs: forward-mode derivatives of lse are not supported"):
        torch.func.jvp(with_outputs, (x,), (x,))
    for name, value in {"temperature": torch.ones(7), "weight": torch.ones(5), "token_weight": torch.ones(7)}.items():
        with pytest.raises(NotImplementedError, match=f"linear_cross_entropy: {name}: the loss has no gradient for it"):
            torch.func.jvp(
                lambda value, name=name: agt.linear_cross_entropy(x, weight, target, **{name: value}),
                (value,),
                (value,),
            )
    with_integers = lambda x: agt.linear_cross_entropy(x, weight, target, outputs=("predicted", "correct")).loss  # noqa: E731
    plain = lambda x: agt.linear_cross_entropy(x, weight, target)  # noqa: E731
    torch.testing.assert_close(*(torch.func.jvp(each, (x,), (vectors[0],)) for each in (with_integers, plain)))


def test_the_registered_product():
    (x, weight, bias), target, vectors = problem_of(torch.float64)
    given = {"input": x, "weight": weight, "bias": bias, "target": target, "reduction": "mean"}
    given |= {"ignore_index": -100, "outputs": [], "filter_eps": 0.0, **dict.fromkeys(LINEAR.wanted, False)}
    arguments = LINEAR.arguments({**NUMBERS, **given})
    operator = torch.ops.ascend_grad.linear_cross_entropy_hvp.default
    vector_input, vector, vector_bias = vectors
    for parts in ((vector, vector_bias, None), (vector, vector_bias, vector_input), (None, None, vector_input)):
        torch.library.opcheck(operator, [*arguments, *parts])
    # The Hessian is symmetric.
    above = [torch.rand_like(each) for each in (vector, vector_bias, vector_input)]
    leaves = [each.requires_grad_() for each in (vector, vector_bias, vector_input)]
    found = torch.autograd.grad(operator(*arguments, *leaves), leaves, above)
    torch.testing.assert_close(found, operator(*arguments, *above))
    torch.testing.assert_close(
        torch.func.jvp(lambda *v: operator(*arguments, *v), tuple(leaves), tuple(above))[1], found
    )
    with pytest.raises(RuntimeError, match=REFUSED):
        torch.func.jvp(lambda x: operator(x, *arguments[1:], *leaves), (x,), (x,))
    problem = LINEAR.arguments(
        {**NUMBERS, **given, **dict.fromkeys(LINEAR.wanted, True), "grad_loss": torch.tensor(2.0)}
    )
    torch.library.opcheck(torch.ops.ascend_grad.linear_cross_entropy.default, problem)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled_second_derivatives(reduction, backend):
    """Compiled functions have the second derivatives, in reverse and forward mode."""
    layer, target, vectors = problem_of(torch.float64, (4, 3, 2))
    loss, func, every = losses(target, reduction=reduction)[0], torch.func, (0, 1, 2)
    for function in (
        lambda: func.grad(lambda *x: sum(g.square().sum() for g in func.grad(loss, every)(*x)), every)(*layer),
        lambda: func.jvp(loss, layer, vectors),
        lambda: func.jvp(func.grad(loss, every), layer, vectors),
        lambda: func.hessian(loss, (0, 1))(*layer),
    ):
        torch.testing.assert_close(torch.compile(function, backend=backend, fullgraph=True)(), function())

    def step(loss, *leaves):
        gradients = torch.autograd.grad(loss, leaves, create_graph=True)
        return loss + sum(each.square().sum() for each in gradients)

    found = []
    for function in (step, torch.compile(step, backend=backend)):
        leaves = [each.clone().requires_grad_() for each in layer]
        function(loss(*leaves), *leaves).backward()
        found.append([each.grad for each in leaves])
    torch.testing.assert_close(*found)
    compiled = torch.compile(loss, backend="aot_eager")
    leaves = [each.clone().requires_grad_() for each in layer]
    gradients = torch.autograd.grad(compiled(*leaves), leaves, create_graph=True)
    with pytest.raises(RuntimeError):  # torch's own: the derivatives are not left out
        torch.autograd.grad(sum(each.square().sum() for each in gradients), leaves)
