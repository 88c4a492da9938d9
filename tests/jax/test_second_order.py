"""Test second derivatives of the loss of logits within JAX: products of the Hessian, and what is refused."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest
from cross_entropy_oracles import OPTIONS_OF_SECOND_ORDER, random_arguments
from mesh_checks import cross_entropy as formula
from samples import assert_identical, generator

import ascend_grad as ag
import ascend_grad.jax as agj

TOLERANCES = {"float64": 1e-13, "float32": 3e-6, "bfloat16": 1e-2, "float16": 2e-3}
#: Shapes with the dimension of the classes, and the number of sparse targets or the dtype of dense ones.
PROBLEMS: tuple[tuple[tuple[int, ...], int, Any], ...] = (
    ((5, 9), -1, 0),
    ((3, 7, 4), 1, 0),
    ((6, 5), 0, 3),
    ((4, 6), -1, "float32"),
)
SMALL = ((3, 4), -1, 0)
TWICE = "cross_entropy: the gradient cannot be differentiated twice"


@pytest.fixture(autouse=True)
def _all_dtypes():
    with jax.enable_x64(True):
        yield


class Problem:
    """Hold a call, and make functions of its logits that return the loss, summed with the upstream gradient."""

    def __init__(self, options: dict[str, Any], problem: Any, dtype: str):
        shape, axis, targets = problem
        self.has_classes = not isinstance(targets, str)
        kind: dict[str, Any] = {"K" if self.has_classes else "dense": targets}
        self.arguments = random_arguments("second order", shape, axis, dtype, options=options, **kind)
        self.settings = dict(self.arguments)
        self.input = jnp.asarray(self.settings.pop("input"))
        self.above = jnp.asarray(self.settings.pop("grad_loss", 1.0))
        self.settings = {
            name: jnp.asarray(each) if isinstance(each, np.ndarray) else each for name, each in self.settings.items()
        }
        self.vector = generator("vector", shape).standard_normal(shape).astype(self.input.dtype)

    def own(self, input, **changed):
        return jnp.sum(self.above * agj.cross_entropy(input, **self.settings | changed))

    def right(self, input, **changed):
        settings = {
            name: jnp.float64(each) if isinstance(each, jax.Array) and each.dtype != int else each
            for name, each in self.settings.items()
        }
        return jnp.sum(self.above * formula(jnp.float64(input), **settings | changed))


def product_of(function, vector):
    """Return a function of logits: the product of the Hessian of a function and a vector, in forward mode."""
    return lambda x: jax.jvp(jax.grad(function), (x,), (vector,))[1]


def penalty(function, vector):
    """Return a function of logits, and of its gradient alone in a direction and squared."""

    def found(input):
        value, gradient = jax.value_and_grad(function)(input)
        return value + (gradient * vector).sum() + (gradient**2).sum()

    return found


def assert_close(got, right, dtype="float64"):
    """Check that errors are small compared with the largest right value."""
    got, right = np.float64(got), np.float64(right)
    np.testing.assert_allclose(got, right, rtol=0, atol=TOLERANCES[dtype] * max(1e-3, np.abs(right).max(initial=0)))


def calls(function, *arguments) -> int:
    """Return the number of calls of the loss or its products in a compiled program."""
    text = jax.jit(function).lower(*arguments).compile().as_text()
    return len(re.findall(r'custom_call_target="ascend_grad_cross_entropy"', text))


# ---- values ----------------------------------------------------------------------------------------------------------


FEW_OPTIONS = [OPTIONS_OF_SECOND_ORDER[i] for i in (3, 9)]
every_option = pytest.mark.parametrize("options", OPTIONS_OF_SECOND_ORDER, ids=str)


def check_against_the_formula(each: Problem, dtype: str):
    """Check products in forward mode, and gradients of a function of the loss and the gradient, in programs."""
    for make in (product_of, lambda function, vector: jax.grad(penalty(function, vector))):
        found = jax.jit(make(each.own, each.vector))(each.input)
        right = jax.jit(make(each.right, np.float64(each.vector)))(jnp.float64(each.input))
        assert found.dtype == each.input.dtype
        assert_close(found, right, dtype)


@every_option
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_forward_and_reverse_mode_equal_the_formula(options, problem):
    check_against_the_formula(Problem(options, problem, "float64"), "float64")


@pytest.mark.parametrize("options", FEW_OPTIONS, ids=str)
def test_every_dtype_equals_the_formula(options, dtype):
    check_against_the_formula(Problem(options, PROBLEMS[1], dtype), dtype)


@every_option
def test_products_have_the_bits_of_the_function_of_arrays(options, dtype):
    """The bits are equal for an upstream gradient of 1, and for one loss per row."""
    upstream = {} if options.get("reduction") == "none" else {"grad_loss": 1.0}
    each = Problem({**options, **upstream}, PROBLEMS[1], dtype)
    right = ag.cross_entropy_hvp(**each.arguments, vector=each.vector)
    found = jax.jit(product_of(each.own, each.vector))(each.input)
    assert_identical(np.asarray(found), np.ascontiguousarray(right))


@pytest.mark.parametrize("options", FEW_OPTIONS, ids=str)
def test_derivatives_are_differences_of_gradients(options):
    each = Problem(options, PROBLEMS[1], "float64")
    gradient = jax.jit(jax.grad(each.own))
    jax.test_util.check_jvp(gradient, partial(jax.jvp, gradient), (each.input,))
    jax.test_util.check_vjp(gradient, partial(jax.vjp, gradient), (each.input,))


def test_whole_hessians():
    """Every way to a Hessian gives the same symmetric one, with and without `jax.jit`."""
    each = Problem({"label_smoothing": 0.1}, SMALL, "float64")
    right = jax.hessian(each.right)(each.input)
    for function in (
        jax.hessian(each.own),
        jax.jit(jax.hessian(each.own)),
        jax.jit(jax.jacrev(jax.grad(each.own))),
        jax.hessian(jax.jit(each.own)),
    ):
        hessian = function(each.input)
        assert_close(hessian, right)
        assert_close(hessian, jnp.transpose(hessian, (2, 3, 0, 1)))


# ---- transformations -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_batches_scans_and_checkpoints(reduction):
    each = Problem({"reduction": reduction, "softcap": 2.0}, SMALL, "float64")
    inputs = jnp.stack([each.input, -each.input, 2 * each.input])
    vectors = jnp.stack([each.vector, each.vector**2, -each.vector])

    def results(function):
        def step(x, _):
            return x - jax.grad(function)(x), None

        gradient = jax.grad(function)
        return {
            "reverse": jax.vmap(jax.grad(penalty(function, each.vector)))(inputs),
            "vectors": jax.vmap(lambda vector: product_of(function, vector)(each.input))(vectors),
            "both": jax.vmap(lambda x, vector: product_of(function, vector)(x))(inputs, vectors),
            "of a batch": jax.jvp(jax.vmap(gradient), (inputs,), (vectors,))[1],
            "hessians": jax.vmap(jax.hessian(function))(inputs[:2]),
            "checkpoint": jax.grad(jax.checkpoint(penalty(function, each.vector)))(each.input),
            "of a checkpoint": jax.grad(penalty(jax.checkpoint(function), each.vector))(each.input),
            "scan": jax.grad(lambda x: jax.lax.scan(step, x, length=3)[0].sum())(each.input),
            "linear": jax.linearize(gradient, each.input)[1](each.vector),
        }

    got, right = (jax.jit(partial(results, function))() for function in (each.own, each.right))
    for name, value in right.items():
        assert_close(got[name], value)
    found = jax.vmap(jax.grad(penalty(each.own, each.vector)))(inputs)  # without jit
    assert_close(found, right["reverse"])


def test_products_are_linear_in_the_vector():
    """Products are differentiable with respect to the vector, to any order, and solvers may transpose them."""
    each = Problem({"reduction": "sum"}, SMALL, "float64")

    def of_vector(function):
        return lambda vector: (product_of(function, vector)(each.input) ** 3).sum()

    for derivative in (jax.grad, jax.hessian):
        got, right = (jax.jit(derivative(of_vector(function)))(each.vector) for function in (each.own, each.right))
        assert_close(got, right)

    def newton_step(function, side):
        matvec = lambda vector: product_of(function, vector)(each.input) + 0.1 * vector  # noqa: E731
        return (jax.scipy.sparse.linalg.cg(matvec, side, tol=1e-12)[0] ** 2).sum()

    got, right = (
        jax.jit(jax.value_and_grad(partial(newton_step, function)))(each.vector) for function in (each.own, each.right)
    )
    np.testing.assert_allclose(got[0], right[0], rtol=1e-9)
    np.testing.assert_allclose(got[1], right[1], rtol=1e-7, atol=1e-9)


def test_a_program_computes_only_what_it_returns():
    each = Problem({}, PROBLEMS[0], "float32")

    def with_outputs(input):
        return agj.cross_entropy(input, **each.settings, outputs=("lse", "entropy", "prob")).loss

    for function in (each.own, with_outputs):
        assert calls(product_of(function, each.vector), each.input) == 1
        assert calls(lambda x, f=function: jax.jvp(jax.grad(f), (x,), (each.vector,)), each.input) == 2


# ---- upstream gradients, values and outputs --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float16"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_derivatives_with_respect_to_the_upstream_gradient(reduction, dtype):
    each = Problem({"reduction": reduction, "label_smoothing": 0.1}, ((2, 5, 3), 1, 0), dtype)
    above = jnp.asarray(generator("above").random((2, 3) if reduction == "none" else ()))
    change = jnp.cos(above)

    def gradient_for(loss, input):
        def of_upstream(above):
            each.above = above
            return jax.grad(loss)(input)

        return of_upstream

    vector = np.float64(each.vector)
    for make in (
        lambda function: jax.jvp(function, (above,), (change,))[1],
        lambda function: jax.grad(lambda above: (function(above) * vector).sum())(above),
        lambda function: jax.grad(lambda above: (function(above) ** 2).sum())(above),
    ):
        got = jax.jit(partial(make, gradient_for(each.own, each.input)))()
        right = jax.jit(partial(make, gradient_for(each.right, jnp.float64(each.input))))()
        assert_close(got, right, dtype)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": "rows", "label_smoothing": 0.1},
        {"softcap": 2.0, "logit_scale": -0.7, "temperature": 0.6, "reduction": "sum"},
    ],
    ids=str,
)
def test_outputs_beside_a_gradient_that_is_differentiated(options, problem):
    """Outputs have tangents, too, though their gradients cannot be differentiated."""
    each = Problem(options, problem, "float64")
    names = tuple(name for name in ("lse", "log_prob", "entropy", "prob") if name != "log_prob" or each.has_classes)

    def tangents(function):
        def found(input):
            result = function(input, **each.settings, outputs=names)
            return result.loss, {name: getattr(result, name) for name in names}

        of_logits = jax.jit(jax.value_and_grad(found, has_aux=True))
        (loss, outputs), gradient = jax.jvp(of_logits, (each.input,), (each.vector,))[1]
        return {**outputs, "loss": loss, "gradient": gradient}

    got, right = tangents(agj.cross_entropy), tangents(formula)
    for name, value in right.items():
        assert_close(got[name], value)


def test_the_gradient_of_probabilities_can_be_differentiated():
    each = Problem({"softcap": 2.0, "temperature": "rows"}, SMALL, "float64")

    def of_prob(function, input):
        return (function(input, **each.settings, outputs=("prob",)).prob * each.vector).sum()

    got, right = (
        jax.jit(jax.hessian(partial(of_prob, function)))(each.input) for function in (agj.cross_entropy, formula)
    )
    assert_close(got, right)


def test_outputs_without_derivatives():
    """Whole numbers and the diagonal of the Hessian count as constants."""
    each = Problem({}, PROBLEMS[0], "float64")

    def found(input):
        result = agj.cross_entropy(input, **each.settings, outputs=("hessian_diag", "predicted", "correct"))
        return result.loss + result.hessian_diag.sum(), result

    (_, result), product = jax.jvp(jax.value_and_grad(found, has_aux=True), (each.input,), (each.vector,))[1]
    assert_identical(np.asarray(result.hessian_diag), np.zeros(each.input.shape))
    assert_identical(np.asarray(product), np.asarray(product_of(each.own, each.vector)(each.input)))


# ---- edges and errors ------------------------------------------------------------------------------------------------


def test_sizes_of_0_and_rank_0():
    for shape, rows in (((), ()), ((0, 3), (0,)), ((2, 0, 3), (2, 0)), ((1,), ())):
        x, target = np.full(shape, 0.5, np.float32), np.zeros(rows, np.int32)
        right = ag.cross_entropy_hvp(x, target, x, lse_square_scale=0.1)
        loss = partial(agj.cross_entropy, target=target, lse_square_scale=0.1)
        assert_identical(np.asarray(product_of(loss, jnp.asarray(x))(jnp.asarray(x))), right)


def test_a_row_of_several_threads():
    x, vector = generator("long row").standard_normal((2, 1, 600_000)).astype(np.float32)
    found = product_of(lambda x: agj.cross_entropy(x, jnp.array([7])), jnp.asarray(vector))(jnp.asarray(x))
    assert_identical(np.asarray(found), ag.cross_entropy_hvp(x, np.array([7]), vector))


def test_a_bad_target_raises_the_error_of_the_loss():
    product = jax.jit(lambda x, target: product_of(lambda x: agj.cross_entropy(x, target), x)(x))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"cross_entropy: target: expected values in \[0, 2\) or -100"):
        product(jnp.zeros((3, 2)), jnp.array([0, 1, 2])).block_until_ready()


def test_the_third_order_raises():
    each = Problem({}, SMALL, "float64")
    product = product_of(each.own, each.vector)
    for function in (
        lambda x: jax.jvp(product, (x,), (x,)),
        jax.grad(lambda x: product(x).sum()),
        jax.grad(lambda x: jax.grad(penalty(each.own, each.vector))(x).sum()),
        jax.jacfwd(jax.hessian(each.own)),
        lambda x: jax.vmap(jax.grad(lambda x: product(x).sum()))(jnp.stack([x, x])),
    ):
        for transformed in (function, jax.jit(function)):
            with pytest.raises(NotImplementedError, match=f"^{TWICE}"):
                transformed(each.input)


@pytest.mark.parametrize("name", ["lse", "log_prob", "entropy"])
def test_gradients_of_outputs_raise(name):
    each = Problem({}, SMALL, "float64")

    def total(input):
        result = agj.cross_entropy(input, **each.settings, outputs=(name,))
        return getattr(result, name).sum() + result.loss

    for function in (product_of(total, each.vector), jax.jit(jax.grad(penalty(total, each.vector)))):
        message = f"^cross_entropy: the gradient of {name} cannot be differentiated once more"
        with pytest.raises(NotImplementedError, match=message):
            function(each.input)


def test_options_that_are_differentiated_raise():
    each = Problem({"token_weight": "rows", "temperature": "rows", "class_weight": "classes"}, PROBLEMS[0], "float64")
    for name in ("token_weight", "temperature", "class_weight"):

        def gradient(option, name=name):
            return jax.grad(partial(each.own, **{name: option}))(each.input)

        option = each.settings[name]
        for function in (
            lambda option: jax.jvp(gradient, (option,), (option,)),
            jax.jit(jax.grad(lambda option: gradient(option).sum())),
        ):
            with pytest.raises(NotImplementedError, match=f"^cross_entropy: {name}: the loss has no gradient for it"):
                function(option)
