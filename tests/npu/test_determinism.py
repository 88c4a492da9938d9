"""Test deterministic results on the device, and that calls set and restore the option of the context."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from linear_samples import LINEAR, WHOLE
from npu_samples import X, problem_for, results_of, to_device
from python_threads import in_threads
from samples import OPERATORS, random_problem
from stand_in import StandIn, build

import ascend_grad as ag
from ascend_grad import npu
from ascend_grad.backends.ascend import runtime

MASKED = "scaled_masked_softmax_backward"
NOT_SET = 107021


class Option:
    """Read and set the option of a device's context, as another library does."""

    def __init__(self) -> None:
        self._runtime = ctypes.CDLL(str(build("split") / "lib64" / "libascendcl.so"))

    def get(self, device: int = 0) -> int:
        value = ctypes.c_int64(-1)
        self._runtime.aclrtSetDevice(device)
        assert self._runtime.aclrtCtxGetSysParamOpt(0, ctypes.byref(value)) in (0, NOT_SET)
        return value.value

    def set(self, value: int, device: int = 0) -> None:
        self._runtime.aclrtSetDevice(device)
        assert self._runtime.aclrtCtxSetSysParamOpt(0, ctypes.c_int64(value)) == 0


@pytest.fixture
def option(device) -> Iterator[Option]:
    ag.softmax(X, backend="npu")
    option = Option()
    yield option
    option.set(0)
    device.set_varying(False)


def varying_call():
    problem = random_problem(MASKED, (1, 2, 3, 500), np.dtype(np.float32))
    return lambda: ag.scaled_masked_softmax_backward(*problem.arrays, **problem.settings, backend="npu")


def different(call) -> int:
    return len({call().tobytes() for _ in range(10)})


def test_bits_that_vary_are_equal_where_asked_for(option, device: StandIn) -> None:
    call = varying_call()
    assert different(call) == 1
    device.set_varying(True)
    assert different(call) == 2
    with npu.use_deterministic():
        assert different(call) == 1
        with npu.use_deterministic(False):
            assert different(call) == 2
        assert different(call) == 1
    assert different(call) == 2
    npu.use_deterministic(True)
    try:
        assert different(call) == 1
    finally:
        npu.use_deterministic(False)
    assert different(call) == 2


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("operator", [*OPERATORS, *LINEAR])
def test_every_operator_is_launched_with_the_option(operator, where, option, device: StandIn) -> None:
    args, kwargs = problem_for(operator)
    if where == "device":
        args, kwargs = to_device(args, kwargs)
    device.reset()
    with npu.use_deterministic():
        results_of(getattr(ag, operator)(*args, **kwargs, backend="npu"))
    launches = 3 if operator == WHOLE else 1
    assert device.counter("deterministic_launches") == device.counter("launches") == launches
    assert option.get() == 0
    results_of(getattr(ag, operator)(*args, **kwargs, backend="npu"))
    assert device.counter("deterministic_launches") == launches
    assert device.violations() == []


@pytest.mark.parametrize("before", [0, 1, 2])
def test_the_option_is_as_before(before, option, device: StandIn) -> None:
    """The option of all devices is restored, also after failures. A stricter level of another library is kept."""
    other = option.get(1)
    option.set(before)
    device.reset()
    with npu.use_deterministic():
        for fault in (None, "aclnnSoftmaxGetWorkspaceSize", "aclnnSoftmax", "aclrtMalloc"):
            npu.release()
            if fault:
                device.fail(fault)
                with pytest.raises(ag.AscendGradError):
                    ag.softmax(X, backend="npu")
            else:
                ag.softmax(X, backend="npu")
            assert option.get() == before
    assert option.get(1) == other
    option.get(0)
    # The allocation failed before the option was set.
    assert device.calls("aclrtCtxSetSysParamOpt") == (0 if before else 2 * 3)


@pytest.mark.parametrize("function", ["aclrtCtxGetSysParamOpt", "aclrtCtxSetSysParamOpt"])
def test_an_option_that_cannot_be_set_is_an_error(function, option, device: StandIn) -> None:
    before = device.live()
    device.fail(function)
    with npu.use_deterministic(), pytest.raises(ag.AclError, match=f"softmax: {function} failed"):
        ag.softmax(X, backend="npu")
    assert option.get() == 0
    with npu.use_deterministic():
        ag.softmax(X, backend="npu")
    npu.release()
    assert device.live().get("executors", 0) == before.get("executors", 0)
    assert device.violations() == []


