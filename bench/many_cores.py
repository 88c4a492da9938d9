"""Predict how calls scale to many cores: ``python -m ascend_grad.bench.many_cores``.

The plans are those of the library for each number of threads, and one thread measures each of their tasks
(`_tasks.record_teams`). A simulation then lets a team take the tasks: it wakes, fetches tasks, waits at the end of each
phase, and shares the memory's bandwidth. ``--validate COUNT`` compares predictions for two threads with measured times.
"""

from __future__ import annotations

import argparse
import heapq
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

import ascend_grad as ag
from ascend_grad import _rowwise_python, _tasks

from . import machine as this_machine
from .arrays import gradients_like, linear_arguments, memory_of, operands
from .case import CROSS_ENTROPY, GRADIENT, LINEAR, MASKED, OUT, WHOLE, Case
from .cases import draw
from .sides import cross_entropy
from .sides.rowwise import SCALE
from .tables import milliseconds, percent, table

#: Numbers of threads of the predictions.
THREADS = (1, 2, 4, 8, 16, 32, 64, 128)
#: Recordings of a call. The least time of each task counts.
REPEATS = 7
#: Partitions of a phase, at most (`AG_MAX_PARTITIONS` in team.h).
PARTITIONS = 16
#: Seconds of the problems that are drawn for the validation, on one thread.
SHORTEST, LONGEST = 200e-6, 30e-3
#: Seconds in which a measured time is repeated, and the least number of repetitions.
MEASURED_SECONDS, MEASURED_CALLS = 2.0, 20

#: Largest error of a prediction that counts as near.
NEAR = 0.15

#: A call with a number of threads.
Call = Callable[[int], object]


@dataclass(frozen=True)
class Machine:
    """What is assumed of a machine, in seconds and bytes per second."""

    start: float = 2e-6  #: from the call until OpenMP has started a team that is awake
    thread: float = 5e-8  #: more of this for each thread
    line: float = 1e-7  #: until another core has a cache line, for example the number of the next task
    bandwidth: float = 300e9  #: of all cores together
    slowdown: float = 1.0  #: times as long as a task takes if all cores are busy


@dataclass(frozen=True)
class Phase:
    """Tasks that may run side by side, in seconds of one thread each."""

    tasks: tuple[float, ...]
    by_thread: bool = False  #: whether threads begin with separate partitions
    bytes: float = 0.0  #: that all tasks together move through memory


@dataclass(frozen=True)
class Team:
    """The phases of a call, and what its first thread does alone between them."""

    threads: int
    phases: tuple[Phase, ...]
    serial: float = 0.0

    @property
    def work(self) -> float:
        """Return the seconds of one thread that computes all tasks without waiting."""
        return self.serial + sum(sum(phase.tasks) for phase in self.phases)


# ---- the simulation --------------------------------------------------------------------------------------------------


def simulated(team: Team, machine: Machine) -> float:
    """Return the seconds of a call."""
    if team.threads == 1:
        return team.work
    start = machine.start + machine.thread * team.threads
    return start + team.serial + sum(phase_seconds(phase, team.threads, machine) for phase in team.phases)


def stretched(phase: Phase, threads: int, machine: Machine) -> float:
    """Return how many times as long tasks take beside those of other threads, which share the memory."""
    busy = min(threads, len(phase.tasks))
    demand = busy * phase.bytes / max(sum(phase.tasks), 1e-12)
    return machine.slowdown * max(1.0, demand / (machine.bandwidth * machine.slowdown))


