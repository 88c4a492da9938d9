"""Timing: all sides (implementations) take turns in one run, after a warm-up; medians count."""

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

#: Least seconds for which a side is called before it is timed. Its caches, clocks and threads are then warm, and the
#: threads of the previous side are asleep.
WARM_UP = 0.015
#: Seconds of a timed loop, approximately (or one call, if that is longer), so that the timer's own cost is negligible.
LOOP = 0.002
#: Seconds of a turn above which a side takes part in every third turn only, as precision does not matter for its ratio.
SLOW = 0.1


Agree = Callable[[tuple[np.ndarray, ...], tuple[np.ndarray, ...]], bool]


class DisagreementError(Exception):
    """Raised if NumPy computes other values, so that times are meaningless."""


@contextlib.contextmanager
def recorded(case: str, failures: list[Failure]) -> Iterator[None]:
    """Append an exception of this case to `failures` instead of raising it, so that other cases are still measured."""
    try:
        yield
    except (DisagreementError, AscendGradError) as error:
        failures.append(Failure(case, str(error)))
    except Exception as error:  # a rival may raise anything
        failures.append(Failure(case, f"{type(error).__name__}: {error}"))


def in_turn(calls: dict[str, Call], turns: int) -> dict[str, float]:
    """Return the median seconds per call of every side."""
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
    """Call repeatedly for WARM_UP seconds, and return the approximate seconds of one call."""
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
    """Return the sides whose results equal ours.

    `reset` clears the shared arrays before each call, so that no side finds another side's results there.
    """
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
    """Raise an error if NumPy computes other values than this library, or warn that another side does.

    A framework that disagrees with both is not timed. For example, its sums in float16 may overflow.
    """
    if side == OWN or side.startswith("numpy"):
        raise DisagreementError(f"{side} computes other values than {OWN}")
    warnings.warn(f"{case}: {side} computes other values and takes no part", stacklevel=3)


@contextlib.contextmanager
def settings(num_threads: int, autograd: bool = False) -> Iterator[None]:
    """Set the conditions of a comparison: equal numbers of threads, no warnings, no garbage collection.

    PyTorch records nothing for a backward pass unless `autograd` is true.
    """
    recording = contextlib.nullcontext() if autograd else frameworks.no_autograd()
    with frameworks.threads(num_threads), recording, np.errstate(all="ignore"), no_collection():
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
