"""Test bad arguments, disagreements and errors of one rank: every rank raises, and no rank is left waiting.

The ranks are threads of a test double. A rank that waits for an ended rank raises `LeftWaitingError`, which no test
but the first expects.
"""

from __future__ import annotations

import pickle
import threading
import warnings

import numpy as np
import pytest
from parallel_samples import tokens_rank, vocabulary_rank, whole
from thread_ranks import LeftWaitingError, ThreadRank, on_grid, on_ranks

import ascend_grad as ag
from ascend_grad import parallel
from ascend_grad.parallel import chunking, part_backend, row_chunk, sums
from ascend_grad.parallel import shard as shard_module

PROBLEM = whole((9, 20, 4), "float32")
CUTS = [0, 7, 12, 20]
ROWS = [0, 4, 7, 9]
A = PROBLEM.arguments


def vocabulary(*others, **options):
    """Call the function on every rank. Only the ranks in `others` get these options."""

    def work(comm):
        return vocabulary_rank(PROBLEM, CUTS, comm, **(options if comm.rank in others else {}))

    return on_ranks(3, work)


def tokens(*others, problem=PROBLEM, **options):
    return on_ranks(3, lambda comm: tokens_rank(problem, ROWS, comm, **(options if comm.rank in others else {})))


def test_a_rank_that_ends_before_the_others():
    """The test double raises an error on ranks that wait for an ended rank. The tests below rely on this error."""

    def work(comm):
        for _ in range(comm.rank):
            comm.allgather(np.zeros(1))
        return comm.rank

    results = on_ranks(3, work)
    assert results[0] == 0
    assert [type(each) for each in results[1:]] == [LeftWaitingError] * 2


# ---- errors of one rank ----------------------------------------------------------------------------------------------

BAD = [
    ({"reduction": "average"}, ag.ParamInvalidError, "reduction: expected 'mean', 'sum' or 'none', got str 'average'"),
    ({"ignore_index": 1.5}, ag.ParamTypeError, "ignore_index: expected an int, got float 1.5"),
    ({"deterministic": 1}, ag.ParamTypeError, "deterministic: expected True or False, got 1"),
    ({"return_grad": None}, ag.ParamTypeError, "return_grad: expected True or False, got None"),
    ({"output_mask": (True,)}, ag.ParamTypeError, "output_mask: expected two of True or False, got tuple"),
    ({"workspace_bytes": 5}, ag.ParamInvalidError, "workspace_bytes: expected an int of at least"),
    ({"filter_eps": -1.0}, ag.ParamInvalidError, "filter_eps: expected a finite number that is not negative, got -1.0"),
    ({"vocab_start_index": -1}, ag.ParamInvalidError, "vocab_start_index: expected None or an int in"),
    ({"vocab_start_index": "0"}, ag.ParamTypeError, "vocab_start_index: expected None or an int, got str '0'"),
    ({"vocab_size": 2.0}, ag.ParamTypeError, "vocab_size: expected None or an int, got float 2.0"),
    ({"grad_loss": [1.0, 2.0]}, ag.ParamTypeError, "grad_loss: expected a real number, as reduction is 'mean'"),
    ({"backend": "gpu"}, ag.ParamInvalidError, "backend: expected one of"),
    ({"num_threads": 0}, ag.ParamInvalidError, "num_threads: expected None or an int in"),
]


@pytest.mark.parametrize(("options", "kind", "text"), BAD, ids=lambda value: str(value)[:20])
@pytest.mark.parametrize("call", [vocabulary, tokens])
def test_a_bad_argument(call, options, kind, text):
    results = call(1, **options)
    assert type(results[1]) is kind
    assert text in str(results[1])
    for rank in (0, 2):
        assert type(results[rank]) is parallel.RankError
        assert results[rank].rank == 1
        assert f"rank 1 failed: {kind.__name__}: " in str(results[rank])
        assert text in str(results[rank])


@pytest.mark.parametrize("call", [vocabulary, tokens])
def test_a_backend_that_cannot_be_used(call):
    results = call(1, backend="npu")
    assert type(results[1]) is ag.BackendUnavailableError
    assert str(results[1]).startswith("parallel.")
    assert [type(results[rank]) for rank in (0, 2)] == [parallel.RankError] * 2


