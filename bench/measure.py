"""Timing: all sides in turn, in one run, warm, medians."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import repeat

import numpy as np

from ascend_grad import AscendGradError

from . import frameworks
from .frameworks import Call
from .results import OWN, Failure

#: A side is called for at least so long before it is timed: caches, clocks and its threads are awake then, and the
#: threads of the side before have gone to sleep.
WARM_UP = 0.015
#: What is timed is a loop of about this length, or one call: the timer's own cost vanishes.
LOOP = 0.002
#: A side whose turn takes longer sits out all turns but every third: its ratio is far from any doubt.
SLOW = 0.1


Agree = Callable[[tuple[np.ndarray, ...], tuple[np.ndarray, ...]], bool]


class DisagreementError(Exception):
    """NumPy computes other values, so that no time says anything."""


@contextlib.contextmanager
def recorded(case: str, failures: list[Failure]) -> Iterator[None]:
    """Add the failure of this case to the others, so that what else is measured is not lost with it."""
    try:
        yield
    except (DisagreementError, AscendGradError) as error:
        failures.append(Failure(case, str(error)))
    except Exception as error:  # whatever a side raises
        failures.append(Failure(case, f"{type(error).__name__}: {error}"))


def in_turn(calls: dict[str, Call], turns: int) -> dict[str, float]:
    """Median seconds per call of every side."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    slow = set()
    for turn in range(turns):
        for name, call in calls.items():
            if turn % 3 and name in slow:
                continue
            start = time.perf_counter()
            estimate = warm_up(call)
            times[name].append(timed(call, max(1, round(LOOP / estimate))))
            if time.perf_counter() - start > SLOW:
                slow.add(name)
    return {name: statistics.median(measured) for name, measured in times.items()}


def warm_up(call: Call) -> float:
    """Call for a while; the answer is about the seconds of one call."""
    start = time.perf_counter()
    count, elapsed = 0, 0.0
    while elapsed < WARM_UP:
        call()
        count += 1
        elapsed = time.perf_counter() - start
    return elapsed / count


def timed(call: Call, count: int) -> float:
    start = time.perf_counter()
    for _ in repeat(None, count):
        call()
    return (time.perf_counter() - start) / count


def agreeing(name: str, calls: dict[str, Call], reset: Callable[[], object], agree: Agree) -> dict[str, Call]:
    """The sides that compute the same values, and do not merely find them in the arrays that all share."""
    reset()
    expected = tuple(array.copy() for array in frameworks.as_arrays(calls[OWN]()))
    found = {OWN: calls[OWN]}
    for side, call in calls.items():
        reset()
        if agree(frameworks.as_arrays(call()), expected):
            found[side] = call
        else:
            disagrees(name, side)
    return found


def disagrees(case: str, side: str) -> None:
    """What becomes of a side that computes other values.

    NumPy is the judge. A framework that disagrees with it and with us takes no part: its sums in float16 may overflow.
    """
    if side == OWN or side.startswith("numpy"):
        raise DisagreementError(f"{side} computes other values than {OWN}")
    warnings.warn(f"{case}: {side} computes other values and takes no part", stacklevel=3)


@contextlib.contextmanager
def settings(num_threads: int) -> Iterator[None]:
    """What holds while sides are compared: the same number of threads, no autograd, no warnings, no collections."""
    with frameworks.threads(num_threads), frameworks.no_autograd(), np.errstate(all="ignore"), no_collection():
        yield


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
