"""``ascend-grad apply`` on directories of ``.npy`` files: one result for each, and what a killed run leaves."""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from files import assert_same_file, refused, sparse, values
from processes import start
from samples import ARRAYS, BFLOAT16, DTYPES, MASKED

import ascend_grad as ag
from ascend_grad.cli import new_directories
from ascend_grad.cli.main import main

pytestmark = pytest.mark.usefixtures("here")

SHAPES = {"a.npy": (3, 2, 5, 7), "b.npy": (1, 2, 4, 3), "c d.npy": (2, 1, 1, 9)}
PART = ".out.ascend-grad-part"


def save_directories(operator: str, dtype: np.dtype = DTYPES["float32"]) -> tuple[list[str], dict[str, dict]]:
    """Directories named after arguments, and what is in their files."""
    arguments = {file: values(operator, shape, dtype) for file, shape in SHAPES.items()}
    options = []
    for name in ARRAYS[operator]:
        Path(name).mkdir()
        for file, arrays in arguments.items():
            np.save(f"{name}/{file}", arrays[name])
        options += [f"--{name.replace('_', '-')}", name]
    return options, arguments


def assert_right(operator: str, arguments: dict[str, dict], path: str = "out", **settings) -> None:
    assert sorted(os.listdir(path)) == sorted([*arguments, new_directories.RECORD])
    for file, arrays in arguments.items():
        assert_same_file(getattr(ag, operator)(**arrays, **settings), f"{path}/{file}")


def stamps(path: str) -> dict[str, int]:
    """When the files of a directory were written."""
    return {name: os.stat(f"{path}/{name}").st_mtime_ns for name in os.listdir(path) if name.endswith(".npy")}


