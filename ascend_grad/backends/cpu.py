"""The CPU backend: compiled kernels behind `_rowwise`, and behind `cpu_linear` for the linear operators."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import _cpu, _memory, _openmp, _rowwise, arrays
from ..contract import LINEAR, Call
from . import cpu_linear

NAME = "cpu"


def status() -> tuple[bool, str]:
    return True, f"{_cpu.variant()} kernels, {_openmp.DESCRIPTION}"


def refusal(call: Call) -> None:
    return None


def run(call: Call, num_threads: int | None) -> Any:
    if call.operator in LINEAR:
        return cpu_linear.run(call, num_threads)
    return _run_rowwise(call, num_threads)


def workspace_size(call: Call, num_threads: int | None) -> int:
    """Bytes that `run` takes beyond arguments and results, at most: by shapes, dtypes and layouts alone."""
    if call.operator in LINEAR:
        return cpu_linear.workspace_size(call, num_threads)
    (out,), (spec,) = call.outs, call.specs
    assert spec is not None
    copied = 0
    if out is None:
        out = arrays.without_memory(spec.shape, spec.dtype)
    elif _needs_copy(call, out):
        copied = out.nbytes
        out = arrays.without_memory(spec.shape, arrays.native(out.dtype))
    name, dim = call.operator.name, call.arguments.get("dim", -1)
    return copied + _rowwise.workspace_bound(name, call.arrays, out, dim, num_threads)


def _needs_copy(call: Call, out: np.ndarray) -> bool:
    """Whether the result has to be computed aside: out shares memory with an input, but not element for element."""
    return any(arrays.may_overlap(out, array) and not arrays.same_memory(out, array) for array in call.arrays)


def _run_rowwise(call: Call, num_threads: int | None) -> np.ndarray:
    first = call.arrays[0]
    (given,) = call.outs
    if given is None:
        out = _rowwise.empty(first, arrays.native(first.dtype))
    elif _needs_copy(call, given):
        out = _rowwise.empty(given, arrays.native(given.dtype))
    else:
        out = given
    _rowwise.compute(
        call.operator.name,
        call.arrays,
        out,
        call.arguments.get("dim", -1),
        call.arguments.get("scale", 1.0),
        num_threads,
    )
    if given is not None and out is not given:
        _memory.copy_into(given, out)
        return given
    return out
