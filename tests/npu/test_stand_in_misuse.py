"""Test that the test double reports misuse of the runtime, or computes wrong results.

Each rule of the device is broken once on purpose, to show that tests over the test double can fail.
"""

from __future__ import annotations

import ctypes
import time

import ml_dtypes
import numpy as np
import pytest
import stand_in
from acl_client import D2D, D2H, H2D, H2H, Acl, StatusError, broken, softmax
from python_threads import in_threads

BF16 = ml_dtypes.bfloat16


# ---- misuse of numbers and pointers ----------------------------------------------------------------------------------


def test_wrong_dtype_constants(acl, double, rng) -> None:
    x = rng.standard_normal((2, 8)).astype(BF16)
    address, out = acl.to_device(x), acl.to_device(x)
    self, result = (acl.tensor(each, x.shape, None, code=1) for each in (address, out))  # code 1 is float16
    acl.launch("Softmax", self, -1, result, stream=(stream := acl.stream()))
    acl.check("aclrtSynchronizeStream", stream)
    assert np.nanmax(np.abs(acl.read(out, x).astype(float) - softmax(x.astype(float)))) > 0.1
    assert acl.tensor(address, x.shape, None, code=99) is None
    assert b"data type 99" in acl.aclGetRecentErrMsg()
    broken(double, "data type 99")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"strides": (-4, 1)}, "stride -4"),
        ({"offset": -1}, "offset -1"),
        ({"strides": (5, 1)}, "the view ends at element 8 of a storage of 8"),
        ({"offset": 1}, "the view ends at element 8"),
        ({"storage": (9,)}, "not within one allocation"),
        ({"storage": (-2, 4)}, "storage dimension -2"),
    ],
)
def test_impossible_tensors(acl, double, settings, words) -> None:
    address = acl.malloc(32)
    settings = {"strides": (4, 1)} | settings
    assert acl.tensor(address, (2, 4), np.float32, **settings) is None
    broken(double, words)


def test_tensors_lie_on_the_device_and_are_aligned(acl, double) -> None:
    here = np.zeros(8, np.float32)
    assert acl.tensor(here.ctypes.data, (8,), np.float32) is None
    broken(double, "not within one allocation on a device")
    double.reset()
    assert acl.tensor(acl.malloc(128) + 32, (8,), np.float32) is None
    broken(double, "not a multiple of 64")


def test_pieces_of_memory_keep_their_padding(acl, double) -> None:
    block, stream = acl.malloc(1024), acl.stream()
    x = acl.tensor(block, (16,), np.float32)  # the tensor has 64 bytes and 32 bytes of padding
    acl.launch("Softmax", x, 0, acl.tensor(block + 128, (16,), np.float32), stream=stream)
    assert double.violations() == []
    acl.launch("Softmax", x, 0, acl.tensor(block + 64, (16,), np.float32), stream=stream)
    broken(double, "starts 64 bytes after tensor 0, which takes 96 with its padding")


@pytest.mark.parametrize("kind", [H2H, D2H, D2D, 7])
def test_wrong_kind_of_copy(acl, double, kind) -> None:
    here, there = np.zeros(16, np.uint8), acl.malloc(16)
    assert acl.aclrtMemcpy(there, 16, here.ctypes.data, 16, kind) == 107000
    assert b"aclrtMemcpy" in acl.aclGetRecentErrMsg()
    broken(double, "kind 7" if kind == 7 else "is said to be on the")


def test_copies_stay_within_an_allocation(acl, double) -> None:
    here, there = np.zeros(64, np.uint8), acl.malloc(16)
    for arguments, words in (
        ((there, 64, here.ctypes.data, 17, H2D), "beyond the end"),
        ((there, 16, here.ctypes.data, 17, H2D), "17 bytes into 16"),
        ((there, 16, here.ctypes.data, 0, H2D), "0 bytes"),
        ((None, 16, here.ctypes.data, 16, H2D), "NULL"),
        ((there - 1, 16, here.ctypes.data, 8, H2D), "no allocation"),
    ):
        double.reset()
        assert acl.aclrtMemcpy(*arguments) == 107000
        broken(double, words)


# ---- misuse of objects and their lifetimes ---------------------------------------------------------------------------


