"""The test double of an Ascend device, by itself: it computes what the operators mean, and it catches misuse.

What is shown here is that tests over it can fail: each rule of the device is broken once, on purpose.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import stand_in
from acl_client import D2D, D2H, H2D, H2H, Acl, StatusError
from device_limits import KERNELS, SYSTEMS, takes
from linear_samples import GRADIENT, LOSS, STATISTICS

BF16 = ml_dtypes.bfloat16
FLOATS = (np.float32, np.float16, BF16)
EPS = {np.float32: 1e-6, np.float16: 1e-3, BF16: 8e-3}


@pytest.fixture(scope="module")
def _library() -> tuple[stand_in.StandIn, Acl]:
    path = stand_in.build_alone()
    return stand_in.StandIn(path), Acl(path)


@pytest.fixture
def double(_library) -> Iterator[stand_in.StandIn]:
    """The control interface; afterwards nothing is left of what the test made."""
    control, acl = _library
    control.reset()
    control.set_delay(0)
    control.set_soc("Ascend910B2")
    control.set_memory(1 << 30)
    if control.counter("initialisations") == 0:
        assert acl.aclInit(None) == 0
    assert acl.aclrtSetDevice(0) == 0
    yield control
    control.reset()
    acl.aclrtSetDevice(0)
    acl.clear()
    assert control.live() == {}


@pytest.fixture
def acl(double, _library) -> Acl:
    return _library[1]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(1)


def broken(double: stand_in.StandIn, words: str) -> None:
    """Exactly one rule was broken, and the record says so."""
    violations = double.violations()
    assert len(violations) == 1, violations
    assert words in violations[0]


def in_thread(function) -> None:
    """Run on a thread of its own; what fails there fails here."""
    errors = []

    def guarded() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("shape", "dim"), [((7,), 0), ((3, 5), -1), ((3, 5), 0), ((2, 3, 4), 1)])
def test_softmax_family(acl, rng, dtype, shape, dim) -> None:
    x, g = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    g64, y64 = g.astype(float), softmax(x.astype(float), dim)
    y, log_y = y64.astype(dtype), np.log(y64).astype(dtype)
    yr, lr = y.astype(float), log_y.astype(float)
    out = np.empty_like(x)
    for name, arguments, expected in (
        ("Softmax", (x,), y64),
        ("LogSoftmax", (x,), np.log(y64)),
        ("SoftmaxBackward", (g, y), (g64 - (g64 * yr).sum(dim, keepdims=True)) * yr),
        ("LogSoftmaxBackward", (g, log_y), g64 - g64.sum(dim, keepdims=True) * np.exp(lr)),
    ):
        result = acl.compute(name, *arguments, dim, out)[-1].astype(float)
        np.testing.assert_allclose(result, expected, rtol=2 * EPS[dtype], atol=2 * EPS[dtype], err_msg=name)


@pytest.mark.parametrize("dtype", FLOATS)
def test_scaled_masked_softmax(acl, rng, dtype) -> None:
    x, g = (rng.standard_normal((2, 3, 4, 8)).astype(dtype) for _ in range(2))
    mask = rng.random((1, 3, 4, 8)) < 0.4
    mask[0, 0, 0] = True  # a row that is masked as a whole
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
    """Arguments of the fused operators, and what comes out of them in float64."""
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
    if stored:  # the argument is destroyed: it holds the tile now
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
    """A row of one element each: its log-softmax gradient with probability 0 is the row itself, rounded once."""
    for dtype in (np.float16, BF16):
        values = np.arange(1 << 16, dtype=np.uint16).view(dtype)[:, None]
        values = values[np.isfinite(values.astype(np.float32))][:, None]
        never = np.full_like(values, -np.inf)
        result = acl.compute("LogSoftmaxBackward", values, never, -1, values)[-1]
        np.testing.assert_array_equal(result.view(np.uint16), values.view(np.uint16))


# ---- what the device does differently --------------------------------------------------------------------------------


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
    assert bits[0] & 3 == 3  # 2**24 + 1 is 2**24 in float32, so that the range is empty


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
    assert np.isnan(result).any()  # Inf - Inf, where (g - s)*y is Inf


def test_quirk_out_of_another_dtype_is_relabelled(acl, double, rng) -> None:
    g, y = (rng.random((1, 1, 2, 4)).astype(np.float16) for _ in range(2))
    mask = np.zeros((1, 1, 2, 4), bool)
    right = acl.compute("ScaledMaskedSoftmaxBackward", g, y, mask, 1.0, False, np.empty_like(g))[-1]
    wrong = acl.compute("ScaledMaskedSoftmaxBackward", g, y, mask, 1.0, False, np.empty_like(g, BF16))[-1]
    np.testing.assert_array_equal(right.view(np.uint16), wrong.view(np.uint16))
    broken(double, "out is BF16, the result is FLOAT16")


# ---- checks of the first phase ---------------------------------------------------------------------------------------


def code_of(acl: Acl, name: str, *arguments) -> int:
    """The code of the first phase for these arguments, arrays as tensors."""
    code, _, _ = acl.prepare(name, *(acl.put(a) if isinstance(a, np.ndarray) else a for a in arguments))
    return code


def z(*shape: int, dtype=np.float16) -> np.ndarray:
    return np.zeros(shape, dtype)


@pytest.mark.parametrize("name", ["SoftmaxBackward", "LogSoftmaxBackward"])
def test_checks_of_softmax_gradients(acl, double, name) -> None:
    assert code_of(acl, name, z(2, 3), None, -1, z(2, 3)) == 161001
    assert code_of(acl, name, z(2, 3), z(2, 3, dtype=np.float32), -1, z(2, 3)) == 161002
    assert code_of(acl, name, *[z(2, 3, dtype=np.float64)] * 2, -1, z(2, 3, dtype=np.float64)) == 161002
    assert code_of(acl, name, z(2, 3), z(2, 3), 2, z(2, 3)) == 161002
    assert code_of(acl, name, z(2, 3), z(3, 3), 1, z(2, 3)) == 161002
    assert code_of(acl, name, z(2, 3), z(2, 3), -3, z(2, 3)) == 161002
    assert code_of(acl, name, z(), z(), -1, z()) == 0
    assert code_of(acl, name, z(0, 3), z(7), 9, z(2, 3)) == 0  # an empty tensor is not looked at any further
    assert code_of(acl, name, *[z(2, dtype=BF16)] * 2, 0, z(2, dtype=BF16)) == 0
    double.set_soc("Ascend310P3")
    assert code_of(acl, name, *[z(2, dtype=BF16)] * 2, 0, z(2, dtype=BF16)) == 161002
    assert double.violations() == []


@pytest.mark.parametrize("backward", [False, True])
def test_checks_of_scaled_masked_softmax(acl, double, backward) -> None:
    name = "ScaledMaskedSoftmaxBackward" if backward else "ScaledMaskedSoftmax"

    def code(shape=(1, 2, 3, 4), mask=(1, 1, 3, 4), mask_dtype=np.bool_, fix=False, dtype=np.float16, out=None) -> int:
        floats = [z(*shape, dtype=dtype)] * (1 + backward)
        result = z(*(shape if out is None else out), dtype=dtype)
        return code_of(acl, name, *floats, z(*mask, dtype=mask_dtype), 1.0, fix, result)

    assert code() == 0
    assert code(mask_dtype=np.uint8) == 161002
    assert code(mask=(1, 3, 3, 4)) == 161002
    assert code(mask=(1, 2, 1, 4)) == 161002
    assert code(shape=(2, 3, 4), mask=(2, 3, 4)) == 161002
    assert code(shape=(1, 2, 3, 0), mask=(1, 2, 3, 0)) == 161002
    assert code(out=(1, 2, 3, 5)) == 161002
    assert code(fix=True) == 161002
    assert code(shape=(1, 1, 1, 4096), mask=(1, 1, 1, 4096)) == 0
    assert code(shape=(1, 1, 1, 4097), mask=(1, 1, 1, 4097)) == 161002
    double.set_soc("Ascend950PR_9589")
    assert code(shape=(1, 1, 1, 8192), mask=(1, 1, 1, 8192)) == 0
    double.set_soc("Ascend310P3")
    assert code() == (0 if backward else 561003)
    assert code(dtype=BF16) == 161002
    double.set_soc("Ascend910A")
    assert code() == 561003
    assert double.violations() == []


def gradient_arguments(BT=3, V=130, H=2, stored=False, dtype=np.float16, **changes) -> tuple:
    column = z(BT, dtype=np.float32)
    values = {
        "grad": column,
        "input": z(BT, H, dtype=dtype),
        "weight": z(V, H, dtype=dtype),
        "mask": z((BT + 7) // 8, dtype=np.uint8),
        "target": z(BT, dtype=np.int64),
        "smoothing": 0.0,
        "largest": None if stored else column,
        "total": None if stored else column,
        "softmax": z(BT, V, dtype=np.float32) if stored else None,
        "input_grad": z(BT, H, dtype=dtype),
        "weight_grad": z(V, H, dtype=dtype),
    }
    return tuple((values | changes).values())


def test_checks_of_the_fused_gradient(acl, double) -> None:
    def code(**settings) -> int:
        return code_of(acl, "FusedLinearCrossEntropyLossGrad", *gradient_arguments(**settings))

    assert code() == 0
    assert code(stored=True) == 0
    assert code(total=None) == 161001
    assert code(weight=None) == 161001
    assert code(dtype=np.float32) == 161002
    assert code(mask=z(3, dtype=np.bool_)) == 161002
    assert code(BT=9, mask=z(1, dtype=np.uint8)) == 161002
    assert code(smoothing=0.1) == 161002
    assert code(grad=z(4, dtype=np.float32)) == 161002
    assert code(weight=z(130, 2, dtype=BF16)) == 161002
    assert code(V=127) == 0
    assert code(V=127, stored=True) == 161002
    assert code(BT=1, H=1, V=24560, stored=True) == 0
    assert code(BT=1, H=1, V=24561, stored=True) == 561103
    assert code(BT=65537, H=1, V=128, dtype=np.float16) == 0
    assert code(BT=1, H=65535) == 0
    assert code(BT=1, H=65536) == 561103
    double.set_soc("Ascend910_9391")
    assert code() == 0
    for soc in ("Ascend310P3", "Ascend950PR_9589", "Ascend910A"):
        double.set_soc(soc)
        assert code() == 361001
    assert double.violations() == []


def test_checks_of_online_max_sum(acl, double) -> None:
    def code(BT=3, V=4, H=2, start=0, end=4, dtype=np.float16, target=np.int64, mask=1, logits=None) -> int:
        column, ids = z(BT, dtype=np.float32), z(BT, dtype=target)
        outputs = column, column, column, z(mask, dtype=np.uint8), ids, logits
        inputs = z(BT, H, dtype=dtype), z(V, H, dtype=dtype), ids
        return code_of(acl, "FusedLinearOnlineMaxSum", *inputs, start, end, *outputs)

    assert code() == 0
    assert code(target=np.int32) == 0
    assert code(logits=z(3, 4)) == 0
    assert code(logits=z(3, 5)) == 161002
    assert code(logits=z(3, 4, dtype=np.float32)) == 161002
    assert code(dtype=np.float32) == 161002
    assert code(target=np.float32) == 161002
    assert code(mask=2) == 161002
    assert code(V=0, end=0) == 161002
    assert code(start=-1) == 161002
    assert code(start=3, end=2) == 161002
    assert code(end=5) == 161002
    assert code(BT=1, V=1, H=65535, end=1) == 161002
    double.set_soc("Ascend950PR_9589")
    assert code() == 561003
    assert double.violations() == []


def test_checks_of_the_loss(acl, double) -> None:
    def code(BT=3, smoothing=0.0, logits=None, softmax=None, total=None) -> int:
        column = z(BT, dtype=np.float32)
        inputs = column, column if total is None else total, column
        return code_of(acl, "FusedCrossEntropyLossWithMaxSum", *inputs, smoothing, None, None, logits, column, softmax)

    assert code() == 0
    assert code(logits=z(3, 4), softmax=z(3, 4, dtype=np.float32)) == 0
    assert code(logits=z(3, 4)) == 161001
    assert code(logits=z(3, 4), softmax=z(3, 4)) == 161002
    assert code(total=z(4, dtype=np.float32)) == 161002
    assert code(smoothing=0.5) == 161002
    assert code(BT=0) == 561002
    double.set_soc("Ascend310P3")
    assert code() == 561003
    assert double.violations() == []


@pytest.mark.parametrize("soc", [soc for names in SYSTEMS.values() for soc in names])
def test_what_each_system_has(acl, double, soc) -> None:
    """Every operator, with bfloat16 and without: a kernel, or the code that says there is none."""
    family = next(family for family, names in SYSTEMS.items() if soc in names)
    double.set_soc(soc)
    for dtype in (np.float16, BF16):
        x, square, mask = z(2, 3, dtype=dtype), z(1, 1, 2, 2, dtype=dtype), z(1, 1, 2, 2, dtype=np.bool_)
        column, ids = z(3, dtype=np.float32), z(3, dtype=np.int64)
        h, bits = z(3, 2, dtype=dtype), z(1, dtype=np.uint8)
        calls = {
            "softmax": (x, -1, x),
            "log_softmax": (x, -1, x),
            "softmax_backward": (x, x, -1, x),
            "log_softmax_backward": (x, x, -1, x),
            "scaled_masked_softmax": (square, mask, 1.0, False, square),
            "scaled_masked_softmax_backward": (square, square, mask, 1.0, False, square),
            GRADIENT: gradient_arguments(dtype=dtype),
            STATISTICS: (h, h, ids, 0, 3, column, column, column, bits, ids, None),
            LOSS: (column, column, column, 0.0, None, None, z(3, 4, dtype=dtype), column, z(3, 4, dtype=np.float32)),
        }
        for operator, arguments in calls.items():
            code = code_of(acl, KERNELS[operator][0][0], *arguments)
            if takes(family, operator, np.dtype(dtype).name):
                assert code == 0, operator
            elif operator == GRADIENT:
                assert code == 361001
            elif dtype == BF16 and family not in ("910B", "910_93", "950"):  # dtypes are looked at first
                assert code == 161002, operator
            else:
                assert code == 561003, operator
    assert double.violations() == []


# ---- misuse: of numbers and pointers ---------------------------------------------------------------------------------


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


def test_label_smoothing_passed_as_a_double_is_refused(acl) -> None:
    arguments = [acl.put(a) if isinstance(a, np.ndarray) else a for a in gradient_arguments()]
    arguments[5] = ctypes.c_double(0.1)
    phase_1 = acl.aclnnFusedLinearCrossEntropyLossGradGetWorkspaceSize
    declared = phase_1.argtypes
    phase_1.argtypes = [ctypes.c_double if each is ctypes.c_float else each for each in declared]
    try:
        assert acl.prepare("FusedLinearCrossEntropyLossGrad", *arguments)[0] == 161002
    finally:
        phase_1.argtypes = declared


def test_wrong_dtype_constants(acl, double, rng) -> None:
    x = rng.standard_normal((2, 8)).astype(BF16)
    address, out = acl.to_device(x), acl.to_device(x)
    self, result = (acl.tensor(each, x.shape, None, code=1) for each in (address, out))  # FLOAT16, which it is not
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
    x = acl.tensor(block, (16,), np.float32)  # 64 bytes and 32 of padding: the next piece begins at 128
    acl.launch("Softmax", x, 0, acl.tensor(block + 128, (16,), np.float32), stream=stream)
    assert double.violations() == []
    acl.launch("Softmax", x, 0, acl.tensor(block + 64, (16,), np.float32), stream=stream)
    broken(double, "starts 64 bytes after tensor 0, which takes 96 with its padding")


def test_host_that_touches_device_memory_crashes() -> None:
    for action in ("ctypes.string_at(p, 1)", "ctypes.memset(p, 0, 1)", "ctypes.string_at(stream, 1)"):
        done = run(f"p = acl.malloc(64); stream = acl.stream(); {action}", check=False)
        assert done.returncode == -signal.SIGSEGV, done.stderr


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


# ---- misuse: of lifetimes --------------------------------------------------------------------------------------------


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
    assert double.counter("executors") == 1  # these do not release it
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


# ---- misuse: of time -------------------------------------------------------------------------------------------------


def test_missing_synchronise_gives_wrong_data(acl, double) -> None:
    double.set_delay(100_000)
    c = softmax_call(acl, double)
    assert acl.aclnnSoftmax(c["workspace"], c["size"], c["executor"], c["stream"]) == 0
    acl.executors.clear()
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
    here[:] = 2  # too early
    acl.check("aclrtSynchronizeStream", stream)
    np.testing.assert_array_equal(acl.read(there, here), np.full(16, 2))
    assert double.violations() == []


def test_asynchronous_copies_need_page_locked_memory(acl, double) -> None:
    stream, there, here = acl.stream(), acl.malloc(16), np.zeros(16, np.uint8)
    assert acl.aclrtMemcpyAsync(there, 16, here.ctypes.data, 16, H2D, stream) == 107000
    broken(double, "not page-locked")


def test_memory_in_use_must_not_be_freed(acl, double) -> None:
    double.set_delay(20_000)
    c = softmax_call(acl, double)
    assert acl.aclnnSoftmax(c["workspace"], c["size"], c["executor"], c["stream"]) == 0
    acl.executors.clear()
    assert acl.aclrtFree(c["workspace"]) == 0
    acl.device_memory.remove(c["workspace"])
    broken(double, "memory that queued work still uses (aclnnSoftmax)")


def test_stream_in_use_must_not_be_destroyed(acl, double) -> None:
    double.set_delay(20_000)
    c = softmax_call(acl, double)
    assert acl.aclnnSoftmax(c["workspace"], c["size"], c["executor"], c["stream"]) == 0
    acl.executors.clear()
    assert acl.aclrtDestroyStream(c["stream"]) == 0
    acl.streams.clear()
    broken(double, "still has work queued")


def test_two_streams_on_the_same_memory(acl, double) -> None:
    double.set_delay(20_000)
    c = softmax_call(acl, double)
    assert acl.aclnnSoftmax(c["workspace"], c["size"], c["executor"], c["stream"]) == 0
    acl.executors.clear()
    acl.launch("LogSoftmax", c["result"], 0, c["self"], stream=acl.stream())
    assert "work on another stream" in double.violations()[0]


def test_work_takes_its_time_on_another_thread(acl, double) -> None:
    double.set_delay(100_000)
    c = softmax_call(acl, double)
    begin = time.monotonic()
    assert acl.aclnnSoftmax(c["workspace"], c["size"], c["executor"], c["stream"]) == 0
    acl.executors.clear()
    assert time.monotonic() - begin < 0.09
    assert double.counter("in_flight") == 1
    acl.check("aclrtSynchronizeStream", c["stream"])
    assert time.monotonic() - begin >= 0.1


# ---- misuse: of threads, devices and processes -----------------------------------------------------------------------


def test_thread_without_device(acl, double) -> None:
    def body() -> None:
        with pytest.raises(StatusError) as error:
            acl.malloc(16)
        assert error.value.code == 107002
        broken(double, "no aclrtSetDevice on this thread")

    in_thread(body)


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
    in_thread(lambda: pytest.fail("of another thread") if acl.aclGetRecentErrMsg() else None)
    assert b"aclrtMalloc" in acl.aclGetRecentErrMsg()
    assert acl.aclGetRecentErrMsg() is None


def test_initialisations_are_counted(acl, double) -> None:
    left = ctypes.c_uint64()
    assert acl.aclInit(None) == 100002
    assert double.counter("initialisations") == 2
    assert acl.aclFinalizeReference(ctypes.byref(left)) == 0
    assert left.value == 1
    assert double.violations() == []


# ---- processes and installations of their own ------------------------------------------------------------------------


def run(code: str, home: Path | None = None, check: bool = True, **environment: str) -> subprocess.CompletedProcess:
    """Run code with `acl` over an installation (initialised, device 0), or over the single library."""
    libraries = [stand_in.build_alone()] if home is None else sorted((home / "lib64").glob("lib[ano]*.so"))
    script = f"""
