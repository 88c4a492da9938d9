"""Test tensors without values, "meta" and fake, and graphs traced by `make_fx` and `torch.export`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch_cases import CASES, case, step
from torch_oracles import TOLERANCES


def described(tensors: tuple[torch.Tensor, ...]) -> list[tuple]:
    return [(each.shape, each.dtype, each.stride()) for each in tensors]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_meta_and_fake(name: str, dtype: torch.dtype):
    """Results and gradients of tensors without values have the shapes, dtypes and strides of a call with values."""
    function, leaves, others = case(name, dtype)
    right = described(step(function, leaves, others))
    on_meta = step(function, [each.to("meta") for each in leaves], [each.to("meta") for each in others])
    assert {each.device.type for each in on_meta} == {"meta"}
    assert described(on_meta) == right
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [[mode.from_tensor(each) for each in tensors] for tensors in (leaves, others)]
        assert described(step(function, *fakes)) == right
    assert described(step(function, *fakes)) == right  # a call on fake tensors works after the mode has ended


@pytest.mark.parametrize("tracing", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("name", CASES)
def test_a_graph_with_its_gradients(name: str, tracing: str):
    """`make_fx` of a function and its backward gives a graph that also computes the results of other values."""
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


#: Functions that refer to a tensor or make a module. Torch 2.6 exports no such function.
NOT_EXPORTED = {"a weight for each class", "all options", "Liger", "Liger, a weight for each class"}
EXPORTED = [name for name in CASES if torch.__version__ >= (2, 7) or name not in NOT_EXPORTED]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated.*:DeprecationWarning")
@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", EXPORTED)
def test_an_exported_program_has_gradients(name: str, strict: bool, with_gradients: bool):
    function, leaves, others = case(name)
    example = [each.clone().requires_grad_(with_gradients) for each in leaves]
    program = torch.export.export(Module(function), (*example, *others), strict=strict)
    graphs = [each.graph for each in program.graph_module.modules()]  # the graph of autocast contains another graph
    names = [str(node.target) for graph in graphs for node in graph.nodes if node.op == "call_function"]
    assert len([each for each in names if each.startswith("ascend_grad.")]) == 1
    for ours, right in zip(step(program.module(), leaves, others), step(function, leaves, others), strict=True):
        torch.testing.assert_close(ours, right)
