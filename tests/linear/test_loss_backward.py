"""Test the gradients of the loss of a linear layer and of its outputs, for upstream gradients that are given later."""

from __future__ import annotations

import numpy as np
import pytest
from faults import INVALID, NULL, TYPE, outcome
from linear_samples import Shape
from loss_samples import (
    OPTIONS,
    PLACES,
    SHAPE_OF_DEVICE,
    SHAPES,
    backward_of,
    check,
    check_on_device,
    device_gradients,
    moved,
    on_devices,
    sizes_and_settings,
    unusual_gradients,
)
from samples import assert_identical, generator

import ascend_grad as ag

BACKWARD = "linear_cross_entropy_backward"


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_on_every_variant(option, shape, dtype, cpu_engines):
    sizes, settings = sizes_and_settings(shape, dtype)
    forward, backward, upstream = backward_of(sizes, dtype, option)
    for _ in cpu_engines():
        check(ag.linear_cross_entropy_backward(**backward, **settings, backend="cpu"), forward, dtype, **upstream)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_reductions_on_both_backends(option, reduction, dtype):
    forward, backward, upstream = backward_of(Shape(60, 70, 20), dtype, option, reduction)
    for backend in ("cpu", "reference"):
        check(ag.linear_cross_entropy_backward(**backward, backend=backend), forward, dtype, **upstream)


@on_devices
def test_the_device_takes_gradients_of_the_loss_the_lse_and_the_log_probabilities(option, dtype, place, device):
    for arguments in device_gradients(option, dtype):
        check_on_device(BACKWARD, arguments, *PLACES[place])
        assert ag.workspace_size(BACKWARD, **arguments, backend="npu") > 0


@pytest.mark.parametrize("place", PLACES)
def test_unusual_gradients_on_the_device(place, device):
    """Rows of weight 0 have gradients of their outputs alone, and means over nothing have none."""
    for arguments in unusual_gradients("float16"):
        check_on_device(BACKWARD, arguments, *PLACES[place])


@pytest.mark.parametrize("place", PLACES)
def test_what_the_device_refuses_of_the_gradients(place, device):
    _, backward, _ = backward_of(SHAPE_OF_DEVICE, "float16", "no option")
    if place == "the host":
        assert ag.explain(BACKWARD, **backward).backend == "cpu"
    there = moved(backward, PLACES[place][0])
    error = outcome(ag.linear_cross_entropy_backward, **there, backend="npu")
    assert isinstance(error, ag.ParamInvalidError)
    assert "grad_entropy: the device's operators do not support it in the gradients" in str(error)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_threads_change_nothing(option, shape):
    sizes, settings = SHAPES[shape]
    for dtype in ("float32", "bfloat16"):
        _, backward, _ = backward_of(sizes, dtype, option)
        expected = ag.linear_cross_entropy_backward(**backward, **settings, num_threads=1)
        for threads in (2, 3, 4):
            results = ag.linear_cross_entropy_backward(**backward, **settings, num_threads=threads)
            for result, right in zip(results, expected, strict=True):
                if right is not None:
                    assert_identical(result, right)


@pytest.mark.parametrize("option", OPTIONS)
def test_finite_differences_of_outputs(option):
    """Changes of outputs along a random direction agree with the gradients."""
    forward, backward, upstream = backward_of(Shape(12, 40, 6), "float64", option, "none")
    backward["grad_loss"] = 0.0
    forward["outputs"] = tuple(name.removeprefix("grad_") for name in upstream)
    direction = generator("direction", option).standard_normal(forward["weight"].shape)
    step, sums = 1e-6, []
    for sign in (-1, 1):
        moved = forward | {"weight": forward["weight"] + sign * step * direction}
        results = ag.linear_cross_entropy(**moved, return_grad=False)
        found = {name: getattr(results, name.removeprefix("grad_")) for name in upstream}
        sums.append(sum(np.vdot(found[name], grad) for name, grad in upstream.items()))
    grad = ag.linear_cross_entropy_backward(**backward).weight_grad
    assert np.isclose(np.vdot(grad, direction), (sums[1] - sums[0]) / (2 * step), rtol=1e-6, atol=1e-7)


