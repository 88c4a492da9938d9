"""Test the cross-entropy of rows whose targets are probabilities of all classes."""

from __future__ import annotations

from typing import Any

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
    assert_right,
    assert_slopes,
    in_layout,
    near_certain,
    random_arguments,
    random_options,
    same_bits,
)
from hypothesis import given
from samples import DTYPES, generator

import ascend_grad as ag
from ascend_grad import _rowwise_candidates

#: Options, as `random_arguments` takes them.
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"reduction": "sum", "label_smoothing": 0.1},
    {"reduction": "none", "class_weight": "classes", "grad_loss": "rows"},
    {"class_weight": "classes", "label_smoothing": 0.2, "temperature": 0.7, "lse_square_scale": 1e-2},
    {"temperature": "rows", "token_weight": "rows", "outputs": ("lse", "entropy", "predicted")},
    {"return_grad": False, "outputs": ("lse",), "denominator": 7.0},
    {"label_smoothing": 1.0, "class_weight": "classes"},
    {"grad_lse": "rows", "grad_entropy": "rows", "label_smoothing": 0.3, "class_weight": "classes"},
    {"grad_entropy": "rows", "grad_loss": 0.0, "temperature": "rows"},
    {"logit_scale": 0.4, "outputs": ("lse",)},
    {"logit_scale": -1.3, "reduction": "sum", "label_smoothing": 0.1, "grad_lse": "rows"},
    {"softcap": 20.0, "outputs": ("lse", "entropy", "predicted")},
    {"softcap": 2.0, "logit_scale": -0.7, "temperature": "rows", "class_weight": "classes", "label_smoothing": 0.2},
    {"softcap": 1.5, "grad_entropy": "rows", "grad_lse": "rows", "lse_square_scale": 0.1},
)


@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_every_option(shape, axis, dtype, cpu_engines):
    for number, options in enumerate(OPTIONS):
        dense = list(DTYPES)[number % 4] if number else dtype
        arguments = random_arguments(number, shape, axis, dtype, options=options, dense=dense)
        right = cross_entropy_oracles.expected(**arguments)
        for engine in cpu_engines():
            for layout, of_target in zip(LAYOUTS, (*LAYOUTS[2:], *LAYOUTS[:2])):
                x, q = in_layout(arguments["input"], layout), in_layout(arguments["target"], of_target)
                result = engine.call("cross_entropy", **arguments | {"input": x, "target": q})
                assert_right(result, right, dtype, f"{engine.name} {options} {layout} {dense}")
        assert_right(ag.cross_entropy(**arguments, backend="reference"), right, dtype, f"reference {options}")


@given(st.data())
def test_random_calls(cpu_engines, data):
    dtype, dense = data.draw(st.sampled_from(list(DTYPES))), data.draw(st.sampled_from(list(DTYPES)))
    shape, axis, options = random_options(data, denominator=(None, 3.0))
    arguments = random_arguments("random", shape, axis, dtype, options=options, dense=dense)
    for name in ("input", "target"):
        arguments[name] = in_layout(arguments[name], data.draw(st.sampled_from(LAYOUTS)))
    right = cross_entropy_oracles.expected(**arguments)
    for engine in cpu_engines():
        assert_right(engine.call("cross_entropy", **arguments), right, dtype, engine.name)


@pytest.mark.parametrize(
    ("shape", "axis"),
    [((3, 70_001), -1), ((2, 3000, 40), 1), ((500, 12), -1), ((4096, 33), -1), ((3, 2, 7, 3, 2, 4), -1)],
)
def test_threads_and_layouts_have_equal_bits(shape, axis, dtype, cpu_engines):
    for number in (0, 1, 3, 4, 7, 10, 12):
        arguments = random_arguments(number, shape, axis, dtype, options=OPTIONS[number], dense=dtype)
        ways = [
            {name: in_layout(arguments[name], layout) for name in ("input", "target")} | {"num_threads": threads}
            for layout, threads in [*(("C", threads) for threads in (1, 2, 3, 4)), ("Fortran", 1), ("steps", 2)]
        ]
        for engine in cpu_engines():
            assert same_bits([engine.call("cross_entropy", **arguments | way) for way in ways]), engine.name


def canonical(x):
    """Return a copy in which every NaN has the same bits."""
    return np.where(np.isnan(x), np.asarray(np.nan, x.dtype), x)


