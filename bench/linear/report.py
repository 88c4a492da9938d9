"""Tables of the linear operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..results import OWN, Growth, Row
from ..tables import DASH, milliseconds, percent, table, times
from .cases import GRADIENT, LARGE_SHAPES, WHOLE, LinearCase
from .sides import SIDES, UNFILTERED
from .targets import of_yardstick

RIVALS = [side for side in SIDES if side != OWN]


def rows_block(rows: Sequence[Row[LinearCase]]) -> str:
    """Every case in a line: own time and rate, then how many times longer the others take."""
    return _rows([(row.case.name, row) for row in rows], RIVALS)


def speed_block(rows: Sequence[Row[LinearCase]]) -> str:
    """The gradient of large problems alone, and the whole loss."""
    titles = {GRADIENT: "gradient", WHOLE: "loss and gradients"}
    return _rows(
        [
            (f"{titles[row.case.operator]}, {row.case.dtype}, {row.case.layout}", row)
            for row in rows
            if row.case.operator in titles
            and row.case.mode in ("recomputed", "loss and gradients")
            and row.case.shape in LARGE_SHAPES
            and not row.case.variant
        ],
        [side for side in RIVALS if side != UNFILTERED],
    )


def _rows(rows: Sequence[tuple[str, Row[LinearCase]]], sides: Sequence[str]) -> str:
    return table(
        ["case", "ms", "GFLOP/s", "of BLAS", *sides],
        (
            [
                name,
                milliseconds(row.own),
                _rate(row.case.operations / row.own / 1e9),
                percent(of_yardstick(row)),
                *(times(row.speedup(side)) for side in sides),
            ]
            for name, row in rows
        ),
    )


def memory_block(memory: Sequence[Growth]) -> str:
    """Megabytes beyond the results, a line for every call."""
    found = {(growth.case, growth.side): growth for growth in memory}
    sides = [side for side in SIDES if any(growth.side == side for growth in memory)]

    def cell(case: LinearCase, side: str, text: Callable[[Growth], str]) -> str:
        growth = found.get((case, side))
        return DASH if growth is None else text(growth)

    return table(
        ["MiB beyond the results", "promised", *sides],
        (
            [
                case.name,
                cell(case, OWN, lambda growth: _mebibytes(growth.promise)),
                *(cell(case, side, lambda growth: _mebibytes(growth.bytes)) for side in sides),
            ]
            for case in dict.fromkeys(growth.case for growth in memory)
        ),
    )


def _rate(billions: float) -> str:
    return f"{billions:.3g}" if billions < 100 else f"{billions:.0f}"


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f}"
