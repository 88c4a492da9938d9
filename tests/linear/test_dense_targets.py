"""Test the loss of a linear layer whose targets are probabilities of all classes, on every sweep."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from linear_samples import Shape
from loss_samples import EDGES, SHAPES, arguments_of, check, sizes_and_settings
from samples import DTYPES, assert_identical, generator

import ascend_grad as ag

#: Names of options in `loss_samples`.
OPTIONS = ("no option", "outputs", "tokens and classes", "classes and smoothing", "cap", "all")


def dense(shape: Shape, dtype: str, option: str, reduction: str = "mean", of_target: str = "float32") -> dict:
    """Make a call with dense targets. They need not add up to 1, and some are 0."""
    arguments = arguments_of(shape, dtype, option, reduction)
    random = generator("dense", shape, option, of_target)
    logits = (shape.BT, shape.V)
    prob = random.random(logits) * (random.random(logits) < 0.7) / max(shape.V, 1)
    arguments.pop("target_prob", None)
    arguments["target"] = prob.astype(DTYPES[of_target])
    outputs = arguments.pop("outputs", ())
    return arguments | {"outputs": tuple(name for name in outputs if name not in ("log_prob", "correct"))}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_on_every_variant(option, shape, dtype, cpu_engines):
    sizes, settings = sizes_and_settings(shape, dtype)
    of_target = list(DTYPES)[(len(option) + len(shape)) % 4]
    arguments = dense(sizes, dtype, option, of_target=of_target)
    for _ in cpu_engines():
        check(ag.linear_cross_entropy(**arguments, **settings, backend="cpu"), arguments, dtype)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_reductions_on_both_backends(option, reduction, dtype):
    for of_target in DTYPES:
        arguments = dense(Shape(60, 70, 20), dtype, option, reduction, of_target)
        for backend in ("cpu", "reference"):
            check(ag.linear_cross_entropy(**arguments, backend=backend), arguments, dtype)


@pytest.mark.parametrize("shape", EDGES)
def test_edges_of_shapes(shape, dtype):
    for option in OPTIONS:
        arguments = dense(shape, dtype, option, "sum")
        check(ag.linear_cross_entropy(**arguments, backend="cpu"), arguments, dtype)


@pytest.mark.parametrize("option", ["tokens and classes", "all"])
@pytest.mark.parametrize("shape", SHAPES)
def test_threads_and_strides_change_nothing(option, shape, dtype):
    sizes, settings = SHAPES[shape]
    arguments = dense(sizes, dtype, option)
    expected = ag.linear_cross_entropy(**arguments, **settings, num_threads=1)
    q = arguments["target"]
    ways = (
        q,
        np.repeat(q, 2, axis=1)[:, ::2],
        np.asfortranarray(q),
        q[::-1].copy()[::-1],
        q.astype(q.dtype.newbyteorder()),
    )
    for threads, way in zip((2, 3, 4, 1, 2), ways):
        results = ag.linear_cross_entropy(**arguments | {"target": way}, **settings, num_threads=threads)
        for result, right in zip(results, expected, strict=True):
            if right is not None:
                assert_identical(result, right)


@given(st.data())
def test_random_calls_agree_with_the_loss_of_logits(data):
    """The layer of one-hot inputs has its weights as logits."""
    rows, entries = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 200))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    logits = 3 * random.standard_normal((rows, entries))
    options = {
        "target": random.random((rows, entries)),
        "class_weight": data.draw(st.sampled_from((None, random.random(entries)))),
        "token_weight": data.draw(st.sampled_from((None, random.random(rows)))),
        "label_smoothing": data.draw(st.sampled_from((0.0, 0.2, 1.0))),
        "lse_square_scale": data.draw(st.sampled_from((0.0, 0.01))),
        "temperature": data.draw(st.sampled_from((1.0, 0.5 + random.random(rows)))),
        "reduction": data.draw(st.sampled_from(("mean", "sum", "none"))),
    }
    right = ag.cross_entropy(logits, **options)
    found = ag.linear_cross_entropy(np.eye(rows), np.ascontiguousarray(logits.T), **options)
    np.testing.assert_allclose(found.loss, right.loss, rtol=1e-11)
    np.testing.assert_allclose(found.weight_grad.T, right.input_grad, rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize(
    "sizes", [Shape(70, 200, 8), Shape(5, 700, 8), Shape(600, 30, 8), Shape(5, 9, 8), Shape(30, 30, 300)]
)
def test_nearly_certain_targets(sizes, dtype, cpu_engines):
    """The loss and the gradient at the nearly certain entry keep a relative error of 1e-4 down to 1 - p = 1e-12."""
    for distance in (4, 8, 16, 28, 33):
        x, w = np.zeros((sizes.BT, sizes.H), DTYPES[dtype]), np.zeros((sizes.V, sizes.H), DTYPES[dtype])
        x[:, 0], w[:, 0], w[3, 0] = 1, -40, distance - 40
        rest = (sizes.V - 1) * np.exp(-np.longdouble(distance))
        q = np.full((sizes.BT, sizes.V), 1e-4 * float(rest) / sizes.V)
        q[:, 3] = 0.875
        others = np.longdouble(q[0, 0]) * (sizes.V - 1)
        loss = (others + 0.875) * np.log1p(rest) + others * distance
        gradient = others - (others + 0.875) * rest / (1 + rest)
        for _ in cpu_engines():
            results = ag.linear_cross_entropy(x, w, q, reduction="sum")
            assert abs(results.loss / (loss * sizes.BT) - 1) < 1e-4
            if dtype != "float16":  # small gradients underflow there
                found = results.weight_grad[3, 0].astype(float)
                assert abs(found / (gradient * sizes.BT) - 1) < (1e-4 if dtype.startswith("float") else 2**-7)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_probability_of_0_excludes_a_logit_of_minus_infinity(backend):
    bias = np.array([0.0, -np.inf, 1.0])
    x, w = np.ones((2, 2)), np.zeros((3, 2))
    result = ag.linear_cross_entropy(x, w, np.array([[0.5, 0, 0.5], [1.0, 0, 0]]), bias=bias, backend=backend)
    np.testing.assert_allclose(result.loss, np.log1p(np.exp(-1)) + 0.75, rtol=1e-12)
    assert np.isfinite(result.bias_grad).all()
    assert ag.linear_cross_entropy(x, w, np.full((2, 3), 0.5), bias=bias, backend=backend).loss == np.inf


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_backward_gives_the_gradients_of_the_loss_and_its_outputs(backend, dtype):
    for option in OPTIONS:
        forward = dense(Shape(50, 60, 12), dtype, option, "none") | {"outputs": ("lse", "entropy")}
        results = ag.linear_cross_entropy(**forward, return_grad=False, backend="reference")
        random = generator("upstream", option)
        upstream = {name: random.standard_normal(50) for name in ("grad_lse", "grad_entropy")}
        del forward["outputs"]
        found = ag.linear_cross_entropy_backward(
            **forward, lse=results.lse, entropy=results.entropy, **upstream, backend=backend
        )
        given = found if "bias" in forward else found[:2]
        names = [name for name in ("input_grad", "weight_grad", "bias_grad") if getattr(found, name) is not None]
        check(ag.LossResult(results.loss, **dict(zip(names, given))), forward, dtype, **upstream)


def test_leading_dimensions(dtype):
    arguments = dense(Shape(24, 30, 8), dtype, "no option", "none") | {"grad_loss": 1.0}
    flat = ag.linear_cross_entropy(**arguments)
    arguments |= {"input": arguments["input"].reshape(4, 6, 8), "target": arguments["target"].reshape(4, 6, 30)}
    result = ag.linear_cross_entropy(**arguments)
    assert result.loss.shape == (4, 6)
    assert_identical(result.loss.reshape(24), flat.loss)
    assert_identical(result.input_grad.reshape(24, 8), flat.input_grad)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"target": np.zeros((2, 5))}, r"target: expected shape \(2, 4\), as floating targets are probabilities"),
        (
            {"target": np.zeros(2)},
            r"target: expected an integer dtype, or shape \(2, 4\), as .*, got float64 of shape \(2,\); target.astype",
        ),
        ({"outputs": ("log_prob",)}, "outputs: expected no output of a single target, as target holds probabilities"),
        (
            {"weight": np.zeros((0, 3)), "target": np.zeros((2, 0))},
            "target: expected only class ids equal to ignore_index, as the vocabulary is empty, got probabilities$",
        ),
        ({"target_prob": np.ones((2, 4))}, "target: expected an integer dtype, as target_prob is given, got float64$"),
    ],
)
def test_refused(arguments, words):
    call = {"input": np.zeros((2, 3)), "weight": np.zeros((4, 3)), "target": np.zeros((2, 4))}
    for backend in ("cpu", "reference"):
        with pytest.raises(ag.ParamInvalidError, match=words) as info:
            ag.linear_cross_entropy(**call | arguments, backend=backend)
        assert info.value.code == 161002


def test_refused_in_the_backward_pass():
    with pytest.raises(ag.ParamInvalidError, match="as the vocabulary is empty, got probabilities"):
        ag.linear_cross_entropy_backward(
            np.zeros((2, 3)), np.zeros((0, 3)), np.zeros((2, 0)), lse=np.zeros(2), grad_loss=1.0
        )


def test_memory_is_bounded():
    """Neither the logits nor a copy of the probabilities are in the workspace."""
    x, w = np.zeros((512, 16), np.float32), np.zeros((20_000, 16), np.float32)
    q = np.broadcast_to(np.float64(0), (512, 20_000))
    assert ag.workspace_size("linear_cross_entropy", x, w, q, workspace_bytes=4 << 20) < 6 << 20
