"""Results of the cases of one run, and their storage in JSON files."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .case import Case

#: Name of the side that is this library.
OWN = "ascend_grad"
#: Name of the side that calls the CPU backend directly. The difference to the public function is the cost of dispatch.
DIRECT = "direct"
#: Name of this library's side on arrays over the memory of tensors.
ARRAYS = "arrays"
#: Name of the side that is this library without the filter.
UNFILTERED = "unfiltered"
#: Name of the estimate of a call's time, by which its plan was chosen.
ESTIMATE = "estimate"
#: Names of the rivals' sides. `NUMPY` names formulas that a NumPy user would write, the last one with copies of strided
#: arrays. `WIDENED` names the same formulas
#: on float32 copies of 16-bit arrays, which are made beforehand.
NUMPY = ("numpy", "numpy dot", "numpy dense")
WIDENED = ("numpy widened", "numpy dot widened", "numpy dense widened")
SCIPY = ("scipy",)
TORCH = ("torch", "torch chunked")
ONEDNN = ("oneDNN",)
SKLEARN = ("scikit-learn",)
#: Name of a chain of NumPy's products, or SciPy's with a sparse input, and this library's loss of logits.
CHAIN = "numpy and cross_entropy"
#: Name of this library's loss with its gradient, whose time is the measure of a product of the Hessian.
GRADIENT_CALL = "gradient"
#: Name of the loops over rows and classes of a demonstration of a boosting objective.
DEMONSTRATION = "demonstration"
#: Names of the limits that the machine sets: additions with the memory traffic of a call, with ordinary and with
#: non-temporal stores; the products of a linear problem at the rate of a square product in BLAS.
STREAM = ("stream", "stream non-temporal")
PRODUCTS = "products"
#: Name of a large square product in BLAS, in the type of the accumulators, which shows the rate of the machine.
YARDSTICK = "gemm"
#: Rows and columns of that product.
YARDSTICK_SIZE = 2048
#: Suffix of the name of a side whose calls come right after an operation by PyTorch's threads, which are then awake.
AWAKE = " awake"

#: Folder of the results in the source tree, which the documents show. The wheel does not have it.
FOLDER = Path(__file__).resolve().parent / "results"


def side_of(variant: str) -> str:
    """Return the name of the side that is this library on a forced variant."""
    return f"{OWN} {variant}"


def side_with_threads(count: int) -> str:
    """Return the name of the side that is this library with an explicit number of threads."""
    return f"{OWN}, {count} thread{'s' if count > 1 else ''}"


@dataclass(frozen=True)
class Row:
    """Seconds per call of one case, by side, and the number of cores kept busy by others meanwhile."""

    case: Case
    seconds: dict[str, float]
    others: float = 0.0

    @property
    def own(self) -> float:
        return self.seconds[OWN]

    def best(self, *sides: str) -> float | None:
        """Return the time of the fastest of some sides, or None if none was measured."""
        return min((self.seconds[side] for side in sides if side in self.seconds), default=None)

    def speedup(self, *sides: str) -> float | None:
        """Return the time of the fastest of some sides, as a multiple of ours, or None if none was measured."""
        best = self.best(*sides)
        return None if best is None else best / self.own

    @property
    def awake_ratio(self) -> float | None:
        """Return torch's time over ours, with torch's threads awake."""
        own, other = self.seconds.get(OWN + AWAKE), self.seconds.get(TORCH[0] + AWAKE)
        return other / own if own and other else None

    @property
    def of_yardstick(self) -> float | None:
        """Return the rate of a linear call relative to the rate of a large square product in BLAS."""
        if YARDSTICK not in self.seconds:
            return None
        return self.case.operations / self.own / (2 * YARDSTICK_SIZE**3 / self.seconds[YARDSTICK])


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
class Growth:
    """The bytes by which a call made the process grow in addition to its results, and this library's upper bound."""

    case: Case
    side: str
    bytes: int
    promise: int


@dataclass(frozen=True)
class Failure:
    """A case that could not be measured, and the reason."""

    case: str
    error: str


@dataclass(frozen=True)
class Results:
    """Results of one run on one machine.

    Attributes
    ----------
    machine, num_threads
        The conditions of the run.
    sections : dict
        Lists of results by name, in the order of the file: "accuracy" of `Worst`, "memory" of `Growth`, "failures" of
        `Failure`, all others of `Row`.
    facts : dict
        The count and the seed of random problems.
    """

    machine: dict[str, str]
    num_threads: int
    sections: dict[str, list]
    facts: dict[str, int] = field(default_factory=dict)

    def __getitem__(self, section: str) -> list:
        return self.sections.get(section, [])

    @property
    def rows(self) -> list[Row]:
        """Return the rows of all timed cases."""
        return [item for items in self.sections.values() for item in items if isinstance(item, Row)]

    def to_json(self) -> str:
        sections = {name: list(map(_fields, items)) for name, items in self.sections.items()}
        return json_lines({"machine": self.machine, "num_threads": self.num_threads, **self.facts, **sections})

    @classmethod
    def from_json(cls, text: str) -> Results:
        content = json.loads(text)
        machine, num_threads = content.pop("machine"), content.pop("num_threads")
        sections = {
            name: [_item(name, fields) for fields in value]
            for name, value in content.items()
            if isinstance(value, list)
        }
        return cls(machine, num_threads, sections, {k: v for k, v in content.items() if k not in sections})


def _fields(item: Any) -> dict[str, Any]:
    if isinstance(item, Row):
        seconds = {side: float(f"{value:.4g}") for side, value in item.seconds.items()}
        return item.case.stored() | {"seconds": seconds, "others": round(item.others, 2)}
    return asdict(item) | ({"case": item.case.stored()} if isinstance(item, Growth) else {})


def _item(section: str, fields: dict[str, Any]) -> Any:
    if section == "accuracy":
        return Worst(**fields)
    if section == "failures":
        return Failure(**fields)
    if section == "memory":
        return Growth(**fields | {"case": Case.of(fields["case"])})
    seconds, others = fields.pop("seconds"), fields.pop("others")
    return Row(Case.of(fields), seconds, others)


def json_lines(content: dict[str, Any]) -> str:
    """Return JSON with one line for each row, so that files can be read and compared."""
    lines = [f"{json.dumps(name)}: {_lines(value)}" for name, value in content.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _lines(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return json.dumps(value, ensure_ascii=False)
    return "[\n" + ",\n".join(f"  {json.dumps(item, ensure_ascii=False)}" for item in value) + "\n]"
