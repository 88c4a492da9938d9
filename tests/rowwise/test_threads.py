"""Test that any number of threads gives the same bits, in any process, and that the caller's settings stay."""

from __future__ import annotations

import functools
import itertools
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from python_threads import INTERRUPT, assert_other_threads_run, check_at_once
from samples import DTYPES, MASKED, OPERATORS, UNMASKED, Problem, assert_identical, random_problem

import ascend_grad as ag
from ascend_grad import _cpu, _openmp, _threads

COUNTS = (1, 2, 3, 4)

needs_openmp = pytest.mark.skipif(not _openmp.VERSION, reason="built without OpenMP")

#: Shapes with many rows, few rows or one row, likewise with columns, and shapes whose dimension is in the middle.
SHAPES = {
    "rows": ((800, 701), -1),
    "a few long rows": ((3, 180_007), -1),
    "one row": ((1, 2**19 + 3), -1),
    "narrow rows": ((140_003, 4), -1),
    "rows of a vector": ((40_001, 16), -1),
    "rows of vectors": ((9001, 64), -1),
    "columns": ((400, 1501), 0),
    "columns of few rows": ((5, 120_011), 0),
    "columns of one row": ((1, 600_011), 0),
    "narrow columns": ((140_003, 4), 0),
    "one column": ((2**19 + 3, 1), 0),
    "middle": ((17, 301, 111), 1),
    "a short one in the middle": ((171, 30, 111), 1),
    "short": ((5, 200), -1),
}
MASKED_SHAPES = [(2, 3, 131, 701), (1, 1, 2, 280_001), (1, 2, 55_003, 5), (1, 1, 3, 7)]


@pytest.fixture
def default_threads() -> Iterator[None]:
    """Make calls use the default number of threads also if other processes keep the cores busy."""
    _threads.detect_oversubscription(False)
    yield
    _threads.detect_oversubscription(True)
    ag.set_num_threads(None)


def compute(problem: Problem, **settings) -> np.ndarray:
    return getattr(ag, problem.operator)(*problem.arrays, **problem.settings, backend="cpu", **settings)


@functools.lru_cache(maxsize=8)
def problem_of(operator: str, shape: tuple[int, ...], dtype: str, axis: int) -> Problem:
    return random_problem(operator, shape, DTYPES[dtype], axis)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("operator", UNMASKED)
def test_threads_and_caches_change_nothing(operator, dtype, shape, caches):
    shape, axis = SHAPES[shape]
    check_counts(problem_of(operator, shape, dtype, axis), caches)


@pytest.mark.parametrize("shape", MASKED_SHAPES)
@pytest.mark.parametrize("operator", MASKED)
def test_threads_and_caches_change_nothing_with_a_mask(operator, dtype, shape, caches):
    problem = problem_of(operator, shape, dtype, -1)
    check_counts(problem, caches)
    *floats, mask = problem.arrays
    check_counts(problem.replaced(*floats, mask[:1, :1].copy()), caches)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("operator", ["log_softmax_backward", "softmax"])
def test_threads_and_caches_change_nothing_on_any_variant(operator, shape, cpu_engine, caches):
    shape, axis = SHAPES[shape]
    check_counts(problem_of(operator, shape, "float32", axis), caches)


def check_counts(problem: Problem, caches: tuple) -> None:
    """Compare the bits for each number of threads, each with its cache sizes, and for the default number."""
    expected = compute(problem, num_threads=1)
    assert _openmp.last_team_size() == 1
    strided = problem.replaced(*(np.repeat(a, 2, -1)[..., ::2] for a in problem.arrays))
    for count, sizes in zip(COUNTS, (*caches, None), strict=True):
        _cpu.force_cache_sizes(sizes)
        for each in (problem, strided):
            assert_identical(compute(each, num_threads=count), expected)
            if _openmp.VERSION and expected.size > 2**19:
                assert _openmp.last_team_size() == count
    assert_identical(compute(problem), expected)


# ---- settings --------------------------------------------------------------------------------------------------------


@needs_openmp
def test_set_num_threads(default_threads):
    # The problem is large enough that a single call wakes a sleeping team.
    problem = Problem("softmax", (np.broadcast_to(np.float32(1), (4096, 4096)),), {})
    out = np.empty(problem.shape, np.float32)
    for count in (3, 1, 2):
        ag.set_num_threads(count)
        assert ag.get_num_threads() == count
        compute(problem, out=out)
        assert _openmp.last_team_size() == count
        compute(problem, num_threads=4, out=out)
        assert _openmp.last_team_size() == 4
        assert ag.get_num_threads() == count


