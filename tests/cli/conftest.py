"""Commands run in an empty directory."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """An empty directory of the test's own, in which it runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
