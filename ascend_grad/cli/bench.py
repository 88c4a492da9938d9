"""The command ``ascend-grad bench``: compares speed with NumPy, PyTorch and JAX, and errors with their bounds."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import ascend_grad as ag

from .._dispatch import requested
from ..arguments import thread_count
from ..backends import REGISTRY
from . import bench_grid, bench_losses
from .errors import CommandError, writing
from .exit_statuses import exit_statuses
from .new_files import check_writable, new_figure, write_report

if TYPE_CHECKING:
    from ..bench.linear.measure import Growth
    from ..bench.results import Failure, Row, Worst
    from ..bench.rowwise.cases import Case

DESCRIPTION = """\
Time the operators, NumPy's formulas, and PyTorch and JAX if they are installed: medians of repeated calls, all sides in
turn. "numpy 8.0×" means that NumPy takes 8 times as long; "numpy dot" is NumPy's fastest form if that is not the
formula as it is written; "of stream" is the fraction of the speed of memory. A mode follows each case: the result goes
into an existing array (out), into a new one (fresh), or the call follows 20 ms of idling (idle).
The full run takes about twenty minutes and up to 5 GB.

--linear times the linear cross-entropy operators in GFLOP/s, also as a fraction of the rate of a large square product
in BLAS ("of BLAS"). It compares them with the formula in NumPy, and with PyTorch with all logits in memory and in
chunks. It also measures the memory that a call takes beyond its results. About fifteen minutes, up to 6 GB.

--torch times calls on PyTorch's tensors, compared with calls on NumPy arrays and with PyTorch's kernels. Then it times
forward and backward together, also while PyTorch's threads are awake, and the loss with its gradients and its memory,
all compared with PyTorch's. About ten minutes, up to 6 GB.

--losses times `cross_entropy` with its gradient, with options and on random problems, compared with NumPy's formula and
with PyTorch's forward and backward. Then it times the linear loss with options and outputs, the largest
log-probabilities, and the loss compiled by JAX: "relative speed" is the time of the plain loss, of the statistics or of
the call of arrays, as a fraction of the time of the call. About ten minutes, up to 3 GB.

--grid COUNT draws random problems: operators, ranks, shapes, dims, layouts in memory, dtypes, the place of the result.
A measurement is the least time of several turns. Every problem is measured twice, with other problems in between, and
up to four times if a rival was faster; the best measurement of each side is kept. "of the limit" is the fraction of the
speed of memory, or of a product in BLAS. 300 problems take about a quarter of an hour and up to 6 GB.

Tables go to stdout, progress and failures to stderr. Only the files of --json, --plot and --update-readme are written.
A case that fails does not end the run: the rows of all others are printed and written.
"""
EPILOG = """\
examples:
  ascend-grad bench --quick
  ascend-grad bench --filter softmax_backward --filter bfloat16 --json results.json
  ascend-grad bench --linear --quick
  ascend-grad bench --losses --filter smoothing
  ascend-grad bench --grid 300 --seed 1 --json grid.json --plot grid.svg
  ascend-grad bench --grid 100 --operators softmax log_softmax --max-elements 10000
  ascend-grad bench --accuracy
