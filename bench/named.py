"""Results of one run over the named cases."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .linear.cases import LinearCase
from .linear.measure import Growth
from .results import Failure, Row, Worst, case_from_json, json_lines, rows_from_json, rows_to_json
from .rowwise.cases import Case


@dataclass(frozen=True)
class Results:
    """Results of one run on one machine: speed of the row-wise or the linear operators, accuracy, memory."""

    machine: dict[str, str]
    num_threads: int
    speed: Sequence[Row[Case]] = field(default_factory=list)
    accuracy: Sequence[Worst] = field(default_factory=list)
    linear: Sequence[Row[LinearCase]] = field(default_factory=list)
    memory: Sequence[Growth] = field(default_factory=list)
    failures: Sequence[Failure] = field(default_factory=list)

    @property
    def rows(self) -> list[Row]:
        """Return the rows of all timed cases."""
        return [*self.speed, *self.linear]

    def to_json(self) -> str:
        content: dict[str, Any] = {
            "machine": self.machine,
            "num_threads": self.num_threads,
            "speed": rows_to_json(self.speed),
            "accuracy": [asdict(worst) for worst in self.accuracy],
            "linear": rows_to_json(self.linear),
            "memory": [asdict(growth) for growth in self.memory],
            "failures": [asdict(failure) for failure in self.failures],
        }
        return json_lines(content)

    @classmethod
    def from_json(cls, text: str) -> Results:
        content = json.loads(text)
        accuracy = [Worst(**fields) for fields in content["accuracy"]]
        memory = [
            Growth(case_from_json(LinearCase, fields.pop("case")), **fields) for fields in content.get("memory", ())
        ]
        return cls(
            content["machine"],
            content["num_threads"],
            rows_from_json(Case, content["speed"]),
            accuracy,
            rows_from_json(LinearCase, content.get("linear", ())),
            memory,
            [Failure(**fields) for fields in content.get("failures", ())],
        )