def test_rows_without_upstream_gradients_are_absent(dtype):
    for sizes, settings in SHAPES.values():
        _, backward, upstream = backward_of(sizes, dtype, "no option", "none")
        nothing = np.arange(sizes.BT) % 3 == 0
        for name in (*upstream, "grad_loss"):
            backward[name] = np.where(nothing, 0, backward[name])
        expected = ag.linear_cross_entropy_backward(**backward, **settings)
        backward["input"][nothing] = np.nan
        results = ag.linear_cross_entropy_backward(**backward, **settings)
        for result, right in zip(results[:2], expected[:2], strict=True):
            assert_identical(result, right)


def test_faults():
    good = {"input": np.ones((9, 5)), "weight": np.ones((6, 5)), "target": np.zeros(9, int), "lse": np.ones(9)}
    for name, value, kind, text in (
        ("lse", None, NULL, "an array"),
        ("lse", np.ones(8), INVALID, "shape (BT = 9)"),
        ("grad_lse", np.ones(9, int), TYPE, "dtype float32"),
        ("grad_entropy", np.ones(9), NULL, "entropy: expected an array, as grad_entropy is given"),
        ("grad_log_prob", np.ones((9, 1)), INVALID, "shape (BT = 9)"),
        (
            *("grad_loss", None, INVALID),
            "grad_loss: expected an upstream gradient, or one as grad_lse, grad_log_prob or grad_entropy, got None",
        ),
    ):
        for backend in ("cpu", "reference"):
            error = outcome(ag.linear_cross_entropy_backward, **good | {name: value}, backend=backend)
            assert type(error) is kind
            assert text in str(error)
        assert str(outcome(ag.explain, BACKWARD, **good | {name: value})) == str(error)
    several = good | {"target": np.zeros((9, 2), int), "target_prob": np.ones((9, 2)), "grad_log_prob": np.ones(9)}
    error = outcome(ag.linear_cross_entropy_backward, **several)
    assert type(error) is INVALID
    assert "grad_log_prob: expected shape (9, 2) as target has, got (9,)" in str(error)


def test_questions_about_a_call():
    _, backward, _ = backward_of(Shape(300, 400, 50), "float32", "all")
    assert ag.explain(BACKWARD, **backward).plan.startswith("packed")
    assert ag.workspace_size(BACKWARD, **backward) < (64 << 20) + (1 << 20)
    assert ag.workspace_size(BACKWARD, **backward, workspace_bytes=0) == 4 << 20


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_an_upstream_gradient_that_is_not_given_is_zero(backend):
    """None stands for 0 in all of them, and a 0 that is given is no error."""
    _, backward, _ = backward_of(Shape(9, 6, 5), "float64", "no option", "sum")
    for name in ("grad_loss", "grad_lse", "grad_log_prob"):
        zero = 0.0 if name == "grad_loss" else np.zeros(9)
        found = ag.linear_cross_entropy_backward(**backward | {name: None}, backend=backend)
        for result, right in zip(
            found, ag.linear_cross_entropy_backward(**backward | {name: zero}, backend=backend), strict=True
        ):
            np.testing.assert_equal(result, right)
    nothing = {name: None for name in backward if name.startswith("grad_")} | {"grad_loss": 0.0}
    assert not ag.linear_cross_entropy_backward(**backward | nothing, backend=backend).weight_grad.any()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_row_without_gradients_is_absent_beside_an_infinite_weight(backend):
    """A row without an upstream gradient has a gradient of 0, whatever the weight holds."""
    weight = np.ones((5, 3))
    weight[1, 2] = np.inf
    grad_lse = np.array([0.0, 1.0, 0.0])
    found = ag.linear_cross_entropy_backward(
        np.ones((3, 3)), weight, np.array([0, 1, -100]), lse=np.ones(3), grad_lse=grad_lse, backend=backend
    )
    assert not found.input_grad[[0, 2]].any()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("weight", [np.inf, np.nan])
