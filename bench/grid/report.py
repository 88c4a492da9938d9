"""Tables of the grid's results: means, shares of problems in which a rival is faster, the worst problems."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from ascend_grad import _cpu

from ..dtypes import DTYPES, DTYPES_OF_16_BITS
from ..results import OWN, Row
from ..tables import DASH, milliseconds, percent, table, times
from . import rivals
from .layouts import LAYOUTS
from .problems import OPERATORS
from .results import GridResults

RIVALS = {"NumPy": rivals.NUMPY, "NumPy, widened": rivals.WIDENED, "SciPy": rivals.SCIPY, "torch": rivals.TORCH}
#: Ratios (a rival's time over ours) below which ours is slower, and clearly slower.
BEHIND, FAR_BEHIND = 1.0, 0.9
#: Share of a limit of the machine from which on a call counts as limited by the machine.
AT_THE_LIMIT = 0.85
WORST = 25
CAPTION = 'Means are geometric; "widened" is NumPy on float32 copies of 16-bit arrays, made beforehand.\n'


def limit_share(row: Row) -> float | None:
    """Return a call's speed as a fraction of the limit set by memory or arithmetic, or None if neither is known."""
    limits = [min((row.seconds[side] for side in group if side in row.seconds), default=0.0) for group in rivals.LIMITS]
    return max(limits) / row.own if any(limits) else None


def is_at_the_limit(row: Row) -> bool:
    return (limit_share(row) or 0) >= AT_THE_LIMIT


# ---- summary ---------------------------------------------------------------------------------------------------------


def groups(results: Sequence[GridResults]) -> dict[str, list[Row]]:
    """Return the rows of results by group, of which each has a line in the summary."""
    rows = [row for found in results for row in found.rows]
    rowwise = [row for found in results for row in found.rowwise]
    linear = [row for found in results for row in found.linear]

    def having(rows: Sequence[Row], attribute: str, value: str) -> list[Row]:
        return [row for row in rows if getattr(row.case, attribute) == value]

    found = {"all": rows}
    if len(results) > 1:
        found |= {f"seed {grid.seed}": grid.rows for grid in results}
    for title, part in (("row-wise", rowwise), ("linear", linear)):
        found[title] = part
        found |= {f"{title}, {dtype}": having(part, "dtype", dtype) for dtype in DTYPES}
    found |= {f"row-wise, {layout}": having(rowwise, "arrangement", layout) for layout in LAYOUTS}
    found |= {operator: having(rows, "operator", operator) for operator in OPERATORS}
    return {title: part for title, part in found.items() if part}


def summary_block(results: Sequence[GridResults]) -> str:
    """Make a table of the geometric means and the shares of slower problems, for every group and rival."""
    return summary_table(groups(results), RIVALS)


def summary_table(groups: Mapping[str, Sequence[Row]], rivals: Mapping[str, Sequence[str]]) -> str:
    """Make a table with a line for every group of rows, from the names of each rival's sides."""
    header = ["rival's time / ours", "problems"]
    for rival in rivals:
        header += [rival, f"< {BEHIND:g}", f"< {FAR_BEHIND:g}"]
    lines = []
    for title, rows in groups.items():
        line = [title, str(len(rows))]
        for names in rivals.values():
            line += _summary([ratio for ratio, _ in _ratios(rows, names)])
        lines.append(line)
    return table(header, lines)


def overview_block(results: Sequence[GridResults]) -> str:
    """Make a short summary: a line for each family of operators and rival."""
    families: dict[str, list[Row]] = {
        "row-wise": [row for found in results for row in found.rowwise],
        "linear": [row for found in results for row in found.linear],
    }
    lines = [
        [f"{family}, {rival}", str(len(ratios)), *_summary(ratios)]
        for family, rows in families.items()
        for rival, names in RIVALS.items()
        if (ratios := [ratio for ratio, _ in _ratios(rows, names)])
    ]
    header = ["operators, rival", "problems", "rival's time / ours", "ours slower", "by more than a tenth"]
    return f"{CAPTION}\n{table(header, lines)}"


