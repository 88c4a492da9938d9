"""Test the functions of `ascend_grad.jax` with JAX's options, and in its transformations of whole programs."""

from __future__ import annotations

import contextlib
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from faults import TYPE, outcome
from samples import generator

import ascend_grad.jax as agj

EVERY = ("lse", "log_prob", "entropy", "predicted", "correct")
TARGET = np.array([0, 3, -100, 2], np.int32)
MASK = np.zeros((1, 1, 4, 6), bool)
WEIGHT = generator("weight").standard_normal((5, 6)).astype(np.float32)
INPUT = generator("input").standard_normal((4, 6)).astype(np.float32)

FUNCTIONS = {
    "softmax": lambda x: agj.softmax(x, 0),
    "log_softmax": agj.log_softmax,
    "scaled_masked_softmax": lambda x: agj.scaled_masked_softmax(x.reshape(1, 1, 4, 6), MASK, 0.5),
    "cross_entropy": lambda x: agj.cross_entropy(x, TARGET),
    "cross_entropy with outputs": lambda x: agj.cross_entropy(x, TARGET, outputs=EVERY, reduction="sum"),
    "cross_entropy of columns": lambda x: agj.cross_entropy(
        x.T, TARGET, 0, outputs=EVERY, temperature=np.full(4, 0.5, np.float32), reduction="none"
    ),
    "cross_entropy of several targets": lambda x: agj.cross_entropy(
        x, np.stack([TARGET, TARGET], -1), target_prob=np.ones((4, 2), np.float32), outputs=("lse", "entropy")
    ),
    "linear_cross_entropy": lambda x: agj.linear_cross_entropy(x, WEIGHT, TARGET),
    "linear_cross_entropy with outputs": lambda x: agj.linear_cross_entropy(
        x, WEIGHT, TARGET, outputs=EVERY, temperature=np.float32(0.5), reduction="none"
    ),
    "linear_top_k": lambda x: agj.linear_top_k(x, WEIGHT, 2, temperature=np.float32(0.5)),
}
ROWWISE = ("softmax", "log_softmax", "scaled_masked_softmax")


def total(function, x):
    return sum(each.astype(jnp.float32).sum() for each in jax.tree.leaves(function(x)))


def derivatives(name: str):
    """Return a function of an array with the gradient, and for a row-wise operator with a second derivative."""
    gradient = jax.grad(partial(total, FUNCTIONS[name]))
    if name not in ROWWISE:
        return gradient
    return lambda x: (gradient(x), jax.grad(lambda x: jnp.sin(gradient(x)).sum())(x))


#: Options of JAX under which a program has to compute the same.
OPTIONS = {
    "promotion": {"jax_numpy_rank_promotion": "raise", "jax_numpy_dtype_promotion": "strict"},
    "promotion, 64 bits": {
        "jax_numpy_rank_promotion": "raise",
        "jax_numpy_dtype_promotion": "strict",
        "jax_enable_x64": True,
    },
    "NaN": {"jax_debug_nans": True},
    "checks": {"jax_enable_checks": True, "jax_check_tracer_leaks": True},
}


@contextlib.contextmanager
def configured(options):
    before = {name: getattr(jax.config, name) for name in options}
    try:
        for name, value in options.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def assert_same(got, right) -> None:
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, right)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_options_of_jax(name, options):
    right = jax.jit(derivatives(name))(jnp.asarray(INPUT))
    with configured(options):
        for transform in (lambda f: f, jax.jit):
            assert_same(transform(derivatives(name))(jnp.asarray(INPUT)), right)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if not name.startswith("linear")])
def test_strict_promotion_of_other_dtypes(name, dtype):
    with configured(OPTIONS["promotion, 64 bits"]):
        found = derivatives(name)(jnp.asarray(INPUT).astype(dtype))
    assert all(each.dtype == dtype for each in jax.tree.leaves(found))


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name.startswith("cross_entropy with")])
def test_infinite_logits_while_jax_looks_for_nan(name):
    """No intermediate result is NaN for a probability of 0, and for the logits of an ignored row."""
    x = jnp.asarray(INPUT).at[0, 1].set(-jnp.inf).at[2].set(jnp.inf)
    with configured({"jax_debug_nans": True}):
        assert np.isfinite(jax.grad(partial(total, lambda x: FUNCTIONS[name](x)._replace(log_prob=None)))(x)).all()