import ctypes, os, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from acl_client import *
acl = Acl(*map(Path, {list(map(str, libraries))!r}))
if {home is None}:
    acl.check("aclInit", None)
    acl.check("aclrtSetDevice", 0)
{code}
"""
    result = subprocess.run(
        [sys.executable, "-P", "-c", script],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if check:
        assert result.returncode == 0, result.stderr
    return result


def test_report_of_a_process(tmp_path: Path) -> None:
    report = tmp_path / "report"
    run(
        "acl.malloc(64); print(acl.aclrtGetSocName(), acl.aclrtMalloc(None, 1, 0), acl.aclrtSetDevice(2))",
        CANN_STAND_IN_REPORT=str(report),
        CANN_STAND_IN_SOC="Ascend310P3",
        CANN_STAND_IN_DEVICES="3",
    )
    lines = report.read_text().splitlines()
    assert "device_allocations 1" in lines
    assert any(line.startswith("violation aclrtMalloc: NULL") for line in lines)


def test_settings_of_a_process() -> None:
    done = run(
        """
print(acl.aclrtGetSocName().decode(), acl.aclrtSetDevice(2), acl.aclrtSetDevice(3))
for size in (2000, 100, 100):
    try:
        acl.malloc(size)
    except StatusError as error:
        print(error.code)