def _summary(ratios: Sequence[float]) -> list[str]:
    """Format the geometric mean of ratios, and the shares below BEHIND and below FAR_BEHIND."""
    mean = statistics.geometric_mean(ratios) if ratios else None
    return [times(mean), *(percent(share_below(ratios, bound)) for bound in (BEHIND, FAR_BEHIND))]


def share_below(ratios: Sequence[float], bound: float) -> float | None:
    return sum(ratio < bound for ratio in ratios) / len(ratios) if ratios else None


# ---- variants --------------------------------------------------------------------------------------------------------


def variants_block(results: Sequence[GridResults]) -> str:
    """Make a table of the variants in linear problems of 16 bits: how many times as long others take."""
    rows = [row for found in results for row in found.linear]
    sides = {side for row in rows for side in row.seconds}
    names = [variant for variant in _cpu.VARIANTS if rivals.side_of(variant) in sides]
    if not names:
        return "These results have no times of each variant, which the benchmark got later.\n"
    header = ["rival's time / ours", "problems"]
    for rival in ("NumPy", "torch"):
        header += [rival, f"< {BEHIND:g}", f"< {FAR_BEHIND:g}"]
    lines = []
    for dtype in DTYPES_OF_16_BITS:
        for variant in names:
            side = rivals.side_of(variant)
            found = [row for row in rows if row.case.dtype == dtype and side in row.seconds]
            line = [f"{dtype}, {variant}", str(len(found))]
            for rival in ("NumPy", "torch"):
                ratios = [best / row.seconds[side] for row in found if (best := _best(row, RIVALS[rival])) is not None]
                line += _summary(ratios)
            lines.append(line)
    return table(header, lines)


# ---- single problems -------------------------------------------------------------------------------------------------


def worst_block(rows: Sequence[Row], names: Sequence[str], count: int = WORST) -> str:
    """Make a table of the problems with the lowest ratios, with the times of all sides."""
    found = sorted(_ratios(rows, names), key=lambda item: item[0])[:count]
    if not found:
        return "Nothing was measured.\n"
    return _table_of_times([(times(ratio), row) for ratio, row in found])


def lost_block(rows: Sequence[Row]) -> str:
    """Make a table of problems in which NumPy is clearly faster, and ours is not limited by memory or arithmetic."""
    lost = [
        (ratio, row) for ratio, row in _ratios(rows, rivals.NUMPY) if ratio < FAR_BEHIND and not is_at_the_limit(row)
    ]
    if not lost:
        return "None.\n"
    return _table_of_times([(times(ratio), row) for ratio, row in sorted(lost, key=lambda item: item[0])])


def _ratios(rows: Sequence[Row], names: Sequence[str]) -> list[tuple[float, Row]]:
    return [(ratio, row) for row in rows if (ratio := row.speedup(*names)) is not None]


def _table_of_times(items: Sequence[tuple[str, Row]]) -> str:
    columns: dict[str, Callable[[Row], str]] = {"ms": lambda row: milliseconds(row.seconds[OWN])}
    for rival, names in RIVALS.items():
        columns[rival] = lambda row, names=names: milliseconds(_best(row, names))  # type: ignore[misc]
    columns["of the limit"] = limit_text
    return table(
        ["problem", "ratio", *columns],
        ([row.case.name, ratio, *(text(row) for text in columns.values())] for ratio, row in items),
    )


def _best(row: Row, names: Sequence[str]) -> float | None:
    return min((row.seconds[name] for name in names if name in row.seconds), default=None)


def limit_text(row: Row) -> str:
    share = limit_share(row)
    return DASH if share is None else f"{percent(share)}{' *' if is_at_the_limit(row) else ''}"


def blocks(results: Sequence[GridResults]) -> dict[str, str]:
    """Make all tables of the grids, by name of the block."""
    rows = [row for found in results for row in found.rows]
    return {
        "grid_summary": summary_block(results),
        "grid_variants": variants_block(results),
        "grid_lost": lost_block(rows),
        "grid_worst_numpy": worst_block(rows, rivals.NUMPY),
        "grid_worst_widened": worst_block(rows, rivals.WIDENED),
        "grid_worst_torch": worst_block(rows, rivals.TORCH),
    }
