"""Test that results of a row have the same bits in every call of many rows, as docs/accuracy.md promises."""

from __future__ import annotations

import numpy as np
import pytest
from samples import DTYPES, generator

import ascend_grad as ag
from ascend_grad import _cpu, _linear_python

#: Most rows, or vocabulary entries, of which some variant and dtype computes logits without packing them.
FEW = 64
OUTPUTS = ("lse", "log_prob", "entropy", "predicted")


def sizes_of(random: np.random.Generator) -> tuple[int, int, int]:
    """Return rows, vocabulary entries and features of a random problem, more of the first two than FEW."""
    rows, vocab = (int(FEW + 1 + random.integers(most) * random.random()) for most in (540, 9000))
    return rows, vocab, int(1 + random.integers(max(1500 - vocab // 6, 1)) * random.random() ** 2)


def options_of(random: np.random.Generator, vocab: int, dtype: np.dtype) -> dict[str, object]:
    options: dict[str, object] = {}
    if random.random() < 0.3:
        options["bias"] = random.standard_normal(vocab).astype(dtype)
    if random.random() < 0.3:
        options |= {"softcap": 5.0, "logit_scale": 1.5}
    return options


def parts_of(random: np.random.Generator, rows: int) -> list[slice]:
    """Return three random ranges of more than FEW rows."""
    starts = random.integers(rows - FEW, size=3)
    return [slice(int(start), int(random.integers(start + FEW + 1, rows + 1))) for start in starts]


@pytest.mark.parametrize("seed", range(6))
def test_losses_do_not_depend_on_other_rows_and_on_gradients(seed, dtype, forced):
    random = generator(seed)
    rows, vocab, hidden = sizes_of(random)
    x = random.standard_normal((rows, hidden)).astype(DTYPES[dtype])
    w = (random.standard_normal((vocab, hidden)) * random.choice((1, 4)) / np.sqrt(hidden)).astype(DTYPES[dtype])
    target, temperature = random.integers(vocab, size=rows), random.uniform(0.5, 2, rows)
    options = options_of(random, vocab, x.dtype) | {"label_smoothing": random.choice((0, 0.1))}
    outputs = OUTPUTS if seed % 2 else OUTPUTS[:2]

    def solve(part: slice, threads: int, return_grad: bool, workspace: int) -> list[np.ndarray]:
        result = ag.linear_cross_entropy(
            x[part], w, target[part], reduction="none", outputs=outputs, temperature=temperature[part],
            return_grad=return_grad, num_threads=threads, workspace_bytes=workspace, backend="cpu", **options,
        )  # fmt: skip
        return [result.loss, *(getattr(result, name) for name in outputs)]

    for variant in _cpu.supported_variants():
        forced(variant)
        right = solve(slice(0, rows), 1, False, 64 << 20)
        for threads, part in enumerate([slice(0, rows), *parts_of(random, rows)], start=1):
            got = solve(part, threads, bool(random.integers(2)) or threads == 1, int(random.choice((8, 64))) << 20)
            for name, first, second in zip(("loss", *outputs), right, got, strict=True):
                assert first[part].tobytes() == second.tobytes(), (variant, name, (rows, vocab, hidden), part)


def test_ignored_rows_count(dtype, forced):
    """A call of few rows has the bits of many rows, if ignored rows make it long enough, as the documentation says."""
    random = generator("ignored rows")
    x, w = (
        random.standard_normal((100, 300)).astype(DTYPES[dtype]),
        random.standard_normal((900, 300)).astype(DTYPES[dtype]),
    )
    target = random.integers(900, size=100)
    for variant in _cpu.supported_variants():
        forced(variant)
        for rows in 1, 5, 40:
            padded = np.where(np.arange(FEW + 1) < rows, target[: FEW + 1], -100)
            results = (
                ag.linear_cross_entropy(
                    each, w, ids, reduction="none", outputs=OUTPUTS, return_grad=False, backend="cpu"
                )
                for each, ids in ((x, target), (x[: FEW + 1], padded))
            )
            for first, second in zip(*results, strict=True):
                assert first is second is None or first[:rows].tobytes() == second[:rows].tobytes(), (variant, rows)


@pytest.mark.parametrize("seed", range(4))
def test_top_k_does_not_depend_on_other_rows(seed, dtype, forced):
    random = generator(seed)
    rows, vocab, hidden = sizes_of(random)
    x = random.standard_normal((rows, hidden)).astype(DTYPES[dtype])
    w = (random.standard_normal((vocab, hidden)) * 2 / np.sqrt(hidden)).astype(DTYPES[dtype])
    temperature, options = random.uniform(0.5, 2, rows), options_of(random, vocab, x.dtype)

    def solve(part: slice, threads: int, workspace: int) -> tuple[np.ndarray, ...]:
        return tuple(
            ag.linear_top_k(
                x[part], w, 1 + seed * 3, temperature=temperature[part], num_threads=threads, workspace_bytes=workspace,
                backend="cpu", **options,
            )
        )  # fmt: skip

    for variant in _cpu.supported_variants():
        forced(variant)
        right = solve(slice(0, rows), 1, 64 << 20)
        for threads, part in enumerate(parts_of(random, rows), start=2):
            for first, second in zip(right, solve(part, threads, int(random.choice((8, 64))) << 20), strict=True):
                assert first[part].tobytes() == second.tobytes(), (variant, (rows, vocab, hidden), part)


def test_more_rows_and_entries_are_packed(dtype, forced):
    """Packed products have one order of sums."""
    for variant in _cpu.supported_variants():
        forced(variant)
        for hidden in 5, 48, 4000:
            x = np.zeros((FEW + 1, hidden), DTYPES[dtype])
            for wanted in (True, False, False), (True, True, True):
                plans = _linear_python.plans(x, x, FEW + 1, 2**26, *wanted, x.itemsize == 2, True)
                assert all(plan.tasks == 0 for plan in plans), (variant, hidden, wanted)
