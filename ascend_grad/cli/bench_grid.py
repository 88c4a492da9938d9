"""The option ``ascend-grad bench --grid``: random problems instead of named cases."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from .errors import CommandError, writing
from .new_files import write_report

if TYPE_CHECKING:
    from ..bench.grid.problems import Problem
    from ..bench.grid.results import GridResults
    from ..bench.results import Failure, Row

#: Names of the two families of operators.
GROUPS = ("rowwise", "linear")


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("random problems")
    group.add_argument("--grid", type=int, metavar="COUNT", help="measure so many random problems, no named cases")
    group.add_argument("--seed", type=int, metavar="SEED", help="of the random problems (default: 0)")
    group.add_argument(
        "--operators",
        nargs="+",
        metavar="OP",
        help="only these operators, or groups: rowwise, linear (default: all, three of ten problems linear ones)",
    )
    group.add_argument(
        "--max-elements", type=int, metavar="N", help="bound for the size of row-wise problems (default: 4194304)"
    )


def check(args: argparse.Namespace) -> None:
    """Check that the options fit together."""
    if args.grid is None:
        for option in ("seed", "operators", "max_elements"):
            if getattr(args, option) is not None:
                raise CommandError(f"--{option.replace('_', '-')} is for random problems, with --grid COUNT")
        return
    if args.linear or args.losses or args.accuracy or args.quick:
        raise CommandError("--grid draws its own problems, without --linear, --losses, --accuracy and --quick")
    if args.grid < 1 or (args.seed or 0) < 0 or (args.max_elements or 4) < 4:
        raise CommandError("--grid takes a count from 1 on, --seed a number from 0 on, --max-elements one from 4 on")
    if args.update_readme and (args.operators or args.max_elements):
        raise CommandError("--update-readme takes a full grid, without --operators and --max-elements")


def run(args: argparse.Namespace, num_threads: int) -> int:
    from ..bench import documents, machine
    from ..bench.grid import chart
    from ..bench.grid.results import GridResults

    problems = _problems(args)
    failures: list[Failure] = []
    rows = measured(problems, num_threads, failures)
    results = GridResults.of(machine.describe(), num_threads, args.grid, args.seed or 0, rows, failures)
    _print(results)
    if args.json:
        write_report("--json", args.json, results.to_json())
    if args.plot and results.rows:
        with writing(f"--plot {args.plot}"):
            chart.chart([results], args.plot)
    for failure in failures:
        print(f"ascend-grad bench: failed: {failure.case}: {failure.error}", file=sys.stderr)
    if args.update_readme and failures:
        print("ascend-grad bench: the documents stay as they are", file=sys.stderr)
    elif args.update_readme:
        documents.keep_grid(results)
        documents.update_documents()
    return 1 if failures else 0


def _problems(args: argparse.Namespace) -> list[Problem]:
    from ..bench.grid import problems

    groups = dict(zip(GROUPS, (problems.ROWWISE, problems.LINEAR)))
    names = args.operators or problems.OPERATORS
    operators = [operator for name in names for operator in groups.get(name, (name,))]
    for operator in operators:
        if operator not in problems.OPERATORS:
            choices = ", ".join((*GROUPS, *problems.OPERATORS))
            raise CommandError(f"--operators: {operator} is none of {choices}")
    found = problems.draw(args.grid, args.seed or 0, operators, args.max_elements or problems.MAX_ELEMENTS)
    found = [problem for problem in found if all(text in problem.name for text in args.filter)]
    if not found:
        raise CommandError(f"no problem contains {' and '.join(map(repr, args.filter))}")
    return found


def measured(problems: Sequence[Problem], num_threads: int, failures: list[Failure]) -> list[Row[Problem]]:
    """Measure problems with a progress bar."""
    from tqdm import tqdm

    from ..bench.grid.measure import measure_all

    def shown(problems: Sequence[Problem]) -> Iterator[Problem]:
        with tqdm(problems, unit="problem") as progress:
            for problem in progress:
                progress.set_postfix_str(problem.name)
                yield problem

    return measure_all(problems, num_threads, shown, failures)


def _print(results: GridResults) -> None:
    from ..bench import documents

    print(documents.machine_block(results))
    if not results.rows:
        return
    contents = documents.grid_blocks([results])
    for name in documents.GRID_TABLES:
        print(contents[name])