def softmax_call(acl: Acl, double: stand_in.StandIn) -> dict:
    x = np.arange(8, dtype=np.float32)
    address, out = acl.to_device(x), acl.to_device(np.zeros_like(x))
    self, result = (acl.tensor(each, x.shape, x.dtype) for each in (address, out))
    code, size, executor = acl.prepare("Softmax", self, 0, result)
    assert code == 0
    assert size > 0
    workspace, stream = acl.malloc(size), acl.stream()
    return locals()


def test_missing_destroys_show(acl, double) -> None:
    c = softmax_call(acl, double)
    live = double.live()
    assert {name: live[name] for name in ("tensors", "executors", "streams", "device_allocations")} == {
        "tensors": 2,
        "executors": 1,
        "streams": 1,
        "device_allocations": 3,
    }
    assert live["device_bytes"] == 64 + c["size"]


def test_executor_is_used_up(acl, double) -> None:
    c = softmax_call(acl, double)
    arguments = c["workspace"], c["size"], c["executor"], c["stream"]
    assert acl.aclnnSoftmax(*arguments) == 0
    assert acl.aclnnSoftmax(*arguments) == 161002
    broken(double, "not an executor: a executor that was used up or destroyed")
    assert acl.aclDestroyAclOpExecutor(c["executor"]) == 161002
    acl.executors.clear()
    assert len(double.violations()) == 2


def test_failure_uses_the_executor_up_too(acl, double) -> None:
    c = softmax_call(acl, double)
    double.fail("aclnnSoftmax", 1, 507015)
    assert acl.aclnnSoftmax(c["workspace"], c["size"], c["executor"], c["stream"]) == 507015
    assert double.counter("executors") == 0
    acl.executors.clear()


def test_repeatable_executor(acl, double) -> None:
    c = softmax_call(acl, double)
    arguments = c["workspace"], c["size"], c["executor"], c["stream"]
    assert acl.aclSetAclOpExecutorRepeatable(c["executor"]) == 0
    for _ in range(3):
        assert acl.aclnnSoftmax(*arguments) == 0
    assert double.counter("executors") == 1
    assert double.counter("launches") == 3
    assert acl.aclDestroyAclOpExecutor(c["executor"]) == 0
    assert double.violations() == []
    assert acl.aclDestroyAclOpExecutor(c["executor"]) == 161002
    broken(double, "not an executor")
    acl.executors.clear()


def test_executor_of_another_operator(acl, double) -> None:
    c = softmax_call(acl, double)
    assert acl.aclnnLogSoftmax(c["workspace"], c["size"], c["executor"], c["stream"]) == 161002
    broken(double, "made for aclnnSoftmax")
    acl.executors.clear()


def test_what_a_failed_first_phase_leaves_is_garbage(acl, double) -> None:
    code, _, executor = acl.prepare("Softmax", None, 0, None)
    assert code == 161001
    assert executor
    assert acl.aclDestroyAclOpExecutor(executor) == 161002
    broken(double, "never given out")


def test_tensors_without_memory_are_for_the_first_phase(acl, double) -> None:
    tensors = [acl.tensor(None, (3, 4), np.float32) for _ in range(2)]
    code, size, executor = acl.prepare("Softmax", tensors[0], 0, tensors[1])
    assert code == 0
    assert double.violations() == []
    assert acl.aclnnSoftmax(acl.malloc(size), size, executor, acl.stream()) == 561103
    broken(double, "the memory of tensor 0 is not on device 0")
    acl.executors.clear()


def test_tensor_destroyed_before_the_second_phase(acl, double) -> None:
    c = softmax_call(acl, double)
    assert acl.aclDestroyTensor(c["self"]) == 0
    assert acl.aclnnSoftmax(c["workspace"], c["size"], c["executor"], c["stream"]) == 561103
    broken(double, "destroyed before the second phase")
    acl.tensors.remove(c["self"])
    acl.executors.clear()


def test_tensor_destroyed_twice(acl, double) -> None:
    tensor = acl.tensor(acl.malloc(4), (1,), np.float32)
    assert acl.aclDestroyTensor(tensor) == 0
    assert acl.aclDestroyTensor(tensor) != 0
    acl.tensors.clear()
    broken(double, "a tensor that was used up or destroyed")


