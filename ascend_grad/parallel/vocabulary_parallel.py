"""Linear cross-entropy over a vocabulary that is split over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from numpy.typing import ArrayLike, NDArray

from .._call import checked
from ..arguments import shown, truth_value
from ..errors import ParamInvalidError
from ..operators.ranks import VOCABULARY_PARALLEL
from ..operators.results import LossResult
from .agreement import Attempt
from .device_shard import make_shard
from .engines import collectives
from .shard import Shard
from .sums import Share

if TYPE_CHECKING:
    from mpi4py.MPI import Comm
    from torch.distributed import ProcessGroup

    from .communicators import Communicator

_NAME = VOCABULARY_PARALLEL.name


def linear_cross_entropy(
    input: ArrayLike,
    weight_shard: ArrayLike,
    target: ArrayLike,
    *,
    comm: Communicator | Comm | ProcessGroup | None,
    vocab_start_index: int | None = None,
    vocab_size: int | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    ignore_index: int = -100,
    grad_loss: ArrayLike | None = None,
    reduce_input_grad: Literal[True, False, "scatter"] = True,
    deterministic: bool = False,
    return_grad: bool = True,
    output_mask: Sequence[bool] = (True, True),
    workspace_bytes: int | None = None,
    filter_eps: float = 0.0,
    token_weight: ArrayLike | None = None,
    class_weight: ArrayLike | None = None,
    target_prob: ArrayLike | None = None,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    temperature: ArrayLike = 1.0,
    denominator: float | None = None,
    bias: ArrayLike | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    outputs: Sequence[str] = (),
    grad_lse: ArrayLike | None = None,
    grad_log_prob: ArrayLike | None = None,
    grad_entropy: ArrayLike | None = None,
    backend: str | None = None,
    num_threads: int | None = None,
) -> LossResult[NDArray]:
    """Compute the cross-entropy loss of a linear layer and its gradients, with the vocabulary split over ranks.

    All ranks of `comm` call it with the same tokens, each with its own rows of the weight. Loss and gradients are what
    `ascend_grad.linear_cross_entropy` computes from the whole weight.

    Parameters
    ----------
    input : array_like, shape (BT, H)
        The layer's input, the same on every rank; float32, float16, bfloat16 or float64.
    weight_shard : array_like, shape (V of this rank, H)
        This rank's rows of the layer's weight, of the dtype of `input`; there may be none.
    target : array_like of int32 or int64, shape (BT,), or (BT, K) with `target_prob`
        Ids in the whole vocabulary, or `ignore_index`; the same on every rank.
    comm : Communicator, mpi4py.MPI.Comm, torch.distributed.ProcessGroup or None
        The ranks. A process group has to take tensors of the CPU or of Ascend NPUs. None: this process is alone.
    vocab_start_index : int, optional
        The id of the first row of `weight_shard`. By default shards follow each other in the order of the ranks.
    vocab_size : int, optional
        Number of entries of the whole vocabulary. If given, it is compared with the number of rows of all shards.
    reduction, ignore_index, grad_loss
        As in `ascend_grad.linear_cross_entropy`, the same on every rank.
    reduce_input_grad : True, False or "scatter", default True
        The input's gradient is a sum over the ranks. True: every rank gets the whole sum; "scatter": every rank gets
        the sum's rows ``slice(*vocab_range(BT, comm.rank, comm.size))``; False: every rank gets its own summand, in
        float32 (float64 if `input` is float64).
    deterministic : bool, default False
        Add in rank order. All ranks then get the same bits, in every run with the same number of ranks.
    return_grad, output_mask
        As in `ascend_grad.linear_cross_entropy`, the same on every rank.
    workspace_bytes, filter_eps
        As in `ascend_grad.fused_linear_cross_entropy_loss_grad`; the first two are the same on every rank.
    token_weight
        As in `ascend_grad.linear_cross_entropy`, the same on every rank. With `target_prob`, `target` has the shape
        (BT, K). Smoothing spreads over the whole vocabulary.
    class_weight : array_like, shape (V of this rank,), optional
        The class weights and the bias of this rank's entries, in the order of the rows of `weight_shard`. All ranks
        pass them, or none.
    target_prob, label_smoothing, lse_square_scale, temperature, denominator
        As in `ascend_grad.linear_cross_entropy`, the same on every rank. With `target_prob`, `target` has the shape
        (BT, K). Smoothing spreads over the whole vocabulary.
    bias : array_like, shape (V of this rank,), optional
        The class weights and the bias of this rank's entries, in the order of the rows of `weight_shard`. All ranks
        pass them, or none.
    logit_scale, softcap
        As in `ascend_grad.linear_cross_entropy`, the same on every rank. With `target_prob`, `target` has the shape
        (BT, K). Smoothing spreads over the whole vocabulary.
    outputs : sequence of {"lse", "log_prob", "entropy", "predicted", "correct"}, default ()
        As in `ascend_grad.linear_cross_entropy`, the same on every rank.
    grad_lse, grad_log_prob, grad_entropy : array_like, shape (BT,), optional
        Upstream gradients of outputs, the same on every rank, as in `ascend_grad.linear_cross_entropy_backward`. They
        add to the gradients of the loss.
    backend, num_threads
        As in `ascend_grad.fused_linear_cross_entropy_loss_grad`; the first two are the same on every rank.

    Returns
    -------
    loss : ndarray, shape () or (BT,)
        The loss, on every rank; float32, or float64 if `input` is float64.
    input_grad : ndarray, shape (BT, H), or None
        The gradient with respect to `input`, in its dtype. `reduce_input_grad` changes rows and dtype as said there.
    weight_grad : ndarray, shape (V of this rank, H), or None
        The gradient with respect to `weight_shard`, in its dtype.
    bias_grad : ndarray, shape (V of this rank,), or None
        The gradient with respect to this rank's `bias`, in its dtype. The field exists if `bias` is given.
    lse, log_prob, entropy, predicted, correct : ndarray
        The requested outputs, as of the undivided problem, on every rank. The predicted entry is the lowest id of the
        whole vocabulary with the largest logit.

    Raises
    ------
    ParamNullptrError
        161001: `input`, `weight_shard` or `target` is None.
    ParamInvalidError
        161002: an argument is not as described or differs between ranks, or the shards have gaps or overlap. Options
        are given for arrays on a device.
    BackendUnavailableError
        The backend of a device is requested for a call with options.
    RankError
        Another rank raised an exception; the message names the rank.

    Notes
    -----
    Results are arrays of the library that the arguments belong to.

    Arrays on a device are results of `ascend_grad.npu.asarray`, or tensors of torch_npu, in float16 or bfloat16. If all
    ranks pass such arrays, the results are on the same device. Each rank's part of a gradient is then rounded to 16
    bits before the parts are added in float32. A `grad_loss` with a number for each row has to be on the device, too.
    Calls with such arrays wait for the device.

    If one rank raises an exception, every rank raises one. Exceptions of the engine itself (a rank died) are passed on.

    One call makes these collective operations:

    - a gathering of 1024 bytes from each rank, to compare the arguments;
    - the maximum of BT numbers, and the sum of 5 BT numbers, in float64, per row chunk;
    - the sum of BT H numbers in float32 (float64). If every rank gets the whole sum and `deterministic` is False, it is
      made per row chunk, too: the gradients of one chunk are transferred while the next chunk is computed.

    For arrays on devices all rows are one chunk, and the statistics are the maximum of BT numbers and the sum of 2 BT
    numbers in float32.

    Calls with options are computed on the host. All rows are one chunk, and logits are computed twice. The statistics
    of rows are these, in float64:

    - the maximum of BT numbers, twice if ``"predicted"`` or ``"correct"`` is requested;
    - the sum of BT (4 + K) numbers, K being the number of targets of a row, or BT (4 + 2 K) with `class_weight`.

    Losses, log-probabilities and entropies keep a relative error of 1e-4 where a target is almost certain, down to
    1 - p = 1e-12, unless a device computes the statistics of rows. So does the gradient at the target, up to its
    rounding to 16 bits.

    Examples
    --------
    Under ``mpiexec -n 2``, pass ``comm=MPI.COMM_WORLD`` and half of the weight on each rank. Here a single process:

    >>> import numpy as np
    >>> from ascend_grad import parallel
    >>> start, stop = parallel.vocab_range(4, 0, 1)
    >>> loss, input_grad, weight_grad = parallel.linear_cross_entropy(
    ...     np.eye(2), np.zeros((4, 2))[start:stop], np.array([0, 3]), comm=None, vocab_start_index=start
    ... )
    >>> loss.round(3)
    np.float64(1.386)
    >>> weight_grad.T
    array([[-0.375,  0.125,  0.125,  0.125],
           [ 0.125,  0.125,  0.125, -0.375]])
    """
    ranks = collectives(comm, "comm", _NAME)
    attempt = Attempt(_NAME)
    values = [
        input, weight_shard, target, reduction, ignore_index, grad_loss, deterministic, return_grad, output_mask,
        workspace_bytes, filter_eps, token_weight, class_weight, target_prob, label_smoothing, lse_square_scale,
        temperature, denominator, bias, logit_scale, softcap, outputs, grad_lse, grad_log_prob, grad_entropy
    ]  # fmt: skip
    execution = {"backend": backend, "num_threads": num_threads}

    def prepare() -> tuple[Shard, dict[str, Any]]:
        share = _checked_share(reduce_input_grad)
        shard = make_shard(checked(VOCABULARY_PARALLEL, values), ranks, vocab_start_index, vocab_size, share, execution)
        facts = shard.facts()
        facts["same"]["reduce_input_grad"] = share
        return shard, facts

    prepared = attempt.run(prepare)
    cards = attempt.tell(ranks, None if prepared is None else prepared[1])
    assert prepared is not None  # otherwise tell() has raised
    shard, _ = prepared
    shard.place(cards)
    return shard.convert_results(shard.solve(attempt, shard.count), attempt, ranks)


def _checked_share(value: object) -> Share:
    expected = "True, False or 'scatter'"
    if isinstance(value, str):
        if value != "scatter":
            raise ParamInvalidError(f"reduce_input_grad: expected {expected}, got {shown(value)}", operator=_NAME)
        return "scatter"
    return truth_value(value, "reduce_input_grad", _NAME, expected)
