"""Test that ``ascend-grad`` works through files that are larger than the address space of its process."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import pytest
from files import sparse

import ascend_grad as ag

pytestmark = pytest.mark.usefixtures("here")

#: A program that runs the command line with little address space: what the interpreter and the threads have taken,
#: and 256 MiB more.
LIMITED = """
import resource, sys
import numpy as np, tqdm
import ascend_grad as ag
from ascend_grad.cli.main import main
ag.softmax(np.zeros((1000, 1000)))
with open("/proc/self/status", encoding="ascii") as lines:
    kilobytes = next(int(line.split()[1]) for line in lines if line.startswith("VmSize:"))
resource.setrlimit(resource.RLIMIT_AS, (kilobytes * 1024 + 2**28,) * 2)
sys.exit(main())
"""
#: A shape of 320 MB in float32, and one of as much with a long first axis.
WIDE, LONG = (1000, 80_000), (1_000_000, 80)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-P", "-c", LIMITED, *argv], capture_output=True, text=True)


def write_rows(name: str, shape: tuple[int, ...], dtype: str = "<f4", fortran_order: bool = False) -> None:
    """Make a sparse file of zeros, and write other numbers to its last row."""
    sparse(name, shape, dtype, fortran_order)
    np.load(name, mmap_mode="r+")[-1] = np.linspace(0, 3, shape[1])


@pytest.mark.parametrize(
    ("axis", "dtype", "fortran_order"),
    [("-1", "<f4", False), ("0", ">f4", False), ("1", "<f4", True), ("0", "<f4", True)],
)
def test_apply(axis, dtype, fortran_order):
    write_rows("x.npy", WIDE, dtype, fortran_order)
    result = run("apply", "softmax", "--input", "x.npy", "--dim", axis, "-o", "y.npy")
    assert (result.returncode, result.stderr) == (0, "")
    x, y = np.load("x.npy", mmap_mode="r"), np.load("y.npy", mmap_mode="r")
    assert (y.shape, y.dtype, y.flags.fnc) == (WIDE, np.float32, fortran_order)
    part = (slice(-2, None), slice(None)) if axis in ("-1", "1") else (slice(None), slice(-300, None))
    assert (y[part] == ag.softmax(x[part], int(axis))).all()


def test_a_long_first_axis():
    write_rows("x.npy", LONG)
    result = run("apply", "softmax", "--input", "x.npy", "--dim", "0", "-o", "y.npy")
    assert (result.returncode, result.stderr) == (0, "")
    x, y = np.load("x.npy", mmap_mode="r"), np.load("y.npy", mmap_mode="r")
    assert (y[:, [0, 40, 79]] == ag.softmax(x[:, [0, 40, 79]], 0)).all()


def test_columns_that_need_more_than_there_is():
    """A column is too long for a buffer, and its elements are apart in the file, which has to be mapped as a whole."""
    sparse("x.npy", (30_000_000, 3))
    result = run("apply", "softmax", "--input", "x.npy", "--dim", "0", "-o", "y.npy")
    assert (result.returncode, result.stdout) == (2, "")
    assert re.match(
        r"ascend-grad apply: error: .*\.npy: cannot map \d{9} bytes: Cannot allocate memory "
        r"\(the limit of address space is \d+ bytes, see ulimit -v\)\n$",
        result.stderr,
    )
    assert os.listdir() == ["x.npy"]


def test_score():
    write_rows("hidden.npy", LONG)
    weight, targets = np.eye(7, LONG[1], dtype="f4") + 1, np.full(LONG[0], 3, "i2")
    np.save("weight.npy", weight)
    np.save("targets.npy", targets)
    result = run("score", "hidden.npy", "weight.npy", "targets.npy", "-o", "log_prob.npy")
    assert (result.returncode, result.stderr) == (0, "")
    log_prob = np.load("log_prob.npy")
    np.testing.assert_allclose(log_prob[:-1], -np.log(7), rtol=1e-6)
    last = np.load("hidden.npy", mmap_mode="r")[-1:]
    expected = ag.linear_cross_entropy(last, weight, targets[-1:].astype("i4"), reduction="none", return_grad=False)
    np.testing.assert_allclose(log_prob[-1:], -expected.loss, rtol=1e-5)


def test_an_input_that_is_used_whole():
    """A linear operator is one call on all of its inputs, so that they must fit into the address space."""
    sparse("x.npy", LONG)
    np.save("weight.npy", np.ones((3, LONG[1]), "f4"))
    names = ("--log-prob-out", "p.npy", "--index-out", "i.npy")
    result = run("apply", "linear_top_k", "--input", "x.npy", "--weight", "weight.npy", "--k", "1", *names)
    assert (result.returncode, result.stdout) == (2, "")
    assert "x.npy: cannot map 320000000 bytes: Cannot allocate memory" in result.stderr
    assert sorted(os.listdir()) == ["weight.npy", "x.npy"]
