"""The limit that memory sets: an addition with the same memory traffic (as in STREAM), on the same arrays.

A backward call reads two arrays and writes one, a forward call reads one and writes one. So does ``out = a + b``, with
``b`` the same memory as ``a`` for forward calls (the second read hits the cache). The faster of ordinary and
non-temporal stores counts. The traffic of a mask is not counted. Arrays that fit into a core's own cache have no such
limit.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ascend_grad import _rowwise_python

from .frameworks import Call

SMALLEST = 2**20
ORDINARY, NON_TEMPORAL = "stream", "stream non-temporal"


def both(a: np.ndarray, b: np.ndarray, out: Callable[[], np.ndarray], num_threads: int) -> dict[str, Call]:
    """Return the calls of the addition with ordinary and with non-temporal stores."""
    return {
        ORDINARY: lambda: _rowwise_python.stream_add(a, b, out(), False, num_threads),
        NON_TEMPORAL: lambda: _rowwise_python.stream_add(a, b, out(), True, num_threads),
    }
