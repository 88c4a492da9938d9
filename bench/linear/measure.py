"""Timing of the linear operators (all sides take turns in one run; medians count), and the memory of a call."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import ascend_grad as ag

from .. import frameworks
from .. import measure as timing
from ..machine import seconds_of_others
from ..results import DIRECT, OWN, Row
from . import rivals
from .cases import GRADIENT, WHOLE, LinearCase, arguments, outs
from .rivals import SIDES, UNFILTERED, YARDSTICK, Call, Sides, agree, direct, yardstick

#: Turns of each side.
TURNS = 5
#: Seconds of a pause before each turn, as the threads of a BLAS spin for up to 0.1 s after its last product.
PAUSE = 0.15
#: Seconds of a timed loop of short calls, approximately. Waking threads can take many times as long as one such call.
LOOP = 0.05
#: Seconds of a call above which it needs no warm-up.
LONG = 0.3
#: A rival has only one turn if its first call takes more than this multiple of ours, and more than LONG seconds.
FAR_BEHIND = 2.0


@dataclass(frozen=True)
class Growth:
    """The bytes by which a call made the process grow in addition to its results, and this library's upper bound."""

    case: LinearCase
    side: str
    bytes: int
    promise: int


def measure(case: LinearCase, num_threads: int, sides: Sides = SIDES) -> Row[LinearCase]:
    """Time one case: this library, every rival that takes part, a large product in BLAS."""
    given = arguments(case)
    results = outs(given)
    with timing.settings(num_threads):
        calls = {name: call for name, prepare in sides.items() if (call := prepare(case, given, results))}
        first = _first_calls(case, calls, results)
        calls = {name: calls[name] for name in first} | {YARDSTICK: yardstick(case, rivals.YARDSTICK_SIZE)}
        if (call := direct(case, given, results)) is not None:
            calls[DIRECT] = call
        start, others = time.perf_counter(), seconds_of_others()
        seconds = in_turn(calls, first)
        others = (seconds_of_others() - others) / (time.perf_counter() - start)
    return Row(case, seconds, max(0.0, others))


def in_turn(
    calls: dict[str, Call], first: dict[str, float], of_turns: Callable[[list[float]], float] = statistics.median
) -> dict[str, float]:
    """Return the median seconds per call of every side, or what ``of_turns`` makes of the seconds of all turns.

    ``first`` has the seconds of the sides' first calls.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(TURNS):
        for name, call in calls.items():
            if turn and first.get(name, 0) > max(LONG, FAR_BEHIND * first[OWN]):
                continue
            time.sleep(PAUSE)
            if first.get(name, 0) > LONG:
                times[name].append(timing.timed(call, 1))
            else:
                times[name].append(timing.timed(call, max(1, round(LOOP / timing.warm_up(call)))))
    return {name: of_turns(measured) for name, measured in times.items()}


def _first_calls(case: LinearCase, calls: dict[str, Call], results: tuple[np.ndarray, ...]) -> dict[str, float]:
    """Return the seconds of the first call of every side that computes the same values.

    The shared arrays are filled with NaN before each call, so that no side finds another side's values there.
    """
    seconds, expected = {}, None
    for name, call in calls.items():
        for result in results:
            result.fill(np.nan)
        start = time.perf_counter()
        found = call()
        elapsed = time.perf_counter() - start
        if expected is None:
            expected = tuple(frameworks.as_array(value).copy() for value in found)
        # The unfiltered side is not compared, as its difference is more than rounding.
        if name == UNFILTERED or agree(found, expected, case.dtype):
            seconds[name] = elapsed
        else:
            timing.disagrees(case.name, name)
    return seconds


# ---- memory ----------------------------------------------------------------------------------------------------------


def memory(case: LinearCase, num_threads: int, sides: Sides = SIDES) -> list[Growth]:
    """Measure the bytes by which a call of each side makes this process grow, new results not counted."""
    given = arguments(case)
    results = outs(given)
    promise = ag.workspace_size(case.operator, **given, num_threads=num_threads)
    new = sum(result.nbytes for result in results) if case.operator == WHOLE else 0
    found = []
    with timing.settings(num_threads):
        for name, prepare in sides.items():
            call = prepare(case, given, results)
            if call is not None:
                found.append(Growth(case, name, max(0, resident_growth(call) - new), promise))
    return found


def resident_growth(call: Any) -> int:
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


def call_small_first() -> None:
    """Call all sides with a small problem to start their threads, whose stacks are not memory of the measured call."""
    case = LinearCase(GRADIENT, "recomputed", "float32", (64, 256, 64))
    given = arguments(case)
    for prepare in SIDES.values():
        call = prepare(case, given, outs(given))
        if call is not None:
            call()


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":")) * 1024
