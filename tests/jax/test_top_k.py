"""Test the largest log-probabilities of a linear layer within JAX: values, gradients, transformations, refusals."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from faults import INVALID, NULL, TYPE, outcome
from samples import assert_identical, generator

import ascend_grad as ag
import ascend_grad.jax as agj

ROWS, CLASSES, FEATURES, K = 6, 9, 4, 3
OPTIONS: dict[str, dict[str, Any]] = {
    "no option": {},
    "transformed": {"logit_scale": -0.7, "softcap": 2.0},
    "temperature": {"temperature": 0.6, "num_threads": 2},
}


@pytest.fixture(autouse=True)
def _all_dtypes():
    with jax.enable_x64(True):
        yield


def layer_of(dtype: Any = "float64", leading: tuple[int, ...] = (ROWS,), *, bias: bool = True) -> dict[str, jax.Array]:
    random = generator("layer", leading)
    shapes = {"input": (*leading, FEATURES), "weight": (CLASSES, FEATURES), **({"bias": (CLASSES,)} if bias else {})}
    return {name: jnp.asarray(random.standard_normal(shape)).astype(dtype) for name, shape in shapes.items()}


def formula(input, weight, k, *, bias=0.0, temperature=1.0, logit_scale=1.0, softcap=None, num_threads=None):
    u = logit_scale * (jnp.einsum("...h,vh->...v", input, weight) + bias)
    z = (u if softcap is None else softcap * jnp.tanh(u / softcap)) / jnp.expand_dims(temperature, -1)
    return jax.lax.top_k(jax.nn.log_softmax(z), k)


def assert_close(got: Any, right: Any, tolerance: float = 1e-11) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), got, right)


# ---- values and gradients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("leading", [(), (ROWS,), (2, 3), (2, 0)], ids=str)
@pytest.mark.parametrize("option", OPTIONS)
def test_values_and_gradients_are_those_of_the_definition(option, leading, transform):
    layer, options = layer_of(leading=leading), dict(OPTIONS[option])
    if option == "transformed":
        options["temperature"] = jnp.asarray(generator("temperature").uniform(0.5, 2.0, leading))
    above = jnp.asarray(generator("upstream").standard_normal((*leading, K)))

    def program(function):
        def total(layer):
            result = function(**layer, k=K, **options)
            return (result[0] * above).sum(), tuple(result)

        return transform(jax.grad(total, has_aux=True))(layer)

    got, right = program(agj.linear_top_k), program(formula)
    assert_close(got, right)
    assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, right)


@pytest.mark.parametrize("option", OPTIONS)
def test_values_have_the_bits_of_the_call_of_arrays(option, dtype):
    layer = layer_of(dtype)
    result = jax.jit(lambda layer: agj.linear_top_k(**layer, k=K, **OPTIONS[option]))(layer)
    right = ag.linear_top_k(**{name: np.asarray(each) for name, each in layer.items()}, k=K, **OPTIONS[option])
    assert type(result) is type(right)
    for got, wanted in zip(result, right, strict=True):
        assert_identical(np.asarray(got), wanted)


def test_gradients_of_every_dtype(dtype):
    """Gradients have the dtypes of their arrays. In 16 bits each is rounded once."""
    layer = layer_of(dtype)
    wide = {name: each.astype(float) for name, each in layer.items()}
    above = jnp.asarray(generator("upstream").standard_normal((ROWS, K)))
    got, right = (
        jax.grad(lambda layer, f=function: (f(**layer, k=K)[0] * above).sum())(each)
        for function, each in ((agj.linear_top_k, layer), (formula, wide))
    )
    for name, each in got.items():
        assert each.dtype == layer[name].dtype
        tolerance = {8: 1e-13, 4: 1e-5, 2: 2.0**-7}[each.dtype.itemsize]
        np.testing.assert_allclose(np.float64(each), right[name], rtol=tolerance, atol=tolerance)


def test_gradients_of_nearly_certain_entries_keep_their_digits():
    input, weight = jnp.array([[18.0, 0.0, 0.0]], jnp.float32), jnp.eye(3, dtype=jnp.float32)
    gradient = jax.grad(lambda x: agj.linear_top_k(x, weight, 1).log_prob.sum())(input)
    np.testing.assert_allclose(gradient, [[2 * np.exp(-18), -np.exp(-18), -np.exp(-18)]], rtol=1e-5)


def test_only_gradients_that_are_needed_are_computed():
    layer = layer_of()
    function = jax.jit(lambda layer: agj.linear_top_k(**layer, k=K))

    def results_of(function, *arguments):
        return re.findall(r"\('results', '([^']*)'\)", str(jax.make_jaxpr(function)(*arguments)))

    assert results_of(function, layer) == ["log_prob index"]
    for name in layer:
        gradient = jax.grad(lambda each, name=name: function({**layer, name: each}).log_prob.sum())
        assert results_of(gradient, layer[name]) == ["log_prob index", f"loss {name}_grad"]
    of_indices = jax.grad(lambda layer: function(layer).index.sum() * layer["bias"].sum())
    assert results_of(of_indices, layer) == ["log_prob index"]


def test_results_while_jax_has_32_bits():
    layer = layer_of("float32")
    right = ag.linear_top_k(**{name: np.asarray(each) for name, each in layer.items()}, k=K)
    with jax.enable_x64(False):
        log_prob, index = jax.jit(lambda layer: agj.linear_top_k(**layer, k=K))(layer)
        gradient = jax.grad(lambda x: agj.linear_top_k(**{**layer, "input": x}, k=1).log_prob.sum())(layer["input"])
    assert (log_prob.dtype, index.dtype, gradient.dtype) == (np.float32, np.int32, np.float32)
    assert_identical(np.asarray(log_prob), right.log_prob)
    assert np.array_equal(index, right.index)


def test_integers_and_kinds_of_numbers():
    input, weight = jnp.arange(6).reshape(2, 3), jnp.arange(12).reshape(4, 3)
    right = ag.linear_top_k(np.asarray(input), np.asarray(weight), 2, temperature=0.5)
    halves = (0.5, np.float64(0.5), jnp.float32(0.5), jnp.full(2, 0.5, jnp.bfloat16), np.full(2, 0.5))
    for k, temperature in zip((2, np.int64(2), np.int32(2), 2, 2), halves, strict=True):
        got = agj.linear_top_k(input, np.asarray(weight), k, temperature=temperature)
        assert_close(tuple(got), tuple(right))
    assert agj.linear_top_k(input, weight.astype(jnp.float32), 2).log_prob.dtype == np.float32


@pytest.mark.parametrize("shape", [(0, 5, 3), (4, 5, 0)], ids=str)
def test_sizes_of_0(shape):
    rows, classes, features = shape
    function = jax.value_and_grad(lambda x, w: agj.linear_top_k(x, w, 2).log_prob.sum(), (0, 1))
    total, gradients = function(jnp.ones((rows, features)), jnp.ones((classes, features)))
    np.testing.assert_allclose(total, -2 * rows * np.log(classes))
    assert [each.shape for each in gradients] == [(rows, features), (classes, features)]
    assert not any(each.any() for each in gradients)


def test_logits_that_are_not_finite():
    bias = jnp.array([0.0, -jnp.inf, 1.0])
    log_prob, index = agj.linear_top_k(jnp.array([[1.0], [jnp.nan]]), jnp.ones((3, 1)), 3, bias=bias)
    right = ag.linear_top_k(np.array([[1.0], [np.nan]]), np.ones((3, 1)), 3, bias=np.asarray(bias))
    assert_identical(np.asarray(log_prob), right.log_prob)
    assert_identical(np.asarray(index), right.index)


def test_large_problems_on_several_threads():
    """One to four threads give the same bits for a problem whose workspace is allocated by its own mapping."""
    random = generator("large")
    input, weight = (jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in ((300, 64), (20000, 64)))
    function = jax.value_and_grad(lambda x, w, n: agj.linear_top_k(x, w, 5, num_threads=n).log_prob.sum(), (0, 1))
    right = function(input, weight, None)
    for n in range(1, 5):
        for got, wanted in zip(jax.tree.leaves(function(input, weight, n)), jax.tree.leaves(right), strict=True):
            assert_identical(np.asarray(got), np.asarray(wanted))


# ---- transformations -------------------------------------------------------------------------------------------------


def test_batches():
    layer = layer_of()
    inputs = jnp.stack([layer["input"], -layer["input"]])
    weights = jnp.stack([layer["weight"], 2 * layer["weight"]])
    weight, input = layer["weight"], layer["input"]
    for axes, arrays in (((0, None), (inputs, weight)), ((None, 0), (input, weights)), ((0, 0), (inputs, weights))):
        for make in (
            lambda f: lambda x, w: tuple(f(x, w, K)),
            lambda f: jax.grad(lambda x, w: (f(x, w, K)[0] ** 2).sum(), (0, 1)),
        ):
            got, right = (jax.jit(jax.vmap(make(f), axes))(*arrays) for f in (agj.linear_top_k, formula))
            assert_close(got, right)


def test_batches_of_temperatures():
    layer, temperatures = layer_of(), jnp.linspace(0.5, 2.0, 4)
    got, right = (
        jax.vmap(lambda t, f=f: tuple(f(**layer, k=K, temperature=t)))(temperatures)
        for f in (agj.linear_top_k, formula)
    )
    assert_close(got, right)


def test_within_loops_and_checkpoints():
    layer = layer_of()
    plain = jax.grad(lambda layer: agj.linear_top_k(**layer, k=K).log_prob.sum())
    again = jax.grad(jax.checkpoint(lambda layer: agj.linear_top_k(**layer, k=K).log_prob.sum()))
    step = jax.jit(lambda layer: jax.tree.map(lambda a, g: a - g, layer, plain(layer)))
    scanned, _ = jax.lax.scan(lambda layer, _: (step(layer), None), layer, length=2)
    assert_close(scanned, step(step(layer)))
    assert_close(again(layer), plain(layer))


@pytest.mark.parametrize("transform", [jax.jit, jax.checkpoint], ids=["jit", "checkpoint"])
@pytest.mark.parametrize("names", [("input", "weight"), ("weight",)])
def test_derivatives_with_respect_to_different_arrays_at_once(names, transform):
    """One compiled program is differentiated with respect to one array after another, and all gradients come later."""
    square = jnp.asarray(generator("square").standard_normal((3, 4, 4)))  # gradients are not told by their shapes
    layer = {"input": square[0], "weight": square[1], "bias": square[2, 0]}

    def gradients(function):
        """Return the gradient with respect to all arrays, and the one with respect to each of these."""
        total = transform(lambda layer: function(**layer, k=K)[0].sum())
        of_all = jax.vjp(total, layer)[1]
        parts = [jax.vjp(lambda each, name=name: total({**layer, name: each}), layer[name])[1] for name in names]
        return [each(jnp.float64(1))[0] for each in (of_all, *parts)]

    assert_close(gradients(agj.linear_top_k), gradients(formula))


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_bad_arguments():
    x, w = jnp.zeros((3, 2)), jnp.zeros((5, 2))
    for arguments, settings, kind, message in (
        ((None, w, 2), {}, NULL, "input: expected an array, got None"),
        ((x, None, 2), {}, NULL, "weight: expected an array, got None"),
        ((x, [[1.0]], 2), {}, TYPE, "weight: expected an array of jax or NumPy, or a number, got list"),
        ((x, w.astype(jnp.float16), 2), {}, TYPE, "weight: expected dtype float64"),
        ((x, w.T, 2), {}, INVALID, r"weight: expected shape (V, H = 2), got (2, 5) (did you mean weight.T?)"),
        ((x, w[:0], 1), {}, INVALID, "weight: expected"),
        ((x, w, 0), {}, INVALID, "k: expected"),
        ((x, w, 6), {}, INVALID, "k: expected at most 128, and at most V = 5, got 6"),
        ((x, w, 1.5), {}, INVALID, "k: expected an int"),
        ((x, w, 2), {"bias": x}, INVALID, "bias: expected shape (V = 5), got (3, 2)"),
        ((x, w, 2), {"temperature": 0.0}, INVALID, "temperature: expected a positive finite number, got 0.0"),
        ((x, w, 2), {"temperature": w}, INVALID, "temperature: expected"),
        ((x, w, 2), {"softcap": -1.0}, INVALID, "softcap: expected a positive finite number, got -1.0"),
        ((x, w, 2), {"num_threads": 0}, INVALID, "num_threads: expected"),
    ):
        error = outcome(agj.linear_top_k, *arguments, **settings)
        assert issubclass(type(error), kind), error
        assert str(error).startswith(f"linear_top_k: {message}"), error


@pytest.mark.parametrize("name", ["k", "softcap"])
def test_traced_settings(name):
    x = jnp.eye(3)
    with pytest.raises(ag.ParamTypeError, match=f"linear_top_k: {name}: expected a value known when"):
        jax.jit(lambda each: agj.linear_top_k(x, x, **{"k": 2, name: each}))(2)


def test_temperatures_that_a_compiled_program_refuses():
    function = jax.jit(lambda temperature: agj.linear_top_k(jnp.eye(3), jnp.eye(3), 2, temperature=temperature))
    for value in (0, -1, jnp.inf, jnp.nan):
        with pytest.raises(
            jax.errors.JaxRuntimeError,
            match=r"linear_top_k: temperature: expected positive finite numbers, got .* in row 1",
        ):
            jax.block_until_ready(function(jnp.array([1, value, 1], float)))


def test_derivatives_that_there_are_not():
    layer, temperature = layer_of(), jnp.ones(ROWS)

    def total(layer, temperature):
        return agj.linear_top_k(**layer, k=K, temperature=temperature).log_prob.sum()

    with pytest.raises(NotImplementedError, match="linear_top_k: the gradient of log_prob cannot be"):
        jax.grad(lambda layer: jax.grad(total)(layer, temperature)["input"].sum())(layer)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda layer: total(layer, temperature), (layer,), (layer,))
    with pytest.raises(
        NotImplementedError, match="linear_top_k: temperature: the log-probabilities have no gradient for"
    ):
        jax.grad(total, 1)(layer, temperature)
    assert not jax.grad(lambda t: total(layer, jax.lax.stop_gradient(t)))(temperature).any()


def test_calls_of_xla_that_do_not_fit():
    """The compiled function refuses attributes and buffers that do not fit."""
    x, w, n = jnp.zeros((3, 2), jnp.float32), jnp.zeros((5, 2), jnp.float32), jnp.zeros(3, jnp.float32)
    numbers, entries = jax.ShapeDtypeStruct((3, 2), jnp.float32), jax.ShapeDtypeStruct((3, 2), jnp.int32)
    good: dict[str, Any] = {
        "arguments": "input weight",
        "results": "log_prob index",
        "num_threads": np.int64(0),
        "softcap": np.float64(0),
        **dict.fromkeys(("temperature", "logit_scale"), np.float64(1)),
    }

    def call(*arrays, specs=(numbers, entries), **changed):
        return jax.ffi.ffi_call("ascend_grad_linear_top_k", specs)(*arrays, **good | changed)

    assert np.array_equal(call(x, w)[1], [[0, 1]] * 3)
    shaped = jax.ShapeDtypeStruct
    refused: list[tuple[tuple, dict[str, Any]]] = [
        ((x,), {}),
        ((x, w, w), {}),
        ((x, w[:, :1]), {}),
        ((x, w.astype(jnp.float64)), {}),
        ((x, w[:1]), {}),
        ((x[0], w[0]), {}),
        ((x, w, n), {"arguments": "input weight bias"}),
        ((x, w, n[:1]), {"arguments": "input weight temperature"}),
        ((x, w, n), {"arguments": "input weight unknown"}),
        ((x, w), {"results": "index", "specs": (entries,)}),
        ((x, w), {"results": "log_prob", "specs": (numbers,)}),
        ((x, w), {"results": "loss index"}),
        ((x, w), {"results": "log_prob index loss", "specs": (numbers, entries, shaped((), jnp.float32))}),
        ((x, w), {"specs": (shaped((3, 2), jnp.float64), entries)}),
        ((x, w), {"specs": (shaped((3, 3), jnp.float32), entries)}),
        ((x, w), {"specs": (numbers, shaped((3, 2), jnp.float32))}),
        ((x, w), {"specs": (shaped((3, 6), jnp.float32), shaped((3, 6), jnp.int32))}),
        ((x, w), {"specs": (shaped((3,), jnp.float32), shaped((3,), jnp.int32))}),
        *(((x, w), {name: np.float32(3)}) for name in good if name not in ("arguments", "results")),
    ]
    for arrays, changed in refused:
        with pytest.raises(jax.errors.JaxRuntimeError, match="ascend_grad: "):
            call(*arrays, **changed)
