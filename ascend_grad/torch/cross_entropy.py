"""The cross-entropy loss of logits, with its gradient in the same pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import torch
from torch.autograd import Function

import ascend_grad as ag

from ..errors import AscendGradError, rename
from ..operators.options import OUTPUT_GRADIENTS, OUTPUTS, largest_factor
from ..operators.results import LossResult
from ..operators.signatures import Words, completed, options_of, with_options
from . import loss_operators
from .gradients import (
    complete_tangents,
    is_differentiated,
    moving_arguments,
    scaled,
    second_order_error,
    without_second_order,
    without_third_order,
)
from .loss_operators import ROWS_OF
from .operators import accumulator, apply, register_gradient, rowwise, saved_primals
from .outputs import Computed, check_outputs, requested
from .tensors import ERRORS, check_floating, check_tensors, refuse_jit_trace

if TYPE_CHECKING:
    from torch import Tensor

    from ..option_types import LogitsOutputs as Outputs
    from .option_types import Options

_LOSS = loss_operators.CROSS_ENTROPY
_NAME = _LOSS.name


#: The places of two outputs among the results.
_PROB, _HESSIAN = (_LOSS.outputs_at + list(OUTPUTS).index(name) for name in ("prob", "hessian_diag"))


def _prob_among(problem: loss_operators.Problem, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the probabilities among the results of a call in a list, which is empty if they are not requested."""
    return [results[_PROB]] if "prob" in problem["outputs"] else []


def _gradient_of_prob(problem: loss_operators.Problem, prob: torch.Tensor, grad_prob: torch.Tensor) -> torch.Tensor:
    """Return the gradient with respect to the input from the probabilities and their upstream gradient."""
    problem = loss_operators.with_numbers(problem)
    input, dim, scale = problem["input"], problem["dim"], problem["logit_scale"]
    dtype = accumulator(input)
    largest = largest_factor(dtype == torch.float64)
    prob = prob.detach().to(dtype)
    gradient = rowwise("softmax_backward", grad_prob.detach().to(dtype), prob, dim, problem["num_threads"])
    scale = min(max(scale, -largest), largest)
    if problem["temperatures"] is not None:
        rows = problem["temperatures"].detach().to(dtype).clamp(1 / largest, largest)
        factor = (scale / rows).unsqueeze(dim) if input.dim() else scale / rows
    else:
        factor = scale / min(max(problem["temperature"], 1 / largest), largest)
    gradient = gradient * factor
    if problem["softcap"] is not None:
        cap = min(max(problem["softcap"], 1 / largest), largest)
        gradient = gradient * (1 - torch.tanh(input.detach().to(dtype) * (scale / cap)) ** 2)
    return gradient.to(input.dtype)


class _Product(Function):
    """Compute the product of the Hessian and a vector. It is differentiable with respect to the vector."""

    forward = staticmethod(loss_operators.cross_entropy_hvp)

    @staticmethod
    def setup_context(ctx, inputs, output):
        tensors = inputs[: _LOSS.tensors + 1]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.settings = inputs[_LOSS.tensors + 1 : -1]

    @staticmethod
    def backward(ctx, grad):
        of_loss = *ctx.saved_tensors, *ctx.settings
        return *[None] * len(of_loss), apply(_Product, *of_loss, grad)  # the Hessian is symmetric

    @staticmethod
    def jvp(ctx, *tangents):
        if any(each is not None for each in tangents[:-1]):
            raise second_order_error(_NAME)
        return apply(_Product, *saved_primals(ctx), *ctx.settings, tangents[-1])


register_gradient(loss_operators.PRODUCT, _Product)


def _product(problem: loss_operators.Problem, vector: torch.Tensor) -> torch.Tensor:
    """Return the product of the Hessian and a vector, which autograd takes as a function of the vector alone."""
    return apply(_Product, *(_detached(problem) | {"outputs": []}).values(), vector)


def _detached(problem: loss_operators.Problem) -> loss_operators.Problem:
    return {name: each.detach() if isinstance(each, torch.Tensor) else each for name, each in problem.items()}


def _derivative_of_loss(problem: loss_operators.Problem, vector: torch.Tensor) -> torch.Tensor:
    """Return the derivative of the loss in the direction of a vector: one number, or one for each row."""
    dtype = accumulator(problem["input"])  # the gradient is not rounded to 16 bits
    of_loss = problem | {"input": problem["input"].to(dtype), "grad_loss": None, "input_grad": True, "outputs": []}
    products = apply(_CrossEntropy, *of_loss.values())[1] * vector.to(dtype)
    return products.sum(problem["dim"] if products.dim() else ()) if problem["reduction"] == "none" else products.sum()


