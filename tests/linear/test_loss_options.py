"""Test the options and the outputs of the loss of a linear layer, on every sweep and every CPU variant."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from faults import INVALID, TYPE, outcome
from linear_samples import WHOLE, Shape
from loss_oracle import logits_of
from loss_samples import (
    EDGES,
    EVERY,
    OF_DEVICE,
    OPTIONS,
    PLACES,
    SHAPE_OF_DEVICE,
    SHAPES,
    arguments_of,
    check,
    check_on_device,
    device_losses,
    moved,
    on_devices,
    sizes_and_settings,
    unusual_losses,
)
from samples import DTYPES, assert_identical, generator

import ascend_grad as ag


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_on_every_variant(option, shape, dtype, cpu_engines):
    sizes, settings = sizes_and_settings(shape, dtype)
    arguments = arguments_of(sizes, dtype, option)
    for _ in cpu_engines():
        check(ag.linear_cross_entropy(**arguments, **settings, backend="cpu"), arguments, dtype)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_reductions_on_both_backends(option, reduction, dtype):
    arguments = arguments_of(Shape(60, 70, 20), dtype, option, reduction)
    for backend in ("cpu", "reference"):
        check(ag.linear_cross_entropy(**arguments, backend=backend), arguments, dtype)


@pytest.mark.parametrize("shape", EDGES)
def test_edges_of_shapes(shape, dtype):
    for option in OPTIONS:
        arguments = arguments_of(shape, dtype, option, "sum")
        check(ag.linear_cross_entropy(**arguments, backend="cpu"), arguments, dtype)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_threads_and_strides_change_nothing(option, shape, dtype):
    sizes, settings = SHAPES[shape]
    arguments = arguments_of(sizes, dtype, option)
    expected = ag.linear_cross_entropy(**arguments, **settings, num_threads=1)
    strided = {name: np.repeat(a, 2, axis=0)[::2] if isinstance(a, np.ndarray) else a for name, a in arguments.items()}
    for threads in (2, 3, 4):
        for each in (arguments, strided):
            for result, right in zip(
                ag.linear_cross_entropy(**each, **settings, num_threads=threads), expected, strict=True
            ):
                assert_identical(result, right)


def test_values_that_change_nothing_keep_the_bits(dtype):
    """Options at their defaults, and weights of 1, give the bits of the call without them."""
    for sizes, settings in SHAPES.values():
        arguments = arguments_of(sizes, dtype, "no option")
        expected = ag.linear_cross_entropy(**arguments, **settings)
        for options in (
            {"token_weight": np.ones(sizes.BT)},
            {"temperature": 1, "logit_scale": 1, "label_smoothing": 0, "lse_square_scale": 0},
            {"outputs": EVERY},
            {"denominator": float(np.count_nonzero(arguments["target"] != -7))},
        ):
            results = ag.linear_cross_entropy(**arguments, **settings, **options)
            # Outputs take a part of a given workspace, whose blocks are the order in which gradients are added up.
            count = 1 if "outputs" in options and "workspace_bytes" in settings else 3
            for result, right in zip(results[:count], expected[:count], strict=True):
                assert_identical(result, right)


@pytest.mark.parametrize("option", OPTIONS)
def test_finite_differences(option):
    """Changes of the loss along random directions agree with the gradients."""
    arguments = arguments_of(Shape(12, 40, 6), "float64", option, "none")
    if "bias" in arguments:
        arguments["bias"] = arguments["bias"].astype(np.float64)
    results = ag.linear_cross_entropy(**arguments)
    random = generator("directions", option)
    for name in ("input", "weight", "bias"):
        if arguments.get(name) is None:
            continue
        direction = random.standard_normal(arguments[name].shape)
        step, losses = 1e-6, []
        for sign in (-1, 1):
            moved = arguments | {name: arguments[name].astype(np.float64) + sign * step * direction}
            losses.append(ag.linear_cross_entropy(**moved, return_grad=False).loss @ arguments["grad_loss"])
        slope = (losses[1] - losses[0]) / (2 * step)
        grad = getattr(results, f"{name}_grad").astype(np.float64)
        assert np.isclose(np.vdot(grad, direction), slope, rtol=1e-6, atol=1e-7)


# ---- digits of nearly certain targets --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes", [Shape(70, 200, 8), Shape(5, 700, 8), Shape(600, 30, 8), Shape(5, 9, 8), Shape(30, 30, 300)]
)
def test_nearly_certain_targets(sizes, dtype, cpu_engines):
    """Losses, outputs and the gradient at the target keep a relative error of 1e-4 down to 1 - p = 1e-12."""
    for distance, target in itertools.product((4, 8, 16, 28, 33), (0, sizes.V - 1)):
        x, w = np.zeros((2, sizes.BT, sizes.H), DTYPES[dtype]), np.zeros((sizes.V, sizes.H), DTYPES[dtype])
        x = x[0]
        x[:, 0], w[:, 0], w[target, 0] = 1, -40, distance - 40
        z = (x @ w.T).astype(np.longdouble)
        rest = (sizes.V - 1) * np.exp(-np.longdouble(distance))
        loss, q = np.log1p(rest), rest / (1 + rest)
        entropy = loss + rest * distance / (1 + rest)
        assert np.all(z[:, target] == distance - 40)
        bias, ones = np.zeros(sizes.V, np.float32), np.ones(sizes.BT, np.float32)
        ways = ({}, {"label_smoothing": 1e-300}, {"bias": bias}, {"bias": bias, "token_weight": ones})
        for _, options in itertools.product(cpu_engines(), ways):
            plain = ag.linear_cross_entropy(x, w, np.full(sizes.BT, target), reduction="sum", **options)
            results = ag.linear_cross_entropy(
                x, w, np.full(sizes.BT, target), reduction="sum", outputs=("log_prob", "entropy"), **options
            )
            assert np.all(abs(results.log_prob / -loss - 1) < 1e-4)
            assert np.all(abs(results.entropy / entropy - 1) < 1e-4)
            for each in (plain, results):
                assert abs(each.loss / (loss * sizes.BT) - 1) < 1e-4
                if dtype != "float16":  # small gradients underflow there
                    grad = each.weight_grad[target, 0].astype(float)
                    assert abs(grad / -(q * sizes.BT) - 1) < (1e-4 if dtype.startswith("float") else 2**-7)


@pytest.mark.parametrize("classes", [2, 5, 17, 40])
@pytest.mark.parametrize("H", [3, 16, 40])
@pytest.mark.parametrize("options", [{}, {"bias": True}, {"bias": True, "token_weight": True}])
def test_infinities_and_nan_of_few_classes(classes, H, options, dtype, cpu_engine):
    """Excluded classes, rows that hold NaN or infinities, and ignored rows give the reference's values."""
    random = generator("few classes", classes, H)
    x, w = random.standard_normal((300, H)), random.standard_normal((classes, H))
    x[5, 0], x[6, 1], x[7, 0] = np.nan, np.inf, np.nan
    arguments = {"input": x.astype(DTYPES[dtype]), "weight": w.astype(DTYPES[dtype])}
    arguments["target"] = random.integers(0, classes, 300)
    arguments["target"][[7, 20]] = -100
    if "bias" in options:
        arguments["bias"] = random.standard_normal(classes).astype(np.float32)
        arguments["bias"][1] = -np.inf
    if "token_weight" in options:
        arguments["token_weight"] = random.random(300, np.float32)
        arguments["token_weight"][5] = 0
    found = ag.linear_cross_entropy(**arguments, reduction="none")
    right = ag.linear_cross_entropy(**arguments, reduction="none", backend="reference")
    for name in ("loss", "input_grad"):
        got, expected = (np.asarray(getattr(each, name), np.float64) for each in (found, right))
        rtol, atol = (1e-9, 1e-9) if dtype == "float64" else (2e-2, 5e-2)
        np.testing.assert_allclose(got, expected, rtol, atol)


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_terms_of_0(cpu_engines):
    """A squared lse of 0 adds nothing for any weight, and a loss of 0 times a negative weight is +0."""
    logits, target = np.array([[0, -1e4], [0, -1e4]]), np.array([1, 0])
    arguments = {"input": np.eye(2), "weight": logits.T.copy(), "target": target, "reduction": "none"}
    for _ in cpu_engines():
        found = ag.linear_cross_entropy(**arguments, token_weight=np.array([np.inf, 1]), lse_square_scale=0.1)
        assert_identical(found.loss, np.array([np.inf, 0]))
        found = ag.linear_cross_entropy(**arguments, token_weight=np.array([1.0, -1.0]))
        assert_identical(found.loss, np.array([1e4, 0]))
        assert not np.signbit(found.loss[1])


