"""Test the largest log-probabilities: values, indices, ties, special values, threads, workspaces and errors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from faults import INVALID, NOT_A_NUMBER, NOT_AN_INT, NULL, TYPE, outcome
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_oracles import assert_top_k, expected, logits_of_problem
from linear_samples import KINDS, TOP_K, LinearProblem, Shape, problem_of, shapes
from samples import DTYPES, assert_fresh, assert_identical, generator, native_copy
from strategies import views

import ascend_grad as ag
from ascend_grad import _cpu, _linear_python
from ascend_grad.bounds import ANY

#: Sizes around the edges of vectors, panels, chunks and blocks, with every plan.
SHAPES = shapes(
    (1, 1, 1), (1, 2, 3), (1, 5000, 33), (2, 129, 0), (3, 1300, 70), (7, 48, 2), (17, 97, 33), (31, 300, 600),
    (64, 193, 65), (65, 200, 31), (300, 7, 5), (1020, 1000, 3), (1100, 1930, 4),
)  # fmt: skip
COUNTS = (1, 3, 16, 127, 128)


def check(engines, problem: LinearProblem, **settings) -> None:
    right, (logits, error) = expected(problem), logits_of_problem(problem)
    for engine in engines:
        results = engine.solve(problem, **settings)
        engine.assert_solved(problem, results, right)
        assert_top_k(results, logits, error)


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_indices(shape, dtype, cpu_engines):
    for k in sorted({min(k, shape.V) for k in (COUNTS if shape.BT < 1000 else (16,))}):
        check(cpu_engines(), problem_of(TOP_K, shape, dtype, k=k))


#: Options of the logits; names of dtypes stand for vectors.
OPTIONS = {
    "bias": {"bias": "float16"},
    "scale": {"logit_scale": -1.3},
    "cap": {"softcap": 0.5},
    "temperatures": {"temperature": "float64"},
    "temperatures of 16 bits": {"temperature": "bfloat16", "softcap": 3},
    "all": {"bias": "float64", "logit_scale": 2.5, "softcap": np.float32(2), "temperature": "float32"},
    "one temperature": {"bias": "bfloat16", "softcap": 5.0, "temperature": 0.25},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_options(options, dtype, cpu_engines):
    for shape in ((1, 3000, 20), (17, 900, 33), (65, 200, 31), (300, 7, 5), (300, 1100, 20)):
        check(cpu_engines(), problem_of(TOP_K, Shape(*shape), dtype, k=20, **OPTIONS[options]))


def test_the_reference(dtype):
    for shape in ((3, 50, 7), (1, 1, 1), (5, 20, 0)):
        for options in ({"temperature": 0.7}, *OPTIONS.values()):
            problem = problem_of(TOP_K, shape, dtype, **options)
            results = ag.linear_top_k(**problem.arguments, backend="reference")
            assert_top_k(results, *logits_of_problem(problem))
            log_prob = expected(problem)[0]
            assert np.all(np.abs(results[0] - log_prob.values) <= log_prob.bound + 1e-6)


@pytest.mark.parametrize("shape", [(5, 700, 40), (100, 300, 40)])
def test_options_that_change_nothing_keep_the_bits(shape, dtype, cpu_engine):
    problem = problem_of(TOP_K, shape, dtype, k=20, temperature=0.7)
    right = ag.linear_top_k(**problem.arguments, backend="cpu")
    for options in (
        {"temperature": np.full(shape[0], 0.7)},
        {"bias": np.zeros(shape[1]), "logit_scale": 1, "softcap": None},
    ):
        for result, same in zip(ag.linear_top_k(**problem.arguments | options, backend="cpu"), right, strict=True):
            assert_identical(result, same)


@pytest.mark.parametrize("shape", [(4, 60, 9), (100, 700, 9)])
@pytest.mark.parametrize("options", OPTIONS)
def test_log_probabilities_of_the_loss(shape, options, dtype, cpu_engine):
    """`linear_cross_entropy` has the same log-probabilities for the entries in the lists."""
    arguments = dict(problem_of(TOP_K, shape, dtype, k=5, **OPTIONS[options]).arguments)
    count = arguments.pop("k")
    log_prob, index = ag.linear_top_k(**arguments, k=count, backend="cpu")
    for j in range(count):
        loss = ag.linear_cross_entropy(
            **arguments, target=np.array(index[:, j]), outputs=("log_prob",), return_grad=False, backend="cpu"
        )
        assert np.allclose(log_prob[:, j], loss.log_prob, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("rows", [3, 100])
def test_entries_at_the_cap_are_equal(rows, dtype, backend):
    w = np.array([1.0, 2000, 3, 1000, 4000, -1, np.inf], DTYPES[dtype])[:, None]
    log_prob, index = ag.linear_top_k(np.ones((rows, 1), DTYPES[dtype]), w, 5, softcap=1.5, backend=backend)
    assert np.all(index == [1, 3, 4, 6, 2])
    assert np.all(log_prob[:, :4] == log_prob[:, :1])


@pytest.mark.parametrize("rows", [3, 100])
def test_a_bias_of_negative_infinity_excludes_entries(rows, dtype, backend):
    problem = problem_of(TOP_K, (rows, 500, 9), dtype, k=4)
    kept = np.arange(500) % 3 == 1
    log_prob, index = ag.linear_top_k(**problem.arguments, bias=np.where(kept, 0, -np.inf), backend=backend)
    alone = np.ascontiguousarray(problem.arguments["weight"][kept])
    right = ag.linear_top_k(problem.arguments["input"], alone, 4, backend=backend)
    assert np.array_equal(index, np.flatnonzero(kept)[right.index])
    assert np.allclose(log_prob, right.log_prob, rtol=1e-5, atol=1e-5)


def test_a_scale_of_zero_and_extreme_options(backend):
    x, w = np.eye(3, dtype=np.float32), np.arange(12, dtype=np.float32).reshape(4, 3)
    log_prob, index = ag.linear_top_k(x, w, 2, logit_scale=0, backend=backend)
    assert np.allclose(log_prob, -np.log(4))
    assert index.tolist() == [[0, 1]] * 3
    plain = ag.linear_top_k(x, w, 4, backend=backend)
    for options in ({"softcap": 1e39}, {"softcap": 1e25}, {"temperature": np.array([1, 1, 1.0])}):
        found = ag.linear_top_k(x, w, 4, **options, backend=backend)
        assert np.allclose(found.log_prob, plain.log_prob, rtol=1e-5)
        assert np.array_equal(found.index, plain.index)
    tiny = ag.linear_top_k(x, w, 4, temperature=np.array([1e-300, 1, 1e300]), backend=backend)
    assert not np.isnan(tiny.log_prob).any()
    assert tiny.log_prob[0].tolist()[0] == 0
    assert np.allclose(tiny.log_prob[2], -np.log(4))


def test_a_nan_in_bias_or_temperature(backend):
    x, w = np.ones((3, 2)), np.ones((5, 2))
    log_prob, index = ag.linear_top_k(x, w, 2, bias=[0, 0, np.nan, 0, 0], backend=backend)
    assert np.isnan(log_prob).all()
    assert index.tolist() == [[0, 1]] * 3
    error = outcome(ag.linear_top_k, x, w, 2, temperature=[1.0, np.nan, 1], backend=backend)
    assert type(error) is INVALID
    assert str(error).startswith(f"{TOP_K}: temperature: expected positive finite numbers, got nan in row 1")


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_values(kind, dtype, cpu_engines):
    for shape in ((5, 700, 40), (70, 300, 40)):
        check(cpu_engines(), problem_of(TOP_K, shape, dtype, kind=kind, k=20))


@pytest.mark.parametrize("temperature", [0.05, 0.7, 3, np.float32(10), 1e-18, 1e18])
def test_temperature(temperature, dtype, cpu_engines):
    for shape in ((5, 700, 40), (70, 300, 40)):
        problem = problem_of(TOP_K, shape, dtype, k=20, temperature=float(temperature))
        check(cpu_engines(), problem)


def test_extreme_temperatures_count_as_the_nearest(backend):
    x, w = np.eye(3), np.arange(12.0).reshape(4, 3)
    for extreme, limit in ((5e-324, 2.0**-500), (1e308, 2.0**500)):
        given, right = (ag.linear_top_k(x, w, 4, temperature=each, backend=backend) for each in (extreme, limit))
        for result, same in zip(given, right, strict=True):
            assert_identical(result, same)
        assert not np.isnan(given.log_prob).any()
    # Arrays of the other byte order also have the limits of their dtype.
    x, w = (array.astype(array.dtype.newbyteorder()) for array in (x, w))
    log_prob = ag.linear_top_k(x, w, 4, temperature=2.0**-300, backend=backend).log_prob
    assert_identical(log_prob[0], np.array([0, -3, -6, -9]) * 2.0**300)


@pytest.mark.parametrize("rows", [1, 100])
@pytest.mark.parametrize("gap", [3, 10, 17.5, 40, 80])
def test_probabilities_of_almost_one(rows, gap, dtype, cpu_engine):
    """A log-probability close to 0 has a small relative error, wherever the largest logit is."""
    vocab = 1500
    exponent = -np.float64(gap) * np.linspace(1, 1.5, vocab)
    for place in (0, 700, 999, 1499):
        w = exponent.copy()
        w[place] = 0
        w = w.astype(DTYPES[dtype])
        x = np.ones((rows, 1), DTYPES[dtype])
        rest = np.exp(np.delete(w, place).astype(np.longdouble)).sum()
        log_prob, index = ag.linear_top_k(x, w[:, None], 2, backend="cpu")
        right = -np.log1p(rest)
        eps = 2.0**-53 if dtype == "float64" else 2.0**-24
        assert np.all(index[:, 0] == place)
        assert np.all(np.abs(log_prob[:, 0] - right) <= 32 * eps * np.abs(right) + vocab * 2.0**-126)


# ---- ties and special values -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 3000), (40, 1000), (100, 1930), (3, 20)])
@pytest.mark.parametrize("distinct", [1, 2, 5, 40])
def test_of_equal_logits_the_lower_index_comes_first(shape, distinct, dtype, cpu_engine):
    rows, vocab = shape
    random = np.random.default_rng(distinct)
    w = random.integers(0, distinct, (vocab, 1)).astype(DTYPES[dtype])
    x = np.where(np.arange(rows) % 2, 1, -1).astype(DTYPES[dtype])[:, None]
    for k in (1, 3, 20):
        _, index = ag.linear_top_k(x, w, k, backend="cpu")
        logits = x.astype(np.float64) @ w.astype(np.float64).T
        assert np.array_equal(index, np.argsort(-logits, axis=-1, kind="stable")[:, :k])


def test_zeros_of_either_sign_are_equal(cpu_engine):
    w = np.array([0.0, -0.0, 0.0, -0.0, -1.0], np.float32)[:, None]
    assert ag.linear_top_k(np.ones((1, 1), np.float32), w, 5).index.tolist() == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize("shape", [(3, 500), (100, 1500)])
def test_special_logits(shape, dtype, cpu_engine):
    """A NaN or an infinite logit makes a row NaN with the indices 0 to k - 1. Other rows are not affected."""
    rows, vocab = shape
    for entry in (0, 17, vocab - 1):
        x = np.zeros((rows, 2), DTYPES[dtype])
        x[:, 0] = 1
        x[1, 1] = 1
        w = np.zeros((vocab, 2))
        w[:, 0] = np.arange(vocab) % 50 / 64
        for value in (np.nan, np.inf):
            w[entry, 1] = value
            some = np.array(w, DTYPES[dtype])
            only = x[1:2]
            others = np.array(x[:, :1])
            log_prob, index = ag.linear_top_k(only, some, 3, backend="cpu")
            assert np.isnan(log_prob).all()
            assert index.tolist() == [[0, 1, 2]]
            # 0 * inf is NaN, so other rows are compared in a separate problem.
            problem = LinearProblem(TOP_K, {"input": others, "weight": np.array(some[:, :1])})
            results = ag.linear_top_k(**problem.arguments, k=3, backend="cpu")
            assert_top_k(results, *logits_of_problem(problem))


@pytest.mark.parametrize("rows", [1, 70])
def test_logits_of_negative_infinity(rows, dtype, cpu_engine):
    """Such logits follow the finite ones in the order of their indices. If there are no others, the row is NaN."""
    vocab, finite = 1000, [3, 500, 998]
    w = np.full((vocab, 1), -np.inf, DTYPES[dtype])
    x = np.ones((rows, 1), DTYPES[dtype])
    log_prob, index = ag.linear_top_k(x, w, 4, backend="cpu")
    assert np.isnan(log_prob).all()
    assert np.all(index == [0, 1, 2, 3])
    w[finite, 0] = [1, 2, 3]
    log_prob, index = ag.linear_top_k(x, w, 8, backend="cpu")
    assert np.all(index == [998, 500, 3, 0, 1, 2, 4, 5])
    assert np.all(log_prob[:, 3:] == -np.inf)
    assert np.all(np.isfinite(log_prob[:, :3]))


def test_a_nan_in_one_row_alone(dtype, cpu_engine):
    for rows, vocab in ((5, 300), (90, 1200)):
        problem = problem_of(TOP_K, (rows, vocab, 9), dtype, k=5)
        x = np.array(problem.arguments["input"])
        x[2, 3] = np.nan
        right = ag.linear_top_k(**problem.arguments, backend="cpu")
        results = ag.linear_top_k(**problem.replaced(input=x).arguments, backend="cpu")
        keep = np.arange(rows) != 2
        for result, same in zip(results, right, strict=True):
            assert_identical(result[keep], same[keep])
        assert np.isnan(results.log_prob[2]).all()
        assert results.index[2].tolist() == [0, 1, 2, 3, 4]


# ---- layouts, threads, workspaces ------------------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=40)
def test_any_layout(cpu_engine, dtype, data):
    shape = Shape(
        *(data.draw(st.sampled_from(sizes)) for sizes in ((0, 1, 2, 7, 50, 70), (1, 2, 17, 130), (0, 1, 3, 33)))
    )
    k = data.draw(st.integers(1, min(shape.V, 128)))
    options = data.draw(st.sampled_from(({}, {"temperature": 0.5}, OPTIONS["all"])))
    problem = problem_of(TOP_K, shape, dtype, k=k, **options)
    strange = replace(problem.mapped(lambda array: data.draw(views(array))), constant=ANY)  # rows may repeat
    plain = strange.mapped(native_copy)
    results = cpu_engine.solve(strange)
    for result, same in zip(results, cpu_engine.solve(plain), strict=True):
        assert_identical(result, same)
        assert_fresh(result, (shape.BT, k), result.dtype)
    cpu_engine.assert_solved(plain, results)
    assert_top_k(results, *logits_of_problem(plain))


@pytest.mark.parametrize("shape", [(1, 20_003, 65), (60, 9001, 40), (300, 2000, 70), (5000, 40, 33), (1500, 2500, 8)])
@pytest.mark.parametrize("options", ["none", "all"])
def test_threads_and_caches_change_nothing(shape, options, dtype, cpu_engine, caches):
    problem = problem_of(TOP_K, shape, dtype, k=17, **OPTIONS.get(options, {}))
    expected = ag.linear_top_k(**problem.arguments, num_threads=1, backend="cpu")
    for count, sizes in zip((1, 2, 3, 4), (*caches, None), strict=True):
        _cpu.force_cache_sizes(sizes)
        results = ag.linear_top_k(**problem.arguments, num_threads=count, backend="cpu")
        for result, same in zip(results, expected, strict=True):
            assert_identical(result, same)


@pytest.mark.parametrize("order", ["growing", "falling", "random", "few distinct", "maxima at the end"])
def test_threads_share_floors(order, dtype, cpu_engine):
    """Logits that tasks leave out, as other tasks have larger ones, change nothing, with any number of threads."""
    vocab, rows, k = 5000, 3, 128
    logits = {
        "growing": np.arange(vocab) / 8,
        "falling": -np.arange(vocab) / 8,
        "random": generator("floors").standard_normal(vocab),
        "few distinct": np.arange(vocab) * 7 % 5,
        "maxima at the end": np.arange(vocab) % 3 + 50 * (np.arange(vocab) % 1000 // 990),
    }[order]
    scale = np.linspace(0.5, 2, rows).astype(DTYPES[dtype])[:, None]
    x, w = np.repeat(scale, 40, axis=1), np.zeros((vocab, 40), DTYPES[dtype])
    w[:, 0] = logits
    exact = scale.astype(np.float64) @ w[:, :1].astype(np.float64).T
    index = np.argsort(-exact.astype(np.float64 if dtype == "float64" else np.float32), axis=-1, kind="stable")[:, :k]
    results = [ag.linear_top_k(x, w, k, num_threads=threads, backend="cpu") for threads in (1, 2, 3, 8)]
    assert ag.explain(TOP_K, x, w, k, backend="cpu").plan == "nothing packed"
    for result in results:
        assert np.array_equal(result.index, index)
        assert_identical(result.log_prob, results[0].log_prob)


def test_plans():
    """Few rows are not packed. The sweep for few vocabulary entries has no kernels for this operator."""
    for shape, plan in {
        (1, 5000, 33): "nothing packed",
        (3, 300, 33): "nothing packed",
        (33, 300, 33): "packed, blocks outside",
        (300, 20, 33): "packed, blocks outside",
        (300, 2000, 33): "packed, blocks outside",
        (2, 5, 3): "packed, blocks outside",
        (0, 5, 3): "nothing to compute",
    }.items():
        assert ag.explain(TOP_K, **problem_of(TOP_K, shape, "float32").arguments, backend="cpu").plan == plan


@pytest.mark.parametrize("shape", [(60, 3000, 600), (1500, 500, 300)])
def test_small_workspaces(shape, dtype, cpu_engines):
    for k in (1, 128):
        problem = problem_of(TOP_K, shape, dtype, k=k)
        least = ag.workspace_size(TOP_K, **problem.arguments, workspace_bytes=0)
        assert least == 4 << 20
        size = ag.workspace_size(TOP_K, **problem.arguments, workspace_bytes=least)
        assert size <= least + 64 * shape[0] + 4096
        check(cpu_engines(), problem, workspace_bytes=least)


def test_no_array_of_all_logits():
    x = np.broadcast_to(np.float32(0), (1 << 20, 8))
    w = np.broadcast_to(np.float32(0), (1 << 20, 8))
    assert ag.workspace_size(TOP_K, x, w, 128) < 200 << 20


def test_the_least_workspace():
    """With very many features a panel of all of them needs more than 4 MiB; the message names the least."""
    x, w = (np.broadcast_to(np.float32(0), (rows, 200_000)) for rows in (100, 300))
    least = ag.workspace_size(TOP_K, x, w, 3, workspace_bytes=0)
    assert least == _linear_python.least_workspace_bytes(x, w, True, False, False, False, True, top_k=3)
    assert least > 4 << 20
    error = outcome(ag.linear_top_k, x, w, 3, workspace_bytes=least - 1)
    assert type(error) is INVALID
    assert str(error).startswith(f"{TOP_K}: workspace_bytes: expected an int of at least {least}, ")
    assert ag.workspace_size(TOP_K, x, w, 3, workspace_bytes=least) >= least


# ---- arguments -------------------------------------------------------------------------------------------------------


def test_empty(backend):
    for dtype in DTYPES.values():
        log_prob, index = ag.linear_top_k(np.zeros((0, 3), dtype), np.zeros((5, 3), dtype), 2, backend=backend)
        assert (log_prob.shape, index.shape) == ((0, 2), (0, 2))
        assert log_prob.dtype == (np.float64 if dtype == np.float64 else np.float32)
        log_prob, index = ag.linear_top_k(np.zeros((2, 0), dtype), np.zeros((5, 0), dtype), 3, backend=backend)
        assert np.allclose(log_prob, -np.log(5))
        assert index.tolist() == [[0, 1, 2]] * 2


def test_the_result_is_a_named_tuple(backend):
    results = ag.linear_top_k(np.eye(2), np.eye(2), 1, backend=backend)
    assert results._fields == ("log_prob", "index")
    assert results.index.tolist() == [[0], [1]]


@pytest.mark.parametrize(
    ("name", "values", "kind"),
    [
        ("input", {"None": None}, NULL),
        ("weight", {"None": None}, NULL),
        ("input", {"text": "x", "complex": np.ones((3, 4), complex)}, TYPE),
        ("weight", {"another dtype": np.ones((5, 4))}, TYPE),
        ("input", {"a number": np.float32(1)}, INVALID),
        ("weight", {"other features": np.ones((5, 3), np.float32), "no rows": np.ones((0, 4), np.float32)}, INVALID),
        ("k", {"zero": 0, "negative": -1, "beyond V": 6, "large": 2**70, "one too large": np.int64(6)}, INVALID),
        ("k", NOT_AN_INT, TYPE),
        ("temperature", {"zero": 0, "negative": -1.0, "NaN": np.nan, "infinite": np.inf, "large": 10**400}, INVALID),
        ("temperature", {"text": "1", "None": None, "integers": np.ones(3, int)}, TYPE),
        ("temperature", {"another length": np.ones(4), "two axes": np.ones((3, 1)), "zeros": np.zeros(3)}, INVALID),
        ("bias", {"integers": np.ones(5, int), "text": "x"}, TYPE),
        ("bias", {"another length": np.ones(4), "two axes": np.ones((5, 1)), "a number": 1.0}, INVALID),
        ("logit_scale", {"NaN": np.nan, "infinite": np.inf, "large": 10**400}, INVALID),
        ("logit_scale", NOT_A_NUMBER, TYPE),
        ("softcap", {"zero": 0, "negative": -1.0, "NaN": np.nan, "infinite": np.inf}, INVALID),
        ("softcap", {"text": "1", "vector": np.ones(3)}, TYPE),
        ("workspace_bytes", {"zero": 0, "small": (4 << 20) - 1, "large": 2**70}, INVALID),
        ("workspace_bytes", {"float": 5e6, "bool": True}, TYPE),
    ],
)
def test_errors(name, values, kind, backend):
    good = {"input": np.ones((3, 4), np.float32), "weight": np.ones((5, 4), np.float32), "k": 2, "backend": backend}
    for label, value in values.items():
        error = outcome(ag.linear_top_k, **good | {name: value})
        assert type(error) is kind, label
        assert str(error).startswith(f"{TOP_K}: {name}: expected "), label


def test_at_most_128(backend):
    x, w = np.ones((2, 3), np.float32), np.ones((500, 3), np.float32)
    assert ag.linear_top_k(x, w, 128, backend=backend).index.shape == (2, 128)
    error = outcome(ag.linear_top_k, x, w, 129, backend=backend)
    assert str(error) == f"{TOP_K}: k: expected at most 128, and at most V = 500, got 129"
