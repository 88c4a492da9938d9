"""Compare a vocabulary that is split over ranks with the undivided problem in float64."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_samples import KINDS
from parallel_samples import even_cuts, of_vocabulary, vocabulary_rank, whole, whole_with_options, with_options
from samples import DTYPES, assert_identical, generator
from thread_ranks import Group, on_ranks, returned

import ascend_grad as ag
from ascend_grad import parallel
from ascend_grad.parallel import chunking, part_backend, shard

SHARES = (True, False, "scatter")


def solve(problem, cuts, **options):
    return returned(on_ranks(len(cuts) - 1, lambda comm: vocabulary_rank(problem, cuts, comm, **options)))


def check(engine, problem, cuts, share=True, **options):
    results = solve(problem, cuts, reduce_input_grad=share, **options)
    for each in of_vocabulary(results, share):
        engine.assert_solved(problem, each)
    return results


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_every_dtype(default_engine, dtype, size, share, deterministic):
    problem = whole((33, 50, 17), dtype)
    check(default_engine, problem, even_cuts(50, size), share, deterministic=deterministic)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"tiny", "huge"}))
def test_any_data(default_engine, dtype, kind):
    check(default_engine, whole((21, 70, 33), dtype, kind=kind), [0, 3, 50, 70])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    ("shape", "cuts"),
    [
        ((19, 40, 8), [0, 1, 39, 40]),  # the shards have very different sizes
        ((1, 12, 5), [0, 7, 12]),  # only one of the two ranks has the only token's target
        ((1, 1, 1), [0, 0, 1, 1]),
        ((6, 2, 3), [0, 1, 2, 2, 2]),  # two entries are split over four ranks
        ((0, 4, 3), [0, 2, 4]),
        ((5, 0, 3), [0, 0, 0]),
        ((5, 4, 0), [0, 2, 4]),
    ],
)
def test_edges(default_engine, shape, cuts, reduction):
    problem = whole(shape, "float32", reduction=reduction)
    for share in SHARES:
        check(default_engine, problem, cuts, share)


def test_a_shard_without_a_target(default_engine):
    problem = whole((9, 20, 4), "float64")
    target = np.arange(9) % 7
    check(default_engine, problem.replaced(target=target), [0, 7, 14, 20])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_tokens_are_ignored(reduction):
    problem = whole((9, 20, 4), "float32", reduction=reduction)
    problem = problem.replaced(target=np.full(9, -7), input=np.full((9, 4), np.nan, np.float32))
    for loss, input_grad, weight_grad in solve(problem, [0, 7, 20]):
        assert np.isnan(loss).all() if reduction == "mean" else not loss.any()
        assert not input_grad.any()
        assert not weight_grad.any()


def test_an_ignored_id_of_the_vocabulary(default_engine):
    problem = whole((30, 5, 4), "float32")
    target = np.arange(30) % 5
    check(default_engine, problem.replaced(target=target, ignore_index=3), [0, 2, 5])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_logits_that_are_no_finite_numbers(dtype):
    """Infinite and NaN logits on any rank give the results of the undivided problem."""
    x = np.array([[1, 0], [0, 1], [1, 1], [-1, 0]], dtype)
    special = [(-np.inf, 0), (0, -np.inf), (np.nan, 0), (0, np.inf), (-np.inf, -np.inf), (np.inf, np.inf)]
    for first in special:
        for second in (*special, (1, 2)):
            w = np.array([(0, 1), first, second, (2, 1), (1, -1), (0, 0)], dtype)
            for target in ([0, 1, 2, 3], [1, 1, 1, 1], [2, 2, 2, 2], [5, 5, 5, 5]):
                right = ag.linear_cross_entropy(x, w, np.array(target), reduction="none", backend="reference")
                for cuts in ([0, 1, 2, 6], [0, 2, 6], [0, 3, 3, 6]):
                    results = returned(
                        on_ranks(
                            len(cuts) - 1,
                            lambda comm, cuts=cuts, w=w, target=target: parallel.linear_cross_entropy(
                                x, w[cuts[comm.rank] : cuts[comm.rank + 1]], np.array(target), comm=comm,
                                reduction="none",
                            ),
                        )
                    )  # fmt: skip
                    for each in of_vocabulary(results):
                        for value, expected in zip(each, right):
                            np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)


def nearly_certain(dtype, entries):
    """Return logits (BT, entries) with targets whose 1 - p is from 0.3 down to 1e-14, and this 1 - p in longdouble."""
    distances = np.repeat([4.5, 6, 8, 12, 16, 20, 24, 28, 33, 37], 3)
    target = np.tile([0, entries // 2, entries - 1], 10)
    logits = generator("nearly certain", entries).integers(-80, -70, (30, entries)) / 4
    logits[np.arange(30), target] = logits.max(-1) + distances
    exact = logits.astype(np.longdouble)
    terms = np.exp(exact - exact[np.arange(30), target][:, None])
    terms[np.arange(30), target] = 0
    rest = terms.sum(-1)
    return logits.astype(DTYPES[dtype]), target, rest / (1 + rest)


@pytest.mark.parametrize("cuts", [[0, 90], [0, 45, 90], [0, 1, 89, 90]])
@pytest.mark.parametrize("are_cached", [True, False])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_nearly_certain_targets(monkeypatch, dtype, cuts, are_cached, backend):
    """Losses and the gradient at the target keep a relative error of 1e-4, with logits cached or computed twice."""
    if are_cached:
        monkeypatch.setattr(chunking, "MIN_FEATURES_TO_CACHE_16_BITS", 0)
    else:
        small_workspace(monkeypatch, 1000, 7)
    logits, target, complement = nearly_certain(dtype, cuts[-1])
    tokens = len(target)
    losses = -np.log1p(-complement)
    # `input` is the identity matrix, so that `weight_grad` is the transposed gradient with respect to the logits.
    call = {"input": np.eye(tokens).astype(DTYPES[dtype]), "weight": np.ascontiguousarray(logits.T), "target": target}
    absolute, relative = {"float16": (2**-24, 2**-10), "bfloat16": (0, 2**-7)}.get(dtype, (0, 0))
    for reduction, right in {"mean": losses.mean(), "sum": losses.sum(), "none": losses}.items():
        grad = complement / (tokens if reduction == "mean" else 1)
        for each in whole_with_options(with_options(call, cuts, reduction=reduction, backend=backend)):
            np.testing.assert_allclose(each.loss, right.astype(float), rtol=1e-4)
            at_target = -each.weight_grad[target, np.arange(tokens)].astype(float)
            np.testing.assert_allclose(at_target, grad.astype(float), rtol=1e-4 + relative, atol=absolute)


@st.composite
def problems(draw):
    shape = draw(st.integers(0, 40)), draw(st.integers(0, 60)), draw(st.integers(0, 20))
    problem = whole(
        shape, draw(st.sampled_from(sorted(DTYPES))), reduction=draw(st.sampled_from(["mean", "sum", "none"]))
    )
    size = draw(st.integers(1, 5))
    cuts = [0, *sorted(draw(st.lists(st.integers(0, shape[1]), min_size=size - 1, max_size=size - 1))), shape[1]]
    return problem, cuts


@given(
    problems(), st.sampled_from(SHARES), st.booleans(), st.integers(1, 40), st.integers(1, 10**5), st.integers(0, 20),
    st.booleans(),
)  # fmt: skip
@settings(max_examples=100)
def test_any_problem(
    default_engine, monkeypatch, drawn, share, deterministic, chunk_rows, workspace, features, with_indices
):
    problem, cuts = drawn
    small_workspace(monkeypatch, workspace, chunk_rows)
    monkeypatch.setattr(chunking, "MIN_FEATURES_TO_CACHE_16_BITS", features)

    def work(comm):
        indices = {"vocab_start_index": cuts[comm.rank], "vocab_size": cuts[-1]} if with_indices else {}
        return vocabulary_rank(problem, cuts, comm, reduce_input_grad=share, deterministic=deterministic, **indices)

    for each in of_vocabulary(returned(on_ranks(len(cuts) - 1, work)), share):
        default_engine.assert_solved(problem, each)


@pytest.mark.parametrize("share", SHARES)
def test_the_same_bits(dtype, share):
    """Deterministic results have the same bits in every run, though the test double adds in a new order each time."""
    problem, cuts = whole((37, 61, 19), dtype), [0, 20, 33, 61]
    group = Group(3)
    runs = [
        returned(
            on_ranks(
                3,
                lambda comm: vocabulary_rank(problem, cuts, comm, reduce_input_grad=share, deterministic=True),
                group,
            )
        )
        for _ in range(4)
    ]
    for run in runs:
        for rank, (loss, input_grad, weight_grad) in enumerate(run):
            assert_identical(loss, runs[0][0].loss)
            assert_identical(input_grad, runs[0][0 if share is True else rank].input_grad)
            assert_identical(weight_grad, runs[0][rank].weight_grad)


def test_shards_in_any_order(default_engine):
    problem = whole((9, 20, 4), "float32")
    entries = [slice(12, 20), slice(0, 5), slice(5, 5), slice(5, 12)]

    def work(comm):
        a = problem.arguments
        own = entries[comm.rank]
        return parallel.linear_cross_entropy(
            a["input"], a["weight"][own], a["target"], comm=comm, vocab_start_index=own.start, ignore_index=-7,
            grad_loss=0.7,
        )  # fmt: skip

    results = returned(on_ranks(4, work))
    weight_grad = np.concatenate([results[rank].weight_grad for rank in (1, 2, 3, 0)])
    for loss, input_grad, _ in results:
        default_engine.assert_solved(problem, (loss, input_grad, weight_grad))


@pytest.mark.parametrize("mask", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("return_grad", [True, False])
def test_gradients_that_are_not_asked_for(default_engine, mask, return_grad):
    problem = whole((9, 20, 4), "float32")
    results = solve(problem, [0, 7, 20], output_mask=mask, return_grad=return_grad)
    right = solve(problem, [0, 7, 20])
    for each, full in zip(results, right):
        assert_identical(each.loss, full.loss)
        assert (each.input_grad is not None, each.weight_grad is not None) == tuple(return_grad and m for m in mask)


def operations(problem, cuts, **options):
    """Return the collective operations of a call, without the comparison of arguments."""
    group = Group(len(cuts) - 1)
    returned(on_ranks(len(cuts) - 1, lambda comm: vocabulary_rank(problem, cuts, comm, **options), group))
    first, *others = group.operations
    assert first == ("allgather", (1024,))
    return others


def test_operations():
    """Calls make the documented collective operations, with the documented sizes."""
    problem, cuts = whole((40, 12, 3), "float32"), [0, 5, 12]
    statistics = [("max", (40,)), ("sum", (40, 5))]
    assert operations(problem, cuts) == [*statistics, ("sum", (121,))]
    assert operations(problem, cuts, return_grad=False) == [*statistics, ("sum", (1,))]
    assert operations(problem, cuts, reduce_input_grad=False) == [*statistics, ("sum", (1,))]
    gathered = [statistics[0], ("allgather", (40, 5)), ("sum", (1,))]
    parts = [("allgather", (20, 3))] * 3
    assert operations(problem, cuts, deterministic=True) == [*gathered, *parts, ("sum", (1,))]
    assert operations(problem, cuts, deterministic=True, reduce_input_grad="scatter") == [*gathered, *parts[:2]]


@pytest.mark.parametrize(("chunk_rows", "chunks"), [(10, [10] * 4), (14, [20, 20]), (9, [10] * 4), (21, [40])])
def test_row_chunks(monkeypatch, chunk_rows, chunks):
    """The input gradient of a row chunk is communicated before the statistics of the next chunk are computed."""
    monkeypatch.setattr(chunking, "CHUNK_ROWS", chunk_rows)
    expected = []
    for rows in chunks:
        expected += [("max", (rows,)), ("sum", (rows, 5)), ("sum", (3 * rows,))]
    expected[-1] = ("sum", (3 * chunks[-1] + 1,))
    assert operations(whole((40, 12, 3), "float32"), [0, 5, 12]) == expected


def small_workspace(monkeypatch, size, chunk_rows):
    monkeypatch.setattr(shard, "default_workspace_bytes", lambda *_: size)
    monkeypatch.setattr(chunking, "CHUNK_ROWS", chunk_rows)


@pytest.mark.parametrize(
    ("size", "dtype", "expected"),
    [
        (12000, "float32", {(100, 30, True), (50, 30, True)}),  # 30 rows of 100 logits fit into 12000 bytes
        (11999, "float32", {(100, 15, True), (50, 15, True)}),
        (4000, "float32", {(100, 10, True), (50, 10, True)}),
        (1600, "float32", {(100, 30, False), (50, 30, False)}),  # 4 rows of logits are too few for a chunk
        (12000, "float64", {(100, 15, True), (50, 15, True)}),
        (12000, "bfloat16", {(100, 30, True), (50, 30, True)}),  # logits of 16 bits are cached in float32
        (4000, "float16", {(100, 10, True), (50, 10, True)}),
    ],
)
def test_logits_are_kept_where_there_is_room(default_engine, monkeypatch, size, dtype, expected):
    """Logits of a row chunk are cached if they fit on the rank with the most vocabulary entries."""
    kept = set()
    original = part_backend._linear_python.part_statistics

    def statistics(input, weight, target, options, logits, *args):
        kept.add((len(weight), len(input), logits is not None))
        return original(input, weight, target, options, logits, *args)

    monkeypatch.setattr(part_backend._linear_python, "part_statistics", statistics)
    small_workspace(monkeypatch, size, 10)
    problem, is_wide = whole((30, 150, 7), dtype), dtype in ("float32", "float64")
    for least, is_cached in ((7, True), (8, is_wide)):
        monkeypatch.setattr(chunking, "MIN_FEATURES_TO_CACHE_16_BITS", least)
        kept.clear()
        check(default_engine, problem, [0, 100, 150], "scatter")
        assert kept == (expected if is_cached else {(100, 30, False), (50, 30, False)})


def test_weight_gradients_of_16_bits_need_room_to_be_added_up(monkeypatch, dtype):
    """Weight gradients of 16 bits are summed in a temporary array.

    If the temporary array does not fit into the workspace, all rows are one chunk.
    """
    narrow = dtype in ("float16", "bfloat16")
    for size, chunks in ((40 * 3 * 4, 4), (40 * 3 * 4 - 1, 1 if narrow else 4)):
        small_workspace(monkeypatch, size, 10)
        ranks = operations(whole((40, 60, 3), dtype), [0, 20, 60])
        assert len([name for name, _ in ranks if name == "max"]) == chunks


@pytest.mark.parametrize("size", [1, 100, 1000, 10000])
def test_vocabulary_blocks_of_weight_gradients(default_engine, monkeypatch, dtype, size):
    small_workspace(monkeypatch, size, 10)
    check(default_engine, whole((33, 150, 7), dtype), [0, 100, 150])


def test_not_too_many_chunks(monkeypatch):
    """The number of chunks is limited, as the chunks' weight gradients are added without compensation."""
    small_workspace(monkeypatch, 4 * 60, 1)  # the workspace holds the logits of one row
    assert len(operations(whole((64, 60, 3), "float32"), [0, 60, 60], reduce_input_grad=False)) == 2 * 64 + 1
    assert len(operations(whole((65, 60, 3), "float32"), [0, 60, 60], reduce_input_grad=False)) == 2 + 1


