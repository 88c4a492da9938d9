"""The blocks of the documents that are generated from results. The command also prints most of them.

A block is the text between ``<!-- bench:NAME:begin -->`` and ``<!-- bench:NAME:end -->``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import report, targets
from .parallel import report as parallel_report
from .parallel.measure import ParallelResults
from .results import FOLDER, Results
from .targets import targets_block

ROOT = Path(__file__).resolve().parents[1]
#: The results in the source tree, by the names of their files. Names of results of random problems contain the seed.
KEPT = ("speed", "accuracy", "linear", "tensors", "losses", "programs", "fit", "classifiers")
GRID, PARALLEL = "grid_{}.json", "parallel.json"
#: Blocks of the documents that the command does not print, as other blocks also show their results.
NOT_PRINTED = (
    *("machine", "speed", "torch", "others", "losses", "linear_machine", "tensors_machine", "loss_machine"),
    "program_machine",
    *("grid_machine", "grid_overview", "classifier_machine"),
)


def documents_below(root: Path) -> tuple[Path, ...]:
    """List the documents with blocks in the source tree ``root``."""
    docs = root / "docs"
    return (
        root / "README.md",
        *(docs / f"{name}.md" for name in ("benchmark", "fitting", "torch", "scaling")),
        *sorted((docs / "development" / "benchmark").glob("*.md")),
    )


DOCUMENTS = documents_below(ROOT)

_BLOCK = re.compile(r"(<!-- bench:(?P<name>\w+):begin -->\n).*?(<!-- bench:(?P=name):end -->)", re.DOTALL)


def machine_block(results: Results) -> str:
    """Describe the machine and the conditions of the measurements in one paragraph."""
    facts = "; ".join(f"{name} {value}" for name, value in results.machine.items())
    text = f"Measured with {results.num_threads} threads on this machine: {facts}."
    if results.rows:
        others = max(row.others for row in results.rows)
        text += f" Other processes kept at most {others:.2f} cores busy meanwhile."
    return f"{text}\n"


def _drawn_block(results: Results) -> str:
    """Describe random problems, and the machine."""
    return f"Seed {results.facts['seed']}, {results.facts['count']} problems. {machine_block(results)}"


def blocks(kept: Mapping[str, Results], grids: Sequence[Results] = ()) -> dict[str, str]:
    """Make every block of the documents that the results can fill, by name.

    ``kept`` has the results of named cases by the names of their files, of `KEPT`. ``grids`` has the results of random
    problems.
    """
    found: dict[str, str] = {}
    lines: list[targets.Target] = []
    if speed := kept.get("speed"):
        lines += targets.rowwise_targets(speed["speed"])
        found |= {"machine": machine_block(speed)} | report.rowwise_blocks(speed["speed"])
    if accuracy := kept.get("accuracy"):
        lines += targets.accuracy_targets(accuracy["accuracy"])
        found["accuracy"] = report.accuracy_block(accuracy["accuracy"])
    if lines:
        found["targets"] = targets_block(lines)
    if linear := kept.get("linear"):
        rows, memory = linear["linear"], linear["memory"]
        lines = [*targets.linear_targets(rows, linear.machine.get("variant", "")), *targets.memory_targets(memory)]
        found |= {"linear_machine": machine_block(linear), "linear_rows": report.linear_rows(rows)}
        found |= {"linear_memory": report.memory_block(memory)} if memory else {}
        found["linear_targets"] = targets_block(lines)
    if tensors := kept.get("tensors"):
        found |= {"tensors_machine": machine_block(tensors)} | report.tensors_blocks(tensors)
        found |= {"tensors_memory": report.memory_block(tensors["memory"])} if tensors["memory"] else {}
        found["tensors_targets"] = targets_block(targets.tensors_targets(tensors))
    if losses := kept.get("losses"):
        found |= {"loss_machine": machine_block(losses), "loss_targets": targets_block(targets.losses_targets(losses))}
        found |= report.losses_blocks(losses)
    if programs := kept.get("programs"):
        rows = programs["programs"]
        found |= {"program_machine": machine_block(programs)} | report.programs_blocks(rows)
        found["program_targets"] = targets_block(targets.programs_targets(rows))
    if fit := kept.get("fit"):
        found |= {"fit_machine": machine_block(fit)} | report.fit_blocks(fit["fit"])
    classifiers = kept.get("classifiers")
    if classifiers:
        found["classifier_machine"] = _drawn_block(classifiers)
        found |= report.classifier_blocks(classifiers["linear"])
    if grids:
        overview = report.overview_block(grids, classifiers["linear"] if classifiers else ())
        found |= report.grid_blocks(grids) | {"grid_overview": overview}
        found["grid_machine"] = "\n".join(map(_drawn_block, grids))
    return found


def filled(text: str, contents: Mapping[str, str]) -> str:
    """Return a document with its blocks filled; blocks without contents stay as they are."""

    def fill(match: re.Match[str]) -> str:
        content = contents.get(match["name"])
        return match[0] if content is None else f"{match[1]}\n{content}\n{match[3]}"

    return _BLOCK.sub(fill, text)


def read(path: Path) -> Results:
    return Results.from_json(path.read_text(encoding="utf-8"))


def kept_grids(folder: Path) -> list[Results]:
    """Read the results of random problems in a folder, sorted by seed."""
    return sorted(map(read, folder.glob(GRID.format("*"))), key=lambda grid: grid.facts["seed"])


def contents_of_documents() -> dict[str, str]:
    """Make all blocks, from the results in the source tree."""
    kept = {name: read(path) for name in KEPT if (path := FOLDER / f"{name}.json").exists()}
    found = blocks(kept, kept_grids(FOLDER))
    if (path := FOLDER / PARALLEL).exists():
        found |= parallel_report.blocks(ParallelResults.from_json(path.read_text(encoding="utf-8")))
    return found


def file_of(suite: str, seed: int) -> str:
    """Return the name of the file with the results of a benchmark."""
    return GRID.format(seed) if suite == "grid" else f"{suite}.json"


def keep(file: str, text: str) -> None:
    """Write results to the source tree, and update the blocks of the documents from all results there."""
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / file).write_text(text, encoding="utf-8")
    update_documents()


def update_documents() -> None:
    """Update the blocks of the documents from the results in the source tree."""
    contents = contents_of_documents()
    for path in DOCUMENTS:
        path.write_text(filled(path.read_text(encoding="utf-8"), contents), encoding="utf-8")
