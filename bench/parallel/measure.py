"""Timing of one process with several threads and of several processes with one thread each, in turns."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import machine
from ..case import WHOLE, Case
from ..results import Row, json_lines
from .cost import MEASURED

#: Runs of each side, of which the median time counts.
TURNS = 3


#: One process with all threads, several processes of one thread, and their communication, including waits for others.
SIDES = ("one", "several", "communication")


@dataclass(frozen=True)
class ParallelResults:
    """The results of one run on one machine."""

    size: int  #: number of processes
    rows: list[Row]  #: seconds of `SIDES`
    sums: list[tuple[int, float]]  #: bytes and seconds of sums over the processes
    machine: dict[str, str]

    def rate(self, row: Row) -> float:
        """Return the operations per second and thread of one process with all threads."""
        return row.case.operations / row.seconds["one"] / self.size

    def to_json(self) -> str:
        rows = [{"case": (row.case.shape, row.case.dtype, row.case.mode)} | row.seconds for row in self.rows]
        return json_lines({"size": self.size, "machine": self.machine, "sums": self.sums, "rows": rows})

    @classmethod
    def from_json(cls, text: str) -> ParallelResults:
        content = json.loads(text)
        rows = []
        for seconds in content["rows"]:
            shape, dtype, split = seconds.pop("case")
            rows.append(Row(Case(WHOLE, dtype, tuple(shape), split), seconds))
        sums = [(int(size), float(seconds)) for size, seconds in content["sums"]]
        return cls(content["size"], rows, sums, content["machine"])


def measure(size: int) -> ParallelResults:
    """Measure both sides in turns, each with `size` threads in total."""
    alone: list[dict[str, Any]] = []
    together: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(TURNS):
            alone.append(_side(Path(folder, "alone"), [], size))
            together.append(_side(Path(folder, "together"), [_mpiexec(), "-n", str(size)], 1))
    rows = []
    for i, case in enumerate(MEASURED):
        several = sorted(run["seconds"][i] for run in together)[TURNS // 2]
        one = statistics.median(run["seconds"][i][0] for run in alone)
        rows.append(Row(case, dict(zip(SIDES, (one, *several)))))
    least = [(few, min(run["sums"][i][1] for run in together)) for i, (few, _) in enumerate(together[0]["sums"])]
    return ParallelResults(size, rows, least, machine.describe())


def _mpiexec() -> str:
    """Return the path of this environment's mpiexec, or else the name for a search in PATH."""
    return next(map(str, Path(sys.executable).parent.glob("mpiexec")), "mpiexec")


def _side(file: Path, launcher: list[str], threads: int) -> dict[str, Any]:
    command = [*launcher, sys.executable, "-m", "ascend_grad.bench.parallel.rank", str(file), str(threads)]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": str(threads)})
    return json.loads(file.read_text(encoding="utf-8"))
