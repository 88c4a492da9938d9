"""Test `torch.compile` and compiled autograd: values, gradients, and the number of compiled graphs.

The limits count graphs and measure no time, so that a busy machine exceeds no limit.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from torch_cases import CASES, case, step
from torch_oracles import linear_cross_entropy

import ascend_grad as ag
import ascend_grad.torch as agt

#: The warnings come from torch's tracing of a `torch.autograd.Function`, and from the first import of Inductor.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script.*` is deprecated"),
]

TARGET = torch.tensor([1, 2, -100, 6])


@pytest.fixture(autouse=True)
def _nothing_is_compiled_yet():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def sized(name: str, rows: int) -> tuple[Callable, list[torch.Tensor], list[torch.Tensor]]:
    """Return the function, the leaves and the other arguments of a case with this number of rows."""
    function, (first, *leaves), others = case(name)
    size = [*first.shape[:-2], rows, first.shape[-1]]
    others = [
        torch.rand(1, 1, rows, 5) < 0.5 if each.dtype == torch.bool else torch.arange(rows) % 7 for each in others
    ]
    return (
        function,
        [torch.randn(size), *(torch.randn(size) if each.shape == first.shape else each for each in leaves)],
        others,
    )


def graphs() -> int:
    """Return the number of compiled graphs. A first attempt that torch itself gives up does not count."""
    assert not counters["graph_break"]
    return counters["aot_autograd"]["ok"]


def check(compiled: Callable, function: Callable, leaves: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    """Compare the value and the gradients of a compiled function with the results of eager mode."""
    value, *grads = step(function, leaves, others)
    leaves = [each.clone().requires_grad_() for each in leaves]
    ours = compiled(*leaves, *others)
    ours.backward(torch.ones_like(value))
    for each, right in zip((ours, *(leaf.grad for leaf in leaves)), (value, *grads), strict=True):
        torch.testing.assert_close(each, right)


@pytest.mark.parametrize("name", CASES)
def test_one_graph_for_one_shape(name: str):
    function, leaves, others = case(name)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for _ in range(4):
        check(compiled, function, [torch.randn_like(each) for each in leaves], others)
    assert graphs() == 1
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(*leaves, *others), function(*leaves, *others))
    assert graphs() == 2


@pytest.mark.parametrize("name", ["softmax", "mean"])
def test_one_graph_by_the_default_backend(name: str):
    """The default backend, Inductor, compiles one graph. New values cause no recompilation."""
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        pytest.skip(f"torch finds no C++ compiler: {error}")
    function, leaves, others = case(name)
    backend = CompileCounterWithBackend("inductor")
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            check(compiled, function, [torch.randn_like(each) for each in leaves], others)
    assert backend.frame_count == counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert not counters["recompiles"]


@pytest.mark.parametrize(("dynamic", "limit"), [(None, 2), (True, 1)])
@pytest.mark.parametrize("name", CASES)
def test_no_graph_for_each_size(name: str, dynamic: bool | None, limit: int):
    """With ``dynamic=True`` one graph serves any number of rows.

    By default one graph serves the first number of rows, and a second graph all others.
    """
    compiled = torch.compile(CASES[name][0], fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (4, 5, 6, 9):
        check(compiled, *sized(name, rows))
    assert graphs() <= limit


#: Values of options that change from step to step. The default is not among them, as it has a separate graph.
CHANGING = {
    "denominator": [3.5, 4.5, 6.25],
    "denominator as an int": [3, 5, 8],
    "temperature": [0.5, 0.75, 2.0],
    "label_smoothing": [0.1, 0.2, 0.3],
    "lse_square_scale": [0.1, 0.2, 0.3],
    "ignore_index": [-1, 6, -7],
    "num_threads": [4, 2, 3],
}

#: The same for options that only `linear_cross_entropy` has.
CHANGING_LINEAR = CHANGING | {
    "logit_scale": [0.5, 0.75, 2.0],
    "softcap": [3.0, 4.0, 5.0],
    "filter_eps": [1e-6, 2e-6, 3e-6],
}

LOSSES = {
    "linear": lambda x, w, **options: agt.linear_cross_entropy(x, w, TARGET.clamp(min=0), **options),
    "logits": lambda x, w, **options: agt.cross_entropy(x @ w.T, TARGET.clamp(min=0), **options),
}


@pytest.mark.parametrize("outputs", [(), ("entropy",)], ids=["loss", "entropy"])
@pytest.mark.parametrize(
    ("loss", "option"), [*(("linear", name) for name in CHANGING_LINEAR), *(("logits", name) for name in CHANGING)]
)
def test_no_graph_for_each_value_of_an_option(loss: str, option: str, outputs: tuple[str, ...]):
    """One graph serves the first value of a number, and a second graph all others."""
    name = option.partition(" ")[0]
    backend = CompileCounterWithBackend("aot_eager")

    def function(x, w, value):
        found = LOSSES[loss](x, w, **{name: value}, outputs=outputs)
        return found.loss + found.entropy.sum() if outputs else found

    compiled = torch.compile(function, fullgraph=True, backend=backend)
    leaves = [torch.randn(4, 3), torch.randn(7, 3)]
    for value in CHANGING_LINEAR[option]:
        check(compiled, function, leaves, [value])
    assert backend.frame_count == 2


@pytest.mark.parametrize("option", ["temperature", "logit_scale", "softcap"])
def test_no_graph_for_each_value_of_an_option_of_top_k(option: str):
    backend = CompileCounterWithBackend("aot_eager")

    def function(x, w, value):
        return agt.linear_top_k(x, w, 2, **{option: value}).log_prob

    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for value in CHANGING_LINEAR[option]:
        check(compiled, function, [torch.randn(4, 3), torch.randn(7, 3)], [value])
    assert backend.frame_count == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64])
@pytest.mark.parametrize("loss", LOSSES)
def test_one_graph_for_options_that_are_tensors(loss: str, dtype: torch.dtype):
    function = lambda x, w, denominator: LOSSES[loss](x, w, denominator=denominator)  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    leaves = [torch.randn(4, 3), torch.randn(7, 3)]
    for value in (3, 5, 8):
        check(compiled, function, leaves, [torch.tensor(value, dtype=dtype)])
    assert graphs() == 1


@pytest.mark.parametrize("as_tensor", [False, True])
def test_no_graph_for_each_value_of_a_scale(as_tensor: bool):
    mask = torch.arange(20).reshape(1, 1, 4, 5) % 3 == 0
    backend = CompileCounterWithBackend("aot_eager")
    function = lambda x, scale: agt.scaled_masked_softmax(x, mask, scale)  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for value in (0.5, 0.75, 2.0, 3):
        check(compiled, function, [torch.randn(2, 3, 4, 5)], [torch.tensor(value) if as_tensor else value])
    assert backend.frame_count <= 3  # an int and floats, the first of which is a constant, or one for tensors


def test_options_that_are_no_numbers():
    x, w = torch.randn(4, 3), torch.randn(7, 3)
    for loss in LOSSES.values():
        for value in (torch.ones(2), torch.tensor(True), torch.tensor(2.0, requires_grad=True)):
            with pytest.raises(ag.ParamTypeError, match="denominator: expected a real number, got"):
                torch.vmap(lambda x, f=loss, d=value: f(x, w, denominator=d))(x[None])


# While tracing, torch reads `.grad` of a tensor that is not a leaf, and warns.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_compiled_autograd(name: str, is_compiled: bool):
    """Compiled autograd captures one backward graph for all calls, of an eager function and of a compiled function."""
    function, leaves, others = case(name)
    backend = CompileCounterWithBackend("aot_eager")
    forward = torch.compile(function, fullgraph=True, backend="aot_eager") if is_compiled else function
    right = step(function, leaves, others)
    tolerance = 2**-7 if name == "autocast" else 1e-5
    for factor in (1.0, 1.0, 2.5):
        inputs = [each.clone().requires_grad_() for each in leaves]
        with compiled_autograd._enable(torch.compile(fullgraph=True, backend=backend)):
            value = forward(*inputs, *others)
            value.backward(torch.full_like(value, factor))
        for each, grad in zip(inputs, right[1:], strict=True):
            torch.testing.assert_close(each.grad, factor * grad, rtol=tolerance, atol=tolerance)
    assert counters["compiled_autograd"]["captures"] == backend.frame_count == 1
    assert not counters["graph_break"]


TRANSFORMED = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x)[..., 1].sum())(x),
    "vmap": lambda f, x: torch.vmap(f)(x),
    "vmap of grad": lambda f, x: torch.vmap(torch.func.grad(lambda row: f(row)[1]))(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacrev of jacrev": lambda f, x: torch.func.jacrev(torch.func.jacrev(f))(x),
}


@pytest.mark.parametrize("transformed", TRANSFORMED)
@pytest.mark.parametrize("function", [agt.softmax, agt.log_softmax])
def test_compiled_transforms(function: Callable, transformed: str):
    x = torch.randn(3, 4, dtype=torch.float64)
    compiled = torch.compile(lambda x: TRANSFORMED[transformed](function, x), fullgraph=True, backend="aot_eager")
    right = getattr(torch, function.__name__)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), TRANSFORMED[transformed](lambda x: right(x, -1), x))
    assert graphs() == 1


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled_transforms_of_the_loss(reduction: str):
    x, w = torch.randn(4, 3, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)

    def gradients(function) -> tuple[torch.Tensor, ...]:
        loss = lambda x, w: function(x, w, TARGET, reduction=reduction).sum()  # noqa: E731
        return torch.func.grad(loss, (0, 1))(x, w)

    compiled = torch.compile(lambda: gradients(agt.linear_cross_entropy), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(), gradients(linear_cross_entropy))
    assert graphs() == 1


def test_a_compiled_module_and_two_backwards():
    module = agt.LinearCrossEntropyLoss(3, 7)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 3)
    module(x, TARGET).backward()
    right, module.linear.weight.grad = module.linear.weight.grad, None
    loss = compiled(x, TARGET)
    loss.backward(retain_graph=True)
    torch.testing.assert_close(module.linear.weight.grad, right)
    loss.backward()
    torch.testing.assert_close(module.linear.weight.grad, 2 * right)
    assert graphs() == 1


def test_outputs_that_this_process_has_not_requested_before(run_script):
    """The class of a result is made at its first use, which may be within a compiled function."""
    run_script(
        """
        import torch
        import ascend_grad.torch as agt

        x, w, target = torch.randn(4, 3), torch.randn(7, 3), torch.tensor([1, 2, -100, 6])
        outputs = ("predicted", "entropy")
        for function, arguments in ((agt.cross_entropy, (x, target % 3)), (agt.linear_cross_entropy, (x, w, target))):
            compiled = torch.compile(lambda *given: function(*given, outputs=outputs), fullgraph=True, backend="eager")
            found, right = compiled(*arguments), function(*arguments, outputs=outputs)
            assert found._fields == ("loss", *outputs) and isinstance(found, type(right))
            assert all(torch.equal(a, b) for a, b in zip(found, right))
            outputs = ("entropy", "lse")
        """
    )
