"""Test second derivatives of the loss of a linear layer within JAX: products of the Hessian, and what is refused."""

from __future__ import annotations

import re
from functools import partial
from itertools import permutations
from typing import Any

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest
from cross_entropy_oracles import OPTIONS_OF_SECOND_ORDER, random_arguments
from mesh_checks import linear_cross_entropy as formula
from samples import DTYPES, assert_identical, generator

import ascend_grad as ag
import ascend_grad.jax as agj

TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 4e-2, "float16": 6e-3}
LAYER = ("input", "weight", "bias")
#: BT, H, V; and the number of sparse targets, or the dtype of dense ones.
PROBLEMS: tuple[tuple[tuple[int, int, int], Any], ...] = (
    ((5, 3, 4), 0),
    ((3, 4, 9), 0),
    ((6, 2, 5), 3),
    ((4, 3, 6), "float32"),
)
SMALL = PROBLEMS[0]
TWICE = "linear_cross_entropy: the gradient cannot be differentiated twice"


@pytest.fixture(autouse=True)
def _all_dtypes():
    with jax.enable_x64(True):
        yield


class Problem:
    """Hold a call, and functions of its layer that return the loss, summed with the upstream gradient."""

    def __init__(self, options: dict[str, Any], problem: Any, dtype: str):
        (BT, H, V), targets = problem
        self.has_classes = not isinstance(targets, str)
        kind: dict[str, Any] = {"K" if self.has_classes else "dense": targets}
        self.arguments = random_arguments("layer", (BT, V), -1, dtype, options=options, **kind)
        del self.arguments["axis"]
        random = generator("layer of second order", problem, dtype)
        for name, size in zip(LAYER, ((BT, H), (V, H), (V,))):
            self.arguments[name] = random.standard_normal(size).astype(DTYPES[dtype])
        self.settings = {
            name: jnp.asarray(each) if isinstance(each, np.ndarray) else each for name, each in self.arguments.items()
        }
        self.layer = {name: self.settings.pop(name) for name in LAYER}
        self.above = jnp.asarray(self.settings.pop("grad_loss", 1.0))
        self.vectors = {
            name: random.standard_normal(each.shape).astype(DTYPES[dtype]) for name, each in self.layer.items()
        }

    def own(self, layer, **changed):
        return jnp.sum(self.above * agj.linear_cross_entropy(**layer, **self.settings | changed))

    def right(self, layer, **changed):
        settings = {
            name: jnp.float64(each) if isinstance(each, jax.Array) and each.dtype != int else each
            for name, each in self.settings.items()
        }
        return jnp.sum(self.above * formula(**wide(layer), **settings | changed))

    def arrays(self, names=LAYER):
        return {name: self.layer[name] for name in names}


def wide(arrays):
    return {name: jnp.float64(each) for name, each in arrays.items()}


def product_of(function, vectors):
    """Return a function of a layer: the product of the Hessian of a function and vectors, in forward mode."""
    return lambda layer: jax.jvp(jax.grad(function), (layer,), (vectors,))[1]


def penalty(function, vectors):
    """Return a function of a layer: of the loss, its gradient in a direction, and its gradient squared."""

    def found(layer):
        value, gradient = jax.value_and_grad(function)(layer)
        parts = ((each * vectors[name]).sum() + (each**2).sum() for name, each in gradient.items())
        return value**2 + sum(parts)

    return found


def assert_close(got, right, dtype="float64"):
    """Check that errors are small compared with the largest right value."""
    for own, expected in zip(jax.tree.leaves(got), jax.tree.leaves(right), strict=True):
        own, expected = np.float64(own), np.float64(expected)
        largest = max(1e-3, np.abs(expected).max(initial=0))
        np.testing.assert_allclose(own, expected, rtol=0, atol=TOLERANCES[dtype] * largest)


