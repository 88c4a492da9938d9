"""Test products that pack nothing, of few rows, few vocabulary entries or both, in several tasks and layouts."""

from __future__ import annotations

import linear_oracles
import numpy as np
import pytest
from linear_samples import GRADIENT, MODES, STATISTICS, WHOLE, Shape, in_layout, problem_of, shapes
from samples import BFLOAT16, Layout, allocated, assert_identical

from ascend_grad import _cpu, _linear_python

#: Shapes around these limits: resident rows (32 or 64; 128 and 256 if features are many), tiles (384 rows, 3072
#: products), segments of features (4 KiB of accumulators), features for which rows are transposed (at most 128) or are
#: columns in all products (at most 16). Some rows are a power of two apart.
SHAPES = shapes(
    (1, 17, 1025), (1, 4000, 20), (3, 700, 1500), (15, 1700, 76), (16, 49, 2100), (16, 16, 1024), (2, 4, 3885),
    (1, 1, 40_000), (5, 9, 33_000), (17, 1, 1025), (1700, 16, 81), (4000, 1, 20), (700, 3, 1500), (64, 65, 520),
    (65, 64, 33), (33, 31, 1030), (48, 48, 4100), (30, 900, 9), (900, 30, 9), (63, 200, 129), (300, 2, 3),
    (2, 300, 128), (1, 1500, 1), (1500, 1, 1), (3, 900, 2), (900, 5, 3), (64, 700, 16), (700, 64, 15), (2, 800, 17),
    (80, 50, 3000), (128, 256, 2100), (256, 70, 2200), (129, 60, 1100), (127, 3, 5003), (8, 40, 2048),
    (16, 33, 4096), (700, 20, 1024), (32, 65, 520), (64, 700, 520), (700, 40, 1030),
)  # fmt: skip
CALLS = [*((GRADIENT, {"mode": mode}) for mode in MODES), (STATISTICS, {}), (WHOLE, {})]
LAYOUTS = [
    Layout((1, 0), (1, 1)),
    Layout((0, 1), (-1, -2)),
    Layout((0, 1), (1, 1), swapped=True),
    Layout((0, 1), (1, 1), shift=1),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(shape, dtype, cpu_engines):
    for operator, how in CALLS:
        problem = problem_of(operator, shape, dtype, **how)
        expected = linear_oracles.expected(problem)
        settings = [(problem, 2), *((in_layout(problem, layout), n) for n, layout in enumerate(LAYOUTS, start=1))]
        for engine in cpu_engines():
            results = engine.solve(problem, num_threads=1)
            engine.assert_solved(problem, results, expected)
            for each, num_threads in settings:
                for result, right in zip(engine.solve(each, num_threads=num_threads), results, strict=True):
                    assert_identical(result, right)


@pytest.mark.parametrize("shape", [Shape(3, 70, 300), Shape(300, 7, 70), Shape(5, 9, 300)], ids=str)
def test_results_of_any_dtype_and_layout(shape, dtype, cpu_engine):
    problem = problem_of(GRADIENT, shape, dtype)
    x, w = problem.arguments["input"], problem.arguments["weight"]
    for name in ("float32", "float16", "bfloat16", "float64"):
        right = None
        for layout in (Layout((0, 1), (1, 1)), *LAYOUTS):
            outs = tuple(
                allocated(a.shape, np.dtype(name) if name != "bfloat16" else BFLOAT16, layout)[0] for a in (x, w)
            )
            results = cpu_engine.solve(problem, out=outs)
            if right is None:
                right = tuple(result.copy() for result in results)
                cpu_engine.assert_solved(problem, results)
            for result, expected in zip(results, right, strict=True):
                assert np.array_equal(result.astype(np.float64), expected.astype(np.float64))


@pytest.mark.parametrize("shape", [Shape(2, 20_000, 520), Shape(20_000, 2, 520)], ids=str)
def test_results_beyond_the_caches(shape, cpu_engine, needs_memory):
    """Aligned rows, which non-temporal stores write, have the bits of misaligned rows, which ordinary stores write."""
    needs_memory(1)
    problem = problem_of(GRADIENT, shape, "float32")
    x, w = problem.arguments["input"], problem.arguments["weight"]
    results = []
    for shift in (0, 1):
        outs = []
        for like in (x, w):
            memory = np.full(like.size + 32, 7, np.float32)
            start = -(memory.ctypes.data // 4) % 16 + shift
            outs.append(memory[start : start + like.size].reshape(like.shape))
        results.append(cpu_engine.solve(problem, out=tuple(outs)))
    for first, second in zip(*results, strict=True):
        assert_identical(first, second)
    cpu_engine.assert_solved(problem, results[0])


#: Variants that compute bfloat16 in pairs.
PAIRS = "avx512_bf16", "amx_bf16", "neon_bf16"


def test_only_few_are_not_packed(forced):
    for variant in _cpu.supported_variants():
        forced(variant)
        many = variant.startswith(("avx512", "amx"))
        few = 64 if many else 32
        for shape, is_skinny in (
            ((few, 900, 80), True),
            ((900, few, 80), True),
            ((few, few, 5), True),
            ((few, 900, 5), True),
            ((few + 1, 900, 80), False),
            ((900, few + 1, 80), False),
            ((65, 128, 2000), many),
        ):
            x, w = np.zeros((shape[0], shape[2]), np.float32), np.zeros((shape[1], shape[2]), np.float32)
            (plan,) = _linear_python.plans(x, w, shape[0], 2**26, True, True, True, False)
            assert (plan.tasks > 0) == is_skinny
            # With dot products of bfloat16, packing pays for fewer rows.
            x, w = x.astype(BFLOAT16), w.astype(BFLOAT16)
            (plan,) = _linear_python.plans(x, w, shape[0], 2**26, True, True, True, True)
            is_short = max(shape[:2]) <= 48  # then tasks are ranges of the features
            assert (plan.tasks > 0) == (is_skinny and (is_short or variant not in PAIRS))


def test_statistics_of_pairs_with_long_rows_are_not_packed_either(forced):
    """Statistics of 512 features and more pack nothing for up to 64 rows, even with dot products of bfloat16."""
    for variant in _cpu.supported_variants():
        forced(variant)
        for features, is_skinny in ((511, variant not in PAIRS), (512, True), (2000, True)):
            is_skinny &= variant.startswith(("avx512", "amx"))
            for few in (48, 64, 65):
                for shape in ((few, 900), (900, few)):
                    x, w = (np.zeros((rows, features), BFLOAT16) for rows in shape)
                    (plan,) = _linear_python.plans(x, w, shape[0], 2**26, True, False, False, False, True)
                    assert (plan.tasks > 0) == (is_skinny and few <= 64)


def test_absent_rows_take_no_more_space(forced):
    """The workspace for all rows is enough if fewer rows are active."""
    for shape in (20, 9000, 300), (16, 9000, 300), (9000, 16, 90), (9, 9, 50_000):
        x, w = np.empty((shape[0], shape[2]), np.float32), np.empty((shape[1], shape[2]), np.float32)
        for caches_logits in (False, True):
            sizes = [
                _linear_python.plans(x, w, rows, 2**26, True, True, True, False, caches_logits)[0].nbytes
                for rows in (shape[0], shape[0] - 1, 7, 1)
            ]
            assert max(sizes) == sizes[0]