def test_workspace_is_needed(acl, double) -> None:
    c = softmax_call(acl, double)
    assert acl.aclnnSoftmax(None, c["size"], c["executor"], c["stream"]) == 161001
    assert double.counter("executors") == 0
    acl.executors.clear()
    x, mask = np.zeros((1, 1, 2, 2), np.float32), np.zeros((1, 1, 2, 2), bool)
    _, size, executor = acl.prepare("ScaledMaskedSoftmax", acl.put(x), acl.put(mask), 1.0, False, acl.put(x))
    assert acl.aclnnScaledMaskedSoftmax(None, size, executor, c["stream"]) == 161001
    assert double.counter("executors") == 1  # a second phase without its workspace does not release the executor
    assert double.violations() == []


def test_workspace_is_large_enough_and_nobody_elses(acl, double) -> None:
    c = softmax_call(acl, double)
    assert acl.aclnnSoftmax(c["workspace"], c["size"] - 1, c["executor"], c["stream"]) == 161002
    broken(double, "a workspace of 511 bytes")
    acl.executors.clear()
    double.reset()
    whole = acl.malloc(2048)
    self = acl.tensor(whole, (8,), np.float32)
    _, size, executor = acl.prepare("Softmax", self, 0, c["result"])
    acl.executors.clear()
    assert acl.aclnnSoftmax(whole, size, executor, c["stream"]) == 0
    broken(double, "the workspace overlaps tensor 0")


# ---- misuse of the order of work -------------------------------------------------------------------------------------


def queued_softmax(acl, double, delay: int) -> dict:
    """Queue a softmax that begins after a delay in microseconds, and return the objects of the call."""
    double.set_delay(delay)
    c = softmax_call(acl, double)
    assert acl.aclnnSoftmax(c["workspace"], c["size"], c["executor"], c["stream"]) == 0
    acl.executors.clear()
    return c


def test_missing_synchronise_gives_wrong_data(acl, double) -> None:
    c = queued_softmax(acl, double, 100_000)
    assert not acl.read(c["out"], c["x"]).any()
    broken(double, "does not wait for the stream")
    acl.check("aclrtSynchronizeStream", c["stream"])
    np.testing.assert_allclose(acl.read(c["out"], c["x"]), softmax(c["x"]), rtol=1e-6)
    assert double.counter("in_flight") == 0


def test_copies_on_a_stream_happen_later(acl, double) -> None:
    double.set_delay(50_000)
    stream, there, locked = acl.stream(), acl.malloc(16), acl.malloc_host(16)
    here = np.ctypeslib.as_array(ctypes.cast(locked, ctypes.POINTER(ctypes.c_uint8)), (16,))
    here[:] = 1
    assert acl.aclrtMemcpyAsync(there, 16, locked, 16, H2D, stream) == 0
    here[:] = 2  # this line overwrites the source of a copy that may be pending
    acl.check("aclrtSynchronizeStream", stream)
    np.testing.assert_array_equal(acl.read(there, here), np.full(16, 2))
    assert double.violations() == []


def test_asynchronous_copies_need_page_locked_memory(acl, double) -> None:
    stream, there, here = acl.stream(), acl.malloc(16), np.zeros(16, np.uint8)
    assert acl.aclrtMemcpyAsync(there, 16, here.ctypes.data, 16, H2D, stream) == 107000
    broken(double, "not page-locked")


def test_memory_in_use_must_not_be_freed(acl, double) -> None:
    c = queued_softmax(acl, double, 20_000)
    assert acl.aclrtFree(c["workspace"]) == 0
    acl.device_memory.remove(c["workspace"])
    broken(double, "memory that queued work still uses (aclnnSoftmax)")


def test_stream_in_use_must_not_be_destroyed(acl, double) -> None:
    c = queued_softmax(acl, double, 20_000)
    assert acl.aclrtDestroyStream(c["stream"]) == 0
    acl.streams.clear()
    broken(double, "still has work queued")


def test_two_streams_on_the_same_memory(acl, double) -> None:
    c = queued_softmax(acl, double, 20_000)
    acl.launch("LogSoftmax", c["result"], 0, c["self"], stream=acl.stream())
    assert "work on another stream" in double.violations()[0]


