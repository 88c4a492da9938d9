"""Test the cross-entropy of rows: values, gradients, bits and memory over options, layouts and threads."""

from __future__ import annotations

import itertools
from typing import Any

import cross_entropy_oracles
import hypothesis.strategies as st
import numpy as np
import pytest
from cross_entropy_oracles import (
    CHOICES,
    LAYOUTS,
    SHAPES,
    assert_right,
    assert_slopes,
    in_layout,
    random_arguments,
    random_options,
    same_bits,
)
from hypothesis import given
from samples import DTYPES, assert_fresh, generator

import ascend_grad as ag

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
                if result.input_grad is not None:
                    assert_fresh(result.input_grad, x.shape, DTYPES[dtype], x)


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
    K = data.draw(st.sampled_from((0, 0, 1, 4)))
    further = {"outputs": (*CHOICES["outputs"], ("log_prob",)), "grad_log_prob": (None, "targets")}
    shape, axis, options = random_options(data, **further)
    if K and data.draw(st.booleans(), label="no probabilities"):
        options["target_prob"] = 0
    arguments = random_arguments("random", shape, axis, dtype, options=options, K=K)
    arguments["input"] = in_layout(arguments["input"], data.draw(st.sampled_from(LAYOUTS)))
    right = cross_entropy_oracles.expected(**arguments)
    for engine in cpu_engines():
        assert_right(engine.call("cross_entropy", **arguments), right, dtype)


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


@pytest.mark.parametrize("K", [1, 2, 5, 8, 33])
@pytest.mark.parametrize("options", [{}, {"class_weight": "classes", "label_smoothing": 0.1}, {"grad_entropy": "rows"}])
def test_rows_of_several_targets_have_the_bits_of_rows_alone(K, options, dtype, cpu_engine):
    """Vectors across rows, with some targets equal, ignored or nearly certain, compute what one row alone gets."""
    options = options | {"reduction": "none"}
    arguments = random_arguments("alone", (37, 6), -1, dtype, options=options, K=K)
    arguments["input"][::3, 2] = 40
    arguments["target"][5] = -100
    arguments["target"][::4, 0] = -100
    right = cross_entropy_oracles.expected(**arguments)
    together = cpu_engine.call("cross_entropy", **arguments)
    assert_right(together, right, dtype)
    columns = cpu_engine.call(
        "cross_entropy", **arguments | {"input": np.ascontiguousarray(arguments["input"].T), "axis": 0}
    )
    assert columns.loss.tobytes() == together.loss.tobytes()
    assert columns.input_grad.T.tobytes() == together.input_grad.tobytes()
    of_rows = [name for name in ("input", "target", "target_prob", "grad_entropy") if name in arguments]
    for i in range(37):
        one = {name: arguments[name][i : i + 1] for name in of_rows}
        alone = cpu_engine.call("cross_entropy", **arguments | one)
        assert alone.loss.tobytes() == together.loss[i : i + 1].tobytes()
        assert alone.input_grad.tobytes() == together.input_grad[i : i + 1].tobytes()


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


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("K", [0, 1, 3])
@pytest.mark.parametrize("options", [{}, {"token_weight": "rows"}, {"class_weight": "classes", "label_smoothing": 0.1}])
def test_ignored_rows_have_no_gradient_whatever_their_logits(K, options, value, dtype, cpu_engine):
    arguments = random_arguments("ignored", (37, 6), -1, dtype, options=options, K=K)
    arguments["input"][5::6, 2] = value
    arguments["target"][5::6] = -100
    for axis in (-1, 0):
        arguments |= {"input": np.ascontiguousarray(np.moveaxis(arguments["input"], -1, axis)), "axis": axis}
        result = cpu_engine.call("cross_entropy", **arguments)
        assert not np.moveaxis(result.input_grad, axis, -1)[5::6].any()
        assert_right(result, cross_entropy_oracles.expected(**arguments), dtype)


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


def test_zeros_have_equal_signs_in_every_layout(dtype, cpu_engines):
    """Also where an upstream gradient is 0 in the kernels' dtype."""
    x, target = generator("signs").standard_normal((257, 33)).astype(DTYPES[dtype]), np.arange(257) % 33
    wide = np.zeros((257, 40), DTYPES[dtype])
    wide[:, :33] = x
    for engine in cpu_engines():
        for label_smoothing in (0.0, 0.1):
            options = {"denominator": 1e300, "grad_loss": -1.0, "label_smoothing": label_smoothing}
            right = engine.call("cross_entropy", x, target, **options).input_grad
            with_gaps = engine.call("cross_entropy", wide[:, :33], target, **options).input_grad
            columns = engine.call("cross_entropy", x.T.copy(), target, axis=0, **options).input_grad
            assert right.tobytes() == np.ascontiguousarray(with_gaps).tobytes() == columns.T.tobytes(), engine.name


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


# ---- plans and memory ------------------------------------------------------------------------------------------------


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
            # Targets are copied, and probabilities converted to float64. Losses of rows are also float64. The targets
            # of one row have to fit, however many they are. If rows are split, logits and exponentials at all targets
            # are kept.
            of_target = 32 if "split" in ag.explain(*call, **given).plan else 16
            assert size < of_target * rows * K + 8 * rows + (3 << 20) + 110 * K, engine.name
