"""Test copies to and from the device, and how much device memory is allocated, kept and freed."""

from __future__ import annotations

import gc
import sys
import threading
import weakref

import numpy as np
import pytest
from faults import Noted
from linear_samples import GRADIENT, LOSS, STATISTICS, WHOLE, problem_of
from npu_samples import COPIES, X, counts, problem_for, results_of
from python_threads import in_threads
from samples import MASKED, OPERATORS, assert_identical, random_problem

import ascend_grad as ag
from ascend_grad import npu
from ascend_grad.backends.ascend import pool, session, transfers
from ascend_grad.backends.ascend.threads import members_of


def test_steady_state(any_operator, device):
    """Every call after the first allocates nothing, copies each input and each result once, and waits once."""
    args, kwargs = problem_for(any_operator)
    function = getattr(ag, any_operator)
    if "grad" in kwargs:
        kwargs["grad"] = np.ones_like(kwargs["grad"])  # rows without a gradient would be copied separately

    def work() -> None:
        results = results_of(function(*args, **kwargs))
        function(*args, **kwargs)
        device.reset()
        function(*args, **kwargs)
        assert counts(device, "mallocs", "host_mallocs") == {"mallocs": 0, "host_mallocs": 0}
        assert device.calls("aclrtCreateStream") == device.calls("aclrtSetDevice") == 0
        inputs = [*args, *(value for value in kwargs.values() if isinstance(value, np.ndarray))]
        expected = {"copies_h2h": 0, "copies_h2d": len(inputs), "copies_d2h": len(results), "copies_d2d": 0}
        if any_operator == WHOLE:
            # Active rows, weight, targets and upstream gradients go to the device. Loss and both gradients come back.
            assert counts(device, *COPIES) == {"copies_h2h": 0, "copies_h2d": 4, "copies_d2h": 3, "copies_d2d": 2}
        else:
            assert counts(device, *COPIES) == expected
            assert device.counter("bytes_d2h") == sum(result.nbytes for result in results)
            assert device.counter("synchronizations") == 1

    in_threads(work)  # another test may have bound this thread to a device


