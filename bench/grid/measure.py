"""Timing of random problems: all sides take turns, their least time counts, every problem is measured repeatedly."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from .. import measure as timing
from ..frameworks import Call
from ..linear.cases import LinearCase
from ..machine import seconds_of_others
from ..results import Failure, Row
from .problems import Problem
from .rivals import NUMPY, SCIPY, TORCH, compared

#: Turns of each side in one attempt.
TURNS = 3
#: Seconds of a turn after the warm-up; a turn has at least one loop.
TURN = 0.002
#: Seconds of one of its loops; a loop has at least one call.
LOOP = 0.0002
#: Seconds of a pause before each turn of a linear problem. The threads of a BLAS spin that long after a product.
PAUSE = 0.1
#: Attempts at every problem, each after all other problems, and attempts at problems in which a rival was faster.
ATTEMPTS, MOST_ATTEMPTS = 2, 4
#: A side has two turns, not three, if it takes more than FAR_BEHIND times as long as the fastest, and SLOW seconds.
FAR_BEHIND = 3.0
SLOW = 0.02
#: Seconds of a call above which it needs no warm-up.
LONG = 0.1

RIVALS = (*NUMPY, *SCIPY, *TORCH)


def measure_all(
    problems: Sequence[Problem],
    num_threads: int,
    shown: Callable[[Sequence[Problem]], Iterable[Problem]],
    failures: list[Failure],
) -> list[Row[Problem]]:
    """Time all problems, in the order in which ``shown`` returns them.

    Other processes disturb the times of all sides. Hence every problem is measured twice, with other problems between.
    Problems in which a rival was faster are measured again after all others. The best time of each side counts.
    """
    rows: dict[str, Row[Problem]] = {}
    failed: set[str] = set()
    for attempt in range(1, MOST_ATTEMPTS + 1):
        for problem in shown(problems) if problems else ():
            count = len(failures)
            with timing.recorded(problem.name, failures):
                row = measure(problem, num_threads)
                rows[problem.name] = best_of_both(rows[problem.name], row) if problem.name in rows else row
            if len(failures) > count:
                failed.add(problem.name)
        problems = [p for p in problems if p.name not in failed and (attempt < ATTEMPTS or is_low(rows[p.name]))]
    return list(rows.values())


def is_low(row: Row[Problem]) -> bool:
    """Return whether a rival was faster."""
    return (row.speedup(*RIVALS) or 1) < 1


def best_of_both(first: Row[Problem], second: Row[Problem]) -> Row[Problem]:
    """Return the least time of every side in two attempts."""
    seconds = dict(first.seconds)
    for side, value in second.seconds.items():
        seconds[side] = min(value, seconds.get(side, value))
    return Row(first.case, seconds, min(first.others, second.others))


def measure(problem: Problem, num_threads: int) -> Row[Problem]:
    """Time one problem: this library, every rival that takes part, the limits."""
    comparison = compared(problem, num_threads)
    with timing.settings(num_threads, comparison.autograd):
        calls = timing.agreeing(problem.name, comparison.calls, comparison.reset, comparison.agree)
        limits = {name: call for name, (call, _) in comparison.limits.items()}
        comparison.before_timing()
        start, others = time.perf_counter(), seconds_of_others()
        seconds = least_in_turns(calls, limits, PAUSE if isinstance(problem, LinearCase) else 0.0)
        others = (seconds_of_others() - others) / (time.perf_counter() - start)
    for name, (_, factor) in comparison.limits.items():
        seconds[name] *= factor
    return Row(problem, seconds, max(0.0, others))


def least_in_turns(sides: dict[str, Call], limits: dict[str, Call], pause: float = 0.0) -> dict[str, float]:
    """Return the least seconds per call of every side. Their order is random, as a side can disturb the next one."""
    random = np.random.default_rng(0)
    calls = sides | limits
    least = dict.fromkeys(calls, math.inf)
    for turn in range(TURNS):
        fastest = min(least[name] for name in sides)
        for name in random.permutation(list(calls)).tolist():
            if turn in (0, TURNS - 1) or least[name] <= max(SLOW, FAR_BEHIND * fastest):
                time.sleep(pause)
                # A long call needs no warm-up, whose effect would be a small part of its time.
                is_long = LONG < least[name] < math.inf
                count = 1 if is_long else max(1, round(LOOP / timing.warm_up(calls[name])))
                least[name] = min(least[name], _least_loop(calls[name], count))
    return least


def _least_loop(call: Call, count: int) -> float:
    """Return the seconds per call in the fastest of consecutive loops. Most disturbances end before the last loop."""
    least, start = math.inf, time.perf_counter()
    while time.perf_counter() - start < TURN:
        least = min(least, timing.timed(call, count))
    return least
