"""Test the benchmark of losses over ranks: its model, its tables, and its stored results."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from thread_ranks import on_ranks, returned

from ascend_grad.bench.case import WHOLE, Case
from ascend_grad.bench.parallel import cost, rank, report
from ascend_grad.bench.parallel.cost import MEASURED, MODELLED, Network
from ascend_grad.bench.parallel.measure import SIDES, ParallelResults
from ascend_grad.bench.parallel.timing import TimedCollectives
from ascend_grad.bench.results import Row
from ascend_grad.parallel.communicators import Collectives

NETWORK = Network("slow", 1e-3, 1e6)
RATE = 1e9


@pytest.fixture
def results() -> ParallelResults:
    rows = [Row(case, dict(zip(SIDES, (1.0, 1.2, 0.05)))) for case in MEASURED]
    return ParallelResults(2, rows, [(1024, 1e-5), (1 << 24, 1e-2)], {"CPU": "one"})


def test_one_rank_does_not_communicate():
    for case in MODELLED:
        step = cost.step(case, 1, RATE, NETWORK)
        assert step.communication == 0
        assert step.kernels == 6 * math.prod(case.shape) / RATE
        assert cost.efficiency(case, 1, RATE, NETWORK) == 1


def test_the_ranks_compute_logits_of_16_bits_twice():
    for dtype, factor in (("float32", 1), ("float64", 1), ("bfloat16", 4 / 3), ("float16", 4 / 3)):
        case = Case(WHOLE, dtype, (10, 20, 30), "vocabulary")
        assert 4 * cost.step(case, 4, RATE, NETWORK).kernels == pytest.approx(36000 * factor / RATE)


def test_what_two_ranks_send():
    """Each of two ranks sends a message with half of its summands, and a message with the sum of the other half."""
    vocabulary, tokens = (
        Case(WHOLE, "float32", (10, 20, 30), "vocabulary"),
        Case(WHOLE, "float32", (10, 20, 30), "tokens"),
    )
    card = 1e-3 + 1024 / 1e6
    statistics = 2 * 2e-3 + (8 * 10 + 40 * 10) / 1e6
    assert cost.step(vocabulary, 2, RATE, NETWORK).communication == pytest.approx(card + statistics + 2e-3 + 1200 / 1e6)
    assert cost.step(tokens, 2, RATE, NETWORK).communication == pytest.approx(
        card + 2e-3 + 16 / 1e6 + 2e-3 + 2400 / 1e6
    )


def test_a_network_is_found_again():
    for size in (2, 8):
        sums = [(count, cost.all_reduce(NETWORK, size, count)) for count in (1000, 10**7)]
        found = cost.fitted("found", sums, size)
        assert found.latency == pytest.approx(NETWORK.latency)
        assert found.bandwidth == pytest.approx(NETWORK.bandwidth)


def test_tokens_are_split_if_there_are_more_of_them_than_entries():
    """The summed gradient has a row per vocabulary entry if tokens are split, and a row per token otherwise."""
    vocabulary, tokens = MODELLED
    _, entries, width = vocabulary.shape
    for size in (2, 64, 4096):
        for rows in (0.99 * entries, 1.01 * entries):
            shape = (round(rows), entries, width)
            by_entries, by_tokens = (
                cost.step(replace(case, shape=shape), size, 1e11, Network("fast", 0, 1e10)).total
                for case in (vocabulary, tokens)
            )
            assert (by_tokens < by_entries) == (rows > entries)


def test_tables(results):
    for block in (report.measured_block(results), report.model_block(results)):
        assert len({line.count("|") for line in block.splitlines()}) == 1
    assert " 83 %" in report.measured_block(results)


def test_results_are_kept(results):
    assert ParallelResults.from_json(results.to_json()) == results


@pytest.mark.parametrize("split", ["vocabulary", "tokens"])
def test_a_rank(split):
    case = Case(WHOLE, "bfloat16", (12, 20, 4), split)

    def work(comm):
        ranks = TimedCollectives(Collectives(comm))
        call = rank.call_of(case, ranks)
        return rank.timed(call, ranks), call().loss

    both = returned(on_ranks(2, work))
    ((_, right),) = returned(on_ranks(1, work))
    for (seconds, communication), loss in both:
        assert 0 < communication < seconds
        np.testing.assert_allclose(loss, right, rtol=1e-5)