def _without_third_order(problem: loss_operators.Problem, found: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Make differentiating second derivatives raise."""
    arguments = [problem[name] for name in ("input", "grad_loss") if problem[name] is not None]
    return without_third_order(_NAME, found, arguments)


def _first_order(
    ctx: Any,
    grad_loss: torch.Tensor | None,
    of_outputs: Sequence[torch.Tensor | None],
    grad_prob: torch.Tensor | None,
) -> torch.Tensor:
    """Return the gradient from the upstream gradients of the loss and of its outputs."""
    upstream = [each for each in (grad_loss, *of_outputs) if each is not None]
    saved = ctx.saved_tensors  # each access unpacks all of them
    problem = _LOSS.problem((*saved[: _LOSS.tensors], *[None] * _LOSS.upstream, *ctx.settings))
    count = _LOSS.tensors + 1 + ("prob" in problem["outputs"])
    shared = saved[count:]
    if grad_prob is not None:
        of_prob = without_second_order(
            _NAME, [_gradient_of_prob(problem, saved[count - 1], grad_prob)], [problem["input"], grad_prob]
        )[0]
        if not upstream:
            return of_prob
    gradient, ctx.gradient = shared[0] if shared else ctx.gradient, None
    is_computed = gradient is not None and len(upstream) == 1 and grad_loss is not None
    if len(upstream) == 1 and grad_loss is not None and grad_prob is None and is_differentiated():
        if is_computed and shared:  # a result of the same call, which has derivatives
            return scaled([gradient], grad_loss, in_place=False)[0]
        of_loss = {**problem, "grad_loss": grad_loss, "input_grad": True, "outputs": []}
        return apply(_CrossEntropy, *of_loss.values())[1]
    if is_computed:
        gradient = gradient.detach()
    else:
        above = {"grad_loss": upstream[0].new_zeros(()) if grad_loss is None else grad_loss, "input_grad": True}
        above.update(zip(OUTPUT_GRADIENTS, of_outputs))
        # With the same outputs, the gradient of the loss has the bits of the one that was computed with the loss.
        # Outputs of the shape of the logits change nothing in it.
        few = [each for each in problem["outputs"] if not OUTPUTS[each].is_of_logits]
        above["outputs"] = few if len(upstream) == 1 and grad_loss is not None else []
        gradient = loss_operators.cross_entropy(*{**problem, **above}.values())[1]
    # If the gradient was computed before, the product below depends on the upstream gradient.
    arguments = [problem["input"]] if is_computed else [problem["input"], *upstream]
    gradients = without_second_order(_NAME, [gradient], arguments)
    if is_computed:
        gradients = scaled(gradients, grad_loss, in_place=not shared)
    return gradients[0] if grad_prob is None else gradients[0] + of_prob


def _second_order(ctx: Any, vector: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the derivatives of the gradient, with respect to the input and to the upstream gradient of the loss."""
    saved = ctx.saved_tensors
    if ctx.has_output_grads or vector.shape != saved[0].shape:  # the gradient may not have been requested
        raise second_order_error(_NAME)
    problem = _LOSS.problem((*saved[: _LOSS.tensors + 1], *[None] * (_LOSS.upstream - 1), *ctx.settings))
    above, found = problem["grad_loss"], {"input": _product(problem, vector)}
    if above is not None and ctx.needs_input_grad[_LOSS.tensors]:
        found["grad_loss"] = _derivative_of_loss(_detached(problem), vector).to(above.dtype)
    return _without_third_order(problem, found)


class _CrossEntropy(Function):
    """Compute the loss with its outputs, and its gradient if `input_grad` is set.

    The gradient of a mean or a sum is computed with the loss, and backward scales it. Backward computes the gradient of
    one loss per row, and every gradient in float16: a loss scale must be applied before the rounding. A gradient that
    was returned may be changed by its owner, so that a second backward computes it again. If an output has an
    upstream gradient, backward computes the gradient of the loss and the outputs in one call. The gradient of the
    probabilities is that of a softmax, which is added.

    With an upstream gradient as an argument there is a gradient without a loss. Backward calls this function again in
    that way if its gradient may be differentiated: the derivative is a product of the Hessian and a vector. Gradients
    of outputs cannot be differentiated.
    """

    forward = staticmethod(loss_operators.cross_entropy)

    @staticmethod
    def setup_context(ctx, inputs, output):
        problem = _LOSS.problem(inputs)
        end = _LOSS.tensors + _LOSS.upstream
        ctx.settings = inputs[end:]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[: _LOSS.tensors + 1], *_prob_among(problem, output))
        ctx.save_for_forward(*inputs[:end], *output)
        ctx.has_output_grads = any(each is not None for each in inputs[_LOSS.tensors + 1 : end])
        ctx.mark_non_differentiable(output[_HESSIAN])
        has_upstream = any(each is not None for each in inputs[_LOSS.tensors : end])
        is_scalable = problem["input_grad"] and not has_upstream and problem["reduction"] != "none"
        ctx.gradient = output[1].detach() if is_scalable else None

    @staticmethod
    def backward(ctx, grad_loss, vector, *others):
        of_outputs, grad_prob = others[: len(OUTPUT_GRADIENTS)], others[_PROB - _LOSS.outputs_at]
        found: dict[str, torch.Tensor] = {}
        if any(each is not None for each in (grad_loss, *of_outputs, grad_prob)):
            found["input"] = _first_order(ctx, grad_loss, of_outputs, grad_prob)
        if vector is not None:
            second = _second_order(ctx, vector)
            found = {**found, **{name: found[name] + each if name in found else each for name, each in second.items()}}
        return tuple(_LOSS.arguments(found))

    @staticmethod
    def jvp(ctx, *tangents):
        saved, end = saved_primals(ctx), _LOSS.tensors + _LOSS.upstream
        problem = _LOSS.problem((*saved[:end], *ctx.settings))
        moving = moving_arguments(_NAME, problem, tangents, ("input", "grad_loss"))
        if ctx.has_output_grads:
            raise second_order_error(_NAME)
        loss = gradient = None
        if "input" in moving and problem["grad_loss"] is None:
            loss = _derivative_of_loss(problem, moving["input"])
        if "input" in moving and problem["input_grad"]:
            gradient = _without_third_order(problem, {"input": _product(problem, moving["input"])})["input"]
        if "grad_loss" in moving and problem["input_grad"]:  # the gradient is linear in the upstream gradient
            part = apply(_CrossEntropy, *(problem | {"grad_loss": moving["grad_loss"]}).values())[1]
            gradient = part if gradient is None else gradient + part
        found = complete_tangents(saved[end:], {0: loss, 1: gradient})
        found[_HESSIAN] = None  # it has no derivative
        return tuple(found)