def computed(capsys) -> int:
    """How many results the command says that it computed."""
    line = capsys.readouterr().out
    return int(line.split(" arrays, ")[1].split()[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operator", ARRAYS)
def test_every_operator(operator, dtype, capsys):
    options, arguments = save_directories(operator, DTYPES[dtype])
    raw = ["--dtype", "bfloat16"] if dtype == "bfloat16" else []
    assert main(["apply", operator, *options, *raw, "-o", "out"]) == 0
    assert_right(operator, arguments)
    assert not os.path.exists(PART)
    assert capsys.readouterr().out.startswith("out: 3 arrays, 3 of them computed and written in ")


@pytest.mark.parametrize("path", ["out/", "./out", "deep/out"])
def test_the_name_of_the_directory(path):
    Path("deep").mkdir()
    options, arguments = save_directories("softmax")
    assert main(["apply", "softmax", *options, "--dim", "1", "--out-dtype", "float64", "-o", path]) == 0
    for file, arrays in arguments.items():
        out = np.empty(arrays["input"].shape)
        assert_same_file(ag.softmax(**arrays, dim=1, out=out), f"{path}/{file}")


@pytest.mark.parametrize("operator", MASKED)
def test_a_file_serves_all_files_of_a_directory(operator):
    options, arguments = save_directories(operator)
    mask = np.arange(7).reshape(1, 1, 1, 7) % 2 == 0
    np.save("mask.npy", mask)
    for file in ("b.npy", "c d.npy"):
        del arguments[file]
        for name in ARRAYS[operator]:
            os.unlink(f"{name}/{file}")
    for arrays in arguments.values():
        arrays["mask"] = np.broadcast_to(mask, (1, 1, *arrays[ARRAYS[operator][0]].shape[2:]))
        np.save("mask.npy", arrays["mask"])
    options[options.index("mask")] = "mask.npy"
    assert main(["apply", operator, *options, "-o", "out"]) == 0
    assert_right(operator, arguments)


def test_other_files_are_left_alone():
    options, arguments = save_directories("softmax")
    Path("input/README").write_text("")
    Path("input/.hidden.npy").write_text("")
    Path("input/deeper").mkdir()
    assert main(["apply", "softmax", *options, "-o", "out"]) == 0
    assert_right("softmax", arguments)


# ---- once more -------------------------------------------------------------------------------------------------------


def test_what_is_there_is_not_computed_again(capsys):
    options, arguments = save_directories("softmax")
    command = ["apply", "softmax", *options, "-o", "out"]
    assert main(command) == 0
    before = stamps("out")
    capsys.readouterr()
    assert main(command) == 0
    assert computed(capsys) == 0
    assert stamps("out") == before
    assert_right("softmax", arguments)


class Interrupted(Exception):
    pass


def interrupt(*args, **kwargs):
    raise Interrupted


@pytest.fixture
def interrupted(monkeypatch):
    """The command of a softmax on three files, ended when it computes the last one; and its arguments."""
    options, arguments = save_directories("softmax")
    command = ["apply", "softmax", *options, "-o", "out"]
    right = ag.softmax

    @functools.wraps(right)
    def softmax(x, *args, **kwargs):
        if x.shape == SHAPES["c d.npy"]:
            raise Interrupted
        return right(x, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(ag, "softmax", softmax)
        with pytest.raises(Interrupted):
            main(command)
    assert sorted(os.listdir()) == sorted([PART, "input"])
    assert set(stamps(f"{PART}/out")) == {"a.npy", "b.npy"}
    return command, arguments


def test_a_run_goes_on_where_another_was_ended(interrupted, capsys):
    command, arguments = interrupted
    before = stamps(f"{PART}/out")
    assert main(command) == 0
    assert computed(capsys) == 1
    assert before.items() <= stamps("out").items()
    assert_right("softmax", arguments)
    assert sorted(os.listdir()) == ["input", "out"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--dim", "0"], "was begun with dim -1, not 0"),
        (["--out-dtype", "float64"], 'was begun with out-dtype null, not "float64"'),
        (["--backend", "reference"], 'was begun with backend null, not "reference"'),
        (["--input", "moved"], "was begun with inputs"),
    ],
)
def test_other_options_are_refused(interrupted, options, text, capsys):
    command, _ = interrupted
    shutil.copytree("input", "moved")
    message = refused(capsys, *command[1:-2], *options, "-o", "out")
    assert text in message
    assert message.endswith(f"remove {os.path.realpath(PART)} to begin anew")


def test_other_threads_are_not_other_options(interrupted, capsys):
    command, arguments = interrupted
    assert main([*command, "--threads", "2"]) == 0
    assert computed(capsys) == 1
    assert_right("softmax", arguments)


def test_a_file_that_has_changed_is_computed_again(interrupted, capsys):
    command, arguments = interrupted
    arguments["a.npy"]["input"] = arguments["a.npy"]["input"] + 1
    np.save("input/a.npy", arguments["a.npy"]["input"])
    assert main(command) == 0
    assert computed(capsys) == 2
    assert_right("softmax", arguments)


def test_a_mask_for_all_files_that_has_changed(capsys):
    """It is a member of a file, whose name has to be told from the member's."""
    Path("x").mkdir()
    x, mask = np.zeros((1, 1, 2, 2), np.float32), np.zeros((1, 1, 2, 2), bool)
    np.save("x/a.npy", x)
    np.savez("m.npz", mask=mask)
    command = ["apply", "scaled_masked_softmax", "--x", "x", "--mask", "m.npz:mask", "-o", "out"]
    assert main(command) == 0
    capsys.readouterr()
    mask[..., 0] = True
    np.savez("m.npz", mask=mask)
    assert "was computed from other files" in refused(capsys, *command[1:])


def test_a_file_that_is_gone_when_the_result_is_complete(capsys):
    options, _ = save_directories("softmax")
    command = ["apply", "softmax", *options, "-o", "out"]
    assert main(command) == 0
    capsys.readouterr()
    os.unlink("input/a.npy")
    assert "a.npy has no input any more" in refused(capsys, *command[1:])


def test_files_may_come_and_go_in_between(interrupted, capsys):
    command, arguments = interrupted
    os.rename("input/a.npy", "input/e.npy")
    arguments["e.npy"] = arguments.pop("a.npy")
    assert main(command) == 0
    assert computed(capsys) == 2
    assert_right("softmax", arguments)


def test_a_file_that_went_and_came_back(interrupted, monkeypatch, capsys):
    command, arguments = interrupted
    os.rename("input/a.npy", "a.npy")
    with monkeypatch.context() as patch:
        patch.setattr(new_directories, "_compute_missing", interrupt)
        with pytest.raises(Interrupted):
            main(command)
    assert set(stamps(f"{PART}/out")) == {"b.npy"}
    os.rename("a.npy", "input/a.npy")
    assert main(command) == 0
    assert computed(capsys) == 2
    assert_right("softmax", arguments)


def test_where_nothing_was_finished_other_options_begin_anew(interrupted, capsys):
    command, arguments = interrupted
    record = Path(PART, "out", new_directories.RECORD)
    record.write_text(record.read_text().splitlines(keepends=True)[0])
    assert main([*command, "--dim", "1"]) == 0
    assert computed(capsys) == 3
    assert_right("softmax", arguments, dim=1)
    assert main([*command, "--dim", "1"]) == 0


def test_a_record_whose_last_line_was_cut(interrupted, capsys):
    command, arguments = interrupted
    record = Path(PART, "out", new_directories.RECORD)
    record.write_bytes(record.read_bytes()[:-3])
    Path(PART, "out", ".ascend-grad-0123.part").write_bytes(b"half")
    assert main(command) == 0
    assert computed(capsys) == 2
    assert_right("softmax", arguments)


def test_a_record_that_is_damaged(interrupted, capsys):
    command, _ = interrupted
    Path(PART, "out", new_directories.RECORD).write_bytes(bytes(20) + b"\n")
    assert "damaged; remove" in refused(capsys, *command[1:])


def test_a_result_that_is_there_is_never_replaced(capsys):
    options, _ = save_directories("softmax")
    command = ["softmax", *options, "-o", "out"]
    Path("out").mkdir()
    assert "out: is there already, and was not written by this command" in refused(capsys, *command)
    os.rmdir("out")
    Path("out").write_text("")
    assert "out: is there already, and was not written by this command" in refused(capsys, *command)
    os.unlink("out")
    assert main(["apply", *command]) == 0
    capsys.readouterr()
    assert "was begun with dim -1, not 0; name another directory" in refused(capsys, *command, "--dim", "0")
    os.rename("input/b.npy", "b.npy")
    assert "is there already, and b.npy has no input any more" in refused(capsys, *command)
    os.rename("b.npy", "input/b.npy")
    np.save("input/a.npy", np.zeros(3))
    assert "is there already, and a.npy was computed from other files" in refused(capsys, *command)
    np.save("input/new.npy", np.zeros(3))
    assert "is there already, and new.npy is not in it" in refused(capsys, *command)


def test_two_runs_at_once(interrupted, capsys):
    command, arguments = interrupted
    with new_directories._locked("out", f"{PART}/out"):
        assert "out: another run is at work on it" in refused(capsys, *command[1:])
    assert main(command) == 0
    assert_right("softmax", arguments)


@pytest.mark.parametrize("moment", ["makedirs", "open", "lock"])
def test_another_run_ends_meanwhile(moment, monkeypatch, capsys):
    """After this one has seen that there is no result, and before it has the lock, or the file that is locked."""
    options, arguments = save_directories("softmax")
    command = ["apply", "softmax", *options, "-o", "out"]
    original, flock = os.makedirs, fcntl.flock

    def lock(*args):
        """Another run that failed, before it had finished anything, has removed what this one has opened."""
        shutil.rmtree(PART)
        flock(*args)

    if moment == "lock":
        monkeypatch.setattr(fcntl, "flock", lock)
        assert main(command) == 2
        assert "out: another run is at work on it" in capsys.readouterr().err
        return

    def makedirs(path, **kwargs):
        monkeypatch.setattr(os, "makedirs", original)
        if moment == "makedirs":
            assert main(command) == 0
        original(path, **kwargs)
        if moment == "open":
            assert main(command) == 0

    monkeypatch.setattr(os, "makedirs", makedirs)
    if moment == "makedirs":
        assert main(command) == 0
        assert " 0 of them computed" in capsys.readouterr().out
    else:
        assert main(command) == 2
        assert "out: another run is at work on it" in capsys.readouterr().err
    assert_right("softmax", arguments)
    assert not os.path.exists(PART)


def wait_for(name: str, process) -> None:
    while not os.path.exists(name):
        assert process.poll() is None
        time.sleep(0.005)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_run_leaves_nothing_half_written(number):
    Path("input").mkdir()
    small = np.linspace(0, 1, 50)
    np.save("input/a.npy", small)
    sparse("input/b.npy", (200, 500_000))
    # The reference is slow enough to be caught at work.
    command = ("apply", "softmax", "--input", "input", "--backend", "reference", "-o", "out")
    process = start(*command)
    wait_for(f"{PART}/out/a.npy", process)
    while not any(name.endswith(".part") for name in os.listdir(f"{PART}/out")):
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode in (-number, 128 + number)
    assert sorted(os.listdir()) == [PART, "input"]
    before = stamps(f"{PART}/out")
    assert set(before) == {"a.npy"}
    sparse("input/b.npy", (2, 5))
    assert main(list(command)) == 0
    assert before.items() <= stamps("out").items()
    assert_right(
        "softmax", {"a.npy": {"input": small}, "b.npy": {"input": np.zeros((2, 5), "f4")}}, backend="reference"
    )


def test_a_failure_before_anything_is_finished_leaves_nothing(monkeypatch, capsys):
    options, _ = save_directories("softmax")

    def fail(*args, **kwargs):
        raise MemoryError("no memory")

    monkeypatch.setattr(ag, "softmax", fail)
    assert "no memory" in refused(capsys, "softmax", *options, "-o", "out")


def test_what_was_written_is_synced_before_it_is_recorded(monkeypatch):
    options, _ = save_directories("softmax")
    events, fsync, rename = [], os.fsync, os.rename

    def synced(descriptor):
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", lambda *names: events.append("renamed") or rename(*names))
    assert main(["apply", "softmax", *options, "-o", "out"]) == 0
    first = events.index("a.npy")
    assert new_directories.RECORD in events[first:]
    assert events[first:].index(new_directories.RECORD) < events[first:].index("b.npy")
    assert events.index("renamed") > max(i for i, name in enumerate(events) if name == "c d.npy")
    assert len(events) > events.index("renamed") + 1  # the directory that has the new name


# ---- refused ---------------------------------------------------------------------------------------------------------


def test_files_that_are_not_in_all_directories(capsys):
    options, _ = save_directories("softmax_backward")
    os.unlink("output/b.npy")
    message = refused(capsys, "softmax_backward", *options, "-o", "out")
    assert message == "output: expected the files that grad_output has; b.npy is in grad_output alone"
    os.unlink("grad_output/b.npy")
    np.save("output/z.npy", np.zeros(3))
    message = refused(capsys, "softmax_backward", *options, "-o", "out")
    assert message == "output: expected the files that grad_output has; z.npy is in output alone"


def test_directories_without_files(capsys):
    Path("empty").mkdir()
    assert refused(capsys, "softmax", "--input", "empty", "-o", "out") == "empty: no .npy file in this directory"


@pytest.mark.parametrize(
    ("array", "options", "text"),
    [
        (np.zeros(3, int), (), "b.npy: softmax: input: expected dtype float32"),
        (np.zeros(3), ("--dim", "1"), "b.npy: softmax: dim: expected a value in [-1, 0], got 1"),
        (np.zeros(3, BFLOAT16), (), "input/b.npy: elements of 2 raw bytes; if this is bfloat16, add --dtype bfloat16"),
        (np.zeros(3), ("--dtype", "bfloat16"), "--dtype bfloat16 is for elements of 2 raw bytes, these are float"),
        (np.zeros(3), ("--backend", "npu"), "b.npy: softmax: backend 'npu'"),
    ],
)
def test_every_file_is_looked_at_before_anything_is_written(array, options, text, capsys):
    Path("input").mkdir()
    if "npu" not in options:
        np.save("input/a.npy", np.zeros((2, 2)))
    np.save("input/b.npy", array)
    assert text in refused(capsys, "softmax", "--input", "input", *options, "-o", "out")


def test_a_directory_that_is_called_as_a_file(capsys):
    Path("input").mkdir()
    np.save("input/fifo.npy", np.zeros(3))
    Path("input/a.npy").mkdir()
    assert "input/a.npy: not a regular file" in refused(capsys, "softmax", "--input", "input", "-o", "out")


@pytest.mark.parametrize(
    ("out", "text"),
    [
        ("out.npy", "out.npy: names a file, and the result of a directory is a directory"),
        ("absent/out", "absent/out: there is no directory"),
        ("input", "input: is there already"),
        ("", "is there already"),
        ("x" * 300, "File name too long"),
    ],
)
def test_results_that_cannot_be_written(out, text, capsys):
    options, _ = save_directories("softmax")
    assert text in refused(capsys, "softmax", *options, "-o", out)


def test_linear_operators_take_files_alone(capsys):
    Path("x").mkdir()
    np.save("y.npy", np.zeros(3))
    names = ("--logits-max", "x", "--sum-exp-logits", "y.npy", "--predicted-logits", "y.npy", "--loss-out", "loss")
    message = refused(capsys, "fused_cross_entropy_loss_with_max_sum", *names)
    assert message == "fused_cross_entropy_loss_with_max_sum: directories and Zarr arrays are for row-wise operators"
