"""Compute expected results in a wider format, without the library's kernels, and the allowed errors.

The formulas and the bounds on errors come from `ascend_grad.bounds`. Here they are applied to calls with any layout and
any dtype of the result. A bound of infinity claims nothing: an intermediate value overflows the accumulator, or the
result lies on the edge of its range.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from ascend_grad.bounds import FORMULAS, SINGLE, Expected, Precision, half_ulp, precision_of, widen

# ---- from operators to rows, from rows to results --------------------------------------------------------------------


def rounded_once(expected: Expected, p: Precision, dtype) -> Expected:
    """Return values and bounds after rounding to a result of ``dtype``."""
    values, bound = expected
    bound = np.where(np.isfinite(values), bound, 0)  # NaN and infinity are exact
    if np.dtype(dtype) != p.dtype:
        bound = bound + half_ulp(np.abs(values) + np.where(np.isfinite(bound), bound, 0), dtype)
    largest = float(ml_dtypes.finfo(dtype).max)
    edge = largest + half_ulp(values.dtype.type(largest)[None], dtype)[0]
    # Values beyond the range become infinite, and values close to its end may become infinite.
    unclear = np.abs(np.abs(values) - edge) <= bound
    values = np.where(np.isfinite(values) & (np.abs(values) >= edge), np.copysign(np.inf, values), values)
    return Expected(values, np.where(unclear, np.inf, bound))


def expected(operator: str, arrays, *, axis: int = -1, scale: float | None = None, out_dtype=None) -> Expected:
    """Return values and bounds of one call, in the result's shape."""
    first = arrays[0]
    p = precision_of(first.dtype)
    # Rows are contiguous and last, so that NumPy sums pairwise.
    rows = [
        np.ascontiguousarray(np.moveaxis(np.atleast_1d(a if a.dtype == bool else widen(a, p.wide)), axis, -1))
        for a in arrays
    ]
    with np.errstate(all="ignore"):
        result = FORMULAS[operator](p, *rows, **({} if scale is None else {"scale": scale}))
        result = rounded_once(result, p, first.dtype if out_dtype is None else out_dtype)
    return Expected(*(np.moveaxis(a, -1, axis).reshape(first.shape) for a in result))


def rounded(values: np.ndarray, dtype) -> np.ndarray:
    """Round values of float32 or float64 to nearest even, by integers alone if NumPy would round twice."""
    if dtype != ml_dtypes.bfloat16 or values.dtype != np.float64:
        with np.errstate(all="ignore"):
            return values.astype(dtype)
    bits = np.abs(values).view(np.uint64)
    # The ends of float32's range of exponents are avoided, since this rounding does not treat them.
    assert np.all((values == 0) | ((np.abs(values) > 2.0**-126) & (np.abs(values) < 2.0**127)))
    kept = bits >> np.uint64(45)
    rest, half = bits & np.uint64(2**45 - 1), np.uint64(2**44)
    kept += (rest > half) | ((rest == half) & (kept % 2 == 1))
    return np.copysign((kept << np.uint64(45)).view(np.float64), values).astype(ml_dtypes.bfloat16)


def errors(result: np.ndarray, expected: Expected) -> np.ndarray:
    """Return each element's error in units of its bound. A wrong or missing NaN or infinity has the error infinity."""
    values, bound = expected
    got = widen(result, values.dtype.type)
    with np.errstate(all="ignore"):
        error = np.abs(got - values)
        ratio = np.where(error == 0, 0, error / bound)
    same = (got == values) | (np.isnan(got) & np.isnan(values))
    ratio = np.where(np.isfinite(values), np.where(np.isnan(ratio), np.inf, ratio), np.where(same, 0, np.inf))
    return np.where(np.isinf(bound), 0, ratio)


def claimed_of_a_device(expected: Expected, operator: str, arrays, settings) -> Expected:
    """Return the values with the bounds of a device, which rounds more often and computes some rows differently."""
    if operator in ("softmax_backward", "scaled_masked_softmax_backward"):
        return _without_overflow(expected, *arrays, axis=settings.get("axis", -1))
    if operator == "scaled_masked_softmax" and arrays[0].dtype == np.float16:
        # The product with the scale is rounded to float16.
        x = widen(arrays[0], np.float64) * settings["scale"]
        with np.errstate(all="ignore"):
            error = 2.0**-11 * np.max(np.abs(np.where(arrays[1], 0, x)), axis=-1, keepdims=True, initial=0) + 2.0**-25
            bound = expected.bound + np.abs(expected.values) * np.expm1(2 * error)
        return Expected(expected.values, np.where(np.isnan(bound), np.inf, bound))
    return expected


def _without_overflow(expected: Expected, g, y, mask=None, *, axis: int) -> Expected:
    """Make no claim about rows in which a product g*y or s*y overflows, as some kernels compute g*y - s*y.

    If the difference cancels, the bounds hold for both forms.
    """
    g, y = (widen(array, np.float64) for array in (g, y))
    axis = axis if g.ndim else None
    with np.errstate(all="ignore"):
        product = np.abs(g * y)
        total = np.sum(product, axis=axis, keepdims=True)
        unclear = ~np.isfinite(y) | ~((product < SINGLE.largest) & (total * np.abs(y) < SINGLE.largest))
    unclear = np.any(unclear, axis=axis, keepdims=True) & np.ones(g.shape, bool)
    if mask is not None:
        unclear &= ~mask  # a masked position is 0 even if others overflow
    return Expected(expected.values, np.where(unclear, np.inf, expected.bound))
