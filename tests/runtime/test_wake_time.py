"""Test that calls after a pause start a team if waking its threads takes less time than the call."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import ascend_grad as ag
from ascend_grad import _openmp, _threads

pytestmark = pytest.mark.skipif(not _openmp.VERSION, reason="built without OpenMP")

PAUSE = 1e9


@pytest.fixture(autouse=True)
def four_threads() -> Iterator[None]:
    ag.set_num_threads(4)
    yield
    ag.set_num_threads(None)


def wake_in(nanoseconds: float) -> None:
    """Record as many wakes that nothing else is remembered."""
    for _ in range(30):
        _threads.record_wake_time(nanoseconds)


def test_a_call_that_takes_longer_than_waking_starts_a_team():
    wake_in(30e3)
    assert _threads.threads_after(PAUSE, PAUSE, 20e3) == 1
    assert _threads.threads_after(PAUSE, PAUSE, 60e3) == 4
    wake_in(3e6)
    assert _threads.threads_after(PAUSE, PAUSE, 2e6) == 1
    assert _threads.threads_after(PAUSE, PAUSE, 4e6) == 4
    wake_in(1e9)
    assert _threads.threads_after(PAUSE, PAUSE, 10e6) == 4  # no wake time is longer than 6 ms


def test_a_team_that_was_used_a_moment_ago_needs_no_waking():
    wake_in(3e6)
    assert _threads.threads_after(0, 0, 60e3) == 4


def test_a_call_has_a_thread_for_every_15_microseconds():
    sizes = [_threads.threads_after(0, 0, cost) for cost in (9e3, 14e3, 16e3, 31e3, 46e3, 1e6)]
    assert sizes == [1, 1, 2, 3, 4, 4]


def test_calls_back_to_back_start_a_team():
    """The serial times of calls that follow each other add up; a pause ends the sum."""
    wake_in(3.5e6)
    for _ in range(3):
        sizes = [_threads.threads_after(PAUSE, PAUSE, 1e6)] + [_threads.threads_after(0, PAUSE, 1e6) for _ in range(3)]
        assert sizes == [1, 1, 1, 4]


def test_programs_whose_pauses_become_cheap_get_the_team_again():
    """Few calls try the team while waking is slow; once it is fast, most calls get the team."""
    wake_in(5e6)
    sizes = []
    for _ in range(1000):
        sizes.append(_threads.threads_after(PAUSE, PAUSE, 1e6))
        if sizes[-1] > 1:
            _threads.record_wake_time(5e6)
    assert 1 <= sizes.count(4) <= 30
    sizes.clear()
    for _ in range(1000):
        sizes.append(_threads.threads_after(PAUSE, PAUSE, 1e6))
        if sizes[-1] > 1:
            _threads.record_wake_time(20e3)
    assert sizes.count(4) > 800
    assert set(sizes[-500:]) == {4}
