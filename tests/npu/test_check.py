"""Test ``ascend-grad check`` on devices: all devices, bits that vary, runtimes without a deterministic option."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import numpy as np
import pytest
from npu_samples import ALL
from stand_in import StandIn, build

import ascend_grad as ag
from ascend_grad import npu
from ascend_grad.backends.ascend import determinism, threads
from ascend_grad.cli import check, check_cases
from ascend_grad.cli.main import main

MASKED = "scaled_masked_softmax_backward"


@pytest.fixture
def varying(device: StandIn) -> Iterator[None]:
    device.set_varying(True)
    yield
    device.set_varying(False)


def verdicts(text: str) -> dict[str, str]:
    return {
        line.split()[0]: line.split()[1] for line in text.splitlines() if line[:1] != " " and len(line.split()) == 2
    }


def test_all_devices_are_checked(device: StandIn, monkeypatch, capsys) -> None:
    """A wrong result is reported with its device, and the thread's device is restored."""
    right, used = ag.log_softmax, set()

    def log_softmax(*args, backend, **kwargs):
        result = right(*args, backend=backend, **kwargs)
        if backend == "npu":
            used.add(npu.get_device())
            if npu.get_device() == 1:
                result[...] += 1
        return result

    before = threads.chosen_device()
    monkeypatch.setattr(ag, "log_softmax", log_softmax)
    assert main(["check", "--backend", "npu", "--filter", "log_softmax float32"]) == 1
    text = capsys.readouterr().out
    assert verdicts(text) == {"log_softmax": "FAIL"}
    assert used == {0, 1}
    assert "times its tolerance, in case" in text
    assert ", device 1\n" in text
    assert threads.chosen_device() == before


@pytest.mark.parametrize("operator", ALL)
def test_every_case_is_computed_on_every_device(device: StandIn, operator: str, monkeypatch) -> None:
    cases = [case for case in check_cases.cases() if (case.operator, case.dtype) == (operator, "float16")]
    cases = [case for case in cases if ag.explain(case.operator, **case.arguments).backend == "npu"]
    labels = {tuple(map(id, case.arguments.values())): case.label for case in cases}
    right, found, named = getattr(ag, operator), set(), set()

    def recorded(**arguments):
        if arguments["backend"] == "npu":
            found.add((npu.get_device(), labels[tuple(map(id, arguments.values()))[:-1]]))
        return right(**arguments)

    monkeypatch.setattr(check, "cases", lambda: iter(cases))
    monkeypatch.setattr(ag, operator, recorded)
    monkeypatch.setattr(check.Row, "add", lambda row, label, errors: named.add(label))
    list(check._measure("npu", ""))
    assert found == set(itertools.product((0, 1), labels.values()))
    assert named == {f"{label}, device {number}" for number, label in found}


@pytest.mark.parametrize("logits", [True, False])
@pytest.mark.parametrize("index", [0, 1])
def test_statistics_that_are_wrong_on_one_device_fail(
    device: StandIn, index: int, logits: bool, monkeypatch, capsys
) -> None:
    operator = "fused_linear_online_max_sum"
    right = ag.fused_linear_online_max_sum

    def wrong(*args, backend, **kwargs):
        result = right(*args, backend=backend, **kwargs)
        if backend == "npu" and kwargs["return_logits"] == logits and npu.get_device() == index:
            result.predicted_logits[-1] -= 0.5
        return result

    monkeypatch.setattr(ag, operator, wrong)
    assert main(["check", "--backend", "npu", "--filter", f"{operator} bfloat16"]) == 1
    text = capsys.readouterr().out
    assert verdicts(text) == {operator: "FAIL"}
    assert f", device {index}\n" in text


def test_an_error_of_one_device_does_not_hide_the_other(device: StandIn, monkeypatch, tmp_path) -> None:
    right, file = ag.softmax, tmp_path / "check.json"

    def softmax(*args, backend, **kwargs):
        if backend == "npu" and npu.get_device() == 0:
            raise ag.AclError("aclnnSoftmax failed", code=507015, call="aclnnSoftmax")
        return right(*args, backend=backend, **kwargs)

    monkeypatch.setattr(ag, "softmax", softmax)
    arguments = ["check", "--backend", "npu", "--filter", "softmax float16", "--json", str(file)]
    assert main(arguments) == 1
    row = next(row for row in json.loads(file.read_text())["rows"] if row["operator"] == "softmax")
    assert row["cases"] == len(row["failures"]) > 10
    assert all("device 0: aclnnSoftmax failed" in failure for failure in row["failures"])


def test_bits_that_vary_on_one_device_fail(device: StandIn, monkeypatch, capsys) -> None:
    right, count = ag.softmax, itertools.count()

    def softmax(*args, backend, **kwargs):
        result = right(*args, backend=backend, **kwargs)
        if backend == "npu" and npu.get_device() == 1 and result.shape == (4, 30000) and next(count) % 10 == 5:
            result[3, 7] = np.nextafter(result[3, 7], np.float32(2))
        return result

    monkeypatch.setattr(ag, "softmax", softmax)
    assert main(["check", "--backend", "npu", "--filter", "softmax float32"]) == 1
    text = capsys.readouterr().out
    assert verdicts(text)["softmax"] == "FAIL"
    assert ", device 1: bits of results differ among 10 equal calls" in text


def test_operators_that_vary(varying, capsys) -> None:
    """An operator passes with a note if its bits vary by default, but not with the deterministic option."""
    assert main(["check", "--backend", "npu", "--filter", f"{MASKED} float32"]) == 0
    text = capsys.readouterr().out
    assert verdicts(text) == {MASKED: "pass"}
    assert "note: (1, 2, 5, 4096) scale" in text
    assert "bits of results differ between equal calls without npu.use_deterministic()" in text


def test_the_option_without_effect_fails(varying, monkeypatch, capsys) -> None:
    monkeypatch.setattr(determinism, "level", lambda call: 0)
    assert main(["check", "--backend", "npu", "--filter", f"{MASKED} float32"]) == 1
    assert "bits of results differ between equal calls with npu.use_deterministic()" in capsys.readouterr().out


def test_a_runtime_without_the_option(run_script) -> None:
    script = f"""
        import sys
        from ascend_grad.cli.main import main
        sys.exit(main(["check", "--backend", "npu", "--filter", "{MASKED} float32"]))
    """
    result = run_script(script, ASCEND_HOME_PATH=str(build("without_determinism")), CANN_STAND_IN_VARYING="1")
    assert verdicts(result.stdout)[MASKED] == "pass"
    assert "the runtime library lacks aclrtCtxSetSysParamOpt" in result.stdout


def test_every_operator_is_repeated(device: StandIn, monkeypatch) -> None:
    calls: dict[str, list[int]] = {}
    for operator in ALL:
        right = getattr(ag, operator)

        def counted(*args, right=right, operator=operator, backend, **kwargs):
            if backend == "npu":
                calls.setdefault(operator, []).append(
                    sum(a.nbytes for a in kwargs.values() if isinstance(a, np.ndarray))
                )
            return right(*args, backend=backend, **kwargs)

        monkeypatch.setattr(ag, operator, counted)
    assert main(["check", "--backend", "npu", "--filter", "float16"]) == 0
    for operator in ALL:
        *_, last = sizes = calls[operator]
        assert last == max(sizes)
        assert sizes[-20:] == [last] * 20  # ten calls on each of the two devices