def check_against_the_formula(each: Problem, dtype: str, names=LAYER):
    """Check products in forward mode, and gradients of a function of the loss and the gradient, in programs."""
    layer, vectors = each.arrays(names), {name: each.vectors[name] for name in names}
    rest = {name: value for name, value in each.layer.items() if name not in names}

    def of_layer(function):
        return lambda layer: function({**rest, **layer})

    for make in (product_of, lambda function, vectors: jax.grad(penalty(function, vectors))):
        found = jax.jit(make(of_layer(each.own), vectors))(layer)
        right = jax.jit(make(of_layer(each.right), wide(vectors)))(wide(layer))
        assert all(found[name].dtype == layer[name].dtype for name in names)
        assert_close(found, right, dtype)


@pytest.mark.parametrize("options", OPTIONS_OF_SECOND_ORDER, ids=str)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_forward_and_reverse_mode_equal_the_formula(options, problem):
    check_against_the_formula(Problem(options, problem, "float64"), "float64")


@pytest.mark.parametrize("options", [OPTIONS_OF_SECOND_ORDER[i] for i in (3, 9, 10)], ids=str)
def test_every_dtype_equals_the_formula(options, dtype):
    check_against_the_formula(Problem(options, PROBLEMS[0], dtype), dtype)


@pytest.mark.parametrize("names", [("input",), ("weight",), ("bias",), ("weight", "bias"), ("input", "bias")], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_parts_of_a_layer(names, reduction):
    check_against_the_formula(Problem({"reduction": reduction}, SMALL, "float64"), "float64", names)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_derivatives_of_one_gradient_by_another_array(reduction):
    each = Problem({"reduction": reduction}, SMALL, "float64")
    for first, second in permutations(LAYER, 2):

        def gradient(array, function, second=second, first=first):
            return jax.grad(lambda value: function({**each.layer, second: array, first: value}))(each.layer[first])

        def derivatives(function, first=first, second=second, gradient=gradient):
            of_array, array = partial(gradient, function=function), each.layer[second]
            pulled = jax.vjp(of_array, array)[1](each.vectors[first])
            return jax.jvp(of_array, (array,), (each.vectors[second],))[1], pulled

        assert_close(*(jax.jit(partial(derivatives, function))() for function in (each.own, each.right)))


@pytest.mark.parametrize("options", OPTIONS_OF_SECOND_ORDER[::2], ids=str)
def test_products_have_the_bits_of_the_function_of_arrays(options, dtype):
    """The bits are equal for an upstream gradient of 1, and for one loss per row."""
    upstream = {} if options.get("reduction") == "none" else {"grad_loss": 1.0}
    each = Problem({**options, **upstream}, PROBLEMS[1], dtype)
    vectors = {"vector": each.vectors["weight"], "vector_bias": each.vectors["bias"]}
    for names in (LAYER, LAYER[1:]):
        further = {"vector_input": each.vectors["input"]} if "input" in names else {}
        right = ag.linear_cross_entropy_hvp(**each.arguments, **vectors, **further)
        along = {name: each.vectors[name] for name in names}
        rest = {name: value for name, value in each.layer.items() if name not in names}
        loss = lambda layer, rest=rest: each.own({**rest, **layer})  # noqa: E731
        found = jax.jit(product_of(loss, along))(each.arrays(names))
        for name in names:
            assert_identical(np.asarray(found[name]), getattr(right, f"{name}_product"))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_derivatives_are_differences_of_gradients(reduction):
    each = Problem({"reduction": reduction, "softcap": 2.0}, PROBLEMS[1], "float64")
    gradient = jax.jit(jax.grad(each.own))
    jax.test_util.check_jvp(gradient, partial(jax.jvp, gradient), (each.layer,))
    jax.test_util.check_vjp(gradient, partial(jax.vjp, gradient), (each.layer,))


def test_whole_hessians():
    each = Problem({"label_smoothing": 0.1}, ((3, 1, 3), 0), "float64")
    right = jax.jit(jax.hessian(each.right))(each.layer)
    for function in (jax.jit(jax.hessian(each.own)), jax.jit(jax.jacrev(jax.grad(each.own)))):
        assert_close(function(each.layer), right)
    found = jax.hessian(lambda bias: each.own({**each.layer, "bias": bias}))(each.layer["bias"])
    assert_close(found, right["bias"]["bias"])


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_batches_scans_and_checkpoints(reduction):
    each = Problem({"reduction": reduction, "softcap": 2.0}, SMALL, "float64")
    layers = jax.tree.map(lambda array: jnp.stack([array, -array, 2 * array]), each.layer)
    vectors = jax.tree.map(lambda array: jnp.stack([array, array**2, -array]), each.vectors)

    def results(function):
        def step(layer, _):
            return jax.tree.map(lambda x, g: x - g, layer, jax.grad(function)(layer)), None

        return {
            "reverse": jax.vmap(jax.grad(penalty(function, each.vectors)))(layers),
            "vectors": jax.vmap(lambda vectors: product_of(function, vectors)(each.layer))(vectors),
            "both": jax.vmap(lambda layer, vectors: product_of(function, vectors)(layer))(layers, vectors),
            "one": jax.vmap(lambda x: jax.grad(penalty(function, each.vectors))({**each.layer, "input": x}))(
                layers["input"]
            ),
            "checkpoint": jax.grad(jax.checkpoint(penalty(function, each.vectors)))(each.layer),
            "scan": jax.grad(lambda layer: jax.lax.scan(step, layer, length=2)[0]["input"].sum())(each.layer),
        }

    got, right = (jax.jit(partial(results, function))() for function in (each.own, each.right))
    for name, value in right.items():
        assert_close(got[name], value)


@pytest.mark.parametrize("dtype", ["float64", "float16"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_derivatives_with_respect_to_the_upstream_gradient(reduction, dtype):
    each = Problem({"reduction": reduction, "label_smoothing": 0.1}, SMALL, dtype)
    above = jnp.asarray(generator("above").random((5,) if reduction == "none" else ()))
    vectors = wide(each.vectors)

    def gradient_for(function, layer):
        def of_upstream(above):
            each.above = above
            return jax.grad(function)(layer)

        return of_upstream

    def total(function, power):
        return lambda above: sum((vectors[name] * each**power).sum() for name, each in function(above).items())

    for make in (
        lambda function: jax.jvp(function, (above,), (jnp.cos(above),))[1],
        lambda function: jax.grad(total(function, 1))(above),
        lambda function: jax.grad(total(function, 2))(above),
    ):
        got = jax.jit(partial(make, gradient_for(each.own, each.layer)))()
        right = jax.jit(partial(make, gradient_for(each.right, wide(each.layer))))()
        assert_close(got, right, dtype)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": "rows", "label_smoothing": 0.1},
        {"softcap": 2.0, "logit_scale": -0.7, "temperature": 0.6, "reduction": "sum"},
        {"reduction": "none"},
    ],
    ids=str,
)
def test_outputs_beside_a_gradient_that_is_differentiated(options, problem):
    """Outputs have tangents, too, though their gradients cannot be differentiated."""
    each = Problem(options, problem, "float64")
    names = tuple(
        name for name in ("lse", "log_prob", "entropy", "predicted") if name != "log_prob" or each.has_classes
    )

    def tangents(function):
        def found(layer):
            result = function(**layer, **each.settings, outputs=names)
            return result.loss.sum(), {name: getattr(result, name) for name in names[:-1]}

        of_layer = jax.jit(jax.value_and_grad(found, has_aux=True))
        (loss, outputs), gradient = jax.jvp(of_layer, (each.layer,), (each.vectors,))[1]
        return {**outputs, "loss": loss, "gradient": gradient}

    got, right = tangents(agj.linear_cross_entropy), tangents(formula)
    for name, value in right.items():
        assert_close(got[name], value)


def test_a_program_computes_only_what_it_returns():
    each = Problem({}, SMALL, "float32")

    def calls(function, layer):
        text = jax.jit(function).lower(layer).compile().as_text()
        return [
            len(re.findall(rf'custom_call_target="ascend_grad_linear_cross_entropy{end}"', text))
            for end in ("", "_hvp")
        ]

    def with_outputs(layer):
        return agj.linear_cross_entropy(**layer, **each.settings, outputs=("lse", "entropy")).loss

    for function in (each.own, with_outputs):
        assert calls(product_of(function, each.vectors), each.layer) == [0, 1]
        both = lambda layer, f=function: jax.jvp(jax.grad(f), (layer,), (each.vectors,))  # noqa: E731
        assert calls(both, each.layer) == [1, 1]


def test_several_dimensions_of_rows():
    each = Problem({}, ((6, 3, 4), 0), "float64")
    along = each.vectors
    right = product_of(each.own, along)(each.layer)
    each.settings["target"] = each.settings["target"].reshape(2, 3)
    layer, vectors = ({**arrays, "input": arrays["input"].reshape(2, 3, 3)} for arrays in (each.layer, along))
    found = product_of(each.own, vectors)(layer)
    assert_close({**found, "input": found["input"].reshape(6, 3)}, right)


def test_sizes_of_0():
    for rows, classes, features in ((0, 4, 3), (5, 4, 0)):
        x, w, bias = jnp.ones((rows, features)), jnp.ones((classes, features)), jnp.arange(float(classes))
        layer, target = {"input": x, "weight": w, "bias": bias}, np.zeros(rows, np.int32)
        for reduction in ("sum", "none"):
            loss = lambda layer, r=reduction, t=target: agj.linear_cross_entropy(  # noqa: E731
                **layer, target=t, reduction=r
            ).sum()
            found = product_of(loss, layer)(layer)
            right = ag.linear_cross_entropy_hvp(
                x, w, target, w, bias=bias, vector_bias=bias, vector_input=x, reduction="sum"
            )
            for name in LAYER:
                np.testing.assert_array_equal(found[name], getattr(right, f"{name}_product"))


def test_a_bad_target_raises_the_error_of_the_loss():
    def product(layer, target):
        return product_of(lambda layer: agj.linear_cross_entropy(**layer, target=target), layer)(layer)

    layer = {"input": jnp.zeros((3, 2)), "weight": jnp.zeros((2, 2))}
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"linear_cross_entropy: target: expected values in \[0, 2\)"):
        jax.block_until_ready(jax.jit(product)(layer, jnp.array([0, 1, 2])))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_third_order_raises(reduction):
    each = Problem({"reduction": reduction}, SMALL, "float64")
    product = product_of(each.own, each.vectors)

    def total(layer):
        return sum(value.sum() for value in product(layer).values())

    for function in (
        lambda layer: jax.jvp(product, (layer,), (each.vectors,)),
        jax.grad(total),
        jax.grad(lambda layer: jax.grad(penalty(each.own, each.vectors))(layer)["bias"].sum()),
        jax.jacfwd(jax.hessian(each.own)),
    ):
        for transformed in (function, jax.jit(function)):
            with pytest.raises(NotImplementedError, match=f"^{TWICE}"):
                transformed(each.layer)


