"""Test that the cross-entropy of rows keeps its digits: near certain targets, many targets, weights of any size."""

from __future__ import annotations

from typing import Any

import cross_entropy_oracles
import hypothesis.strategies as st
import numpy as np
import pytest
from cross_entropy_oracles import (
    CERTAIN_SHAPES,
    GAPS,
    PLACES,
    assert_right,
    near_certain,
    random_arguments,
    same_bits,
)
from hypothesis import assume, given
from samples import DTYPES, generator

import ascend_grad as ag


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize(("shape", "axis"), CERTAIN_SHAPES)
def test_near_certain_targets(gap, shape, axis, dtype, cpu_engines):
    """Loss, entropy and the gradient at the target keep a relative error of 1e-4 down to 1 - p = 1e-12."""
    logits, place = near_certain(gap, shape, axis, dtype)
    arguments = {
        "input": logits,
        "target": place.squeeze(axis),
        "axis": axis,
        "reduction": "none",
        "outputs": ("log_prob", "entropy"),
    }
    right = cross_entropy_oracles.expected(**arguments)
    of_target = np.take_along_axis(right["input_grad"], place, axis).astype(np.float64)
    for engine in cpu_engines():
        out = np.empty(shape, np.float64)
        result = engine.call("cross_entropy", **arguments, out=out)
        at_target = np.take_along_axis(out, place, axis)
        np.testing.assert_allclose(at_target, of_target, rtol=1e-4, err_msg=engine.name)
        for name in ("loss", "log_prob", "entropy"):
            text = f"{engine.name} {name}"
            np.testing.assert_allclose(getattr(result, name), right[name].astype(np.float64), rtol=1e-4, err_msg=text)


def test_gradients_at_nearly_certain_targets_of_outputs(cpu_engines):
    x = np.zeros((3, 40))
    x[:, 7] = (12.0, 20.0, 27.0)
    arguments = {"input": x, "target": np.full(3, 7), "grad_loss": 0.0, "grad_log_prob": np.array([1.0, -2.0, 3.0])}
    right = cross_entropy_oracles.expected(**arguments)["input_grad"].astype(np.float64)
    for engine in cpu_engines():
        found = engine.call("cross_entropy", **arguments).input_grad
        np.testing.assert_allclose(found, right, rtol=1e-9, err_msg=engine.name)


@pytest.mark.parametrize("gap", [30.0, -30.0])
def test_gradients_at_targets_keep_their_digits(gap, cpu_engine):
    """Gradients at sparse targets are accurate where they are tiny beside the other terms of the row.

    Entry 1 is a target of weight 0. With a positive gap it has a probability of 1e-13, otherwise 1 - p is 1e-13 there.
    """
    x = np.array([[0.5, 0.5 - gap, 0.0, -1.0]])
    target, prob = np.array([[0, 1, 1, 3]]), np.array([[0.75, 0.0, 0.0, 0.25]])
    if gap < 0:
        target, prob = np.array([[1, 1, 1, 1]]), np.array([[0.25, 0.25, 0.25, 0.25]])
    grad = cpu_engine.call("cross_entropy", x, target, target_prob=prob, reduction="sum").input_grad
    right = cross_entropy_oracles.expected(x, target, target_prob=prob, reduction="sum")["input_grad"]
    right = right.reshape(grad.shape)
    if gap < 0:  # the gradients of a row add up to 0; at its target the oracle has lost digits
        right[0, 1] = -(right.sum() - right[0, 1])
    np.testing.assert_allclose(grad, right.astype(np.float64), rtol=1e-12)


@pytest.mark.parametrize("K", [2, 3, 8, 9, 32, 33, 700])
def test_several_targets_of_few_entries(K, dtype, cpu_engine):
    """Targets that are the same entry, in any order and number, are added up; ignored ones take no part."""
    arguments = random_arguments("several", (6, 37), -1, dtype, options={"class_weight": "classes"}, K=K)
    g = generator("entries", K)
    arguments["target"] = g.choice([0, 5, 36, -100], size=(6, K), p=[0.4, 0.3, 0.2, 0.1])
    arguments["target"][0] = -100
    result = cpu_engine.call("cross_entropy", **arguments)
    assert_right(result, cross_entropy_oracles.expected(**arguments), dtype)
    # Few targets are compared with one another, many are found in a table.
    for name, value in ("target", -100), ("target_prob", 2):
        more = np.full((6, 40), value, arguments[name].dtype)
        arguments[name] = np.concatenate([arguments[name], more], axis=-1)
    assert same_bits([result, cpu_engine.call("cross_entropy", **arguments)])
    # An entry of the row may be the one that is ignored.
    assert_right(
        cpu_engine.call("cross_entropy", **arguments | {"target": np.abs(arguments["target"]) % 37}, ignore_index=5),
        cross_entropy_oracles.expected(**arguments | {"target": np.abs(arguments["target"]) % 37}, ignore_index=5),
        dtype,
    )


