"""Fixtures of the tests of tensors."""

from __future__ import annotations

import pytest
import torch
from torch_oracles import TOLERANCES

import ascend_grad as ag


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
