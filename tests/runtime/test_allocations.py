"""Test that a call whose allocation fails raises MemoryError and writes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from linear_samples import GRADIENT, LOSS, STATISTICS, TOP_K, WHOLE
from samples import OPERATORS

TESTS = Path(__file__).parents[1] / "support"

SCRIPT = """
    import sys
    sys.path.insert(0, {tests!r})
    import numpy as np
    from failing_malloc import ended, fail_at
    from linear_samples import PROBLEMS, Shape, problem_of
    from samples import DTYPES, MASKED, assert_identical, random_problem
    import ascend_grad as ag

    def outs_of(results):
        "For each result, several arrays that can take it: plain, of another dtype, strided, swapped."
        wide = [None if a is None else np.empty(a.shape, np.float64) for a in results]
        plain = [None if a is None else np.empty_like(a) for a in results]
        other = [None if a is None else np.empty(a.shape, DTYPES["float16"]) for a in results]
        strided = [None if a is None else np.empty((*a.shape, 2), a.dtype)[..., 0] for a in results]
        swapped = [None if a is None else np.empty(a.shape, a.dtype.newbyteorder()) for a in results]
        return plain, other, wide, strided, swapped

    def attempts(function, arguments, settings, outs, expected):
        "Fail every allocation once, in turn, until a call needs no more."
        named = [value for name, value in settings.items() if name != "out"]
        given = [a for a in [*arguments, *named] if isinstance(a, np.ndarray)]
        before = [a.copy() for a in given]
        n = 0
        while True:
            n += 1
            for out in outs:
                if out is not None:
                    out[...] = 7
            untouched = [None if out is None else out.tobytes() for out in outs]
            results = None
            try:
                fail_at(n)
                results = function(*arguments, **settings)
            except MemoryError:
                pass
            except SystemError as error:  # some functions of NumPy fail like this
                assert "exception" in str(error)
            failed = ended()
            for array, copy in zip(given, before, strict=True):
                assert_identical(array, copy)
            if results is None:
                assert failed
                touched = [None if out is None else out.tobytes() for out in outs] != untouched
                assert not touched, (function, n, "a result was touched")
                continue
            results = results if isinstance(results, tuple) else (results,)
            for result, right in zip(results, expected, strict=True):
                assert (result is None) == (right is None)
                if result is not None:
                    assert_identical(result, right)
            if not failed:
                return n

    name, counts = {operator!r}, []
    function = getattr(ag, name)
    for dtype in DTYPES:
        if name in PROBLEMS:
            # Rows that are absent, two chunks, results beside the inputs.
            problems = [problem_of(name, Shape(70, 130, 19), dtype)]
            if name == {gradient!r}:
                problems += [problem_of(name, Shape(70, 130, 19), dtype, mode="stored")]
                grad = problems[0].arguments["grad"].copy()
                grad[5:9] = 0
                problems += [problem.replaced(grad=grad) for problem in problems]
            calls = [((), problem.arguments) for problem in problems]
        else:
            shapes = [(1, 2, 30, 41)] if name in MASKED else [(30, 41), (2, 40, 30)]
            problems = [random_problem(name, shape, DTYPES[dtype]) for shape in shapes]
            calls = [(problem.arrays, problem.settings) for problem in problems]
            if name not in MASKED:
                calls += [(problem.arrays, {{"axis": 0}}) for problem in problems]
        for (arguments, settings), num_threads in ((call, n) for call in calls for n in (1, 2)):
            settings = {{**settings, "num_threads": num_threads, "backend": "cpu"}}
            several = function(*arguments, **settings)
            is_one = not isinstance(several, tuple)
            several = (several,) if is_one else several
            counts.append(attempts(function, arguments, settings, (), several))
            if name in ({statistics!r}, {whole!r}, {top_k!r}):
                continue
            for outs in outs_of(several):
                settings["out"] = outs[0] if is_one else tuple(outs)
                function(*arguments, **settings)
                expected = [None if out is None else out.copy() for out in outs]
                counts.append(attempts(function, arguments, settings, outs, expected))
            del settings["out"]
            # Results beside their inputs: computed aside, then copied.
            if not is_one and name == {gradient!r}:
                x, w = (np.empty((n + 1, 19), settings["input"].dtype) for n in (70, 130))
                beside = settings | {{"input": x[1:], "weight": w[1:], "out": (x[:-1], w[:-1])}}
                for n in range(1, 10**6):
                    x[:-1], w[:-1] = 7, 7
                    x[1:], w[1:] = settings["input"], settings["weight"]
                    guards = x.copy(), w.copy()
                    try:
                        fail_at(n)
                        function(**beside)
                        touched = True
                    except (MemoryError, SystemError):
                        touched = False
                    failed = ended()
                    if touched:
                        assert_identical(x[:-1], several[0])
                        assert_identical(w[:-1], several[1])
                    else:
                        assert_identical(x, guards[0])
                        assert_identical(w, guards[1])
                    if not failed:
                        break
    assert min(counts) > 1, counts  # something was failed in every call
"""


@pytest.mark.parametrize("operator", [*OPERATORS, GRADIENT, STATISTICS, LOSS, WHOLE, TOP_K])
def test_every_allocation_fails_once(operator, failing_malloc, run_script):
    names = {"gradient": GRADIENT, "statistics": STATISTICS, "whole": WHOLE, "top_k": TOP_K}
    script = SCRIPT.format(tests=str(TESTS), operator=operator, **names)
    run_script(script, LD_PRELOAD=failing_malloc, PYTHONMALLOC="malloc")