""",
        CANN_STAND_IN_SOC="Ascend310P3",
        CANN_STAND_IN_DEVICES="3",
        CANN_STAND_IN_MEMORY="1000",
        CANN_STAND_IN_FAIL="aclrtMalloc:3:207018,aclrtFree:1:1",
    )
    assert done.stdout.split() == ["Ascend310P3", "0", "107001", "207001", "207018"]


def test_nothing_works_before_initialisation_or_in_a_child() -> None:
    done = run(
        """
left = ctypes.c_uint64()
print(acl.aclFinalizeReference(ctypes.byref(left)), acl.aclrtSetDevice(0), acl.aclFinalizeReference(ctypes.byref(left)))
acl.check("aclInit", None)
acl.check("aclrtSetDevice", 0)
stream = acl.stream()
pid = os.fork()
if pid == 0:
    os._exit(acl.aclrtSynchronizeStream(stream) == 507899)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    )
    assert done.stdout.split() == ["0", "100001", "100037", "1"]


@pytest.mark.parametrize("call", ["aclFinalize()", "aclrtResetDevice(0)"])
def test_ending_the_device_for_everybody(call, tmp_path: Path) -> None:
    report = tmp_path / "report"
    run(f"acl.{call}", CANN_STAND_IN_REPORT=str(report))
    assert "for everybody in the process" in report.read_text()


