"""Linear cross-entropy over a vocabulary that is split over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack

from numpy.typing import ArrayLike, NDArray

from .._call import Operator, checked
from ..arguments import shown, truth_value
from ..errors import ParamInvalidError
from ..operators import losses
from ..operators.options import OUTPUT_GRADIENTS
from ..operators.ranks import VOCABULARY_PARALLEL, VOCABULARY_PARALLEL_BACKWARD
from ..operators.results import LinearCrossEntropyGradients, LossResult
from ..operators.signatures import Words, completed, options_like, with_options
from .agreement import Attempt
from .device_shard import make_shard
from .shard import Shard, check_entries
from .sums import Share
from .transports import collectives

if TYPE_CHECKING:
    from mpi4py.MPI import Comm
    from torch.distributed import ProcessGroup

    from ..option_types import RankGradientOptions, RankLossOptions
    from .communicators import Communicator

#: Options of all functions over ranks.
SHARD_OPTIONS = {"vocab_start_index": None, "vocab_size": None}
#: Options of the loss over ranks: the options of the undivided problem, and upstream gradients of the outputs.
LOSS_OPTIONS = {
    **SHARD_OPTIONS,
    "deterministic": False,
    **options_like(losses.linear_cross_entropy, ("vocab_start_index",)),
    **dict.fromkeys(OUTPUT_GRADIENTS),
}
_GRADIENT_OPTIONS = {name: LOSS_OPTIONS[name] for name in LOSS_OPTIONS if name not in ("return_grad", "outputs")}
WORDS = Words(classes=", shape (V of this rank,)")


@with_options(LOSS_OPTIONS, WORDS, like=losses.linear_cross_entropy)
def linear_cross_entropy(
    input: ArrayLike,
    weight_shard: ArrayLike,
    target: ArrayLike,
    *,
    comm: Communicator | Comm | ProcessGroup | None,
    reduce_input_grad: Literal[True, False, "scatter"] = True,
    **options: Unpack[RankLossOptions[ArrayLike, float]],
) -> LossResult[NDArray]:
    """Compute the cross-entropy loss of a linear layer and its gradients, with the vocabulary split over ranks.

    All ranks of `comm` call it with the same tokens, each with its own rows of the weight. Loss and gradients are what
    `ascend_grad.linear_cross_entropy` computes from the whole weight::

        loss, input_grad, weight_grad = parallel.linear_cross_entropy(input, weight_shard, target, comm=comm)

    All ranks pass `class_weight`, or none, in the order of the rows of `weight_shard`; likewise `bias`. The other
    options are the same on all ranks, but for `num_threads`.

    Parameters
    ----------
    input : array_like, shape (BT, H)
        The layer's input, the same on every rank; float32, float16, bfloat16 or float64.
    weight_shard : array_like, shape (V of this rank, H)
        This rank's rows of the layer's weight, of the dtype of `input`; there may be none.
    target : array_like of any integer dtype, shape (BT,), or (BT, K) with `target_prob`
        Ids in the whole vocabulary, or `ignore_index`; the same on every rank.
    comm : Communicator, mpi4py.MPI.Comm, torch.distributed.ProcessGroup or None
        The ranks. A process group has to take tensors of the CPU or of Ascend NPUs. None: there is only this process.
    vocab_start_index : int, optional
        The id of the first row of `weight_shard`. By default shards follow each other in the order of the ranks.
    vocab_size : int, optional
        Number of entries of the whole vocabulary. If given, it is compared with the number of rows of all shards.
    reduce_input_grad : True, False or "scatter", default True
        The input's gradient is a sum over the ranks. True: every rank gets the whole sum; "scatter": every rank gets
        the sum's rows ``slice(*vocab_range(BT, comm.rank, comm.size))``; False: every rank gets its own summand, in
        float32 (float64 if `input` is float64).
    deterministic : bool, default False
        Add in rank order. All ranks then get the same bits, in every run with the same number of ranks.
    .. options:: class_weight bias
    grad_lse, grad_log_prob, grad_entropy : array_like, shape (BT,), optional
        The gradients with respect to the outputs, as in `ascend_grad.linear_cross_entropy_backward`.

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
    ParamInvalidError
        161002: an argument is not as described or differs between ranks, or the shards have gaps or overlap. Arrays
        are on a device, with options that it does not compute.
    BackendUnavailableError
        The backend of a device is requested for a call with options that it does not compute.
    RankError
        Another rank raised an exception; the message names the rank.

    Notes
    -----
    Results are arrays of the library that the arguments belong to.

    Arrays on a device are results of `ascend_grad.npu.asarray`, or tensors of torch_npu, in float16 or bfloat16. If all
    ranks pass such arrays, the results are on the same device. Each rank's part of a gradient is then rounded to 16
    bits before the parts are added in float32. A `grad_loss` with a number for each row also has to be on the device.
    Calls with such arrays wait for the device, which takes the options that it takes without ranks.

    If one rank raises an exception, every rank raises one. Exceptions of the transport (a rank died) are passed on.

    One call makes these collective operations:

    - a gathering of 1024 bytes from each rank, to compare the arguments;
    - with `class_weight`, the sum of BT K numbers in float64, K being the number of targets of a row;
    - the maximum of BT numbers, and the sum of BT (4 + K) numbers, in float64, per row chunk. If ``"predicted"`` or
      ``"correct"`` is requested, there is one more maximum of BT numbers;
    - the sum of BT H numbers in float32 (float64). If every rank gets the whole sum and `deterministic` is False, it is
      also made per row chunk: the gradients of one chunk are transferred while the next chunk is computed.

    For arrays on devices all rows are one chunk, and the statistics are in float32.

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
    given = completed(options, LOSS_OPTIONS, "linear_cross_entropy")
    arrays = input, weight_shard, target
    return _solved(VOCABULARY_PARALLEL, arrays, given, comm, reduce_input_grad)


