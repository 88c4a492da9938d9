"""Test the command line as a whole: its commands, exit statuses and output streams."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import ascend_grad as ag
from ascend_grad.cli import apply, bench, check, demo, info, score
from ascend_grad.cli.main import main

COMMANDS = {"demo": demo, "apply": apply, "score": score, "bench": bench, "check": check, "info": info}
DOCUMENT = Path(__file__).parents[2] / "docs" / "command_line.md"


def exits(*argv: str) -> int:
    """Return the status with which argparse ends the command."""
    with pytest.raises(SystemExit) as exit:
        main(argv)
    return exit.value.code


def test_version(capsys):
    assert exits("--version") == 0
    assert capsys.readouterr().out == f"ascend-grad {ag.__version__}\n"


def test_help_names_every_command(capsys):
    assert exits("--help") == 0
    text = capsys.readouterr().out
    assert all(f"\n    {command} " in text for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    assert exits(command, "--help") == 0
    assert f"usage: ascend-grad {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv",
    [(), *((command,) for command in COMMANDS), *(("apply", each.name) for each in apply.OPERATORS)],
    ids=" ".join,
)
def test_every_help_names_the_exit_statuses(argv, capsys):
    assert exits(*argv, "--help") == 0
    text = capsys.readouterr().out
    assert text.count("exit status:\n") == 1
    statuses = [line.split()[0] for line in text.partition("exit status:\n")[2].splitlines()]
    may_find_something_wrong = not argv or argv[0] in ("demo", "bench", "check")
    assert statuses == ["0", *["1"] * may_find_something_wrong, "2", "128"]


@pytest.mark.parametrize(("command", "module"), COMMANDS.items())
def test_the_document_says_of_exit_statuses_what_the_help_says(command, module):
    meanings = [line.partition("        ")[2] for line in module.STATUSES.splitlines()[1:-2]]
    (row,) = (line for line in DOCUMENT.read_text().splitlines() if line.startswith(f"| `{command}` | {meanings[0]} |"))
    assert [cell.strip() for cell in row.split("|")[2:-1]] == [*meanings, *[""] * (2 - len(meanings))]


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        ((), ""),
        (("nonsense",), ""),
        (("--nonsense", "info"), ""),
        *(((name, "--nonsense"), f" {name}") for name in COMMANDS if name not in ("apply", "score")),
        (("score", "hidden", "weight", "-o", "out", "--nonsense", "3"), " score"),
        (("apply", "softmax", "x", "-o", "y", "--nonsense"), " apply softmax"),
        (("apply", "softmax", "x", "-o", "y", "more"), " apply softmax"),
        (("apply", "softmax", "x", "-o", "y", "--input", "x"), " apply softmax"),
        (("apply", "softmax", "x", "-o", "y", "--axis", "-1", "--dim", "-1"), " apply softmax"),
        (("apply", "softmax_backward", "g", "-o", "y"), " apply softmax_backward"),
        (("demo", "--steps", "x"), " demo"),
        (("demo", "--backend", "x"), " demo"),
    ],
)
def test_wrong_use_says_how_to(argv, command, capsys):
    """The error is one line, and names the help of the command itself."""
    assert exits(*argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"ascend-grad{command}: error: ")
    assert err.splitlines()[1:] == [f"see ascend-grad{command} --help"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("softmax", "x.npy"), "'softmax'; did you mean: ascend-grad apply softmax\n"),
        (("softmax-backward",), "'softmax-backward'; did you mean: ascend-grad apply softmax_backward\n"),
        (("linear_cross_entropy",), "'linear_cross_entropy'; ascend-grad score gives its log-probabilities\n"),
        (("apply", "softmax-backward"), "'softmax-backward'; did you mean: ascend-grad apply softmax_backward\n"),
        (("apply", "linear_cross_entropy", "h.npy"), "ascend-grad score gives its log-probabilities\n"),
        (("apply", "nonsense"), "'nonsense' (choose from "),
        (("apply", "softmax", "x", "-o", "y", "more"), "softmax: expected one input, got 2 files\n"),
        (("apply", "cross_entropy", *"xyz", "-o", "y"), "cross_entropy: expected 2 inputs, got 3 files\n"),
        (
            ("apply", "softmax", "x", "-o", "y", "--dtype", "float64"),
            "; --dtype is the dtype of inputs with elements of 2 raw bytes; for the result use --out-dtype float64",
        ),
        (
            ("apply", "cross_entropy", "x", "t", "-o", "y", "--denominator", "4"),
            "--denominator: expected with --reduction",
        ),
        (
            ("apply", "cross_entropy", "x", "t", "-o", "y", "--denominator", "4", "--reduction", "sum"),
            "--denominator: expected with --reduction mean only\n",
        ),
    ],
)
def test_wrong_use_is_told_what_is_meant(argv, message, capsys):
    assert exits(*argv) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", [[sys.executable, "-m", "ascend_grad"], [Path(sys.executable).with_name("ascend-grad")]]
)
def test_both_ways_to_start_it(command, tmp_path):
    if not Path(command[0]).exists():
        pytest.skip(f"there is no {command[0]}: the package runs without having been installed")
    result = subprocess.run([*command, "--version"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert result.stdout == f"ascend-grad {ag.__version__}\n"
    wrong = [*command, "apply", "softmax", "--input", "absent.npy", "-o", "y.npy"]
    result = subprocess.run(wrong, cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "ascend-grad apply: error: absent.npy: No such file or directory\n"


def assert_one_line(argv: list[str], variable: str, value: str, message: str) -> None:
    """Check that the command line names the wrong environment variable in one line."""
    command = [sys.executable, "-P", *argv]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | {variable: value})
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"ascend-grad: error: {variable}: {message}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("ASCEND_GRAD_BACKEND", "gpu", "expected one of auto, cpu, npu, reference, got 'gpu'"),
        ("ASCEND_GRAD_CPU", "sse9", "expected one of baseline, "),
        ("ASCEND_GRAD_NUM_THREADS", "many", "expected an integer in [1, "),
        ("ASCEND_GRAD_DEVICE", "-1", "expected an integer in [0, "),
    ],
)
def test_a_wrong_environment_is_one_line_and_a_status(variable, value, message):
    assert_one_line(["-m", "ascend_grad", "info"], variable, value, message)


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["apply", "softmax", "--help"], []], ids=" ".join)
@pytest.mark.parametrize("way", [["-m", "ascend_grad"], ["-mascend_grad"], ["ascend-grad"]], ids=" ".join)
def test_a_wrong_environment_however_it_is_started(way, argv, tmp_path):
    if way == ["ascend-grad"]:
        script = tmp_path / "ascend-grad"  # the script has the text that an installer writes
        script.write_text("import sys\nfrom ascend_grad.cli.main import main\nsys.exit(main())\n")
        way = [str(script)]
    assert_one_line([*way, *argv], "ASCEND_GRAD_CPU", "sse9", "expected one of baseline, ")


@pytest.mark.parametrize("way", [["-c", "import ascend_grad"], ["-m", "program", "ascend_grad"], ["program.py"]])
def test_other_programs_see_an_exception(way, tmp_path):
    (tmp_path / "program.py").write_text("import ascend_grad\n")
    environment = os.environ | {"ASCEND_GRAD_CPU": "sse9", "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, *way]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert result.returncode == 1
    assert "\nValueError: ASCEND_GRAD_CPU: expected one of baseline, " in result.stderr


def test_nothing_heavy_is_imported_before_it_is_needed(run_script):
    run_script("""
        import sys
        from ascend_grad.cli.main import build_parser
        build_parser()
        assert not {"matplotlib", "scipy", "torch", "jax", "tqdm"} & set(sys.modules)
    """)


def test_info_for_people(capsys):
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    config = ag.show_config(mode="dict")
    for expected in (config["version"]["ascend_grad"], config["cpu"]["variant"], config["openmp"], ag.get_include()):
        assert expected in text
    assert config["cpu"]["model"] in text
    assert config["system"] in text
    for name, status in config["backends"].items():
        assert f"{name}: {'usable' if status['usable'] else 'not usable'}, {status['reason']}" in text


def test_info_for_programs(capsys):
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == ag.show_config(mode="dict")


def test_info_names_what_the_environment_asks_for(run_script):
    script = "from ascend_grad.cli.main import main; main(['info'])"
    assert "environment   ASCEND_GRAD_NUM_THREADS=1\n" in run_script(script, ASCEND_GRAD_NUM_THREADS="1").stdout


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(28, "No space left on device"), 2, "error: No space left on device"),
        (PermissionError(13, "Permission denied", "x.npy"), 2, "error: x.npy: Permission denied"),
        (MemoryError("2 TiB"), 2, "error: out of memory: 2 TiB"),
        (ag.ParamInvalidError("two\nlines"), 2, "error: two lines"),
    ],
)
def test_failures_are_one_line_and_a_status(error, status, message, monkeypatch, capsys):
    def fail(args):
        raise error

    monkeypatch.setattr(info, "run", fail)
    assert main(["info"]) == status
    assert capsys.readouterr() == ("", f"ascend-grad info: {message}\n")


def test_an_ignored_signal_stays_ignored(monkeypatch):
    seen = []

    def look(args):
        seen.extend(signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM))
        return 0

    monkeypatch.setattr(info, "run", look)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert main(["info"]) == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert seen[0] is signal.SIG_IGN
    assert callable(seen[1])


def test_it_runs_outside_the_main_thread(capsys):
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(main, ["info"]).result() == 0


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch):
    def fail(args):
        raise AssertionError

    monkeypatch.setattr(demo, "run", fail)
    with pytest.raises(AssertionError):
        main(["demo"])


def test_there_may_be_no_output_at_all(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["info"]) == 0


def in_a_shell(command: str, folder: Path) -> tuple[int, str, str]:
    """Run a command, which may have redirections, in a shell, and return its exit status, stdout and stderr."""
    line = f"{sys.executable} -P -m ascend_grad {command}"
    result = subprocess.run(["bash", "-c", line], cwd=folder, capture_output=True, text=True)
    return result.returncode, result.stdout, result.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&-", "<&- >&- 2>&-"])
def test_streams_may_be_closed(closed, tmp_path):
    """Closed standard streams do no harm.

    The file of a result could otherwise get the number of a closed stream, and receive the printed text.
    """
    np.save(tmp_path / "x.npy", np.zeros(4))
    status, out, err = in_a_shell(f"apply softmax --input x.npy -o y.npy {closed}", tmp_path)
    assert (status, err) == (0, "")
    assert out.startswith("y.npy: ") == (">&-" not in closed.split())
    assert np.array_equal(np.load(tmp_path / "y.npy"), np.full(4, 0.25))


@pytest.fixture(params=["", "1"])
def buffering(request, monkeypatch) -> None:
    """Let Python write output at the end ('') or at once ('1')."""
    monkeypatch.setenv("PYTHONUNBUFFERED", request.param)


@pytest.mark.usefixtures("buffering")
@pytest.mark.parametrize("stderr", ["2>&-", "2>/dev/full"])
@pytest.mark.parametrize("command", ["apply softmax --input absent.npy -o y.npy", "apply softmax --inputs", "nothing"])
def test_an_error_that_nobody_can_read(command, stderr, tmp_path):
    assert in_a_shell(f"{command} {stderr}", tmp_path) == (2, "", "")


def test_an_error_that_an_older_argparse_cannot_write(monkeypatch):
    """Before Python 3.11.4, argparse raises the error of a stream."""

    def write(self, message, file=None):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(argparse.ArgumentParser, "_print_message", write)
    assert main(["nothing"]) == 2


@pytest.mark.usefixtures("buffering")
def test_a_report_that_cannot_be_written(tmp_path):
    error = "ascend-grad info: error: standard output: No space left on device\n"
    assert in_a_shell("info > /dev/full", tmp_path) == (2, "", error)


@pytest.mark.usefixtures("buffering")
def test_a_result_whose_report_cannot_be_written(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros(4))
    status, _, err = in_a_shell("apply softmax --input x.npy -o y.npy > /dev/full", tmp_path)
    assert (status, err) == (2, "ascend-grad apply: error: standard output: No space left on device\n")
    assert np.array_equal(np.load(tmp_path / "y.npy"), np.full(4, 0.25))


def test_a_name_that_the_encoding_of_stdout_does_not_have(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    np.save(tmp_path / "x.npy", np.zeros(4))
    status, out, err = in_a_shell("apply softmax --input x.npy -o é.npy", tmp_path)
    assert (status, err) == (0, "")
    assert out.startswith(r"\xe9.npy: float64 (4,)")


def test_a_backend_that_cannot_be_used_is_told_before_anything_is_measured(capsys):
    for argv in (["bench", "--quick"], ["bench", "accuracy"]):
        with ag.use_backend("npu"):
            assert main(argv) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.usefixtures("buffering")
def test_a_reader_that_goes_away_is_no_error(tmp_path):
    reader = f"{sys.executable} -m ascend_grad info --json | head -c 1 > /dev/null; echo ${{PIPESTATUS[0]}}"
    # The output is shorter than a pipe's buffer. The timing decides whether the writer notices the closed pipe.
    result = subprocess.run(["bash", "-c", reader], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert result.stderr == ""
    assert result.stdout.strip() in ("0", "141")
