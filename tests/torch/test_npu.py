"""Test tensors on an Ascend NPU: values, gradients, the order of torch's stream, and refused calls."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st
from loss_formulas import Formula
from torch_npu_stand_in import NCDHW, NCHW, ND
from torch_oracles import assert_close, linear_cross_entropy, pending, value_and_gradients

import ascend_grad as ag
import ascend_grad.torch as agt
from ascend_grad import npu
from ascend_grad.backends.ascend import runtime

pytestmark = pytest.mark.usefixtures("torch_npu")

SOFTMAXES = {"softmax": torch.softmax, "log_softmax": torch.log_softmax}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
COPIES = ("copies_h2h", "copies_h2d", "copies_d2h", "copies_d2d")
BT, H, V = 9, 6, 130


def masked(x: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.softmax((x * scale).masked_fill(mask, -10000.0), -1)


def copies(device) -> dict[str, int]:
    return {name: count for name in COPIES if (count := device.counter(name))}


@st.composite
def layouts(draw: st.DrawFn) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor], int]:
    """Draw a tensor, a function that returns a view of it, and one of the view's dimensions."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    skip, step = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    order = draw(st.permutations(range(len(shape))))
    repeated = draw(st.booleans())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    stored = torch.randn([skip + step * n for n in shape], generator=generator)

    def view(stored: torch.Tensor) -> torch.Tensor:
        x = stored[tuple(slice(skip, None, step) for _ in shape)].permute(order)
        return x.unsqueeze(0).expand(2, *x.shape) if repeated else x

    rank = len(shape) + repeated
    return stored, view, draw(st.integers(-rank, rank - 1))


# ---- values and gradients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SOFTMAXES)
def test_values_and_gradients(name: str, dtype: torch.dtype, device):
    x, above = torch.randn(4, 5, 6).to(dtype), torch.randn(4, 5, 6).to(dtype)
    there = x.to("npu")
    value, grad = value_and_gradients(lambda x: getattr(agt, name)(x, 1), [there], above.to("npu"))
    assert value.device == grad.device == there.device == torch.device("npu:0")
    assert value.dtype == grad.dtype == dtype
    assert value.is_contiguous()
    assert_close(value.cpu(), SOFTMAXES[name](x.double(), 1), dtype)
    backward = {"softmax": torch._softmax_backward_data, "log_softmax": torch._log_softmax_backward_data}[name]
    right = backward(above.double(), value.cpu().double(), 1, torch.float64)
    assert_close(grad.cpu(), right, dtype, steps=4)  # the device rounds sums and products to float32
    device.reset()
    getattr(agt, name)(there)
    assert copies(device) == {}
    assert (device.counter("launches"), device.counter("mallocs")) == (1, 0)


@pytest.mark.parametrize("name", SOFTMAXES)
@given(layout=layouts())
def test_any_layout(name: str, layout):
    stored, view, dim = layout
    there = stored.to("npu")
    above = torch.linspace(-1, 2, view(stored).numel()).reshape(view(stored).shape)
    ours = value_and_gradients(lambda stored: getattr(agt, name)(view(stored), dim), [there], above.to("npu"))
    right = value_and_gradients(lambda stored: SOFTMAXES[name](view(stored), dim), [stored.double()], above.double())
    for each, expected in zip(ours, right, strict=True):
        torch.testing.assert_close(each.cpu().double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2)], ids=str)
@pytest.mark.parametrize("name", SOFTMAXES)
def test_no_dimensions_and_no_elements(name: str, shape: tuple[int, ...]):
    x = torch.randn(shape)
    value, grad = value_and_gradients(getattr(agt, name), [x.to("npu")], torch.ones(shape, device="npu"))
    assert value.device == grad.device == torch.device("npu:0")
    torch.testing.assert_close(value.cpu().detach(), SOFTMAXES[name](x, -1))
    assert grad.shape == x.shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask_shape", [(2, 3, 4, 5), (1, 1, 4, 5)], ids=str)