class _CrossEntropyOfOperator(_CrossEntropy):
    """Differentiate the registered operator. Its caller has the gradient, too, so backward leaves it unchanged."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        _CrossEntropy.setup_context(ctx, inputs, output)
        if ctx.gradient is not None:
            prob = _prob_among(_LOSS.problem(inputs), output)
            ctx.save_for_backward(*inputs[: _LOSS.tensors + 1], *prob, output[1])
            ctx.gradient = None


register_gradient(_NAME, _CrossEntropyOfOperator)

#: The options beside `weight` (the class weights) and the outputs.
_OPTIONS = options_of(of_logits=True, without=("class_weight", "outputs"))
#: The weights of the classes, with torch's name.
WEIGHT = """
weight : torch.Tensor, shape (C,), optional
    A weight for each class. The mean is then the sum of the weighted losses divided by the sum of their weights.
"""
_PARAMETERS = f"""{WEIGHT}
outputs : sequence of {{"lse", "log_prob", "entropy", "predicted", "correct", "prob", "hessian_diag"}}, default ()
    Further results. "lse", "log_prob", "entropy" and "prob" are differentiable, too. "log_prob" has the shape of
    `target`, the last two have that of `input`. "correct" exists without `target_prob`.
"""
WORDS = Words("torch.Tensor", "float or torch.Tensor, shape ()", "", targets="", errors=ERRORS, parameters=_PARAMETERS)


@overload
def cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, *, outputs: tuple[()] = (), **options: Unpack[Options]
) -> Tensor: ...


@overload
def cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, *, outputs: Outputs, **options: Unpack[Options]
) -> LossResult[Tensor]: ...


@with_options(_OPTIONS, WORDS, like=ag.cross_entropy)
def cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    outputs: Outputs = (),
    num_threads: int | None = None,
    **options: Any,
) -> torch.Tensor | LossResult[torch.Tensor]:
    r"""Compute the loss of `torch.nn.functional.cross_entropy`, in one pass over the rows with its gradient.

    The loss of a row is ``logsumexp(row) - row[target]``. The result is the mean by default::

        loss = agt.cross_entropy(logits, target)

    The first arguments are torch's. `ascend_grad.cross_entropy` describes the formula with the options of this library.

    Parameters
    ----------
    input : torch.Tensor, shape (C,), (N, C) or (N, C, d1, ...)
        The logits, in any layout; float32, float16, bfloat16 or float64.
    target : torch.Tensor of an integer dtype, shape (), (N,) or (N, d1, ...); or floating, with the shape of `input`
        The class of each row, in [0, C), or `ignore_index`. With `target_prob` there is one more dimension, the last
        one, of K classes. A tensor of a floating dtype has probabilities of all classes.
    .. options::

    Returns
    -------
    torch.Tensor or LossResult
        The loss in the dtype of `input`. Under autocast it is float32, or float64 if `input` is float64. With `outputs`
        it is the first field of a named tuple, `loss`, and the outputs are others.

    Raises
    ------
    NotImplementedError
        Probabilities or an option require grad, which the loss has no gradient for.

    Notes
    -----
    If `reduction` is "mean" or "sum", the gradient is computed with the loss, except in float16. With
    ``retain_graph=True`` a second backward computes it again. If an output has an upstream gradient, the backward pass
    computes the gradient of the loss and the outputs. The gradient of the loss can be differentiated once more, the
    gradients of outputs cannot. The loss has forward-mode derivatives, outputs have none.

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
    given = loss_operators.with_probabilities(completed(options, _OPTIONS, _NAME), target)
    found = unrounded_loss(
        input, target, {"class_weight": weight, **given}, ignore_index, reduction, outputs, num_threads=num_threads
    )
    if not torch.is_autocast_enabled("cpu"):
        found["loss"] = found["loss"].to(input.dtype)
    return requested(found, outputs) if outputs else found["loss"]


