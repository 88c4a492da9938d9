"""Fixtures of the tests of tensors."""

from __future__ import annotations

import pytest
import torch
from torch_oracles import TOLERANCES


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(params=tuple(TOLERANCES), ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param
