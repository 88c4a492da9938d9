"""Test statements in documents that are written by hand."""

from __future__ import annotations

import re
from pathlib import Path

import ascend_grad as ag
from ascend_grad import objectives, parallel

SOURCES = Path(__file__).resolve().parents[2]


def test_the_api_reference_lists_every_public_name():
    text = (SOURCES / "docs" / "api.md").read_text()
    listed = set(re.findall(r"^   ([\w.]+)$", text, re.MULTILINE)) | set(
        re.findall(r"autoclass:: ascend_grad\.([\w.]+)", text)
    )
    optional = ("dask.", "jax.", "sklearn.", "torch.")  # optional packages have separate tests
    listed = {name for name in listed if not name.startswith(optional)}
    public = {name for name in ag.__all__ if name not in ("__version__", "npu")}
    public |= {f"parallel.{name}" for name in parallel.__all__}
    public |= {f"objectives.{name}" for name in objectives.__all__}
    assert listed == public | {f"npu.{name}" for name in ag.npu.__all__} | {
        "operators.results.LinearCrossEntropyGradients",
        "operators.results.LinearHessianProduct",
        "operators.results.LinearTopK",
        "operators.results.OnlineMaxSum",
    }


def test_the_front_page_is_short():
    assert len((SOURCES / "README.md").read_text().splitlines()) <= 140
