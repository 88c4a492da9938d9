"""Make arguments for the row-wise operators, with ordinary or adversarial values and in any layout."""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {name: np.dtype(name) for name in ("float32", "float16", "float64")} | {"bfloat16": BFLOAT16}

#: Names of the array arguments by operator. The operators with a mask work on the last of four dimensions.
ARRAYS = {
    "softmax_backward": ("grad_output", "output"),
    "log_softmax_backward": ("grad_output", "output"),
    "scaled_masked_softmax_backward": ("grad_output", "y", "mask"),
    "softmax": ("input",),
    "log_softmax": ("input",),
    "scaled_masked_softmax": ("x", "mask"),
}
OPERATORS = tuple(ARRAYS)
MASKED = tuple(name for name in OPERATORS if "masked" in name)
UNMASKED = tuple(name for name in OPERATORS if "masked" not in name)
BACKWARD = tuple(name for name in OPERATORS if "backward" in name)


def generator(*key: object) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(repr(key).encode()))


@dataclass(frozen=True)
class Problem:
    """Hold one call: the operator, its arrays, and ``axis`` or ``scale``."""

    operator: str
    arrays: tuple[np.ndarray, ...]
    settings: dict[str, Any]

    def replaced(self, *arrays: np.ndarray, **settings: Any) -> Problem:
        return replace(self, arrays=arrays or self.arrays, settings=self.settings | settings)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.arrays[0].shape

    @property
    def dtype(self) -> np.dtype:
        return self.arrays[0].dtype


def random_problem(operator: str, shape: tuple[int, ...], dtype, axis: int = -1) -> Problem:
    """Make a problem of ordinary logits, probabilities and gradients. The rank is 4 if the operator has a mask."""
    random = generator(operator, shape, str(dtype), axis)
    masked = operator in MASKED
    logits, gradient = (random.standard_normal(shape, np.float32) for _ in range(2))
    if operator in BACKWARD:
        axes = axis if shape else None
        y = logits - np.log(np.sum(np.exp(logits), axis=axes, keepdims=True)) if logits.size else logits
        arrays = [gradient, y if operator == "log_softmax_backward" else np.exp(y)]
    else:
        arrays = [3 * logits]
    arrays = [np.asarray(array).astype(dtype).reshape(shape) for array in arrays]
    if masked:
        arrays.append(random.random(shape) < 0.3)
    return Problem(operator, tuple(arrays), {"scale": 0.37} if masked else {"axis": axis})


# ---- adversarial rows ------------------------------------------------------------------------------------------------