def test_many_equal_targets_are_added_up(cpu_engine):
    target, prob = np.array([[2, 2, 0, 2, -100]]), np.array([[0.1, 0.2, 0.3, 0.4, 9.0]])
    x = np.array([[0.5, -1.0, 2.0]])
    result = cpu_engine.call("cross_entropy", x, target, target_prob=prob)
    single = cpu_engine.call("cross_entropy", x, np.array([[0, 2]]), target_prob=np.array([[0.3, 0.7]]))
    np.testing.assert_allclose(result.input_grad, single.input_grad, rtol=1e-14)


# ---- numbers of any size ---------------------------------------------------------------------------------------------


def test_temperatures_beyond_the_limits_count_as_the_nearest_one(cpu_engine):
    for temperature, nearest in ((1e60, 2.0**60), (1e-60, 2.0**-60)):
        for options in ({}, {"label_smoothing": 0.3}, {"outputs": ("lse", "log_prob")}):
            x = np.array([[1e18, -1e18, 1]] if temperature > 1 else [[1e-18, 0, 0]], np.float32)
            results = [
                cpu_engine.call("cross_entropy", x, [0], temperature=each, **options) for each in (temperature, nearest)
            ]
            assert same_bits(results)
            right = ag.cross_entropy(x, [0], temperature=temperature, **options, backend="reference")
            np.testing.assert_allclose(results[0].loss, right.loss, rtol=1e-4)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.3}, {"outputs": ("lse", "log_prob")}])
def test_a_temperature_without_a_reciprocal_in_float64(options, cpu_engine):
    for x in (np.zeros((1, 2)), np.array([[0.0, -np.inf]]), np.array([[1e-309, 0.0]])):
        result = cpu_engine.call("cross_entropy", x, [0], temperature=1e-310, **options)
        right = ag.cross_entropy(x, [0], temperature=1e-310, **options, backend="reference")
        np.testing.assert_allclose(result.loss, right.loss, rtol=1e-12)


def assert_scaled(result: Any, right: dict[str, np.ndarray], dtype: str, text: str) -> None:
    """Check results of the dtype of the logits, whose right values may be too large for it."""
    with np.errstate(over="ignore"):
        rounded = {
            name: np.asarray(right[name]).astype(np.float64).astype(value.dtype)
            for name, value in result._asdict().items()
            if value is not None
        }
    assert_right(result, rounded, dtype, text)


@pytest.mark.parametrize("size", [1e-300, 1e-50, 1e50, 1e300])
@pytest.mark.parametrize(("shape", "axis"), PLACES)
def test_a_mean_does_not_depend_on_the_size_of_weights(size, shape, axis, dtype, cpu_engines):
    """Weights of float64 beyond the range of float32 cancel in a mean, of tokens and of classes."""
    options = {"class_weight": "classes", "label_smoothing": 0.2}
    arguments = random_arguments("size", shape, axis, dtype, options=options)
    rows = arguments["target"].shape
    for name, few in (("class_weight", shape[axis]), ("token_weight", rows)):
        each = arguments | {name: (generator("size", name).random(few) + 0.25) * size}
        right = cross_entropy_oracles.expected(**each)
        for engine in cpu_engines():
            assert_right(engine.call("cross_entropy", **each), right, dtype, f"{engine.name} {name}")
        assert_right(ag.cross_entropy(**each, backend="reference"), right, dtype, f"reference {name}")


@pytest.mark.parametrize("small", [1e-20, 1e-37])
def test_class_weights_of_different_sizes(small, cpu_engines):
    """Weights that float32 holds keep their digits beside much larger ones."""
    x, target = np.array([[200, 0, 1]], np.float32), np.array([0])
    arguments = {"class_weight": np.array([1e30, small, small]), "label_smoothing": 1.0, "reduction": "none"}
    right = ag.cross_entropy(x.astype(np.float64), target, **arguments, backend="reference")
    for engine in cpu_engines():
        found = engine.call("cross_entropy", input=x, target=target, **arguments)
        np.testing.assert_allclose(found.loss, right.loss, rtol=1e-5, err_msg=engine.name)
        layer = ag.linear_cross_entropy(np.ones((1, 1), np.float32), x.T, target, **arguments)
        np.testing.assert_allclose(layer.loss, right.loss, rtol=1e-5)


