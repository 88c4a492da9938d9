"""Test the fused operators on tensors: values, tracing, missing gradients, and functions with torch_npu's names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch_npu_real
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch_oracles import assert_close, value_and_gradients

import ascend_grad as ag
import ascend_grad.torch as agt
from ascend_grad.torch.compat import torch_npu as compat

BT, H, V = 9, 6, 130

#: Error message of an operator without a gradient, which names a function that has gradients.
NO_GRADIENT = "the operator has no gradient for autograd; use .*linear_cross_entropy"


def problem(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(BT, H).to(dtype), torch.randn(V, H).to(dtype), torch.randint(0, V, (BT,))


def chain(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor, *, stored: bool) -> tuple[torch.Tensor, ...]:
    """Compute the loss of each row, and the gradients for the upstream gradients 1, 2, ..."""
    found = agt.fused_linear_online_max_sum(x, w, target, 0, len(w), return_logits=stored)
    maximum, total, predicted, mask, masked_target, logits = found
    loss, softmax = agt.fused_cross_entropy_loss_with_max_sum(maximum, total, predicted, vocab_parallel_logits=logits)
    above = (torch.arange(len(x)) + 1).to(loss)
    mode = (None, None, softmax) if stored else (maximum, total, None)
    return loss, *agt.fused_linear_cross_entropy_loss_grad(above, x, w, mask, masked_target, 0.0, *mode)


def right_chain(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute the losses and gradients of `chain` by torch in float64."""
    x, w, target = (each.cpu() for each in (x, w, target))
    return value_and_gradients(
        lambda x, w: torch.nn.functional.cross_entropy(x @ w.T, target, reduction="none"),
        [x.double(), w.double()],
        torch.arange(BT) + 1.0,
    )


@pytest.mark.parametrize("stored", [False, True])
def test_a_chain(dtype: torch.dtype, stored: bool):
    x, w, target = problem(dtype)
    results = chain(x, w, target, stored=stored)
    accumulator = torch.promote_types(dtype, torch.float32)
    assert [each.dtype for each in results] == [accumulator, dtype, dtype]
    for each, right in zip(results, right_chain(x, w, target), strict=True):
        assert_close(each, right, dtype, steps=8)


