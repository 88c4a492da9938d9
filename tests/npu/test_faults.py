"""Let every call of the device's runtime fail once, in every operator.

The operator then raises a clear exception or returns the right result, leaks nothing and changes no input, and the next
call works.
"""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from linear_samples import GRADIENT, LINEAR, problem_of
from npu_samples import attempts_with_a_fault
from python_threads import in_threads
from samples import MASKED, OPERATORS, random_problem
from stand_in import StandIn, build

import ascend_grad as ag
from ascend_grad import npu

#: Functions that a call needs, and that may fail every time.
NEEDED = (
    *("aclrtGetCurrentContext", "aclrtSetCurrentContext", "aclrtSetDevice", "aclrtCreateStream"),
    *("aclrtSynchronizeStream", "aclrtMalloc", "aclrtMallocHost", "aclrtMemcpyAsync", "aclrtMemset"),
    *("aclCreateTensor", "aclGetRecentErrMsg"),
)
#: Functions that release an object or memory.
RELEASING = ("aclrtFree", "aclrtFreeHost", "aclrtDestroyStream", "aclDestroyTensor", "aclDestroyAclOpExecutor")

FAILED, OUT_OF_MEMORY = 507899, 207001


class Case:
    """Represent one call with its expected result. The call's arrays lie on the host or on the device."""

    def __init__(self, operator: str, where: str, how: str = ""):
        self.function: Callable = getattr(ag, operator)
        self.positional: tuple = ()
        if operator in OPERATORS:
            problem = random_problem(operator, (1, 2, 3, 5) if operator in MASKED else (3, 7), "float16")
            self.positional, self.named = problem.arrays, dict(problem.settings)
        else:
            settings = {"mode": how} if operator == GRADIENT else {}
            self.named = dict(problem_of(operator, (9, 130, 4), "float16", **settings).arguments)
        self.where = where
        self.arguments = self._there()
        self.before = self._bytes()
        self.right = self()

    def _there(self):
        if self.where == "host":
            return self.positional, self.named
        positional = [npu.asarray(a) for a in self.positional]
        return positional, {k: npu.asarray(a) if isinstance(a, np.ndarray) else a for k, a in self.named.items()}

    def _bytes(self) -> list[bytes]:
        positional, named = self.arguments
        arrays = [*positional, *(a for a in named.values() if hasattr(a, "nbytes") and hasattr(a, "ndim"))]
        return [(a.numpy() if isinstance(a, npu.DeviceArray) else a).tobytes() for a in arrays]

    def __call__(self) -> list[np.ndarray]:
        positional, named = self.arguments
        results = self.function(*positional, **named, backend="npu")
        results = results if isinstance(results, tuple) else (results,)
        return [a.numpy() if isinstance(a, npu.DeviceArray) else a for a in results if a is not None]

    def assert_right(self, results: list[np.ndarray]) -> None:
        assert len(results) == len(self.right)
        for result, right in zip(results, self.right):
            np.testing.assert_array_equal(result, right)

    def assert_works(self) -> None:
        self.assert_right(self())
        assert self._bytes() == self.before, "an input was changed"

    def attempt(self) -> ag.AscendGradError | None:
        """Make the call. Return its exception, or check its result and return None."""
        try:
            results = self()
        except ag.AscendGradError as error:
            return error.with_traceback(None)  # the traceback holds arrays on the device
        self.assert_right(results)
        return None


CASES = [(name, "") for name in (*OPERATORS, *LINEAR) if name != GRADIENT]
CASES += [(GRADIENT, "stored"), (GRADIENT, "recomputed")]


@pytest.fixture(params=["host", "device"])
def where(request) -> str:
    return request.param


@pytest.fixture(params=CASES, ids=lambda case: "-".join(filter(None, case)))
def case(request, where, device) -> Iterator[Case]:
    device.set_delay(20)
    case = Case(request.param[0], where, request.param[1])
    yield case
    case.arguments = (), {}  # the empty call holds no arrays on the device


@pytest.fixture(autouse=True)
def nothing_is_left(device) -> Iterator[None]:
    """Check that no object of the device is left after `release`."""
    npu.release()
    before = device.live()
    yield
    device.reset()
    device.set_delay(200)
    npu.release()
    assert device.live() == before


def assert_clear(error: ag.AscendGradError, code: int) -> None:
    """Check that the exception names the failed call and its code, unless the function returns no code."""
    assert isinstance(error, ag.AclError)
    assert error.code == code or (error.code is None and error.call == "aclCreateTensor")
    assert error.call in str(error)
    assert "a fault was injected here" in error.runtime_message


failed_clearly = partial(assert_clear, code=FAILED)


