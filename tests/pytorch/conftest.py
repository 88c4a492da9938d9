"""Fixtures of the tests of tensors."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest
import torch
import torch_npu_stand_in
from stand_in import StandIn, build
from torch_oracles import TOLERANCES

import ascend_grad as ag
from ascend_grad.backends.ascend import session

_TORCH_NPU = torch_npu_stand_in.register() if torch_npu_stand_in.IS_POSSIBLE else None


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """The keywords of every call of `ascend_grad.linear_cross_entropy`."""
    recorded: list[dict] = []
    original = ag.linear_cross_entropy

    def recording(*args, **kwargs):
        recorded.append(kwargs)
        return original(*args, **kwargs)

    monkeypatch.setattr(ag, "linear_cross_entropy", recording)
    return recorded


@pytest.fixture(params=tuple(TOLERANCES), ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def torch_npu(device: StandIn, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch_npu_stand_in.TorchNpu]:
    """A test double of torch_npu. In the end nothing is left on the device, of this thread or of autograd's."""
    if _TORCH_NPU is None:
        pytest.skip(f"torch {torch.__version__} knows no backends that are written in Python")
    _TORCH_NPU.bind(build("split"))
    monkeypatch.setitem(sys.modules, "torch_npu", _TORCH_NPU)
    yield _TORCH_NPU
    gc.collect()
    assert session.release_all()
    _TORCH_NPU.release()
    assert device.live() == {}