def _gradient_rows(random: np.random.Generator, n: int, dtype) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Make rows of an upstream gradient and of a forward result, which may have any values."""
    info = ml_dtypes.finfo(dtype)
    smallest, largest = float(info.smallest_subnormal), float(info.max)
    normal, uniform, ones = random.standard_normal(n), random.random(n), np.ones(n)
    probabilities = np.exp(3 * normal - np.max(3 * normal, initial=0))
    probabilities /= max(np.sum(probabilities), 1)
    alternating = np.where(np.arange(n) % 2, 1.0, -1.0)
    spread = np.log10(largest) / 3
    return {
        "normal": (random.standard_normal(n), probabilities),
        "positive": (uniform, random.random(n)),
        "constants": (ones / 3, ones / 7),
        "cancelling sum": (1000 * alternating * (1 + uniform / 64), ones * 0.7),
        "gradient near the sum": (100 + uniform, probabilities),
        "one hot": (normal, np.arange(n) == n // 2),
        "zeros": (0 * ones, -0.0 * ones),
        "subnormal gradient": (smallest * np.floor(1000 * uniform), 2 * random.random(n)),
        "subnormal result": (random.standard_normal(n), smallest * np.floor(1000 * uniform)),
        "tiny": (largest**-0.6 * normal, largest**-0.3 * uniform),
        "huge": (largest**0.65 * normal, largest**0.1 * uniform),
        "equal": (-2.5 * ones, -2.5 * ones),
        "many magnitudes": tuple(
            random.choice([-1.0, 1.0], n) * 10 ** random.uniform(-spread, spread, n) for _ in range(2)
        ),
    }


def _exponent_rows(random: np.random.Generator, n: int, dtype) -> dict[str, np.ndarray]:
    """Make rows of logits or of log-probabilities."""
    info = ml_dtypes.finfo(dtype)
    smallest, largest = float(info.smallest_subnormal), float(info.max)
    normal, uniform, ones = random.standard_normal(n), random.random(n), np.ones(n)
    underflow = -np.log(2.0) * (1074 if dtype == np.float64 else 149)
    half = np.where(uniform < 0.5, -np.inf, normal)
    half[n // 2] = 1
    return {
        "normal": 3 * normal,
        "log probabilities": normal - np.log(np.sum(np.exp(normal))),
        "constant": -np.log(n) * ones,
        "ascending": np.linspace(-20, 20, n),
        "underflow": underflow + 20 * random.uniform(-1, 1, n),
        "growing": np.linspace(-underflow / 3, -underflow / 2, n),
        "wide": np.maximum(largest**0.2, 100) * random.uniform(-1, 1, n),
        "half minus infinity": half,
        "one finite": np.where(np.arange(n) == n // 3, 5, -np.inf),
        "huge": -largest / 4 * uniform,
        "subnormal": smallest * np.floor(1000 * uniform),
        "far from zero": 1000 + normal,
        "tie for the largest": np.where(np.arange(n) % 3, 0, 80.0),
    }


@functools.lru_cache(maxsize=128)
def adversarial_problem(operator: str, n: int, dtype_name: str, kinds: tuple[str, ...] | None = None) -> Problem:
    """Make rows of length n, one for each kind (or each named kind), as a problem over the last dimension."""
    dtype = DTYPES[dtype_name]
    random = generator(operator, n, dtype_name)
    gradients, exponents = _gradient_rows(random, n, dtype), _exponent_rows(random, n, dtype)
    if operator == "log_softmax_backward":
        names = list(zip(gradients, exponents, strict=True))
        pairs = {f"{g}, {e}": (gradients[g][0], exponents[e]) for g, e in names}
    elif operator in BACKWARD:
        pairs = gradients
    else:
        pairs = {name: (row,) for name, row in exponents.items()}
    chosen = [rows for name, rows in pairs.items() if kinds is None or any(kind in name for kind in kinds)]
    with np.errstate(all="ignore"):
        arrays = [np.stack(rows).astype(dtype) for rows in zip(*chosen, strict=True)]
    settings: dict[str, Any] = {"axis": -1}
    if operator in MASKED:
        mask = random.random(arrays[0].shape) < 0.3
        mask[0], mask[-1] = False, True
        arrays = [array[None, None] for array in (*arrays, mask)]
        settings = {"scale": 1.7}
    for array in arrays:
        array.flags.writeable = False
    return Problem(operator, tuple(arrays), settings)


# ---- layouts ---------------------------------------------------------------------------------------------------------

GUARD = 0xA5


@dataclass(frozen=True)
class Layout:
    """Describe the layout of an array in memory.

    `axes` lists the axes from the slowest to the fastest. `steps` are the distances of neighbours on each axis, in
    elements, and may be negative. `shift` is the number of bytes before the first element. `swapped` tells whether the
    array has the other byte order.
    """

    axes: tuple[int, ...]
    steps: tuple[int, ...]
    shift: int = 0
    swapped: bool = False


#: Layouts of matrices: transposed, with gaps between columns, between rows, backwards, in the other byte order,
#: unaligned, shifted by one element, and most of these at once.
LAYOUTS = (
    Layout((1, 0), (1, 1)),
    Layout((0, 1), (1, 2)),
    Layout((0, 1), (2, 1)),
    Layout((0, 1), (-1, -1)),
    Layout((0, 1), (1, 1), swapped=True),
    Layout((0, 1), (1, 1), shift=1),
    Layout((0, 1), (1, 1), shift=8),
    Layout((1, 0), (-3, 2), shift=3, swapped=True),
)


def allocated(shape: tuple[int, ...], dtype: np.dtype, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """Allocate an array of this shape and layout, and return it with its buffer, of which all bytes are `GUARD`."""
    lengths = [max((n - 1) * abs(step) + 1, 0) for n, step in zip(shape, layout.steps, strict=True)]
    if layout.swapped:
        dtype = dtype.newbyteorder()
    # The buffer is aligned, so that `shift` alone decides the alignment.
    start = 64 + layout.shift
    buffer = np.full(start + int(np.prod(lengths, dtype=np.int64)) * dtype.itemsize + 192, GUARD, np.uint8)
    buffer = buffer[-buffer.ctypes.data % 64 :]
    whole = np.ndarray([lengths[axis] for axis in layout.axes], dtype, buffer, offset=start)
    view = whole.transpose(np.argsort(layout.axes)) if shape else whole
    return view[tuple(slice(None, None, step) for step in layout.steps)] if shape else view, buffer


def laid_out(values: np.ndarray, layout: Layout, *, readonly: bool = False) -> np.ndarray:
    """Return an array of the same values in this layout."""
    view, _ = allocated(values.shape, values.dtype, layout)
    view[...] = values
    view.flags.writeable = not readonly
    return view


def bytes_inside(view: np.ndarray, buffer: np.ndarray) -> np.ndarray:
    """Return a mask of the buffer's bytes that belong to elements of the view."""
    inside = np.zeros(buffer.size, bool)
    if view.size:
        offset = view.__array_interface__["data"][0] - buffer.ctypes.data
        np.lib.stride_tricks.as_strided(inside[offset:], (*view.shape, view.itemsize), (*view.strides, 1))[...] = True
    return inside


