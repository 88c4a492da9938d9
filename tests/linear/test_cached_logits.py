"""Test where the loss with gradients caches logits between its passes, and that it does not overwrite them."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import linear_oracles
import numpy as np
import pytest
from linear_samples import WHOLE, LinearProblem, Shape, accumulator, problem_of
from samples import DTYPES, assert_identical

from ascend_grad import _cpu, _linear_python

#: The alignment of buffers, in bytes.
ALIGNMENT = 64


def plan_of(shape: Shape, dtype: str, nbytes: int):
    """Return the plan of a loss whose rows are all active, or None if no logits are cached."""
    real = DTYPES[dtype]
    x, w = np.broadcast_to(real.type(0), (shape.BT, shape.H)), np.broadcast_to(real.type(0), (shape.V, shape.H))
    buffered = real != accumulator(real)
    found = _linear_python.plans(x, w, shape.BT, nbytes, True, True, True, buffered, True, w.size * real.itemsize)
    return found[0] if found else None


def caches_exp(dtype: str) -> bool:
    """Return whether the active variant caches exponentials of this dtype in half the memory of logits."""
    return dtype == "bfloat16" and _cpu.variant() != "baseline"


def plans():
    sizes = (
        (140, 300, 700, 1100, 1500, 2100, 3000),
        (300, 900, 1500, 3000, 8000, 20000),
        (48, 100, 300, 700, 1200, 2000),
    )
    for *shape, dtype, power in itertools.product(*sizes, DTYPES, (22, 23, 24, 25)):
        plan = plan_of(Shape(*shape), dtype, 2**power)
        if plan is not None and plan.cached_blocks:
            yield Shape(*shape), DTYPES[dtype], plan


def test_nothing_is_written_over_logits_that_are_still_to_be_read():
    found = list(plans())
    assert len(found) > 500
    for shape, real, plan in found:
        check_places(shape, real, plan)


def check_places(shape: Shape, real: np.dtype, plan) -> None:
    assert plan.blocks_in_weight_grad <= plan.cached_blocks <= plan.blocks
    row, one_chunk = shape.H * real.itemsize, plan.rows * plan.vocab * accumulator(real).itemsize
    if caches_exp(real.name):  # no variant has less than one maximum for 48 exponentials
        one_chunk = plan.rows * (2 * plan.vocab + 4 * (plan.vocab // 48))
    end = shape.V * row - ALIGNMENT
    for block in range(plan.blocks):
        for chunk in range(plan.chunks):
            if real != accumulator(real) and chunk < plan.chunks - 1:
                continue  # only the last chunk writes the result
            written = min((block + 1) * plan.vocab, shape.V) * row
            # Unread logits, of later chunks and blocks, lie at the end of the result.
            unread = (plan.blocks_in_weight_grad - block) * plan.chunks - chunk - 1
            if unread > 0:
                assert end - unread * one_chunk >= written
    if plan.blocks_in_weight_grad:
        assert plan.blocks_in_weight_grad * plan.chunks * one_chunk <= end


def test_many_logits_of_few_features_are_computed_again(dtype):
    """Logits that leave the caches take longer to store and read than to compute, if they have few features."""
    assert plan_of(Shape(900, 30000, 8), dtype, 64 << 20) is None
    assert plan_of(Shape(200, 2000, 8), dtype, 64 << 20).caches_logits
    assert plan_of(Shape(900, 30000, 900), dtype, 64 << 20) is not None


class Case(NamedTuple):
    """Describe a problem with a workspace of `nbytes`, for some dtypes, and its expected plan.

    `has_chunks` means several chunks of rows, `packs_all` that all chunks stay packed. `places` names the memory that
    caches logits: the result's, the workspace, or none if some logits are computed twice.
    """

    shape: Shape
    nbytes: int
    dtypes: tuple[str, ...]
    has_chunks: bool
    packs_all: bool
    places: str


FLOATS = "float32", "bfloat16", "float16"
#: Cases by name. A sixth of their rows is ignored.
CASES = {
    "one chunk": Case(Shape(520, 4000, 280), 8 << 20, FLOATS, False, True, "result workspace none"),
    "result": Case(Shape(160, 6000, 260), 4 << 20, ("float32", "float64"), False, True, "result"),
    "result and workspace": Case(Shape(480, 3000, 400), 4 << 20, ("float32",), False, True, "result workspace"),
    "packed chunks": Case(Shape(1250, 1000, 100), 8 << 20, FLOATS, True, True, "workspace"),
    "packed chunks, float64": Case(Shape(1250, 1000, 100), 16 << 20, ("float64",), True, True, "workspace"),
    "packed chunks, in part": Case(Shape(1250, 4000, 200), 8 << 20, ("float32",), True, True, "workspace none"),
    "packed chunks in the result": Case(Shape(1800, 4000, 400), 8 << 20, ("float16",), True, True, "result none"),
    "chunks": Case(Shape(1300, 1500, 1200), 12 << 20, ("float32",), True, False, "result none"),
    "chunks, float64": Case(Shape(600, 1500, 300), 4 << 20, ("float64",), True, True, "result none"),
}
NAMES_AND_DTYPES = [(name, dtype) for name, case in CASES.items() for dtype in case.dtypes]


def problem_with(name: str, dtype: str) -> LinearProblem:
    return problem_of(WHOLE, CASES[name].shape, dtype, reduction="mean")


@pytest.mark.parametrize(("name", "dtype"), NAMES_AND_DTYPES)
def test_the_cases_are_what_they_say(name, dtype, cpu_engine):
    case, arguments = CASES[name], problem_with(name, dtype).arguments
    rows = np.count_nonzero(arguments["target"] != arguments["ignore_index"])
    plan = plan_of(case.shape._replace(BT=int(rows)), dtype, case.nbytes)
    counts = {
        "result": plan.blocks_in_weight_grad,
        "workspace": plan.cached_blocks - plan.blocks_in_weight_grad,
        "none": plan.blocks - plan.cached_blocks,
    }
    places = case.places
    if name == "one chunk" and caches_exp(dtype):
        places = "result workspace"  # there is space for all exponentials
    assert " ".join(place for place, count in counts.items() if count) == places
    assert (plan.chunks > 1, plan.packed_chunks == plan.chunks) == (case.has_chunks, case.packs_all)


@functools.lru_cache
def expected(name: str, dtype: str):
    """Return the expected values, which are the same for all variants."""
    return linear_oracles.expected(problem_with(name, dtype))


def check(name: str, dtype: str, engine) -> None:
    """Check a case against the oracle, and for equal bits with every number of threads."""
    problem, nbytes = problem_with(name, dtype), CASES[name].nbytes
    results = engine.solve(problem, workspace_bytes=nbytes, num_threads=1)
    engine.assert_solved(problem, results, expected(name, dtype))
    for count in (2, 3, 4):
        others = engine.solve(problem, workspace_bytes=nbytes, num_threads=count)
        for result, right in zip(others, results, strict=True):
            assert_identical(result, right)


#: Cases that every variant computes. The default variant computes all cases.
ON_ANY_VARIANT = "one chunk", "packed chunks"


@pytest.mark.parametrize(("name", "dtype"), [pair for pair in NAMES_AND_DTYPES if pair[0] not in ON_ANY_VARIANT])
def test_values(name, dtype, default_engine):
    check(name, dtype, default_engine)


@pytest.mark.parametrize(("name", "dtype"), [pair for pair in NAMES_AND_DTYPES if pair[0] in ON_ANY_VARIANT])
def test_values_of_any_variant(name, dtype, cpu_engine):
    check(name, dtype, cpu_engine)
