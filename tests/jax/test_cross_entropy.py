"""Test the loss of logits within JAX: its values, gradients and transformations, and what it refuses."""

from __future__ import annotations

from functools import partial
from typing import Any

import cross_entropy_oracles
import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest
from cross_entropy_oracles import random_arguments
from faults import INVALID, NULL, TYPE, outcome
from samples import DTYPES, assert_identical, generator

import ascend_grad as ag
import ascend_grad.jax as agj

ARRAY = "an array of jax or NumPy, or a number"
EVERY = ("lse", "log_prob", "entropy", "predicted", "correct")
#: Options, as `random_arguments` takes them, with the number of sparse targets, or the dtype of dense ones.
OPTIONS: dict[str, tuple[dict[str, Any], int | str]] = {
    "no option": ({}, 0),
    "outputs": ({"outputs": EVERY}, 0),
    "correct": ({"outputs": ("correct",), "denominator": 7.0}, 0),
    "weights": ({"class_weight": "classes", "token_weight": "rows", "lse_square_scale": 1e-2}, 0),
    "smoothing": ({"class_weight": "classes", "label_smoothing": 0.2, "temperature": 0.7, "outputs": EVERY}, 0),
    "temperatures": ({"temperature": "rows", "outputs": ("entropy", "log_prob")}, 0),
    "scaled": ({"logit_scale": 0.6, "outputs": ("lse",)}, 0),
    "transformed": (
        {"softcap": 2.5, "logit_scale": -0.7, "temperature": "rows", "outputs": ("entropy", "log_prob")},
        0,
    ),
    "several log-probabilities": ({"target_prob": 0, "outputs": ("log_prob",), "softcap": 3.0}, 4),
    "dense": ({}, "float32"),
    "dense with options": (
        {"temperature": "rows", "class_weight": "classes", "label_smoothing": 0.1, "outputs": ("lse", "entropy")},
        "bfloat16",
    ),
    "dense and transformed": ({"softcap": 2.5, "logit_scale": -0.7, "outputs": ("lse",)}, "float32"),
    "full": ({"softcap": 2.5, "logit_scale": -0.7, "outputs": ("hessian_diag", "prob"), "temperature": "rows"}, 0),
    "full, several targets": ({"outputs": ("prob", "lse", "hessian_diag"), "lse_square_scale": 0.1}, 3),
    "sparse": ({"temperature": "rows", "class_weight": "classes", "outputs": ("predicted", "lse", "entropy")}, 3),
}
SHAPES = (((7,), 0), ((5, 9), -1), ((3, 70, 6), 1), ((40, 3), 0))


@pytest.fixture(autouse=True)
def _all_dtypes():
    with jax.enable_x64(True):
        yield


def problem_of(option: str, dtype: str, shape: tuple[int, ...], axis: int, reduction: str = "mean") -> tuple[dict, Any]:
    """Make the arguments of a call, and a compiled function of its logits whose results are a named tuple."""
    options, targets = OPTIONS[option]
    kind: dict[str, Any] = {"dense" if isinstance(targets, str) else "K": targets}
    arguments = random_arguments(option, shape, axis, dtype, options=options, **kind) | {"reduction": reduction}
    given = {name: jnp.asarray(each) if isinstance(each, np.ndarray) else each for name, each in arguments.items()}
    del given["input"]

    @jax.jit
    def function(input):
        result = agj.cross_entropy(input, **given)
        return result if isinstance(result, ag.LossResult) else ag.LossResult(result)

    return arguments, function


@pytest.mark.parametrize(("shape", "axis"), SHAPES, ids=str)
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_has_the_bits_of_the_call_of_arrays(option, shape, axis, dtype):
    arguments, function = problem_of(option, dtype, shape, axis)
    right = ag.cross_entropy(**arguments)
    input = jnp.asarray(arguments["input"])
    for name, each in function(input)._asdict().items():
        assert (each is None) == (name not in ("loss", *arguments.get("outputs", ())))
        if each is not None:
            assert_identical(np.asarray(each), getattr(right, name))
    gradient = jax.grad(lambda x: function(x).loss)(input)
    assert_identical(np.asarray(gradient), right.input_grad)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("option", OPTIONS)
