"""The cross-entropy loss of a linear layer, with its gradients, in bounded memory."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import torch

import ascend_grad as ag

from ..arguments import shown
from ..errors import ParamInvalidError, ParamTypeError
from ..operators.results import LossResult
from ..operators.signatures import completed, options_of, with_options
from .cross_entropy import WEIGHT, WORDS
from .linear_loss import Names, Options, autocast_device, checked, refuse, unrounded_loss
from .loss_operators import with_probabilities
from .outputs import requested
from .positions import loss_of_positions

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.nn import LinearCrossEntropyOptions

    from ..option_types import Outputs
    from .option_types import LinearOptions
    from .vocabulary_parallel import VocabularyShard

_NAME = Names().operator

#: The options that torch's function does not have, without the outputs.
_OPTIONS = options_of(without=("bias", "class_weight", "label_smoothing", "outputs"))
_PARAMETERS = f"""{WEIGHT}
outputs : sequence of {{"lse", "log_prob", "entropy", "predicted", "correct"}}, default ()
    Further results. The first three are differentiable. "log_prob" has the shape of `target`. "correct" exists without
    `target_prob`.
"""
_WORDS = WORDS._replace(
    rows=", shape (N,) or ()", classes=", shape (C,)", targets=", shape (N, K) or (K,)", parameters=_PARAMETERS
)


@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, outputs: tuple[()] = (), **further: Unpack[LinearOptions]
) -> Tensor: ...


@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, outputs: Outputs, **further: Unpack[LinearOptions]
) -> LossResult[Tensor]: ...


@with_options(_OPTIONS, _WORDS, like=ag.linear_cross_entropy)
def linear_cross_entropy(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    *,
    linear_bias: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    ignore_index: int | None = None,
    label_smoothing: float | torch.Tensor = 0.0,
    options: LinearCrossEntropyOptions | None = None,
    outputs: Outputs = (),
    filter_eps: float | torch.Tensor = 0.0,
    num_threads: int | None = None,
    group: ProcessGroup | None = None,
    vocab_start_index: int | None = None,
    vocab_size: int | None = None,
    **further: Any,
) -> torch.Tensor | LossResult[torch.Tensor]:
    r"""Compute the loss of `torch.nn.functional.linear_cross_entropy` without storing all logits.

    The logits are ``input @ linear_weight.T``. The loss of a row is ``logsumexp(row) - row[target]``. The result is
    the mean by default::

        loss = agt.linear_cross_entropy(input, linear_weight, target)

    The first arguments are torch's. The notes of `ascend_grad.linear_cross_entropy` have the formula.

    Parameters
    ----------
    input : torch.Tensor, shape (..., in_features)
        The layer's input; float32, float16, bfloat16 or float64. Arrays of rows have its shape without the last
        dimension; N below stands for all of these dimensions.
    linear_weight : torch.Tensor, shape (C, in_features) or (C, d1, ..., in_features)
        The layer's weight, of the dtype of `input`, in any layout. With further dimensions the loss has several
        dimensions: the classes are predicted separately at each of d1 * ... positions, from the same `input` of shape
        (N, in_features). `target`, `token_weight`, `target_prob` and a tensor of temperatures have the dimensions d1,
        ... after N, `linear_bias` after C. On the CPU, such losses of 16 bits are computed on a float32 copy of the
        weight.
    target : torch.Tensor of an integer dtype, shape (N,) or (), or (N, K) or (K,) with `target_prob`; or floating
        The class of each row, in [0, C), or `ignore_index`. A tensor of a floating dtype, shape (N, C) or (C,), has
        probabilities of all classes. Of tensors on an Ascend NPU another value is no error: the row's loss, its row of
        the gradient of `input` and all of that of `linear_weight` are NaN.
    linear_bias : torch.Tensor, shape (C,), optional
        The layer's bias, of any of the four dtypes.
    ignore_index : int, optional
        Rows with this target have no loss and no gradient; None is -100.
    .. options:: label_smoothing
    options : torch.nn.LinearCrossEntropyOptions, optional
        Accepted, without an effect: memory is bounded, sums are in float32 or better, and ``retain_graph=True`` works.
    group : torch.distributed.ProcessGroup, optional
        The processes that the classes are split over, as in `ascend_grad.parallel.linear_cross_entropy`. Each process
        has its rows of `linear_weight`; all have the same `input` and `target`, and get the same loss and gradient of
        `input`. All processes call this function, and backward, together. Each process has its classes' elements of
        `linear_bias` and `weight`; the other options are the same in all processes. Tensors are on the CPU in all
        processes, or on Ascend NPUs in all of them. A group of hccl alone accepts only tensors on torch's current
        device.
    vocab_start_index, vocab_size : int, optional
        Only with a group: the class of the first row of `linear_weight`, and the number of all classes.
    .. options::

    Returns
    -------
    torch.Tensor or LossResult
        The loss in the dtype that torch gives it: the dtype of `input`. Under autocast it is float32, or float64 if
        `input` is float64. With `outputs` it is the first field of a named tuple, `loss`, and the outputs are others.

    Raises
    ------
    NotImplementedError
        A keyword is not supported; or probabilities or an option require grad that the loss has no gradient for:
        `weight`, `token_weight`, `target_prob`, `temperature`. Probabilities of all classes are not supported with a
        group or with several dimensions of `linear_weight`.
    RankError
        Another process of the group failed; the message names it.

    Notes
    -----
    If `reduction` is "mean" or "sum", the gradients are computed with the loss, except in float16. Only the gradients
    that are needed are computed: a frozen layer costs one product less. With ``retain_graph=True`` a second backward
    computes them again. The gradients of the loss can be differentiated once more, if no process group is given, and
    the loss has forward-mode derivatives. Second derivatives of outputs and third derivatives raise.

    Examples
    --------
    >>> import torch
    >>> import ascend_grad.torch as agt
    >>> hidden = torch.eye(2, requires_grad=True)
    >>> weight = torch.zeros(4, 2, requires_grad=True)
    >>> agt.linear_cross_entropy(hidden, weight, torch.tensor([0, 3])).backward()
    >>> weight.grad.T
    tensor([[-0.3750,  0.1250,  0.1250,  0.1250],
            [ 0.1250,  0.1250,  0.1250, -0.3750]])
    """
    given = with_probabilities(completed(further, _OPTIONS, _NAME), target)
    own = {"bias": linear_bias, "class_weight": weight, "label_smoothing": label_smoothing}
    loss_options = {**own, **given, "outputs": outputs}
    shard = _shard(group, vocab_start_index, vocab_size)
    function = _rounded_loss_over_group if group is not None and torch.compiler.is_compiling() else _rounded_loss
    arguments = input, linear_weight, target, reduction, ignore_index, loss_options, options, filter_eps, num_threads
    return function(*arguments, shard)


def _rounded_loss(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    reduction: Literal["mean", "sum", "none"],
    ignore_index: int | None,
    loss_options: Options,
    torch_options: LinearCrossEntropyOptions | None,
    filter_eps: float | torch.Tensor,
    num_threads: int | None,
    shard: VocabularyShard | None,
) -> torch.Tensor | LossResult[torch.Tensor]:
    checked(shard, partial(_check_torch_options, torch_options, input))
    has_positions = isinstance(linear_weight, torch.Tensor) and linear_weight.dim() > 2
    found = (loss_of_positions if has_positions else unrounded_loss)(
        input,
        linear_weight,
        target,
        reduction,
        ignore_index,
        loss_options,
        filter_eps=filter_eps,
        num_threads=num_threads,
        shard=shard,
    )
    if not torch.is_autocast_enabled(autocast_device(input)):
        found["loss"] = found["loss"].to(input.dtype)
    outputs = loss_options["outputs"]
    return requested(found, outputs) if outputs else found["loss"]


# Not `torch.compiler.disable`, which imports the compiler at once. PyTorch uses this function in its optimizers.
_rounded_loss_over_group = torch._disable_dynamo(_rounded_loss)


def _shard(group: ProcessGroup | None, vocab_start_index: int | None, vocab_size: int | None) -> VocabularyShard | None:
    if group is None:
        for name, value in (("vocab_start_index", vocab_start_index), ("vocab_size", vocab_size)):
            if value is not None:
                raise ParamInvalidError(f"{name}: expected None without a group, got {shown(value)}", operator=_NAME)
        return None
    from .vocabulary_parallel import VocabularyShard

    return VocabularyShard(group, vocab_start_index, vocab_size)


def _check_torch_options(options: object, input: torch.Tensor) -> None:
    """Accept the options that torch has for memory and speed, unless sums would have to be in a wider dtype."""
    if options is None:
        return
    kind = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if kind is None or not isinstance(options, kind):
        expected = "None or torch.nn.LinearCrossEntropyOptions"
        raise ParamTypeError(f"options: expected {expected}, got {shown(options)}", operator=_NAME)
    if options.acc_dtype not in (None, torch.float32) and options.acc_dtype != getattr(input, "dtype", None):
        refuse(_NAME, **{"options.acc_dtype": options.acc_dtype})