@pytest.mark.parametrize("classes", [1, 2, 7, 33, 64, 65, 128, 129, 256, 257])
def test_columns_have_the_bits_of_rows(classes, dtype, cpu_engines):
    """Also with logits and weights that are not finite, and nearly certain entries."""
    options = [
        {},
        {"reduction": "none", "token_weight": "rows"},
        {"label_smoothing": 0.2, "class_weight": "classes", "temperature": 0.6},
        {"reduction": "sum", "grad_loss": 0.0},
        {"reduction": "sum", "token_weight": "rows", "grad_loss": -1e-300, "logit_scale": 0.3},
        {"denominator": 1e300, "grad_loss": -1.0},
    ]
    for number, option in enumerate(options):
        arguments = random_arguments((classes, number), (150, classes), -1, dtype, options=option, dense=dtype)
        x, q = arguments["input"], arguments["target"]
        x[10:40, 0] += 60
        x[0, 0], x[1, 0], x[2:4, -1] = np.nan, np.inf, -np.inf
        q[4, 0], q[5, -1], q[6, 0], q[7] = np.nan, np.inf, 0, 0
        if "class_weight" in option:
            arguments["class_weight"][:1] = np.inf
        if "denominator" in option:
            q[10:] *= np.where(generator("signs").random(q[10:].shape) < 0.5, -1, 1).astype(q.dtype)
        if "token_weight" in option:
            arguments["token_weight"][20:25] = 0, np.nan, np.inf, -1, 1e-320
        columns = arguments | {name: arguments[name].T.copy() for name in ("input", "target")} | {"axis": 0}
        for engine in cpu_engines():
            _rowwise_candidates.force("rows in place")
            try:
                rows = engine.call("cross_entropy", **arguments)
                _rowwise_candidates.force("columns in place")
                results = [engine.call("cross_entropy", **columns)]
                _rowwise_candidates.force("columns, gathered")
                results.append(engine.call("cross_entropy", **columns))
            finally:
                _rowwise_candidates.force()
            for result in results:
                for one, other in ((rows.loss, result.loss), (rows.input_grad, result.input_grad.T)):
                    assert canonical(one).tobytes() == canonical(other).tobytes(), (engine.name, option)


def test_in_place_and_other_outs(dtype, cpu_engine):
    for (shape, axis), options in zip([((9, 130), -1), ((2, 6, 70), 1), ((50, 3), -1)], OPTIONS):
        arguments = random_arguments("out", shape, axis, dtype, options=options, dense=dtype)
        fresh = cpu_engine.call("cross_entropy", **arguments)
        for name in ("input", "target"):
            array = arguments[name].copy()
            result = cpu_engine.call("cross_entropy", **arguments | {name: array}, out=array)
            assert result.input_grad is array
            assert same_bits([fresh, result])
        right = cross_entropy_oracles.expected(**arguments)
        for other in DTYPES.values():
            result = cpu_engine.call("cross_entropy", **arguments, out=np.full(shape, 7, other).T.copy().T)
            assert_right(result, right, min(str(other), dtype, key=lambda name: np.dtype(DTYPES[name]).itemsize))


def test_one_hot_rows_are_single_targets(cpu_engines):
    arguments = random_arguments(
        "one-hot", (20, 30), -1, "float64", options={"class_weight": "classes", "reduction": "sum"}
    )
    arguments["target"] = np.abs(arguments["target"]) % 30
    one_hot = np.eye(30)[arguments["target"]]
    for engine in cpu_engines():
        single = engine.call("cross_entropy", **arguments)
        dense = engine.call("cross_entropy", **arguments | {"target": one_hot})
        np.testing.assert_allclose(dense.loss, single.loss, rtol=1e-13)
        np.testing.assert_allclose(dense.input_grad, single.input_grad, rtol=1e-12, atol=1e-16)


# ---- accuracy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize(("shape", "axis"), CERTAIN_SHAPES)
def test_near_certain_targets(gap, shape, axis, dtype, cpu_engines):
    """The loss and the gradient at the nearly certain entry keep a relative error of 1e-4 down to 1 - p = 1e-12."""
    logits, place = near_certain(gap, shape, axis, dtype)
    q = 1e-4 * generator("certain", gap, shape, dtype).random(shape) * np.exp(-gap) / shape[axis]
    np.put_along_axis(q, place, 0.875, axis)  # exact in every dtype; all other probabilities together are much smaller
    arguments = {"input": logits, "target": q, "axis": axis, "reduction": "none"}
    right = cross_entropy_oracles.expected(**arguments)
    expected = np.take_along_axis(right["input_grad"], place, axis).astype(np.float64)
    for engine in cpu_engines():
        out = np.empty(shape, np.float64)
        result = engine.call("cross_entropy", **arguments, out=out)
        np.testing.assert_allclose(np.take_along_axis(out, place, axis), expected, rtol=1e-4, err_msg=engine.name)
        np.testing.assert_allclose(result.loss, right["loss"].astype(np.float64), rtol=1e-4, err_msg=engine.name)


@pytest.mark.parametrize(("shape", "axis"), [((200, 7), -1), ((40, 130), -1), ((3, 40_000), -1), ((2, 9, 70), 1)])
def test_rows_of_weight_0_have_no_gradient(shape, axis, dtype, cpu_engines):
    """Also where an entry is nearly certain, after rows that have a gradient."""
    arguments = random_arguments("weight of 0", shape, axis, dtype, options={"token_weight": "rows"}, dense=dtype)
    np.moveaxis(arguments["input"], axis, -1)[..., 1] = 100
    arguments["token_weight"].reshape(-1)[1::2] = 0
    right = cross_entropy_oracles.expected(**arguments)
    for engine in cpu_engines():
        for _ in range(2):
            result = engine.call("cross_entropy", **arguments)
            assert_right(result, right, dtype, engine.name)
            assert not np.moveaxis(result.input_grad, axis, -1).reshape(-1, shape[axis])[1::2].any()


