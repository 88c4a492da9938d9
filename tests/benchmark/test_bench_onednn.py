"""Test the benchmark's rival oneDNN, which takes part where its headers, its library and a compiler are installed."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from ascend_grad.bench import arrays, cases, measure
from ascend_grad.bench.case import BACKWARD, FORWARD
from ascend_grad.bench.sides import onednn


@pytest.mark.parametrize("compiler", ["absent-compiler", "false"])
def test_without_a_compiler_it_takes_no_part(compiler, monkeypatch, capsys):
    monkeypatch.setenv("CC", compiler)
    assert onednn.driver.__wrapped__() is None
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("oneDNN is left out: ")


def test_other_types_and_operators_take_no_part(hasty):
    for problem in cases.draw(8, 0, FORWARD, 20):
        assert onednn.onednn(problem, arrays.operands(problem)) is None


@pytest.mark.parametrize(
    "problem",
    [c for c in cases.draw(60, 1, (*FORWARD, *BACKWARD), 500) if c.dtype in onednn.TYPES],
    ids=lambda problem: problem.name,
)
def test_it_computes_the_same(problem):
    if onednn.driver() is None:
        pytest.skip("no oneDNN")
    with measure.prepared(problem, 1) as comparison:
        if "oneDNN" not in comparison.calls:
            pytest.skip("this oneDNN has no such types")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            calls, _ = measure.agreeing(problem.name, comparison)
        assert "oneDNN" in calls
        # Nothing but the result is written.
        comparison.reset()
        first, second = (np.array(calls["oneDNN"](), np.float32) for _ in range(2))
        assert problem.mode == "in place" or np.array_equal(first, second)
