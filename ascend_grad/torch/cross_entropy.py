"""The cross-entropy loss of logits, with its gradient in the same pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Unpack, overload

import torch
from torch.autograd import Function

import ascend_grad as ag

from ..arguments import MAX_INDEX, integer, shown, thread_count
from ..errors import AscendGradError, ParamInvalidError, rename
from ..operators.options import OUTPUTS
from ..operators.results import LossResult
from . import operators
from .gradients import scaled, second_order_error, without_second_order
from .outputs import Computed, check_outputs, requested
from .tensors import are_plain, check_tensors, detached, optional, refuse_jit_trace

if TYPE_CHECKING:
    from ..option_types import LossOptions, Outputs

_NAME = "cross_entropy"


class _Loss(NamedTuple):
    """The arguments of the operator `cross_entropy`, in the order of its schema."""

    input: torch.Tensor
    target: torch.Tensor
    class_weight: torch.Tensor | None
    token_weight: torch.Tensor | None
    target_prob: torch.Tensor | None
    #: A temperature for each row, or None: `temperature` is then the temperature of all rows.
    temperatures: torch.Tensor | None
    #: The options that `operators.numbers_of` replaces, or None.
    numbers: torch.Tensor | None
    grad_loss: torch.Tensor | None
    grad_lse: torch.Tensor | None
    grad_log_prob: torch.Tensor | None
    grad_entropy: torch.Tensor | None
    dim: int
    reduction: Literal["mean", "sum", "none"]
    ignore_index: int
    input_grad: bool
    label_smoothing: float
    lse_square_scale: float
    temperature: float
    denominator: float | None
    #: The names of the outputs to compute.
    outputs: Sequence[Any]
    num_threads: int | None


_SCHEMA = (
    "(Tensor input, Tensor target, Tensor? class_weight, Tensor? token_weight, Tensor? target_prob, "
    "Tensor? temperatures, Tensor? numbers, Tensor? grad_loss, Tensor? grad_lse, Tensor? grad_log_prob, "
    "Tensor? grad_entropy, int dim, str reduction, SymInt ignore_index, bool input_grad, float label_smoothing, "
    "float lse_square_scale, float temperature, float? denominator, "
    "str[] outputs, SymInt? num_threads) -> (Tensor loss, Tensor input_grad, Tensor lse, Tensor log_prob, "
    "Tensor entropy, Tensor predicted, Tensor correct)"
)

#: The numbers of tensors among the first arguments, without the upstream gradients and with them.
_TENSORS, _ALL_TENSORS = _Loss._fields.index("grad_loss"), _Loss._fields.index("dim")


def _compute(*arguments: Any) -> tuple[torch.Tensor, ...]:
    problem = operators.with_numbers(_Loss(*arguments))
    result = ag.cross_entropy(
        detached(problem.input),
        detached(problem.target),
        problem.dim,
        reduction=problem.reduction,
        ignore_index=problem.ignore_index,
        class_weight=optional(problem.class_weight),
        token_weight=optional(problem.token_weight),
        target_prob=optional(problem.target_prob),
        label_smoothing=problem.label_smoothing,
        lse_square_scale=problem.lse_square_scale,
        temperature=problem.temperature if problem.temperatures is None else detached(problem.temperatures),
        denominator=problem.denominator,
        grad_loss=operators.upstream(problem.grad_loss, problem.reduction),
        grad_lse=optional(problem.grad_lse),
        grad_log_prob=optional(problem.grad_log_prob),
        grad_entropy=optional(problem.grad_entropy),
        outputs=tuple(problem.outputs),
        return_grad=problem.input_grad,
        num_threads=problem.num_threads,
    )
    found = result.loss, result.input_grad, *operators.outputs_of(result, problem.outputs)
    return operators.without_none(problem.input, found)


def _fake(*arguments: Any) -> tuple[torch.Tensor, ...]:
    problem = _Loss(*arguments)
    input, dim = problem.input, problem.dim
    rows = input.shape[:dim] + input.shape[dim + 1 :]
    loss = input.new_empty(rows if problem.reduction == "none" else (), dtype=operators.accumulator(input))
    gradient = input.new_empty(input.shape if problem.input_grad else (0,))
    return loss, gradient, *operators.fake_outputs(input, rows, problem.outputs)


operators.register(_NAME, _SCHEMA, _compute, _fake, operators.one_after_another)


def _loss(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """Compute `_Loss`. torch's dispatcher is used only if `are_plain` is False."""
    if not are_plain(arguments):
        return torch.ops.ascend_grad.cross_entropy(*arguments)
    return _compute(*arguments)


