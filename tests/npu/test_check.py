"""``ascend-grad check`` on the device: all devices, bits that vary, runtimes that cannot change that."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from npu_samples import ALL
from stand_in import StandIn, build

import ascend_grad as ag
from ascend_grad import npu
from ascend_grad.backends.ascend import determinism, threads
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
    """In turn; what is wrong on one of them is named with it, and the thread's device is as before."""
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
    assert "tolerances, at" in text
    assert ", device 1\n" in text
    assert threads.chosen_device() == before


def test_operators_that_vary(varying, capsys) -> None:
    """The one whose vendor promises nothing passes, as it does not vary where that is asked for; it is told."""
    assert main(["check", "--backend", "npu", "--filter", f"{MASKED} float32"]) == 0
    text = capsys.readouterr().out
    assert verdicts(text) == {MASKED: "pass"}
    assert "note: (1, 2, 5, 4096) scale" in text
    assert "bits vary from call to call without npu.use_deterministic()" in text


def test_the_option_without_effect_fails(varying, monkeypatch, capsys) -> None:
    monkeypatch.setattr(determinism, "is_asked_for", lambda call: False)
    assert main(["check", "--backend", "npu", "--filter", f"{MASKED} float32"]) == 1
    assert "bits vary with npu.use_deterministic()" in capsys.readouterr().out


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
        assert sizes[-10:] == [last] * 10
