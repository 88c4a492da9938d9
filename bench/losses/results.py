"""Results of one run over the losses, and their storage in a JSON file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..grid.problems import RowwiseProblem
from ..results import Failure, Row, json_lines, rows_from_json, rows_to_json
from .cases import RelativeCase


@dataclass(frozen=True)
class LossResults:
    """Times on one machine: of named and random problems of the loss of logits, and of linear layers."""

    machine: dict[str, str]
    num_threads: int
    logits: Sequence[Row[RowwiseProblem]] = field(default_factory=list)
    drawn: Sequence[Row[RowwiseProblem]] = field(default_factory=list)
    linear: Sequence[Row[RelativeCase]] = field(default_factory=list)
    failures: Sequence[Failure] = field(default_factory=list)

    @property
    def rows(self) -> list[Row]:
        """Return all rows."""
        return [*self.logits, *self.drawn, *self.linear]

    def to_json(self) -> str:
        content: dict[str, Any] = {
            "machine": self.machine,
            "num_threads": self.num_threads,
            "logits": rows_to_json(self.logits),
            "drawn": rows_to_json(self.drawn),
            "linear": rows_to_json(self.linear),
            "failures": [asdict(failure) for failure in self.failures],
        }
        return json_lines(content)

    @classmethod
    def from_json(cls, text: str) -> LossResults:
        content = json.loads(text)
        return cls(
            content["machine"],
            content["num_threads"],
            rows_from_json(RowwiseProblem, content["logits"]),
            rows_from_json(RowwiseProblem, content["drawn"]),
            rows_from_json(RelativeCase, content["linear"]),
            [Failure(**fields) for fields in content["failures"]],
        )