@pytest.mark.parametrize(
    ("variant", "code", "expected"),
    [
        ("split", "acl.aclInit(None), count(), n.value", "0 0 2"),
        ("aggregate", "acl.aclInit(None), count(), n.value", "0 0 2"),
        ("train_infer", "acl.aclInit(None), count(), n.value", "0 0 2"),
        ("link_time_stub", "acl.aclInit(None), count(), acl.aclnnSoftmax(None, 0, None, None)", "100039 100039 100039"),
        ("no_device", "acl.aclInit(None), count(), n.value", "0 0 0"),
        ("no_driver", "acl.aclInit(None), count()", "0 107001"),
        ("device_lost", "acl.aclInit(None), count()", "0 207004"),
        ("init_fails", "acl.aclInit(None), count()", "500000 100001"),
        ("older", "*[hasattr(acl, f'acl{name}') for name in ('nnSoftmax', 'nnFusedLinearOnlineMaxSum')]", "True False"),
        ("older", "hasattr(acl, 'aclFinalizeReference'), hasattr(acl, 'aclrtCreateContext')", "False False"),
    ],
)
def test_installations(variant, code, expected) -> None:
    done = run(
        f"n = ctypes.c_uint32()\ndef count(): return acl.aclrtGetDeviceCount(ctypes.byref(n))\nprint({code})",
        stand_in.build(variant),
    )
    assert done.stdout.strip() == expected


