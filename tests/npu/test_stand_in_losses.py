"""Test the test double's losses of logits: their results, their checks, and what they do not do."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from acl_client import broken, code_of, softmax
from aclnn_losses import (
    EPS,
    FLOATS,
    IGNORED,
    dense_loss,
    gradient,
    loss,
    nan,
    right_dense_loss,
    right_gradient,
    right_loss,
)
from device_limits import DENSE, IDS, takes

BF16 = ml_dtypes.bfloat16


def z(*shape: int, dtype=np.float16) -> np.ndarray:
    return np.zeros(shape, dtype)


def rounded(values, dtype) -> np.ndarray:
    """Round values to float32 and then to the dtype, and return them in float64."""
    return np.asarray(values, np.float32).astype(dtype).astype(float)


def sample(rng, dtype, weighted: bool, N=7, C=5) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    target = rng.integers(0, C, N)
    target[2] = IGNORED
    weight = rng.random(C).astype(np.float32) if weighted else None
    return (3 * rng.standard_normal((N, C))).astype(dtype), target, weight


# ---- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_loss(acl, double, rng, dtype, reduction, weighted, smoothing) -> None:
    x, target, weight = sample(rng, dtype, weighted)
    results = loss(acl, x, target, weight, reduction, smoothing=smoothing)
    right, log_prob = right_loss(x, target, weight, reduction, smoothing=smoothing)
    np.testing.assert_allclose(results["loss"].astype(float), right, rtol=2 * EPS[dtype], atol=1e-6)
    np.testing.assert_allclose(results["log_prob"].astype(float), rounded(log_prob, dtype), rtol=EPS[dtype] / 2)
    for name in ("z_loss", "lse"):
        assert np.isnan(results[name].astype(float)).all(), "the device leaves the outputs of the z-loss unwritten"
    assert double.violations() == []


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_gradient(acl, double, rng, dtype, reduction, weighted) -> None:
    x, target, weight = sample(rng, dtype, weighted)
    log_prob = np.log(softmax(x.astype(float))).astype(dtype)
    grad = rng.standard_normal(len(x) if reduction == "none" else ()).astype(dtype)
    grad = np.asarray(grad, dtype)
    result = gradient(acl, grad, log_prob, target, weight, reduction).astype(float)
    expected = right_gradient(grad, log_prob, target, weight, reduction)
    np.testing.assert_allclose(result, expected, rtol=2 * EPS[dtype], atol=1e-6)
    assert not result[2].any()
    assert double.violations() == []


def test_the_gradient_starts_from_rounded_log_probabilities(acl, rng) -> None:
    """In bfloat16 the probabilities err by a part of 2^-8 of the logarithm."""
    log_prob = np.full((1, 4), np.log(np.float32(1e-4)), np.float32)
    arguments = z(1, dtype=np.int64), None, None, None, b"sum", IGNORED, 0.0, 0.0
    exact, coarse = (
        acl.compute(
            "CrossEntropyLossGrad", np.ones((), dtype), log_prob.astype(dtype), *arguments, nan(1, 4, dtype=dtype)
        )
        for dtype in (np.float32, BF16)
    )
    assert abs(exact[-1][0, 1] / 1e-4 - 1) < 1e-5
    assert abs(float(coarse[-1][0, 1]) / 1e-4 - 1) > 2e-3


@pytest.mark.parametrize("dtype", FLOATS)
def test_loss_of_dense_labels(acl, double, rng, dtype) -> None:
    x, labels = (3 * rng.standard_normal((4, 6))).astype(dtype), rng.random((4, 6)).astype(dtype)
    losses, backprop = dense_loss(acl, x, labels)
    right, gradients = right_dense_loss(x, labels)
    np.testing.assert_allclose(losses.astype(float), right, rtol=2 * EPS[dtype])
    np.testing.assert_allclose(backprop.astype(float), gradients, atol=2 * EPS[dtype])
    assert double.violations() == []


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("outer", [(6,), (2, 3)], ids=str)
def test_sums_of_a_shard(acl, double, rng, dtype, outer) -> None:
    double.set_soc("Ascend950PR_9589")
    x = rng.standard_normal((*outer, 16)).astype(dtype)
    largest = x.max(-1)
    target = np.array([0, 31, 32, 47, 48, 5], np.int32).reshape(outer)
    floats, ints = nan(*outer), z(*outer, dtype=np.int32)
    *_, predicted, total, exponentials, offset, mask = acl.compute(
        *("CrossEntropySumExpAndIndexLogit", x, target, largest, 32, 48),
        *(floats, floats, nan(*outer, 16), ints, ints),
    )
    moved = x.astype(float) - largest.astype(float)[..., None]
    masked = (target < 32) | (target >= 48)
    local = np.where(masked, 0, target - 32)
    np.testing.assert_array_equal(mask, masked)
    np.testing.assert_array_equal(offset, local)
    expected = np.where(masked, 0, np.take_along_axis(moved, local[..., None], -1)[..., 0])
    np.testing.assert_allclose(predicted, expected, rtol=1e-6)
    np.testing.assert_allclose(exponentials, np.exp(moved), rtol=1e-6)
    np.testing.assert_allclose(total, np.exp(moved).sum(-1), rtol=1e-6)
    assert double.violations() == []


# ---- differences between the device and the contract -----------------------------------------------------------------


def test_quirk_a_mean_over_no_targets_is_nan(acl, rng) -> None:
    x = rng.standard_normal((2, 3)).astype(np.float32)
    target = np.full(2, IGNORED)
    assert np.isnan(loss(acl, x, target)["loss"]).all()
    assert loss(acl, x, target, reduction="sum")["loss"] == 0


def test_quirk_gradients_of_ignored_rows_spread_nan(acl) -> None:
    log_prob = nan(1, 3)
    arguments = np.ones((), np.float32), log_prob, np.array([IGNORED]), None, None, None, b"sum", IGNORED, 0.0, 0.0
    assert np.isnan(acl.compute("CrossEntropyLossGrad", *arguments, z(1, 3, dtype=np.float32))[-1]).all()


def test_quirk_no_negative_label_is_ignored_on_950(acl, double, rng) -> None:
    double.set_soc("Ascend950PR_9589")
    x, target, _ = sample(rng, np.float32, False)
    assert np.isnan(loss(acl, x, target)["loss"]).all()
    broken(double, "target -100 of row 2 is not in [0, 5) and not ignored")
    double.reset()
    target[2] = 4
    found = loss(acl, x, target, ignored=4)["loss"]
    np.testing.assert_allclose(found, right_loss(x, target, None, "mean", ignored=4)[0], rtol=1e-5)
    assert double.violations() == []


def test_quirk_losses_over_no_classes_are_unwritten(acl) -> None:
    results = acl.compute("SoftmaxCrossEntropyWithLogits", z(2, 0), z(2, 0), nan(2, dtype=np.float16), z(2, 0))
    assert np.isnan(results[2]).all()


@pytest.mark.parametrize("target", [-1, 5, 2**40])
def test_targets_that_are_no_classes(acl, double, rng, target) -> None:
    x, targets, _ = sample(rng, np.float32, False)
    targets[4] = target
    words = f"target {target} of row 4 is not in [0, 5) and not ignored"
    losses = loss(acl, x, targets, reduction="none")["loss"]
    np.testing.assert_array_equal(np.isnan(losses), np.arange(7) == 4)
    broken(double, words)
    double.reset()
    arguments = np.ones(7, np.float32), x, targets, None, None, None, b"none", IGNORED, 0.0, 0.0
    result = acl.compute("CrossEntropyLossGrad", *arguments, z(7, 5, dtype=np.float32))[-1]
    np.testing.assert_array_equal(np.isnan(result).all(-1), np.arange(7) == 4)
    broken(double, words)


def test_a_z_loss_is_not_computed(acl, double) -> None:
    x, target, one, column = z(3, 4), z(3, dtype=np.int64), z(1), z(3)
    for scale, is_returned in ((0.1, False), (0.0, True)):
        arguments = x, target, None, b"mean", IGNORED, 0.0, scale, is_returned, one, x, one, column
        assert code_of(acl, "CrossEntropyLoss", *arguments) == 0
        broken(double, "the z-loss is asked for, and not computed")
        double.reset()
    for z_gradient, lse, scale, is_asked in (
        (None, z(0), 0, 0),
        (None, None, 0.1, 1),
        (None, column, 0, 1),
        (z(), None, 0, 1),
    ):
        gradient = z(), x, target, None, z_gradient, lse, b"mean", IGNORED, 0.0, scale, x
        assert code_of(acl, "CrossEntropyLossGrad", *gradient) == 0
        assert len(double.violations()) == is_asked
        double.reset()


# ---- checks ----------------------------------------------------------------------------------------------------------


def loss_arguments(N=3, C=4, dtype=np.float16, reduction=b"mean", ignored=IGNORED, smoothing=0.0, **changes) -> tuple:
    rows = N if reduction == b"none" else 1
    values = {
        "input": z(N, C, dtype=dtype),
        "target": z(N, dtype=np.int64),
        "weight": None,
        "reduction": reduction,
        "ignored": ignored,
        "smoothing": smoothing,
        "scale": 0.0,
        "is_returned": False,
        "loss": z(rows, dtype=dtype),
        "log_prob": z(N, C, dtype=dtype),
        "z_loss": z(rows, dtype=dtype),
        "lse": z(N, dtype=dtype),
    }
    return tuple((values | changes).values())


def test_checks_of_the_loss(acl, double) -> None:
    def code(**settings) -> int:
        return code_of(acl, "CrossEntropyLoss", *loss_arguments(**settings))

    for reduction in (b"mean", b"sum", b"none"):
        assert code(reduction=reduction, weight=z(4, dtype=np.float32), smoothing=1.0) == 0
    for name in ("input", "target", "loss", "log_prob", "z_loss", "lse", "reduction"):
        assert code(**{name: None}) == 161001
    assert code(dtype=np.float64) == 161002
    assert code(target=z(3, dtype=np.int32)) == 161002
    assert code(weight=z(4)) == 161002
    for name, shape in (("loss", (1,)), ("log_prob", (3, 4)), ("z_loss", (1,)), ("lse", (3,))):
        assert code(**{name: z(*shape, dtype=np.float32)}) == 161002
    assert code(N=0) == code(C=0) == 561002
    for name, value in (
        *(("input", z(3, 4, 1)), ("target", z(4, dtype=np.int64)), ("target", z(3, 1, dtype=np.int64))),
        *(("weight", z(5, dtype=np.float32)), ("loss", z()), ("loss", z(3)), ("log_prob", z(4, 3))),
        *(("z_loss", z(3)), ("lse", z(1)), ("reduction", b"average"), ("reduction", b"")),
        *(("smoothing", -0.1), ("smoothing", 1.1), ("smoothing", float("nan")), ("ignored", 4)),
    ):
        assert code(**{name: value}) == 561002, (name, value)
    assert code(input=None, target=z(1), reduction=b"") == 161001  # the order of the checks
    assert code(target=z(1), reduction=b"") == 161002
    assert code(ignored=3) == code(z_loss=z(0), lse=z(0)) == code(reduction=b"none", z_loss=z(0), lse=z(0)) == 0
    assert double.violations() == []


def gradient_arguments(N=3, C=4, dtype=np.float16, reduction=b"mean", ignored=IGNORED, smoothing=0.0, **changes):
    values = {
        "grad": z(*([N] if reduction == b"none" else []), dtype=dtype),
        "log_prob": z(N, C, dtype=dtype),
        "target": z(N, dtype=np.int64),
        "weight": None,
        "grad_z_loss": None,
        "lse": None,
        "reduction": reduction,
        "ignored": ignored,
        "smoothing": smoothing,
        "scale": 0.0,
        "out": z(N, C, dtype=dtype),
    }
    return tuple((values | changes).values())


def test_checks_of_the_gradient(acl, double) -> None:
    def code(**settings) -> int:
        return code_of(acl, "CrossEntropyLossGrad", *gradient_arguments(**settings))

    for reduction in (b"mean", b"sum", b"none"):
        assert code(reduction=reduction, weight=z(4, dtype=np.float32)) == 0
    assert code(grad=z(1)) == 0
    for name in ("grad", "log_prob", "target", "out", "reduction"):
        assert code(**{name: None}) == 161001
    assert code(dtype=np.float64) == 161002
    assert code(target=z(3, dtype=np.int32)) == 161002
    assert code(weight=z(4)) == 161002
    for name, shape in (("grad", ()), ("log_prob", (3, 4)), ("out", (3, 4)), ("lse", (3,)), ("grad_z_loss", ())):
        assert code(**{name: z(*shape, dtype=np.float32)}) == 161002
    assert code(N=0) == code(C=0) == 561002
    for name, value in (
        *(("grad", z(3)), ("grad", z(1, 1)), ("target", z(4, dtype=np.int64)), ("weight", z(3, dtype=np.float32))),
        *(("out", z(4, 3)), ("reduction", b"average"), ("smoothing", 0.1), ("ignored", 4)),
    ):
        assert code(**{name: value}) == 561002, (name, value)
    assert double.violations() == []


@pytest.mark.parametrize("name", ["CrossEntropyLoss", "CrossEntropyLossGrad"])
def test_losses_take_no_strides(acl, double, name) -> None:
    handle = acl.tensor(acl.malloc(64), (3, 4), np.float16, strides=(8, 1), storage=(32,))
    arguments = loss_arguments(input=handle) if name == "CrossEntropyLoss" else gradient_arguments(out=handle)
    assert code_of(acl, name, *arguments) == 161002
    assert b"not contiguous" in acl.aclGetRecentErrMsg()
    assert double.violations() == []


def test_checks_of_the_loss_of_dense_labels(acl, double) -> None:
    def code(features=(3, 4), labels=(3, 4), loss=(3,), backprop=(3, 4), dtypes=(np.float16,) * 4) -> int:
        arrays = (z(*shape, dtype=each) for shape, each in zip((features, labels, loss, backprop), dtypes))
        return code_of(acl, "SoftmaxCrossEntropyWithLogits", *arrays)

    assert code() == 0
    for i in range(4):
        arguments = [z(3, 4), z(3, 4), z(3), z(3, 4)]
        arguments[i] = None
        assert code_of(acl, "SoftmaxCrossEntropyWithLogits", *arguments) == 161001
        assert code(dtypes=[np.float32 if i == j else np.float16 for j in range(4)]) == 161002
    assert code(dtypes=(np.float64,) * 4) == 161002
    assert code(features=(12,), labels=(12,)) == 161002
    assert code(labels=(1, 4)) == code(loss=(1,)) == code(loss=(3, 1)) == code(backprop=(4, 3)) == 161002
    assert code(features=(0, 4), labels=(0, 4), loss=(0,), backprop=(0, 4)) == 0
    assert double.violations() == []


def test_dense_labels_take_strides(acl, rng) -> None:
    x = rng.standard_normal((4, 6)).astype(np.float32)
    address, out = acl.to_device(x), acl.malloc(24)
    self = acl.tensor(address, (6, 4), np.float32, strides=(1, 6), storage=(24,))
    labels, backprop = acl.put(np.ones((6, 4), np.float32)), acl.put(np.zeros((6, 4), np.float32))
    stream = acl.stream()
    acl.launch(
        "SoftmaxCrossEntropyWithLogits", self, labels, acl.tensor(out, (6,), np.float32), backprop, stream=stream
    )
    acl.check("aclrtSynchronizeStream", stream)
    loss = acl.read(out, np.empty(6, np.float32))
    np.testing.assert_allclose(loss, -np.log(softmax(x.T.astype(float))).sum(-1), rtol=1e-5)


def test_checks_of_the_sums_of_a_shard(acl, double) -> None:
    double.set_soc("Ascend950PR_9589")

    def code(N=3, V=16, start=0, end=None, dtype=np.float32, **changes) -> int:
        values = {
            "logits": z(N, V, dtype=dtype),
            "target": z(N, dtype=np.int32),
            "max": z(N, dtype=dtype),
            "start": start,
            "end": start + V if end is None else end,
            "predicted": z(N, dtype=np.float32),
            "sum": z(N, dtype=np.float32),
            "exp": z(N, V, dtype=np.float32),
            "offset": z(N, dtype=np.int32),
            "mask": z(N, dtype=np.int32),
        }
        return code_of(acl, "CrossEntropySumExpAndIndexLogit", *(values | changes).values())

    assert code() == code(V=24, start=100) == code(V=32, dtype=BF16) == code(N=1, V=200000) == code(N=32768) == 0
    for name in ("logits", "target", "max", "predicted", "sum", "exp", "offset", "mask"):
        assert code(**{name: None}) == 161001
    assert code(V=8) == code(V=20) == code(V=24, dtype=BF16) == code(N=1, V=200008) == 161002
    assert code(N=0) == code(N=32769) == code(start=-1) == code(end=0) == code(end=15) == 161002
    assert code(dtype=np.float16) == code(target=z(3, dtype=np.int64)) == code(max=z(3, dtype=BF16)) == 161002
    assert code(exp=z(3, 16)) == code(mask=z(3, dtype=np.bool_)) == code(sum=z(2, dtype=np.float32)) == 161002
    assert code(logits=z(1, 1, 3, 16, dtype=np.float32)) == 161002
    double.set_soc("Ascend910_9391")
    assert code() == 561003
    assert double.violations() == []


def test_what_each_system_has(acl, double, family) -> None:
    for dtype in (np.float16, BF16):
        square, column = z(3, 4, dtype=dtype), z(3, dtype=dtype)
        for operator, name, arguments in (
            (IDS, "CrossEntropyLoss", loss_arguments(dtype=dtype)),
            (IDS, "CrossEntropyLossGrad", gradient_arguments(dtype=dtype)),
            (DENSE, "SoftmaxCrossEntropyWithLogits", (square, square, column, square)),
        ):
            expected = 0 if takes(family, operator, np.dtype(dtype).name) else 561003
            if dtype == BF16 and expected and family not in ("910B", "910_93", "950"):  # dtypes are checked first
                expected = 161002
            assert code_of(acl, name, *arguments) == expected, name
    assert double.violations() == []
