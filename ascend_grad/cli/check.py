"""The command ``ascend-grad check``: compares every operator with the reference on this machine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import ascend_grad as ag

from ..backends import FROM_ENVIRONMENT, REGISTRY, reference
from ..backends.ascend.backend import NAME as NPU
from ..errors import AscendGradError
from .check_calls import REPEATS, Caller, as_tuple, import_torch_npu
from .check_cases import Case, cases
from .errors import CommandError
from .exit_statuses import exit_statuses
from .new_files import check_writable, write_report

#: Backends that can be checked, and the default.
BACKENDS = tuple(sorted(name for name in REGISTRY if name != reference.NAME))
DEFAULT = FROM_ENVIRONMENT if FROM_ENVIRONMENT in BACKENDS else "cpu"

#: The place of the report of ``--json`` without a file.
STDOUT = Path("-")

SUMMARY = "verify every operator against the reference, on the CPU or the NPU"
DESCRIPTION = """\
Compute a grid of cases with every operator, and compare with the reference backend, which computes in float64. Errors
are relative to the right value, or to the absolute tolerance if that is larger. For each operator and dtype:
  max, mean    the largest and the mean relative error
  <= 1e-3      the share of elements with an error of at most 1e-3 (the "double thousandth" rule: 99.9 % of them); the
               spacing of bfloat16 is wider
  in tol.      the share of elements within the tolerance, relative and absolute: float32 2**-10 and 2**-16, float16
               2**-9 and 2**-9, bfloat16 2**-6 and 2**-6, float64 2**-42 and 2**-48
  max/tol.     the largest error divided by its tolerance
An operator passes if 99 % of the elements are within the tolerance, no error exceeds ten times the tolerance, and NaN
and infinities are in the right places. Cases that a device does not support are listed as unsupported; they are no
failures. The largest case of each operator and dtype is computed ten times, and the bits of the results are compared.

On an NPU, every case is computed on every device, and again with tensors of torch_npu if it is installed.

On a CPU the command takes some seconds. It prints a verdict on each operator: pass, FAIL or unsupported. The last line
counts them. The command writes only the file of --json.
"""
EPILOG = """\
examples:
  ascend-grad check --backend npu
  ascend-grad check --backend cpu --filter softmax_backward --json check.json
"""
STATUSES = exit_statuses("no operator failed", "an operator failed, or the backend supports none of the cases")

#: Relative and absolute tolerance by dtype.
TOLERANCES = {
    "float32": (2**-10, 2**-16),
    "float16": (2**-9, 2**-9),
    "bfloat16": (2**-6, 2**-6),
    "float64": (2**-42, 2**-48),
}
SHARE = 0.99
CAP = 10.0
DOUBLE_THOUSANDTH = 1e-3


class Errors(NamedTuple):
    """The relative error of every element, and its error in units of the tolerance."""

    relative: NDArray
    in_tolerances: NDArray


@dataclass
class Row:
    """The findings for one operator and dtype."""

    operator: str
    dtype: str
    cases: int = 0
    elements: int = 0
    max_relative_error: float = 0.0
    mean_relative_error: float = 0.0
    within_double_thousandth: float = 1.0
    within_tolerance: float = 1.0
    largest_in_tolerances: float = 0.0
    worst_case: str = ""
    refused: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def passes(self) -> bool:
        return not self.failures and self.within_tolerance >= SHARE and self.largest_in_tolerances <= CAP

    @property
    def verdict(self) -> str:
        if not self.cases and not self.failures:
            return "unsupported"
        return "pass" if self.passes else "FAIL"

    def add(self, label: str, errors: Errors) -> None:
        count = errors.relative.size
        self.cases += 1
        if not count:
            return
        total = self.elements + count
        shares = {
            "mean_relative_error": float(np.mean(errors.relative)),
            "within_double_thousandth": float(np.mean(errors.relative <= DOUBLE_THOUSANDTH)),
            "within_tolerance": float(np.mean(errors.in_tolerances <= 1)),
        }
        for name, share in shares.items():
            setattr(self, name, (getattr(self, name) * self.elements + share * count) / total)
        self.elements = total
        self.max_relative_error = max(self.max_relative_error, float(np.max(errors.relative)))
        largest = float(np.max(errors.in_tolerances))
        if largest > self.largest_in_tolerances:
            self.largest_in_tolerances, self.worst_case = largest, label


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", choices=BACKENDS, default=DEFAULT, help=f"backend to check (default: {DEFAULT})")
    parser.add_argument(
        "--filter",
        default="",
        metavar="TEXT",
        help="check only operators and dtypes that contain TEXT, such as 'softmax float16'",
    )
    parser.add_argument(
        "--json",
        type=Path,
        nargs="?",
        const=STDOUT,
        metavar="FILE",
        help="write the results to FILE as JSON; without FILE, print JSON instead of the table",
    )


def run(args: argparse.Namespace) -> int:
    if args.json and args.json is not STDOUT:
        check_writable("--json", args.json)
    failed_import = import_torch_npu() if args.backend == NPU else ""
    status = ag.backends()[args.backend]
    if not status.usable:
        advice = "; see ascend-grad info --verbose" if args.backend == NPU else ""
        raise CommandError(f"backend {args.backend!r} is not usable: {status.reason}{advice}")
    rows = list(_measure(args.backend, args.filter))
    if not rows:
        raise CommandError(f"--filter: no operator and dtype contain {args.filter!r}")

    content = [asdict(row) | {"verdict": row.verdict} for row in rows]
    info = ag.show_config(mode="dict")
    report = json.dumps({"backend": args.backend, "status": status.reason, "info": info, "rows": content}, indent=2)
    if args.json is STDOUT:
        print(report)
    else:
        print(f"backend {args.backend}: {status.reason}\n{failed_import}")
        for line in _table(rows):
            print(line)
        if args.json:
            write_report("--json", args.json, report)
        print(_summary(rows, args.backend))
    return 0 if any(row.cases for row in rows) and all(row.passes for row in rows) else 1


def _measure(backend: str, text: str) -> Iterator[Row]:
    caller = Caller(backend)
    wanted = (case for case in cases() if text in f"{case.operator} {case.dtype}")
    for (operator, dtype), group in groupby(wanted, key=lambda case: (case.operator, case.dtype)):
        row = Row(operator, dtype)
        computed = [case for case in group if _check(case, caller, row)]
        if computed:
            _check_repeats(max(computed, key=lambda case: case.nbytes), caller, row)
        yield row


def _check(case: Case, caller: Caller, row: Row) -> bool:
    """Compute one case with the backend and add the findings to `row`. Return whether all calls succeeded."""
    widened = {name: _widened(value, case.dtype) for name, value in case.arguments.items()}
    expected = None
    succeeded = True
    for way in caller.ways:
        label = case.label + way.suffix
        try:
            way.explain(case)
        except AscendGradError as error:
            row.refused.append(f"{label}: {error}")
            succeeded = False
            continue
        try:
            got = way.compute(case)
        except AscendGradError as error:
            row.failures.append(f"{label}: {error}")
            succeeded = False
            continue
        if expected is None:
            expected = as_tuple(getattr(ag, case.operator)(**widened, backend=reference.NAME))
        found = [
            _errors(result, right, case.dtype)
            for result, right in zip(got, expected, strict=True)
            if result is not None
        ]
        row.add(label, Errors(*(np.concatenate(parts) for parts in zip(*found))))
    return succeeded


def _check_repeats(case: Case, caller: Caller, row: Row) -> None:
    for way in caller.ways:
        label = case.label + way.suffix
        try:
            failure, note = caller.repeat(case, way)
        except AscendGradError as error:
            failure, note = f"one of {REPEATS} equal calls failed: {error}", ""
        if failure:
            row.failures.append(f"{label}: {failure}")
        if note:
            row.notes.append(f"{label}: {note}")


def _widened(value: Any, dtype: str) -> Any:
    """Convert floating arrays to float64, so that the reference does not round. Round a scale as calls do."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "fV":
        return value.astype(np.float64)
    return float(np.float32(value)) if isinstance(value, float) and dtype != "float64" else value


