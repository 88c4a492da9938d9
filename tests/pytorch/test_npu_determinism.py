"""Tensors on an Ascend NPU: operators are deterministic where torch's algorithms have to be."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import ascend_grad as ag
import ascend_grad.torch as agt
from ascend_grad import npu

pytestmark = pytest.mark.usefixtures("torch_npu")


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def softmax_and_gradient(x: torch.Tensor) -> None:
    x.requires_grad_()
    agt.softmax(x, -1).sum().backward()


def test_torch_decides_for_its_tensors(device, deterministic) -> None:
    x = torch.randn(3, 4)
    there = x.to("npu")
    device.reset()
    softmax_and_gradient(there)
    assert device.counter("deterministic_launches") == device.counter("launches") == 2
    ag.softmax(npu.asarray(x.to("npu")))
    assert device.counter("deterministic_launches") == device.counter("launches") == 3
    ag.softmax(npu.asarray(x.numpy()))
    ag.softmax(x.numpy(), backend="npu")
    assert device.counter("deterministic_launches") == 3
    torch.use_deterministic_algorithms(False)
    softmax_and_gradient(x.to("npu"))
    assert device.counter("deterministic_launches") == 3
    assert device.violations() == []


def test_the_librarys_own_choice_holds_for_tensors(device) -> None:
    there = torch.randn(3, 4).to("npu")
    device.reset()
    with npu.use_deterministic():
        agt.softmax(there, -1)
    agt.softmax(there, -1)
    assert (device.counter("deterministic_launches"), device.counter("launches")) == (1, 2)