def test_finite_differences(cpu_engine):
    for options in (*OPTIONS[3:5], OPTIONS[12]):
        arguments = random_arguments("differences", (4, 6), -1, "float64", options=options, dense="float64")

        def loss(moved, arguments=arguments):
            return cpu_engine.call("cross_entropy", **arguments | {"input": moved}, return_grad=False).loss

        assert_slopes(loss, arguments["input"], cpu_engine.call("cross_entropy", **arguments).input_grad)


@pytest.mark.parametrize(("shape", "axis"), PLACES)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_probability_of_0_excludes_a_logit_of_minus_infinity(shape, axis, backend, dtype, cpu_engines):
    arguments = random_arguments("infinite", shape, axis, dtype, options={"reduction": "none"}, dense=dtype)
    x, q = (np.moveaxis(arguments[name], axis, -1) for name in ("input", "target"))
    x[..., 1] = -np.inf
    q[..., 1] = 0
    right = cross_entropy_oracles.expected(**arguments)
    assert np.isfinite(right["loss"].astype(float)).all()
    for _ in cpu_engines() if backend == "cpu" else range(1):
        assert_right(ag.cross_entropy(**arguments, backend=backend), right, dtype)
        q[..., 1] = 1
        assert np.all(ag.cross_entropy(**arguments, backend=backend).loss == np.inf)
        assert np.all(
            ag.cross_entropy(**arguments, token_weight=np.zeros(right["loss"].shape), backend=backend).loss == 0
        )
        q[..., 1] = 0


# ---- shapes and errors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_shapes_without_rows_and_of_one_class(backend):
    empty = ag.cross_entropy(np.zeros((0, 3)), np.zeros((0, 3)), backend=backend)
    assert np.isnan(empty.loss)
    assert empty.input_grad.shape == (0, 3)
    assert ag.cross_entropy(np.zeros((0, 0)), np.zeros((0, 0)), reduction="sum", backend=backend).loss == 0
    one = ag.cross_entropy(np.array([[2.0], [3.0]]), np.array([[0.5], [1.0]]), reduction="none", backend=backend)
    assert not one.loss.any()
    assert not one.input_grad.any()
    assert ag.cross_entropy(np.float64(2.0), np.float64(1.0), backend=backend).loss == 0


def test_a_mean_counts_every_row():
    """Rows without any probability count, too, and so does an ignore_index that could be an entry."""
    x, q = np.zeros((4, 2)), np.array([[0.5, 0.5], [0.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    for backend in ("cpu", "reference"):
        result = ag.cross_entropy(x, q, ignore_index=0, backend=backend)
        np.testing.assert_allclose(result.loss, np.log(2) / 2, rtol=1e-14)
        assert not result.input_grad[1].any()
        weighted = ag.cross_entropy(x, q, token_weight=np.array([1.0, 2.0, 3.0, 4.0]), backend=backend)
        np.testing.assert_allclose(weighted.loss, np.log(2) * 4 / 10, rtol=1e-14)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"target": np.zeros((2, 4))}, r"target: expected shape \(2, 3\), as floating targets are probabilities"),
        (
            {"target": np.zeros(2)},
            r"target: expected an integer dtype, or shape \(2, 3\), as .*, got float64 of shape \(2,\); target.astype",
        ),
        ({"target": np.zeros((2, 3), np.longdouble)}, "target: expected an integer dtype, got"),
        ({"target": np.zeros((2, 3), complex)}, "target: expected an integer dtype, got complex128"),
        ({"target": np.zeros((2, 3), bool)}, r"got bool; if rows are one-hot, pass target.argmax\(-1\)"),
        ({"outputs": ("log_prob",)}, "outputs: expected no output of a single target, as target holds probabilities"),
        ({"outputs": ("correct",)}, "outputs: expected no output of a single target, as target holds probabilities"),
        ({"target_prob": np.ones((2, 3))}, "target: expected an integer dtype, as target_prob is given, got float64$"),
        ({"grad_log_prob": np.ones(2)}, "grad_log_prob: expected None, as target holds probabilities"),
    ],
)
def test_refused(arguments, words):
    for backend in ("cpu", "reference"):
        with pytest.raises(ag.ParamInvalidError, match=words) as info:
            ag.cross_entropy(**{"input": np.zeros((2, 3)), "target": np.zeros((2, 3))} | arguments, backend=backend)
        assert info.value.code == 161002


def test_memory_is_bounded():
    """The bound of the workspace holds no copy of the probabilities, unless the result is written over them."""
    x, q = np.zeros((64, 4096), np.float32), np.zeros((64, 4096), np.float32)
    arguments = (x, q)
    assert ag.workspace_size("cross_entropy", *arguments) < x.nbytes
    assert ag.explain("cross_entropy", *arguments).plan == "rows in place"
    assert ag.workspace_size("cross_entropy", *arguments, out=q) >= x.nbytes
