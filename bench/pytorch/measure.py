"""Timing of calls on tensors, and of calls that follow an operation by PyTorch's threads, which are then awake."""

from __future__ import annotations

import statistics
import time

import numpy as np

from .. import frameworks
from .. import measure as timing
from ..frameworks import Call
from ..linear import measure as linear
from ..linear.cases import LinearCase
from ..linear.measure import Growth
from ..machine import seconds_of_others
from ..results import OWN, Row
from ..rowwise.cases import Case, operands
from . import rivals
from .cases import AUTOGRAD

#: Turns of each side.
TURNS = 5
#: Turns of each side right after an operation by PyTorch's threads.
AWAKE_TURNS = 41
#: Seconds after which no such turn begins.
AWAKE_SECONDS = 2.0
#: Suffix of the name of a side whose calls come right after an operation by PyTorch's threads.
AWAKE = " awake"


def measure(case: Case | LinearCase, num_threads: int) -> Row:
    """Time one case on every side."""
    if isinstance(case, LinearCase):
        return linear.measure(case, num_threads, rivals.LINEAR_SIDES)
    arrays = operands(case)
    with frameworks.threads(num_threads), timing.no_collection():
        calls = rivals.calls(case, arrays)
        calls = timing.agreeing(case.name, calls, lambda: arrays.out.fill(np.nan), rivals.agree(case))
        start, others = time.perf_counter(), seconds_of_others()
        seconds = timing.in_turn(calls, TURNS)
        if case.mode == AUTOGRAD:
            seconds |= after_parallel_loop(calls, rivals.parallel_loop(num_threads))
        others = (seconds_of_others() - others) / (time.perf_counter() - start)
    return Row(case, seconds, max(0.0, others))


def after_parallel_loop(calls: dict[str, Call], loop: Call) -> dict[str, float]:
    """Return the median seconds of a single call right after a parallel loop of PyTorch."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + AWAKE_SECONDS
    for _ in range(AWAKE_TURNS):
        if times[OWN] and time.perf_counter() > end:
            break
        for name, call in calls.items():
            loop()
            times[name].append(timing.timed(call, 1))
    return {name + AWAKE: statistics.median(measured) for name, measured in times.items()}


def memory(case: LinearCase, num_threads: int) -> list[Growth]:
    """Measure the bytes by which a loss with its gradients makes this process grow, for every side."""
    return linear.memory(case, num_threads, rivals.LINEAR_SIDES)
