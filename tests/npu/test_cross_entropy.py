"""Test the loss of logits on the device: values of the reference for random problems of every kind that it takes."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from cross_entropy_problems import check, in_float64, random_arguments

import ascend_grad as ag
from ascend_grad import _aclnn, npu
from ascend_grad.backends.ascend import cross_entropy, operators


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


def test_the_operators_that_a_call_is_made_of(device, monkeypatch):
    """No call launches an operator that it does not name as needed, and some call launches each that it names."""
    calls = []

    def recorded(queue, call):
        calls.append(call)
        return cross_entropy.cross_entropy(queue, call)

    monkeypatch.setitem(operators.OPERATORS, "cross_entropy", recorded)
    named, launched = set(), set()
    for seed in range(150):
        arguments, _ = random_arguments(seed)
        device.reset()
        ag.cross_entropy(**arguments, backend="npu")
        of_call = {name for name in _aclnn.NAMES if device.calls(name)}
        assert of_call <= {*cross_entropy.needed(calls[-1])}
        named.update(cross_entropy.needed(calls[-1]))
        launched |= of_call
    assert named == launched


#: Options and outputs, for each kind of targets, that let the device compute all that it can.
EVERYTHING = {"softcap": 3.0, "temperature": 2.0, "label_smoothing": 0.1, "lse_square_scale": 0.1}
KINDS = ("one target", "several targets", "all classes")


def targets_of(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return the arguments with the targets of logits whose last axis has the classes."""
    if kind == "all classes":
        return {"target": rng.random(shape, np.float32)}
    if kind == "one target":
        return {"target": rng.integers(0, shape[-1], shape[:-1])}
    places = (*shape[:-1], 3)
    return {"target": rng.integers(0, shape[-1], places), "target_prob": rng.random(places, np.float32)}


