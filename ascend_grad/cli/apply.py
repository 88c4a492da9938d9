"""``ascend-grad apply``: one operator on arrays in files, of any size, through memory maps."""

from __future__ import annotations

import argparse
import inspect
import os
from collections.abc import Callable, Iterable
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from numpy.typing import NDArray

import ascend_grad as ag

from .. import contract
from ..arrays import BFLOAT16, FLOATING_DTYPES, native
from .chunks import boxes
from .options import add_execution_options

if TYPE_CHECKING:
    from tqdm import tqdm

    from .npy_files import MappedArray

OPERATORS = (
    contract.SOFTMAX_BACKWARD,
    contract.LOG_SOFTMAX_BACKWARD,
    contract.SCALED_MASKED_SOFTMAX_BACKWARD,
    contract.SOFTMAX,
    contract.LOG_SOFTMAX,
    contract.SCALED_MASKED_SOFTMAX,
)
INPUTS = {
    "grad_output": "gradient with respect to the forward result",
    "output": "forward result",
    "y": "forward result",
    "input": "values to take the softmax of",
    "x": "values to take the softmax of",
    "mask": "bool, True where masked out",
}
#: The arguments that are no arrays.
SETTINGS = {"dim": int, "scale": float}
DTYPES = {str(dtype): dtype for dtype in FLOATING_DTYPES}

#: Mapped pages are given back each time this much of the result is done.
RELEASED_BYTES = 2**26

DESCRIPTION = """\
Apply an operator to arrays in .npy or .npz files of any size.

The files are memory-mapped and worked through in boxes; the result is the same, bit for bit, as that of one call.
"""
EPILOG = """\
examples:
  ascend-grad apply softmax_backward --grad-output g.npy --output y.npy --dim -1 -o dx.npy
  ascend-grad apply log_softmax --input logits.npz:x --out-dtype float32 -o y.npy
  ascend-grad apply scaled_masked_softmax --x x.npy --mask mask.npy --scale 0.125 -o y.npy
  ascend-grad apply softmax --input x.npy --dtype bfloat16 -o y.npy

'ascend-grad apply OP --help' lists the options of an operator.
"""
FILES = """\
An input is FILE.npy, FILE.npz with one array in it, or FILE.npz:MEMBER, which is first copied, decompressed, to a
temporary file. The result is a .npy file. It appears under its name when it is complete; until then the name is
untouched.
"""


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "apply",
        help="apply an operator to .npy and .npz files of any size",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    subparsers = parser.add_subparsers(dest="operator", metavar="OP", required=True)
    for operator in OPERATORS:
        _add_operator(subparsers, operator)


def _add_operator(subparsers, operator: contract.Operator) -> None:
    function = getattr(ag, operator.name)
    summary = (inspect.getdoc(function) or "").partition("\n")[0].partition(":")[0].rstrip(".")
    parser = subparsers.add_parser(
        operator.name, help=summary, description=f"{summary}.", epilog=FILES, allow_abbrev=False
    )
    for name in operator.array_names:
        parser.add_argument(_option(name), required=True, metavar="FILE", help=INPUTS[name])
    parameters = inspect.signature(function).parameters
    for name, kind in SETTINGS.items():
        if name in parameters:
            parser.add_argument(_option(name), type=kind, default=parameters[name].default, help="default: %(default)s")
    parser.add_argument("-o", "--out", required=True, metavar="FILE.npy", help="the result")
    parser.add_argument("--out-dtype", choices=DTYPES, help="dtype of the result (default: that of the inputs)")
    parser.add_argument("--dtype", choices=["bfloat16"], help="what elements of 2 raw bytes are (NumPy cannot tell)")
    add_execution_options(parser)
    parser.add_argument("--tmp-dir", metavar="DIR", help="for copies of .npz members (default: the result's directory)")
    parser.add_argument(
        "--progress", action=argparse.BooleanOptionalAction, help="progress bar (default: if stderr is a terminal)"
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from .npy_files import checked_target, new_npy, open_array, parse_source

    operator = contract.OPERATORS[args.operator]
    sources = [parse_source(getattr(args, name)) for name in operator.array_names]
    target = checked_target(args.out, sources)
    # For tqdm, None means: unless stderr is a terminal.
    disable = None if args.progress is None else not args.progress
    bar = partial(tqdm, unit="B", unit_scale=True, unit_divisor=1024, disable=disable)
    raw_dtype = None if args.dtype is None else BFLOAT16
    inputs = [open_array(source, raw_dtype, args.tmp_dir or os.path.dirname(target), bar) for source in sources]

    arrays = [mapped.array for mapped in inputs]
    settings = {name: getattr(args, name) for name in SETTINGS if hasattr(args, name)}
    # Every rule of the contract is checked here, before anything is written. One backend then takes all the boxes.
    backend = ag.explain(operator.name, *arrays, **settings, backend=args.backend, num_threads=args.threads).backend
    function = partial(getattr(ag, operator.name), **settings, backend=backend, num_threads=args.threads)

    shape, fortran_order = arrays[0].shape, arrays[0].flags.fnc
    dtype = DTYPES[args.out_dtype] if args.out_dtype else native(arrays[0].dtype)
    start = perf_counter()
    with (
        new_npy(target, shape, dtype, fortran_order) as result,
        bar(desc=operator.name, total=result.array.nbytes) as progress,
    ):
        dim = settings.get("dim", -1) % max(len(shape), 1)
        _fill(result, function, inputs, boxes(shape, dim, fortran_order), progress)
    seconds = perf_counter() - start
    print(f"{args.out}: {dtype} {shape}, computed and written in {seconds:.2f} s (backend {backend})")
    return 0


def _fill(result: MappedArray, function: Callable, inputs: list[MappedArray], parts: Iterable, progress: tqdm) -> None:
    """Compute the result box by box."""
    unreleased = 0
    for box in parts:
        out = _cut(result.array, box)
        function(*(_cut(mapped.array, box) for mapped in inputs), out=out)
        progress.update(out.nbytes)
        unreleased += out.nbytes
        if unreleased >= RELEASED_BYTES:
            for mapped in (*inputs, result):
                mapped.release()
            unreleased = 0


def _cut(array: NDArray, box: tuple[slice, ...]) -> NDArray:
    """The part of an array that belongs to a box; where a mask has length 1, it serves all boxes."""
    # With the ellipsis a rank-0 array gives a view, too, and no scalar.
    index: tuple = (..., *(slice(None) if length == 1 else part for length, part in zip(array.shape, box)))
    return array[index]


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
