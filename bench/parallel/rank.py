"""Run one side of the measurement: ``python -m ascend_grad.bench.parallel.rank FILE THREADS``.

Under mpiexec the cases are split over the processes. A single process computes them whole. The first rank writes the
results to FILE.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import ascend_grad as ag
from ascend_grad import parallel
from ascend_grad.parallel.communicators import Collectives
from ascend_grad.parallel.transports import collectives

from ..case import Case, numpy_dtype
from .cost import MEASURED, VOCABULARY
from .timing import TimedCollectives

#: Timed calls of each case, of which the median counts.
CALLS = 5
#: Bytes of two sums, from whose times latency and bandwidth are computed.
SMALL, LARGE = 1 << 10, 16 << 20


def call_of(case: Case, ranks: Collectives) -> Callable[[], Any]:
    """Prepare the call that computes this rank's part of a case."""
    bt, v, h = case.shape
    random = np.random.default_rng(0)
    x = random.standard_normal((bt, h), np.float32).astype(numpy_dtype(case.dtype))
    w = (random.standard_normal((v, h), np.float32) / np.sqrt(h)).astype(numpy_dtype(case.dtype))
    target = random.integers(0, v, bt)
    if ranks.size == 1:
        return lambda: ag.linear_cross_entropy(x, w, target)
    part = slice(*parallel.vocab_range(v if case.mode == VOCABULARY else bt, ranks.rank, ranks.size))
    if case.mode == VOCABULARY:
        shard = w[part].copy()
        return lambda: parallel.linear_cross_entropy(x, shard, target, comm=ranks)
    rows, targets = x[part].copy(), target[part]
    return lambda: parallel.data_parallel_linear_cross_entropy(rows, w, targets, comm=ranks)


def timed(call: Callable[[], Any], ranks: TimedCollectives) -> tuple[float, float]:
    """Return the median seconds of a call, and of its communication, including waits for other ranks."""
    call()
    times = []
    for _ in range(CALLS):
        ranks.allgather(np.zeros(1))  # a barrier, so that all ranks begin together
        ranks.seconds, start = 0.0, time.perf_counter()
        call()
        times.append((time.perf_counter() - start, ranks.seconds))
    return sorted(times)[CALLS // 2]


def sum_seconds(ranks: Collectives, count: int) -> float:
    """Return the least seconds of several sums of `count` bytes over the ranks."""
    array, times = np.zeros(count // 4, np.float32), []
    for _ in range(20):
        start = time.perf_counter()
        ranks.allreduce(array, "sum")
        times.append(time.perf_counter() - start)
    return min(times)


def main(file: str, threads: str) -> None:
    """Measure all cases, and write their times to a file."""
    comm = None
    if threads == "1":
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
    ranks = TimedCollectives(collectives(comm, "comm", "bench"))
    ag.set_num_threads(int(threads))
    found: dict[str, Any] = {"size": ranks.size, "seconds": [timed(call_of(case, ranks), ranks) for case in MEASURED]}
    if ranks.size > 1:
        found["sums"] = [(size, sum_seconds(ranks, size)) for size in (SMALL, LARGE)]
    if ranks.rank == 0:
        Path(file).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