# ---- the gradient ----------------------------------------------------------------------------------------------------


class _CrossEntropy(Function):
    """Compute the loss with its outputs, and its gradient if `input_grad` is set.

    The gradient of a mean or a sum is computed with the loss, and backward scales it. Backward computes the gradient of
    one loss per row, and every gradient in float16: a loss scale must be applied before the rounding. A gradient that
    was returned may be changed by its owner, so that a second backward computes it again. If an output has an
    upstream gradient, backward computes the gradient of the loss and the outputs in one call.
    """

    @staticmethod
    def forward(*arguments):
        return _loss(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        problem = _Loss(*inputs)
        ctx.settings = inputs[_ALL_TENSORS:]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:_TENSORS])
        has_upstream = any(each is not None for each in inputs[_TENSORS:_ALL_TENSORS])
        is_scalable = problem.input_grad and not has_upstream and problem.reduction != "none"
        ctx.gradient = output[1].detach() if is_scalable else None

    @staticmethod
    def backward(ctx, grad_loss, grad_input_grad, *others):
        if grad_input_grad is not None:
            raise second_order_error(_NAME)
        nothing = [None] * len(_Loss._fields)
        of_outputs = others[:3]  # of lse, log_prob and entropy
        upstream = [each for each in (grad_loss, *of_outputs) if each is not None]
        if not upstream:
            return tuple(nothing)
        saved = ctx.saved_tensors  # each access unpacks all of them
        nothing_above = (None,) * (_ALL_TENSORS - _TENSORS)
        problem, shared = _Loss._make((*saved[:_TENSORS], *nothing_above, *ctx.settings)), saved[_TENSORS:]
        gradient, ctx.gradient = shared[0].detach() if shared else ctx.gradient, None
        is_computed = gradient is not None and upstream == [grad_loss]
        if not is_computed:
            above = dict(zip(("grad_lse", "grad_log_prob", "grad_entropy"), of_outputs))
            above["grad_loss"] = upstream[0].new_zeros(()) if grad_loss is None else grad_loss
            # With the same outputs, the gradient of the loss has the bits of the one that was computed with the loss.
            outputs = problem.outputs if upstream == [grad_loss] else []
            gradient = _loss(*problem._replace(**above, input_grad=True, outputs=outputs))[1]
        # If the gradient was computed before, the product below depends on the upstream gradient.
        arguments = [problem.input] if is_computed else [problem.input, *upstream]
        gradients = without_second_order(_NAME, [gradient], arguments)
        if is_computed:
            gradients = scaled(gradients, grad_loss, in_place=not shared)
        return gradients[0], *nothing[1:]


