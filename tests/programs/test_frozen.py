"""Test a program that PyInstaller has frozen: it has all compiled modules, and computes the same numbers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import ascend_grad as ag

PROGRAM = """
import numpy as np
import ascend_grad as ag

x = np.linspace(-1, 1, 4096 * 512, dtype=np.float32).reshape(4096, 512)
target = np.arange(len(x)) % 512
y = ag.softmax(x, num_threads=2)
ag.softmax_backward(x, y)
loss, gradient = ag.cross_entropy(x[:64], target[:64])[:2]
by_layer = ag.linear_cross_entropy(x[:64], x[64:576], target[:64])
print(y[0, 0], loss, gradient[0, 0], by_layer.loss, ag.backends()["cpu"].usable)
"""

#: Large packages that NumPy and this library offer to use, and that the program does not need.
UNNEEDED = (
    "dask",
    "jax",
    "matplotlib",
    "mpi4py",
    "numpy.f2py",
    "numpy.testing",
    "scipy",
    "setuptools",
    "tkinter",
    "torch",
)


def test_a_frozen_program(tmp_path):
    program = tmp_path / "app.py"
    program.write_text(PROGRAM, encoding="utf-8")
    packages = Path(ag.__file__).parents[1]  # an editable installation is not on the path that PyInstaller searches
    command = [sys.executable, "-P", "-m", "PyInstaller", "--noconfirm", "--log-level=ERROR", f"--paths={packages}"]
    excluded = [f"--exclude-module={name}" for name in UNNEEDED]
    subprocess.run([*command, *excluded, str(program)], check=True, cwd=tmp_path, capture_output=True)
    result = subprocess.run([tmp_path / "dist" / "app" / "app"], capture_output=True, text=True, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    expected = subprocess.run([sys.executable, "-P", str(program)], capture_output=True, text=True, check=True)
    assert result.stdout == expected.stdout