@pytest.mark.parametrize("name", ["lse", "log_prob", "entropy"])
def test_gradients_of_outputs_raise(name):
    each = Problem({}, SMALL, "float64")

    def total(layer):
        result = agj.linear_cross_entropy(**layer, **each.settings, outputs=(name,))
        return getattr(result, name).sum() + result.loss

    for function in (product_of(total, each.vectors), jax.jit(jax.grad(penalty(total, each.vectors)))):
        message = f"^linear_cross_entropy: the gradient of {name} cannot be differentiated once more"
        with pytest.raises(NotImplementedError, match=message):
            function(each.layer)


def test_options_that_are_differentiated_raise():
    each = Problem({"token_weight": "rows", "temperature": "rows", "class_weight": "classes"}, SMALL, "float64")
    for name in ("token_weight", "temperature", "class_weight"):

        def gradient(option, name=name):
            return jax.grad(partial(each.own, **{name: option}))(each.layer)

        option = each.settings[name]
        for function in (
            lambda option: jax.jvp(gradient, (option,), (option,)),
            jax.jit(jax.grad(lambda option: gradient(option)["input"].sum())),
        ):
            message = f"^linear_cross_entropy: {name}: the loss has no gradient for it"
            with pytest.raises(NotImplementedError, match=message):
                function(option)