@pytest.mark.parametrize("exponent", [-300, -50, 50, 300])
@pytest.mark.parametrize(("shape", "axis"), PLACES[:4])
def test_factors_meet_in_float64(exponent, shape, axis, dtype, cpu_engines):
    """Factors of a row whose product is ordinary give ordinary gradients, whatever the size of each factor is."""
    sizes = {"class_weight": 10.0**exponent, "token_weight": 10.0**-exponent}
    base = random_arguments(
        "factors", shape, axis, dtype, options={"class_weight": "classes", "token_weight": "rows", "reduction": "none"}
    )
    for smoothing, square in ((0.0, 0.0), (0.2, 0.0), (0.2, 0.01)):
        arguments = base | {"label_smoothing": smoothing, "lse_square_scale": 0.0}
        arguments |= {name: np.asarray(base[name], np.float64) * size for name, size in sizes.items()}
        if square:
            arguments["lse_square_scale"] = square * sizes["class_weight"]
        right = cross_entropy_oracles.expected(**arguments)
        for engine in cpu_engines():
            assert_right(engine.call("cross_entropy", **arguments), right, dtype, engine.name)
        assert_right(ag.cross_entropy(**arguments, backend="reference"), right, dtype, "reference")


@given(st.data())
def test_weights_of_any_size(cpu_engines, data):
    dtype = data.draw(st.sampled_from(("float32", "float64", "bfloat16")))
    shape, axis = data.draw(st.sampled_from((((4, 7), -1), ((5, 9), 0), ((3, 200), -1))))
    rows = tuple(length for place, length in enumerate(shape) if place != axis % 2)
    of_classes, spread = data.draw(st.integers(-140, 140)), data.draw(st.sampled_from((0, 1, 150)))
    most = 290 - spread - abs(of_classes)  # sums of products of weights are within the range of float64
    of_rows = data.draw(st.integers(-min(most, 140), min(most, 140)))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    exponents = of_classes + spread * random.uniform(-1, 1, shape[axis])
    arguments = random_arguments("any size", shape, axis, dtype) | {
        "class_weight": (random.random(shape[axis]) + 0.1) * 10.0**exponents,
        "token_weight": (random.random(rows) + 0.1) * 10.0**of_rows,
        "label_smoothing": data.draw(st.sampled_from((0.0, 0.1, 1.0))),
        "lse_square_scale": data.draw(st.sampled_from((0.0, 1e-3))),
        "reduction": data.draw(st.sampled_from(("mean", "sum", "none"))),
    }
    if arguments["reduction"] != "mean":
        arguments["grad_loss"] = 10.0 ** -(of_classes + of_rows)
    right = cross_entropy_oracles.expected(**arguments)
    # A gradient that overflows the accumulators may be NaN.
    assume(np.all(np.abs(right["input_grad"]) < (1e38 if dtype != "float64" else 1e308)))
    for engine in cpu_engines():
        assert_scaled(engine.call("cross_entropy", **arguments), right, dtype, engine.name)
    assert_scaled(ag.cross_entropy(**arguments, backend="reference"), right, dtype, "reference")


@pytest.mark.parametrize(
    "options",
    [
        {"logit_scale": 0}, {"logit_scale": 1e-300}, {"logit_scale": -1e300}, {"logit_scale": 1e300},
        {"softcap": 1e-300}, {"softcap": 1e300}, {"softcap": 1e-3, "logit_scale": 1e30},
        {"logit_scale": 2.0**59, "temperature": 2.0**59}, {"logit_scale": -(2.0**59), "temperature": 2.0**59},
        {"softcap": 2.0**60, "temperature": 2.0**60},
    ],
    ids=str,
)  # fmt: skip
def test_limits_of_transformed_logits(options, dtype, cpu_engine):
    """Extreme numbers count as the limits that the reference has, and the linear loss."""
    random = generator("limits", dtype)
    x, target = (3 * random.standard_normal((5, 9))).astype(DTYPES[dtype]), random.integers(0, 9, 5)
    options = options | {"outputs": ("lse", "entropy", "log_prob"), "reduction": "none"}
    result = cpu_engine.call("cross_entropy", x, target, out=np.empty(x.shape), **options)
    right = ag.cross_entropy(x, target, out=np.empty(x.shape), **options, backend="reference")
    for name, value in result._asdict().items():
        expected = getattr(right, name)
        size = np.max(np.abs(expected), initial=1)
        np.testing.assert_allclose(value, expected, rtol=2e-5, atol=1e-6 * size, err_msg=name)
