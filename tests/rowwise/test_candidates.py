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
    assert occurred == {name for name in _rowwise_candidates.names() if "boxes" not in name}


def test_boxes_give_the_same_bits(force):
    """Boxes of operands in several axis orders have the bits of contiguous operands, also at their ragged ends."""
    rng = np.random.default_rng(6)
    occurred = set()
    for shape in [(2621, 6, 4), (37, 50, 41), (3, 5, 130, 7), (1, 2, 3, 4, 5), (40, 3001, 5)]:
        for dtype in (np.float32, np.float64, np.float16):
            g, y = rng.random(shape).astype(dtype), rng.random(shape).astype(dtype)
            orders = [rng.permutation(len(shape)) for _ in range(3)]
            for axis in range(len(shape)):
                expected = ag.softmax_backward(g, y, axis), ag.log_softmax(g, axis)
                a, b, out = (ordered(x, order) for x, order in zip((g, y, g), orders, strict=True))
                for name in ["rows, gathered, in boxes", "columns, gathered, in boxes"]:
                    force(name)
                    for threads in (1, 3):
                        occurred.add(ag.explain("softmax_backward", a, b, axis, out=out, num_threads=threads).plan)
                        assert_identical(ag.softmax_backward(a, b, axis, out=out, num_threads=threads), expected[0])
                        assert_identical(ag.log_softmax(a, axis, out=out, num_threads=threads), expected[1])
                force()
    assert occurred >= {"rows, gathered, in boxes", "columns, gathered, in boxes"}


def test_inputs_of_stride_0_give_the_same_bits(force):
    """Plans may have the results and one input in place, and only an element of each column of the other input."""
    rng = np.random.default_rng(8)
    for shape in [(5, 3000, 9), (9, 40, 200), (4, 7, 11, 300), (2, 5000, 300)]:
        for dtype in (np.float32, np.float16):
            for _ in range(4):
                is_equal = rng.random(len(shape)) < 0.5
                y, one = (rng.random(lengths).astype(dtype) for lengths in (shape, np.where(is_equal, 1, shape)))
                g = np.broadcast_to(one, shape)
                axis = int(rng.integers(len(shape)))
                out = np.empty(shape, dtype)
                expected = ag.softmax_backward(g.copy(), y, axis), ag.softmax_backward(y, g.copy(), axis)
                forward = ag.log_softmax(g.copy(), axis)
                for name in _rowwise_candidates.names():
                    force(name)
                    for threads in (1, 3):
                        assert_identical(ag.softmax_backward(g, y, axis, out=out, num_threads=threads), expected[0])
                        assert_identical(ag.softmax_backward(y, g, axis, out=out, num_threads=threads), expected[1])
                        assert_identical(ag.log_softmax(g, axis, out=out, num_threads=threads), forward)
                force()


def test_boxes_take_masks_and_other_dtypes(force):
    rng = np.random.default_rng(7)
    x, mask = rng.random((3, 4, 65, 50), np.float32), rng.random((3, 1, 65, 50)) < 0.3
    expected = ag.scaled_masked_softmax(x, mask, 0.5)
    out = ordered(np.empty(x.shape), [2, 0, 3, 1])
    wide = ag.scaled_masked_softmax(x, mask, 0.5, out=np.empty(x.shape))
    for name in ["rows, gathered, in boxes", "columns, gathered, in boxes"]:
        force(name)
        plan = ag.explain("scaled_masked_softmax", ordered(x, [3, 1, 0, 2]), mask, 0.5, out=out).plan
        assert plan == "rows, gathered, in boxes" or name.startswith("columns")
        assert_identical(ag.scaled_masked_softmax(ordered(x, [3, 1, 0, 2]), mask, 0.5, out=out), wide)
        out32 = ordered(np.empty_like(x), [1, 2, 3, 0])
        assert_identical(ag.scaled_masked_softmax(ordered(x, [3, 1, 0, 2]), mask, 0.5, out=out32), expected)


def test_an_out_in_another_axis_order_is_computed_in_boxes():
    x = np.asfortranarray(np.ones((26321, 6, 4), np.float32))
    assert ag.explain("softmax", x, 1, out=np.empty(x.shape, np.float32), num_threads=1).plan.endswith("in boxes")
    assert "boxes" not in ag.explain("softmax", x, 1, out=np.empty_like(x), num_threads=1).plan


def ordered(x: np.ndarray, order: list[int]) -> np.ndarray:
    """Return a copy whose axes have this order in memory."""
    return x.transpose(order).copy().transpose(np.argsort(order))


def test_the_plan_has_an_estimated_time():
    small, large = (ag.explain("softmax", np.ones((rows, 1000), np.float32), num_threads=1) for rows in (10, 1000))
    assert 0 < small.estimated_ns < large.estimated_ns
    assert ag.explain("softmax", np.ones((0, 3), np.float32)).estimated_ns == 0
