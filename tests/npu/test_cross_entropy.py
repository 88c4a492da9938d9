"""Test the loss of logits on the device: values of the reference for random problems of every kind that it takes."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from cross_entropy_problems import check, in_float64, random_arguments

import ascend_grad as ag
from ascend_grad import npu


@pytest.mark.parametrize("seed", range(400))
def test_random_problems(seed, device):
    arguments, rng = random_arguments(seed)
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


@pytest.mark.parametrize("target", [np.array(0), np.array(-100), np.array(1, np.float32)])
def test_one_logit(target, device):
    """The gradient of an array without axes has none either."""
    x = np.array(2, np.float32)
    expected = ag.cross_entropy(x, target, backend="reference")
    for arrays in ((x, target), (npu.asarray(x), npu.asarray(target))):
        check(ag.cross_entropy(*arrays), expected, np.float32)


@pytest.mark.parametrize(
    "options",
    [
        {"class_weight": np.array([0, 0, 1.0]), "lse_square_scale": 0.5},
        {"class_weight": np.array([1, 2.0, 1]), "token_weight": np.array([1, -1.0]), "lse_square_scale": 0.5},
        {"token_weight": np.array([np.nan, 1]), "grad_loss": 0.0},
        {"class_weight": np.array([1, 1, np.nan]), "label_smoothing": 0.1, "grad_loss": 0.0},
    ],
)
@pytest.mark.parametrize("is_on_device", [False, True])
def test_means_without_a_gradient(options, is_on_device, device, rng):
    """If the weights of one term of the loss add up to 0, the other term has no gradient either."""
    x, target = rng.standard_normal((2, 3)).astype(np.float32), np.array([0, 1])
    options = {name: value.astype(np.float32) if np.ndim(value) else value for name, value in options.items()}
    if is_on_device:
        x, target = npu.asarray(x), npu.asarray(target)
        options = {name: npu.asarray(value) if np.ndim(value) else value for name, value in options.items()}
    loss, grad = ag.cross_entropy(x, target, **options, backend="npu")
    loss, grad = (each.numpy() if is_on_device else each for each in (loss, grad))
    assert np.isnan(loss)
    assert np.array_equal(grad, np.zeros((2, 3)))


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
            with contextlib.suppress(ag.AclError):
                ag.cross_entropy(x, target, **options, backend="npu")
            device.reset()
            assert np.array_equal(x, before)
            result = ag.cross_entropy(x, target, **options, backend="npu")
            assert np.array_equal(result.input_grad, expected.input_grad)


def test_memory_of_workspaces(device, rng):
    x, target = rng.standard_normal((4, 5)).astype(np.float16), rng.integers(0, 5, 4)
    assert ag.workspace_size("cross_entropy", x, target, backend="npu") > 0
