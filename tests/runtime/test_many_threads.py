"""Test calls from many Python threads at once, which run in parallel if Python has no global interpreter lock."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from linear_samples import GRADIENT, LINEAR, problem_of
from samples import DTYPES, OPERATORS, assert_identical, random_problem

import ascend_grad as ag

THREADS = 8


def calls():
    """Return calls of every operator and dtype, whose workspaces are of many sizes."""
    for number, dtype in enumerate(DTYPES):
        for operator in OPERATORS:
            problem = random_problem(operator, (1, 2, 9 + number, 300), DTYPES[dtype])
            yield lambda p=problem: (getattr(ag, p.operator)(*p.arrays, **p.settings),)
        for operator in LINEAR:
            problem = problem_of(operator, (5 + 7 * number, 90, 33), dtype)
            yield lambda p=problem: getattr(ag, p.operator)(**p.arguments)


def test_results_from_many_threads():
    expected = [(call, call()) for call in calls()]
    start = threading.Barrier(THREADS)

    def work(number: int) -> None:
        start.wait(60)
        for repetition in range(5):
            shift = 5 * number + 3 * repetition
            for call, right in expected[shift:] + expected[:shift]:
                for result, each in zip(call(), right, strict=True):
                    if each is not None:
                        assert_identical(result, each)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(THREADS)))


def test_workspaces_of_many_threads():
    """Each call has a separate workspace. The calls are short, so that several threads allocate at the same time."""
    shapes = [(3, 64, 17), (5, 200, 17), (9, 48, 17), (2, 300, 17)]
    problems = [problem_of(GRADIENT, shape, "float32") for shape in shapes]

    def solve(number: int) -> list[bytes]:
        arguments = problems[number % len(problems)].arguments
        results = ag.fused_linear_cross_entropy_loss_grad(**arguments, backend="cpu", num_threads=1)
        return [result.tobytes() for result in results]

    expected = [solve(number) for number in range(len(problems))]
    start = threading.Barrier(THREADS)

    def work(number: int) -> int:
        start.wait(60)
        return sum(solve(number + call) != expected[(number + call) % len(problems)] for call in range(3000))

    with ThreadPoolExecutor(THREADS) as pool:
        assert sum(pool.map(work, range(THREADS))) == 0


def test_every_generated_file_declares_that_it_needs_no_lock():
    """The C file of every module declares that the module needs no global interpreter lock.

    Cython writes the same file for Pythons with the lock and without it.
    """
    root = Path(__file__).parents[2]
    sources = {path.stem for path in (root / "pyx").rglob("*.pyx")}
    # Earlier builds may have left files of modules that are gone.
    paths = [path for path in (root / "build" / "cython").rglob("*.c") if path.stem in sources | {"_cyutility"}]
    generated = {path.stem: path.read_text() for path in paths}
    if not generated:
        pytest.skip("there is no build/cython: the modules were built elsewhere")
    declared = {
        name: re.findall(r"^#else\n#define __Pyx_FREETHREADING_COMPATIBLE (\w+)\n#endif", text, re.MULTILINE)[-1:]
        for name, text in generated.items()
        if "{Py_mod_gil, __Pyx_FREETHREADING_COMPATIBLE}" in text
    }
    assert declared == {name: ["Py_MOD_GIL_NOT_USED"] for name in sources | {"_cyutility"}}


def test_the_interpreters_lock_stays_as_it_was(run_script):
    script = """
        import importlib, pathlib, sys
        import ml_dtypes, numpy
        is_enabled = getattr(sys, "_is_gil_enabled", lambda: True)
        before = is_enabled()
        import ascend_grad
        for path in pathlib.Path(ascend_grad.__file__).parent.glob("*.so"):
            importlib.import_module(f"ascend_grad.{path.name.partition('.')[0]}")
        assert is_enabled() == before
    """
    run_script(script)
