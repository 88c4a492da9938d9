"""Compare the linear operators with the oracles, for every dtype and CPU variant, within the documented bounds."""

from __future__ import annotations

import functools
import itertools
import math

import linear_oracles
import numpy as np
import oracles
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from linear_samples import (
    GRADIENT,
    KINDS,
    LINEAR,
    LOSS,
    MODES,
    PROBLEMS,
    SHAPES,
    STATISTICS,
    WHOLE,
    WITHOUT_PROBLEMS,
    LinearProblem,
    Shape,
    accumulator,
    gradient_problem,
    problem_of,
    statistics_problem,
)
from samples import BFLOAT16, DTYPES, assert_fresh, assert_identical, generator

import ascend_grad as ag
from ascend_grad import _cpu, _linear_python
from ascend_grad._loss_checks import Workspace
from ascend_grad.bounds import ANY, CENTRED, ONE_SIGN
from ascend_grad.operators import table


@functools.lru_cache(maxsize=128)
def expected(operator: str, shape, dtype: str, how: tuple = ()):
    return linear_oracles.expected(problem_of(operator, shape, dtype, **dict(how)))


def check(engine, operator: str, shape, dtype: str, **how) -> None:
    """Check results in the dtype of the arguments, and 16-bit gradients also in the accumulator's dtype."""
    problem = problem_of(operator, shape, dtype, **how)
    right = expected(operator, shape, dtype, tuple(how.items()))
    engine.assert_solved(problem, engine.solve(problem), right)
    if operator == GRADIENT and DTYPES[dtype].itemsize == 2:
        outs = tuple(np.empty(problem.arguments[name].shape, np.float32) for name in ("input", "weight"))
        engine.assert_solved(problem, engine.solve(problem, out=outs), right)


@pytest.mark.parametrize("mode", MODES)
def test_gradients(dtype, mode, engine):
    engine.over(SHAPES, lambda shape: check(engine, GRADIENT, shape, dtype, mode=mode))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_adversarial_data(kind, dtype, mode, engine):
    shapes = [(6, 1100, 50), (37, 101, 29), (130, 70, 5)]
    engine.over(shapes, lambda shape: check(engine, GRADIENT, shape, dtype, mode=mode, kind=kind, mask="bits"))


@pytest.mark.parametrize("name", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(70, 900, 9), (70, 1270, 9)])
def test_input_gradients_whose_first_term_is_large(shape, name, engine):
    """All targets are the first vocabulary entry, so that each further term rounds a sum of about the largest term."""
    problem = gradient_problem(shape, name)
    is_mine, target = np.zeros(shape[0], bool), np.zeros(shape[0], np.int64)
    problem = problem.replaced(target_mask=is_mine, masked_target=target)
    engine.over([shape], lambda _: engine.assert_solved(problem, engine.solve(problem)))


