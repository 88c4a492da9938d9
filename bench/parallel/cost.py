"""The time of a step on many ranks, by arithmetic: kernels at a known rate, sums by latency and bandwidth.

A message of n bytes takes ``latency + n / bandwidth`` (the alpha-beta model). A sum over p ranks is a reduce-scatter
and an all-gather by halving and doubling: ``2 log2 p`` messages, ``2 (p - 1) / p`` times its bytes (Thakur,
Rabenseifner and Gropp, 2005). Nothing is hidden behind computing, no rank is late, and the network is as fast for all
ranks at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ascend_grad.parallel.agreement import CARD_BYTES

from .cases import Case

#: Of a number on its way: float32.
NUMBER_BYTES = 4


class Network(NamedTuple):
    """What a message takes."""

    name: str
    latency: float  #: seconds
    bandwidth: float  #: bytes per second


NETWORKS = (
    Network("10 Gbit/s Ethernet", 30e-6, 1.25e9),
    Network("100 Gbit/s InfiniBand", 2e-6, 12.5e9),
    Network("400 Gbit/s InfiniBand", 2e-6, 50e9),
)


class Step(NamedTuple):
    """Seconds of one step."""

    kernels: float
    communication: float

    @property
    def total(self) -> float:
        return self.kernels + self.communication

    @property
    def share(self) -> float:
        """The part that communication takes."""
        return self.communication / self.total


def all_gather(network: Network, size: int, bytes_each: float) -> float:
    """Every rank gets what every rank has."""
    return math.ceil(math.log2(size)) * network.latency + (size - 1) * bytes_each / network.bandwidth


def all_reduce(network: Network, size: int, bytes_each: float) -> float:
    """Every rank gets the sum."""
    messages = 2 * math.ceil(math.log2(size))
    return messages * network.latency + 2 * (size - 1) / size * bytes_each / network.bandwidth


def step(case: Case, size: int, rate: float, network: Network) -> Step:
    """One step of `size` ranks whose kernels each do the undivided problem at `rate` operations a second."""
    if size == 1:
        return Step(case.flops / rate, 0.0)
    communication = all_gather(network, size, CARD_BYTES) + all_reduce(network, size, NUMBER_BYTES * case.summed)
    if case.split == "words":
        rows = case.shape[0] * NUMBER_BYTES
        communication += all_reduce(network, size, rows) + all_reduce(network, size, 2 * rows)
    else:
        communication += all_reduce(network, size, 16)
    return Step(case.split_flops / size / rate, communication)


def efficiency(case: Case, size: int, rate: float, network: Network) -> float:
    """The time of one rank over that of all of them together."""
    return step(case, 1, rate, network).total / (size * step(case, size, rate, network).total)


def fitted(name: str, sums: Sequence[tuple[int, float]], size: int) -> Network:
    """The network in which two sums of so many bytes, few and many, take these seconds."""
    (few, soon), (many, late) = sums
    moved = 2 * (size - 1) / size
    bandwidth = moved * (many - few) / (late - soon)
    messages = 2 * math.ceil(math.log2(size))
    return Network(name, max(0.0, soon - moved * few / bandwidth) / messages, bandwidth)
