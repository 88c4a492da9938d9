"""Test the benchmark of fits and objectives on tiny cases. No test depends on speed."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
from benchmark_settings import hurry

from ascend_grad.bench import documents, fit
from ascend_grad.bench.measure import DisagreementError
from ascend_grad.bench.report import fit_blocks
from ascend_grad.bench.results import DEMONSTRATION, NUMPY, OWN, SKLEARN, Row

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
    assert case.name in fit_blocks([row])["fit_rows"]


def test_each_kind_of_call_has_a_line_with_mean_and_range():
    rows = [Row(fit.FITS[0], {OWN: 1, SKLEARN[0]: ratio}, 0) for ratio in (2, 8)]
    rows += [Row(case, {OWN: 1, NUMPY[0]: 3, DEMONSTRATION: 300}, 0) for case in fit.OBJECTIVES]
    lines = fit_blocks(rows)["fit"].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells == [
        ["SoftmaxRegression fit float64", "2", "4.00× (2.00× to 8.00×)", "–", "–"],
        *(
            [f"{name} objective {dtype}", "1", "–", "3.00× (3.00× to 3.00×)", "300.0× (300.0× to 300.0×)"]
            for name, dtype in (("xgboost_softmax", "float32"), ("lightgbm_softmax", "float64"))
        ),
    ]


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
    assert "--keep needs a full run" in capsys.readouterr().err
