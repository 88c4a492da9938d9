"""What the library is meant to reach, and what was measured: a line for every target, met or not."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .cases import (
    BACKWARD,
    FIRST_LAYOUTS,
    FORWARD,
    LAST_LAYOUTS,
    MASKED,
    MASKED_BACKWARD,
    MIDDLE_LAYOUTS,
    NARROW_DTYPES,
    SMALL_LAYOUTS,
    Case,
)
from .results import Row, Worst
from .rivals import DIRECT

#: float32 arrays of more elements do not stay in any cache between two calls.
LARGE = 8_000_000

Condition = Callable[[Case], bool]


@dataclass(frozen=True)
class Target:
    """One line of the summary; without a value where nothing of it was measured."""

    text: str
    required: str
    measured: str
    met: bool | None


def speed_targets(rows: Sequence[Row[Case]]) -> list[Target]:
    """Every target for the speed; the worst case decides."""
    torch, formula = ("torch",), ("numpy",)
    stream = ("stream", "stream non-temporal")

    def large(*groups: Iterable) -> Condition:
        layouts = [layout for group in groups for layout in group]
        return lambda c: _backward(c, "out") and c.dtype == "float32" and c.size >= LARGE and _layout(c) in layouts

    def worst(text: str, least: float, sides: tuple[str, ...], condition: Condition, unit: str = "×") -> Target:
        found = [(ratio, row.case) for row in rows if condition(row.case) and (ratio := row.speedup(*sides))]
        if not found:
            return Target(text, f"≥ {ratio_text(least, unit)}", "–", None)
        ratio, case = min(found, key=lambda item: item[0])
        where = f"{ratio_text(ratio, unit)} ({case.operator} {case.dtype}, {case.layout})"
        below = sum(ratio < least for ratio, _ in found)
        if below:
            where += f"; {below} of {len(found)} below"
        return Target(text, f"≥ {ratio_text(least, unit)}", where, not below)

    return [
        worst("with `out=`, every case, against torch", 0.95, torch, lambda c: _main(c, "out")),
        _mean("with `out=`, geometric mean, against torch", 1.3, rows, lambda c: _main(c, "out")),
        worst("large float32, last dim, share of the stream", 0.9, stream, large(LAST_LAYOUTS), "%"),
        worst(
            "large float32, other dims, share of the stream", 0.55, stream, large(FIRST_LAYOUTS, MIDDLE_LAYOUTS), "%"
        ),
        worst(
            "with `out=`, from a million elements, against NumPy's formula",
            4,
            formula,
            lambda c: _main(c, "out") and c.size >= 1_000_000,
        ),
        worst(
            "without `out=`, results of 64 MiB, against torch",
            3,
            torch,
            lambda c: _backward(c, "fresh") and c.nbytes == 2**26,
        ),
        worst("without `out=`, every case, against torch", 0.95, torch, lambda c: _backward(c, "fresh")),
        worst(
            "small calls, with and without `out=`, every dtype, against torch",
            1,
            torch,
            lambda c: c.operator in BACKWARD and c.mode != "idle" and _layout(c) in SMALL_LAYOUTS,
        ),
        worst("every call, against NumPy's best form", 1, ("numpy", "numpy dot"), lambda c: c.mode != "idle"),
        worst("one call after 20 ms of idling, against NumPy's formula", 1, formula, lambda c: c.mode == "idle"),
        worst("forward twins, against torch", 0.95, torch, lambda c: c.operator in (*FORWARD, MASKED[1])),
        worst("float64, against torch", 0.95, torch, lambda c: c.dtype == "float64" and c.mode == "out"),
        worst(
            "masked backward, against torch's three calls in turn",
            1.5,
            torch,
            lambda c: c.operator == MASKED_BACKWARD,
        ),
        dispatch_target(rows),
    ]


def accuracy_targets(accuracy: Sequence[Worst]) -> list[Target]:
    text, required = "accuracy: largest error in units of its bound", "≤ 1"
    if not accuracy:
        return [Target(text, required, "–", None)]
    worst = max(accuracy, key=lambda item: item.error)
    where = f"{worst.error:.2f} ({worst.operator} {worst.dtype}, {worst.variant}, {worst.values}, n = {worst.length})"
    return [Target(text, required, where, worst.error <= 1)]


def _mean(text: str, least: float, rows: Sequence[Row[Case]], condition: Condition) -> Target:
    ratios = [ratio for row in rows if condition(row.case) and (ratio := row.speedup("torch"))]
    if not ratios:
        return Target(text, f"≥ {ratio_text(least)}", "–", None)
    mean = statistics.geometric_mean(ratios)
    return Target(text, f"≥ {ratio_text(least)}", ratio_text(mean), mean >= least)


def dispatch_target(rows: Sequence[Row[Any]]) -> Target:
    """What a public function takes beyond that of the backend."""
    text, required = "dispatch, over calling the CPU backend directly", "< 1 µs"
    found = [(row.own - row.seconds[DIRECT], row.case) for row in rows if DIRECT in row.seconds]
    if not found:
        return Target(text, required, "–", None)
    seconds, case = max(found, key=lambda item: item[0])
    where = f"{1e6 * seconds:.2f} µs ({case.operator} {case.dtype}, {case.layout})"
    return Target(text, required, where, seconds < 1e-6)


def _backward(case: Case, mode: str) -> bool:
    return case.operator in BACKWARD and case.mode == mode


def _main(case: Case, mode: str) -> bool:
    return _backward(case, mode) and case.dtype in NARROW_DTYPES


def _layout(case: Case) -> tuple[tuple[int, ...], int]:
    return case.shape, case.dim


def ratio_text(ratio: float, unit: str = "×") -> str:
    """A ratio, for a line of the summary."""
    # Enough digits to tell a target that is just missed from one that is met.
    return f"{100 * ratio:.4g} %" if unit == "%" else f"{ratio:.4g}{unit}"
