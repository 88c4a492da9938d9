"""The cross-entropy loss of a linear layer, with its gradients, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, Unpack, cast, overload

import torch
from torch.autograd import Function

from ..arguments import MAX_INDEX, integer, shown, thread_count
from ..errors import AscendGradError, ParamInvalidError, ParamTypeError, rename
from ..operators.options import OUTPUTS
from ..operators.results import LossResult
from . import operators
from .gradients import scaled, second_order_error, without_second_order
from .outputs import Computed, check_outputs, computed_outputs, no_lse_error, requested, statistics
from .tensors import check_tensors, refuse_jit_trace

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.nn import LinearCrossEntropyOptions

    from ..option_types import Outputs
    from .option_types import LinearOptions
    from .vocabulary_parallel import VocabularyShard

_T = TypeVar("_T")

_NAME = operators.LINEAR

#: Default `ignore_index` of torch's functions.
IGNORE_INDEX = -100


class Names(NamedTuple):
    """Names of the function and its tensors, for errors; fields are `ascend_grad.linear_cross_entropy`'s names."""

    operator: str = _NAME
    input: str = "input"
    weight: str = "linear_weight"
    target: str = "target"
    class_weight: str = "weight"
    bias: str = "linear_bias"


_NAMES = Names()


class Options(NamedTuple):
    """The options of the loss: the arguments of `linear_cross_entropy` with the same names."""

    linear_bias: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    token_weight: torch.Tensor | None = None
    target_prob: torch.Tensor | None = None
    label_smoothing: float | torch.Tensor = 0.0
    lse_square_scale: float | torch.Tensor = 0.0
    temperature: float | torch.Tensor = 1.0
    denominator: float | torch.Tensor | None = None
    logit_scale: float | torch.Tensor = 1.0
    softcap: float | torch.Tensor | None = None
    outputs: Sequence[str] = ()


#: The number of tensors among the first arguments of `operators.Loss`, without the upstream gradient.
_TENSORS = operators.Loss._fields.index("grad_loss")

#: The arguments of `operators.Loss` that the loss has a gradient for.
_DIFFERENTIABLE = [operators.Loss._fields.index(name) for name in ("input", "weight", "bias")]


