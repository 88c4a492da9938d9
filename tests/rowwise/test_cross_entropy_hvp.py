"""Test products of the Hessian of the cross-entropy of rows and a vector."""

from __future__ import annotations

import cross_entropy_oracles
import hypothesis.strategies as st
import numpy as np
import pytest
from cross_entropy_oracles import (
    CERTAIN_SHAPES,
    GAPS,
    LAYOUTS,
    PLACES,
    SHAPES,
    assert_product,
    expected_product,
    in_layout,
    near_certain,
    products,
    random_arguments,
    random_options,
    with_vector,
)
from hypothesis import given
from samples import DTYPES, generator

import ascend_grad as ag


@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_every_option(shape, axis, dtype, cpu_engines):
    for number, arguments in enumerate(products("options", shape, axis, dtype)):
        right = expected_product(arguments, dtype)
        for engine in cpu_engines():
            for layout in LAYOUTS if number % 3 == 0 else LAYOUTS[:2]:
                moved = {name: in_layout(arguments[name], layout) for name in ("input", "vector")}
                product = engine.call("cross_entropy_hvp", **arguments | moved)
                assert_product(product, right, dtype, f"{engine.name} {number} {layout}")


@pytest.mark.parametrize(("shape", "axis"), SHAPES[:9])
def test_the_reference(shape, axis, dtype):
    for arguments in products("reference", shape, axis, dtype):
        product = ag.cross_entropy_hvp(**arguments, backend="reference")
        assert_product(product, expected_product(arguments, dtype), dtype)
        assert product.strides == ag.cross_entropy_hvp(**arguments).strides


@given(st.data())
def test_random_calls(cpu_engines, data):
    dtype = data.draw(st.sampled_from(list(DTYPES)))
    shape, axis, options = random_options(data)
    K = data.draw(st.sampled_from((0, 0, 4)))
    arguments = with_vector("random", random_arguments("random", shape, axis, dtype, options=options, K=K))
    for name in ("input", "vector"):
        arguments[name] = in_layout(arguments[name], data.draw(st.sampled_from(LAYOUTS)))
    right = expected_product(arguments, dtype)
    for engine in cpu_engines():
        assert_product(engine.call("cross_entropy_hvp", **arguments), right, dtype)


@pytest.mark.parametrize(("shape", "axis"), PLACES)
def test_threads_and_layouts_have_equal_bits(shape, axis, dtype, cpu_engine):
    for options in ({}, {"temperature": "rows"}, {"softcap": 3.0}):
        arguments = with_vector("bits", random_arguments("bits", shape, axis, dtype, options=options))
        products = {
            cpu_engine.call(
                "cross_entropy_hvp",
                **arguments | {name: in_layout(arguments[name], layout) for name in ("input", "vector")},
                num_threads=threads,
            ).tobytes()
            for layout in LAYOUTS
            for threads in (1, 2, 3, 4)
        }
        assert len(products) == 1


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize(("shape", "axis"), CERTAIN_SHAPES)
def test_nearly_certain_rows(gap, shape, axis, dtype, cpu_engine):
    """The product at the certain entry is a difference of nearly equal numbers, whose digits are kept."""
    x, place = near_certain(gap, shape, axis, dtype)
    arguments = {"input": x, "target": np.squeeze(place, axis), "axis": axis, "reduction": "sum"}
    arguments["vector"] = np.zeros(x.shape, x.dtype)
    np.put_along_axis(arguments["vector"], place, 1, axis)  # the other elements add up to nothing
    product, right = cpu_engine.call("cross_entropy_hvp", **arguments), cross_entropy_oracles.expected(**arguments)
    error = 1e-4 + {"float16": 2.0**-10, "bfloat16": 2.0**-8}.get(dtype, 0.0)
    np.testing.assert_allclose(
        np.take_along_axis(product, place, axis).astype(np.float64),
        np.take_along_axis(right["product"], place, axis).astype(np.float64),
        rtol=error,
        atol=6e-8 if dtype == "float16" else 0,
    )