def unrounded_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    options: Mapping[str, Any],
    ignore_index: int,
    reduction: Literal["mean", "sum", "none"],
    outputs: Outputs = (),
    *,
    num_threads: int | None = None,
    operator: str = _NAME,
    input_name: str = "input",
) -> Computed:
    """Return the loss in float32, or in float64 if `input` is, with the names of the caller in errors."""
    names = {"class_weight": "weight", "input": input_name}
    tensors = _LOSS.tensors_among(options)
    of_rows = {ROWS_OF[name]: tensors[name] for name in tensors if name in ROWS_OF}
    given = {names.get(name, name): each for name, each in tensors.items()}
    refuse_jit_trace(operator)
    check_tensors(operator, **{input_name: input}, target=target, **given)
    check_floating(operator, target, **{input_name: input})
    loss_operators.check_target_dtype(operator, "target", target)
    loss_operators.refuse_gradients(operator, {"target": target, **given})
    loss_operators.check_reduction(operator, reduction)
    ignore_index, num_threads = loss_operators.checked_integers(operator, ignore_index, num_threads)
    check_outputs(operator, outputs, OUTPUTS)
    dim = 1 if input.dim() > 1 else 0
    of_rows = {
        name: each.expand(input.shape[:dim] + input.shape[dim + 1 :]) if each.dim() == 0 else each
        for name, each in of_rows.items()
    }
    numbers = {name: each for name, each in options.items() if ROWS_OF.get(name) not in of_rows}
    values, traced = loss_operators.numbers_of(_LOSS.fields, operator, numbers)
    can_scale = reduction != "none" and input.dtype != torch.float16
    problem = {
        **{name: each for name, each in tensors.items() if name in _LOSS.arrays},
        **of_rows,
        **values,
        "input": input,
        "target": loss_operators.class_ids(target),
        "numbers": traced,
        "dim": dim,
        "reduction": reduction,
        "ignore_index": ignore_index,
        "input_grad": can_scale and input.requires_grad and torch.is_grad_enabled(),
        "outputs": list(outputs),
        "num_threads": num_threads,
    }
    try:
        results = apply(_CrossEntropy, *_LOSS.arguments(problem))
    except AscendGradError as error:
        rename(error, operator, names)
        raise
    return _LOSS.computed(results, outputs)
