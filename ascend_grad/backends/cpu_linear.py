"""The linear operators on the CPU.

The compiled kernels are not here yet: until they are, the formulas of the reference compute in their place.
"""

from __future__ import annotations

from .. import arrays
from ..contract import DEFAULT_WORKSPACE_BYTES, Call
from . import reference


def run(call: Call, num_threads: int | None) -> tuple:
    return reference.run(call, num_threads)


def workspace_size(call: Call, num_threads: int | None) -> int:
    """Bytes beyond arguments and results, at most, from shapes, dtypes and layouts alone.

    The workspace itself; where results are of 16 bits, a float32 accumulator of input's size; for each `out` that
    overlaps an input, a copy of the result.
    """
    size = call.arguments.get("workspace_bytes", DEFAULT_WORKSPACE_BYTES)
    for name, spec, out in zip(call.operator.results, call.specs, call.outs):
        if name == "input_grad" and spec is not None and spec.dtype.itemsize == 2:
            size += 4 * call.arguments["input"].size
        if out is not None and any(arrays.may_overlap(out, array) for array in call.inputs):
            size += out.nbytes
    return size
