"""Test devices, threads, forks, interrupts, and the end of the process."""

from __future__ import annotations

import sys
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from npu_samples import X, chain, chain_arguments, results_of
from python_threads import in_threads
from samples import assert_identical
from stand_in import build

import ascend_grad as ag
from ascend_grad import npu
from ascend_grad.backends.ascend import runtime, session

# ---- devices, threads, processes -------------------------------------------------------------------------------------


def test_devices(device):
    assert npu.device_count() == 2
    assert npu.get_device() == 0
    seen = []
    npu.set_device(1)
    try:
        assert npu.asarray(X).device == 1
        thread = threading.Thread(target=lambda: seen.append(npu.get_device()))
        thread.start()
        thread.join()
        assert_identical(ag.softmax(X, backend="npu"), ag.softmax(npu.asarray(X)).numpy())
    finally:
        npu.set_device(0)
    assert seen == [0]
    for wrong in (-1, 2):
        with pytest.raises(ag.ParamInvalidError, match=r"npu.set_device: device: expected an int in \[0, 1\]"):
            npu.set_device(wrong)
    for wrong in ("0", True, np.True_, 0.0, np.ma.array(0)):
        with pytest.raises(ag.ParamTypeError, match=r"npu.set_device: device: expected an int, got "):
            npu.set_device(wrong)
    npu.set_device(np.int64(0))
    with pytest.raises(ag.ParamTypeError, match=r"x: expected an array without a mask"):
        npu.asarray(np.ma.array(X))


def test_the_environments_device(run_script):
    script = """
        import ascend_grad as ag, numpy as np
        print(ag.npu.get_device(), ag.npu.asarray(np.zeros(3, np.float32)).device)
    """
    home = str(build("split"))
    assert run_script(script, ASCEND_HOME_PATH=home, ASCEND_GRAD_DEVICE="1").stdout == "1 1\n"


def test_a_device_beyond_those_that_there_are(run_script):
    """If the chosen device does not exist, forced calls raise. The automatic choice computes on the CPU and warns."""
    script = """
        import ascend_grad as ag, numpy as np
        x = np.zeros(4, np.float32)
        if ag.explain("softmax", x, backend="auto").backend == "cpu" and FORCED is None:
            print(*[ag.softmax(x).tolist() for _ in range(3)], ag.backends()["npu"].usable)
        try:
            if FORCED == "use_backend":
                ag.use_backend("npu")
            ag.softmax(x, backend="npu" if FORCED == "argument" else None)
        except ag.BackendUnavailableError as error:
            print(error)
    """
    reason = "ASCEND_GRAD_DEVICE is 2, but the devices are 0 to 1"
    settings = {"ASCEND_HOME_PATH": str(build("split")), "ASCEND_GRAD_DEVICE": "2"}
    automatic = run_script("FORCED = None" + script.replace("\n        ", "\n"), **settings)
    assert automatic.stdout == "[0.25, 0.25, 0.25, 0.25] " * 3 + "False\n"
    assert automatic.stderr == f"the Ascend NPU cannot be used: {reason}\n"
    for forced, more in (
        ("argument", {}),
        ("use_backend", {}),
        ("environment", {"ASCEND_GRAD_BACKEND": "npu"}),
    ):
        result = run_script(f"FORCED = {forced!r}" + script.replace("\n        ", "\n"), **settings, **more)
        assert reason in result.stdout, forced


def test_a_runtime_that_does_not_end_is_left_to_itself(run_script):
    """A runtime that fails at the end of the process causes no error message."""
    script = """
        import sys
        sys.path.insert(0, {tests!r})
        import numpy as np, ascend_grad as ag
        from pathlib import Path
        from stand_in import StandIn
        device = StandIn(Path({home!r}))
        ag.softmax(np.zeros(2, np.float32))
        device.fail("aclFinalizeReference")
    """
    home = str(build("split"))
    tests = str(Path(__file__).parents[1] / "support")
    result = run_script(script.format(home=home, tests=tests), ASCEND_HOME_PATH=home)
    assert result.stderr == ""


def test_four_threads(device):
    """Four threads get the right results. Two threads use the second device, and host and device arrays alternate."""
    arguments = chain_arguments()
    expected = [result.numpy() if isinstance(result, npu.DeviceArray) else result for result in chain(*arguments)]

    def work(number: int) -> None:
        npu.set_device(number % 2)
        random = np.random.default_rng(number)
        for round_ in range(12):
            x = random.standard_normal((50 + number, 300)).astype(np.float32)
            g = random.standard_normal(x.shape).astype(np.float32)
            y = ag.softmax(npu.asarray(x) if round_ % 2 else x)
            result = ag.softmax_backward(npu.asarray(g) if round_ % 2 else g, y)
            result = result.numpy() if round_ % 2 else result
            right = ag.softmax_backward(g, ag.softmax(x, backend="cpu"), backend="cpu")
            np.testing.assert_allclose(result, right, rtol=1e-4, atol=1e-7)
            results = chain(*map(npu.asarray, arguments) if round_ % 2 else arguments)
            for result, right in zip(results_of(results), expected, strict=True):
                assert_identical(result, right)

    in_threads(*(partial(work, number) for number in range(4)))


