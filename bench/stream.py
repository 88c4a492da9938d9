"""The limit that memory sets: a stream of the same traffic, on the same arrays.

A backward call reads two arrays and writes one, a forward call reads one; so does ``out = a + b``, with ``b`` the same
memory as ``a`` for forward calls (the second read hits the cache). The faster of ordinary and non-temporal stores
counts. What a mask adds to the traffic is not counted. Arrays that fit into a core's own cache have no such limit.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ascend_grad import _rowwise

from .cases import Case, Operands
from .rivals import Call

SMALLEST = 2**20
ORDINARY, NON_TEMPORAL = "stream", "stream non-temporal"


def calls(case: Case, operands: Operands, num_threads: int) -> dict[str, Call]:
    """The two streams of a case. A new result has the price of its pages on top: no stream tells its limit."""
    if case.mode != "out" or case.nbytes < SMALLEST:
        return {}
    floats = [a for a in operands.inputs if a.dtype == operands.out.dtype]
    a, b, out = (_as_float32(array) for array in (floats[0], floats[-1], operands.out))
    return both(a, b, lambda: out, num_threads)


def both(a: np.ndarray, b: np.ndarray, out: Callable[[], np.ndarray], num_threads: int) -> dict[str, Call]:
    """The stream with ordinary and with non-temporal stores."""
    return {
        ORDINARY: lambda: _rowwise.stream_add(a, b, out(), False, num_threads),
        NON_TEMPORAL: lambda: _rowwise.stream_add(a, b, out(), True, num_threads),
    }


def _as_float32(array: np.ndarray) -> np.ndarray:
    """The array itself, or for other types float32 values of the same size: their bits could be slow subnormals."""
    if array.dtype == np.float32:
        return array.reshape(-1)
    return np.ones(array.nbytes // 4, np.float32)
