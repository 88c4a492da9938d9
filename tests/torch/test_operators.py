"""Test the registered operators as torch sees them: schema, tracing, gradients."""

from __future__ import annotations

import pytest
import torch
from torch_cases import changed, loss_arguments

import ascend_grad as ag
import ascend_grad.torch  # this import registers the operators
from ascend_grad._call import Operator
from ascend_grad.operators.options import LAYER_OUTPUTS
from ascend_grad.torch.operators import rowwise_schema

OPS = torch.ops.ascend_grad
SCALE = torch.tensor([0.5], dtype=torch.float64)


def softmax_cases():
    for shape in [(), (5,), (3, 4), (2, 0, 3)]:
        x, y = torch.randn(shape), torch.rand(shape)
        yield pytest.param(OPS.softmax, (x, -1, None), id=f"softmax {shape}")
        yield pytest.param(OPS.log_softmax, (x, 0, None), id=f"log_softmax {shape}")
        yield pytest.param(OPS.softmax_backward, (x, y, 0, None), id=f"softmax_backward {shape}")
        yield pytest.param(OPS.log_softmax_backward, (x, y, -1, None), id=f"log_softmax_backward {shape}")
    x, mask = torch.randn(2, 3, 5, 4).transpose(2, 3), torch.rand(1, 3, 4, 5) < 0.5
    yield pytest.param(OPS.scaled_masked_softmax, (x, mask, SCALE, None), id="scaled_masked_softmax")
    yield pytest.param(
        OPS.scaled_masked_softmax_backward, (x, x.exp(), mask, SCALE, None), id="scaled_masked_softmax_backward"
    )
    yield pytest.param(OPS.softmax, (torch.randn(4, 3, dtype=torch.bfloat16).T, 0, None), id="softmax bfloat16")


def linear_cases():
    target = torch.tensor([1, 2, -100, 6])
    for dtype in (torch.float64, torch.float16):
        x, w = torch.randn(4, 3).to(dtype), torch.randn(7, 3).to(dtype)
        for reduction in ("mean", "sum", "none"):
            for wanted in [(True, True), (False, True), (True, False), (False, False)]:
                flags = dict(zip(("input_grad", "weight_grad"), wanted))
                arguments = loss_arguments(x, w, target, reduction=reduction, **flags)
                yield pytest.param(OPS.linear_cross_entropy, tuple(arguments), id=f"{dtype} {reduction} {wanted}")
    above = torch.randn(4, dtype=torch.float64)
    arguments = loss_arguments(
        x.double(), w.double(), target, grad_loss=above, reduction="none", input_grad=True, weight_grad=True
    )
    yield pytest.param(OPS.linear_cross_entropy, tuple(arguments), id="with a gradient from above")
    arguments = changed(
        arguments,
        bias=torch.randn(7), token_weight=torch.rand(4), class_weight=torch.rand(7), temperatures=1 + torch.rand(4),
        bias_grad=True, label_smoothing=0.1, lse_square_scale=0.1, logit_scale=0.5, softcap=2.0,
        outputs=list(LAYER_OUTPUTS)
    )  # fmt: skip
    yield pytest.param(OPS.linear_cross_entropy, tuple(arguments), id="with all options")
    several = torch.tensor([[1, 2], [0, -100], [-100, -100], [6, 6]])
    arguments = loss_arguments(x, w, several, target_prob=torch.rand(4, 2), denominator=3.0, weight_grad=True)
    yield pytest.param(OPS.linear_cross_entropy, tuple(arguments), id="with several targets")


def backward_cases():
    x, w, target = torch.randn(4, 3), torch.randn(7, 3), torch.tensor([1, 2, -100, 6])
    arguments = loss_arguments(x, w, target, bias=torch.randn(7), outputs=["lse", "entropy"])
    lse, _, entropy = OPS.linear_cross_entropy(*arguments)[4:7]
    above = torch.randn(3, 4)
    for given, changes in (
        ((lse, entropy, *above), {"grad_loss": torch.tensor(2.0), "weight_grad": True, "bias_grad": True}),
        ((lse, None, above[0], None, None), {"input_grad": True}),
    ):
        arguments = (*given, *changed(changed(arguments, outputs=[]), **changes))
        yield pytest.param(OPS.linear_cross_entropy_backward, arguments, id=f"backward {list(changes)}")
        arguments = loss_arguments(x, w, target, bias=torch.randn(7))


def fused_cases():
    target = torch.tensor([1, 2, -100, 6], dtype=torch.int32)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x, w = torch.randn(4, 3).to(dtype), torch.randn(7, 3).to(dtype)
        for return_logits in (False, True):
            arguments = (x, w, target, 2, 7, return_logits, 1)
            yield pytest.param(OPS.fused_linear_online_max_sum, arguments, id=f"statistics {dtype} {return_logits}")
        found = OPS.fused_linear_online_max_sum(x, w, target, 0, 7, True, None)
        maximum, total, predicted, mask, masked_target, logits = found
        for given in (None, logits):
            arguments = (maximum, total, predicted, 0.0, given, None)
            loss = OPS.fused_cross_entropy_loss_with_max_sum
            yield pytest.param(loss, arguments, id=f"loss {dtype} {given is not None}")
        softmax = loss(*arguments)[1]
        for mode, wanted in (
            ((maximum, total, None), [True, True]),
            ((None, None, softmax), [False, True]),
            ((None, None, softmax), [False, False]),
        ):
            arguments = (maximum, x, w, mask, masked_target, 0.0, *mode, wanted, None, 0.0, 1)
            label = f"gradients {dtype} {wanted}"
            yield pytest.param(OPS.fused_linear_cross_entropy_loss_grad, arguments, id=label)


