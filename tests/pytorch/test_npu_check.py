"""``ascend-grad check`` with tensors of torch_npu."""

from __future__ import annotations

import json

import pytest
import torch

import ascend_grad as ag
from ascend_grad.cli.main import main

pytestmark = pytest.mark.usefixtures("torch_npu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_case_is_computed_with_tensors_too(dtype, device, tmp_path) -> None:
    file = tmp_path / "check.json"
    counts = []
    for backend in ("npu", "cpu"):
        assert main(["check", "--backend", backend, "--filter", f"log_softmax {dtype}", "--json", str(file)]) == 0
        (row,) = json.loads(file.read_text())["rows"]
        counts.append(row["cases"])
    assert counts[0] == 2 * counts[1]


def test_linear_operators(device, tmp_path) -> None:
    file = tmp_path / "check.json"
    assert main(["check", "--backend", "npu", "--filter", "loss_grad bfloat16", "--json", str(file)]) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert row["cases"] > 10
    assert row["failures"] == []


def test_wrong_results_of_tensors_are_named(device, monkeypatch, capsys) -> None:
    right = ag.softmax

    def softmax(input, *args, **kwargs):
        result = right(input, *args, **kwargs)
        if isinstance(input, torch.Tensor) and input.shape == (5, 31):
            return right(result, *args, **kwargs)
        return result

    monkeypatch.setattr(ag, "softmax", softmax)
    assert main(["check", "--backend", "npu", "--filter", "softmax float32"]) == 1
    text = capsys.readouterr().out
    assert "(5, 31) dim -1" in text
    assert "tensors of torch_npu" in text
