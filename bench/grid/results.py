"""Results of one run of the grid, and their storage in JSON files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..linear.cases import LinearCase
from ..results import Failure, Row, json_lines, rows_from_json, rows_to_json
from .problems import RowwiseProblem


@dataclass(frozen=True)
class GridResults:
    """The times of random problems on one machine."""

    machine: dict[str, str]
    num_threads: int
    count: int
    seed: int
    rowwise: Sequence[Row[RowwiseProblem]] = field(default_factory=list)
    linear: Sequence[Row[LinearCase]] = field(default_factory=list)
    failures: Sequence[Failure] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        machine: dict[str, str],
        num_threads: int,
        count: int,
        seed: int,
        rows: Sequence[Row],
        failures: Sequence[Failure],
    ) -> GridResults:
        """Make the results from rows of both kinds of problems."""
        linear = [row for row in rows if isinstance(row.case, LinearCase)]
        rowwise = [row for row in rows if not isinstance(row.case, LinearCase)]
        return cls(machine, num_threads, count, seed, rowwise, linear, failures)

    @property
    def rows(self) -> list[Row]:
        return [*self.rowwise, *self.linear]

    def to_json(self) -> str:
        content: dict[str, Any] = {
            "machine": self.machine,
            "num_threads": self.num_threads,
            "count": self.count,
            "seed": self.seed,
            "rowwise": rows_to_json(self.rowwise),
            "linear": rows_to_json(self.linear),
            "failures": [asdict(failure) for failure in self.failures],
        }
        return json_lines(content)

    @classmethod
    def from_json(cls, text: str) -> GridResults:
        content = json.loads(text)
        return cls(
            content["machine"],
            content["num_threads"],
            content["count"],
            content["seed"],
            rows_from_json(RowwiseProblem, content["rowwise"]),
            rows_from_json(LinearCase, content["linear"]),
            [Failure(**fields) for fields in content["failures"]],
        )