def test_masked_values_and_gradients(mask_shape: tuple[int, ...], dtype: torch.dtype):
    x, above = torch.randn(2, 4, 3, 5).to(dtype).transpose(1, 2), torch.randn(2, 3, 4, 5).to(dtype)
    mask = (torch.rand(*mask_shape, 2) < 0.5)[..., 1]
    mask[..., 0, :] = True
    there = mask.to("npu")
    assert_close(
        agt.scaled_masked_softmax(x.to("npu"), there, 0.5).cpu(), masked(x.double(), mask, 0.5), dtype, steps=2
    )
    _, grad = value_and_gradients(lambda x: agt.scaled_masked_softmax(x, there, 0.5), [x.to("npu")], above.to("npu"))
    _, right = value_and_gradients(lambda x: masked(x, mask, 0.5), [x.double()], above.double())
    assert_close(grad.cpu(), right, dtype, steps=6)


def problem(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    target = torch.randint(0, V, (BT,))
    target[[2, 3, 7]] = -100
    return torch.randn(BT, H).to(dtype), torch.randn(V, H).to(dtype), target


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("how", ["plain", "strided", "a weight for each class"])
def test_linear_cross_entropy(how: str, reduction: str, dtype: torch.dtype):
    x, w, target = problem(dtype)
    weight = torch.rand(V).to(dtype) if how == "a weight for each class" else None
    above = torch.randn(BT if reduction == "none" else ()).to(dtype)
    there = [x.to("npu"), w.to("npu"), target.to("npu")]
    if how == "strided":
        there[0], there[1] = x.T.contiguous().to("npu").T, torch.cat([w, w], 1).to("npu")[:, H:]
        there[2] = torch.stack([target, target], 1).to("npu")[:, 1]
    weight_there = None if weight is None else weight.to("npu")
    value, *grads = value_and_gradients(
        lambda x, w: agt.linear_cross_entropy(x, w, there[2], weight=weight_there, reduction=reduction),
        there[:2],
        above.to("npu"),
    )
    right, *right_grads = value_and_gradients(
        lambda x, w: linear_cross_entropy(
            x, w, target, weight=None if weight is None else weight.double(), reduction=reduction
        ),
        [x.double(), w.double()],
        above.double(),
    )
    assert (value.device, value.dtype, value.shape) == (torch.device("npu:0"), dtype, right.shape)
    assert_close(value.cpu(), right, dtype, steps=4)  # logits and their factors are rounded to 16 bits
    for grad, right_grad in zip(grads, right_grads, strict=True):
        assert grad.dtype == dtype
        assert_close(grad.cpu(), right_grad, dtype, steps=8)
    if reduction == "none":
        assert torch.equal(value.cpu()[target == -100].detach(), torch.zeros(3, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("denominator", [None, 2.5])
@pytest.mark.parametrize("outputs", [(), ("lse",), ("log_prob",), ("lse", "log_prob")], ids=str)
def test_options_and_outputs(outputs: tuple[str, ...], denominator: float | None, reduction: str, dtype: torch.dtype):
    """The loss and its outputs have the values and gradients of their formulas, with weights and a denominator."""
    x, w, target = problem(dtype)
    weight, token_weight = torch.rand(V), torch.rand(BT)
    token_weight[:4] = 0
    formula = Formula(denominator=denominator, weight=weight.double(), token_weight=token_weight.double())
    names = "loss", *outputs
    above = [torch.randn(BT if name != "loss" or reduction == "none" else ()) for name in names]

    def right(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        found = {"loss": formula.loss(x, w, None, target, reduction)} | formula.outputs(x, w, None, target)
        return [found[name] for name in names]

    def ours(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        options = {"weight": weight.to("npu"), "token_weight": token_weight.to("npu"), "outputs": outputs}
        found = agt.linear_cross_entropy(
            x, w, target.to("npu"), reduction=reduction, denominator=denominator, **options
        )
        return list(found) if outputs else [found]

    leaves = [each.to("npu").requires_grad_() for each in (x, w)]
    found = ours(*leaves)
    grads = torch.autograd.grad(found, leaves, [each.to("npu", value.dtype) for each, value in zip(above, found)])
    right_leaves = [each.double().requires_grad_() for each in (x, w)]
    rights = right(*right_leaves)
    right_grads = torch.autograd.grad(rights, right_leaves, [each.double() for each in above])
    for name, value, right_value in zip(names, found, rights, strict=True):
        assert value.dtype == (dtype if name == "loss" else torch.float32)
        assert_close(value.cpu(), right_value, dtype, steps=4)
        if name != "loss":
            assert not value.cpu()[target == -100].any()
    for grad, right_grad in zip(grads, right_grads, strict=True):
        assert grad.dtype == dtype
        assert_close(grad.cpu(), right_grad, dtype, steps=8)


def test_modules_and_calls_of_other_libraries():
    x, w, target = (each.to("npu") for each in problem(torch.bfloat16))
    module = agt.LinearCrossEntropyLoss(H, V, linear_weight=torch.nn.Parameter(w))
    right = F.cross_entropy(x.cpu().double() @ w.cpu().double().T, target.cpu())
    for loss in (
        module(x, target),
        agt.compat.cce.linear_cross_entropy(x[None], w, target[None]),
        agt.compat.liger.LigerFusedLinearCrossEntropyLoss()(w, x, target),
    ):
        assert_close(loss.cpu(), right, torch.bfloat16, steps=2)
    module(x, target).backward()
    assert module.linear.weight.grad.device == x.device
    fresh = agt.LinearCrossEntropyLoss(H, V, device="npu", dtype=torch.bfloat16)
    assert fresh(x, target).device == x.device


def test_autocast():
    x, w, target = (each.to("npu") for each in problem(torch.float32))
    with torch.autocast("npu", torch.bfloat16):
        loss, *grads = value_and_gradients(lambda x, w: agt.linear_cross_entropy(x, w, target), [x, w])
    assert (loss.dtype, *(grad.dtype for grad in grads)) == (torch.float32,) * 3
    right = F.cross_entropy(x.cpu().bfloat16().double() @ w.cpu().bfloat16().double().T, target.cpu())
    assert_close(loss.cpu(), right, torch.bfloat16)


def test_batches_and_gradients_of_gradients():
    x = torch.randn(3, 4, 5)
    there = torch.vmap(agt.softmax, in_dims=1)(x.to("npu"))
    assert_close(there.cpu(), torch.vmap(lambda x: torch.softmax(x, -1), in_dims=1)(x.double()), torch.float32)

    def second(function, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(function(x, -1)[..., 0].sum(), x, create_graph=True)
        return torch.autograd.grad(grad[..., 1].sum(), x)[0]

    for name, function in SOFTMAXES.items():
        ours = second(getattr(agt, name), x.to("npu"))
        assert_close(ours.cpu(), second(function, x.double()), torch.float32, steps=10)


@pytest.mark.parametrize("name", SOFTMAXES)
def test_batches_of_upstream_gradients(name: str):
    """Upstream gradients of torch's older batching, whose tensors have no memory, give the right gradients."""
    x, above = torch.randn(4, 5), torch.randn(3, 4, 5)

    def gradients(function, x: torch.Tensor, above: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(function(x, -1), x, above, is_grads_batched=True)[0]

    ours = gradients(getattr(agt, name), x.to("npu"), above.to("npu"))
    assert ours.device.type == "npu"
    right = gradients(SOFTMAXES[name], x.double(), above.double())
    assert_close(ours.cpu(), right, torch.float32, steps=4)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_batches_of_upstream_gradients_of_the_loss(reduction: str):
    x, w, target = problem(torch.bfloat16)
    above = torch.randn(3, *((BT,) if reduction == "none" else ())).bfloat16()

    def gradients(function, x, w, target, above) -> tuple[torch.Tensor, ...]:
        leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        return torch.autograd.grad(function(*leaves, target, reduction=reduction), leaves, above, is_grads_batched=True)

    ours = gradients(agt.linear_cross_entropy, *(each.to("npu") for each in (x, w, target, above)))
    rights = gradients(linear_cross_entropy, x.double(), w.double(), target, above.double())
    for grad, right in zip(ours, rights, strict=True):
        assert grad.device.type == "npu"
        assert_close(grad.cpu(), right, torch.bfloat16, steps=8)


@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_gradients_are_scaled_where_they_are(factor: float, device):
    """Backward scales the gradients without computing them again, and does nothing for a factor of 1."""
    x, w, target = (each.to("npu") for each in problem(torch.bfloat16))
    leaves = [x.requires_grad_(), w.requires_grad_()]
    loss = agt.linear_cross_entropy(*leaves, target)
    device.reset()
    grads = torch.autograd.grad(loss, leaves, torch.full_like(loss, factor))
    assert device.calls("aclnnFusedLinearCrossEntropyLossGrad") == 0
    rights = value_and_gradients(
        lambda x, w: factor * linear_cross_entropy(x, w, target.cpu()),
        [each.detach().cpu().double() for each in leaves],
    )[1:]
    for grad, right in zip(grads, rights, strict=True):
        assert_close(grad.cpu(), right, torch.bfloat16, steps=8)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated.*:DeprecationWarning")  # torch's tracing warns
def test_compiled():
    x = torch.randn(4, 5).to("npu").requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: agt.softmax(2 * x, 0), fullgraph=True, backend="aot_eager")
    right = value_and_gradients(lambda x: torch.softmax(2 * x, 0), [x.detach().cpu().double()], torch.ones(4, 5))
    for each, expected in zip(value_and_gradients(compiled, [x], torch.ones(4, 5).to("npu")), right, strict=True):
        assert_close(each.cpu(), expected, torch.float32, steps=4)


# ---- the order of torch's stream -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("slowly")
def test_what_torch_has_yet_to_compute_is_waited_for():
    y, values = pending()
    assert_close(agt.softmax(y).cpu(), torch.softmax(values, -1), torch.float32)
    y, values = pending()
    assert_close(torch.softmax(agt.log_softmax(y), -1).cpu(), torch.softmax(values, -1), torch.float32)
    y, values = pending()
    assert_close(torch.from_numpy(npu.asarray(y.T).numpy()), values.T, torch.float32)


@pytest.mark.usefixtures("slowly")
def test_memory_that_torch_gives_out_again_while_it_is_in_use():
    """A result reuses, in stream order, the memory of a dropped tensor whose work is still under way."""
    x = torch.randn(64, 65)
    there = x.to("npu")
    for _ in range(3):
        torch.softmax(there * 0, -1)  # the result is dropped immediately
        result = agt.softmax(there)
        assert_close(result.cpu(), torch.softmax(x.double(), -1), torch.float32)


@pytest.mark.usefixtures("slowly")
def test_memory_that_torch_gives_back_while_it_is_in_use(torch_npu, device):
    """Another array gets the memory of a dropped tensor once torch's work on this memory has ended."""
    npu.release()
    x, other = torch.randn(64, 65), np.zeros((64, 65), np.float32)
    array = npu.asarray(x)
    tensor = torch.from_dlpack(array)
    del array
    result = torch.softmax(tensor, -1)
    assert torch_npu.npu.current_stream(0).npu_stream
    mallocs = device.counter("mallocs")
    del tensor
    array = npu.asarray(other)
    assert device.counter("mallocs") == mallocs
    assert_close(result.cpu(), torch.softmax(x.double(), -1), torch.float32)
    assert not array.numpy().any()


def test_failures_leave_nothing_behind(device):
    x = torch.randn(4, 5).to("npu").requires_grad_()
    right = agt.softmax(x)
    for function in ("aclCreateTensor", "aclnnSoftmaxGetWorkspaceSize", "aclnnSoftmax"):
        npu.release()
        device.fail(function, 0, 507899)
        with pytest.raises(ag.AclError):
            agt.softmax(x)
        device.reset()
        assert torch.equal(agt.softmax(x).cpu(), right.cpu())


# ---- refused calls ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOFTMAXES)
def test_what_the_device_does_not_take(name: str, device):
    function = getattr(agt, name)
    double = torch.zeros(3, dtype=torch.float64).to("npu")
    integers, packed = torch.zeros(3, dtype=torch.int16).to("npu"), torch.zeros(3, dtype=torch.uint8).to("npu")
    sparse = torch.zeros(3).to_sparse()
    device.reset()
    with pytest.raises(ag.ParamTypeError, match=f"{name}: input: the device supports dtype float32 .*, got float64"):
        function(double)
    with pytest.raises(ag.ParamTypeError, match=f"{name}: input: expected dtype float32, .* got int16"):
        function(integers)
    with pytest.raises(ag.ParamTypeError, match=f"{name}: input: expected a dtype that NumPy has, got torch.float4_"):
        function(packed.view(torch.float4_e2m1fn_x2))
    with pytest.raises(ag.ParamTypeError, match=f"{name}: input: expected a dense tensor"):
        function(sparse)
    with pytest.raises(ag.ParamInvalidError, match=f"{name}: dim: expected a value in"):
        function(double.float(), 1)
    device.reset()
    x, w, target = (each.to("npu") for each in problem(torch.float32))
    assert agt.linear_cross_entropy(x.half(), w.half(), torch.full((BT,), V).to("npu")).isnan().item()
    for option in ({"outputs": ("lse", "predicted")}, {"weight": w[:, 0].half(), "outputs": ("predicted",)}):
        pattern = "linear_cross_entropy: outputs: the device's operators do not support predicted in the loss"
        with pytest.raises(ag.ParamInvalidError, match=pattern):
            agt.linear_cross_entropy(x.half(), w.half(), target.to("npu"), **option)


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4), (2, 3, 4, 5), (1, 2, 3, 4, 5)], ids=str)
def test_formats_of_new_tensors(torch_npu, shape: tuple[int, ...]):
    x = torch.randn(shape)
    assert torch_npu.get_npu_format(x.to("npu")) == {4: NCHW, 5: NCDHW}.get(len(shape), ND)
    assert_close(agt.softmax(x.to("npu")).cpu(), torch.softmax(x.double(), -1), torch.float32)


def test_base_formats_are_labels(torch_npu):
    x = torch.randn(2, 3, 4, 5)
    there = x.to("npu")
    cast = torch_npu.npu_format_cast(there, ND)
    assert cast.untyped_storage().data_ptr() == there.untyped_storage().data_ptr()
    assert torch_npu.get_npu_format(there) == torch_npu.get_npu_format(cast) == ND
    assert_close(agt.softmax(cast).cpu(), torch.softmax(x.double(), -1), torch.float32)


def test_the_current_stream_is_by_default_that_of_the_current_device(torch_npu):
    for index in (0, 1):
        with torch_npu.npu.device(index):
            assert torch_npu.npu.current_stream().npu_stream == torch_npu.npu.current_stream(index).npu_stream


def test_devices_do_not_mix():
    x, mask = torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 2, 3, dtype=torch.bool)
    for first, second in [("npu:0", "cpu"), ("cpu", "npu:0"), ("npu:0", "npu:1")]:
        expected = f"scaled_masked_softmax: mask: expected a tensor on {first}, like x, got one on {second}"
        with pytest.raises(ag.ParamTypeError, match=expected):
            agt.scaled_masked_softmax(x.to(first), mask.to(second))
    x, w, target = problem(torch.float16)
    for name, tensors in {
        "linear_weight": (x.to("npu"), w, target.to("npu")),
        "target": (x.to("npu"), w.to("npu"), target),
    }.items():
        with pytest.raises(ag.ParamTypeError, match=f"linear_cross_entropy: {name}: expected a tensor on npu:0, like "):
            agt.linear_cross_entropy(*tensors)
    with pytest.raises(ag.ParamTypeError, match="linear_cross_entropy: weight: expected a tensor on npu:0"):
        agt.linear_cross_entropy(x.to("npu"), w.to("npu"), target.to("npu"), weight=torch.ones(V))


def test_memory_that_the_device_cannot_read(torch_npu):
    x = torch.zeros(64).to("npu")
    capsule = x[3:].__dlpack__()  # the device cannot read at the address of x[3:]
    with pytest.raises(ag.ParamInvalidError, match=r"input: expected memory at a multiple of 32 bytes"):
        agt.softmax(torch.from_dlpack(capsule))


def test_without_a_usable_device(monkeypatch: pytest.MonkeyPatch):
    x = torch.zeros(3).to("npu:1")
    monkeypatch.setitem(runtime.found, "state", runtime.State((False, "lost")))
    for call in (agt.softmax, npu.asarray):
        with pytest.raises(ag.BackendUnavailableError, match="device 1 cannot be used: lost"):
            call(x)
    monkeypatch.setitem(runtime.found, "state", runtime.State((True, "1 device, Ascend910B2"), 1, "Ascend910B2"))
    with pytest.raises(ag.BackendUnavailableError, match="softmax: device 1 cannot be used: 1 device, Ascend910B2"):
        agt.softmax(x)
    monkeypatch.delitem(sys.modules, "torch_npu")
    with pytest.raises(ag.BackendUnavailableError, match=r"softmax: .* torch_npu is not imported"):
        agt.softmax(x)


# ---- arrays over tensors, and tensors over arrays --------------------------------------------------------------------


def test_arrays_over_tensors(device):
    x = torch.randn(6, 8)
    there = x.to("npu")
    device.reset()
    for tensor, values in [(there, x), (there[2:, 1::2], x[2:, 1::2]), (there.T, x.T), (there[0, 0], x[0, 0])]:
        array = npu.asarray(tensor)
        assert (array.shape, array.dtype, array.device) == (tuple(tensor.shape), "float32", 0)
        assert copies(device) == {}
        result = ag.softmax(array)
        assert isinstance(result, npu.DeviceArray)
        assert copies(device) == {}
        assert_close(torch.from_numpy(result.numpy()), torch.softmax(values.double(), -1), torch.float32)
        assert torch.equal(torch.from_numpy(array.numpy()), values)
        device.reset()
    on_the_other = npu.asarray(x.to("npu:1"))
    assert on_the_other.device == 1
    assert ag.softmax(on_the_other).device == 1


def test_arrays_show_what_torch_writes():
    there = torch.zeros(4, dtype=torch.int64).to("npu")
    array = npu.asarray(there)
    assert array.host_values().tolist() == [0] * 4
    there.add_(3)
    assert array.host_values().tolist() == array.numpy().tolist() == [3] * 4


def test_tensors_that_are_no_arrays():
    x = torch.zeros(3).to("npu")
    with pytest.raises(ag.ParamTypeError, match=r"x: expected a tensor that does not require grad, got one that does"):
        npu.asarray(x.clone().requires_grad_())
    with pytest.raises(
        ag.ParamTypeError, match=r"x: expected a tensor whose class does not override torch's functions, got .*Mine"
    ):
        npu.asarray(x.as_subclass(type("Mine", (torch.Tensor,), {"__torch_function__": classmethod(print)})))
    with pytest.raises(
        ag.ParamTypeError, match=r"x: expected a tensor with memory, got one of shape .*; use ascend_grad.torch"
    ):
        torch.vmap(npu.asarray)(x)
    with pytest.raises(ag.ParamTypeError, match=r"^npu\.asarray: x: expected one of the .*, got float64"):
        npu.asarray(torch.zeros(3, dtype=torch.float64).to("npu"))  # x.double() is float32 on a device
    with pytest.raises(ag.ParamInvalidError, match=r"^npu\.asarray: x: expected rank 0 to 8, got rank 9"):
        npu.asarray(x.reshape((1,) * 8 + (3,)))


def test_tensors_over_arrays(device):
    x = torch.randn(5, 6)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        array = npu.asarray((x * 3).to(dtype))
        device.reset()
        tensor = torch.from_dlpack(array)
        assert copies(device) == {}
        assert (tensor.device, tensor.dtype) == (torch.device("npu:0"), dtype)
        assert torch.equal(tensor.cpu(), (x * 3).to(dtype))
    back = torch.from_dlpack(npu.asarray(x.to("npu:1").T))
    assert (back.device, back.stride()) == (torch.device("npu:1"), (1, 6))
    assert torch.equal(back.cpu(), x.T)
    assert torch.from_dlpack(npu.asarray(torch.zeros(0, 3))).shape == (0, 3)
    result = torch.from_dlpack(ag.softmax(npu.asarray(x)))
    assert_close(result.cpu(), torch.softmax(x.double(), -1), torch.float32)


@pytest.mark.parametrize("stride", [2**62, 2**63 - 1])
def test_strides_that_lead_to_no_element_may_be_anything(stride):
    """The stride of an axis of length 1 has no effect.

    The stride may overflow as a number of bytes, or as an argument of the device.
    """
    x = torch.arange(3.0)
    there = x.to("npu").as_strided((1, 3), (stride, 1))
    array = npu.asarray(there)
    assert np.array_equal(array.numpy(), x[None])
    assert torch.equal(torch.from_dlpack(array).cpu(), x[None])
    assert_close(agt.softmax(there).cpu(), torch.softmax(x[None].double(), -1), torch.float32)


def test_what_torch_writes_into_an_array_is_looked_at_again():
    """Values of an array that torch may have changed are checked again, so that no invalid target is computed."""
    x, w, target = problem(torch.bfloat16)
    target[target < 0] = 0
    there = [npu.asarray(each) for each in (x, w, target, torch.ones(BT))]
    stats = ag.fused_linear_online_max_sum(*there[:3], 0, V)

    def gradient(targets, mask=stats.target_mask):
        statistics = {"logits_max": stats.logits_max, "sum_exp_logits": stats.sum_exp_logits}
        return ag.fused_linear_cross_entropy_loss_grad(there[3], *there[:2], mask, targets, **statistics)

    right = [each.numpy() for each in gradient(stats.masked_target)]
    tensor = torch.from_dlpack(stats.masked_target)
    for each, expected in zip(gradient(stats.masked_target), right, strict=True):
        assert each.numpy().tobytes() == expected.tobytes()
    tensor[3] = V
    with pytest.raises(ag.ParamInvalidError, match=r"masked_target: expected values in .*, got 130 in row 3"):
        gradient(stats.masked_target)
    gradients = torch.from_dlpack(there[3])
    gradients[3] = 0
    tensor[3] = 0
    assert not gradient(stats.masked_target)[0].numpy()[3].any()
    mask = npu.asarray(torch.zeros(BT, dtype=torch.bool).to("npu"))
    assert not gradient(stats.masked_target, mask)[0].numpy()[3].any()


# ---- lifetime of memory ----------------------------------------------------------------------------------------------


def allocations(device) -> int:
    """Free unused memory of the library and of torch, and return the number of allocations on the device."""
    npu.release()
    torch.npu.empty_cache()
    return device.counter("device_allocations")


def test_memory_lives_as_long_as_either_side(device):
    before = allocations(device)
    array = npu.asarray(torch.arange(5000.0))
    tensor = torch.from_dlpack(array)
    assert array.storage.is_shared
    del array
    gc.collect()
    npu.release()
    assert torch.equal(tensor[::2].cpu(), torch.arange(5000.0)[::2])
    part = tensor[:3]
    del tensor
    thread = threading.Thread(target=lambda held: held.clear(), args=([part],))
    del part
    thread.start()
    thread.join()
    assert allocations(device) == before

    array = npu.asarray(torch.arange(5000.0))
    tensor = torch.from_dlpack(array)
    del tensor
    assert not array.storage.is_shared
    array.__dlpack__()  # this capsule is never imported
    assert array.numpy()[7] == 7
    del array
    assert allocations(device) == before

    there = torch.randn(3).to("npu")
    right = there.cpu()
    array = npu.asarray(there)
    del there
    gc.collect()
    torch.zeros(3).to("npu")  # torch would reuse the memory if it were free
    assert array.numpy().tolist() == right.tolist()


def test_results_are_torchs(torch_npu, device):
    x = torch.randn(100, 100).to("npu")
    agt.softmax(x)  # the first call also lets torch allocate a workspace
    before = torch_npu.npu.memory_allocated(0)
    result = agt.softmax(x)
    assert torch_npu.npu.memory_allocated(0) >= before + 40_000
    del result
    assert torch_npu.npu.memory_allocated(0) == before
    device.reset()
    for _ in range(3):
        x = agt.softmax(x)
    assert (device.counter("mallocs"), device.counter("host_mallocs")) == (0, 0)
