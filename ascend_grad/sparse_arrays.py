"""Sparse arrays of SciPy: which are taken, and their parts. SciPy itself is not imported."""

from __future__ import annotations

from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from ._dtypes import FLOATING_DTYPES
from .errors import ParamInvalidError, ParamTypeError

#: The number of elements that no array of float64 has.
MOST_ELEMENTS = 2**60


class SparseRows:
    """A sparse matrix as rows of nonzeros (CSR), in native byte order. `check` looks at its elements.

    Attributes
    ----------
    shape : tuple of int
    data : ndarray, shape (nonzeros,)
        The nonzeros; float32 or float64, unless they are integers.
    indices : ndarray of int32 or int64, shape (nonzeros,)
        The columns of the nonzeros. A column may occur several times in a row, and they may have any order.
    starts : ndarray of int64, shape (rows + 1,)
        The first nonzero of each row, and the number of nonzeros.
    has_integers : bool
        Whether the elements are integers or truth values, which `convert_integers` converts.
    """

    def __init__(self, matrix: Any, name: str, operator: str) -> None:
        if matrix.ndim != 2:
            got = f"{type(matrix).__name__} of shape {tuple(matrix.shape)}"
            raise ParamInvalidError(f"{name}: expected a sparse array with 2 dimensions, got {got}", operator=operator)
        if matrix.format != "csr":  # SciPy's conversion of a wrong structure could read beyond its arrays
            message = f"{name}: expected a sparse array in CSR format, got {matrix.format}; pass {name}.tocsr()"
            raise ParamTypeError(message, operator=operator)
        self.shape = rows, columns = int(matrix.shape[0]), int(matrix.shape[1])
        if max(rows + 1, rows * columns) >= MOST_ELEMENTS:  # more than NumPy has numbers for the bytes of
            expected = "a sparse array of fewer than 2**60 elements, stored or not, and rows"
            raise ParamInvalidError(f"{name}: expected {expected}, got shape {self.shape}", operator=operator)
        parts: list[Any] = [getattr(matrix, each, None) for each in ("data", "indices", "indptr")]
        if not all(isinstance(each, np.ndarray) and each.ndim == 1 for each in parts) or any(
            each.dtype.kind not in "iu" for each in parts[1:]
        ):
            message = f"{name}: expected a sparse array with vectors as data, indices and indptr, got other objects"
            raise ParamTypeError(message, operator=operator)
        data, indices, indptr = map(np.asarray, parts)  # without the class of memory-mapped arrays
        dtype = data.dtype.newbyteorder("=")
        self.has_integers = dtype.kind in "biu"
        if not self.has_integers and dtype not in (np.float32, np.float64):
            message = f"{name}: expected a sparse array of float32, float64 or integers, got {dtype}"
            raise ParamTypeError(message, operator=operator)
        if len(indptr) != self.shape[0] + 1:
            message = f"{name}: expected {self.shape[0] + 1} elements of indptr, got {len(indptr)}"
            raise ParamInvalidError(message, operator=operator)
        wide = indices.dtype.itemsize != 4 or indices.dtype.kind == "u"
        self.data = np.require(data, dtype, ["C", "A"])
        self.indices = np.require(indices, np.int64 if wide else np.int32, ["C", "A"])
        self.starts = np.require(indptr, np.int64, ["C", "A"])
        self._given = data, indices, indptr

    def convert_integers(self, weight: NDArray, operator: str) -> None:
        """Convert elements that are integers or truth values to float32 if the weight is float32, or to float64."""
        dtype = weight.dtype.newbyteorder("=")
        if dtype in FLOATING_DTYPES and dtype not in (np.float32, np.float64):
            message = f"weight: expected float32 or float64 with a sparse input of integers, got {dtype}"
            raise ParamTypeError(message, operator=operator)
        self.data = self.data.astype(np.float32 if dtype == np.float32 else np.float64)

    @property
    def copied_bytes(self) -> int:
        """Return the bytes of the parts that are copies."""
        pairs = zip((self.data, self.indices, self.starts), self._given)
        return sum(part.nbytes for part, given in pairs if not np.may_share_memory(part, given))

    @property
    def nonzeros(self) -> int:
        """Return the number of stored elements, which `starts` may not use up."""
        return min(len(self.data), len(self.indices))

    @property
    def stand_in(self) -> NDArray:
        """Return an array of the same shape and dtype, without memory for its elements, which are all 0."""
        return np.broadcast_to(np.zeros((), self.data.dtype), self.shape)

    def refuse_starts(self, operator: str) -> None:
        """Raise the error about starts of rows that no valid array has."""
        _refuse("whose indptr does not begin with 0, decreases, or exceeds the number of elements", operator)

    def refuse_columns(self, operator: str) -> None:
        """Raise the error about the column of an element."""
        _refuse(f"with a column index outside [0, {self.shape[1]})", operator)

    def parts(self, operator: str) -> tuple[NDArray, NDArray, NDArray]:
        """Return the elements that `starts` uses, their columns, and `starts`. The structure is checked."""
        starts = self.starts
        if starts[0] != 0 or starts[-1] > self.nonzeros or (np.diff(starts) < 0).any():
            self.refuse_starts(operator)
        data, indices = self.data[: starts[-1]], self.indices[: starts[-1]]
        if len(indices) and (indices.min() < 0 or indices.max() >= self.shape[1]):
            self.refuse_columns(operator)
        return data, indices, starts


def _refuse(reason: str, operator: str) -> None:
    raise ParamInvalidError(f"input: expected a valid sparse array, got one {reason}", operator=operator)


def is_sparse(value: object) -> TypeGuard[Any]:
    """Return whether a value is a sparse array or matrix of SciPy."""
    is_of_scipy = any(each.__module__.startswith("scipy.sparse.") for each in type(value).__mro__)
    return is_of_scipy and hasattr(value, "tocsr")
