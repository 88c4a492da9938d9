"""The loss of a linear layer, with its gradients, before it is rounded to the dtype of the tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar

import torch
from torch.autograd import Function

from ..arguments import shown
from ..errors import AscendGradError, ParamInvalidError, ParamTypeError, rename
from ..operators.options import OPTIONS, OUTPUT_GRADIENTS, OUTPUTS, PER_CLASS, PER_ROW
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
from .operators import accumulator, apply, register_gradient, saved_primals
from .outputs import Computed, check_outputs, computed_outputs, no_lse_error, statistics
from .tensors import check_floating, check_tensors, refuse_jit_trace

if TYPE_CHECKING:
    from .vocabulary_parallel import VocabularyShard

_T = TypeVar("_T")

_LOSS = loss_operators.LINEAR
_NAME = _LOSS.name


class Names(NamedTuple):
    """Names of the function and its tensors, for errors; fields are `ascend_grad.linear_cross_entropy`'s names."""

    operator: str = _NAME
    input: str = "input"
    weight: str = "linear_weight"
    target: str = "target"
    class_weight: str = "weight"
    bias: str = "linear_bias"

    def of(self, argument: str) -> str:
        """Return the name of an argument of `ascend_grad.linear_cross_entropy`."""
        return str(getattr(self, argument, argument))


_NAMES = Names()

#: The options of the loss by their names in `ascend_grad.linear_cross_entropy`, those that are given.
Options: TypeAlias = Mapping[str, Any]

#: The arguments that the loss has a gradient for, and their places in the schema.
_DIFFERENTIABLE = ("input", "weight", "bias")
_PLACES = [_LOSS.fields.index(name) for name in _DIFFERENTIABLE]


class _Product(Function):
    """Compute the product of the Hessian and a vector, with respect to which it is differentiable.

    The vector has a part of the shape of the weight, another of the shape of the bias, and a third of the shape of the
    input. A part may be None. Without the last one there is no product for the input.
    """

    forward = staticmethod(loss_operators.linear_cross_entropy_hvp)

    @staticmethod
    def setup_context(ctx, inputs, output):
        tensors = inputs[: _LOSS.tensors + 1]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.settings = inputs[_LOSS.tensors + 1 : -3]
        ctx.with_input = inputs[-1] is not None

    @staticmethod
    def backward(ctx, *grads):
        of_loss = *ctx.saved_tensors, *ctx.settings
        needs = ctx.needs_input_grad[-3:]
        found = _product(of_loss, grads, with_input=needs[2])  # the Hessian is symmetric
        return *[None] * len(of_loss), *(each if need else None for each, need in zip(found, needs))

    @staticmethod
    def jvp(ctx, *tangents):
        if any(each is not None for each in tangents[:-3]):
            raise second_order_error(_NAME)
        return _product((*saved_primals(ctx), *ctx.settings), tangents[-3:], with_input=ctx.with_input)


register_gradient(loss_operators.LINEAR_PRODUCT, _Product)


def _product(
    of_loss: Sequence[Any], vectors: Sequence[torch.Tensor | None], *, with_input: bool
) -> tuple[torch.Tensor, ...]:
    """Return the product of the Hessian and vectors for weight, bias and input. None: zeros."""
    problem = _LOSS.problem(of_loss)
    vector, vector_bias, vector_input = vectors
    if vector_input is None and with_input:
        vector_input = torch.zeros_like(problem["input"])
    if vector is None and vector_input is None:
        vector = torch.zeros_like(problem["weight"])
    return apply(_Product, *of_loss, vector, None if problem["bias"] is None else vector_bias, vector_input)


def _detached(problem: loss_operators.Problem) -> loss_operators.Problem:
    return {name: each.detach() if isinstance(each, torch.Tensor) else each for name, each in problem.items()}


