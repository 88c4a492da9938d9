"""Test toolkits that have an operator but no usable kernel of the operator, which the first stage reports."""

from __future__ import annotations

import logging
import pickle
import threading

import numpy as np
import pytest
from device_limits import DENSE, IDS, KERNELS, PRODUCT
from linear_samples import GRADIENT, LOSS, STATISTICS, TOP_K, WHOLE
from python_threads import in_threads
from stand_in import StandIn, build

import ascend_grad as ag
from ascend_grad import npu
from ascend_grad.backends.ascend import runtime

CODES = (561003, 561107, 561112)
X = np.arange(6, dtype=np.float32).reshape(2, 3)
RIGHT = ag.softmax(X, backend="cpu")
FIRST_STAGE = "aclnnSoftmaxGetWorkspaceSize"


@pytest.fixture(autouse=True)
def known_state(device, monkeypatch) -> None:
    """Restore the state of the runtime after a test, so that no later test knows of missing kernels."""
    monkeypatch.setitem(runtime.found, "state", runtime.state())


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("code", CODES)
def test_the_cpu_computes_this_call_and_all_that_follow(code, device: StandIn, caplog) -> None:
    device.fail(FIRST_STAGE, 0, code)
    assert ag.explain("softmax", X).backend == "npu"
    for _ in range(3):
        np.testing.assert_array_equal(ag.softmax(X), RIGHT)
    assert device.calls(FIRST_STAGE) == 1
    assert device.calls("aclnnSoftmax") == 0
    (warning,) = warnings(caplog)
    assert "no usable kernel of aclnnSoftmax" in warning
    assert str(code) in warning
    choice = ag.explain("softmax", X)
    assert choice.backend == "cpu"
    assert "no usable kernel of aclnnSoftmax" in choice.reason
    assert str(code) in choice.reason
    status = ag.backends()["npu"]
    assert status.usable
    assert status.reason == "2 devices, Ascend910B2; this toolkit lacks aclnnSoftmax"
    # The other operators still run on the device.
    assert ag.explain("log_softmax", X).backend == "npu"
    ag.log_softmax(X)
    assert device.calls("aclnnLogSoftmax") == 1


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("how", ["argument", "use_backend", "an array on the device"])
def test_forced_calls_raise(code, how, device: StandIn, caplog) -> None:
    x = npu.asarray(X) if how == "an array on the device" else X
    device.fail(FIRST_STAGE, 0, code)

    def call():
        if how == "use_backend":
            with ag.use_backend("npu"):
                return ag.softmax(x)
        return ag.softmax(x, backend="npu" if how == "argument" else None)

    def error() -> ag.AscendGradError | None:
        try:
            call()
        except ag.AscendGradError as error:
            return error.with_traceback(None)  # the traceback holds the array on the device
        return None

    first = error()
    assert isinstance(first, ag.AclError)
    assert str(first).startswith(f"softmax: {FIRST_STAGE} failed: {FIRST_STAGE}: a fault was injected here")
    assert (first.code, first.call) == (code, FIRST_STAGE)
    twin = pickle.loads(pickle.dumps(first))
    assert (type(twin), str(twin), twin.code, twin.call) == (type(first), str(first), code, FIRST_STAGE)
    for _ in range(2):
        later = error()
        assert isinstance(later, ag.BackendUnavailableError)
        assert f"no usable kernel of aclnnSoftmax ({code} " in str(later)
    assert device.calls(FIRST_STAGE) == 1
    assert len(warnings(caplog)) == 1
    np.testing.assert_array_equal(ag.softmax(X, backend="auto"), RIGHT)


def test_other_failures_are_no_missing_kernels(device: StandIn, caplog) -> None:
    """Other codes of the first stage, and the same codes from other functions, raise.

    The operator still runs on the device afterwards.
    """
    for function, code in (
        (FIRST_STAGE, 561103),
        (FIRST_STAGE, 361001),
        ("aclnnSoftmax", 561003),
        ("aclrtMalloc", 561112),
    ):
        npu.release()
        device.fail(function, 1, code)
        with pytest.raises(ag.AscendGradError) as info:
            ag.softmax(X)
        assert info.value.code == code
        assert ag.explain("softmax", X).backend == "npu"
    assert warnings(caplog) == []
    np.testing.assert_allclose(ag.softmax(X), RIGHT, rtol=1e-6)


@pytest.mark.parametrize("missing", [STATISTICS, LOSS, GRADIENT])
def test_the_chain_needs_all_of_its_operators(missing, device: StandIn, caplog) -> None:
    """If one operator of the chain is missing, the device computes the call by blocks."""
    device_name = "aclnn" + KERNELS[missing][0][0]
    random = np.random.default_rng(0)
    x, w = (random.standard_normal(shape).astype(np.float16) for shape in ((5, 4), (130, 4)))
    target = np.array([0, 5, -100, 129, 7])
    right = ag.linear_cross_entropy(x, w, target, backend="cpu")
    npu.release()
    before = device.live()
    device.fail(device_name + "GetWorkspaceSize", 0, 561112)
    for _ in range(2):
        for result, expected in zip(ag.linear_cross_entropy(x, w, target), right, strict=True):
            np.testing.assert_allclose(result, expected, rtol=2**-9, atol=2**-14)
    assert ag.explain(WHOLE, x, w, target).backend == "npu"
    assert device.calls(device_name + "GetWorkspaceSize") == 1
    assert device.calls("aclnnCrossEntropyLossGrad") == 2
    assert len(warnings(caplog)) == 1
    npu.release()
    for name, count in device.live().items():  # arrays of earlier tests may have been freed
        assert count <= before.get(name, 0), name
    device.reset()
    ag.linear_cross_entropy(x, w, target, return_grad=False, backend="npu")
    assert device.calls("aclnnCrossEntropyLoss") == (missing != GRADIENT)


