"""Cases of calls on tensors: calls without gradients, then forward and backward together."""

from __future__ import annotations

from ..dtypes import NARROW_DTYPES
from ..linear.cases import FIRST, MEMORY_SHAPE, WHOLE, LinearCase
from ..rowwise.cases import BACKWARD, FORWARD, LAYOUTS, SMALL_LAYOUTS, Case

#: The mode of a row-wise case whose result is differentiated.
AUTOGRAD = "autograd"
DTYPES = NARROW_DTYPES[:2]


def full() -> list[Case | LinearCase]:
    """Return all cases."""
    return [
        *(
            Case(operator, dtype, shape, dim, mode)
            for shape, dim in SMALL_LAYOUTS
            for operator in BACKWARD
            for dtype in DTYPES
            for mode in ("out", "fresh")
        ),
        *_differentiated(LAYOUTS),
        *_losses(FIRST),
    ]


def quick() -> list[Case | LinearCase]:
    """Return a choice of cases that takes about half a minute."""
    return [
        *(Case(BACKWARD[0], "float32", shape, dim, mode) for shape, dim in SMALL_LAYOUTS for mode in ("out", "fresh")),
        *_differentiated(LAYOUTS[:3]),
    ]


def memory() -> list[LinearCase]:
    """Return the cases whose memory is measured."""
    return _losses(MEMORY_SHAPE)


def _differentiated(layouts: tuple[tuple[tuple[int, ...], int], ...]) -> list[Case]:
    return [
        Case(operator, dtype, shape, dim, AUTOGRAD)
        for shape, dim in layouts
        for operator in FORWARD
        for dtype in DTYPES
    ]


def _losses(shape: tuple[int, int, int]) -> list[LinearCase]:
    return [LinearCase(WHOLE, "loss and gradients", dtype, shape) for dtype in DTYPES]