@pytest.mark.parametrize("operator", [STATISTICS, LOSS, WHOLE])
def test_the_other_operators(operator, dtype, engine):
    engine.over(SHAPES, lambda shape: check(engine, operator, shape, dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operator", [STATISTICS, WHOLE])
def test_the_other_operators_on_adversarial_data(operator, kind, dtype, engine):
    shapes = [(37, 101, 29), (6, 1100, 50)]
    engine.over(shapes, lambda shape: check(engine, operator, shape, dtype, kind=kind))


# ---- very many rows and entries --------------------------------------------------------------------------------------


def of_many(axis: str, n: int, kind: str, dtype: str) -> tuple[LinearProblem, tuple[oracles.Expected, ...]]:
    """Return a problem with a stored softmax and all targets elsewhere: two plain products, one of n terms."""
    random = generator(axis, n, kind)
    shape = Shape(n, 3, 2) if axis == "BT" else Shape(3, n, 2)
    sizes = ((shape.BT, shape.V), (shape.BT, shape.H), (shape.V, shape.H), (shape.BT,))
    wide, narrow = accumulator(DTYPES[dtype]), DTYPES[dtype]
    dtypes = (wide, narrow, narrow, wide)
    if kind == "constant":
        values = (np.full(size, 1 / 3, each) for size, each in zip(sizes, dtypes, strict=True))
    elif kind == "positive":
        values = (random.random(size, np.float32).astype(each) for size, each in zip(sizes, dtypes, strict=True))
    else:
        values = (
            random.standard_normal(size, np.float32).astype(each) for size, each in zip(sizes, dtypes, strict=True)
        )
    softmax, x, w, grad = values
    arguments = {"grad": grad, "input": x, "weight": w, "softmax": softmax}
    arguments |= {
        "target_mask": np.full(-(-shape.BT // 8), 255, np.uint8),
        "masked_target": np.zeros(shape.BT, np.int32),
    }
    constant = {"constant": ANY, "positive": ONE_SIGN, "centred": CENTRED}[kind]
    problem = LinearProblem(GRADIENT, arguments, constant)
    s = linear_oracles.sizes_of(problem)
    tile, x, w = (oracles.widen(a, s.p.wide) for a in (softmax, x, w))
    tile *= oracles.widen(grad, s.p.wide)[:, None]
    zero = np.zeros((1, 1), s.p.wide)
    first = linear_oracles.product(s, tile, np.broadcast_to(zero, tile.shape), w)
    return problem, (first, linear_oracles.product(s, tile.T, np.broadcast_to(zero, tile.T.shape), x))


@pytest.mark.parametrize("axis", ["BT", "V"])
@pytest.mark.parametrize("kind", ["centred", "constant", "positive"])
def test_many_terms(kind, axis, dtype, engine):
    """Errors do not grow with the number of terms."""
    problem, right = _of_many(axis, 60_001, kind, dtype)
    outs = None
    if DTYPES[dtype].itemsize == 2:
        outs = tuple(np.empty(problem.arguments[name].shape, np.float32) for name in ("input", "weight"))
    engine.assert_solved(problem, engine.solve(problem, out=outs), right)


_of_many = functools.lru_cache(maxsize=1)(of_many)


@pytest.mark.parametrize("axis", ["BT", "V"])
@pytest.mark.parametrize("kind", ["centred", "constant"])
def test_ten_million(kind, axis, needs_memory):
    """If a thousand rows (entries) repeat ten thousand times, one gradient repeats, and the other one is multiplied."""
    needs_memory(1)
    times, n = 10**4, 1000
    problem, right = of_many(axis, n, kind, "float32")
    long = {"softmax": ((times, 1) if axis == "BT" else (1, times)), "input" if axis == "BT" else "weight": (times, 1)}
    if axis == "BT":
        long |= {"grad": times, "target_mask": times, "masked_target": times}
    tiled = problem.replaced(**{name: np.tile(problem.arguments[name], reps) for name, reps in long.items()})
    repeated, added = getattr(ag, GRADIENT)(**tiled.arguments, backend="cpu")[:: 1 if axis == "BT" else -1]
    parts = repeated.reshape(times, n, 2)
    one, sum_ = right[:: 1 if axis == "BT" else -1]
    assert np.all(oracles.errors(parts.max(0), one) <= 1)
    assert np.all(oracles.errors(parts.min(0), one) <= 1)
    total = oracles.Expected(times * sum_.values, times * sum_.bound)
    assert np.all(oracles.errors(added, total) <= 1), oracles.errors(added, total)


def test_statistics_of_ten_million_entries(default_engine, needs_memory):
    needs_memory(3)
    problem = statistics_problem.__wrapped__(Shape(1, 10**7, 2), "float32", "constant", False)
    default_engine.assert_solved(problem, default_engine.solve(problem))


# ---- exact values ----------------------------------------------------------------------------------------------------


def test_small_integers_are_exact(dtype, engine):
    """Sums of small integers are exact in any order, so that only the result is rounded."""
    engine.over(SHAPES, lambda shape: check_integers(engine, shape, dtype))


def check_integers(engine, shape: Shape, dtype: str) -> None:
    random = generator("integers", shape, dtype)
    x = random.integers(-2, 3, (shape.BT, shape.H))
    w = random.integers(-2, 3, (shape.V, shape.H))
    p = random.integers(0, 3, (shape.BT, shape.V))
    grad = random.integers(-1, 2, shape.BT)
    elsewhere = random.random(shape.BT) < 0.3
    target = random.integers(0, shape.V, shape.BT)
    arguments = {
        "grad": grad.astype(accumulator(DTYPES[dtype])),
        "input": x.astype(DTYPES[dtype]),
        "weight": w.astype(DTYPES[dtype]),
        "target_mask": elsewhere,
        "masked_target": target,
        "softmax": p.astype(accumulator(DTYPES[dtype])),
    }
    results = engine.solve(LinearProblem(GRADIENT, arguments))
    tile = p.copy()
    tile[~elsewhere, target[~elsewhere]] -= 1
    tile *= grad[:, None]
    for result, exact in zip(results, (tile @ w, tile.T @ x), strict=True):
        assert_fresh(result, exact.shape, DTYPES[dtype])
        assert np.array_equal(result, exact.astype(np.float32).astype(DTYPES[dtype]))


def test_zeros_give_zeros(engine):
    """Results are 0 for the example in the device's documents, which has zeros only."""
    n = 1024
    x, vector = np.zeros((n, n), BFLOAT16), np.zeros(n, np.float32)
    target = np.zeros(n, np.int64)
    arguments = {
        "grad": vector,
        "input": x,
        "weight": x,
        "target_mask": np.zeros(n // 8, np.uint8),
        "masked_target": target,
    }
    for grad in (vector, vector + 1):
        arguments |= {"grad": grad, "softmax": np.zeros((n, n), np.float32)}
        for result in engine.solve(LinearProblem(GRADIENT, arguments)):
            assert not np.any(result)


# ---- NaN and infinity ------------------------------------------------------------------------------------------------

PLACES = {
    "grad": ("grad", 3),
    "the first row of input": ("input", (0, 5)),
    "the last row of input": ("input", (-1, -1)),
    "the first row of weight": ("weight", (0, 0)),
    "the last row of weight": ("weight", (-1, -1)),
    "logits_max": ("logits_max", 4),
    "sum_exp_logits": ("sum_exp_logits", 2),
    "softmax": ("softmax", (3, 7)),
    "the last of softmax": ("softmax", (-1, -1)),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", PLACES)
def test_special_values_go_where_the_formula_sends_them(place, mode, dtype, engine):
    name, at = PLACES[place]
    problem = gradient_problem(Shape(9, 130, 18), dtype, mode)
    grad = np.where(problem.arguments["grad"] == 0, 1, problem.arguments["grad"])
    problem = problem.replaced(grad=grad.astype(accumulator(problem.dtype)))
    if name in problem.arguments:
        for special in (np.nan, np.inf, -np.inf):
            spoilt = problem.arguments[name].copy()
            spoilt[at] = special
            changed = problem.replaced(**{name: spoilt})
            engine.assert_solved(changed, engine.solve(changed))


@pytest.mark.parametrize("place", ["the first row of input", "the last row of weight"])
def test_special_values_in_statistics(place, dtype, engine):
    name, at = PLACES[place]
    problem = problem_of(STATISTICS, (9, 50, 18), dtype)
    for special in (np.nan, np.inf, -np.inf):
        spoilt = problem.arguments[name].copy()
        spoilt[at] = special
        problem = problem.replaced(**{name: spoilt})
        engine.assert_solved(problem, engine.solve(problem))


@pytest.mark.parametrize("shape", [(65, 2000), (3, 30000), (1, 100000), (2000, 64), (100, 5000)], ids=str)
def test_sums_of_many_exponentials_lose_nothing(shape, cpu_engine):
    """Sums of many exponentials err by at most 4 eps. The logits are exact, so that they add no error."""
    rows, entries = shape
    weight = np.full((entries, 1), -(2.0**-11))
    weight[entries // 2] = 0
    target = np.zeros(rows, np.int64)
    result = ag.fused_linear_online_max_sum(np.ones((rows, 1)), weight, target, 0, entries)
    right = math.fsum([1.0, *[math.exp(-(2.0**-11))] * (entries - 1)])
    assert np.all(result.logits_max == 0)
    assert np.max(np.abs(result.sum_exp_logits - right)) <= 4 * np.finfo(float).eps * right


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf], ids=str)
def test_rows_without_a_gradient_are_absent(junk, mode, dtype, engine):
    problem = gradient_problem(Shape(41, 130, 19), dtype, mode)
    grad = problem.arguments["grad"].copy()
    grad[1::3], grad[4::6] = 0.0, -0.0
    absent = grad == 0
    problem = problem.replaced(grad=grad)
    spoilt = {}
    for name in ("input", "logits_max", "sum_exp_logits", "softmax"):
        if name in problem.arguments:
            spoilt[name] = problem.arguments[name].copy()
            spoilt[name][absent] = junk
    results = engine.solve(problem.replaced(**spoilt))
    for result, expected in zip(results, engine.solve(problem), strict=True):
        assert_identical(result, expected)
    engine.assert_solved(problem, results)
    assert_identical(results[0][absent], np.zeros((absent.sum(), 19), problem.dtype))
    # A vocabulary entry of NaN makes the gradients of present rows NaN. The gradients of absent rows remain 0.
    weight = problem.arguments["weight"].copy()
    weight[5] = np.nan
    first, _ = engine.solve(problem.replaced(weight=weight))
    assert_identical(first[absent], np.zeros((absent.sum(), 19), problem.dtype))
    assert np.isnan(first[~absent].astype(np.float64)).all()
    for result in engine.solve(problem.replaced(**spoilt, weight=weight, grad=np.zeros_like(grad))):
        assert_identical(result, np.zeros(result.shape, problem.dtype))


# ---- the arguments' other forms --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_masks_and_targets_have_several_forms(mode, dtype, engine):
    for rows in (1, 7, 8, 9, 41):
        problem = gradient_problem(Shape(rows, 130, 19), dtype, mode)
        expected = engine.solve(problem)
        elsewhere, target = (problem.arguments[name] for name in ("target_mask", "masked_target"))
        packed = np.packbits(elsewhere, bitorder="little")
        beyond = packed.copy()
        beyond[-1] |= 0xFF << (rows - 8 * (packed.size - 1)) & 0xFF
        longer = np.concatenate([beyond, np.full(5, 255, np.uint8)])
        valid = np.where(elsewhere, 0, target)
        for mask in (elsewhere, packed, beyond, longer):
            for ids in (target, target.astype(np.int32), valid, valid.astype(">i4")):
                results = engine.solve(problem.replaced(target_mask=mask, masked_target=ids))
                for result, right in zip(results, expected, strict=True):
                    assert_identical(result, right)


@pytest.mark.parametrize("mode", MODES)
def test_output_mask(mode, dtype, engine):
    for shape in (Shape(5, 300, 33), Shape(41, 67, 19)):
        problem = gradient_problem(shape, dtype, mode)
        right = linear_oracles.expected(problem)
        for chosen in ((True, False), (False, True), (False, False), [np.True_, np.False_], np.array([False, True])):
            results = engine.solve(problem, output_mask=chosen)
            engine.assert_solved(problem, results, tuple(e if c else None for e, c in zip(right, chosen, strict=True)))


@pytest.mark.parametrize("nbytes", [table.MIN_WORKSPACE_BYTES, 2**23, 2**40])
def test_any_workspace(nbytes, dtype, cpu_engine):
    for shape in (Shape(97, 1500, 33), Shape(2100, 70, 40)):
        problem = gradient_problem(shape, dtype)
        right = expected(GRADIENT, shape, dtype)
        cpu_engine.assert_solved(problem, cpu_engine.solve(problem, workspace_bytes=nbytes), right)


# The plans have few chunks, enough chunks for compensated additions to weight_grad, or hardly space to cache logits.
@pytest.mark.parametrize(
    ("shape", "nbytes", "least"),
    [
        ((1000, 800, 9), table.MIN_WORKSPACE_BYTES, 2),
        ((32_000, 200, 3), 700_000, 65),
        ((300, 9000, 5), table.MIN_WORKSPACE_BYTES, 0),
    ],
    ids=str,
)
def test_the_whole_loss_in_little_space(shape, nbytes, least, dtype, cpu_engine, any_space):
    # A row of weight_grad is the sum of one large term, the target's, and hundreds of small terms: it is not centred.
    how = {"kind": "positive"}
    real = accumulator(DTYPES[dtype]).itemsize
    shape = Shape(shape[0], shape[1] * 4 // real, shape[2])
    problem = problem_of(WHOLE, shape, dtype, **how)
    x, w = (problem.arguments[name] for name in ("input", "weight"))
    plans = _linear_python.plans(x, w, shape[0], nbytes, True, True, True, problem.dtype.itemsize < real, True)
    assert len(plans) == 1 or not least
    assert all(plan.chunks >= least for plan in plans)
    right = expected(WHOLE, shape, dtype, tuple(how.items()))
    cpu_engine.assert_solved(problem, cpu_engine.solve(problem, workspace_bytes=nbytes), right)


SIZES = st.tuples(*(st.integers(0, 300).map(lambda k, n=n: int(n ** (k / 300))) for n in (10**5, 10**6, 10**6)))


@given(
    sizes=SIZES,
    nbytes=st.sampled_from([2**22, 2**22 + 1, 10**7, 2**26, 2**28, 2**34]),
    name=st.sampled_from(sorted(DTYPES)),
    chosen=st.sampled_from([(True, True), (True, False), (False, True), (False, False)]),
    choices=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
@example((128, 400_000, 8192), 2**22, "float32", (True, True), (False, False, False))
@example((4096, 152_064, 4096), 2**26, "float32", (True, True), (True, False, False))
@example((10**5, 10**6, 10**6), 2**22, "float64", (True, True), (True, True, False))
@example((1, 1, 10**6), 2**22, "float32", (True, True), (True, False, False))
@settings(max_examples=1000, deadline=None)
def test_a_plan_has_few_partial_sums_or_compensates_them(forced, sizes, nbytes, name, chosen, choices):
    """At most 64 partial sums are added without compensation, in any workspace. Only plans are made here."""
    rows, entries, features = sizes
    with_logits, buffers_weight_grad, with_statistics = choices
    x = np.lib.stride_tricks.as_strided(np.empty(1, DTYPES[name]), (rows, features), (0, 0))
    w = np.lib.stride_tricks.as_strided(np.empty(1, DTYPES[name]), (entries, features), (0, 0))
    for variant in _cpu.supported_variants():
        forced(variant)
        with_loss = with_statistics and any(chosen)
        with_statistics |= not any(chosen)
        what = with_logits or with_statistics, *chosen, buffers_weight_grad, with_statistics
        space = max(nbytes, _linear_python.least_workspace_bytes(x, w, *what))
        plans = _linear_python.plans(x, w, rows, space, *what)
        assert plans or with_loss or not (rows and entries) or (any(chosen) and not features)
        for plan in plans:
            assert plan.nbytes <= space
            assert plan.rows * plan.chunks >= rows
            assert plan.vocab * plan.blocks >= entries
            for product, sums in ("input_grad", plan.blocks), ("weight_grad", plan.chunks):
                assert sums <= 64 or product in plan.compensated or product not in plan.products
        for product, is_chosen in zip(("input_grad", "weight_grad"), chosen, strict=True):
            assert sum(product in plan.products for plan in plans) == (is_chosen and bool(plans))


#: Problems with workspaces far below the least of the public functions, in which every kind of plan occurs.
CRAMPED = [
    (Shape(40, 7000, 20), 40_000),
    (Shape(700, 4000, 30), 60_000),
    (Shape(60, 3000, 300), 60_000),
    (Shape(30, 900, 1500), 60_000),
    (Shape(3, 60, 7000), 80_000),
    (Shape(20, 50, 9000), 45_000),
    (Shape(700, 60, 700), 60_000),
    (Shape(5000, 60, 30), 60_000),
    (Shape(5000, 600, 5), 60_000),
]


@pytest.fixture
def any_space(monkeypatch) -> None:
    for operator in (table.FUSED_LINEAR_CROSS_ENTROPY_LOSS_GRAD, table.LINEAR_CROSS_ENTROPY):
        (check,) = (check for check in operator.checks if isinstance(check, Workspace))
        monkeypatch.setattr(check, "least", 1)


def space_of(nbytes: int, dtype: str, shape: Shape) -> int:
    """Return `nbytes` scaled to the accumulator, but at least the least workspace of a plan."""
    x, w = (np.broadcast_to(DTYPES[dtype].type(0), (rows, shape.H)) for rows in (shape.BT, shape.V))
    least = _linear_python.least_workspace_bytes(x, w, True, True, True, True)
    return max(nbytes * accumulator(DTYPES[dtype]).itemsize // 4, least)


@pytest.mark.parametrize(("shape", "nbytes"), CRAMPED, ids=str)
def test_every_kind_of_plan(shape, nbytes, dtype, cpu_engine, any_space):
    how = {"kind": "positive"}  # sums of one large term and hundreds of small terms are not centred
    problem, right = gradient_problem(shape, dtype, **how), expected(GRADIENT, shape, dtype, tuple(how.items()))
    cpu_engine.assert_solved(problem, cpu_engine.solve(problem, workspace_bytes=space_of(nbytes, dtype, shape)), right)


def test_every_kind_of_plan_occurs(forced):
    seen = set()
    for variant in _cpu.supported_variants():
        forced(variant)
        for (shape, nbytes), dtype in itertools.product(CRAMPED, DTYPES):
            x, w = np.empty((shape.BT, shape.H), DTYPES[dtype]), np.empty((shape.V, shape.H), DTYPES[dtype])
            plans = _linear_python.plans(
                x, w, shape.BT, space_of(nbytes, dtype, shape), True, True, True, x.itemsize == 2
            )
            seen |= {
                f"{len(plans)} plans",
                *(f"{product} compensated" for plan in plans for product in plan.compensated),
            }
            seen |= {"chunks outside" if plan.chunks_outside else "blocks outside" for plan in plans}
    products = ("input_grad", "weight_grad")
    assert seen == {
        *("1 plans", "2 plans", "chunks outside", "blocks outside"),
        *(f"{product} compensated" for product in products),
    }


def test_constants_in_little_space(cpu_engine, any_space):
    """Sums of equal terms, whose rounding errors do not cancel, err by at most 512 roundings in a small workspace."""
    w = np.broadcast_to(np.float32(1.1), (60_000, 30))
    arguments = {
        "grad": np.ones(40, np.float32),
        "input": np.broadcast_to(np.float32(1.1), (40, 30)),
        "weight": w,
        "target_mask": np.ones(40, bool),
        "masked_target": np.zeros(40, np.int64),
        "softmax": np.broadcast_to(np.float32(1), (40, 60_000)),
    }
    problem = LinearProblem(GRADIENT, arguments)
    exact = 60_000 * float(w[0, 0]), 40 * float(w[0, 0])
    for result, value in zip(cpu_engine.solve(problem, workspace_bytes=30_000), exact, strict=True):
        assert np.abs(result - value).max() <= 512 * 2**-24 * value


def test_both_modes_agree(dtype, engine):
    shape = Shape(41, 131, 31)
    stored, recomputed = (engine.solve(gradient_problem(shape, dtype, mode)) for mode in MODES)
    tolerance = {"float16": 2**-9, "bfloat16": 2**-6, "float32": 1e-5, "float64": 1e-13}[dtype]
    for first, second in zip(stored, recomputed, strict=True):
        scale = np.abs(first.astype(np.float64)).max()
        np.testing.assert_allclose(
            *(a.astype(np.float64) for a in (first, second)), rtol=tolerance, atol=tolerance * scale
        )


def test_labels_are_not_smoothed(engine):
    problem = gradient_problem(Shape(9, 50, 18), "float32")
    for zero in (0, -0.0, np.float32(0), np.array(0)):
        for result, expected in zip(engine.solve(problem, label_smoothing=zero), engine.solve(problem), strict=True):
            assert_identical(result, expected)


# ---- empty dimensions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", LINEAR)
def test_empty_dimensions(operator, dtype, engine):
    for sizes in ((0, 5, 3), (5, 0, 3), (0, 0, 3), (5, 4, 0), (0, 4, 0), (0, 0, 0), (5, 0, 0)):
        shape = Shape(*sizes)
        if operator == STATISTICS and not shape.V:
            continue
        for how in ({"mode": mode} for mode in MODES) if operator == GRADIENT else ({},):
            problem = problem_of(operator, shape, dtype, **how)
            results = engine.solve(problem)
            engine.assert_solved(problem, results)
            for result in results:
                assert_fresh(result, result.shape, result.dtype)
            if operator == STATISTICS and not shape.H:
                assert np.all(results[0] == 0)
                assert np.all(results[1] == shape.V)
                assert np.all(results[2] == 0)


def test_results_are_ordinary_arrays(linear, dtype, engine):
    shape = Shape(9, 50, 18)
    problem = problem_of(linear, shape, dtype)
    wide = accumulator(problem.dtype)
    shapes = {
        GRADIENT: [((9, 18), problem.dtype), ((50, 18), problem.dtype)],
        STATISTICS: [*[((9,), wide)] * 3, ((2,), np.uint8), ((9,), np.int64), ((9, 50), problem.dtype)],
        LOSS: [((9,), wide), ((9, 50), wide)],
        WHOLE: [((), wide), ((9, 18), problem.dtype), ((50, 18), problem.dtype)],
    }[linear]
    for result, (shape, dtype) in zip(engine.solve(problem), shapes, strict=True):
        assert_fresh(result, shape, np.dtype(dtype))


# ---- gradients of the loss -------------------------------------------------------------------------------------------


def test_gradients_are_finite_differences_of_the_loss(backend):
    random = generator("differences")
    x, w, upstream = random.standard_normal((5, 3)), random.standard_normal((7, 3)), random.standard_normal(5)
    target = np.array([4, 0, 6, 6, 1])

    def loss(x, w):
        statistics = ag.fused_linear_online_max_sum(x, w, target, 0, 7, backend=backend)
        losses, _ = ag.fused_cross_entropy_loss_with_max_sum(*statistics[:3], backend=backend)
        return np.sum(upstream * losses)

    step, numeric = 1e-5, []
    for which in range(2):
        differences = np.empty((x, w)[which].shape)
        for index in np.ndindex(differences.shape):
            values = []
            for sign in (1, -1):
                moved = [x.copy(), w.copy()]
                moved[which][index] += sign * step
                values.append(loss(*moved))
            differences[index] = (values[0] - values[1]) / (2 * step)
        numeric.append(differences)
    largest, total, *_ = ag.fused_linear_online_max_sum(x, w, target, 0, 7, backend=backend)
    softmax = np.exp(x @ w.T - largest[:, None]) / total[:, None]
    here = np.zeros(5, bool)
    for mode in ({"logits_max": largest, "sum_exp_logits": total}, {"softmax": softmax}):
        results = ag.fused_linear_cross_entropy_loss_grad(upstream, x, w, here, target, **mode, backend=backend)
        for result, right in zip(results, numeric, strict=True):
            np.testing.assert_allclose(result, right, rtol=1e-7, atol=1e-8)
    results = ag.linear_cross_entropy(x, w, target, reduction="none", grad_loss=upstream, backend=backend)
    for result, right in zip(results[1:], numeric, strict=True):
        np.testing.assert_allclose(result, right, rtol=1e-7, atol=1e-8)


# ---- filtering -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_filtering_admits_no_more_than_it_says(mode, dtype, engine):
    """A skipped entry is at most eps, so the error is at most eps times the sum of its factors' magnitudes."""
    for shape, eps in itertools.product((Shape(97, 1500, 33), Shape(41, 67, 19)), (1e-6, 1e-3, 0.1, 1e30)):
        problem = gradient_problem(shape, dtype, mode, "peaked")
        x, w = (np.abs(problem.arguments[name].astype(np.float64)) for name in ("input", "weight"))
        present = problem.arguments["grad"] != 0
        admitted = eps * present[:, None] * w.sum(0), np.broadcast_to(eps * x[present].sum(0), w.shape)
        right = [
            oracles.Expected(each.values, each.bound + more)
            for each, more in zip(
                expected(GRADIENT, shape, dtype, (("mode", mode), ("kind", "peaked"))), admitted, strict=True
            )
        ]
        engine.assert_solved(problem, engine.solve(problem, filter_eps=eps), tuple(right))


@pytest.mark.parametrize("mode", MODES)
def test_a_filter_below_everything_changes_nothing(mode, dtype, engine):
    problem = gradient_problem(Shape(97, 300, 33), dtype, mode)
    results = [engine.solve(problem, filter_eps=eps) for eps in (0.0, 0, 1e-300)]
    for other in results:
        for result, right in zip(other, engine.solve(problem), strict=True):
            assert_identical(result, right)


def test_every_linear_operator_is_tested():
    assert {*PROBLEMS, *WITHOUT_PROBLEMS} == {operator.name for operator in table.LINEAR}
