"""Test that results stay the same if another library disables subnormal numbers in the calling thread."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ascend_grad import _cpu

TESTS = Path(__file__).parents[1] / "support"


@pytest.mark.parametrize("variant", _cpu.supported_variants())
def test_flush_to_zero_in_the_calling_thread_changes_nothing(variant, tmp_path, run_script):
    """Results have the same bytes before and after a library linked with -ffast-math is loaded.

    Such a library switches on flush-to-zero in the thread that loads it, and in no other thread. The calls have every
    operator, dtype, dtype of `out` and axis, and subnormal inputs, sums, results or settings. Byte orders of `out` and
    numbers of threads take turns.
    """
    library = tmp_path / "fast_math.so"
    subprocess.run(["cc", "-shared", "-ffast-math", "-x", "c", "/dev/null", "-o", library], check=True)
    script = f"""
        import ctypes, itertools, sys
        sys.path.insert(0, {str(TESTS)!r})
        import ml_dtypes
        import numpy as np
        from samples import DTYPES, MASKED, OPERATORS
        import ascend_grad as ag

        random = np.random.default_rng(1)
        shape = (1, 2, 37, 37)
        mask = random.random(shape) < 0.2

        def tiny(dtype, *shape, scale=8):
            smallest = float(ml_dtypes.finfo(dtype).smallest_subnormal)
            # At most `scale` steps from 0: subnormal in this dtype.
            return (smallest * random.integers(-scale, scale + 1, shape)).astype(dtype)

        def rowwise(name, dtype):
            values = random.random(shape).astype(dtype)
            subnormal, small = tiny(dtype, *shape, scale=100), float(ml_dtypes.finfo(dtype).smallest_normal)
            far = (values * np.log(small) * 1.1).astype(dtype)  # exponentials are subnormal
            pairs = [(subnormal, values), (values, subnormal)] if name.endswith("backward") else [(far,), (subnormal,)]
            for pair in pairs:
                if name not in MASKED:
                    for axis in (-1, 1, 2):
                        yield pair, {{"axis": axis}}
                    continue
                for scale in (1.0, 1e-40, np.float32(1e-40), 1e-310, small):
                    yield (*pair, mask), {{"scale": scale}}

        def linear(dtype):
            rows, words, features = 19, 53, 21
            wide = np.dtype(np.float64 if dtype == np.float64 else np.float32)
            numbers, target = np.ones(rows, wide), random.integers(0, words, rows)
            here, bits = np.zeros(rows, bool), np.zeros(-(-rows // 8), np.uint8)
            x, w = random.standard_normal((rows, features)), random.standard_normal((words, features))
            softmax = random.random((rows, words)).astype(wide)
            for x, w, grad in (
                (tiny(dtype, rows, features), w.astype(dtype), numbers),
                (x.astype(dtype), tiny(dtype, words, features), numbers),
                (x.astype(dtype), w.astype(dtype), tiny(wide, rows, scale=10**5)),
                (x.astype(dtype), w.astype(dtype), np.full(rows, ml_dtypes.finfo(dtype).smallest_subnormal, wide)),
            ):
                statistics = {{"logits_max": numbers, "sum_exp_logits": 10 * numbers}}
                for mode in (statistics, {{"softmax": softmax}}, {{"softmax": tiny(wide, rows, words)}}):
                    for target_mask in (here, bits):
                        yield "fused_linear_cross_entropy_loss_grad", (grad, x, w, target_mask, target), mode
                yield "fused_linear_online_max_sum", (x, w, target, 0, words), {{"return_logits": True}}
                logits = tiny(dtype, rows, words)
                yield "fused_cross_entropy_loss_with_max_sum", (numbers * 80, numbers, tiny(wide, rows)), {{
                    "vocab_parallel_logits": logits
                }}
                # Losses that are subnormal themselves.
                yield "fused_cross_entropy_loss_with_max_sum", (numbers, numbers, tiny(wide, rows, scale=10**5)), {{}}
                for upstream in (1e-37, np.float32(1e-40), np.float16(6e-8)):
                    yield "linear_cross_entropy", (x, w, target), {{"grad_loss": upstream}}
                upstream = tiny(np.float32, rows), tiny(np.float16, rows)
                for each in upstream:
                    yield "linear_cross_entropy", (x, w, target), {{"grad_loss": each, "reduction": "none"}}

        calls = []
        for dtype in DTYPES.values():
            calls += [(name, *call) for name in OPERATORS for call in rowwise(name, dtype)]
            calls += linear(dtype)

        def results():
            turns = itertools.cycle([(False, 1), (True, 2), (False, 2), (True, 1), (True, 2), (False, 1), (False, 2)])
            for name, arrays, settings in calls:
                function = getattr(ag, name)
                for num_threads in (1, 2):
                    first = function(*arrays, **settings, num_threads=num_threads)
                    several = first if isinstance(first, tuple) else (first,)
                    yield name, num_threads, None, several
                if name in ("fused_linear_online_max_sum", "linear_cross_entropy"):
                    continue
                for out_dtype, (swapped, num_threads) in zip(DTYPES.values(), turns):
                    dtype = out_dtype.newbyteorder() if swapped else out_dtype
                    outs = tuple(None if a is None else np.empty_like(a, dtype=dtype) for a in several)
                    function(*arrays, **settings, num_threads=num_threads, out=outs if first is several else outs[0])
                    yield name, num_threads, dtype, outs

        def as_bytes(found):
            return [(*what, [None if a is None else a.tobytes() for a in arrays]) for *what, arrays in found]

        before = as_bytes(results())
        ctypes.CDLL({str(library)!r})
        assert np.full(3, 1e-40, np.float32)[0] * np.ones(3, np.float32)[0] == 0, "subnormal numbers are still there"
        after = as_bytes(results())
        different = [first[:3] for first, second in zip(before, after, strict=True) if first != second]
        assert not different, (len(different), len(before), different[:20])
        assert np.full(3, 1e-40, np.float32)[0] * np.ones(3, np.float32)[0] == 0, "the caller's mode was changed"
    """
    run_script(script, ASCEND_GRAD_CPU=variant)
