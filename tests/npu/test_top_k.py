"""Test the largest log-probabilities on the device: values of the reference for random problems, ties and memory."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from ml_dtypes import bfloat16
from top_k_problems import check, in_rows, on_the_host, random_arguments

import ascend_grad as ag
from ascend_grad import npu
from ascend_grad.backends.ascend import top_k

NAME = "linear_top_k"


def on_device(arguments: dict) -> dict:
    taken = {np.dtype(np.float64): np.float32}
    return {
        name: npu.asarray(value.astype(taken.get(value.dtype, value.dtype))) if isinstance(value, np.ndarray) else value
        for name, value in arguments.items()
    }


@pytest.fixture
def small_blocks(monkeypatch):
    """Let blocks have at most 16 rows, and fewer columns for more rows: 255 for 4 of them."""
    monkeypatch.setattr(top_k, "LOGIT_BYTES", 1 << 16)


@pytest.mark.parametrize("seed", range(400))
def test_random_problems(seed, device, request):
    if seed % 2:
        request.getfixturevalue("small_blocks")
    arguments = random_arguments(seed)
    assert ag.explain(NAME, **arguments).backend == "npu"
    check(ag.linear_top_k(**arguments), arguments)
    arguments = in_rows(arguments)
    results = ag.linear_top_k(**on_device(arguments))
    assert all(isinstance(each, npu.DeviceArray) for each in results)
    check(results, arguments)


def test_blocks_of_rows_and_columns(device):
    """Ties pass from one block to the next, in a workspace of the least size."""
    rng = np.random.default_rng(0)
    x, w = rng.integers(-2, 3, (400, 3)).astype(bfloat16), rng.integers(-2, 3, (3000, 3)).astype(bfloat16)
    arguments = {"input": x, "weight": w, "k": 100, "temperature": 1.5, "workspace_bytes": 4 << 20}
    device.reset()
    check(ag.linear_top_k(**arguments), arguments)
    assert device.calls("aclnnMm") > 4


@pytest.mark.parametrize("excluded", [slice(0, 600), slice(300, None), slice(0, 700)])
def test_blocks_of_excluded_entries(excluded, device, rng, small_blocks):
    arguments = {"input": rng.standard_normal((5, 3)).astype(np.float32), "k": 6, "bias": np.zeros(700, np.float32)}
    arguments["weight"] = rng.integers(-2, 3, (700, 3)).astype(np.float32)
    arguments["bias"][excluded] = -np.inf
    check(ag.linear_top_k(**arguments), arguments)


@pytest.mark.parametrize("dtype", [np.float32, bfloat16])
def test_memory_is_bounded(dtype, device):
    """The memory of the device holds the operands and a few blocks, whatever the number of logits is."""
    x, w = np.zeros((200, 2), dtype), np.zeros((20_000, 2), dtype)
    device.set_memory(x.nbytes + w.nbytes + (8 << 20))
    try:
        index = ag.linear_top_k(x, w, 2, workspace_bytes=4 << 20, backend="npu").index
    finally:
        npu.release()
        device.set_memory(1 << 30)
    assert np.all(index == [0, 1])


def test_memory_of_long_rows(device, rng):
    """Blocks are narrower than k where a few entries of the weight in float32 fill the workspace."""
    x, w = (rng.integers(-1, 2, (rows, 16_384)).astype(np.float16) for rows in (4, 400))
    arguments = {"input": x, "weight": w, "k": 128, "workspace_bytes": 4 << 20}
    npu.release()
    device.reset()
    before = device.counter("device_bytes")
    check(ag.linear_top_k(**arguments), arguments)
    assert device.counter("peak_device_bytes") - before <= x.nbytes + w.nbytes + (6 << 20)


def test_the_memory_is_full(device):
    """A call fails if its blocks do not fit, and releases what it had."""
    x, w = np.zeros((200, 2), np.float16), np.zeros((3000, 2), np.float16)
    npu.release()
    device.set_memory(1 << 20)
    try:
        with pytest.raises(ag.AclError) as info:
            ag.linear_top_k(x, w, 2, backend="npu")
    finally:
        device.set_memory(1 << 30)
    assert info.value.code in (207001, 207018)
    assert np.all(ag.linear_top_k(x, w, 2, backend="npu").index == [0, 1])


def test_a_tie_alone_needs_a_second_top_k(device, rng):
    x, w = rng.standard_normal((3, 4)).astype(np.float32), rng.standard_normal((50, 4)).astype(np.float32)
    for k, is_tied in ((5, False), (50, True), (3, True)):
        device.reset()
        if is_tied:
            w = np.ones_like(w)
        assert ag.linear_top_k(x, w, k).index.shape == (3, k)
        assert device.calls("aclnnTopk") == 1 + (is_tied and k < 50)


def test_no_logits_pass_through_the_host(device, rng):
    """For each row, only k logits with their places are copied to the host, and its largest logit to the device."""
    x, w = (npu.asarray(rng.integers(-1, 2, shape).astype(np.float16)) for shape in ((8, 4), (5000, 4)))
    device.reset()
    ag.linear_top_k(x, w, 3)
    assert device.counter("bytes_d2h") <= 8 * 64 * 3
    assert device.counter("bytes_h2d") <= 8 * 64 * 3 + 5000 * 4  # the factors that make keys


def test_empty(device):
    for shape in ((0, 3), (2, 0)):
        x, w = np.zeros(shape, np.float16), np.zeros((5, shape[1]), np.float16)
        for given in ((x, w), (npu.asarray(x), npu.asarray(w))):
            log_prob, index = (on_the_host(each) for each in ag.linear_top_k(*given, 2, backend="npu"))
            assert (log_prob.shape, index.shape) == ((shape[0], 2), (shape[0], 2))
            assert np.allclose(log_prob, -np.log(5))
            assert np.all(index == [0, 1])


@pytest.mark.parametrize("soc", ["Ascend910A", "Ascend310P3", "Ascend310B1"])
def test_systems_without_products_of_float32(soc, device, monkeypatch):
    monkeypatch.setitem(npu.runtime.found, "state", npu.runtime.state()._replace(soc=soc))
    x = np.eye(4, dtype=np.float32)
    choice = ag.explain(NAME, x, x, 2)
    assert choice.backend == "cpu"
    assert "the operator exists only on 910B, 910_93, 950" in choice.reason
    with pytest.raises(ag.UnsupportedDeviceError):
        ag.linear_top_k(x, x, 2, backend="npu")


def test_float64_stays_on_the_cpu(device):
    x = np.eye(4)
    choice = ag.explain(NAME, x, x, 2)
    assert choice.backend == "cpu"
    assert "input: the device supports dtype float32 or float16 or bfloat16, got float64" in choice.reason
    with pytest.raises(ag.ParamTypeError):
        ag.linear_top_k(x, x, 2, backend="npu")


@pytest.mark.parametrize("is_on_device", [False, True])
def test_faults_at_every_call(is_on_device, device, rng, small_blocks):
    """A failure of any call of the device raises, leaves the arguments as they were, and loses nothing."""
    arguments = {
        "input": rng.integers(-1, 2, (6, 3)).astype(np.float16),
        "weight": rng.integers(-1, 2, (300, 3)).astype(np.float16),
        "bias": np.zeros(300, np.float32),
        "temperature": np.full(6, 0.5, np.float32),
    }
    arguments |= {"k": 4, "softcap": 3.0}
    given = on_device(arguments) if is_on_device else arguments
    expected = [on_the_host(each) for each in ag.linear_top_k(**given)]
    check(expected, arguments)
    device.reset()
    ag.linear_top_k(**given)
    calls = device.calls()
    for nth in range(1, calls + 1):
        device.fail("*", nth)
        with contextlib.suppress(ag.AclError):
            ag.linear_top_k(**given, backend="npu")
        device.reset()
        for result, right in zip(ag.linear_top_k(**given, backend="npu"), expected, strict=True):
            assert np.array_equal(on_the_host(result), right)


def test_the_workspace_is_that_of_one_block(device, rng, small_blocks):
    x, w = np.zeros((4, 2), np.float16), np.zeros((2048, 2), np.float16)
    sizes = [ag.workspace_size(NAME, x, w[:entries], 2, backend="npu") for entries in (256, 512, 2048)]
    assert sizes[0] > 0
    assert len({*sizes}) == 1
