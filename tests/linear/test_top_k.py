"""Test the largest log-probabilities of a linear layer."""

from __future__ import annotations

import numpy as np
import pytest
from faults import INVALID, NULL, TYPE, outcome
from linear_samples import Shape
from loss_oracle import logits_of
from samples import DTYPES, assert_identical, generator

import ascend_grad as ag

TOP_K = "linear_top_k"

#: Shapes of every sweep, with several chunks of rows and blocks of the vocabulary, and numbers of entries.
SHAPES = [
    (Shape(1100, 2300, 20), 5),
    (Shape(300, 5000, 30), 128),
    (Shape(3, 150_000, 4), 128),
    (Shape(900, 30, 8), 30),
    (Shape(20, 20, 300), 1),
    (Shape(5, 7, 0), 4),
    (Shape(0, 5, 2), 3),
    (Shape(1, 1, 1), 1),
]

OPTIONS = ("none", "all")


def arguments_of(shape: Shape, k: int, dtype: str, options: str) -> dict:
    random = generator("top k", shape, options)
    arguments = {
        "input": random.standard_normal((shape.BT, shape.H)).astype(DTYPES[dtype]),
        "weight": (random.standard_normal((shape.V, shape.H)) / np.sqrt(max(shape.H, 1))).astype(DTYPES[dtype]),
        "k": k,
    }
    if options == "all":
        arguments |= {
            "temperature": 0.5 + random.random(shape.BT),
            "bias": random.standard_normal(shape.V).astype(np.float32),
            "logit_scale": 1.5,
            "softcap": 20.0,
        }
    return arguments


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("shape", "k"), SHAPES)
def test_on_every_variant(shape, k, options, dtype, cpu_engines):
    """The log-probabilities are the k largest ones, in order, and the indices are theirs."""
    arguments = arguments_of(shape, k, dtype, options)
    x, w = arguments["input"].astype(np.float64), arguments["weight"].astype(np.float64)
    others = {name: a for name, a in arguments.items() if name not in ("input", "weight", "k")}
    z, _ = logits_of(x @ w.T, **others)
    log_prob = z - np.log(np.exp(z).sum(-1, keepdims=True)) if shape.BT else z
    right = -np.sort(-log_prob, axis=-1)[:, :k]
    eps = 2.0**-53 if dtype == "float64" else 2.0**-24
    bound = eps * (64 + 16 * (np.abs(x) @ np.abs(w).T).max(initial=0) * 3 + 16 * np.abs(z).max(initial=0))
    if shape.V > 100_000:  # the right values are costly
        assert_right(ag.linear_top_k(**arguments, backend="cpu"), log_prob, right, bound)
        return
    for _ in cpu_engines():
        assert_right(ag.linear_top_k(**arguments, backend="cpu"), log_prob, right, bound)


def assert_right(results, log_prob: np.ndarray, right: np.ndarray, bound: float) -> None:
    assert results.log_prob.shape == results.indices.shape == right.shape
    assert results.indices.dtype == np.int64
    assert np.all(np.abs(results.log_prob - right) <= bound)
    assert np.all(np.abs(np.take_along_axis(log_prob, results.indices, axis=-1) - right) <= 2 * bound)
    assert np.all(np.diff(results.log_prob, axis=-1) <= 0)
    assert all(len(set(row)) == row.size for row in results.indices)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("shape", "k"), SHAPES)
def test_threads_and_strides_change_nothing(shape, k, options, dtype):
    arguments = arguments_of(shape, k, dtype, options)
    expected = ag.linear_top_k(**arguments, num_threads=1)
    strided = {name: np.repeat(a, 2, axis=0)[::2] if isinstance(a, np.ndarray) else a for name, a in arguments.items()}
    for threads in (2, 3, 4):
        for each in (arguments, strided):
            for result, right in zip(ag.linear_top_k(**each, num_threads=threads), expected, strict=True):
                assert_identical(result, right)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_the_lower_index_comes_first(dtype, backend):
    """Equal logits are in the order of the indices, within a block and across blocks."""
    x = np.ones((300, 2), DTYPES[dtype])
    w = np.zeros((12_000, 2), DTYPES[dtype])
    w[[11_000, 40, 7]] = 2
    results = ag.linear_top_k(x, w, 6, backend=backend)
    assert np.all(results.indices == [7, 40, 11_000, 0, 1, 2])


def test_probabilities_that_are_almost_1(dtype, cpu_engines):
    """The largest log-probability keeps a relative error of 1e-4 where 1 - p is tiny."""
    for rows, entries in ((70, 200), (5, 9), (600, 30)):
        x, w = np.ones((rows, 1), DTYPES[dtype]), np.full((entries, 1), -40).astype(DTYPES[dtype])
        w[entries // 2] = -8
        rest = np.log1p((entries - 1) * np.exp(-np.longdouble(32)))
        for _ in cpu_engines():
            results = ag.linear_top_k(x, w, 2)
            assert np.all(results.indices[:, 0] == entries // 2)
            assert np.all(np.abs(results.log_prob[:, 0] / -rest - 1) < 1e-4)


def test_rows_with_nan(dtype):
    x = np.ones((5, 1), DTYPES[dtype])
    w = np.array([[1], [np.nan], [3]], DTYPES[dtype])
    for backend in ("cpu", "reference"):
        results = ag.linear_top_k(x, w, 3, backend=backend)
        assert np.isnan(results.log_prob).all()
        assert np.all(results.indices == [2, 0, 1])


def test_faults():
    good = {"input": np.ones((9, 5)), "weight": np.ones((6, 5)), "k": 3}
    for name, value, kind, text in (
        ("input", None, NULL, "an array"),
        ("weight", np.ones((0, 5)), INVALID, "at least one row"),
        ("k", 0, INVALID, "an int in [1, 6]"),
        ("k", 7, INVALID, "an int in [1, 6]"),
        ("k", 2.5, TYPE, "an int"),
        ("bias", np.ones(5), INVALID, "shape (V = 6)"),
        ("temperature", -1.0, INVALID, "a positive finite number"),
        ("softcap", np.inf, INVALID, "a positive finite number"),
    ):
        for backend in ("cpu", "reference"):
            error = outcome(ag.linear_top_k, **good | {name: value}, backend=backend)
            assert type(error) is kind
            assert text in str(error)
        assert str(outcome(ag.explain, TOP_K, **good | {name: value})) == str(error)
    many = good | {"weight": np.ones((300, 5)), "k": 129}
    assert "an int in [1, 128]" in str(outcome(ag.linear_top_k, **many))


def test_questions_about_a_call():
    x, w = np.ones((300, 20), np.float32), np.ones((50_000, 20), np.float32)
    assert ag.explain(TOP_K, x, w, 5).plan.startswith("packed")
    assert ag.workspace_size(TOP_K, x, w, 5) < (64 << 20) + (9 << 20)
