"""Timing of the row-wise operators; disturbed cases are measured again."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from .. import frameworks
from .. import measure as timing
from ..frameworks import Call
from ..machine import seconds_of_others
from ..results import DIRECT, NUMPY, OWN, Failure, Row
from . import rivals
from .cases import Case, operands

#: Turns of each side.
TURNS = 5
#: Seconds of a pause before each call of an "idle" case.
IDLE = 0.02
#: Turns of each side in an "idle" case.
IDLE_TURNS = 21
#: Cores that others may keep busy during a case. If they use more, the case is measured again after all others.
TOLERATED = 0.1
#: Most attempts at a case.
ATTEMPTS = 3


def measure_all(
    cases: Sequence[Case],
    num_threads: int,
    shown: Callable[[Sequence[Case]], Iterable[Case]],
    failures: list[Failure],
) -> list[Row[Case]]:
    """Time all cases, in the order in which ``shown`` returns them.

    While another process, or another virtual machine, keeps a core busy, two threads wait for each other most of the
    time. Such disturbances end, so disturbed cases have their next attempt after all others. The same holds for cases
    in which NumPy was faster, as some disturbances are not visible (such as the host's search for free memory). The
    least disturbed attempt counts. A case that fails has no further attempt, and is added to ``failures``.
    """
    rows: dict[Case, Row[Case]] = {}
    for _ in range(ATTEMPTS):
        failed = {failure.case for failure in failures}
        cases = [case for case in cases if case not in rows or _is_doubtful(rows[case])]
        cases = [case for case in cases if case.name not in failed]
        for case in shown(cases) if cases else ():
            with timing.recorded(case.name, failures):
                row = measure(case, num_threads)
                rows[case] = min(row, rows.get(case, row), key=_disturbance)
    return list(rows.values())


def _is_doubtful(row: Row[Case]) -> bool:
    speedup = row.speedup(*NUMPY)
    return row.others > TOLERATED or (speedup is not None and speedup < 1)


def _disturbance(row: Row[Case]) -> tuple[float, float]:
    """Return a key that orders attempts: the cores used by others, if above TOLERATED, then the time of all sides."""
    return (row.others if row.others > TOLERATED else 0.0, sum(row.seconds.values()))


def measure(case: Case, num_threads: int) -> Row[Case]:
    """Time one case: this library, every rival that takes part, the memory limit."""
    arrays = operands(case)
    calls: dict[str, Call] = {OWN: rivals.ascend_grad(case, arrays)}
    for name, prepare in rivals.RIVALS.items():
        call = prepare(case, arrays)
        if call is not None:
            calls[name] = call
    with timing.settings(num_threads):
        calls = timing.agreeing(
            case.name,
            calls,
            lambda: arrays.out.fill(np.nan),
            lambda got, expected: frameworks.agree(got[0], expected[0], case.dtype),
        )
        # The additions that measure the memory limit overwrite the result, so they are added after the check.
        calls |= rivals.streams(case, arrays, num_threads)
        if (direct := rivals.direct(case, arrays)) is not None:
            calls[DIRECT] = direct
        start, others = time.perf_counter(), seconds_of_others()
        seconds = after_idling(calls, IDLE_TURNS) if case.mode == "idle" else timing.in_turn(calls, TURNS)
        others = (seconds_of_others() - others) / (time.perf_counter() - start)
    return Row(case, seconds, max(0.0, others))


def after_idling(calls: dict[str, Call], turns: int) -> dict[str, float]:
    """Return the median seconds of a single call after a pause, for every side."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            time.sleep(IDLE)
            times[name].append(timing.timed(call, 1))
    return {name: statistics.median(measured) for name, measured in times.items()}
