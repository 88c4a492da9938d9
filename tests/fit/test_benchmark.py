"""Test the benchmark of fits and objectives on tiny cases. No test depends on speed."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
from benchmark_settings import hurry

from ascend_grad.bench import documents, fit
from ascend_grad.bench.measure import DisagreementError
from ascend_grad.bench.report import fit_block
from ascend_grad.bench.results import DEMONSTRATION, NUMPY, OWN, SKLEARN

TINY = [replace(case, shape=(60, *case.shape[1:])) for case in (*fit.FITS[:3], fit.OBJECTIVES[0], fit.OBJECTIVES[-1])]


@pytest.fixture(autouse=True)
def _tiny(monkeypatch) -> None:
    hurry(monkeypatch)
    monkeypatch.setattr(fit, "PAUSE", 0)
    monkeypatch.setattr(fit, "FITS", TINY[:3])
    monkeypatch.setattr(fit, "OBJECTIVES", TINY[3:])


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)
def test_all_sides_are_measured(case):
    row = fit.measure(case, 1)
    assert set(row.seconds) == ({OWN, SKLEARN[0]} if case in TINY[:3] else {OWN, NUMPY[0], DEMONSTRATION})
    assert all(seconds > 0 for seconds in row.seconds.values())
    assert case.name in fit_block([row])


def test_other_values_are_refused(monkeypatch):
    monkeypatch.setattr(fit, "formula", lambda *arguments: (np.zeros((60, 3)), np.zeros((60, 3))))
    with pytest.raises(DisagreementError, match="numpy computes other values"):
        fit.measure(TINY[3], 1)


def test_the_command(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(documents, "FOLDER", tmp_path)
    monkeypatch.setattr(documents, "DOCUMENTS", ())
    monkeypatch.setattr(sys, "argv", ["fit", "--threads", "1", "--keep"])
    fit.main()
    assert "| xgboost_softmax objective float32 60 × 3 " in capsys.readouterr().out
    assert [row.case for row in documents.read(tmp_path / "fit.json")["fit"]] == TINY


def test_a_part_is_not_kept(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fit", "--filter", "xgboost", "--keep"])
    with pytest.raises(SystemExit):
        fit.main()
    assert "--keep takes a full run" in capsys.readouterr().err
