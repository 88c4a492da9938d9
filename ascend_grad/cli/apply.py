"""``ascend-grad apply``: one operator on arrays of any size, in ``.npy`` files or in Zarr arrays."""

from __future__ import annotations

import argparse
import inspect
from typing import Any

import ascend_grad as ag

from .._call import Operator
from ..arrays import BFLOAT16, FLOATING_DTYPES
from ..operators import functions, losses, table
from ..operators.options import OPTIONS, OUTPUTS
from . import apply_npy
from .apply_job import Job, takes_out
from .errors import CommandError, out_of_memory
from .exit_statuses import exit_statuses
from .options import (
    CommandParser,
    add_command,
    add_execution_options,
    add_file_options,
    check_file_names,
    plain,
    progress_bar,
)
from .zarr_inputs import is_zarr, require_packages

OPERATORS = (
    *table.ROWWISE,
    table.FUSED_LINEAR_CROSS_ENTROPY_LOSS_GRAD,
    table.FUSED_LINEAR_ONLINE_MAX_SUM,
    table.FUSED_CROSS_ENTROPY_LOSS_WITH_MAX_SUM,
    table.LINEAR_TOP_K,
    table.CROSS_ENTROPY,
)
#: The logits, which exist in memory alone (all other results of that operator are small), and what has to be 0 but in
#: `cross_entropy`.
NOT_OFFERED = {"vocab_parallel_logits", "label_smoothing"}

INPUTS = {
    "grad_output": "gradient with respect to the forward result",
    "output": "forward result",
    "y": "forward result",
    "x": "input of the softmax",
    "mask": "bool, True where masked out",
    "grad": "gradient with respect to the loss of each row",
    "weight": "the layer's weight, a row for each entry of the vocabulary",
    "target": "class id of each row",
    "target_mask": "bool, or uint8 with a bit for each row: set if the target is in another shard",
    "masked_target": "row of weight that is the target of each row",
    "logits_max": "largest logit of each row",
    "sum_exp_logits": "sum of exp(logit - largest) of each row",
    "predicted_logits": "logit of each row's target, minus the largest logit of the row",
    "softmax": "probabilities; if given, logits_max and sum_exp_logits are not needed",
    "vocab_parallel_logits": "logits, from which the softmax is computed",
    "bias": "the layer's bias",
}
#: The types of arguments by the words that their annotations begin with.
_NUMBERS = {"int": int, "float": float}
REDUCTIONS = ("none", "mean", "sum")
DTYPES = {str(dtype): dtype for dtype in FLOATING_DTYPES}

SUMMARY = "apply an operator to .npy files and Zarr arrays of any size"
DESCRIPTION = """\
Apply an operator to arrays of any size, in .npy files or in Zarr arrays.

Row-wise operators compute the files in parts; the result has the same bits as that of one call. The linear operators
and cross_entropy compute whole files in one call. Large files are mapped, so they need not fit into memory.

Each result is a separate file. A line on stdout has its name, dtype and shape, and the time. Row-wise operators take
about as long as the disk takes to read the inputs and to write the result. They and cross_entropy also accept Zarr
arrays; if such a run is interrupted, the same command continues it.
"""
EPILOG = """\
examples:
  ascend-grad apply softmax x.npy -o y.npy
  ascend-grad apply softmax_backward --grad-output g.npy --output y.npy --axis -1 -o dx.npy
  ascend-grad apply log_softmax logits.npy --out-dtype float32 -o y.npy
  ascend-grad apply scaled_masked_softmax x.npy mask.npy --scale 0.125 -o y.npy
  ascend-grad apply softmax x.npy --dtype bfloat16 -o y.npy
  ascend-grad apply softmax x.zarr --axis 0 -o y.zarr
  ascend-grad apply cross_entropy logits.npy targets.npy -o loss.npy --input-grad-out gradient.npy
  ascend-grad apply fused_linear_cross_entropy_loss_grad --grad g.npy --input x.npy --weight w.npy \\
      --target-mask mask.npy --masked-target t.npy --logits-max max.npy --sum-exp-logits sum.npy \\
      --input-grad-out dx.npy --weight-grad-out dw.npy

'ascend-grad apply OP --help' lists the options of an operator.
"""
FILES = """\
An input is a .npy file. A result is a .npy file with exactly the given name; no suffix is added. It appears when all
results are complete; until then, an existing file of this name stays as it is.
"""
ZARR = """\

The inputs can also be Zarr arrays; the result is then a Zarr array. Until it is complete, its finished parts are in the
hidden directory .NAME.ascend-grad-part next to it. The same command does not compute them again.
"""
STATUSES = exit_statuses("all results are written")


