"""Test the loss of a linear layer by blocks: values of the reference for random problems, memory, and failures."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from linear_block_problems import (
    BACKWARD,
    LOSS,
    backward_of,
    check,
    in_float64,
    on_device,
    on_the_host,
    random_arguments,
)
from ml_dtypes import bfloat16

import ascend_grad as ag
from ascend_grad import npu
from ascend_grad.backends.ascend import linear_blocks

SYSTEMS = ("Ascend950PR_9589", "Ascend910B2")


@pytest.fixture
def ascend_950(device, monkeypatch):
    """Let the device be one that lacks the fused operators."""
    monkeypatch.setitem(npu.runtime.found, "state", npu.runtime.state()._replace(soc=SYSTEMS[0]))
    device.set_soc(SYSTEMS[0])
    yield device
    device.set_soc("Ascend910B2")


@pytest.fixture
def small_blocks(monkeypatch):
    """Let blocks have 3 rows and at most 16 columns."""
    monkeypatch.setattr(linear_blocks, "LOGIT_BYTES", 1_500_000)


@pytest.mark.parametrize("seed", range(300))
def test_random_problems(seed, ascend_950, request):
    if seed % 2:
        request.getfixturevalue("small_blocks")
    arguments = random_arguments(seed)
    for function, given in ((LOSS, arguments), (BACKWARD, backward_of(arguments, seed))):
        assert ag.explain(function, **given).backend == "npu"
        expected = in_float64(function, given)
        check(getattr(ag, function)(**given), expected, given)
        results = getattr(ag, function)(**on_device(given))
        assert all(each is None or isinstance(each, npu.DeviceArray) for each in results)
        check(results, expected, given)


@pytest.mark.parametrize("seed", range(0, 300, 6))
def test_what_the_fused_operators_lack(seed, device):
    """On a system that has the fused operators, blocks compute calls with other dtypes and options, or few entries."""
    arguments = random_arguments(seed)
    device.reset()
    check(ag.linear_cross_entropy(**arguments), in_float64(LOSS, arguments), arguments)
    assert device.calls("aclnnCrossEntropyLoss") == 1


def test_the_fused_operators_have_precedence(device, rng):
    x, w = (rng.standard_normal(shape).astype(np.float16) for shape in ((5, 4), (130, 4)))
    target = rng.integers(0, 130, 5)
    for options, is_fused in (
        ({}, True),
        ({"outputs": ("lse", "log_prob"), "token_weight": np.ones(5)}, True),
        ({"bias": np.zeros(130, np.float32)}, False),
        ({"temperature": 2.0}, False),
        ({"weight": w[:127], "target": target % 127}, False),
        ({"input": x.astype(np.float32), "weight": w.astype(np.float32)}, False),
    ):
        device.reset()
        ag.linear_cross_entropy(**{"input": x, "weight": w, "target": target, **options}, backend="npu")
        assert (device.calls("aclnnFusedLinearOnlineMaxSum") > 0) == is_fused
        assert (device.calls("aclnnMm") > 0) != is_fused


@pytest.mark.parametrize("dtype", [np.float32, bfloat16])
def test_memory_is_bounded(dtype, ascend_950):
    """The memory of the device holds operands, gradients and a few blocks, whatever the number of logits is."""
    x, w = np.zeros((300, 2), dtype), np.zeros((20_000, 2), dtype)
    target = np.arange(300)
    kept = 2 * (x.nbytes + w.nbytes) + 4 * x.size
    ascend_950.set_memory(kept + (6 << 20))
    try:
        npu.release()
        loss = ag.linear_cross_entropy(x, w, target, workspace_bytes=4 << 20, backend="npu").loss
    finally:
        npu.release()
        ascend_950.set_memory(1 << 30)
    assert loss == pytest.approx(np.log(20_000))
    assert ascend_950.calls("aclnnMm") >= 4 * 6  # the logits alone have six times the workspace


def test_the_memory_is_full(ascend_950):
    """A call fails if its blocks do not fit, and releases what it had."""
    x, w, target = np.zeros((200, 2), np.float16), np.zeros((3000, 2), np.float16), np.zeros(200, int)
    npu.release()
    ascend_950.set_memory(1 << 20)
    try:
        with pytest.raises(ag.AclError) as info:
            ag.linear_cross_entropy(x, w, target, backend="npu")
    finally:
        ascend_950.set_memory(1 << 30)
    assert info.value.code in (207001, 207018)
    assert ag.linear_cross_entropy(x, w, target, backend="npu").loss == pytest.approx(np.log(3000))


def test_no_matrices_pass_through_the_host(ascend_950, rng, small_blocks):
    """Matrices of arrays on the device stay there; vectors of rows, entries and blocks are copied."""
    x, w = (npu.asarray(rng.standard_normal(shape).astype(np.float16)) for shape in ((16, 512), (64, 512)))
    target = npu.asarray(rng.integers(0, 64, 16))
    ascend_950.reset()
    ag.linear_cross_entropy(x, w, target)
    for counter in ("bytes_h2d", "bytes_d2h"):
        assert ascend_950.counter(counter) < 16 * 512


def test_rows_without_a_gradient_may_hold_anything(ascend_950, rng):
    x, w = rng.standard_normal((6, 4)).astype(np.float32), rng.standard_normal((9, 4)).astype(np.float32)
    x[1], x[4] = np.nan, np.inf
    weight, target = np.array([1, 0, 1, 2, 0, 1], np.float32), rng.integers(0, 9, 6)
    kept = weight > 0
    given = {"input": x, "weight": w, "target": target, "token_weight": weight}
    expected = in_float64(LOSS, {**given, **{name: given[name][kept] for name in ("input", "target", "token_weight")}})
    for arguments in (given, on_device(given)):
        loss, input_grad, weight_grad = map(on_the_host, ag.linear_cross_entropy(**arguments)[:3])
        np.testing.assert_allclose(loss, expected.loss, rtol=1e-5)
        np.testing.assert_allclose(input_grad[kept], expected.input_grad, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(weight_grad, expected.weight_grad, rtol=1e-4, atol=1e-6)
        assert np.all(input_grad[~kept] == 0)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"label_smoothing": 0.1, "class_weight": True}])
@pytest.mark.parametrize("excluded", [slice(0, 20), slice(14, None), slice(3, 7), slice(0, 40)])
def test_blocks_of_excluded_entries(excluded, options, ascend_950, rng, small_blocks):
    """Biases of negative infinity exclude entries and whole blocks, with and without targets and weights there."""
    x, w = rng.standard_normal((8, 3)).astype(np.float32), rng.standard_normal((40, 3)).astype(np.float32)
    arguments = {"input": x, "weight": w, "target": np.arange(8) * 5, "bias": np.zeros(40, np.float32)}
    arguments["bias"][excluded] = -np.inf
    arguments |= {"reduction": "none", "outputs": ("lse", "log_prob"), "return_grad": False, **options}
    if "class_weight" in options:
        arguments["class_weight"] = rng.random(40, np.float32)
        arguments["class_weight"][excluded] = 0
    expected = ag.linear_cross_entropy(**arguments, backend="cpu")
    for got, right in zip(ag.linear_cross_entropy(**arguments, backend="npu"), expected):
        if right is not None:
            np.testing.assert_allclose(got, right, rtol=1e-5)


def test_all_rows_are_ignored(ascend_950):
    x, w, target = np.ones((3, 4), np.float16), np.ones((5, 4), np.float16), np.full(3, -100)
    result = ag.linear_cross_entropy(x, w, target, bias=np.ones(5, np.float32), label_smoothing=0.1, backend="npu")
    assert np.isnan(result.loss)
    for gradient in (result.input_grad, result.weight_grad, result.bias_grad):
        assert not gradient.any()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"outputs": ("predicted",)}, "outputs: the device's operators do not support predicted in the loss"),
        ({"outputs": ("lse", "entropy")}, "outputs: the device's operators do not support entropy in the loss"),
        ({"target": np.ones((3, 5))}, "target: the device's operators do not support probabilities of all"),
        ({"input": np.ones((3, 4)), "weight": np.ones((5, 4))}, "input: the device supports dtype float32 or float16"),
    ],
)
def test_what_the_cpu_computes(options, reason, ascend_950):
    call = {"input": np.ones((3, 4), np.float32), "weight": np.ones((5, 4), np.float32), "target": np.zeros(3, int)}
    choice = ag.explain(LOSS, **call | options)
    assert choice.backend == "cpu"
    assert reason in choice.reason
    with pytest.raises(ag.ParamInvalidError, match=reason):
        ag.linear_cross_entropy(**call | options, backend="npu")


@pytest.mark.parametrize("soc", ["Ascend910A", "Ascend310P3", "Ascend310B1"])
def test_systems_without_products_of_float32(soc, device, monkeypatch):
    monkeypatch.setitem(npu.runtime.found, "state", npu.runtime.state()._replace(soc=soc))
    x, target = np.eye(4, dtype=np.float32), np.arange(4)
    assert "the operator exists only on 910B, 910_93, 950" in ag.explain(LOSS, x, x, target).reason


@pytest.mark.parametrize("missing", ["aclnnMm", "aclnnCrossEntropyLoss", "aclnnCrossEntropyLossGrad"])
def test_a_toolkit_that_lacks_an_operator(missing, ascend_950, monkeypatch):
    """The CPU computes what lacks an operator. Where the fused operators are, these compute what no document lists."""
    monkeypatch.setitem(npu.runtime.found, "state", npu.runtime.state()._replace(absent={missing: f"no {missing}"}))
    x, target = np.ones((4, 4), np.float16), np.arange(4)
    choice = ag.explain(LOSS, x, x, target)
    assert (choice.backend, f"no {missing}" in choice.reason) == ("cpu", True)
    monkeypatch.setitem(npu.runtime.found, "state", npu.runtime.state()._replace(soc=SYSTEMS[1]))
    forced = ag.explain(LOSS, x, x, target, backend="npu")
    assert "the vendor documents V of at least 128, got 4" in forced.reason
    assert forced.backend == "npu"


def test_faults_at_every_call(ascend_950, rng, small_blocks):
    """A failure of any call of the device raises, leaves the arguments as they were, and loses nothing."""
    arguments = {
        "input": rng.standard_normal((4, 3)).astype(np.float16),
        "weight": rng.standard_normal((20, 3)).astype(np.float16),
        "target": np.array([0, 19, -100, 7]),
        "bias": np.zeros(20, np.float32),
        "class_weight": np.ones(20, np.float32),
        "label_smoothing": 0.1,
        "lse_square_scale": 0.1,
        "softcap": 3.0,
    }
    for given in (arguments, on_device(arguments)):
        expected = [on_the_host(each) for each in ag.linear_cross_entropy(**given)]
        ascend_950.reset()
        ag.linear_cross_entropy(**given)
        for nth in range(1, ascend_950.calls() + 1, 3):
            ascend_950.fail("*", nth)
            with contextlib.suppress(ag.AclError):
                ag.linear_cross_entropy(**given, backend="npu")
            ascend_950.reset()
            for result, right in zip(ag.linear_cross_entropy(**given, backend="npu"), expected, strict=True):
                assert np.array_equal(on_the_host(result), right)


def test_the_workspace_is_that_of_one_block(ascend_950, small_blocks):
    x, w, target = np.zeros((4, 2), np.float16), np.zeros((2048, 2), np.float16), np.zeros(4, int)
    sizes = [ag.workspace_size(LOSS, x, w[:entries], target, backend="npu") for entries in (14, 28, 1400)]
    assert sizes[0] > 0
    assert len({*sizes}) == 1


def test_a_call_without_elements(ascend_950):
    for shapes in (((0, 3), (5, 3)), ((2, 0), (5, 0))):
        x, w = (np.zeros(shape, np.float32) for shape in shapes)
        result = ag.linear_cross_entropy(x, w, np.zeros(len(x), int), reduction="sum", backend="npu")
        assert result.loss == pytest.approx(len(x) * np.log(5))
        assert not result.weight_grad.any()