def assert_guarded(view: np.ndarray, buffer: np.ndarray) -> None:
    """Check that no byte of the buffer outside the view's elements was written."""
    assert np.all(buffer[~bytes_inside(view, buffer)] == GUARD), "bytes outside the array were written"


def native_copy(array: np.ndarray) -> np.ndarray:
    """Return the values as a contiguous, aligned array of native byte order."""
    dtype = array.dtype.newbyteorder("=")
    return np.array(array.astype(next((known for known in DTYPES.values() if known == dtype), dtype)), order="C")


def pairs_of_results(results: Any, expected: Any) -> list[tuple[Any, Any]]:
    """Return each result of a call with its expected value, but for results that are None, as expected."""
    if not isinstance(expected, tuple):
        results, expected = (results,), (expected,)
    assert [each is None for each in results] == [each is None for each in expected]
    return [pair for pair in zip(results, expected, strict=True) if pair[1] is not None]


def assert_identical(got: np.ndarray, expected: np.ndarray) -> None:
    """Check that shape, dtype (up to byte order) and bits are equal. All NaN count as equal."""
    got, expected = native_copy(got), native_copy(expected)
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    bits = np.dtype(f"u{got.itemsize}")
    different = got.reshape(-1).view(bits) != expected.reshape(-1).view(bits)
    if got.dtype in DTYPES.values():
        different &= ~(np.isnan(got) & np.isnan(expected)).reshape(-1)
    assert not different.any(), (
        f"{different.sum()} of {got.size} elements differ, first at {np.flatnonzero(different)[0]}: "
        f"{got.reshape(-1)[different][0]!r} is not {expected.reshape(-1)[different][0]!r}"
    )


def is_dense(array: np.ndarray) -> bool:
    """Return whether the elements fill their range of memory, in any order of the axes."""
    low, high = np.lib.array_utils.byte_bounds(array)
    repeats = any(step == 0 for step, length in zip(array.strides, array.shape, strict=True) if length > 1)
    return array.size > 0 and high - low == array.nbytes and not repeats


def assert_fresh(result: np.ndarray, shape: tuple[int, ...], dtype: np.dtype, like: np.ndarray | None = None) -> None:
    """Check that a result is an ordinary array that the library allocated, or a loss that is one number.

    It has to be in C order, or in the axis order of `like` if that is dense.
    """
    if isinstance(result, np.generic):
        assert (shape, result.dtype) == ((), dtype)
        return
    assert type(result) is np.ndarray
    assert result.shape == shape
    assert result.dtype == dtype
    assert result.dtype.isnative
    order = like if like is not None and is_dense(like) else np.empty(shape)
    assert result.strides == np.empty_like(order, dtype).strides, f"strides {result.strides} of {shape}"
    assert result.flags.writeable
    assert result.flags.aligned
