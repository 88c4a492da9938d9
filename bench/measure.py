"""Timing: all sides in turn, in one run, hot, medians."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat

import numpy as np

from ascend_grad import AscendGradError

from . import rivals, stream
from .cases import Case, operands
from .machine import seconds_of_others
from .results import OWN, Failure, Row
from .rivals import Call

#: A side is called for at least so long before it is timed: caches, clocks and its threads are awake then, and the
#: threads of the side before have gone to sleep.
WARM_UP = 0.015
#: What is timed is a loop of about this length, or one call: the timer's own cost vanishes.
LOOP = 0.002
TURNS = 5
#: A side whose turn takes longer sits out all turns but every third: its ratio is far from any doubt.
SLOW = 0.1
IDLE = 0.02
IDLE_TURNS = 21
#: So much of a core may be taken by others; above that, a case is measured again after all others, up to so many times.
TOLERATED = 0.1
ATTEMPTS = 3


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


def measure_all(
    cases: Sequence[Case],
    num_threads: int,
    shown: Callable[[Sequence[Case]], Iterable[Case]],
    failures: list[Failure],
) -> list[Row[Case]]:
    """Time all cases, in the order in which ``shown`` gives them back.

    While another process, or another guest of the machine, keeps a core busy, two threads wait for each other most of
    the time. Such times come and go, so cases that were disturbed have their next attempt after all others, and the
    least disturbed attempt counts. A case that fails has no further attempt, and is added to ``failures``.
    """
    rows: dict[Case, Row[Case]] = {}
    for _ in range(ATTEMPTS):
        failed = {failure.case for failure in failures}
        cases = [case for case in cases if case not in rows or rows[case].others > TOLERATED]
        cases = [case for case in cases if case.name not in failed]
        for case in shown(cases) if cases else ():
            with recorded(case.name, failures):
                row = measure(case, num_threads)
                rows[case] = min(row, rows.get(case, row), key=lambda row: row.others)
    return list(rows.values())


def measure(case: Case, num_threads: int) -> Row[Case]:
    """Time one case: this library, every rival that takes part, the stream."""
    arrays = operands(case)
    calls: dict[str, Call] = {OWN: rivals.ascend_grad(case, arrays)}
    for name, prepare in rivals.RIVALS.items():
        call = prepare(case, arrays)
        if call is not None:
            calls[name] = call
    with settings(num_threads):
        calls = agreeing(
            case.name,
            calls,
            lambda: arrays.out.fill(np.nan),
            lambda got, expected: rivals.agree(got[0], expected[0], case.dtype),
        )
        # The streams overwrite the result, so they come after the check.
        calls |= stream.calls(case, arrays, num_threads)
        if (direct := rivals.direct(case, arrays)) is not None:
            calls[rivals.DIRECT] = direct
        start, others = time.perf_counter(), seconds_of_others()
        seconds = after_idling(calls, IDLE_TURNS) if case.mode == "idle" else in_turn(calls, TURNS)
        others = (seconds_of_others() - others) / (time.perf_counter() - start)
    return Row(case, seconds, max(0.0, others))


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


def after_idling(calls: dict[str, Call], turns: int) -> dict[str, float]:
    """Median seconds of a single call after a pause."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            time.sleep(IDLE)
            times[name].append(timed(call, 1))
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
    expected = tuple(array.copy() for array in rivals.as_arrays(calls[OWN]()))
    found = {OWN: calls[OWN]}
    for side, call in calls.items():
        reset()
        if agree(rivals.as_arrays(call()), expected):
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
    with rivals.threads(num_threads), rivals.no_autograd(), np.errstate(all="ignore"), no_collection():
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
