"""Results: their form, and how they are kept in JSON files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from . import stream
from .cases import Case
from .linear.cases import LinearCase

#: This library among the sides.
OWN = "ascend_grad"

#: Results that are kept with the sources, and that the documents show. The wheel does without them.
FOLDER = Path(__file__).resolve().parent / "results"


AnyCase = TypeVar("AnyCase", bound=Case | LinearCase)


@dataclass(frozen=True)
class Row(Generic[AnyCase]):
    """Median seconds per call of one case, by side, and how many cores others kept busy meanwhile."""

    case: AnyCase
    seconds: dict[str, float]
    others: float = 0.0

    @property
    def own(self) -> float:
        return self.seconds[OWN]

    def speedup(self, *sides: str) -> float | None:
        """How many times longer the (fastest) other side takes; None where it took no part."""
        others = [self.seconds[side] for side in sides if side in self.seconds]
        return min(others) / self.own if others else None

    @property
    def share(self) -> float | None:
        """The part of the memory limit that this library reaches."""
        return self.speedup(stream.ORDINARY, stream.NON_TEMPORAL)


@dataclass(frozen=True)
class Growth:
    """By how many bytes a call made the process grow, beyond its results, and what this library promises at most."""

    case: LinearCase
    side: str
    bytes: int
    promise: int


@dataclass(frozen=True)
class Worst:
    """The largest error of an operator, in units of its bound, and the row of values where it was found."""

    operator: str
    dtype: str
    variant: str
    error: float
    values: str
    length: int


@dataclass(frozen=True)
class Failure:
    """A case that could not be measured, and why."""

    case: str
    error: str


@dataclass(frozen=True)
class Results:
    """What one run found on one machine: speed of the row-wise or of the linear operators, accuracy, memory."""

    machine: dict[str, str]
    num_threads: int
    speed: Sequence[Row[Case]] = field(default_factory=list)
    accuracy: Sequence[Worst] = field(default_factory=list)
    linear: Sequence[Row[LinearCase]] = field(default_factory=list)
    memory: Sequence[Growth] = field(default_factory=list)
    failures: Sequence[Failure] = field(default_factory=list)

    @property
    def rows(self) -> list[Row]:
        """All that were timed."""
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
        memory = [Growth(_case(LinearCase, fields.pop("case")), **fields) for fields in content.get("memory", ())]
        return cls(
            content["machine"],
            content["num_threads"],
            rows_from_json(Case, content["speed"]),
            accuracy,
            rows_from_json(LinearCase, content.get("linear", ())),
            memory,
            [Failure(**fields) for fields in content.get("failures", ())],
        )


def rows_to_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [asdict(row.case) | {"seconds": _rounded(row.seconds), "others": round(row.others, 2)} for row in rows]


def rows_from_json(kind: type, content: Sequence[dict[str, Any]]) -> list[Row]:
    rows = []
    for fields in content:
        seconds, others = fields.pop("seconds"), fields.pop("others")
        rows.append(Row(_case(kind, fields), seconds, others))
    return rows


def _case(kind: type, fields: dict[str, Any]) -> Any:
    return kind(**fields | {"shape": tuple(fields["shape"])})


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {side: float(f"{value:.4g}") for side, value in seconds.items()}


def json_lines(content: dict[str, Any]) -> str:
    """JSON with one line for a row: files that can be read, and compared."""
    lines = [f"{json.dumps(name)}: {_lines(value)}" for name, value in content.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _lines(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return json.dumps(value, ensure_ascii=False)
    return "[\n" + ",\n".join(f"  {json.dumps(item, ensure_ascii=False)}" for item in value) + "\n]"
