"""Test that calls on the caller's stream do not wait, and that memory in use is not given to other work."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from acl_client import Acl
from cross_entropy_problems import (
    check,
    check_product,
    in_float64,
    product_in_float64,
    random_arguments,
    random_product,
)
from linear_samples import GRADIENT, LINEAR, problem_of
from npu_samples import ALL, X, attempts_with_a_fault, chain, chain_arguments, problem_for, results_of, to_device
from python_threads import in_threads
from samples import assert_identical
from stand_in import StandIn, build

import ascend_grad as ag
from ascend_grad import npu

SLOW, FAST = 100_000, 200
WORK = np.linspace(-2, 2, 64 * 65, dtype=np.float32).reshape(64, 65)


class Streams:
    """Create and destroy streams as a caller does, by default on device 0."""

    def __init__(self, acl: Acl):
        self._acl, self._made = acl, []

    def new(self, device: int = 0) -> int:
        handle = ctypes.c_void_p()
        self._acl.check("aclrtSetDevice", device)
        self._acl.check("aclrtCreateStream", ctypes.byref(handle))
        self._acl.check("aclrtSetDevice", 0)
        assert handle.value is not None
        self._made.append((device, handle.value))
        return handle.value

    def destroy(self) -> None:
        while self._made:
            device, handle = self._made.pop()
            self._acl.check("aclrtSetDevice", device)
            self._acl.check("aclrtDestroyStream", handle)
        self._acl.check("aclrtSetDevice", 0)


@pytest.fixture
def streams(device: StandIn) -> Iterator[Streams]:
    gc.collect()
    npu.release()
    before = device.live()
    home = build("split")
    made = Streams(Acl(*(home / "lib64" / name for name in ("libascendcl.so", "libnnopbase.so", "libopapi_nn.so"))))
    npu.device_count()
    yield made
    device.reset()
    device.set_delay(FAST)
    gc.collect()
    npu.synchronize()
    made.destroy()
    npu.release()
    assert device.live() == before


@pytest.mark.parametrize("operator", ALL)
def test_results(operator: str, streams: Streams, device: StandIn) -> None:
    arguments, named = problem_for(operator)
    rights = results_of(getattr(ag, operator)(*arguments, **named, backend="npu"))
    there, named_there = to_device(arguments, named)
    device.set_delay(SLOW)
    with npu.stream(streams.new()):
        results = getattr(ag, operator)(*there, **named_there)
    for result, right in zip(results_of(results), rights, strict=True):
        assert_identical(result, right)
    assert device.violations() == []


def test_the_largest_log_probabilities(streams: Streams, device: StandIn) -> None:
    """A call reads the largest logits of each block, and waits only for these logits."""
    x, w = np.ones((5, 3), np.float16), np.repeat(np.arange(100, dtype=np.float16)[:, None] // 3, 3, axis=1)
    right = ag.linear_top_k(x, w, 4, backend="npu")
    there = npu.asarray(x), npu.asarray(w)
    device.set_delay(SLOW)
    with npu.stream(streams.new()):
        results = ag.linear_top_k(*there, 4)
    for result, expected in zip(results, right, strict=True):
        assert_identical(result.numpy(), expected)
    assert right.index.tolist() == [[99, 96, 97, 98]] * 5
    assert device.violations() == []


@pytest.mark.parametrize("seed", range(20))
def test_the_loss_of_logits(seed: int, streams: Streams, device: StandIn) -> None:
    """Memory that a call on a stream drops serves its later work, in the order of the stream."""
    arguments, _ = random_arguments(seed, targets=(np.int64,))
    expected = in_float64(arguments)
    arrays = {
        name: npu.asarray(value.astype(np.float32) if value.dtype == np.float64 else value)
        for name, value in arguments.items()
        if isinstance(value, np.ndarray)
    }
    device.set_delay(2_000)
    with npu.stream(streams.new()):
        results = [ag.cross_entropy(**{**arguments, **arrays}) for _ in range(3)]
    npu.synchronize()
    for result in results:
        check(result, expected, arguments["input"].dtype.type)
    assert device.violations() == []


@pytest.mark.parametrize("seed", range(20))
def test_products_of_the_hessian(seed: int, streams: Streams, device: StandIn) -> None:
    arguments = random_product(seed, targets=(np.int64,))
    there = {name: each for name, each in arguments.items() if not isinstance(each, np.ndarray)}
    for name in arguments.keys() - there.keys():
        each = arguments[name]
        there[name] = npu.asarray(each.astype(np.float32) if each.dtype == np.float64 else each)
    expected = product_in_float64(arguments | {"vector": there["vector"].numpy()})
    device.set_delay(2_000)
    with npu.stream(streams.new()):
        products = [ag.cross_entropy_hvp(**there) for _ in range(3)]
    npu.synchronize()
    for product in products:
        check_product(product, expected, arguments["input"].dtype.type)
    assert device.violations() == []


def test_nobody_waits(streams: Streams, device: StandIn) -> None:
    x = npu.asarray(WORK)
    handle = streams.new()
    with npu.stream(handle):
        ag.softmax(x)  # this call allocates the memory of later calls
        npu.synchronize()
        device.set_delay(SLOW)
        device.reset()
        twice = ag.softmax(ag.softmax(x))
        assert device.counter("synchronizations") == 0
        assert device.counter("mallocs") <= 1  # released memory is used again, in stream order
        assert device.counter("in_flight") > 0
        npu.synchronize()
        assert device.counter("in_flight") == 0
        assert device.counter("synchronizations") == 1
    assert_identical(twice.numpy(), ag.softmax(ag.softmax(WORK, backend="npu"), backend="npu"))
    assert device.violations() == []


def test_a_chain_makes_no_copy(streams: Streams, device: StandIn) -> None:
    arguments = [npu.asarray(each) for each in chain_arguments()]
    rights = [each.numpy() for each in chain(*arguments)]
    with npu.stream(streams.new()):
        device.reset()
        results = chain(*arguments)
        counts = [device.counter(f"copies_{kind}") for kind in ("h2h", "h2d", "d2h", "d2d")]
        assert (device.counter("synchronizations"), counts) == (0, [0] * 4)
    for result, right in zip(results, rights, strict=True):
        assert_identical(result.numpy(), right)


def test_values_that_are_looked_at(streams: Streams, device: StandIn) -> None:
    """A call waits if it has to read values of its arrays.

    A call looks for rows without a gradient and for invalid targets, and packs masks of bools.
    """
    problem = problem_of(GRADIENT, (9, 130, 4), "float16")
    rights = list(ag.fused_linear_cross_entropy_loss_grad(**problem.arguments, backend="npu"))
    handle = streams.new()
    device.set_delay(20_000)
    for _ in range(3):
        named = {name: npu.asarray(a) if isinstance(a, np.ndarray) else a for name, a in problem.arguments.items()}
        with npu.stream(handle):
            results = ag.fused_linear_cross_entropy_loss_grad(**named)
            again = ag.fused_linear_cross_entropy_loss_grad(**named)
        for pair in (results, again):
            for result, right in zip(pair, rights, strict=True):
                assert_identical(result.numpy(), right)
    assert device.violations() == []


def test_whatever_uses_an_array_waits_for_it(streams: Streams, device: StandIn) -> None:
    right = ag.softmax(WORK, backend="npu")
    twice = ag.softmax(right, backend="npu")
    x, first, second = npu.asarray(WORK), streams.new(), streams.new()
    device.set_delay(SLOW)

    def once() -> npu.DeviceArray:
        with npu.stream(first):
            return ag.softmax(x)

    assert_identical(once().numpy(), right)
    assert_identical(ag.softmax(once()).numpy(), twice)  # this call runs on the thread's own stream
    y = once()
    with npu.stream(second):
        y = ag.softmax(y)
    assert_identical(y.numpy(), twice)
    found: list[np.ndarray] = []
    y = once()
    thread = threading.Thread(target=lambda: found.append(ag.softmax(y).numpy()))
    thread.start()
    thread.join()
    assert_identical(found[0], twice)
    y = once()
    y.__dlpack__()
    assert device.counter("in_flight") == 0
    assert device.violations() == []


def test_memory_of_arrays_that_are_dropped(streams: Streams, device: StandIn) -> None:
    """Memory of arrays that are dropped while their work runs is not given to other work."""
    right = ag.softmax(WORK, backend="npu")
    handle = streams.new()
    device.set_delay(20_000)
    for _ in range(3):
        with npu.stream(handle):
            y = ag.softmax(npu.asarray(WORK))  # the argument is dropped immediately
            zeros = npu.asarray(np.zeros_like(WORK))  # the copy runs on another stream
            ag.softmax(zeros)
            z = ag.softmax(ag.softmax(y))
        ag.softmax(zeros)
        del zeros
        assert_identical(y.numpy(), right)
        del y, z
        assert_identical(ag.softmax(npu.asarray(WORK)).numpy(), right)
    thread = threading.Thread(target=lambda held: held.clear(), args=([_pending(handle)],))
    thread.start()
    thread.join()
    npu.release()
    assert device.violations() == []


def _pending(handle: int) -> npu.DeviceArray:
    with npu.stream(handle):
        return ag.softmax(npu.asarray(WORK))


def test_a_thread_that_ends(streams: Streams, device: StandIn) -> None:
    device.set_delay(20_000)
    found: list[npu.DeviceArray] = []
    handle = streams.new()
    thread = threading.Thread(target=lambda: found.append(_pending(handle)))
    thread.start()
    thread.join()
    assert_identical(found.pop().numpy(), ag.softmax(WORK, backend="npu"))
    assert device.violations() == []


def test_full_memory(streams: Streams, device: StandIn) -> None:
    """If memory is full, the pools of this thread's streams are freed once their work has ended."""
    device.set_memory(4 << 20)
    try:
        x = npu.asarray(np.zeros((1 << 18,), np.float32))
        with npu.stream(streams.new()):
            for n in (1 << 18, 1 << 16, 1 << 17, 1 << 18):
                ag.softmax(npu.asarray(np.zeros(n, np.float32)))
            ag.softmax(x)
    finally:
        device.set_memory(4 << 30)
    assert device.violations() == []


