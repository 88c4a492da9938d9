"""Test C++: the public headers, and Cython modules that are translated to it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import ascend_grad as ag

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="needs a compiler of C++")


@pytest.mark.parametrize("header", ["rowwise/rowwise.h", "linear/linear.h"])
def test_public_headers(header):
    """A C++ file may include each public header, alone and with all kernels."""
    path = Path(ag.get_include(), "ascend_grad", header)
    command = ["g++", "-std=c++17", "-fsyntax-only", "-x", "c++", path]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[:5000]


def test_row_wise_operators(calls_in_cpp):
    x = np.random.default_rng(1).standard_normal((70, 300), np.float32)
    out = np.empty_like(x)
    assert calls_in_cpp.float32(3, x, None, None, out, 1.0, 2) == 0
    np.testing.assert_array_equal(out, ag.softmax(x, backend="cpu"))


def test_linear_operators(linear_calls_in_cpp):
    random = np.random.default_rng(2)
    x, w = random.standard_normal((30, 20), np.float32), random.standard_normal((50, 20), np.float32)
    target = random.integers(0, 50, 30)
    expected = ag.fused_linear_online_max_sum(x, w, target, 0, 50, backend="cpu")
    numbers = [np.empty(30, np.float32) for _ in range(3)]
    workspace = np.empty(linear_calls_in_cpp.max_sum_workspace["float"](x, w), np.uint8)
    mask, masked_target = np.empty(30, np.uint8), np.empty(30, np.int64)
    call = linear_calls_in_cpp.max_sum["float"]
    assert call(x, w, target, 0, 50, *numbers, mask, masked_target, workspace, 2) == 0
    for result, right in zip(numbers, expected, strict=False):
        np.testing.assert_array_equal(result, right)