def test_inputs_stay_and_results_are_new():
    problem, cuts = whole((9, 20, 4), "float32"), [0, 7, 20]
    before = {name: array.copy() for name, array in problem.arrays.items()}
    for result in solve(problem, cuts):
        for array in result:
            assert array.flags.writeable or isinstance(array, np.generic)
            assert not any(np.shares_memory(array, own) for own in problem.arrays.values())
    for name, array in problem.arrays.items():
        assert_identical(array, before[name])


def test_any_layout(default_engine):
    problem = whole((9, 20, 4), "float32")
    a = problem.arguments
    other = problem.replaced(
        input=np.asfortranarray(a["input"]), weight=a["weight"].astype(">f4"), target=a["target"].astype(">i4")
    )
    for one, two in zip(solve(problem, [0, 7, 20], deterministic=True), solve(other, [0, 7, 20], deterministic=True)):
        for first, second in zip(one, two):
            assert_identical(first, second)


def test_the_other_backend(default_engine):
    problem, cuts = whole((9, 20, 4), "float32"), [0, 7, 20]
    for each in of_vocabulary(solve(problem, cuts, backend="reference")):
        default_engine.assert_solved(problem, each)


@given(st.integers(0, 10**6), st.integers(1, 100))
def test_ranges(vocab_size, size):
    ranges = [parallel.vocab_range(vocab_size, rank, size) for rank in range(size)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == vocab_size
    assert all(before[1] == after[0] for before, after in pairwise(ranges))
    lengths = [stop - start for start, stop in ranges]
    assert sorted(lengths, reverse=True) == lengths
    assert lengths[0] - lengths[-1] <= 1
