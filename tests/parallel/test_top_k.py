"""Compare the largest log-probabilities over ranks with the log-probabilities of one process."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import DTYPES, assert_identical, generator
from thread_ranks import Group, on_ranks, returned

import ascend_grad as ag
from ascend_grad import parallel

OPTIONS = {
    "none": {},
    "bias": {"bias": "entries"},
    "all": {"bias": "entries", "temperature": "tokens", "logit_scale": -1.5, "softcap": 3.0},
    "temperature": {"temperature": 0.25},
}


def call_of(shape, dtype, option="none", kind="normal"):
    tokens, entries, features = shape
    random = generator("top k over ranks", shape, option, kind)
    x, w = random.standard_normal((tokens, features)), random.standard_normal((entries, features))
    if kind == "ties":
        x, w = np.rint(x), np.rint(w / 2)
    arrays = {"entries": random.standard_normal(entries), "tokens": 0.3 + random.random(tokens)}
    options = {name: arrays[value] if isinstance(value, str) else value for name, value in OPTIONS[option].items()}
    return {"input": x.astype(DTYPES[dtype]), "weight": w.astype(DTYPES[dtype]), **options}


def solve(call, k, cuts, group=None, **more):
    def work(comm):
        own, a = slice(cuts[comm.rank], cuts[comm.rank + 1]), dict(call)
        if "bias" in a:
            a["bias"] = a["bias"][own]
        return parallel.linear_top_k(a.pop("input"), a.pop("weight")[own], k, comm=comm, num_threads=1, **a | more)

    return returned(on_ranks(len(cuts) - 1, work, group))


def check(call, k, cuts, **more):
    right = ag.linear_top_k(
        call["input"], call["weight"], k, **{n: v for n, v in call.items() if n not in ("input", "weight")}
    )
    step = 1e-12 if call["input"].dtype == np.float64 else 1e-6
    for each in solve(call, k, cuts, **more):
        assert each.log_prob.dtype == right.log_prob.dtype
        np.testing.assert_array_equal(each.index, right.index)
        np.testing.assert_allclose(each.log_prob, right.log_prob, rtol=step, atol=step)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("k", [1, 5, 50])
def test_options(option, k, dtype):
    for cuts in ([0, 50], [0, 17, 17, 45, 50], [0, 1, 2, 50]):
        check(call_of((21, 50, 8), dtype, option), k, cuts)


def test_the_reference():
    check(call_of((21, 50, 8), "float64", "all"), 7, [0, 3, 50], backend="reference")


@pytest.mark.parametrize("shape", [(0, 5, 3), (4, 1, 3), (3, 6, 0), (300, 400, 64)])
def test_shapes(shape):
    check(call_of(shape, "float64"), 1, [0, shape[1] // 2, shape[1]])


def test_ties(dtype):
    """Of equal logits the lower id comes first, whatever ranks they are on and in whatever order these are."""
    call = call_of((30, 60, 2), dtype, kind="ties")
    check(call, 20, [0, 13, 31, 60])
    right = ag.linear_top_k(call["input"], call["weight"], 20)
    parts = [slice(31, 60), slice(0, 13), slice(13, 31)]

    def work(comm):
        own = parts[comm.rank]
        return parallel.linear_top_k(call["input"], call["weight"][own], 20, comm=comm, vocab_start_index=own.start)

    for each in returned(on_ranks(3, work)):
        np.testing.assert_array_equal(each.index, right.index)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_logits_that_are_no_finite_numbers(dtype, backend):
    bias = np.zeros(12)
    x, w = np.ones((4, 1), dtype), np.linspace(-1, 1, 12).astype(dtype)[:, None]
    for value in (np.nan, np.inf, -np.inf):
        for places in ([0], [11], [3, 4, 5], list(range(4)), list(range(12))):
            call = {"input": x, "weight": w, "bias": bias.copy()}
            call["bias"][places] = value
            for cuts in ([0, 12], [0, 4, 8, 12], [0, 1, 12]):
                check(call, 10, cuts, backend=backend)


@given(st.integers(1, 9), st.integers(1, 40), st.integers(0, 6), st.data())
@settings(max_examples=50)
def test_any_problem(tokens, entries, features, data):
    kinds = (sorted(DTYPES), sorted(OPTIONS), ["normal", "ties"])
    call = call_of((tokens, entries, features), *(data.draw(st.sampled_from(each)) for each in kinds))
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, entries), max_size=4))), entries]
    check(call, data.draw(st.integers(1, entries)), cuts)


def test_nearly_certain(dtype):
    """The log-probability of an almost certain entry has a small relative error."""
    w = np.zeros((9, 1), DTYPES[dtype])
    w[4] = 20
    right = -np.log1p(8 * np.exp(-20.0))
    for each in solve({"input": np.ones((2, 1), DTYPES[dtype]), "weight": w}, 1, [0, 2, 5, 9]):
        np.testing.assert_allclose(each.log_prob, right, rtol=1e-5)


def test_every_rank_has_the_same_bits():
    group = Group(3)
    first, *others = solve(call_of((21, 50, 8), "float32", "all"), 5, [0, 9, 30, 50], group)
    for each in others:
        assert_identical(each.log_prob, first.log_prob)
        assert_identical(each.index, first.index)
    assert group.operations == [("allgather", (1024,)), ("allgather", (21, 12)), ("sum", (1,))]


@pytest.mark.parametrize(
    ("k", "more", "kind", "text"),
    [
        (0, {}, ag.ParamInvalidError, "k: expected an int of at least 1"),
        (51, {}, ag.ParamInvalidError, "k: expected an int in [1, 50], got 51"),
        (10**9, {}, ag.ParamInvalidError, "k: expected an int in [1, 50], got 1000000000"),
        (1.0, {}, ag.ParamTypeError, "k: expected an int"),
        (1, {"temperature": -1.0}, ag.ParamInvalidError, "temperature: expected"),
        (1, {"workspace_bytes": 5}, ag.ParamInvalidError, "workspace_bytes: expected"),
        (1, {"vocab_size": 49}, ag.ParamInvalidError, "expected 50, the sum of the rows of all shards, got 49"),
        (1, {"backend": "npu"}, ag.AscendGradError, ""),
    ],
)
def test_a_bad_argument(k, more, kind, text):
    with pytest.raises(kind) as raised:
        solve(call_of((4, 50, 3), "float32"), k, [0, 50], **more)
    assert text in str(raised.value)


def test_arguments_that_differ_between_ranks():
    call = call_of((4, 50, 3), "float32")
    for name, values in {
        "k": (1, 2),
        "temperature": (1.0, 2.0),
        "softcap": (None, 1.0),
        "logit_scale": (1.0, 2.0),
    }.items():

        def work(comm, name=name, values=values):
            more = {"k": 1} | {name: values[comm.rank]}
            own = slice(25 * comm.rank, 25 * comm.rank + 25)
            return parallel.linear_top_k(call["input"], call["weight"][own], comm=comm, **more)

        for error in on_ranks(2, work):
            assert type(error) is ag.ParamInvalidError
            assert f"{name}: expected the same on every rank" in str(error)


def test_a_rank_that_fails(monkeypatch):
    """Every rank raises, and none is left waiting."""
    from ascend_grad.parallel import top_k

    def failing(self):
        if self._ranks.rank == 1:
            raise MemoryError("no room")

    monkeypatch.setattr(top_k._Part, "find_largest", failing)
    call = call_of((4, 50, 3), "float32")

    def work(comm):
        own = slice(25 * comm.rank, 25 * comm.rank + 25)
        return parallel.linear_top_k(call["input"], call["weight"][own], 3, comm=comm)

    assert [type(each) for each in on_ranks(2, work)] == [parallel.RankError, MemoryError]
