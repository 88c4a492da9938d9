"""Test that `workspace_size` on the device is the largest size that the operators' first stages request."""

from __future__ import annotations

import numpy as np
import pytest
from linear_samples import GRADIENT, LINEAR, LOSS, STATISTICS, WHOLE, problem_of
from npu_samples import X, problem_for, to_device
from samples import MASKED, OPERATORS, random_problem
from stand_in import StandIn

import ascend_grad as ag
from ascend_grad import _aclnn, npu
from ascend_grad.backends.ascend import runtime
from ascend_grad.operators import table

FIRST_STAGES = (*OPERATORS, GRADIENT, STATISTICS, LOSS)


@pytest.fixture
def asked(monkeypatch) -> list[int]:
    """Return a list of the sizes that first stages request, in order."""
    sizes: list[int] = []

    def recorded(prepare):
        def first_stage(*arguments):
            executor = prepare(*arguments)
            sizes.append(executor.workspace_size)
            return executor

        return first_stage

    for name in FIRST_STAGES:
        monkeypatch.setattr(_aclnn, name, recorded(getattr(_aclnn, name)))
    return sizes


def with_all_rows(arguments: dict) -> dict:
    """Replace zero gradients and ignored targets, so that the device computes every row."""
    changed = dict(arguments)
    if "grad" in changed:
        changed["grad"] = np.where(changed["grad"] == 0, np.float32(1), changed["grad"])
    if "ignore_index" in changed:
        ignored = changed["target"] == changed["ignore_index"]
        changed["target"] = np.where(ignored, changed["vocab_start_index"], changed["target"])
    return changed


def calls_of(operator: str):
    """Yield arguments in all variants that lead to different calls of the device."""
    if operator in OPERATORS:
        shapes = ((2, 3, 5, 16),) if operator in MASKED else ((), (7,), (64, 128))
        for shape in shapes:
            for dtype in ("float32", "float16"):
                problem = random_problem(operator, shape, dtype)
                yield problem.arrays, dict(problem.settings)
        yield problem.arrays, {**problem.settings, "out": np.empty(shapes[-1], np.float32)}
        return
    modes = [{"mode": mode} for mode in ("stored", "recomputed")] if operator == GRADIENT else [{}]
    for mode in modes:
        for bt in (9, 64):
            arguments = with_all_rows(problem_of(operator, (bt, 130, 16), "float16", **mode).arguments)
            if operator == STATISTICS:
                arguments["return_logits"] = bt == 9
            yield (), arguments
    if operator == WHOLE:
        yield (), {**arguments, "return_grad": False}
        first = arguments["vocab_start_index"]
        yield (), {**arguments, "target": arguments["target"].astype(np.int32) - first, "vocab_start_index": 0}


def test_the_first_stages_tell(any_operator, device: StandIn, asked) -> None:
    """`workspace_size` requests the same sizes as the call itself, and allocates, copies and launches nothing."""
    for args, kwargs in calls_of(any_operator):
        npu.release()
        device.reset()
        del asked[:]
        size = ag.workspace_size(any_operator, *args, **kwargs, backend="npu")
        assert size == max(asked) > 0
        for name in ("mallocs", "host_mallocs", "launches", "copies_h2d", "copies_d2h"):
            assert device.counter(name) == 0, name
        assert device.calls("aclDestroyAclOpExecutor") == len(asked)
        assert device.counter("tensors") == device.counter("executors") == 0
        del asked[:]
        getattr(ag, any_operator)(*args, **kwargs, backend="npu")
        assert size == max(asked)
        assert device.violations() == []


def test_arrays_on_the_device(any_operator, device: StandIn, asked) -> None:
    args, kwargs = problem_for(any_operator)
    args, kwargs = to_device(args, with_all_rows(kwargs))
    device.reset()
    size = ag.workspace_size(any_operator, *args, **kwargs)
    assert device.counter("copies_d2h") == device.counter("launches") == 0
    assert size == max(asked) > 0
    del asked[:]
    getattr(ag, any_operator)(*args, **kwargs)
    assert size == max(asked)


