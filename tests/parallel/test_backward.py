"""Compare gradients from given statistics over ranks with the gradients of one process."""

from __future__ import annotations

import numpy as np
import pytest
from linear_samples import Shape
from loss_samples import OPTIONS, arguments_of
from parallel_samples import joined, part_with_options
from samples import DTYPES, assert_identical, generator
from thread_ranks import Group, on_ranks, returned

import ascend_grad as ag
from ascend_grad import parallel
from ascend_grad.parallel import chunking

SHAPE, CUTS = Shape(41, 50, 20), [0, 17, 17, 45, 50]


def arguments(option, dtype="float64", reduction="mean"):
    """Return a call of the gradients: a call of the loss, with its statistics and upstream gradients of its outputs."""
    a = arguments_of(SHAPE, dtype, option, reduction, start=0)
    del a["vocab_start_index"]
    a.pop("outputs", None)
    statistics = ag.linear_cross_entropy(**a, return_grad=False, outputs=("lse", "entropy"))
    random = generator("gradients over ranks", option)
    a |= {"lse": statistics.lse, "entropy": statistics.entropy}
    for name in ("grad_lse", "grad_log_prob", "grad_entropy"):
        a[name] = random.standard_normal(a["target"].shape if name == "grad_log_prob" else SHAPE.BT)
    return a


def solve(a, cuts=CUTS, group=None, **more):
    def work(comm):
        given, keywords = part_with_options(a, slice(cuts[comm.rank], cuts[comm.rank + 1]))
        return parallel.linear_cross_entropy_backward(*given, comm=comm, **keywords | more)

    return returned(on_ranks(len(cuts) - 1, work, group))


def check(results, right, share=True, **tolerance):
    weight_grad, bias_grad = (
        joined([getattr(each, name) for each in results]) for name in ("weight_grad", "bias_grad")
    )
    inputs = [each.input_grad for each in results]
    if share == "scatter":
        inputs = [np.concatenate(inputs)]
    elif share is False:
        inputs = [sum(inputs)]
    for input_grad in inputs:
        for value, expected in zip((input_grad, weight_grad, bias_grad), right):
            assert (value is None) == (expected is None)
            if value is not None:
                assert value.dtype == expected.dtype
                np.testing.assert_allclose(value.astype(float), expected.astype(float), **tolerance)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("option", OPTIONS)
def test_options(option, backend):
    for reduction in ("mean", "none"):
        a = arguments(option, reduction=reduction)
        right = ag.linear_cross_entropy_backward(**a)
        check(solve(a, backend=backend), right, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("share", [True, False, "scatter"])
@pytest.mark.parametrize("chunk_rows", [512, 9])
def test_shares_and_row_chunks(monkeypatch, share, chunk_rows):
    monkeypatch.setattr(chunking, "CHUNK_ROWS", chunk_rows)
    a = arguments("all")
    right = ag.linear_cross_entropy_backward(**a)
    check(solve(a, reduce_input_grad=share), right, share, rtol=1e-11, atol=1e-12)


def test_dtypes(dtype):
    a = arguments("bias", dtype, "sum")
    step = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    right = ag.linear_cross_entropy_backward(**a)
    assert right.input_grad.dtype == DTYPES[dtype]
    check(solve(a), right, rtol=step, atol=20 * step)


def test_one_upstream_gradient():
    """An upstream gradient that is not given is 0, also that of the loss."""
    a = arguments("tokens and classes")
    for name in ("grad_loss", "grad_lse", "grad_log_prob", "grad_entropy"):
        one = {key: each for key, each in a.items() if not key.startswith("grad_") or key == name}
        check(solve(one), ag.linear_cross_entropy_backward(**one), rtol=1e-11, atol=1e-12)


def test_the_same_bits():
    a = arguments("classes and smoothing", "float32")
    for first, second in zip(solve(a, deterministic=True), solve(a, deterministic=True)):
        for value, expected in zip(first[:2], second[:2]):
            assert_identical(value, expected)


def test_operations():
    """Statistics are not communicated; class weights of targets on other ranks are."""
    for option, others in (("bias", []), ("classes", [("sum", (41, 1))])):
        group = Group(2)
        solve(arguments(option), [0, 20, 50], group)
        assert group.operations == [("allgather", (1024,)), *others, ("sum", (41 * 20 + 1,))]


@pytest.mark.parametrize(
    ("other", "kind", "text"),
    [
        ({"lse": None}, ag.ParamNullptrError, "lse: expected an array, got None"),
        ({"lse": np.zeros(3)}, ag.ParamInvalidError, "lse: expected shape"),
        ({"entropy": None}, ag.ParamNullptrError, "entropy: expected an array, as grad_entropy is given"),
    ],
)
def test_a_bad_argument(other, kind, text):
    a = arguments("no option")

    def work(comm):
        given, keywords = part_with_options(a, slice(CUTS[comm.rank], CUTS[comm.rank + 1]))
        return parallel.linear_cross_entropy_backward(*given, comm=comm, **keywords | (other if comm.rank == 1 else {}))

    results = on_ranks(4, work)
    assert type(results[1]) is kind
    assert f"parallel.linear_cross_entropy_backward: {text}" in str(results[1])
    assert {type(results[rank]) for rank in (0, 2, 3)} == {parallel.RankError}


def test_statistics_that_differ_between_ranks():
    a = arguments("no option")

    def work(comm):
        given, keywords = part_with_options(a, slice(CUTS[comm.rank], CUTS[comm.rank + 1]))
        keywords["lse"] = keywords["lse"] + comm.rank
        return parallel.linear_cross_entropy_backward(*given, comm=comm, **keywords)

    for error in on_ranks(4, work):
        assert type(error) is ag.ParamInvalidError
        assert "lse: expected the same on every rank, got checksum" in str(error)