def test_the_threads_own_context_is_given_back(device):
    """A thread that another library has bound to a device is still bound to it after a call."""
    import ctypes

    runtime = ctypes.CDLL(str(build("split") / "lib64" / "libascendcl.so"))
    assert runtime.aclrtSetDevice(1) == 0
    number = ctypes.c_int32(-1)
    for _ in range(2):
        ag.softmax(X, backend="npu")
        assert runtime.aclrtGetDevice(ctypes.byref(number)) == 0
        assert number.value == 1
    assert runtime.aclrtSetDevice(0) == 0


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_fork(run_script, tmp_path):
    script = """
        import os, numpy as np, ascend_grad as ag
        from ascend_grad import npu
        x = np.zeros((3, 4), np.float32)
        array = npu.asarray(x)
        ag.softmax(x, backend="npu")
        child = os.fork()
        if not child:
            assert ag.softmax(x).sum() == 3
            assert ag.explain("softmax", x).backend == "cpu"
            assert "forked" in ag.explain("softmax", x).reason
            for call in (lambda: ag.softmax(x, backend="npu"), lambda: ag.softmax(array), array.numpy,
                         lambda: npu.asarray(x), lambda: npu.set_device(0)):
                try:
                    call()
                except ag.BackendUnavailableError as error:
                    assert "forked" in str(error), error
                else:
                    raise SystemExit("no error")
            assert npu.device_count() == 0
            npu.release()
            del array
            raise SystemExit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert ag.softmax(array).numpy().sum() == 3
    """
    report = tmp_path / "report"
    run_script(
        "import warnings; warnings.simplefilter('ignore', DeprecationWarning)\n"
        + __import__("textwrap").dedent(script),
        ASCEND_HOME_PATH=str(build("split")),
        CANN_STAND_IN_REPORT=str(report),
    )
    assert_nothing_left(report)


def test_a_fork_before_the_first_call(run_script):
    script = """
        import os, numpy as np, ascend_grad as ag
        child = os.fork()
        ag.softmax(np.zeros(3, np.float32), backend="npu")
        if child:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """
    run_script(script, ASCEND_HOME_PATH=str(build("split")))


def assert_nothing_left(report) -> None:
    lines = dict(line.split(None, 1) for line in report.read_text().splitlines())
    assert "violation" not in lines, lines["violation"]
    left = {name: lines[name] for name in ("tensors", "executors", "streams", "device_allocations", "initialisations")}
    assert set(left.values()) == {"0"}, left


def test_everything_is_given_back_at_exit(run_script, tmp_path):
    """At exit, live arrays and other threads' sessions are freed, and the library's initialisation ends."""
    script = """
        import threading, numpy as np, ascend_grad as ag
        x = np.zeros((3, 4), np.float32)
        array = ag.npu.asarray(x)
        results = [ag.softmax(array), ag.softmax(x)]
        go = threading.Event()
        threading.Thread(target=lambda: (results.append(ag.softmax(x)), go.wait(5)), daemon=True).start()
        while len(results) < 3:
            pass
    """
    report = tmp_path / "report"
    run_script(script, ASCEND_HOME_PATH=str(build("split")), CANN_STAND_IN_REPORT=str(report))
    assert_nothing_left(report)


# ---- interrupts, and the end of the process --------------------------------------------------------------------------


def test_a_signal_handler_may_ask_while_the_device_is_looked_for(run_script):
    script = f"""
        import os
        os.environ["ASCEND_HOME_PATH"] = {str(build("split"))!r}
        import signal
        import numpy as np
        import ascend_grad as ag
        from ascend_grad import _acl

        seen = []
        signal.signal(signal.SIGUSR1, lambda *_: seen.append(ag.backends()["npu"]))
        count = _acl.device_count

        def interrupted():
            signal.raise_signal(signal.SIGUSR1)
            return count()

        _acl.device_count = interrupted
        assert ag.explain("softmax", np.zeros(3, np.float32)).backend == "npu"
        assert [each[:2] for each in seen] == [(False, "the search for the device is in progress")], seen
    """
    run_script(script)


