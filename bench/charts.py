"""Pictures of results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .case import BACKWARD, FRESH, OUT, Case, layout_text
from .cases import ROWWISE_LAYOUTS
from .results import NUMPY, TORCH, Results, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, RED, LIGHT_RED = "#7a9cc6", "#e07a3f", "#f2c29b"


def speed_chart(rows: Sequence[Row], path: str | Path) -> None:
    """Draw the times of NumPy and torch as multiples of ours, for float32."""
    found = {row.case: row for row in rows}
    bars = (
        ("NumPy", "numpy", OUT, BLUE),
        ("torch", "torch", OUT, RED),
        ("torch, new result", "torch", FRESH, LIGHT_RED),
    )
    layouts = [(s, d) for s, d in ROWWISE_LAYOUTS if Case(BACKWARD[0], "float32", s, OUT, d) in found]
    figure = _figure(10, 1.5 + 0.45 * len(layouts))
    height = 0.8 / len(bars)
    axes = figure.subplots(1, 2, sharey=True, sharex=True)
    for ax, operator in zip(axes, BACKWARD):
        for i, (label, side, mode, color) in enumerate(bars):
            rows_of_bars = [found.get(Case(operator, "float32", shape, mode, dim)) for shape, dim in layouts]
            ratios = [(row.speedup(side) if row else None) or 0 for row in rows_of_bars]
            places = [y + (i - 1) * height for y in range(len(layouts))]
            ax.barh(places, ratios, height, label=label, color=color)
        ax.axvline(1, color="black", linewidth=1)
        ax.set(title=operator, xlabel="time, in times that of ascend_grad")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(layouts)), [layout_text(*layout) for layout in layouts])
    axes[0].invert_yaxis()
    axes[1].legend(frameon=False, loc="lower right")
    _save(figure, path)


def grid_chart(grids: Sequence[Results], path: str | Path) -> None:
    """Draw a point for every random problem and rival: its time as a multiple of ours, over the size of the problem."""
    kinds = (("row-wise operators", "elements", "rowwise"), ("linear operators", "BT × V × H", "linear"))
    panels = [(*kind, rows) for kind in kinds if (rows := [row for grid in grids for row in grid[kind[2]]])]
    figure = _figure(5 * len(panels), 4.5)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for ax, (title, size, _, rows) in zip(axes, panels):
        for label, names, color in (("NumPy", NUMPY, BLUE), ("torch", TORCH, RED)):
            found = [(row.case.shape, ratio) for row in rows if (ratio := row.speedup(*names)) is not None]
            sizes, ratios = [math.prod(shape) for shape, _ in found], [ratio for _, ratio in found]
            if found:
                ax.scatter(sizes, ratios, s=10, alpha=0.6, color=color, label=label, linewidths=0)
        ax.axhline(1, color="black", linewidth=1)
        ax.set(title=title, xlabel=size, xscale="log", yscale="log")
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(frameon=False, loc="upper right")
    axes[0].set_ylabel("time, in times that of ascend_grad")
    _save(figure, path)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def _save(figure: Figure, path: str | Path) -> None:
    """Write a figure without a date and random identifiers, so that equal results give equal files."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "ascend_grad", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None} if str(path).endswith(".svg") else None)
