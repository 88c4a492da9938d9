"""Tasks of losses and of the top k, which workers compute on the NumPy arrays of a block of rows or on sums."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import ascend_grad as ag

from .._dispatch import run
from ..arrays import accumulator_dtype
from ..errors import ParamInvalidError
from ..operators.options import WITH_OWN_DIVISOR, has_own_divisor
from ..operators.table import OPERATORS

# ---- blocks of rows --------------------------------------------------------------------------------------------------


def loss(
    operator: str,
    settings: dict[str, Any],
    sums: NDArray | None,
    *,
    requested: tuple[str, ...],
    backend: str | None,
    num_threads: int | None,
    index: tuple[int, ...],
    **arrays: Any,
) -> tuple:
    """Compute the requested results of a loss on a block of rows. `sums` is as for `_share`.

    Errors name the index of the block.

    A summed loss and the bias's gradient are in float64, and the weight's gradient is not rounded to 16 bits.
    """
    arguments = _share(settings, sums) | arrays
    if arguments.get("bias") is not None:
        arguments["bias"] = arguments["bias"].astype(np.float64)  # its gradient has the same dtype
    out = None
    if "weight_grad" in requested:
        out = np.empty(arrays["weight"].shape, accumulator_dtype(arrays["weight"].dtype))
    contract = OPERATORS[operator]
    values = [arguments[name] for name in contract.parameters]
    try:
        found = dict(zip(contract.results, run(contract, values, out, backend, num_threads)))
    except ParamInvalidError as error:
        text = str(error).removeprefix(f"{error.operator}: ")
        raise type(error)(f"{text} (block {index})", operator=error.operator) from error
    if arguments["reduction"] != "none":
        found["loss"] = np.asarray(found["loss"], np.float64)
    return tuple(found[name] for name in requested)


def top_k(input: NDArray, weight: NDArray, **settings: Any) -> tuple:
    """Compute the largest log-probabilities of a block of rows, and their indices."""
    return tuple(ag.linear_top_k(input, weight, **settings))


# ---- sums over all blocks --------------------------------------------------------------------------------------------


def total(parts: list) -> Any:
    """Add up results of blocks, in order."""
    with np.errstate(all="ignore"):
        return np.asarray(sum(parts[1:], start=parts[0]))


def rounded(total: NDArray, dtype: np.dtype) -> NDArray:
    """Round a sum over all blocks to the dtype of the result."""
    with np.errstate(all="ignore"):
        return np.asarray(total).astype(dtype, copy=False)


# ---- means -----------------------------------------------------------------------------------------------------------


def is_over_weights(arguments: dict[str, Any]) -> bool:
    """Return whether a loss is divided by sums of weights of the rows of all blocks."""
    return arguments["reduction"] == "mean" and arguments["denominator"] is None


def _share(settings: dict[str, Any], sums: NDArray | None) -> dict[str, Any]:
    """Return the settings of the call on one block. With them, its gradients are its share of the whole loss's.

    The loss of the call is the block's share of a mean, but for the sign of the divisor, which `reduced` applies.
    `sums` is the sum of `weight_sums` over all blocks for a mean without a denominator, otherwise None.
    """
    if settings["reduction"] != "mean":
        return settings
    size, rest = _divisors(settings, sums)
    factors = {name: settings[name] for name in WITH_OWN_DIVISOR}
    with np.errstate(all="ignore"):
        for name, factor in factors.items():
            if sums is not None and factor and sums[1]:
                # The term is divided by another sum of weights than the rest. An infinite sum makes the mean NaN.
                ratio = factor * float(sums[0] / sums[1])
                factors[name] = ratio if np.isfinite(ratio) else factor
        grad = 0.0 if _is_undefined(settings, sums) else float(settings["grad_loss"] / rest)
    return settings | factors | {"denominator": size, "grad_loss": grad}


def _divisors(settings: dict[str, Any], sums: NDArray | None) -> tuple[float, np.float64]:
    """Return two factors of a mean's divisor: a positive finite one, and 1, -1 or a number that is not finite or 0."""
    divisor = np.float64(settings["denominator"] if sums is None else sums[0])
    size = float(abs(divisor)) if divisor and np.isfinite(divisor) else 1.0
    return size, divisor / size


def _is_undefined(settings: dict[str, Any], sums: NDArray | None) -> bool:
    """Return whether the loss is a mean over weights whose sum is 0, which is NaN and has no gradient."""
    return sums is not None and bool(not sums[0] or (has_own_divisor(settings) and not sums[1]))


def reduced(total: NDArray, sums: NDArray | None, settings: dict[str, Any], dtype: np.dtype) -> NDArray:
    """Return the loss from the sum over all blocks."""
    with np.errstate(all="ignore"):
        if settings["reduction"] == "mean":
            _, rest = _divisors(settings, sums)
            total = np.asarray(np.nan if _is_undefined(settings, sums) else np.divide(total, rest))
        return np.asarray(total, dtype)
