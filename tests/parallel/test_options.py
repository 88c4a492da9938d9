"""Compare losses with options over ranks with the definitions, in float64, and with the undivided problem."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_samples import Shape
from loss_samples import EVERY, OPTIONS, arguments_of, check
from parallel_samples import on_grid_with_options, part_with_options, whole_of_grid, whole_with_options, with_options
from samples import DTYPES, assert_identical, generator
from thread_ranks import Group, on_grid, on_ranks

import ascend_grad as ag
from ascend_grad import parallel
from ascend_grad.parallel import (
    agreement,
    chunking,
    data_parallel,
    part_backend,
    row_chunk,
    row_losses,
    row_statistics,
    shard,
    sums,
)

SHAPE, CUTS, ROWS = Shape(41, 50, 20), [0, 17, 17, 45, 50], [0, 11, 11, 41]
SHARES = (True, False, "scatter")
GIVEN = [name for name in OPTIONS if name != "no option"]


def arguments(option, dtype="float32", reduction="mean", shape=SHAPE):
    return arguments_of(shape, dtype, option, reduction, start=0)


# ---- right values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", GIVEN)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_vocabulary_parallel(option, dtype, backend):
    for reduction in ("mean", "none"):
        a = arguments(option, dtype, reduction)
        for each in whole_with_options(with_options(a, CUTS, backend=backend)):
            check(each, a, dtype)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_infinite_class_weights_of_improbable_targets(backend):
    """0 times infinity is NaN, as in one process, without a warning."""
    x, w, target = np.ones((1, 2)), np.ones((3, 2)), np.array([[0, 1]])
    options = {"class_weight": np.array([np.inf, 1, 1]), "target_prob": np.array([[0.0, 1.0]]), "backend": backend}
    for result in (
        ag.linear_cross_entropy(x, w, target, **options),
        parallel.linear_cross_entropy(x, w, target, comm=None, **options),
    ):
        assert np.isnan(result.loss)


@pytest.mark.parametrize("option", OPTIONS)
def test_a_grid_of_ranks(option, dtype):
    for reduction, share in (("mean", True), ("sum", "scatter"), ("none", True)):
        a = arguments(option, dtype, reduction)
        results = on_grid_with_options(a, [0, 17, 50], ROWS, reduce_weight_grad=share)
        for each in whole_of_grid(results, reduction, share):
            check(each, a, dtype)


@pytest.mark.parametrize("option", GIVEN)
@pytest.mark.parametrize("share", SHARES)
def test_shares_of_the_gradient(option, share):
    a = arguments(option)
    results = with_options(a, CUTS, reduce_input_grad=share)
    for each in whole_with_options(results, share):
        check(each, a, "float32")


@pytest.mark.parametrize("shape", [Shape(1, 2, 3), Shape(5, 7, 0), Shape(0, 5, 3), Shape(9, 1, 4), Shape(700, 24, 10)])
@pytest.mark.parametrize("option", GIVEN)
def test_edges(option, shape):
    a = arguments(option, "float64", "sum", shape)
    for cuts in ([0, shape.V], [0, 0, 1, shape.V], [0, shape.V, shape.V]):
        for each in whole_with_options(with_options(a, cuts)):
            check(each, a, "float64")


@pytest.mark.parametrize("option", GIVEN)
@pytest.mark.parametrize("workspace", [100, 4000, 10**6])
def test_row_chunks_and_vocabulary_blocks(monkeypatch, option, workspace, dtype):
    monkeypatch.setattr(shard, "default_workspace_bytes", lambda *_: workspace)
    monkeypatch.setattr(chunking, "CHUNK_ROWS", 10)
    monkeypatch.setattr(chunking, "MIN_FEATURES_TO_CACHE_16_BITS", 0)
    a = arguments(option, dtype, "none")
    for backend in ("cpu", "reference") if dtype == "float64" else ("cpu",):
        for each in whole_with_options(with_options(a, CUTS, backend=backend)):
            check(each, a, dtype)


def test_operations_of_row_chunks(monkeypatch):
    """The input gradient of a row chunk is communicated before the statistics of the next chunk are computed."""
    monkeypatch.setattr(chunking, "CHUNK_ROWS", 20)
    of_chunk = [("max", (21,)), ("sum", (21, 5)), ("sum", (21 * 20,))]
    last = [("max", (20,)), ("sum", (20, 5)), ("sum", (20 * 20 + 1,))]
    assert operations("smoothing") == of_chunk + last


@st.composite
def calls(draw):
    """Draw a call with any options, in float64."""
    shape = Shape(draw(st.integers(1, 20)), draw(st.integers(1, 30)), draw(st.integers(0, 9)))
    random = generator("options over ranks", draw(st.integers(0, 1000)))
    several = draw(st.booleans())
    target = random.integers(0, shape.V, (shape.BT, 2) if several else shape.BT)
    target[random.random(target.shape) < 0.3] = -7
    options = {
        "token_weight": random.integers(0, 3, shape.BT).astype(float),
        "class_weight": random.random(shape.V),
        "label_smoothing": draw(st.sampled_from([0.2, 1.0])),
        "lse_square_scale": 0.3,
        "temperature": draw(st.sampled_from([0.6, 0.5 + random.random(shape.BT)])),
        "denominator": 3.5,
        "bias": random.standard_normal(shape.V),
        "logit_scale": -1.2,
        "softcap": 3.0,
        "outputs": ("lse", "entropy", "predicted", "log_prob", *(() if several else ("correct",))),
    }
    names = draw(st.lists(st.sampled_from(sorted(options)), unique=True))
    call = {
        "input": random.standard_normal((shape.BT, shape.H)),
        "weight": random.standard_normal((shape.V, shape.H)),
        "target": target,
        "ignore_index": -7,
        "reduction": draw(st.sampled_from(["mean", "sum", "none"])),
        **({"target_prob": draw(st.sampled_from([0, random.random((shape.BT, 2))]))} if several else {}),
        **{name: options[name] for name in names},
    }
    if call["reduction"] == "none":
        call["grad_loss"] = random.standard_normal(shape.BT)
    places = [sorted(draw(st.lists(st.integers(0, n), max_size=2))) for n in (shape.V, shape.BT)]
    return call, [0, *places[0], shape.V], [0, *places[1], shape.BT]


@given(calls(), st.booleans())
@settings(max_examples=60)
def test_any_options(drawn, deterministic):
    """Results over a grid match the results of the undivided problem, but are computed in another order."""
    call, cuts, rows = drawn
    right = ag.linear_cross_entropy(**call)
    for each in whole_of_grid(on_grid_with_options(call, cuts, rows, deterministic=deterministic), call["reduction"]):
        assert each._fields == right._fields
        for name, value, expected in zip(right._fields, each, right):
            assert value.dtype == expected.dtype
            np.testing.assert_allclose(value, expected, rtol=1e-12, atol=1e-12, err_msg=name)


@pytest.mark.parametrize(
    "option", ["outputs", "token weights alone", "cap", "classes and smoothing", "several log-probabilities", "all"]
)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_gradients_of_outputs(option, backend, dtype):
    """Upstream gradients of outputs add to the gradients."""
    a = arguments(option, dtype, "none")
    random = generator("gradients of outputs", option)
    upstream = {name: random.standard_normal(41) for name in ("grad_lse", "grad_entropy")}
    counted = (a["target"] != -7).reshape(41, -1).any(-1)
    right = {name: np.where(counted, each, 0) for name, each in upstream.items()}
    upstream["grad_log_prob"] = random.standard_normal(a["target"].shape)
    right["grad_log_prob"] = np.where(a["target"] != -7, upstream["grad_log_prob"], 0)
    for each in whole_with_options(with_options(a | upstream, CUTS, backend=backend)):
        check(each, a, dtype, **right)
    for each in whole_of_grid(on_grid_with_options(a | upstream, [0, 17, 50], ROWS, backend=backend), "none"):
        check(each, a, dtype, **right)


# ---- digits, ties, and numbers that are not finite -------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [[0, 100, 200], [0, 1, 2, 150, 200], [0, 199, 200]])
def test_nearly_certain_targets(cuts, dtype):
    """Losses, outputs and the gradient at the target keep a relative error of 1e-4 down to 1 - p = 1e-12."""
    tokens, entries = 7, cuts[-1]
    for distance, target in itertools.product((4, 16, 28, 33), (0, 1, entries - 1)):
        x, w = np.zeros((tokens, 8), DTYPES[dtype]), np.zeros((entries, 8), DTYPES[dtype])
        x[:, 0], w[:, 0], w[target, 0] = 1, -40, distance - 40
        rest = (entries - 1) * np.exp(-np.longdouble(distance))
        loss, q = np.log1p(rest), rest / (1 + rest)
        entropy = loss + rest * distance / (1 + rest)
        call = {"input": x, "weight": w, "target": np.full(tokens, target), "reduction": "sum"}
        for each in whole_with_options(with_options(call, cuts, outputs=("log_prob", "entropy"))):
            assert abs(each.loss / (loss * tokens) - 1) < 1e-4
            assert np.all(abs(each.log_prob / -loss - 1) < 1e-4)
            assert np.all(abs(each.entropy / entropy - 1) < 1e-4)
            if dtype != "float16":  # small gradients underflow there
                grad = each.weight_grad[target, 0].astype(float)
                assert abs(grad / -(q * tokens) - 1) < (1e-4 if dtype.startswith("float") else 2**-7)


def test_the_lowest_entry_of_a_tie_is_predicted():
    """The ids of the shards decide, not the order of the ranks."""
    x, w = np.ones((3, 1), np.float32), np.zeros((12, 1), np.float32)
    w[[5, 7, 10]] = 2
    entries = [slice(9, 12), slice(4, 9), slice(0, 4)]

    def work(comm):
        own = entries[comm.rank]
        return parallel.linear_cross_entropy(
            x, w[own], np.array([5, 7, -100]), comm=comm, vocab_start_index=own.start, outputs=("predicted", "correct")
        )

    for each in on_ranks(3, work):
        assert each.predicted.tolist() == [5, 5, -1]
        assert each.correct == 1


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_the_first_nan_is_predicted(backend):
    """The first NaN of a row counts as its maximum, as in `numpy.argmax`, whatever rank has it."""
    for bias in ([0, 1, 0, np.nan, 0, 2], [-np.inf, 1, 0, np.nan, np.nan, 0], [-np.inf] * 3 + [np.nan] * 3):
        call = {"input": np.zeros((2, 3)), "weight": np.zeros((6, 3)), "target": np.array([1, 3]), "bias": bias}
        call |= {"bias": np.array(bias), "reduction": "none", "outputs": ("predicted", "correct")}
        for cuts in ([0, 1, 6], [0, 0, 6], [0, 3, 6], [0, 4, 6], [0, 2, 2, 4, 5, 6]):
            for each in with_options(call, cuts, backend=backend):
                assert each.predicted.tolist() == [3, 3]
                assert each.correct == 1


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("weight", [0.0, 2.0])
def test_a_rank_whose_logits_are_all_minus_infinity(backend, weight):
    """Such a rank adds nothing to the sums of exponentials. Smoothing makes the loss infinite if its classes count."""
    call = arguments("no option", "float64", "none") | {"label_smoothing": 0.1, "outputs": ("lse", "entropy")}
    call["target"] = 20 + np.arange(41) % 30
    call["bias"], call["class_weight"] = np.zeros(50), np.ones(50)
    call["bias"][:17], call["class_weight"][:17] = -np.inf, weight
    right = ag.linear_cross_entropy(**call, backend=backend)
    assert np.all(np.isinf(right.loss) == (weight > 0))
    for cuts in (CUTS, [0, 17, 50], [0, 9, 17, 50], [0, 20, 50]):
        for each in whole_with_options(with_options(call, cuts, backend=backend)):
            for name, value, expected in zip(right._fields, each, right):
                np.testing.assert_allclose(value, expected, rtol=1e-12, atol=1e-12, err_msg=name)


def test_logits_that_are_no_finite_numbers(dtype):
    """A row has the results of the undivided problem if a logit is infinite or NaN, on any rank."""
    x = np.array([[1, 0], [0, 1], [1, 1], [-1, 0]], DTYPES[dtype])
    outputs = ("lse", "log_prob", "entropy")
    for first in ((-np.inf, 0), (0, np.inf), (np.nan, 0), (-np.inf, -np.inf)):
        w = np.array([(0, 1), first, (1, 2), (2, 1), (1, -1), (0, 0)], DTYPES[dtype])
        for target, smoothing in itertools.product(([0, 1, 2, 3], [1, 1, 1, 1]), (0.0, 0.25)):
            call = {"input": x, "weight": w, "target": np.array(target), "reduction": "none", "outputs": outputs}
            call["label_smoothing"] = smoothing
            right = ag.linear_cross_entropy(**call, backend="reference")
            for cuts in ([0, 1, 2, 6], [0, 2, 6], [0, 3, 3, 6]):
                for each in whole_with_options(with_options(call, cuts)):
                    for name, value, expected in zip(right._fields, each, right):
                        value, expected = value.astype(float), expected.astype(float)
                        np.testing.assert_allclose(value, expected, rtol=1e-2, atol=1e-2, err_msg=name)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("size", [1e-300, 1e-50, 1e50, 1e300])
def test_the_size_of_class_weights_cancels(size, backend):
    """Weights of float64 beyond the range of float32 cancel in a mean, though each rank rounds its own."""
    call = arguments("classes and smoothing")
    right = ag.linear_cross_entropy(**call)
    call["class_weight"] = call["class_weight"] * size
    for each in whole_with_options(with_options(call, CUTS, backend=backend)):
        for name, value, expected in zip(right._fields, each, right):
            np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_an_infinite_class_weight_makes_the_smoothed_loss_infinite(backend):
    """Also where its class has the largest logit, on any rank."""
    call = arguments("no option", "float64", "none") | {"label_smoothing": 0.1, "return_grad": False}
    call["target"] = np.full(41, 20)
    for place, largest in itertools.product((0, 18, 49), repeat=2):
        call["bias"], call["class_weight"] = np.zeros(50), np.ones(50)
        call["bias"][largest], call["class_weight"][place] = 1000, np.inf
        for each in with_options(call, CUTS, backend=backend):
            assert np.array_equal(each.loss, ag.linear_cross_entropy(**call).loss, equal_nan=True)
            assert place == largest or np.all(each.loss == np.inf)
        call["bias"][largest] = 5
        for each in with_options(call, CUTS, backend=backend):
            assert np.all(each.loss == np.inf)


def test_rows_without_weight():
    """A row of weight 0 adds nothing, whatever values it holds. A mean over such rows alone is NaN."""
    a = arguments("token weights alone")
    a["token_weight"] = (np.arange(41) % 2).astype(np.float32)
    expected = with_options(a, CUTS, deterministic=True)
    a["input"][::2] = np.nan
    for each, right in zip(with_options(a, CUTS, deterministic=True), expected):
        for value, own in zip(each, right):
            assert_identical(value, own)
    for weights in ({"token_weight": np.zeros(41)}, {"class_weight": np.zeros(50)}):
        for each in with_options(arguments("no option") | weights, CUTS):
            assert np.isnan(each.loss)
            assert not each.input_grad.any()
            assert not each.weight_grad.any()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.filterwarnings("error")
def test_an_infinite_class_without_token_weight(backend):
    """A row of token weight 0 adds 0 to the divisor of a mean, whatever its class weight is."""
    call = arguments("no option", "float64") | {"token_weight": np.ones(41), "class_weight": np.ones(50)}
    call["target"] = np.arange(41)
    call["token_weight"][[3, 8]] = 0
    expected = ag.linear_cross_entropy(**call)
    call["class_weight"][[3, 8]] = np.inf
    results = whole_with_options(with_options(call, CUTS, backend=backend))
    results += whole_of_grid(on_grid_with_options(call, [0, 17, 50], ROWS, backend=backend), "mean")
    for each in results:
        for name, value, right in zip(expected._fields, each, expected):
            np.testing.assert_allclose(value, right, rtol=1e-12, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_an_infinite_token_weight_makes_an_infinite_loss(backend):
    call = arguments("no option", "float64", "none") | {"token_weight": np.full(41, np.inf)}
    right = ag.linear_cross_entropy(**call, return_grad=False).loss
    assert np.isinf(right).any()
    assert not np.isnan(right).any()
    for each in whole_with_options(with_options(call | {"return_grad": False}, CUTS, backend=backend)):
        np.testing.assert_allclose(each.loss, right, rtol=1e-12)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_vocabulary_parallel_without_entries(smoothing, reduction):
    """All rows are ignored, and the results match the results of the undivided problem."""
    call = {"input": np.ones((3, 2)), "weight": np.ones((0, 2)), "target": np.full(3, -100), "reduction": reduction}
    call |= {"label_smoothing": smoothing, "bias": np.zeros(0), "outputs": EVERY}
    right = ag.linear_cross_entropy(**call)
    for cuts in ([0, 0], [0, 0, 0]):
        for each in whole_with_options(with_options(call, cuts)):
            for value, expected in zip(each, right):
                np.testing.assert_array_equal(value, expected)


# ---- communication ---------------------------------------------------------------------------------------------------


def operations(option, **more):
    group = Group(2)
    with_options(arguments(option) | more, [0, 20, 50], group)
    first, *others = group.operations
    assert first == ("allgather", (1024,))
    return others


def test_operations():
    """Calls make the documented collective operations, with the documented sizes."""
    total = ("sum", (41 * 20 + 1,))
    assert operations("smoothing") == [("max", (41,)), ("sum", (41, 5)), total]
    assert operations("several targets") == [("sum", (41, 3)), ("max", (41,)), ("sum", (41, 7)), total]
    assert operations("outputs", return_grad=False) == [("max", (41,)), ("max", (41,)), ("sum", (41, 5)), ("sum", (1,))]
    assert operations("bias", deterministic=True)[:2] == [("max", (41,)), ("allgather", (41, 5))]


@pytest.mark.parametrize("option", ["all", "classes"])
def test_the_same_bits(option, dtype):
    """Deterministic results have the same bits in every run, though the test double adds in a new order each time."""
    a = arguments(option, dtype)
    runs = [with_options(a, CUTS, deterministic=True) for _ in range(3)]
    for run, rank in itertools.product(runs[1:], range(4)):
        for value, expected in zip(run[rank], runs[0][rank]):
            assert_identical(value, expected)


def test_most_options_fit_on_a_card():
    """Ranks tell each other their facts in messages of one size, which holds any options."""
    facts = {"same": {f"option {i}": repr(i / 7e-201) for i in range(45)}}
    told = on_ranks(2, lambda comm: agreement.Attempt("f").exchange_records(comm, facts))
    assert told == [[facts, facts]] * 2


# ---- errors of one rank between two collective operations ------------------------------------------------------------

STEPS = ["part_statistics", "candidates", "write_summands", "RowStatistics", "part_gradients"]


@pytest.fixture
def failing(monkeypatch):
    """Return a function that makes a step raise an error in the thread of one rank."""

    def patch(step, rank, error):
        module = part_backend._linear_python if step.startswith("part_") else row_chunk
        original = getattr(module, step)

        def stepped(*args):
            if threading.current_thread().name == f"rank {rank}":
                raise error
            return original(*args)

        monkeypatch.setattr(module, step, stepped)

    return patch


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("error", [MemoryError("no room"), KeyboardInterrupt()], ids=["memory", "Ctrl-C"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_an_error_in_a_step(failing, step, error, deterministic):
    """Every rank raises, and none is left waiting."""
    failing(step, 1, error)
    a, cuts = arguments("outputs") | {"bias": np.ones(50)}, [0, 17, 45, 50]

    def work(comm):
        given, keywords = part_with_options(a, slice(cuts[comm.rank], cuts[comm.rank + 1]))
        return parallel.linear_cross_entropy(*given, comm=comm, deterministic=deterministic, **keywords)

    results = on_ranks(3, work)
    assert results[1] is error
    for rank in (0, 2):
        assert type(results[rank]) is parallel.RankError
        assert f"rank 1 failed: {type(error).__name__}" in str(results[rank])


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("rank", [0, 3])
def test_an_error_on_a_grid(failing, step, rank):
    error = MemoryError("no room")
    failing(step, rank, error)
    a = arguments("outputs")

    def work(vocab_comm, comm):
        entries, tokens = (slice(n * each.rank, n * each.rank + n) for n, each in ((25, vocab_comm), (20, comm)))
        given, keywords = part_with_options(a, entries, tokens)
        return parallel.data_parallel_linear_cross_entropy(*given, comm=comm, vocab_comm=vocab_comm, **keywords)

    results = list(on_grid(2, 2, work).values())
    assert results[rank] is error
    assert [type(each) for i, each in enumerate(results) if i != rank] == [parallel.RankError] * 3


class Allocating:
    """Stand in for NumPy in a module, and raise in the thread of rank 1 where the n-th array is allocated."""

    def __init__(self, n):
        self.left = n

    def __getattr__(self, name):
        found = getattr(np, name)
        if name not in ("empty", "zeros", "ones", "concatenate", "stack", "where") or (
            threading.current_thread().name != "rank 1"
        ):
            return found
        self.left -= 1
        if self.left == 0:
            raise MemoryError("no room")
        return found


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("function", ["vocabulary", "tokens", "grid"])
def test_no_memory_for_any_array(monkeypatch, function, deterministic):
    """Whichever array a rank has no memory for: every rank raises, and none is left waiting."""
    a = arguments("outputs", "float64") | {"bias": np.ones(50), "deterministic": deterministic}

    def work(comm):
        if function == "vocabulary":
            given, keywords = part_with_options(a, slice(25 * comm.rank, 25 * comm.rank + 25))
            return parallel.linear_cross_entropy(*given, comm=comm, **keywords)
        given, keywords = part_with_options(a, slice(None), slice(21 * comm.rank, 21 * comm.rank + 21))
        return parallel.data_parallel_linear_cross_entropy(*given, comm=comm, **keywords)

    def on_a_grid(vocab_comm, comm):
        entries, tokens = (slice(n * each.rank, n * each.rank + n) for n, each in ((25, vocab_comm), (21, comm)))
        given, keywords = part_with_options(a, entries, tokens)
        return parallel.data_parallel_linear_cross_entropy(*given, comm=comm, vocab_comm=vocab_comm, **keywords)

    for n in range(1, 1000):
        numpy = Allocating(n)
        for module in (data_parallel, row_chunk, row_losses, row_statistics, shard, sums):
            monkeypatch.setattr(module, "np", numpy)
        results = list(on_grid(2, 2, on_a_grid).values()) if function == "grid" else on_ranks(2, work)
        if numpy.left > 0:  # there are fewer arrays
            break
        assert type(results.pop(1)) is MemoryError, n
        assert {type(each) for each in results} == {parallel.RankError}, n
    assert n > 20
    assert not any(isinstance(each, BaseException) for each in results)


# ---- arguments -------------------------------------------------------------------------------------------------------

BAD = [
    ({"token_weight": np.ones(3)}, ag.ParamInvalidError, "token_weight: expected"),
    ({"class_weight": np.ones(4)}, ag.ParamInvalidError, "class_weight: expected"),
    ({"bias": np.ones(4)}, ag.ParamInvalidError, "bias: expected"),
    ({"target_prob": np.ones((41, 2))}, ag.ParamInvalidError, "target: expected"),
    ({"label_smoothing": 1.5}, ag.ParamInvalidError, "label_smoothing: expected"),
    ({"lse_square_scale": np.inf}, ag.ParamInvalidError, "lse_square_scale: expected"),
    ({"temperature": 0.0}, ag.ParamInvalidError, "temperature: expected"),
    ({"temperature": np.full(41, -1.0)}, ag.ParamInvalidError, "temperature: expected positive finite numbers"),
    ({"denominator": 0}, ag.ParamInvalidError, "denominator: expected"),
    ({"logit_scale": "1"}, ag.ParamTypeError, "logit_scale: expected"),
    ({"softcap": -2.0}, ag.ParamInvalidError, "softcap: expected"),
    ({"outputs": ("loss",)}, ag.ParamInvalidError, "outputs: expected"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "kind", "text"), BAD, ids=lambda value: str(value)[:20])
def test_a_bad_option(options, kind, text):
    """A bad option of one rank is an error on every rank."""
    a = arguments("no option")

    def work(comm):
        own = slice(CUTS[comm.rank], CUTS[comm.rank + 1])
        return parallel.linear_cross_entropy(
            a["input"], a["weight"][own], a["target"], comm=comm, ignore_index=-7, **options if comm.rank == 2 else {}
        )

    results = on_ranks(4, work)
    assert type(results[2]) is kind
    assert text in str(results[2])
    assert [type(results[rank]) for rank in (0, 1, 3)] == [parallel.RankError] * 3


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("token_weight", np.ones(41), np.arange(41.0)),
        ("token_weight", None, np.ones(41)),
        ("temperature", 2.0, 0.5),
        ("temperature", 1.0, np.ones(41)),
        ("denominator", None, 4.0),
        ("label_smoothing", 0.1, 0.0),
        ("lse_square_scale", 0.1, 0.2),
        ("logit_scale", 2.0, 3.0),
        ("softcap", 30.0, None),
        ("outputs", ("lse", "entropy"), ("entropy", "lse")),
        ("bias", None, "entries"),
        ("class_weight", "entries", None),
    ],
)
def test_options_that_differ_between_ranks(name, one, other):
    a = arguments("no option")

    def work(comm):
        own = slice(CUTS[comm.rank], CUTS[comm.rank + 1])
        value = other if comm.rank == 3 else one
        value = np.ones(own.stop - own.start) if isinstance(value, str) else value
        return parallel.linear_cross_entropy(
            a["input"], a["weight"][own], a["target"], comm=comm, ignore_index=-7, **{name: value}
        )

    for each in on_ranks(4, work):
        assert type(each) is ag.ParamInvalidError
        assert f"{name}: expected the same on every rank, got " in str(each)
        for value, place in ((one, " on rank 0 and "), (other, " on rank 3")):
            if isinstance(value, tuple):
                value = list(value)
            assert isinstance(value, (str, np.ndarray)) or f" {value}{place}" in str(each)


def test_vectors_over_the_vocabulary_are_the_same_for_all_tokens():
    a = arguments("no option")
    for name in ("bias", "class_weight"):

        def work(comm, name=name):
            own = slice(ROWS[comm.rank], ROWS[comm.rank + 1])
            return parallel.data_parallel_linear_cross_entropy(
                a["input"][own], a["weight"], a["target"][own], comm=comm, ignore_index=-7,
                **{name: np.full(50, 1.0 + comm.rank)},
            )  # fmt: skip

        for each in on_ranks(3, work):
            assert type(each) is ag.ParamInvalidError
            assert f"{name}: expected the same on every rank, got checksum " in str(each)


def test_targets_outside_the_vocabulary():
    a = arguments("several targets")
    a["target"][3, 1] = 50
    with pytest.raises(ag.ParamInvalidError, match=r"target: expected values in \[0, 50\) or -7, got 50 in row 3"):
        with_options(a, [0, 50])


def test_a_device_computes_no_options():
    a = arguments("smoothing")
    with pytest.raises(ag.BackendUnavailableError, match="label_smoothing: the loss over ranks with this option is"):
        with_options(a, [0, 50], backend="npu")


def test_results_are_in_the_order_of_the_outputs():
    a = arguments("no option", reduction="none")
    right = ag.linear_cross_entropy(**a, outputs=EVERY)
    for names in itertools.permutations(("lse", "entropy", "predicted")):
        for each in (
            *with_options(a, CUTS, return_grad=False, outputs=names),
            *whole_of_grid(on_grid_with_options(a, [0, 50], [0, 41], outputs=names), "none"),
        ):
            assert each._fields[3:] == names
            loss, _, _, *others = each
            for value, expected in zip((loss, *others), (right.loss, *(getattr(right, name) for name in names))):
                np.testing.assert_allclose(value, expected, rtol=1e-5)


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_dtypes_of_results(kind):
    a = arguments("outputs", "bfloat16") | {"bias": np.zeros(50, kind)}
    for each in with_options(a, CUTS):
        assert each.bias_grad.dtype == kind
        assert each._fields == ("loss", "input_grad", "weight_grad", "bias_grad", *EVERY)
        assert {getattr(each, name).dtype for name in ("loss", "lse", "log_prob", "entropy")} == {np.dtype(np.float32)}
        assert each.predicted.dtype == each.correct.dtype == np.int64