def _errors(got: NDArray, expected: NDArray, dtype: str) -> Errors:
    relative_tolerance, absolute_tolerance = TOLERANCES[dtype]
    if got.dtype.kind in "iub":
        wrong = np.where(got == expected, 0.0, np.inf).ravel()
        return Errors(wrong, wrong)
    right = expected.astype(np.float64).ravel()
    values = got.astype(np.float64).ravel()
    with np.errstate(all="ignore"):
        error = np.abs(values - right)
        relative = error / np.maximum(np.abs(right), absolute_tolerance)
        in_tolerances = error / (relative_tolerance * np.abs(right) + absolute_tolerance)
    same = (values == right) | (np.isnan(values) & np.isnan(right))
    special = ~np.isfinite(right) | ~np.isfinite(values)
    relative = np.where(special, np.where(same, 0, np.inf), relative)
    in_tolerances = np.where(special, np.where(same, 0, np.inf), in_tolerances)
    return Errors(relative, in_tolerances)


def _verdicts(rows: list[Row]) -> dict[str, str]:
    """Return the verdict on each operator, by its name."""
    by_operator: dict[str, set[str]] = {}
    for row in rows:
        by_operator.setdefault(row.operator, set()).add(row.verdict)
    return {
        operator: next(verdict for verdict in ("FAIL", "pass", "unsupported") if verdict in verdicts)
        for operator, verdicts in by_operator.items()
    }


def _summary(rows: list[Row], backend: str) -> str:
    """Return the last line of the report."""
    verdicts = list(_verdicts(rows).values())
    unsupported = verdicts.count("unsupported")
    end = f", {unsupported} unsupported" if unsupported else ""
    return f"{verdicts.count('pass')} of {len(verdicts)} operators pass on {backend}{end}"


def _table(rows: list[Row]) -> Iterator[str]:
    head = f"{'':13}{'cases':>6}{'elements':>10}{'max':>10}{'mean':>10}{'<= 1e-3':>10}{'in tol.':>10}{'max/tol.':>10}"
    verdicts = _verdicts(rows)
    width = max(map(len, verdicts)) + 2
    for operator, verdict in verdicts.items():
        group = [row for row in rows if row.operator == operator]
        yield f"{operator:{width}}{verdict}"
        yield head
        for row in group:
            numbers = (
                f"{row.elements:10}{row.max_relative_error:10.2g}{row.mean_relative_error:10.2g}"
                f"{row.within_double_thousandth:10.3%}{row.within_tolerance:10.3%}{row.largest_in_tolerances:10.2g}"
            )
            yield f"  {row.dtype:11}{row.cases:6}{numbers if row.cases else f' {row.verdict}'}"
            if row.largest_in_tolerances > CAP or row.within_tolerance < SHARE:
                largest = f"{row.largest_in_tolerances:.3g} times its tolerance"
                yield f"    the largest error is {largest}, in case {row.worst_case}"
            for what, texts in (("unsupported", row.refused), ("failed", row.failures), ("note", row.notes)):
                if texts:
                    more = f" (and {len(texts) - 1} more)" if len(texts) > 1 else ""
                    yield f"    {what}: {texts[0]}{more}"
        yield ""