def test_an_option_that_cannot_be_restored_is_told(option, device: StandIn, caplog) -> None:
    device.fail("aclrtCtxSetSysParamOpt", 2)
    with npu.use_deterministic():
        ag.softmax(X, backend="npu")
    assert "aclrtCtxSetSysParamOpt failed" in caplog.text


def test_threads_do_not_disturb_one_another(option, device: StandIn) -> None:
    """Threads share a context, but a call that ends does not reset the option while another call goes on."""
    device.reset()
    calls = 40

    def work() -> None:
        with npu.use_deterministic():
            for _ in range(calls):
                ag.softmax(X, backend="npu")

    in_threads(*[work] * 4)
    assert device.counter("deterministic_launches") == device.counter("launches") == 4 * calls
    assert option.get() == 0


def test_the_choice_is_one_of_the_context(option, device: StandIn) -> None:
    device.reset()
    with npu.use_deterministic():
        thread = threading.Thread(target=lambda: ag.softmax(X, backend="npu"))
        thread.start()
        thread.join()
    assert device.counter("deterministic_launches") == 0
    block = npu.use_deterministic(False)
    with pytest.raises(RuntimeError, match=r"use_deterministic\(False\): expected an open `with` block of it"):
        block.__exit__()
    with pytest.raises(ag.ParamTypeError, match=r"^npu\.use_deterministic: mode: expected True, .*, got 1$"):
        npu.use_deterministic(1)  # type: ignore[arg-type]


def test_a_runtime_without_the_option(run_script) -> None:
    """The CPU computes if the runtime lacks the option. Forced calls and `workspace_size` name the missing function."""
    script = """
        import numpy as np
        import ascend_grad as ag
        x = np.zeros(4, np.float32)
        ag.softmax(x, backend="npu")
        with ag.npu.use_deterministic():
            print(ag.explain("softmax", x))
            print(ag.softmax(x).tolist())
            for call in ag.softmax, lambda x, **kwargs: ag.workspace_size("softmax", x, **kwargs):
                try:
                    call(x, backend="npu")
                except ag.BackendUnavailableError as error:
                    print(error)
        print(ag.explain("softmax", x).backend)
    """
    result = run_script(script, ASCEND_HOME_PATH=str(build("without_determinism")))
    choice, computed, *errors, last = result.stdout.splitlines()
    assert choice.startswith("Explanation(backend='cpu', ")
    assert "automatic choice; not npu: deterministic results were requested, but the runtime library lacks" in choice
    assert computed == "[0.25, 0.25, 0.25, 0.25]"
    assert len(errors) == 2
    for error in errors:
        assert error.endswith(
            "deterministic results were requested, but the runtime library lacks aclrtCtxSetSysParamOpt"
        )
    assert last == "npu"


def test_the_first_stage_is_asked_with_the_option(option, device: StandIn) -> None:
    device.reset()
    with npu.use_deterministic():
        ag.workspace_size("softmax", X, backend="npu")
    assert device.calls("aclrtCtxSetSysParamOpt") == 2
    assert option.get() == 0


def test_rows_alone_are_deterministic(option, device: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stricter level is set for the operators that have it on the system that has it; the CPU computes the rest."""
    state = runtime.state()
    with npu.use_deterministic("batch"):
        assert "not npu: batch-invariant results were requested" in ag.explain("softmax", X).reason
        with pytest.raises(ag.UnsupportedDeviceError, match="only softmax and log_softmax have, on 950"):
            ag.softmax(X, backend="npu")
    monkeypatch.setitem(runtime.found, "state", state._replace(soc="Ascend950PR_9589"))
    device.set_soc("Ascend950PR_9589")
    device.reset()
    try:
        with npu.use_deterministic("batch"):
            for operator in (ag.softmax, ag.log_softmax):
                operator(X, backend="npu")
            assert ag.explain("softmax_backward", X, X).backend == "cpu"
        assert device.counter("batch_invariant_plans") == 2
        assert option.get() == 0
        option.set(3)
        with npu.use_deterministic():
            ag.softmax(X, backend="npu")
        assert (device.counter("batch_invariant_plans"), option.get()) == (3, 3)
    finally:
        device.set_soc("Ascend910B2")
    with pytest.raises(ag.ParamInvalidError, match=r"^npu\.use_deterministic: .* or 'batch', got str 'rows'$"):
        npu.use_deterministic("rows")  # type: ignore[arg-type]
