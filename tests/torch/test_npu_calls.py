"""Test `ascend_grad`'s functions on tensors of torch_npu: results, torch's stream, and refused calls."""

from __future__ import annotations

import ctypes
import re
import tracemalloc
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch_npu_real
from acl_client import StatusError
from linear_samples import GRADIENT, LINEAR, LOSS, STATISTICS, WHOLE, problem_of
from loss_samples import (
    OF_DEVICE,
    check_on_device,
    device_gradients,
    device_losses,
    unusual_gradients,
    unusual_losses,
)
from npu_tensors import (
    BFLOAT16,
    BT,
    CASES,
    H,
    V,
    arguments_of,
    bound_context,
    call_of,
    fails_and_recovers,
    on_tensors,
    results_of,
    tensor,
    values,
)  # fmt: skip
from samples import OPERATORS
from torch_oracles import assert_close

import ascend_grad as ag
import ascend_grad.torch as agt
from ascend_grad import npu, parallel
from ascend_grad.backends.ascend.tensor_queue import on_current_stream
from ascend_grad.operators.table import OPERATORS as ALL
from ascend_grad.torch.compat import torch_npu as compat

pytestmark = pytest.mark.usefixtures("torch_npu")

NAN = float("nan")
BACKWARD = "linear_cross_entropy_backward"
#: Functions of the runtime that wait or copy.
WAITING = (
    *("aclrtSynchronizeStream", "aclrtSynchronizeStreamWithTimeout", "aclrtSynchronizeDevice", "aclrtMemset"),
    *("aclrtSynchronizeDeviceWithTimeout", "aclrtSynchronizeEvent", "aclrtMemcpy", "aclrtMemcpyAsync"),
)


def assert_results(results: list, rights: list[np.ndarray]) -> None:
    assert len(results) == len(rights)
    for result, right in zip(results, rights, strict=True):
        assert result.device.type == "npu"
        assert (tuple(result.shape), str(result.dtype)) == (right.shape, f"torch.{right.dtype}")
        step = {"float32": 1e-5, "float16": 2**-9, "bfloat16": 2**-6}.get(str(right.dtype), 0)
        right = right.astype(np.float32) if right.dtype == BFLOAT16 else right
        np.testing.assert_allclose(values(result), right, rtol=step, atol=step * max(np.abs(right).max(initial=0), 1))


# ---- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("operator", "how"), CASES, ids=str)
def test_every_operator(operator: str, how: dict, dtype: str):
    positional, named = arguments_of(operator, dtype, **how)
    rights = results_of(getattr(ag, operator)(*positional, **named, backend="npu"))
    before = [tensor(each) for each in (*positional, *named.values())]
    given = {id(each): tensor(each) for each in (*positional, *named.values())}
    results = on_tensors(operator, positional, named, lambda each: given[id(each)])
    assert all(type(each) is torch.Tensor for each in results)
    assert_results(results, rights)
    for each, copy in zip(given.values(), before):
        if isinstance(each, torch.Tensor):
            assert torch.equal(each.cpu().nan_to_num(), copy.cpu().nan_to_num()), "an input was changed"


def strided(value: Any) -> Any:
    """Return the values as a view of a larger tensor, with steps of 2 and its axes in reverse order."""
    there = tensor(value)
    if not isinstance(there, torch.Tensor) or not there.dim():
        return there
    large = torch.zeros([2 * n + 3 for n in reversed(there.shape)], dtype=there.dtype).to("npu")
    view = large.permute(*reversed(range(there.dim())))[tuple(slice(3, 2 * n + 3, 2) for n in there.shape)]
    view.copy_(there)
    return view


@pytest.mark.parametrize(("operator", "how"), CASES, ids=str)
def test_any_layout(operator: str, how: dict):
    positional, named = arguments_of(operator, **how)
    rights = results_of(getattr(ag, operator)(*positional, **named, backend="npu"))
    assert_results(on_tensors(operator, positional, named, strided), rights)


@pytest.mark.parametrize("place", [tensor, strided])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("option", OF_DEVICE)
@pytest.mark.parametrize(("function", "calls"), [(WHOLE, device_losses), (BACKWARD, device_gradients)])
def test_options_of_losses(function: str, calls: Callable, option: str, dtype: str, place: Callable):
    for arguments in calls(option, dtype):
        check_on_device(function, arguments, place, values)


@pytest.mark.parametrize(("function", "calls"), [(WHOLE, unusual_losses), (BACKWARD, unusual_gradients)])
def test_unusual_options_of_losses(function: str, calls: Callable):
    """Rows of weight 0 add nothing, whatever they hold. The mean over weights of sum 0 is NaN without a gradient."""
    for arguments in calls("float16"):
        check_on_device(function, arguments, tensor, values)


