"""Test the results of the test double's operators, and the differences of these results from the contract."""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import pytest
from acl_client import broken, softmax

BF16 = ml_dtypes.bfloat16

FLOATS = (np.float32, np.float16, BF16)

EPS = {np.float32: 1e-6, np.float16: 1e-3, BF16: 8e-3}


# ---- arithmetic ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("shape", "axis"), [((7,), 0), ((3, 5), -1), ((3, 5), 0), ((2, 3, 4), 1)])
def test_softmax_family(acl, rng, dtype, shape, axis) -> None:
    x, g = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    g64, y64 = g.astype(float), softmax(x.astype(float), axis)
    y, log_y = y64.astype(dtype), np.log(y64).astype(dtype)
    yr, lr = y.astype(float), log_y.astype(float)
    out = np.empty_like(x)
    for name, arguments, expected in (
        ("Softmax", (x,), y64),
        ("LogSoftmax", (x,), np.log(y64)),
        ("SoftmaxBackward", (g, y), (g64 - (g64 * yr).sum(axis, keepdims=True)) * yr),
        ("LogSoftmaxBackward", (g, log_y), g64 - g64.sum(axis, keepdims=True) * np.exp(lr)),
    ):
        result = acl.compute(name, *arguments, axis, out)[-1].astype(float)
        np.testing.assert_allclose(result, expected, rtol=2 * EPS[dtype], atol=2 * EPS[dtype], err_msg=name)


@pytest.mark.parametrize("dtype", FLOATS)
def test_scaled_masked_softmax(acl, rng, dtype) -> None:
    x, g = (rng.standard_normal((2, 3, 4, 8)).astype(dtype) for _ in range(2))
    mask = rng.random((1, 3, 4, 8)) < 0.4
    mask[0, 0, 0] = True  # every element of this row is masked
    x64, g64, out = x.astype(float), g.astype(float), np.empty_like(x)
    expected = softmax(np.where(mask, -10000, x64 * 0.37))
    result = acl.compute("ScaledMaskedSoftmax", x, mask, 0.37, False, out)[-1].astype(float)
    np.testing.assert_allclose(result, expected, rtol=4 * EPS[dtype], atol=EPS[dtype])
    y = expected.astype(dtype)
    y64 = y.astype(float)
    expected = np.where(mask, 0, (g64 - (g64 * y64).sum(-1, keepdims=True)) * y64 * 0.37)
    result = acl.compute("ScaledMaskedSoftmaxBackward", g, y, mask, 0.37, False, out)[-1].astype(float)
    np.testing.assert_allclose(result, expected, rtol=4 * EPS[dtype], atol=EPS[dtype])


def problem(rng, BT=11, V=130, H=6, dtype=np.float16) -> dict[str, np.ndarray]:
    """Return arguments of the fused operators, and their results in float64."""
    input, weight = (rng.standard_normal(shape).astype(dtype) for shape in ((BT, H), (V, H)))
    target = rng.integers(0, 2 * V, BT)
    masked = target >= V
    logits = input.astype(float) @ weight.astype(float).T
    largest = logits.max(-1)
    P = np.exp(logits - largest[:, None])
    total = P.sum(-1)
    P /= total[:, None]
    local = np.where(masked, 0, target)
    grad = rng.standard_normal(BT).astype(np.float32)
    tile = P.copy()
    tile[np.arange(BT), local] -= ~masked
    tile *= grad[:, None].astype(float)
    predicted = np.where(masked, 0, logits[np.arange(BT), local] - largest)
    return locals()


@pytest.mark.parametrize("dtype", [np.float16, BF16])
@pytest.mark.parametrize("stored", [True, False])
def test_fused_gradient(acl, rng, dtype, stored) -> None:
    p = problem(rng, dtype=dtype)
    out = np.empty_like(p["input"]), np.empty_like(p["weight"])
    bits, P = np.packbits(p["masked"], bitorder="little"), p["P"].astype(np.float32)
    mode = (None, None, P) if stored else (p["largest"].astype(np.float32), p["total"].astype(np.float32), None)
    results = acl.compute(
        "FusedLinearCrossEntropyLossGrad", p["grad"], p["input"], p["weight"], bits, p["local"], 0.0, *mode, *out
    )
    tolerance = 30 * EPS[dtype]
    np.testing.assert_allclose(results[-2].astype(float), p["tile"] @ p["weight"].astype(float), atol=tolerance)
    np.testing.assert_allclose(results[-1].astype(float), p["tile"].T @ p["input"].astype(float), atol=tolerance)
    if stored:  # the operator overwrites its argument with the tile
        np.testing.assert_allclose(results[5], p["tile"], atol=1e-6)


