"""Test what calls on tensors of torch_npu refuse, without waiting for values."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from linear_samples import GRADIENT
from npu_tensors import BT, H, V, Waits, arguments_of, chain_arguments, on_tensors

import ascend_grad as ag
from ascend_grad import npu

pytestmark = pytest.mark.usefixtures("torch_npu")


def test_what_does_not_mix():
    g, y = torch.randn(2, 3), torch.randn(2, 3)
    there = y.to("npu")
    on_host = r"one on the host \(copy it with Tensor.npu\(\), or the others with Tensor.cpu\(\)\)"
    for other in (g, g.numpy(), g.tolist()):
        with pytest.raises(ag.ParamTypeError, match="softmax_backward: "):
            ag.softmax_backward(other, there)
    for other in (g, g.numpy()):
        expected = f"grad_output: expected an array on device 0, like output, got {on_host}"
        with pytest.raises(ag.ParamTypeError, match=expected):
            ag.softmax_backward(other, there)
        with pytest.raises(
            ag.ParamTypeError, match=f"output: expected an array on device 0, like grad_output, got {on_host}"
        ):
            ag.softmax_backward(there, other)
    with pytest.raises(ag.ParamTypeError, match="output: expected an array on device 1, like grad_output, got one"):
        ag.softmax_backward(g.to("npu:1"), there)
    array = npu.asarray(g)
    expected = "output: expected a tensor on device 0, like grad_output, got an array of ascend_grad.npu.asarray on"
    with pytest.raises(ag.ParamTypeError, match=expected):
        ag.softmax_backward(there, array)
    expected = "output: expected an array of ascend_grad.npu.asarray on device 0, like .*, got a tensor on that device"
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
        with pytest.raises(ag.ParamTypeError, match=r"expected an array on device 0, .* got one on the host"):
            call()
        assert waits.counted() == {}
    for reduction in ("mean", "sum"):
        message = f"grad_loss: expected a real number, as reduction is {reduction!r}, got shape (1,)"
        with pytest.raises(ag.ParamInvalidError, match=re.escape(message)):
            ag.linear_cross_entropy(*there[:3], grad_loss=one, reduction=reduction)
        assert waits.counted() == {}


def test_tensors_that_are_refused():
    x = torch.randn(2, 3).to("npu")
    hint = r"input: expected a tensor that does not require grad, got one that does; use .*, or pass input.detach\(\)"
    with pytest.raises(ag.ParamTypeError, match=f"softmax: {hint}"):
        ag.softmax(x.clone().requires_grad_())
    with pytest.raises(ag.ParamTypeError, match="out: expected a tensor that does not require grad"):
        ag.softmax(x, out=x.clone().requires_grad_())
    with pytest.raises(
        ag.ParamTypeError, match=r"softmax: input: expected a tensor whose class does not override torch"
    ):
        ag.softmax(x.as_subclass(type("Mine", (torch.Tensor,), {"__torch_function__": classmethod(print)})))
    with pytest.raises(ag.ParamTypeError, match=r"expected a tensor with memory, got one of .*; use ascend_grad.torch"):
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
    with pytest.raises(ag.ParamTypeError, match="online_max_sum: input: the device supports dtype float16 or bfloat16"):
        ag.fused_linear_online_max_sum(x.float(), w.float(), target, 0, V)
    long = torch.zeros(1, 1, 1, 5000).to("npu")
    with pytest.raises(ag.ParamInvalidError, match="the device supports a last dimension up to 4096, got 5000"):
        ag.scaled_masked_softmax(long, long.bool())
    with pytest.raises(ag.ParamInvalidError, match="given, the device supports V of at least 128, got 100"):
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
        (3.5, "out: expected a writable array, got float"),
        (torch.zeros(2, 3, dtype=torch.int32).to("npu"), "out: expected dtype float32, .* got int32"),
    ):
        with pytest.raises((ag.ParamTypeError, ag.BackendUnavailableError), match=expected):
            ag.softmax(x, out=out)
    for out, expected in (
        (torch.zeros(2, 4).to("npu"), r"out: expected shape \(2, 3\), got \(2, 4\)"),
        (torch.zeros(1, 3).to("npu").expand(2, 3), "out: expected an array whose elements do not overlap"),
    ):
        with pytest.raises(ag.ParamInvalidError, match=expected):
            ag.softmax(x, out=out)
    with pytest.raises(
        ag.ParamTypeError, match="out: expected an array on the host, as the inputs are, got one on device 1"
    ):
        ag.softmax(torch.zeros(3), out=torch.zeros(3).to("npu:1"))
    _, named = arguments_of(GRADIENT)
    both = torch.zeros(V, 2 * H, dtype=torch.float16).to("npu")
    with pytest.raises(ag.ParamInvalidError, match="out: expected arrays that do not overlap, got two that do"):
        on_tensors(GRADIENT, [], named, out=(both[:BT, :H], both[:, H - 1 : -1]))
    on_tensors(GRADIENT, [], named, out=(both[:BT, :H], both[:, H:]))
    with pytest.raises(ag.ParamInvalidError, match=r"out\[0\]: expected None, as this result is not requested"):
        on_tensors(GRADIENT, [], named, out=(both[:BT, :H], None), output_mask=(False, True))
    assert not both[:BT, :H].cpu().isnan().any()