def all_outputs(kind: str) -> tuple[str, ...]:
    of_targets = {"one target": ("log_prob", "correct"), "several targets": ("log_prob",), "all classes": ()}
    return ("lse", "entropy", "predicted", *of_targets[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_the_problem_passes_through_the_host(kind, device, rng):
    """Logits and gradients of arrays on the device stay there, whatever the axis is; vectors come back."""
    x = rng.standard_normal((8, 500, 4)).astype(np.float16)
    targets = targets_of(kind, (8, 4, 500), rng)
    if kind == "all classes":
        targets["target"] = np.moveaxis(targets["target"], 2, 1)
    arrays = {"input": npu.asarray(x), **{name: npu.asarray(value) for name, value in targets.items()}}
    device.reset()
    ag.cross_entropy(**arrays, axis=1, softcap=3.0, outputs=all_outputs(kind))
    sent = 500 * 4  # the numbers of the columns
    for counter in ("bytes_h2d", "bytes_d2h"):
        assert device.counter(counter) <= sent + 8 * 32 * 16


@pytest.mark.parametrize("options", [{}, EVERYTHING])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_memory(kind, dtype, options, device, rng):
    """At most three matrices of float32 are on the device at the same time, four with a softcap, and 16-bit logits."""
    x = rng.standard_normal((256, 2048)).astype(dtype)
    call = {"input": x, **targets_of(kind, x.shape, rng), **options}
    if options:
        call |= {"outputs": all_outputs(kind), "grad_entropy": np.ones(256), "class_weight": np.ones(2048)}
    npu.release()
    device.reset()
    before = device.counter("peak_device_bytes")
    ag.cross_entropy(**call, backend="npu")
    bound = (4 if options else 3) * (4 * x.size + (1 << 17))
    bound += x.nbytes + (1 << 17) if dtype == np.float16 else 0
    bound += x.size if options else 0  # of `predicted`: where a logit is the largest one
    vectors = 1 << 18
    bound += ag.workspace_size("cross_entropy", **call, backend="npu") + vectors
    assert device.counter("peak_device_bytes") - before <= bound


def test_ignored_rows_of_the_host_are_not_sent(device, rng):
    x = rng.standard_normal((8, 4, 500)).astype(np.float16)
    target = np.where(np.arange(32) % 4 == 0, 3, -100).reshape(8, 4)
    expected = ag.cross_entropy(x, target, backend="cpu")
    device.reset()
    check(ag.cross_entropy(x, target), expected, np.float16)
    assert device.counter("bytes_h2d") <= x.nbytes / 4 + 8 * 32


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_on_device", [False, True])
def test_logits_of_minus_infinity(kind, is_on_device, device, rng):
    """Classes of probability 0 add nothing to an entropy."""
    x = rng.standard_normal((6, 9)).astype(np.float32)
    call = {"input": x, **targets_of(kind, x.shape, rng)}
    if kind == "all classes":
        x = x[:, :5]
        call |= {"input": x, "target": np.eye(6, 5, dtype=np.float32)}
        x[:, 4] = -200.0
    else:
        x[:, 5:] = -np.inf
        call["target"] = call["target"] % 5
    call["grad_entropy"] = rng.standard_normal(6).astype(np.float32)
    expected = ag.cross_entropy(**call, outputs=("entropy", "predicted"), backend="reference")
    assert np.all(np.isfinite(expected.input_grad))
    if is_on_device:
        call = {name: npu.asarray(value) for name, value in call.items()}
    check(ag.cross_entropy(**call, outputs=("entropy", "predicted")), expected, np.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_on_device", [False, True])
def test_excluded_classes_of_weight_0(kind, is_on_device, device, rng):
    """Classes of weight or probability 0 whose logits are -infinity add nothing. Other rows have an infinite loss."""
    x = rng.standard_normal((6, 9)).astype(np.float32)
    call = {"input": x, **targets_of(kind, x.shape, rng), "reduction": "none"}
    x[:, 5:] = -np.inf
    x[2, 5:] = 0
    x[3, 1] = -np.inf  # its class has a weight
    x[4] = -np.inf
    x[5, 2] = np.nan
    if kind == "all classes":
        call["target"][:, 5:] = 0
        call["target"][3, 1] = 1e-30
    else:
        call["target"] = call["target"] % 5
        call |= {"class_weight": np.array([1.5, 2, 1, 0.5, 2, 0, 0, 0, 0], np.float32), "label_smoothing": 0.25}
    expected = ag.cross_entropy(**call, backend="reference")
    assert np.array_equal(np.isfinite(expected.loss), [True, True, True, False, False, False])
    if is_on_device:
        call = {name: npu.asarray(value) if isinstance(value, np.ndarray) else value for name, value in call.items()}
    for got, right in zip(ag.cross_entropy(**call)[:2], expected):
        np.testing.assert_allclose(got.numpy() if is_on_device else got, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_on_device", [False, True])
@pytest.mark.parametrize("return_grad", [False, True])
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_rows_without_probabilities_have_no_loss(value, return_grad, is_on_device, device, rng):
    """If all probabilities of a row are 0, its loss is 0, whatever its logits are."""
    x, q = rng.standard_normal((4, 5)).astype(np.float32), rng.random((4, 5), np.float32)
    x[1, 2] = x[3, 0] = value
    q[[0, 1]] = 0
    call = {"input": x, "target": q, "reduction": "none", "return_grad": return_grad}
    expected = ag.cross_entropy(**call, backend="reference")
    assert np.array_equal(np.isnan(expected.loss), [False, False, False, True])
    if is_on_device:
        call |= {"input": npu.asarray(x), "target": npu.asarray(q)}
    check(ag.cross_entropy(**call), expected, np.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sign", [-1, 1])
def test_infinite_losses_have_the_sign_of_the_class_weight(kind, sign, device, rng):
    x = rng.standard_normal((4, 5)).astype(np.float32)
    x[2, 1] = -np.inf
    call = {"input": x, **targets_of(kind, x.shape, rng), "label_smoothing": 0.25, "reduction": "none"}
    call["class_weight"] = sign * np.arange(1.0, 6) / 100
    expected = ag.cross_entropy(**call, backend="reference")
    assert expected.loss[2] == sign * np.inf
    np.testing.assert_allclose(ag.cross_entropy(**call).loss, expected.loss, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_factor_of_0_hides_no_nan(kind, device, rng):
    x = rng.standard_normal((4, 5)).astype(np.float32)
    x[2, 1], x[3, 0] = np.inf, np.nan
    call = {"input": x, **targets_of(kind, x.shape, rng), "logit_scale": 0.0}
    expected = ag.cross_entropy(**call, backend="reference")
    assert np.array_equal(np.isnan(expected.input_grad).all(1), [False, False, True, True])
    check(ag.cross_entropy(**call), expected, np.float32)


def test_of_equal_logits_the_first_one_is_predicted(device, rng):
    x = rng.integers(0, 3, (50, 20)).astype(np.float16)
    x[7] = -np.inf
    target = x.argmax(1)
    target[::3] = 19
    target[1] = -100
    expected = ag.cross_entropy(x, target, outputs=("predicted", "correct"), backend="reference")
    result = ag.cross_entropy(x, target, outputs=("predicted", "correct"))
    assert np.array_equal(result.predicted, expected.predicted)
    assert result.correct == expected.correct


def test_probabilities_given_as_the_number_0(device, rng):
    call = {"input": rng.random((4, 5), np.float32), "target": rng.integers(0, 5, (4, 2))}
    expected = ag.cross_entropy(**call, target_prob=0, outputs=("log_prob",), backend="reference")
    check(ag.cross_entropy(**call, target_prob=0, outputs=("log_prob",)), expected, np.float32)
    call = {name: npu.asarray(value) for name, value in call.items()}
    with pytest.raises(ag.ParamInvalidError, match="expected an array of zeros on the device of target, got 0"):
        ag.cross_entropy(**call, target_prob=0)


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
        ({"input": np.ones((3, 4))}, "input: the device supports dtype"),
        ({"outputs": ("lse", "prob")}, "outputs: the device's operators do not support prob in the loss"),
        ({"outputs": ("hessian_diag",)}, "outputs: the device's operators do not support hessian_diag in the loss"),
        (
            {"input": np.broadcast_to(np.float32(0), (3, 2**24 + 1)), "outputs": ("correct",)},
            "the device supports classes for predicted and correct up to 16777216, got 16777217",
        ),
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
    x = rng.standard_normal((4, 5, 5)).astype(np.float16)
    for kind in KINDS:
        options = {**EVERYTHING, **targets_of(kind, x.shape, rng), "axis": 1, "class_weight": np.arange(5.0)}
        options |= {"outputs": all_outputs(kind), "grad_entropy": np.ones((4, 5))}
        expected = ag.cross_entropy(x, **options)
        device.reset()
        ag.cross_entropy(x, **options)
        calls = device.calls()
        before = x.copy()
        for nth in range(1, calls + 1):
            device.fail("*", nth)
            with contextlib.suppress(ag.AclError):
                ag.cross_entropy(x, **options, backend="npu")
            device.reset()
            assert np.array_equal(x, before)
            result = ag.cross_entropy(x, **options, backend="npu")
            assert np.array_equal(result.input_grad, expected.input_grad)


def test_several_targets_on_950(device, monkeypatch):
    """The vendor does not document the operator that takes elements by their columns there, so forced calls use it."""
    monkeypatch.setitem(ag.npu.runtime.found, "state", ag.npu.runtime.state()._replace(soc="Ascend950PR_9589"))
    device.set_soc("Ascend950PR_9589")
    call = {"input": np.eye(4, dtype=np.float32), "target": np.zeros((4, 2), int), "target_prob": np.ones((4, 2))}
    try:
        choice = ag.explain("cross_entropy", **call)
        assert choice.backend == "cpu"
        assert "the vendor documents the operator only on 910B, 910_93" in choice.reason
        check(ag.cross_entropy(**call, backend="npu"), ag.cross_entropy(**call, backend="cpu"), np.float32)
    finally:
        device.set_soc("Ascend910B2")


def test_memory_of_workspaces(device, rng):
    x, target = rng.standard_normal((4, 5)).astype(np.float16), rng.integers(0, 5, 4)
    assert ag.workspace_size("cross_entropy", x, target, backend="npu") > 0
