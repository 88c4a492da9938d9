"""Test products that pack nothing, of few rows, few vocabulary entries or both, in several tasks and layouts."""

from __future__ import annotations

import linear_oracles
import numpy as np
import pytest
from linear_samples import GRADIENT, MODES, STATISTICS, WHOLE, Shape, in_layout, problem_of, shapes
from samples import BFLOAT16, DTYPES, Layout, allocated, assert_identical

import ascend_grad as ag
from ascend_grad import _cpu, _linear_python

#: Shapes around these limits: resident rows (3 to 64), rows with which the weight is the left operand (256), panels (6
#: to 48), tiles (384 rows, 3072 products), segments of features (4 KiB of accumulators), features for which rows are
#: transposed (at most 128) or are columns in all products (at most 16). Some rows are a power of two apart.
SHAPES = shapes(
    (1, 17, 1025), (1, 4000, 20), (3, 700, 1500), (15, 1700, 76), (16, 49, 2100), (16, 16, 1024), (2, 4, 3885),
    (1, 1, 40_000), (5, 9, 33_000), (17, 1, 1025), (1700, 16, 81), (4000, 1, 20), (700, 3, 1500), (64, 65, 520),
    (65, 64, 33), (33, 31, 1030), (48, 48, 4100), (30, 900, 9), (900, 30, 9), (63, 200, 129), (300, 2, 3),
    (2, 300, 128), (1, 1500, 1), (1500, 1, 1), (3, 900, 2), (900, 5, 3), (64, 700, 16), (700, 64, 15), (2, 800, 17),
    (80, 50, 3000), (128, 256, 2100), (256, 70, 2200), (129, 60, 1100), (127, 3, 5003), (8, 40, 2048),
    (16, 33, 4096), (700, 20, 1024), (32, 65, 520), (64, 700, 520), (700, 40, 1030),
    (97, 97, 1310), (256, 257, 40), (257, 258, 40), (66, 66, 2561), (31, 32, 33), (35, 1000, 31), (300, 66, 65),
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


#: The last two are packed, with one block and one chunk: kernels then round results to 16 bits.
@pytest.mark.parametrize("shape", shapes((3, 70, 300), (300, 7, 70), (5, 9, 300), (70, 66, 45), (300, 90, 33)), ids=str)
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
#: The most rows, or vocabulary entries, of which gradients are computed unpacked, and the same of statistics.
LIMITS = {
    "float32": {"avx512": (32, 12), "avx2": (32, 6), "baseline": (32, 32), "neon": (32, 32)},
    "float64": {"avx512": (32, 6), "avx2": (32, 3), "baseline": (32, 32), "neon": (32, 32)},
    "float16": {"avx512": (64, 24), "avx2": (64, 12), "baseline": (64, 64), "neon": (64, 64)},
    "bfloat16": {
        "avx512": (64, 24),
        "avx2": (64, 12),
        "baseline": (64, 64),
        "neon": (64, 64),
        "avx512_bf16": (32, 12),
        "amx_bf16": (12, 3),
        "neon_bf16": (16, 16),
    },
}


def test_only_few_are_not_packed(dtype, forced):
    for variant in _cpu.supported_variants():
        forced(variant)
        limits = LIMITS[dtype]
        base = {"avx512_bf16": "avx512", "amx_bf16": "avx512", "neon_bf16": "neon"}.get(variant, variant)
        for few, with_statistics in zip(limits.get(variant, limits[base]), (False, True), strict=True):
            pairs = dtype == "bfloat16" and variant in PAIRS
            streams = with_statistics and dtype in ("float32", "float64")
            medium = min(few * 5 // 3, 32) if streams else few  # classes of statistics with at most 200 features
            of_short_rows = (12 if variant == "amx_bf16" else 16 if variant == "neon_bf16" else 32) if pairs else 64
            for shape, is_skinny in (
                *(((few, 900, features), True) for features in (5, 80, 2000)),
                *(((few, few, features), True) for features in (5, 80, 2000)),
                *(((few + 1, 900, features), False) for features in (5, 80, 2000)),
                *(((900, few + 1, features), few < medium) for features in (49, 200)),
                *(((900, medium, features), features <= 200 or few == medium) for features in (49, 200, 201)),
                *(((900, medium + 1, features), False) for features in (49, 200, 2000)),
                *(((900, n, 48), n <= max(few, of_short_rows)) for n in (few, few + 1, 32, 33, 64, 65)),
                ((few + 1, few + 1, 2000), False),
                ((few, 128, 2000), True),
            ):
                x, w = (np.zeros((rows, shape[2]), DTYPES[dtype]) for rows in shape[:2])
                wanted = (True, False, False) if with_statistics else (True, True, True)
                (plan,) = _linear_python.plans(x, w, shape[0], 2**26, *wanted, x.itemsize == 2, with_statistics)
                assert (plan.tasks > 0) == is_skinny, (variant, shape, with_statistics)


def test_packed_logits_do_not_depend_on_other_rows(dtype, forced):
    """Logits of packed rows have the same bits if W or X is the left operand, which is read in place or gathered."""
    for shape in (300, 1301), (310, 1344), (70, 46):
        arrays = problem_of(STATISTICS, Shape(400, *shape), dtype).arrays
        x, w = arrays["input"], arrays["weight"]
        strided = np.zeros((400, 2 * shape[1]), x.dtype)[:, ::2]
        strided[:] = x
        for variant in _cpu.supported_variants():
            forced(variant)
            logits = [
                ag.fused_linear_online_max_sum(
                    each[:rows], w, np.zeros(rows, np.int64), 0, shape[0], return_logits=True, backend="cpu"
                ).vocab_parallel_logits
                for each in (x, strided)
                for rows in (65, 70, 256, 257, 400)
            ]
            for each in logits:
                assert_identical(each, logits[-1][: len(each)])


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