class _CrossEntropyOfOperator(_CrossEntropy):
    """Differentiate the registered operator. Its caller has the gradient, too, so backward leaves it unchanged."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        _CrossEntropy.setup_context(ctx, inputs, output)
        if ctx.gradient is not None:
            ctx.save_for_backward(*inputs[:_TENSORS], output[1])
            ctx.gradient = None


operators.register_gradient(_NAME, _CrossEntropyOfOperator)


@overload
def cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    outputs: tuple[()] = (),
    **options: Unpack[LossOptions[torch.Tensor, float | torch.Tensor]],
) -> torch.Tensor: ...


@overload
def cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    outputs: Outputs,
    **options: Unpack[LossOptions[torch.Tensor, float | torch.Tensor]],
) -> LossResult[torch.Tensor]: ...


def cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float | torch.Tensor = 0.0,
    token_weight: torch.Tensor | None = None,
    target_prob: torch.Tensor | None = None,
    lse_square_scale: float | torch.Tensor = 0.0,
    temperature: float | torch.Tensor = 1.0,
    denominator: float | torch.Tensor | None = None,
    outputs: Outputs = (),
    num_threads: int | None = None,
) -> torch.Tensor | LossResult[torch.Tensor]:
    r"""Compute the loss of `torch.nn.functional.cross_entropy`, in one pass over the rows with its gradient.

    The arguments from `token_weight` on are this library's. `ascend_grad.cross_entropy` describes the formula with all
    arguments.

    Parameters
    ----------
    input : torch.Tensor, shape (C,), (N, C) or (N, C, d1, ...)
        The logits, in any layout; float32, float16, bfloat16 or float64.
    target : torch.Tensor of int64 or int32, shape (), (N,) or (N, d1, ...)
        The class of each row, in [0, C), or `ignore_index`. With `target_prob` there is one more dimension, the last
        one, of K classes.
    weight : torch.Tensor, shape (C,), optional
        A weight for each class. The mean is then the sum of the weighted losses divided by the sum of their weights.
    ignore_index : int, default -100
        Rows with this target have no loss and no gradient.
    reduction : {"mean", "sum", "none"}, default "mean"
        The loss is the mean or the sum over the rows that are not ignored, or one number per row, 0 for ignored rows.
    label_smoothing : float or torch.Tensor, shape (), default 0.0
        The share of the loss that goes to all classes, from 0 to 1.
    token_weight : torch.Tensor, optional
        Factors of the losses of the rows, of their shape.
    target_prob : torch.Tensor, optional
        Probabilities of K classes in each row, of the shape of `target`, of any of the four dtypes.
    lse_square_scale : float or torch.Tensor, shape (), default 0.0
        The factor of the squared logarithm of the sum of the exponentials (z-loss).
    temperature : float or torch.Tensor, default 1.0
        The divisor of the logits, above 0: one number, or one for each row.
    denominator : float or torch.Tensor, shape (), optional
        The divisor of a mean, above 0.
    outputs : sequence of {"lse", "log_prob", "entropy", "predicted", "correct"}, default ()
        Further results. The first three are differentiable, too. The second and the last exist without `target_prob`.
    num_threads : int, optional
        As in `ascend_grad.softmax_backward`.

    Returns
    -------
    torch.Tensor or LossResult
        The loss in the dtype of `input`. Under autocast it is float32, or float64 if `input` is float64. With `outputs`
        it is the first field of a named tuple, `loss`, and the outputs are others.

    Raises
    ------
    NotImplementedError
        `target` has a floating dtype (probabilities of all classes), or an option requires grad, which the loss has no
        gradient for.
    ParamInvalidError
        161002: a dtype, a shape or a value is not as described (a dtype or a kind: its subclass `ParamTypeError`).
    UnsupportedDeviceError
        361001: the tensors are on an Ascend NPU, which has no such operator.
    BackendUnavailableError
        A tensor is neither on the CPU nor on a usable Ascend NPU.

    Notes
    -----
    If `reduction` is "mean" or "sum", the gradient is computed with the loss, except in float16. With
    ``retain_graph=True`` a second backward computes it again. If an output has an upstream gradient, the backward pass
    computes the gradient of the loss and the outputs. No gradient can be differentiated once more.

    Examples
    --------
    >>> import torch
    >>> import ascend_grad.torch as agt
    >>> logits = torch.zeros(2, 4, requires_grad=True)
    >>> agt.cross_entropy(logits, torch.tensor([0, 3])).backward()
    >>> logits.grad
    tensor([[-0.3750,  0.1250,  0.1250,  0.1250],
            [ 0.1250,  0.1250,  0.1250, -0.3750]])
    """
    found = unrounded_loss(
        input,
        target,
        weight,
        ignore_index,
        reduction,
        label_smoothing,
        lse_square_scale,
        token_weight=token_weight,
        target_prob=target_prob,
        temperature=temperature,
        denominator=denominator,
        outputs=outputs,
        num_threads=num_threads,
    )
    if not torch.is_autocast_enabled("cpu"):
        found = found._replace(loss=found.loss.to(input.dtype))
    return requested(found, outputs) if outputs else found.loss


def unrounded_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    reduction: Literal["mean", "sum", "none"],
    label_smoothing: float | torch.Tensor,
    lse_square_scale: float | torch.Tensor,
    *,
    token_weight: torch.Tensor | None = None,
    target_prob: torch.Tensor | None = None,
    temperature: float | torch.Tensor = 1.0,
    denominator: float | torch.Tensor | None = None,
    outputs: Outputs = (),
    num_threads: int | None = None,
    operator: str = _NAME,
    input_name: str = "input",
) -> Computed:
    """Return the loss in float32, or in float64 if `input` is, with the names of the caller in errors."""
    options = {"weight": weight, "token_weight": token_weight, "target_prob": target_prob}
    if isinstance(temperature, torch.Tensor):
        options["temperature"] = temperature
    given = {name: each for name, each in options.items() if each is not None}
    refuse_jit_trace(operator)
    check_tensors(operator, **{input_name: input}, target=target, **given)
    if target.is_floating_point():
        hint = "target_prob takes the probabilities of some classes"
        raise NotImplementedError(f"{operator}: target: probabilities are not supported, got {target.dtype} ({hint})")
    for name, each in given.items():
        if each.requires_grad and torch.is_grad_enabled():
            message = "the loss has no gradient for it, got a tensor that requires grad (tensor.detach() does not)"
            raise NotImplementedError(f"{operator}: {name}: {message}")
    if reduction not in ("mean", "sum", "none"):
        raise ParamInvalidError(f"reduction: expected mean, sum or none, got {shown(reduction)}", operator=operator)
    ignored = integer(ignore_index, "ignore_index", operator)
    if not -MAX_INDEX - 1 <= ignored <= MAX_INDEX:
        expected = f"an int in [{-MAX_INDEX - 1}, {MAX_INDEX}]"
        raise ParamInvalidError(f"ignore_index: expected {expected}, got {shown(ignored)}", operator=operator)
    check_outputs(operator, outputs)
    dim = 1 if input.dim() > 1 else 0
    if isinstance(temperature, torch.Tensor) and temperature.dim() == 0:
        temperature = temperature.expand(input.shape[:dim] + input.shape[dim + 1 :])
    values, numbers = operators.numbers_of(
        operator,
        label_smoothing=label_smoothing,
        lse_square_scale=lse_square_scale,
        temperature=1.0 if isinstance(temperature, torch.Tensor) else temperature,
        denominator=denominator,
    )
    can_scale = reduction != "none" and input.dtype != torch.float16
    problem = _Loss(
        input=input,
        target=target,
        class_weight=weight,
        token_weight=token_weight,
        target_prob=target_prob,
        temperatures=temperature if isinstance(temperature, torch.Tensor) else None,
        numbers=numbers,
        grad_loss=None,
        grad_lse=None,
        grad_log_prob=None,
        grad_entropy=None,
        dim=dim,
        reduction=reduction,
        ignore_index=ignored,
        input_grad=can_scale and input.requires_grad and torch.is_grad_enabled(),
        **values,
        outputs=list(outputs),
        num_threads=None if num_threads is None else thread_count(num_threads, operator),
    )
    try:
        loss, _, *others = operators.apply(_CrossEntropy, *problem)
    except AscendGradError as error:
        rename(error, operator, {"class_weight": "weight", "input": input_name})
        raise
    return Computed(loss, **{name: each for name, each in zip(OUTPUTS, others) if name in outputs})
