"""Tensors without values, and graphs that are traced from them: "meta", fake, `make_fx`, `torch.export`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch_oracles import value_and_gradients

import ascend_grad.torch as agt

MASK = torch.arange(20).reshape(1, 1, 4, 5) % 3 == 0
TARGET = torch.tensor([1, 2, -100, 6])
CLASS_WEIGHT = torch.arange(7.0)


def loss(**keywords) -> Callable[..., torch.Tensor]:
    return lambda x, w, target: 3 * agt.linear_cross_entropy(x, w, target, **keywords)


def a_weight_for_each_class(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return agt.linear_cross_entropy(x, w, target, weight=CLASS_WEIGHT.to(x.device))


def one_row(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return agt.linear_cross_entropy(x[0], w, target[0])


def shifted(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return agt.compat.cce.linear_cross_entropy(x[None], w, target[None], shift=1)


def liger(weight: torch.Tensor | None) -> Callable[..., torch.Tensor]:
    def call(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        here = None if weight is None else weight.to(x.device)
        return agt.compat.liger.LigerFusedLinearCrossEntropyLoss(here)(w, x, target)

    return call


#: A function, the shapes of what it differentiates, and its other tensors.
CASES = {
    "softmax": (lambda x: agt.softmax(2 * x, 0), [(4, 3)], []),
    "log_softmax": (lambda x: agt.log_softmax(2 * x), [(4, 3)], []),
    "scaled_masked_softmax": (lambda x, mask: agt.scaled_masked_softmax(x, mask, 0.5), [(2, 3, 4, 5)], [MASK]),
    **{name: (loss(reduction=name), [(4, 3), (7, 3)], [TARGET]) for name in ("mean", "sum", "none")},
    "a weight for each class": (a_weight_for_each_class, [(4, 3), (7, 3)], [TARGET]),
    "one row": (one_row, [(4, 3), (7, 3)], [TARGET]),
    "cut cross-entropy": (shifted, [(4, 3), (7, 3)], [TARGET]),
    "Liger": (liger(None), [(4, 3), (7, 3)], [TARGET]),
    "Liger, a weight for each class": (liger(CLASS_WEIGHT), [(4, 3), (7, 3)], [TARGET]),
}
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def case(name: str, dtype: torch.dtype = torch.float32) -> tuple[Callable, list[torch.Tensor], list[torch.Tensor]]:
    function, shapes, others = CASES[name]
    return function, [torch.randn(shape).to(dtype) for shape in shapes], others


def step(function: Callable, leaves: list[torch.Tensor], others: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The value, and gradients for an upstream gradient of ones."""
    return value_and_gradients(
        lambda *leaves: function(*leaves, *others), leaves, torch.ones_like(function(*leaves, *others))
    )


def described(tensors: tuple[torch.Tensor, ...]) -> list[tuple]:
    return [(each.shape, each.dtype, each.stride()) for each in tensors]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_meta_and_fake(name: str, dtype: torch.dtype):
    """Shapes and dtypes of values and gradients are those of a call with values."""
    function, leaves, others = case(name, dtype)
    right = described(step(function, leaves, others))
    on_meta = step(function, [each.to("meta") for each in leaves], [each.to("meta") for each in others])
    assert {each.device.type for each in on_meta} == {"meta"}
    assert described(on_meta) == right
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [[mode.from_tensor(each) for each in tensors] for tensors in (leaves, others)]
        assert described(step(function, *fakes)) == right
    assert described(step(function, *fakes)) == right  # after the mode has ended


@pytest.mark.parametrize("tracing", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("name", CASES)
def test_a_graph_with_its_gradients(name: str, tracing: str):
    """`make_fx` of a function and its backward gives a graph that computes other values, too."""
    function, leaves, others = case(name)
    count = len(leaves)

    def traced(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return step(function, list(tensors[:count]), list(tensors[count:]))

    graph = make_fx(traced, tracing_mode=tracing, _allow_non_fake_inputs=True)(*leaves, *others)
    assert "torch.ops.ascend_grad." in graph.code
    assert ".item" not in graph.code
    others_values = [torch.randn_like(each) for each in leaves]
    for ours, right in zip(graph(*others_values, *others), step(function, others_values, others), strict=True):
        torch.testing.assert_close(ours, right)


class Module(torch.nn.Module):
    def __init__(self, function: Callable):
        super().__init__()
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return self.function(*tensors)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated.*:DeprecationWarning")
@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_an_exported_program_has_gradients(name: str, strict: bool, with_gradients: bool):
    function, leaves, others = case(name)
    example = [each.clone().requires_grad_(with_gradients) for each in leaves]
    program = torch.export.export(Module(function), (*example, *others), strict=strict)
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert len([each for each in names if each.startswith("ascend_grad.")]) == 1
    for ours, right in zip(step(program.module(), leaves, others), step(function, leaves, others), strict=True):
        torch.testing.assert_close(ours, right)
