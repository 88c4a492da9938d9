"""Arithmetic of matrices of rows by the device's operators, in float32, and the factors of logits."""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import _aclnn
from ...operators.options import largest_factor
from .array import DeviceArray
from .queue import FLOAT32, Queue

INT64 = np.dtype(np.int64)
BOOL = np.dtype(np.bool_)

#: Temperatures, softcaps and factors of logits beyond this bound, or its reciprocal, count as the bound.
LARGEST_FACTOR = largest_factor(is_double=False)
#: Columns of a matrix whose numbers are exact in float32, in which `keys` numbers them.
MAX_COLUMNS = 2**24
#: The lowest finite number of float32.
LOWEST = -float(np.finfo(np.float32).max)


def limited_scale(scale: float) -> float:
    """Return a factor of logits, of either sign, within the bounds."""
    return min(max(scale, -LARGEST_FACTOR), LARGEST_FACTOR)


def limited(queue: Queue, factor: Any) -> Any:
    """Return a positive factor within the bounds: a number, or a vector for an array of one for each row."""
    if isinstance(factor, float):
        return min(max(factor, 1 / LARGEST_FACTOR), LARGEST_FACTOR)
    return queue.xp.clip(queue.vector(factor).reshape(-1), 1 / LARGEST_FACTOR, LARGEST_FACTOR)


def cast(queue: Queue, array: DeviceArray, dtype: np.dtype) -> DeviceArray:
    """Return the array, or a copy on the device in another dtype."""
    if array.dtype == dtype:
        return array
    result = queue.empty(array.shape, dtype)
    queue.launch("cast", array, _aclnn.DTYPES[dtype.name], result)
    return result


def number(queue: Queue, value: float) -> DeviceArray:
    """Return a number in float32 on the device."""
    return queue.put(queue.vector(value), FLOAT32)


def column(queue: Queue, vector: Any) -> DeviceArray:
    """Return a vector in float32 as a matrix of one column on the device."""
    array = queue.put(queue.vector(vector), FLOAT32)
    return queue.reshaped(array, (array.size, 1))


def row(queue: Queue, vector: Any) -> DeviceArray:
    """Return a vector in float32 as a matrix of one row on the device."""
    array = queue.put(queue.vector(vector), FLOAT32)
    return queue.reshaped(array, (1, array.size))


def product(queue: Queue, first: DeviceArray, second: DeviceArray) -> DeviceArray:
    """Return the product of two arrays, of which one is broadcast to the other's shape."""
    shape = tuple(np.broadcast_shapes(first.shape, second.shape))
    result = queue.empty(shape, FLOAT32)
    queue.launch("mul", first, second, result)
    return result


def exponentials(queue: Queue, matrix: DeviceArray) -> DeviceArray:
    """Return the exponentials of the elements."""
    result = queue.empty(matrix.shape, FLOAT32)
    queue.launch("exp", matrix, result)
    return result


def row_sums(queue: Queue, matrix: DeviceArray) -> DeviceArray:
    """Return the sums of the rows as a vector on the device."""
    result = queue.empty((matrix.shape[0], 1), FLOAT32)
    queue.launch("row_sums", matrix, result)
    return queue.reshaped(result, (matrix.shape[0],))


def weighted_log_probs(queue: Queue, log_prob: DeviceArray, weights: DeviceArray) -> Any:
    """Return the sums of the rows' log-probabilities times the weights of the classes, as a vector.

    A weight of 0 times an infinite log-probability is 0, not NaN.
    """
    terms = finite(queue, log_prob, LOWEST)
    queue.launch("inplace_mul", terms, weights)
    sums = queue.vector(row_sums(queue, terms))
    del terms
    return with_infinite(queue, sums, -weights_of(queue, log_prob, -np.inf, weights))


def weights_of(queue: Queue, matrix: DeviceArray, value: float, weights: DeviceArray) -> Any:
    """Return the sum of the weights of the elements that have a value, for each row, as a vector."""
    has_value = marked(queue, matrix, number(queue, value))
    queue.launch("inplace_mul", has_value, weights)
    return queue.vector(row_sums(queue, has_value))


def with_infinite(queue: Queue, numbers: Any, weights: Any) -> Any:
    """Return numbers of the rows, but infinite ones with the sign of the weight where that is not 0."""
    # Weights are NaN, and leave the numbers, where a class weight is infinite.
    return queue.xp.where(weights > 0, np.inf, queue.xp.where(weights < 0, -np.inf, numbers))


def finite(queue: Queue, matrix: DeviceArray, least: float) -> DeviceArray:
    """Return the elements, but at least `least`; NaN stay."""
    result = queue.empty(matrix.shape, FLOAT32)
    queue.launch("maximum", matrix, number(queue, least), result)
    return result


def marked(queue: Queue, matrix: DeviceArray, wanted: DeviceArray) -> DeviceArray:
    """Return 1 for the elements that equal another array's, which is broadcast, and 0 for others, in float32."""
    equal = queue.empty(matrix.shape, BOOL)
    queue.launch("equal", matrix, wanted, equal)
    return cast(queue, equal, FLOAT32)


def log_sum_exp(queue: Queue, matrix: DeviceArray) -> DeviceArray:
    """Return the logarithms of the sums of the rows' exponentials as a vector on the device."""
    result = queue.empty((matrix.shape[0], 1), FLOAT32)
    queue.launch("log_sum_exp", matrix, result)
    return queue.reshaped(result, (matrix.shape[0],))


def top_k(queue: Queue, matrix: DeviceArray, count: int) -> tuple[DeviceArray, DeviceArray]:
    """Return the largest elements of each row and their columns; of equal elements, the device takes any."""
    shape = matrix.shape[0], count
    values, places = queue.empty(shape, FLOAT32), queue.empty(shape, INT64)
    queue.launch("top_k", matrix, count, values, places)
    return values, places


def keys(queue: Queue, matrix: DeviceArray, wanted: DeviceArray) -> DeviceArray:
    """Return ``width - column`` for the elements that equal the one of their row in a column, and 0 for others."""
    width = matrix.shape[1]
    result = marked(queue, matrix, wanted)
    queue.launch("inplace_mul", result, row(queue, width - queue.numbers(width)))
    return result


def multiply(queue: Queue, matrix: DeviceArray, factor: Any) -> None:
    """Multiply a matrix by a number, or its rows by the numbers of a vector, in place."""
    if not isinstance(factor, float):
        queue.launch("inplace_mul", matrix, column(queue, factor))
    elif factor != 1:
        queue.launch("inplace_mul", matrix, number(queue, factor))


def slope_of(queue: Queue, tanh: DeviceArray) -> DeviceArray:
    """Return ``1 - tanh**2``."""
    slope = product(queue, tanh, tanh)
    multiply(queue, slope, -1.0)
    queue.launch("inplace_add", slope, number(queue, 1.0))
    return slope


def multiply_by_slope(queue: Queue, matrix: DeviceArray, tanh: DeviceArray) -> None:
    """Multiply a matrix by ``1 - tanh**2`` in place."""
    queue.launch("inplace_mul", matrix, slope_of(queue, tanh))
