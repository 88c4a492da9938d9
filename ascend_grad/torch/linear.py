"""The cross-entropy loss of a linear layer, with its gradients, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

import torch
from torch.autograd import Function

from ..arguments import MAX_INDEX, integer, real_number, shown, thread_count
from ..errors import AscendGradError, ParamInvalidError, ParamTypeError, rename
from . import operators
from .tensors import are_readable, check_tensors, to_array

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.nn import LinearCrossEntropyOptions

    from .vocabulary_parallel import VocabularyShard

_T = TypeVar("_T")

_NAME = operators.LINEAR

#: Default `ignore_index` of torch's functions.
IGNORE_INDEX = -100


class Names(NamedTuple):
    """Names of the function and its tensors, for errors."""

    operator: str = _NAME
    input: str = "input"
    weight: str = "linear_weight"
    target: str = "target"
    class_weight: str = "weight"


_NAMES = Names()

_SECOND_ORDER = f"{_NAME}: the gradient cannot be differentiated once more (create_graph=True)"


class _LinearCrossEntropy(Function):
    """The loss, in the accumulator's dtype, and the requested gradients.

    Gradients of a mean or a sum are computed with the loss, so that logits are computed once. Backward scales them and
    returns them without a copy, so that a second backward computes them again. Gradients of one loss per row are
    computed in backward, as upstream gradients must be applied before the sum over the rows. So are gradients in
    float16: a loss scale must be applied before the rounding, in which the gradient of a mean would vanish.
    """

    @staticmethod
    def forward(*arguments):
        return operators.loss(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        input, weight, target, grad_loss, *ctx.settings = inputs
        ctx.shard = operators.SHARDS.get(ctx.settings[-1])  # kept alive for backward
        ctx.set_materialize_grads(False)  # would allocate zeros of the weight's size
        ctx.save_for_backward(input, weight, target)
        is_scalable = grad_loss is None and ctx.settings[0] != "none"
        ctx.gradients = [each.detach() for each in output[1:]] if is_scalable else None

    @staticmethod
    def backward(ctx, grad_loss, *second_order):
        if any(each is not None for each in second_order):
            raise RuntimeError(_SECOND_ORDER)
        nothing = (None,) * (2 + len(ctx.settings))
        if grad_loss is None:
            return None, None, *nothing
        reduction, ignore_index, *computed, filter_eps, num_threads, shard = ctx.settings
        wanted = ctx.needs_input_grad[:2]
        input, weight, target, *shared = ctx.saved_tensors
        gradients, ctx.gradients = [each.detach() for each in shared] or ctx.gradients, None
        is_computed = gradients is not None and all(known or not asked for known, asked in zip(computed, wanted))
        if not is_computed:
            _, *gradients = operators.loss(
                input, weight, target, grad_loss, reduction, ignore_index, *wanted, filter_eps, num_threads, shard
            )
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # the compiler refuses a second order itself
            above = () if is_computed else (grad_loss,)  # if computed before, the product below depends on it
            gradients = _Gradients.apply(*gradients, *above, input, weight)
        if is_computed:
            gradients = _scaled(gradients, grad_loss, in_place=not shared)
        return *(gradient if asked else None for gradient, asked in zip(gradients, wanted)), *nothing


class _LinearCrossEntropyOfOperator(_LinearCrossEntropy):
    """The gradient of the registered operator. Its caller has the gradients, too, so backward leaves them unchanged."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        _LinearCrossEntropy.setup_context(ctx, inputs, output)
        if ctx.gradients is not None:
            ctx.save_for_backward(*inputs[:3], *output[1:])  # torch refuses backward if they were changed
            ctx.gradients = None


def _scaled(gradients: Sequence[torch.Tensor], factor: torch.Tensor, in_place: bool) -> Sequence[torch.Tensor]:
    """Multiply gradients by one number. In place, a multiplication by 1 is skipped if the number is on the CPU."""
    if not in_place or torch.is_grad_enabled() or not are_readable((*gradients, factor)):
        return [gradient * factor for gradient in gradients]
    if not factor.is_cpu or to_array(factor, "grad_loss", _NAME)[()] != 1:  # reading it from a device would wait
        for gradient in gradients:
            gradient.mul_(factor)
    return gradients