@needs_openmp
def test_calls_that_follow_one_another_get_the_team(default_threads, forced):
    """Calls in close succession get the team, however long each takes. The team sleeps only if calls are far apart."""
    forced("baseline" if "baseline" in _cpu.supported_variants() else _cpu.variant())
    problem = Problem("softmax", (np.broadcast_to(np.float64(1), (1500, 1500)),), {})
    out = np.empty(problem.shape)
    ag.set_num_threads(2)
    sizes = set()
    for _ in range(30):
        compute(problem, out=out)
        sizes.add(_openmp.last_team_size())
    assert 2 in sizes


@pytest.mark.parametrize("value", [0, -1, 10**6, 2**40, 1.5, "2", [2], True, np.True_], ids=repr)
def test_numbers_that_cannot_be_set(value, default_threads):
    ag.set_num_threads(2)
    message = r"^set_num_threads: num_threads: expected None or an int in \[1, "
    with pytest.raises(ag.ParamInvalidError, match=message) as info:
        ag.set_num_threads(value)
    assert info.value.code == 161002
    assert ag.get_num_threads() == 2


def test_the_setting_is_for_all_threads(default_threads):
    ag.set_num_threads(3)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(ag.get_num_threads).result() == 3
        pool.submit(ag.set_num_threads, 2).result()
    assert ag.get_num_threads() == 2


def test_the_environments_number(run_script):
    script = """
        import ascend_grad as ag
        assert ag.get_num_threads() == 3
        ag.set_num_threads(2)
        assert ag.get_num_threads() == 2
        ag.set_num_threads(None)
        assert ag.get_num_threads() == 3
    """
    run_script(script, ASCEND_GRAD_NUM_THREADS="3", OMP_NUM_THREADS="1")


@needs_openmp
def test_the_default_follows_openmp_and_the_cores(run_script):
    script = """
        import os
        import ascend_grad as ag
        cores = os.sched_getaffinity(0)
        assert 1 <= ag.get_num_threads() <= len(cores)
        os.sched_setaffinity(0, {min(cores)})
        assert ag.get_num_threads() == 1
    """
    run_script(script)
    run_script("import ascend_grad as ag; assert ag.get_num_threads() == 1", OMP_NUM_THREADS="1")


@needs_openmp
def test_threadpoolctl_limits_the_default(run_script):
    pytest.importorskip("threadpoolctl")
    script = """
        import numpy
        import ascend_grad as ag
        from threadpoolctl import threadpool_limits
        before = ag.get_num_threads()
        with threadpool_limits(1):
            assert ag.get_num_threads() == 1
        assert ag.get_num_threads() == before
    """
    run_script(script)


def test_the_callers_settings_stay(run_script):
    script = """
        import os, sys, warnings
        environment = dict(os.environ)
        import numpy as np
        errors, precision = np.geterr(), np.get_printoptions()
        interval, filters = sys.getswitchinterval(), list(warnings.filters)
        import ascend_grad as ag
        with np.errstate(all="raise"):
            for dtype in (np.float16, np.float32, np.float64):
                x = np.array([[np.inf, -np.inf, np.nan, 1], [1e-8, 0, 6e4, -6e4]], dtype)
                mask = np.zeros((1, 1, 2, 4), bool)
                for backend in ("cpu", "reference"):
                    for out in (None, np.empty(x.shape, np.float16)):
                        for function in (ag.softmax_backward, ag.log_softmax_backward):
                            function(x, x, backend=backend, out=out)
                            function(x, x, 0, backend=backend, out=out)
                        for function in (ag.softmax, ag.log_softmax):
                            function(x, backend=backend, out=out)
                    ag.scaled_masked_softmax(x[None, None], mask, 1e30, backend=backend)
                    ag.scaled_masked_softmax_backward(x[None, None], x[None, None], mask, 1e300, backend=backend)
        big = np.zeros((1000, 1000), np.float32)
        ag.softmax(big, num_threads=2)
        assert np.geterr() == errors and np.get_printoptions() == precision
        assert sys.getswitchinterval() == interval and warnings.filters == filters
        assert dict(os.environ) == environment
    """
    run_script(script)


# ---- forks -----------------------------------------------------------------------------------------------------------