@pytest.mark.parametrize("operator", [name for name in (*OPERATORS, *LINEAR) if name not in (STATISTICS, WHOLE)])
@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.parametrize("place", [tensor, strided])
def test_out(operator: str, dtype: torch.dtype | None, place: Callable):
    positional, named = arguments_of(operator)
    rights = results_of(getattr(ag, operator)(*positional, **named, backend="npu"))
    outs = [place(right) if dtype is None else place(right.astype(np.float32)) for right in rights]
    for out in outs:
        out.zero_()
    versions = [out._version for out in outs]
    results = on_tensors(operator, positional, named, out=outs[0] if len(outs) == 1 else tuple(outs))
    assert all(result is out for result, out in zip(results, outs, strict=True))
    assert all(out._version > version for out, version in zip(outs, versions))
    if dtype is None or operator == LOSS:
        assert_results(outs, rights)
    else:  # linear operators round to the input's dtype, other operators to float32
        for out, right in zip(outs, rights, strict=True):
            np.testing.assert_allclose(values(out), right.astype(np.float32), rtol=2**-10, atol=1e-3)


def test_out_may_be_an_input_or_none():
    g, y = torch.randn(4, 5), torch.softmax(torch.randn(4, 5), -1)
    right = ag.softmax_backward(g, y).clone()
    there = g.to("npu")
    assert ag.softmax_backward(there, y.to("npu"), out=there) is there
    torch.testing.assert_close(there.cpu(), right)
    positional, named = arguments_of(GRADIENT)
    rights = results_of(ag.fused_linear_cross_entropy_loss_grad(**named, backend="npu"))
    weight_grad = tensor(rights[1])
    assert_results(on_tensors(GRADIENT, positional, named, out=(None, weight_grad)), rights)
    assert_results([weight_grad], rights[1:])
    only = on_tensors(GRADIENT, positional, named, output_mask=(False, True))
    assert_results(only, rights[1:])


def test_no_elements_and_no_rank():
    for shape in ((), (0,), (3, 0, 2)):
        x = torch.randn(shape)
        for result in (ag.softmax(x.to("npu")), ag.softmax(x.to("npu"), out=torch.zeros(shape).to("npu"))):
            assert result.device.type == "npu"
            torch.testing.assert_close(result.cpu(), torch.softmax(x, -1))
    for sizes in ((0, V, H), (BT, V, 0), (0, V, 0)):
        for operator in LINEAR:
            problem = problem_of(operator, sizes, "float16").arguments
            rights = results_of(getattr(ag, operator)(**problem, backend="cpu"))
            assert_results(on_tensors(operator, [], problem), rights)


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("dtype", ["float32", BFLOAT16, "int64", ">f4", "bool"], ids=str)
def test_arrays_of_the_host_are_copied_once(dtype: str | np.dtype, constant: bool):
    """Host arrays of any layout are copied to the device without another copy on the host."""
    array = (np.full(10**6, 1) if constant else np.arange(10**6) % 200).reshape(1000, 1000).astype(dtype)
    strided = array.T, array[::-1, 3:], np.broadcast_to(array[0, 1], (3, 4)), array[0, 1], array[:0]
    with on_current_stream(0) as queue:
        for each in (array, *strided):
            there = queue.from_host(each)
            assert there.dtype == each.dtype.newbyteorder("=")
            found = values(there.tensor)
            np.testing.assert_array_equal(found, each.astype(found.dtype))
        tracemalloc.start()
        queue.from_host(array)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    if torch_npu_real.IS_INSTALLED:  # the double of torch_npu copies on the host
        assert peak < 1.5 * array.nbytes


def test_arguments_that_are_no_tensors_stay_as_they_are():
    x = torch.randn(2, 3)
    assert ag.explain("softmax", x.to("npu")) == ("npu", "its arrays are on device 0")
    assert ag.softmax(x.to("npu:1"), dim=0, backend="npu", num_threads=1).device == torch.device("npu:1")
    with pytest.raises(ag.BackendUnavailableError, match=r"'cpu' .* arrays are on device 0 \(Tensor.cpu\(\) brings"):
        ag.softmax(x.to("npu"), backend="cpu")


