"""Make calls whose input is a sparse array of SciPy, in every form that it may have, and compute its products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import scipy.sparse
from hypothesis import strategies as st
from samples import generator

FLOATS = ("float32", "float64")


def with_zeros(arguments: dict[str, Any]) -> dict[str, Any]:
    """Set most elements of the input to 0, among them all of some rows and columns."""
    x = arguments["input"].copy()
    random = generator("zeros", x.shape)
    x[random.random(x.shape) < 0.6] = 0
    x[::7] = 0
    x[:, ::11] = 0
    return arguments | {"input": x}


def sparse(arguments: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """Make the input of a call sparse, with other parts if they are given."""
    x = scipy.sparse.csr_array(arguments["input"])
    for name, part in parts.items():
        setattr(x, name, part)
    return arguments | {"input": x}


def random_matrix(rows: int, columns: int, density: float, kind: str = "csr") -> Any:
    random = generator("matrix", rows, columns)
    x = random.random((rows, columns)) * (random.random((rows, columns)) < density)
    return scipy.sparse.csr_array(x).asformat(kind)


def ways(x: np.ndarray) -> Iterator[Any]:
    """Yield the same matrix in several forms: unsorted, with elements in parts, and mapped to a file's memory."""
    csr = scipy.sparse.csr_array(x)
    yield scipy.sparse.csr_matrix(x)
    mapped = csr.copy()
    mapped.data, mapped.indices, mapped.indptr = (each.view(np.memmap) for each in (csr.data, csr.indices, csr.indptr))
    yield mapped
    unsorted = csr.copy()
    for begin, end in zip(csr.indptr[:-1], csr.indptr[1:]):
        unsorted.indices[begin:end] = csr.indices[begin:end][::-1]
        unsorted.data[begin:end] = csr.data[begin:end][::-1]
    yield scipy.sparse.csr_array((unsorted.data, unsorted.indices, unsorted.indptr), csr.shape)
    twice = np.repeat(csr.data / 2, 2), np.repeat(csr.indices, 2), csr.indptr * 2
    yield scipy.sparse.csr_array(twice, csr.shape)
    yield scipy.sparse.csr_array((csr.data.astype(csr.dtype.newbyteorder()), csr.indices, csr.indptr), csr.shape)
    longer = scipy.sparse.csr_array(csr)
    longer.data, longer.indices = np.append(csr.data, 7).astype(x.dtype), np.append(csr.indices, 99).astype(np.int32)
    yield longer


@st.composite
def structures(draw, *, most_rows: int = 9, most_columns: int = 7) -> Any:
    """Draw an array of float64 with any valid structure.

    Rows may be empty, and columns in any order, several times in a row, or with a stored 0. There may be no rows, no
    columns, and elements behind the last row's.
    """
    rows, columns = draw(st.integers(0, most_rows)), draw(st.integers(0, most_columns))
    counts = draw(st.lists(st.integers(0, 5 if columns else 0), min_size=rows, max_size=rows))
    behind = draw(st.integers(0, 2))
    starts = np.append(0, np.cumsum(np.asarray(counts, np.int64)))
    size = int(starts[-1])
    indices = draw(st.lists(st.integers(0, max(columns - 1, 0)), min_size=size, max_size=size))
    data = draw(st.lists(st.sampled_from((0.0, -0.0, 1.0, -2.5, 0.125, 3.0)), min_size=size, max_size=size))
    x = scipy.sparse.csr_array((rows, columns), dtype=np.float64)
    x.data = np.append(np.asarray(data, np.float64), [7.0] * behind)
    x.indices = np.append(np.asarray(indices, np.int64), [-1] * behind).astype(
        draw(st.sampled_from((np.int32, np.int64)))
    )
    x.indptr = starts.astype(draw(st.sampled_from((np.int32, np.int64))))
    return x


def dense_copy(x: Any) -> np.ndarray:
    """Return the elements as a dense array of float64. Elements at the same place are added up."""
    result = np.zeros(x.shape)
    for row, (begin, end) in enumerate(zip(x.indptr[:-1], x.indptr[1:])):
        for place in range(begin, end):
            result[row, x.indices[place]] += x.data[place]
    return result


def times(x: Any, matrix: np.ndarray) -> np.ndarray:
    """Return the product with a matrix (columns, n) in float64, where elements that are not stored are no factors."""
    result = np.zeros((x.shape[0], matrix.shape[1]))
    for row, (begin, end) in enumerate(zip(x.indptr[:-1], x.indptr[1:])):
        for place in range(begin, end):
            result[row] += np.float64(x.data[place]) * matrix[x.indices[place]].astype(np.float64)
    return result


def transposed_times(x: Any, matrix: np.ndarray) -> np.ndarray:
    """Return the product of the transposed array with a matrix (rows, n), as `times` does. Rows of 0 are left out."""
    result = np.zeros((x.shape[1], matrix.shape[1]))
    for row, (begin, end) in enumerate(zip(x.indptr[:-1], x.indptr[1:])):
        for place in range(begin, end if np.any(matrix[row] != 0) else begin):
            result[x.indices[place]] += np.float64(x.data[place]) * matrix[row]
    return result