def test_online_max_sum_and_loss(acl, rng) -> None:
    p = problem(rng)
    column = np.empty(len(p["target"]), np.float32)
    outputs = column, column, column, np.empty(2, np.uint8), p["target"], np.empty_like(p["P"], np.float16)
    *_, largest, total, predicted, bits, local, logits = acl.compute(
        "FusedLinearOnlineMaxSum", p["input"], p["weight"], p["target"], 0, 130, *outputs
    )
    np.testing.assert_allclose(largest, p["largest"], rtol=1e-3)
    np.testing.assert_allclose(total, p["total"], rtol=1e-2)
    np.testing.assert_allclose(predicted, p["predicted"], atol=1e-2)
    np.testing.assert_allclose(logits.astype(float), p["logits"], rtol=1e-3, atol=1e-3)
    np.testing.assert_array_equal(local, p["local"])
    np.testing.assert_array_equal(np.unpackbits(bits, bitorder="little")[:11], p["masked"])
    assert np.all(np.unpackbits(bits, bitorder="little")[11:]), "the device leaves the bits after the last row dirty"
    loss, P = acl.compute(
        *("FusedCrossEntropyLossWithMaxSum", largest, total, predicted, 0.0),
        *(None, None, logits, column, np.empty_like(p["P"], np.float32)),
    )[-2:]
    np.testing.assert_allclose(loss, np.log(p["total"]) - p["predicted"], atol=2e-2)
    np.testing.assert_allclose(P, p["P"], atol=1e-2)


def test_any_strides(acl, rng) -> None:
    storage = rng.standard_normal(64).astype(np.float32)
    x, address, out = acl.to_device(storage), acl.malloc(48), np.empty((4, 3), np.float32)
    view = np.lib.stride_tricks.as_strided(storage[5:], (4, 3), (4 * 2, 4 * 13))
    self = acl.tensor(x, (4, 3), np.float32, strides=(2, 13), offset=5, storage=(64,))
    stream = acl.stream()
    acl.launch("Softmax", self, 0, acl.tensor(address, (4, 3), np.float32), stream=stream)
    acl.check("aclrtSynchronizeStream", stream)
    np.testing.assert_allclose(acl.read(address, out), softmax(view, 0), rtol=1e-6)


def test_every_half_precision_value_survives(acl) -> None:
    """The log-softmax gradient of a single element with probability 0 is the element itself."""
    for dtype in (np.float16, BF16):
        values = np.arange(1 << 16, dtype=np.uint16).view(dtype)[:, None]
        with np.errstate(invalid="ignore"):  # on aarch64 NumPy warns of casts of signalling NaNs
            finite = np.isfinite(values.astype(np.float32))
        values = values[finite][:, None]
        never = np.full_like(values, -np.inf)
        result = acl.compute("LogSoftmaxBackward", values, never, -1, values)[-1]
        np.testing.assert_array_equal(result.view(np.uint16), values.view(np.uint16))


# ---- differences between the device and the contract -----------------------------------------------------------------


def test_quirk_empty_gradient_leaves_results_unwritten(acl, double) -> None:
    zero = np.zeros
    results = acl.compute(
        *("FusedLinearCrossEntropyLossGrad", zero(0, np.float32), zero((0, 3), np.float16), zero((130, 3), np.float16)),
        *(zero(0, np.uint8), zero(0, np.int64), 0.0, zero(0, np.float32), zero(0, np.float32), None),
        *(zero((0, 3), np.float16), np.ones((130, 3), np.float16)),
    )
    assert np.all(results[-1] == 1)


def test_quirk_absent_rows_spread_nan(acl, rng) -> None:
    p = problem(rng)
    p["grad"][:] = 0
    p["largest"][0] = np.nan
    results = acl.compute(
        *("FusedLinearCrossEntropyLossGrad", p["grad"], p["input"], p["weight"], np.zeros(2, np.uint8), p["local"]),
        *(0.0, p["largest"].astype(np.float32), p["total"].astype(np.float32), None),
        *(np.empty_like(p["input"]), np.empty_like(p["weight"])),
    )
    assert np.isnan(results[-2][0].astype(float)).all()
    assert np.isnan(results[-1].astype(float)).all()


