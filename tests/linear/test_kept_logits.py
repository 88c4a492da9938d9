"""Logits that the loss with gradients keeps between its passes: where, and that nothing is written over them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from linear_samples import WHOLE, LinearProblem, Shape, accumulator, problem_of
from samples import DTYPES, assert_identical

from ascend_grad import _linear

#: Bytes of a boundary that buffers begin at.
ALIGNMENT = 64


def plan_of(shape: Shape, dtype: str, nbytes: int):
    """How a problem is solved whose rows all count; None: no logits are kept."""
    real = DTYPES[dtype]
    x, w = np.broadcast_to(real.type(0), (shape.BT, shape.H)), np.broadcast_to(real.type(0), (shape.V, shape.H))
    buffered = real != accumulator(real)
    plans = _linear.plans(x, w, shape.BT, nbytes, True, True, True, buffered, True, w.size * real.itemsize)
    return plans[0] if plans else None


def plans():
    sizes = (
        (140, 300, 700, 1100, 1500, 2100, 3000),
        (300, 900, 1500, 3000, 8000, 20000),
        (48, 100, 300, 700, 1200, 2000),
    )
    for *shape, dtype, power in itertools.product(*sizes, DTYPES, (22, 23, 24, 25)):
        plan = plan_of(Shape(*shape), dtype, 2**power)
        if plan is not None and plan.kept_blocks:
            yield Shape(*shape), DTYPES[dtype], plan


def test_nothing_is_written_over_logits_that_are_still_to_be_read():
    found = list(plans())
    assert len(found) > 500
    for shape, real, plan in found:
        check_places(shape, real, plan)


def check_places(shape: Shape, real: np.dtype, plan) -> None:
    assert plan.lent_blocks <= plan.kept_blocks <= plan.blocks
    row, one_chunk = shape.H * real.itemsize, plan.rows * plan.vocab * accumulator(real).itemsize
    end = shape.V * row - ALIGNMENT
    for block in range(plan.blocks):
        for chunk in range(plan.chunks):
            if real != accumulator(real) and chunk < plan.chunks - 1:
                continue  # it is added up elsewhere
            written = min((block + 1) * plan.vocab, shape.V) * row
            # What is unread lies behind that of this chunk, and of this block, at the end.
            unread = (plan.lent_blocks - block) * plan.chunks - chunk - 1
            if unread > 0:
                assert end - unread * one_chunk >= written
    if plan.lent_blocks:
        assert plan.lent_blocks * plan.chunks * one_chunk <= end


#: What becomes of the logits of float32 problems, a sixth of whose rows is ignored: shape, bytes of the workspace.
CASES = {
    "all three": (Shape(360, 6000, 200), 4 << 20),
    "in the result": (Shape(160, 6000, 260), 4 << 20),
    "in both": (Shape(480, 3000, 400), 4 << 20),
    "chunks": (Shape(1300, 1500, 1200), 12 << 20),
}


def problem_with(name: str, dtype: str) -> LinearProblem:
    return problem_of(WHOLE, CASES[name][0], dtype, reduction="mean")


def test_the_cases_are_what_they_are_named():
    """In the memory of the result, in the workspace, or computed twice."""
    plans = {}
    for name, (shape, nbytes) in CASES.items():
        arguments = problem_with(name, "float32").arguments
        rows = np.count_nonzero(arguments["target"] != arguments["ignore_index"])
        plans[name] = plan_of(shape._replace(BT=int(rows)), "float32", nbytes)
    kept = {name: (plan.lent_blocks, plan.kept_blocks, plan.blocks) for name, plan in plans.items()}
    lent, all_kept, blocks = kept["all three"]
    assert 0 < lent < all_kept < blocks
    lent, all_kept, blocks = kept["in the result"]
    assert 1 < lent == all_kept == blocks
    lent, all_kept, blocks = kept["in both"]
    assert 0 < lent < all_kept == blocks
    assert plans["chunks"].chunks > 1
    assert plans["chunks"].lent_blocks > 0


def check(problem: LinearProblem, engine, **settings) -> None:
    """Right, and the same for every number of threads."""
    results = engine.solve(problem, **settings, num_threads=1)
    engine.assert_solved(problem, results)
    for count in (2, 3, 4):
        for result, right in zip(engine.solve(problem, **settings, num_threads=count), results, strict=True):
            assert_identical(result, right)


@pytest.mark.parametrize("name", ["all three", "in the result"])
def test_values(name, dtype, cpu_engine):
    check(problem_with(name, dtype), cpu_engine, workspace_bytes=CASES[name][1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["in both", "chunks"])
def test_values_of_larger_problems(name, dtype, default_engine):
    check(problem_with(name, dtype), default_engine, workspace_bytes=CASES[name][1])