def phase_seconds(phase: Phase, threads: int, machine: Machine) -> float:
    """Return the seconds from the begin of a phase until its first thread knows that all tasks are complete.

    A partition's number of tasks, and the number of complete tasks, are on cache lines that one thread has at a time.
    """
    tasks = phase.tasks
    if len(tasks) == 1 or threads == 1:
        return sum(tasks)
    factor = stretched(phase, threads, machine)
    count = min(threads, PARTITIONS) if phase.by_thread else 1
    bounds = [len(tasks) // count * p + len(tasks) % count * p // count for p in range(count + 1)]
    following, line_free = bounds[:-1], [0.0] * count
    # The other threads see the phase one line later than the first one.
    ready = [(0.0 if thread == 0 else machine.line, thread) for thread in range(threads)]
    heapq.heapify(ready)
    complete, has_worked = 0.0, [False] * threads
    while ready:
        now, thread = heapq.heappop(ready)
        first = thread * count // threads
        for p in ((first + k) % count for k in range(count)):
            if following[p] < bounds[p + 1]:
                begin = max(now, line_free[p]) + (machine.line if threads > 1 else 0)
                line_free[p] = begin
                heapq.heappush(ready, (begin + factor * tasks[following[p]], thread))
                following[p] += 1
                has_worked[thread] = True
                break
        else:
            if has_worked[thread]:
                complete = max(complete, now) + machine.line
    return complete + machine.line


def limit(team: Team, machine: Machine) -> float:
    """Return the seconds that memory alone takes."""
    return sum(phase.bytes for phase in team.phases) / machine.bandwidth


# ---- recorded calls --------------------------------------------------------------------------------------------------


def gaps_of(team: tuple[int, int, int, list[list]]) -> list[int]:
    """Return the nanoseconds before, between and behind the phases of a recorded team."""
    _, begin, end, phases = team
    return [after - before for before, after in zip([begin, *(p[1] for p in phases)], [*(p[0] for p in phases), end])]


def recorded(call: Call, threads: int, repeats: int = REPEATS, traffic: float = 0.0) -> list[Team]:
    """Return the teams of a call, with the least times of some recordings.

    The last team is the calling thread alone, with what it does before and behind the other teams. `traffic` is the
    number of bytes that the call moves through memory, of which each phase has the share that it has of the time.
    """
    elapsed = []

    def timed() -> None:  # without the time that `record_teams` takes to return its recordings
        before = time.monotonic_ns()
        call(threads)
        elapsed.append(time.monotonic_ns() - before)

    recordings = [_tasks.record_teams(timed) for _ in range(repeats)]
    in_teams = [sum(end - begin for _, begin, end, _ in recording) for recording in recordings]
    outside = [whole - part for whole, part in zip(elapsed, in_teams)]
    teams = []
    for same in zip(*recordings):
        threads_of_team, _, _, first = same[0]
        phases = [
            Phase(tuple(1e-9 * min(times) for times in zip(*(team[3][k][3] for team in same))), by_thread)
            for k, (_, _, by_thread, _) in enumerate(first)
        ]
        serial = sum(map(min, zip(*map(gaps_of, same))))
        teams.append(Team(threads_of_team, tuple(phases), 1e-9 * serial))
    total = sum(sum(phase.tasks) for team in teams for phase in team.phases)
    shared = [
        replace(team, phases=tuple(replace(p, bytes=traffic * sum(p.tasks) / total) for p in team.phases))
        for team in teams
    ]
    return [*shared, Team(1, (), 1e-9 * min(outside))]


def predicted(call: Call, threads: int, machine: Machine, repeats: int = REPEATS, traffic: float = 0.0) -> float:
    """Return the predicted seconds of a call."""
    return sum(simulated(team, machine) for team in recorded(call, threads, repeats, traffic))


def call_of(case: Case) -> tuple[Call, float]:
    """Prepare a call of this library with any number of threads, and count its memory traffic in bytes."""
    if case.operator in LINEAR:
        given = linear_arguments(case)
        function = getattr(ag, case.operator)
        if case.operator == GRADIENT:
            given["out"] = gradients_like(given)
        return lambda threads: function(**given, num_threads=threads, backend="cpu"), 0.0
    arrays = operands(case)
    traffic = float(sum(memory_of(array).nbytes for array in (*arrays.inputs, arrays.out)))
    if case.operator == CROSS_ENTROPY:
        loss: Any = cross_entropy.ascend_grad(case, arrays)
        return lambda threads: loss(num_threads=threads, backend="cpu"), traffic
    settings = {"out": arrays.out} if case.mode == OUT else {}
    last = SCALE if case.operator in MASKED else case.dim
    function = getattr(ag, case.operator)
    return lambda threads: function(*arrays.inputs, last, **settings, num_threads=threads, backend="cpu"), traffic


# ---- predictions -----------------------------------------------------------------------------------------------------

#: Linear problems of 2 GFLOP and more, and row-wise problems of 64 MB and more.
PRODUCTS = [
    Case(operator, "float32", shape, mode)
    for operator, mode, shape in (
        (GRADIENT, "recomputed", (1024, 1024, 512)),
        (GRADIENT, "recomputed", (1024, 4096, 1024)),
        (GRADIENT, "stored", (2048, 4096, 512)),
        (WHOLE, "loss and gradients", (1024, 4096, 1024)),
        (WHOLE, "loss and gradients", (4096, 8192, 256)),
        (WHOLE, "loss and gradients", (128, 32768, 512)),
        ("fused_linear_online_max_sum", "forward", (1024, 8192, 512)),
    )
]
ROWS = [
    Case(operator, "float32", shape, OUT, dim)
    for operator, shape, dim in (
        ("softmax", (4096, 4096), 1),
        ("softmax", (4096, 4096), 0),
        ("softmax_backward", (65536, 128), 1),
        ("softmax_backward", (4, 2**21), 1),
        ("log_softmax", (512, 32768), 1),
        (CROSS_ENTROPY, (2048, 8192), 1),
    )
]


def efficiencies(call: Call, traffic: float, machine: Machine, repeats: int, counts: Sequence[int]) -> list[float]:
    """Return the efficiency of each number of threads: the least time of the work, or of the memory, over the call's.

    The work is the least of all recordings, divided by the number of threads.
    """
    recordings = [recorded(call, threads, repeats, traffic) for threads in counts]
    alone = min(sum(team.work for team in teams) for teams in recordings)
    found = []
    for threads, teams in zip(counts, recordings):
        best = max(alone / threads, sum(limit(team, machine) for team in teams))
        found.append(best / sum(simulated(team, machine) for team in teams))
    return found


def report(cases: Iterable[Case], machine: Machine, repeats: int, counts: Sequence[int] = THREADS) -> str:
    """Make a table of the predicted efficiency of each case."""
    lines = []
    for case in cases:
        call, traffic = call_of(case)
        lines.append([case.name, *map(percent, efficiencies(call, traffic, machine, repeats, counts))])
    return table(["predicted efficiency", *map(str, counts)], lines)


# ---- validation ------------------------------------------------------------------------------------------------------


def least_seconds(call: Callable[[], object]) -> float:
    """Return the least seconds of many calls."""
    least, begin, calls = float("inf"), time.perf_counter(), 0
    while calls < MEASURED_CALLS or time.perf_counter() - begin < MEASURED_SECONDS:
        before = time.perf_counter()
        call()
        least = min(least, time.perf_counter() - before)
        calls += 1
    return least


def stream_rate(nbytes: float) -> float:
    """Return the bytes per second of ``out = a + b`` with as much traffic on two threads."""
    a = np.ones(max(int(nbytes) // 12, 2**16), np.float32)
    b, out = a.copy(), a.copy()
    return (
        12
        * len(a)
        / min(least_seconds(partial(_rowwise_python.stream_add, a, b, out, bypass, 2)) for bypass in (False, True))
    )


def start_seconds() -> float:
    """Return the seconds that two threads take to begin and end a call, beside their work."""
    x = np.zeros((8, 4096), np.float32)
    out = np.empty_like(x)
    call = partial(ag.softmax, x, 1, out=out, backend="cpu")
    return max(least_seconds(partial(call, num_threads=2)) - least_seconds(partial(call, num_threads=1)) / 2, 0.0)


def slowdown() -> float:
    """Return how many times as long a computation takes if the other core computes as well."""
    case = Case(GRADIENT, "float32", (256, 512, 256), "recomputed")
    call, _ = call_of(case)
    other, _ = call_of(case)
    alone, ends = least_seconds(partial(call, 1)), threading.Event()

    def compute() -> None:
        while not ends.is_set():
            other(1)

    thread = threading.Thread(target=compute)
    thread.start()
    beside = least_seconds(partial(call, 1))
    ends.set()
    thread.join()
    return max(beside / alone, 1.0)


@dataclass
class Validation:
    """Predicted and measured seconds of two threads."""

    lines: list[tuple[str, float, float, float]] = field(default_factory=list)  #: name, one thread, predicted, measured

    @property
    def errors(self) -> list[float]:
        return [predicted / measured - 1 for _, _, predicted, measured in self.lines]

    def text(self) -> str:
        titles = ["problem", "one thread, ms", "predicted, ms", "measured, ms", "predicted / measured"]
        lines = [[name, *map(milliseconds, seconds), f"{seconds[1] / seconds[2]:.2f}"] for name, *seconds in self.lines]
        near = sum(abs(error) <= NEAR for error in self.errors)
        middle = statistics.median(self.errors)
        return f"{table(titles, lines)}\n{near} of {len(lines)} within {percent(NEAR)}, median {middle:+.0%}\n"


def validate(count: int, seed: int, repeats: int) -> Validation:
    """Compare predicted with measured times of two threads for random problems."""
    found = Validation()
    general = replace(Machine(), start=start_seconds(), thread=0.0, slowdown=slowdown())
    print(f"start of two threads {1e6 * general.start:.1f} us, slowdown {general.slowdown:.2f}", flush=True)
    for case in draw(100 * count, seed, layouts="plain"):
        if len(found.lines) == count:
            break
        call, traffic = call_of(case)
        before = time.perf_counter()
        call(1)
        if not SHORTEST / 2 < time.perf_counter() - before < 2 * LONGEST:
            continue
        one = least_seconds(partial(call, 1))
        if not SHORTEST < one < LONGEST:
            continue
        machine = general
        if traffic > 2**21:
            machine = replace(general, bandwidth=stream_rate(traffic))
        two = least_seconds(partial(call, 2))
        found.lines.append((case.name, one, predicted(call, 2, machine, repeats, traffic), two))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m ascend_grad.bench.many_cores", description=__doc__)
    parser.add_argument("--validate", type=int, default=0, metavar="COUNT", help="random problems for two threads")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="recordings of each call; default: %(default)s")
    parser.add_argument("--bandwidth", type=float, default=Machine.bandwidth / 1e9, help="GB/s; default: %(default)g")
    arguments = parser.parse_args()
    print(*(f"{name} {value}" for name, value in this_machine.describe().items()), sep="; ")
    if arguments.validate:
        print(validate(arguments.validate, arguments.seed, arguments.repeats).text())
        return
    machine = Machine(bandwidth=1e9 * arguments.bandwidth)
    print(report(PRODUCTS, machine, arguments.repeats), report(ROWS, machine, arguments.repeats), sep="\n")


if __name__ == "__main__":
    main()
