"""Test threads of the linear operators: equal bits for any number, in any process, and interrupts of long calls."""

from __future__ import annotations

import itertools
import subprocess
import threading

import numpy as np
import pytest
from linear_samples import GRADIENT, LINEAR, LOSS, MODES, STATISTICS, WHOLE, LinearProblem, Shape, problem_of
from python_threads import INTERRUPT, assert_other_threads_run, check_at_once
from samples import DTYPES, Layout, assert_identical, laid_out

import ascend_grad as ag
from ascend_grad import _cpu, _openmp

COUNTS = (1, 2, 3, 4)

needs_openmp = pytest.mark.skipif(not _openmp.VERSION, reason="built without OpenMP")

#: Shapes with many rows, vocabulary entries or features, shapes with a single one, and a small shape.
SHAPES = {
    "square": Shape(300, 600, 70),
    "rows": Shape(5000, 40, 33),
    "entries": Shape(17, 9001, 40),
    "features": Shape(40, 300, 1500),
    "one row": Shape(1, 20_003, 65),
    "one entry": Shape(20_003, 1, 65),
    "one feature": Shape(500, 1203, 1),
    "small": Shape(3, 256, 17),
}

HOW = {
    "recomputed": (GRADIENT, {"mode": "recomputed"}),
    "stored": (GRADIENT, {"mode": "stored"}),
    "statistics": (STATISTICS, {}),
    "loss": (LOSS, {}),
    "whole": (WHOLE, {"reduction": "mean"}),
    "whole without reduction": (WHOLE, {"reduction": "none"}),
}


def compute(problem: LinearProblem, **settings):
    return getattr(ag, problem.operator)(**problem.arguments, **settings, backend="cpu")


def assert_same(results, expected) -> None:
    for result, right in zip(results, expected, strict=True):
        if right is not None:
            assert_identical(result, right)


