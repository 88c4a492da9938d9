"""Linear cross-entropy over tokens that are split over ranks. On a grid of ranks the weight is also split."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .. import arrays
from .._call import checked
from ..arguments import shown
from ..errors import ParamInvalidError, ParamTypeError
from ..operators.ranks import DATA_PARALLEL, OF_ENTRIES
from ..operators.results import LossResult
from ..operators.signatures import completed, with_options
from .agreement import Attempt, check_agreement
from .device_shard import make_shard
from .device_sums import DeviceMatrixSum, device_matrix_sum
from .shard import Shard, check_entries, check_memory
from .sums import MatrixSum, VectorSums
from .transports import collectives
from .vocabulary_parallel import LOSS_OPTIONS, linear_cross_entropy

if TYPE_CHECKING:
    from mpi4py.MPI import Comm
    from torch.distributed import ProcessGroup

    from ..option_types import RankLossOptions
    from .communicators import Communicator

_NAME = DATA_PARALLEL.name


class _Prepared(NamedTuple):
    """Hold a rank's memory, allocated before the first collective operation: a lack can then be told to other ranks."""

    shard: Shard
    facts: dict[str, Any]
    weight_sum: MatrixSum | DeviceMatrixSum | None
    #: The number of failed ranks, and the results that are sums over tokens.
    sums: NDArray
    token_sums: VectorSums


