"""Test that every kind of plan of a row-wise problem gives the same bits, and that the chosen one has an estimate."""

from __future__ import annotations

import numpy as np
import pytest
from samples import assert_identical

import ascend_grad as ag
from ascend_grad import _rowwise_candidates


@pytest.fixture
def force():
    """Force a kind of plan, until the test ends."""
    yield _rowwise_candidates.force
    _rowwise_candidates.force()


def test_every_kind_of_plan_gives_the_same_bits(force):
    rng = np.random.default_rng(5)
    occurred = set()
    for shape, axis in [
        ((37, 50), 1),
        ((5, 3000, 9), 1),
        ((2, 70_001), 1),
        ((300, 7), 1),
        ((9, 5000), 0),
        ((3, 40, 80), 1),
    ]:
        for step in (1, 2, -1):
            g, y = (rng.random((*shape[:-1], abs(step) * shape[-1]), np.float32)[..., ::step] for _ in range(2))
            for operator, arrays in (("softmax_backward", (g, y)), ("log_softmax", (g,))):
                expected = getattr(ag, operator)(*arrays, axis)
                for name in _rowwise_candidates.names():
                    force(name)
                    for threads in (1, 3):
                        occurred.add(ag.explain(operator, *arrays, axis, num_threads=threads).plan)
                        assert_identical(getattr(ag, operator)(*arrays, axis, num_threads=threads), expected)
                force()
    assert occurred == set(_rowwise_candidates.names())


def test_the_plan_has_an_estimated_time():
    small, large = (ag.explain("softmax", np.ones((rows, 1000), np.float32), num_threads=1) for rows in (10, 1000))
    assert 0 < small.estimated_ns < large.estimated_ns
    assert ag.explain("softmax", np.ones((0, 3), np.float32)).estimated_ns == 0