def test_gradients_are_those_of_the_definition(option, reduction):
    """Gradients of the loss agree with the definition in extended precision, for any upstream gradient."""
    arguments, function = problem_of(option, "float64", (3, 7, 5), 1, reduction)
    above = generator("upstream").standard_normal((3, 5) if reduction == "none" else ())
    gradient = jax.grad(lambda x: (above * function(x).loss).sum())(jnp.asarray(arguments["input"]))
    right = cross_entropy_oracles.expected(**arguments, grad_loss=above)
    np.testing.assert_allclose(gradient, np.float64(right["input_grad"]), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("option", ["outputs", "smoothing", "temperatures", "sparse", "full", "full, several targets"])
def test_gradients_of_outputs_are_differences(option):
    arguments, function = problem_of(option, "float64", (2, 5, 3), 1)
    names = [name for name in ("lse", "log_prob", "entropy") if name in arguments["outputs"]]
    above = generator("upstream", option).standard_normal((3, 2, 3))
    of_prob = generator("prob", option).standard_normal((2, 5, 3))

    def total(input):
        found = function(input)
        result = found.loss + sum((each * getattr(found, name)).sum() for each, name in zip(above, names))
        return result if found.prob is None else result + (of_prob * found.prob).sum()

    jax.test_util.check_grads(total, (jnp.asarray(arguments["input"]),), order=1, modes=["rev"])


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.1}, {"target_prob": np.ones((2, 2))}], ids=str)
def test_ignored_rows_have_no_gradient_of_outputs(options, transform):
    """The statistics of an ignored row are 0, so the exponentials of its logits may overflow."""
    target = np.array([[0, 2], [-100, -100]] if "target_prob" in options else [0, -100])

    def total(name, input):
        return getattr(agj.cross_entropy(input, target, outputs=(name,), **options), name).sum()

    for name in ("lse", "entropy", *(["log_prob"] if target.ndim == 1 else [])):
        gradient = transform(jax.grad(partial(total, name)))
        for large in (100.0, 1e6, np.inf, np.nan):
            found = np.asarray(gradient(jnp.array([[1.0, 2, 3], [large, 1, 2]], jnp.float32)))
            assert np.isfinite(found[0]).all()
            assert found[0].any()
            assert_identical(found[1], np.zeros(3, np.float32))


@pytest.mark.parametrize("prob", DTYPES)
def test_target_prob_has_any_of_the_four_dtypes(prob, dtype):
    arguments, _ = problem_of("sparse", dtype, (3, 70, 6), 1)
    arguments["target_prob"] = arguments["target_prob"].astype(DTYPES[prob])
    right = ag.cross_entropy(**arguments)
    given = {name: jnp.asarray(each) if isinstance(each, np.ndarray) else each for name, each in arguments.items()}
    input = given.pop("input")

    def loss(input):
        found = agj.cross_entropy(input, **given)
        return found.loss, found

    found, gradient = jax.jit(jax.grad(loss, has_aux=True))(input)[::-1]
    assert_identical(np.asarray(gradient), right.input_grad)
    for name in ("loss", *arguments["outputs"]):
        assert_identical(np.asarray(getattr(found, name)), getattr(right, name))


def test_float16_takes_the_scale_of_the_loss_first():
    arguments, function = problem_of("no option", "float16", (300, 50), -1)
    gradient = jax.grad(lambda x: 4096 * function(x).loss)(jnp.asarray(arguments["input"]))
    assert_identical(np.asarray(gradient), ag.cross_entropy(**arguments, grad_loss=4096.0).input_grad)


def test_batches():
    arguments, function = problem_of("outputs", "float32", (5, 9), -1)
    inputs = jnp.stack([arguments["input"], -arguments["input"]])
    found = jax.vmap(function)(inputs)
    gradients = jax.vmap(jax.grad(lambda x: function(x).loss))(inputs)
    for i, input in enumerate(inputs):
        right = ag.cross_entropy(**arguments | {"input": np.asarray(input)})
        assert_identical(np.asarray(gradients[i]), right.input_grad)
        for name, each in found._asdict().items():
            assert_identical(np.asarray(each[i]), getattr(right, name))


