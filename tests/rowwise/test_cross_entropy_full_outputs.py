"""Test the outputs of the cross-entropy of the shape of the logits: probabilities, and the diagonal of the Hessian."""

from __future__ import annotations

import cross_entropy_oracles
import hypothesis.strategies as st
import numpy as np
import pytest
from cross_entropy_oracles import (
    CERTAIN_SHAPES,
    GAPS,
    LAYOUTS,
    OPTIONS_OF_SECOND_ORDER,
    PLACES,
    SHAPES,
    assert_right,
    assert_slopes,
    in_layout,
    near_certain,
    random_arguments,
    random_options,
    same_bits,
)
from hypothesis import given
from samples import DTYPES, assert_identical

import ascend_grad as ag

BOTH = ("prob", "hessian_diag")


def calls(key: object, shape: tuple[int, ...], axis: int, dtype: str):
    """Yield the arguments of calls with every option, and one target, several, or probabilities of all classes."""
    for number, options in enumerate(OPTIONS_OF_SECOND_ORDER):
        for K, dense in ((0, None), (3, None), (0, dtype)):
            if K and number % 2:
                options = {**options, "outputs": ("lse",)}
            further = {"outputs": (*options.get("outputs", ()), *BOTH), "return_grad": number % 3 > 0}
            yield random_arguments((key, number), shape, axis, dtype, options=options | further, K=K, dense=dense)


@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_every_option(shape, axis, dtype, cpu_engines):
    for number, arguments in enumerate(calls("options", shape, axis, dtype)):
        right = cross_entropy_oracles.expected(**arguments)
        for engine in cpu_engines():
            for layout in LAYOUTS if number % 3 == 0 else LAYOUTS[:2]:
                x = in_layout(arguments["input"], layout)
                result = engine.call("cross_entropy", **arguments | {"input": x})
                assert_right(result, right, dtype, f"{engine.name} {number} {layout}")
                assert result.prob.dtype == result.hessian_diag.dtype == DTYPES[dtype]


@pytest.mark.parametrize(("shape", "axis"), SHAPES[:9])
def test_the_reference(shape, axis, dtype):
    for arguments in calls("reference", shape, axis, dtype):
        result = ag.cross_entropy(**arguments, backend="reference")
        assert_right(result, cross_entropy_oracles.expected(**arguments), dtype)
        assert result.prob.strides == ag.cross_entropy(**arguments).prob.strides


@given(st.data())
def test_random_calls(cpu_engines, data):
    dtype = data.draw(st.sampled_from(list(DTYPES)))
    outputs = [*BOTH, "lse", "entropy"]
    further = {
        "outputs": tuple(tuple(each) for each in (outputs[:1], outputs[1:2], outputs[:2], outputs)),
        "grad_lse": (None,),
        "grad_entropy": (None,),
        "return_grad": (True, False),
    }
    shape, axis, options = random_options(data, **further)
    arguments = random_arguments("random", shape, axis, dtype, options=options, K=data.draw(st.sampled_from((0, 0, 4))))
    arguments["input"] = in_layout(arguments["input"], data.draw(st.sampled_from(LAYOUTS)))
    right = cross_entropy_oracles.expected(**arguments)
    for engine in cpu_engines():
        assert_right(engine.call("cross_entropy", **arguments), right, dtype)


@pytest.mark.parametrize(("shape", "axis"), PLACES)
def test_threads_and_layouts_have_equal_bits(shape, axis, dtype, cpu_engine):
    for options in ({}, {"temperature": "rows"}, {"softcap": 3.0}):
        arguments = random_arguments("bits", shape, axis, dtype, options={**options, "outputs": BOTH})
        results = [
            cpu_engine.call(
                "cross_entropy", **arguments | {"input": in_layout(arguments["input"], layout)}, num_threads=threads
            )
            for layout in LAYOUTS
            for threads in (1, 2, 3, 4)
        ]
        assert same_bits(results)
        assert results[0].input_grad.tobytes() == ag.cross_entropy(**arguments | {"outputs": ()}).input_grad.tobytes()