def test_finite_differences_of_the_gradient(cpu_engine):
    for number, arguments in enumerate(products("differences", (3, 5), -1, "float64")):
        of_loss = {name: each for name, each in arguments.items() if name != "vector"}
        x, step = arguments["input"], 1e-5 * arguments["vector"].astype(np.float64)
        first, second = (
            cpu_engine.call("cross_entropy", **of_loss | {"input": each}).input_grad for each in (x - step, x + step)
        )
        product = cpu_engine.call("cross_entropy_hvp", **arguments)
        np.testing.assert_allclose(product, (second - first) / 2e-5, atol=1e-8, err_msg=str(number))


def test_symmetry_and_the_diagonal(cpu_engine):
    for arguments in products("symmetry", (4, 6), -1, "float64"):
        x = arguments["input"]
        other = np.random.default_rng(3).standard_normal(x.shape)
        first = np.sum(other * cpu_engine.call("cross_entropy_hvp", **arguments))
        second = np.sum(arguments["vector"] * cpu_engine.call("cross_entropy_hvp", **arguments | {"vector": other}))
        assert first == pytest.approx(second, abs=1e-12)
        of_loss = {name: each for name, each in arguments.items() if name != "vector"}
        diagonal = cpu_engine.call("cross_entropy", **of_loss, outputs=("hessian_diag",)).hessian_diag
        for v in range(x.shape[-1]):
            unit = np.zeros_like(x)
            unit[:, v] = 1
            column = cpu_engine.call("cross_entropy_hvp", **arguments | {"vector": unit})[:, v]
            np.testing.assert_allclose(column, diagonal[:, v], atol=1e-13)


def test_ignored_and_absent_rows_are_zero(dtype, cpu_engine):
    x = np.array([[np.nan, 1, 2], [0, 1, 2], [3, np.inf, 1], [3, 1, 1]], DTYPES[dtype])
    vector = np.array([[np.nan, 1, 1], [np.inf, 1, 1], [1, 2, 3], [1, 2, 3]], DTYPES[dtype])
    call = {"grad_loss": np.array([1.0, 0.0, 1.0, 1.0]), "reduction": "none"}
    for softcap in (None, 5.0):
        product = cpu_engine.call("cross_entropy_hvp", x, np.array([-100, 1, 2, 0]), vector, softcap=softcap, **call)
        assert not product[:2].any()
        assert softcap is not None or np.isnan(product[2].astype(np.float64)).all()
        assert np.all(product[3] != 0)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0, 3), ()])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_shapes_without_rows_or_axes(shape, backend):
    x = np.ones(shape, np.float32)
    product = ag.cross_entropy_hvp(x, np.zeros(shape[:-1], int), x, backend=backend)
    assert product.shape == shape
    assert shape or product == 0


@pytest.mark.parametrize(
    ("vector", "message"),
    [
        (np.ones((3, 2)), r"vector: expected shape \(2, 3\) as input has, got \(3, 2\)"),
        (np.ones((2, 3), int), "vector: expected dtype"),
        (None, "vector: expected an array, got None"),
    ],
)
def test_what_is_refused(vector, message):
    with pytest.raises(ag.AscendGradError, match=f"cross_entropy_hvp: {message}"):
        ag.cross_entropy_hvp(np.zeros((2, 3)), np.array([0, 1]), vector)


def test_workspace_size_and_explain():
    arguments = with_vector("size", random_arguments("size", (30, 50), -1, "float32"))
    of_call = "cross_entropy_hvp", arguments["input"], arguments["target"], arguments["vector"]
    assert ag.explain(*of_call).backend == "cpu"
    assert 0 < ag.workspace_size(*of_call) < 1 << 20


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_certain_targets_below_a_softcap(dtype, cpu_engines):
    """Where the slope of the softcap has lost digits, products of nearly certain targets keep theirs."""
    random = generator("certain", dtype)
    x = np.zeros((200, 3), DTYPES[dtype])
    x[:, 0] = random.uniform(60, 200, 200)
    arguments = {"input": x, "target": np.zeros(200, int), "softcap": 50.0, "reduction": "sum"}
    arguments["vector"] = random.standard_normal(x.shape).astype(x.dtype)
    right = ag.cross_entropy_hvp(**arguments, backend="reference")
    for engine in cpu_engines():
        product = engine.call("cross_entropy_hvp", **arguments)
        np.testing.assert_allclose(product, right, rtol=1e-3, atol=1e-30, err_msg=engine.name)
