"""Targets of calls on tensors, and the comparison of measured values with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..linear.cases import LinearCase
from ..results import Row
from ..rowwise.cases import SMALL_LAYOUTS, Case
from ..targets import Target, ratio_text, worst_target
from .cases import AUTOGRAD
from .report import awake_ratio
from .rivals import ARRAYS, TORCH

#: Seconds by which a call on tensors may take longer than on arrays.
PRICE = 1.5e-6


def call_targets(rows: Sequence[Row[Case]]) -> list[Target]:
    """Compare the worst cases of the row-wise operators with their targets."""

    def worst(text: str, condition: Callable[[Case], bool], ratio: Callable[[Row], float | None]) -> Target:
        found = [(value, row.case) for row in rows if condition(row.case) and (value := ratio(row)) is not None]
        return worst_target(text, 1, found, lambda case: case.name)

    def against_torch(row: Row) -> float | None:
        return row.speedup(TORCH)

    return [
        _price(rows),
        worst(
            "64 × 128 without gradients, against torch's kernel",
            lambda case: case.mode != AUTOGRAD and (case.shape, case.dim) == SMALL_LAYOUTS[1],
            against_torch,
        ),
        worst("forward and backward, against torch", lambda case: case.mode == AUTOGRAD, against_torch),
        worst("the same with torch's threads awake", lambda case: case.mode == AUTOGRAD, awake_ratio),
    ]


def _price(rows: Sequence[Row[Case]]) -> Target:
    text, required = "tensors, over NumPy arrays, 8 × 8", f"≤ {1e6 * PRICE:g} µs"
    cases = [row for row in rows if ARRAYS in row.seconds and (row.case.shape, row.case.dim) == SMALL_LAYOUTS[0]]
    if not cases:
        return Target(text, required, "–", None)
    seconds, case = max(((row.own - row.seconds[ARRAYS], row.case) for row in cases), key=lambda item: item[0])
    return Target(text, required, f"{1e6 * seconds:.2f} µs ({case.name})", seconds <= PRICE)


def loss_targets(rows: Sequence[Row[LinearCase]]) -> list[Target]:
    """Compare the loss with its targets relative to torch's chunked loss."""
    targets = []
    for dtype, least in (("float32", 2.0), ("bfloat16", 3.0)):
        ratios = [ratio for row in rows if row.case.dtype == dtype and (ratio := row.speedup("torch chunked"))]
        text = f"loss and gradients, {dtype}, against torch's in chunks"
        measured = ratio_text(min(ratios)) if ratios else "–"
        targets.append(Target(text, f"≥ {ratio_text(least)}", measured, min(ratios) >= least if ratios else None))
    return targets
