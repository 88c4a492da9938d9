"""A chart of the grid, with a point for every problem and rival."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from ..figures import save
from ..results import Row
from . import rivals
from .results import GridResults

RIVALS = (("NumPy", rivals.NUMPY, "#7a9cc6"), ("torch", rivals.TORCH, "#e07a3f"))


def chart(grids: Sequence[GridResults], path: str | Path) -> None:
    """Draw the times of NumPy and torch, as multiples of ours, over the size of the problem."""
    from matplotlib.figure import Figure

    kinds: tuple[tuple[str, str, list[Row]], ...] = (
        ("row-wise operators", "elements", [row for grid in grids for row in grid.rowwise]),
        ("linear operators", "BT × V × H", [row for grid in grids for row in grid.linear]),
    )
    panels = [kind for kind in kinds if kind[2]]
    figure = Figure(figsize=(5 * len(panels), 4.5), layout="constrained", facecolor="white")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for ax, (title, size, part) in zip(axes, panels):
        for label, names, color in RIVALS:
            found = [(row.case.shape, ratio) for row in part if (ratio := row.speedup(*names)) is not None]
            sizes, ratios = [math.prod(shape) for shape, _ in found], [ratio for _, ratio in found]
            if found:
                ax.scatter(sizes, ratios, s=10, alpha=0.6, color=color, label=label, linewidths=0)
        ax.axhline(1, color="black", linewidth=1)
        ax.set(title=title, xlabel=size, xscale="log", yscale="log")
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(frameon=False, loc="upper right")
    axes[0].set_ylabel("time, in times that of ascend_grad")
    save(figure, path)