TRANSFORMS = {
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    "linearize": lambda f: lambda x: jax.linear_transpose(jax.linearize(f, x)[1], x)(jnp.float32(1))[0],
    "donated": lambda f: lambda x: jax.jit(jax.grad(f), donate_argnums=0)(x + 0),
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, x: (c, jax.grad(f)(x)), 0, x[None])[1][0],
    "map": lambda f: lambda x: jax.lax.map(jax.grad(f), x[None])[0],
    "while": lambda f: (
        lambda x: jax.lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, jax.grad(f)(x)), (0, x))[1]
    ),
    "no compilation": lambda f: lambda x: jax.disable_jit()(jax.grad(f))(x),
    "program": lambda f: jax.jit(jax.grad(f)).lower(jax.ShapeDtypeStruct((4, 6), jnp.float32)).compile(),
    "jaxpr": lambda f: lambda x: jax.core.eval_jaxpr((p := jax.make_jaxpr(jax.grad(f))(x)).jaxpr, p.consts, x)[0],
    "shape": lambda f: lambda x: jax.eval_shape(jax.grad(f), x),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize(
    "name", ["softmax", "scaled_masked_softmax", "cross_entropy with outputs", "linear_cross_entropy", "linear_top_k"]
)
def test_transformations(name, transform):
    function, x = partial(total, FUNCTIONS[name]), jnp.asarray(INPUT)
    got, right = transform(function)(x), jax.grad(function)(x)
    assert (got.shape, got.dtype) == (right.shape, right.dtype)
    if not isinstance(got, jax.ShapeDtypeStruct):
        assert_same(got, right)


@pytest.mark.parametrize("transform", [jax.jit, jax.checkpoint], ids=["jit", "checkpoint"])
@pytest.mark.parametrize("function", ["mean", "none", "top-k"])
@pytest.mark.parametrize("names", [("input", "weight"), ("input",)])
def test_derivatives_with_respect_to_different_arrays_at_once(names, function, transform):
    """One compiled program is differentiated with respect to one array after another, and all gradients come later."""
    square = generator("square").standard_normal((3, 4, 4)).astype(np.float32)  # gradients are not told by their shapes
    layer = {"input": square[0], "weight": square[1], "bias": square[2, 0]}

    def gradients(of_layer):
        """Return the gradient with respect to each of the arrays, and the one with respect to all of them."""
        mean = transform(lambda layer: of_layer(**layer).mean())
        parts = [jax.vjp(lambda each, name=name: mean({**layer, name: each}), layer[name])[1] for name in names]
        of_all = jax.vjp(mean, layer)[1]
        return [each(jnp.float32(1))[0] for each in (*parts, of_all)]

    def formula(input, weight, bias):
        log_prob = jax.nn.log_softmax(input @ weight.T + bias)
        return jax.lax.top_k(log_prob, 2)[0] if function == "top-k" else -jnp.diagonal(log_prob)

    def ours(**layer):
        if function == "top-k":
            return agj.linear_top_k(**layer, k=2).log_prob
        return agj.linear_cross_entropy(**layer, target=np.arange(4), reduction=function)

    assert_same(gradients(ours), gradients(formula))


CALLS = {
    "softmax": "rowwise",
    "cross_entropy": "cross_entropy",
    "linear_cross_entropy": "linear_cross_entropy",
    "linear_top_k": "linear_top_k",
}


@pytest.mark.parametrize("name", CALLS)
def test_exported_programs(name):
    """JAX exports a program that names the compiled functions which it may call."""
    allowed = jax.export.DisabledSafetyCheck.custom_call(f"ascend_grad_{CALLS[name]}")
    program = jax.jit(partial(total, FUNCTIONS[name]))
    exported = jax.export.export(program, disabled_checks=[allowed])(jax.ShapeDtypeStruct((4, 6), jnp.float32))
    assert_same(exported.call(jnp.asarray(INPUT)), program(jnp.asarray(INPUT)))


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int8", "int16", "int4", "uint4", "bool", "float16"])
def test_targets_of_other_dtypes(dtype):
    x, classes = jnp.asarray(INPUT), np.array([0, 3, 1, 2])
    target = jnp.asarray(classes).astype(dtype)
    for name, arrays in (("cross_entropy", (x,)), ("linear_cross_entropy", (x, x))):
        function = getattr(agj, name)
        if dtype not in ("bool", "float16"):
            assert_same(jax.jit(function)(*arrays, target), function(*arrays, classes))
            continue
        error = outcome(function, *arrays, target)
        assert type(error) is TYPE
        assert re.match(f"{name}: target: expected an integer dtype.*, got {dtype}[ ;]", str(error))


def test_a_value_that_is_ignored_may_be_beyond_the_dtype_of_targets():
    x, target = jnp.asarray(INPUT), np.array([0, 3, 1, 2], np.int32)

    def of(ignored):
        return jax.grad(lambda x: agj.cross_entropy(x, target, ignore_index=ignored, outputs=("lse",)).lse.sum())(x)

    assert_same(of(-(2**40)), of(-100))
