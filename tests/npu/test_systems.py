"""Systems on chip: the automatic choice asks each for what it has, and for nothing else."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from device_limits import KERNELS, SYSTEMS, takes
from linear_samples import GRADIENT, LINEAR, problem_of
from samples import MASKED, OPERATORS, random_problem
from stand_in import StandIn, build

import ascend_grad as ag
from ascend_grad.backends.ascend import limits, runtime

DTYPES = ("float32", "float16", "bfloat16", "float64")


def arguments_of(operator: str, dtype: str) -> tuple[tuple, dict]:
    kind = np.dtype(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)
    if operator in OPERATORS:
        problem = random_problem(operator, (1, 2, 3, 5) if operator in MASKED else (3, 7), kind)
        return problem.arrays, dict(problem.settings)
    settings = {"mode": "recomputed"} if operator == GRADIENT else {}
    return (), dict(problem_of(operator, (9, 130, 4), dtype, **settings).arguments)


@pytest.fixture
def system(device: StandIn, monkeypatch):
    """A function that makes the device one of this name."""

    def become(soc: str) -> None:
        device.set_soc(soc)
        monkeypatch.setitem(runtime.found, "state", runtime.state()._replace(soc=soc))

    yield become
    device.set_soc("Ascend910B2")


@pytest.mark.parametrize("soc", [soc for names in SYSTEMS.values() for soc in names])
def test_every_system_is_asked_for_what_it_has(soc, system, device) -> None:
    """Nothing raises under the automatic choice; what the tables say is asked is really asked."""
    family = next(family for family, names in SYSTEMS.items() if soc in names)
    device.set_delay(0)
    system(soc)
    try:
        for operator in (*OPERATORS, *LINEAR):
            for dtype in DTYPES:
                positional, named = arguments_of(operator, dtype)
                taken = takes(family, operator, dtype)
                label = f"{operator} {dtype}"
                assert ag.explain(operator, *positional, **named).backend == ("npu" if taken else "cpu"), label
                device.reset()
                getattr(ag, operator)(*positional, **named)
                asked = [
                    device.calls(f"aclnn{name}{part}")
                    for name in KERNELS[operator][0]
                    for part in ("", "GetWorkspaceSize")
                ]
                assert asked == [int(taken)] * len(asked), label
                assert device.violations() == [], label
    finally:
        device.set_delay(200)


def test_an_operator_without_limits_stays_on_the_cpu(device, monkeypatch) -> None:
    """As one that is new, and has not been brought to the device."""
    x = np.zeros((3, 4), np.float32)
    monkeypatch.delitem(limits.LIMITS, "softmax")
    reason = "the operator has not been brought to the device"
    assert ag.explain("softmax", x) == ("cpu", f"automatic choice; not npu: {reason}")
    np.testing.assert_array_equal(ag.softmax(x), np.full((3, 4), 0.25, np.float32))
    with pytest.raises(ag.UnsupportedDeviceError, match=f"softmax: {reason}"):
        ag.softmax(x, backend="npu")
    assert ag.explain("log_softmax", x).backend == "npu"


@pytest.mark.parametrize("soc", SYSTEMS["unknown"])
def test_an_unknown_system(soc, system, device, caplog) -> None:
    """The CPU computes, and the reason is told; only who forces the device has it asked."""
    x = np.zeros((3, 4), np.float32)
    system(soc)
    choice = ag.explain("softmax", x)
    name = soc or "of an unknown kind"
    assert choice == ("cpu", f"automatic choice; not npu: what this device has is not known, it is {name}")
    assert ag.explain("softmax", x, backend="npu").backend == "npu"
    device.reset()
    with pytest.raises(ag.AclError) as info:
        ag.softmax(x, backend="npu")
    assert info.value.code == 561003
    assert device.calls("aclnnSoftmaxGetWorkspaceSize") == 1
    with pytest.raises(ag.ParamTypeError, match="the device takes dtype float32 or float16 or bfloat16, got float64"):
        ag.log_softmax(x.astype(np.float64), backend="npu")


def test_the_loss_on_a_950_of_an_older_toolkit(run_script) -> None:
    """The operator's symbol is there, its kernel is not: found out at the first call, which the CPU computes."""
    script = """
        import numpy as np
        import ascend_grad as ag
        vectors = [np.ones(3, np.float32)] * 3
        loss = "fused_cross_entropy_loss_with_max_sum"
        print(ag.explain(loss, *vectors).backend)
        for _ in range(2):
            print(getattr(ag, loss)(*vectors)[0].tolist())
        print(ag.explain(loss, *vectors).backend, ag.explain("softmax", vectors[0]).backend)
    """
    environment = {"CANN_STAND_IN_SOC": "Ascend950PR_9589"}
    older = run_script(script, ASCEND_HOME_PATH=str(build("before_9_2")), **environment)
    assert older.stdout.splitlines() == ["npu", "[-1.0, -1.0, -1.0]", "[-1.0, -1.0, -1.0]", "cpu npu"]
    assert older.stderr.count("\n") == 1
    newer = run_script(script, ASCEND_HOME_PATH=str(build("split")), **environment)
    assert newer.stdout.splitlines()[-1] == "npu npu"
    assert newer.stderr == ""