@pytest.mark.parametrize("code", [FAILED, OUT_OF_MEMORY])
@pytest.mark.parametrize("start", ["cold", "warm"])
def test_every_call_fails_once(device: StandIn, case: Case, start: str, code: int) -> None:
    npu.release()
    for _ in range(1 + (start == "warm")):
        device.reset()
        case.assert_works()
    struck, nth = 0, 0
    while True:
        nth += 1
        if start == "cold":
            npu.release()
        device.reset()
        device.fail("*", nth, code)
        error = case.attempt()
        if device.faults_left():  # the call ended before the fault
            assert error is None
            break
        if error is not None:
            assert_clear(error, code)
            struck += 1
        device.reset()
        case.assert_works()
        assert device.violations() == []
    assert struck >= (3 if start == "cold" else 2), "hardly anything failed"


def test_device_is_lost_in_the_middle(device: StandIn, case: Case) -> None:
    """If the device is lost in the middle of a call, the call raises or returns the right result.

    All calls of the runtime then fail until the device is reset. Calls after the reset work.
    """
    npu.release()
    nth, error = 0, None
    while nth == 0 or error is not None:
        nth += 1
        device.reset()
        device.fail("*", -nth, FAILED)
        error = case.attempt()
        lost = error is not None or device.calls() >= nth
        if error is not None:
            assert_clear(error, FAILED)
        assert device.violations() == []
        device.reset()
        case.assert_works()
    assert nth > 5
    assert not lost


@pytest.mark.parametrize("function", NEEDED)
def test_function_that_always_fails(device: StandIn, case: Case, function: str) -> None:
    npu.release()
    device.reset()
    device.fail(function, 0, FAILED)
    error = case.attempt()
    needed = function not in ("aclrtSetCurrentContext", "aclGetRecentErrMsg")
    if error is None:
        assert not needed or not device.calls(function)
    else:
        assert needed
        assert_clear(error, FAILED)
    assert device.violations() == []
    device.reset()
    case.assert_works()


def struck_one_after_another(device: StandIn, attempt: Callable[[], None]) -> int:
    """Let every call of the runtime fail, each in a separate attempt, and count the attempts that raise."""
    struck = 0
    for has_raised in attempts_with_a_fault(device, "*", FAILED, attempt, failed_clearly, npu.release):
        struck += has_raised
        assert device.violations() == []
    return struck


def test_copies_to_the_device_and_back(device: StandIn) -> None:
    x = np.arange(600_000, dtype=np.float32).reshape(2, 300_000)[:, ::-1]  # copied in several chunks
    assert struck_one_after_another(device, lambda: np.testing.assert_array_equal(npu.asarray(x).numpy(), x)) > 5


def _whole(places: Callable, problem: dict[str, np.ndarray]):
    """Compute the losses of single rows, some of which are ignored."""
    x, w, target = (places(problem[name]) for name in ("input", "weight", "target"))
    return ag.linear_cross_entropy(x, w, target, reduction="none", ignore_index=3, backend="npu")


def _gradient(places: Callable, problem: dict[str, np.ndarray]):
    """Compute gradients with a mask of bools, and with invalid targets where the mask is set."""
    there = [places(problem[name]) for name in ("grad", "input", "weight", "mask", "masked")]
    named = {name: places(problem[name]) for name in ("logits_max", "sum_exp_logits")}
    return ag.fused_linear_cross_entropy_loss_grad(*there, **named, backend="npu")


@pytest.mark.parametrize("function", [_whole, _gradient])
@pytest.mark.parametrize("places", [lambda array: array, npu.asarray], ids=["host", "device"])
def test_arrays_that_were_never_seen_before(function: Callable, places: Callable, device: StandIn) -> None:
    """Each attempt copies new arrays to the device, checks their values and repairs their targets."""
    device.set_delay(0)
    random = np.random.default_rng(0)
    target = np.array([0, 3, 129, 3, 5, 6, 7, 8, 3])
    problem = {
        "input": random.standard_normal((9, 4)).astype(np.float16),
        "weight": random.standard_normal((130, 4)).astype(np.float16),
        "target": target,
        "grad": np.array([1, 2, 3, 4, 0, 6, 7, 8, 9], np.float32),
        "mask": target == 3,
        "masked": np.where(target == 3, 10**6, target),
        "logits_max": np.full(9, 3, np.float32),
        "sum_exp_logits": np.full(9, 40, np.float32),
    }

    def results() -> list[np.ndarray]:
        return [a.numpy() if isinstance(a, npu.DeviceArray) else a for a in function(places, problem)]

    right = results()

    def attempt() -> None:
        for result, expected in zip(results(), right, strict=True):
            np.testing.assert_array_equal(result, expected)

    assert struck_one_after_another(device, attempt) > 20


