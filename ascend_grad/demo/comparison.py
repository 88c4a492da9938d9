"""Comparison of the library's gradients with the reference backend (errors) and with plain NumPy (speed)."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ascend_grad as ag

from .. import bounds
from ..backends import reference

Gradient = Callable[..., Any]

#: Errors of products of bfloat16, in units of the rounding of their terms; half a unit of the result comes on top.
LINEAR_ERRORS = 2
#: Rows of a linear problem that are compared: the reference takes its time.
COMPARED_ROWS = 64
#: Seconds to time a gradient for, about.
TIMED = 4.0


def problem(gradient: Gradient, arguments: tuple) -> str:
    """Return the size of a call, in words."""
    if gradient.__name__ == "linear_cross_entropy":
        lengths = (len(arguments[0]), *arguments[1].shape)  # BT, V, H
    else:
        lengths = arguments[0].shape
    return "x".join(map(str, lengths))


def error_share(gradient: Gradient, arguments: tuple) -> float:
    """Return the largest error of a result, as a share of the allowed error.

    The right values come from the reference backend in float64. An element that is the small difference of large
    terms cannot have a small relative error, so the error is compared with the sum of the terms' magnitudes.

    Parameters
    ----------
    gradient : callable
        One of this library's gradients.
    arguments : tuple
        Its positional arguments: float32 arrays, for a masked softmax the mask and the scale; for
        `linear_cross_entropy` its input and weight in any dtype, and the targets.
    """
    if gradient.__name__ == "linear_cross_entropy":
        return _linear_error_share(gradient, *arguments)
    g, y = (array.astype(np.float64) for array in arguments[:2])
    # The scale is rounded to float32 for float32 arrays, which is part of the formula.
    mask_and_scale = tuple(np.float32(value) if isinstance(value, float) else value for value in arguments[2:])
    error = np.abs(gradient(*arguments) - gradient(g, y, *mask_and_scale, backend="reference"))
    _, bound = bounds.FORMULAS[gradient.__name__](bounds.SINGLE, g, y, *mask_and_scale)
    # Masked elements have to be 0.
    return float(np.max(np.divide(error, bound, out=np.where(error == 0, 0.0, np.inf), where=bound > 0), initial=0))


def _linear_error_share(gradient: Gradient, input: NDArray, weight: NDArray, target: NDArray) -> float:
    input, target = input[:COMPARED_ROWS], target[:COMPARED_ROWS]
    x, w = input.astype(np.float64), weight.astype(np.float64)
    right = gradient(x, w, target, backend="reference")
    # The terms belong to the products with P = (softmax - one-hot) / BT.
    p = ag.softmax(x @ w.T, backend="reference")
    p[np.arange(len(p)), target] -= 1
    p = np.abs(p, out=p) / len(p)
    terms = (1 + np.abs(right.loss), p @ np.abs(w), p.T @ np.abs(x))
    shares = [
        np.max(
            np.abs(got.astype(np.float64) - value) / (LINEAR_ERRORS * bounds.BFLOAT16_P * size + 2**-8 * np.abs(value))
        )
        for got, value, size in zip(gradient(input, weight, target), right, terms)
    ]
    return float(np.max(shares))


def compare_seconds(gradient: Gradient, arguments: tuple, rounds: int = 15) -> tuple[float, float]:
    """Return the median times of a call and of the same formula in plain NumPy, measured in turn on the same arrays."""
    linear = gradient.__name__ == "linear_cross_entropy"
    formula = numpy_linear_cross_entropy if linear else getattr(reference, gradient.__name__)
    ours: list[float] = []
    numpys: list[float] = []
    start = perf_counter()
    while len(ours) < rounds and (not ours or perf_counter() - start < TIMED):
        ours.append(_seconds(gradient, arguments))
        numpys.append(_seconds(formula, arguments))
    return median(ours), median(numpys)


def compare_megabytes(input: NDArray, weight: NDArray, target: NDArray) -> tuple[float, float]:
    """Return the megabytes of the workspace of `linear_cross_entropy`, and of only the logits in NumPy."""
    logits = len(input) * len(weight) * np.dtype(np.float32).itemsize
    return ag.workspace_size("linear_cross_entropy", input, weight, target) / 1e6, logits / 1e6


def numpy_linear_cross_entropy(input: NDArray, weight: NDArray, target: NDArray) -> tuple[float, NDArray, NDArray]:
    """Compute the mean loss and both gradients in float32, with all logits in memory."""
    x, w = input.astype(np.float32), weight.astype(np.float32)
    rows = np.arange(len(x))
    p = x @ w.T  # the logits at first, [BT, V]
    p -= p.max(axis=1, keepdims=True)
    predicted = p[rows, target]
    total = np.exp(p, out=p).sum(axis=1)
    loss = float(np.mean(np.log(total) - predicted))
    p /= total[:, None]
    p[rows, target] -= 1
    p /= len(x)
    return loss, (p @ w).astype(input.dtype), (p.T @ x).astype(weight.dtype)


def _seconds(function: Gradient, arguments: tuple) -> float:
    """Return the time of the second of two calls, after which the threads of the other side no longer spin."""
    function(*arguments)
    start = perf_counter()
    function(*arguments)
    return perf_counter() - start