@pytest.mark.parametrize("classes", [1, 2, 3, 5, 8, 17, 31, 32, 33])
def test_columns_have_the_bits_of_rows(classes, dtype, cpu_engine):
    """Few classes are computed by columns, and a single row as a row."""
    options_of_columns = (
        {},
        {"token_weight": "rows", "class_weight": "classes"},
        {"label_smoothing": 0.1, "token_weight": "rows", "temperature": 0.7},
        {"class_weight": "classes", "grad_loss": -2.0},
        {"return_grad": False},
    )
    special = [np.inf, 60, -np.inf, np.nan, 0, -60, 500, 1, 0, 0]
    for number, options in enumerate(options_of_columns):
        for shape, axis in (((530, classes), -1), ((3, classes, 90), 1)):
            key = "columns", number
            arguments = random_arguments(key, shape, axis, dtype, options={**options, "reduction": "sum"})
            rows = np.moveaxis(arguments["input"], axis, -1).reshape(-1, classes)
            rows[:10, 0], rows[10:20, -1] = special, special
            arguments["input"] = np.moveaxis(rows.reshape(np.moveaxis(arguments["input"], axis, -1).shape), -1, axis)
            for name in ("token_weight", "class_weight"):
                if name in arguments:
                    arguments[name].reshape(-1)[::3] = 0
            each = [
                cpu_engine.call(
                    "cross_entropy",
                    **arguments
                    | {"input": rows[i : i + 1], "axis": -1, "outputs": BOTH}
                    | {n: arguments[n].reshape(-1)[i : i + 1] for n in ("target", "token_weight") if n in arguments},
                )
                for i in range(30)
            ]
            for layout in LAYOUTS:
                given = arguments | {"input": in_layout(arguments["input"], layout)}
                for outputs in (BOTH, ("prob",), ("hessian_diag",)):
                    found = cpu_engine.call("cross_entropy", **given, outputs=outputs, num_threads=3)
                    for name in (*outputs, "input_grad") if options.get("return_grad", True) else outputs:
                        result = np.moveaxis(getattr(found, name), axis, -1).reshape(-1, classes)
                        right = np.concatenate([getattr(row, name) for row in each])
                        assert_identical(result[:30], right)


def test_they_are_written_before_a_gradient_in_place(dtype):
    for options in ({}, {"softcap": 3.0}):
        arguments = random_arguments("in place", (40, 300), -1, dtype, options={**options, "outputs": BOTH})
        right, x = ag.cross_entropy(**arguments), arguments["input"].copy()
        result = ag.cross_entropy(**arguments | {"input": x}, out=x)
        assert result.input_grad is x
        assert same_bits([right, result])
        wide = ag.cross_entropy(**arguments, out=np.empty(x.shape, np.float32))
        assert same_bits([wide[2:], right[2:]])


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize(("shape", "axis"), CERTAIN_SHAPES)
def test_nearly_certain_rows(gap, shape, axis, dtype, cpu_engine):
    x, place = near_certain(gap, shape, axis, dtype)
    arguments = {"input": x, "target": np.squeeze(place, axis), "axis": axis, "reduction": "sum", "outputs": BOTH}
    result, right = cpu_engine.call("cross_entropy", **arguments), cross_entropy_oracles.expected(**arguments)
    error = 1e-4 + {"float16": 2.0**-10, "bfloat16": 2.0**-8}.get(dtype, 0.0)
    found = np.take_along_axis(result.hessian_diag, place, axis).astype(np.float64)
    np.testing.assert_allclose(
        found,
        np.take_along_axis(right["hessian_diag"], place, axis).astype(np.float64),
        rtol=error,
        atol=6e-8 if dtype == "float16" else 0,
    )