@with_options(_GRADIENT_OPTIONS, WORDS, like=linear_cross_entropy)
def linear_cross_entropy_backward(
    input: ArrayLike,
    weight_shard: ArrayLike,
    target: ArrayLike,
    *,
    comm: Communicator | Comm | ProcessGroup | None,
    lse: ArrayLike,
    entropy: ArrayLike | None = None,
    reduce_input_grad: Literal[True, False, "scatter"] = True,
    **options: Unpack[RankGradientOptions[ArrayLike, float]],
) -> LinearCrossEntropyGradients:
    """Compute the gradients of `linear_cross_entropy` and of its outputs, for upstream gradients that are known later.

    All ranks of `comm` call it with the same tokens, each with its own rows of the weight. The gradients are what
    `ascend_grad.linear_cross_entropy_backward` computes from the whole weight::

        gradients = parallel.linear_cross_entropy_backward(x, weight_shard, target, comm=comm, lse=lse, grad_loss=1.0)

    The logits are computed again. Upstream gradients that are None stand for 0, `grad_loss` among them.

    Parameters
    ----------
    lse : array_like, shape (BT,)
        The output of `linear_cross_entropy` with this name, of any of the four dtypes; the same on every rank.
    entropy : array_like, shape (BT,), optional
        The output with this name. It is required if `grad_entropy` is given.

    Returns
    -------
    input_grad, weight_grad, bias_grad : ndarray or None
        As in `linear_cross_entropy`.

    Raises
    ------
    ParamNullptrError
        161001: a required array is None, or `entropy` is None and `grad_entropy` is given.
    ParamInvalidError
        161002: all upstream gradients are None, or as in `linear_cross_entropy`.

    Notes
    -----
    One call makes the collective operations of `linear_cross_entropy` without the sums of the statistics. Arrays on a
    device are as in `linear_cross_entropy`.

    The gradient at a target whose probability is 1 up to a rounding error is 0, where `linear_cross_entropy` keeps its
    digits.

    Examples
    --------
    >>> import numpy as np
    >>> from ascend_grad import parallel
    >>> x, w, target = np.eye(2), np.zeros((4, 2)), np.array([0, 3])
    >>> result = parallel.linear_cross_entropy(x, w, target, comm=None, return_grad=False, outputs=("lse",))
    >>> gradients = parallel.linear_cross_entropy_backward(x, w, target, comm=None, lse=result.lse, grad_loss=1.0)
    >>> gradients.weight_grad.T
    array([[-0.375,  0.125,  0.125,  0.125],
           [ 0.125,  0.125,  0.125, -0.375]])
    """
    given = completed(options, _GRADIENT_OPTIONS, "linear_cross_entropy_backward")
    given["entropy"] = entropy
    arrays = input, weight_shard, target, lse
    return _solved(VOCABULARY_PARALLEL_BACKWARD, arrays, given, comm, reduce_input_grad)


def _solved(
    operator: Operator,
    arrays: Sequence[ArrayLike],
    options: dict[str, Any],
    comm: object,
    reduce_input_grad: object,
) -> Any:
    """Return the results of a call. `arrays` are the first parameters, and `options` has the others by name."""
    name = operator.name
    ranks = collectives(comm, "comm", name)
    attempt = Attempt(name)

    def prepare() -> tuple[Shard, dict[str, Any]]:
        share = _checked_share(reduce_input_grad, name)
        check_entries(arrays[1], options, ranks, name)
        call = checked(operator, [*arrays, *(options[each] for each in operator.parameters[len(arrays) :])])
        shard = make_shard(call, ranks, share, options)
        facts = shard.facts()
        facts["same"]["reduce_input_grad"] = share
        return shard, facts

    prepared = attempt.run(prepare)
    records = attempt.exchange_records(ranks, None if prepared is None else prepared[1])
    assert prepared is not None  # otherwise exchange_records() has raised
    shard, _ = prepared
    shard.place(records)
    return shard.in_library(shard.solve(attempt, shard.count), attempt, ranks)


def _checked_share(value: object, operator: str) -> Share:
    expected = "True, False or 'scatter'"
    if isinstance(value, str):
        if value != "scatter":
            raise ParamInvalidError(f"reduce_input_grad: expected {expected}, got {shown(value)}", operator=operator)
        return "scatter"
    return truth_value(value, "reduce_input_grad", operator, expected)
