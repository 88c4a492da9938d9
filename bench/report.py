"""Results as text: the tables and the chart, and the blocks of the documents that are generated from them.

A block is what stands between ``<!-- bench:NAME:begin -->`` and ``<!-- bench:NAME:end -->``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from .cases import BACKWARD, DTYPES, FORWARD, LAYOUTS, MASKED, Case, layout_text
from .figures import save
from .grid import report as grid_report
from .grid.chart import chart as grid_chart
from .grid.results import GridResults
from .linear.report import memory_block
from .linear.report import rows_block as linear_rows_block
from .linear.targets import memory_targets
from .linear.targets import speed_targets as linear_targets
from .results import FOLDER, Results, Row
from .rivals import RIVALS
from .tables import DASH, milliseconds, percent, table, times
from .targets import Target, accuracy_targets, speed_targets

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
DOCUMENTS = (ROOT / "README.md", DOCS / "benchmark.md", DOCS / "accuracy.md")
CHART, GRID_CHART = DOCS / "benchmark.svg", DOCS / "grid.svg"
SPEED_FILE, ACCURACY_FILE, LINEAR_FILE = (
    FOLDER / f"{name}.json" for name in ("speed", "accuracy", "linear")
)  #: Of the random grids, by seed.
GRID_FILE = "grid_{}.json"
#: The grids' tables, and what they show.
GRID_TABLES = {
    "grid_summary": (
        "How many times longer others take (geometric means), and the share of problems in which ours is slower (< 1), "
        "and by more than a tenth (< 0.9):"
    ),
    "grid_lost": "More than a tenth behind NumPy, and not at a limit of the machine (times in ms, here and below):",
    "grid_worst_numpy": "Lowest against NumPy (*: at a limit of the machine):",
    "grid_worst_torch": "Lowest against torch:",
}

_BLOCK = re.compile(r"(<!-- bench:(?P<name>\w+):begin -->\n).*?(<!-- bench:(?P=name):end -->)", re.DOTALL)


# ---- tables ----------------------------------------------------------------------------------------------------------


def machine_block(results: Results | GridResults) -> str:
    """Where and how it was measured, in one paragraph."""
    facts = "; ".join(f"{name} {value}" for name, value in results.machine.items())
    text = f"Measured with {results.num_threads} threads on this machine: {facts}."
    if results.rows:
        others = max(row.others for row in results.rows)
        text += f" Other processes kept at most {others:.2f} cores busy meanwhile."
    return f"{text}\n"


def rows_block(rows: Sequence[Row[Case]]) -> str:
    """Every case in a line: own time, then how many times longer the others take."""
    return table(
        ["case", "ms", *RIVALS, "of stream"],
        (
            [row.case.name, milliseconds(row.own), *(times(row.speedup(side)) for side in RIVALS), percent(row.share)]
            for row in rows
        ),
    )


def losses_block(rows: Sequence[Row[Case]]) -> str:
    """The cases in which another side is faster."""
    lost = [row for row in rows if any((row.speedup(side) or 1) < 1 for side in RIVALS)]
    return rows_block(lost) if lost else "None.\n"


class _Index:
    """Rows by case; a cell of a case that was not measured is a dash."""

    def __init__(self, rows: Iterable[Row[Case]]):
        self._rows = {row.case: row for row in rows}

    def cell(self, case: Case, text: Callable[[Row[Case]], str]) -> str:
        return text(self._rows[case]) if case in self._rows else DASH

    def layouts(self, *operators: str) -> list[Case]:
        """One case for every layout that was measured with one of the operators, in order."""
        found = {(c.shape, c.dim): c for c in reversed(self._rows) if c.operator in operators and c.mode == "out"}
        return list(reversed(found.values()))


def speed_block(rows: Sequence[Row[Case]]) -> str:
    """float32 into an array at hand: milliseconds, and the others relative to them."""
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
    """Both backward operators against torch, for every dtype, with and without an array at hand."""
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
    """The forward and the masked operators against torch."""
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


def targets_block(targets: Iterable[Target]) -> str:
    verdicts = {True: "met", False: "**NOT met**", None: "not measured"}
    return table(
        ["target", "required", "measured, at worst", "verdict"],
        ([target.text, target.required, target.measured, verdicts[target.met]] for target in targets),
    )


def accuracy_block(results: Results) -> str:
    """The largest errors, a column for every CPU variant."""
    variants = list(dict.fromkeys(worst.variant for worst in results.accuracy))
    pairs = dict.fromkeys((worst.operator, worst.dtype) for worst in results.accuracy)
    lines = []
    for operator, dtype in pairs:
        found = {w.variant: w for w in results.accuracy if (w.operator, w.dtype) == (operator, dtype)}
        worst = max(found.values(), key=lambda item: item.error)
        cells = [f"{found[name].error:.2f}" if name in found else DASH for name in variants]
        lines.append([f"{operator} {dtype}", *cells, f"{worst.values}, n = {worst.length}"])
    return table(["largest error / bound", *variants, "where"], lines)


# ---- the chart -------------------------------------------------------------------------------------------------------


def chart(rows: Sequence[Row[Case]], path: str | Path) -> None:
    """Draw how many times longer NumPy and torch take, for float32."""
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


# ---- documents -------------------------------------------------------------------------------------------------------


def blocks(speed: Results | None, accuracy: Results | None, linear: Results | None = None) -> dict[str, str]:
    """Every block that these results can fill, by name: row-wise operators, errors, linear operators."""
    found: dict[str, str] = {}
    targets: list[Target] = []
    if speed:
        targets += speed_targets(speed.speed)
        found |= {
            "machine": machine_block(speed),
            "speed": speed_block(speed.speed),
            "chart": f"![Speed of named cases beside NumPy and PyTorch]({CHART.name})\n",
            "torch": torch_block(speed.speed),
            "others": others_block(speed.speed),
            "losses": losses_block(speed.speed),
            "rows": rows_block(speed.speed),
        }
    if accuracy:
        targets += accuracy_targets(accuracy.accuracy)
        found["accuracy"] = accuracy_block(accuracy)
    if targets:
        found["targets"] = targets_block(targets)
    if linear:
        targets = [*linear_targets(linear.linear, linear.machine.get("variant", "")), *memory_targets(linear.memory)]
        found |= {
            "linear_machine": machine_block(linear),
            "linear_rows": linear_rows_block(linear.linear),
            "linear_targets": targets_block(targets),
        }
        if linear.memory:
            found["linear_memory"] = memory_block(linear.memory)
    return found


def grid_blocks(grids: Sequence[GridResults]) -> dict[str, str]:
    """The blocks of the random grids, all seeds together."""
    if not grids:
        return {}
    contents = {name: f"{GRID_TABLES[name]}\n\n{table}" for name, table in grid_report.blocks(grids).items()}
    contents["grid_machine"] = "\n".join(
        f"Seed {grid.seed}, {grid.count} problems. {machine_block(grid)}" for grid in grids
    )
    text = "Random problems beside NumPy and PyTorch"
    contents["grid_chart"] = f"![{text}]({GRID_CHART.name})\n"
    contents["grid_overview"] = f"![{text}](docs/{GRID_CHART.name})\n\n{grid_report.overview_block(grids)}"
    return contents


def filled(text: str, contents: dict[str, str]) -> str:
    """A document with its blocks filled; those without contents stay as they are."""

    def fill(match: re.Match[str]) -> str:
        content = contents.get(match["name"])
        return match[0] if content is None else f"{match[1]}\n{content}\n{match[3]}"

    return _BLOCK.sub(fill, text)


def kept() -> tuple[Results | None, Results | None, Results | None]:
    """The results that are kept with the sources: speed, accuracy, and the linear operators."""
    speed, accuracy, linear = (
        Results.from_json(path.read_text()) if path.exists() else None
        for path in (SPEED_FILE, ACCURACY_FILE, LINEAR_FILE)
    )
    return speed, accuracy, linear


def keep_grid(grid: GridResults) -> None:
    """Keep a random grid with the sources, in place of an earlier one of the same seed."""
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / GRID_FILE.format(grid.seed)).write_text(grid.to_json())


def kept_grids() -> list[GridResults]:
    """The random grids that are kept with the sources, by seed."""
    found = [GridResults.from_json(path.read_text()) for path in FOLDER.glob(GRID_FILE.format("*"))]
    return sorted(found, key=lambda grid: grid.seed)


def contents_of_documents() -> dict[str, str]:
    """All blocks, from the results that are kept with the sources."""
    return blocks(*kept()) | grid_blocks(kept_grids())


def update_documents() -> None:
    """Write the blocks and the charts anew from the results that are kept with the sources."""
    contents = contents_of_documents()
    for path in DOCUMENTS:
        path.write_text(filled(path.read_text(), contents))
    speed, _, _ = kept()
    if speed:
        chart(speed.speed, CHART)
    if grids := kept_grids():
        grid_chart(grids, GRID_CHART)
