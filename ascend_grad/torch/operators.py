"""Registration of the operators with torch, as ``torch.ops.ascend_grad``, for tracing and batching.

Each operator has a schema, a computation on the CPU and on an Ascend NPU, a "fake" that returns tensors without memory,
and a rule for `torch.vmap`. The modules `rowwise`, `linear`, `cross_entropy` and `fused` register the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd.function import Function, _SingleLevelFunction

import ascend_grad as ag

from ..arguments import OUTPUTS
from ..contract import OPERATORS
from ..errors import ParamInvalidError
from .tensors import are_plain, are_readable, itself, to_array, to_tensor, without_gradient

if TYPE_CHECKING:
    from .vocabulary_parallel import VocabularyShard


def register(name: str, schema: str, compute: Callable, compute_on_npu: Callable, fake: Callable) -> None:
    qualified = f"ascend_grad::{name}"
    torch.library.define(qualified, schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(qualified, "cpu", compute)
    torch.library.impl(qualified, "privateuseone", compute_on_npu)  # torch_npu's key, which it renames
    torch.library.register_fake(qualified, fake)


def register_gradient(name: str, function: type[Function]) -> None:
    """Register the gradient of `function`, which has the operator's arguments and results, for an operator."""
    operator = getattr(torch.ops.ascend_grad, name).default

    def compute(*arguments):
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)

    class SingleLevel(_SingleLevelFunction):  # torch's handling of transforms has come before
        setup_context = staticmethod(function.setup_context)
        backward = staticmethod(function.backward)

        @staticmethod
        def forward(*arguments):
            with torch.enable_grad():  # outer transforms see this call, too
                return compute(*arguments)

    def compute_with_gradient(*arguments):
        if not torch.is_grad_enabled():
            return compute(*arguments)
        with enable_single_level_autograd_function():  # one call for each transform
            return SingleLevel.apply(*arguments)

    torch.library.impl(f"ascend_grad::{name}", "Autograd", compute_with_gradient)


def apply(function: type[Function], *arguments: Any) -> Any:
    """Compute a function with its gradient. The slower registered operator is used only if `are_readable` is False."""
    if are_readable(each for each in arguments if isinstance(each, torch.Tensor)):
        # This skips the handling of keyword arguments and of transforms in `Function.apply`.
        return super(Function, function).apply(*arguments)
    return function.forward(*arguments)


# -- row-wise operators --


def _rowwise(array_of: Callable, tensor_of: Callable, name: str, *arguments: torch.Tensor | float) -> torch.Tensor:
    """Compute an operator. `array_of` converts its tensors, `tensor_of` its result."""
    values = [
        array_of(each, parameter, name) if isinstance(each, torch.Tensor) else each
        for each, parameter in zip(arguments, OPERATORS[name].parameters)
    ]
    return tensor_of(getattr(ag, name)(*values))


def _rowwise_fake(first: torch.Tensor, *_: object) -> torch.Tensor:
    return first.new_empty(first.shape)


def _batch_first(tensor: torch.Tensor, batch_dim: int | None, size: int) -> torch.Tensor:
    return tensor.expand(size, *tensor.shape) if batch_dim is None else tensor.movedim(batch_dim, 0)


def _softmax_vmap(name: str, info, in_dims: tuple, *arguments) -> tuple[torch.Tensor, int]:
    operator = getattr(torch.ops.ascend_grad, name)
    *tensors, dim = arguments
    tensors = [_batch_first(each, batch_dim, info.batch_size) for each, batch_dim in zip(tensors, in_dims)]
    rank = tensors[0].dim() - 1
    least = max(rank, 1)
    if not -least <= dim < least:
        raise ParamInvalidError(f"dim: expected an int in [{-least}, {least - 1}], got {dim}", operator=name)
    if rank == 0:
        return operator(*(each.unsqueeze(1) for each in tensors), 1).squeeze(1), 0
    return operator(*tensors, dim % rank + 1), 0