def test_values_do_not_matter(device: StandIn) -> None:
    arguments = dict(problem_of(GRADIENT, (9, 130, 16), "float16", mode="recomputed").arguments)
    size = ag.workspace_size(GRADIENT, **arguments, backend="npu")
    arguments["grad"] = np.zeros_like(arguments["grad"])
    assert ag.workspace_size(GRADIENT, **arguments, backend="npu") == size


def test_who_would_compute_the_call(device: StandIn) -> None:
    there = ag.workspace_size("softmax", X, backend="npu")
    assert ag.workspace_size("softmax", X) == there
    assert ag.workspace_size("softmax", npu.asarray(X)) == there
    device.reset()
    here = ag.workspace_size("softmax", X, backend="cpu")
    assert ag.workspace_size("softmax", X.astype(np.float64)) >= 0
    assert device.calls() == 0
    with ag.use_backend("npu"):
        assert ag.workspace_size("softmax", X) == there != here
        with pytest.raises(ag.ParamTypeError, match="the device supports dtype"):
            ag.workspace_size("softmax", X.astype(np.float64))


def test_empty_arrays_need_nothing(device: StandIn) -> None:
    device.reset()
    assert ag.workspace_size("softmax", X[:0], backend="npu") == 0
    assert device.calls() == 0


@pytest.mark.parametrize("operator", [*OPERATORS, *LINEAR])
def test_failures(operator, device: StandIn) -> None:
    """A failure raises a clear error and leaks nothing, and the next `workspace_size` works."""
    args, kwargs = problem_for(operator)
    size = ag.workspace_size(operator, *args, **kwargs, backend="npu")
    before = device.live()
    device.reset()
    ag.workspace_size(operator, *args, **kwargs, backend="npu")
    tensors = device.calls("aclCreateTensor")
    for nth in range(1, tensors + 1):
        device.fail("aclCreateTensor", nth)
        with pytest.raises(ag.AclError, match=f"{operator}: aclCreateTensor failed"):
            ag.workspace_size(operator, *args, **kwargs, backend="npu")
        assert device.live() == before
    names = STATISTICS, LOSS, GRADIENT
    for name in names if operator == WHOLE else (operator,):
        call = table.OPERATORS[name].device_name + "GetWorkspaceSize"
        device.fail(call, 1, 561103)
        with pytest.raises(ag.AclError, match=f"{operator}: {call} failed") as info:
            ag.workspace_size(operator, *args, **kwargs, backend="npu")
        assert info.value.code == 561103
        assert device.live() == before
    assert ag.workspace_size(operator, *args, **kwargs, backend="npu") == size
    assert device.violations() == []


def test_a_missing_kernel(device: StandIn, monkeypatch, caplog) -> None:
    """If a kernel is missing, a forced `workspace_size` raises. Otherwise `workspace_size` returns the CPU's size."""
    here = ag.workspace_size("softmax", X, backend="cpu")
    for forced in (True, False):
        with monkeypatch.context() as patch:
            patch.setitem(runtime.found, "state", runtime.state())
            device.fail("aclnnSoftmaxGetWorkspaceSize", 0, 561112)
            if forced:
                with pytest.raises(ag.AclError) as info:
                    ag.workspace_size("softmax", X, backend="npu")
                assert info.value.code == 561112
                with pytest.raises(ag.BackendUnavailableError, match="no usable kernel"):
                    ag.workspace_size("softmax", X, backend="npu")
            else:
                assert ag.workspace_size("softmax", X) == here
                assert ag.explain("softmax", X).backend == "cpu"
            device.reset()


def test_without_a_device(run_script) -> None:
    script = """
        import numpy as np
        import ascend_grad as ag
        try:
            ag.workspace_size("softmax", np.zeros(3, np.float32), backend="npu")
        except ag.BackendUnavailableError as error:
            print(error)
    """
    nowhere = dict.fromkeys(("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "LD_LIBRARY_PATH"), "/nonexistent")
    assert "cannot compute this call: no Ascend NPU found" in run_script(script, **nowhere).stdout
