"""Named cases of the row-wise operators, and their arrays."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..dtypes import DTYPES, numpy_dtype

BACKWARD = ("softmax_backward", "log_softmax_backward")
FORWARD = ("softmax", "log_softmax")
MASKED_BACKWARD = "scaled_masked_softmax_backward"
MASKED = (MASKED_BACKWARD, "scaled_masked_softmax")

#: Shapes and dims: small calls, then calls along the last dim, the first dim, and a dim between.
SMALL_LAYOUTS = (((8, 8), 1), ((64, 128), 1))
LAST_LAYOUTS = tuple(
    (shape, 1)
    for shape in (
        (1024, 1024),
        (4096, 4096),
        (2048, 32768),
        (65536, 64),
        (1000000, 3),
        (1, 2**24),
        (3, 2**22),
    )
)
FIRST_LAYOUTS = tuple((shape, 0) for shape in ((4096, 4096), (84, 43682), (1000000, 10)))
MIDDLE_LAYOUTS = (((64, 1000, 128), 1), ((32, 81, 8732), 1))
LAYOUTS = (*SMALL_LAYOUTS, *LAST_LAYOUTS, *FIRST_LAYOUTS, *MIDDLE_LAYOUTS)
QUICK_LAYOUTS = (((64, 128), 1), ((1024, 1024), 1), ((4096, 4096), 1), ((64, 1000, 128), 1))

MASKED_LAYOUTS = tuple((shape, 3) for shape in ((2, 4, 32, 32), (32, 12, 128, 128), (8, 16, 512, 512)))
IDLE_LAYOUTS = (*SMALL_LAYOUTS, ((512, 512), 1), ((1024, 1024), 1), ((4096, 4096), 1))

#: The factor of the masked operators.
SCALE = 0.125


@dataclass(frozen=True)
class Case:
    """One measured call.

    Attributes
    ----------
    operator : str
        The public function.
    dtype : str
        The dtype of all arrays (masks are bool).
    shape : tuple of int
        The shape of all arrays; the second length of a mask is 1.
    dim : int
        The axis, not negative.
    mode : {"out", "fresh", "idle"}
        The result is written to an existing array or to a new one, or to an existing one in a single call after a
        pause.
    """

    operator: str
    dtype: str
    shape: tuple[int, ...]
    dim: int
    mode: str

    @property
    def layout(self) -> str:
        return layout_text(self.shape, self.dim)

    @property
    def name(self) -> str:
        return f"{self.operator} {self.dtype} {self.layout} {self.mode}"

    @property
    def size(self) -> int:
        """Return the number of elements of the result."""
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of the result."""
        return self.size * numpy_dtype(self.dtype).itemsize


class Operands(NamedTuple):
    """The arrays of one call: its inputs, and the array of its result unless that is new."""

    inputs: tuple[np.ndarray, ...]
    out: np.ndarray


def layout_text(shape: tuple[int, ...], dim: int) -> str:
    """Format shape and axis."""
    lengths = " × ".join(map(str, shape))
    return lengths if dim == len(shape) - 1 else f"{lengths}, dim {dim}"


def _cases(operators, dtypes, layouts, modes) -> list[Case]:
    # Cases with the same values are adjacent, as `values` caches the last ones.
    return [
        Case(operator, dtype, shape, dim, mode)
        for shape, dim in layouts
        for operator in operators
        for dtype in dtypes
        for mode in modes
    ]


def full() -> list[Case]:
    """Return all cases."""
    return [
        *_cases(BACKWARD, DTYPES, LAYOUTS, ("out", "fresh")),
        *_cases(FORWARD, DTYPES, LAYOUTS, ("out",)),
        *_cases(MASKED, DTYPES, MASKED_LAYOUTS, ("out",)),
        *_cases(BACKWARD, ("float32",), IDLE_LAYOUTS, ("idle",)),
    ]


def quick() -> list[Case]:
    """Return a choice of cases that takes about half a minute."""
    return [
        *_cases(BACKWARD, ("float32",), QUICK_LAYOUTS, ("out", "fresh")),
        *_cases(BACKWARD, ("bfloat16",), QUICK_LAYOUTS, ("out",)),
        *_cases(FORWARD, ("float32",), QUICK_LAYOUTS[:2], ("out",)),
        *_cases(MASKED, ("float32",), MASKED_LAYOUTS[1:2], ("out",)),
        *_cases(BACKWARD, ("float32",), SMALL_LAYOUTS[1:], ("idle",)),
    ]


@functools.lru_cache(maxsize=1)
def values(operator: str, shape: tuple[int, ...], dim: int) -> tuple[np.ndarray, ...]:
    """Make ordinary values in float32: logits, or gradients of magnitude one and (logarithms of) probabilities."""
    random = np.random.default_rng(0)
    logits = random.standard_normal(shape, np.float32)
    if not operator.endswith("_backward"):
        return (logits,)
    logits -= np.log(np.exp(logits).sum(dim, keepdims=True))
    output = logits if operator == "log_softmax_backward" else np.exp(logits, out=logits)
    return random.standard_normal(shape, np.float32), output


def mask(shape: tuple[int, ...]) -> np.ndarray:
    """Make the mask of a masked operator, the same for all heads, with three of ten positions masked."""
    batch, _, *rest = shape
    return np.random.default_rng(1).random((batch, 1, *rest)) < 0.3


def operands(case: Case) -> Operands:
    """Make the arrays of a case. All sides use the same memory, which NumPy has allocated."""
    dtype = numpy_dtype(case.dtype)
    inputs = tuple(array.astype(dtype, copy=False) for array in values(case.operator, case.shape, case.dim))
    if case.operator in MASKED:
        inputs += (mask(case.shape),)
    out = np.empty(case.shape, dtype)
    out.fill(0)  # np.zeros would allocate memory without huge pages
    return Operands(inputs, out)
