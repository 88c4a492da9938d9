"""Timing of the two calls of a case of a linear layer, in turn in one run; the least time of each counts.

Losses of logits are timed as random problems are, in `bench.grid.measure`.
"""

from __future__ import annotations

import time

from .. import measure as timing
from ..linear.measure import in_turn
from ..machine import seconds_of_others
from ..results import OWN, Row
from .cases import RelativeCase
from .rivals import pair


def measure(case: RelativeCase, num_threads: int) -> Row[RelativeCase]:
    """Time one case and the other call."""
    prepared = pair(case)
    calls = {OWN: prepared.own, case.other: prepared.other}
    with timing.settings(num_threads):
        first, results = {}, []
        for name, call in calls.items():
            start = time.perf_counter()
            results.append(call())
            first[name] = time.perf_counter() - start
        if not prepared.agree(*results):
            raise timing.DisagreementError(f"{case.other} computes other values than {case.operator}")
        del results
        start, others = time.perf_counter(), seconds_of_others()
        # The two calls differ by less than other work on the machine disturbs one of them.
        seconds = in_turn(calls, first, min)
        others = (seconds_of_others() - others) / (time.perf_counter() - start)
    return Row(case, seconds, max(0.0, others))