def test_calls_at_the_end_of_the_process_find_no_device(run_script):
    script = f"""
        import os, sys
        sys.path.insert(0, {str(Path(__file__).parents[1] / "support")!r})
        os.environ["ASCEND_HOME_PATH"] = {str(build("split"))!r}
        import atexit
        import numpy as np
        import ascend_grad as ag
        from ascend_grad import npu
        from stand_in import StandIn, build

        x = np.zeros((2, 3), np.float32)

        def late():
            backend, reason = ag.explain("softmax", x)
            assert backend == "cpu" and "npu: the process is ending" in reason, reason
            ag.softmax(x)
            try:
                there.numpy()
            except ag.BackendUnavailableError:
                print("late", StandIn(build("split")).violations())

        atexit.register(late)
        ag.softmax(x)
        there = npu.asarray(x)
    """
    assert run_script(script).stdout.strip() == "late []"


def test_an_interrupt_at_the_end_of_a_call_leaves_the_session_free(device):
    x = np.zeros((64, 128), np.float32)
    ag.softmax(x)
    body = session.Session.call.__wrapped__.__code__

    def trace(frame, event, argument):
        if frame.f_code is body:
            return interrupt if event == "call" else None
        return None

    def interrupt(frame, event, argument):
        if event == "line" and "allocations" in frame.f_locals:
            raise KeyboardInterrupt
        return interrupt

    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            ag.softmax(x)
    finally:
        sys.settrace(None)
    ag.softmax(x)
    device.reset()
    for _ in range(3):
        ag.softmax(x)
    assert [device.calls(name) for name in ("aclrtMalloc", "aclrtMallocHost", "aclrtCreateStream")] == [0, 0, 0]


@pytest.mark.parametrize("times", [1, 2, 5])
def test_whoever_interrupts_waits_for_the_device(times, device, monkeypatch):
    """A call that is interrupted any number of times frees memory only after its work has ended."""
    x = np.ones((64, 128), np.float32)
    ag.softmax(x)
    synchronize = session.Session.synchronize
    interrupts = iter(range(times))

    def interrupted(self):
        if next(interrupts, None) is not None:
            raise KeyboardInterrupt
        synchronize(self)

    monkeypatch.setattr(session.Session, "synchronize", interrupted)
    device.set_delay(100_000)
    try:
        with pytest.raises(KeyboardInterrupt):
            ag.softmax(x)
        npu.release()
    finally:
        device.set_delay(200)
    assert device.violations() == []
    assert_identical(ag.softmax(x), ag.softmax(x, backend="npu"))


@pytest.mark.parametrize("moment", ["_check_usable", "session_on"])
def test_calls_that_begin_while_the_process_ends(moment, device, monkeypatch):
    """A call that has chosen the device when another thread begins to end the process is computed by the CPU."""
    x = np.linspace(-1, 1, 64 * 128, dtype=np.float32).reshape(64, 128)
    original = getattr(session, moment)

    def ends_there(*args):
        if moment == "_check_usable":
            runtime.found["state"] = runtime.ENDING
            return original(*args)
        result = original(*args)  # a session that another thread may close, as it is not busy yet
        runtime.found["state"] = runtime.ENDING
        return result

    def ending(call):
        with monkeypatch.context() as patch:
            patch.setitem(runtime.found, "state", runtime.state())
            patch.setattr(session, moment, ends_there)
            return call()

    expected = ag.softmax(x, backend="cpu")
    assert_identical(ending(lambda: ag.softmax(x)), expected)
    assert ending(lambda: ag.workspace_size("softmax", x)) == ag.workspace_size("softmax", x, backend="cpu")
    out = np.full_like(x, 7)
    with pytest.raises(ag.BackendUnavailableError, match=r"softmax: .* the process is ending"):
        ending(lambda: ag.softmax(x, out=out, backend="npu"))
    assert (out == 7).all()
    assert_identical(ag.softmax(x), ag.softmax(x, backend="npu"))


def test_daemon_threads_at_the_end_of_the_process(run_script):
    script = f"""
        import os
        os.environ["ASCEND_HOME_PATH"] = {str(build("split"))!r}
        import threading
        import numpy as np
        import ascend_grad as ag

        x = np.zeros((64, 128), np.float32)
        worked = threading.Barrier(4)

        def work():
            ag.softmax(x)
            worked.wait()
            while True:
                ag.softmax(x)

        for _ in range(3):
            threading.Thread(target=work, daemon=True).start()
        worked.wait()
        print("ending")
    """
    for _ in range(5):
        result = run_script(script)
        assert (result.stdout, result.stderr) == ("ending\n", "")
