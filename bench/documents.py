"""The blocks of the documents that are generated from results, which the command prints, too.

A block is the text between ``<!-- bench:NAME:begin -->`` and ``<!-- bench:NAME:end -->``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from .grid import report as grid_report
from .grid.chart import chart as grid_chart
from .grid.results import GridResults
from .linear import report as linear_report
from .linear.targets import memory_targets
from .linear.targets import speed_targets as linear_targets
from .losses import report as losses_report
from .losses.results import LossResults
from .losses.targets import speed_targets as losses_targets
from .named import Results
from .parallel import report as parallel_report
from .parallel.measure import ParallelResults
from .pytorch import report as tensors_report
from .pytorch.targets import call_targets, loss_targets
from .results import FOLDER
from .rowwise import report as rowwise_report
from .rowwise.targets import speed_targets
from .tables import DASH, table
from .targets import Target, accuracy_targets, targets_block

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
DOCUMENTS = (
    ROOT / "README.md",
    *(DOCS / f"{name}.md" for name in ("benchmark", "accuracy", "torch", "scaling", "losses")),
)
#: The pictures, which are drawn into the folder of the pages when these are built.
CHART, GRID_CHART = "benchmark.svg", "grid.svg"
SPEED_FILE, ACCURACY_FILE, LINEAR_FILE, TENSORS_FILE = (
    FOLDER / f"{name}.json" for name in ("speed", "accuracy", "linear", "tensors")
)
PARALLEL_FILE, LOSSES_FILE = FOLDER / "parallel.json", FOLDER / "losses.json"
#: File names of the random grids, by seed.
GRID_FILE = "grid_{}.json"
#: The caption of the picture of the grids.
GRID_CAPTION = (
    "Each point compares a random problem with one rival: above the line this library is faster, below it the rival."
)
#: The grids' tables by name of the block, with their captions.
GRID_TABLES = {
    "grid_summary": (
        "How many times longer others take (geometric means), and the share of problems in which ours is slower (< 1), "
        "and by more than a tenth (< 0.9):"
    ),
    "grid_variants": (
        "Linear problems of 16 bits on each variant of the CPU, beside PyTorch's own bfloat16 and float16 (geometric "
        "means and shares, as above):"
    ),
    "grid_lost": "More than a tenth behind NumPy, and not at a limit of the machine (times in ms, here and below):",
    "grid_worst_numpy": "Lowest against NumPy (*: at a limit of the machine):",
    "grid_worst_widened": "Lowest against NumPy on float32 copies of 16-bit arrays, made beforehand:",
    "grid_worst_torch": "Lowest against torch:",
}

_BLOCK = re.compile(r"(<!-- bench:(?P<name>\w+):begin -->\n).*?(<!-- bench:(?P=name):end -->)", re.DOTALL)


def machine_block(results: Results | GridResults | LossResults) -> str:
    """Describe the machine and the conditions of the measurements in one paragraph."""
    facts = "; ".join(f"{name} {value}" for name, value in results.machine.items())
    text = f"Measured with {results.num_threads} threads on this machine: {facts}."
    if results.rows:
        others = max(row.others for row in results.rows)
        text += f" Other processes kept at most {others:.2f} cores busy meanwhile."
    return f"{text}\n"


def accuracy_block(results: Results) -> str:
    """Make a table of the largest errors, with a column for every CPU variant."""
    variants = list(dict.fromkeys(worst.variant for worst in results.accuracy))
    pairs = dict.fromkeys((worst.operator, worst.dtype) for worst in results.accuracy)
    lines = []
    for operator, dtype in pairs:
        found = {w.variant: w for w in results.accuracy if (w.operator, w.dtype) == (operator, dtype)}
        worst = max(found.values(), key=lambda item: item.error)
        cells = [f"{found[name].error:.2f}" if name in found else DASH for name in variants]
        lines.append([f"{operator} {dtype}", *cells, f"{worst.values}, n = {worst.length}"])
    return table(["largest error / bound", *variants, "where"], lines)


def blocks(
    speed: Results | None, accuracy: Results | None, linear: Results | None = None, tensors: Results | None = None
) -> dict[str, str]:
    """Make every block that these results can fill, by name: row-wise operators, errors, linear operators, tensors."""
    found: dict[str, str] = {}
    targets: list[Target] = []
    if speed:
        targets += speed_targets(speed.speed)
        found |= {
            "machine": machine_block(speed),
            "speed": rowwise_report.speed_block(speed.speed),
            "chart": f"![Speed of named cases compared with NumPy and PyTorch]({CHART})\n",
            "torch": rowwise_report.torch_block(speed.speed),
            "others": rowwise_report.others_block(speed.speed),
            "losses": rowwise_report.losses_block(speed.speed),
            "rows": rowwise_report.rows_block(speed.speed),
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
            "linear_rows": linear_report.rows_block(linear.linear),
            "linear_targets": targets_block(targets),
        }
        if linear.memory:
            found["linear_memory"] = linear_report.memory_block(linear.memory)
    if tensors:
        found |= {
            "tensors_machine": machine_block(tensors),
            "tensors_calls": tensors_report.calls_block(tensors.speed),
            "tensors_autograd": tensors_report.autograd_block(tensors.speed),
            "tensors_losses": tensors_report.losses_block(tensors.linear),
            "tensors_targets": targets_block([*call_targets(tensors.speed), *loss_targets(tensors.linear)]),
        }
        if tensors.memory:
            found["tensors_memory"] = linear_report.memory_block(tensors.memory)
    return found


def grid_blocks(grids: Sequence[GridResults]) -> dict[str, str]:
    """Make the blocks of the random grids, from all seeds together."""
    if not grids:
        return {}
    contents = {name: f"{GRID_TABLES[name]}\n\n{table}" for name, table in grid_report.blocks(grids).items()}
    contents["grid_machine"] = "\n".join(
        f"Seed {grid.seed}, {grid.count} problems. {machine_block(grid)}" for grid in grids
    )
    contents["grid_chart"] = f"![Random problems compared with NumPy and PyTorch]({GRID_CHART})\n\n{GRID_CAPTION}\n"
    contents["grid_overview"] = grid_report.overview_block(grids)
    return contents


def filled(text: str, contents: dict[str, str]) -> str:
    """Return a document with its blocks filled; blocks without contents stay as they are."""

    def fill(match: re.Match[str]) -> str:
        content = contents.get(match["name"])
        return match[0] if content is None else f"{match[1]}\n{content}\n{match[3]}"

    return _BLOCK.sub(fill, text)


def kept() -> tuple[Results | None, Results | None, Results | None, Results | None]:
    """Read the results in the source tree: speed, accuracy, the linear operators, and tensors."""
    speed, accuracy, linear, tensors = (
        Results.from_json(path.read_text(encoding="utf-8")) if path.exists() else None
        for path in (SPEED_FILE, ACCURACY_FILE, LINEAR_FILE, TENSORS_FILE)
    )
    return speed, accuracy, linear, tensors


def keep_grid(grid: GridResults) -> None:
    """Write a random grid to the source tree, replacing an earlier one of the same seed."""
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / GRID_FILE.format(grid.seed)).write_text(grid.to_json(), encoding="utf-8")


def kept_grids() -> list[GridResults]:
    """Read the random grids in the source tree, sorted by seed."""
    return _grids(FOLDER)


def parallel_blocks() -> dict[str, str]:
    """Make the blocks of the losses over ranks, from the results in the source tree."""
    if not PARALLEL_FILE.exists():
        return {}
    results = ParallelResults.from_json(PARALLEL_FILE.read_text(encoding="utf-8"))
    facts = "; ".join(f"{name} {value}" for name, value in results.machine.items())
    sums = f"Sums over the processes take what {parallel_report.network_text(results)} would."
    return {
        "parallel_machine": f"Measured on this machine: {facts}. {sums}\n",
        "parallel_measured": parallel_report.measured_block(results),
        "parallel_model": parallel_report.model_block(results),
    }


def loss_blocks(results: LossResults) -> dict[str, str]:
    """Make the blocks of the losses that these results can fill."""
    return {
        "loss_machine": machine_block(results),
        "loss_targets": targets_block(losses_targets(results)),
    } | losses_report.blocks(results)


def kept_loss_blocks() -> dict[str, str]:
    """Make the blocks of the losses from the results in the source tree, or none without results."""
    return loss_blocks(LossResults.from_json(LOSSES_FILE.read_text(encoding="utf-8"))) if LOSSES_FILE.exists() else {}


def contents_of_documents() -> dict[str, str]:
    """Make all blocks, from the results in the source tree."""
    return blocks(*kept()) | grid_blocks(kept_grids()) | parallel_blocks() | kept_loss_blocks()


def update_documents() -> None:
    """Update the blocks of the documents from the results in the source tree."""
    contents = contents_of_documents()
    for path in DOCUMENTS:
        path.write_text(filled(path.read_text(encoding="utf-8"), contents), encoding="utf-8")


def draw_charts(results: Path, folder: Path) -> None:
    """Draw the pictures of the documents.

    Parameters
    ----------
    results : Path
        The folder with the results: the wheel, whose code draws, does without them.
    folder : Path
        The folder of the pages.
    """
    speed = Results.from_json((results / SPEED_FILE.name).read_text(encoding="utf-8"))
    rowwise_report.chart(speed.speed, folder / CHART)
    grid_chart(_grids(results), folder / GRID_CHART)


def _grids(folder: Path) -> list[GridResults]:
    found = [GridResults.from_json(path.read_text(encoding="utf-8")) for path in folder.glob(GRID_FILE.format("*"))]
    return sorted(found, key=lambda grid: grid.seed)
