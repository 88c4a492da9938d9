"""Tables of the results of losses."""

from __future__ import annotations

from collections.abc import Sequence

from ..dtypes import DTYPES
from ..grid.layouts import LAYOUTS
from ..grid.problems import RowwiseProblem
from ..grid.report import RIVALS, limit_text, summary_table, worst_block
from ..grid.rivals import NUMPY, TORCH
from ..results import Row
from ..tables import milliseconds, percent, table, times
from .cases import RelativeCase
from .results import LossResults
from .targets import LARGE_VOCABULARY

#: The sides beside this library's, by the titles of their columns.
SIDES = {name: RIVALS[name] for name in ("NumPy", "NumPy, widened", "torch")}
#: The tables by name of the block, with their captions.
CAPTIONS = {
    "loss_rows": "Times in ms, and how many times as long others take (*: at a limit of the machine):",
    "loss_lost": "Where NumPy or PyTorch is faster:",
    "loss_drawn": (
        "Random problems: how many times longer others take (geometric means), and the share of problems in which ours "
        "is slower (< 1), and by more than a tenth (< 0.9):"
    ),
    "loss_worst": "Random problems that are lowest against PyTorch (times in ms):",
    "loss_linear": "Times in ms; the relative speed is the time of the other call as a share of ours:",
}


def rows_block(rows: Sequence[Row[RowwiseProblem]]) -> str:
    """Make a table with a line for every case: our time, then the others' times as multiples of ours."""
    return table(
        ["case", "ms", *SIDES, "of the limit"],
        (
            [
                row.case.name,
                milliseconds(row.own),
                *(times(row.speedup(*names)) for names in SIDES.values()),
                limit_text(row),
            ]
            for row in rows
        ),
    )


def lost_block(rows: Sequence[Row[RowwiseProblem]]) -> str:
    """Make a table of the cases in which NumPy or PyTorch is faster."""
    lost = [row for row in rows if (row.speedup(*NUMPY, *TORCH) or 1) < 1]
    return rows_block(lost) if lost else "None.\n"


def drawn_block(rows: Sequence[Row[RowwiseProblem]]) -> str:
    """Make a table of the means of random problems, for every dtype, every layout and a large vocabulary."""
    groups = {"all": rows}
    groups |= {dtype: [row for row in rows if row.case.dtype == dtype] for dtype in DTYPES}
    groups |= {layout: [row for row in rows if row.case.arrangement == layout] for layout in LAYOUTS}
    groups[f"from {LARGE_VOCABULARY:,} classes"] = [
        row for row in rows if row.case.shape[row.case.dim] >= LARGE_VOCABULARY
    ]
    return summary_table({title: part for title, part in groups.items() if part}, SIDES)


def linear_block(rows: Sequence[Row[RelativeCase]]) -> str:
    """Make a table of calls for a linear layer: the times of both calls, and our speed relative to the other's."""
    return table(
        ["call", "ms", "compared with", "ms", "relative speed"],
        (
            [
                row.case.name,
                milliseconds(row.own),
                row.case.other,
                milliseconds(row.seconds[row.case.other]),
                percent(row.speedup(row.case.other)),
            ]
            for row in rows
        ),
    )


def blocks(results: LossResults) -> dict[str, str]:
    """Make all tables that these results can fill, by name of the block."""
    found = {}
    if results.logits:
        found["loss_rows"] = rows_block(results.logits)
    if results.logits or results.drawn:
        found["loss_lost"] = lost_block([*results.logits, *results.drawn])
    if results.drawn:
        found["loss_drawn"] = drawn_block(results.drawn)
        found["loss_worst"] = worst_block(results.drawn, TORCH)
    if results.linear:
        found["loss_linear"] = linear_block(results.linear)
    return {name: f"{CAPTIONS[name]}\n\n{content}" for name, content in found.items()}
