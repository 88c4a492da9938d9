"""Timing of cases: all sides (implementations) take turns in one process, and their least time counts.

Before a turn, a side is called until its caches, clocks and threads are warm, and the threads of the previous side are
asleep. The order of the sides changes between turns. Cases that came out low are measured again after all others.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

import ascend_grad as ag
from ascend_grad import AscendGradError

from . import frameworks
from .case import AUTOGRAD, IDLE, OTHER_CALLS, RANDOM, WHOLE, Case
from .frameworks import Call
from .machine import seconds_of_others
from .results import (
    AWAKE,
    CHAIN,
    ESTIMATE,
    NUMPY,
    ONEDNN,
    OWN,
    SCIPY,
    SKLEARN,
    TORCH,
    Failure,
    Growth,
    Row,
)
from .sides import Comparison, call_small_first, compared, programs, rowwise

#: Least seconds for which a side is called before it is timed.
WARM_UP = 0.015
#: Seconds of a turn after the warm-up; a turn has at least one loop.
TURN = 0.002
#: Seconds of one of its loops, so that the timer's own cost is negligible; a loop has at least one call.
LOOP = 0.0002
#: Seconds of a pause before each turn of a linear problem. The threads of a BLAS spin for 0.1 s after a product.
PAUSE = 0.15
#: A side has two turns only if it takes more than FAR_BEHIND times as long as the fastest, and SLOW seconds.
FAR_BEHIND = 3.0
SLOW = 0.02
#: Seconds of a call above which it needs no warm-up, whose effect would be a small part of its time.
LONG = 0.1
#: Seconds of a pause before each call of an "idle" case, and the number of such calls.
IDLE_SECONDS, IDLE_CALLS = 0.02, 21
#: Number of calls right after an operation by PyTorch's threads, and seconds after which no such call begins.
AWAKE_CALLS, AWAKE_SECONDS = 41, 2.0
#: Number of calls of a program, and how many of them are not timed.
PROGRAM_CALLS, FIRST_CALLS = 20, 6
#: Cores that others may keep busy during a case. If they use more, the case is measured again after all others.
TOLERATED = 0.1

#: The sides whose lead makes a case low.
RIVALS = (*NUMPY, CHAIN, *SCIPY, *SKLEARN, *TORCH, *ONEDNN)


class Repeats(NamedTuple):
    """How often a case is measured."""

    #: Turns of each side in one attempt.
    turns: int
    #: Attempts, each after all other cases, and attempts at a case that came out low.
    attempts: int
    most: int


#: The numbers for named cases and of random problems, whose sides have few turns in each of at least two attempts.
NAMED_REPEATS, RANDOM_REPEATS = Repeats(5, 1, 3), Repeats(3, 2, 4)


def repeats_of(case: Case) -> Repeats:
    return RANDOM_REPEATS if case.suite == RANDOM else NAMED_REPEATS


class DisagreementError(Exception):
    """Raised if NumPy computes other values, so that times are meaningless."""


# ---- all cases -------------------------------------------------------------------------------------------------------


def measure_all(
    cases: Sequence[Case],
    num_threads: int,
    shown: Callable[[Sequence[Case]], Iterable[Case]],
    failures: list[Failure],
) -> list[Row]:
    """Time all cases, in the order in which ``shown`` returns them.

    While another process, or another virtual machine, keeps a core busy, two threads wait for each other most of the
    time. Such disturbances end, so disturbed cases have another attempt after all others. The same holds for cases in
    which a rival was faster, as some disturbances are not visible. The best time of each side counts. A case that fails
    has no further attempt, and is added to ``failures``.
    """
    rows: dict[str, Row] = {}
    for attempt in itertools.count(1):
        failed = {failure.case for failure in failures}
        cases = [c for c in cases if c.name not in failed and _is_next(rows.get(c.name), repeats_of(c), attempt)]
        if not cases:
            break
        for case in shown(cases):
            with recorded(case.name, failures):
                row = measure(case, num_threads)
                rows[case.name] = best_of_both(rows[case.name], row) if case.name in rows else row
    return list(rows.values())


def _is_next(row: Row | None, repeats: Repeats, attempt: int) -> bool:
    """Return whether a case has this attempt."""
    return row is None or attempt <= repeats.attempts or (attempt <= repeats.most and is_low(row))


def is_low(row: Row) -> bool:
    """Return whether a rival was faster, or others disturbed the case."""
    return (row.speedup(*RIVALS) or 1) < 1 or row.others > TOLERATED


def best_of_both(first: Row, second: Row) -> Row:
    """Return the least time of every side in two attempts."""
    seconds = dict(first.seconds)
    for side, value in second.seconds.items():
        seconds[side] = min(value, seconds.get(side, value))
    return Row(first.case, seconds, min(first.others, second.others))


@contextlib.contextmanager
def recorded(case: str, failures: list[Failure]) -> Iterator[None]:
    """Append an exception of this case to `failures` instead of raising it, so that other cases are still measured."""
    try:
        yield
    except (DisagreementError, AscendGradError) as error:
        failures.append(Failure(case, str(error)))
    except Exception as error:  # a rival may raise anything
        failures.append(Failure(case, f"{type(error).__name__}: {error}"))


# ---- one case --------------------------------------------------------------------------------------------------------


def measure(case: Case, num_threads: int) -> Row:
    """Time one case: this library, every side that takes part, the limits."""
    with prepared(case, num_threads) as comparison:
        calls, first = agreeing(case.name, comparison)
        # Limits overwrite the result, so they are added after the check.
        limits = {name: call for name, (call, _) in comparison.limits.items()}
        comparison.before_timing()
        start, others = time.perf_counter(), seconds_of_others()
        if case.place:
            seconds = in_programs(calls, programs.work_before(case.place), repeats_of(case).turns)
        elif case.mode == IDLE:
            seconds = single_calls(calls | limits, lambda: time.sleep(IDLE_SECONDS), IDLE_CALLS)
        else:
            seconds = least_in_turns(calls, limits, first, repeats_of(case).turns, PAUSE if case.dim is None else 0.0)
        if case.mode == AUTOGRAD:
            loop = rowwise.parallel_loop(num_threads)
            awake = single_calls(calls, loop, AWAKE_CALLS, AWAKE_SECONDS)
            seconds |= {name + AWAKE: value for name, value in awake.items()}
        others = (seconds_of_others() - others) / (time.perf_counter() - start)
    for name, (_, factor) in comparison.limits.items():
        seconds[name] *= factor
    if comparison.estimated_ns is not None:
        seconds[ESTIMATE] = comparison.estimated_ns * 1e-9
    return Row(case, seconds, max(0.0, others))


@contextlib.contextmanager
def prepared(case: Case, num_threads: int) -> Iterator[Comparison]:
    """Prepare a case under the conditions of a comparison: equal numbers of threads, no warnings, no collection.

    PyTorch records nothing for a backward pass unless the comparison needs it.
    """
    enabled = gc.isenabled()
    with frameworks.threads(num_threads), np.errstate(all="ignore"):
        comparison = compared(case, num_threads)
        gc.disable()
        try:
            with contextlib.nullcontext() if comparison.autograd else frameworks.no_autograd():
                yield comparison
        finally:
            if enabled:
                gc.enable()


def agreeing(name: str, comparison: Comparison) -> tuple[dict[str, Call], dict[str, float]]:
    """Return the calls of the sides whose results equal ours, and the seconds of their first calls.

    The shared arrays are reset before each call, so that no side finds another side's results there. If this library or
    NumPy computes other values, an error is raised. A framework that disagrees with both is not timed: its sums in
    float16 may overflow, for example.
    """
    comparison.reset()
    expected = tuple(array.copy() for array in frameworks.as_arrays(comparison.calls[OWN]()))
    calls, seconds = {}, {}
    for side, call in comparison.calls.items():
        comparison.reset()
        start = time.perf_counter()
        found = call()
        elapsed = time.perf_counter() - start
        if comparison.agree(side, frameworks.as_arrays(found), expected):
            calls[side], seconds[side] = call, elapsed
        elif side in OTHER_CALLS.values() or side.startswith((OWN, "numpy")):
            raise DisagreementError(f"{side} computes other values than {OWN}")
        else:
            warnings.warn(f"{name}: {side} computes other values and is left out", stacklevel=3)
    return calls, seconds


def least_in_turns(
    sides: dict[str, Call], limits: dict[str, Call], first: dict[str, float], turns: int, pause: float = 0.0
) -> dict[str, float]:
    """Return the least seconds per call of every side. Their order is random, as a side can disturb the next one.

    ``first`` has the seconds of the sides' first calls.
    """
    random, calls = np.random.default_rng(0), sides | limits
    least = dict.fromkeys(calls, math.inf)
    known = least | first
    for turn in range(turns):
        fastest = min(known[name] for name in sides)
        for name in random.permutation(list(calls)).tolist():
            if turn in (0, turns - 1) or known[name] <= max(SLOW, FAR_BEHIND * fastest):
                time.sleep(pause)
                is_long = LONG < known[name] < math.inf
                count = 1 if is_long else max(1, round(LOOP / warm_up(calls[name])))
                known[name] = least[name] = min(least[name], _least_loop(calls[name], count))
    return least


def warm_up(call: Call) -> float:
    """Call repeatedly for WARM_UP seconds, and return the approximate seconds of one call."""
    start = time.perf_counter()
    count, elapsed = 0, 0.0
    while elapsed < WARM_UP:
        call()
        count += 1
        elapsed = time.perf_counter() - start
    return elapsed / count


def _least_loop(call: Call, count: int) -> float:
    """Return the seconds per call in the fastest of consecutive loops. Most disturbances end before the last loop."""
    least, start = math.inf, time.perf_counter()
    while time.perf_counter() - start < TURN:
        least = min(least, _timed(call, count))
    return least


def _timed(call: Call, count: int) -> float:
    start = time.perf_counter()
    for _ in itertools.repeat(None, count):
        call()
    return (time.perf_counter() - start) / count


def single_calls(calls: dict[str, Call], before: Call, count: int, most_seconds: float = math.inf) -> dict[str, float]:
    """Return the median seconds of a single call right after another one, for every side."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + most_seconds
    for turn in range(count):
        if turn and time.perf_counter() > end:
            break
        for name, call in calls.items():
            before()
            times[name].append(_timed(call, 1))
    return {name: statistics.median(measured) for name, measured in times.items()}