class _Gradients(Function):
    """Gradients that depend on the arguments of the loss, so that differentiating them raises instead of giving 0."""

    generate_vmap_rule = True

    @staticmethod
    def forward(input_grad, weight_grad, *_):
        return input_grad.view_as(input_grad), weight_grad.view_as(weight_grad)

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Save nothing: backward raises."""

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(_SECOND_ORDER)


operators.register_gradient(_NAME, _LinearCrossEntropyOfOperator)


def linear_cross_entropy(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    *,
    linear_bias: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: LinearCrossEntropyOptions | None = None,
    filter_eps: float = 0.0,
    num_threads: int | None = None,
    group: ProcessGroup | None = None,
    vocab_start_index: int | None = None,
    vocab_size: int | None = None,
) -> torch.Tensor:
    r"""Compute the loss of `torch.nn.functional.linear_cross_entropy` without storing all logits.

    Memory is bounded for all sizes. `options`, which torch has for that purpose, are therefore not needed.

    Parameters
    ----------
    input : torch.Tensor, shape (N, in_features) or (in_features,)
        The layer's input; float32, float16, bfloat16 or float64.
    linear_weight : torch.Tensor, shape (C, in_features)
        The layer's weight, of the dtype of `input`, in any layout.
    target : torch.Tensor of int64 or int32, shape (N,) or ()
        The class of each row, in [0, C), or `ignore_index`. Of tensors on an Ascend NPU another value is no error: the
        row's loss, its row of the gradient of `input` and all of that of `linear_weight` are NaN.
    linear_bias : None
        Not supported.
    weight : torch.Tensor, shape (C,), optional
        A weight for each class. The mean is then the sum of the weighted losses divided by the sum of their weights.
    reduction : {"mean", "sum", "none"}, default "mean"
        The loss is the mean or the sum over the rows that are not ignored, or one number per row, 0 for ignored rows.
    ignore_index : int, optional
        Rows with this target have no loss and no gradient; None is -100.
    label_smoothing : float, default 0.0
        Only 0 is supported.
    options : None
        Not supported.
    filter_eps : float, default 0.0
        As in `ascend_grad.fused_linear_cross_entropy_loss_grad`.
    num_threads : int, optional
        As in `ascend_grad.softmax_backward`.
    group : torch.distributed.ProcessGroup, optional
        The processes that the classes are split over, as in `ascend_grad.parallel.linear_cross_entropy`. Each process
        has its rows of `linear_weight`; all have the same `input` and `target`, and get the same loss and gradient of
        `input`. All processes call this function, and backward, together. `weight` is then not supported. Tensors are
        on the CPU in all processes, or on Ascend NPUs in all of them. A group of hccl alone accepts only tensors on
        torch's current device.
    vocab_start_index, vocab_size : int, optional
        Only with a group: the class of the first row of `linear_weight`, and the number of all classes.

    Returns
    -------
    torch.Tensor
        The loss in the dtype that torch gives it: the dtype of `input`. Under autocast it is float32, or float64 if
        `input` is float64.

    Raises
    ------
    NotImplementedError
        A keyword is not supported, or classes are given as probabilities.
    ParamInvalidError
        161002: a dtype, a shape or a value is not as described (a dtype or a kind: its subclass `ParamTypeError`).
    UnsupportedDeviceError
        361001: the Ascend NPU of the tensors lacks the operator.
    BackendUnavailableError
        A tensor is neither on the CPU nor on a usable Ascend NPU.
    RankError
        Another process of the group failed; the message names it.

    Notes
    -----
    If `reduction` is "mean" or "sum", the gradients are computed with the loss, except in float16 or with class
    weights. Only the gradients that are needed are computed: a frozen layer costs one product less. With
    ``retain_graph=True`` a second backward computes them again. The gradient cannot be differentiated once more.

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
    arguments = (
        input,
        linear_weight,
        target,
        linear_bias,
        weight,
        reduction,
        ignore_index,
        label_smoothing,
        options,
        filter_eps,
        num_threads,
        _shard(group, vocab_start_index, vocab_size),
    )
    return _rounded_loss(*arguments) if group is None else _rounded_loss_over_group(*arguments)