@pytest.mark.parametrize("options", [{"backend": "gpu"}, {"num_threads": 0}])
def test_a_rank_without_entries_checks_its_arguments(options):
    def work(comm):
        return vocabulary_rank(PROBLEM, [0, 20, 20], comm, **(options if comm.rank == 1 else {}))

    results = on_ranks(2, work)
    assert [type(each) for each in results] == [parallel.RankError, ag.ParamInvalidError]
    assert next(iter(options)) in str(results[0])


@pytest.mark.parametrize("share", [True, "scatter"])
@pytest.mark.parametrize("kind", [sums.VectorSums, sums.MatrixSum])
def test_no_memory_for_what_arrives(monkeypatch, kind, share):
    """If one rank lacks memory for received data, every rank raises, since the rank allocates before others wait."""

    class Failing(kind):
        def __init__(self, ranks, *args):
            super().__init__(ranks, *args)
            if ranks.rank == 1:
                raise MemoryError("no room")

    monkeypatch.setattr(shard_module, kind.__name__, Failing)
    results = vocabulary(0, 1, 2, deterministic=True, reduce_input_grad=share)
    assert type(results[1]) is MemoryError
    assert [type(results[rank]) for rank in (0, 2)] == [parallel.RankError] * 2


@pytest.mark.parametrize("share", ["gather", "", 1, None, 2.0])
def test_a_bad_share(share):
    expected = r"reduce_input_grad: expected True, False or 'scatter'|reduce_input_grad: expected True or False, got"
    with pytest.raises(ag.ParamInvalidError, match=expected):
        vocabulary_rank(PROBLEM, [0, 20], OneRank(), reduce_input_grad=share)
    with pytest.raises(ag.ParamInvalidError, match=r"reduce_weight_grad: expected True or 'scatter', got"):
        tokens_rank(PROBLEM, [0, 9], OneRank(), reduce_weight_grad=share)


ARRAYS = [
    (("input", "input_rows"), None, ag.ParamNullptrError, "expected an array, got None"),
    (("input", "input_rows"), np.zeros((9, 4), complex), ag.ParamTypeError, "expected dtype float32"),
    (("weight_shard", "weight"), np.zeros((9, 5), np.float32), ag.ParamInvalidError, "expected shape"),
    (("weight_shard", "weight"), np.zeros((9, 4)), ag.ParamTypeError, "expected dtype float32 as input"),
    (("target", "target_rows"), np.zeros(9), ag.ParamTypeError, "expected an integer dtype"),
    (("target", "target_rows"), np.zeros(8, np.int64), ag.ParamInvalidError, "expected shape"),
]


@pytest.mark.parametrize(("names", "value", "kind", "text"), ARRAYS)
@pytest.mark.parametrize("function", [parallel.linear_cross_entropy, parallel.data_parallel_linear_cross_entropy])
def test_a_bad_array(function, names, value, kind, text):
    name = names[function is parallel.data_parallel_linear_cross_entropy]
    place = [names[0] for names, *_ in (ARRAYS[0], ARRAYS[3], ARRAYS[5])].index(names[0])

    def work(comm):
        values = [A["input"], A["weight"][CUTS[comm.rank] : CUTS[comm.rank + 1]], A["target"]]
        if comm.rank == 2:
            values[place] = value
        return function(*values, comm=comm)

    results = on_ranks(3, work)
    assert type(results[2]) is kind
    assert f"parallel.{function.__name__}: {name}: {text}" in str(results[2])
    assert all(type(each) is parallel.RankError and each.rank == 2 for each in results[:2])


class OneRank:
    rank, size = 0, 1

    def allreduce(self, array, op):
        pass

    def allgather(self, array):
        return array[None]


ERRORS = (MemoryError("no room"), KeyboardInterrupt(), ValueError("ü" * 5000))
#: The computations of a rank, and a problem that makes each: logits of 16 bits are not cached.
STEPS = {"part_statistics": PROBLEM, "part_gradients": whole((9, 20, 4), "float16")}