@pytest.mark.parametrize(
    ("variant", "soc", "codes"),
    [
        ("no_kernel_path", "Ascend910B2", "561107 561107 561107"),
        ("no_kernel_package", "Ascend910B2", "561112 561112 561112"),
        ("no_kernels", "Ascend910B2", "561003 561003 561003"),
        ("before_9_2", "Ascend910B2", "0 0 0"),
        ("before_9_2", "Ascend950PR_9589", "0 0 561112"),
        ("split", "Ascend950PR_9589", "0 0 0"),
    ],
)
def test_installations_without_kernels(variant, soc, codes) -> None:
    """The first phase says so, after all its checks."""
    done = run(
        """
acl.check("aclInit", None)
acl.check("aclrtSetDevice", 0)
x, mask, column = np.zeros((1, 1, 2, 2), np.float32), np.zeros((1, 1, 2, 2), bool), np.zeros(3, np.float32)
def code(name, *arguments):
    return acl.prepare(name, *(acl.put(a) if isinstance(a, np.ndarray) else a for a in arguments))[0]
assert code("Softmax", x, 7, x) == 161002
print(code("Softmax", x, 0, x), code("ScaledMaskedSoftmax", x, mask, 1.0, False, x),
      code("FusedCrossEntropyLossWithMaxSum", *[column] * 3, 0.0, None, None, None, column, None))
acl.clear()
""",
        stand_in.build(variant),
        CANN_STAND_IN_SOC=soc,
    )
    assert done.stdout.strip() == codes


def test_compiles_without_warnings() -> None:
    for variant in stand_in.VARIANTS:
        stand_in.build(variant)
    assert stand_in.warnings == []


def test_library_that_lacks_its_neighbour_does_not_load() -> None:
    """In a process of its own: the neighbour may be loaded in this one."""
    library = stand_in.build("split_without_math") / "lib64" / "libopapi_nn.so"
    program = f"import ctypes; ctypes.CDLL({str(library)!r})"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert run.returncode == 1
    assert "libopapi_math" in run.stderr
