"""Tasks of means over all chunks: calls on a chunk that give its part of the mean, and the mean itself."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def is_over_weights(arguments: dict[str, Any]) -> bool:
    """Return whether a loss is divided by sums of weights of the rows of all chunks."""
    return arguments["reduction"] == "mean" and arguments["denominator"] is None


def of_chunk(settings: dict[str, Any], sums: NDArray | None) -> dict[str, Any]:
    """Return the settings of the call on one chunk. With them, its gradients are its share of the whole loss's.

    The loss of the call is the chunk's share of a mean, but for the sign of the divisor, which `reduced` applies.
    `sums` is the sum of `weight_sums` over all chunks for a mean without a denominator, otherwise None.
    """
    if settings["reduction"] != "mean":
        return settings
    size, rest = _divisors(settings, sums)
    square = settings["lse_square_scale"]
    with np.errstate(all="ignore"):
        if sums is not None and square and sums[1]:
            # The squared lse is divided by another sum of weights than the rest. An infinite sum makes the mean NaN.
            ratio = square * float(sums[0] / sums[1])
            square = ratio if np.isfinite(ratio) else square
        grad = 0.0 if _is_undefined(settings, sums) else float(settings["grad_loss"] / rest)
    return settings | {"denominator": size, "lse_square_scale": square, "grad_loss": grad}


def _divisors(settings: dict[str, Any], sums: NDArray | None) -> tuple[float, np.float64]:
    """Return two factors of a mean's divisor: a positive finite one, and 1, -1 or a number that is not finite or 0."""
    divisor = np.float64(settings["denominator"] if sums is None else sums[0])
    size = float(abs(divisor)) if divisor and np.isfinite(divisor) else 1.0
    return size, divisor / size


def _is_undefined(settings: dict[str, Any], sums: NDArray | None) -> bool:
    """Return whether the loss is a mean over weights whose sum is 0, which is NaN and has no gradient."""
    return sums is not None and bool(not sums[0] or (settings["lse_square_scale"] and not sums[1]))


def reduced(total: NDArray, sums: NDArray | None, settings: dict[str, Any], dtype: np.dtype) -> NDArray:
    """Return the loss from the sum over all chunks."""
    with np.errstate(all="ignore"):
        if settings["reduction"] == "mean":
            _, rest = _divisors(settings, sums)
            total = np.asarray(np.nan if _is_undefined(settings, sums) else np.divide(total, rest))
        return np.asarray(total, dtype)