def operator_hints(dest: str) -> dict[tuple[str, str], str]:
    """Return hints, as in `CommandParser.hints`, for misspelt operators and for operators in place of a command."""
    hints = {operator.name: f"did you mean: ascend-grad apply {operator.name}" for operator in OPERATORS}
    hints["linear_cross_entropy"] = "ascend-grad score gives its log-probabilities"
    return {(dest, name.replace("_", sign)): hint for name, hint in hints.items() for sign in "_-"}


def add_options(parser: CommandParser) -> None:
    parser.hints = operator_hints("operator")
    subparsers = parser.add_subparsers(dest="operator", metavar="OP", required=True)
    for operator in OPERATORS:
        _add_operator(subparsers, operator)


def _add_operator(subparsers, operator: Operator) -> None:
    function = getattr(ag, operator.name)
    summary = (inspect.getdoc(function) or "").partition("\n")[0].partition(":")[0].rstrip(".")
    end = f"{FILES}{ZARR if operator in (*table.ROWWISE, table.CROSS_ENTROPY) else ''}\n{STATUSES}"
    parser = add_command(subparsers, operator.name, help=summary, description=f"{summary}.", end=end)
    inputs = INPUTS | {name: plain(OPTIONS[name].text) for name in operator.optional_names if name in OPTIONS}
    inputs |= {
        name: f"gradient with respect to {name[5:]}" for name in operator.optional_names if name.startswith("grad_")
    }
    if operator is table.CROSS_ENTROPY:
        inputs["input"] = "the logits"
    else:
        inputs["input"] = "the layer's input" if operator in table.LINEAR else "input of the softmax"
    order = ", ".join(map(_option, operator.array_names))
    parser.add_argument("inputs", nargs="*", metavar="FILE", help=f"input files in the order {order}")
    for name in operator.array_names:
        parser.add_argument(
            _option(name), metavar="FILE", help=f"{inputs[name]}; required, as an option or by position"
        )
    for name in _optional_files(operator):
        parser.add_argument(_option(name), metavar="FILE", help=inputs[name])
    for name, (kind, default) in _settings(operator).items():
        if default is inspect.Parameter.empty:
            parser.add_argument(_option(name), type=kind, required=True, metavar="N", help=f"{name}; required")
        elif name == "axis":
            group = parser.add_mutually_exclusive_group()
            # With a default, argparse would not notice an option that repeats it beside the other one.
            text = f"axis to reduce (default: {default})"
            group.add_argument("--axis", type=kind, dest=name, default=argparse.SUPPRESS, metavar="N", help=text)
            group.add_argument("--dim", type=kind, dest=name, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        else:
            text = f"{plain(OPTIONS[name].text)} (default: %(default)s)" if name in OPTIONS else "default: %(default)s"
            parser.add_argument(_option(name), type=kind, default=default, metavar="N", help=text)
    if "reduction" in operator.parameters:
        text = "none: a loss for each row; mean, sum: one loss (default: %(default)s)"
        parser.add_argument("--reduction", choices=REDUCTIONS, default=REDUCTIONS[0], help=text)
    results = _result_options(operator)
    for name, option in results.items():
        flags = ("-o", option) if option == "--out" else (option,)
        text = "file of the result" if name == "result" else f"file of the result {name}"
        if len(results) == 1:
            text += "; required"
        elif operator is not table.CROSS_ENTROPY:
            text += "; required if it has more than one number for each row"
        parser.add_argument(*flags, metavar="FILE.npy", help=text)
    if takes_out(operator):
        text = (
            "dtype of the result (default: that of the library's function). bfloat16 is written as elements of 2 raw "
        )
        text += "bytes; read it with np.load(file).view(ml_dtypes.bfloat16)"
        parser.add_argument("--out-dtype", choices=DTYPES, help=text)
        hint = "--dtype is the dtype of inputs with elements of 2 raw bytes; for the result use --out-dtype"
        parser.hints = {("dtype", name): f"{hint} {name}" for name in DTYPES}
    add_file_options(parser)
    add_execution_options(parser)
    parser.set_defaults(out_dtype=None, usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    operator = table.OPERATORS[args.operator]
    results = _results(args, operator)
    _place_inputs(args, operator)
    if getattr(args, "denominator", None) is not None and args.reduction != "mean":
        args.usage_error("--denominator: expected with --reduction mean only")
    names = [name for name in (*operator.array_names, *_optional_files(operator)) if getattr(args, name) is not None]
    settings = {name: getattr(args, name, default) for name, (_, default) in _settings(operator).items()}
    if operator is table.FUSED_LINEAR_CROSS_ENTROPY_LOSS_GRAD:
        settings["output_mask"] = [name in results for name in operator.results]
    if operator is table.CROSS_ENTROPY:
        outputs = tuple(name for name in OUTPUTS if name in results)
        settings |= {"reduction": args.reduction, "outputs": outputs, "return_grad": "input_grad" in results}
    job = Job(
        operator,
        sources={name: getattr(args, name) for name in names},
        results=results,
        settings=settings,
        backend=args.backend,
        num_threads=args.threads,
        out_dtype=DTYPES.get(args.out_dtype),
        raw_dtype=None if args.dtype is None else BFLOAT16,
        bar=progress_bar(args, unit="B", unit_scale=True, unit_divisor=1024),
    )
    check_file_names([*job.sources.values(), *job.results.values()])
    try:
        zarrs = [source for source in job.sources.values() if is_zarr(source)]
        if zarrs:
            require_packages(zarrs[0])
            from . import apply_zarr

            apply_zarr.run(job)
        else:
            apply_npy.run(job, _result_options(operator))
    except MemoryError as error:
        raise out_of_memory(list(results.values()), list(job.sources.values()), error) from error
    return 0


def _place_inputs(args: argparse.Namespace, operator: Operator) -> None:
    """Give inputs by position the names of their options. End with an error of the usage if one is missing or twice."""
    names = operator.array_names
    if len(args.inputs) > len(names):
        expected = "one input" if len(names) == 1 else f"{len(names)} inputs"
        args.usage_error(f"{operator.name}: expected {expected}, got {len(args.inputs)} files")
    for name, path in zip(names, args.inputs):
        if getattr(args, name) is not None:
            args.usage_error(f"{_option(name)}: expected one file, got another by position: {path}")
        setattr(args, name, path)
    missing = [_option(name) for name in names if getattr(args, name) is None]
    if missing:
        args.usage_error(f"the following arguments are required: {', '.join(missing)}")


def _settings(operator: Operator) -> dict[str, tuple[type, Any]]:
    """Return types and defaults of the arguments that are numbers. A number for each row is not offered."""
    found: dict[str, tuple[type, Any]] = {}
    function = getattr(functions, operator.name, None) or getattr(losses, operator.name)
    for name, parameter in inspect.signature(function).parameters.items():
        offered = name not in NOT_OFFERED or operator is table.CROSS_ENTROPY
        if name in operator.parameters and offered:
            is_option = name in OPTIONS and OPTIONS[name].is_number
            kind = float if is_option else _NUMBERS.get(str(parameter.annotation).split()[0])
            if kind is not None:
                found[name] = (kind, parameter.default)
    return found


def _optional_files(operator: Operator) -> list[str]:
    """Return the names of optional arguments that are files."""
    settings = _settings(operator)
    return [name for name in operator.optional_names if name not in settings]


def _result_options(operator: Operator) -> dict[str, str]:
    """Return the option that names the file of each result."""
    if len(operator.results) == 1:
        return {operator.results[0]: "--out"}
    options = {name: f"{_option(name)}-out" for name in operator.results if name not in NOT_OFFERED}
    return options | {"loss": "--out"} if operator is table.CROSS_ENTROPY else options


def _results(args: argparse.Namespace, operator: Operator) -> dict[str, str]:
    """Return the path of each requested result."""
    options = _result_options(operator)
    paths = {name: getattr(args, option[2:].replace("-", "_")) for name, option in options.items()}
    paths = {name: path for name, path in paths.items() if path is not None}
    if not paths:
        one_of = "-o" if len(options) == 1 else " or ".join(options.values())
        note = f" (--output is an input, the {INPUTS['output']})" if "output" in operator.array_names else ""
        raise CommandError(f"name a file for a result, with {one_of}{note}")
    return paths


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
