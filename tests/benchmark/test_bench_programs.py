"""Test the benchmark's calls in programs. No test depends on the speed of the machine."""

from __future__ import annotations

import pytest

from ascend_grad.bench import cases, measure, report, targets
from ascend_grad.bench.case import AFTER_PAUSE, AFTER_TORCH, BACK_TO_BACK, PLACES, PROGRAMS, Case
from ascend_grad.bench.results import OWN, Results, Row, side_with_threads
from ascend_grad.bench.sides import programs
from ascend_grad.cli.main import main


def small(call: Case) -> Case:
    shape = (3, 4, 5) if call.dim is None else (3, 5)
    return Case(call.operator, call.dtype, shape, call.mode, call.dim, place=call.place, suite=PROGRAMS)


WITHOUT_TORCH = [call for call in cases.programs() if call.place != AFTER_TORCH]


@pytest.mark.parametrize("call", WITHOUT_TORCH, ids=lambda call: call.name)
def test_calls_in_programs(call, hasty):
    found = measure.measure(small(call), 2)
    assert set(found.seconds) == {OWN, *map(side_with_threads, (1, 2))}


def test_numbers_of_threads():
    assert [list(programs.counts(most)) for most in (1, 2, 3, 8)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8]]


@pytest.mark.parametrize("first_calls", [0, 2])
def test_the_program_works_before_each_call(first_calls, hasty, monkeypatch):
    monkeypatch.setattr(measure, "PROGRAM_CALLS", 3)
    monkeypatch.setattr(measure, "FIRST_CALLS", first_calls)
    events = []
    monkeypatch.setattr(measure, "_timed", lambda call, count: call())

    def call() -> float:
        events.append("call")
        return float(events.count("call"))

    least = measure.in_programs({OWN: call}, lambda: events.append("work"), 2)
    assert events == ["work", "call"] * 6
    assert least == {OWN: 2.0 if first_calls == 0 else 3.0}


@pytest.fixture
def rows() -> list[Row]:
    """Make invented results: two threads are faster than the default by a third and by a quarter."""

    def row(place: str, alone: float, two: float, torch: float) -> Row:
        seconds = {OWN: 3e-3, side_with_threads(1): alone, side_with_threads(2): two, "torch": torch}
        return Row(Case("softmax", "float32", (3, 5), "out", 1, place=place, suite=PROGRAMS), seconds)

    return [row(BACK_TO_BACK, 3e-3, 2e-3, 6e-3), row(AFTER_PAUSE, 2.25e-3, 4e-3, 2.4e-3)]


def test_the_default_is_compared_with_the_best_number_of_threads(rows):
    lines = report.programs_rows(rows).splitlines()[2:]
    assert [[cell.strip() for cell in line.strip("|").split("|")][1:] for line in lines] == [
        ["3", "2 threads", "0.67×", "2.00×"],
        ["3", "1 thread", "0.75×", "0.80×"],
    ]
    found = {target.text: target for target in targets.programs_targets(rows)}
    assert [target.met for target in found.values()] == [False, False, False, True, None, None, None, False]
    assert "2 of 2 below" in found["the same at worst"].measured


def test_results_keep_the_place(rows):
    kept = Results({}, 2, {"programs": rows})
    assert [row.case.place for row in Results.from_json(kept.to_json())["programs"]] == [BACK_TO_BACK, AFTER_PAUSE]


def test_the_command(hasty, monkeypatch, tmp_path, capsys):
    file = tmp_path / "programs.json"
    monkeypatch.setattr(cases, "PROGRAM_LAYOUTS", (((3, 4), 1), ((3, 5), 1)))
    assert main(["bench", "programs", "--quick", "--threads", "2", "--json", str(file)]) == 0
    found = Results.from_json(file.read_text())["programs"]
    assert {row.case.place for row in found} == set(PLACES) - {AFTER_TORCH}
    out = capsys.readouterr().out
    assert all(row.case.name in out for row in found)
    assert "default number of threads" in out
