"""Registration of the operators with torch, as ``torch.ops.ascend_grad``, for tracing and batching.

Each operator has a schema, a computation on the CPU and on an Ascend NPU, a "fake" that returns tensors without memory,
and a rule for `torch.vmap`. The modules `rowwise`, `linear`, `cross_entropy` and `fused` register the gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import torch
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd.function import Function, _SingleLevelFunction
from torch.utils.flop_counter import register_flop_formula

import ascend_grad as ag

from ..arguments import real_number, shown
from ..errors import ParamInvalidError, ParamTypeError
from ..operators.options import OUTPUTS
from .tensors import are_plain, are_readable, check_tensors, detached, optional

if TYPE_CHECKING:
    from .vocabulary_parallel import VocabularyShard


#: What has been registered. torch keeps it and the operators when this module is imported once more.
_REGISTERED: set[str] = vars(torch.ops.ascend_grad).setdefault("_registered", set())


def _is_first(what: str) -> bool:
    """Return whether something has not been registered in this process, and record that it is registered."""
    is_first = what not in _REGISTERED
    _REGISTERED.add(what)
    return is_first


def register(name: str, schema: str, compute: Callable, fake: Callable, vmap: Callable) -> None:
    """Register an operator, once in a process. `vmap` is its rule for batches, after the operator's name."""
    if not _is_first(name):
        return
    qualified = f"ascend_grad::{name}"
    torch.library.define(qualified, schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("cpu", "privateuseone"):  # the latter is torch_npu's, which renames it
        torch.library.impl(qualified, key, compute)
    torch.library.register_fake(qualified, fake)
    torch.library.register_vmap(qualified, partial(vmap, name))


def register_flops(name: str, formula: Callable) -> None:
    """Register the floating-point operations of an operator for `torch.utils.flop_counter`."""
    if _is_first(f"flops of {name}"):
        register_flop_formula([getattr(torch.ops.ascend_grad, name)])(formula)


def register_gradient(name: str, function: type[Function]) -> None:
    """Register the gradient of `function`, which has the operator's arguments and results, for an operator."""
    if not _is_first(f"gradient of {name}"):
        return
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


def _rowwise(name: str, *arguments: torch.Tensor | float) -> torch.Tensor:
    return getattr(ag, name)(*(detached(each) if isinstance(each, torch.Tensor) else each for each in arguments))


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
    register(_name, _schema, partial(_rowwise, _name), _rowwise_fake, _vmap)


def rowwise(name: str, *arguments: torch.Tensor | float) -> torch.Tensor:
    """Compute an operator. torch's dispatcher takes longer, so it is used only if `are_plain` is False."""
    if not are_plain(arguments):
        return getattr(torch.ops.ascend_grad, name)(*arguments)
    values = (each.detach() if isinstance(each, torch.Tensor) and each.requires_grad else each for each in arguments)
    return getattr(ag, name)(*values)


# -- linear cross-entropy --

LINEAR = "linear_cross_entropy"

#: Shards of vocabularies that are split over processes, by the number that is the operator's last argument.
SHARDS: WeakValueDictionary[int, VocabularyShard]
SHARDS = vars(torch.ops.ascend_grad).setdefault("_shards", WeakValueDictionary())
SHARD_NUMBERS: Iterator[int] = vars(torch.ops.ascend_grad).setdefault("_shard_numbers", itertools.count())


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
    #: The options that `numbers_of` replaces, or None.
    numbers: torch.Tensor | None
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
    "Tensor? target_prob, Tensor? temperatures, Tensor? numbers, Tensor? grad_loss, str reduction, "
    "SymInt ignore_index, bool input_grad, "
    "bool weight_grad, bool bias_grad, float label_smoothing, float lse_square_scale, float temperature, "
    "float? denominator, float logit_scale, float? softcap, str[] outputs, float filter_eps, SymInt? num_threads, "
    "int? shard"
)


#: The options that are numbers, each with its default. Only those whose default is None may be None.
_NUMBERS = {
    "label_smoothing": 0.0,
    "lse_square_scale": 0.0,
    "temperature": 1.0,
    "denominator": None,
    "logit_scale": 1.0,
    "softcap": None,
    "filter_eps": 0.0,
}


def numbers_of(operator: str, **options: Any) -> tuple[dict[str, Any], torch.Tensor | None]:
    """Convert options that are numbers, or None, to the types of the schema.

    torch compiles a graph for each value of a number. So while it traces, the second result is a vector of all numbers
    that are given. `with_numbers` puts the vector's elements instead of the numbers.
    """
    given = {name: value for name, value in options.items() if value is not None or _NUMBERS[name] is not None}
    may_change = torch.compiler.is_compiling()
    if not any((may_change or type(value) is not float) and _is_traced(name, value) for name, value in given.items()):
        return options | {name: real_number(value, name, operator) for name, value in given.items()}, None
    elements = [_traced_number(value, name, operator) for name, value in given.items()]
    return options | dict.fromkeys(given, 1.0), torch.stack(elements)


