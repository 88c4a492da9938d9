"""The command ``ascend-grad bench``: compares speed with NumPy, PyTorch and JAX, and errors with their bounds."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import ascend_grad as ag

from .._dispatch import requested
from ..arguments import thread_count
from ..backends import REGISTRY
from .errors import CommandError, writing
from .exit_statuses import exit_statuses
from .new_files import check_writable, new_figure, write_report

if TYPE_CHECKING:
    from ..bench.case import Case
    from ..bench.results import Failure, Worst

SUMMARY = "compare speed with NumPy, PyTorch and JAX, or measure accuracy"
DESCRIPTION = """\
Time this library, NumPy's formulas, and PyTorch and JAX if they are installed. All take turns; the smallest of five
times counts. The last lines count how often each rival is slower or faster, and list where it is faster. The suites:

rowwise    Softmax, log-softmax and their gradients (default). "numpy 8.0×" means that NumPy takes 8 times as long;
           "numpy dot" is NumPy's fastest form of the formula, if that is another one; "of stream" is the fraction of
           the memory bandwidth. A mode follows each case: the result goes into an existing array (out), into a new one
           (fresh), or the call follows 20 ms of idling (idle). About twenty minutes, up to 5 GB.
linear     The linear cross-entropy operators in GFLOP/s, also as a fraction of the rate of a large square product in
           BLAS ("of BLAS"), compared with the formula in NumPy, and with PyTorch with all logits in memory and in
           chunks. Also the memory that a call takes beyond its results. About fifteen minutes, up to 6 GB.
torch      Calls on PyTorch's tensors, compared with calls on NumPy arrays and with PyTorch's kernels; then forward and
           backward together, also while PyTorch's threads are awake, and the loss with its gradients and its memory,
           compared with PyTorch's. About ten minutes, up to 6 GB.
losses     `cross_entropy` with its gradient, with options and on random problems, compared with NumPy's formula and
           with PyTorch's forward and backward; then the linear loss with options and outputs, the largest
           log-probabilities, and the loss compiled by JAX: "relative speed" is the time of the plain loss, of the
           statistics or of the call of arrays, as a fraction of the time of the call. Then random products of the
           Hessian, and losses of sparse inputs, compared with the gradient, NumPy, SciPy, PyTorch and scikit-learn.
           About fifteen minutes, up to 3 GB.
programs   Calls in programs that do something else before each call: a product in NumPy or PyTorch, work in Python, a
           pause. It compares the default number of threads with explicit numbers, and with PyTorch in the same place.
           About five minutes.
accuracy   Errors instead of times, with every CPU variant of this machine. Some minutes.
random     Random operators, ranks, shapes, axes, memory layouts and dtypes, and results in existing or new arrays.
           Half of the row-wise problems have strange layouts: steps, one column of several, permuted axes, stride 0.
           Every problem is measured twice, with other problems in between, and up to four times if a rival was faster,
           or if other processes disturbed it; the best measurement of each side is kept. "of the limit" is the
           fraction of the memory bandwidth, or of the rate of BLAS. 300 problems take about a quarter of an hour and
           up to 6 GB.

Tables go to stdout, progress and failures to stderr. Only the files of --json, --plot and --update-readme are written.
A case that fails does not end the run: the rows of all others are printed and written.
"""
EPILOG = """\
examples:
  ascend-grad bench --quick
  ascend-grad bench --filter softmax_backward --filter bfloat16 --json results.json
  ascend-grad bench linear --quick
  ascend-grad bench losses --filter smoothing
  ascend-grad bench random --seed 1 --json random.json --plot random.svg
  ascend-grad bench random --count 100 --operators softmax log_softmax --max-elements 10000
  ascend-grad bench random --operators rowwise --layouts strange
  ascend-grad bench programs
  ascend-grad bench accuracy
