"""Registration of the losses with torch. Their schemas, conversions and computations follow the list of options.

A call of a registered loss has a value for every argument of its schema. Within the package the arguments are a
dictionary in that order, a `Problem`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import torch

import ascend_grad as ag

from ..arguments import MAX_INDEX, integer, real_number, shown
from ..errors import ParamInvalidError, ParamTypeError
from ..operators.options import LAYER_OUTPUTS, NUMBER_OR_PER_ROW, OPTIONS, OUTPUT_GRADIENTS, OUTPUTS, Output, is_zero
from .operators import (
    accumulator,
    is_traced,
    linear_flops,
    one_after_another,
    register,
    register_flops,
    traced_number,
    without_none,
)
from .tensors import are_plain, detached, optional, threads_of

#: The arguments of a registered loss by name, in the order of its schema.
Problem: TypeAlias = dict[str, Any]

#: The options that are numbers, each with its default. Only those whose default is None may be None.
NUMBERS = {
    **{each.name: each.default for each in OPTIONS.values() if each.is_number},
    "filter_eps": 0.0,
}
#: The name of the tensor in a schema that has a number for each row, instead of the number.
ROWS_OF = {each.name: f"{each.name}s" for each in OPTIONS.values() if each.kind == NUMBER_OR_PER_ROW}
#: The default of `ignore_index` of torch's functions.
IGNORE_INDEX = -100


class Loss:
    """A loss that is registered with torch.

    Attributes
    ----------
    name : str
    fields : tuple of str
        The arguments of its schema in order. `numbers` has the numbers that torch traces, see `numbers_of`.
    parameters : str
        The arguments in torch's notation.
    tensors : int
        The number of tensors before the upstream gradients, which are followed by other arguments.
    upstream : int
        The number of upstream gradients.
    wanted : tuple of str
        The arguments that tell which gradients to compute.
    outputs : dict of Output
        The outputs that may be requested, by name.
    outputs_at : int
        The place of the first output among the results. The loss and the gradients come before.
    """

    def __init__(self, name: str, *, of_logits: bool):
        options = [each for each in OPTIONS.values() if each.of_logits or not of_logits]
        arrays = [each.name for each in options if each.is_array]
        numbers = [each for each in options if each.is_number]
        rows = [ROWS_OF[each.name] for each in numbers if each.name in ROWS_OF]
        upstream = ["grad_loss", *(OUTPUT_GRADIENTS if of_logits else ())]
        layer = [] if of_logits else ["weight"]
        self.options, self.arrays = tuple(each.name for each in options), tuple(arrays)
        self.wanted = ("input_grad",) if of_logits else ("input_grad", "weight_grad", "bias_grad")
        types = {
            **dict.fromkeys(["input", *layer, "target"], "Tensor"),
            **dict.fromkeys([*arrays, *rows, "numbers", *upstream], "Tensor?"),
            **({"dim": "int"} if of_logits else {}),
            "reduction": "str",
            "ignore_index": "SymInt",
            **dict.fromkeys(self.wanted, "bool"),
            **{each.name: "float?" if each.default is None else "float" for each in numbers},
            "outputs": "str[]",
            **({} if of_logits else {"filter_eps": "float"}),
            "num_threads": "SymInt?",
            **({} if of_logits else {"shard": "int?"}),
        }
        self.name, self.fields = name, tuple(types)
        self.parameters = ", ".join(f"{kind} {each}" for each, kind in types.items())
        self.tensors, self.upstream = self.fields.index("grad_loss"), len(upstream)
        self.outputs, self.outputs_at = OUTPUTS if of_logits else LAYER_OUTPUTS, 1 + len(self.wanted)

    @property
    def results(self) -> str:
        """The results in torch's notation."""
        return ", ".join(f"Tensor {each}" for each in ("loss", *self.wanted, *self.outputs))

    def problem(self, arguments: Sequence[Any]) -> Problem:
        """Return arguments by name."""
        return dict(zip(self.fields, arguments))

    def arguments(self, values: Mapping[str, Any]) -> list[Any]:
        """Return arguments in the order of the schema, None where `values` has none."""
        return [values.get(each) for each in self.fields]

    def tensors_among(self, options: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the options that are tensors, or should be: numbers that may be tensors are not among them."""
        return {
            name: each
            for name, each in options.items()
            if (name in self.arrays and each is not None) or (name in ROWS_OF and isinstance(each, torch.Tensor))
        }

    def computed(self, results: Sequence[torch.Tensor], outputs: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return the loss and the outputs of these names among the results of a call."""
        found = dict(zip(self.outputs, results[self.outputs_at :]))
        return {"loss": results[0], **{name: found[name] for name in outputs}}

    def options_of(self, problem: Problem) -> dict[str, Any]:
        """Return the options as the functions for NumPy accept them."""
        given = {name: optional(problem[name]) for name in self.arrays}
        for name in self.options:
            if name in NUMBERS:
                rows = problem[ROWS_OF[name]] if name in ROWS_OF else None
                given[name] = problem[name] if rows is None else detached(rows)
        return given


CROSS_ENTROPY = Loss("cross_entropy", of_logits=True)
LINEAR = Loss("linear_cross_entropy", of_logits=False)


# -- conversion of options --


def numbers_of(
    names: Collection[str], operator: str, options: Mapping[str, Any]
) -> tuple[dict[str, Any], torch.Tensor | None]:
    """Convert options of these names that are numbers, or None, to the schema's types. Missing options are defaults.

    torch compiles a graph for each value of a number. So while it traces, the second result is a vector of all numbers
    that are given. `with_numbers` puts the vector's elements instead of the numbers.
    """
    values = {name: options.get(name, default) for name, default in NUMBERS.items() if name in names}
    given = {name: value for name, value in values.items() if value is not None or NUMBERS[name] is not None}
    may_change = torch.compiler.is_compiling()
    if not any(
        (may_change or type(value) is not float) and is_traced(value, NUMBERS[name]) for name, value in given.items()
    ):
        return {**values, **{name: real_number(value, name, operator) for name, value in given.items()}}, None
    elements = [traced_number(value, name, operator) for name, value in given.items()]
    return {**values, **dict.fromkeys(given, 1.0)}, torch.stack(elements)


def with_numbers(problem: Problem) -> Problem:
    """Return the arguments of an operator with the elements of `numbers` instead of the options."""
    if problem["numbers"] is None:
        return problem
    names = [name for name in NUMBERS if problem.get(name) is not None]
    return {**problem, "numbers": None, **dict(zip(names, problem["numbers"].tolist()))}


def with_probabilities(options: dict[str, Any], target: object) -> dict[str, Any]:
    """Return options with zeros of the targets' shape if the probabilities of targets are the number 0."""
    if not is_zero(options["target_prob"]) or not isinstance(target, torch.Tensor):
        return options
    return {**options, "target_prob": target.new_zeros((), dtype=torch.float32).expand(target.shape)}


def checked_integers(operator: str, ignore_index: object, num_threads: object) -> tuple[int, int | None]:
    """Convert arguments to the schema's types. torch's own errors would name neither function nor argument."""
    ignored = IGNORE_INDEX if ignore_index is None else integer(ignore_index, "ignore_index", operator)
    if not -MAX_INDEX - 1 <= ignored <= MAX_INDEX:
        expected = "an int of 64 bits"
        raise ParamInvalidError(f"ignore_index: expected {expected}, got {shown(ignored)}", operator=operator)
    return ignored, threads_of(num_threads, operator)


def check_reduction(operator: str, reduction: object) -> None:
    """Refuse an unknown reduction."""
    if reduction not in ("mean", "sum", "none"):
        raise ParamInvalidError(f"reduction: expected mean, sum or none, got {shown(reduction)}", operator=operator)


def check_target_dtype(operator: str, name: str, target: torch.Tensor) -> None:
    """Refuse truth values."""
    if target.dtype == torch.bool:
        message = f"{name}: expected an integer dtype, got bool ({name}.long() makes classes of it)"
        raise ParamTypeError(message, operator=operator)


def refuse_dense(operator: str, name: str, target: torch.Tensor, where: str) -> None:
    """Refuse probabilities of all classes."""
    if target.is_floating_point():
        hint = "target_prob takes the probabilities of some classes"
        message = f"probabilities of all classes are not supported {where}, got {target.dtype} ({hint})"
        raise NotImplementedError(f"{operator}: {name}: {message}")


def class_ids(target: torch.Tensor) -> torch.Tensor:
    """Return targets as int64 or int32. Those beyond int64 become its largest number, which no vocabulary has."""
    if target.dtype in (torch.int64, torch.int32) or target.is_floating_point() or target.is_complex():
        return target
    converted = target.to(torch.int64)
    if target.dtype == torch.uint64:
        return torch.where(converted < 0, torch.iinfo(torch.int64).max, converted)
    return converted


def refuse_gradients(operator: str, options: Mapping[str, torch.Tensor], results_have: str = "the loss has") -> None:
    """Refuse options that require grad, which the results have no gradient for."""
    for name, tensor in options.items():
        if tensor.requires_grad and torch.is_grad_enabled():
            message = f"{results_have} no gradient for it, got a tensor that requires grad (tensor.detach() does not)"
            raise NotImplementedError(f"{operator}: {name}: {message}")


# -- computations --

#: Shards of vocabularies that are split over processes, by the number that is the operator's last argument.
SHARDS: WeakValueDictionary[int, Any]
SHARDS = vars(torch.ops.ascend_grad).setdefault("_shards", WeakValueDictionary())
SHARD_NUMBERS: Iterator[int] = vars(torch.ops.ascend_grad).setdefault("_shard_numbers", itertools.count())


def _outputs_of(loss: Loss, result: Any, requested: Sequence[str]) -> list[Any]:
    """Return the outputs in the result of a loss in order, None for those that are not requested."""
    return [getattr(result, name) if requested else None for name in loss.outputs]


def _loss_of(problem: Problem, result: Any) -> torch.Tensor | None:
    """Return the loss of a call, None if an upstream gradient is given: the call is then of gradients alone."""
    return result.loss if problem["grad_loss"] is None else None


def _fake_outputs(loss: Loss, problem: Problem, rows: Sequence[int]) -> list[torch.Tensor]:
    """Return outputs without memory for rows of this shape, empty ones where they are not requested."""
    input = problem["input"]

    def shape(output: Output) -> Sequence[int]:
        if output.is_of_logits:
            return input.shape
        return () if output.is_total else problem["target"].shape if output.is_of_targets else rows

    def dtype(output: Output) -> torch.dtype:
        return torch.int64 if output.is_integer else input.dtype if output.is_of_logits else accumulator(input)

    return [
        input.new_empty(shape(output), dtype=dtype(output)) if name in problem["outputs"] else input.new_empty(0)
        for name, output in loss.outputs.items()
    ]


def _fake_loss(problem: Problem, rows: Sequence[int]) -> torch.Tensor:
    input = problem["input"]
    if problem["grad_loss"] is not None:
        return input.new_empty(0)
    return input.new_empty(rows if problem["reduction"] == "none" else (), dtype=accumulator(input))


def _upstream(grad_loss: torch.Tensor | None, reduction: str) -> torch.Tensor | float | None:
    """Return the upstream gradient as the functions accept it."""
    if grad_loss is None:
        return None
    if reduction == "none" or grad_loss.device.type == "npu":  # reading a number waits for the device
        return detached(grad_loss)
    return grad_loss.item()


def _cross_entropy(*arguments: Any) -> tuple[torch.Tensor, ...]:
    problem = with_numbers(CROSS_ENTROPY.problem(arguments))
    result = ag.cross_entropy(
        detached(problem["input"]),
        detached(problem["target"]),
        problem["dim"],
        reduction=problem["reduction"],
        ignore_index=problem["ignore_index"],
        grad_loss=_upstream(problem["grad_loss"], problem["reduction"]),
        **{name: optional(problem[name]) for name in OUTPUT_GRADIENTS},
        outputs=tuple(problem["outputs"]),
        return_grad=problem["input_grad"],
        num_threads=problem["num_threads"],
        **CROSS_ENTROPY.options_of(problem),
    )
    results = _loss_of(problem, result), result.input_grad, *_outputs_of(CROSS_ENTROPY, result, problem["outputs"])
    return without_none(problem["input"], results)


def _cross_entropy_fake(*arguments: Any) -> tuple[torch.Tensor, ...]:
    problem = CROSS_ENTROPY.problem(arguments)
    input, dim = problem["input"], problem["dim"]
    rows = input.shape[:dim] + input.shape[dim + 1 :]
    gradient = input.new_empty(input.shape if problem["input_grad"] else (0,))
    return _fake_loss(problem, rows), gradient, *_fake_outputs(CROSS_ENTROPY, problem, rows)


def _cross_entropy_hvp(*arguments: Any) -> torch.Tensor:
    *of_loss, vector = arguments
    problem = with_numbers(CROSS_ENTROPY.problem(of_loss))
    product: Any = ag.cross_entropy_hvp(
        detached(problem["input"]),
        detached(problem["target"]),
        detached(vector),
        problem["dim"],
        reduction=problem["reduction"],
        ignore_index=problem["ignore_index"],
        grad_loss=_upstream(problem["grad_loss"], problem["reduction"]),
        num_threads=problem["num_threads"],
        **CROSS_ENTROPY.options_of(problem),
    )
    return product.contiguous()  # the classes of a row lie side by side


def _linear_cross_entropy_hvp(*arguments: Any) -> tuple[torch.Tensor, ...]:
    *of_loss, vector, vector_bias, vector_input = arguments
    problem = with_numbers(LINEAR.problem(of_loss))
    found = ag.linear_cross_entropy_hvp(
        detached(problem["input"]),
        detached(problem["weight"]),
        detached(problem["target"]),
        optional(vector),
        vector_bias=optional(vector_bias),
        vector_input=optional(vector_input),
        reduction=problem["reduction"],
        ignore_index=problem["ignore_index"],
        grad_loss=_upstream(problem["grad_loss"], problem["reduction"]),
        num_threads=problem["num_threads"],
        **LINEAR.options_of(problem),
    )
    return without_none(problem["weight"], found)


def _linear_cross_entropy_hvp_fake(*arguments: Any) -> tuple[torch.Tensor, ...]:
    problem, with_input = LINEAR.problem(arguments), arguments[-1] is not None
    return tuple(
        problem["weight"].new_empty(0) if each is None else each.new_empty(each.shape)
        for each in (problem["weight"], problem["bias"], problem["input"] if with_input else None)
    )


def _cross_entropy_hvp_fake(*arguments: Any) -> torch.Tensor:
    return arguments[0].new_empty(arguments[0].shape)


def _over_processes(function: Callable, number: int | None) -> Callable:
    """Return a function of the library, or the same over the processes of the shard with this number."""
    if number is None:
        return function
    shard = SHARDS.get(number)
    if shard is None:
        expected = "the number of a part of a vocabulary whose loss is in use"
        message = f"shard: expected {expected}, which a graph cannot keep, got {number}"
        raise ParamInvalidError(message, operator=LINEAR.name)
    return shard.function(function.__name__)


def _computed_linear(function: Callable, problem: Problem, **further: Any) -> Any:
    return _over_processes(function, problem["shard"])(
        detached(problem["input"]),
        detached(problem["weight"]),
        detached(problem["target"]),
        reduction=problem["reduction"],
        ignore_index=problem["ignore_index"],
        grad_loss=_upstream(problem["grad_loss"], problem["reduction"]),
        output_mask=(problem["input_grad"], problem["weight_grad"]),
        filter_eps=problem["filter_eps"],
        num_threads=problem["num_threads"],
        **LINEAR.options_of(problem),
        **further,
    )


def _gradients(problem: Problem, found: Any) -> tuple[torch.Tensor | None, ...]:
    return found.input_grad, found.weight_grad, found.bias_grad if problem["bias_grad"] else None


def _linear_cross_entropy(*arguments: Any) -> tuple[torch.Tensor, ...]:
    problem = with_numbers(LINEAR.problem(arguments))
    with_gradients = any(problem[name] for name in LINEAR.wanted)
    outputs = tuple(problem["outputs"])
    found = _computed_linear(ag.linear_cross_entropy, problem, return_grad=with_gradients, outputs=outputs)
    results = _loss_of(problem, found), *_gradients(problem, found), *_outputs_of(LINEAR, found, outputs)
    return without_none(problem["input"], results)


def _gradients_fake(problem: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    input, weight, bias = problem["input"], problem["weight"], problem["bias"]
    return (
        input.new_empty(input.shape if problem["input_grad"] else (0,)),
        weight.new_empty(weight.shape if problem["weight_grad"] else (0,)),
        bias.new_empty(bias.shape) if problem["bias_grad"] and bias is not None else input.new_empty(0),
    )


def _linear_cross_entropy_fake(*arguments: Any) -> tuple[torch.Tensor, ...]:
    problem = LINEAR.problem(arguments)
    rows = problem["input"].shape[:1]
    return _fake_loss(problem, rows), *_gradients_fake(problem), *_fake_outputs(LINEAR, problem, rows)


#: The first arguments of the operator `linear_cross_entropy_backward`: outputs and their upstream gradients.
STATISTICS = ("lse", "entropy", *OUTPUT_GRADIENTS)


def _linear_cross_entropy_backward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    statistics = {name: optional(each) for name, each in zip(STATISTICS, arguments)}
    problem = with_numbers(LINEAR.problem(arguments[len(STATISTICS) :]))
    found = _computed_linear(ag.linear_cross_entropy_backward, problem, **statistics)
    return without_none(problem["input"], _gradients(problem, found))


def _linear_cross_entropy_backward_fake(*arguments: Any) -> tuple[torch.Tensor, ...]:
    return _gradients_fake(LINEAR.problem(arguments[len(STATISTICS) :]))


register(
    CROSS_ENTROPY.name,
    f"({CROSS_ENTROPY.parameters}) -> ({CROSS_ENTROPY.results})",
    _cross_entropy,
    _cross_entropy_fake,
    one_after_another,
)
register(
    LINEAR.name,
    f"({LINEAR.parameters}) -> ({LINEAR.results})",
    _linear_cross_entropy,
    _linear_cross_entropy_fake,
    one_after_another,
)
#: The operator of products of the Hessian and a vector. Its arguments are the arguments of the loss, then the vector.
PRODUCT = "cross_entropy_hvp"
register(
    PRODUCT,
    f"({CROSS_ENTROPY.parameters}, Tensor vector) -> Tensor",
    _cross_entropy_hvp,
    _cross_entropy_hvp_fake,
    one_after_another,
)
#: The same of the loss of a linear layer. The vectors belong to its weight, bias and input.
LINEAR_PRODUCT = "linear_cross_entropy_hvp"
register(
    LINEAR_PRODUCT,
    f"({LINEAR.parameters}, Tensor? vector, Tensor? vector_bias, Tensor? vector_input) -> "
    "(Tensor weight_product, Tensor bias_product, Tensor input_product)",
    _linear_cross_entropy_hvp,
    _linear_cross_entropy_hvp_fake,
    one_after_another,
)
_BACKWARD = "linear_cross_entropy_backward"
register(
    _BACKWARD,
    f"(Tensor lse, {', '.join(f'Tensor? {each}' for each in STATISTICS[1:])}, {LINEAR.parameters}) -> "
    "(Tensor input_grad, Tensor weight_grad, Tensor bias_grad)",
    _linear_cross_entropy_backward,
    _linear_cross_entropy_backward_fake,
    one_after_another,
)


def _loss_flops(*arguments: Any, **_: Any) -> int:
    problem = LINEAR.problem(arguments)  # with shapes instead of tensors
    return linear_flops(problem["input"], problem["weight"], 1 + problem["input_grad"] + problem["weight_grad"])


def _loss_backward_flops(*arguments: Any, **_: Any) -> int:
    return _loss_flops(*arguments[len(STATISTICS) :])


register_flops(LINEAR.name, _loss_flops)
register_flops(_BACKWARD, _loss_backward_flops)


# torch's dispatcher is used only for tensors that are not plain memory, or if the call is observed.


def cross_entropy(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """Compute the loss of logits."""
    if not are_plain(arguments):
        return torch.ops.ascend_grad.cross_entropy(*arguments)
    return _cross_entropy(*arguments)


def cross_entropy_hvp(*arguments: Any) -> torch.Tensor:
    """Compute the product of the Hessian of the loss of logits and a vector, which is the last argument."""
    if not are_plain(arguments):
        return torch.ops.ascend_grad.cross_entropy_hvp(*arguments)
    return _cross_entropy_hvp(*arguments)


def linear_cross_entropy(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """Compute the loss of a linear layer."""
    if not are_plain(arguments):
        return torch.ops.ascend_grad.linear_cross_entropy(*arguments)
    return _linear_cross_entropy(*arguments)


def linear_cross_entropy_hvp(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """Compute the product of the Hessian of the loss of a linear layer and a vector: the last three arguments."""
    if not are_plain(arguments):
        return torch.ops.ascend_grad.linear_cross_entropy_hvp(*arguments)
    return _linear_cross_entropy_hvp(*arguments)


def linear_cross_entropy_backward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """Compute the gradients of the loss of a linear layer from `STATISTICS` and the loss's arguments."""
    if not are_plain(arguments):
        return torch.ops.ascend_grad.linear_cross_entropy_backward(*arguments)
    return _linear_cross_entropy_backward(*arguments)