def _is_traced(name: str, value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return not are_plain((value,))
    if isinstance(value, (torch.SymFloat, torch.SymInt)):
        return True
    return torch.compiler.is_compiling() and type(value) in (int, float) and value != _NUMBERS[name]


def _traced_number(value: Any, name: str, operator: str) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        check_tensors(operator, **{name: value})
        if value.dim() or value.dtype in (torch.bool, torch.complex64, torch.complex128) or value.requires_grad:
            raise ParamTypeError(f"{name}: expected a real number, got {shown(value)}", operator=operator)
        return value.to("cpu", torch.float64)
    if type(value) not in (int, float, torch.SymFloat, torch.SymInt):
        value = real_number(value, name, operator)
    return torch.ones((), dtype=torch.float64) * value  # torch specialises graphs to the numbers in `torch.full`


_P = TypeVar("_P", bound=Any)


def with_numbers(problem: _P) -> _P:
    """Return the arguments of a loss with the elements of `numbers` instead of the options."""
    if problem.numbers is None:
        return problem
    names = [name for name in _NUMBERS if getattr(problem, name, None) is not None]
    return problem._replace(numbers=None, **dict(zip(names, problem.numbers.tolist())))


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


def upstream(grad_loss: torch.Tensor | None, reduction: str) -> torch.Tensor | float | None:
    """Return the upstream gradient as the functions accept it."""
    if grad_loss is None:
        return None
    if reduction == "none" or grad_loss.device.type == "npu":  # reading a number waits for the device
        return detached(grad_loss)
    return grad_loss.item()


def loss_of(function: Callable, problem: Loss, grad_loss: Any, **options: Any) -> tuple[torch.Tensor, ...]:
    """Compute loss, gradients and outputs by `function`.

    `grad_loss` is a result of `upstream`. `options` are further keywords of `function`.
    """
    result = function(
        detached(problem.input),
        detached(problem.weight),
        detached(problem.target),
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
    return without_none(problem.input, (result.loss, *gradients, *outputs_of(result, problem.outputs)))


def without_none(like: torch.Tensor, results: Iterable[torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
    """Return results with an empty tensor instead of each None, as schemas of operators have no optional results."""
    return tuple([like.new_empty(0) if each is None else each for each in results])


def options_of(problem: Loss) -> dict[str, Any]:
    """Return the options of the loss as the functions accept them."""
    return {
        "bias": optional(problem.bias),
        "token_weight": optional(problem.token_weight),
        "class_weight": optional(problem.class_weight),
        "target_prob": optional(problem.target_prob),
        "label_smoothing": problem.label_smoothing,
        "lse_square_scale": problem.lse_square_scale,
        "temperature": problem.temperature if problem.temperatures is None else detached(problem.temperatures),
        "denominator": problem.denominator,
        "logit_scale": problem.logit_scale,
        "softcap": problem.softcap,
    }


def _function(function: Callable, number: int | None) -> Callable:
    """Return a function of the library, or the same over the processes of the shard with this number."""
    if number is None:
        return function
    shard = SHARDS.get(number)
    if shard is None:
        expected = "the number of a part of a vocabulary whose loss is in use"
        message = f"shard: expected {expected}, which a graph cannot keep, got {number}"
        raise ParamInvalidError(message, operator=LINEAR)
    return shard.function(function.__name__)


def _linear_cross_entropy(*arguments: Any) -> tuple[torch.Tensor, ...]:
    problem = with_numbers(Loss(*arguments))
    function = _function(ag.linear_cross_entropy, problem.shard)
    grad_loss = upstream(problem.grad_loss, problem.reduction)
    return loss_of(function, problem, grad_loss, outputs=tuple(problem.outputs), **options_of(problem))


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


def _linear_cross_entropy_backward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    given = OutputGradients(*arguments[: len(OutputGradients._fields)])
    problem = with_numbers(Loss(*arguments[len(given) :]))
    found = _function(ag.linear_cross_entropy_backward, problem.shard)(
        detached(problem.input),
        detached(problem.weight),
        detached(problem.target),
        **{name: optional(each) for name, each in given._asdict().items()},
        grad_loss=upstream(problem.grad_loss, problem.reduction),
        reduction=problem.reduction,
        ignore_index=problem.ignore_index,
        output_mask=(problem.input_grad, problem.weight_grad),
        filter_eps=problem.filter_eps,
        num_threads=problem.num_threads,
        **options_of(problem),
    )
    gradients = found.input_grad, found.weight_grad, found.bias_grad if problem.bias_grad else None
    return without_none(problem.input, gradients)


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
    _linear_cross_entropy,
    _linear_cross_entropy_fake,
    one_after_another,
)

_BACKWARD = "linear_cross_entropy_backward"

register(
    _BACKWARD,
    "(Tensor lse, Tensor? entropy, Tensor? grad_lse, Tensor? grad_log_prob, Tensor? grad_entropy, "
    f"{_LOSS_PARAMETERS}) -> (Tensor input_grad, Tensor weight_grad, Tensor bias_grad)",
    _linear_cross_entropy_backward,
    _linear_cross_entropy_backward_fake,
    one_after_another,
)


def linear_flops(input: Sequence[int], weight: Sequence[int], products: int) -> int:
    """Return the floating-point operations of products of the size of the logits, for shapes of input and weight."""
    return 2 * products * input[0] * weight[0] * weight[1]


def _loss_flops(*arguments: Any, **_: Any) -> int:
    problem = Loss(*arguments)  # with shapes instead of tensors
    return linear_flops(problem.input, problem.weight, 1 + problem.input_grad + problem.weight_grad)


def _loss_backward_flops(*arguments: Any, **_: Any) -> int:
    return _loss_flops(*arguments[len(OutputGradients._fields) :])


register_flops(LINEAR, _loss_flops)
register_flops(_BACKWARD, _loss_backward_flops)


def loss(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """Compute `Loss`. torch's dispatcher is used only if `are_plain` is False."""
    if not are_plain(arguments):
        return torch.ops.ascend_grad.linear_cross_entropy(*arguments)
    return _linear_cross_entropy(*arguments)


def loss_backward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """Compute the gradients of `Loss` and its outputs for `OutputGradients`, like `loss`."""
    if not are_plain(arguments):
        return torch.ops.ascend_grad.linear_cross_entropy_backward(*arguments)
    return _linear_cross_entropy_backward(*arguments)