def test_quirk_ids_are_compared_as_float32(acl) -> None:
    ids = np.array([2**24, 2**24 + 1])
    column = np.empty(2, np.float32)
    *_, bits, _ = acl.compute(
        *("FusedLinearOnlineMaxSum", np.zeros((2, 1), np.float16), np.zeros((4, 1), np.float16), ids),
        *(2**24, 2**24 + 1, column, column, column, np.empty(1, np.uint8), ids, None),
    )
    assert bits[0] & 3 == 3  # 2**24 + 1 rounds to 2**24 in float32, so that the range of ids is empty


def test_quirk_targets_are_not_checked(acl, double, rng) -> None:
    p = problem(rng)
    p["local"][3] = 130
    acl.compute(
        *("FusedLinearCrossEntropyLossGrad", p["grad"], p["input"], p["weight"], np.zeros(2, np.uint8), p["local"]),
        *(0.0, p["largest"].astype(np.float32), p["total"].astype(np.float32), None),
        *(np.empty_like(p["input"]), np.empty_like(p["weight"])),
    )
    broken(double, "target 130 of row 3 is not in [0, 130)")


def test_quirk_softmax_gradient_overflows_in_its_own_form(acl) -> None:
    g, y = np.array([[3e38, 3e38]], np.float32), np.array([[4.0, 0.0]], np.float32)
    result = acl.compute("SoftmaxBackward", g, y, -1, y)[-1]
    assert np.isnan(result).any()  # the device computes inf - inf, the contract (g - s) * y = inf


def test_quirk_out_of_another_dtype_is_relabelled(acl, double, rng) -> None:
    g, y = (rng.random((1, 1, 2, 4)).astype(np.float16) for _ in range(2))
    mask = np.zeros((1, 1, 2, 4), bool)
    right = acl.compute("ScaledMaskedSoftmaxBackward", g, y, mask, 1.0, False, np.empty_like(g))[-1]
    wrong = acl.compute("ScaledMaskedSoftmaxBackward", g, y, mask, 1.0, False, np.empty_like(g, BF16))[-1]
    np.testing.assert_array_equal(right.view(np.uint16), wrong.view(np.uint16))
    broken(double, "out is BF16, the result is FLOAT16")


# ---- misuse of numbers and pointers ----------------------------------------------------------------------------------


def test_swapped_arguments_give_another_result(acl, rng) -> None:
    g, y = (rng.standard_normal((2, 3)).astype(np.float32) for _ in range(2))
    right, wrong = (acl.compute("LogSoftmaxBackward", *pair, -1, g)[-1] for pair in ((g, y), (y, g)))
    assert np.abs(right - wrong).max() > 0.1


def test_scale_passed_as_a_float_gives_another_result(acl, rng) -> None:
    x, mask = rng.random((1, 1, 2, 4)).astype(np.float32), np.zeros((1, 1, 2, 4), bool)
    right = acl.compute("ScaledMaskedSoftmax", x, mask, 3.0, False, x)[-1]
    phase_1 = acl.aclnnScaledMaskedSoftmaxGetWorkspaceSize
    declared = phase_1.argtypes
    phase_1.argtypes = [ctypes.c_float if each is ctypes.c_double else each for each in declared]
    try:
        wrong = acl.compute("ScaledMaskedSoftmax", x, mask, 3.0, False, x)[-1]
    finally:
        phase_1.argtypes = declared
    assert np.abs(right - wrong).max() > 0.01


# ---- work that fails later -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wait", ["aclrtSynchronizeStream", "aclrtSynchronizeDevice"])
def test_work_that_fails_is_told_by_the_next_wait(acl, double, rng, wait) -> None:
    x = rng.standard_normal((3, 8)).astype(np.float32)
    streams = [acl.stream(), acl.stream()]
    double.fail_work(2, 507015)
    outs = []
    for stream in (streams[0], streams[0], streams[1]):
        outs.append(acl.to_device(np.zeros_like(x)))
        acl.launch("Softmax", acl.put(x), -1, acl.tensor(outs[-1], x.shape, x.dtype), stream=stream)
        if stream == streams[0] and len(outs) == 2:
            assert acl.aclrtSynchronizeStream(streams[1]) == 0
    assert getattr(acl, wait)(*streams[: wait.endswith("Stream")]) == 507015
    assert b"a fault was injected here" in acl.aclGetRecentErrMsg()
    for stream in streams:
        acl.check("aclrtSynchronizeStream", stream)
    acl.check("aclrtSynchronizeDevice")
    assert [acl.read(out, x).any() for out in outs] == [True, False, True]
    assert double.faults_left() == 0
