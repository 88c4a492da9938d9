"""Test the kernels for the matrix unit AMX bit for bit, by a program in C with the kernels and their emulation."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from processes import cpu_flags
from stand_in import compiler

import ascend_grad as ag

SOURCE = Path(__file__).parents[1] / "c" / "selftest_amx.c"
#: The arithmetic flags of setup.py.
FLAGS = "-O1", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> str:
    """Build and run the program, and return what it printed."""
    program = tmp_path_factory.mktemp("amx") / "selftest_amx"
    command = [*compiler(), *FLAGS, "-I", ag.get_include(), str(SOURCE), "-lm", "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_the_emulation_is_compared_with_the_model_where_the_cpu_executes_it(printed):
    assert "model: " in printed
    assert ("emulation: " in printed) == ({"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= cpu_flags())


def test_the_unit_is_compared_with_the_emulation_where_the_cpu_has_it(printed):
    has_unit = {"amx_tile", "amx_bf16", "avx512_bf16"} <= cpu_flags()
    expected = ("compared", "refused by the operating system") if has_unit else ("absent",)
    lines = [line.removeprefix("unit: ") for line in printed.splitlines() if line.startswith("unit: ")]
    assert all(line in (*expected, "unknown to the compiler") for line in lines)
    assert ("unit: " in printed) == ("emulation: " in printed)
