"""Define the fixture that runs commands in an empty directory."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """Make an empty directory, run the test in it, and return its path."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
