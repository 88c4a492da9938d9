"""Tables of the results of the linear operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..dtypes import DTYPES_OF_16_BITS
from ..results import OWN, Row
from ..tables import DASH, milliseconds, percent, table, times
from .cases import LinearCase
from .measure import Growth
from .rivals import SIDES
from .targets import of_yardstick

RIVALS = [side for side in SIDES if side != OWN]
NOT_BY_VARIANT = "These results have no cases of 16 bits on each variant of the CPU, which the benchmark got later."


def rows_block(rows: Sequence[Row[LinearCase]]) -> str:
    """Make a table with a line for every case: our time and rate, then the others' times as multiples of ours.

    If no case of 16 bits has a variant, a sentence says so.
    """
    is_by_variant = any(row.case.variant and row.case.dtype in DTYPES_OF_16_BITS for row in rows)
    return ("" if is_by_variant else f"{NOT_BY_VARIANT}\n\n") + table(
        ["case", "ms", "GFLOP/s", "of BLAS", *RIVALS],
        (
            [
                row.case.name,
                milliseconds(row.own),
                _rate(row.case.operations / row.own / 1e9),
                percent(of_yardstick(row)),
                *(times(row.speedup(side)) for side in RIVALS),
            ]
            for row in rows
        ),
    )


def memory_block(memory: Sequence[Growth]) -> str:
    """Make a table of the memory of calls in addition to their results, with a line for every call."""
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