def arrays(tensor: torch.Tensor) -> np.ndarray:
    return tensor.numpy()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("wanted", [(True, True), (False, True), (True, False), (False, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_results_are_those_of_arrays(dtype: torch.dtype, wanted: tuple[bool, bool], packed: bool):
    """Results of a shard, with all options, are bit for bit equal to the results of calls on arrays."""
    x, w, target = problem(dtype)
    shard = x, w[20:60], target.int()
    statistics = agt.fused_linear_online_max_sum(*shard, 20, 58, return_logits=True, num_threads=1)
    rights = ag.fused_linear_online_max_sum(*map(arrays, shard), 20, 58, return_logits=True)
    assert statistics._fields == rights._fields
    for each, right in zip(statistics, rights, strict=True):
        assert np.array_equal(each.numpy(), right)
        assert each.numpy().dtype == right.dtype
    logits = statistics.vocab_parallel_logits
    loss, softmax = agt.fused_cross_entropy_loss_with_max_sum(*statistics[:3], 0, vocab_parallel_logits=logits)
    rights = ag.fused_cross_entropy_loss_with_max_sum(
        *map(arrays, statistics[:3]), vocab_parallel_logits=logits.numpy()
    )
    assert np.array_equal(loss.numpy(), rights[0])
    assert np.array_equal(softmax.numpy(), rights[1])
    mask = statistics.target_mask if packed else (shard[2] < 20) | (shard[2] >= 58)
    given = torch.rand(BT, dtype=dtype), x, shard[1], mask, statistics.masked_target
    options = {"output_mask": wanted, "workspace_bytes": 4 << 20, "filter_eps": 1e-9, "num_threads": 1}
    results = agt.fused_linear_cross_entropy_loss_grad(
        *given, logits_max=statistics.logits_max, sum_exp_logits=statistics.sum_exp_logits, **options
    )
    rights = ag.fused_linear_cross_entropy_loss_grad(
        *map(arrays, given), 0.0, statistics.logits_max.numpy(), statistics.sum_exp_logits.numpy(), **options
    )
    for each, right in zip(results, rights, strict=True):
        assert (each is None) == (right is None)
        assert each is None or np.array_equal(each.numpy(), right)


def test_results_that_are_not_asked_for():
    x, w, target = problem(torch.float32)
    statistics = agt.fused_linear_online_max_sum(x, w, target, 0, V)
    assert statistics.vocab_parallel_logits is None
    assert agt.fused_cross_entropy_loss_with_max_sum(*statistics[:3])[1] is None


def test_the_softmax_is_not_modified_and_wins():
    x, w, target = problem(torch.bfloat16)
    statistics = agt.fused_linear_online_max_sum(x, w, target, 0, V, return_logits=True)
    _, softmax = agt.fused_cross_entropy_loss_with_max_sum(*statistics[:3], vocab_parallel_logits=statistics[5])
    before = softmax.clone()
    agt.fused_linear_cross_entropy_loss_grad(torch.ones(BT), x, w, *statistics[3:5], 0.0, "nothing", None, softmax)
    assert torch.equal(softmax, before)


# ---- gradients -------------------------------------------------------------------------------------------------------


class Loss(torch.autograd.Function):
    """Compute the sum of the losses, with gradients by the third operator.

    Code for torch_npu defines a function of autograd in this way.
    """

    @staticmethod
    def forward(ctx, x, w, target):
        *statistics, mask, masked_target, _ = compat.npu_fused_linear_online_max_sum(x, w, target, 0, len(w), False)
        loss, _ = compat.npu_fused_cross_entropy_loss_with_max_sum(*statistics, label_smoothing=0.0)
        ctx.save_for_backward(x, w, mask, masked_target, *statistics[:2])
        return loss.sum()

    @staticmethod
    def backward(ctx, above):
        x, *others, maximum, total = ctx.saved_tensors
        grad = above.float().expand(len(x)).contiguous()
        gradients = compat.npu_fused_linear_cross_entropy_loss_with_max_sum_backward(
            grad, x, *others, 0.0, maximum, total, None
        )
        return *gradients, None


def test_a_function_of_autograd_gives_them_gradients():
    x, w, target = problem(torch.bfloat16)
    results = value_and_gradients(lambda x, w: Loss.apply(x, w, target), [x, w])
    rights = value_and_gradients(
        lambda x, w: torch.nn.functional.cross_entropy(x @ w.T, target, reduction="sum"), [x.double(), w.double()]
    )
    for each, right in zip(results, rights, strict=True):
        assert_close(each, right, torch.bfloat16, steps=4)


def calls_with_gradients() -> dict[str, Callable[[], torch.Tensor]]:
    """Return, for each operator, a call whose result depends on a tensor that requires grad."""
    x, w, target = problem(torch.float32)
    statistics = agt.fused_linear_online_max_sum(x, w, target, 0, V)
    x.requires_grad_()
    rest = torch.ones(BT), x, w, *statistics[3:5], 0.0, *statistics[:2]
    ops = torch.ops.ascend_grad
    return {
        "statistics": lambda: agt.fused_linear_online_max_sum(x, w, target, 0, V).predicted_logits,
        "frozen input": lambda: (
            agt.fused_linear_online_max_sum(
                x.detach(), w.clone().requires_grad_(), target, 0, V, return_logits=True
            ).vocab_parallel_logits
        ),
        "loss": lambda: agt.fused_cross_entropy_loss_with_max_sum(*(2 * x[:, 0].exp() for _ in range(3)))[0],
        "gradient": lambda: agt.fused_linear_cross_entropy_loss_grad(*rest)[1],
        "statistics, as an operator": lambda: ops.fused_linear_online_max_sum(x, w, target, 0, V, False, None)[1],
        "gradient, as an operator": lambda: ops.fused_linear_cross_entropy_loss_grad(
            *rest, None, [True, True], None, 0.0, None
        )[0],
    }


@pytest.mark.parametrize("name", calls_with_gradients())
def test_backward_is_an_error_and_no_zero(name: str):
    call = calls_with_gradients()[name]
    result = call()
    assert result.requires_grad
    with pytest.raises(NotImplementedError, match=rf"^fused_\w+: {NO_GRADIENT}"):
        result.sum().backward()
    with torch.no_grad():
        assert not call().requires_grad


def test_integers_do_not_depend_on_what_requires_grad():
    x, w, target = problem(torch.float32)
    statistics = agt.fused_linear_online_max_sum(x.requires_grad_(), w, target, 0, V)
    assert [each.requires_grad for each in statistics[:5]] == [True] * 3 + [False] * 2
    statistics.sum_exp_logits.mul_(2)  # programs over several ranks also change the sums in place


def test_transforms_have_no_gradient_either():
    x, w, target = problem(torch.float32)
    with pytest.raises(NotImplementedError, match=NO_GRADIENT):
        torch.func.grad(lambda x: agt.fused_linear_online_max_sum(x, w, target, 0, V).logits_max.sum())(x)


# ---- tracing, transforms, tensors without values ---------------------------------------------------------------------

CHAINS = [functools.partial(chain, stored=stored) for stored in (False, True)]


def described(tensors: tuple[torch.Tensor, ...]) -> list[tuple]:
    return [(each.shape, each.dtype, each.stride()) for each in tensors]


@pytest.mark.parametrize("function", CHAINS)
def test_tensors_without_values(dtype: torch.dtype, function: Callable):
    tensors = problem(dtype)
    right = described(function(*tensors))
    assert described(function(*(each.to("meta") for each in tensors))) == right
    with FakeTensorMode() as mode:
        assert described(function(*map(mode.from_tensor, tensors))) == right


@pytest.mark.parametrize("function", CHAINS)
def test_graphs(function: Callable):
    tensors, others = problem(torch.float32), problem(torch.float32)
    graph = make_fx(function, tracing_mode="symbolic")(*tensors)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    compiled(*tensors)
    for each in (graph(*others), compiled(*others)):
        for result, right in zip(each, function(*others), strict=True):
            assert torch.equal(result, right)
    with pytest.raises(Exception, match=NO_GRADIENT):  # torch traces backward together with forward
        compiled(others[0].requires_grad_(), *others[1:])
    torch._dynamo.reset()


@pytest.mark.parametrize("function", CHAINS)
def test_one_graph_for_all_sizes(function: Callable):
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows, words in ((BT, V), (BT + 1, V - 3), (BT + 2, V + 7)):
        tensors = torch.randn(rows, H), torch.randn(words, H), torch.randint(0, words, (rows,))
        for result, right in zip(compiled(*tensors), function(*tensors), strict=True):
            assert torch.equal(result, right)
    assert counters["aot_autograd"]["ok"] == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("function", CHAINS)
def test_batches(function: Callable):
    x, w, target = problem(torch.float64)
    xs, targets = torch.stack([x, 2 * x, x - 1], 1), torch.stack([target, target.flip(0), target])
    for batched, rights in (
        (torch.vmap(function, (1, None, 0))(xs, w, targets), [function(xs[:, i], w, targets[i]) for i in range(3)]),
        (torch.vmap(function, (None, 0, None))(x, w[None], target), [function(x, w, target)]),
    ):
        for i, right in enumerate(rights):
            for each, expected in zip(batched, right, strict=True):
                assert torch.equal(each[i], expected)


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_errors():
    x, w, target = problem(torch.float32)
    statistics = agt.fused_linear_online_max_sum(x, w, target, 0, V)
    rest = torch.ones(BT), x, w, *statistics[3:5]
    for call, kind, text in (
        (lambda: agt.fused_linear_online_max_sum(x, None, target, 0, V), ag.ParamTypeError, "weight: expected a torch"),
        (lambda: agt.fused_linear_online_max_sum(x, w.half(), target, 0, V), ag.ParamTypeError, "weight: expected dty"),
        (lambda: agt.fused_linear_online_max_sum(x, w, target, 0, V + 1), ag.ParamInvalidError, "vocab_end_index: "),
        (lambda: agt.fused_linear_online_max_sum(x, w, target, 0.5, V), ag.ParamTypeError, "vocab_start_index: expect"),
        (
            lambda: agt.fused_linear_online_max_sum(x, w, target, 0, V, return_logits=1),
            ag.ParamTypeError,
            "return_logits: expected True or False",
        ),
        (
            lambda: agt.fused_linear_online_max_sum(x, w, target, 0, V, num_threads=0),
            ag.ParamInvalidError,
            "num_threads: expected None or an int",
        ),
        (
            lambda: agt.fused_cross_entropy_loss_with_max_sum(*statistics[:3], 0.1),
            ag.ParamInvalidError,
            r"label_smoothing: expected 0 \(smoothing is not supported\), got 0\.1",
        ),
        (
            lambda: agt.fused_cross_entropy_loss_with_max_sum(*statistics[:3], vocab_parallel_logits=[1.0]),
            ag.ParamTypeError,
            "vocab_parallel_logits: expected a torch.Tensor, got list",
        ),
        (lambda: agt.fused_linear_cross_entropy_loss_grad(*rest), ag.ParamNullptrError, "softmax: expected an array"),
        (
            lambda: agt.fused_linear_cross_entropy_loss_grad(*rest, 0.0, *statistics[:2], output_mask=True),
            ag.ParamTypeError,
            "output_mask: expected two of True or False",
        ),
        (
            lambda: agt.fused_linear_cross_entropy_loss_grad(*rest, 0.0, *statistics[:2], workspace_bytes=1),
            ag.ParamInvalidError,
            "workspace_bytes: expected an int of at least",
        ),
        (
            lambda: agt.fused_linear_cross_entropy_loss_grad(*rest[:4], rest[4] + V, 0.0, *statistics[:2]),
            ag.ParamInvalidError,
            r"masked_target: expected values in \[0, 130\)",
        ),
    ):
        with pytest.raises(kind, match=rf"^fused_\w+: {text}"):
            call()


# ---- functions with torch_npu's names --------------------------------------------------------------------------------


def test_signatures_are_those_of_torch_npu():
    """Each signature has the same names, positions and defaults as in torch_npu 2.13.0."""
    kinds = {inspect.Parameter.POSITIONAL_OR_KEYWORD: "", inspect.Parameter.KEYWORD_ONLY: "*"}

    def described(function: Callable) -> list[str]:
        parameters = inspect.signature(function).parameters.values()
        default = {inspect.Parameter.empty: ""}
        return [kinds[each.kind] + each.name + default.get(each.default, f"={each.default}") for each in parameters]

    assert described(compat.npu_fused_linear_online_max_sum) == [
        "input", "weight", "target", "vocab_start_index", "vocab_end_index", "return_logits=False"
    ]  # fmt: skip
    assert described(compat.npu_fused_cross_entropy_loss_with_max_sum) == [
        "logits_max", "sum_exp_logits", "predicted_logits", "*label_smoothing=0.0", "*input=None", "*weight=None",
        "*vocab_parallel_logits=None"
    ]  # fmt: skip
    assert described(compat.npu_fused_linear_cross_entropy_loss_with_max_sum_backward) == [
        "grad", "input", "weight", "target_mask", "masked_target", "label_smoothing=0.0", "logits_max=None",
        "sum_exp_logits=None", "softmax=None"
    ]  # fmt: skip


@pytest.mark.parametrize("stored", [False, True])
def test_a_chain_as_torch_npu_has_it(dtype: torch.dtype, stored: bool):
    x, w, target = problem(dtype)
    results = compat.npu_fused_linear_online_max_sum(x, w, target, 0, V, stored)
    assert type(results) is tuple
    assert (results[5] is None) == (not stored)
    *statistics, mask, masked_target, logits = results
    loss, softmax = compat.npu_fused_cross_entropy_loss_with_max_sum(
        *statistics, label_smoothing=None, input=None, weight=None, vocab_parallel_logits=logits
    )
    assert (softmax is None) == (not stored)
    above = (torch.arange(BT) + 1).to(loss)
    mode = (None, None, softmax) if stored else statistics[:2]
    gradients = compat.npu_fused_linear_cross_entropy_loss_with_max_sum_backward(
        above, x, w, mask, masked_target, 0.0, *mode
    )
    for each, right in zip((loss, *gradients), chain(x, w, target, stored=stored), strict=True):
        assert torch.equal(each, right)


def test_what_torch_npu_documents_as_none():
    given = [torch.ones(BT) for _ in range(3)]
    for name in ("input", "weight"):
        with pytest.raises(NotImplementedError, match=f"compat.torch_npu.npu_fused_cross.*: {name}: not supported"):
            compat.npu_fused_cross_entropy_loss_with_max_sum(*given, **{name: torch.ones(BT, H)})


def test_errors_name_the_functions_of_torch_npu():
    x, w, target = problem(torch.float32)
    with pytest.raises(ag.ParamTypeError, match=r"^compat.torch_npu.npu_fused_linear_online_max_sum: target: expected"):
        compat.npu_fused_linear_online_max_sum(x, w, target.double(), 0, V)
    name = "compat.torch_npu.npu_fused_linear_cross_entropy_loss_with_max_sum_backward"
    with pytest.raises(ag.ParamNullptrError, match=f"^{name}: softmax: expected"):
        compat.npu_fused_linear_cross_entropy_loss_with_max_sum_backward(torch.ones(BT), x, w, target > 0, target)
    with pytest.raises(ag.ParamInvalidError, match=r"^compat.torch_npu.npu_fused_cross\w+: label_smoothing: expected"):
        compat.npu_fused_cross_entropy_loss_with_max_sum(*[torch.ones(BT)] * 3, label_smoothing=0.1)


# Torch's own tracing causes this warning.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated.*:DeprecationWarning")
def test_compiled_as_torch_npu_has_it():
    tensors = problem(torch.bfloat16)
    torch._dynamo.reset()
    compiled = torch.compile(Loss.apply, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*tensors), Loss.apply(*tensors))
    torch._dynamo.reset()


# ---- calls on an Ascend NPU ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("torch_npu")
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_chain_on_a_device(dtype: torch.dtype, stored: bool, device):
    for place in ("npu:0", "npu:1"):
        x, w, target = (each.to(place) for each in problem(dtype))
        before = device.counter("launches")
        results = chain(x, w, target.int(), stored=stored)
        assert device.counter("launches") - before >= 3
        assert {each.device for each in results} == {torch.device(place)}
        assert [each.dtype for each in results] == [torch.float32, dtype, dtype]
        for each, right in zip(results, right_chain(x, w, target), strict=True):
            assert_close(each.cpu(), right, dtype, steps=8)


@pytest.mark.usefixtures("torch_npu")
def test_torch_npus_names_on_a_device():
    x, w, target = (each.to("npu") for each in problem(torch.bfloat16))
    results = value_and_gradients(lambda x, w: Loss.apply(x, w, target), [x, w])
    rights = value_and_gradients(
        lambda x, w: torch.nn.functional.cross_entropy(x @ w.T, target.cpu(), reduction="sum"),
        [x.cpu().double(), w.cpu().double()],
    )
    for each, right in zip(results, rights, strict=True):
        assert each.device == torch.device("npu:0")
        assert_close(each.cpu(), right, torch.bfloat16, steps=8)
    statistics = compat.npu_fused_linear_online_max_sum(x, w, target, 0, V)
    assert {each.device.type for each in statistics[:5]} == {"npu"}
    assert statistics[5] is None
    with pytest.raises(ag.ParamTypeError, match="weight: expected a tensor on npu:0, like input, got one on cpu"):
        compat.npu_fused_linear_online_max_sum(x, w.cpu(), target, 0, V)


@pytest.mark.usefixtures("torch_npu")
@pytest.mark.parametrize("name", ["softmax_backward", "log_softmax_backward"])
def test_backward_functions_on_a_device(name: str):
    g, y = torch.randn(4, 5), torch.rand(4, 5)
    found = getattr(agt, name)(g.to("npu"), y.to("npu"), 0)
    assert found.device == torch.device("npu:0")
    assert_close(found.cpu(), getattr(agt, name)(g.double(), y.double(), 0), torch.float32, steps=4)


@pytest.mark.usefixtures("torch_npu")
def test_the_masked_backward_function_on_a_device():
    g, y, mask = torch.randn(2, 3, 4, 5), torch.rand(2, 3, 4, 5), torch.rand(1, 3, 4, 5) < 0.5
    found = agt.scaled_masked_softmax_backward(g.to("npu"), y.to("npu"), mask.to("npu"), 0.5)
    right = agt.scaled_masked_softmax_backward(g.double(), y.double(), mask, 0.5)
    assert_close(found.cpu(), right, torch.float32, steps=4)


def on_device(values: tuple) -> list:
    return [each.to("npu:1") if isinstance(each, torch.Tensor) else each for each in values]


def as_tuple(results) -> tuple[torch.Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def operators_and_arguments() -> dict[str, tuple]:
    """Return arguments on the CPU for the operators of the fused functions and of the backward functions."""
    x, w, target = problem(torch.float16)
    statistics = agt.fused_linear_online_max_sum(x, w, target, 0, V, return_logits=True)
    logits = statistics.vocab_parallel_logits
    _, softmax = agt.fused_cross_entropy_loss_with_max_sum(*statistics[:3], vocab_parallel_logits=logits)
    given = torch.arange(BT) + 1.0, x, w, *statistics[3:5], 0.0
    g, y, mask = torch.randn(2, 3, 4, 5), torch.rand(2, 3, 4, 5), torch.rand(1, 3, 4, 5) < 0.5
    return {
        "fused_linear_online_max_sum": (x, w, target, 0, V, False, None),
        "fused_linear_online_max_sum with logits": (x, w, target.int(), 0, V, True, None),
        "fused_cross_entropy_loss_with_max_sum": (*statistics[:3], 0.0, None, None),
        "fused_cross_entropy_loss_with_max_sum of logits": (*statistics[:3], 0.0, logits, None),
        "fused_linear_cross_entropy_loss_grad": (*given, *statistics[:2], None, [True, True], None, 0.0, None),
        "fused_linear_cross_entropy_loss_grad stored": (*given, None, None, softmax, [False, True], None, 0.0, None),
        "softmax_backward": (g, y, 1, None),
        "log_softmax_backward": (g, y, 2, None),
        "scaled_masked_softmax_backward": (g, y, mask, torch.tensor([0.5], dtype=torch.float64), None),
    }


@pytest.mark.usefixtures("torch_npu")
@pytest.mark.parametrize("name", operators_and_arguments())
def test_registered_operators_on_a_device(name: str, device):
    arguments = operators_and_arguments()[name]
    operator = getattr(torch.ops.ascend_grad, name.split()[0])
    there = on_device(arguments)
    before = device.counter("launches")
    results = operator(*there)
    assert device.counter("launches") > before
    for each, right in zip(as_tuple(results), as_tuple(operator(*arguments)), strict=True):
        assert (each.device, each.dtype, each.shape) == (torch.device("npu:1"), right.dtype, right.shape)
        tolerance = 0.02 if right.dtype == torch.float16 else 2e-3  # logits are rounded to float16 on the device
        torch.testing.assert_close(each.cpu(), right, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("torch_npu")
@pytest.mark.parametrize("name", ["softmax_backward", "log_softmax_backward", "scaled_masked_softmax_backward"])
def test_gradients_of_backward_functions_on_a_device(name: str):
    g, y, *rest, setting, _ = operators_and_arguments()[name]
    rest.append(setting.item() if isinstance(setting, torch.Tensor) else setting)
    function = getattr(agt, name)
    # The double of torch_npu has no threads of autograd.
    with torch.autograd.set_multithreading_enabled(torch_npu_real.IS_INSTALLED):
        results = value_and_gradients(lambda g, y: function(g, y, *on_device(rest)), on_device((g, y)), g.to("npu:1"))
    rights = value_and_gradients(lambda g, y: function(g, y, *rest), [g.double(), y.double()], g.double())
    for each, right in zip(results, rights, strict=True):
        assert each.device == torch.device("npu:1")
        assert_close(each.cpu(), right, torch.float32, steps=10)


@pytest.mark.usefixtures("torch_npu")
def test_no_gradients_of_the_fused_operators_on_a_device():
    x, w, target = (each.to("npu") for each in problem(torch.float16))
    for result in (
        agt.fused_linear_online_max_sum(x.requires_grad_(), w, target, 0, V).predicted_logits,
        torch.ops.ascend_grad.fused_linear_online_max_sum(x, w, target, 0, V, False, None)[1],
    ):
        assert result.requires_grad
        with pytest.raises(NotImplementedError, match=NO_GRADIENT):
            result.sum().backward()


@pytest.mark.usefixtures("torch_npu")
@pytest.mark.parametrize("function", CHAINS)
def test_a_compiled_chain_on_a_device(function: Callable):
    tensors = [each.to("npu") for each in problem(torch.bfloat16)]
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for each, right in zip(compiled(*tensors), function(*tensors), strict=True):
        assert torch.equal(each.cpu(), right.cpu())
    torch._dynamo.reset()
