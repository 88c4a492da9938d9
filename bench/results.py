"""Results of a case, and their storage in JSON files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from . import stream

#: Name of the side that is this library.
OWN = "ascend_grad"
#: Name of the side that calls the CPU backend directly. The difference to the public function is the cost of dispatch.
DIRECT = "direct"
#: Names of the sides that a NumPy user would write.
NUMPY = ("numpy", "numpy dot")

#: Folder of the results in the source tree, which the documents show. The wheel does not have it.
FOLDER = Path(__file__).resolve().parent / "results"


Case = TypeVar("Case")


@dataclass(frozen=True)
class Row(Generic[Case]):
    """Median seconds per call of one case, by side, and the number of cores kept busy by others meanwhile."""

    case: Case
    seconds: dict[str, float]
    others: float = 0.0

    @property
    def own(self) -> float:
        return self.seconds[OWN]

    def speedup(self, *sides: str) -> float | None:
        """Return the time of the fastest of some sides, as a multiple of ours, or None if none was measured."""
        others = [self.seconds[side] for side in sides if side in self.seconds]
        return min(others) / self.own if others else None

    @property
    def share(self) -> float | None:
        """Return the speed of this library as a fraction of the limit that memory sets, or None if that is unknown."""
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
class Failure:
    """A case that could not be measured, and the reason."""

    case: str
    error: str


def rows_to_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [asdict(row.case) | {"seconds": _rounded(row.seconds), "others": round(row.others, 2)} for row in rows]


def rows_from_json(kind: type, content: Sequence[dict[str, Any]]) -> list[Row]:
    rows = []
    for fields in content:
        seconds, others = fields.pop("seconds"), fields.pop("others")
        rows.append(Row(case_from_json(kind, fields), seconds, others))
    return rows


def case_from_json(kind: type, fields: dict[str, Any]) -> Any:
    return kind(**fields | {"shape": tuple(fields["shape"])})


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {side: float(f"{value:.4g}") for side, value in seconds.items()}


def json_lines(content: dict[str, Any]) -> str:
    """Return JSON with one line for each row, so that files can be read and compared."""
    lines = [f"{json.dumps(name)}: {_lines(value)}" for name, value in content.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _lines(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return json.dumps(value, ensure_ascii=False)
    return "[\n" + ",\n".join(f"  {json.dumps(item, ensure_ascii=False)}" for item in value) + "\n]"
