"""Test which device a thread's calls go to, and that another library's binding of a thread is kept."""

from __future__ import annotations

import ctypes
from contextlib import suppress

import numpy as np
import pytest
from python_threads import in_threads
from stand_in import StandIn, build

import ascend_grad as ag
from ascend_grad import npu
from ascend_grad.backends.ascend import threads

X = np.arange(12, dtype=np.float32).reshape(3, 4)


class Other:
    """Bind threads to devices, as another library of the process does."""

    def __init__(self) -> None:
        self._runtime = ctypes.CDLL(str(build("split") / "lib64" / "libascendcl.so"))

    def set_device(self, device: int) -> None:
        assert self._runtime.aclrtSetDevice(device) == 0

    def create_context(self, device: int) -> int:
        context = ctypes.c_void_p()
        assert self._runtime.aclrtCreateContext(ctypes.byref(context), device) == 0
        return context.value

    def destroy_context(self, context: int) -> None:
        assert self._runtime.aclrtDestroyContext(ctypes.c_void_p(context)) == 0

    def context(self) -> int | None:
        context = ctypes.c_void_p()
        return None if self._runtime.aclrtGetCurrentContext(ctypes.byref(context)) else context.value


@pytest.fixture
def other(device) -> Other:
    return Other()


def test_a_thread_that_is_bound_keeps_to_its_device(other, device: StandIn) -> None:
    def work() -> None:
        other.set_device(1)
        before = other.context()
        assert npu.get_device() == 1
        assert npu.asarray(X).device == 1
        np.testing.assert_allclose(ag.softmax(X, backend="npu").sum(1), 1, rtol=1e-6)
        assert list(threads.thread.sessions) == [1]
        assert other.context() == before
        other.set_device(0)
        assert npu.get_device() == npu.asarray(X).device == 0
        other.set_device(1)
        npu.set_device(0)  # `set_device` takes precedence over the binding
        assert npu.get_device() == npu.asarray(X).device == 0
        assert other.context() == before

    in_threads(work)


def test_a_context_of_their_own_counts_too(other, device: StandIn) -> None:
    def work() -> None:
        context = other.create_context(1)
        assert npu.get_device() == npu.asarray(X).device == 1
        assert other.context() == context
        npu.release()
        assert other.context() == context
        other.destroy_context(context)

    in_threads(work)


@pytest.fixture
def array_on_device_1(device) -> list[npu.DeviceArray]:
    """Return a list with the only reference to an array on device 1."""
    npu.set_device(1)
    array = [npu.asarray(X)]
    npu.set_device(0)
    return array


def test_a_thread_that_nobody_has_bound_works_on_device_0(other, array_on_device_1) -> None:
    def work() -> None:
        assert npu.get_device() == 0
        assert other.context() is None, "a question binds nobody"
        ag.softmax(X, backend="npu")
        assert list(threads.thread.sessions) == [0]
        other.set_device(1)
        assert npu.get_device() == npu.asarray(X).device == 1
        other.set_device(0)
        assert npu.get_device() == npu.asarray(X).device == 0

    in_threads(work)


@pytest.mark.parametrize("how", ["computing", "copying", "freeing"])
def test_work_on_arrays_of_another_device_is_no_choice(how, other, array_on_device_1) -> None:
    """Work on arrays of another device binds the thread, but the binding does not count as another library's choice."""

    def work() -> None:
        if how == "computing":
            assert ag.softmax(array_on_device_1[0]).device == 1
        elif how == "copying":
            array_on_device_1[0].numpy()
        else:
            array_on_device_1.clear()
        assert npu.get_device() == npu.asarray(X).device == 0
        other.set_device(1)
        other.set_device(0)
        assert npu.get_device() == 0

    in_threads(work)


@pytest.mark.parametrize("said", [None, 0, 1])
def test_the_context_survives_calls_errors_and_releases(said, other, array_on_device_1, device: StandIn) -> None:
    def work() -> None:
        on_device_0 = npu.asarray(X)
        other.set_device(1)
        if said is not None:
            npu.set_device(said)
        before = other.context()
        for function in (
            *("aclrtSetDevice", "aclrtCreateStream", "aclrtMalloc", "aclrtMallocHost", "aclrtMemcpyAsync"),
            *("aclCreateTensor", "aclnnSoftmaxGetWorkspaceSize", "aclnnSoftmax", "aclrtSynchronizeStream"),
            *("aclrtFree", "aclrtFreeHost", "aclrtDestroyStream", "aclDestroyTensor", "nothing"),
        ):
            npu.release()
            assert other.context() == before, function
            device.fail(function, 1, 507899)
            for x in (X, array_on_device_1[0], on_device_0):
                with suppress(ag.AclError):
                    ag.softmax(x, backend="npu")
                assert other.context() == before, function
            with suppress(ag.AclError):
                npu.asarray(X).numpy()
            assert other.context() == before, function
            device.reset()
        with pytest.raises(ag.ParamInvalidError):
            ag.softmax(X, 7, backend="npu")
        del on_device_0
        array_on_device_1.clear()
        npu.release()
        assert other.context() == before

    in_threads(work)


def test_the_environment_goes_before_the_binding(run_script) -> None:
    script = """
        import ctypes, os, numpy as np
        import ascend_grad as ag
        runtime = ctypes.CDLL(os.environ["ASCEND_HOME_PATH"] + "/lib64/libascendcl.so")
        assert runtime.aclInit(None) == 0
        assert runtime.aclrtSetDevice(1) == 0
        x = np.zeros(3, np.float32)
        print(ag.npu.get_device(), ag.npu.asarray(x).device)
        number = ctypes.c_int32()
        assert runtime.aclrtGetDevice(ctypes.byref(number)) == 0
        print(number.value)
    """
    home = str(build("split"))
    assert run_script(script, ASCEND_HOME_PATH=home).stdout == "1 1\n1\n"
    assert run_script(script, ASCEND_HOME_PATH=home, ASCEND_GRAD_DEVICE="0").stdout == "0 0\n1\n"