@pytest.mark.parametrize("option", [name for name in OPTIONS if name != "several targets"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_of_weight_0_adds_nothing(option, shape, dtype):
    sizes, settings = SHAPES[shape]
    arguments = arguments_of(sizes, dtype, option)
    weight = np.ones(sizes.BT)
    weight[::3] = 0
    arguments["token_weight"] = weight
    expected = ag.linear_cross_entropy(**arguments, **settings)
    arguments["input"][::3] = np.nan
    results = ag.linear_cross_entropy(**arguments, **settings)
    for name in ("loss", "input_grad", "weight_grad", "bias_grad"):
        if getattr(expected, name) is not None:
            assert_identical(getattr(results, name), getattr(expected, name))
    assert np.all(results.input_grad[::3] == 0)


def test_ignored_rows_have_no_outputs(dtype):
    for sizes, settings in SHAPES.values():
        arguments = arguments_of(sizes, dtype, "outputs")
        ignored = arguments["target"] == -7
        arguments["input"][ignored] = np.inf
        results = ag.linear_cross_entropy(**arguments, **settings)
        for name in ("lse", "log_prob", "entropy"):
            assert np.all(getattr(results, name)[ignored] == 0)
            assert np.all(np.isfinite(getattr(results, name)))
        assert np.all(results.predicted[ignored] == -1)


def test_the_lowest_entry_of_a_tie_is_predicted(dtype, cpu_engines):
    for sizes, settings in SHAPES.values():
        w = np.zeros((sizes.V, sizes.H), DTYPES[dtype])
        x = np.ones((sizes.BT, sizes.H), DTYPES[dtype])
        w[[5, 7, sizes.V - 1]] = 1
        for _ in cpu_engines():
            results = ag.linear_cross_entropy(
                x, w, np.full(sizes.BT, 5), return_grad=False, outputs=("predicted", "correct"), **settings
            )
            assert np.all(results.predicted == 5)
            assert results.correct == sizes.BT


def test_the_first_nan_is_predicted(dtype, cpu_engines):
    """As in NumPy's argmax, a NaN is larger than anything else, in whichever block it is."""
    for sizes, settings in SHAPES.values():
        for entry in (sizes.V - 1, sizes.V // 2):
            w = np.zeros((sizes.V, sizes.H), DTYPES[dtype])
            w[3] = 1
            w[[entry, sizes.V - 1]] = np.nan
            for _ in cpu_engines():
                results = ag.linear_cross_entropy(
                    np.ones((sizes.BT, sizes.H), DTYPES[dtype]), w, np.full(sizes.BT, 5), return_grad=False,
                    outputs=("predicted",), **settings
                )  # fmt: skip
                assert np.all(results.predicted == entry)


def test_duplicate_targets_are_added_up(dtype):
    sizes = Shape(40, 90, 12)
    arguments = arguments_of(sizes, dtype, "no option", "sum")
    expected = ag.linear_cross_entropy(**arguments)
    target = arguments.pop("target")
    several = np.stack([target, np.full(sizes.BT, -7), target], axis=1)
    prob = np.tile([0.25, np.nan, 0.75], (sizes.BT, 1))
    results = ag.linear_cross_entropy(**arguments, target=several, target_prob=prob)
    rtol = 1e-2 if dtype.startswith("b") else 1e-3 if dtype == "float16" else 1e-5
    for result, right in zip(results, expected, strict=True):
        wide = right.astype(np.float64)
        assert np.allclose(result.astype(np.float64), wide, rtol=rtol, atol=rtol * np.abs(wide).max())


def test_tiles_that_are_skipped_stay_within_the_bound(dtype):
    sizes = Shape(200, 500, 30)
    for option in OPTIONS:
        arguments = arguments_of(sizes, dtype, option, "sum")
        exact = ag.linear_cross_entropy(**arguments)
        eps = 1e-4
        results = ag.linear_cross_entropy(**arguments, filter_eps=eps)
        x, w = (np.abs(arguments[name].astype(float)) for name in ("input", "weight"))
        rtol = 2**-6 if dtype.startswith("b") else 2**-9 if dtype == "float16" else 1e-4
        for name, most in (("input_grad", w.sum(0)), ("weight_grad", x.sum(0))):
            result, right = (getattr(each, name).astype(float) for each in (results, exact))
            assert np.all(np.abs(result - right) <= eps * most + rtol * np.abs(right).max())


# ---- coefficients of any size ----------------------------------------------------------------------------------------

#: The sweeps of the CPU, whose variants are forced one after another, and the reference.
BACKENDS = [*((shape, "cpu") for shape in SHAPES), ("packed", "reference")]


def engines(cpu_engines, backend):
    """Return an iterator over the variants that a backend has."""
    return cpu_engines() if backend == "cpu" else iter(["reference"])


def assert_scaled(results, expected, factor):
    """Check that gradients are a power of two times others, bit for bit."""
    for name in ("input_grad", "weight_grad", "bias_grad"):
        if getattr(expected, name, None) is not None:
            wanted = (getattr(expected, name).astype(np.float64) * factor).astype(getattr(results, name).dtype)
            assert_identical(getattr(results, name), wanted)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("option", ["classes and smoothing", "all"])
@pytest.mark.parametrize("exponent", [-166, 900])
def test_the_size_of_class_weights_cancels(option, shape, exponent, dtype, cpu_engines):
    """Weights of float64 beyond the range of float32 cancel in a mean, or against the upstream gradient of a sum."""
    sizes, settings = SHAPES[shape]
    for _, reduction in itertools.product(cpu_engines(), ("mean", "sum")):
        arguments = arguments_of(sizes, dtype, option, reduction) | settings
        arguments |= {"denominator": None, "lse_square_scale": 0.0}
        if reduction == "mean":
            arguments["target_prob"] = None
            arguments["target"] = arguments["target"].reshape(sizes.BT, -1)[:, 0]
        expected = ag.linear_cross_entropy(**arguments)
        arguments["class_weight"] = arguments["class_weight"] * 2.0**exponent
        if reduction == "sum":
            arguments["grad_loss"] *= 2.0**-exponent
        results = ag.linear_cross_entropy(**arguments)
        assert_scaled(results, expected, 1)
        with np.errstate(over="ignore", under="ignore"):
            factor = 1 if reduction == "mean" else 2.0**exponent
            loss = (np.float64(expected.loss) * factor).astype(expected.loss.dtype)
        if dtype == "float64" or np.isinf(loss) or loss == 0 or factor == 1:
            assert results.loss == loss
        lse = ag.linear_cross_entropy(**arguments | {"outputs": ("lse", "entropy")}, return_grad=False)
        given = {name: each for name, each in arguments.items() if name != "outputs"}
        again = ag.linear_cross_entropy_backward(**given, lse=lse.lse, entropy=lse.entropy)
        given["class_weight"], given["grad_loss"] = given["class_weight"] * 2.0**-exponent, 0.7
        assert_scaled(again, ag.linear_cross_entropy_backward(**given, lse=lse.lse, entropy=lse.entropy), 1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("factor", ["logit_scale", "temperature", "temperatures"])
def test_the_factor_of_logits_meets_the_upstream_gradient_in_float64(factor, shape, dtype, cpu_engines):
    """An upstream gradient beyond the range of accumulators is ordinary together with the factor of the products."""
    sizes, settings = SHAPES[shape]
    factor_bits, grad_bits = (58, 130) if dtype == "float32" else (400, 900)
    for _, sign, cap in itertools.product(cpu_engines(), (1, -1), (None, 4.0)):
        arguments = arguments_of(sizes, dtype, "classes and smoothing", "sum") | settings | {"softcap": cap}
        expected = ag.linear_cross_entropy(**arguments)
        size = 2.0 ** (sign * factor_bits)
        arguments["input"] = arguments["input"] * arguments["input"].dtype.type(1 / size)
        if factor == "logit_scale":
            arguments["logit_scale"] = size
        else:
            each = 1 / size
            arguments["temperature"] = np.full(sizes.BT, each) if factor == "temperatures" else each
            arguments["softcap"] = None if cap is None else cap / size
        power = 2.0 ** (-sign * grad_bits)
        arguments["grad_loss"] *= power
        results = ag.linear_cross_entropy(**arguments)
        assert_identical(results.input_grad, expected.input_grad * results.input_grad.dtype.type(power * size))


@pytest.mark.parametrize(("shape", "backend"), BACKENDS)
def test_an_infinite_class_weight_makes_the_smoothed_loss_infinite(shape, backend, dtype, cpu_engines):
    """Also where its class has the largest logit, in whichever block it is."""
    sizes, settings = SHAPES[shape]
    x, w = np.ones((sizes.BT, sizes.H), DTYPES[dtype]), np.zeros((sizes.V, sizes.H), DTYPES[dtype])
    places = (0, sizes.V - 1), (0, 1, sizes.V - 1), (2, 1000)
    for _, place, largest, gap in itertools.product(engines(cpu_engines, backend), *places):
        w[:, 0], w[largest, 0] = 0, gap
        weight = np.ones(sizes.V)
        weight[place] = np.inf
        loss = ag.linear_cross_entropy(
            x, w, np.full(sizes.BT, 1), class_weight=weight, label_smoothing=0.1, reduction="none", backend=backend,
            **settings, outputs=("entropy",), return_grad=False
        ).loss  # fmt: skip
        if place != 1:
            assert np.all(loss == np.inf)


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.5}, {"logit_scale": 2.0}, {"logit_scale": -1.0}, {"softcap": 0.25}], ids=str
)
def test_a_bias_beyond_the_range_of_accumulators(options, cpu_engines):
    """One above it takes all of the probability, one below it none, as in float64."""
    random = generator("bias")
    x, w = (random.standard_normal(each).astype(np.float32) for each in ((9, 5), (20, 5)))
    for _, value in itertools.product(cpu_engines(), (1e300, -1e300, 1e-50, -np.inf)):
        bias = np.zeros(20)
        bias[3] = value
        for target in (2, 3):
            arguments = {"target": np.full(9, target), "bias": bias, "reduction": "none", **options}
            result = ag.linear_cross_entropy(x, w, **arguments, backend="cpu")
            right = ag.linear_cross_entropy(x, w, **arguments, backend="reference")
            for name in ("input_grad", "weight_grad", "bias_grad"):
                np.testing.assert_allclose(getattr(result, name), getattr(right, name), rtol=1e-5, atol=1e-5)
            is_large = right.loss > 1e38
            assert np.all(result.loss[is_large] > 3e38)
            np.testing.assert_allclose(result.loss[~is_large], right.loss[~is_large], rtol=1e-5)
        top, other = (ag.linear_top_k(x, w, 3, bias=bias, **options, backend=each) for each in ("cpu", "reference"))
        assert np.array_equal(top.index[:, 0], other.index[:, 0]) or "softcap" in options  # which makes logits equal
        np.testing.assert_allclose(top.log_prob[:, 0], other.log_prob[:, 0], rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_temperatures_have_one_limit(dtype, backend):
    """Temperatures beyond the limits count as the nearest one, in every function."""
    limit = 2.0**500 if dtype == "float64" else 2.0**60
    x = np.array([[3.0, 1.0, 2.0]], dtype)
    for temperature, nearest in ((limit * 2**10, limit), (2.0**-10 / limit, 1 / limit)):
        logits = x * x.dtype.type(nearest)
        for function, arguments in (
            (ag.cross_entropy, (logits, np.array([1]))),
            (ag.linear_cross_entropy, (logits, np.eye(3, dtype=dtype), np.array([1]))),
            (ag.linear_top_k, (logits, np.eye(3, dtype=dtype), 2)),
        ):
            for form in (float, lambda value: np.full(1, value)):
                results, expected = (
                    function(*arguments, temperature=form(each), backend=backend) for each in (temperature, nearest)
                )
                for result, right in zip(results, expected, strict=True):
                    assert_identical(result, right)


# ---- infinite logits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "backend"), BACKENDS)
def test_the_lse_of_infinite_logits_is_that_of_scipy(shape, backend, dtype, cpu_engines):
    """It is infinite where a logit is positive infinite or all are negative infinite, and all other results are NaN."""
    sizes, settings = SHAPES[shape]
    random = generator("infinite logits", shape)
    w = ((0.5 + random.random((sizes.V, sizes.H))) / sizes.H).astype(DTYPES[dtype])
    x = random.standard_normal((sizes.BT, sizes.H)).astype(DTYPES[dtype])
    x[1], x[2], x[3] = -np.inf, np.inf, np.nan
    positive, negative = np.zeros((2, sizes.V))
    positive[-1], negative[1] = np.inf, -np.inf
    outputs = ("lse", "entropy", "log_prob")
    for _, bias in itertools.product(
        engines(cpu_engines, backend), (None, positive, negative, np.full(sizes.V, -np.inf))
    ):
        arguments = {"target": np.zeros(sizes.BT, int), "bias": bias, "reduction": "none", "backend": backend}
        result = ag.linear_cross_entropy(x, w, **arguments, **settings, outputs=outputs)
        right = np.zeros(sizes.BT)
        if bias is not None and np.isinf(bias[-1]):
            right[:] = bias[-1]
        right[1], right[2], right[3] = -np.inf, np.inf, np.nan
        if bias is not None:
            right[1 if bias is positive else 2] = np.nan  # a logit is a sum of both infinities
        finite = right == 0
        assert np.isfinite(result.lse[finite]).all()
        np.testing.assert_array_equal(result.lse[~finite], right[~finite])
        for name in ("loss", "entropy", "log_prob"):
            assert np.isnan(getattr(result, name)[~finite]).all()
            assert np.isfinite(getattr(result, name)[finite]).all()
        square = ag.linear_cross_entropy(
            x, w, **arguments, **settings, lse_square_scale=1.0, class_weight=np.zeros(sizes.V), return_grad=False
        ).loss
        np.testing.assert_array_equal(square[~finite], right[~finite] ** 2)
        gradients = ag.linear_cross_entropy_backward(
            x, w, **arguments, **settings, lse=result.lse, grad_lse=np.where(finite, 0.0, 1.0)
        )
        assert np.isnan(result.input_grad[~finite].astype(np.float64)).all()
        assert np.isnan(gradients.input_grad[~finite].astype(np.float64)).all()


# ---- arguments -------------------------------------------------------------------------------------------------------

FAULTS = [
    ("token_weight", np.ones(8), INVALID, "shape (BT = 9)"),
    ("token_weight", np.ones(9, int), TYPE, "dtype float32"),
    ("class_weight", np.ones(9), INVALID, "shape (V = 6)"),
    ("bias", np.ones((6, 1)), INVALID, "shape (V = 6)"),
    ("bias", np.ones(6, bool), TYPE, "dtype float32"),
    ("target_prob", np.ones((9, 2)), INVALID, "target: expected shape (BT = 9, K) with K > 0"),
    ("target_prob", np.ones((9, 6)), INVALID, "pass probabilities of all classes as target, without target_prob"),
    ("label_smoothing", 1.5, INVALID, "a number in [0, 1]"),
    ("label_smoothing", np.nan, INVALID, "a number in [0, 1]"),
    ("label_smoothing", "1", TYPE, "a real number"),
    ("lse_square_scale", np.inf, INVALID, "a finite number"),
    ("temperature", 0, INVALID, "a positive finite number"),
    ("temperature", np.ones(8), INVALID, "shape (BT = 9)"),
    ("temperature", np.arange(9.0), INVALID, "positive finite numbers, got 0.0 in row 0"),
    ("temperature", None, TYPE, "a real number"),
    ("denominator", -1, INVALID, "a positive finite number"),
    ("logit_scale", np.nan, INVALID, "a finite number"),
    ("softcap", 0.0, INVALID, "a positive finite number"),
    ("vocab_start_index", 2**63 - 5, INVALID, f"an int of at most {2**63 - 6}"),
    ("outputs", ("lse", "loss"), INVALID, "a tuple of names among"),
    ("outputs", ("lse", "lse"), INVALID, "different names"),
    ("outputs", "lse", TYPE, "a tuple of names among"),
]


@pytest.mark.parametrize(("name", "value", "kind", "text"), FAULTS)
def test_faults_of_options(name, value, kind, text):
    """Every backend refuses the same options with the same message, and so do the questions about a call."""
    arguments = {"input": np.ones((9, 5)), "weight": np.ones((6, 5)), "target": np.zeros(9, int), name: value}
    messages = set()
    for function, more in (
        (ag.linear_cross_entropy, {"backend": "cpu"}),
        (ag.linear_cross_entropy, {"backend": "reference"}),
        (lambda **a: ag.explain(WHOLE, **a), {}),
        (lambda **a: ag.workspace_size(WHOLE, **a), {}),
    ):
        error = outcome(function, **arguments, **more)
        assert type(error) is kind
        messages.add(str(error))
    (message,) = messages
    assert text in message


def test_outputs_of_several_targets():
    arguments = {"input": np.ones((9, 5)), "weight": np.ones((6, 5)), "target": np.zeros((9, 2), int)}
    error = outcome(ag.linear_cross_entropy, **arguments, target_prob=np.ones((9, 2)), outputs=("correct",))
    assert type(error) is INVALID
    assert "outputs: expected no output of a single target, as target_prob is given, got 'correct'" in str(error)


def test_the_fields_of_results():
    arguments = arguments_of(Shape(9, 20, 5), "float32", "outputs")
    order = ("correct", "lse")
    results = ag.linear_cross_entropy(**arguments | {"outputs": order, "bias": np.zeros(20)})
    assert results._fields == ("loss", "input_grad", "weight_grad", "bias_grad", *order)
    assert results.entropy is None
    assert results.bias_grad.dtype == np.float64
    assert results.correct.shape == ()
    results = ag.linear_cross_entropy(**arguments, return_grad=False)
    assert results[1:3] == (None, None)
    assert len(results) == 3 + len(EVERY)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("option", [name for name in OPTIONS if name not in OF_DEVICE])
def test_options_that_no_device_computes(option, place, device):
    arguments = arguments_of(SHAPE_OF_DEVICE, "bfloat16", option)
    if place == "the host":
        chosen = ag.explain(WHOLE, **arguments)
        assert chosen.backend == "cpu"
        assert "the device's operators do not support" in chosen.reason
    there = moved(arguments, PLACES[place][0])
    error = outcome(ag.linear_cross_entropy, **there, backend="npu")
    assert type(error) is INVALID
    is_number = place == "the device" and isinstance(arguments.get("target_prob"), int)  # no array on the device
    expected = "expected an array of zeros on the device" if is_number else "the device's operators do not support"
    assert expected in str(error)


@on_devices
def test_the_device_takes_options_that_are_vectors(option, dtype, place, device):
    for arguments in device_losses(option, dtype):
        check_on_device(WHOLE, arguments, *PLACES[place])


@pytest.mark.parametrize("place", PLACES)
def test_unusual_weights_on_the_device(place, device):
    """Rows of weight 0 add nothing, whatever they hold. The mean over weights of sum 0 is NaN without a gradient."""
    for arguments in unusual_losses("float16"):
        check_on_device(WHOLE, arguments, *PLACES[place])


@pytest.mark.parametrize("option", OPTIONS)
def test_memory_without_gradients(option):
    """Without gradients nothing of the size of the weight or of the logits is allocated."""
    arguments = arguments_of(Shape(2000, 50_000, 4), "float32", option)
    assert ag.workspace_size(WHOLE, **arguments, return_grad=False) < (64 << 20) + 64 * 50_000 + 400 * 2000


def test_tanh():
    """A cap that is far above the logits leaves them as they are."""
    random = generator("tanh")
    z = np.sort(random.uniform(-12, 12, 4000)).astype(np.float32)
    results = ag.linear_cross_entropy(
        z[:, None], np.ones((2, 1), np.float32), np.zeros(4000, int), softcap=1.0, return_grad=False, outputs=("lse",)
    )
    capped, _ = logits_of(z[:, None].astype(np.float64), softcap=1.0)
    assert np.allclose(results.lse, capped[:, 0] + np.log(2), rtol=0, atol=4 * 2.0**-23)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("option", [{"softcap": 1e39}, {"logit_scale": 1.0, "softcap": 1e30}])
def test_a_huge_cap_is_none(dtype, option):
    x, w, target = np.eye(3, 4, dtype=dtype), np.arange(20, dtype=dtype).reshape(5, 4), np.array([0, 1, 2])
    for found, right in zip(ag.linear_cross_entropy(x, w, target, **option), ag.linear_cross_entropy(x, w, target)):
        np.testing.assert_allclose(found, right, rtol=1e-5)


EXTREMES = [
    {"softcap": 1e30, "temperature": 1e-9},
    {"softcap": 1e10, "temperature": 1e-29},
    {"logit_scale": 1e20, "temperature": 1e-20},
    {"logit_scale": -1e300, "softcap": 1e-300},
    {"temperature": np.full(2, 1e-310)},
]


@pytest.mark.parametrize("options", EXTREMES)
def test_quotients_of_extreme_factors_are_finite(options, dtype, cpu_engines):
    """A logit of 0 stays 0 if a quotient of two factors would be infinite. The other logit decides the row."""
    x, w, target = np.ones((2, 1), DTYPES[dtype]), np.array([[0], [1]], DTYPES[dtype]), np.array([0, 1])
    right = ag.linear_cross_entropy(x, w, target, **options, reduction="none", backend="reference")
    for _ in cpu_engines():
        found = ag.linear_cross_entropy(
            x, w, target, **options, reduction="none", backend="cpu", outputs=("lse", "entropy")
        )
        np.testing.assert_allclose(found.loss, right.loss, rtol=1e-6)
        assert not any(np.isnan(each.astype(np.float64)).any() for each in found)
        gradients = ag.linear_cross_entropy_backward(
            x, w, target, lse=found.lse, grad_loss=1.0, **options, reduction="sum", backend="cpu"
        )
        assert not np.isnan(gradients.input_grad.astype(np.float64)).any()
        assert not np.isnan(ag.linear_top_k(x, w, 2, **options, backend="cpu").log_prob[:, 0]).any()


@pytest.mark.parametrize("prob", [np.nan, np.inf])
def test_smoothing_all_of_the_loss_keeps_a_weight_that_is_no_number(prob, dtype, cpu_engines):
    """The loss has (1 - 1) times that weight, which is NaN."""
    x, w, target = np.ones((1, 1), DTYPES[dtype]), np.array([[0], [1]], DTYPES[dtype]), np.array([[1]])
    options = {"target_prob": np.array([[prob]]), "label_smoothing": 1.0}
    for _ in cpu_engines():
        for result in (
            ag.linear_cross_entropy(x, w, target, **options, backend="cpu"),
            ag.linear_cross_entropy(x, w, target, **options, backend="reference"),
            ag.cross_entropy(w.T, target, **options, backend="cpu"),
        ):
            assert np.isnan(result.loss)
            assert np.isnan(result.input_grad.astype(np.float64)).all()


def test_a_tiny_temperature_is_no_nan():
    x, w = np.array([[1.0, 0.0]], np.float32), np.array([[2.0, 0.0], [1.0, 0.0]], np.float32)
    result = ag.linear_cross_entropy(x, w, [0], temperature=1e-40, outputs=("predicted",))
    assert result.loss == 0
    assert result.predicted == 0
    assert not result.input_grad.any()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_rows_without_upstream_gradient_meet_no_infinity(backend):
    """A row whose upstream gradient is 0 adds nothing, whatever the weight and the input of other rows hold."""
    x, weight = np.ones((3, 2), np.float32), np.array([[1, np.inf], [0, 1], [2, 3]], np.float32)
    x[1, 0] = np.nan
    _, input_grad, weight_grad = ag.linear_cross_entropy(x, weight, np.array([0, 1, 2]), grad_loss=0.0, backend=backend)
    assert not input_grad.any()
    assert not weight_grad.any()
    weight[0, 1] = 1
    result = ag.linear_cross_entropy(
        x, weight, np.array([0, 1, 2]), reduction="none", grad_loss=np.array([1.0, 0.0, 1.0]), backend=backend
    )
    assert np.isfinite(result.input_grad).all()
    assert np.isfinite(result.weight_grad).all()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("infinity", [np.inf, -np.inf])
def test_rows_of_infinities_have_an_infinite_lse(infinity, backend):
    x, weight, target = np.ones((2, 2), np.float32), np.full((3, 2), infinity, np.float32), np.array([0, 1])
    result = ag.linear_cross_entropy(
        x, weight, target, reduction="none", outputs=("lse", "log_prob", "entropy"), backend=backend
    )
    logits = np.full((2, 3), infinity, np.float32)
    of_logits = ag.cross_entropy(logits, target, reduction="none", outputs=("lse",), backend=backend)
    assert np.all(result.lse == infinity)
    assert np.all(of_logits.lse == infinity)
    for values in (result.loss, result.log_prob, result.entropy, of_logits.loss):
        assert np.isnan(values).all()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("more", [{}, {"outputs": ("lse",)}, {"lse_square_scale": 0.1}])
def test_rows_without_weight_meet_no_infinite_class_weight(more, backend):
    """A row of weight 0 adds nothing to a loss or to the divisor of a mean."""
    random = generator("infinite class weight")
    x, weight = random.standard_normal((3, 4)), random.standard_normal((3, 4))
    options = {"token_weight": np.array([0.0, 1.0, 2.0]), "class_weight": np.array([np.inf, 1.0, 0.5])} | more
    target = np.array([0, 1, 2])
    finite = options | {"class_weight": np.array([1.0, 1.0, 0.5])}
    for function, arrays in ((ag.linear_cross_entropy, (x, weight)), (ag.cross_entropy, (x @ weight.T,))):
        result = function(*arrays, target, **options, backend=backend)
        expected = function(*arrays, target, **finite, backend=backend)
        assert_identical(result.loss, expected.loss)
        assert_identical(result.input_grad, expected.input_grad)