def test_a_context_that_cannot_be_read_is_not_replaced(device: StandIn) -> None:
    """A call that could not restore the thread's context does not begin, so the thread stays bound to its device."""
    runtime = ctypes.CDLL("libascendcl.so")
    npu.set_device(1)
    x = npu.asarray(np.ones((2, 3), np.float32))
    npu.set_device(0)
    assert runtime.aclrtSetDevice(0) == 0

    def bound() -> int | None:
        context = ctypes.c_void_p()
        runtime.aclrtGetCurrentContext(ctypes.byref(context))
        return context.value

    before, failed = bound(), 0
    for call in (lambda: ag.softmax(x), x.numpy, lambda: ag.workspace_size("softmax", x)):
        for has_raised in attempts_with_a_fault(device, "aclrtGetCurrentContext", FAILED, call, failed_clearly):
            failed += has_raised
            device.reset()
            assert bound() == before
    assert failed
    np.testing.assert_array_equal(ag.softmax(x).numpy(), np.full((2, 3), 1 / 3, np.float32))
    for nth in range(1, 4):  # memory is released even if the thread's device cannot be restored
        ag.softmax(x)
        device.fail("aclrtGetCurrentContext", nth, FAILED)
        npu.release()
        device.reset()
        assert device.counter("streams") == 0


def test_operators_own_codes_are_passed_on(device: StandIn) -> None:
    x = np.ones((2, 3), np.float32)
    for function in ("aclnnSoftmaxGetWorkspaceSize", "aclnnSoftmax"):
        for code, kind in (
            (161001, ag.ParamNullptrError),
            (161002, ag.ParamInvalidError),
            (361001, ag.UnsupportedDeviceError),
            (561103, ag.AclError),
            (999999, ag.AclError),
        ):
            device.fail(function, 1, code)
            with pytest.raises(kind, match=f"softmax.*{function} failed.*{code}") as info:
                ag.softmax(x, backend="npu")
            assert info.value.code == code
            assert info.value.operator == "softmax"
            assert info.value.call == function
            assert "a fault was injected here" in info.value.runtime_message
            again = pickle.loads(pickle.dumps(info.value))
            assert (str(again), again.call, again.code_name) == (str(info.value), function, info.value.code_name)


@pytest.mark.parametrize(
    ("code", "name"),
    [(507034, "ACL_ERROR_RT_VECTOR_CORE_TIMEOUT"), (507035, "ACL_ERROR_RT_VECTOR_CORE_EXCEPTION")],
)
def test_failures_of_the_vector_cores_have_names(code: int, name: str, device: StandIn) -> None:
    device.fail("aclrtSynchronizeStream", 1, code)
    with pytest.raises(ag.AclError, match=f"{code} {name}") as info:
        ag.softmax(np.ones(3, np.float32), backend="npu")
    assert info.value.code_name == name


def test_failed_call_never_goes_to_the_cpu_quietly(device: StandIn) -> None:
    device.fail("aclnnSoftmax", 1, FAILED)
    with pytest.raises(ag.AclError):
        ag.softmax(np.ones(3, np.float32))


def test_full_device(device: StandIn) -> None:
    x = np.ones((64, 1024), np.float32)
    right = ag.softmax(x, backend="npu")
    npu.release()
    device.set_memory(4096)
    try:
        with pytest.raises(ag.AclError, match=r"softmax.*bytes do not fit on device 0") as info:
            ag.softmax(x, backend="npu")
        assert info.value.code == OUT_OF_MEMORY
        np.testing.assert_array_equal(ag.softmax(x[0, :4], backend="npu"), np.full(4, 0.25, np.float32))
    finally:
        device.set_memory(4 << 30)
    np.testing.assert_array_equal(ag.softmax(x, backend="npu"), right)


def test_full_device_makes_room_by_emptying_the_pools(device: StandIn) -> None:
    x = np.ones((64, 1024), np.float32)
    right = ag.softmax(x, backend="npu")
    kept = device.counter("device_bytes")
    assert kept > 0
    device.set_memory(kept)  # no block of another size fits next to the kept memory
    try:
        larger = np.concatenate([x[:, :128]] * 9, 1)
        assert ag.softmax(larger[:32], backend="npu").shape == (32, 1152)
    finally:
        device.set_memory(4 << 30)
    np.testing.assert_array_equal(ag.softmax(x, backend="npu"), right)


@pytest.mark.parametrize("code", [207001, 207018])
def test_a_full_device_is_asked_again(code: int, device: StandIn) -> None:
    x = np.ones((64, 1024), np.float32)
    right = ag.softmax(x, backend="npu")
    npu.release()
    device.fail("aclrtMalloc", 1, code)
    np.testing.assert_array_equal(ag.softmax(x, backend="npu"), right)
    assert device.faults_left() == 0


