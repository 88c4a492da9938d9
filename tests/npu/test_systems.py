"""Test that the automatic choice uses each system on chip only for the operators that its vendor documents."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from device_limits import DENSE, IDS, KERNELS, PRODUCT, SYSTEMS, documents, kernels, takes
from linear_samples import GRADIENT, TOP_K, WHOLE, problem_of
from samples import MASKED, OPERATORS, random_problem
from stand_in import StandIn, build

import ascend_grad as ag
from ascend_grad import npu
from ascend_grad.backends.ascend import limits, runtime
from ascend_grad.inspection import bound_call

DTYPES = ("float32", "float16", "bfloat16", "float64")


def arguments_of(operator: str, dtype: str) -> tuple[tuple, dict]:
    kind = np.dtype(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)
    if operator in OPERATORS:
        problem = random_problem(operator, (1, 2, 3, 5) if operator in MASKED else (3, 7), kind)
        return problem.arrays, dict(problem.settings)
    random = np.random.default_rng(0)
    x = random.standard_normal((9, 130)).astype(kind)
    if operator == TOP_K:
        return (x, random.standard_normal((20, 130)).astype(kind), 3), {}
    if operator in (IDS, DENSE, PRODUCT):
        target = np.abs(x) if operator == DENSE else random.integers(0, 130, 9)
        return (x, target, x) if operator == PRODUCT else (x, target), {}
    settings = {"mode": "recomputed"} if operator == GRADIENT else {}
    return (), dict(problem_of(operator, (9, 130, 4), dtype, **settings).arguments)


def function_of(operator: str) -> str:
    """Return the name of the function that calls an operator."""
    return operator.partition(",")[0]


@pytest.fixture
def system(device: StandIn, monkeypatch):
    """Return a function that gives the device the name of a system."""

    def become(soc: str) -> None:
        device.set_soc(soc)
        monkeypatch.setitem(runtime.found, "state", runtime.state()._replace(soc=soc))

    yield become
    device.set_soc("Ascend910B2")


@pytest.mark.parametrize("soc", [soc for names in SYSTEMS.values() for soc in names])
def test_every_system_is_asked_for_what_is_documented(soc, system, device) -> None:
    """The automatic choice raises no error, and runs on the device the operators that the tables list.

    Forced calls also go to systems that have the operator although no document lists it.
    """
    family = next(family for family, names in SYSTEMS.items() if soc in names)
    device.set_delay(0)
    system(soc)
    try:
        for operator in KERNELS:
            name = function_of(operator)
            for dtype in DTYPES:
                positional, named = arguments_of(operator, dtype)
                documented = documents(family, operator, dtype)
                label = f"{operator} {dtype}"
                choice = ag.explain(name, *positional, **named)
                assert choice.backend == ("npu" if documented else "cpu"), label
                taken = takes(family, operator, dtype)
                undocumented = "the vendor documents the operator only on 910B, 910_93, this device is " + family
                assert (undocumented in choice.reason) == (taken and not documented), label
                device.reset()
                getattr(ag, name)(*positional, **named)
                if not documented:
                    assert device.calls() == 0, label
                if taken and not documented:
                    forced = ag.explain(name, *positional, **named, backend="npu")
                    assert forced == ("npu", f"requested by the backend argument, though {undocumented}"), label
                    getattr(ag, name)(*positional, **named, backend="npu")
                asked = [
                    device.calls(f"aclnn{kernel}{part}")
                    for kernel in kernels(family, operator, dtype)
                    for part in ("", "GetWorkspaceSize")
                ]
                assert [count > 0 for count in asked] == [taken] * len(asked), label
                assert device.violations() == [], label
    finally:
        device.set_delay(200)


def test_the_document_lists_what_the_limits_say(system) -> None:
    """The table of operators and systems in docs/npu.md agrees with the limits."""
    text = (Path(__file__).parents[2] / "docs" / "npu.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.count(" | ") == 6]
    (head,) = (row for row in rows if row[0] == "operator")
    named = {row[0].replace("`", "").partition(" (")[0]: row[1:] for row in rows}
    table = {name: cells for name, cells in named.items() if name in KERNELS}
    assert table.keys() == KERNELS.keys() - {WHOLE}
    for operator, cells in table.items():
        positional, named = arguments_of(operator, "float16")
        for family, cell in zip(head[1:], cells, strict=True):
            system(SYSTEMS[family][-1])
            expected = {"D": None, "d": None, "(w)": "the vendor documents", "–": "the operator "}[cell]
            reason = limits.unsupported_reason(bound_call(function_of(operator), positional, named)[0], runtime.state())
            assert (reason and reason.reason[: len(expected or "")]) == expected, (operator, family)
            assert (reason is not None and reason.error is not None) == (cell == "–")


def test_the_reason_is_about_ids(system) -> None:
    """A device that only computes probabilities refuses ids for a reason that names ids."""
    system("Ascend310P3")
    logits = np.zeros((2, 3), np.float32)
    reason = "the operator of ids exists only on 910B, 910_93, 950, this device is 310P"
    assert reason in ag.explain("cross_entropy", logits, np.array([0, 1])).reason
    assert ag.explain("cross_entropy", logits, logits).backend == "npu"


def test_an_operator_without_limits_stays_on_the_cpu(device, monkeypatch) -> None:
    """The CPU computes an operator without limits, since such an operator was not brought to the device."""
    x = np.zeros((3, 4), np.float32)
    monkeypatch.delitem(limits.LIMITS, "softmax")
    reason = "the function is not implemented for the NPU"
    assert ag.explain("softmax", x) == ("cpu", f"automatic choice; not npu: {reason}")
    np.testing.assert_array_equal(ag.softmax(x), np.full((3, 4), 0.25, np.float32))
    with pytest.raises(ag.UnsupportedDeviceError, match=f"softmax: {reason}"):
        ag.softmax(x, backend="npu")
    assert ag.explain("log_softmax", x).backend == "npu"


@pytest.mark.parametrize("soc", SYSTEMS["unknown"])
def test_an_unknown_system(soc, system, device, caplog) -> None:
    """On an unknown system the CPU computes, and `explain` returns the reason. Only forced calls go to the device."""
    x = np.zeros((3, 4), np.float32)
    system(soc)
    choice = ag.explain("softmax", x)
    name = soc or "unknown model"
    reason = f"the operators of this device are not known ({name})"
    assert choice == ("cpu", f"automatic choice; not npu: {reason} (backend='npu' tries it)")
    assert ag.explain("softmax", x, backend="npu").backend == "npu"
    device.reset()
    with pytest.raises(ag.AclError) as info:
        ag.softmax(x, backend="npu")
    assert info.value.code == 561003
    assert device.calls("aclnnSoftmaxGetWorkspaceSize") == 1
    with pytest.raises(ag.ParamTypeError, match="supports dtype float32 or float16 or bfloat16, got float64"):
        ag.log_softmax(x.astype(np.float64), backend="npu")


def test_the_loss_on_a_950(run_script) -> None:
    """Only forced calls of the loss go to a 950. CANN has the kernel from 9.2 on, but no document lists it."""
    script = """
        import numpy as np
        import ascend_grad as ag
        vectors = [np.ones(3, np.float32)] * 3
        loss = "fused_cross_entropy_loss_with_max_sum"
        print(ag.explain(loss, *vectors).backend, getattr(ag, loss)(*vectors)[0].tolist())
        for _ in range(2):
            try:
                print(getattr(ag, loss)(*vectors, backend="npu")[0].tolist())
            except ag.AscendGradError as error:
                print(type(error).__name__, error.code)
        print(ag.explain("softmax", vectors[0]).backend)
    """
    environment = {"CANN_STAND_IN_SOC": "Ascend950PR_9589"}
    older = run_script(script, ASCEND_HOME_PATH=str(build("before_9_2")), **environment)
    missing = ["MissingKernelError 561112", "BackendUnavailableError None"]
    assert older.stdout.splitlines() == ["cpu [-1.0, -1.0, -1.0]", *missing, "npu"]
    assert older.stderr.count("\n") == 1
    newer = run_script(script, ASCEND_HOME_PATH=str(build("split")), **environment)
    assert newer.stdout.splitlines() == ["cpu [-1.0, -1.0, -1.0]", *["[-1.0, -1.0, -1.0]"] * 2, "npu"]
    assert newer.stderr == ""


def test_what_is_not_documented_is_named_for_arrays_of_the_device(system, device) -> None:
    """Calls on device arrays go to the device. `explain` tells if no document lists the operator for the system."""
    operator = "scaled_masked_softmax_backward"
    positional, named = arguments_of(operator, "float16")
    there = [npu.asarray(each) for each in positional]
    documented = ag.explain(operator, *there, **named)
    assert documented == ("npu", "its arrays are on device 0")
    system(SYSTEMS["310P"][-1])
    undocumented = "the vendor documents the operator only on 910B, 910_93, this device is 310P"
    assert ag.explain(operator, *there, **named) == ("npu", f"{documented.reason}, though {undocumented}")
    right = ag.scaled_masked_softmax_backward(*positional, **named, backend="cpu")
    found = ag.scaled_masked_softmax_backward(*there, **named)
    np.testing.assert_allclose(found.numpy().astype(np.float32), right.astype(np.float32), rtol=2**-8, atol=2**-8)


def test_a_small_vocabulary_is_for_forced_calls(device) -> None:
    """Only forced calls with fewer than 128 vocabulary entries go to the device, since no document mentions them."""
    operator = GRADIENT
    for v, documented in ((127, False), (128, True)):
        arguments = dict(problem_of(operator, (9, v, 4), "float16", mode="recomputed").arguments)
        choice = ag.explain(operator, **arguments)
        if documented:
            assert choice == ("npu", "automatic choice")
            continue
        reason = "weight: the vendor documents V of at least 128, got 127"
        assert choice == ("cpu", f"automatic choice; not npu: {reason} (backend='npu' tries it)")
        device.reset()
        expected = getattr(ag, operator)(**arguments)
        assert device.calls() == 0
        assert ag.explain(operator, **arguments, backend="npu").reason == (
            f"requested by the backend argument, though {reason}"
        )
        for got, right in zip(getattr(ag, operator)(**arguments, backend="npu"), expected, strict=True):
            np.testing.assert_allclose(got.astype(np.float32), right.astype(np.float32), rtol=2**-8, atol=2**-8)
        assert device.calls("aclnnFusedLinearCrossEntropyLossGrad") == 1
