"""Targets of the library: a table with a line for every target, its measured value, and whether it is met."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .results import DIRECT, Row, Worst
from .tables import table


@dataclass(frozen=True)
class Target:
    """One line of the summary. `met` is None if nothing was measured for it."""

    text: str
    required: str
    measured: str
    met: bool | None


def targets_block(targets: Iterable[Target]) -> str:
    verdicts = {True: "met", False: "**NOT met**", None: "not measured"}
    return table(
        ["target", "required", "measured, at worst", "verdict"],
        ([target.text, target.required, target.measured, verdicts[target.met]] for target in targets),
    )


def worst_target(
    text: str, least: float, found: Sequence[tuple[float, Any]], name: Callable[[Any], str], unit: str = "×"
) -> Target:
    """Compare the smallest of the ratios in `found`, which holds pairs of a ratio and its case, with its target."""
    required = f"≥ {ratio_text(least, unit)}"
    if not found:
        return Target(text, required, "–", None)
    value, case = min(found, key=lambda item: item[0])
    below = sum(ratio < least for ratio, _ in found)
    where = f"{ratio_text(value, unit)} ({name(case)})"
    return Target(text, required, f"{where}; {below} of {len(found)} below" if below else where, not below)


def accuracy_targets(accuracy: Sequence[Worst]) -> list[Target]:
    text, required = "accuracy: largest error in units of its bound", "≤ 1"
    if not accuracy:
        return [Target(text, required, "–", None)]
    worst = max(accuracy, key=lambda item: item.error)
    where = f"{worst.error:.2f} ({worst.operator} {worst.dtype}, {worst.variant}, {worst.values}, n = {worst.length})"
    return [Target(text, required, where, worst.error <= 1)]


def dispatch_target(rows: Sequence[Row[Any]]) -> Target:
    """Compare the largest time that a public call adds to the backend's time with its target."""
    text, required = "dispatch, over calling the CPU backend directly", "< 1 µs"
    found = [(row.own - row.seconds[DIRECT], row.case) for row in rows if DIRECT in row.seconds]
    if not found:
        return Target(text, required, "–", None)
    seconds, case = max(found, key=lambda item: item[0])
    where = f"{1e6 * seconds:.2f} µs ({case.operator} {case.dtype}, {case.layout})"
    return Target(text, required, where, seconds < 1e-6)


def ratio_text(ratio: float, unit: str = "×") -> str:
    """Format a ratio for a line of the summary."""
    # Four digits distinguish a target that is just missed from one that is met.
    return f"{100 * ratio:.4g} %" if unit == "%" else f"{ratio:.4g}{unit}"