def test_a_long_row_and_many_rows_on_several_threads():
    for shape in ((1, 3_000_000), (3000, 500)):
        arguments, function = problem_of("smoothing", "float32", shape, -1)
        gradient = jax.grad(lambda x, f=function: f(x).loss)(jnp.asarray(arguments["input"]))
        assert_identical(np.asarray(gradient), ag.cross_entropy(**arguments).input_grad)


def test_sizes_of_0_and_rank_0():
    function = jax.value_and_grad(agj.cross_entropy)
    for input, target in (((), ()), ((0, 3), (0,)), ((2, 0, 3), (2, 0)), ((0, 0), (0,))):
        x, t = np.zeros(input, np.float32), np.zeros(target, np.int32)
        loss, gradient = function(jnp.asarray(x), jnp.asarray(t))
        right = ag.cross_entropy(x, t)
        assert_identical(np.asarray(loss), right.loss)
        assert_identical(np.asarray(gradient), right.input_grad)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int64"])
def test_integers_as_logits_and_as_targets(dtype):
    x, t = jnp.arange(6).reshape(3, 2).astype(dtype), jnp.array([0, 1, 1])
    wide = x.astype(jnp.result_type(float))
    assert_identical(np.asarray(agj.softmax(x)), np.asarray(agj.softmax(wide)))
    targets = t.astype("uint8" if dtype == "bool" else dtype)
    assert_identical(np.asarray(jax.jit(agj.cross_entropy)(x, targets)), np.asarray(agj.cross_entropy(wide, t)))
    half = wide.astype(jnp.float16)
    got, right = agj.linear_cross_entropy(half, x, targets), agj.linear_cross_entropy(half, x.astype(jnp.float16), t)
    assert_identical(np.asarray(got), np.asarray(right))


def test_bad_arguments():
    x, t = jnp.zeros((3, 2)), jnp.zeros(3, int)
    for arguments, settings, kind, message in (
        ((None, t), {}, NULL, "input: expected an array, got None"),
        ((x, None), {}, NULL, "target: expected an array, got None"),
        ((x, x[:, 0]), {}, TYPE, "target: expected an integer dtype"),
        ((x, t[:2]), {}, INVALID, "target: expected shape (3,)"),
        ((x, t), {"axis": 2}, INVALID, "axis: expected"),
        ((x, t), {"class_weight": jnp.ones(3)}, INVALID, "class_weight: expected shape (2,)"),
        ((x, t), {"temperature": -1.0}, INVALID, "temperature: expected a positive finite number, got -1.0"),
        ((x, t), {"temperature": [1.0, 2.0, 3.0]}, TYPE, f"temperature: expected {ARRAY}, got list"),
        ((x, t), {"temperature": [[1.0], 2.0]}, TYPE, f"temperature: expected {ARRAY}, got list"),
        ((x, t), {"reduction": "all"}, INVALID, "reduction: expected"),
    ):
        error = outcome(agj.cross_entropy, *arguments, **settings)
        assert issubclass(type(error), kind)
        assert str(error).startswith(f"cross_entropy: {message}")
    with pytest.raises(ag.ParamTypeError, match="label_smoothing: expected a value known when JAX traces"):
        jax.jit(lambda s: agj.cross_entropy(x, t, label_smoothing=s))(0.1)


def test_values_that_a_compiled_program_refuses():
    function = jax.jit(
        lambda target, **options: agj.cross_entropy(jnp.zeros((*target.shape[:2], 5)), target, **options)
    )
    for target, message in (
        ([[0, 4, 5]], r"got 5 at index \(0, 2\)"),
        ([[0], [-1]], r"got -1 at index \(1, 0\)"),
    ):
        expected = rf"INVALID_ARGUMENT: cross_entropy: target: expected values in \[0, 5\) or -100, {message}"
        with pytest.raises(jax.errors.JaxRuntimeError, match=expected):
            function(jnp.array(target)).block_until_ready()
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"got 9 at index \(2,\)"):
        agj.cross_entropy(jnp.zeros((3, 5)), jnp.array([0, 0, 9])).block_until_ready()
    temperature = jnp.array([[1.0, 0.0]])
    with pytest.raises(
        jax.errors.JaxRuntimeError, match="temperature: expected positive finite numbers, got 0 in row 1"
    ):
        function(jnp.zeros((1, 2), int), temperature=temperature).block_until_ready()


