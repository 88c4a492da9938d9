"""The reference backend: every formula in plain NumPy, float64 inside. Specification, fallback and oracle at once."""

from __future__ import annotations

import numpy as np

from .. import arrays
from ..contract import Call

NAME = "reference"

MASKED_LOGIT = -10000.0


def status() -> tuple[bool, str]:
    return True, "plain NumPy in float64; slow, meant for comparison"


def refusal(call: Call) -> str | None:
    return None


# Rows lie along the last axis, contiguous: NumPy then sums every row in the same order, whatever the layout was.


def softmax_backward(grad_output, output):
    return (grad_output - np.sum(grad_output * output, axis=-1, keepdims=True)) * output


def log_softmax_backward(grad_output, output):
    return grad_output - np.sum(grad_output, axis=-1, keepdims=True) * np.exp(output)


def scaled_masked_softmax_backward(grad_output, y, mask, scale):
    return np.where(mask, 0.0, softmax_backward(grad_output, y) * scale)


def softmax(input):
    exponential = np.exp(input - np.max(input, axis=-1, keepdims=True))
    return exponential / np.sum(exponential, axis=-1, keepdims=True)


def log_softmax(input):
    shifted = input - np.max(input, axis=-1, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))


def scaled_masked_softmax(x, mask, scale):
    # The product is rounded to scale's dtype: it is part of the formula, not of its evaluation.
    scaled = np.asarray(x * scale, scale.dtype).astype(np.float64)
    return softmax(np.where(mask, MASKED_LOGIT, scaled))


_FORMULAS = {
    formula.__name__: formula
    for formula in (
        softmax_backward,
        log_softmax_backward,
        scaled_masked_softmax_backward,
        softmax,
        log_softmax,
        scaled_masked_softmax,
    )
}


def _rows(array: np.ndarray, dim: int) -> np.ndarray:
    """The values in float64 (a mask stays one), rows along the last axis. Rank 0 counts as rank 1."""
    wide = array if array.dtype == np.bool_ else array.astype(np.float64)
    return np.ascontiguousarray(np.moveaxis(np.atleast_1d(wide), dim, -1))


def run(call: Call, num_threads: int | None) -> np.ndarray:
    first = call.arrays[0]
    dtype = arrays.native(first.dtype)
    out = np.empty(first.shape, dtype) if call.out is None else call.out
    if out.size == 0:
        return out
    dim = call.arguments.get("dim", -1)
    settings = {}
    with np.errstate(all="ignore"):
        if "scale" in call.arguments:
            settings["scale"] = arrays.accumulator_dtype(dtype).type(call.arguments["scale"])
        values = _FORMULAS[call.operator.name](*(_rows(array, dim) for array in call.arrays), **settings)
        values = np.moveaxis(values, -1, dim).reshape(out.shape)
    arrays.round_into(out, values)
    return out
