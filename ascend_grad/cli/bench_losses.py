"""The option ``ascend-grad bench --losses``: losses of logits and of linear layers, with options and outputs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .bench_grid import measured
from .errors import CommandError
from .new_files import write_report

if TYPE_CHECKING:
    from ..bench.losses.cases import RelativeCase
    from ..bench.results import Failure, Row


def run(args: argparse.Namespace, num_threads: int) -> int:
    from ..bench import documents, machine
    from ..bench.losses import cases
    from ..bench.losses.results import LossResults

    def wanted(chosen: Sequence) -> list:
        return [case for case in chosen if all(text in case.name for text in args.filter)]

    logits = wanted(cases.quick_logits() if args.quick else cases.logits())
    drawn = wanted([] if args.quick else cases.drawn())
    linear = wanted(cases.quick_linear() if args.quick else cases.linear())
    if not logits and not drawn and not linear:
        raise CommandError(f"no case contains {' and '.join(map(repr, args.filter))}")
    failures: list[Failure] = []
    # Named and random problems are measured together, so that each has its second attempt after all others.
    rows = measured([*logits, *drawn], num_threads, failures) if logits or drawn else []
    results = LossResults(
        machine.describe(),
        num_threads,
        [row for row in rows if row.case in logits],
        [row for row in rows if row.case not in logits],
        _measured_linear(linear, num_threads, failures),
        failures,
    )
    print(documents.machine_block(results))
    contents = documents.loss_blocks(results)
    for name, content in contents.items():
        if name != "loss_machine":
            print(content)
    if args.json:
        write_report("--json", args.json, results.to_json())
    for failure in failures:
        print(f"ascend-grad bench: failed: {failure.case}: {failure.error}", file=sys.stderr)
    if args.update_readme and failures:
        print("ascend-grad bench: the documents stay as they are", file=sys.stderr)
    elif args.update_readme:
        documents.LOSSES_FILE.parent.mkdir(exist_ok=True)
        documents.LOSSES_FILE.write_text(results.to_json(), encoding="utf-8")
        documents.update_documents()
    return 1 if failures else 0


def _measured_linear(
    cases: Sequence[RelativeCase], num_threads: int, failures: list[Failure]
) -> list[Row[RelativeCase]]:
    from tqdm import tqdm

    from ..bench.losses.measure import measure
    from ..bench.measure import recorded

    rows: list[Row[RelativeCase]] = []
    with tqdm(cases, unit="case", disable=not cases) as progress:
        for case in progress:
            progress.set_postfix_str(case.name)
            with recorded(case.name, failures):
                rows.append(measure(case, num_threads))
    return rows
