"""Test that commands answer a mistake, or what the machine lacks, with one line and no traceback."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("here")

#: Runs the command line. A text file that a command opens without naming its encoding is an error.
PROGRAM = """
import sys, warnings
with warnings.catch_warnings():
    warnings.simplefilter("ignore", EncodingWarning)
    from ascend_grad.cli.main import main
warnings.simplefilter("error", EncodingWarning)
sys.exit(main())
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.ones((4, 5), np.float32))
    os.mkfifo("pipe")
    os.mkdir("folder")


def run(*argv: str | bytes, limit: str = "", **settings) -> subprocess.CompletedProcess[str]:
    """Run the command line, with an option of prlimit if one is given."""
    # A function that is called after a fork could also set the limit. But JAX warns of forks wherever it has been used.
    before = ["prlimit", limit] if limit else []
    command = [*before, sys.executable, "-P", "-X", "warn_default_encoding", "-c", PROGRAM, *argv]
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "errors": "replace", "timeout": 100} | settings
    return subprocess.run(command, **settings)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("apply", "softmax", "--input", "missing.npy", "-o", "o.npy"), "missing.npy: No such file or directory"),
        (("apply", "softmax", "--input", "", "-o", "o.npy"), "the name of an input is empty"),
        (("apply", "softmax", "--input", "pipe", "-o", "o.npy"), "pipe: expected a regular file, got a pipe"),
        (
            ("apply", "softmax", "--input", "/dev/zero", "-o", "o.npy"),
            "/dev/zero: expected a regular file, got a device",
        ),
        (("apply", "softmax", "--input", "x.npy", "-o", ""), "the name of a result is empty"),
        (("apply", "softmax", "--input", "x.npy", "-o", "."), ".: expected a regular file, got a directory"),
        (
            ("apply", "softmax", "--input", "x.npy", "-o", "folder/"),
            "folder/: expected a regular file, got a directory",
        ),
        (("apply", "softmax", "--input", "x.npy", "-o", "pipe"), "pipe: expected a regular file, got a pipe"),
        (
            ("apply", "softmax", "--input", "x.npy", "-o", "/dev/stdout"),
            "/dev/stdout: expected a regular file, got a pipe",
        ),
        (("apply", "softmax", "--input", "x.npy", "-o", "./x.npy"), "./x.npy: this is the input x.npy"),
        (("apply", "softmax", "--input", "x.npy", "-o", "none/o.npy"), "none/o.npy: there is no directory"),
        (("score", "x.npy", "missing.npy", "--lse-out", "o.npy"), "missing.npy: No such file or directory"),
        (("check", "--json", "none/o.json"), "--json none/o.json: cannot write in none"),
        (("check", "--json", "folder"), "--json folder: is a directory"),
        (("bench", "--json", "none/o.json"), "--json none/o.json: cannot write in none"),
    ],
)
def test_mistakes(argv, message):
    before = sorted(os.listdir())
    result = run(*argv)
    assert (result.returncode, result.stdout) == (2, "")
    assert re.fullmatch(rf"ascend-grad {argv[0]}: error: .*\n", result.stderr), result.stderr
    assert message in result.stderr
    assert sorted(os.listdir()) == before


def test_a_pipe_as_standard_input():
    result = run("apply", "softmax", "--input", "/dev/stdin", "-o", "o.npy", input="not used")
    assert result.returncode == 2
    assert result.stderr == "ascend-grad apply: error: /dev/stdin: expected a regular file, got a pipe\n"


def test_a_file_as_standard_input():
    with open("x.npy", "rb") as file:
        assert run("apply", "softmax", "--input", "/dev/stdin", "-o", "o.npy", stdin=file).returncode == 0
    assert (np.load("o.npy") == np.float32(0.2)).all()


@pytest.mark.parametrize("environment", [{}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}])
def test_names_that_the_locale_cannot_write(environment):
    settings = {"env": os.environ | environment}
    os.rename("x.npy", b"\xff\xe9.npy")
    result = run("apply", "softmax", "--input", b"\xff\xe9.npy", "-o", "é.npy".encode(), **settings)
    assert (result.returncode, result.stderr) == (0, "")
    assert (np.load("é.npy".encode()) == np.float32(0.2)).all()
    result = run("apply", "softmax", "--input", b"\xff.npy", "-o", b"\xff.npy", **settings)
    assert result.returncode == 2
    assert "No such file or directory" in result.stderr


@pytest.mark.parametrize("name", ["check --json o.json --filter linear_top_k", "info --json"])
def test_reports(name):
    result = run(*name.split())
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("check", "--filter", "linear_top_k", "--json", "o.json"), "--json o.json: cannot be written: File too large"),
        (("apply", "softmax", "--input", "x.npy", "-o", "o.npy"), "o.npy: cannot reserve 208 bytes"),
    ],
)
def test_files_that_cannot_get_large(argv, message):
    """The limit stands for a full disk."""
    result = run(*argv, limit="--fsize=100")
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not Path("o.npy").exists()