def test_finite_differences_of_the_gradient(cpu_engine):
    for number, arguments in enumerate(calls("differences", (3, 5), -1, "float64")):
        if arguments.get("reduction") == "none":
            continue
        x = arguments["input"]
        diagonal = cpu_engine.call("cross_entropy", **arguments).hessian_diag
        for v in range(x.shape[-1]):

            def slope_at(moved, arguments=arguments, v=v):
                given = arguments | {"input": moved, "return_grad": True, "outputs": ()}
                return cpu_engine.call("cross_entropy", **given).input_grad[:, v].sum()

            column = np.zeros_like(x)
            column[:, v] = diagonal[:, v]
            for row in range(len(x)):
                step = np.zeros_like(x)
                step[row, v] = 1e-5
                measured = (slope_at(x + step) - slope_at(x - step)) / 2e-5
                assert measured == pytest.approx(diagonal[row, v], abs=1e-8), number


def test_ignored_and_absent_rows_are_zero(dtype, cpu_engine):
    x = np.array([[np.nan, 1, 2], [0, 1, 2], [3, np.inf, 1], [3, 1, 1]], DTYPES[dtype])
    for softcap in (None, 5.0):
        result = cpu_engine.call(
            "cross_entropy",
            x,
            np.array([-100, 1, 2, 0]),
            reduction="none",
            grad_loss=np.array([1.0, 0.0, 1.0, 1.0]),
            softcap=softcap,
            outputs=BOTH,
        )
        assert not result.prob[0].any()
        assert not result.hessian_diag[:2].any()
        assert np.all(result.prob[1] > 0)
        assert softcap is not None or np.isnan(result.prob[2].astype(np.float64)).all()
    for absent in ({"grad_loss": 0.0}, {"token_weight": np.array([1.0, 1.0, 0.0, 1.0]), "ignore_index": 0}):
        result = cpu_engine.call("cross_entropy", x, np.array([0, 1, 2, 0]), outputs=BOTH, **absent)
        assert not result.hessian_diag[[0, 2, 3]].any()
    nothing = cpu_engine.call("cross_entropy", x, np.full(4, -100), outputs=BOTH)
    assert not nothing.hessian_diag.any()


@pytest.mark.parametrize("shape", [(0, 3), (2, 0, 3), ()])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_shapes_without_rows_or_axes(shape, backend):
    target = np.zeros(shape[:-1], int)
    result = ag.cross_entropy(np.ones(shape, np.float32), target, outputs=BOTH, backend=backend)
    assert result.prob.shape == result.hessian_diag.shape == shape
    assert shape or (result.prob == 1 and result.hessian_diag == 0)


def test_what_is_refused():
    x, target = np.zeros((2, 3)), np.array([0, 1])
    match = "outputs: expected no 'hessian_diag' with grad_entropy, which is not part of this Hessian, got both"
    with pytest.raises(ag.ParamInvalidError, match=match):
        ag.cross_entropy(x, target, outputs=BOTH, grad_entropy=np.ones(2))
    assert ag.cross_entropy(x, target, outputs=("prob",), grad_entropy=np.ones(2)).prob.shape == (2, 3)
    for name in BOTH:
        with pytest.raises(ag.ParamInvalidError, match=f"outputs: expected a tuple .*'correct', got '{name}'"):
            ag.linear_cross_entropy(x, np.zeros((4, 3)), target, outputs=(name,))


def test_workspace_size_and_explain():
    arguments = random_arguments("size", (30, 50), -1, "float32", options={"outputs": BOTH})
    given = {name: each for name, each in arguments.items() if name not in ("input", "target", "axis")}
    of_call = "cross_entropy", arguments["input"], arguments["target"]
    assert ag.explain(*of_call, **given).backend == "cpu"
    assert 0 < ag.workspace_size(*of_call, **given) < 1 << 20


def test_slopes_of_probabilities():
    x = np.random.default_rng(1).standard_normal((2, 4))
    prob = ag.cross_entropy(x, np.zeros(2, int), outputs=("prob",)).prob
    weights = np.random.default_rng(2).standard_normal(x.shape)

    def total(moved):
        return np.sum(weights * ag.cross_entropy(moved, np.zeros(2, int), outputs=("prob",)).prob)

    assert_slopes(total, x, ag.softmax_backward(weights, prob))