def _rounded_loss(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    linear_bias: torch.Tensor | None,
    weight: torch.Tensor | None,
    reduction: Literal["mean", "sum", "none"],
    ignore_index: int | None,
    label_smoothing: float,
    options: LinearCrossEntropyOptions | None,
    filter_eps: float,
    num_threads: int | None,
    shard: VocabularyShard | None,
) -> torch.Tensor:
    def check() -> None:
        refuse(_NAME, linear_bias=linear_bias, options=options, label_smoothing=label_smoothing or None)
        if shard is not None:
            refuse(f"{_NAME} with a group", weight=weight)

    _run(shard, check)
    loss = unrounded_loss(
        input,
        linear_weight,
        target,
        weight,
        reduction,
        ignore_index,
        filter_eps=filter_eps,
        num_threads=num_threads,
        shard=shard,
    )
    return loss if torch.is_autocast_enabled(_autocast_device(input)) else loss.to(input.dtype)


_rounded_loss_over_group = torch.compiler.disable(_rounded_loss)


def unrounded_loss(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: Literal["mean", "sum", "none"],
    ignore_index: int | None,
    *,
    filter_eps: float = 0.0,
    num_threads: int | None = None,
    shard: VocabularyShard | None = None,
    names: Names = _NAMES,
    zero_if_empty: bool = False,
) -> torch.Tensor:
    """Return the loss in float32, or in float64 if `input` is. A mean over no rows is NaN, or 0 if `zero_if_empty`."""
    _run(shard, partial(_check_arguments, names, input, linear_weight, target, weight, reduction))
    numbers = _run(shard, partial(_as_numbers, names.operator, ignore_index, filter_eps, num_threads))
    ignore_index, filter_eps, num_threads = numbers

    given = input.dtype, linear_weight.dtype
    if torch.is_autocast_enabled(_autocast_device(input)):
        input, linear_weight = _lower_precision(input), _lower_precision(linear_weight)
    _run(shard, partial(_check_dtypes, names, input, linear_weight, given))
    rows, classes = (input, target) if input.dim() == 2 else (input.unsqueeze(0), target.unsqueeze(0))
    computed = reduction if weight is None else "none"
    with_gradients = torch.is_grad_enabled() and computed != "none" and rows.dtype != torch.float16
    arguments = (
        rows,
        linear_weight,
        classes,
        None,
        computed,
        ignore_index,
        with_gradients and rows.requires_grad,
        with_gradients and linear_weight.requires_grad,
        filter_eps,
        num_threads,
    )
    try:
        if shard is None:
            loss, *_ = operators.apply(_LinearCrossEntropy, *arguments, None)
        else:
            loss, *_ = shard.apply(_LinearCrossEntropy, *arguments)
    except AscendGradError as error:
        if shard is None:
            rename(error, names.operator, {"input": names.input, "weight": names.weight, "target": names.target})
        raise
    if weight is not None:
        loss = _weighted(loss, classes, weight, reduction, ignore_index, zero_if_empty)
    elif zero_if_empty and reduction == "mean":
        loss = torch.where((classes != ignore_index).any(), loss, 0)
    return loss.reshape(target.shape) if reduction == "none" else loss


def refuse(operator: str, **arguments: object) -> None:
    """Raise NotImplementedError for arguments that are not None: unsupported options are never silently ignored."""
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"{operator}: {name}: not supported, got {shown(value)}")


def _shard(group: ProcessGroup | None, vocab_start_index: int | None, vocab_size: int | None) -> VocabularyShard | None:
    if group is None:
        for name, value in (("vocab_start_index", vocab_start_index), ("vocab_size", vocab_size)):
            if value is not None:
                raise ParamInvalidError(f"{name}: expected None without a group, got {shown(value)}", operator=_NAME)
        return None
    from .vocabulary_parallel import VocabularyShard

    return VocabularyShard(group, vocab_start_index, vocab_size)


def _run(shard: VocabularyShard | None, check: Callable[[], _T]) -> _T:
    """Return the result of `check()`. If it raises, tell the other processes of a group, which wait for this one."""
    return check() if shard is None else shard.run(_NAME, check)


