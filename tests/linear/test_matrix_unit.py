"""Test the kernels for the matrix units AMX and BFMMLA bit for bit, by programs in C with their emulation."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from processes import cpu_flags
from stand_in import compiler

import ascend_grad as ag

SOURCES = Path(__file__).parents[1] / "c"
#: The arithmetic flags of setup.py.
FLAGS = "-O1", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"


def run_program(folder: Path, name: str, flags: tuple[str, ...] = (), arguments: tuple[str, ...] = ()) -> str:
    """Build and run a program, and return what it printed."""
    program, source = folder / name, SOURCES / f"{name}.c"
    command = [*compiler(), *FLAGS, *flags, "-I", ag.get_include(), str(source), "-lm", "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(program), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> str:
    """Return what the program for AMX prints."""
    return run_program(tmp_path_factory.mktemp("amx"), "selftest_amx")


def test_bfmmla_adds_in_the_order_of_its_emulation(tmp_path):
    """Packing, tiles and products equal the model's on every CPU, with the instruction in plain C."""
    flags = "-DAG_EMULATE_BFMMLA", "-DAG_ONLY_LANES=4"
    assert run_program(tmp_path, "selftest_linear", flags, ("neon_bf16",)).endswith(" 0 failed\n")


def test_the_emulation_of_amx_is_compared_with_the_model_where_the_cpu_executes_it(printed):
    assert "model: " in printed
    assert ("emulation: " in printed) == ({"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= cpu_flags())


def test_amx_is_compared_with_the_emulation_where_the_cpu_has_it(printed):
    has_unit = {"amx_tile", "amx_bf16", "avx512_bf16"} <= cpu_flags()
    expected = ("compared", "refused by the operating system") if has_unit else ("absent",)
    lines = [line.removeprefix("unit: ") for line in printed.splitlines() if line.startswith("unit: ")]
    assert all(line in (*expected, "unknown to the compiler") for line in lines)
    assert ("unit: " in printed) == ("emulation: " in printed)
