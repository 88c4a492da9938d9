"""Draw sparse arrays of SciPy with random structures, and ways to spoil them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from faults import INVALID, TYPE, Fault, constant
from fuzzed_arrays import NUMPY, Draw, random_view

try:
    import scipy.sparse
except ImportError:
    IS_AVAILABLE = False
else:
    IS_AVAILABLE = True

#: The parts of a sparse array.
PARTS = ("data", "indices", "indptr")
#: Formats that the library refuses.
OTHER_FORMATS = ("csc", "coo", "lil", "bsr", "dok", "dia")
#: Dtypes of integers and truth values as which small counts are given.
OF_COUNTS = ("?", "i1", "u1", "<i8", ">i2", "u8")


def with_zeros(draw: Draw, x: np.ndarray) -> np.ndarray:
    """Return an input most of whose elements are 0, or one of small counts."""
    random = np.random.Generator(np.random.PCG64(draw.getrandbits(32)))
    result = np.where(random.random(x.shape) < draw.choice((0.0, 0.1, 0.5, 0.9)), x, 0).astype(x.dtype)
    if draw.chance(0.2):
        result = random.integers(0, draw.choice((2, 4)), x.shape).astype(x.dtype)
    if draw.chance(0.3):
        result[:: draw.choice((1, 2, 7))] = 0
    return result


def _nonzeros(draw: Draw, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return values, columns and starts of rows in any order, with zeros, and with elements that are sums of two."""
    random = np.random.Generator(np.random.PCG64(draw.getrandbits(32)))
    is_stored = (x != 0) | (random.random(x.shape) < draw.choice((0, 0, 0.05)))
    rows, columns = np.nonzero(is_stored)
    values = x[rows, columns]
    if draw.chance(0.2):  # a half is exact but for subnormal numbers, for which the other part is 0
        with np.errstate(all="ignore"):
            half = values / 2
            half = np.where((half + half == values) & np.isfinite(values), half, values)
            others = np.where(half == values, 0, half).astype(x.dtype)
        rows, columns = np.concatenate([rows, rows]), np.concatenate([columns, columns])
        values = np.concatenate([half.astype(x.dtype), others])
    order = np.lexsort((columns, rows))
    if draw.chance(0.3):
        order = np.lexsort((random.random(len(rows)), rows))
    starts = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(x)))]).astype(np.int64)
    return values[order], columns[order], starts


def _matrix(shape: tuple[int, ...], parts: tuple[np.ndarray, ...], kind: Any = None) -> Any:
    """Return a matrix with these parts, which SciPy's constructor would convert."""
    matrix = (kind or scipy.sparse.csr_array)(shape, dtype=np.float64)
    for name, part in zip(PARTS, parts, strict=True):
        setattr(matrix, name, part)
    return matrix


def drawn(draw: Draw, x: np.ndarray) -> tuple[Any, Any]:
    """Return the matrix of an input with a random structure and layout, and one with contiguous parts in its order."""
    values, columns, starts = _nonzeros(draw, x)
    plain = _matrix(x.shape, (values.copy(), columns.astype(np.int32), starts.astype(np.int32)))
    if np.isin(values, (0, 1, 2, 3)).all() and draw.chance(0.6):
        dtype = np.dtype(draw.choice(OF_COUNTS if np.isin(values, (0, 1)).all() else OF_COUNTS[1:]))
        values = values.astype(dtype)
    if draw.chance(0.2):  # memory behind the elements
        values = np.append(values, np.full(3, 7, values.dtype))
        columns = np.append(columns, draw.choice((-1, x.shape[1], 2**31 - 1)))
    narrow = ("u1", "<i2", ">i2") if columns.max(initial=0) < 128 and columns.min(initial=0) >= 0 else ()
    of_columns = np.dtype(draw.choice(("i4", "i4", "i8", "i8", ">i4", ">i8", *narrow)))
    of_starts = np.dtype(draw.choice(("i4", "i4", "i8", ">i8", "u8")))
    parts = (
        random_view(draw, part, NUMPY.form, repeats=False)
        for part in (values, columns.astype(of_columns), starts.astype(of_starts))
    )
    kind = draw.choice((scipy.sparse.csr_array, scipy.sparse.csr_matrix))
    return _matrix(x.shape, tuple(parts), kind), plain


def parts_of(matrix: Any) -> list[bytes]:
    """Return the elements of the arrays that a matrix has. Wrong ones have other formats, or objects as elements."""
    parts = (getattr(matrix, name, None) for name in PARTS)
    return [part.tobytes() for part in parts if isinstance(part, np.ndarray) and part.dtype != object]


def _changed(matrix: Any, **parts: Any) -> Any:
    copy = _matrix(matrix.shape, tuple(getattr(matrix, name) for name in PARTS), type(matrix))
    for name, part in parts.items():
        setattr(copy, name, part)
    return copy


def faults_of_conversion(draw: Draw, matrix: Any) -> Iterator[Fault]:
    """Yield matrices that are refused whatever their elements are."""

    def fault(label: str, value: Any, kind: type = TYPE) -> Fault:
        return Fault("dtype", "input", f"sparse: {label}", constant(value), kind, "input")

    count = len(matrix.data)
    for name in OTHER_FORMATS:
        yield fault(name, scipy.sparse.csr_array(np.ones((2, 3))).asformat(name))
    yield fault("one axis", scipy.sparse.coo_array(np.ones(3)), INVALID)
    for name in ("object", "c8", "g", "f2", "U3", "M8[s]", "V2"):
        yield fault(f"data {name}", _changed(matrix, data=np.zeros(count, name)))
    yield fault("data that is a list", _changed(matrix, data=[1.0] * count))
    for name in PARTS:
        part = np.asarray(getattr(matrix, name))
        yield fault(f"a matrix of {name}", _changed(matrix, **{name: part[None]}))
        yield fault(f"no {name}", _changed(matrix, **{name: None}))
        if name != "data":
            for dtype in (np.float64, bool, object):
                yield fault(f"{name} {np.dtype(dtype)}", _changed(matrix, **{name: np.zeros(len(part), dtype)}))
    starts = np.asarray(matrix.indptr)
    yield fault("fewer starts", _changed(matrix, indptr=starts[:-1]), INVALID)
    yield fault("more starts", _changed(matrix, indptr=np.append(starts, starts[-1:])), INVALID)


def faults_of_structure(draw: Draw, matrix: Any) -> Iterator[Fault]:
    """Yield matrices whose elements are refused when they are read, as they lie outside of the matrix or of memory."""

    def fault(label: str, **parts: Any) -> Fault:
        return Fault("structure", "input", label, constant(_changed(matrix, **parts)), INVALID, "input")

    starts, columns = np.asarray(matrix.indptr).astype(np.int64), np.asarray(matrix.indices).astype(np.int64)
    end = int(starts[-1])
    if end:
        place = draw.randrange(end)
        for column in (matrix.shape[1], -1, 2**31 - 1, 2**31, 2**40, -(2**63)):
            wrong = columns.copy()
            wrong[place] = column
            yield fault(f"column {column} at {place}", indices=wrong)
            if abs(column) < 2**31:
                yield fault(f"narrow column {column} at {place}", indices=wrong.astype(np.int32))
        yield fault("fewer elements", data=np.asarray(matrix.data)[: end - 1])
        yield fault("fewer columns", indices=columns[: end - 1])
    place = draw.randrange(len(starts))
    for number in (-1, end + len(columns) + 1, 2**40, 2**62):
        wrong = starts.copy()
        wrong[place] = number
        if len(starts) > 1 or number > 0:
            yield fault(f"start {number} at {place}", indptr=wrong)
