"""Define fixtures that run commands in an empty directory, and in small parts."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """Make an empty directory, run the test in it, and return its path."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def small_parts(monkeypatch) -> None:
    """Compute Zarr arrays in small parts: `apply` in rows of chunks, `score` in four rows at least."""
    monkeypatch.setattr("ascend_grad.cli.apply_zarr.BLOCK_BYTES", 1)
    monkeypatch.setattr("ascend_grad.cli.score_job.CHUNK_ROWS", 4)
    monkeypatch.setattr("ascend_grad.cli.score_job.CHUNK_BYTES", 1)