"""

#: The tables of the documents that are printed.
SHOWN = (
    *("rows", "accuracy", "targets", "linear_rows", "linear_memory", "linear_targets"),
    *("tensors_calls", "tensors_autograd", "tensors_losses", "tensors_memory", "tensors_targets"),
)

STATUSES = exit_statuses(
    "everything was measured (no matter how fast it is)",
    "a case failed, as where NumPy computes other values, or with --accuracy an error is beyond its bound",
)


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="compare speed with NumPy, PyTorch and JAX, or measure accuracy",
        description=DESCRIPTION,
        epilog=f"{EPILOG}\n{STATUSES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--quick", action="store_true", help="a choice of cases, a minute or two")
    parser.add_argument(
        "--filter",
        action="append",
        default=[],
        metavar="TEXT",
        help="only cases whose name contains this text; repeated: all of them",
    )
    parser.add_argument("--threads", type=int, metavar="N", help="threads of this library, PyTorch and NumPy's BLAS")
    parser.add_argument("--linear", action="store_true", help="the linear operators in place of the row-wise ones")
    parser.add_argument("--torch", action="store_true", help="calls on PyTorch's tensors, with and without gradients")
    parser.add_argument("--losses", action="store_true", help="losses of logits and of linear layers, with options")
    parser.add_argument("--accuracy", action="store_true", help="measure errors in place of times, some minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the speed to this file (needs matplotlib)")
    parser.add_argument(
        "--update-readme",
        action="store_true",
        help="keep the results with the sources, and write the tables of the documents anew (in a source tree)",
    )
    bench_grid.add_options(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    if not importlib.util.find_spec("ascend_grad.bench"):  # it is the folder bench/ of the sources
        raise CommandError("the benchmark needs the package to be installed, not only compiled: pip install .")
    from ..bench import documents, machine
    from ..bench.linear.cases import LinearCase
    from ..bench.named import Results
    from ..bench.rowwise import report

    _check(args)
    num_threads = thread_count(args.threads) or ag.get_num_threads()
    if args.grid is not None:
        return bench_grid.run(args, num_threads)
    if args.losses:
        return bench_losses.run(args, num_threads)
    speed: Sequence[Row[Case]] = ()
    accuracy: Sequence[Worst] = ()
    failures: list[Failure] = []
    linear: Sequence[Row[LinearCase]] = ()
    memory: Sequence[Growth] = ()
    if args.accuracy:
        file = documents.ACCURACY_FILE
        accuracy = _measure_accuracy(args.filter, failures)
    elif args.linear:
        file = documents.LINEAR_FILE
        linear, memory = _measure_room("linear", args, num_threads, failures)
    elif args.torch:
        file = documents.TENSORS_FILE
        rows, memory = _measure_room("pytorch", args, num_threads, failures)
        linear = [row for row in rows if isinstance(row.case, LinearCase)]
        speed = [row for row in rows if row not in linear]
    else:
        file = documents.SPEED_FILE
        speed = _measure_speed(_chosen_cases(args), num_threads, failures)
    results = Results(machine.describe(), num_threads, speed, accuracy, linear, memory, failures)

    print(documents.machine_block(results))
    parts = (None, None, None, results) if args.torch else (speed, accuracy, linear or memory)
    shown = documents.blocks(*(results if part else None for part in parts))
    for name in SHOWN:
        if name in shown:
            print(shown[name])
    if args.json:
        write_report("--json", args.json, results.to_json())
    for failure in failures:
        print(f"ascend-grad bench: failed: {failure.case}: {failure.error}", file=sys.stderr)
    if args.plot and speed:
        with writing(f"--plot {args.plot}"):
            report.chart(speed, args.plot)
    if args.update_readme and failures:
        print("ascend-grad bench: the documents stay as they are", file=sys.stderr)
    elif args.update_readme:
        file.parent.mkdir(exist_ok=True)
        file.write_text(results.to_json(), encoding="utf-8")
        documents.update_documents()
    return 0 if not failures and all(worst.error <= 1 for worst in accuracy) else 1


def _check(args: argparse.Namespace) -> None:
    """Check the options and what they need, so that an error comes before the measurements."""
    from ..bench import documents, frameworks

    backend, _ = requested(None)
    if args.accuracy and backend not in ("auto", "cpu"):
        raise CommandError(f"--accuracy is about the CPU, and {backend!r} is asked for")
    if backend in REGISTRY and not (status := ag.backends()[backend]).usable:
        raise CommandError(f"backend {backend!r} is not usable: {status.reason}")
    bench_grid.check(args)
    if args.accuracy and (args.linear or args.torch or args.losses):
        raise CommandError("--accuracy goes over all operators, without --linear, --torch and --losses")
    if args.linear and args.torch:
        raise CommandError("--torch has cases of its own, without --linear")
    if args.losses and (args.linear or args.torch):
        raise CommandError("--losses measures cases of the losses alone, without --linear and --torch")
    if args.plot and (args.accuracy or args.linear or args.torch or args.losses):
        raise CommandError(
            "--plot draws the speed of the row-wise operators, not --accuracy, --linear, --torch or --losses"
        )
    if args.torch:
        torch = frameworks.module("torch")
        if torch is None:
            raise CommandError("--torch needs PyTorch: pip install torch")
        if not hasattr(torch.nn.functional, "linear_cross_entropy"):
            raise CommandError(f"--torch compares with a loss of PyTorch 2.13 or newer, this is {torch.__version__}")
    if args.quick and args.accuracy:
        raise CommandError("--quick chooses among the cases for speed, not for --accuracy")
    if args.plot and not importlib.util.find_spec("matplotlib"):
        raise CommandError("the chart needs matplotlib: pip install matplotlib")
    if args.update_readme and (args.quick or args.filter):
        raise CommandError("--update-readme takes a full run, without --quick and --filter")
    if args.update_readme and not all(path.exists() for path in documents.DOCUMENTS):
        raise CommandError("--update-readme works in a source tree, with an editable installation")
    if args.json:
        check_writable("--json", args.json)
    if args.plot:
        new_figure("--plot", args.plot)


def _chosen_cases(args: argparse.Namespace) -> list[Case]:
    from ..bench.rowwise import cases

    found = cases.quick() if args.quick else cases.full()
    found = [case for case in found if _is_wanted(case.name, args)]
    if not found:
        raise CommandError(f"no case contains {' and '.join(map(repr, args.filter))}")
    return found


def _measure_speed(cases: Sequence[Case], num_threads: int, failures: list[Failure]) -> list[Row[Case]]:
    from tqdm import tqdm

    from ..bench.rowwise.measure import TOLERATED, measure_all

    def shown(cases: Sequence[Case]) -> Iterator[Case]:
        with tqdm(cases, unit="case") as progress:
            for case in progress:
                progress.set_postfix_str(case.name)
                yield case

    rows = measure_all(cases, num_threads, shown, failures)
    disturbed = sum(row.others > TOLERATED for row in rows)
    if disturbed:
        print(f"warning: other processes disturbed {disturbed} of {len(rows)} cases", file=sys.stderr)
    return rows


def _measure_room(
    family: str, args: argparse.Namespace, num_threads: int, failures: list[Failure]
) -> tuple[list[Row], list[Growth]]:
    """Measure times of the chosen cases of a benchmark package, and memory of its others unless the run is quick."""
    from tqdm import tqdm

    from ..bench.measure import recorded

    cases, measure = (importlib.import_module(f"ascend_grad.bench.{family}.{name}") for name in ("cases", "measure"))
    chosen = [case for case in (cases.quick() if args.quick else cases.full()) if _is_wanted(case.name, args)]
    memory_cases = [] if args.quick else [case for case in cases.memory() if _is_wanted(case.name, args)]
    if not chosen and not memory_cases:
        raise CommandError(f"no case contains {' and '.join(map(repr, args.filter))}")
    rows: list[Row] = []
    memory: list[Growth] = []
    with tqdm(total=len(chosen) + len(memory_cases), unit="case") as progress:
        for case in chosen:
            progress.set_postfix_str(case.name)
            with recorded(case.name, failures):
                rows.append(measure.measure(case, num_threads))
            progress.update()
        for case in memory_cases:
            progress.set_postfix_str(case.name)
            with recorded(case.name, failures):
                memory += measure.memory(case, num_threads)
            progress.update()
    return rows, memory


def _is_wanted(name: str, args: argparse.Namespace) -> bool:
    return all(text in name for text in args.filter)


def _measure_accuracy(texts: Sequence[str], failures: list[Failure]) -> list[Worst]:
    from tqdm import tqdm

    from ..bench.linear import accuracy as linear
    from ..bench.measure import recorded
    from ..bench.rowwise import accuracy as rowwise

    pairs = [(module, *pair) for module in (rowwise, linear) for pair in module.pairs()]
    pairs = [pair for pair in pairs if all(text in " ".join(pair[1:]) for text in texts)]
    if not pairs:
        raise CommandError(f"no operator and dtype contain {' and '.join(map(repr, texts))}")
    rows: list[Worst] = []
    with tqdm(pairs, unit="operator") as progress:
        for module, operator, dtype in progress:
            progress.set_postfix_str(f"{operator} {dtype}")
            with recorded(f"{operator} {dtype}", failures):
                rows += module.measure(operator, dtype)
    return rows