@pytest.mark.parametrize("more", [{}, {"label_smoothing": 0.1, "lse_square_scale": 0.1}])
def test_a_loss_at_which_0_arrives_has_no_gradient_whatever_its_weight(weight, more, backend):
    random = generator("weights without gradient")
    arguments = {"input": random.standard_normal((3, 4)), "weight": random.standard_normal((5, 4)), **more}
    arguments |= {"target": np.array([0, 1, 2]), "reduction": "none", "backend": backend}
    for name, size in (("token_weight", 3), ("class_weight", 5)):
        if name == "class_weight" and more:
            continue  # smoothing adds the weights of all classes to each row
        weights = [np.where(np.arange(size) == 0, first, 1.0) for first in (weight, 1)]
        found, right = (ag.linear_cross_entropy(**arguments, **{name: each}, grad_loss=[0.0, 1, 1]) for each in weights)
        assert_identical(found.input_grad, right.input_grad)
        assert_identical(found.weight_grad, right.weight_grad)
        assert_identical(found.loss[1:], right.loss[1:])
        arguments["lse"] = np.ones(3)
        for grad_loss in (None, np.array([0.0, 1.0, 1.0])):
            upstream = {"grad_loss": grad_loss, "grad_lse": np.ones(3), "grad_log_prob": np.ones(3)}
            found, right = (
                ag.linear_cross_entropy_backward(**arguments, **upstream, **{name: each}) for each in weights
            )
            assert np.isfinite(found.weight_grad).all()
            assert_identical(found.input_grad, right.input_grad)
        del arguments["lse"]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("more", [{}, {"return_grad": False}, {"outputs": ("lse",)}, {"grad_loss": [0.0, 1.0]}])
def test_an_infinite_token_weight_makes_an_infinite_loss(more, backend):
    x, target, weights = np.eye(2, 3), np.array([0, 1]), np.array([np.inf, 1])
    options = {"reduction": "none", "token_weight": weights, "backend": backend} | more
    assert ag.cross_entropy(x, target, **options).loss[0] == np.inf
    assert ag.linear_cross_entropy(x, np.eye(3), target, **options).loss[0] == np.inf


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_divisors_that_are_infinite_nan_or_tiny(backend):
    """A loss whose upstream gradient is 0 has no gradient, whatever the divisor of a mean is."""
    x, weight, target, lse = np.eye(2, 3), np.eye(3), np.array([0, 1]), np.ones(2)
    backward = {"lse": lse, "grad_lse": np.ones(2), "backend": backend}
    for options in ({"token_weight": [np.nan, 1.0]}, {"denominator": 1e-310}, {"class_weight": [np.nan, 1.0, 1.0]}):
        for function, arrays in ((ag.cross_entropy, (x,)), (ag.linear_cross_entropy, (x, weight))):
            assert not function(*arrays, target, **options, grad_loss=0.0, backend=backend).input_grad.any()
        for grad_loss in (0.0, None):
            options["grad_loss"] = grad_loss
            found = ag.linear_cross_entropy_backward(x, weight, target, **options, **backward)
            assert np.isfinite(found.input_grad).all()
    options = {"class_weight": [np.inf, 1.0, 1.0], "lse_square_scale": 0.1, "backend": backend}
    found = ag.linear_cross_entropy(x, weight, target, **options)
    lse = ag.linear_cross_entropy(x, weight, target, **options, outputs=("lse",)).lse
    again = ag.linear_cross_entropy_backward(x, weight, target, lse=lse, grad_loss=1.0, **options)
    np.testing.assert_allclose(found.input_grad, again.input_grad, rtol=1e-12)
    assert np.isfinite(ag.cross_entropy(x, target, **options).input_grad).all()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_weights_of_no_classes(backend):
    """Without vocabulary entries all rows are ignored, also with class weights."""
    arguments = {"target": np.full(3, -100), "class_weight": np.ones(0), "backend": backend}
    found = ag.linear_cross_entropy_backward(
        np.ones((3, 2)), np.ones((0, 2)), lse=np.ones(3), grad_loss=1.0, **arguments
    )
    assert not found.input_grad.any()
    assert np.isnan(ag.linear_cross_entropy(np.ones((3, 2)), np.ones((0, 2)), **arguments).loss)
