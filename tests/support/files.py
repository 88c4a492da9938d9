"""Make files for ``ascend-grad apply`` and ``ascend-grad score``, and run commands that succeed or are refused."""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import stat
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from processes import start
from samples import ARRAYS, MASKED, generator

import ascend_grad as ag
from ascend_grad.cli.main import main

GRADIENT = "fused_linear_cross_entropy_loss_grad"
STATISTICS = ("logits_max", "sum_exp_logits", "predicted_logits", "target_mask", "masked_target")


def values(operator: str, shape: tuple[int, ...], dtype: np.dtype) -> dict[str, np.ndarray]:
    """Make arguments of an operator."""
    rng = generator(operator, shape, str(dtype))
    arguments = {name: rng.standard_normal(shape).astype(dtype) for name in ARRAYS[operator]}
    if operator in MASKED:
        arguments["mask"] = rng.random((1, *shape[1:])) < 0.3
    return arguments


def save(**arrays: np.ndarray) -> list[str]:
    """Save arrays as NumPy does, and name them on the command line."""
    options = []
    for name, array in arrays.items():
        np.save(f"{name}.npy", array)
        options += [f"--{name.replace('_', '-')}", f"{name}.npy"]
    return options


def apply(operator: str, *options: str, raw: bool = False) -> None:
    """Run the command, which must succeed, with the result in out.npy."""
    assert main(["apply", operator, *options, *(["--dtype", "bfloat16"] if raw else []), "-o", "out.npy"]) == 0


def assert_same_file(expected: np.ndarray, name: str = "out.npy") -> None:
    """Check that the file has the bytes that NumPy would write."""
    buffer = io.BytesIO()
    np.save(buffer, expected)
    assert Path(name).read_bytes() == buffer.getvalue()


def linear_values(dtype: np.dtype, shape: tuple[int, int, int] = (10, 21, 5)) -> dict[str, np.ndarray]:
    """Make arguments of the gradient, for (BT, V, H) and the memory-saving mode, with some targets in another shard."""
    rows, vocabulary, width = shape
    rng = generator(shape, str(dtype))
    x, weight = (rng.standard_normal((n, width)).astype(dtype) for n in (rows, vocabulary))
    target = rng.integers(0, 2 * vocabulary, rows)
    statistics = ag.fused_linear_online_max_sum(x, weight, target, 0, vocabulary)
    grad = rng.standard_normal(rows).astype(statistics.logits_max.dtype)
    used = {name: getattr(statistics, name) for name in STATISTICS if name != "predicted_logits"}
    return {"grad": grad, "input": x, "weight": weight} | used


def result_files(*names: str) -> list[str]:
    return [word for name in names for word in (f"--{name.replace('_', '-')}-out", f"{name}_out.npy")]


def everything_here() -> dict[str, tuple[int, int, int]]:
    """Return inode, size and modification time of all files, and inodes of directories and links."""
    found = {}
    for folder, folders, files in os.walk("."):
        for name in (*folders, *files):
            status = os.lstat(os.path.join(folder, name))
            is_file = stat.S_ISREG(status.st_mode)
            kept = (status.st_size, status.st_mtime_ns) if is_file else (0, 0)
            found[os.path.join(folder, name)] = (status.st_ino, *kept)
    return found


def assert_target_refused(capsys: pytest.CaptureFixture[str], inputs: Sequence[str], targets: np.ndarray, row: int):
    """Assert that ``score`` names the row of a target out of the vocabulary."""
    vocabulary = len(np.load("weight.npy", mmap_mode="r"))
    np.save("targets.npy", np.where(np.arange(len(targets)) == row, vocabulary, targets))
    message = refused(capsys, *inputs, "-o", "out", command="score")
    assert message.startswith("targets.npy: linear_cross_entropy: target: expected")
    assert f"{vocabulary} in row {row}" in message


def refused(capsys, *argv: str, command: str = "apply") -> str:
    """Check that a command fails and changes no file, and return its message."""
    before = everything_here()
    assert main([command, *argv]) == 2
    assert everything_here() == before
    out, err = capsys.readouterr()
    assert out == ""
    message = re.fullmatch(rf"ascend-grad {command}: error: (.*)\n", err)
    assert message, err
    return message[1]


def sparse(name: str, shape: tuple[int, ...], dtype: str = "<f4", fortran_order: bool = False) -> int:
    """Make a sparse file of zeros, and return its size."""
    with open(name, "wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": fortran_order, "shape": shape})
        file.truncate(file.tell() + math.prod(shape) * np.dtype(dtype).itemsize)
        return file.seek(0, os.SEEK_END)


def peak_anonymous_bytes(*argv: str, command: str = "apply") -> int:
    """Run the command, and return its largest sampled anonymous memory, in bytes."""
    process, peak = start(command, *argv), 0
    while process.poll() is None:
        with contextlib.suppress(OSError, StopIteration):
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            line = next(line for line in lines if line.startswith("RssAnon:"))
            peak = max(peak, int(line.split()[1]) * 1024)
        time.sleep(0.002)
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert peak > 0
    return peak
