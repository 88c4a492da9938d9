"""The three fused linear operators for a loss over shards of a vocabulary. They have no gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd import Function

import ascend_grad as ag

from ..arguments import integer, pair_of_truth_values, real_number, truth_value
from ..operators.results import OnlineMaxSum
from ..operators.signatures import documented
from .operators import (
    accumulator,
    apply,
    linear_flops,
    one_after_another,
    register,
    register_flops,
    register_gradient,
    without_none,
)
from .tensors import TENSORS, are_plain, check_tensors, detached, threads_of

__all__ = [
    "fused_cross_entropy_loss_with_max_sum",
    "fused_linear_cross_entropy_loss_grad",
    "fused_linear_online_max_sum",
]

_STATISTICS = "fused_linear_online_max_sum"
_LOSS = "fused_cross_entropy_loss_with_max_sum"
_GRADIENT = "fused_linear_cross_entropy_loss_grad"


def _statistics_fake(input, weight, target, vocab_start_index, vocab_end_index, return_logits, num_threads):
    rows, entries = input.shape[0], weight.shape[0]
    statistics = (input.new_empty((rows,), dtype=accumulator(input)) for _ in range(3))
    mask = input.new_empty(((rows + 7) // 8,), dtype=torch.uint8)
    logits = input.new_empty((rows, entries) if return_logits else (0,))
    return *statistics, mask, target.new_empty(target.shape), logits


def _loss_fake(logits_max, sum_exp_logits, predicted_logits, label_smoothing, vocab_parallel_logits, num_threads):
    shape = (0,) if vocab_parallel_logits is None else vocab_parallel_logits.shape
    return logits_max.new_empty(logits_max.shape), logits_max.new_empty(shape)


def _gradient_fake(grad, input, weight, *others):
    *_, output_mask, _, _, _ = others
    return tuple(
        each.new_empty(each.shape if is_wanted else (0,)) for each, is_wanted in zip((input, weight), output_mask)
    )


_SCHEMAS = {
    _STATISTICS: "(Tensor input, Tensor weight, Tensor target, SymInt vocab_start_index, "
    "SymInt vocab_end_index, bool return_logits, int? num_threads) "
    "-> (Tensor logits_max, Tensor sum_exp_logits, Tensor predicted_logits, Tensor target_mask, Tensor masked_target, "
    "Tensor vocab_parallel_logits)",
    _LOSS: "(Tensor logits_max, Tensor sum_exp_logits, Tensor predicted_logits, float label_smoothing, "
    "Tensor? vocab_parallel_logits, int? num_threads) -> (Tensor loss, Tensor softmax)",
    _GRADIENT: "(Tensor grad, Tensor input, Tensor weight, Tensor target_mask, Tensor masked_target, "
    "float label_smoothing, Tensor? logits_max, Tensor? sum_exp_logits, Tensor? softmax, bool[2] output_mask, "
    "int? workspace_bytes, float filter_eps, int? num_threads) -> (Tensor input_grad, Tensor weight_grad)",
}

#: The argument, by operator, whose dtype an empty tensor has that replaces a result that is not requested.
_LIKE = {_STATISTICS: "input", _LOSS: "logits_max", _GRADIENT: "input"}

_FAKES: dict[str, Callable] = {_STATISTICS: _statistics_fake, _LOSS: _loss_fake, _GRADIENT: _gradient_fake}


#: Names of the arguments, by operator, in the schema's order. The functions of arrays use the same names.
_PARAMETERS: dict[str, list[str]] = {}


def _compute(name: str, *values: Any) -> tuple[torch.Tensor, ...]:
    given = {
        parameter: detached(value) if isinstance(value, torch.Tensor) else value
        for parameter, value in zip(_PARAMETERS[name], values)
    }
    return without_none(given[_LIKE[name]], getattr(ag, name)(**given))


def _without_gradient(name: str) -> type[Function]:
    """Return the function that `apply` calls. Its results require grad if an argument does, and backward raises.

    Results that do not require grad would silently be left out of gradients.
    """
    operator = getattr(torch.ops.ascend_grad, name).default

    class WithoutGradient(Function):
        @staticmethod
        def forward(*arguments):
            if are_plain(arguments):
                return _compute(name, *arguments)
            return operator(*arguments)

        @staticmethod
        def setup_context(ctx, inputs, output):
            """Save nothing: backward raises."""

        @staticmethod
        def backward(ctx, *_):
            hint = "use ascend_grad.torch.linear_cross_entropy, or write a torch.autograd.Function"
            raise NotImplementedError(f"{name}: the operator has no gradient for autograd; {hint}")

    return WithoutGradient


#: The functions that `apply` computes, by operator.
_FUNCTIONS: dict[str, type[Function]] = {}

for _name, _schema in _SCHEMAS.items():
    register(_name, _schema, partial(_compute, _name), _FAKES[_name], one_after_another)
    _PARAMETERS[_name] = [each.name for each in getattr(torch.ops.ascend_grad, _name).default._schema.arguments]
    _FUNCTIONS[_name] = _without_gradient(_name)
    register_gradient(_name, _FUNCTIONS[_name])


def _statistics_flops(input, weight, *_, **__):
    return linear_flops(input, weight, 1)


def _gradient_flops(*arguments, **_):
    given = dict(zip(_PARAMETERS[_GRADIENT], arguments))
    products = (given["softmax"] is None) + sum(given["output_mask"])
    return linear_flops(given["input"], given["weight"], products)


register_flops(_STATISTICS, _statistics_flops)
register_flops(_GRADIENT, _gradient_flops)


def _number(value: float, name: str, operator: str) -> float:
    return value if type(value) is float else real_number(value, name, operator)


def _given(**tensors: torch.Tensor | None) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


@documented(TENSORS, like=ag.fused_linear_online_max_sum)
def fused_linear_online_max_sum(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    *,
    return_logits: bool = False,
    num_threads: int | None = None,
) -> OnlineMaxSum:
    r"""Compute statistics of a linear layer's logits over one shard of the vocabulary, without storing all logits.

    The results have no gradient: see Notes.

    Notes
    -----
    Backward through the results raises NotImplementedError. To compute gradients, call
    `fused_linear_cross_entropy_loss_grad` in the backward of a `torch.autograd.Function`.

    Examples
    --------
    >>> import torch
    >>> import ascend_grad.torch as agt
    >>> statistics = agt.fused_linear_online_max_sum(torch.eye(2), torch.zeros(4, 2), torch.tensor([5, 9]), 4, 8)
    >>> statistics.sum_exp_logits
    tensor([4., 4.])
    >>> statistics.masked_target, statistics.target_mask
    (tensor([1, 0]), tensor([2], dtype=torch.uint8))
    """
    check_tensors(_STATISTICS, input=input, weight=weight, target=target)
    bounds = [
        value if type(value) in (int, torch.SymInt) else integer(value, name, _STATISTICS)
        for name, value in (("vocab_start_index", vocab_start_index), ("vocab_end_index", vocab_end_index))
    ]
    return_logits = truth_value(return_logits, "return_logits", _STATISTICS)
    logits_max, sum_exp_logits, predicted_logits, target_mask, masked_target, logits = apply(
        _FUNCTIONS[_STATISTICS], input, weight, target, *bounds, return_logits, threads_of(num_threads, _STATISTICS)
    )
    return OnlineMaxSum(
        logits_max, sum_exp_logits, predicted_logits, target_mask, masked_target, logits if return_logits else None
    )


@documented(TENSORS, like=ag.fused_cross_entropy_loss_with_max_sum)
def fused_cross_entropy_loss_with_max_sum(
    logits_max: torch.Tensor,
    sum_exp_logits: torch.Tensor,
    predicted_logits: torch.Tensor,
    label_smoothing: float = 0.0,
    *,
    vocab_parallel_logits: torch.Tensor | None = None,
    num_threads: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | Any]:
    r"""Compute the cross-entropy loss of each row from statistics of its logits, and the softmax if logits are given.

    The loss and the softmax have no gradient.

    Examples
    --------
    >>> import torch
    >>> import ascend_grad.torch as agt
    >>> loss, softmax = agt.fused_cross_entropy_loss_with_max_sum(
    ...     torch.zeros(1), torch.full((1,), 4.0), torch.zeros(1), vocab_parallel_logits=torch.zeros(1, 4)
    ... )
    >>> loss, softmax
    (tensor([1.3863]), tensor([[0.2500, 0.2500, 0.2500, 0.2500]]))
    """
    check_tensors(
        _LOSS,
        logits_max=logits_max,
        sum_exp_logits=sum_exp_logits,
        predicted_logits=predicted_logits,
        **_given(vocab_parallel_logits=vocab_parallel_logits),
    )
    label_smoothing = _number(label_smoothing, "label_smoothing", _LOSS)
    statistics = logits_max, sum_exp_logits, predicted_logits
    loss, softmax = apply(
        _FUNCTIONS[_LOSS], *statistics, label_smoothing, vocab_parallel_logits, threads_of(num_threads, _LOSS)
    )
    return loss, None if vocab_parallel_logits is None else softmax


@documented(TENSORS, like=ag.fused_linear_cross_entropy_loss_grad)
def fused_linear_cross_entropy_loss_grad(
    grad: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    target_mask: torch.Tensor,
    masked_target: torch.Tensor,
    label_smoothing: float = 0.0,
    logits_max: torch.Tensor | None = None,
    sum_exp_logits: torch.Tensor | None = None,
    softmax: torch.Tensor | None = None,
    *,
    output_mask: Sequence[bool] = (True, True),
    filter_eps: float = 0.0,
    workspace_bytes: int | None = None,
    num_threads: int | None = None,
) -> tuple[torch.Tensor | Any, torch.Tensor | Any]:
    r"""Compute the gradients of a linear layer followed by a cross-entropy loss, without storing all logits.

    The results cannot be differentiated once more.

    Raises
    ------
    ParamNullptrError
        161001: `softmax` is None, and so is `logits_max` or `sum_exp_logits`.
    ParamInvalidError
        161002: an argument is not as described (a dtype or kind: its subclass `ParamTypeError`). Of tensors on the CPU
        also a target that is out of range where the mask is not set.

    Examples
    --------
    >>> import torch
    >>> import ascend_grad.torch as agt
    >>> x, w, target = torch.eye(2), torch.zeros(4, 2), torch.tensor([0, 3])
    >>> maximum, total, _, mask, masked_target, _ = agt.fused_linear_online_max_sum(x, w, target, 0, 4)
    >>> _, weight_grad = agt.fused_linear_cross_entropy_loss_grad(
    ...     torch.ones(2), x, w, mask, masked_target, logits_max=maximum, sum_exp_logits=total
    ... )
    >>> weight_grad.T
    tensor([[-0.7500,  0.2500,  0.2500,  0.2500],
            [ 0.2500,  0.2500,  0.2500, -0.7500]])
    """
    if softmax is not None:
        logits_max = sum_exp_logits = None
    check_tensors(
        _GRADIENT,
        grad=grad,
        input=input,
        weight=weight,
        target_mask=target_mask,
        masked_target=masked_target,
        **_given(logits_max=logits_max, sum_exp_logits=sum_exp_logits, softmax=softmax),
    )
    wanted = pair_of_truth_values(output_mask, "output_mask", _GRADIENT)
    if workspace_bytes is not None:
        workspace_bytes = integer(workspace_bytes, "workspace_bytes", _GRADIENT)
    gradients = apply(
        _FUNCTIONS[_GRADIENT],
        grad,
        input,
        weight,
        target_mask,
        masked_target,
        _number(label_smoothing, "label_smoothing", _GRADIENT),
        logits_max,
        sum_exp_logits,
        softmax,
        wanted,
        workspace_bytes,
        _number(filter_eps, "filter_eps", _GRADIENT),
        threads_of(num_threads, _GRADIENT),
    )
    input_grad, weight_grad = (each if is_wanted else None for each, is_wanted in zip(gradients, wanted))
    return input_grad, weight_grad
