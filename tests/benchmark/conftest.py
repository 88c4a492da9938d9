"""Fixtures of the tests of the benchmark."""

from __future__ import annotations

import pytest
from benchmark_settings import hurry
from benchmark_settings import restored_jax as restored_jax

from ascend_grad.bench import cases, frameworks


@pytest.fixture
def hasty(monkeypatch) -> None:
    """Make turns short and random problems small, and leave out optional packages."""
    hurry(monkeypatch)
    monkeypatch.setattr(frameworks, "module", lambda name: None)
    monkeypatch.setattr(cases, "MAX_PRODUCT", 2**12)
