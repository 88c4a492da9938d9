"""Tasks of `cross_entropy`, which workers compute on the NumPy arrays of a block of rows or on sums."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import ascend_grad as ag


def weights(
    *,
    target: NDArray,
    ignore_index: int,
    class_weight: NDArray | None = None,
    token_weight: NDArray | None = None,
    target_prob: NDArray | None = None,
    **_: Any,
) -> NDArray:
    """Return what the two terms of a mean are divided by, as far as the rows of a block add to it, in float64."""
    entries = target.reshape(*target.shape, 1) if target_prob is None else target
    counted = np.any(entries != ignore_index, axis=-1)
    tokens = np.where(counted, 1.0 if token_weight is None else token_weight, 0).astype(np.float64)
    classes = tokens
    if target_prob is None and class_weight is not None:
        classes = tokens * class_weight[np.where(counted, target, 0)]
    return np.array([np.sum(classes), np.sum(tokens)])


def loss_and_gradient(settings: dict[str, Any], total: NDArray | None, **arrays: Any) -> tuple:
    """Compute the loss, the gradient and the outputs of a block.

    `total` is the sum of `weights` over all blocks for a mean without a denominator, otherwise None.
    """
    settings = dict(settings)
    divisor = settings.pop("denominator")
    if settings["reduction"] == "mean":
        settings["reduction"] = "sum"
        if total is not None:
            # The squared lse is divided by another sum of weights than the rest.
            divisor = total[0]
            if total[1]:
                settings["lse_square_scale"] *= float(total[0] / total[1])
        is_undefined = not divisor or (total is not None and settings["lse_square_scale"] != 0 and not total[1])
        settings["grad_loss"] = 0.0 if is_undefined else settings["grad_loss"] / divisor
    result = ag.cross_entropy(**arrays, **settings)
    loss = result.loss if settings["reduction"] == "none" else np.asarray(result.loss, np.float64)
    return (loss, *result[1:])


def total(parts: list) -> Any:
    """Add up results of all blocks, in order."""
    with np.errstate(all="ignore"):
        return sum(parts[1:], start=parts[0])


def reduced(total: NDArray, mean: NDArray | None, divisor: float | None, dtype: np.dtype) -> NDArray:
    """Return a result of all rows from the sum over all blocks, divided by the weights of a mean or by a number."""
    with np.errstate(all="ignore"):
        if mean is not None and mean[0] == 0:
            return np.asarray(np.nan, dtype)  # the mean over a sum of weights of 0
        divisor = 1 if divisor is None else divisor
        return np.asarray(np.divide(total, divisor if mean is None else mean[0]), dtype)
