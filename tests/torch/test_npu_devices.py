"""Test two devices: calls run on the device of their tensors, and leave torch's current device unchanged."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import torch_npu_real
from python_threads import in_threads
from torch_oracles import assert_close, value_and_gradients

import ascend_grad as ag
import ascend_grad.torch as agt
from ascend_grad import npu

pytestmark = pytest.mark.usefixtures("torch_npu")

BT, H, V = 9, 6, 130


def softmax(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return agt.softmax(x), torch.softmax(x.cpu().double(), -1)


def strided(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a loss of strided rows, which torch copies on the device."""
    w = torch.linspace(-1, 1, V * x.shape[1], device="cpu").reshape(V, -1).half()
    target = torch.arange(x.shape[0])
    there = x.half().T.contiguous().T
    loss = agt.linear_cross_entropy(there, w.to(x.device), target.to(x.device))
    return loss, F.cross_entropy(there.cpu().double() @ w.double().T, target)


def borrowed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute on an array over a view of a tensor."""
    array = npu.asarray(x[1:, ::2])
    assert array.device == x.device.index
    return torch.from_numpy(ag.softmax(array).numpy()).to(x.device), torch.softmax(x[1:, ::2].cpu().double(), -1)


def lent(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tensor over the memory of a result."""
    return torch.from_dlpack(ag.softmax(npu.asarray(x))), torch.softmax(x.cpu().double(), -1)


def masked(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mask = (x > 0)[None, None]
    right = torch.softmax((x.cpu().double() * 0.5).masked_fill(x.cpu() > 0, -10000.0), -1)
    return agt.scaled_masked_softmax(x[None, None], mask, 0.5)[0, 0], right


CALLS = {function.__name__: function for function in (softmax, strided, borrowed, lent, masked)}


def on_both(call: Callable[[torch.Tensor], Any]) -> None:
    """Call the function on tensors of both devices in turn, for each current device of torch."""
    for current in (0, 1):
        for index in (1, 0, 1):
            x = torch.randn(4, 6).to(f"npu:{index}")
            with torch.npu.device(current):
                result, right = call(x)
                assert torch.npu.current_device() == current
                new = torch.ones(3, device="npu")
                assert new.device.index == current
                assert new.cpu().sum() == 3
            assert result.device == x.device
            assert_close(result.cpu(), right, result.dtype, steps=4)


@pytest.mark.parametrize("name", CALLS)
def test_in_turn(name: str) -> None:
    on_both(CALLS[name])


@pytest.mark.parametrize("name", CALLS)
def test_in_a_thread_of_its_own(name: str) -> None:
    """Calls work in a thread that is bound to no device."""
    in_threads(lambda: on_both(CALLS[name]))


@pytest.mark.parametrize("name", CALLS)
def test_the_first_call_of_a_thread_does_not_choose_its_device(name: str) -> None:
    x = torch.randn(4, 6).to("npu:1")

    def work() -> None:
        result, right = CALLS[name](x)
        assert torch.npu.current_device() == 0
        new = torch.ones(3, device="npu")
        assert new.device.index == 0
        assert new.cpu().sum() == 3
        assert_close(result.cpu(), right, result.dtype, steps=4)

    in_threads(work)


def test_many_threads() -> None:
    x = torch.randn(40, 30)
    right = torch.softmax(x.double(), -1)

    def work(name: str) -> None:
        for _ in range(10):
            assert_close(agt.softmax(x.to(name)).cpu(), right, torch.float32)

    in_threads(*(partial(work, f"npu:{i % 2}") for i in range(4)))


def test_backward() -> None:
    """Autograd's thread of each device computes the right gradients. The double of torch_npu lacks these threads."""
    x, above = torch.randn(4, 5), torch.randn(4, 5)
    right = value_and_gradients(lambda x: torch.softmax(x, -1), [x.double()], above.double())
    for current in (0, 1):
        for name in ("npu:1", "npu:0", "npu:1"):
            with torch.autograd.set_multithreading_enabled(torch_npu_real.IS_INSTALLED), torch.npu.device(current):
                ours = value_and_gradients(agt.softmax, [x.to(name)], above.to(name))
                assert torch.npu.current_device() == current
            for each, expected in zip(ours, right, strict=True):
                assert each.device == torch.device(name)
                assert_close(each.cpu(), expected, torch.float32, steps=4)


@pytest.mark.parametrize("current", [0, 1])
def test_after_errors_the_device_is_as_before(current: int, device) -> None:
    x, right = softmax(torch.randn(4, 6).to("npu:1"))
    for function in ("aclnnSoftmaxGetWorkspaceSize", "aclnnSoftmax"):
        for code in (507899, 107003):
            device.fail(function, 0, code)
            with torch.npu.device(current):
                with pytest.raises(ag.AclError):
                    agt.softmax(x)
                assert torch.npu.current_device() == current
            device.reset()
    with torch.npu.device(current):
        assert_close(agt.softmax(x).cpu(), torch.softmax(right, -1), torch.float32, steps=4)
        with pytest.raises(ag.ParamTypeError, match="expected a tensor on npu:1, like x, got one on npu:0"):
            agt.scaled_masked_softmax(x[None, None], torch.zeros(1, 1, 4, 6, dtype=torch.bool, device="npu:0"))
        assert torch.npu.current_device() == current
        assert torch.ones(3, device="npu").device.index == current