def test_work_takes_its_time_on_another_thread(acl, double) -> None:
    double.set_delay(500_000)
    c = softmax_call(acl, double)
    begin = time.monotonic()
    assert acl.aclnnSoftmax(c["workspace"], c["size"], c["executor"], c["stream"]) == 0
    acl.executors.clear()
    assert double.counter("in_flight") == 1
    acl.check("aclrtSynchronizeStream", c["stream"])
    assert time.monotonic() - begin >= 0.5


# ---- misuse of threads, devices and processes ------------------------------------------------------------------------


def test_thread_without_device(acl, double) -> None:
    def body() -> None:
        with pytest.raises(StatusError) as error:
            acl.malloc(16)
        assert error.value.code == 107002
        broken(double, "no aclrtSetDevice on this thread")

    in_threads(body)


def test_devices_are_separate(acl, double) -> None:
    first, stream = acl.to_device(np.zeros(16, np.uint8)), acl.stream()
    assert acl.aclrtSetDevice(1) == 0
    assert acl.aclrtMemset(first, 16, 0, 16) == 107000
    broken(double, "not within an allocation on device 1")
    double.reset()
    assert acl.aclrtSynchronizeStream(stream) == 107003
    broken(double, "belongs to another context")
    double.reset()
    here = np.zeros(16, np.uint8)
    assert acl.aclrtMemcpy(here.ctypes.data, 16, first, 16, D2H) == 107000
    broken(double, "is on device 0, but device 1 is current")
    assert acl.aclrtSetDevice(2) == 107001
    device = ctypes.c_int32()
    assert acl.aclrtGetDevice(ctypes.byref(device)) == 0
    assert device.value == 1


def test_explicit_contexts_are_counted(acl, double) -> None:
    primary, context, current = (ctypes.c_void_p() for _ in range(3))
    assert acl.aclrtGetCurrentContext(ctypes.byref(primary)) == 0
    assert acl.aclrtCreateContext(ctypes.byref(context), 1) == 0
    assert acl.aclrtGetCurrentContext(ctypes.byref(current)) == 0
    assert current.value == context.value
    assert double.live() == {"contexts": 1}
    assert acl.aclrtDestroyContext(context) == 0
    assert acl.aclrtMallocHost(ctypes.byref(current), 16) == 107002
    assert acl.aclrtSetCurrentContext(context) == 107000
    assert acl.aclrtSetCurrentContext(primary) == 0


def test_memory_is_limited(acl, double) -> None:
    double.set_memory(1000)
    acl.malloc(900)
    with pytest.raises(StatusError) as error:
        acl.malloc(200)
    assert error.value.code == 207001
    assert b"200 bytes do not fit on device 0" in acl.aclGetRecentErrMsg()
    assert acl.aclrtSetDevice(1) == 0
    acl.malloc(900)
    assert double.violations() == []
    with pytest.raises(StatusError) as error:
        acl.malloc(0)
    assert error.value.code == 100000
    assert double.counter("mallocs") == 2
    assert double.counter("device_bytes") == double.counter("peak_device_bytes") == 1800


def test_fresh_memory_is_poisoned_and_aligned_no_better_than_promised(acl, double) -> None:
    for nbytes in (1, 64, 4096, 100_000):
        address = acl.malloc(nbytes)
        assert address % 128 == 64
        assert np.all(acl.read(address, np.empty(nbytes, np.uint8)) == 0xFF)


def test_copies_are_counted(acl, double) -> None:
    here, there = np.zeros(24, np.uint8), acl.malloc(24)
    for arguments in (
        (there, 24, here.ctypes.data, 24, H2D),
        (here.ctypes.data, 24, there, 8, D2H),
        (there, 24, there, 4, D2D),
        (here.ctypes.data, 24, here.ctypes.data, 2, H2H),
    ):
        acl.check("aclrtMemcpy", *arguments)
    assert [double.counter(f"copies_{kind}") for kind in ("h2d", "d2h", "d2d", "h2h")] == [1] * 4
    assert [double.counter(f"bytes_{kind}") for kind in ("h2d", "d2h", "d2d", "h2h")] == [24, 8, 4, 2]
    with pytest.raises(KeyError):
        double.counter("cats")


# ---- faults and messages ---------------------------------------------------------------------------------------------


