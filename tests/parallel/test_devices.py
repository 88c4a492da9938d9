"""Test arrays on a device over ranks: matrices stay on the device, and sums pass through the host."""

from __future__ import annotations

import gc

import linear_oracles
import numpy as np
import pytest
from parallel_samples import (
    even_cuts,
    of_tokens,
    of_vocabulary,
    part_with_options,
    tokens_rank,
    vocabulary_rank,
    whole,
    whole_of_grid,
    whole_with_options,
)
from samples import assert_identical
from thread_ranks import on_grid, on_ranks, returned

import ascend_grad as ag
from ascend_grad import parallel
from ascend_grad.npu import asarray
from ascend_grad.parallel import chunking, part_backend

pytestmark = pytest.mark.usefixtures("device")

DTYPES = ("float16", "bfloat16")


@pytest.fixture(autouse=True)
def _no_exceptions_are_left():
    """Delete exceptions after each test, as their tracebacks keep arrays on the device alive."""
    yield
    gc.collect()


REDUCTIONS = ("mean", "sum", "none")


def solve(problem, cuts, work=vocabulary_rank, **options):
    return returned(on_ranks(len(cuts) - 1, lambda comm: work(problem, cuts, comm, put=asarray, **options)))


def check_vocabulary(engine, problem, cuts, share=True, **options):
    results = solve(problem, cuts, reduce_input_grad=share, **options)
    for each in of_vocabulary(results, share):
        if share is False and each.input_grad is not None:  # the test adds up parts that the device has rounded
            each = each._replace(input_grad=each.input_grad.astype(problem.dtype))
        engine.assert_solved(problem, each)
    return results