LOGITS, PROBABILITIES = X * 0.5, np.full((2, 3), 1 / 3, np.float32)
CALLS = {
    IDS: ("cross_entropy", (LOGITS, np.array([2, 0]))),
    DENSE: ("cross_entropy", (LOGITS, PROBABILITIES)),
    PRODUCT: ("cross_entropy_hvp", (LOGITS, np.array([2, 0]), X)),
    TOP_K: ("linear_top_k", (LOGITS, X, 1)),
}


@pytest.mark.parametrize(("of", "kernel"), [(of, kernel) for of in CALLS for kernel in KERNELS[of][0]])
def test_only_calls_that_need_the_kernel_leave_the_device(of, kernel, device: StandIn, caplog) -> None:
    """The warning names the device's operator. Other calls of the same function stay on the device."""
    name, arguments = CALLS[of]
    right = getattr(ag, name)(*arguments, backend="cpu")
    device.fail(f"aclnn{kernel}GetWorkspaceSize", 0, 561112)
    for _ in range(2):
        for result, expected in zip(getattr(ag, name)(*arguments), right, strict=True):
            np.testing.assert_array_equal(result, expected)
    assert device.calls(f"aclnn{kernel}GetWorkspaceSize") == 1
    (warning,) = warnings(caplog)
    assert warning.startswith(f"this toolkit has no usable kernel of aclnn{kernel} (561112 ")
    assert warning.endswith(f": calls that need it, such as this call of {name}, do not run on the Ascend NPU")
    for other, (function, others) in CALLS.items():
        choice = ag.explain(function, *others)
        assert choice.backend == ("cpu" if kernel in KERNELS[other][0] else "npu"), other
    without_gradient = ag.explain("cross_entropy", *CALLS[IDS][1], return_grad=False)
    assert without_gradient.backend == ("cpu" if kernel == "CrossEntropyLoss" else "npu")
    assert ag.backends()["npu"].reason.endswith(f"; this toolkit lacks aclnn{kernel}")


@pytest.mark.parametrize(
    ("option", "kernel"),
    [
        ({"label_smoothing": 0.1}, "aclnnExp"),
        ({"grad_lse": np.ones(2)}, "aclnnExp"),
        ({"lse_square_scale": 0.1}, "aclnnLogSumExp"),
        ({"outputs": ("lse",)}, "aclnnLogSumExp"),
    ],
)
def test_only_options_that_need_the_kernel_leave_the_device(option, kernel, device: StandIn) -> None:
    _, arguments = CALLS[IDS]
    device.fail(kernel + "GetWorkspaceSize", 0, 561112)
    ag.cross_entropy(*arguments, **option)
    assert kernel in ag.explain("cross_entropy", *arguments, **option).reason
    assert ag.explain("cross_entropy", *arguments).backend == "npu"


def test_many_threads_find_it_out_at_once(device: StandIn, caplog) -> None:
    device.fail(FIRST_STAGE, 0, 561112)
    together, results = threading.Barrier(4), []

    def work() -> None:
        together.wait()
        results.append(ag.softmax(X))

    in_threads(*[work] * 4)
    assert len(results) == 4
    for result in results:
        np.testing.assert_array_equal(result, RIGHT)
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize(
    ("variant", "code"), [("no_kernel_path", 561107), ("no_kernel_package", 561112), ("no_kernels", 561003)]
)
def test_a_toolkit_without_kernels(variant, code, run_script) -> None:
    """Without kernels the CPU computes every operator, with one warning for each operator. Forced calls raise."""
    script = """
        import numpy as np
        import ascend_grad as ag
        x = np.zeros(4, np.float32)
        for _ in range(3):
            print(ag.softmax(x).tolist(), ag.log_softmax(x)[0] < 0)
        print(ag.backends()["npu"].reason)
        for function in ag.softmax, ag.softmax_backward:
            try:
                function(*[x] * (1 + (function is ag.softmax_backward)), backend="npu")
            except ag.AscendGradError as error:
                print(type(error).__name__, error.code)
    """
    result = run_script(script, ASCEND_HOME_PATH=str(build(variant)))
    assert result.stdout.splitlines() == [
        *["[0.25, 0.25, 0.25, 0.25] True"] * 3,
        "2 devices, Ascend910B2; this toolkit lacks aclnnSoftmax, aclnnLogSoftmax",
        "BackendUnavailableError None",
        f"MissingKernelError {code}",
    ]
    assert result.stderr.count("no usable kernel of") == result.stderr.count("\n") == 3
