"""Test that ``ascend-grad apply cross_entropy`` writes Zarr arrays with the losses and gradients of one call."""

from __future__ import annotations

import numpy as np
import pytest
import zarr
from files import refused
from samples import generator

import ascend_grad as ag
from ascend_grad.cli import apply_zarr
from ascend_grad.cli.main import main

pytestmark = pytest.mark.usefixtures("here")


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("block_bytes", [1, 2**24])
def test_every_result(axis, block_bytes, monkeypatch, capsys):
    monkeypatch.setattr(apply_zarr, "BLOCK_BYTES", block_bytes)
    rng = generator(axis)
    logits = rng.standard_normal((5, 7, 6)).astype(np.float32)
    target = rng.integers(0, 5, np.delete(logits.shape, axis))
    weights = {"class_weight": rng.random(logits.shape[axis]), "token_weight": rng.random(target.shape)}
    for name, array in {"input": logits, "target": target, **weights}.items():
        zarr.create_array(name, shape=array.shape, dtype=array.dtype, chunks=(2,) * array.ndim)[...] = array
    outputs = ("lse", "log_prob", "entropy", "predicted")
    command = ["apply", "cross_entropy", "input", "target", "--axis", str(axis), "--class-weight", "class_weight"]
    command += ["--token-weight", "token_weight", "-o", "loss.zarr"]
    for name in ("input_grad", *outputs):
        command += [f"--{name.replace('_', '-')}-out", f"{name}.zarr"]
    assert main(command) == 0
    expected = ag.cross_entropy(logits, target, axis, reduction="none", outputs=outputs, **weights)
    for name in ("loss", "input_grad", *outputs):
        result = zarr.open_array(f"{name}.zarr", mode="r")[...]
        assert np.array_equal(result, getattr(expected, name))
        assert result.dtype == getattr(expected, name).dtype
    capsys.readouterr()
    assert main(command) == 0
    assert ", 0 of " in capsys.readouterr().out


def test_totals_are_refused(capsys):
    for name, shape, dtype in (("input", (4, 3), "f4"), ("target", (4,), "i8")):
        zarr.create_array(name, shape=shape, dtype=dtype, chunks=shape)[...] = 0
    for options in (("-o", "out", "--reduction", "mean"), ("--correct-out", "out")):
        assert "need --reduction none, without --correct-out" in refused(
            capsys, "cross_entropy", "input", "target", *options
        )
