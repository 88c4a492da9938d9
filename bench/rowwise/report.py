"""Tables and the chart of the results of the row-wise operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ..dtypes import DTYPES
from ..figures import save
from ..results import Row
from ..tables import DASH, milliseconds, percent, table, times
from .cases import BACKWARD, FORWARD, LAYOUTS, MASKED, Case, layout_text
from .rivals import RIVALS

# ---- tables ----------------------------------------------------------------------------------------------------------


def rows_block(rows: Sequence[Row[Case]]) -> str:
    """Make a table with a line for every case: our time, then the others' times as multiples of ours."""
    return table(
        ["case", "ms", *RIVALS, "of stream"],
        (
            [row.case.name, milliseconds(row.own), *(times(row.speedup(side)) for side in RIVALS), percent(row.share)]
            for row in rows
        ),
    )


def losses_block(rows: Sequence[Row[Case]]) -> str:
    """Make a table of the cases in which another side is faster."""
    lost = [row for row in rows if any((row.speedup(side) or 1) < 1 for side in RIVALS)]
    return rows_block(lost) if lost else "None.\n"


class _Index:
    """An index of rows by case, in which the cell of a case that was not measured is a dash."""

    def __init__(self, rows: Iterable[Row[Case]]):
        self._rows = {row.case: row for row in rows}

    def cell(self, case: Case, text: Callable[[Row[Case]], str]) -> str:
        return text(self._rows[case]) if case in self._rows else DASH

    def layouts(self, *operators: str) -> list[Case]:
        """Return one case for every layout that was measured with one of the operators, in order."""
        found = {(c.shape, c.dim): c for c in reversed(self._rows) if c.operator in operators and c.mode == "out"}
        return list(reversed(found.values()))


def speed_block(rows: Sequence[Row[Case]]) -> str:
    """Make a table of float32 cases with `out`: our milliseconds, and the others' times as multiples of ours."""
    index = _Index(rows)
    columns: dict[str, Callable[[Row[Case]], str]] = {
        "ms": lambda row: milliseconds(row.own),
        "NumPy": lambda row: times(row.speedup("numpy")),
        "torch": lambda row: times(row.speedup("torch")),
        "of stream": lambda row: percent(row.share),
    }
    operators = ("softmax", "log-softmax")
    header = ["float32, with `out=`", *(f"{operator}: {title}" for operator in operators for title in columns)]
    lines = []
    for shape, dim in LAYOUTS:
        cases = [Case(operator, "float32", shape, dim, "out") for operator in BACKWARD]
        lines.append([cases[0].layout, *(index.cell(case, text) for case in cases for text in columns.values())])
    return table(header, lines)


def torch_block(rows: Sequence[Row[Case]]) -> str:
    """Make a table of torch's times as multiples of ours: backward operators, every dtype, with and without `out`."""
    index = _Index(rows)

    def cell(shape: tuple[int, ...], dim: int, dtype: str, mode: str) -> str:
        cases = (Case(operator, dtype, shape, dim, mode) for operator in BACKWARD)
        return " / ".join(index.cell(case, lambda row: times(row.speedup("torch"))) for case in cases)

    modes = {"out": "`out=`", "fresh": "new"}
    header = ["torch's time / ours", *(f"{dtype} {title}" for dtype in DTYPES for title in modes.values())]
    lines = []
    for shape, dim in LAYOUTS:
        cells = (cell(shape, dim, dtype, mode) for dtype in DTYPES for mode in modes)
        lines.append([layout_text(shape, dim), *cells])
    return table(header, lines)


def others_block(rows: Sequence[Row[Case]]) -> str:
    """Make a table of torch's times as multiples of ours for the forward and the masked operators."""
    index = _Index(rows)
    lines = [
        [f"{operator}, {like.layout}"]
        + [
            index.cell(Case(operator, dtype, like.shape, like.dim, "out"), lambda row: times(row.speedup("torch")))
            for dtype in DTYPES
        ]
        for operators in (FORWARD, MASKED)
        for operator in operators
        for like in index.layouts(*operators)
    ]
    return table(["torch's time / ours", *DTYPES], lines)


# ---- the chart -------------------------------------------------------------------------------------------------------


def chart(rows: Sequence[Row[Case]], path: str | Path) -> None:
    """Draw the times of NumPy and torch as multiples of ours, for float32."""
    from matplotlib.figure import Figure

    found = {row.case: row for row in rows}
    bars = (("NumPy", "numpy", "out"), ("torch", "torch", "out"), ("torch, new result", "torch", "fresh"))
    colors = ("#7a9cc6", "#e07a3f", "#f2c29b")
    layouts = [layout for layout in LAYOUTS if Case(BACKWARD[0], "float32", *layout, "out") in found]
    figure = Figure(figsize=(10, 1.5 + 0.45 * len(layouts)), layout="constrained", facecolor="white")
    height = 0.8 / len(bars)
    axes = figure.subplots(1, 2, sharey=True, sharex=True)
    for ax, operator in zip(axes, BACKWARD):
        for i, ((label, side, mode), color) in enumerate(zip(bars, colors)):
            rows_of_bars = [found.get(Case(operator, "float32", *layout, mode)) for layout in layouts]
            ratios = [(row.speedup(side) if row else None) or 0 for row in rows_of_bars]
            places = [y + (i - 1) * height for y in range(len(layouts))]
            ax.barh(places, ratios, height, label=label, color=color)
        ax.axvline(1, color="black", linewidth=1)
        ax.set(title=operator, xlabel="time, in times that of ascend_grad")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(layouts)), [layout_text(*layout) for layout in layouts])
    axes[0].invert_yaxis()
    axes[1].legend(frameon=False, loc="lower right")
    save(figure, path)