@pytest.fixture
def failing(monkeypatch):
    """Return a function that makes a step raise an error in the step's n-th call with two threads."""

    def patch(name, error, times=1):
        module = part_backend._linear_python
        original = getattr(module, name)
        calls = [0]

        def step(*args, **kwargs):
            if kwargs.get("num_threads", args[-1]) == 2:
                calls[0] += 1
                if calls[0] == times:
                    raise error
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, step)

    return patch


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("share", [True, False, "scatter"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_an_error_in_a_step(failing, step, error, share, deterministic):
    failing(step, error)

    def work(comm):
        options = {"num_threads": 2 if comm.rank == 1 else 1}
        return vocabulary_rank(STEPS[step], CUTS, comm, reduce_input_grad=share, deterministic=deterministic, **options)

    results = on_ranks(3, work)
    assert results[1] is error
    for rank in (0, 2):
        assert type(results[rank]) is parallel.RankError
        assert results[rank].rank == 1
        assert f"rank 1 failed: {type(error).__name__}" in str(results[rank])


@pytest.mark.parametrize("call", [vocabulary, tokens])
@pytest.mark.parametrize("deterministic", [False, True])
def test_an_error_between_steps(monkeypatch, call, deterministic):
    """Ctrl-C on one rank, between the operators of a call, raises an error on every rank."""
    original = row_chunk.np.exp

    def interrupted(*args, **kwargs):
        if threading.current_thread().name.endswith("rank 1"):
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(row_chunk.np, "exp", interrupted)
    results = call(0, 1, 2, deterministic=deterministic)
    assert [type(each) for each in results] == [parallel.RankError, KeyboardInterrupt, parallel.RankError]


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_an_error_in_a_row_chunk(failing, monkeypatch, chunk):
    """An error in any row chunk raises on every rank, since the failed rank still takes part in the later sums."""
    monkeypatch.setattr(chunking, "CHUNK_ROWS", 3)
    failing("part_gradients", MemoryError(), chunk)
    results = vocabulary(1, num_threads=2)
    assert [type(each) for each in results] == [parallel.RankError, MemoryError, parallel.RankError]


@pytest.mark.parametrize("step", STEPS)
def test_an_error_in_a_step_with_tokens(failing, step):
    failing(step, MemoryError())
    results = tokens(1, problem=STEPS[step], num_threads=2)
    assert [type(each) for each in results] == [parallel.RankError, MemoryError, parallel.RankError]


@pytest.mark.parametrize("step", [*STEPS, None])
def test_an_error_on_a_grid(failing, step):
    """An error reaches the ranks that share neither tokens nor vocabulary entries with the failed rank."""
    if step:
        failing(step, MemoryError())

    def work(vocab_comm, comm):
        is_bad = vocab_comm.rank == 1 and comm.rank == 0
        options = {"num_threads": 2} if is_bad and step else {"reduction": "total"} if is_bad else {}
        entries = slice(*parallel.vocab_range(20, vocab_comm.rank, 3))
        return tokens_rank(STEPS.get(step, PROBLEM), [0, 4, 9], comm, entries, vocab_comm=vocab_comm, **options)

    results = on_grid(3, 2, work)
    assert type(results.pop((1, 0))) is (MemoryError if step else ag.ParamInvalidError)
    assert {type(each) for each in results.values()} == {parallel.RankError}


def test_disagreement_in_one_column_of_a_grid():
    """If two columns of a grid have different shards, every rank raises an error."""

    def work(vocab_comm, comm):
        entries = slice(0, 12) if vocab_comm.rank == 0 else slice(12, 20)
        if comm.rank == 1:
            entries = slice(0, 10) if vocab_comm.rank == 0 else slice(10, 20)
        if comm.rank == 1 and vocab_comm.rank == 2:
            entries = slice(20, 20)
        return tokens_rank(PROBLEM, [0, 4, 9], comm, entries, vocab_comm=vocab_comm)

    for error in on_grid(2, 2, work).values():
        assert type(error) is ag.ParamInvalidError
        assert "shape of weight: expected the same on every rank, got [" in str(error)

    def crossed(vocab_comm, comm):
        """Call the function with shards of equal size that hold different vocabulary entries in the two columns."""
        entries = slice(0, 10) if vocab_comm.rank == comm.rank else slice(10, 20)
        return tokens_rank(PROBLEM, [0, 4, 9], comm, entries, vocab_comm=vocab_comm, vocab_start_index=entries.start)

    for error in on_grid(2, 2, crossed).values():
        assert type(error) is ag.ParamInvalidError
        assert "vocab_start_index: expected the same on every rank, got " in str(error)

    def other(vocab_comm, comm):
        """Call the function with vocabulary entries that differ between ranks only in the second column."""
        entries = slice(0, 12) if vocab_comm.rank == 0 else slice(12, 20 - comm.rank)
        problem = PROBLEM.replaced(target=np.arange(9))
        return tokens_rank(problem, [0, 4, 9], comm, entries, vocab_comm=vocab_comm)

    results = on_grid(2, 2, other)
    assert [type(results[1, t]) for t in (0, 1)] == [ag.ParamInvalidError] * 2
    assert [type(results[0, t]) for t in (0, 1)] == [parallel.RankError] * 2


# ---- disagreement between ranks --------------------------------------------------------------------------------------

DIFFERENT = [
    ({"reduction": "sum"}, "reduction: expected the same on every rank, got mean on rank 0 and sum on rank 2"),
    ({"ignore_index": 3}, "ignore_index: expected the same on every rank, got -7 on rank 0 and 3 on rank 2"),
    ({"deterministic": True}, "deterministic: "),
    ({"return_grad": False}, "return_grad: "),
    ({"output_mask": (True, False)}, "output_mask: "),
    ({"workspace_bytes": 4 << 20}, "workspace_bytes: "),
    ({"filter_eps": 1e-3}, "filter_eps: "),
    ({"grad_loss": 2.0}, "grad_loss: expected the same on every rank, got 0.7 on rank 0 and 2.0 on rank 2"),
    ({"vocab_size": 20}, "vocab_size: "),
]


@pytest.mark.parametrize(("options", "text"), DIFFERENT, ids=lambda value: str(value)[:20])
@pytest.mark.parametrize("call", [vocabulary, tokens])
def test_options_differ(call, options, text):
    results = call(2, **options)
    assert {type(each) for each in results} == {ag.ParamInvalidError}
    assert len({str(each) for each in results}) == 1
    assert text in str(results[0])


def test_shares_differ():
    (text,) = {str(each) for each in vocabulary(1, reduce_input_grad="scatter")}
    assert "reduce_input_grad: expected the same on every rank, got True on rank 0 and scatter on rank 1" in text
    (text,) = {str(each) for each in tokens(1, reduce_weight_grad="scatter")}
    assert "reduce_weight_grad: expected the same on every rank, got True on rank 0 and scatter on rank 1" in text


def arrays_differ(**other):
    """Replace the given arrays on rank 1, and return the error message of all ranks."""

    def work(comm):
        problem = PROBLEM.replaced(**other) if comm.rank == 1 else PROBLEM
        return vocabulary_rank(problem, CUTS, comm)

    results = on_ranks(3, work)
    assert {type(each) for each in results} == {ag.ParamInvalidError}
    (text,) = {str(each) for each in results}
    return text


def test_arrays_differ():
    changed = A["target"].copy()
    changed[4] ^= 1
    assert "checksum of target: expected the same on every rank" in arrays_differ(target=changed)
    assert "dtype of target: expected the same" in arrays_differ(target=A["target"].astype(np.int32))
    assert "shape of input: expected the same on every rank, got [9, 4] on rank 0 and [8, 4] on rank 1" in (
        arrays_differ(input=A["input"][:8], target=A["target"][:8])
    )
    wide = {"input": A["input"].astype(np.float64), "weight": A["weight"].astype(np.float64)}
    assert "dtype of input: expected the same on every rank, got float32 on rank 0 and float64" in arrays_differ(**wide)


def test_gradients_of_rows_differ():
    problem = PROBLEM.replaced(reduction="none", grad_loss=np.ones(9, np.float32))

    def work(comm):
        other = problem.replaced(grad_loss=np.full(9, 1 + comm.rank, np.float32))
        return vocabulary_rank(other, CUTS, comm)

    (text,) = {str(each) for each in on_ranks(3, work)}
    assert "checksum of grad_loss: expected the same on every rank" in text


def wrong_shards(cuts, **options):
    def work(comm):
        start, stop = cuts[comm.rank]
        return parallel.linear_cross_entropy(
            A["input"], A["weight"][start:stop], A["target"], comm=comm, ignore_index=-7,
            **{"vocab_start_index": start} | options,
        )  # fmt: skip

    results = on_ranks(len(cuts), work)
    assert {type(each) for each in results} == {ag.ParamInvalidError}
    (text,) = {str(each) for each in results}
    return text


def test_shards_that_do_not_tile():
    expected = "vocab_start_index: expected shards from 0 without gaps or overlaps, got "
    assert f"{expected}13 on rank 2, where the previous shard ends at 12" in wrong_shards([(0, 7), (7, 12), (13, 20)])
    assert f"{expected}11 on rank 2, where the previous shard ends at 12" in wrong_shards([(0, 7), (7, 12), (11, 20)])
    assert f"{expected}1 on rank 0, where the previous shard ends at 0" in wrong_shards([(1, 7), (7, 12)])
    assert "expected 20, the sum of the rows of all shards, got 21" in wrong_shards([(0, 7), (7, 20)], vocab_size=21)
    assert "checksum" not in wrong_shards([(0, 20), (0, 20)])


TAKE_PART = "; pass weight[start:stop] of vocab_range on each rank"


def test_the_whole_weight_on_every_rank():
    whole = [(0, 20)] * 2
    text = wrong_shards(whole, vocab_start_index=None, vocab_size=20)
    assert text.endswith(f"vocab_size: expected 40, the sum of the rows of all shards, got 20{TAKE_PART}")
    assert wrong_shards(whole).endswith(f"got 0 on rank 1, where the previous shard ends at 20{TAKE_PART}")
    # Without any of these arguments the call is valid, and may be meant.
    calls = [
        lambda comm: parallel.linear_cross_entropy(A["input"], A["weight"], A["target"], comm=comm, ignore_index=-7),
        lambda comm: parallel.linear_top_k(A["input"], A["weight"], 3, comm=comm),
    ]
    for call in calls:
        with pytest.warns(
            UserWarning, match=r"the weights of all ranks look the same; if .* weight\[start:stop\] of"
        ) as caught:
            on_ranks(2, call)
        assert {each.filename for each in caught} == {__file__}


@pytest.mark.parametrize("weights", [[np.zeros((10, 4))] * 2, [np.eye(4), np.eye(4)[::-1]], [np.eye(4), np.eye(4)[:3]]])
def test_weights_that_are_not_the_same(weights):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = on_ranks(
            2, lambda comm: parallel.linear_cross_entropy(np.eye(4), weights[comm.rank], np.arange(4), comm=comm)
        )
    assert [np.isfinite(each.loss) for each in results] == [True, True]


def test_a_single_process_is_named():
    for name, comm in (("linear_cross_entropy", "comm"), ("data_parallel_linear_cross_entropy", "vocab_comm")):
        for options, text in (
            ({"vocab_size": 40}, "the sum of the rows of all shards, got 40"),
            ({"vocab_start_index": 1}, "at 0"),
        ):
            with pytest.raises(ag.ParamInvalidError) as info:
                getattr(parallel, name)(A["input"], A["weight"], A["target"], comm=None, **options)
            assert str(info.value).endswith(f"{text} ({comm} is None or has one rank)")


@pytest.mark.parametrize("name", ["class_weight", "bias"])
def test_numbers_of_the_whole_vocabulary(name):
    """The whole array is refused on every rank. One that is too short has the usual error."""
    vector = np.ones(20, np.float32)
    for given, note in ((vector, "; pass the part [start:stop] of vocab_range"), (vector[:2], "")):
        results = vocabulary(0, 1, 2, **{name: given})
        assert {type(each) for each in results} == {ag.ParamInvalidError}
        for rank, each in enumerate(results):
            n = CUTS[rank + 1] - CUTS[rank]
            assert f"{name}: expected shape (V" in str(each)
            assert str(each).endswith(f"= {n}), got ({len(given)},){note}")


def test_split_tokens_are_told_of_the_other_function():
    """Errors name the other function if ranks pass different tokens, equally many or not."""
    expected = "; pass all tokens on every rank, or use parallel.data_parallel_linear_cross_entropy"
    assert arrays_differ(target=A["target"][::-1]).endswith(expected)
    assert arrays_differ(input=A["input"][:8], target=A["target"][:8]).endswith(expected)


def test_some_shards_say_where_they_begin():
    for rank in range(3):
        results = vocabulary(rank, vocab_start_index=CUTS[rank])
        (text,) = {str(each) for each in results}
        other = 1 if rank == 0 else 0
        assert f"expected an int on every rank or None on every rank, got None on rank {other}" in text


def test_targets_beyond_the_vocabulary():
    for wrong in (-1, 20, 2**40):
        target = A["target"].copy()
        target[3:5] = wrong
        results = on_ranks(3, lambda comm, target=target: vocabulary_rank(PROBLEM.replaced(target=target), CUTS, comm))
        assert {type(each) for each in results} == {ag.ParamInvalidError}
        (text,) = {str(each) for each in results}
        assert f"target: expected values in [0, 20) or -7, got {wrong} in row 3" in text


def test_the_functions_differ():
    def work(comm):
        function = (parallel.linear_cross_entropy, parallel.data_parallel_linear_cross_entropy)[comm.rank]
        return function(A["input"], A["weight"], A["target"], comm=comm, ignore_index=-7)

    for error in on_ranks(2, work):
        assert type(error) is ag.ParamInvalidError
        assert "operator: expected the same on every rank, got parallel.linear_cross_entropy on rank 0" in str(error)


# ---- communicators ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("comm", [0, "world", object(), ThreadRank, [None]])
def test_no_communicator(comm):
    with pytest.raises(ag.ParamTypeError, match=r"comm: expected None, a communicator of mpi4py, a torch"):
        parallel.linear_cross_entropy(A["input"], A["weight"], A["target"], comm=comm)
    with pytest.raises(ag.ParamTypeError, match=r"vocab_comm: expected None, a communicator of mpi4py, a torch"):
        parallel.data_parallel_linear_cross_entropy(A["input"], A["weight"], A["target"], comm=None, vocab_comm=comm)


@pytest.mark.parametrize(("rank", "size", "text"), [(2, 2, r"in \[0, 1\], got 2"), (-1, 2, "got -1"), (0, 0, "got 0")])
def test_impossible_ranks(rank, size, text):
    comm = OneRank()
    comm.rank, comm.size = rank, size
    with pytest.raises(ag.ParamInvalidError, match=f"comm.rank: expected an int {text if '[' in text else ''}"):
        parallel.linear_cross_entropy(A["input"], A["weight"], A["target"], comm=comm)


@pytest.mark.parametrize(
    ("gathered", "got"),
    [
        (lambda array: array, r"uint8 of shape \(1024,\)"),
        (lambda array: array[None].astype(np.float64), r"float64 of shape \(1, 1024\)"),
        (lambda array: [array], "list "),
        (lambda array: None, "None"),
    ],
)
def test_a_communicator_that_gathers_something_else(gathered, got):
    comm = OneRank()
    comm.allgather = gathered
    expected = rf"^parallel.linear_cross_entropy: comm.allgather: expected uint8 of shape \(1, 1024\), got {got}"
    with pytest.raises(ag.ParamTypeError, match=expected):
        parallel.linear_cross_entropy(A["input"], A["weight"], A["target"], comm=comm)


def test_a_grid_of_one_communicator():
    def work(comm):
        return tokens_rank(PROBLEM, [0, 4, 9], comm, vocab_comm=comm)

    for error in on_ranks(2, work):
        assert type(error) is ag.ParamInvalidError
        assert "vocab_comm: expected the ranks with the same tokens and other vocabulary entries" in str(error)
    comm = OneRank()  # both groups consist of this one rank
    result = parallel.data_parallel_linear_cross_entropy(
        A["input"], A["weight"], A["target"], comm=comm, vocab_comm=comm, ignore_index=A["ignore_index"]
    )
    assert np.isfinite(result.loss)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((-1, 0, 1), "vocab_size: expected 0 or more, got -1"),
        ((5, 0, 0), "size: expected 1 or more, got 0"),
        ((5, 2, 2), r"rank: expected an int in \[0, 1\], got 2"),
        ((5, -1, 2), r"rank: expected an int in \[0, 1\], got -1"),
        ((5.0, 0, 2), "vocab_size: expected an int, got float 5.0"),
        ((5, True, 2), "rank: expected an int, got bool True"),
    ],
)
def test_impossible_ranges(arguments, text):
    with pytest.raises(ag.ParamInvalidError, match=f"parallel.vocab_range: {text}"):
        parallel.vocab_range(*arguments)


def test_rank_errors_can_be_pickled():
    error = parallel.RankError("rank 3 failed: MemoryError: ", rank=3, operator="parallel.linear_cross_entropy")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.rank, copy.operator, copy.code) == (str(error), 3, error.operator, None)
