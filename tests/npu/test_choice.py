"""Test which calls go to the device, by the automatic choice and by a forced backend."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest
from linear_samples import GRADIENT, LOSS, STATISTICS, WHOLE, gradient_problem, problem_of
from npu_samples import ALL, BFLOAT16, X, problem_for, results_of
from samples import MASKED, OPERATORS, assert_identical, random_problem
from stand_in import build

import ascend_grad as ag
from ascend_grad import npu
from ascend_grad.backends.ascend import limits, runtime
from ascend_grad.inspection import bound_call
from ascend_grad.operators import table


def test_automatic_choice(device):
    assert ag.backends()["npu"][:2] == (True, "2 devices, Ascend910B2")
    assert ag.explain("softmax", X) == ("npu", "automatic choice")
    assert ag.explain("softmax", X, backend="npu") == ("npu", "requested by the backend argument")
    assert ag.explain("softmax", X, backend="cpu").backend == "cpu"
    wide = X.astype(np.float64)
    reason = "input: the device supports dtype float32 or float16 or bfloat16, got float64"
    assert ag.explain("softmax", wide) == ("cpu", f"automatic choice; not npu: {reason}")
    with ag.use_backend("npu"):
        assert ag.explain("softmax", X) == ("npu", "requested by use_backend")
        with pytest.raises(ag.ParamTypeError, match=reason) as info:
            ag.softmax(wide)
    assert info.value.code == 161002
    assert device.calls("aclnnSoftmax") == 0
    ag.softmax(X)
    assert device.calls("aclnnSoftmax") == 1
    ag.softmax(wide)
    ag.softmax(X, backend="cpu")
    assert device.calls("aclnnSoftmax") == 1


def test_what_the_device_takes_goes_there_without_being_asked(any_operator, device):
    args, kwargs = problem_for(any_operator)
    assert ag.explain(any_operator, *args, **kwargs).backend == "npu"
    automatic = getattr(ag, any_operator)(*args, **kwargs)
    assert device.counter("launches") == (3 if any_operator == WHOLE else 1)
    for result, forced in zip(
        results_of(automatic), results_of(getattr(ag, any_operator)(*args, **kwargs)), strict=True
    ):
        assert_identical(result, forced)


@pytest.mark.parametrize(
    ("soc", "documented", "undocumented"),
    [
        ("Ascend910B2", {*ALL}, set()),
        ("Ascend910_9391", {*ALL}, set()),
        ("Ascend310P3", {*OPERATORS} - {*MASKED}, {"scaled_masked_softmax_backward"}),
        ("Ascend950PR", {*OPERATORS, WHOLE} - {*MASKED}, {*MASKED, LOSS}),
        ("Ascend910A", {*OPERATORS} - {*MASKED}, set()),
        ("Ascend910B", {*OPERATORS} - {*MASKED}, set()),
        ("Ascend310B4", {"softmax"}, set()),
    ],
)
def test_systems(soc, documented, undocumented, run_script, tmp_path):
    """Check, for float16, which operators run on each system automatically, and which operators only if forced."""
    problems = tmp_path / "problems"
    problems.write_bytes(pickle.dumps({operator: in_float16(operator) for operator in ALL}))
    script = f"""
        import pickle
        import ascend_grad as ag
        with open({str(problems)!r}, "rb") as file:
            problems = pickle.load(file)
        for name, (args, kwargs) in problems.items():
            said = [name, ag.explain(name, *args, **kwargs).backend]
            try:
                getattr(ag, name)(*args, **kwargs, backend="npu")
            except ag.AscendGradError as error:
                said += [type(error).__name__, str(error.code)]
            print(*said)
    """
    result = run_script(script, ASCEND_HOME_PATH=str(build("split")), CANN_STAND_IN_SOC=soc)
    said = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    expected = dict.fromkeys(ALL, "cpu UnsupportedDeviceError 361001")
    assert said == expected | dict.fromkeys(documented, "npu") | dict.fromkeys(undocumented, "cpu")


def in_float16(operator: str) -> tuple[tuple, dict]:
    """Return the arguments of a problem in float16, a dtype that every system has."""
    args, kwargs = problem_for(operator)

    def halved(value):
        return value.astype(np.float16) if isinstance(value, np.ndarray) and value.dtype == BFLOAT16 else value

    return tuple(map(halved, args)), {name: halved(value) for name, value in kwargs.items()}


def test_bfloat16_where_the_system_has_none(run_script):
    script = """
        import ascend_grad as ag, numpy as np, ml_dtypes
        x = np.zeros((2, 3), ml_dtypes.bfloat16)
        print(ag.explain("softmax", x))
        print(ag.explain("softmax", x.astype(np.float16)).backend)
    """
    result = run_script(script, ASCEND_HOME_PATH=str(build("split")), CANN_STAND_IN_SOC="Ascend310P3")
    assert "'cpu'" in result.stdout
    assert "the device supports dtype float32 or float16, got bfloat16" in result.stdout
    assert result.stdout.endswith("npu\n")


def test_codes_from_inside_the_device_are_passed_on(device):
    """A forced call beyond the device's limits goes to the device, and raises the device's status code."""
    problem = gradient_problem((1, 24568, 1), "float16", "stored")
    explanation = ag.explain(GRADIENT, **problem.arguments)
    reason = "the device supports V, with softmax given, up to 24560, got 24568"
    assert explanation == ("cpu", f"automatic choice; not npu: {reason} (backend='npu' tries it)")
    with pytest.raises(ag.AclError) as info:
        ag.fused_linear_cross_entropy_loss_grad(**problem.arguments, backend="npu")
    error = info.value
    assert (error.code, error.code_name) == (561103, "ACLNN_ERR_INNER_NULLPTR")
    assert error.call == "aclnnFusedLinearCrossEntropyLossGradGetWorkspaceSize"
    assert "too large with softmax" in error.runtime_message
    assert str(error).startswith(f"{GRADIENT}: {error.call} failed: {error.runtime_message}")
    twin = pickle.loads(pickle.dumps(error))
    assert (str(twin), twin.code, twin.call, twin.runtime_message) == (
        str(error),
        error.code,
        error.call,
        error.runtime_message,
    )


def test_bad_calls_do_not_reach_the_device(device):
    with pytest.raises(ag.ParamInvalidError, match="axis"):
        ag.softmax(X, 2, backend="npu")
    assert device.calls() == 0


def test_dtypes_that_no_device_takes_stay_on_the_host(any_operator, device):
    halves_alone = any_operator in (GRADIENT, STATISTICS)
    for dtype in ("float64", "float32") if halves_alone else ("float64",):
        if any_operator in OPERATORS:
            problem = random_problem(any_operator, (2, 3, 5, 16), np.dtype(dtype))
            args, kwargs = problem.arrays, dict(problem.settings)
        else:
            args, kwargs = (), dict(problem_of(any_operator, (9, 130, 16), dtype).arguments)
            kwargs.pop("out", None)
        call, *_ = bound_call(any_operator, args, kwargs)
        for soc in limits.FAMILIES:
            assert limits.unsupported_reason(call, runtime.State((True, ""), 1, soc)) is not None
        device.reset()
        getattr(ag, any_operator)(*args, **kwargs)
        assert device.calls() == 0


def test_calls_that_the_device_does_not_take_stay_there(device):
    x, w = (npu.asarray(np.zeros(shape, np.float32)) for shape in ((3, 4), (5, 4)))
    t = npu.asarray(np.zeros(3, np.int64))
    for backend in (None, "auto", "npu"):
        with pytest.raises(ag.ParamTypeError, match="input: the device supports dtype float16 or bfloat16, got"):
            ag.fused_linear_online_max_sum(x, w, t, 0, 5, backend=backend)
    with pytest.raises(ag.ParamInvalidError, match="axis"):
        ag.softmax(x, 2)


def test_the_environments_backend(run_script):
    script = """
        import ascend_grad as ag, numpy as np
        print(ag.explain("softmax", np.zeros(3, np.float32)), ag.softmax(np.zeros(2, np.float32)))
        for call in ag.softmax, ag.explain:
            try:
                call(*["softmax"] * (call is ag.explain), np.zeros(3))
            except ag.ParamTypeError as error:
                print(error.code)
    """
    result = run_script(script, ASCEND_HOME_PATH=str(build("split")), ASCEND_GRAD_BACKEND="npu")
    said = "Explanation(backend='npu', reason='requested by ASCEND_GRAD_BACKEND', transferred_bytes=24) [0.5 0.5]"
    assert result.stdout.splitlines() == [said, "161002", "161002"]


def test_the_loss_alone_needs_no_gradient(device, monkeypatch):
    x, w, t = np.ones((2, 3), np.float16), np.ones((5, 3), np.float16), np.zeros(2, int)
    absent = dict.fromkeys(("aclnnFusedLinearCrossEntropyLossGrad", "aclnnMm"), "its symbol")
    monkeypatch.setitem(runtime.found, "state", runtime.state()._replace(absent=absent))
    assert ag.explain("linear_cross_entropy", x, w, t).backend == "cpu"
    assert ag.explain("linear_cross_entropy", x, w, t, return_grad=False).backend == "npu"
    device.reset()
    assert ag.linear_cross_entropy(x, w, t, return_grad=False)[0] == pytest.approx(np.log(5), rel=1e-3)
    assert device.calls("aclnnFusedLinearOnlineMaxSum") == 1


def test_decisions_are_logged(device, caplog):
    with caplog.at_level("DEBUG", logger="ascend_grad"):
        ag.softmax(X)
        ag.softmax(X.tolist())  # a list counts as an array of float64
        ag.softmax(X.astype(np.float64))
    first, *others = (record.getMessage() for record in caplog.records)
    assert first == "softmax of float32(3, 4): npu, automatic choice"
    assert len(others) == 2
    for message in others:
        assert message.startswith(
            "softmax of float64(3, 4): cpu, automatic choice; not npu: input: the device supports dtype "
        )


def test_check_command(device, capsys, tmp_path):
    from ascend_grad.cli.main import main

    assert main(["check", "--backend", "npu", "--json", str(tmp_path / "check.json")]) == 0
    text = capsys.readouterr().out
    assert text.startswith("backend npu: 2 devices, Ascend910B2\n")
    for operator in ALL:
        assert any(line.split() == [operator, "pass"] for line in text.splitlines())
    assert text.count("float64         0 unsupported\n    unsupported: ") == len(table.OPERATORS)
    assert os.path.getsize(tmp_path / "check.json") > 1000


def test_overflow_is_no_warning(device):
    h, w, target = np.zeros((4, 5), np.float16), np.zeros((6, 5), np.float16), np.zeros(4, np.int64)
    for reduction in ("sum", "mean"):
        ag.linear_cross_entropy(h, w, target, reduction=reduction, grad_loss=1e300, backend="npu")


def test_bytes_that_cross_the_bus(device):
    """`explain` tells the bytes of arguments and results of calls on arrays of the host."""
    x = np.zeros((8, 6), np.float16)
    device.reset()
    assert ag.explain("softmax", x).transferred_bytes == 2 * x.nbytes
    ag.softmax(x)
    assert device.counter("bytes_h2d") + device.counter("bytes_d2h") == 2 * x.nbytes
    assert ag.explain("softmax", x, backend="cpu").transferred_bytes is None
    assert ag.explain("softmax", ag.npu.asarray(x)).transferred_bytes is None
    target = np.zeros(8, np.int64)
    assert ag.explain("cross_entropy", x, target).transferred_bytes == 2 * x.nbytes + target.nbytes + 4


def test_bytes_of_probabilities_in_float64(device):
    """Probabilities in float64 are rounded before they are sent. Some numbers for each row are not counted."""
    x, q = np.zeros((64, 500), np.float32), np.full((64, 500), 1 / 500)
    told = ag.explain("cross_entropy", x, q).transferred_bytes
    assert told == 3 * x.nbytes + 4
    device.reset()
    ag.cross_entropy(x, q)
    assert 0 <= device.counter("bytes_h2d") + device.counter("bytes_d2h") - told <= 32 * len(x)