"""

#: The suites, by the names of the files with their results. Those of random problems contain the seed.
SUITES = {
    "rowwise": "speed",
    "linear": "linear",
    "torch": "tensors",
    "losses": "losses",
    "programs": "programs",
    "accuracy": "accuracy",
    "random": "grid",
}
#: Names of the two families of operators of random problems.
GROUPS = ("rowwise", "linear")
#: Names of the options that narrow random problems, of all options of random problems, and of all options that few
#: suites have, with these suites.
NARROWING = ("operators", "max_elements", "layouts", "max_rows")
RANDOM_OPTIONS = ("count", "seed", *NARROWING, "few_classes")
SUITES_OF = {
    "quick": ("rowwise", "linear", "torch", "losses", "programs"),
    "plot": ("rowwise", "random"),
    **dict.fromkeys(RANDOM_OPTIONS, ("random",)),
}
#: Random problems of a suite, unless --count says otherwise.
COUNT = 300

STATUSES = exit_statuses(
    "everything was measured, whatever the speed",
    "a case failed, for example as NumPy computes other values, or an error of `bench accuracy` exceeds its bound",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("suite", nargs="?", choices=tuple(SUITES), default="rowwise", help="what to measure")
    parser.add_argument("--quick", action="store_true", help="measure a selection of cases, in a minute or two")
    parser.add_argument(
        "--filter",
        action="append",
        default=[],
        metavar="TEXT",
        help="measure only cases whose name contains TEXT; if repeated, all of the texts",
    )
    parser.add_argument(
        "--threads", type=int, metavar="N", help="number of threads of this library, PyTorch and NumPy's BLAS"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the speed to this file (needs matplotlib)")
    parser.add_argument(
        "--update-readme",
        action="store_true",
        help="store the results in the source tree, and update the tables of the documents",
    )
    parser.add_argument(
        "--targets", action="store_true", help="also print the targets of the library and whether they are met"
    )
    group = parser.add_argument_group("random problems")
    group.add_argument("--count", type=int, metavar="COUNT", help=f"number of problems (default: {COUNT})")
    group.add_argument("--seed", type=int, metavar="SEED", help="seed of the problems (default: 0)")
    group.add_argument(
        "--operators",
        nargs="+",
        metavar="OP",
        help="draw only these operators or groups: rowwise, linear (default: all; 3 of 10 problems are linear)",
    )
    group.add_argument(
        "--max-elements", type=int, metavar="N", help="largest size of row-wise problems (default: 4194304)"
    )
    group.add_argument(
        "--layouts",
        choices=("plain", "strange"),
        help="draw only these layouts of row-wise problems (default: half of each)",
    )
    group.add_argument(
        "--max-rows", type=int, metavar="N", help="draw only linear problems with at most N rows or at most N classes"
    )
    group.add_argument(
        "--few-classes",
        action="store_true",
        default=None,
        help="measure classifiers with 2 to 64 classes instead, also compared with scikit-learn",
    )


def run(args: argparse.Namespace) -> int:
    if not importlib.util.find_spec("ascend_grad.bench"):  # it is the folder bench/ of the sources
        raise CommandError("the benchmark needs the package to be installed, not only compiled: pip install .")
    from ..bench import charts, documents, machine, report
    from ..bench.results import ONEDNN, Results
    from ..bench.sides import onednn

    _check(args)
    num_threads = thread_count(args.threads) or ag.get_num_threads()
    suite = SUITES[args.suite]
    failures: list[Failure] = []
    if suite == "accuracy":
        sections: dict[str, list] = {"accuracy": _measure_accuracy(args.filter, failures)}
    else:
        sections = _measure(_selected(suite, args), num_threads, failures)
    if suite not in ("grid", "losses", "programs"):
        sections = {name: sections.get(name, []) for name in ("speed", "accuracy", "linear", "memory")}
    facts = {"count": args.count, "seed": args.seed} if suite == "grid" else {}
    results = Results(machine.describe(), num_threads, sections | {"failures": failures}, facts)
    if any(side in row.seconds for row in results.rows for side in ONEDNN):
        results.machine["oneDNN"] = onednn.version() or ""

    show_targets = args.targets or suite == "accuracy"
    print(documents.machine_block(results))
    if any(sections.values()):
        found = documents.blocks({}, [results]) if suite == "grid" else documents.blocks({suite: results})
        for name, block in found.items():
            if name not in documents.NOT_PRINTED and (show_targets or not name.endswith("targets")):
                print(block)
    if suite != "accuracy":
        print(report.verdict(results.rows))
    if args.json:
        write_report("--json", args.json, results.to_json())
    for failure in failures:
        print(f"ascend-grad bench: failed: {failure.case}: {failure.error}", file=sys.stderr)
    if args.plot and results.rows:
        with writing(f"--plot {args.plot}"):
            if suite == "grid":
                charts.grid_chart([results], args.plot)
            else:
                charts.speed_chart(results.rows, args.plot)
    if args.update_readme and failures:
        print("ascend-grad bench: the documents are not updated", file=sys.stderr)
    elif args.update_readme:
        kept = "classifiers" if args.few_classes else suite
        documents.keep(documents.file_of(kept, args.seed), results.to_json())
    return 0 if not failures and all(worst.error <= 1 for worst in results["accuracy"]) else 1


def _check(args: argparse.Namespace) -> None:
    """Check the options and what they need, so that an error comes before the measurements."""
    from ..bench import documents, frameworks

    backend, _ = requested(None)
    if args.suite == "accuracy" and backend not in ("auto", "cpu"):
        raise CommandError(f"bench accuracy: expected the backend cpu, got {backend!r}")
    if backend in REGISTRY and not (status := ag.backends()[backend]).usable:
        raise CommandError(f"backend {backend!r} is not usable: {status.reason}")
    _check_options(args)
    if args.suite == "torch":
        torch = frameworks.module("torch")
        if torch is None:
            raise CommandError("bench torch needs PyTorch: pip install torch")
        if not hasattr(torch.nn.functional, "linear_cross_entropy"):
            raise CommandError(f"bench torch needs PyTorch 2.13 or newer, found {torch.__version__}")
    if args.plot and not importlib.util.find_spec("matplotlib"):
        raise CommandError("--plot needs matplotlib: pip install matplotlib")
    if args.update_readme and (args.quick or args.filter):
        raise CommandError("--update-readme needs a full run, without --quick and --filter")
    if args.update_readme and not all(path.exists() for path in documents.DOCUMENTS):
        raise CommandError("--update-readme works in a source tree, with an editable installation")
    if args.json:
        check_writable("--json", args.json)
    if args.plot:
        new_figure("--plot", args.plot)


def _check_options(args: argparse.Namespace) -> None:
    """Check options of some suites, and fill in the defaults of random problems."""
    for option, suites in SUITES_OF.items():
        if (value := getattr(args, option)) is not None and value is not False and args.suite not in suites:
            raise CommandError(
                f"--{option.replace('_', '-')} is an option of {', '.join(f'bench {suite}' for suite in suites)}, not "
                f"of bench {args.suite}"
            )
    least = {"count": 1, "seed": 0, "max_elements": 4, "max_rows": 1}
    for option, minimum in least.items():
        if (value := getattr(args, option)) is not None and value < minimum:
            raise CommandError(f"--{option.replace('_', '-')}: expected a number of at least {minimum}, got {value}")
    narrowed = [option for option in NARROWING if getattr(args, option) is not None]
    if args.update_readme and narrowed:
        raise CommandError(f"--update-readme needs all random problems, without --{narrowed[0].replace('_', '-')}")
    args.count = COUNT if args.count is None else args.count
    args.seed = args.seed or 0


def _selected(suite: str, args: argparse.Namespace) -> dict[str, list[Case]]:
    """Return the cases that are measured, by section of the results."""
    from ..bench import cases

    if suite == "grid":
        drawn = cases.draw(
            *(args.count, args.seed, _operators(args)),
            *(args.max_elements, args.layouts, args.max_rows),
        )
        if args.few_classes:
            drawn = cases.few_classes(args.count, args.seed)
        found = dict(zip(GROUPS, ([c for c in drawn if c.dim is not None], [c for c in drawn if c.dim is None])))
    elif suite == "tensors":
        both = cases.tensors(args.quick)
        found = {"speed": [c for c in both if c.dim is not None], "linear": [c for c in both if c.dim is None]}
    elif suite == "losses":
        found = {part: getattr(cases, part)(args.quick) for part in ("logits", "drawn")}
        found["linear"] = cases.relative(args.quick)
        found |= {part: getattr(cases, part)(args.quick) for part in ("second_order", "sparse")}
    else:
        found = {suite: getattr(cases, suite)(args.quick)}
    if suite in ("linear", "tensors") and not args.quick:
        found["memory"] = cases.linear_memory() if suite == "linear" else cases.tensors_memory()
    wanted = {
        section: [case for case in part if all(text in case.name for text in args.filter)]
        for section, part in found.items()
    }
    if not any(wanted.values()):
        kind = "problem" if suite == "grid" else "case"
        raise CommandError(f"--filter: no {kind} contains {' and '.join(map(repr, args.filter))}")
    return wanted


def _operators(args: argparse.Namespace) -> list[str]:
    from ..bench.case import LINEAR, ROWWISE
    from ..bench.cases import OPERATORS

    groups = dict(zip(GROUPS, (ROWWISE, LINEAR)))
    operators = [operator for name in args.operators or OPERATORS for operator in groups.get(name, (name,))]
    for operator in operators:
        if operator not in OPERATORS:
            raise CommandError(f"--operators: expected some of {', '.join((*GROUPS, *OPERATORS))}, got {operator}")
    return operators


def _measure(selected: dict[str, list[Case]], num_threads: int, failures: list[Failure]) -> dict[str, list]:
    """Measure times of cases, and memory of those in the section "memory"."""
    from tqdm import tqdm

    from ..bench import measure

    def shown(cases: Sequence[Case]) -> Iterator[Case]:
        with tqdm(cases, unit="case") as progress:
            for case in progress:
                progress.set_postfix_str(case.name)
                yield case

    of_memory = selected.get("memory", [])
    # All cases are measured together, so that each has its next attempt after all others.
    timed = [case for section, cases in selected.items() for case in cases if section != "memory"]
    rows = {row.case.name: row for row in measure.measure_all(timed, num_threads, shown, failures)}
    found: dict[str, list] = {
        section: [rows[name] for name in dict.fromkeys(case.name for case in cases) if name in rows]
        for section, cases in selected.items()
    }
    if of_memory:
        found["memory"] = []
    for case in shown(of_memory) if of_memory else ():
        with measure.recorded(case.name, failures):
            found["memory"] += measure.memory(case, num_threads)
    disturbed = sum(row.others > measure.TOLERATED for row in rows.values())
    if disturbed:
        print(f"warning: other processes disturbed {disturbed} of {len(rows)} cases", file=sys.stderr)
    return found


def _measure_accuracy(texts: Sequence[str], failures: list[Failure]) -> list[Worst]:
    from tqdm import tqdm

    from ..bench import accuracy
    from ..bench.measure import recorded

    pairs = [pair for pair in accuracy.pairs() if all(text in " ".join(pair) for text in texts)]
    if not pairs:
        raise CommandError(f"--filter: no operator and dtype contain {' and '.join(map(repr, texts))}")
    rows: list[Worst] = []
    with tqdm(pairs, unit="operator") as progress:
        for operator, dtype in progress:
            progress.set_postfix_str(f"{operator} {dtype}")
            with recorded(f"{operator} {dtype}", failures):
                rows += accuracy.measure(operator, dtype)
    return rows
