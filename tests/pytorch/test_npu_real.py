"""What only the wheel of torch_npu shows, on the test double of a device."""

from __future__ import annotations

import pytest
import torch
from torch_oracles import assert_close, value_and_gradients

import ascend_grad as ag
import ascend_grad.torch as agt
from ascend_grad import npu

pytestmark = pytest.mark.usefixtures("torch_npu")


def test_backward_over_both_devices() -> None:
    """On a thread of autograd for each device."""
    x = torch.randn(4, 5)

    def ours(x: torch.Tensor) -> torch.Tensor:
        return agt.log_softmax(agt.softmax(x.to("npu:1")).to("npu:0")).cpu()

    def plain(x: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(torch.softmax(x, -1), -1)

    results = value_and_gradients(ours, [x], torch.ones(4, 5))
    rights = value_and_gradients(plain, [x.double()], torch.ones(4, 5, dtype=torch.float64))
    for each, expected in zip(results, rights, strict=True):
        assert_close(each, expected, torch.float32, steps=8)


def test_the_queue_of_another_device_is_not_handed_over() -> None:
    """Reading ``npu_stream`` hands over what torch holds back for its current device, which a wait has to respect."""
    x = torch.randn(64, 65)
    for _ in range(20):
        there = x.to("npu:1")
        assert_close(
            agt.softmax(there.clone() * 2 - there).cpu(), torch.softmax(x.double(), -1), torch.float32, steps=4
        )


def test_a_thread_that_is_bound_to_another_device_fails_once(device) -> None:
    """Its context could not be restored: no stream or memory of the other device is kept."""
    x = torch.randn(4, 6)
    there = x.to("npu:1")
    calls = (lambda: agt.softmax(there).cpu(), lambda: torch.from_numpy(ag.softmax(npu.asarray(there.T)).numpy().T))
    failed = 0
    for call, dim in zip(calls, (-1, 0), strict=True):
        for nth in range(1, 6):
            npu.release()
            device.fail("aclrtSetCurrentContext", nth)
            try:
                call()
            except ag.AscendGradError:
                failed += 1
            device.reset()  # the test double has noticed, too
            assert_close(call(), torch.softmax(x.double(), dim), torch.float32, steps=4)
    assert failed  # of the calls on the array, which are on a stream of ours
