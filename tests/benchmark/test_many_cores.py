"""Test the simulator of many cores: its arithmetic on phases that can be computed by hand, and its recordings."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import ascend_grad as ag
from ascend_grad import _tasks
from ascend_grad.bench import many_cores
from ascend_grad.bench.case import GRADIENT, OUT, Case
from ascend_grad.bench.many_cores import Machine, Phase, Team, limit, phase_seconds, recorded, simulated

#: Nothing but tasks takes time.
FREE = Machine(start=0, thread=0, line=0, bandwidth=1e30)
#: Besides, a cache line takes a second to another core.
LINES = replace(FREE, line=1.0)


@pytest.mark.parametrize(
    ("tasks", "threads", "seconds"),
    [((1,) * 8, 4, 2), ((1,) * 9, 4, 3), ((3, 1, 1, 1), 2, 3), ((1, 1, 1, 3), 2, 4), ((5,), 4, 5)],
)
@pytest.mark.parametrize("by_thread", [False, True])
def test_free_threads_take_the_next_task(tasks, threads, seconds, by_thread):
    assert phase_seconds(Phase(tasks, by_thread), threads, FREE) == seconds


def test_threads_help_other_partitions():
    """The first partition has all the work: the second thread takes half of it."""
    assert phase_seconds(Phase((4.0, 4.0, 0.0, 0.0), True), 2, FREE) == 4


def test_tasks_of_one_partition_are_fetched_one_by_one():
    """Four threads fetch after 1, 2, 3 and 4 seconds, compute for 10, and count their tasks one by one."""
    assert phase_seconds(Phase((10.0,) * 4), 4, LINES) == pytest.approx(4 + 10 + 1 + 1)


def test_tasks_of_separate_partitions_are_fetched_at_once():
    """The first thread fetches after one second, the others after two, as they see the phase later."""
    assert phase_seconds(Phase((10.0,) * 4, True), 4, LINES) == pytest.approx(2 + 10 + 3 + 1)


def test_threads_share_the_bandwidth():
    phase = Phase((1.0,) * 4, bytes=400.0)
    assert phase_seconds(phase, 4, replace(FREE, bandwidth=400)) == 1  # four threads move 400 bytes a second
    assert phase_seconds(phase, 4, replace(FREE, bandwidth=100)) == 4
    assert limit(Team(4, (phase,)), replace(FREE, bandwidth=100)) == 4


def test_busy_cores_are_slower():
    assert phase_seconds(Phase((1.0,) * 4), 4, replace(FREE, slowdown=1.5)) == 1.5
    assert phase_seconds(Phase((1.0,) * 4), 1, replace(FREE, slowdown=1.5)) == 4
    # Slower tasks also move fewer bytes a second.
    assert phase_seconds(Phase((1.0,) * 4, bytes=400.0), 4, replace(FREE, slowdown=2.0, bandwidth=200)) == 2


def test_a_call_starts_its_team_and_works_alone_between_phases():
    team = Team(2, (Phase((1.0, 1.0)), Phase((2.0,))), serial=0.5)
    assert team.work == 4.5
    assert simulated(team, replace(FREE, start=10, thread=0.25)) == 10 + 2 * 0.25 + 0.5 + 1 + 2
    assert simulated(replace(team, threads=1), replace(FREE, start=10)) == 4.5


@pytest.mark.parametrize("threads", [1, 3, 64])
def test_recordings_have_the_plan_of_any_number_of_threads(threads):
    x = np.random.default_rng(0).standard_normal((512, 1024), np.float32)
    expected = ag.softmax(x, num_threads=1, backend="cpu")
    results = []
    team, outside = recorded(
        lambda count: results.append(ag.softmax(x, num_threads=count, backend="cpu")), threads, 2, traffic=100.0
    )
    assert team.threads == threads
    assert [len(phase.tasks) >= 4 * min(threads, 128) for phase in team.phases] == [True]
    assert all(seconds > 0 for phase in team.phases for seconds in phase.tasks)
    assert team.serial > 0
    assert outside.work > 0
    assert outside.phases == ()
    assert [phase.bytes for phase in team.phases] == pytest.approx([100.0])
    assert all(np.array_equal(result, expected) for result in results)


@pytest.mark.parametrize(
    "case",
    [
        Case(GRADIENT, "float32", (512, 1024, 256), "recomputed"),
        Case("softmax_backward", "float32", (4, 2**18), OUT, 1),
        Case("softmax", "float32", (2048, 512), OUT, 1),
    ],
    ids=lambda case: case.operator,
)
def test_large_phases_have_four_tasks_for_each_thread(case):
    call, _ = many_cores.call_of(case)
    for threads in (8, 16):  # four rows are tasks as they are for two threads
        team, _ = recorded(call, threads, 1)
        largest = max(team.phases, key=lambda phase: sum(phase.tasks))
        assert len(largest.tasks) >= 4 * threads


def test_phases_share_the_traffic_by_their_times():
    x = np.zeros((2, 2**18), np.float32)
    team, _ = recorded(lambda count: ag.softmax(x, num_threads=count, backend="cpu"), 8, 2, traffic=1000.0)
    assert len(team.phases) > 3
    assert sum(phase.bytes for phase in team.phases) == pytest.approx(1000)
    combination = min(team.phases, key=lambda phase: len(phase.tasks))
    assert combination.bytes < 100


def test_a_failed_call_ends_the_recording():
    def fail() -> None:
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        _tasks.record_teams(fail)
    x = np.zeros((64, 512), np.float32)
    ag.softmax(x, num_threads=2)
    assert _tasks.record_teams(lambda: None) == []


def test_the_report_has_a_line_for_each_case():
    text = many_cores.report([Case("softmax", "float32", (256, 512), OUT, 1)], Machine(), 1, (1, 2))
    assert text.count("\n") == 3
    assert "softmax float32 256 × 512" in text


def test_the_text_of_a_validation():
    found = many_cores.Validation([("near", 2e-3, 1.1e-3, 1e-3), ("far", 2e-3, 2e-3, 1e-3)])
    assert found.errors == pytest.approx([0.1, 1.0])
    assert "1 of 2 within 15 %, median +55%" in found.text()
