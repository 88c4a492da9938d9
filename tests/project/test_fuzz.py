"""Make some random calls of ``fuzz.py``, and test that it finds and reports wrong results, and can repeat a call."""

from __future__ import annotations

import collections
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import fuzz
import fuzzed_faults
import fuzzed_losses
import numpy as np
import pytest
from fuzzed_arrays import DLPACK
from samples import DTYPES

import ascend_grad as ag
from ascend_grad import _cpu
from ascend_grad.operators import table

OPTIONS = fuzz.Options(1, ("numpy", "dlpack"))


def failures(numbers: range) -> int:
    return fuzz.run_calls(OPTIONS, numbers, types.SimpleNamespace(), collections.Counter(), variants=True)


@pytest.fixture(autouse=True)
def _variant(forced):
    """Restore the variant after a test, as calls are made on every variant."""
    forced(_cpu.variant())


def test_some_calls():
    assert failures(range(1000)) == 0


def test_everything_occurs():
    """Random calls have all operators, dtypes, libraries and stages of checks.

    Some calls have results that share memory with arguments, and some have several faults.
    """
    seen = collections.Counter()
    for number in range(30_000):
        made = fuzz.make(OPTIONS, number)
        seen.update([made.sample.operator, made.sample.dtype.name, made.sample.library.name])
        seen.update((made.sample.case, fault.stage) for fault in made.faults)
        seen[len(made.faults)] += 1
        for place in made.sample.outs:
            if not made.faults and place is not None and place.shared is not None:
                argument = made.sample.arguments[place.shared]
                seen["in place" if argument.ctypes.data == place.array.ctypes.data else "beside"] += 1
    stages = {(case, stage) for case, each in fuzzed_faults.STAGES.items() for stage in each}
    # In calls of "rows" every other array may be NumPy's. Calls of losses have up to thirty other stages.
    without = ("softmax", "log_softmax", *fuzzed_losses.OPERATOR_OF)
    several = {(case, "library") for case in fuzzed_faults.STAGES if case not in without}
    libraries = {"numpy", *(library.name for library in DLPACK)}
    expected = {*table.OPERATORS, *DTYPES, *libraries, *stages, *several, "in place", "beside", 0, 1, 2, 3}
    assert expected <= set(seen)


def test_a_call_can_be_made_again():
    for number in range(300):
        first, second = (fuzz.make(OPTIONS, number) for _ in range(2))
        assert [str(fault) for fault in first.faults] == [str(fault) for fault in second.faults]
        assert first.arguments.keys() == second.arguments.keys()
        assert fuzz.all_contents(first.sample) == fuzz.all_contents(second.sample)


def wrong(result: np.ndarray) -> np.ndarray:
    """Return the result with a small error in its last element."""
    if isinstance(result, np.ndarray) and result.size and result.dtype == np.float32:
        result = result.copy()
        result.reshape(-1)[-1] *= 1.001
    return result


def lenient(function):
    """Return the function without its error for a axis that is out of range."""

    def call(input, axis=-1, **settings):
        try:
            return function(input, axis, **settings)
        except ag.ParamInvalidError as error:
            if ": axis: " not in str(error):
                raise
            return None

    return call


def overwriting(function):
    """Return the function with an error: after the computation it writes to its input."""

    def call(input, axis=-1, **settings):
        result = function(input, axis, **settings)
        if isinstance(input, np.ndarray) and input.size and input.flags.writeable:
            input[...] = 0
        return result

    return call


@pytest.mark.parametrize(
    ("spoil", "found"),
    {
        "a value": (lambda f: lambda *args, **settings: wrong(f(*args, **settings)), "times the bound"),
        "no refusal": (lenient, "took what is wrong"),
        "an input": (overwriting, "was modified"),
    }.values(),
    ids=("a value", "no refusal", "an input"),
)
def test_what_is_wrong_is_found(spoil, found, monkeypatch, capsys):
    monkeypatch.setattr(ag, "softmax", spoil(ag.softmax))
    assert failures(range(1000)) > 0
    report = capsys.readouterr().out
    assert found in report
    number = int(report.partition("--call ")[2].split()[0])
    assert f"=== seed 1, call {number} failed: python tests/support/fuzz.py --arrays numpy,dlpack --seed 1" in report
    assert "softmax on " in report
    assert "input = " in report
    monkeypatch.undo()
    fuzz.check(OPTIONS, number)


def command(*options: str, **environment: str) -> subprocess.CompletedProcess:
    program = Path(__file__).parents[1] / "support" / "fuzz.py"
    return subprocess.run(
        [sys.executable, program, *options], capture_output=True, text=True, env=os.environ | environment, timeout=300
    )


def test_command():
    done = command("--calls", "60", "--seed", "5", "--threads", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("60 calls of seed 5 are as they have to be\n")
    done = command("--seed", "5", "--call", "17")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(fuzz.described(fuzz.Options(5, ("numpy", "dlpack")), 17).partition(" on ")[0])


def test_a_process_that_crashes_is_told_of(tmp_path):
    """The report of a crashed process names the call that was running."""
    crash = f"import os, ascend_grad\nascend_grad.softmax = lambda *a, **k: os.kill(os.getpid(), {signal.SIGSEGV:d})\n"
    (tmp_path / "sitecustomize.py").write_text(crash)
    done = command("--calls", "200", "--processes", "1", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert f"a process ended with {-signal.SIGSEGV}; it was at\n  python tests/support/fuzz.py --arrays" in done.stdout