@pytest.mark.parametrize("function", ["linear_cross_entropy", "data_parallel_linear_cross_entropy"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_losses_over_ranks(function: str, reduction: str):
    """Functions over ranks return the same losses as the function of one rank.

    These functions wait for the device, since a few numbers of each token pass through the host.
    """
    _, named = arguments_of(WHOLE, reduction=reduction)
    named.pop("vocab_start_index")
    named["target"] = np.where(named["target"] < 0, named["target"], named["target"] - 100)
    rights = results_of(ag.linear_cross_entropy(**named, backend="npu"))
    input, weight, target = (named.pop(name) for name in ("input", "weight", "target"))
    options = {name: tensor(each) for name, each in named.items()}
    results = getattr(parallel, function)(*map(tensor, (input, weight, target)), **options, comm=None)
    assert_results(results_of(results), rights)


# ---- calls that cannot read values -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["stored", "recomputed"])
def test_rows_without_gradient_hold_anything(mode: str):
    _, named = arguments_of(GRADIENT, "bfloat16", mode=mode)
    absent = named["grad"] == 0
    absent[:3] = True
    named["grad"] = np.where(absent, np.float32(-0.0), named["grad"])
    rights = results_of(ag.fused_linear_cross_entropy_loss_grad(**named, backend="npu"))
    for name in ("input", "softmax", "logits_max", "sum_exp_logits"):
        if name in named:
            named[name] = named[name].copy()
            named[name][absent] = NAN
    results = on_tensors(GRADIENT, [], named)
    assert_results(results, rights)
    assert not values(results[0])[absent].any()
    assert not np.signbit(values(results[0])[absent]).any()
    named["grad"] = np.zeros_like(named["grad"])
    named["weight"] = np.full_like(named["weight"], NAN)
    for result in on_tensors(GRADIENT, [], named):
        assert not values(result).any()


@pytest.mark.parametrize("mask", ["bool", "bits"])
@pytest.mark.parametrize("wrong", [-1, V, 2**40, -(2**63)])
def test_targets_outside_of_the_weight_make_nan(wrong: int, mask: str):
    """An invalid target in a tensor makes its row NaN, since an exception would need a wait for the values.

    No memory outside of the weight is accessed.
    """
    _, named = arguments_of(GRADIENT, mask=mask)
    bits = named["target_mask"] if mask == "bool" else np.unpackbits(named["target_mask"], bitorder="little")[:BT] != 0
    row = int(np.flatnonzero(~bits)[1])
    named["masked_target"] = named["masked_target"].copy()
    named["masked_target"][row] = wrong
    with pytest.raises(ag.ParamInvalidError, match=f"masked_target: expected .*, got {wrong} in row {row}"):
        ag.fused_linear_cross_entropy_loss_grad(**named)
    input_grad, weight_grad = on_tensors(GRADIENT, [], named)
    assert np.isnan(values(input_grad)).all(1).tolist() == (np.arange(BT) == row).tolist()
    assert np.isnan(values(weight_grad)).all()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("wrong", [99, 100 + V, 2**40, -(2**63)])
def test_targets_outside_of_the_vocabulary_make_nan(wrong: int, reduction: str):
    _, named = arguments_of(WHOLE, reduction=reduction)
    row = int(np.flatnonzero(named["target"] != -7)[2])
    named["target"] = named["target"].copy()
    named["target"][row] = wrong
    loss, input_grad, weight_grad = on_tensors(WHOLE, [], named)
    assert np.isnan(values(loss)).tolist() == ((np.arange(BT) == row).tolist() if reduction == "none" else True)
    assert np.isnan(values(input_grad)).all(1).tolist() == (np.arange(BT) == row).tolist()
    assert np.isnan(values(weight_grad)).all()
    named["token_weight"] = (np.arange(BT) != row).astype(np.float32)  # the target is wrong in a row of weight 0, too
    named["class_weight"] = np.ones(V, np.float32)
    _, input_grad, weight_grad, lse, log_prob = on_tensors(WHOLE, [], named, outputs=("lse", "log_prob"))
    assert not np.isnan(values(lse)).any()
    assert np.isnan(values(log_prob)).tolist() == (np.arange(BT) == row).tolist()
    named |= {"lse": values(lse), "grad_lse": np.ones(BT, np.float32)}
    for gradients in ((input_grad, weight_grad), on_tensors(BACKWARD, [], named)):
        assert np.isnan(values(gradients[0])).all(1).tolist() == (np.arange(BT) == row).tolist()
        assert np.isnan(values(gradients[1])).all()


@pytest.mark.parametrize("extents", [(130, 0), (0, 4), (0, 0)])
@pytest.mark.parametrize("wrong", [500, -5, -(2**63)])
def test_targets_outside_of_a_weight_without_elements_make_nan(wrong: int, extents: tuple[int, int]):
    extent, hidden = extents
    x, w = np.zeros((3, hidden), np.float16), np.zeros((extent, hidden), np.float16)
    target = np.array([3 if extent else -100, wrong, -100])
    outputs = {"outputs": ("lse", "log_prob"), "class_weight": np.arange(extent, dtype=np.float32)}
    for reduction, isnan in (("none", [False, True, False]), ("sum", True), ("mean", True)):
        loss, *gradients, lse, log_prob = on_tensors(WHOLE, [x, w, target], outputs | {"reduction": reduction})
        assert np.isnan(values(loss)).tolist() == isnan
        assert np.isnan(values(log_prob)).tolist() == [False, True, False]
        assert values(lse)[1] == (np.float32(np.log(extent)) if extent else -np.inf)
        options = {"reduction": reduction, "lse": np.ones(3, np.float32), "grad_lse": np.ones(3, np.float32)}
        for input_grad, weight_grad in (gradients, on_tensors(BACKWARD, [x, w, target], options)):
            assert values(weight_grad).shape == w.shape
            assert np.isnan(values(input_grad)).tolist() == np.full((3, hidden), [[False], [True], [False]]).tolist()
    ones, mask = np.ones(3, np.float32), np.array([not extent, False, True])
    statistics = {"logits_max": ones, "sum_exp_logits": ones}
    input_grad, _ = on_tensors(GRADIENT, [ones, x, w, mask, target], statistics)
    assert np.isnan(values(input_grad)).tolist() == np.full((3, hidden), [[False], [True], [False]]).tolist()


@pytest.mark.parametrize("number", [1e300, 1e-46])
def test_a_gradient_and_a_denominator_beyond_float32(number: float):
    _, named = arguments_of(WHOLE, reduction="mean")
    rights = results_of(ag.linear_cross_entropy(**named | {"grad_loss": 1.0, "denominator": 1.0}, backend="npu"))
    assert_results(on_tensors(WHOLE, [], named | {"grad_loss": number, "denominator": number})[1:], rights[1:])


def test_bits_beyond_the_last_row_are_cleared():
    _, named = arguments_of(STATISTICS)
    named["target"] = np.full_like(named["target"], -5)
    mask = ag.fused_linear_online_max_sum(**{name: tensor(each) for name, each in named.items()}).target_mask
    assert mask.cpu().tolist() == [255, 2 ** (BT - 8) - 1]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_upstream_gradient_may_be_on_the_device(reduction: str, dtype: torch.dtype):
    _, named = arguments_of(WHOLE, reduction=reduction)
    named["grad_loss"] = 0.5
    rights = results_of(ag.linear_cross_entropy(**named, backend="npu"))
    named["grad_loss"] = torch.tensor(0.5, dtype=dtype).to("npu")
    assert_results(on_tensors(WHOLE, [], named), rights)
    there = {name: npu.asarray(each) if isinstance(each, np.ndarray) else each for name, each in named.items()}
    there["grad_loss"] = npu.asarray(np.float32(0.5))
    for result, right in zip(ag.linear_cross_entropy(**there), rights, strict=True):
        np.testing.assert_array_equal(result.numpy(), right)
    with pytest.raises(ag.ParamTypeError, match="grad_loss: expected dtype float32"):
        on_tensors(WHOLE, [], named | {"grad_loss": torch.tensor(1).to("npu")})
    with pytest.raises(ag.ParamTypeError, match=r"grad_loss: expected an array on device 0, as input is one, got one"):
        on_tensors(WHOLE, [], named | {"grad_loss": torch.tensor(1.0).to("npu:1")})


def test_all_rows_ignored():
    x, w, target = torch.randn(3, 4).half().to("npu"), torch.randn(9, 4).half().to("npu"), torch.full((3,), -100)
    for reduction, right in (("mean", NAN), ("sum", 0.0), ("none", [0.0] * 3)):
        loss, *grads = ag.linear_cross_entropy(x, w, target.to("npu"), reduction=reduction)
        np.testing.assert_array_equal(values(loss), right)
        assert not any(values(grad).any() for grad in grads)


# ---- the order of torch's stream -------------------------------------------------------------------------------------


class Waits:
    """Count waits and copies of the library since the start, without the calls that the double of torch_npu makes."""

    def __init__(self, torch_npu, device, monkeypatch: pytest.MonkeyPatch):
        self._device, self._of_the_double = device, Counter[str]()
        device.reset()
        acl = getattr(torch_npu, "acl", None)
        if acl is not None:
            original = acl.check

            def check(name: str, *arguments) -> None:
                self._of_the_double[name] += 1
                original(name, *arguments)

            monkeypatch.setattr(acl, "check", check)

    def counted(self) -> dict[str, int]:
        counts = {name: self._device.calls(name) - self._of_the_double[name] for name in WAITING}
        return {name: count for name, count in counts.items() if count}


def chain(x, w, target, grad, functions=ag) -> tuple:
    s = functions.fused_linear_online_max_sum(x, w, target, 0, w.shape[0])
    loss, _ = functions.fused_cross_entropy_loss_with_max_sum(s.logits_max, s.sum_exp_logits, s.predicted_logits)
    grads = functions.fused_linear_cross_entropy_loss_grad(
        grad, x, w, s.target_mask, s.masked_target, logits_max=s.logits_max, sum_exp_logits=s.sum_exp_logits
    )
    return loss, *grads


def whole(x: torch.Tensor) -> torch.Tensor:
    """Compute a loss by the chain of three operators."""
    weight, target = torch.zeros(V, x.shape[1]).half().to(x.device), torch.arange(len(x)).to(x.device)
    return ag.linear_cross_entropy(x, weight, target).loss


def chain_of_torch_npu(x, w, target, grad, *, stored: bool) -> tuple:
    """Compute loss and gradients with the functions that have torch_npu's names."""
    *statistics, mask, masked, logits = compat.npu_fused_linear_online_max_sum(x, w, target, 0, len(w), stored)
    loss, softmax = compat.npu_fused_cross_entropy_loss_with_max_sum(*statistics, vocab_parallel_logits=logits)
    mode = (None, None, softmax) if stored else statistics[:2]
    return loss, *compat.npu_fused_linear_cross_entropy_loss_with_max_sum_backward(grad, x, w, mask, masked, 0.0, *mode)


def sum_of_outputs(x, w, target, token_weight) -> torch.Tensor:
    """Return the sum of a loss and its outputs, whose gradients are computed by another call than the loss."""
    found = agt.linear_cross_entropy(x, w, target, token_weight=token_weight, outputs=("lse", "log_prob"))
    return found.loss + found.lse.sum() + found.log_prob.sum()


def chain_arguments() -> list[torch.Tensor]:
    x, w = torch.randn(BT, H).bfloat16(), torch.randn(V, H).bfloat16()
    return [x, w, torch.randint(0, V, (BT,)), torch.randn(BT)]


def test_nothing_waits(torch_npu, device, monkeypatch: pytest.MonkeyPatch):
    arguments = chain_arguments()
    rights = chain(*(each.float() if each.is_floating_point() else each for each in arguments))
    there = [each.to("npu") for each in arguments]
    mask = torch.tensor([True, False] * 6 + [False]).to("npu")
    statistics = torch.zeros(BT).to("npu"), torch.ones(BT).to("npu")
    softmax = torch.zeros(BT, V).to("npu")
    options = {"token_weight": there[3], "class_weight": torch.rand(V).to("npu")}
    waits = Waits(torch_npu, device, monkeypatch)
    results = chain(*there)
    assert waits.counted() == {}
    for call in (
        lambda: ag.linear_cross_entropy(*there[:3]),
        lambda: ag.linear_cross_entropy(*there[:3], reduction="none", grad_loss=there[3]),
        lambda: ag.linear_cross_entropy(*there[:3], **options, outputs=("lse", "log_prob")),
        lambda: ag.linear_cross_entropy(*there[:3], **options, denominator=3.0),
        lambda: ag.linear_cross_entropy_backward(
            *there[:3], lse=statistics[1], grad_loss=1.0, grad_lse=there[3], grad_log_prob=there[3], **options
        ),
        lambda: ag.linear_cross_entropy_backward(*there[:3], lse=statistics[1], grad_log_prob=there[3]),
        lambda: ag.fused_linear_cross_entropy_loss_grad(there[3], *there[:2], mask, there[2], softmax=softmax),
        lambda: ag.fused_linear_cross_entropy_loss_grad(
            there[3], *there[:2], mask, there[2], logits_max=statistics[0], sum_exp_logits=statistics[1]
        ),
        lambda: ag.softmax(there[0], out=there[0]),
        lambda: ag.softmax(there[0][:0]),
        lambda: ag.linear_cross_entropy(there[0][:0], there[1], there[2][:0]),
        lambda: agt.softmax(there[0]),
        lambda: agt.softmax_backward(there[0], there[0]),
        lambda: chain(*there, functions=agt),
        lambda: chain_of_torch_npu(*there, stored=False),
        lambda: chain_of_torch_npu(*there, stored=True),
        lambda: agt.linear_cross_entropy(*(each.requires_grad_() for each in there[:2]), there[2]).backward(),
        lambda: agt.linear_cross_entropy(there[0], there[1].half().bfloat16(), there[2], reduction="sum").backward(),
        lambda: sum_of_outputs(*there).backward(),
    ):
        call()
        assert waits.counted() == {}
    for result, right in zip(results, rights, strict=True):
        torch.testing.assert_close(result.cpu().float(), right, rtol=0.05, atol=0.05)
    assert device.violations() == []


def test_a_call_returns_before_its_work_is_done(device):
    x = torch.randn(64, 65)
    there = x.to("npu")
    device.set_delay(100_000)
    for function in (ag.log_softmax, agt.log_softmax):
        result = function(there)
        assert device.counter("in_flight") > 0
        torch.testing.assert_close(result.cpu(), torch.log_softmax(x, -1))
    y = torch.softmax(there, -1)  # the device has not computed y yet
    for _ in range(4):
        y = ag.softmax(y)  # the memory of a result is reused while work on the memory is under way
    right = torch.softmax(x, -1)
    for _ in range(4):
        right = torch.softmax(right, -1)
    torch.testing.assert_close(torch.softmax(y, -1).cpu(), torch.softmax(right, -1))
    loss, *grads = chain(*(each.to("npu") for each in chain_arguments()))
    assert all(np.isfinite(values(each)).all() for each in (loss, *grads))
    device.set_delay(200)
    assert device.violations() == []


def test_memory_is_torchs(device):
    """Calls take memory from torch's blocks, and neither allocate memory nor create streams."""
    x = torch.randn(100, 100).to("npu")
    npu.release()
    for _ in range(3):
        device.reset()
        result = ag.softmax(ag.softmax(x))
        counts = [device.counter(name) for name in ("mallocs", "host_mallocs")] + [device.calls("aclrtCreateStream")]
    assert counts == [0, 0, 0]
    del result


# ---- torch's device, and the thread's context ------------------------------------------------------------------------


def bind(device: int) -> None:
    assert ctypes.CDLL("libascendcl.so").aclrtSetDevice(device) == 0


@pytest.mark.parametrize("device_of_torch", [0, 1])
def test_device_and_context_are_as_before(device_of_torch: int, torch_npu, device):
    arguments = [each.to("npu:1") for each in chain_arguments()]
    for bound in (0, 1):
        with torch_npu.npu.device(device_of_torch):
            bind(bound)
            before = bound_context()
            results = chain(*arguments)
            assert (torch_npu.npu.current_device(), bound_context()) == (device_of_torch, before)
            assert all(each.device == torch.device("npu:1") for each in results)
            device.fail("aclnnFusedLinearOnlineMaxSum", 1, 507899)
            with pytest.raises(ag.AclError):
                chain(*arguments)
            device.reset()
            assert (torch_npu.npu.current_device(), bound_context()) == (device_of_torch, before)
    bind(0)


@pytest.mark.parametrize(("operator", "how"), CASES, ids=str)
def test_either_stage_fails(operator: str, how: dict, device, torch_npu):
    names = [ALL[name].device_name for name in ((STATISTICS, LOSS, GRADIENT) if operator == WHOLE else (operator,))]
    functions = [function for name in names for function in (f"{name}GetWorkspaceSize", name)]
    assert fails_and_recovers(call_of(operator, how), functions, device, torch_npu) == len(functions)


def backward_of_softmax() -> Callable[[], list]:
    x, above = (torch.randn(4, 6).to("npu:1") for _ in range(2))

    def call() -> list:
        leaf = x.clone().requires_grad_()
        with torch.autograd.set_multithreading_enabled(torch_npu_real.IS_INSTALLED):  # the double has no threads
            value = agt.softmax(leaf)
            (grad,) = torch.autograd.grad(value, leaf, above)
        return [value.detach(), grad]

    return call


def backward_of(function: Callable) -> Callable[[], list]:
    """Return a call of a loss and its gradients."""
    x, w, target, token_weight = (each.to("npu:1") for each in chain_arguments())

    def call() -> list:
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        with torch.autograd.set_multithreading_enabled(torch_npu_real.IS_INSTALLED):
            loss = function(*leaves, target, token_weight)
            gradients = torch.autograd.grad(loss, leaves)
        return [loss.detach(), *gradients]

    return call


def backward_of_the_loss() -> Callable[[], list]:
    """Return a call whose gradients are computed together with the loss, and scaled in backward."""
    return backward_of(lambda x, w, target, _: agt.linear_cross_entropy(x, w, target))


def backward_of_outputs() -> Callable[[], list]:
    """Return a call whose gradients are computed with the loss, and again in backward."""
    return backward_of(sum_of_outputs)


def outs() -> Callable[[], list]:
    """Return a function that calls softmax with `out` tensors of the same dtype, of another dtype, and with gaps."""
    x = torch.randn(4, 6).to("npu:1")
    given = torch.zeros_like(x), torch.zeros_like(x).half(), torch.zeros(8, 12).to("npu:1")[::2, ::2]
    return lambda: [ag.softmax(x, out=out) for out in given]


def _stages(*names: str) -> list[str]:
    return [function for name in names for function in (f"{name}GetWorkspaceSize", name)]


@pytest.mark.parametrize(
    ("make", "functions", "failures"),
    [
        (backward_of_softmax, _stages("aclnnSoftmax", "aclnnSoftmaxBackward"), 4),
        (backward_of_the_loss, _stages(*(ALL[name].device_name for name in (STATISTICS, LOSS, GRADIENT))), 6),
        (backward_of_outputs, _stages(*(ALL[name].device_name for name in (STATISTICS, LOSS, GRADIENT))), 8),
        (outs, _stages("aclnnSoftmax"), 6),
    ],
)
def test_either_stage_fails_in_backward_and_with_out(make, functions, failures: int, device, torch_npu):
    assert fails_and_recovers(make(), functions, device, torch_npu) == failures


@pytest.mark.parametrize("place", ["npu:0", "npu:1"])
@pytest.mark.parametrize("wait", ["cpu", "synchronize"])
@pytest.mark.parametrize(
    ("function", "nth"),
    [
        (ag.softmax, 1),
        (agt.softmax, 1),
        # The double of torch_npu waits within the call, as it computes torch's operators on the host.
        *((whole, nth) for nth in range(1, 6) if torch_npu_real.IS_INSTALLED),
    ],
)
def test_work_that_fails_is_an_error_where_torch_waits(function, nth: int, wait: str, place: str, device, torch_npu):
    """Failed work raises in torch's next wait, not in the call. Later calls on arrays and tensors work."""
    x = torch.randn(9, 6).half()
    right = torch.softmax(x.double(), -1)
    there = x.to(place)
    array, before = npu.asarray(x.numpy()), torch_npu.npu.current_device()
    torch_npu.npu.synchronize(there.device.index)
    device.set_delay(200_000)
    device.fail_work(nth, 507015)
    result = function(there)
    assert device.counter("in_flight")
    waiting = result.cpu if wait == "cpu" else lambda: torch_npu.npu.synchronize(there.device.index)
    with pytest.raises((RuntimeError, StatusError), match="507015"):
        waiting()
    assert device.faults_left() == 0
    device.set_delay(200)
    assert torch_npu.npu.current_device() == before
    for found in (ag.softmax(array).numpy(), ag.softmax(x.numpy(), backend="npu"), values(ag.softmax(there))):
        assert_close(torch.from_numpy(found), right, torch.float16)
    assert device.violations() == []


# ---- refused calls ---------------------------------------------------------------------------------------------------


def test_what_does_not_mix():
    g, y = torch.randn(2, 3), torch.randn(2, 3)
    there = y.to("npu")
    on_host = r"an array on the host \(Tensor.npu\(\) copies it, Tensor.cpu\(\) brings the others back\)"
    for other in (g, g.numpy(), g.tolist()):
        with pytest.raises(ag.ParamTypeError, match="softmax_backward: "):
            ag.softmax_backward(other, there)
    for other in (g, g.numpy()):
        expected = f"grad_output: expected an array on device 0, as output is one, got {on_host}"
        with pytest.raises(ag.ParamTypeError, match=expected):
            ag.softmax_backward(other, there)
        with pytest.raises(
            ag.ParamTypeError, match=f"output: expected an array on device 0, as grad_output .* {on_host}"
        ):
            ag.softmax_backward(there, other)
    with pytest.raises(
        ag.ParamTypeError, match="output: expected an array on device 1, as grad_output is one, got one"
    ):
        ag.softmax_backward(g.to("npu:1"), there)
    array = npu.asarray(g)
    expected = "output: expected a tensor on device 0, as grad_output is one, got one on it that is an array of asc"
    with pytest.raises(ag.ParamTypeError, match=expected):
        ag.softmax_backward(there, array)
    expected = "output: expected an array of ascend_grad.npu.asarray on device 0, as .*, got one on it that is a tensor"
    with pytest.raises(ag.ParamTypeError, match=expected):
        ag.softmax_backward(array, there)
    _, named = arguments_of(GRADIENT)
    with pytest.raises(ag.ParamTypeError, match=f"target_mask: expected an array on device 0, .* got {on_host}"):
        on_tensors(GRADIENT, [], {**named, "target_mask": torch.from_numpy(named["target_mask"].copy())})


def test_what_does_not_mix_is_refused_before_values_are_read(torch_npu, device, monkeypatch: pytest.MonkeyPatch):
    """Calls that mix tensors of host and device are refused without waiting for values."""
    x, w, target, grad = chain_arguments()
    there = [each.to("npu") for each in (x, w, target, grad)]
    mask, bits = torch.zeros(BT, dtype=torch.bool), torch.zeros(2, dtype=torch.uint8)
    bad, softmax = torch.full((BT,), V), torch.zeros(BT, V)
    moved = [each.to("npu") for each in (mask, bits, bad, softmax)]
    one, number = torch.ones(1).to("npu"), torch.tensor(1.0).to("npu")
    waits = Waits(torch_npu, device, monkeypatch)
    for call in (
        lambda: ag.linear_cross_entropy(x, w, moved[2]),
        lambda: ag.linear_cross_entropy(*there[:2], bad),
        lambda: ag.linear_cross_entropy(x, w, bad, grad_loss=number),
        *(
            lambda each=each: ag.fused_linear_cross_entropy_loss_grad(grad, x, w, each, bad, softmax=softmax)
            for each in moved[:2]
        ),
        lambda: ag.fused_linear_cross_entropy_loss_grad(grad, x, w, mask, moved[2], softmax=softmax),
        lambda: ag.fused_linear_cross_entropy_loss_grad(there[3], *there[:2], moved[0], bad, softmax=moved[3]),
    ):
        with pytest.raises(ag.ParamTypeError, match=r"expected an array on device 0, .* got an array on the host"):
            call()
        assert waits.counted() == {}
    for reduction in ("mean", "sum"):
        message = f"grad_loss: expected a real number, as reduction is {reduction!r}, got shape (1,)"
        with pytest.raises(ag.ParamInvalidError, match=re.escape(message)):
            ag.linear_cross_entropy(*there[:3], grad_loss=one, reduction=reduction)
        assert waits.counted() == {}


def test_tensors_that_are_refused():
    x = torch.randn(2, 3).to("npu")
    hint = r"input: expected a tensor that does not require grad \(ascend_grad.torch takes those, detach\(\) drops it\)"
    with pytest.raises(ag.ParamTypeError, match=f"softmax: {hint}"):
        ag.softmax(x.clone().requires_grad_())
    with pytest.raises(ag.ParamTypeError, match="out: expected a tensor that does not require grad"):
        ag.softmax(x, out=x.clone().requires_grad_())
    with pytest.raises(ag.ParamTypeError, match=r"softmax: input: expected a tensor that computes as torch.Tensor"):
        ag.softmax(x.as_subclass(type("Mine", (torch.Tensor,), {"__torch_function__": classmethod(print)})))
    with pytest.raises(
        ag.ParamTypeError, match=r"expected a tensor with memory \(ascend_grad.torch is for what torch.v"
    ):
        torch.vmap(ag.softmax)(x)
    with pytest.raises(ag.ParamInvalidError, match="axis: expected a value in"):
        ag.softmax(x, 2)
    with pytest.raises(
        ag.BackendUnavailableError, match="softmax: input: expected an array on the CPU, got one on device"
    ):
        ag.softmax(torch.zeros(3, device="meta"))


def test_limits_of_the_device(device):
    """Beyond a limit, a call on tensors raises an error that names the limit, and the CPU does not compute it."""
    x, w, target, grad = (each.to("npu") for each in chain_arguments())
    with pytest.raises(
        ag.ParamTypeError, match="linear_cross_entropy: input: the device takes dtype float16 or bfloat16"
    ):
        ag.linear_cross_entropy(x.float(), w.float(), target)
    long = torch.zeros(1, 1, 1, 5000).to("npu")
    with pytest.raises(ag.ParamInvalidError, match="the device takes a last dimension up to 4096, got 5000"):
        ag.scaled_masked_softmax(long, long.bool())
    with pytest.raises(ag.ParamInvalidError, match="with softmax given, the device takes V from 128 on, got 100"):
        ag.fused_linear_cross_entropy_loss_grad(
            grad,
            x,
            w[:100],
            torch.zeros(2, dtype=torch.uint8).to("npu"),
            target,
            softmax=torch.zeros(BT, 100).to("npu"),
        )


def test_outs_that_are_refused():
    x = torch.randn(2, 3).to("npu")
    for out, expected in (
        (torch.zeros(2, 3), "out: expected an array on device 0, as the inputs are, got one on the host"),
        (torch.zeros(2, 3).to("npu:1"), "out: expected an array on device 0, as the inputs are, got one on device 1"),
        (np.zeros((2, 3), np.float32), "out: expected an array of torch, as the inputs are, got one of numpy"),
        (
            npu.asarray(np.zeros((2, 3), np.float32)),
            "out: expected a tensor, .* got an array of ascend_grad.npu.asarray",
        ),
        (3.5, "out: expected an array that can be written into, got float"),
        (torch.zeros(2, 3, dtype=torch.int32).to("npu"), "out: expected dtype float32, .* got int32"),
    ):
        with pytest.raises((ag.ParamTypeError, ag.BackendUnavailableError), match=expected):
            ag.softmax(x, out=out)
    for out, expected in (
        (torch.zeros(2, 4).to("npu"), r"out: expected shape \(2, 3\), got \(2, 4\)"),
        (torch.zeros(1, 3).to("npu").expand(2, 3), "out: expected an array whose elements do not share memory"),
    ):
        with pytest.raises(ag.ParamInvalidError, match=expected):
            ag.softmax(x, out=out)
    with pytest.raises(
        ag.ParamTypeError, match="out: expected an array on the host, as the inputs are, got one on device 1"
    ):
        ag.softmax(torch.zeros(3), out=torch.zeros(3).to("npu:1"))
    _, named = arguments_of(GRADIENT)
    both = torch.zeros(V, 2 * H, dtype=torch.float16).to("npu")
    with pytest.raises(ag.ParamInvalidError, match="out: expected arrays that do not share memory, got two that do"):
        on_tensors(GRADIENT, [], named, out=(both[:BT, :H], both[:, H - 1 : -1]))
    on_tensors(GRADIENT, [], named, out=(both[:BT, :H], both[:, H:]))
    with pytest.raises(
        ag.ParamInvalidError, match=r"out\[0\]: expected None, as the call does not ask for this result"
    ):
        on_tensors(GRADIENT, [], named, out=(both[:BT, :H], None), output_mask=(False, True))
    assert not both[:BT, :H].cpu().isnan().any()
