"""Test the loss of logits on the device: values of the reference for random problems of every kind that it takes."""

from __future__ import annotations

import numpy as np
import pytest
from ml_dtypes import bfloat16

import ascend_grad as ag
from ascend_grad import npu

DTYPES = (np.float32, np.float16, bfloat16)
EPS = {np.float32: 2.0**-24, np.float16: 2.0**-11, bfloat16: 2.0**-8}


def problem(seed: int) -> tuple[dict, np.random.Generator]:
    """Return the arguments of a random call."""
    rng = np.random.default_rng(seed)
    dtype = DTYPES[seed % 3]
    rank = int(rng.integers(1, 5))
    shape = tuple(int(n) for n in rng.integers(1, 7, rank))
    axis = int(rng.integers(-rank, rank))
    classes, rows = shape[axis], tuple(np.delete(shape, axis))
    x = (rng.standard_normal(shape) * rng.choice([1, 4])).astype(dtype)
    if rng.random() < 0.3:
        x = np.asfortranarray(x)
    is_dense = rng.random() < 0.4
    arguments = {"input": x, "axis": axis, "reduction": str(rng.choice(["mean", "sum", "none"]))}

    def maybe(name, value, chance=0.35):
        if rng.random() < chance:
            arguments[name] = value

    if is_dense:
        target = rng.random(shape).astype(rng.choice([np.float32, np.float64]))
        target[rng.random(shape) < 0.2] = 0
    else:
        target = rng.integers(0, classes, rows, rng.choice([np.int64, np.int32, np.uint8]))
        if target.dtype != np.uint8:
            target = np.where(rng.random(rows) < 0.2, -100, target).astype(target.dtype)
        maybe("grad_log_prob", rng.standard_normal(rows), 0.2)
    arguments["target"] = target
    maybe("class_weight", np.where(rng.random(classes) < 0.2, 0, rng.random(classes) + 0.1))
    maybe("token_weight", np.where(rng.random(rows) < 0.2, 0, rng.random(rows)))
    maybe("label_smoothing", float(rng.random()))
    maybe("lse_square_scale", float(rng.random()), 0.25)
    maybe("temperature", float(rng.random() + 0.5) if rng.random() < 0.5 else rng.random(rows) + 0.5)
    maybe("logit_scale", float(rng.standard_normal()), 0.2)
    maybe("denominator", float(rng.random() + 1), 0.2)
    maybe("grad_lse", rng.standard_normal(rows), 0.2)
    maybe("outputs", ("lse",) if is_dense else ("log_prob", "lse"))
    grad_loss = rng.standard_normal(rows if arguments["reduction"] == "none" else ())
    maybe("grad_loss", np.where(rng.random(grad_loss.shape) < 0.2, 0, grad_loss), 0.5)
    if rng.random() < 0.15:
        arguments["return_grad"] = False
    return arguments, rng


def in_float64(arguments: dict) -> tuple:
    """Return the reference's results for the same values in float64."""
    widened = {"input": arguments["input"].astype(np.float64)}
    return ag.cross_entropy(**{**arguments, **widened}, backend="reference")


def check(results, expected, dtype) -> None:
    assert results._fields == expected._fields
    for name, got, right in zip(results._fields, results, expected):
        if right is None:
            assert got is None
            continue
        got = got.numpy() if isinstance(got, npu.DeviceArray) else np.asarray(got)
        assert got.shape == np.shape(right)
        assert got.dtype == (dtype if name == "input_grad" else np.float32)
        eps = 2.0**-24 + (EPS[dtype] if name == "input_grad" else 0)
        scale = np.abs(right).max(initial=0)
        subnormal = 2.0**-24 if dtype == np.float16 and name == "input_grad" else 0
        assert np.array_equal(np.isnan(got), np.isnan(right)), name
        error = np.abs(np.nan_to_num(got.astype(np.float64)) - np.nan_to_num(right))
        scale = np.nan_to_num(scale)
        assert np.all(error <= 2 * eps * np.abs(np.nan_to_num(right)) + 64 * 2.0**-24 * (1 + scale) + subnormal), name


@pytest.mark.parametrize("seed", range(400))
def test_random_problems(seed, device):
    arguments, rng = problem(seed)
    expected = in_float64(arguments)
    dtype = arguments["input"].dtype.type
    assert ag.explain("cross_entropy", **arguments).backend == "npu"
    check(ag.cross_entropy(**arguments), expected, dtype)
    taken = {np.dtype(np.float64): np.float32, np.dtype(np.uint8): np.int32}
    arrays = {
        name: npu.asarray(value.astype(taken.get(value.dtype, value.dtype)))
        for name, value in arguments.items()
        if isinstance(value, np.ndarray)
    }
    check(ag.cross_entropy(**{**arguments, **arrays}), in_float64(arguments), dtype)
    if "return_grad" not in arguments:
        out = np.empty(arguments["input"].shape, rng.choice([np.float32, np.float64]))
        result = ag.cross_entropy(**arguments, out=out)
        assert result.input_grad is out
        error = np.abs(out - expected.input_grad)
        assert np.all(error <= 64 * 2.0**-24 * (1 + np.abs(expected.input_grad).max()))