@with_options(LOSS_OPTIONS, like=linear_cross_entropy)
def data_parallel_linear_cross_entropy(
    input_rows: ArrayLike,
    weight: ArrayLike,
    target_rows: ArrayLike,
    *,
    comm: Communicator | Comm | ProcessGroup | None,
    vocab_comm: Communicator | Comm | ProcessGroup | None = None,
    reduce_weight_grad: Literal[True, "scatter"] = True,
    **options: Unpack[RankLossOptions[ArrayLike, float]],
) -> LossResult[NDArray]:
    """Compute the cross-entropy loss of a linear layer and its gradients, with the tokens split over ranks.

    Loss and weight gradient are what `ascend_grad.linear_cross_entropy` computes from the tokens of all ranks::

        loss, input_grad, weight_grad = parallel.data_parallel_linear_cross_entropy(x, weight, target, comm=comm)

    A mean is over the tokens of all ranks that are not ignored; it is not a mean of the ranks' means. By default the
    sum of the weights of the tokens of all ranks divides it.

    Parameters
    ----------
    input_rows : array_like, shape (BT of this rank, H)
        The layer's input for this rank's tokens; float32, float16, bfloat16 or float64. There may be none.
    weight : array_like, shape (V, H)
        The layer's weight, of the dtype of `input_rows`, the same on every rank of `comm`.
    target_rows : array_like of any integer dtype, shape (BT of this rank,), or (BT of this rank, K) with `target_prob`
        Ids in the vocabulary, or `ignore_index`.
    comm : Communicator, mpi4py.MPI.Comm, torch.distributed.ProcessGroup or None
        The ranks that the tokens are split over.
    vocab_comm : like `comm`, optional
        On a grid of ranks, the ranks with the same tokens as this one and other vocabulary entries. `comm` then holds
        the ranks with the same entries and other tokens, and `weight` is a shard as in `linear_cross_entropy`.
    vocab_start_index, vocab_size
        As in `linear_cross_entropy`, over the ranks of `vocab_comm`.
    reduce_weight_grad : True or "scatter", default True
        The weight's gradient is a sum over `comm`. True: every rank gets the whole sum; "scatter": every rank gets the
        sum's rows ``slice(*vocab_range(V, comm.rank, comm.size))``.

    Returns
    -------
    loss : ndarray, shape () or (BT of this rank,)
        The loss; float32, or float64 if `input_rows` is float64. Mean and sum are over the tokens of all ranks, and are
        returned on every rank.
    input_grad : ndarray, shape (BT of this rank, H), or None
        The gradient with respect to `input_rows`, in its dtype.
    weight_grad : ndarray, shape (V, H) or (rows of this rank, H), or None
        The gradient with respect to `weight`, in its dtype.
    bias_grad : ndarray, shape (V,), or None
        The gradient with respect to `bias`, in its dtype: the whole sum over `comm`, whatever `reduce_weight_grad` is.
        The field exists if `bias` is given.
    lse, log_prob, entropy, predicted, correct : ndarray
        The requested outputs: arrays of this rank's tokens, and the number of correct ones of all ranks.

    Notes
    -----
    Options have one element for each of this rank's tokens, or row of `weight`. Arguments are compared over the ranks
    that share them. Results and arrays on a device are as in `linear_cross_entropy`.

    The weights have to be the same on all ranks of `comm`; only their shapes are compared. One call makes these
    collective operations on `comm`: a gathering of 1024 bytes from each rank, the sum of two numbers, and the sum of
    V H numbers in float32 (float64). On a grid it also makes the collective operations of `linear_cross_entropy` on
    `vocab_comm`. With the output ``"correct"``, the sum of two numbers becomes a sum of three, and of V more with a
    bias. With weights, a mean without `denominator` needs the sum of two more numbers.

    Examples
    --------
    Under ``mpiexec -n 2``, pass ``comm=MPI.COMM_WORLD`` and half of the tokens on each rank. Here a single process:

    >>> import numpy as np
    >>> from ascend_grad import parallel
    >>> loss, input_grad, weight_grad = parallel.data_parallel_linear_cross_entropy(
    ...     np.eye(2), np.zeros((4, 2)), np.array([0, 3]), comm=None
    ... )
    >>> loss.round(3)
    np.float64(1.386)
    """
    given = completed(options, LOSS_OPTIONS, "data_parallel_linear_cross_entropy")
    ranks, vocab_ranks = collectives(comm, "comm", _NAME), collectives(vocab_comm, "vocab_comm", _NAME)

    def prepare() -> _Prepared:
        if not (reduce_weight_grad is True or reduce_weight_grad == "scatter"):
            kind = ParamInvalidError if isinstance(reduce_weight_grad, (str, bool)) else ParamTypeError
            message = f"reduce_weight_grad: expected True or 'scatter', got {shown(reduce_weight_grad)}"
            raise kind(message, operator=_NAME)
        if vocab_comm is comm and ranks.size > 1:
            expected = "the ranks with the same tokens and other vocabulary entries"
            raise ParamInvalidError(f"vocab_comm: expected {expected}, got the ranks of comm", operator=_NAME)
        values = [input_rows, weight, target_rows, *(given[name] for name in DATA_PARALLEL.parameters[3:])]
        check_entries(weight, given, vocab_ranks, _NAME)
        call = checked(DATA_PARALLEL, values)
        check_memory(call, ranks)
        a = call.arguments
        total: MatrixSum | DeviceMatrixSum | None = None
        if a["return_grad"] and a["output_mask"][1]:
            (entries, features), dtype = a["weight"].shape, arrays.native(a["weight"].dtype)
            share, in_order = reduce_weight_grad, a["deterministic"]
            if call.device is None:
                total = MatrixSum(ranks, entries, features, arrays.accumulator_dtype(dtype), dtype, share, in_order)
            else:
                total = device_matrix_sum(ranks, entries, features, dtype, share, in_order, a["weight"])
        place = total.matrix if isinstance(total, MatrixSum) else total
        shard = make_shard(call, vocab_ranks, True, given, place)
        sums = np.zeros(1 + shard.token_summands)
        token_sums = VectorSums(ranks, sums.size, sums.dtype, a["deterministic"])
        return _Prepared(shard, shard.facts(), total, sums, token_sums)

    # Both gatherings run before any rank raises. A rank that failed tells the ranks of its vocab_comm first (in
    # agree()); each of these ranks then tells the ranks of its comm.
    attempt, inner = Attempt(_NAME), Attempt(_NAME)
    prepared = inner.run(prepare)

    def agree() -> dict[str, Any]:
        records = inner.exchange_records(vocab_ranks, None if prepared is None else prepared.facts)
        assert prepared is not None
        shard = prepared.shard
        shard.place(records)
        same = {
            "operator": _NAME,
            "memory of input_rows": shard.memory,
            "columns of input_rows": shard.input.shape[1],
            "dtype of input_rows": shard.dtype.name,
            "shape of weight": list(shard.weight.shape),
            "vocab_start_index": shard.start,
            **shard.facts_of_options(OF_ENTRIES),
            "reduce_weight_grad": reduce_weight_grad,
        }
        return {"same": same, "count": shard.count}

    records = attempt.exchange_records(ranks, attempt.run(agree))
    assert prepared is not None  # otherwise exchange_records() has raised
    shard, _, weight_sum, sums, token_sums = prepared

    def agreed_count() -> int:
        check_agreement([record["same"] for record in records], _NAME)
        return sum(record["count"] for record in records)

    count = inner.run(agreed_count)
    if count is None:  # every rank of comm knows, ranks of vocab_comm may not: solve() tells them and raises
        shard.solve(inner, 0, token_sums)

    def solve() -> dict[str, Any]:
        assert count is not None  # otherwise solve() has raised
        solved = shard.solve(inner, count, token_sums)
        inner.raise_kept()
        shard.write_token_summands(solved, sums[1:])
        return solved

    solved = attempt.run(solve)
    sums[0] = attempt.failed
    token_sums.add(sums)
    attempt.settle(ranks, sums[0])
    assert solved is not None
    attempt.run(partial(shard.take_sums_of_tokens, solved, sums[1:]))
    if weight_sum is not None:
        solved["weight_grad"] = weight_sum.result(attempt)
    return shard.in_library(solved, attempt, ranks)
