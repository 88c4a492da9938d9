"""Tasks of the linear operators, which workers compute on the NumPy arrays of a chunk of tokens or on sums."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import ascend_grad as ag

from .._dispatch import run
from ..arrays import accumulator_dtype
from ..operators.table import LINEAR_CROSS_ENTROPY
from . import means


def results(
    settings: dict[str, Any],
    sums: NDArray | None,
    *,
    requested: tuple[str, ...],
    backend: str | None,
    num_threads: int | None,
    **arrays: NDArray,
) -> tuple:
    """Compute the requested results of `linear_cross_entropy` on a chunk. `sums` is as for `means.of_chunk`.

    A summed loss and the bias's gradient are in float64, and the weight's gradient is not rounded to 16 bits.
    """
    arguments = means.of_chunk(settings, sums) | arrays
    if arguments["bias"] is not None:
        arguments["bias"] = arguments["bias"].astype(np.float64)  # its gradient has the same dtype
    weight = arrays["weight"]
    out = np.empty(weight.shape, accumulator_dtype(weight.dtype)) if "weight_grad" in requested else None
    values = [arguments[name] for name in LINEAR_CROSS_ENTROPY.parameters]
    found = dict(zip(LINEAR_CROSS_ENTROPY.results, run(LINEAR_CROSS_ENTROPY, values, out, backend, num_threads)))
    if arguments["reduction"] != "none":
        found["loss"] = np.asarray(found["loss"], np.float64)
    return tuple(found[name] for name in requested)


def top_k(input: NDArray, weight: NDArray, **settings: Any) -> tuple:
    """Compute the largest log-probabilities of a chunk, and their indices."""
    return tuple(ag.linear_top_k(input, weight, **settings))


def add(first: Any, second: Any) -> Any:
    """Add the results of two chunks, or two sums of results."""
    with np.errstate(all="ignore"):
        return first + second


def rounded(total: NDArray, dtype: np.dtype) -> NDArray:
    """Round a sum over all chunks to the dtype of the result."""
    with np.errstate(all="ignore"):
        return np.asarray(total).astype(dtype, copy=False)
