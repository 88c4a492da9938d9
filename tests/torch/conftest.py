"""Provide the fixtures of the tests of tensors."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
import torch_npu_real
import torch_npu_stand_in
from stand_in import StandIn, build
from torch_oracles import TOLERANCES

import ascend_grad as ag
from ascend_grad.backends.ascend import session

_DOUBLE = torch_npu_stand_in.register() if torch_npu_stand_in.IS_POSSIBLE and not torch_npu_real.IS_INSTALLED else None


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """Record and return the keyword arguments of every call of `ascend_grad.linear_cross_entropy`."""
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
def torch_npu(device: StandIn, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Return torch_npu if it is installed, else its test double.

    After the test, check that neither this thread nor autograd's has objects left on the device. Objects that torch_npu
    itself keeps are allowed.
    """
    if torch_npu_real.IS_INSTALLED:
        gc.collect()
        assert session.release_all()  # tests of arrays may have left objects
        before = torch_npu_real.kept(device)
        yield sys.modules["torch_npu"]
    elif _DOUBLE is None:
        pytest.skip(f"torch {torch.__version__} knows no backends that are written in Python")
    else:
        before = {}
        _DOUBLE.bind(build("split"))
        monkeypatch.setitem(sys.modules, "torch_npu", _DOUBLE)
        yield _DOUBLE
    gc.collect()
    assert session.release_all()
    if _DOUBLE is not None:
        _DOUBLE.release()
    assert (device.live() if _DOUBLE is not None else torch_npu_real.kept(device)) == before


@pytest.fixture
def slowly(device: StandIn) -> Iterator[None]:
    """Let the device delay its work during a test, so that the work is pending when a call returns."""
    device.set_delay(100_000)
    yield
    device.set_delay(200)
