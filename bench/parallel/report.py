"""Tables of the losses over ranks: measured times, the model's times of the same cases, and its times on more ranks."""

from __future__ import annotations

from ..tables import milliseconds, percent, table
from . import cost
from .cases import MODELLED, Case
from .cost import NETWORKS, Network
from .measure import ParallelResults

#: Numbers of ranks in the model's table.
SIZES = (2, 8, 64, 512, 4096)


def rate(results: ParallelResults, dtype: str) -> float:
    """Return the operations per second and thread of one process with all threads, in its fastest case."""
    return max(row.case.flops / row.one / results.size for row in results.rows if row.case.dtype == dtype)


def measured_block(results: ParallelResults) -> str:
    """Make a table of the processes' efficiency, and of the model's times with the measured latency and bandwidth."""
    network = cost.fitted("this machine", results.sums, results.size)
    lines = []
    for row in results.rows:
        own_rate = row.case.flops / row.one / results.size
        lines.append(
            [
                str(row.case),
                milliseconds(row.one),
                milliseconds(row.several),
                percent(row.one / row.several),
                percent(row.communication / row.several),
                milliseconds(cost.step(row.case, results.size, own_rate, network).total),
            ]
        )
    several = f"{results.size} processes, ms"
    return table(["BT x V x H", "one, ms", several, "efficiency", "communication", "model, ms"], lines)


def network_text(results: ParallelResults) -> str:
    """Format the latency and bandwidth measured on this machine."""
    network = cost.fitted("this machine", results.sums, results.size)
    return f"{network.latency * 1e6:.1f} us and {network.bandwidth / 1e9:.1f} GB/s"


def model_block(results: ParallelResults) -> str:
    """Make a table of the efficiency on many ranks, computed by the model."""
    own_rate = rate(results, MODELLED[0].dtype)
    lines = [
        [
            f"{network.name}, {case.split}",
            *(percent(cost.efficiency(case, size, own_rate, network)) for size in SIZES),
        ]
        for network in NETWORKS
        for case in MODELLED
    ]
    return table(["network, what is split", *(f"{size} ranks" for size in SIZES)], lines)


def crossover(case: Case, size: int, own_rate: float, network: Network) -> int:
    """Return the least number of tokens for which splitting the tokens is faster than splitting the vocabulary."""
    low, high = 1, 1 << 40
    while low < high:
        rows = (low + high) // 2
        vocabulary, tokens = (
            cost.step(Case((rows, *case.shape[1:]), case.dtype, split), size, own_rate, network).total
            for split in ("vocabulary", "tokens")
        )
        low, high = (low, rows) if tokens < vocabulary else (rows + 1, high)
    return low