def test_blocks_within_each_other_and_other_devices(streams: Streams, device: StandIn) -> None:
    x = npu.asarray(X)
    first, second = streams.new(), streams.new()
    device.set_delay(SLOW)
    with npu.stream(first):
        device.reset()
        with npu.stream(second):
            a = ag.softmax(x)
        b = ag.softmax(X, backend="npu")  # the result is complete when the call returns
        with pytest.raises(ZeroDivisionError), npu.stream(second):
            raise ZeroDivisionError
        c = ag.softmax(a)
        npu.set_device(1)
        try:
            other = npu.asarray(X)
            device.reset()
            d = ag.softmax(other)
            assert device.counter("synchronizations") == 1
        finally:
            npu.set_device(0)
    for result, right in ((a, b), (d, b), (c, ag.softmax(b, backend="npu"))):
        assert_identical(result.numpy(), right)
    npu.synchronize()
    device.reset()
    ag.softmax(x)
    assert device.counter("synchronizations") == 1
    npu.set_device(1)
    try:
        with npu.stream(streams.new(1)):
            assert ag.softmax(other).device == 1
        npu.synchronize()
    finally:
        npu.set_device(0)
    assert device.violations() == []


def test_handles_that_are_none(device: StandIn) -> None:
    for wrong, kind in ((0, ag.ParamInvalidError), (-4, ag.ParamInvalidError), ("8", ag.ParamTypeError)):
        with pytest.raises(kind, match=r"^npu\.stream: handle: expected"), npu.stream(wrong):
            raise AssertionError


