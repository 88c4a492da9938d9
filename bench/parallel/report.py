"""Tables of the losses over ranks: measured times, the model's times of the same cases, and its times on more ranks."""

from __future__ import annotations

from ..tables import milliseconds, percent, table
from . import cost
from .cost import MODELLED, NETWORKS
from .measure import SIDES, ParallelResults

#: Numbers of ranks in the model's table.
SIZES = (2, 8, 64, 512, 4096)


def blocks(results: ParallelResults) -> dict[str, str]:
    """Make the blocks of the losses over ranks, by name."""
    facts = "; ".join(f"{name} {value}" for name, value in results.machine.items())
    sums = f"Sums over the processes take what {network_text(results)} would."
    return {
        "parallel_machine": f"Measured on this machine: {facts}. {sums}\n",
        "parallel_measured": measured_block(results),
        "parallel_model": model_block(results),
    }


def measured_block(results: ParallelResults) -> str:
    """Make a table of the processes' efficiency, and of the model's times with the measured latency and bandwidth."""
    network = cost.fitted("this machine", results.sums, results.size)
    lines = []
    for row in results.rows:
        one, several, communication = (row.seconds[side] for side in SIDES)
        lines.append(
            [
                f"{'x'.join(map(str, row.case.shape))} {row.case.dtype}, {row.case.mode}",
                milliseconds(one),
                milliseconds(several),
                percent(one / several),
                percent(communication / several),
                milliseconds(cost.step(row.case, results.size, results.rate(row), network).total),
            ]
        )
    processes = f"{results.size} processes, ms"
    return table(["BT x V x H", "one, ms", processes, "efficiency", "communication", "model, ms"], lines)


def network_text(results: ParallelResults) -> str:
    """Format the latency and bandwidth measured on this machine."""
    network = cost.fitted("this machine", results.sums, results.size)
    return f"{network.latency * 1e6:.1f} us and {network.bandwidth / 1e9:.1f} GB/s"


def model_block(results: ParallelResults) -> str:
    """Make a table of the efficiency on many ranks, computed by the model."""
    # The model has the rate of the fastest case.
    own_rate = max(results.rate(row) for row in results.rows if row.case.dtype == MODELLED[0].dtype)
    lines = [
        [
            f"{network.name}, {case.mode}",
            *(percent(cost.efficiency(case, size, own_rate, network)) for size in SIZES),
        ]
        for network in NETWORKS
        for case in MODELLED
    ]
    return table(["network, what is split", *(f"{size} ranks" for size in SIZES)], lines)
