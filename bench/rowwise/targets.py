"""Targets of the row-wise operators, and the comparison of measured values with them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

from ..dtypes import NARROW_DTYPES
from ..results import NUMPY, Row
from ..targets import Target, dispatch_target, ratio_text, worst_target
from .cases import (
    BACKWARD,
    FIRST_LAYOUTS,
    FORWARD,
    LAST_LAYOUTS,
    MASKED,
    MASKED_BACKWARD,
    MIDDLE_LAYOUTS,
    SMALL_LAYOUTS,
    Case,
)

#: Least elements of float32 arrays that do not stay in any cache between two calls.
LARGE = 8_000_000

Condition = Callable[[Case], bool]


def speed_targets(rows: Sequence[Row[Case]]) -> list[Target]:
    """Compare the worst case of each group with its target for the speed."""
    torch, formula = ("torch",), ("numpy",)
    stream = ("stream", "stream non-temporal")

    def large(*groups: Iterable) -> Condition:
        layouts = [layout for group in groups for layout in group]
        return lambda c: _backward(c, "out") and c.dtype == "float32" and c.size >= LARGE and _layout(c) in layouts

    def worst(text: str, least: float, sides: tuple[str, ...], condition: Condition, unit: str = "×") -> Target:
        found = [(ratio, row.case) for row in rows if condition(row.case) and (ratio := row.speedup(*sides))]
        return worst_target(text, least, found, lambda case: f"{case.operator} {case.dtype}, {case.layout}", unit)

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
        worst("every call, against NumPy's best form", 1, NUMPY, lambda c: c.mode != "idle"),
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


def _mean(text: str, least: float, rows: Sequence[Row[Case]], condition: Condition) -> Target:
    ratios = [ratio for row in rows if condition(row.case) and (ratio := row.speedup("torch"))]
    if not ratios:
        return Target(text, f"≥ {ratio_text(least)}", "–", None)
    mean = statistics.geometric_mean(ratios)
    return Target(text, f"≥ {ratio_text(least)}", ratio_text(mean), mean >= least)


def _backward(case: Case, mode: str) -> bool:
    return case.operator in BACKWARD and case.mode == mode


def _main(case: Case, mode: str) -> bool:
    return _backward(case, mode) and case.dtype in NARROW_DTYPES


def _layout(case: Case) -> tuple[tuple[int, ...], int]:
    return case.shape, case.dim
