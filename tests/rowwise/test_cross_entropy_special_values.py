"""Test the cross-entropy of rows with infinite and NaN values, weights of 0, and means over nothing."""

from __future__ import annotations

import itertools
import warnings

import cross_entropy_oracles
import numpy as np
import pytest
import scipy.special
from cross_entropy_oracles import (
    PLACES,
    assert_right,
    in_layout,
    random_arguments,
)
from samples import DTYPES, generator

import ascend_grad as ag


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


def test_a_loss_that_overflows_is_infinite_without_a_warning():
    x = np.array([[0, -3e38]], np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = ag.cross_entropy(x, np.array([1]), token_weight=np.full(1, 1e3), reduction="sum", return_grad=False).loss
    assert loss == np.inf


# ---- weights of 0 and infinite weights -------------------------------------------------------------------------------


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


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("is_dense", [False, True])
def test_an_upstream_gradient_and_a_denominator_of_any_size(axis, is_dense, dtype, cpu_engine):
    """Only their quotient has to be a number of the accumulator."""
    x = np.random.default_rng(0).standard_normal((5, 7)).astype(dtype)
    target = np.full(x.shape, 0.5, x.dtype) if is_dense else np.zeros(x.shape[1 - axis], int)
    for options in ({}, {"label_smoothing": 0.1}, {"lse_square_scale": 0.1}):
        right, *others = (
            cpu_engine.call("cross_entropy", x, target, axis, denominator=each, grad_loss=each, **options).input_grad
            for each in (1.0, 5e-324, 1e-310, 1e300)
        )
        for each in others:
            np.testing.assert_array_equal(each, right)


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
    """Smoothing 1 and probability 0 also exclude the logit. A mean without weight is NaN, and its gradient is 0."""
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


# ---- means over nothing ----------------------------------------------------------------------------------------------


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