def _products(
    problem: loss_operators.Problem, vectors: Mapping[str, torch.Tensor], wanted: Collection[str]
) -> dict[str, torch.Tensor]:
    """Return the products of the Hessian and vectors, by name, for the wanted arguments among `_DIFFERENTIABLE`."""
    of_loss = (_detached(problem) | {"outputs": []}).values()
    parts = [vectors.get(name) for name in ("weight", "bias", "input")]
    found = dict(zip(("weight", "bias", "input"), _product(tuple(of_loss), parts, with_input="input" in wanted)))
    return {name: found[name] for name in wanted}


def _derivative_of_loss(problem: loss_operators.Problem, vectors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the derivative of the loss in the direction of vectors: one number, or one for each row.

    The derivative of the loss of a row follows from the gradients of a layer whose input has further features, which
    are 0, and whose weight has the vectors as columns there.
    """
    input, weight, dtype = problem["input"], problem["weight"], accumulator(problem["input"])
    of_loss = {**problem, "outputs": [], "grad_loss": None, **dict.fromkeys(_LOSS.wanted, False)}
    if problem["reduction"] != "none":
        of_loss |= {flag: name in vectors for name, flag in zip(_DIFFERENTIABLE, _LOSS.wanted)}
        rows = max(input.shape[0], 1)
        if input.dtype == torch.float16 and problem["reduction"] == "mean":  # small gradients would be rounded to 0
            of_loss["grad_loss"] = input.new_full((), rows, dtype=dtype)
        gradients = dict(zip(_DIFFERENTIABLE, apply(_LinearCrossEntropy, *of_loss.values())[1:4]))
        total = torch.zeros((), dtype=dtype, device=input.device)
        for name, vector in vectors.items():
            total = total + (gradients[name].to(dtype) * vector.to(dtype)).sum()
        return total if of_loss["grad_loss"] is None else total / rows
    zeros, one = torch.zeros_like(input), input.new_ones((input.shape[0], 1))
    inputs, weights, along = [input], [weight], [vectors.get("input", zeros)]
    if "weight" in vectors:
        inputs, weights, along = [*inputs, zeros], [*weights, vectors["weight"]], [*along, input]
    if "bias" in vectors:
        inputs, weights, along = [*inputs, 0 * one], [*weights, vectors["bias"].unsqueeze(1)], [*along, one]
    input, weight, along = (torch.cat([each.to(dtype) for each in parts], 1) for parts in (inputs, weights, along))
    of_loss |= {"input": input, "weight": weight, "input_grad": True, "grad_loss": torch.ones_like(input[:, 0])}
    return (apply(_LinearCrossEntropy, *of_loss.values())[1] * along).sum(1)


def _first_order(
    ctx: Any, grad_loss: torch.Tensor | None, of_outputs: Sequence[torch.Tensor | None]
) -> dict[str, torch.Tensor]:
    """Return the gradients from the upstream gradients of the loss and of its outputs."""
    upstream = [each for each in (grad_loss, *of_outputs) if each is not None]
    saved, end = ctx.saved_tensors, _LOSS.tensors  # each access unpacks all of them
    tensors, (lse, entropy), shared = saved[:end], saved[end + 1 : end + 3], saved[end + 3 :]
    problem = _LOSS.problem((*tensors, None, *ctx.settings))
    wanted = [ctx.needs_input_grad[place] for place in _PLACES]
    is_of_loss = len(upstream) == 1 and grad_loss is not None
    gradients, ctx.gradients = shared or ctx.gradients, None
    is_computed = (
        gradients is not None
        and is_of_loss
        and all(problem[name] or not asked for name, asked in zip(_LOSS.wanted, wanted))
    )
    again = {**problem, "grad_loss": grad_loss, **dict(zip(_LOSS.wanted, wanted)), "outputs": []}
    if is_of_loss and problem["shard"] is None and is_differentiated():
        if is_computed and shared:  # results of the same call, which have derivatives
            gradients = scaled(gradients, grad_loss, in_place=False)
        else:
            gradients = apply(_LinearCrossEntropy, *again.values())[1:4]
        return {name: each for name, each, asked in zip(_DIFFERENTIABLE, gradients, wanted) if asked}
    if is_computed:
        gradients = [each.detach() for each in gradients]
    elif all(each is None for each in of_outputs):
        gradients = loss_operators.linear_cross_entropy(*again.values())[1:4]
    elif lse is None:
        raise no_lse_error(_NAME)
    else:
        gradients = loss_operators.linear_cross_entropy_backward(lse, entropy, *of_outputs, *again.values())
    leaves = [problem[name] for name in _DIFFERENTIABLE if problem[name] is not None]
    # If the gradients were computed before, the product below depends on the upstream gradient.
    gradients = without_second_order(_NAME, gradients, leaves if is_computed else [*upstream, *leaves])
    if is_computed:
        gradients = scaled(gradients, grad_loss, in_place=not shared)
    return {name: each for name, each, asked in zip(_DIFFERENTIABLE, gradients, wanted) if asked}


def _second_order(ctx: Any, vectors: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """Return the derivatives of the gradients, with respect to input, weight, bias and the upstream gradient."""
    saved = ctx.saved_tensors
    problem = _LOSS.problem((*saved[: _LOSS.tensors + 1], *ctx.settings))
    if problem["shard"] is not None:
        raise second_order_error(_NAME)
    given = {name: each for name, each in zip(_DIFFERENTIABLE, vectors) if each is not None}
    needs = dict(zip(_LOSS.fields, ctx.needs_input_grad))
    above = problem["grad_loss"]
    wanted = [name for name in _DIFFERENTIABLE if needs[name]]
    found = _products(problem, given, wanted) if wanted else {}
    if above is not None and needs["grad_loss"]:
        found["grad_loss"] = _derivative_of_loss(_detached(problem), given).to(above.dtype)
    return _without_third_order(problem, found)


def _without_third_order(problem: loss_operators.Problem, found: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Make differentiating second derivatives raise."""
    arguments = [problem[name] for name in (*_DIFFERENTIABLE, "grad_loss") if problem[name] is not None]
    return without_third_order(_NAME, found, arguments)


class _LinearCrossEntropy(Function):
    """The loss of a linear layer: the loss, the requested gradients, and the requested outputs.

    Gradients of a mean or a sum are computed with the loss, so that logits are computed once. Backward scales them and
    returns them without a copy, so that a second backward computes them again. Gradients of one loss per row are
    computed in backward, as upstream gradients must be applied before the sum over the rows. So are gradients in
    float16: a loss scale must be applied before the rounding, in which the gradient of a mean would vanish. If an
    output has an upstream gradient, backward computes the gradients of loss and outputs together.

    With an upstream gradient as an argument there are gradients without a loss. Backward calls this function again in
    that way if its gradients may be differentiated: their derivatives are products of the Hessian and vectors.
    """

    forward = staticmethod(loss_operators.linear_cross_entropy)

    @staticmethod
    def setup_context(ctx, inputs, output):
        problem = _LOSS.problem(inputs)
        ctx.settings = inputs[_LOSS.tensors + 1 :]
        shard = problem["shard"]
        ctx.shard = None if shard is None else loss_operators.SHARDS.get(shard)  # kept alive for backward
        ctx.set_materialize_grads(False)  # would allocate zeros of the weight's size
        tensors = inputs[: _LOSS.tensors + 1]
        ctx.save_for_backward(*tensors, *statistics(problem["outputs"], output[4], output[6]))
        ctx.save_for_forward(*tensors, *output)
        is_scalable = problem["grad_loss"] is None and problem["reduction"] != "none"
        ctx.gradients = [each.detach() for each in output[1:4]] if is_scalable else None

    @staticmethod
    def backward(ctx, grad_loss, *others):
        vectors, of_outputs = others[:3], others[3 : 3 + len(OUTPUT_GRADIENTS)]
        found: dict[str, torch.Tensor] = {}
        if any(each is not None for each in (grad_loss, *of_outputs)):
            found = _first_order(ctx, grad_loss, of_outputs)
        if any(each is not None for each in vectors):
            second = _second_order(ctx, vectors)
            found = {**found, **{name: found[name] + each if name in found else each for name, each in second.items()}}
        return tuple(_LOSS.arguments(found))

    @staticmethod
    def jvp(ctx, *tangents):
        saved, end = saved_primals(ctx), _LOSS.tensors + 1
        problem = _LOSS.problem((*saved[:end], *ctx.settings))
        moving = moving_arguments(_NAME, problem, tangents, (*_DIFFERENTIABLE, "grad_loss"))
        if problem["shard"] is not None:
            raise NotImplementedError(f"{_NAME} with a group: forward-mode derivatives are not supported")
        vectors = {name: each for name, each in moving.items() if name != "grad_loss"}
        wanted = [name for name, flag in zip(_DIFFERENTIABLE, _LOSS.wanted) if problem[flag]]
        found: dict[str, torch.Tensor] = {}
        if vectors and wanted:
            found = _without_third_order(problem, _products(problem, vectors, wanted))
        if "grad_loss" in moving and wanted:  # gradients are linear in the upstream gradient
            linear = apply(_LinearCrossEntropy, *(problem | {"grad_loss": moving["grad_loss"]}).values())[1:4]
            parts = {name: each for name, each in zip(_DIFFERENTIABLE, linear) if name in wanted}
            found = {name: found[name] + each if name in found else each for name, each in parts.items()}
        loss = _derivative_of_loss(problem, vectors) if vectors and problem["grad_loss"] is None else None
        return tuple(complete_tangents(saved[end:], dict(enumerate([loss, *map(found.get, _DIFFERENTIABLE)]))))


class _LinearCrossEntropyOfOperator(_LinearCrossEntropy):
    """The gradient of the registered operator. Its caller has the gradients, too, so backward leaves them unchanged."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        _LinearCrossEntropy.setup_context(ctx, inputs, output)
        if ctx.gradients is not None:
            saved = statistics(_LOSS.problem(inputs)["outputs"], output[4], output[6])
            ctx.save_for_backward(*inputs[: _LOSS.tensors + 1], *saved, *output[1:4])
            ctx.gradients = None


register_gradient(_NAME, _LinearCrossEntropyOfOperator)


def unrounded_loss(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    reduction: Literal["mean", "sum", "none"],
    ignore_index: int | None,
    options: Options,
    *,
    filter_eps: float | torch.Tensor = 0.0,
    num_threads: int | None = None,
    shard: VocabularyShard | None = None,
    names: Names = _NAMES,
    zero_if_empty: bool = False,
) -> Computed:
    """Return the loss in float32, or in float64 if `input` is. A mean over no rows is NaN, or 0 if `zero_if_empty`."""
    if shard is not None and isinstance(target, torch.Tensor):
        checked(shard, partial(loss_operators.refuse_dense, names.operator, names.target, target, "with a group"))
    checked(shard, partial(_check_arguments, names, input, linear_weight, target, reduction, options))
    integers = checked(shard, partial(loss_operators.checked_integers, names.operator, ignore_index, num_threads))
    ignore_index, num_threads = integers
    numbers = {**options, "filter_eps": filter_eps}
    options, traced = checked(shard, partial(converted, names.operator, numbers))

    input, linear_weight = checked(shard, partial(layer_as_computed, names, input, linear_weight))
    shape = input.shape[:-1]
    rows, classes, options = _as_batch(input, loss_operators.class_ids(target), options)
    outputs = options["outputs"]
    with_gradients = torch.is_grad_enabled() and reduction != "none" and rows.dtype != torch.float16
    layer = {"input": rows, "weight": linear_weight, "bias": options.get("bias")}
    problem = {
        **options,
        **layer,
        "target": classes,
        "numbers": traced,
        "reduction": reduction,
        "ignore_index": ignore_index,
        **{f"{name}_grad": with_gradients and each is not None and each.requires_grad for name, each in layer.items()},
        "outputs": computed_outputs(outputs, options),
        "num_threads": num_threads,
        "shard": None if shard is None else shard.number(rows, linear_weight, classes),
    }
    try:
        results = apply(_LinearCrossEntropy, *_LOSS.arguments(problem))
    except AscendGradError as error:
        if shard is None:
            rename(error, names.operator, names._asdict())
        raise
    found = _LOSS.computed(results, outputs)
    if zero_if_empty and reduction == "mean":
        is_any = rows.shape[0] > 0 if classes.is_floating_point() else (classes != ignore_index).any()
        found["loss"] = torch.where(torch.as_tensor(is_any), found["loss"], 0)
    of_rows = [name for name in found if name != "correct" and (name != "loss" or reduction == "none")]
    shapes = {name: target.shape if name in OUTPUTS and OUTPUTS[name].is_of_targets else shape for name in of_rows}
    return {**found, **{name: found[name].reshape(each) for name, each in shapes.items()}}


def refuse(operator: str, **arguments: object) -> None:
    """Raise NotImplementedError for arguments that are not None: unsupported options are never silently ignored."""
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"{operator}: {name}: not supported, got {shown(value)}")


def checked(shard: VocabularyShard | None, check: Callable[[], _T]) -> _T:
    """Return the result of `check()`. If it raises, tell the other processes of a group, which wait for this one."""
    return check() if shard is None else shard.run(_NAME, check)


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
    given = _LOSS.tensors_among(options)
    if given:
        check_tensors(operator, **{names.input: input}, **{names.of(name): each for name, each in given.items()})
    _check_shapes(names, input, linear_weight, target, options.get("target_prob"))
    loss_operators.check_reduction(operator, reduction)
    for name, tensor in given.items():
        if name in OPTIONS and OPTIONS[name].kind == PER_CLASS:
            words = f"one for each row of {names.weight}"
            check_shape(operator, names.of(name), tensor, linear_weight.shape[:1], words)
        elif OPTIONS[name].kind == PER_ROW or (name in ROWS_OF and tensor.dim() > 0):
            check_shape(operator, name, tensor, input.shape[:-1], f"one for each row of {names.input}")
    undifferentiable = {"target": target, **given}
    loss_operators.refuse_gradients(
        operator, {names.of(name): each for name, each in undifferentiable.items() if name not in _DIFFERENTIABLE}
    )


def converted(operator: str, options: Options) -> tuple[dict[str, Any], torch.Tensor | None]:
    """Convert the options to the schema's types. torch's own errors would name neither function nor argument."""
    outputs = options.get("outputs", ())
    check_outputs(operator, outputs)
    tensors = _LOSS.tensors_among(options)
    numbers = {name: each for name, each in options.items() if name not in tensors}
    values, traced = loss_operators.numbers_of(_LOSS.fields, operator, numbers)
    return {**values, **tensors, "outputs": outputs}, traced


def _as_batch(
    input: torch.Tensor, target: torch.Tensor, options: Options
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Return the arguments of a batch of rows in one dimension. A temperature that is one number holds for all rows.

    Options that are numbers or tensors of the rows have the names of the tensors in the schema, if they are tensors.
    """
    rows = {
        name: options[name].expand(input.shape[:-1]) if options[name].dim() == 0 else options[name]
        for name in ROWS_OF
        if isinstance(options.get(name), torch.Tensor)
    }
    given = {
        **{name: loss_operators.NUMBERS[name] if name in rows else each for name, each in options.items()},
        **{ROWS_OF[name]: each for name, each in rows.items()},
    }
    if input.dim() == 2:
        return input, target, given
    of_rows = [*(ROWS_OF[name] for name in rows), *(name for name in _OF_ROWS if given.get(name) is not None)]
    last = input.dim() - 2

    def in_one(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unsqueeze(0) if last < 0 else tensor.flatten(0, last)

    return in_one(input), in_one(target), {**given, **{name: in_one(given[name]) for name in of_rows}}


#: The tensors with numbers for each row.
_OF_ROWS = [name for name in _LOSS.arrays if OPTIONS[name].kind != PER_CLASS]


def layer_as_computed(
    names: Names, input: torch.Tensor, linear_weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a layer's input and weight in autocast's dtype if it is enabled. Check that their dtypes are equal."""
    given = input.dtype, linear_weight.dtype
    if torch.is_autocast_enabled(autocast_device(input)):
        input, linear_weight = _lower_precision(input), _lower_precision(linear_weight)
    if linear_weight.dtype != input.dtype:
        message = f"{names.weight}: expected {given[0]}, as {names.input} is, got {given[1]}"
        message += f" ({names.weight}.to({names.input}.dtype) converts it)"
        raise ParamTypeError(message, operator=names.operator)
    return input, linear_weight


def _check_shapes(
    names: Names,
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    target_prob: torch.Tensor | None,
) -> None:
    operator = names.operator
    check_floating(operator, **{names.input: input, names.weight: linear_weight})
    loss_operators.check_target_dtype(operator, names.target, target)
    if input.dim() == 0 or (input.dim() > 2 and names.operator != _NAME):  # the compat modules take torch's ranks
        shapes = "(..., in_features)" if names.operator == _NAME else "(N, in_features) or (in_features,)"
        message = f"{names.input}: expected shape {shapes}, got {tuple(input.shape)}"
        raise ParamInvalidError(message, operator=operator)
    if linear_weight.dim() != 2 or linear_weight.shape[1] != input.shape[-1]:
        message = f"{names.weight}: expected shape (C, {input.shape[-1]}), got {tuple(linear_weight.shape)}"
        if linear_weight.dim() == 2 and linear_weight.shape[0] == input.shape[-1]:
            message += f" (did you mean {names.weight}.T?)"
        raise ParamInvalidError(message, operator=operator)
    if target.is_floating_point():
        shape = (*input.shape[:-1], linear_weight.shape[0])
        words = "as floating targets are probabilities of all classes"
        check_shape(operator, names.target, target, shape, words, linear_weight.shape[0])
        return
    if target_prob is None:
        words = f"one for each row of {names.input}"
        check_shape(operator, names.target, target, input.shape[:-1], words, linear_weight.shape[0])
        return
    if target.dim() != input.dim() or target.shape[:-1] != input.shape[:-1]:
        message = f"{names.target}: expected shape {(*input.shape[:-1], 'K')}, as target_prob is given, got "
        raise ParamInvalidError(f"{message}{tuple(target.shape)}", operator=operator)
    check_shape(operator, "target_prob", target_prob, target.shape, f"as {names.target} has")


def _advice(name: str, target: torch.Tensor, shape: tuple[int, ...], classes: int) -> str:
    """Return what to do about targets of another shape than this one, if the likely cause is known."""
    is_floating, got = target.is_floating_point(), tuple(target.shape)
    rows = shape[:-1] if is_floating else shape
    if got == (*rows, 1):
        return f" (class ids: {name}.squeeze(-1){'.long()' if is_floating else ''})"
    if not is_floating and target.numel() == prod(shape):
        return f" ({name}.reshape({shape}) has this shape)"
    if got == (rows if is_floating else (*rows, classes)):
        return f" ({name}.long() makes classes of it)" if is_floating else f" (if one-hot, {name}.argmax(-1))"
    return ""


def check_shape(
    operator: str, name: str, tensor: torch.Tensor, shape: Sequence[int], words: str, classes: int | None = None
) -> None:
    """Raise an error unless a tensor has this shape, which `words` explain. `classes` is their number for targets."""
    if tensor.shape != shape:
        advice = "" if classes is None else _advice(name, tensor, tuple(shape), classes)
        message = f"{name}: expected shape {tuple(shape)}, {words}, got {tuple(tensor.shape)}{advice}"
        raise ParamInvalidError(message, operator=operator)


def autocast_device(tensor: torch.Tensor) -> str:
    return "npu" if tensor.device.type == "npu" else "cpu"


def _lower_precision(tensor: torch.Tensor) -> torch.Tensor:
    """Convert an argument of a linear layer as autocast does."""
    is_double = tensor.dtype == torch.float64
    return tensor if is_double else tensor.to(torch.get_autocast_dtype(autocast_device(tensor)))