def check_tokens(engine, problem, cuts, share=True, **options):
    results = solve(problem, cuts, tokens_rank, reduce_weight_grad=share, **options)
    for each in of_tokens(results, problem.arguments["reduction"], share):
        engine.assert_solved(problem, each)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("share", [True, False, "scatter"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_vocabulary(device_engine, dtype, size, share, deterministic):
    problem = whole((33, 50, 17), dtype)
    check_vocabulary(device_engine, problem, even_cuts(50, size), share, deterministic=deterministic)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("share", [True, "scatter"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_tokens(device_engine, dtype, size, share, reduction):
    check_tokens(device_engine, whole((50, 33, 17), dtype, reduction=reduction), even_cuts(50, size), share)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    ("shape", "cuts", "token_cuts"),
    [
        ((19, 40, 8), [0, 1, 39, 40], [0, 1, 18, 19]),
        ((1, 12, 5), [0, 7, 12], [0, 0, 1]),
        ((6, 2, 3), [0, 1, 2, 2, 2], [0, 2, 2, 6]),  # two entries are split over four ranks
        ((0, 4, 3), [0, 2, 4], [0, 0, 0]),
        ((5, 0, 3), [0, 0, 0], [0, 2, 5]),
        ((5, 4, 0), [0, 2, 4], [0, 2, 5]),
    ],
)
def test_edges(device_engine, shape, cuts, token_cuts, reduction):
    problem = whole(shape, "float16", reduction=reduction)
    check_vocabulary(device_engine, problem, cuts)
    check_tokens(device_engine, problem, token_cuts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk_rows", [512, 9])
def test_arrays_of_the_host(device_engine, monkeypatch, dtype, chunk_rows):
    """The device's operators compute arrays of the host, in row chunks and vocabulary blocks."""

    def on_the_host(*args):
        raise AssertionError

    for name in ("part_statistics", "part_gradients"):
        monkeypatch.setattr(part_backend._linear_python, name, on_the_host)
    monkeypatch.setattr(chunking, "CHUNK_ROWS", chunk_rows)
    monkeypatch.setattr(chunking, "VOCAB_BLOCK_SHARE", 1 << 20)
    problem, cuts = whole((33, 50, 17), dtype), [0, 17, 17, 50]
    for backend in ("auto", "npu"):
        results = returned(
            on_ranks(3, lambda comm, backend=backend: vocabulary_rank(problem, cuts, comm, backend=backend))
        )
        for each in of_vocabulary(results):
            device_engine.assert_solved(problem, each)


@pytest.mark.parametrize("mask", [(True, False), (False, True), (False, False)])
def test_gradients_that_are_not_asked_for(device_engine, mask):
    problem = whole((9, 20, 4), "float16")
    expected = linear_oracles.expected(problem)
    kept = (expected[0], *(each if asked else None for each, asked in zip(expected[1:], mask)))
    for each in of_vocabulary(solve(problem, [0, 11, 20], output_mask=mask)):
        device_engine.assert_solved(problem, each, kept)
    for each in of_tokens(solve(problem, [0, 4, 9], tokens_rank, output_mask=mask), "mean"):
        device_engine.assert_solved(problem, each, kept)


def test_nothing_counts(device_engine):
    problem = whole((9, 20, 4), "bfloat16").replaced(target=np.full(9, -7))
    check_vocabulary(device_engine, problem, [0, 7, 20])
    check_tokens(device_engine, problem, [0, 7, 9])


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_grid(device_engine, reduction):
    problem, entries, rows = whole((25, 33, 9), "bfloat16", reduction=reduction), [0, 20, 33], [0, 10, 25]

    def work(vocab_comm, comm):
        own = slice(entries[vocab_comm.rank], entries[vocab_comm.rank + 1])
        return tokens_rank(problem, rows, comm, own, vocab_comm=vocab_comm, put=asarray)

    ranks = on_grid(2, 2, work)
    returned(list(ranks.values()))
    columns = [of_tokens([ranks[v, t] for t in (0, 1)], reduction) for v in (0, 1)]
    for row in zip(*columns):
        for each in of_vocabulary(row):
            device_engine.assert_solved(problem, each)


def test_the_same_bits():
    problem = whole((33, 50, 17), "float16")
    runs = [solve(problem, [0, 20, 30, 50], deterministic=True) for _ in range(3)]
    for run in runs:
        for rank, each in enumerate(run):
            for one, other in zip(each, runs[0][rank]):
                assert_identical(one, other)
            assert_identical(each.input_grad, runs[0][0].input_grad)


def test_matrices_stay_on_the_device(device):
    """A call of one process copies no data as large as a matrix from or to the host."""
    problem = whole((64, 300, 256), "float16")
    a = problem.arguments
    x, w, t = (asarray(a[name]) for name in ("input", "weight", "target"))
    device.reset()
    for function in (parallel.linear_cross_entropy, parallel.data_parallel_linear_cross_entropy):
        result = function(x, w, t, comm=None, ignore_index=-7)
        assert all(isinstance(each, ag.npu.DeviceArray) for each in result)
    assert device.counter("bytes_h2d") + device.counter("bytes_d2h") < 64 * 256


@pytest.mark.parametrize("work", [vocabulary_rank, tokens_rank])
def test_another_dtype_than_the_device_has(work):
    problem = whole((9, 20, 4), "float32")
    cuts = [0, 11, 20] if work is vocabulary_rank else [0, 4, 9]
    for error in on_ranks(2, lambda comm: work(problem, cuts, comm, put=asarray)):
        assert type(error) is ag.ParamTypeError
        assert "expected dtype float16 or bfloat16 on a device, got float32" in str(error)


@pytest.mark.parametrize("work", [vocabulary_rank, tokens_rank])
@pytest.mark.parametrize("options", [{"label_smoothing": 0.1}, {"outputs": ("entropy",)}])
def test_options_are_refused(work, options):
    """The options that a device lacks are an error over ranks."""
    problem = whole((9, 20, 4), "bfloat16")
    cuts = [0, 11, 20] if work is vocabulary_rank else [0, 4, 9]
    for error in on_ranks(2, lambda comm: work(problem, cuts, comm, put=asarray, **options)):
        assert type(error) is ag.ParamInvalidError
        assert f"{next(iter(options))}: not supported over ranks for arrays on a device" in str(error)


#: Options that a device has over ranks. The names in values stand for arrays.
DEVICE_OPTIONS = {
    "weights": {"token_weight": "tokens", "class_weight": "classes"},
    "denominator": {"denominator": 7.5, "token_weight": "tokens"},
    "outputs": {"outputs": ("log_prob", "lse")},
    "gradients of outputs": {"grad_lse": "tokens", "grad_log_prob": "others", "outputs": ("lse",)},
    "all": {"token_weight": "tokens", "class_weight": "classes", "grad_lse": "others", "grad_log_prob": "tokens"},
}


def option_call(option, dtype, reduction):
    """Return a call on the host, whose options are arrays of float32."""
    problem = whole((25, 40, 9), dtype, reduction=reduction)
    random = np.random.default_rng(0)
    arrays = {
        "tokens": random.integers(0, 3, 25).astype(np.float32) / 2,
        "others": random.standard_normal(25).astype(np.float32),
        "classes": random.random(40).astype(np.float32),
    }
    options = {name: arrays[a] if isinstance(a, str) else a for name, a in DEVICE_OPTIONS[option].items()}
    a = {name: problem.arguments[name] for name in ("input", "weight", "target", "ignore_index", "reduction")}
    return a | options


def on_device(keywords):
    return {name: asarray(each) if isinstance(each, np.ndarray) else each for name, each in keywords.items()}


def assert_near(results, right, dtype):
    """Check results of ranks on devices, of which each has rounded its part of a gradient."""
    for each in results:
        for name in right._fields:
            value, expected = getattr(each, name), getattr(right, name)
            if expected is None:
                continue
            step = 2.0 ** (-8 if dtype == "bfloat16" else -11) if name.endswith("grad") else 1e-3
            scale = np.abs(expected).max(initial=0)
            np.testing.assert_allclose(
                value.astype(float), expected, rtol=4 * step, atol=4 * step * scale, err_msg=name
            )


def right_values(a):
    """Return the results of a call in float64, with the gradients of outputs added."""
    wide = a | {name: a[name].astype(np.float64) for name in ("input", "weight")}
    upstream = {name: wide.pop(name) for name in ("grad_lse", "grad_log_prob") if name in wide}
    right = ag.linear_cross_entropy(**wide, backend="cpu")
    if upstream:
        lse = ag.linear_cross_entropy(**wide | {"outputs": ("lse",)}, backend="cpu").lse
        del wide["reduction"]
        wide.pop("outputs", None)
        added = ag.linear_cross_entropy_backward(**wide, lse=lse, **upstream, backend="cpu")
        right = right._replace(
            input_grad=right.input_grad + added.input_grad, weight_grad=right.weight_grad + added.weight_grad
        )
    return right


@pytest.mark.parametrize("option", DEVICE_OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", ["device", "host"])
def test_options(option, dtype, place):
    """Options that a device has are computed there over ranks, on arrays of the device or of the host."""
    for reduction in REDUCTIONS:
        a = option_call(option, dtype, reduction)
        cuts = [0, 17, 17, 40]

        def work(comm, a=a, cuts=cuts):
            given, keywords = part_with_options(a, slice(cuts[comm.rank], cuts[comm.rank + 1]))
            if place == "host":
                return parallel.linear_cross_entropy(*given, comm=comm, backend="npu", **keywords)
            result = parallel.linear_cross_entropy(*map(asarray, given), comm=comm, **on_device(keywords))
            return result._replace(**{name: getattr(result, name).numpy() for name in result._fields})

        results = whole_with_options(returned(on_ranks(3, work)))
        assert all(each._fields[3:] == a.get("outputs", ()) for each in results)
        assert_near(results, right_values(a), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_options_on_a_grid(dtype):
    a = option_call("weights", dtype, "mean")

    def work(vocab_comm, comm):
        entries, tokens = (
            slice(20 * vocab_comm.rank, 20 * vocab_comm.rank + 20),
            slice(13 * comm.rank, 13 * comm.rank + 13),
        )
        given, keywords = part_with_options(a, entries, tokens)
        result = parallel.data_parallel_linear_cross_entropy(
            *map(asarray, given), comm=comm, vocab_comm=vocab_comm, **on_device(keywords)
        )
        return result._replace(**{name: getattr(result, name).numpy() for name in result._fields})

    results = on_grid(2, 2, work)
    returned(list(results.values()))
    assert_near(whole_of_grid(results, "mean"), right_values(a), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_from_statistics(device, dtype):
    a = option_call("all", dtype, "sum")
    wide = a | {name: a[name].astype(np.float64) for name in ("input", "weight")}
    for name in ("grad_lse", "grad_log_prob"):
        wide.pop(name)
    lse = ag.linear_cross_entropy(**wide, backend="cpu", return_grad=False, outputs=("lse",)).lse
    a |= {"lse": lse.astype(np.float32), "grad_loss": 0.5}
    right = ag.linear_cross_entropy_backward(
        **a | {name: wide[name] for name in ("input", "weight")}, backend="cpu"
    )  # fmt: skip

    def work(comm):
        given, keywords = part_with_options(a, slice(20 * comm.rank, 20 * comm.rank + 20))
        return parallel.linear_cross_entropy_backward(*map(asarray, given), comm=comm, **on_device(keywords))

    results = returned(on_ranks(2, work))
    weight_grad = np.concatenate([each.weight_grad.numpy() for each in results])
    for each in results:
        assert_near([each._replace(input_grad=each.input_grad.numpy(), weight_grad=weight_grad)], right, dtype)


def test_the_largest_log_probabilities_are_refused():
    a = whole((9, 20, 4), "float16").arguments
    for error in on_ranks(
        2,
        lambda comm: parallel.linear_top_k(
            asarray(a["input"]), asarray(a["weight"][comm.rank * 10 :][:10]), 2, comm=comm
        ),
    ):
        assert type(error) in (ag.UnsupportedDeviceError, parallel.RankError)
        assert "the function is not implemented for the NPU" in str(error)


@pytest.mark.parametrize("function", [parallel.linear_cross_entropy, parallel.data_parallel_linear_cross_entropy])
def test_a_device_that_fails(device, function):
    """If a call of the runtime fails on one rank, no rank is left waiting, and no rank returns a result."""
    x, w, target = (whole((9, 20, 4), "float16").arguments[name] for name in ("input", "weight", "target"))
    if function is parallel.linear_cross_entropy:
        parts = [(x, w[:11], target), (x, w[11:], target)]
    else:
        parts = [(x[:5], w, target[:5]), (x[5:], w, target[5:])]
    there = [[asarray(each) for each in part] for part in parts]
    kinds, nth, is_reached = set(), 0, True
    while is_reached:
        nth += 1
        device.reset()
        device.fail("*", nth)
        outcomes = on_ranks(2, lambda comm: function(*there[comm.rank], comm=comm, ignore_index=-7))
        is_reached = device.faults_left() == 0
        device.reset()
        raised = [type(each) for each in outcomes if isinstance(each, BaseException)]
        assert len(raised) in (0, 2), (nth, outcomes)
        kinds.update(raised)
    assert kinds == {ag.AclError, parallel.RankError}
    assert nth > 50


def test_arrays_in_different_memory():
    problem = whole((9, 20, 4), "float16")

    def work(comm):
        return vocabulary_rank(problem, [0, 11, 20], comm, put=asarray if comm.rank else None)

    (text,) = {str(error) for error in on_ranks(2, work)}
    assert (
        "memory of input: expected the same on every rank, got on the host on rank 0 and on a device on rank 1" in text
    )
