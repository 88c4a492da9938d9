"""The largest log-probabilities of a linear layer."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

import ascend_grad as ag

from ..arguments import integer
from ..errors import AscendGradError, rename
from ..operators.results import LinearTopK
from ..operators.signatures import documented
from ..operators.table import LINEAR_TOP_K
from .linear import linear_cross_entropy
from .linear_loss import Names, layer_as_computed
from .loss_operators import numbers_of, refuse_gradients, with_numbers
from .operators import accumulator, linear_flops, one_after_another, register, register_flops
from .tensors import (
    TENSORS,
    check_floating,
    check_tensors,
    detached,
    optional,
    refuse_forward_mode,
    threads_of,
)

_NAME = LINEAR_TOP_K.name
_NUMBERS = ("temperature", "logit_scale", "softcap")
_NAMES = Names(operator=_NAME)


def _compute(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    temperatures: torch.Tensor | None,
    numbers: torch.Tensor | None,
    k: int,
    temperature: float,
    logit_scale: float,
    softcap: float | None,
    num_threads: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    options: dict[str, Any] = dict(zip(_NUMBERS, (temperature, logit_scale, softcap)))
    options = with_numbers({**options, "numbers": numbers})
    del options["numbers"]
    if temperatures is not None:
        options["temperature"] = detached(temperatures)
    return ag.linear_top_k(
        detached(input), detached(weight), k, bias=optional(bias), **options, num_threads=num_threads
    )


def _fake(input: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    shape = *input.shape[:-1], others[4]
    return input.new_empty(shape, dtype=accumulator(input)), input.new_empty(shape, dtype=torch.int64)


register(
    _NAME,
    "(Tensor input, Tensor weight, Tensor? bias, Tensor? temperatures, Tensor? numbers, SymInt k, float temperature, "
    "float logit_scale, float? softcap, SymInt? num_threads) -> (Tensor log_prob, Tensor index)",
    _compute,
    _fake,
    one_after_another,
)
register_flops(_NAME, lambda rows, weight, *_, **__: linear_flops((prod(rows[:-1]),), weight, 1))


@documented(TENSORS, like=ag.linear_top_k)
def linear_top_k(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    k: int,
    *,
    linear_bias: torch.Tensor | None = None,
    temperature: float | torch.Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    num_threads: int | None = None,
) -> LinearTopK[torch.Tensor]:
    """Compute the k largest log-probabilities of a linear layer for each row, without storing all logits.

    The log-probabilities have a gradient. If a tensor requires it, they are computed a second time, by
    `linear_cross_entropy` with the indices as targets. Under autocast, `input` and `linear_weight` are converted to
    its dtype, as in the losses.

    Parameters
    ----------
    linear_weight : torch.Tensor, shape (V, H)
        The layer's weight, of the dtype of `input`, with at least one row.
    linear_bias : torch.Tensor, shape (V,), optional
        The layer's bias.

    Raises
    ------
    NotImplementedError
        `temperature` requires grad, which the log-probabilities have no gradient for; a tensor has a tangent of
        forward-mode differentiation; or a tensor on an Ascend NPU requires grad.

    Examples
    --------
    >>> import torch
    >>> import ascend_grad.torch as agt
    >>> logits = torch.tensor([[0.5, 0.125, 0.25, 0.125]]).log()
    >>> log_prob, index = agt.linear_top_k(torch.eye(1), logits.T, 3)
    >>> index
    tensor([[0, 2, 1]])
    >>> log_prob.exp()
    tensor([[0.5000, 0.2500, 0.1250]])
    """
    tensors = {"input": input, "linear_weight": linear_weight}
    if linear_bias is not None:
        tensors["linear_bias"] = linear_bias
    of_rows = temperature if isinstance(temperature, torch.Tensor) else None
    further = {} if of_rows is None else {"temperature": of_rows}
    check_tensors(_NAME, **tensors, **further)
    check_floating(_NAME, input=input, linear_weight=linear_weight)
    refuse_gradients(_NAME, further, "the log-probabilities have")
    refuse_forward_mode(_NAME, **tensors, **further)
    needs_grad = torch.is_grad_enabled() and any(each.requires_grad for each in tensors.values())
    if needs_grad and input.device.type == "npu":
        message = "gradients are not supported on an Ascend NPU, got tensors that require grad"
        raise NotImplementedError(f"{_NAME}: {message}; use torch.no_grad()")
    input, linear_weight = layer_as_computed(_NAMES, input, linear_weight)
    k = k if type(k) in (int, torch.SymInt) else integer(k, "k", _NAME)
    threads = threads_of(num_threads, _NAME)
    options = {"temperature": temperature if of_rows is None else 1.0, "logit_scale": logit_scale, "softcap": softcap}
    numbers, traced = numbers_of(_NUMBERS, _NAME, options)
    with torch.no_grad():
        try:
            found = torch.ops.ascend_grad.linear_top_k(
                input, linear_weight, linear_bias, of_rows, traced, k, *map(numbers.__getitem__, _NUMBERS), threads
            )
        except AscendGradError as error:
            rename(error, _NAME, _NAMES._asdict())
            raise
    log_prob, index = found
    if needs_grad:
        result = linear_cross_entropy(
            input,
            linear_weight,
            index,
            linear_bias=linear_bias,
            target_prob=0,
            reduction="sum",
            temperature=temperature,
            logit_scale=logit_scale,
            softcap=softcap,
            outputs=("log_prob",),
            num_threads=num_threads,
        )
        log_prob = result.log_prob
    return LinearTopK(log_prob, index)