def test_a_stream_that_is_none(streams: Streams, device: StandIn) -> None:
    """The first call on an address that is not a stream raises an error. Later calls work."""
    x = npu.asarray(X)
    device.reset()
    with npu.stream(0x7F00_0000_1000), pytest.raises(ag.AscendGradError, match="not a stream"):
        ag.softmax(x)
    assert_identical(ag.softmax(x).numpy(), ag.softmax(X, backend="npu"))
    device.reset()


# ---- faults ----------------------------------------------------------------------------------------------------------

FAILED = 507899


def assert_clear(error: ag.AclError) -> None:
    assert error.code == FAILED or error.call == "aclCreateTensor"
    assert "a fault was injected here" in error.runtime_message


@pytest.mark.parametrize("operator", [*LINEAR, "softmax_backward", "scaled_masked_softmax"])
def test_every_call_fails_once(operator: str, streams: Streams, device: StandIn) -> None:
    """A fault raises a clear exception, in the call or in a wait, or the result is right. The next call works."""
    device.set_delay(20)
    arguments, named = problem_for(operator)
    rights = results_of(getattr(ag, operator)(*arguments, **named, backend="npu"))
    there = to_device(arguments, named)
    handle = streams.new()

    def attempt() -> None:
        with npu.stream(handle):
            results = getattr(ag, operator)(*there[0], **there[1])
        npu.synchronize()
        for result, right in zip(results_of(results), rights, strict=True):
            assert_identical(result, right)

    struck = 0
    for has_raised in attempts_with_a_fault(device, "*", FAILED, attempt, assert_clear, npu.release):
        struck += has_raised
        device.reset()
        attempt()
        assert device.violations() == []
    assert struck > 5
    there = (), {}  # the streams may be destroyed once no array is left


def test_errors_of_the_work_appear_where_somebody_waits(streams: Streams, device: StandIn) -> None:
    x = npu.asarray(X)
    with npu.stream(streams.new()):
        device.fail("aclrtSynchronizeStream", 1, FAILED)
        y = ag.softmax(x)
        with pytest.raises(ag.AclError, match="aclrtSynchronizeStream"):
            npu.synchronize()
        npu.synchronize()
        device.reset()
        assert_identical(y.numpy(), ag.softmax(X, backend="npu"))
        y = ag.softmax(x)
        device.fail("aclrtSynchronizeStream", 1, FAILED)
        with pytest.raises(ag.AclError, match="aclrtSynchronizeStream"):
            y.numpy()
        device.reset()


def test_threads_that_read_one_result(streams: Streams, device: StandIn) -> None:
    """Threads that read one result wait for this result independently."""
    x = npu.asarray(WORK)
    device.set_delay(SLOW)
    with npu.stream(streams.new()):
        y = ag.softmax(x)
    in_threads(*[y.numpy] * 3)
    assert device.violations() == []


def test_memory_that_is_released_after_the_stream_is_done(streams: Streams, device: StandIn) -> None:
    """Memory of dropped results is freed, although another result of the stream is alive."""
    x = npu.asarray(np.zeros(1 << 20, np.float32))
    with npu.stream(streams.new()):
        results = [ag.softmax(x) for _ in range(4)]
    npu.synchronize()
    npu.release()
    before = device.counter("device_allocations")
    del results[1:]
    npu.release()
    assert device.counter("device_allocations") == before - 3
    assert device.violations() == []
