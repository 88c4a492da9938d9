"""The loss over tokens that are split over ranks, with the whole weight on each or, on a grid, a part of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from .. import arrays
from .._call import checked
from ..arguments import shown
from ..contract.parallel import DATA_PARALLEL
from ..errors import ParamInvalidError, ParamTypeError
from ..results import LinearCrossEntropy
from .agreement import Attempt, check_agreement
from .device_shard import make_shard
from .device_sums import DeviceMatrixSum, device_matrix_sum
from .engines import collectives
from .shard import Shard, check_memory
from .sums import MatrixSum, VectorSums

if TYPE_CHECKING:
    from mpi4py.MPI import Comm
    from torch.distributed import ProcessGroup

    from .communicators import Communicator

_NAME = DATA_PARALLEL.name


def data_parallel_linear_cross_entropy(
    input_rows: ArrayLike,
    weight: ArrayLike,
    target_rows: ArrayLike,
    *,
    comm: Communicator | Comm | ProcessGroup | None,
    vocab_comm: Communicator | Comm | ProcessGroup | None = None,
    vocab_start_index: int | None = None,
    vocab_size: int | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    ignore_index: int = -100,
    grad_loss: ArrayLike | None = None,
    reduce_weight_grad: Literal[True, "scatter"] = True,
    deterministic: bool = False,
    return_grad: bool = True,
    output_mask: Sequence[bool] = (True, True),
    workspace_bytes: int | None = None,
    filter_eps: float = 0.0,
    backend: str | None = None,
    num_threads: int | None = None,
) -> LinearCrossEntropy:
    """Cross-entropy loss of a linear layer and its gradients, where each rank holds some of the tokens.

    Loss and weight gradient are those of `ascend_grad.linear_cross_entropy` on the tokens of all ranks: a mean is over
    all tokens that are not ignored, on whichever rank, and not a mean of means.

    Parameters
    ----------
    input_rows : array_like, shape (BT of this rank, H)
        The layer's input for this rank's tokens; float32, float16, bfloat16 or float64. There may be none.
    weight : array_like, shape (V, H)
        The layer's weight, of the dtype of `input_rows`, the same on every rank of `comm`.
    target_rows : array_like of int32 or int64, shape (BT of this rank,)
        Ids in the vocabulary, or `ignore_index`.
    comm : Communicator, mpi4py.MPI.Comm, torch.distributed.ProcessGroup or None
        The ranks that the tokens are split over.
    vocab_comm : the same, optional
        On a grid of ranks, those that have the same tokens as this one and other words of the vocabulary; `comm` then
        are those that have the same words and other tokens, and `weight` is a shard as in `linear_cross_entropy`.
    vocab_start_index, vocab_size
        As in `linear_cross_entropy`, over the ranks of `vocab_comm`.
    reduction, ignore_index, grad_loss
        As in `ascend_grad.linear_cross_entropy`; all but a `grad_loss` for each row are the same on every rank.
    reduce_weight_grad : True or "scatter", default True
        The weight's gradient is a sum over `comm`. True: every rank gets it; "scatter": every rank gets the rows
        ``slice(*vocab_range(V, comm.rank, comm.size))`` of it.
    deterministic, return_grad, output_mask, workspace_bytes, filter_eps, backend, num_threads
        As in `linear_cross_entropy`.

    Returns
    -------
    loss : ndarray, shape () or (BT of this rank,)
        float32, or float64 where `input_rows` is. Mean and sum are over the tokens of all ranks, on every rank.
    input_grad : ndarray, shape (BT of this rank, H), or None
        The gradient with respect to `input_rows`, in its dtype.
    weight_grad : ndarray, shape (V, H) or this rank's rows of it, or None
        The gradient with respect to `weight`, in its dtype.

    Raises
    ------
    ParamNullptrError
        161001: `input_rows`, `weight` or `target_rows` is None.
    ParamInvalidError
        161002: an argument is not as described, or not the same on every rank that it has to be the same on.
    RankError
        Another rank raised something; it says which.

    Notes
    -----
    Results are arrays of the library that the arguments belong to. If all ranks pass arrays on a device, results
    are on that device, and each rank's part of a gradient is rounded to 16 bits before the parts are added in float32.
    Such arrays are those of `ascend_grad.npu.asarray`, or tensors of torch_npu, in float16 or bfloat16. A `grad_loss`
    for each row is there, too. Calls on them wait for the device.

    The weights of the ranks of `comm` are taken to be the same; their shapes alone are compared. One call makes these
    collective operations on `comm`: a gathering of 1024 bytes of each rank, the sum of two numbers, and that of V H
    numbers in float32 (float64). On a grid those of `linear_cross_entropy` on `vocab_comm` come besides.

    Examples
    --------
    With ``mpiexec -n 2``, ``comm = MPI.COMM_WORLD`` and each half of the tokens; here a process alone:

    >>> import numpy as np
    >>> from ascend_grad import parallel
    >>> loss, input_grad, weight_grad = parallel.data_parallel_linear_cross_entropy(
    ...     np.eye(2), np.zeros((4, 2)), np.array([0, 3]), comm=None
    ... )
    >>> loss.round(3)
    np.float64(1.386)
    """
    ranks, vocab_ranks = collectives(comm, "comm", _NAME), collectives(vocab_comm, "vocab_comm", _NAME)
    values = [
        input_rows, weight, target_rows, reduction, ignore_index, grad_loss, deterministic, return_grad, output_mask,
        workspace_bytes, filter_eps
    ]  # fmt: skip
    execution = {"backend": backend, "num_threads": num_threads}

    def prepare() -> tuple[Shard, MatrixSum | DeviceMatrixSum | None, dict[str, Any]]:
        if not (reduce_weight_grad is True or reduce_weight_grad == "scatter"):
            kind = ParamInvalidError if isinstance(reduce_weight_grad, (str, bool)) else ParamTypeError
            message = f"reduce_weight_grad: expected True or 'scatter', got {shown(reduce_weight_grad)}"
            raise kind(message, operator=_NAME)
        if vocab_comm is comm and ranks.size > 1:
            expected = "ranks that have the same tokens as this one and other words"
            raise ParamInvalidError(f"vocab_comm: expected {expected}, got those of comm", operator=_NAME)
        call = checked(DATA_PARALLEL, values)
        check_memory(call, ranks)
        a = call.arguments
        total: MatrixSum | DeviceMatrixSum | None = None
        if a["return_grad"] and a["output_mask"][1]:
            (words, features), dtype = a["weight"].shape, arrays.native(a["weight"].dtype)
            share, in_order = reduce_weight_grad, a["deterministic"]
            if call.device is None:
                total = MatrixSum(ranks, words, features, arrays.accumulator_dtype(dtype), dtype, share, in_order)
            else:
                total = device_matrix_sum(ranks, words, features, dtype, share, in_order, a["weight"])
        place = total.matrix if isinstance(total, MatrixSum) else total
        shard = make_shard(call, vocab_ranks, vocab_start_index, vocab_size, True, execution, place)
        return shard, total, shard.facts()

    # Both gatherings come before anything is raised: who fails tells the ranks of its vocabulary first, and each of
    # those tells the ranks that have other tokens.
    attempt, inner = Attempt(_NAME), Attempt(_NAME)
    prepared = inner.run(prepare)

    def agree() -> dict[str, Any]:
        cards = inner.tell(vocab_ranks, None if prepared is None else prepared[2])
        assert prepared is not None
        shard, *_ = prepared
        shard.place(cards)
        same = {
            "operator": _NAME,
            "memory of input_rows": shard.memory,
            "columns of input_rows": shard.input.shape[1],
            "dtype of input_rows": shard.dtype.name,
            "shape of weight": list(shard.weight.shape),
            "vocab_start_index": shard.start,
            **shard.options(),
            "reduce_weight_grad": reduce_weight_grad,
        }
        return {"same": same, "count": shard.count}

    cards = attempt.tell(ranks, attempt.run(agree))
    assert prepared is not None  # else it has raised
    shard, weight_sum, _ = prepared

    def agreed_count() -> int:
        check_agreement([card["same"] for card in cards], _NAME)
        return sum(card["count"] for card in cards)

    count = inner.run(agreed_count)
    if count is None:  # all ranks of comm see that, but others of the vocabulary may not: this tells them, and raises
        return shard.solve(inner, 0)

    def solve() -> LinearCrossEntropy:
        solved = shard.solve(inner, count)
        inner.raise_kept()
        return solved

    result = attempt.run(solve)
    loss = np.array([0 if result is None or reduction == "none" else result.loss, attempt.failed], np.float64)
    VectorSums(ranks, loss.size, loss.dtype, deterministic).add(loss)
    attempt.settle(ranks, loss[1])
    assert result is not None
    if reduction != "none":
        result = result._replace(loss=np.asarray(loss[0], shard.accumulator))
    if weight_sum is not None:
        weight_grad: Any = weight_sum.result(attempt)
        result = result._replace(weight_grad=weight_grad)
    return shard.convert_results(result, attempt, ranks)