def in_programs(calls: dict[str, Call], before: Call, turns: int) -> dict[str, float]:
    """Return the seconds of a call in a program that does something before each call: the least median of all turns.

    Each turn of a side is a separate program, whose first calls are not timed: by then threads are where the program
    leaves them.
    """
    random, least = np.random.default_rng(0), dict.fromkeys(calls, math.inf)
    for _ in range(turns):
        for name in random.permutation(list(calls)).tolist():
            time.sleep(PAUSE)
            times = []
            for _ in range(PROGRAM_CALLS):
                before()
                times.append(_timed(calls[name], 1))
            least[name] = min(least[name], statistics.median(times[FIRST_CALLS:]))
    return least


# ---- memory ----------------------------------------------------------------------------------------------------------


def memory(case: Case, num_threads: int, sides: Collection[str] = ()) -> list[Growth]:
    """Measure the bytes by which a call of each side makes this process grow, new results not counted.

    ``sides`` are the names of the sides to measure, by default all.
    """
    with prepared(case, num_threads) as comparison:
        given = comparison.given
        promise = ag.workspace_size(case.operator, **given, num_threads=num_threads)
        new = sum(given[name].nbytes for name in ("input", "weight")) if case.operator == WHOLE else 0
        return [
            Growth(case, side, max(0, resident_growth(call) - new), promise)
            for side, call in comparison.calls.items()
            if side in (sides or comparison.calls)
        ]


def resident_growth(call: Call) -> int:
    """Return the bytes by which the resident set grows at most during a call."""
    call_small_first()
    # Freed memory is returned to the system, so that this call cannot reuse it, and the recorded peak is reset.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before = _status("VmRSS")
    result = call()
    growth = _status("VmHWM") - before
    del result
    return growth


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":")) * 1024