def test_large_arrays_go_in_chunks(device):
    """Arrays larger than the staging memory are copied in chunks, in any layout and direction."""
    x = np.random.default_rng(0).standard_normal((3001, 3000), np.float32)
    expected = ag.softmax(x, backend="reference")
    device.reset()
    np.testing.assert_allclose(ag.softmax(x, backend="npu"), expected, rtol=1e-6)
    chunks = -(-x.nbytes // (1 << 20))
    assert counts(device, *COPIES) == {"copies_h2h": 0, "copies_h2d": chunks, "copies_d2h": chunks, "copies_d2d": 0}
    assert device.counter("bytes_h2d") == device.counter("bytes_d2h") == x.nbytes
    # The host waits only for free staging memory, not for each chunk. The host fills a chunk while others are copied.
    assert device.counter("synchronizations") <= 2 * -(-x.nbytes // transfers.STAGING_BYTES) + 1
    turned = np.asarray(x[::-1].T[::-1], order="F").astype(">f4")
    out = np.empty((3001, 3000), np.float16)[::-1]
    assert ag.softmax(turned, 0, out=out.T, backend="npu") is not None
    np.testing.assert_allclose(out[::-1, ::-1], expected, rtol=2e-3, atol=1e-7)


def test_memory_of_another_thread_is_taken_when_the_device_is_full(device):
    x = np.zeros((256, 1024), np.float32)
    done, go_on = threading.Event(), threading.Event()

    def fill_a_pool():
        ag.softmax(x, backend="npu")
        done.set()
        go_on.wait(60)

    npu.release()
    thread = threading.Thread(target=fill_a_pool)
    thread.start()
    try:
        assert done.wait(60)
        device.set_memory(3 * x.nbytes)
        with ag.use_backend("npu"):
            assert_identical(ag.softmax(x), ag.softmax(x))
    finally:
        device.set_memory(4 << 30)
        go_on.set()
        thread.join()


def test_the_pool_is_bounded(device, monkeypatch):
    npu.release()
    before = device.live().get("device_bytes", 0)
    monkeypatch.setattr(pool, "POOL_BLOCKS", 3)
    for size in 2 ** np.arange(10, 20):
        ag.softmax(np.zeros(size, np.float32), backend="npu")
        assert device.live()["device_allocations"] <= 3
    monkeypatch.setattr(pool, "POOL_BLOCKS", 100)
    monkeypatch.setattr(pool, "POOL_BYTES", 1 << 20)
    for size in 2 ** np.arange(10, 20):
        ag.softmax(np.zeros(size, np.float32), backend="npu")
        assert device.live().get("device_bytes", 0) - before <= 1 << 20


def test_dropped_arrays_serve_later_work_of_the_call(device):
    """A call needs no more memory than its arrays that are alive at the same time, and waits for none of it."""
    npu.release()
    device.reset()
    before = device.counter("peak_device_bytes")
    with session.session_on(0).call() as here:
        for _ in range(10):
            here.copied(here.copied(here.put(np.ones(1 << 18, np.float32))))
            here.workspace(1 << 20)
        assert device.counter("synchronizations") == 0
    assert device.counter("mallocs") == 2
    assert device.counter("peak_device_bytes") - before <= 2 * ((1 << 20) + (1 << 17))


def test_release_and_the_end_of_a_thread(device):
    npu.release()
    before = device.live()

    def work():
        ag.softmax(X, backend="npu")
        assert device.live()["streams"] == before.get("streams", 0) + 1

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert device.live() == before
    ag.softmax(X, backend="npu")
    assert device.live() != before
    npu.release()
    assert device.live() == before


def test_forgotten_arrays_are_used_again(device):
    array = npu.asarray(X)
    del array
    gc.collect()
    device.reset()
    array = npu.asarray(X)
    assert device.counter("mallocs") == 0
    before = device.live()["device_allocations"]
    thread = threading.Thread(target=lambda arrays: arrays.clear(), args=([array],))
    del array
    thread.start()
    thread.join()
    npu.release()
    assert device.live().get("device_allocations", 0) < before


def test_a_subclass_takes_a_large_result(device):
    x = np.zeros((600, 1000), np.float32)
    out = x.copy().view(Noted)
    assert ag.softmax(x, out=out, backend="npu") is out
    np.testing.assert_allclose(np.asarray(out), 1e-3, rtol=1e-6)


def test_sets_that_other_threads_change():
    class Member:
        pass

    members: weakref.WeakSet[Member] = weakref.WeakSet()
    kept = [Member() for _ in range(200)]
    for member in kept:
        members.add(member)
    over = threading.Event()

    def change():
        while not over.is_set():
            members.add(Member())

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=change) for _ in range(3)]
    try:
        for thread in threads:
            thread.start()
        for _ in range(300):
            assert len(members_of(members)) >= len(kept)
    finally:
        over.set()
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("operator", [*OPERATORS, GRADIENT, STATISTICS, LOSS])
def test_inputs_are_sent_as_they_are(operator, dtype, device):
    """Each input is sent in its own dtype, and the mask of the vocabulary as bits."""
    if operator in OPERATORS:
        problem = random_problem(operator, (1, 2, 3, 5) if operator in MASKED else (3, 7), np.dtype(dtype))
        args, kwargs = problem.arrays, dict(problem.settings)
        sent = sum(array.nbytes for array in args)
        outs = [np.empty(args[0].shape, np.float16)] if dtype == "float32" else []
    else:
        settings = {"mode": "recomputed"} if operator == GRADIENT else {}
        args, kwargs = (), dict(problem_of(operator, (16, 130, 4), "float16", **settings).arguments)
        if "grad" in kwargs:
            kwargs["grad"] = np.ones_like(kwargs["grad"])
        arrays = {name: value for name, value in kwargs.items() if isinstance(value, np.ndarray)}
        sent = sum(2 if name == "target_mask" else array.nbytes for name, array in arrays.items())
        outs = []
    for out in (None, *outs):
        device.reset()
        getattr(ag, operator)(*args, **kwargs, **({} if out is None else {"out": out}), backend="npu")
        assert device.counter("bytes_h2d") == sent


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_targets_are_sent_in_their_dtype(dtype, device):
    """Targets of losses go to the device in the caller's dtype, among them the rest of those with ignored rows."""
    rows, entries, features = 16, 130, 4
    input, weight = np.ones((rows, features), np.float16), np.ones((entries, features), np.float16)
    target, lse = np.arange(rows, dtype=dtype), np.full(rows, 9, np.float32)
    device.reset()
    ag.linear_cross_entropy_backward(input, weight, target, lse=lse, grad_loss=1.0, backend="npu")
    mask = 2
    assert device.counter("bytes_h2d") == input.nbytes + weight.nbytes + target.nbytes + 3 * lse.nbytes + mask
    device.reset()
    ag.linear_cross_entropy(input, weight, np.where(target == 3, -100, target), backend="npu")
    sent = input.nbytes + weight.nbytes + target.nbytes + lse.nbytes
    assert device.counter("bytes_h2d") == sent - (2 * features + target.itemsize + lse.itemsize)  # of the ignored row
