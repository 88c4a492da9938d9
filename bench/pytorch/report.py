"""Tables of the results of calls on tensors."""

from __future__ import annotations

from collections.abc import Sequence

from ..linear.cases import LinearCase
from ..results import OWN, Row
from ..rowwise.cases import Case
from ..tables import DASH, milliseconds, table, times
from .cases import AUTOGRAD
from .measure import AWAKE
from .rivals import ARRAYS, TORCH


def calls_block(rows: Sequence[Row[Case]]) -> str:
    """Make a table of calls without gradients: microseconds on tensors, on arrays, and of torch's own kernel."""
    return table(
        ["case, µs", "tensors", "NumPy arrays", "torch", "torch / ours"],
        (
            [row.case.name, *(_microseconds(row, side) for side in (OWN, ARRAYS, TORCH)), times(row.speedup(TORCH))]
            for row in rows
            if row.case.mode != AUTOGRAD
        ),
    )


def autograd_block(rows: Sequence[Row[Case]]) -> str:
    """Make a table of forward and backward together: our time and torch's ratio, also with torch's threads awake."""
    return table(
        ["forward and backward", "ms", "torch / ours", "threads awake: ms", "torch / ours"],
        (
            [
                f"{row.case.operator} {row.case.dtype} {row.case.layout}",
                milliseconds(row.own),
                times(row.speedup(TORCH)),
                milliseconds(row.seconds.get(OWN + AWAKE)),
                times(awake_ratio(row)),
            ]
            for row in rows
            if row.case.mode == AUTOGRAD
        ),
    )


def losses_block(rows: Sequence[Row[LinearCase]]) -> str:
    """Make a table of the loss with its gradients, compared with both losses of torch."""
    sides = ("torch", "torch chunked")
    return table(
        ["loss and gradients", "ms", *(f"{side} / ours" for side in sides)],
        (
            [
                f"{row.case.dtype} {row.case.layout}",
                milliseconds(row.own),
                *(times(row.speedup(side)) for side in sides),
            ]
            for row in rows
        ),
    )


def awake_ratio(row: Row[Case]) -> float | None:
    """Return torch's time over ours, with torch's threads awake."""
    own, other = row.seconds.get(OWN + AWAKE), row.seconds.get(TORCH + AWAKE)
    return other / own if own and other else None


def _microseconds(row: Row[Case], side: str) -> str:
    return f"{1e6 * row.seconds[side]:.2f}" if side in row.seconds else DASH
