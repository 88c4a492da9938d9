"""Cross-entropy losses of a linear layer with several dimensions, and with different factors in a mean."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..errors import ParamInvalidError, ParamTypeError
from ..operators.options import NUMBER_OR_PER_ROW, OPTIONS, PER_CLASS, PER_ROW, PER_TARGET, has_own_divisor
from .linear_loss import Names, Options, check_shape, checked, converted, refuse, unrounded_loss
from .loss_operators import (
    LINEAR,
    ROWS_OF,
    check_reduction,
    check_target_dtype,
    checked_integers,
    class_ids,
    refuse_dense,
)
from .operators import accumulator
from .outputs import Computed
from .tensors import check_tensors

if TYPE_CHECKING:
    from .vocabulary_parallel import VocabularyShard

_NAMES = Names()
_NAME = _NAMES.operator


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
    if of_square is of_row or not has_own_divisor(options):
        changed = {**options, "token_weight": of_row}
        return unrounded_loss(input, linear_weight, target, "sum", ignore_index, changed, **keywords)
    outputs = tuple(dict.fromkeys((*options.get("outputs", ()), "lse")))
    changed = {**options, "token_weight": of_row, "lse_square_scale": 0.0, "outputs": outputs}
    found = unrounded_loss(input, linear_weight, target, "sum", ignore_index, changed, **keywords)
    # Rows without weight add nothing, whatever their lse is.
    counted = _are_counted(target, ignore_index, options) & (of_square != 0)
    squares = options["lse_square_scale"] * torch.where(counted, found["lse"], 0) ** 2 * of_square
    loss = found["loss"]
    return {**found, "loss": loss + torch.where(counted, squares, 0).sum().to(loss.dtype)}


def _are_counted(target: torch.Tensor, ignore_index: int, options: Options) -> torch.Tensor:
    """Return which rows are not ignored."""
    counted = target != ignore_index
    return counted if options.get("target_prob") is None else counted.any(-1)


def loss_of_positions(
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
    target = class_ids(target)
    ignore_index, num_threads = checked_integers(_NAME, ignore_index, num_threads)
    numbers_checked, traced = converted(_NAME, {**options, "filter_eps": filter_eps})
    if traced is None:  # otherwise torch traces numbers, which the calls for the positions convert
        filter_eps = numbers_checked.pop("filter_eps")
        options = numbers_checked
    after = 0 if options.get("target_prob") is None else 1
    shape = target.shape if after == 0 else target.shape[:-1]

    def of_positions(tensor: torch.Tensor, after: int = 0) -> Sequence[torch.Tensor]:
        """Return the tensors of all positions. `after` is the number of dimensions after the positions."""
        return tensor.flatten(1, -1 - after).unbind(1)

    if input.dtype == linear_weight.dtype in (torch.float16, torch.bfloat16) and input.device.type != "npu":
        # The gradient of the input is the sum of the positions' ones, which is then rounded once.
        input, linear_weight = input.float(), linear_weight.float()
    weights, targets = of_positions(linear_weight, 1), of_positions(target, after)
    split = {
        name: of_positions(value, after if name == "target_prob" else 0)
        for name, value in options.items()
        if isinstance(value, torch.Tensor) and name != "class_weight" and value.dim() > 0
    }
    parts = [{**options, **{name: each[i] for name, each in split.items()}} for i in range(len(weights))]
    keywords: dict[str, Any] = {"filter_eps": filter_eps, "num_threads": num_threads}
    if reduction == "mean":
        of_row, of_square, divisor = _mean_factors(input, linear_weight, target, ignore_index, options)
        rows = of_positions(of_row)
        squares = rows if of_square is of_row else of_positions(of_square)
        found = [
            summed_loss(input, each[0], each[1], ignore_index, *each[2:], **keywords)
            for each in zip(weights, targets, parts, rows, squares)
        ]
        loss = torch.where(divisor == 0, torch.nan, torch.stack([each["loss"] for each in found]).sum())
    else:
        found = [
            unrounded_loss(input, each[0], each[1], reduction, ignore_index, each[2], **keywords)
            for each in zip(weights, targets, parts)
        ]
        losses = torch.stack([each["loss"] for each in found], -1)
        loss = losses.reshape(shape) if reduction == "none" else losses.sum()
    outputs = {}
    for name in options.get("outputs", ()):
        each = torch.stack([each[name] for each in found], 0 if name == "correct" else 1)
        outputs[name] = each.sum() if name == "correct" else each.reshape((*shape, *each.shape[2:]))
    return {"loss": loss, **outputs}


def _mean_factors(
    input: torch.Tensor, linear_weight: torch.Tensor, target: torch.Tensor, ignore_index: int, options: Options
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the factors of the cross-entropy and of the squared lse of each row in a mean, and the first divisor.

    The factors are the same tensor if their divisors are equal. They are 0 if the divisor is.
    """
    counted = _are_counted(target, ignore_index, options)
    # Devices lack float64.
    factors = counted.to(torch.float64 if input.device.type == "cpu" else accumulator(input))
    weight, class_weight, denominator = (options.get(each) for each in ("token_weight", "class_weight", "denominator"))
    if weight is not None:
        factors = torch.where(counted, weight.to(factors.dtype), 0)
    if denominator is not None:
        factors = factors / denominator
        return factors, factors, torch.ones_like(factors).sum()
    rows = factors.sum()
    of_square = torch.where(rows == 0, 0, factors / rows)
    if class_weight is None or options.get("target_prob") is not None:
        return of_square, of_square, rows
    entries = torch.where(counted, target, 0).clamp(0, linear_weight.shape[0] - 1)  # others are refused later
    divisor = (factors * class_weight.to(factors.dtype)[entries]).sum()
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
    given = LINEAR.tensors_among(options)
    arrays = {_NAMES.of(name): each for name, each in given.items() if name not in ROWS_OF}
    check_tensors(_NAME, input=input, linear_weight=linear_weight, target=target, **arrays)
    if shard is not None:
        refuse(f"{_NAME} with a group", **{"linear_weight of several dimensions": tuple(linear_weight.shape)})
    check_target_dtype(_NAME, "target", target)
    refuse_dense(_NAME, "target", target, "with several dimensions of linear_weight")
    check_reduction(_NAME, reduction)
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
    for name in ("token_weight", "class_weight"):  # their sums are computed before the loss of a position checks them
        if name in given and not given[name].is_floating_point():
            message = f"{_NAMES.of(name)}: expected a floating dtype, got {given[name].dtype}"
            raise ParamTypeError(message, operator=_NAME)
    rows = torch.Size((input.shape[0], *positions))
    if "target_prob" not in given:
        check_shape(_NAME, "target", target, rows, "one for each row and position")
    elif target.dim() != len(rows) + 1 or target.shape[:-1] != rows:
        message = f"target: expected shape {(*rows, 'K')}, as target_prob is given, got {tuple(target.shape)}"
        raise ParamInvalidError(message, operator=_NAME)
    shapes = {
        PER_TARGET: (target.shape, "as target has"),
        PER_ROW: (rows, "one for each row and position"),
        NUMBER_OR_PER_ROW: (rows, "one for each row and position"),
        PER_CLASS: (linear_weight.shape[:1], "one for each class"),
    }
    for name, tensor in given.items():
        shape, words = shapes[OPTIONS[name].kind]
        if name == "bias":
            shape, words = linear_weight.shape[:-1], "that of linear_weight without its last dimension"
        if name not in ROWS_OF or tensor.dim() > 0:
            check_shape(_NAME, _NAMES.of(name), tensor, shape, words)
