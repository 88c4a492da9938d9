"""The operators as torch's own machinery sees them: schema, tracing, compilation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch_oracles import value_and_gradients

import ascend_grad.torch as agt

#: By torch's own tracing of a `torch.autograd.Function`.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated.*:DeprecationWarning")

OPS = torch.ops.ascend_grad


def softmax_cases():
    for shape in [(), (5,), (3, 4), (2, 0, 3)]:
        x, y = torch.randn(shape), torch.rand(shape)
        yield pytest.param(OPS.softmax, (x, -1), id=f"softmax {shape}")
        yield pytest.param(OPS.log_softmax, (x, 0), id=f"log_softmax {shape}")
        yield pytest.param(OPS.softmax_backward, (x, y, 0), id=f"softmax_backward {shape}")
        yield pytest.param(OPS.log_softmax_backward, (x, y, -1), id=f"log_softmax_backward {shape}")
    x, mask = torch.randn(2, 3, 5, 4).transpose(2, 3), torch.rand(1, 3, 4, 5) < 0.5
    yield pytest.param(OPS.scaled_masked_softmax, (x, mask, 0.5), id="scaled_masked_softmax")
    yield pytest.param(OPS.scaled_masked_softmax_backward, (x, x.exp(), mask, 0.5), id="scaled_masked_softmax_backward")
    yield pytest.param(OPS.softmax, (torch.randn(4, 3, dtype=torch.bfloat16).T, 0), id="softmax bfloat16")


def linear_cases():
    target = torch.tensor([1, 2, -100, 6])
    for dtype in (torch.float64, torch.float16):
        x, w = torch.randn(4, 3).to(dtype), torch.randn(7, 3).to(dtype)
        for reduction in ("mean", "sum", "none"):
            for wanted in [(True, True), (False, True), (True, False), (False, False)]:
                arguments = (x, w, target, None, reduction, -100, *wanted, 0.0, None, None)
                yield pytest.param(OPS.linear_cross_entropy, arguments, id=f"{dtype} {reduction} {wanted}")
    above = torch.randn(4, dtype=torch.float64)
    arguments = (x.double(), w.double(), target, above, "none", -100, True, True, 0.0, 1, None)
    yield pytest.param(OPS.linear_cross_entropy, arguments, id="with a gradient from above")


@pytest.mark.parametrize(("operator", "arguments"), [*softmax_cases(), *linear_cases()])
def test_operators_keep_the_rules(operator, arguments: tuple):
    torch.library.opcheck(operator.default, arguments)


MASK = torch.arange(20).reshape(1, 1, 4, 5) % 3 == 0
TARGET = torch.tensor([1, 2, -100, 6])


def linear(**keywords) -> Callable[..., torch.Tensor]:
    return lambda x, w: 3 * agt.linear_cross_entropy(x, w, TARGET, **keywords)


def under_autocast(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return agt.linear_cross_entropy(x, w, TARGET)


def shifted(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return agt.compat.cce.linear_cross_entropy(x[None], w, TARGET[None], shift=1)


COMPILED = {
    "softmax": (lambda x: agt.softmax(2 * x, 0), [(4, 3)]),
    "log_softmax": (lambda x: agt.log_softmax(2 * x), [(4, 3)]),
    "scaled_masked_softmax": (lambda x: agt.scaled_masked_softmax(x, MASK, 0.5), [(2, 3, 4, 5)]),
    "mean": (linear(), [(4, 3), (7, 3)]),
    "sum": (linear(reduction="sum", num_threads=1), [(4, 3), (7, 3)]),
    "none": (linear(reduction="none"), [(4, 3), (7, 3)]),
    "a weight for each class": (linear(weight=torch.arange(7.0)), [(4, 3), (7, 3)]),
    "one row": (lambda x, w: agt.linear_cross_entropy(x, w, TARGET[0]), [(3,), (7, 3)]),
    "autocast": (under_autocast, [(4, 3), (7, 3)]),
    "cut cross-entropy": (shifted, [(4, 3), (7, 3)]),
}


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_without_breaks(name: str, dynamic: bool):
    function, shapes = COMPILED[name]
    tensors = [torch.randn(shape) for shape in shapes]
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    above = torch.randn(function(*tensors).shape)
    results = [value_and_gradients(f, tensors, above) for f in (compiled, function)]
    for ours, right in zip(*results):
        torch.testing.assert_close(ours, right)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*tensors), results[1][0])


def test_a_compiled_module_and_two_backwards():
    module = agt.LinearCrossEntropyLoss(3, 7)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 3)
    module(x, TARGET).backward()
    right, module.linear.weight.grad = module.linear.weight.grad, None
    loss = compiled(x, TARGET)
    loss.backward(retain_graph=True)
    torch.testing.assert_close(module.linear.weight.grad, right)
    loss.backward()
    torch.testing.assert_close(module.linear.weight.grad, 2 * right)