def test_faults_strike_at_the_call_they_were_meant_for(acl, double) -> None:
    double.fail("aclrtMalloc", 2, 207018)
    acl.malloc(16)
    with pytest.raises(StatusError) as error:
        acl.malloc(16)
    assert error.value.code == 207018
    assert b"injected" in acl.aclGetRecentErrMsg()
    acl.malloc(16)
    assert double.calls("aclrtMalloc") == 3
    double.fail("*", 2)
    acl.malloc(16)
    assert acl.aclrtMemset(acl.device_memory[0], 16, 0, 16) == 500000
    assert double.faults_left() == 0
    double.fail("aclCreateTensor", 0)
    double.fail("aclrtFree", -2, 7)
    assert acl.tensor(acl.malloc(4), (1,), np.float32) is None
    assert acl.tensor(acl.malloc(4), (1,), np.float32) is None
    assert [acl.aclrtFree(acl.device_memory.pop()) for _ in range(4)] == [0, 7, 7, 7]
    assert double.faults_left() == 2
    assert double.violations() == []


def test_what_releases_does_so_before_it_fails(acl, double) -> None:
    address = acl.malloc(16)
    double.fail("aclrtFree", 1)
    assert acl.aclrtFree(address) == 500000
    assert double.live() == {}
    acl.device_memory.clear()
    assert acl.aclrtFree(address) == 107000
    broken(double, "is not the start of an allocation")


def test_messages_are_per_thread_and_gone_once_read(acl, double) -> None:
    double.fail("aclrtMalloc", 1, 207001)
    with pytest.raises(StatusError):
        acl.malloc(16)
    in_threads(lambda: pytest.fail("of another thread") if acl.aclGetRecentErrMsg() else None)
    assert b"aclrtMalloc" in acl.aclGetRecentErrMsg()
    assert acl.aclGetRecentErrMsg() is None


def test_initialisations_are_counted(acl, double) -> None:
    left = ctypes.c_uint64()
    assert acl.aclInit(None) == 100002
    assert double.counter("initialisations") == 2
    assert acl.aclFinalizeReference(ctypes.byref(left)) == 0
    assert left.value == 1
    assert double.violations() == []


def test_an_option_belongs_to_its_context(acl, double) -> None:
    """An option has no value before it is set, and no value in another context."""
    value, context = ctypes.c_int64(-1), ctypes.c_void_p()
    assert acl.aclrtCreateContext(ctypes.byref(context), 0) == 0
    try:
        assert acl.aclrtCtxGetSysParamOpt(0, ctypes.byref(value)) == 107021
        assert value.value == -1
        assert acl.aclrtCtxSetSysParamOpt(0, 1) == 0
        assert acl.aclrtCtxGetSysParamOpt(0, ctypes.byref(value)) == 0
        assert value.value == 1
        assert acl.aclrtSetDevice(1) == 0
        assert acl.aclrtCtxGetSysParamOpt(0, ctypes.byref(value)) in (0, 107021)
        assert acl.aclrtCtxSetSysParamOpt(0, 0) == 0
        assert acl.aclrtSetCurrentContext(context) == 0
        assert acl.aclrtCtxGetSysParamOpt(0, ctypes.byref(value)) == 0
        assert value.value == 1
        assert double.violations() == []
        assert acl.aclrtCtxSetSysParamOpt(4, 1) == 100000
        broken(double, "option 4")
        double.reset()
        assert acl.aclrtCtxSetSysParamOpt(0, 4) == 107000
        broken(double, "option 0 set to 4")
    finally:
        assert acl.aclrtDestroyContext(context) == 0


def test_an_option_needs_a_context(acl, double) -> None:
    def without_context() -> None:
        assert acl.aclrtCtxSetSysParamOpt(0, 1) == 107002

    in_threads(without_context)
    broken(double, "no aclrtSetDevice on this thread")


def test_the_option_holds_for_what_is_prepared_under_it(acl, double) -> None:
    c = softmax_call(acl, double)
    assert acl.aclrtCtxSetSysParamOpt(0, 1) == 0
    later = softmax_call(acl, double)
    assert acl.aclrtCtxSetSysParamOpt(0, 0) == 0
    for each, launches in ((c, 0), (later, 1)):
        assert acl.aclnnSoftmax(each["workspace"], each["size"], each["executor"], each["stream"]) == 0
        assert double.counter("deterministic_launches") == launches
    acl.executors.clear()