def test_a_forked_child_computes(run_script):
    script = """
        import os, signal, warnings
        import numpy as np
        import ascend_grad as ag
        warnings.simplefilter("ignore")  # of forking where there are threads
        x = np.linspace(0, 1, 2**21, dtype=np.float32).reshape(1024, 2048)
        expected = ag.softmax(x, num_threads=2)
        for _ in range(3):
            child = os.fork()
            if child == 0:
                signal.alarm(30)  # a child that hangs ends itself
                right = np.array_equal(ag.softmax(x), expected)
                right &= np.array_equal(ag.softmax(x, num_threads=2), expected)
                right &= np.array_equal(ag.softmax(x[:, ::-1], 0, num_threads=4)[:, ::-1], ag.softmax(x, 0))
                os._exit(0 if right else 1)
            assert os.waitpid(child, 0)[1] == 0
            assert np.array_equal(ag.softmax(x, num_threads=2), expected)
    """
    run_script(script)


def test_worker_processes_compute(run_script):
    script = """
        import multiprocessing, warnings
        import numpy as np
        import ascend_grad as ag
        x = np.linspace(0, 1, 2**20, dtype=np.float32).reshape(1024, 1024)
        expected = ag.softmax(x, num_threads=2)
        warnings.simplefilter("ignore")  # of forking where there are threads
        with multiprocessing.get_context("fork").Pool(2) as pool:
            for result in pool.map(ag.softmax, [x] * 4):
                assert np.array_equal(result, expected)
    """
    run_script(script)


# ---- many threads at once --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [None, 1, 2])
def test_many_python_threads_at_once(num_threads):
    problems = [
        random_problem(operator, shape if operator in UNMASKED else (1, 1, *shape), DTYPES[name], -1)
        for operator, name, shape in itertools.product(OPERATORS, DTYPES, [(7, 30), (300, 501)])
    ]
    expected = [compute(problem, num_threads=1) for problem in problems]
    checks = [
        lambda problem=problem, right=right: assert_identical(compute(problem, num_threads=num_threads), right)
        for problem, right in zip(problems, expected, strict=True)
    ]
    check_at_once(checks, threads=8, stride=5)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_other_python_threads_run_during_a_call(num_threads, strided, no_forced_switches):
    problem = random_problem("softmax_backward", (2048, 2048), np.float32)
    if strided:
        problem = problem.replaced(*(np.repeat(a, 2, 1)[:, ::2] for a in problem.arrays))
    out = np.empty(problem.shape, np.float32)
    assert_other_threads_run(lambda: compute(problem, num_threads=num_threads, out=out))


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("axis", [0, 1])
def test_ctrl_c_interrupts_a_long_call(num_threads, axis, run_script, needs_memory):
    """A signal that arrives after the first result is written ends the call before the last result is written."""
    needs_memory(2.5)
    script = f"""
        import os, signal, threading, time
        import numpy as np
        import ascend_grad as ag
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent may have had it ignored
        shape = (2**14, 2**16)
        axis, num_threads = {axis}, {num_threads}
        line = np.linspace(0, 1, shape[axis], dtype=np.float16)
        line = line[:, None] if axis == 0 else line[None]
        copy = line.copy()
        g = y = np.broadcast_to(line, shape)
        out = np.full(shape, 7, np.float16)

        {INTERRUPT}
        try:
            ag.softmax_backward(g, y, axis, out=out, num_threads=num_threads)
        except KeyboardInterrupt:
            pass
        else:
            raise SystemExit("the call ran to its end")
        assert out[0, 0] != 7 and out[-1, -1] == 7
        assert np.array_equal(line, copy)
        # The library is as good as before.
        few = (slice(None), slice(100)) if axis == 0 else slice(100)
        expected = ag.softmax_backward(g[few], y[few], axis, num_threads=1)
        assert np.array_equal(ag.softmax_backward(g[few], y[few], axis, num_threads=2), expected)
    """
    run_script(script)


def test_subnormals_survive_flush_to_zero_in_the_calling_thread(tmp_path, run_script):
    """Flush-to-zero, which a library linked with -ffast-math sets in the loading thread, does not change results."""
    library = tmp_path / "fast_math.so"
    subprocess.run(["cc", "-shared", "-ffast-math", "-x", "c", "/dev/null", "-o", library], check=True)
    script = f"""
        import ctypes
        import numpy as np
        import ascend_grad as ag
        g = np.full((64, 4096), 1e-30, np.float32)
        y = np.full((64, 4096), 1e-10, np.float32)
        y[:, 0] = 0
        before = ag.softmax_backward(g, y, num_threads=1)
        assert before[0, 1] > 0
        ctypes.CDLL({str(library)!r})
        for num_threads in (1, 2, 3):
            assert ag.softmax_backward(g, y, num_threads=num_threads).tobytes() == before.tobytes()
        assert ag.softmax_backward(g[:1], y[:1]).tobytes() == before[:1].tobytes()
    """
    run_script(script)