def _check_arguments(
    names: Names,
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: object,
) -> None:
    operator = names.operator
    check_tensors(operator, **{names.input: input, names.weight: linear_weight, names.target: target})
    _check_shapes(names, input, linear_weight, target)
    if reduction not in ("mean", "sum", "none"):
        raise ParamInvalidError(f"reduction: expected mean, sum or none, got {shown(reduction)}", operator=operator)
    if weight is not None:
        check_tensors(operator, **{names.input: input, names.class_weight: weight})
        words = f"one for each row of {names.weight}"
        _check_shape(operator, names.class_weight, weight, linear_weight.shape[:1], words)


def _as_numbers(
    operator: str, ignore_index: object, filter_eps: object, num_threads: object
) -> tuple[int, float, int | None]:
    """Convert arguments to the schema's types. torch's own errors would name neither function nor argument."""
    if ignore_index is None:
        ignore_index = IGNORE_INDEX
    elif type(ignore_index) is not int:
        ignore_index = integer(ignore_index, "ignore_index", operator)
    if not -MAX_INDEX - 1 <= ignore_index <= MAX_INDEX:
        expected = f"an int in [{-MAX_INDEX - 1}, {MAX_INDEX}]"
        raise ParamInvalidError(f"ignore_index: expected {expected}, got {shown(ignore_index)}", operator=operator)
    if type(filter_eps) is not float:
        filter_eps = real_number(filter_eps, "filter_eps", operator)
    if num_threads is not None:
        num_threads = thread_count(num_threads, operator)
    return ignore_index, filter_eps, num_threads


def _check_dtypes(
    names: Names, input: torch.Tensor, linear_weight: torch.Tensor, given: tuple[torch.dtype, torch.dtype]
) -> None:
    """Check that both dtypes are equal. `given` has the dtypes before autocast, for the message."""
    if linear_weight.dtype != input.dtype:
        message = f"{names.weight}: expected {given[0]}, as {names.input} is, got {given[1]}"
        raise ParamTypeError(message, operator=names.operator)


def _check_shapes(names: Names, input: torch.Tensor, linear_weight: torch.Tensor, target: torch.Tensor) -> None:
    operator = names.operator
    if linear_weight.dim() > 2:
        got = f"got shape {tuple(linear_weight.shape)}"
        raise NotImplementedError(f"{operator}: {names.weight}: losses of several dimensions are not supported, {got}")
    if target.is_floating_point():
        raise NotImplementedError(f"{operator}: {names.target}: probabilities are not supported, got {target.dtype}")
    if input.dim() not in (1, 2):
        message = f"{names.input}: expected shape (N, in_features) or (in_features,), got {tuple(input.shape)}"
        raise ParamInvalidError(message, operator=operator)
    if linear_weight.dim() != 2 or linear_weight.shape[1] != input.shape[-1]:
        message = f"{names.weight}: expected shape (C, {input.shape[-1]}), got {tuple(linear_weight.shape)}"
        raise ParamInvalidError(message, operator=operator)
    _check_shape(operator, names.target, target, input.shape[:-1], f"one for each row of {names.input}")


def _check_shape(operator: str, name: str, tensor: torch.Tensor, shape: torch.Size, words: str) -> None:
    if tensor.shape != shape:
        message = f"{name}: expected shape {tuple(shape)}, {words}, got {tuple(tensor.shape)}"
        raise ParamInvalidError(message, operator=operator)


def _autocast_device(tensor: torch.Tensor) -> str:
    return "npu" if tensor.device.type == "npu" else "cpu"


def _lower_precision(tensor: torch.Tensor) -> torch.Tensor:
    """Convert an argument of a linear layer as autocast does."""
    is_double = tensor.dtype == torch.float64
    return tensor if is_double else tensor.to(torch.get_autocast_dtype(_autocast_device(tensor)))


def _weighted(
    losses: torch.Tensor, target: torch.Tensor, weight: torch.Tensor, reduction: str, ignored: int, zero_if_empty: bool
) -> torch.Tensor:
    """Multiply each row's loss by the weight of its class, and reduce the losses."""
    counted = target != ignored
    weights = weight.to(losses.dtype)[torch.where(counted, target, 0)] * counted
    losses = losses * weights
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    total = weights.sum()
    return losses.sum() / (torch.where(counted.any(), total, 1) if zero_if_empty else total)
