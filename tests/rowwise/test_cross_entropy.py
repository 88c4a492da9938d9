"""Test the cross-entropy of rows: its values over all options, layouts and threads, and what it refuses."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import threading
import warnings
from typing import Any

import cross_entropy_oracles
import hypothesis.strategies as st
import numpy as np
import pytest
import scipy.special
from cross_entropy_oracles import (
    LAYOUTS,
    PLACES,
    SHAPES,
    assert_right,
    assert_slopes,
    in_layout,
    random_arguments,
    same_bits,
)
from hypothesis import assume, given
from samples import DTYPES, generator

import ascend_grad as ag
from ascend_grad import LossResult
from ascend_grad.operators import table

OUTPUTS = ("lse", "log_prob", "entropy", "predicted", "correct")

#: Options, as `random_arguments` takes them.
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"reduction": "sum", "label_smoothing": 0.1},
    {"reduction": "none", "class_weight": "classes", "grad_loss": "rows"},
    {"class_weight": "classes", "label_smoothing": 0.2, "temperature": 0.7, "lse_square_scale": 1e-2},
    {"temperature": "rows", "token_weight": "rows", "outputs": OUTPUTS},
    {"outputs": ("correct", "lse"), "lse_square_scale": 0.1, "denominator": 7.0},
    {"return_grad": False, "outputs": ("log_prob", "lse"), "reduction": "sum"},
    {"token_weight": "rows", "lse_square_scale": 1e-3, "grad_loss": -2.5},
    {"class_weight": "classes", "token_weight": "rows", "reduction": "none"},
    {"token_weight": "rows", "label_smoothing": 0.3, "temperature": 0.7, "grad_loss": -2.5},
    {"label_smoothing": 1.0},
    {"grad_lse": "rows"},
    {"grad_lse": "rows", "grad_log_prob": "rows", "grad_entropy": "rows", "label_smoothing": 0.1, "reduction": "sum"},
    {"grad_entropy": "rows", "grad_loss": 0.0, "temperature": "rows"},
    {"grad_entropy": "rows", "grad_log_prob": "rows", "class_weight": "classes", "label_smoothing": 0.2},
    {"logit_scale": 0.4},
    {"logit_scale": 1.7, "temperature": "rows", "label_smoothing": 0.1, "outputs": ("lse",)},
    {"logit_scale": -1.3, "outputs": OUTPUTS, "grad_lse": "rows"},
    {"logit_scale": 0.0, "reduction": "none", "grad_log_prob": "rows"},
    {"softcap": 20.0, "outputs": OUTPUTS},
    {"softcap": 2.0, "logit_scale": -0.7, "temperature": "rows", "class_weight": "classes", "label_smoothing": 0.2},
    {"softcap": 1.5, "grad_entropy": "rows", "grad_lse": "rows", "grad_log_prob": "rows", "lse_square_scale": 0.1},
)
SPARSE: tuple[dict[str, Any], ...] = (
    {},
    {"class_weight": "classes", "label_smoothing": 0.3, "reduction": "none", "outputs": ("lse", "entropy")},
    {"temperature": "rows", "token_weight": "rows", "lse_square_scale": 1e-2, "outputs": ("predicted",)},
    {"grad_lse": "rows", "grad_entropy": "rows", "token_weight": "rows"},
    {"target_prob": 0, "outputs": ("log_prob",), "grad_log_prob": "targets"},
    {"outputs": ("log_prob", "lse"), "grad_log_prob": "targets", "grad_entropy": "rows", "label_smoothing": 0.1},
    {"target_prob": 0.0, "grad_loss": 0.0, "grad_log_prob": "targets", "softcap": 3.0, "temperature": "rows"},
    {"logit_scale": -0.8, "softcap": 2.5, "class_weight": "classes", "outputs": ("log_prob", "entropy")},
)


@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_every_option(shape, axis, dtype, cpu_engines):
    for number, (options, K) in enumerate([*((each, 0) for each in OPTIONS), *((each, 3) for each in SPARSE)]):
        arguments = random_arguments(number, shape, axis, dtype, options=options, K=K)
        right = cross_entropy_oracles.expected(**arguments)
        for engine in cpu_engines():
            for layout in LAYOUTS:
                x = in_layout(arguments["input"], layout)
                result = engine.call("cross_entropy", **arguments | {"input": x})
                assert_right(result, right, dtype, f"{engine.name} {options} {layout}")
                assert result.input_grad is None or result.input_grad.flags.c_contiguous


@pytest.mark.parametrize(("shape", "axis"), SHAPES[:9])
def test_the_reference(shape, axis, dtype):
    for number, (options, K) in enumerate([*((each, 0) for each in OPTIONS), *((each, 3) for each in SPARSE)]):
        arguments = random_arguments(number, shape, axis, dtype, options=options, K=K)
        result = ag.cross_entropy(**arguments, backend="reference")
        assert_right(result, cross_entropy_oracles.expected(**arguments), dtype, f"{options}")
        assert [field is None for field in result] == [field is None for field in ag.cross_entropy(**arguments)]


@given(st.data())
def test_random_calls(cpu_engines, data):
    dtype = data.draw(st.sampled_from(list(DTYPES)))
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    K = data.draw(st.sampled_from((0, 0, 1, 4)))
    choices: dict[str, Any] = {
        "reduction": ("mean", "sum", "none"),
        "class_weight": (None, "classes"),
        "token_weight": (None, "rows"),
        "label_smoothing": (0.0, 0.1, 1.0),
        "lse_square_scale": (0.0, 0.01),
        "temperature": (1.0, 2.5, "rows"),
        "logit_scale": (1.0, 1.0, 0.6, -1.5),
        "softcap": (None, None, 30.0),
        "outputs": ((), ("lse",), ("entropy", "lse"), ("predicted",), ("log_prob",)),
        "grad_lse": (None, "rows"),
        "grad_log_prob": (None, "targets"),
        "grad_entropy": (None, "rows"),
    }
    options = {name: data.draw(st.sampled_from(values), label=name) for name, values in choices.items()}
    if options["reduction"] == "none":
        options["grad_loss"] = data.draw(st.sampled_from((1.0, "rows")))
    if K and data.draw(st.booleans(), label="no probabilities"):
        options["target_prob"] = 0
    arguments = random_arguments("random", shape, axis, dtype, options=options, K=K)
    arguments["input"] = in_layout(arguments["input"], data.draw(st.sampled_from(LAYOUTS)))
    right = cross_entropy_oracles.expected(**arguments)
    for engine in cpu_engines():
        assert_right(engine.call("cross_entropy", **arguments), right, dtype)


# ---- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((3, 70_001), -1),
        ((40_000, 3), 0),
        ((2, 3000, 40), 1),
        ((500, 12), -1),
        ((2, 5, 2000), 1),
        ((2, 32, 300), 1),
        ((4, 3, 5, 1, 9, 2, 6), 2),
        ((3, 2, 7, 3, 2, 4), -1),
    ],
)
def test_threads_and_layouts_have_equal_bits(shape, axis, dtype, cpu_engines):
    for number in (0, 1, 3, 4, 8, 9, 15, 17, 20):
        arguments = random_arguments(number, shape, axis, dtype, options=OPTIONS[number])
        right = cross_entropy_oracles.expected(**arguments)
        ways = [
            {"input": in_layout(arguments["input"], layout), "num_threads": threads}
            for layout, threads in [*(("C", threads) for threads in (1, 2, 3, 4)), ("Fortran", 1), ("steps", 2)]
        ]
        for engine in cpu_engines():
            results = [engine.call("cross_entropy", **arguments | way) for way in ways]
            assert same_bits(results), engine.name
            assert_right(results[0], right, dtype, engine.name)


def test_confident_rows_among_others(dtype, cpu_engine):
    """Sums of exponentials close to 1 are computed again, for one row or several together."""
    arguments = random_arguments("confident", (40, 70), -1, dtype, options={"label_smoothing": 0.1})
    confident = generator("confident", "rows").random(40) < 0.6
    arguments["input"][confident, 3] = 30
    arguments["target"][confident] = 3
    result = cpu_engine.call("cross_entropy", **arguments, reduction="none")
    right = cross_entropy_oracles.expected(**arguments, reduction="none")
    assert_right(result, right, dtype)
    for i in range(40):
        rows = {name: arguments[name][i : i + 1] for name in ("input", "target")}
        alone = cpu_engine.call("cross_entropy", **arguments | rows, reduction="none")
        assert result.loss[i] == alone.loss[0]
        assert result.input_grad[i].tobytes() == alone.input_grad[0].tobytes()


@pytest.mark.parametrize("value", [-1.0, np.inf, np.nan])
def test_odd_weights_give_the_same_in_every_layout(value, dtype, cpu_engine):
    """A loss of 0 has no sign, and infinities and NaN stay in their rows, whatever the plan."""
    x = np.zeros((256, 2), DTYPES[dtype])
    x[:, 0] = 1000
    target = np.repeat([0, 1], 128)
    weight = np.array([value, 0.5], "float64" if dtype == "float64" else "float32")
    for options in ({"class_weight": weight}, {"token_weight": weight[target]}):
        results = [
            cpu_engine.call(
                "cross_entropy", in_layout(x, layout), target, reduction="none", **options, **more, num_threads=threads
            )
            for layout, threads, more in itertools.product(LAYOUTS, (1, 2), ({}, {"outputs": ("predicted",)}))
        ]
        for result in results:
            assert not np.any(np.signbit(result.loss[result.loss == 0]))
            np.testing.assert_array_equal(result.loss, results[0].loss)
            np.testing.assert_array_equal(result.input_grad.astype(float), results[0].input_grad.astype(float))


@pytest.mark.parametrize("K", [0, 1, 3])
@pytest.mark.parametrize("weight", [np.nan, np.inf])
def test_rows_without_an_upstream_gradient_have_none(weight, K, dtype, cpu_engine):
    shape = (2, K) if K else (2,)
    options = {"target_prob": np.ones(shape, "float64" if dtype == "float64" else "float32")} if K else {}
    token_weight = np.array([weight, 1], "float64" if dtype == "float64" else "float32")
    result = cpu_engine.call(
        "cross_entropy", np.zeros((2, 4), DTYPES[dtype]), np.zeros(shape, int), grad_loss=0.0, reduction="sum",
        token_weight=token_weight, **options
    )  # fmt: skip
    assert np.all(result.input_grad == 0)


def test_in_place_and_other_outs(dtype, cpu_engine):
    for (shape, axis), options in itertools.product([((9, 130), -1), ((2, 6, 70), 1), ((50, 3), -1)], OPTIONS[:5]):
        arguments = random_arguments("out", shape, axis, dtype, options=options)
        fresh = cpu_engine.call("cross_entropy", **arguments)
        x = arguments["input"].copy()
        result = cpu_engine.call("cross_entropy", **arguments | {"input": x}, out=x)
        assert result.input_grad is x
        assert same_bits([fresh, result])
        shifted = np.empty((shape[0] + 1, *shape[1:]), x.dtype)
        shifted[:-1] = arguments["input"]
        result = cpu_engine.call("cross_entropy", **arguments | {"input": shifted[:-1]}, out=shifted[1:])
        assert same_bits([fresh, result])
        right = cross_entropy_oracles.expected(**arguments)
        for other in DTYPES.values():
            out = np.full(shape, 7, other).T.copy().T
            result = cpu_engine.call("cross_entropy", **arguments, out=out)
            assert result.input_grad is out
            assert_right(result, right, min(str(other), dtype, key=lambda name: np.dtype(DTYPES[name]).itemsize))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_a_result_of_another_dtype_is_rounded_once_along_any_axis(dtype, out_dtype, cpu_engine):
    """Columns of few elements have the bits of rows, whatever the dtype of the result."""
    rng = generator("rounded once", dtype, out_dtype)
    x = (3 * rng.standard_normal((2, 5, 700))).astype(dtype)
    target = rng.integers(0, 5, (2, 700))
    columns = cpu_engine.call("cross_entropy", x, target, 1, out=np.empty(x.shape, out_dtype)).input_grad
    rows = np.ascontiguousarray(np.moveaxis(x, 1, -1))
    expected = cpu_engine.call("cross_entropy", rows, target, -1, out=np.empty(rows.shape, out_dtype)).input_grad
    assert np.moveaxis(columns, 1, -1).tobytes() == expected.tobytes()


# ---- accuracy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gap", [0.5, 3.0, 10.0, 20.0, 27.5])
@pytest.mark.parametrize(("shape", "axis"), [((5, 17), -1), ((3, 4096), -1), ((2, 9, 70), 1), ((2, 40_000), -1)])
def test_near_certain_targets(gap, shape, axis, dtype, cpu_engines):
    """Loss, entropy and the gradient at the target keep a relative error of 1e-4 down to 1 - p = 1e-12."""
    random = generator("certain", gap, shape, dtype)
    vocabulary = shape[axis]
    rows = tuple(length for place, length in enumerate(shape) if place != axis % len(shape))
    target = random.integers(0, vocabulary, rows)
    logits = np.round(random.random(shape) * 4) / 4 - gap - np.log(vocabulary)
    np.put_along_axis(logits, np.expand_dims(target, axis), 0, axis)
    arguments = {
        "input": (logits + 2).astype(DTYPES[dtype]),
        "target": target,
        "axis": axis,
        "reduction": "none",
        "outputs": ("log_prob", "entropy"),
    }
    right = cross_entropy_oracles.expected(**arguments)
    of_target = np.take_along_axis(right["input_grad"], np.expand_dims(target, axis), axis).astype(np.float64)
    for engine in cpu_engines():
        out = np.empty(shape, np.float64)
        result = engine.call("cross_entropy", **arguments, out=out)
        at_target = np.take_along_axis(out, np.expand_dims(target, axis), axis)
        np.testing.assert_allclose(at_target, of_target, rtol=1e-4, err_msg=engine.name)
        for name in ("loss", "log_prob", "entropy"):
            text = f"{engine.name} {name}"
            np.testing.assert_allclose(getattr(result, name), right[name].astype(np.float64), rtol=1e-4, err_msg=text)


def test_finite_differences(cpu_engine):
    for options, K in [(OPTIONS[3], 0), (OPTIONS[7], 0), (OPTIONS[20], 0), (SPARSE[2], 2), (SPARSE[7], 2)]:
        arguments = random_arguments("differences", (4, 6), -1, "float64", options=options, K=K)
        x, upstream = arguments["input"], arguments.get("grad_loss", 1.0)
        gradient = cpu_engine.call("cross_entropy", **arguments).input_grad

        def loss(moved, arguments=arguments, upstream=upstream):
            given = arguments | {"input": moved}
            return upstream * cpu_engine.call("cross_entropy", **given, return_grad=False).loss

        assert_slopes(loss, x, gradient)


def test_finite_differences_of_outputs(cpu_engine):
    names = ("lse", "log_prob", "entropy")
    options = {f"grad_{name}": "rows" for name in names} | {"temperature": "rows", "outputs": names}
    for further, K in (({}, 0), ({"softcap": 2.0}, 0), ({"grad_log_prob": "targets", "target_prob": 0}, 3)):
        arguments = random_arguments("outputs", (4, 6), -1, "float64", options=options | further, K=K)

        def total(moved, arguments=arguments):
            result = cpu_engine.call("cross_entropy", **arguments | {"input": moved}, return_grad=False)
            return result.loss + sum(np.sum(arguments[f"grad_{name}"] * getattr(result, name)) for name in names)

        assert_slopes(total, arguments["input"], cpu_engine.call("cross_entropy", **arguments).input_grad)


def test_gradients_of_outputs_of_few_rows_or_logits(cpu_engines):
    """Ignored rows are not read, and neither rows of weight 0 nor an undefined mean lack gradients of outputs."""
    x = np.array([[0.0, -np.inf, 1.0, -np.inf], [1.0, 2.0, 3.0, 4.0], [np.nan, 1.0, 2.0, 3.0], [5.0, 0.0, 0.0, 1.0]])
    arguments = {
        "target": np.array([2, 0, -100, 1]),
        "token_weight": np.array([0.0, 0.0, 1.0, 0.0]),
        "grad_lse": np.array([1.0, 0.0, np.nan, 0.5]),
        "grad_log_prob": np.array([0.5, 0.0, np.nan, 2.0]),
        "grad_entropy": np.array([2.0, 0.0, np.nan, -1.0]),
    }
    for dtype in ("float32", "float64", "bfloat16"):
        wide = {**arguments, "input": x.astype(DTYPES[dtype])}
        right = cross_entropy_oracles.expected(**wide)
        assert not right["input_grad"][[1, 2]].any()
        assert right["input_grad"][[0, 3]].any(axis=-1).all()
        for engine in cpu_engines():
            result = engine.call("cross_entropy", **wide)
            assert np.isnan(result.loss)
            assert_right(result._replace(loss=None), right, dtype, engine.name)
            in_place = wide["input"].copy()
            engine.call("cross_entropy", **wide | {"input": in_place}, out=in_place)
            assert in_place.tobytes() == result.input_grad.tobytes()


def test_gradients_at_nearly_certain_targets_of_outputs(cpu_engines):
    x = np.zeros((3, 40))
    x[:, 7] = (12.0, 20.0, 27.0)
    arguments = {"input": x, "target": np.full(3, 7), "grad_loss": 0.0, "grad_log_prob": np.array([1.0, -2.0, 3.0])}
    right = cross_entropy_oracles.expected(**arguments)["input_grad"].astype(np.float64)
    for engine in cpu_engines():
        found = engine.call("cross_entropy", **arguments).input_grad
        np.testing.assert_allclose(found, right, rtol=1e-9, err_msg=engine.name)


def test_extreme_logits(cpu_engine):
    x = np.array([[0.0, -np.inf, 1.0], [np.nan, 0.0, 1.0], [np.inf, 0.0, 1.0], [3e38, -3e38, 0.0], [-np.inf] * 3])
    arguments = {"target": np.array([0, 1, 1, 0, 0]), "reduction": "none", "outputs": ("lse", "predicted")}
    for dtype in (np.float32, np.float64):
        loss, gradient, lse, predicted = cpu_engine.call("cross_entropy", x.astype(dtype), **arguments)
        assert np.isfinite(loss).tolist() == [True, False, False, True, False]
        assert np.isnan(gradient).all(axis=-1).tolist() == [False, True, True, False, True]
        assert gradient[0, 1] == 0
        assert np.isnan(lse).tolist() == [False, True, False, False, False]
        assert predicted.tolist() == [2, 0, 0, 0, 0]


def test_rows_that_add_nothing(dtype, cpu_engine):
    """Ignored rows, rows of weight 0 and rows without an upstream gradient have gradients of +0, whatever they hold."""
    for (shape, axis), value in itertools.product([((6, 40), -1), ((6, 3), -1), ((40, 6), 0)], (np.nan, np.inf)):
        arguments = random_arguments("nothing", shape, axis, dtype, options={"reduction": "none"})
        x = np.moveaxis(arguments["input"], axis, -1)
        x[:3] = value
        arguments["target"][:] = 1
        arguments["target"][0] = -100
        arguments["token_weight"] = np.array([1, 0, 1, 1, 1, 1], np.float64 if dtype == "float64" else np.float32)
        for smoothing in (0.0, 0.1):  # without upstream gradients of rows, as column kernels have none
            gradient = cpu_engine.call("cross_entropy", **arguments | {"label_smoothing": smoothing}).input_grad
            rows = np.moveaxis(gradient, axis, -1).astype(np.float64)
            assert not rows[:2].any()
            assert not np.signbit(rows[:2]).any()
            assert np.isnan(rows[2]).any()
            assert rows[3:].any(axis=-1).all()
        arguments["grad_loss"] = np.array([1, 1, 0, 1, 1, 1], np.float32)
        loss, gradient = cpu_engine.call("cross_entropy", **arguments)
        rows = np.moveaxis(gradient, axis, -1).astype(np.float64)
        assert not rows[:3].any()
        assert not np.signbit(rows[:3]).any()
        assert rows[3:].any(axis=-1).all()
        assert loss[:2].tolist() == [0, 0]
        assert np.isnan(loss[2])
        assert np.isfinite(loss[3:]).all()


@pytest.mark.parametrize(
    "options",
    [
        {"grad_loss": np.inf},
        {"grad_loss": -np.inf, "temperature": 1e-200},
        {"reduction": "mean", "denominator": 1e-310},
        {"token_weight": np.full(65, np.inf)},
        {"class_weight": np.array([1.0, np.inf, 1.0])},
        {"grad_loss": -1.0},
        {"token_weight": np.where(np.arange(65) % 2, -1.0, 1.0)},
        {"grad_loss": -1.0, "label_smoothing": 0.2},
        {"grad_loss": np.inf, "label_smoothing": 0.2},
    ],
)
def test_infinite_factors_and_signs_of_zeros_do_not_depend_on_the_layout(options, dtype, cpu_engine):
    x = np.tile(np.array([-2000.0, 0, 1]), (65, 1)).astype(dtype)
    arguments = {"target": np.ones(65, int), "reduction": "sum"} | options
    columns = np.zeros((6, 130), x.dtype)[::2, ::2]
    columns[...] = x.T
    gradients = [
        cpu_engine.call("cross_entropy", x, axis=1, **arguments).input_grad.T,
        cpu_engine.call("cross_entropy", np.ascontiguousarray(x.T), axis=0, **arguments).input_grad,
        *(
            cpu_engine.call("cross_entropy", columns, axis=0, **arguments, num_threads=threads).input_grad
            for threads in (1, 2)
        ),
    ]
    first, *others = (each.astype(np.float64) for each in gradients)
    for each in others:
        np.testing.assert_array_equal(each, first)
        assert ((np.signbit(each) == np.signbit(first)) | np.isnan(first)).all()


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"lse_square_scale": 0.1}, {"outputs": ("lse",)}])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_nothing_arrives_at_rows_of_weight_0_and_at_means_over_nothing(options, backend):
    x = np.array([[1.0, 2.0, 3.0], [np.nan, 0.0, 0.0], [0.0, 0.0, 1.0]])
    for grad in (1.0, np.nan, np.inf):
        for weights in ({"token_weight": np.array([0.0, 0.0, 1.0])}, {"token_weight": np.array([0.0, -1.0, 1.0])}):
            gradient = ag.cross_entropy(x, [0, 1, 1], **weights, **options, grad_loss=grad, backend=backend).input_grad
            is_nothing = weights["token_weight"].sum() == 0
            assert not gradient[: None if is_nothing else 2].any()
            assert is_nothing or gradient[2].any()
        weights = {"class_weight": np.array([0.0, 0.0, 1.0])}
        gradient = ag.cross_entropy(x, [0, 1, 1], **weights, **options, grad_loss=grad, backend=backend).input_grad
        assert not gradient.any()


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


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.5}, {"reduction": "sum", "outputs": ("lse", "entropy")}])
def test_a_logit_of_rank_0_is_certain(options, dtype, cpu_engine):
    result = cpu_engine.call("cross_entropy", np.array(1.5, DTYPES[dtype]), 0, 0, **options)
    assert (result.loss, result.input_grad, result.input_grad.shape) == (0, 0, ())
    assert (result.lse, result.entropy) == ((1.5, 0) if "outputs" in options else (None, None))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_means_over_nothing(backend):
    x, target = np.ones((2, 3)), np.array([-100, -100])
    loss, gradient = ag.cross_entropy(x, target, backend=backend)
    assert np.isnan(loss)
    assert not gradient.any()
    assert ag.cross_entropy(x, target, denominator=2.0, backend=backend).loss == 0
    assert ag.cross_entropy(x, target, reduction="sum", backend=backend).loss == 0
    result = ag.cross_entropy(x, [0, 1], token_weight=[0.0, 0.0], backend=backend)
    assert np.isnan(result.loss)
    assert not result.input_grad.any()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(
    "options",
    [
        {"token_weight": [1.0, -1.0]},
        {"class_weight": [0.0, 0.0, 1.0], "label_smoothing": 0.1},
        {"class_weight": [0.0, 0.0, 0.0], "lse_square_scale": 0.1},
    ],
)
def test_means_over_weights_whose_sum_is_0(options, backend):
    """The mean is NaN, and has no gradient, of logits and of a linear layer."""
    x, target = np.array([[1.0, 2, 3], [0, 0, 5]]), np.array([0, 1])
    for loss, *gradients in (
        ag.cross_entropy(x, target, **options, backend=backend),
        ag.linear_cross_entropy(x, np.eye(3), target, **options, backend=backend),
    ):
        assert np.isnan(loss)
        for gradient in gradients:
            assert not gradient.any()


def test_targets_that_change_during_a_call():
    """Another thread moves targets out of the row. Calls compute or raise an error, and write nothing elsewhere."""
    x, target = np.zeros((20_000, 16), np.float32), np.zeros(20_000, np.int64)
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            target[10_000:] = 10**12
            target[10_000:] = 0

    other = threading.Thread(target=change)
    other.start()
    try:
        for _ in range(300):
            with contextlib.suppress(ag.ParamInvalidError):
                assert np.isfinite(ag.cross_entropy(x, target, num_threads=1).loss)
    finally:
        stop.set()
        other.join()


@pytest.mark.parametrize("function", [ag.cross_entropy, lambda x, t, **more: ag.linear_cross_entropy(x, x, t, **more)])
def test_outputs_that_are_no_names(function):
    with pytest.raises(ag.ParamTypeError, match="cross_entropy: outputs: expected a tuple of names"):
        function(np.eye(3), np.arange(3), outputs=np.array(["lse"]))


def test_no_entries_in_a_row_of_several_targets():
    with pytest.raises(ag.ParamInvalidError, match="target: expected at least one entry for each row"):
        ag.cross_entropy(np.eye(2), np.zeros((2, 0), int), target_prob=np.zeros((2, 0)))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("shape", [(0, 3), (0, 0), (2, 0, 3)])
def test_empty(shape, backend):
    rows = shape[:-1]
    for reduction, loss in (("mean", np.nan), ("sum", 0.0)):
        result = ag.cross_entropy(
            np.ones(shape, np.float32), np.zeros(rows, int), reduction=reduction, outputs=OUTPUTS, backend=backend
        )
        assert result.loss.shape == ()
        np.testing.assert_equal(result.loss.item(), loss)
        assert result.input_grad.shape == shape
        assert result.lse.shape == result.predicted.shape == rows
        assert result.correct == 0
    assert ag.cross_entropy(np.ones(shape), np.zeros(rows, int), reduction="none", backend=backend).loss.shape == rows
    with pytest.raises(ag.ParamInvalidError, match="at least one element along axis 1"):
        ag.cross_entropy(np.ones((2, 0)), np.full(2, -100), backend=backend)


# ---- results ---------------------------------------------------------------------------------------------------------


def test_fields_of_the_result():
    x, target = np.eye(3, dtype=np.float32), np.array([0, 1, 0])
    plain = ag.cross_entropy(x, target)
    assert plain._fields == ("loss", "input_grad")
    assert (plain.lse, plain.correct) == (None, None)
    result = ag.cross_entropy(x, target, outputs=["correct", "lse"], return_grad=False)
    loss, gradient, correct, lse = result
    assert result._fields == ("loss", "input_grad", "correct", "lse")
    assert gradient is None
    assert (result.correct, result.entropy) == (correct, None)
    assert correct == 2
    assert correct.dtype == np.int64
    assert loss.dtype == lse.dtype == np.float32
    assert isinstance(result, LossResult)
    assert pickle.loads(pickle.dumps(result))._fields == result._fields
    assert result._replace(lse=None, loss=1) == (1, None, correct, None)
    with pytest.raises(ValueError, match="unexpected field names"):
        result._replace(los=0)
    assert type(result)._make(result) == result
    assert repr(result._make("abcd")) == "LossResult(loss='a', input_grad='b', correct='c', lse='d')"
    assert "each row's logits" in type(result).lse.__doc__
    match result:
        case LossResult(loss=first) if type(result).__match_args__ == result._fields:
            assert first is loss
        case _:
            pytest.fail("the result does not match its class")


def test_ties_and_nan_are_predicted_as_numpy_does(dtype, cpu_engine):
    random = generator("ties", dtype)
    for shape in ((50, 5), (7, 300), (2, 20_000)):
        x = np.round(2 * random.standard_normal(shape)).astype(DTYPES[dtype])
        x[1, [2, 4]] = np.nan
        result = cpu_engine.call("cross_entropy", x, np.zeros(shape[0], int), outputs=("predicted",), num_threads=2)
        assert np.array_equal(result.predicted, np.argmax(x.astype(np.float64), axis=-1))


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
@pytest.mark.parametrize("target", [0, 1])
def test_class_weight_of_zero_hides_its_class(target, label_smoothing, cpu_engine):
    """The logit of a class of weight 0 may be infinite, in rows and in columns, and as the target."""
    x, target = np.array([[0.0, -np.inf, 1.0]] * 70), np.full(70, target)
    options = {
        "class_weight": np.array([1.0, 0.0, 1.0]),
        "label_smoothing": label_smoothing,
        "reduction": "sum",
    }
    right = cross_entropy_oracles.expected(x, target, **options)
    assert_right(cpu_engine.call("cross_entropy", x, target, **options), right, "float64")
    result = cpu_engine.call("cross_entropy", np.ascontiguousarray(x.T), target, 0, **options)
    assert_right(result, right | {"input_grad": right["input_grad"].T}, "float64")


def test_smoothing_all_of_the_loss_leaves_the_target_no_weight(cpu_engine):
    """The loss is that of all classes alike, whatever the target; it is infinite if a class has the logit -inf."""
    x = np.array([[0.0, 2.0, 1.0]] * 70)
    for axis, logits in ((1, x), (0, np.ascontiguousarray(x.T))):
        loss = cpu_engine.call("cross_entropy", logits, np.full(70, 0), axis, label_smoothing=1.0).loss
        np.testing.assert_allclose(loss, np.log(np.exp(x[0]).sum()) - 1, rtol=1e-12)
    x[:, 0] = -np.inf
    for axis, logits in ((1, x), (0, np.ascontiguousarray(x.T))):
        assert cpu_engine.call("cross_entropy", logits, np.full(70, 0), axis, label_smoothing=1.0).loss == np.inf


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


# ---- coefficients of any size ----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(("shape", "axis"), PLACES)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_an_infinite_class_weight_makes_the_smoothed_loss_infinite(shape, axis, backend, dtype, cpu_engines):
    """Also where its class has the largest logit, or all of the probability."""
    x = np.moveaxis(np.zeros(shape, DTYPES[dtype]), axis, -1)
    x[..., 1] = 2
    x[0, ..., 2] = 1000
    weight = np.ones(shape[axis])
    for place, size in itertools.product((0, 1, 2), (np.inf, -np.inf)):
        weight[:] = 1
        weight[place] = size
        arguments = {"class_weight": weight, "label_smoothing": 0.1, "reduction": "none", "backend": backend}
        logits = np.ascontiguousarray(np.moveaxis(x, -1, axis))
        for _ in cpu_engines() if backend == "cpu" else range(1):
            loss = ag.cross_entropy(logits, np.full(x.shape[:-1], 3), axis, **arguments).loss
            assert np.all(loss == size)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("options", "loss"),
    [
        ({"class_weight": np.array([1.0, 0, 1])}, 0),
        ({"target_prob": np.array([[0.0, 1.0]])}, np.log1p(np.exp(-1))),
        ({"label_smoothing": 1.0}, np.inf),
        ({"label_smoothing": 0.1}, np.inf),
        ({"label_smoothing": 1.0, "class_weight": np.array([1.0, 0, 1])}, (2 * np.log1p(np.exp(-1)) + 1) / 3),
    ],
)
def test_a_weight_of_0_excludes_a_logit_of_minus_infinity(options, loss, backend):
    """So do smoothing of 1 and a probability of 0, in both losses; means over no weight are NaN without a gradient."""
    x = np.array([[0.0, -np.inf, 1.0]])
    target = np.array([[1, 2]] if "target_prob" in options else [1])
    for reduction in ("sum", "mean"):
        more = {"reduction": reduction, "backend": backend, **options}
        of_rows = ag.cross_entropy(x, target, **more)
        of_layer = ag.linear_cross_entropy(np.ones((1, 2)), np.zeros((3, 2)), target, bias=x[0], **more)
        is_undefined = reduction == "mean" and "class_weight" in options
        for result, gradient in ((of_rows.loss, of_rows.input_grad), (of_layer.loss, of_layer.bias_grad)):
            np.testing.assert_allclose(result, np.nan if is_undefined else loss, rtol=1e-12)
            assert np.isfinite(gradient).all()
            assert gradient.any() != (is_undefined or loss == 0)


# ---- infinite logits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "axis"), PLACES)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("layout", "dtype"),  # NumPy has no swapped bfloat16
    [each for each in itertools.product(("C", "steps", "swapped"), DTYPES) if each != ("swapped", "bfloat16")],
)
def test_the_lse_of_infinite_logits_is_that_of_scipy(shape, axis, backend, layout, dtype, cpu_engines):
    """It is infinite where a logit is positive infinite or all are negative infinite, and all other results are NaN."""
    x = generator("infinite", shape).standard_normal(shape)
    rows = np.moveaxis(x, axis, -1).reshape(-1, shape[axis])
    rows = np.resize(rows, (max(len(rows), 7), shape[axis]))
    rows[0] = -np.inf
    rows[1, -1] = np.inf
    rows[2, [0, -1]] = np.inf, np.nan
    rows[3], rows[3, -1] = -np.inf, np.nan
    rows[4] = np.nan
    rows[5, 1] = -np.inf
    target = np.zeros(len(rows), int)
    with np.errstate(all="ignore"):
        right = scipy.special.logsumexp(rows, axis=-1)
    right_rows = np.isfinite(right)
    x = in_layout((rows if axis == -1 else rows.T).astype(DTYPES[dtype]), layout)
    arguments = {"target": target, "axis": -1 if axis == -1 else 0, "reduction": "none", "backend": backend}
    engines = cpu_engines() if backend == "cpu" else range(1)
    for _, outputs in itertools.product(engines, (("lse",), ("entropy", "log_prob", "lse"))):
        result = ag.cross_entropy(x, **arguments, outputs=outputs)
        np.testing.assert_allclose(result.lse.astype(np.float64), right, rtol=2e-2 if dtype == "bfloat16" else 2e-3)
        for name in ("loss", *outputs[:-1]):
            assert np.array_equal(np.isfinite(getattr(result, name)), right_rows)
            assert np.isnan(getattr(result, name)[~right_rows]).all()
    zero = ag.cross_entropy(
        x, **arguments, lse_square_scale=1.0, class_weight=np.zeros(rows.shape[1]), return_grad=False
    ).loss
    np.testing.assert_allclose(zero, right**2, rtol=2e-2 if dtype == "bfloat16" else 4e-3)


# ---- what is refused -------------------------------------------------------------------------------------------------

GOOD: dict[str, Any] = {"input": np.ones((2, 3), np.float32), "target": np.array([0, 2])}
FAULTS = (
    ("input", None, "ParamNullptrError"),
    ("target", None, "ParamNullptrError"),
    ("input", np.ones((2, 3), complex), "ParamTypeError"),
    ("target", np.zeros(2), "ParamTypeError"),
    ("target", np.zeros(2, bool), "ParamTypeError"),
    ("axis", 2, "ParamInvalidError"),
    ("target", np.zeros(3, int), "ParamInvalidError"),
    ("target", np.zeros((2, 1), int), "ParamInvalidError"),
    ("target", np.array([0, 3]), "ParamInvalidError"),
    ("target", np.array([-1, 0]), "ParamInvalidError"),
    ("reduction", "average", "ParamInvalidError"),
    ("reduction", 1, "ParamTypeError"),
    ("ignore_index", 1.0, "ParamTypeError"),
    ("class_weight", np.ones(2), "ParamInvalidError"),
    ("class_weight", np.ones(3, int), "ParamTypeError"),
    ("token_weight", np.ones(3), "ParamInvalidError"),
    ("target_prob", np.ones(2, np.int64), "ParamTypeError"),
    ("target_prob", np.ones(2, np.float32), "ParamInvalidError"),
    ("label_smoothing", 1.5, "ParamInvalidError"),
    ("label_smoothing", -0.1, "ParamInvalidError"),
    ("label_smoothing", np.nan, "ParamInvalidError"),
    ("lse_square_scale", np.inf, "ParamInvalidError"),
    ("temperature", 0.0, "ParamInvalidError"),
    ("temperature", np.array([1.0, -1.0]), "ParamInvalidError"),
    ("temperature", np.ones(3), "ParamInvalidError"),
    ("temperature", "hot", "ParamTypeError"),
    ("denominator", 0.0, "ParamInvalidError"),
    ("grad_loss", np.ones(2), "ParamTypeError"),
    ("grad_lse", np.ones(3), "ParamInvalidError"),
    ("grad_entropy", np.ones(2, int), "ParamTypeError"),
    ("outputs", ("loss",), "ParamInvalidError"),
    ("outputs", ("lse", "lse"), "ParamInvalidError"),
    ("outputs", "lse", "ParamTypeError"),
    ("return_grad", 1, "ParamTypeError"),
    ("out", np.ones((3, 2)), "ParamInvalidError"),
    ("out", [1.0], "ParamTypeError"),
)


@pytest.mark.parametrize(("name", "value", "error"), FAULTS)
def test_faults(name, value, error):
    messages = set()
    for backend in ("cpu", "reference", "auto"):
        with pytest.raises(getattr(ag, error)) as info:
            ag.cross_entropy(**GOOD | {name: value}, backend=backend)
        assert info.value.code == (161001 if error == "ParamNullptrError" else 161002)
        messages.add(str(info.value))
    (message,) = messages
    assert message.startswith("cross_entropy: ")
    assert ": expected " in message
    assert ", got " in message
    if name != "out":
        for question in (ag.explain, ag.workspace_size):
            with pytest.raises(getattr(ag, error)):
                question("cross_entropy", **GOOD | {name: value})


def test_faults_of_two_arguments():
    sparse = GOOD | {"target": np.array([[0], [2]]), "target_prob": np.ones((2, 1), np.float32)}
    for arguments, text in (
        (sparse | {"outputs": ("correct",)}, "no output of a single target, as target_prob is given"),
        (sparse | {"grad_log_prob": np.ones(2)}, r"grad_log_prob: expected shape \(2, 1\) as target has, got \(2,\)"),
        (sparse | {"target_prob": 1.0}, r"target_prob: expected shape \(2, 1\) as target has, got \(\)"),
        (GOOD | {"target_prob": 0}, r"target: expected shape \(2, K\), K entries for each row of input"),
        (sparse | {"target_prob": np.ones((2, 2), np.float32)}, "target_prob: expected shape"),
        (GOOD | {"return_grad": False, "out": np.ones((2, 3))}, "out: expected None"),
        (GOOD | {"axis": 0}, r"target: expected shape \(3,\), that of input without axis 0, got \(2,\)"),
        (GOOD | {"token_weight": np.ones(3)}, r"token_weight: expected shape \(2,\), that of input without axis 1"),
        (GOOD | {"grad_loss": np.ones(2)}, "grad_loss: expected a real number, as reduction is 'mean', got "),
    ):
        with pytest.raises(ag.ParamInvalidError, match=text):
            ag.cross_entropy(**arguments)


def test_nothing_is_written_before_everything_is_checked():
    out = np.full((2, 3), 7.0)
    with pytest.raises(ag.ParamInvalidError):
        ag.cross_entropy(np.ones((2, 3)), np.array([0, 5]), out=out)
    assert np.all(out == 7)


# ---- the call --------------------------------------------------------------------------------------------------------


def test_the_operator_is_described_and_public():
    (operator,) = table.LOSSES
    assert operator is table.OPERATORS["cross_entropy"]
    assert operator.device_name is None
    assert "cross_entropy" in ag.__all__


def test_the_device_has_no_such_operator(device):
    assert ag.explain("cross_entropy", **GOOD).backend == "cpu"
    assert "not npu: the operator has not been brought to the device" in ag.explain("cross_entropy", **GOOD).reason
    with pytest.raises(ag.UnsupportedDeviceError) as info:
        ag.cross_entropy(**GOOD, backend="npu")
    assert info.value.code == 361001


def test_plans_are_explained():
    x = np.ones((4, 100), np.float32)
    plans = [
        ag.explain("cross_entropy", array, np.zeros(length, int), axis, num_threads=1).plan
        for array, length, axis in ((x, 4, -1), (x, 100, 0), (x[:, ::2], 4, -1))
    ]
    assert plans == ["rows in place", "columns in place", "rows, gathered"]


@pytest.mark.parametrize(("shape", "axis"), [((8, 1000), -1), ((300, 40), 0), ((2, 200_000), -1), ((2, 50, 33), 1)])
def test_workspace_is_bounded(shape, axis, dtype):
    for number, options in enumerate(OPTIONS):
        arguments = random_arguments(number, shape, axis, dtype, options=options)
        assert 0 <= ag.workspace_size("cross_entropy", **arguments, num_threads=2) < 64 << 20


@pytest.mark.parametrize("K", [1, 8, 1000, 100_000])
@pytest.mark.parametrize(("shape", "axis"), [((20_000, 16), 1), ((16, 20_000), 0), ((500, 100), 0), ((2000, 130), 1)])
def test_several_targets_take_little_memory_per_thread(shape, axis, K, cpu_engines):
    rows = min(shape[1 - axis], 10**7 // K)  # the targets are copied
    shape = (rows, shape[1]) if axis else (shape[0], rows)
    target = np.broadcast_to(np.int64(0), (rows, K))
    prob = np.broadcast_to(np.float64(1), (rows, K))
    for dtype, out in itertools.product(("float32", "float64"), (None, "float16")):
        call = ("cross_entropy", np.zeros(shape, dtype), target, axis)
        given = {} if out is None else {"out": np.empty(shape, out)}
        given |= {"target_prob": prob, "num_threads": 1, "backend": "cpu"}
        for engine in cpu_engines():
            size = ag.workspace_size(*call, **given)
            # Targets are copied, and probabilities converted to float64. Losses of rows are float64, too. The targets
            # of one row have to fit, however many they are. If rows are split, logits and exponentials at all targets
            # are kept.
            of_target = 32 if "split" in ag.explain(*call, **given).plan else 16
            assert size < of_target * rows * K + 8 * rows + (3 << 20) + 110 * K, engine.name


def test_a_loss_that_overflows_is_infinite_without_a_warning():
    x = np.array([[0, -3e38]], np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = ag.cross_entropy(x, np.array([1]), token_weight=np.full(1, 1e3), reduction="sum", return_grad=False).loss
    assert loss == np.inf


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


def test_infinite_and_missing_logits_that_are_transformed(cpu_engine):
    inf, nan = np.inf, np.nan
    x = np.array([[inf, 1, 2], [-inf, -inf, -inf], [nan, 1, 2], [inf, inf, inf], [1, 2, -inf]], np.float32)
    outputs = ("lse", "entropy", "log_prob", "predicted")
    for options in ({"softcap": 2.0}, {"logit_scale": -1}, {"logit_scale": 0}, {"softcap": 2.0, "logit_scale": 0}):
        arguments = {"target": [0, 0, 0, 1, 1], "reduction": "none", "outputs": outputs, **options}
        result = cpu_engine.call("cross_entropy", x, **arguments)
        right = ag.cross_entropy(x, **arguments, backend="reference")
        for value, expected in zip(result, right, strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