def check_counts(problem: LinearProblem, caches: tuple, *, large: bool) -> None:
    """Check for equal bits with every number of threads, each with other sizes of caches, and with the default."""
    expected = compute(problem, num_threads=1)
    assert _openmp.last_team_size() == 1
    layout = {1: Layout((0,), (2,), 3), 2: Layout((1, 0), (1, -1), 3)}
    strided = problem.mapped(lambda array: laid_out(array, layout[array.ndim]))
    for count, sizes in zip(COUNTS, (*caches, None), strict=True):
        _cpu.force_cache_sizes(sizes)
        for each in (problem, strided):
            assert_same(compute(each, num_threads=count), expected)
            if _openmp.VERSION and large:
                assert _openmp.last_team_size() == count
    assert_same(compute(problem), expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("how", HOW)
def test_threads_and_caches_change_nothing(how, shape, dtype, caches):
    operator, settings = HOW[how]
    check_counts(problem_of(operator, SHAPES[shape], dtype, **settings), caches, large=False)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", ["square", "rows", "entries", "features"])
def test_threads_and_caches_change_nothing_on_any_variant(shape, mode, dtype, cpu_engine, caches):
    """Bits are equal on every variant, and large problems get the requested number of threads."""
    check_counts(problem_of(GRADIENT, SHAPES[shape], dtype, mode=mode), caches, large=True)


def test_the_number_of_threads_changes_nothing_in_little_space(dtype):
    """Bits are equal in a small workspace, which cuts rows into chunks and the vocabulary into many blocks."""
    problem = problem_of(GRADIENT, Shape(3000, 2500, 20), dtype)
    expected = compute(problem, num_threads=1, workspace_bytes=2**22)
    for count in COUNTS[1:]:
        assert_same(compute(problem, num_threads=count, workspace_bytes=2**22), expected)


def test_the_same_from_run_to_run(dtype):
    for how in HOW.values():
        problem = problem_of(how[0], SHAPES["square"], dtype, **how[1])
        expected = compute(problem, num_threads=2)
        for _ in range(5):
            assert_same(compute(problem, num_threads=2), expected)


@pytest.mark.parametrize("how", HOW)
def test_the_sizes_of_caches_change_nothing_in_large_problems(how, dtype, caches):
    operator, settings = HOW[how]
    for shape in (Shape(1300, 2100, 20), Shape(2100, 130, 700)):
        problem = problem_of(operator, shape, dtype, **settings)
        expected = compute(problem)
        for sizes in caches:
            _cpu.force_cache_sizes(sizes)
            assert_same(compute(problem), expected)
        _cpu.force_cache_sizes()


def test_small_calls_stay_in_their_thread():
    for operator in LINEAR:
        compute(problem_of(operator, (2, 3, 4), "float32"))
        assert _openmp.last_team_size() == 1


# ---- processes and Python threads ------------------------------------------------------------------------------------


def test_a_forked_child_computes(run_script):
    script = """
        import os, signal, warnings
        import numpy as np
        import ascend_grad as ag
        warnings.simplefilter("ignore")  # of forking where there are threads
        random = np.random.default_rng(1)
        x, w = (random.standard_normal((n, 64), np.float32) for n in (300, 1000))
        target = random.integers(0, 1000, 300)

        def same(results, expected):
            return all(np.array_equal(a, b) for a, b in zip(results, expected))

        expected = ag.linear_cross_entropy(x, w, target, num_threads=2)
        for _ in range(3):
            child = os.fork()
            if child == 0:
                signal.alarm(60)  # a child that hangs ends itself
                right = same(ag.linear_cross_entropy(x, w, target), expected)
                right &= same(ag.linear_cross_entropy(x, w, target, num_threads=2), expected)
                os._exit(0 if right else 1)
            assert os.waitpid(child, 0)[1] == 0
            assert same(ag.linear_cross_entropy(x, w, target, num_threads=2), expected)
    """
    run_script(script)


@pytest.mark.parametrize("num_threads", [None, 1, 2])
def test_many_python_threads_at_once(num_threads):
    problems = [
        problem_of(operator, shape, name, **how)
        for (operator, how), name, shape in itertools.product(HOW.values(), DTYPES, [(5, 30, 7), (150, 400, 33)])
    ]
    expected = [compute(problem, num_threads=1) for problem in problems]
    checks = [
        lambda problem=problem, right=right: assert_same(compute(problem, num_threads=num_threads), right)
        for problem, right in zip(problems, expected, strict=True)
    ]
    check_at_once(checks, threads=6, stride=7)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("how", HOW)
def test_other_python_threads_run_during_a_call(how, num_threads, no_forced_switches):
    operator, settings = HOW[how]
    problem = problem_of(operator, SHAPES["square"], "float32", **settings)
    assert_other_threads_run(lambda: compute(problem, num_threads=num_threads))


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_phases_do_not_need_the_interpreters_lock(mode, num_threads, no_forced_switches):
    """Another thread holds the lock from before the first row of the result is written until the last row is written.

    Checks of signals need the lock. If a check comes before the result is complete, the call is repeated.
    """
    problem = problem_of(GRADIENT, Shape(1500, 2500, 20), "float32", mode=mode)
    results = np.empty((1500, 20), np.float32), np.empty((2500, 20), np.float32)
    untouched = np.float32(7)
    has_ended = False

    def watch() -> None:
        nonlocal has_ended
        called.wait()
        if results[1][0, 0] == untouched:
            has_ended = any(results[1][-1, -1] != untouched for _ in range(10**6))

    for _ in range(2000):
        results[1][...] = untouched
        called = threading.Event()
        watcher = threading.Thread(target=watch)
        watcher.start()
        called.set()
        compute(problem, num_threads=num_threads, workspace_bytes=2**22, out=results)
        watcher.join()
        if has_ended:
            break
    else:
        pytest.fail("no call was computed while another thread kept the interpreter's lock")


def test_the_callers_settings_stay(run_script):
    script = """
        import os, sys, warnings
        environment = dict(os.environ)
        import numpy as np
        errors = np.geterr()
        interval, filters = sys.getswitchinterval(), list(warnings.filters)
        import ascend_grad as ag
        with np.errstate(all="raise"):
            for dtype in (np.float16, np.float32, np.float64):
                x = np.array([[np.inf, -np.inf, np.nan], [1e-8, 0, 6e4], [1, 2, 3]], dtype)
                target = np.array([0, 1, 2])
                wide = np.float64 if dtype == np.float64 else np.float32
                numbers = np.array([0, np.nan, -np.inf], wide)
                for backend in ("cpu", "reference"):
                    for reduction in ("mean", "none"):
                        ag.linear_cross_entropy(x, x, target, reduction=reduction, backend=backend)
                    ag.linear_cross_entropy(x, x, target, ignore_index=0, backend=backend)
                    ag.linear_cross_entropy(x[:0], x, target[:0], backend=backend)
                    s = ag.fused_linear_online_max_sum(x, x, target, 0, 3, return_logits=True, backend=backend)
                    ag.fused_cross_entropy_loss_with_max_sum(*s[:3], vocab_parallel_logits=s[5], backend=backend)
                    ag.fused_cross_entropy_loss_with_max_sum(numbers, numbers, numbers, backend=backend)
                    for mode in ({"logits_max": numbers, "sum_exp_logits": numbers}, {"softmax": x.astype(wide)}):
                        ag.fused_linear_cross_entropy_loss_grad(
                            numbers, x, x, s.target_mask, s.masked_target, **mode, backend=backend
                        )
        assert np.geterr() == errors
        assert sys.getswitchinterval() == interval and warnings.filters == filters
        assert dict(os.environ) == environment
    """
    run_script(script)


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("mode", ["recomputed", "stored"])
def test_ctrl_c_interrupts_a_long_call(mode, num_threads, run_script, needs_memory):
    """A signal that arrives when the first row is written interrupts the call before the last row is written."""
    needs_memory(1.5)
    script = f"""
        import os, signal, threading, time
        import numpy as np
        import ascend_grad as ag
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent may have had it ignored
        rows, entries, features = 1024, 200_000, 256
        x = np.full((rows, features), 0.01, np.float32)
        w = np.broadcast_to(x[:1], (entries, features))
        out = np.full((entries, features), 7, np.float32)
        numbers, here = np.ones(rows, np.float32), np.zeros(rows, bool)
        mode = {{"logits_max": numbers, "sum_exp_logits": numbers}}
        if "{mode}" == "stored":
            mode = {{"softmax": np.broadcast_to(np.float32(0.5), (rows, entries))}}
        arguments = (numbers, x, w, here, np.zeros(rows, np.int64))

        {INTERRUPT}
        try:
            ag.fused_linear_cross_entropy_loss_grad(*arguments, **mode, out=(None, out), num_threads={num_threads})
        except KeyboardInterrupt:
            pass
        else:
            raise SystemExit("the call ran to its end")
        assert out[0, 0] != 7 and out[-1, -1] == 7
        assert np.all(x == np.float32(0.01)) and np.all(numbers == 1)
        # Later calls are computed as before.
        few = {{name: value[:3, :50] if value.ndim == 2 else value[:3] for name, value in mode.items()}}
        small = (numbers[:3], x[:3], w[:50], here[:3], np.zeros(3, np.int64))
        expected = ag.fused_linear_cross_entropy_loss_grad(*small, **few, num_threads=1)
        results = ag.fused_linear_cross_entropy_loss_grad(*small, **few, num_threads=2)
        assert all(np.array_equal(a, b) for a, b in zip(results, expected))
    """
    run_script(script)


@pytest.mark.parametrize("operator", [STATISTICS, WHOLE, "sparse"])
def test_ctrl_c_interrupts_the_other_operators(operator, run_script):
    """Signals are handled within the call. The second signal, sent after the first was handled, interrupts the call."""
    script = f"""
        import os, signal, threading
        import numpy as np
        import ascend_grad as ag
        handled, first_is_handled = 0, threading.Event()

        def handle(number, frame):
            global handled
            handled += 1
            first_is_handled.set()
            if handled == 2:
                raise KeyboardInterrupt

        def interrupt():
            os.kill(os.getpid(), signal.SIGINT)
            first_is_handled.wait()
            os.kill(os.getpid(), signal.SIGINT)

        signal.signal(signal.SIGINT, handle)
        target = np.zeros(2048, np.int64)
        x = np.broadcast_to(np.float32(0.01), (2048, 512))
        w = np.broadcast_to(np.float32(0.01), (4_000_000, 512))  # a minute's work
        if "{operator}" == "sparse":
            import scipy.sparse
            sparse = scipy.sparse.csr_array(np.ones((200_000, 20)))
        try:
            threading.Timer(0.1, interrupt).start()
            if "{operator}" == "{STATISTICS}":
                ag.{STATISTICS}(x, w, target, 0, 10, num_threads=1)
            elif "{operator}" == "sparse":
                ag.{WHOLE}(sparse, np.ones((4000, 20)), np.zeros(sparse.shape[0], np.int64), num_threads=2)
            else:
                ag.{WHOLE}(x, w, target, output_mask=(True, False), num_threads=1)
            handled = 2  # by now, the call is over
        except KeyboardInterrupt:
            pass
        else:
            raise SystemExit("the call ran to its end")
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
        n = 64
        x = np.full((n, n), 1e-20, np.float32)
        arguments = (np.full(n, 1e-20, np.float32), x, x, np.ones(n, bool), np.zeros(n, int))
        softmax = np.ones((n, n), np.float32)
        before = ag.fused_linear_cross_entropy_loss_grad(*arguments, softmax=softmax, num_threads=1)
        assert before[0][0, 0] > 0
        small = (np.full(2, 1e-40, np.float32), x[:2] * 1e30, x * 1e30, np.ones(2, bool), np.zeros(2, int))
        of_small = ag.fused_linear_cross_entropy_loss_grad(*small, softmax=softmax[:2])
        assert of_small[0][0, 0] > 0
        whole = ag.linear_cross_entropy(x * 1e20, x * 1e20, np.arange(n), grad_loss=1e-37)
        ctypes.CDLL({str(library)!r})
        again = ag.fused_linear_cross_entropy_loss_grad(*small, softmax=softmax[:2])
        assert all(a.tobytes() == b.tobytes() for a, b in zip(of_small, again))
        again = ag.linear_cross_entropy(x * 1e20, x * 1e20, np.arange(n), grad_loss=1e-37)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(whole, again))
        for num_threads in (1, 2, 3):
            after = ag.fused_linear_cross_entropy_loss_grad(*arguments, softmax=softmax, num_threads=num_threads)
            assert all(a.tobytes() == b.tobytes() for a, b in zip(before, after))
    """
    run_script(script)
