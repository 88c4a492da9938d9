"""Test ``ascend-grad check`` with tensors of torch_npu."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import pytest
import torch
from linear_samples import TOP_K

import ascend_grad as ag
from ascend_grad.cli import check, check_calls, check_cases
from ascend_grad.cli.main import main
from ascend_grad.operators.table import OPERATORS

pytestmark = pytest.mark.usefixtures("torch_npu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_case_is_computed_with_tensors_too(dtype, device, tmp_path) -> None:
    file = tmp_path / "check.json"
    counts = []
    for backend in ("npu", "cpu"):
        assert main(["check", "--backend", backend, "--filter", f"log_softmax {dtype}", "--json", str(file)]) == 0
        (row,) = json.loads(file.read_text())["rows"]
        counts.append(row["cases"])
    assert counts[0] == 4 * counts[1]  # arrays and tensors are checked, each on two devices


#: The operators that a device computes; the others have no cases for it.
OF_LAYERS = {"linear_cross_entropy_hvp", "linear_cross_entropy_hessian"}
OF_DEVICES = sorted(set(OPERATORS) - {"cross_entropy", TOP_K, *OF_LAYERS})


@pytest.mark.parametrize("operator", OF_DEVICES)
def test_every_case_is_computed_on_every_device(operator, device, monkeypatch) -> None:
    cases = [case for case in check_cases.cases() if (case.operator, case.dtype) == (operator, "float16")]
    cases = [case for case in cases if ag.explain(operator, **case.arguments).backend == "npu"]
    right, named, used = getattr(ag, operator), set(), Counter()

    def recorded(*, backend, **arguments):
        devices = {each.device.index for each in arguments.values() if isinstance(each, torch.Tensor)}
        used.update(devices if backend == "npu" else ())
        return right(**arguments, backend=backend)

    monkeypatch.setattr(check, "cases", lambda: iter(cases))
    monkeypatch.setattr(ag, operator, recorded)
    monkeypatch.setattr(check.Row, "add", lambda row, label, errors: named.add(label))
    list(check._measure("npu", ""))
    ways = [f", device {index}{how}" for index in (0, 1) for how in ("", ", tensors of torch_npu")]
    assert named == {case.label + way for case in cases for way in ways}
    varies = 2 if operator in check_calls.VARYING else 1
    assert used == dict.fromkeys((0, 1), len(cases) + varies * check_calls.REPEATS)


def test_logits_that_are_wrong_on_one_device_fail(device, monkeypatch, capsys) -> None:
    operator = "fused_linear_online_max_sum"
    right = ag.fused_linear_online_max_sum

    def wrong(*, input, return_logits, **arguments):
        result = right(input=input, return_logits=return_logits, **arguments)
        if return_logits and isinstance(input, torch.Tensor) and input.device.index == 1:
            result.predicted_logits[-1] -= 0.5
        return result

    monkeypatch.setattr(ag, operator, wrong)
    assert main(["check", "--backend", "npu", "--filter", f"{operator} float16"]) == 1
    assert ", logits, device 1, tensors of torch_npu\n" in capsys.readouterr().out


def test_bits_of_tensors_that_vary_fail(device, monkeypatch, capsys) -> None:
    right, count = ag.softmax, itertools.count()

    def softmax(*, input, **arguments):
        result = right(input=input, **arguments)
        if isinstance(input, torch.Tensor) and input.device.index == 1 and input.shape == (4, 30000):
            result[3, 7] *= 1 + 2**-23 * (next(count) % 10 == 5)
        return result

    monkeypatch.setattr(ag, "softmax", softmax)
    assert main(["check", "--backend", "npu", "--filter", "softmax float32"]) == 1
    assert ", device 1, tensors of torch_npu: bits of results differ among 10 equal calls" in capsys.readouterr().out


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