def test_derivatives_that_there_are_not():
    x, t, ones = jnp.zeros((3, 2)), jnp.zeros(3, int), jnp.ones(3)
    with pytest.raises(NotImplementedError, match="cross_entropy: token_weight: the loss has no gradient for it"):
        jax.grad(lambda each: agj.cross_entropy(x, t, token_weight=each))(ones)


GOOD: dict[str, Any] = {
    "arguments": "input target",
    "results": "loss",
    "reduction": "mean",
    **dict.fromkeys(("ignore_index", "axis"), np.int64(-1)),
    "num_threads": np.int64(0),
    **dict.fromkeys(("label_smoothing", "lse_square_scale", "denominator"), np.float64(0)),
    **dict.fromkeys(("temperature", "logit_scale"), np.float64(1)),
    "softcap": np.float64(0),
}


def call(*arrays, specs=(((), jnp.float32),), **changed):
    specs = [jax.ShapeDtypeStruct(*each) for each in specs]
    return jax.ffi.ffi_call("ascend_grad_cross_entropy", specs)(*arrays, **GOOD | changed)


def test_calls_of_xla_that_do_not_fit():
    """The compiled function refuses attributes and buffers that do not fit a loss."""
    x, t = jnp.zeros((3, 2), jnp.float32), jnp.zeros(3, jnp.int32)
    n, rows, loss = jnp.zeros(3, jnp.float32), ((3,), jnp.float32), ((), jnp.float32)
    assert np.isclose(call(x, t)[0], np.log(2))
    refused: list[tuple[tuple, dict[str, Any]]] = [
        ((x,), {}),
        ((x, t, t), {}),
        ((t[:, None], t), {}),
        ((x, n), {}),
        ((x, t[:2]), {}),
        ((x, t[:, None]), {}),
        ((x[:, :0], t), {}),
        ((x, t), {"axis": np.int64(0)}),
        ((x, t), {"axis": np.int64(-3)}),
        ((x, t), {"reduction": "none"}),
        ((x, t), {"specs": (rows,)}),
        ((x, t), {"results": "input_grad", "specs": (((3, 2), jnp.float32),)}),
        ((x, t), {"results": "loss input_grad", "specs": (loss, ((3, 2), jnp.float16))}),
        ((x, t), {"results": "loss lse", "specs": (loss, loss)}),
        ((x, t), {"results": "loss predicted", "specs": (loss, rows)}),
        ((x, t, n), {"arguments": "input target grad_loss"}),
        ((x, t, n), {"arguments": "input target class_weight"}),
        ((x, t, n[:2]), {"arguments": "input target token_weight"}),
        ((x, t, n), {"arguments": "input target target_prob"}),
        ((x, t[:, None], n), {"arguments": "input target target_prob"}),
    ]
    v, logits = jnp.zeros((3, 2), jnp.float32), ((3, 2), jnp.float32)
    product: dict[str, Any] = {"arguments": "input target vector", "results": "product", "specs": (logits,)}
    assert np.array_equal(call(x, t, v, **product)[0], v)
    refused += [
        ((x, t), {**product, "arguments": "input target"}),
        ((x, t, v), {"arguments": "input target vector"}),
        ((x, t, v[:2]), product),
        ((x, t, v.astype(jnp.float16)), product),
        ((x, t, t), product),
        ((x, t, v), {**product, "specs": (rows,)}),
        ((x, t, v), {**product, "specs": (((3, 2), jnp.float16),)}),
        ((x, t, v), {**product, "results": "product loss", "specs": (logits, loss)}),
        ((x, t, v, n), {**product, "arguments": "input target vector grad_lse"}),
        ((x, t, v, n), {**product, "arguments": "input target vector grad_log_prob"}),
        ((x, t, v, n), {**product, "arguments": "input target vector grad_entropy"}),
    ]
    for name in GOOD:
        wrong = np.float32(3) if name not in ("arguments", "results", "reduction") else np.int64(3)
        refused.append(((x, t), {name: wrong}))
    for arrays, changed in refused:
        with pytest.raises(jax.errors.JaxRuntimeError, match="ascend_grad: "):
            call(*arrays, **changed)
