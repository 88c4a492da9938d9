"""Test that README's sentences state the numbers of the stored results."""

from __future__ import annotations

import statistics
from pathlib import Path

from ascend_grad.bench import documents, pictures
from ascend_grad.bench.results import NUMPY, OWN, SKLEARN, TORCH

SOURCES = Path(__file__).resolve().parents[2]
RESULTS = SOURCES / "bench" / "results"
README = " ".join((SOURCES / "README.md").read_text(encoding="utf-8").split())


def ratios(rows, rival):
    return [ratio for row in rows if (ratio := row.speedup(*rival)) is not None]


def mean(rows, rival):
    return f"{statistics.geometric_mean(ratios(rows, rival)):.0f} times"


def between(rows, rival):
    """Return the range of ratios as README writes it."""
    found = ratios(rows, rival)
    return f"{min(found):.1f} to {max(found):.1f} times"


def test_losses_of_pytorch():
    rows = {row.case.name: row for row in documents.read(RESULTS / "losses.json")["logits"]}

    def ratio(dtype):
        return rows[f"cross_entropy {dtype} (1024, 32000) dim 1, C order, fresh"].speedup(*TORCH)

    narrow = sorted({f"{ratio(dtype):.0f}" for dtype in ("float16", "bfloat16")}, key=int)
    words = f"takes {ratio('float32'):.0f} times as long for loss and gradient of 1024 × 32,000 logits in float32, "
    assert f"{words}{' to '.join(narrow)} times in 16 bits" in README


def test_random_problems():
    grids = documents.kept_grids(RESULTS)
    rowwise, linear = ([row for grid in grids for row in grid[section]] for section in ("rowwise", "linear"))
    scipy = ratios(rowwise, ("scipy",))
    assert f"take {mean(rowwise, ('scipy',))} as long (geometric mean of {len(scipy)} random problems)" in README
    assert f"{mean(rowwise, NUMPY)} as long for row-wise functions, {mean(linear, NUMPY)} for linear losses" in README


def test_memory():
    case = pictures.CASES[-1]
    tokens, vocabulary, features = case.shape
    own = {growth.case: growth for growth in documents.read(RESULTS / "memory.json")["memory"] if growth.side == OWN}
    logits = f"{4 * tokens * vocabulary / 2**30:.1f} GiB of logits"
    assert f"A loss of {tokens} tokens over a vocabulary of {vocabulary:,} stores {logits}" in README
    assert f"needs {own[case].bytes / 2**30:.1f} GiB beyond its results with {features} features" in README


def test_fits():
    rows = [row for row in documents.read(RESULTS / "fit.json")["fit"] if row.speedup(*SKLEARN) is not None]
    double, single = ([row for row in rows if row.case.dtype == dtype] for dtype in ("float64", "float32"))
    words = f"is {between(double, SKLEARN)} as fast as `LogisticRegression` in float64, and "
    assert f"{words}{between(single, SKLEARN)} in float32" in README