@pytest.mark.parametrize(
    ("operator", "arguments"), [*softmax_cases(), *linear_cases(), *backward_cases(), *fused_cases()]
)
def test_operators_keep_the_rules(operator, arguments: tuple):
    torch.library.opcheck(operator.default, arguments)


# While tracing, torch 2.14 reads `.grad` of a tensor that is not a leaf, and warns.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    ("operator", "shapes", "settings"),
    [
        (OPS.softmax, [(4, 3)], (0, None)),
        (OPS.log_softmax, [(4, 3)], (-1, None)),
        (OPS.softmax_backward, [(4, 3), (4, 3)], (0, None)),
        (OPS.log_softmax_backward, [(4, 3), (4, 3)], (-1, None)),
        (OPS.scaled_masked_softmax, [(2, 3, 4, 5)], (torch.arange(20).reshape(1, 1, 4, 5) % 3 == 0, SCALE, None)),
        (
            OPS.scaled_masked_softmax_backward,
            [(2, 3, 4, 5), (2, 3, 4, 5)],
            (torch.arange(20).reshape(1, 1, 4, 5) % 3 == 0, SCALE, None),
        ),
    ],
)
def test_operators_have_gradients(operator, shapes: list[tuple[int, ...]], settings: tuple):
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    torch.library.opcheck(operator.default, (*tensors, *settings))
    assert torch.autograd.gradcheck(operator, (*tensors, *settings))
    assert torch.autograd.gradgradcheck(operator, (*tensors, *settings))


@pytest.mark.parametrize("flags", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_loss_as_an_operator_has_gradients(reduction: str, flags: tuple[bool, bool]):
    """The operator has gradients for every set of computed outputs."""
    x, w = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in [(4, 3), (7, 3)])
    bias = torch.randn(7, dtype=torch.float64, requires_grad=True)
    arguments = loss_arguments(x, w, torch.tensor([1, 2, -100, 6]), reduction=reduction)
    asked = changed(arguments, **dict(zip(("input_grad", "weight_grad"), flags)), bias_grad=flags[0])

    def loss(x, w, bias):
        return OPS.linear_cross_entropy(*changed(asked, input=x, weight=w, bias=bias))[0]

    assert torch.autograd.gradcheck(loss, (x, w, bias), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(loss, (x, w, bias), check_fwd_over_rev=True)

    def loss_and_gradient(x, w):
        found = OPS.linear_cross_entropy(*changed(arguments, input=x, weight=w, input_grad=True, weight_grad=True))
        return found[0] + found[1].square().sum() + found[2].square().sum()

    assert torch.autograd.gradcheck(loss_and_gradient, (x, w), check_forward_ad=True)


def test_an_output_without_what_its_gradient_needs():
    x, w = torch.randn(4, 3, requires_grad=True), torch.randn(7, 3)
    entropy = OPS.linear_cross_entropy(*loss_arguments(x, w, torch.tensor([1, 2, -100, 6]), outputs=["entropy"]))[6]
    with pytest.raises(ag.ParamInvalidError, match="linear_cross_entropy: outputs: expected 'lse' among them"):
        entropy.sum().backward()


@pytest.mark.parametrize("factor", [1.0, 7.0])
def test_backward_leaves_the_gradients_that_the_operator_returned(factor: float):
    x, w = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in [(4, 3), (7, 3)])
    arguments = loss_arguments(x, w, torch.tensor([1, 2, -100, 6]), input_grad=True, weight_grad=True)
    loss, *gradients = OPS.linear_cross_entropy(*arguments)[:3]
    before = [each.detach().clone() for each in gradients]
    (factor * loss).backward()
    for leaf, gradient, expected in zip((x, w), gradients, before, strict=True):
        assert torch.equal(leaf.grad, factor * expected)
        leaf.grad.zero_()
        assert torch.equal(gradient, expected)


def test_backward_is_refused_where_a_gradient_that_the_operator_returned_was_changed():
    x, w = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in [(4, 3), (7, 3)])
    arguments = loss_arguments(x, w, torch.tensor([1, 2, -100, 6]), input_grad=True, weight_grad=True)
    loss, gradient, *_ = OPS.linear_cross_entropy(*arguments)
    with torch.no_grad():
        gradient.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_unknown_shard():
    """An operator raises an error for the number of a shard that does not exist.

    A graph can outlive the traced call, and then refers to a shard that no longer exists.
    """
    x, w, target = torch.randn(4, 3), torch.randn(7, 3), torch.tensor([1, 2, -100, 6])
    with pytest.raises(ag.ParamInvalidError, match=r"shard: expected the number of a part of a vocabulary .* got -5"):
        OPS.linear_cross_entropy(*loss_arguments(x, w, target, shard=-5))


@pytest.mark.parametrize(
    ("parameters", "arrays", "schema"),
    [
        ("g y axis", "g y", "(Tensor g, Tensor y, int dim, SymInt? num_threads) -> Tensor"),
        ("x m scale", "x m", "(Tensor x, Tensor m, Tensor scale, SymInt? num_threads) -> Tensor"),
    ],
)
def test_the_schema_of_a_new_rowwise_operator_follows_from_the_table(parameters, arrays, schema):
    new = Operator("new", None, parameters, family="rowwise", kernels="softmax", arrays=arrays, checks=[], results=[])
    assert rowwise_schema(new) == schema
