"""The CPU backend: compiled kernels behind `_rowwise`."""

from __future__ import annotations

import numpy as np

from .. import _cpu, _openmp, _rowwise, arrays
from ..contract import Call

NAME = "cpu"


def status() -> tuple[bool, str]:
    return True, f"{_cpu.variant()} kernels, {_openmp.DESCRIPTION}"


def refusal(call: Call) -> str | None:
    return None


def _needs_copy(call: Call) -> bool:
    """Whether the result has to be computed aside: out shares memory with an input, but not element for element."""
    return call.out is not None and any(
        arrays.may_overlap(call.out, array) and not arrays.same_memory(call.out, array) for array in call.arrays
    )


def run(call: Call, num_threads: int | None) -> np.ndarray:
    first = call.arrays[0]
    if call.out is None:
        out = _rowwise.empty(first, arrays.native(first.dtype))
    elif _needs_copy(call):
        out = _rowwise.empty(call.out, arrays.native(call.out.dtype))
    else:
        out = call.out
    _rowwise.compute(
        call.operator.name,
        call.arrays,
        out,
        call.arguments.get("dim", -1),
        call.arguments.get("scale", 1.0),
        num_threads,
    )
    if call.out is not None and out is not call.out:
        call.out[...] = out
        return call.out
    return out


def workspace_size(call: Call, num_threads: int | None) -> int:
    copied = call.out.nbytes if call.out is not None and _needs_copy(call) else 0
    return copied + _rowwise.workspace_bound(call.arrays[0], call.arguments.get("dim", -1), num_threads)
