"""The library's gradients beside the reference backend (how exact) and the formulas in plain NumPy (how fast)."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

import ascend_grad as ag

from ..backends import reference

Gradient = Callable[..., NDArray]

#: The largest `rounding_errors` that the library promises for float32.
ALLOWED_ERRORS = 32.0


def rounding_errors(gradient: Gradient, arguments: tuple) -> float:
    """The largest error of a float32 result, in units of 2**-24 of the terms that were added up for it.

    The right values are those of the reference backend in float64. An element that is the small difference of large
    terms cannot have a small relative error, so the error is compared with the sum of the terms' magnitudes.

    Parameters
    ----------
    gradient : callable
        One of this library's gradients.
    arguments : tuple
        Its positional arguments: two float32 arrays, and for the masked one the mask and the scale.
    """
    g, y = (array.astype(np.float64) for array in arguments[:2])
    # The scale is rounded to float32 for float32 arrays, which is part of the formula.
    mask_and_scale = tuple(np.float32(value) if isinstance(value, float) else value for value in arguments[2:])
    error = np.abs(gradient(*arguments) - gradient(g, y, *mask_and_scale, backend="reference"))
    if gradient is ag.log_softmax_backward:
        terms = np.abs(g) + np.exp(y) * np.sum(np.abs(g), axis=-1, keepdims=True)
    else:
        products = np.abs(g * y)
        terms = products + np.abs(y) * np.sum(products, axis=-1, keepdims=True)
    if mask_and_scale:
        terms *= abs(mask_and_scale[1])
    # Below the smallest normal number float32 has an absolute precision only.
    return float(np.max(error / (2**-24 * terms + np.finfo(np.float32).tiny), initial=0))


def seconds_beside_numpy(gradient: Gradient, arguments: tuple, rounds: int = 15) -> tuple[float, float]:
    """The time of one call and of the same formula in plain NumPy: medians, on the same arrays, in turn."""
    formula = getattr(reference, gradient.__name__)
    ours, numpys = [], []
    for _ in range(rounds):
        ours.append(_seconds(gradient, arguments))
        numpys.append(_seconds(formula, arguments))
    return median(ours), median(numpys)


def _seconds(function: Gradient, arguments: tuple) -> float:
    start = perf_counter()
    function(*arguments)
    return perf_counter() - start
