"""Results: their form, and how they are kept in JSON files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import stream
from .cases import Case

#: This library among the sides.
OWN = "ascend_grad"

#: Results that come with the library, and that its documents show.
FOLDER = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Row:
    """Median seconds per call of one case, by side, and how many cores others kept busy meanwhile."""

    case: Case
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
class Worst:
    """The largest error of an operator, in units of its bound, and the row of values where it was found."""

    operator: str
    dtype: str
    variant: str
    error: float
    values: str
    length: int


@dataclass(frozen=True)
class Results:
    """What one run found on one machine: speed, or accuracy, or both."""

    machine: dict[str, str]
    num_threads: int
    speed: Sequence[Row] = ()
    accuracy: Sequence[Worst] = ()

    def to_json(self) -> str:
        content: dict[str, Any] = {
            "machine": self.machine,
            "num_threads": self.num_threads,
            "speed": [
                asdict(row.case) | {"seconds": _rounded(row.seconds), "others": round(row.others, 2)}
                for row in self.speed
            ],
            "accuracy": [asdict(worst) for worst in self.accuracy],
        }
        # One line for a row: files that can be read, and compared.
        lines = [f"{json.dumps(name)}: {_lines(value)}" for name, value in content.items()]
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def from_json(cls, text: str) -> Results:
        content = json.loads(text)
        speed = []
        for fields in content["speed"]:
            seconds, others = fields.pop("seconds"), fields.pop("others")
            speed.append(Row(Case(**fields | {"shape": tuple(fields["shape"])}), seconds, others))
        accuracy = [Worst(**fields) for fields in content["accuracy"]]
        return cls(content["machine"], content["num_threads"], speed, accuracy)


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {side: float(f"{value:.4g}") for side, value in seconds.items()}


def _lines(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return json.dumps(value, ensure_ascii=False)
    return "[\n" + ",\n".join(f"  {json.dumps(item, ensure_ascii=False)}" for item in value) + "\n]"
