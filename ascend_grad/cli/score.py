"""``ascend-grad score``: log-probabilities, entropies and top-k entries of the rows of a linear layer's input."""

from __future__ import annotations

import argparse

from ..arrays import BFLOAT16
from ..operators.options import OUTPUTS
from . import score_npy
from .errors import CommandError, out_of_memory
from .exit_statuses import exit_statuses
from .options import add_execution_options, add_file_options, check_file_names, plain, progress_bar
from .score_job import ScoreJob
from .zarr_inputs import is_zarr, require_packages

#: The results, with the flags of their options and their descriptions.
RESULTS = {
    "log_prob": (("-o", "--log-prob-out"), OUTPUTS["log_prob"].text),
    "entropy": (("--entropy-out",), OUTPUTS["entropy"].text),
    "lse": (("--lse-out",), OUTPUTS["lse"].text),
    "predicted": (("--predicted-out",), OUTPUTS["predicted"].text),
    "top_k_log_prob": (("--top-k-log-prob-out",), "the K largest log-probabilities of each row, the largest one first"),
    "top_k_index": (("--top-k-index-out",), "the vocabulary entries of these log-probabilities"),
}

#: The name of the file of targets in messages, with its place and contents.
TARGETS = "TARGETS, a third file after HIDDEN and WEIGHT: the id of each row's target, integers of shape (N,)"

SUMMARY = "score tokens: log-probabilities, entropies and top-k of a linear layer's rows, from files of any size"
DESCRIPTION = """\
Score the rows of a linear layer's input: log-probabilities of targets, entropies, and the K most probable entries.

A row's logits are the dot products of the row of HIDDEN with all rows of WEIGHT, plus --bias, times --logit-scale,
capped by --softcap, divided by --temperature. Logits are never stored. HIDDEN may be of any size: its rows are computed
in chunks of about 64 MB, and of at least 1024 rows.

HIDDEN is a .npy file or a Zarr array, and the results are of the same kind. WEIGHT, TARGETS and --bias may be either.
A line on stdout names each result. With TARGETS, the last line has the number of scored tokens, their mean negative
log-likelihood, and the perplexity. If the results are Zarr arrays, this line is printed only with -o.
"""
EPILOG = """\
examples:
  ascend-grad score hidden.npy weight.npy targets.npy -o log_prob.npy
  ascend-grad score hidden.npy weight.npy targets.npy -o log_prob.npy --entropy-out entropy.npy --dtype bfloat16
  ascend-grad score hidden.npy weight.npy --top-k 64 --top-k-log-prob-out top.npy --top-k-index-out index.npy
  ascend-grad score hidden.zarr weight.npy targets.npy -o log_prob.zarr

Results that are .npy files appear, with exactly the given names, when all of them are complete; until then, existing
files stay as they are. A result that is a Zarr array appears when it is complete. Until then, its finished parts are in
the hidden directory .NAME.ascend-grad-part next to it. The same command does not compute them again.
"""
STATUSES = exit_statuses("all results are written")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "hidden", metavar="HIDDEN", help="the layer's input, shape (N, H); errors of the library call it `input`"
    )
    parser.add_argument("weight", metavar="WEIGHT", help="the layer's weight, shape (V, H), in the dtype of HIDDEN")
    parser.add_argument(
        "targets",
        metavar="TARGETS",
        nargs="?",
        help="the class id of each row, integers of shape (N,), or K ids of each row, shape (N, K); needed only for -o "
        "and --ignore-index",
    )
    for flags, description in RESULTS.values():
        parser.add_argument(*flags, metavar="OUT", help=plain(description))
    parser.add_argument("--top-k", type=int, metavar="K", help="number of entries in each row of the --top-k-* results")
    parser.add_argument("--ignore-index", type=int, metavar="N", help="target of rows to ignore (default: -100)")
    parser.add_argument("--bias", metavar="FILE", help="the layer's bias, shape (V,), of any floating dtype")
    parser.add_argument(
        "--logit-scale", type=float, default=1.0, metavar="F", help="factor of the products (default: %(default)s)"
    )
    parser.add_argument(
        "--softcap", type=float, metavar="C", help="cap of the logits: C * tanh(logit / C), before --temperature"
    )
    parser.add_argument(
        "--temperature", type=float, default=1.0, metavar="T", help="divisor of the logits (default: %(default)s)"
    )
    parser.add_argument(
        "--workspace-bytes", type=int, metavar="N", help="bytes of a call's workspace (default: automatic)"
    )
    add_file_options(parser)
    add_execution_options(parser)


def run(args: argparse.Namespace) -> int:
    results = {name: getattr(args, _attribute(name)) for name in RESULTS}
    results = {name: path for name, path in results.items() if path is not None}
    _check_options(args, results)
    job = ScoreJob(
        hidden=args.hidden,
        weight=args.weight,
        targets=args.targets,
        results=results,
        top_k=args.top_k,
        ignore_index=-100 if args.ignore_index is None else args.ignore_index,
        bias=args.bias,
        logit_scale=args.logit_scale,
        softcap=args.softcap,
        temperature=args.temperature,
        workspace_bytes=args.workspace_bytes,
        backend=args.backend,
        num_threads=args.threads,
        raw_dtype=None if args.dtype is None else BFLOAT16,
        bar=progress_bar(args, desc="score", unit=" rows"),
    )
    check_file_names([*job.sources, *results.values()])
    try:
        if is_zarr(job.hidden):
            require_packages(job.hidden)
            from . import score_zarr

            score_zarr.run(job)
        else:
            score_npy.run(job)
    except MemoryError as error:
        raise out_of_memory(list(results.values()), job.sources, error) from error
    return 0


def _attribute(result: str) -> str:
    """Return the name under which argparse stores the path of a result."""
    return RESULTS[result][0][-1][2:].replace("-", "_")


def _check_options(args: argparse.Namespace, results: dict[str, str]) -> None:
    flags = {name: RESULTS[name][0][-1] for name in RESULTS}
    if not results:
        raise CommandError(f"name a file for a result, with {' or '.join(flags.values())}")
    for name in results:
        if name.startswith("top_k") and args.top_k is None:
            raise CommandError(f"{flags[name]} needs --top-k")
    if args.top_k is not None and not any(name.startswith("top_k") for name in results):
        raise CommandError("--top-k needs a file for its result: --top-k-log-prob-out or --top-k-index-out")
    if args.targets is None:
        if "log_prob" in results:
            raise CommandError(f"{flags['log_prob']} needs {TARGETS}")
        if args.ignore_index is not None:
            raise CommandError(f"--ignore-index needs {TARGETS}")