def test_threads_with_faults_in_between(device: StandIn) -> None:
    """Faults hit any of four threads on two devices. Every call returns the right result or raises."""
    device.set_delay(0)
    problems = [random_problem(name, (1, 2, 3, 5) if name in MASKED else (3, 7), "float32") for name in OPERATORS]
    right = [getattr(ag, p.operator)(*p.arrays, **p.settings, backend="npu") for p in problems]
    npu.release()
    wrong: list[object] = []
    failed: list[ag.AscendGradError] = []

    def work(number: int) -> None:
        npu.set_device(number % 2)
        for _ in range(10):
            for problem, expected in zip(problems, right):
                try:
                    result = getattr(ag, problem.operator)(*problem.arrays, **problem.settings, backend="npu")
                except ag.AscendGradError as error:
                    failed.append(error)
                    continue
                except BaseException as error:
                    wrong.append(error)
                    continue
                if not np.array_equal(result, expected):
                    wrong.append((problem.operator, result, expected))
        npu.release()

    for nth in range(7, 3000, 61):
        device.fail("*", nth, FAILED)
    in_threads(*(partial(work, number) for number in range(4)))
    assert wrong == []
    assert failed
    assert device.violations() == []


# ---- tests that run in a separate process ----------------------------------------------------------------------------

_CALLS = """
import logging
import numpy as np
import ascend_grad as ag
from ascend_grad import npu
logging.basicConfig(format="%(levelname)s %(message)s")
x = np.arange(6, dtype=np.float32).reshape(2, 3)
right = ag.softmax(x, backend="reference")
"""


@pytest.mark.parametrize("function", RELEASING)
def test_what_cannot_be_given_back_is_told(run_script, function: str) -> None:
    done = run_script(
        _CALLS
        + """
for _ in range(2):
    np.testing.assert_allclose(ag.softmax(x, backend="npu"), right, rtol=1e-5)
try:
    ag.log_softmax(x, backend="npu")
except ag.AclError as error:
    assert error.code == 507015, error
np.testing.assert_allclose(npu.asarray(x).numpy(), x)
npu.release()
""",
        ASCEND_HOME_PATH=str(build("split")),
        # The log-softmax fails between its two phases, which leaves an executor.
        CANN_STAND_IN_FAIL=f"{function}:0:{FAILED}" + ",aclnnLogSoftmax:1:507015",
    )
    if function != "aclDestroyAclOpExecutor":  # a failed second phase has consumed the executor
        assert f"WARNING {function} failed" in done.stderr


@pytest.mark.parametrize("function", ["aclInit", "aclrtGetDeviceCount"])
def test_device_that_cannot_be_found(run_script, function: str) -> None:
    """If the device cannot be found, the CPU computes, after one warning with the reason. Forced calls raise."""
    done = run_script(
        _CALLS
        + """
for _ in range(3):
    np.testing.assert_allclose(ag.softmax(x), right, rtol=1e-5)
print(ag.backends()["npu"])
try:
    ag.softmax(x, backend="npu")
except ag.BackendUnavailableError as error:
    print(error)
""",
        ASCEND_HOME_PATH=str(build("split")),
        CANN_STAND_IN_FAIL=f"{function}:0:{FAILED}",
    )
    assert done.stdout.count(f"{function} failed") == 2
    assert done.stderr.count("WARNING") == 1
    assert f"{function} failed" in done.stderr
    assert "a fault was injected here" in done.stderr


def test_somebody_else_has_initialised_it(run_script, tmp_path: Path) -> None:
    """At exit the library ends its own initialisation of the runtime, but not the initialisation of another library.

    No other object of the library is left.
    """
    home, report = build("split"), tmp_path / "report"
    run_script(
        f"""
import ctypes
assert ctypes.CDLL({str(home / "lib64" / "libascendcl.so")!r}).aclInit(None) == 0
"""
        + _CALLS
        + """
np.testing.assert_allclose(ag.softmax(x, backend="npu"), right, rtol=1e-5)
kept = npu.asarray(x)
""",
        ASCEND_HOME_PATH=str(home),
        CANN_STAND_IN_REPORT=str(report),
    )
    lines = dict(line.split(maxsplit=1) for line in report.read_text().splitlines())
    assert lines["initialisations"] == "1"
    assert lines["launches"] == "1"
    assert "violation" not in lines
    for name in ("tensors", "executors", "streams", "contexts", "device_allocations", "host_allocations", "in_flight"):
        assert lines[name] == "0"


def test_device_that_does_not_say_what_it_is(run_script) -> None:
    done = run_script(
        _CALLS
        + """
np.testing.assert_allclose(ag.softmax(x, backend="npu"), right, rtol=1e-5)
print(ag.explain("scaled_masked_softmax", np.ones((1, 1, 2, 2), "f4"), np.ones((1, 1, 2, 2), bool)))
""",
        ASCEND_HOME_PATH=str(build("split")),
        CANN_STAND_IN_FAIL="aclrtGetSocName:0:1",
    )
    assert "unknown model" in done.stdout
