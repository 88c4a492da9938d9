"""Test the test double's events, order between streams, options, and operators for torch_npu."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from acl_client import D2D, Acl, broken
from numpy.typing import NDArray


@pytest.fixture
def event(acl) -> Iterator[Callable[[], ctypes.c_void_p]]:
    made: list[ctypes.c_void_p] = []

    def create() -> ctypes.c_void_p:
        made.append(ctypes.c_void_p())
        assert acl.aclrtCreateEventExWithFlag(ctypes.byref(made[-1]), 0) == 0
        return made[-1]

    yield create
    for each in made:
        acl.aclrtDestroyEvent(each)


def copy(acl: Acl, to: int, source: int, stream: int) -> None:
    assert acl.aclrtMemcpyAsync(to, 16, source, 16, D2D, stream) == 0


def copies_on_two_streams(acl: Acl, double) -> tuple[np.ndarray, list[int], list[int]]:
    """Return values, three places in memory of which the first has them, and two streams, on a slow device."""
    double.set_delay(20_000)
    values = np.arange(16, dtype=np.uint8)
    streams = [acl.stream(), acl.stream()]
    return values, [acl.to_device(each) for each in (values, 0 * values, 0 * values)], streams


# ---- events ----------------------------------------------------------------------------------------------------------


def test_what_waits_for_an_event_comes_after_it(acl, double, event) -> None:
    values, (source, middle, last), (first, second) = copies_on_two_streams(acl, double)
    mark = event()
    copy(acl, middle, source, first)
    assert acl.aclrtRecordEvent(mark, first) == 0
    assert acl.aclrtStreamWaitEvent(second, mark) == 0
    copy(acl, last, middle, second)
    assert acl.aclrtSynchronizeStream(second) == 0
    np.testing.assert_array_equal(acl.read(last, values), values)
    assert double.violations() == []
    assert (double.counter("event_waits"), double.counter("synchronizations")) == (1, 1)


def test_what_comes_after_the_event_is_not_waited_for(acl, double, event) -> None:
    _, (source, middle, last), (first, second) = copies_on_two_streams(acl, double)
    mark = event()
    assert acl.aclrtRecordEvent(mark, first) == 0
    copy(acl, middle, source, first)
    assert acl.aclrtStreamWaitEvent(second, mark) == 0
    copy(acl, last, middle, second)
    broken(double, "uses memory that work on another stream uses (aclrtMemcpyAsync)")
    assert acl.aclrtSynchronizeDevice() == 0
    double.reset()


def test_events_tell_when_they_are_reached(acl, double, event) -> None:
    double.set_delay(50_000)
    status, elapsed = ctypes.c_int(), ctypes.c_float()
    stream, here, there = acl.stream(), acl.malloc(16), acl.malloc(16)
    first, last = event(), event()
    assert acl.aclrtRecordEvent(first, stream) == 0
    copy(acl, there, here, stream)
    assert acl.aclrtRecordEvent(last, stream) == 0
    for mark, expected in ((first, 1), (last, 0)):
        assert acl.aclrtQueryEventStatus(mark, ctypes.byref(status)) == 0
        assert status.value == expected
    assert acl.aclrtStreamQuery(stream, ctypes.byref(status)) == 0
    assert status.value == 1
    assert acl.aclrtSynchronizeEvent(last) == 0
    assert acl.aclrtQueryEventStatus(last, ctypes.byref(status)) == 0
    assert status.value == 1
    assert acl.aclrtEventElapsedTime(ctypes.byref(elapsed), first, last) == 0
    assert elapsed.value >= 0
    assert double.counter("in_flight") == 0


def test_misuse_of_events(acl, double, event) -> None:
    mark = event()
    assert double.live() == {"events": 1}
    assert acl.aclrtRecordEvent(mark, None) == 107000
    stream = acl.stream()
    assert acl.aclrtSetDevice(1) == 0
    assert acl.aclrtRecordEvent(mark, stream) == 107003
    assert acl.aclrtSetDevice(0) == 0
    double.reset()
    assert acl.aclrtDestroyEvent(mark) == 0
    assert acl.aclrtRecordEvent(mark, stream) == 107017
    broken(double, "not an event: a event that was used up or destroyed")
    double.reset()


def test_options_of_the_process_and_of_a_context(acl) -> None:
    value = ctypes.c_int64()
    for index in (0, 1):
        assert acl.aclrtSetDevice(index) == 0
        assert acl.aclrtCtxSetSysParamOpt(0, index) == 0
    for index in (0, 1):
        assert acl.aclrtSetDevice(index) == 0
        assert acl.aclrtCtxGetSysParamOpt(0, ctypes.byref(value)) == 0
        assert value.value == index
        assert acl.aclrtCtxSetSysParamOpt(0, 0) == 0
    assert acl.aclrtGetSysParamOpt(0, ctypes.byref(value)) == 0
    assert value.value == 0


# ---- operators that only torch_npu uses ------------------------------------------------------------------------------


def computed(acl: Acl, name: str, *arguments: object) -> NDArray:
    """Run an operator, and return the values of the last array."""
    return acl.compute(name, *arguments)[-1]


def test_element_by_element(acl, scalar, rng) -> None:
    x, y = rng.standard_normal((3, 4)).astype(np.float32), rng.standard_normal(4).astype(np.float32)
    out = np.zeros_like(x)
    np.testing.assert_allclose(computed(acl, "Add", x, y, scalar(2), out), x + 2 * y, rtol=1e-6)
    np.testing.assert_allclose(computed(acl, "Muls", x, scalar(0.5), out), x / 2)
    np.testing.assert_array_equal(computed(acl, "GtTensor", x, y, np.zeros((3, 4), np.bool_)), x > y)
    np.testing.assert_array_equal(computed(acl, "SWhere", x > 0, x, y, out), np.where(x > 0, x, y))
    large = np.array([2**62 + 1, -(2**62) - 1])
    np.testing.assert_array_equal(acl.compute("InplaceCopy", np.zeros(2, np.int64), large)[0], large)
    wrapped = acl.compute("InplaceCopy", np.zeros(3, np.uint8), np.array([-1, 256, 7]))[0]
    np.testing.assert_array_equal(wrapped, [255, 0, 7])
    assert acl.prepare("Add", acl.put(y), acl.put(x), scalar(1), acl.put(y))[0] == 161002


def test_along_dimensions(acl, rng) -> None:
    x, w = rng.standard_normal((3, 4)).astype(np.float32), rng.standard_normal((4, 2)).astype(np.float32)
    axes = acl.aclCreateIntArray((ctypes.c_int64 * 1)(-1), 1)
    sums = computed(acl, "ReduceSum", x, axes, False, 0, np.zeros(3, np.float32))
    np.testing.assert_allclose(sums, x.sum(-1), rtol=1e-5)
    whole = computed(acl, "ReduceSum", x, None, False, 0, np.zeros((), np.float32))
    np.testing.assert_allclose(whole, x.sum(), rtol=1e-5)
    assert acl.aclDestroyIntArray(axes) == 0
    _, values, places = acl.compute("MaxDim", x, 0, False, np.zeros(4, np.float32), np.zeros(4, np.int64))
    np.testing.assert_array_equal(values, x.max(0))
    np.testing.assert_array_equal(places, x.argmax(0))
    np.testing.assert_allclose(computed(acl, "Mm", x, w, np.zeros((3, 2), np.float32), 0), x @ w, rtol=1e-5)


def listed(acl: Acl, *arrays: NDArray) -> int:
    """Return a list of tensors, which destroys its tensors when it is destroyed."""
    handles = [acl.put(each) for each in arrays]
    for each in handles:
        acl.tensors.remove(each)
    return acl.aclCreateTensorList((ctypes.c_void_p * len(handles))(*handles), len(handles))


def test_selected_and_joined(acl, double, rng) -> None:
    x, y = rng.standard_normal((3, 4)).astype(np.float32), rng.standard_normal((3, 2)).astype(np.float32)
    parts, rows = listed(acl, x, y), listed(acl, np.array([2, 0]), np.array([1, -1]))
    joined = computed(acl, "Cat", parts, 1, np.zeros((3, 6), np.float32))
    np.testing.assert_array_equal(joined, np.concatenate([x, y], 1))
    np.testing.assert_array_equal(computed(acl, "Index", x, rows, np.zeros(2, np.float32)), x[[2, 0], [1, -1]])
    for each in (parts, rows):
        assert acl.aclDestroyTensorList(each) == 0
    assert double.counter("arguments") == 0
    dims, rank = ctypes.POINTER(ctypes.c_int64)(), ctypes.c_uint64()
    out = np.zeros(12, np.float32)
    chosen = computed(acl, "MaskedSelect", x, x > 0, out)
    assert acl.aclGetViewShape(acl.tensors[-1], ctypes.byref(dims), ctypes.byref(rank)) == 0
    assert rank.value == 1
    np.testing.assert_array_equal(chosen[: dims[0]], x[x > 0])
