"""Turn NumPy arrays into dask arrays with chunks that hypothesis draws."""

from __future__ import annotations

import dask.array as da
import numpy as np
from hypothesis import strategies as st


def cuts(length: int):
    """Draw lengths of chunks with this sum. Some of the lengths may be 0."""
    return st.lists(st.integers(0, length), max_size=3).map(
        lambda ends: tuple(np.diff([0, *sorted(ends), length]).tolist())
    )


def chunks(shape: tuple[int, ...], whole: int | None = None):
    """Draw chunks of an array that is not cut along the axis ``whole``."""
    return st.tuples(*(st.just((n,)) if axis == whole else cuts(n) for axis, n in enumerate(shape)))


def assert_identical(result: np.ndarray, expected: np.ndarray) -> None:
    """Check that shape, dtype and bits are equal."""
    result, expected = np.asarray(result), np.asarray(expected)
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    assert result.tobytes() == expected.tobytes()


def from_array(array: np.ndarray, chunks: tuple[tuple[int, ...], ...]) -> da.Array:
    return da.from_array(array, chunks=chunks) if array.ndim else da.from_array(array)
