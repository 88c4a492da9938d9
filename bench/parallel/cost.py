"""A cost model of a step on many ranks: kernels at a known rate, sums by latency and bandwidth.

A message of n bytes takes ``latency + n / bandwidth`` (the alpha-beta model). A sum over p ranks is a reduce-scatter
and an all-gather by halving and doubling: ``2 log2 p`` messages, ``2 (p - 1) / p`` times its bytes (Thakur,
Rabenseifner and Gropp, 2005). The model assumes that communication and computation do not overlap, no rank is late,
and the network is equally fast if all ranks use it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ascend_grad.parallel.agreement import RECORD_BYTES

from ..case import WHOLE, Case

VOCABULARY, TOKENS = "vocabulary", "tokens"
#: Linear cross-entropies that are measured. The mode says what is split over the ranks: vocabulary entries, or tokens.
MEASURED = tuple(
    Case(WHOLE, dtype, shape, split)
    for shape in ((1024, 32768, 1024), (4096, 32000, 512))
    for dtype in ("float32", "bfloat16")
    for split in (VOCABULARY, TOKENS)
)
#: One step of a large model: 16,384 tokens, 151,936 vocabulary entries, 4096 features.
MODELLED = tuple(Case(WHOLE, "bfloat16", (16384, 151936, 4096), split) for split in (VOCABULARY, TOKENS))

#: Bytes of a number of a gradient in a message (float32).
NUMBER_BYTES = 4
#: Bytes of the maximum of a row in a message, and of its sums (float64).
MAXIMUM_BYTES, SUMS_BYTES = 8, 40


class Network(NamedTuple):
    """The latency and bandwidth of a message."""

    name: str
    latency: float  #: seconds
    bandwidth: float  #: bytes per second


NETWORKS = (
    Network("10 Gbit/s Ethernet", 30e-6, 1.25e9),
    Network("100 Gbit/s InfiniBand", 2e-6, 12.5e9),
    Network("400 Gbit/s InfiniBand", 2e-6, 50e9),
)


class Step(NamedTuple):
    """The seconds of one step."""

    kernels: float
    communication: float

    @property
    def total(self) -> float:
        return self.kernels + self.communication


def all_gather(network: Network, size: int, bytes_each: float) -> float:
    """Return the seconds in which every rank gets `bytes_each` bytes from every rank."""
    return math.ceil(math.log2(size)) * network.latency + (size - 1) * bytes_each / network.bandwidth


def all_reduce(network: Network, size: int, bytes_each: float) -> float:
    """Return the seconds in which every rank gets the sum of arrays of `bytes_each` bytes."""
    messages = 2 * math.ceil(math.log2(size))
    return messages * network.latency + 2 * (size - 1) / size * bytes_each / network.bandwidth


def step(case: Case, size: int, rate: float, network: Network) -> Step:
    """Return the time of one step of `size` ranks, whose kernels each compute `rate` operations per second."""
    if size == 1:
        return Step(case.operations / rate, 0.0)
    rows, vocabulary, width = case.shape
    # A sum over the ranks makes the gradient that each of them has a part of.
    summed = (rows if case.mode == VOCABULARY else vocabulary) * width
    communication = all_gather(network, size, RECORD_BYTES) + all_reduce(network, size, NUMBER_BYTES * summed)
    if case.mode == VOCABULARY:
        communication += all_reduce(network, size, MAXIMUM_BYTES * rows) + all_reduce(network, size, SUMS_BYTES * rows)
    else:
        communication += all_reduce(network, size, 16)
    # 16-bit logits that do not fit into the workspace are computed twice.
    computed = case.operations * (1 if case.dtype in ("float32", "float64") else 4 / 3)
    return Step(computed / size / rate, communication)


def efficiency(case: Case, size: int, rate: float, network: Network) -> float:
    """Return the time of one rank, divided by the sum of the times of all `size` ranks."""
    return step(case, 1, rate, network).total / (size * step(case, size, rate, network).total)


def fitted(name: str, sums: Sequence[tuple[int, float]], size: int) -> Network:
    """Return the network in which two sums over `size` ranks, given as (bytes, seconds), take their seconds."""
    (few, soon), (many, late) = sums
    moved = 2 * (size - 1) / size
    bandwidth = moved * (many - few) / (late - soon)
    messages = 2 * math.ceil(math.log2(size))
    return Network(name, max(0.0, soon - moved * few / bandwidth) / messages, bandwidth)
