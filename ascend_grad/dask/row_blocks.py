"""Tasks of `cross_entropy`, which workers compute on the NumPy arrays of a block of rows or on sums."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import ascend_grad as ag

from . import means


def loss_and_gradient(settings: dict[str, Any], sums: NDArray | None, **arrays: Any) -> tuple:
    """Compute the loss, the gradient and the outputs of a block. `sums` is as for `means.of_chunk`."""
    result = ag.cross_entropy(**arrays, **means.of_chunk(settings, sums))
    loss = result.loss if settings["reduction"] == "none" else np.asarray(result.loss, np.float64)
    return (loss, *result[1:])


def total(parts: list) -> Any:
    """Add up results of all blocks, in order."""
    with np.errstate(all="ignore"):
        return np.asarray(sum(parts[1:], start=parts[0]))