def _scaled_masked_vmap(name: str, info, in_dims: tuple, *arguments) -> tuple[torch.Tensor, int]:
    """Compute a batch as one problem. It becomes part of the first dimension, over which a mask may be broadcast."""
    *tensors, mask, scale = arguments
    size = info.batch_size
    tensors = [_batch_first(each, batch_dim, size).flatten(0, 1) for each, batch_dim in zip(tensors, in_dims)]
    mask_dim = in_dims[len(tensors)]
    if mask_dim is not None or mask.shape[0] != 1:
        mask = _batch_first(mask, mask_dim, size)
        if mask.shape[1] == 1:
            mask = mask.expand(size, len(tensors[0]) // size, *mask.shape[2:])
        mask = mask.flatten(0, 1)
    result = getattr(torch.ops.ascend_grad, name)(*tensors, mask, scale)
    return result.unflatten(0, (size, -1)), 0


for _name, _schema, _vmap in (
    ("softmax", "(Tensor input, int dim) -> Tensor", _softmax_vmap),
    ("log_softmax", "(Tensor input, int dim) -> Tensor", _softmax_vmap),
    ("softmax_backward", "(Tensor grad_output, Tensor output, int dim) -> Tensor", _softmax_vmap),
    ("log_softmax_backward", "(Tensor grad_output, Tensor output, int dim) -> Tensor", _softmax_vmap),
    ("scaled_masked_softmax", "(Tensor x, Tensor mask, float scale) -> Tensor", _scaled_masked_vmap),
    (
        "scaled_masked_softmax_backward",
        "(Tensor grad_output, Tensor y, Tensor mask, float scale) -> Tensor",
        _scaled_masked_vmap,
    ),
):
    register(
        _name,
        _schema,
        partial(_rowwise, to_array, to_tensor, _name),
        partial(_rowwise, without_gradient, itself, _name),
        _rowwise_fake,
    )
    torch.library.register_vmap(f"ascend_grad::{_name}", partial(_vmap, _name))


def rowwise(name: str, *arguments: torch.Tensor | float) -> torch.Tensor:
    """Compute an operator. torch's dispatcher takes longer, so it is used only if `are_plain` is False."""
    if not are_plain(arguments):
        return getattr(torch.ops.ascend_grad, name)(*arguments)
    values = (each.detach() if isinstance(each, torch.Tensor) and each.requires_grad else each for each in arguments)
    return getattr(ag, name)(*values)


# -- linear cross-entropy --

LINEAR = "linear_cross_entropy"

#: Shards of vocabularies that are split over processes, by the number that is the operator's last argument.
SHARDS: WeakValueDictionary[int, VocabularyShard] = WeakValueDictionary()


class Loss(NamedTuple):
    """The arguments of the operator `linear_cross_entropy`, in the order of its schema."""

    input: torch.Tensor
    weight: torch.Tensor
    target: torch.Tensor
    bias: torch.Tensor | None
    token_weight: torch.Tensor | None
    class_weight: torch.Tensor | None
    target_prob: torch.Tensor | None
    #: A temperature for each row, or None: `temperature` is then the temperature of all rows.
    temperatures: torch.Tensor | None
    grad_loss: torch.Tensor | None
    reduction: Literal["mean", "sum", "none"]
    ignore_index: int
    input_grad: bool
    weight_grad: bool
    bias_grad: bool
    label_smoothing: float
    lse_square_scale: float
    temperature: float
    denominator: float | None
    logit_scale: float
    softcap: float | None
    outputs: Sequence[str]
    filter_eps: float
    num_threads: int | None
    shard: int | None


_LOSS_PARAMETERS = (
    "Tensor input, Tensor weight, Tensor target, Tensor? bias, Tensor? token_weight, Tensor? class_weight, "
    "Tensor? target_prob, Tensor? temperatures, Tensor? grad_loss, str reduction, int ignore_index, bool input_grad, "
    "bool weight_grad, bool bias_grad, float label_smoothing, float lse_square_scale, float temperature, "
    "float? denominator, float logit_scale, float? softcap, str[] outputs, float filter_eps, int? num_threads, "
    "int? shard"
)


_NO_OUTPUTS = (None,) * len(OUTPUTS)


def outputs_of(result: Any, requested: Sequence[str]) -> Sequence[Any]:
    """Return the outputs in the result of a loss in order, None for those that are not requested."""
    return [getattr(result, name) for name in OUTPUTS] if requested else _NO_OUTPUTS


def accumulator(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype of losses and statistics of a tensor's rows."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def fake_outputs(input: torch.Tensor, rows: Sequence[int], requested: Sequence[str]) -> list[torch.Tensor]:
    """Return outputs without memory for rows of this shape, empty ones where they are not requested."""
    return [
        input.new_empty(
            () if name == "correct" else rows,
            dtype=torch.int64 if name in ("predicted", "correct") else accumulator(input),
        )
        if name in requested
        else input.new_empty(0)
        for name in OUTPUTS
    ]


def upstream(array_of: Callable, grad_loss: torch.Tensor | None, reduction: str) -> Any:
    """Return the upstream gradient as the functions accept it: None, an array or a number."""
    if grad_loss is None:
        return None
    array = array_of(grad_loss, "grad_loss", LINEAR)
    if reduction == "none" or grad_loss.device.type == "npu":  # reading a number waits for the device
        return array
    return float(array)


def loss_of(
    function: Callable, array_of: Callable, tensor_of: Callable, problem: Loss, grad_loss: Any, **options: Any
) -> tuple[torch.Tensor, ...]:
    """Compute loss, gradients and outputs by `function`. `array_of` converts its tensors, `tensor_of` its results.

    `grad_loss` is a result of `upstream`. `options` are further keywords of `function`.
    """
    result = function(
        array_of(problem.input, "input", LINEAR),
        array_of(problem.weight, "linear_weight", LINEAR),
        array_of(problem.target, "target", LINEAR),
        reduction=problem.reduction,
        ignore_index=problem.ignore_index,
        grad_loss=grad_loss,
        return_grad=problem.input_grad or problem.weight_grad or problem.bias_grad,
        output_mask=(problem.input_grad, problem.weight_grad),
        filter_eps=problem.filter_eps,
        num_threads=problem.num_threads,
        **options,
    )
    bias_grad = result.bias_grad if problem.bias_grad else None
    gradients = result.input_grad, result.weight_grad, bias_grad
    found = result.loss, *gradients, *outputs_of(result, problem.outputs)
    empty = problem.input.new_empty
    return tuple([empty(0) if each is None else tensor_of(each) for each in found])


def _optional_array(array_of: Callable, tensor: torch.Tensor | None, name: str) -> Any:
    return None if tensor is None else array_of(tensor, name, LINEAR)


def options_of(array_of: Callable, problem: Loss) -> dict[str, Any]:
    """Return the options of the loss as the functions accept them."""
    array = partial(_optional_array, array_of)
    return {
        "bias": array(problem.bias, "bias"),
        "token_weight": array(problem.token_weight, "token_weight"),
        "class_weight": array(problem.class_weight, "class_weight"),
        "target_prob": array(problem.target_prob, "target_prob"),
        "label_smoothing": problem.label_smoothing,
        "lse_square_scale": problem.lse_square_scale,
        "temperature": problem.temperature
        if problem.temperatures is None
        else array_of(problem.temperatures, "temperature", LINEAR),
        "denominator": problem.denominator,
        "logit_scale": problem.logit_scale,
        "softcap": problem.softcap,
    }


def _shard_of(number: int) -> VocabularyShard:
    shard = SHARDS.get(number)
    if shard is None:
        expected = "the number of a part of a vocabulary whose loss is in use"
        message = f"shard: expected {expected}, which a graph cannot keep, got {number}"
        raise ParamInvalidError(message, operator=LINEAR)
    return shard


def _linear_cross_entropy(array_of: Callable, tensor_of: Callable, *arguments: Any) -> tuple[torch.Tensor, ...]:
    problem = Loss(*arguments)
    if problem.shard is not None:
        return _shard_of(problem.shard).linear_cross_entropy(problem)
    grad_loss = upstream(array_of, problem.grad_loss, problem.reduction)
    options = options_of(array_of, problem)
    function = ag.linear_cross_entropy
    return loss_of(function, array_of, tensor_of, problem, grad_loss, outputs=tuple(problem.outputs), **options)


def _linear_cross_entropy_fake(*arguments):
    problem = Loss(*arguments)
    input, rows = problem.input, problem.input.shape[:1]
    loss = input.new_empty(rows if problem.reduction == "none" else (), dtype=accumulator(input))
    return loss, *_gradients_fake(problem), *fake_outputs(input, rows, problem.outputs)


def _gradients_fake(problem: Loss) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    input, weight, bias = problem.input, problem.weight, problem.bias
    return (
        input.new_empty(input.shape if problem.input_grad else (0,)),
        weight.new_empty(weight.shape if problem.weight_grad else (0,)),
        bias.new_empty(bias.shape) if problem.bias_grad and bias is not None else input.new_empty(0),
    )


class OutputGradients(NamedTuple):
    """The first arguments of the operator `linear_cross_entropy_backward`: outputs and their upstream gradients."""

    lse: torch.Tensor
    entropy: torch.Tensor | None
    grad_lse: torch.Tensor | None
    grad_log_prob: torch.Tensor | None
    grad_entropy: torch.Tensor | None


def _linear_cross_entropy_backward(
    array_of: Callable, tensor_of: Callable, *arguments: Any
) -> tuple[torch.Tensor, ...]:
    given = OutputGradients(*arguments[: len(OutputGradients._fields)])
    problem = Loss(*arguments[len(given) :])
    if problem.shard is not None:
        return _shard_of(problem.shard).linear_cross_entropy(problem, given)[1:4]
    found = ag.linear_cross_entropy_backward(
        array_of(problem.input, "input", LINEAR),
        array_of(problem.weight, "linear_weight", LINEAR),
        array_of(problem.target, "target", LINEAR),
        **{name: _optional_array(array_of, each, name) for name, each in given._asdict().items()},
        grad_loss=upstream(array_of, problem.grad_loss, problem.reduction),
        reduction=problem.reduction,
        ignore_index=problem.ignore_index,
        output_mask=(problem.input_grad, problem.weight_grad),
        filter_eps=problem.filter_eps,
        num_threads=problem.num_threads,
        **options_of(array_of, problem),
    )
    gradients = found.input_grad, found.weight_grad, found.bias_grad if problem.bias_grad else None
    return tuple(problem.input.new_empty(0) if each is None else tensor_of(each) for each in gradients)


def _linear_cross_entropy_backward_fake(*arguments):
    return _gradients_fake(Loss(*arguments[len(OutputGradients._fields) :]))


def one_after_another(
    name: str, info: Any, in_dims: tuple, *arguments: Any
) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    """Compute the problems of a batch in order: as each has a sum over its rows, they are not one problem."""

    def problem(i: int) -> list:
        return [
            each if dim is None or not isinstance(each, torch.Tensor) else each.select(dim, i)
            for each, dim in zip(arguments, in_dims)
        ]

    results = [getattr(torch.ops.ascend_grad, name)(*problem(i)) for i in range(info.batch_size)]
    if not results:
        message = "expected a batch of at least one problem, got none"
        raise ParamInvalidError(f"torch.vmap: {message}", operator=name)
    return tuple(torch.stack(each) for each in zip(*results)), (0,) * len(results[0])


register(
    LINEAR,
    f"({_LOSS_PARAMETERS}) -> (Tensor loss, Tensor input_grad, Tensor weight_grad, Tensor bias_grad, Tensor lse, "
    "Tensor log_prob, Tensor entropy, Tensor predicted, Tensor correct)",
    partial(_linear_cross_entropy, to_array, to_tensor),
    partial(_linear_cross_entropy, without_gradient, itself),
    _linear_cross_entropy_fake,
)
torch.library.register_vmap(f"ascend_grad::{LINEAR}", partial(one_after_another, LINEAR))

_BACKWARD = "linear_cross_entropy_backward"

register(
    _BACKWARD,
    "(Tensor lse, Tensor? entropy, Tensor? grad_lse, Tensor? grad_log_prob, Tensor? grad_entropy, "
    f"{_LOSS_PARAMETERS}) -> (Tensor input_grad, Tensor weight_grad, Tensor bias_grad)",
    partial(_linear_cross_entropy_backward, to_array, to_tensor),
    partial(_linear_cross_entropy_backward, without_gradient, itself),
    _linear_cross_entropy_backward_fake,
)
torch.library.register_vmap(f"ascend_grad::{_BACKWARD}", partial(one_after_another, _BACKWARD))


def loss(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """Compute `Loss`. torch's dispatcher is used only if `are_plain` is False."""
    if not are_plain(arguments):
        return torch.ops.ascend_grad.linear_cross_entropy(*arguments)
    return _linear_cross_entropy(to_array, to_tensor, *arguments)


def loss_backward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """Compute the gradients of `Loss` and its outputs for `OutputGradients`, like `loss`."""
    if not are_plain(arguments):
        return torch.ops.ascend_grad.linear_cross_entropy_backward(*arguments)
    return _linear_cross_entropy_backward(to_array, to_tensor, *arguments)