@pytest.mark.parametrize("is_dense", [False, True])
def test_nothing_of_the_problem_passes_through_the_host(is_dense, device, rng):
    """Logits and gradients of arrays on the device stay there, whatever the axis is; vectors come back."""
    x = rng.standard_normal((8, 500, 4)).astype(np.float16)
    target = rng.random(x.shape, np.float32) if is_dense else rng.integers(0, 500, (8, 4))
    arrays = npu.asarray(x), npu.asarray(target)
    device.reset()
    ag.cross_entropy(*arrays, axis=1)
    for counter in ("bytes_h2d", "bytes_d2h"):
        assert device.counter(counter) <= 16 * 32


@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize("is_on_device", [False, True])
def test_rows_without_a_gradient_may_hold_anything(is_dense, is_on_device, device, rng):
    x = rng.standard_normal((6, 5)).astype(np.float32)
    x[1], x[4] = np.nan, np.inf
    weight = np.array([1, 0, 1, 2, 0, 1], np.float32)
    target = rng.random(x.shape, np.float32) if is_dense else rng.integers(0, 5, 6)
    arrays = [x, target, weight]
    if is_on_device:
        arrays = [npu.asarray(each) for each in arrays]
    loss, grad = ag.cross_entropy(*arrays[:2], token_weight=arrays[2])
    kept = weight > 0
    expected = ag.cross_entropy(x[kept], target[kept], token_weight=weight[kept], backend="reference")
    loss, grad = (each.numpy() if is_on_device else each for each in (loss, grad))
    np.testing.assert_allclose(loss, expected.loss, rtol=1e-5)
    np.testing.assert_allclose(grad[kept], expected.input_grad, rtol=1e-4, atol=1e-6)
    assert np.all(grad[~kept] == 0)


def test_all_rows_are_ignored(device):
    x, target = np.ones((3, 4), np.float16), np.full(3, -100)
    loss, grad = ag.cross_entropy(x, target)
    assert np.isnan(loss)
    assert np.array_equal(grad, np.zeros_like(x))


def test_no_rows(device):
    result = ag.cross_entropy(np.ones((0, 4), np.float16), np.ones(0, int), reduction="none", backend="npu")
    assert (result.loss.shape, result.input_grad.shape) == ((0,), (0, 4))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"target_prob": np.ones((3, 2)), "target": np.zeros((3, 2), int)}, "target_prob: the device's operators"),
        ({"softcap": 3.0}, "softcap: the device's operators compute the loss without it"),
        ({"outputs": ("entropy", "correct")}, "outputs: the device's operators compute the loss without entropy"),
        ({"grad_entropy": np.ones(3)}, "grad_entropy: the device's operators compute the gradients without it"),
        ({"input": np.ones((3, 4))}, "input: the device takes dtype"),
    ],
)
def test_what_the_cpu_computes(arguments, reason, device):
    call = {"input": np.ones((3, 4), np.float32), "target": np.zeros(3, int)} | arguments
    choice = ag.explain("cross_entropy", **call)
    assert choice.backend == "cpu"
    assert reason in choice.reason
    with pytest.raises(ag.ParamInvalidError, match=reason):
        ag.cross_entropy(**call, backend="npu")


@pytest.mark.parametrize(
    ("soc", "of_ids", "of_probabilities"),
    [("Ascend910A", False, True), ("Ascend310P3", False, True), ("Ascend310B1", False, False)],
)
def test_systems(soc, of_ids, of_probabilities, device, monkeypatch):
    monkeypatch.setitem(ag.npu.runtime.found, "state", ag.npu.runtime.state()._replace(soc=soc))
    device.set_soc(soc)
    x = np.eye(4, dtype=np.float32)
    try:
        for target, is_there in ((np.arange(4), of_ids), (x, of_probabilities)):
            assert (ag.explain("cross_entropy", x, target).backend == "npu") == is_there
            if is_there:
                expected = ag.cross_entropy(x, target, backend="cpu")
                check(ag.cross_entropy(x, target), expected, np.float32)
            else:
                with pytest.raises(ag.UnsupportedDeviceError):
                    ag.cross_entropy(x, target, backend="npu")
    finally:
        device.set_soc("Ascend910B2")


def test_faults_at_every_call(device, rng):
    """A failure of any call of the device raises, leaves the arguments as they were, and loses nothing."""
    x = rng.standard_normal((4, 5, 3)).astype(np.float16)
    for target in (rng.integers(0, 5, (4, 3)), rng.random(x.shape)):
        options = {"axis": 1, "label_smoothing": 0.1, "lse_square_scale": 0.1, "class_weight": np.arange(5.0)}
        expected = ag.cross_entropy(x, target, **options)
        device.reset()
        ag.cross_entropy(x, target, **options)
        calls = device.calls()
        before = x.copy()
        for nth in range(1, calls + 1):
            device.fail("*", nth)
            try:
                ag.cross_entropy(x, target, **options, backend="npu")
            except ag.AclError:
                pass
            device.reset()
            assert np.array_equal(x, before)
            result = ag.cross_entropy(x, target, **options, backend="npu")
            assert np.array_equal(result.input_grad, expected.input_grad)


def test_memory_of_workspaces(device, rng):
    x, target = rng.standard_normal((4, 5)).astype(np.float16), rng.integers(0, 5, 4)
    assert ag.workspace_size("cross_entropy", x, target, backend="npu") > 0