class _LinearCrossEntropy(Function):
    """The operator of `operators.Loss`: the loss, the requested gradients, and the requested outputs.

    Gradients of a mean or a sum are computed with the loss, so that logits are computed once. Backward scales them and
    returns them without a copy, so that a second backward computes them again. Gradients of one loss per row are
    computed in backward, as upstream gradients must be applied before the sum over the rows. So are gradients in
    float16: a loss scale must be applied before the rounding, in which the gradient of a mean would vanish. If an
    output has an upstream gradient, backward computes the gradients of loss and outputs together.
    """

    @staticmethod
    def forward(*arguments):
        return operators.loss(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        problem = operators.Loss(*inputs)
        ctx.settings = inputs[_TENSORS + 1 :]
        ctx.shard = None if problem.shard is None else operators.SHARDS.get(problem.shard)  # kept alive for backward
        ctx.set_materialize_grads(False)  # would allocate zeros of the weight's size
        ctx.save_for_backward(*inputs[:_TENSORS], *statistics(problem.outputs, output[4], output[6]))
        is_scalable = problem.grad_loss is None and problem.reduction != "none"
        ctx.gradients = [each.detach() for each in output[1:4]] if is_scalable else None

    @staticmethod
    def backward(ctx, grad_loss, *others):
        if any(each is not None for each in others[:3]):
            raise second_order_error(_NAME)
        nothing = [None] * len(operators.Loss._fields)
        of_outputs = others[3:6]  # of lse, log_prob and entropy
        upstream = [each for each in (grad_loss, *of_outputs) if each is not None]
        if not upstream:
            return tuple(nothing)
        saved = ctx.saved_tensors  # each access unpacks all of them
        tensors, (lse, entropy), shared = saved[:_TENSORS], saved[_TENSORS : _TENSORS + 2], saved[_TENSORS + 2 :]
        problem = operators.Loss._make((*tensors, None, *ctx.settings))
        computed = problem.input_grad, problem.weight_grad, problem.bias_grad
        wanted = [ctx.needs_input_grad[i] for i in _DIFFERENTIABLE]
        gradients, ctx.gradients = [each.detach() for each in shared] or ctx.gradients, None
        is_computed = (
            gradients is not None
            and upstream == [grad_loss]
            and all(known or not asked for known, asked in zip(computed, wanted))
        )
        if not is_computed:
            input_grad, weight_grad, bias_grad = wanted
            again = problem._replace(
                grad_loss=grad_loss, input_grad=input_grad, weight_grad=weight_grad, bias_grad=bias_grad, outputs=[]
            )
            if all(each is None for each in of_outputs):
                gradients = operators.loss(*again)[1:4]
            elif lse is None:
                raise no_lse_error(_NAME)
            else:
                gradients = operators.loss_backward(lse, entropy, *of_outputs, *again)
        leaves = [each for each in (problem.input, problem.weight, problem.bias) if each is not None]
        # If the gradients were computed before, the product below depends on the upstream gradient.
        gradients = without_second_order(_NAME, gradients, leaves if is_computed else [*upstream, *leaves])
        if is_computed:
            gradients = scaled(gradients, grad_loss, in_place=not shared)
        for i, gradient, asked in zip(_DIFFERENTIABLE, gradients, wanted):
            nothing[i] = gradient if asked else None
        return tuple(nothing)


class _LinearCrossEntropyOfOperator(_LinearCrossEntropy):
    """The gradient of the registered operator. Its caller has the gradients, too, so backward leaves them unchanged."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        _LinearCrossEntropy.setup_context(ctx, inputs, output)
        if ctx.gradients is not None:
            saved = statistics(operators.Loss(*inputs).outputs, output[4], output[6])
            ctx.save_for_backward(*inputs[:_TENSORS], *saved, *output[1:4])  # torch refuses backward if they changed
            ctx.gradients = None


operators.register_gradient(_NAME, _LinearCrossEntropyOfOperator)


@overload
def linear_cross_entropy(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    *,
    outputs: tuple[()] = (),
    **further: Unpack[LinearOptions],
) -> torch.Tensor: ...


@overload
def linear_cross_entropy(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    *,
    outputs: Outputs,
    **further: Unpack[LinearOptions],
) -> LossResult[torch.Tensor]: ...


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
    token_weight: torch.Tensor | None = None,
    target_prob: torch.Tensor | None = None,
    lse_square_scale: float | torch.Tensor = 0.0,
    temperature: float | torch.Tensor = 1.0,
    denominator: float | torch.Tensor | None = None,
    logit_scale: float | torch.Tensor = 1.0,
    softcap: float | torch.Tensor | None = None,
    outputs: Outputs = (),
    filter_eps: float | torch.Tensor = 0.0,
    num_threads: int | None = None,
    group: ProcessGroup | None = None,
    vocab_start_index: int | None = None,
    vocab_size: int | None = None,
) -> torch.Tensor | LossResult[torch.Tensor]:
    r"""Compute the loss of `torch.nn.functional.linear_cross_entropy` without storing all logits.

    The first arguments are torch's. The arguments from `token_weight` on are this library's; the formula with all of
    them is that of `ascend_grad.linear_cross_entropy`.

    Parameters
    ----------
    input : torch.Tensor, shape (N, in_features) or (in_features,)
        The layer's input; float32, float16, bfloat16 or float64.
    linear_weight : torch.Tensor, shape (C, in_features) or (C, d1, ..., in_features)
        The layer's weight, of the dtype of `input`, in any layout. With further dimensions the loss has several
        dimensions: the classes are predicted separately at each of d1 * ... positions, from the same `input` of shape
        (N, in_features). `target`, `token_weight`, `target_prob` and a tensor of temperatures have the dimensions d1,
        ... after N, `linear_bias` after C. On the CPU, such losses of 16 bits are computed on a float32 copy of the
        weight.
    target : torch.Tensor of int64 or int32, shape (N,) or (), or (N, K) or (K,) with `target_prob`
        The class of each row, in [0, C), or `ignore_index`. Of tensors on an Ascend NPU another value is no error: the
        row's loss, its row of the gradient of `input` and all of that of `linear_weight` are NaN.
    linear_bias : torch.Tensor, shape (C,), optional
        The layer's bias, of any of the four dtypes.
    weight : torch.Tensor, shape (C,), optional
        A weight for each class. The mean is then the sum of the weighted losses divided by the sum of their weights.
    reduction : {"mean", "sum", "none"}, default "mean"
        The loss is the mean or the sum over the rows that are not ignored, or one number per row, 0 for ignored rows.
    ignore_index : int, optional
        Rows with this target have no loss and no gradient; None is -100.
    label_smoothing : float or torch.Tensor, shape (), default 0.0
        The share of the loss that goes to all classes, from 0 to 1.
    options : torch.nn.LinearCrossEntropyOptions, optional
        Accepted, without an effect: memory is bounded, sums are in float32 or better, and ``retain_graph=True`` works.
    token_weight : torch.Tensor, shape (N,) or (), optional
        Factors of the losses of the rows. The mean is then divided by the sum of the products with `weight`.
    target_prob : torch.Tensor, shape (N, K) or (K,), optional
        Probabilities of K classes in each row. A class that is `ignore_index` adds nothing, and a row of such classes
        alone is ignored.
    lse_square_scale : float or torch.Tensor, shape (), default 0.0
        The factor of the squared logarithm of the sum of the exponentials (z-loss).
    temperature : float or torch.Tensor, shape (N,) or (), default 1.0
        The divisor of the logits, above 0: one number, or one for each row.
    denominator : float or torch.Tensor, shape (), optional
        The divisor of a mean, above 0.
    logit_scale : float or torch.Tensor, shape (), default 1.0
        The factor of the layer's results.
    softcap : float or torch.Tensor, shape (), optional
        The bound of the logits before `temperature` divides them, above 0. None: the logits are not bounded.
    outputs : sequence of {"lse", "log_prob", "entropy", "predicted", "correct"}, default ()
        Further results. The first three are differentiable, too.
    filter_eps : float or torch.Tensor, shape (), default 0.0
        As in `ascend_grad.fused_linear_cross_entropy_loss_grad`.
    num_threads : int, optional
        As in `ascend_grad.softmax_backward`.
    group : torch.distributed.ProcessGroup, optional
        The processes that the classes are split over, as in `ascend_grad.parallel.linear_cross_entropy`. Each process
        has its rows of `linear_weight`; all have the same `input` and `target`, and get the same loss and gradient of
        `input`. All processes call this function, and backward, together. Each process has its classes' elements of
        `linear_bias` and `weight`; the other options are the same in all processes. Tensors are on the CPU in all
        processes, or on Ascend NPUs in all of them. A group of hccl alone accepts only tensors on torch's current
        device.
    vocab_start_index, vocab_size : int, optional
        Only with a group: the class of the first row of `linear_weight`, and the number of all classes.

    Returns
    -------
    torch.Tensor or LossResult
        The loss in the dtype that torch gives it: the dtype of `input`. Under autocast it is float32, or float64 if
        `input` is float64. With `outputs` it is the first field of a named tuple, `loss`, and the outputs are others.

    Raises
    ------
    NotImplementedError
        A keyword is not supported, `target` has a floating dtype (probabilities of all classes), or an option requires
        grad that the loss has no gradient for: `weight`, `token_weight`, `target_prob`, `temperature`.
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
    If `reduction` is "mean" or "sum", the gradients are computed with the loss, except in float16. Only the gradients
    that are needed are computed: a frozen layer costs one product less. With ``retain_graph=True`` a second backward
    computes them again. The gradient cannot be differentiated once more.

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
    loss_options = Options(
        linear_bias, weight, token_weight, target_prob, label_smoothing, lse_square_scale, temperature, denominator,
        logit_scale, softcap, outputs
    )  # fmt: skip
    shard = _shard(group, vocab_start_index, vocab_size)
    function = _rounded_loss if group is None else _rounded_loss_over_group
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
    found = (_loss_of_positions if has_positions else unrounded_loss)(
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
    if not torch.is_autocast_enabled(_autocast_device(input)):
        found = found._replace(loss=found.loss.to(input.dtype))
    return requested(found, loss_options.outputs) if loss_options.outputs else found.loss


_rounded_loss_over_group = torch.compiler.disable(_rounded_loss)


def unrounded_loss(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    reduction: Literal["mean", "sum", "none"],
    ignore_index: int | None,
    options: Options = Options(),  # noqa: B008 (immutable)
    *,
    filter_eps: float | torch.Tensor = 0.0,
    num_threads: int | None = None,
    shard: VocabularyShard | None = None,
    names: Names = _NAMES,
    zero_if_empty: bool = False,
) -> Computed:
    """Return the loss in float32, or in float64 if `input` is. A mean over no rows is NaN, or 0 if `zero_if_empty`."""
    checked(shard, partial(_check_arguments, names, input, linear_weight, target, reduction, options))
    ignore_index, num_threads = checked(shard, partial(_as_integers, names.operator, ignore_index, num_threads))
    converted = checked(shard, partial(_converted, names.operator, options, filter_eps))
    options, filter_eps, numbers = converted

    given = input.dtype, linear_weight.dtype
    if torch.is_autocast_enabled(_autocast_device(input)):
        input, linear_weight = _lower_precision(input), _lower_precision(linear_weight)
    checked(shard, partial(_check_dtypes, names, input, linear_weight, given))
    shape = input.shape[:-1]
    rows, classes, options = _as_batch(input, target, options)
    bias, weight, temperature = options.linear_bias, options.weight, options.temperature
    with_gradients = torch.is_grad_enabled() and reduction != "none" and rows.dtype != torch.float16
    problem = operators.Loss(
        input=rows,
        weight=linear_weight,
        target=classes,
        bias=bias,
        token_weight=options.token_weight,
        class_weight=weight,
        target_prob=options.target_prob,
        temperatures=temperature if isinstance(temperature, torch.Tensor) else None,
        numbers=numbers,
        grad_loss=None,
        reduction=reduction,
        ignore_index=ignore_index,
        input_grad=with_gradients and rows.requires_grad,
        weight_grad=with_gradients and linear_weight.requires_grad,
        bias_grad=with_gradients and bias is not None and bias.requires_grad,
        label_smoothing=options.label_smoothing,
        lse_square_scale=options.lse_square_scale,
        temperature=1.0 if isinstance(temperature, torch.Tensor) else temperature,
        denominator=options.denominator,
        logit_scale=options.logit_scale,
        softcap=options.softcap,
        outputs=computed_outputs(options.outputs),
        filter_eps=filter_eps,
        num_threads=num_threads,
        shard=None,
    )
    try:
        if shard is None:
            loss, _, _, _, *others = operators.apply(_LinearCrossEntropy, *problem)
        else:
            loss, _, _, _, *others = shard.apply(_LinearCrossEntropy, problem)
    except AscendGradError as error:
        if shard is None:
            rename(error, names.operator, names._asdict())
        raise
    if zero_if_empty and reduction == "mean":
        loss = torch.where((classes != ignore_index).any(), loss, 0)
    outputs = {
        name: each if name == "correct" else each.reshape(shape)
        for name, each in zip(OUTPUTS, others)
        if name in options.outputs
    }
    return Computed(loss.reshape(shape) if reduction == "none" else loss, **outputs)


def summed_loss(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    options: Options,
    of_row: torch.Tensor,
    of_square: torch.Tensor,
    **keywords: Any,
) -> Computed:
    """Return the sum of the rows' losses with different factors for the cross-entropy and for the squared lse."""
    scale = options.lse_square_scale
    if of_square is of_row or (not isinstance(scale, torch.Tensor) and scale == 0):
        changed = options._replace(token_weight=of_row)
        return unrounded_loss(input, linear_weight, target, "sum", ignore_index, changed, **keywords)
    outputs = tuple(dict.fromkeys((*options.outputs, "lse")))
    changed = options._replace(token_weight=of_row, lse_square_scale=0.0, outputs=outputs)
    found = unrounded_loss(input, linear_weight, target, "sum", ignore_index, changed, **keywords)
    # Rows without weight add nothing, whatever their lse is.
    counted = _are_counted(target, ignore_index, options) & (of_square != 0)
    squares = scale * torch.where(counted, cast(torch.Tensor, found.lse), 0) ** 2 * of_square
    return found._replace(loss=found.loss + torch.where(counted, squares, 0).sum().to(found.loss.dtype))


def _are_counted(target: torch.Tensor, ignore_index: int, options: Options) -> torch.Tensor:
    """Return which rows are not ignored."""
    counted = target != ignore_index
    return counted if options.target_prob is None else counted.any(-1)


def _loss_of_positions(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    reduction: Literal["mean", "sum", "none"],
    ignore_index: int | None,
    options: Options,
    *,
    filter_eps: float | torch.Tensor,
    num_threads: int | None,
    shard: VocabularyShard | None,
) -> Computed:
    """Compute a loss of several dimensions, in which each position has its own part of the weight and its own targets.

    Positions are computed one after another. A mean is divided by the weights of the rows at all positions.
    """
    checked(shard, partial(_check_positions, input, linear_weight, target, reduction, options, shard))
    ignore_index, num_threads = _as_integers(_NAME, ignore_index, num_threads)
    numbers_checked, _, numbers = _converted(_NAME, options, filter_eps)
    if numbers is None:  # otherwise torch traces numbers, which the calls for the positions convert
        options = numbers_checked
    shape = target.shape if options.target_prob is None else target.shape[:-1]

    def of_positions(tensor: torch.Tensor, after: int = 0) -> Sequence[torch.Tensor]:
        """Return the tensors of all positions. `after` is the number of dimensions after the positions."""
        return tensor.flatten(1, -1 - after).unbind(1)

    after = 0 if options.target_prob is None else 1
    if input.dtype == linear_weight.dtype in (torch.float16, torch.bfloat16) and input.device.type != "npu":
        # The gradient of the input is the sum of the positions' ones, which is then rounded once.
        input, linear_weight = input.float(), linear_weight.float()
    weights, targets = of_positions(linear_weight, 1), of_positions(target, after)
    split = {
        name: of_positions(value, after if name == "target_prob" else 0)
        for name, value in options._asdict().items()
        if isinstance(value, torch.Tensor) and name != "weight" and value.dim() > 0
    }
    parts = [options._replace(**{name: each[i] for name, each in split.items()}) for i in range(len(weights))]
    keywords: dict[str, Any] = {"filter_eps": filter_eps, "num_threads": num_threads}
    if reduction == "mean":
        of_row, of_square, divisor = _mean_factors(input, linear_weight, target, ignore_index, options)
        rows = of_positions(of_row)
        squares = rows if of_square is of_row else of_positions(of_square)
        found = [
            summed_loss(input, each[0], each[1], ignore_index, *each[2:], **keywords)
            for each in zip(weights, targets, parts, rows, squares)
        ]
        loss = torch.where(divisor == 0, torch.nan, torch.stack([each.loss for each in found]).sum())
    else:
        found = [
            unrounded_loss(input, each[0], each[1], reduction, ignore_index, each[2], **keywords)
            for each in zip(weights, targets, parts)
        ]
        losses = torch.stack([each.loss for each in found], -1)
        loss = losses.reshape(shape) if reduction == "none" else losses.sum()
    outputs = {
        name: torch.stack([cast(torch.Tensor, getattr(each, name)) for each in found], -1) for name in options.outputs
    }
    return Computed(
        loss, **{name: each.sum() if name == "correct" else each.reshape(shape) for name, each in outputs.items()}
    )


def _mean_factors(
    input: torch.Tensor, linear_weight: torch.Tensor, target: torch.Tensor, ignore_index: int, options: Options
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the factors of the cross-entropy and of the squared lse of each row in a mean, and the first divisor.

    The factors are the same tensor if their divisors are equal. They are 0 if the divisor is.
    """
    counted = _are_counted(target, ignore_index, options)
    # Devices lack float64.
    factors = counted.to(torch.float64 if input.device.type == "cpu" else operators.accumulator(input))
    if options.token_weight is not None:
        factors = torch.where(counted, options.token_weight.to(factors.dtype), 0)
    if options.denominator is not None:
        factors = factors / options.denominator
        return factors, factors, torch.ones_like(factors).sum()
    rows = factors.sum()
    of_square = torch.where(rows == 0, 0, factors / rows)
    if options.weight is None or options.target_prob is not None:
        return of_square, of_square, rows
    entries = torch.where(counted, target, 0).clamp(0, linear_weight.shape[0] - 1)  # others are refused later
    divisor = (factors * options.weight.to(factors.dtype)[entries]).sum()
    return torch.where(divisor == 0, 0, factors / divisor), of_square, divisor


def _check_positions(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    reduction: object,
    options: Options,
    shard: VocabularyShard | None,
) -> None:
    """Check the shapes of a loss of several dimensions. `unrounded_loss` checks everything else of each position."""
    tensors = {"token_weight": options.token_weight, "target_prob": options.target_prob}
    tensors |= {"linear_bias": options.linear_bias, "weight": options.weight}
    given = {name: each for name, each in tensors.items() if each is not None}
    check_tensors(_NAME, input=input, linear_weight=linear_weight, target=target, **given)
    if shard is not None:
        refuse(f"{_NAME} with a group", **{"linear_weight of several dimensions": tuple(linear_weight.shape)})
    _check_target_dtype(_NAMES, target)
    if reduction not in ("mean", "sum", "none"):
        raise ParamInvalidError(f"reduction: expected mean, sum or none, got {shown(reduction)}", operator=_NAME)
    positions = linear_weight.shape[1:-1]
    if input.dim() != 2:
        expected = "shape (N, in_features), as linear_weight has positions"
        raise ParamInvalidError(f"input: expected {expected}, got {tuple(input.shape)}", operator=_NAME)
    if linear_weight.shape[-1] != input.shape[-1]:
        expected = f"shape {('C', *positions, input.shape[-1])}"
        message = f"linear_weight: expected {expected}, got {tuple(linear_weight.shape)}"
        raise ParamInvalidError(message, operator=_NAME)
    for expected, count in (("position", positions.numel()), ("class", linear_weight.shape[0])):
        if count == 0:
            message = f"linear_weight: expected at least one {expected}, got shape {tuple(linear_weight.shape)}"
            raise ParamInvalidError(message, operator=_NAME)
    for name in ("token_weight", "weight"):  # their sums are computed before the loss of a position checks them
        if name in given and not given[name].is_floating_point():
            message = f"{name}: expected a floating dtype, got {given[name].dtype}"
            raise ParamTypeError(message, operator=_NAME)
    rows = input.shape[0], *positions
    if options.target_prob is not None:
        if target.dim() != len(rows) + 1 or target.shape[:-1] != rows:
            message = f"target: expected shape {(*rows, 'K')}, as target_prob is given, got {tuple(target.shape)}"
            raise ParamInvalidError(message, operator=_NAME)
        check_shape(_NAME, "target_prob", options.target_prob, target.shape, "as target has")
    else:
        check_shape(_NAME, "target", target, torch.Size(rows), "one for each row and position")
    if options.token_weight is not None:
        check_shape(_NAME, "token_weight", options.token_weight, torch.Size(rows), "one for each row and position")
    if isinstance(options.temperature, torch.Tensor) and options.temperature.dim() > 0:
        check_shape(_NAME, "temperature", options.temperature, torch.Size(rows), "one for each row and position")
    if options.linear_bias is not None:
        words = "that of linear_weight but for its last dimension"
        check_shape(_NAME, "linear_bias", options.linear_bias, linear_weight.shape[:-1], words)
    if options.weight is not None:
        check_shape(_NAME, "weight", options.weight, linear_weight.shape[:1], "one for each class")


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


def checked(shard: VocabularyShard | None, check: Callable[[], _T]) -> _T:
    """Return the result of `check()`. If it raises, tell the other processes of a group, which wait for this one."""
    return check() if shard is None else shard.run(_NAME, check)


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


def _check_arguments(
    names: Names,
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    reduction: object,
    options: Options,
) -> None:
    operator = names.operator
    refuse_jit_trace(operator)
    check_tensors(operator, **{names.input: input, names.weight: linear_weight, names.target: target})
    tensors = {
        names.bias: options.linear_bias,
        names.class_weight: options.weight,
        "token_weight": options.token_weight,
        "target_prob": options.target_prob,
        "temperature": options.temperature if isinstance(options.temperature, torch.Tensor) else None,
    }
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    if given:
        check_tensors(operator, **{names.input: input}, **given)
    _check_shapes(names, input, linear_weight, target, options.target_prob)
    if reduction not in ("mean", "sum", "none"):
        raise ParamInvalidError(f"reduction: expected mean, sum or none, got {shown(reduction)}", operator=operator)
    for name in names.bias, names.class_weight:
        if name in given:
            words = f"one for each row of {names.weight}"
            check_shape(operator, name, given[name], linear_weight.shape[:1], words)
    if options.token_weight is not None:
        words = f"one for each row of {names.input}"
        check_shape(operator, "token_weight", options.token_weight, input.shape[:-1], words)
    if "temperature" in given and given["temperature"].dim() > 0:
        words = f"one for each row of {names.input}"
        check_shape(operator, "temperature", given["temperature"], input.shape[:-1], words)
    for name, tensor in given.items():
        if name != names.bias and tensor.requires_grad and torch.is_grad_enabled():
            message = "the loss has no gradient for it, got a tensor that requires grad (tensor.detach() does not)"
            raise NotImplementedError(f"{operator}: {name}: {message}")


def _converted(operator: str, options: Options, filter_eps: Any) -> tuple[Options, float, torch.Tensor | None]:
    """Convert the options to the schema's types. torch's own errors would name neither function nor argument."""
    check_outputs(operator, options.outputs)
    values, numbers = operators.numbers_of(
        operator,
        label_smoothing=options.label_smoothing,
        lse_square_scale=options.lse_square_scale,
        temperature=1.0 if isinstance(options.temperature, torch.Tensor) else options.temperature,
        denominator=options.denominator,
        logit_scale=options.logit_scale,
        softcap=options.softcap,
        filter_eps=filter_eps,
    )
    filter_eps = values.pop("filter_eps")
    if isinstance(options.temperature, torch.Tensor):
        del values["temperature"]
    return options._replace(**values), filter_eps, numbers


def _as_batch(
    input: torch.Tensor, target: torch.Tensor, options: Options
) -> tuple[torch.Tensor, torch.Tensor, Options]:
    """Return the arguments of a batch of rows: a single row is a batch of one, a temperature holds for all rows."""
    temperature = options.temperature
    if isinstance(temperature, torch.Tensor) and temperature.dim() == 0:
        options = options._replace(temperature=temperature.expand(input.shape[:-1]))
    if input.dim() == 2:
        return input, target, options
    batch = {
        name: getattr(options, name).unsqueeze(0)
        for name in ("token_weight", "target_prob", "temperature")
        if isinstance(getattr(options, name), torch.Tensor)
    }
    return input.unsqueeze(0), target.unsqueeze(0), options._replace(**batch)


def _as_integers(operator: str, ignore_index: object, num_threads: object) -> tuple[int, int | None]:
    """Convert arguments to the schema's types. torch's own errors would name neither function nor argument."""
    if ignore_index is None:
        ignore_index = IGNORE_INDEX
    elif type(ignore_index) is not int:
        ignore_index = integer(ignore_index, "ignore_index", operator)
    if not -MAX_INDEX - 1 <= ignore_index <= MAX_INDEX:
        expected = f"an int in [{-MAX_INDEX - 1}, {MAX_INDEX}]"
        raise ParamInvalidError(f"ignore_index: expected {expected}, got {shown(ignore_index)}", operator=operator)
    if num_threads is not None:
        num_threads = thread_count(num_threads, operator)
    return ignore_index, num_threads


def _check_dtypes(
    names: Names, input: torch.Tensor, linear_weight: torch.Tensor, given: tuple[torch.dtype, torch.dtype]
) -> None:
    """Check that both dtypes are equal. `given` has the dtypes before autocast, for the message."""
    if linear_weight.dtype != input.dtype:
        message = f"{names.weight}: expected {given[0]}, as {names.input} is, got {given[1]}"
        raise ParamTypeError(message, operator=names.operator)


def _check_shapes(
    names: Names,
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    target_prob: torch.Tensor | None,
) -> None:
    operator = names.operator
    _check_target_dtype(names, target)
    if input.dim() not in (1, 2):
        message = f"{names.input}: expected shape (N, in_features) or (in_features,), got {tuple(input.shape)}"
        raise ParamInvalidError(message, operator=operator)
    if linear_weight.dim() != 2 or linear_weight.shape[1] != input.shape[-1]:
        message = f"{names.weight}: expected shape (C, {input.shape[-1]}), got {tuple(linear_weight.shape)}"
        raise ParamInvalidError(message, operator=operator)
    if target_prob is None:
        check_shape(operator, names.target, target, input.shape[:-1], f"one for each row of {names.input}")
        return
    if target.dim() != input.dim() or target.shape[:-1] != input.shape[:-1]:
        message = f"{names.target}: expected shape {(*input.shape[:-1], 'K')}, as target_prob is given, got "
        raise ParamInvalidError(f"{message}{tuple(target.shape)}", operator=operator)
    check_shape(operator, "target_prob", target_prob, target.shape, f"as {names.target} has")


def _check_target_dtype(names: Names, target: torch.Tensor) -> None:
    if target.is_floating_point():
        hint = "target_prob takes the probabilities of some classes"
        message = f"probabilities are not supported, got {target.dtype} ({hint})"
        raise NotImplementedError(f"{names.operator}: {names.target}: {message}")


def check_shape(operator: str, name: str, tensor: torch.Tensor, shape: Sequence[int], words: str) -> None:
    """Raise an error unless a tensor has this shape, which `words` explain."""
    if tensor.shape != shape:
        message = f"{name}: expected shape {tuple(shape)}, {words}, got {tuple(tensor.shape)}"
        raise ParamInvalidError(message, operator=operator)


def _autocast_device(tensor: torch.Tensor) -> str:
    return "npu" if tensor.device.type == "npu" else "cpu"


def _lower_precision(tensor: torch.Tensor) -> torch.Tensor:
    """Convert an argument of a linear layer as autocast does."""
    is_double = tensor.dtype == torch.float64
    return tensor if is_double else tensor.to(torch.get_autocast_dtype(_autocast_device(tensor)))
