"""Test repeated runs of ``ascend-grad apply`` on Zarr arrays.

A run goes on where another one was ended, a result has its name when it is complete, and nobody else can write to it
before.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import zarr
from files import everything_here, refused, values
from processes import end_stopped, stopped
from zarr_files import PART, Interrupted, assert_identical, before_call, chunk_files, save_zarr

import ascend_grad as ag
from ascend_grad.cli.main import main

pytestmark = pytest.mark.usefixtures("here", "small_parts")


@pytest.fixture(params=[2, 3])
def interrupted(request, monkeypatch):
    """Interrupt a softmax of three parts before it computes the last one, and return the command and the input."""
    x = values("softmax", (5, 6), np.float32)["input"]
    save_zarr("x", x, (2, 4), zarr_format=request.param)
    command = ["apply", "softmax", "--input", "x", "-o", "out"]
    with monkeypatch.context() as patch:
        patch.setattr(ag, "softmax", before_call(3, ag.softmax))
        with pytest.raises(Interrupted):
            main([*command, "--threads", "1"])
    assert sorted(os.listdir()) == [PART, "x"]
    return command, x


@pytest.fixture
def complete(capsys):
    """Compute a softmax of three parts, and return the command and the input."""
    x = values("softmax", (5, 6), np.float32)["input"]
    save_zarr("x", x, (2, 4))
    command = ["apply", "softmax", "--input", "x", "-o", "out"]
    assert main(command) == 0
    capsys.readouterr()
    return command, x


def computed(capsys) -> str:
    """Return the number of parts that the command says it computed."""
    return capsys.readouterr().out.split(", ")[-1].split(" parts")[0]


def test_a_run_goes_on_where_another_was_ended(interrupted, capsys):
    command, x = interrupted
    before = chunk_files(f"{PART}/out")
    assert len(before) == 4
    assert main(command) == 0
    assert computed(capsys) == "1 of 3"
    assert before.items() <= chunk_files("out").items()
    assert sorted(os.listdir()) == ["out", "x"]
    assert_identical("out", ag.softmax(x))
    after = everything_here()
    assert main([*command[:-3], "./x/", "-o", "./out/"]) == 0
    assert computed(capsys) == "0 of 3"
    assert everything_here() == after


@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_part_that_has_lost_a_chunk_is_computed_again(change, interrupted, capsys):
    command, x = interrupted
    name = next(iter(chunk_files(f"{PART}/out")))
    change(Path(PART, "out", name))
    assert main(command) == 0
    assert computed(capsys) == "2 of 3"
    assert_identical("out", ag.softmax(x))


def test_inputs_that_have_changed_since(interrupted, capsys):
    command, x = interrupted
    zarr.open_array("x", mode="r+")[2:4] = 1
    text = f"was started with inputs that have changed since; remove {os.path.realpath(PART)} to start again"
    assert refused(capsys, *command[1:]).endswith(text)
    shutil.rmtree(PART)
    assert main(command) == 0
    x[2:4] = 1
    assert_identical("out", ag.softmax(x))
    zarr.open_array("x", mode="r+")[0, 0] = 0
    capsys.readouterr()
    text = "out: was started with inputs that have changed since; name another result, or remove this one"
    assert refused(capsys, *command[1:]) == text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--dim", "0"), "was started with axis -1, not 0"),
        (("--out-dtype", "float64"), 'was started with out-dtype null, not "float64"'),
        (("--backend", "reference"), 'was started with backend null, not "reference"'),
        (("--input", "moved"), "was started with inputs"),
    ],
)
def test_other_options_are_refused(interrupted, options, text, capsys):
    command, _ = interrupted
    shutil.copytree("x", "moved")
    message = refused(capsys, *command[1:], *options)
    assert text in message
    assert message.endswith(f"; remove {os.path.realpath(PART)} to start again")


def test_a_complete_result_of_other_options(complete, capsys):
    command, _ = complete
    text = "out: was started with axis -1, not 0; name another result, or remove this one"
    assert refused(capsys, *command[1:], "--dim", "0") == text


@pytest.mark.parametrize("shards", [None, (4, 6)])
def test_a_complete_result_that_has_lost_a_chunk(shards, capsys):
    """A missing chunk would be read as fill values."""
    x = values("softmax", (9, 10), np.float32)["input"]
    save_zarr("x", x, (2, 2), shards=shards)
    assert main(["apply", "softmax", "--input", "x", "-o", "out"]) == 0
    assert main(["apply", "softmax", "--input", "out", "-o", "again"]) == 0
    capsys.readouterr()
    os.unlink("out/c/1/1")
    text = "out: exists, and lacks a chunk; name another result, or remove this one"
    assert refused(capsys, "softmax", "--input", "x", "-o", "out") == text
    message = refused(capsys, "softmax", "--input", "out", "-o", "another")
    assert message == "out: chunk c/1/1 is missing, and ascend-grad had written all chunks"


def test_a_link_to_a_complete_result(complete, capsys):
    command, _ = complete
    Path("out").rename("real")
    Path("out").symlink_to("real")
    assert main(command) == 0
    assert computed(capsys) == "0 of 3"


@pytest.mark.parametrize("attribute", ["", "7", "[]", "{"])
def test_a_damaged_attribute_of_a_complete_result(attribute, complete, capsys):
    command, _ = complete
    zarr.open_array("out", mode="r+").attrs["ascend_grad"] = attribute
    message = refused(capsys, *command[1:])
    assert message == "out: a damaged attribute ascend_grad; name another result, or remove this one"


# ---- runs that end early ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "name", "call", "finished"),
    [
        ("ascend_grad", "softmax", 1, 0),
        ("ascend_grad", "softmax", 3, 2),
        ("os", "replace", 2, 1),
        ("os", "rename", 1, 3),
    ],
)
def test_a_killed_run_leaves_nothing_half_written(owner, name, call, finished, capsys):
    zarr.create_array("x", shape=(3, 2**22), dtype="f4", chunks=(1, 2**22))  # parts of 16 MiB
    command = ("apply", "softmax", "--input", "x", "-o", "out")
    with stopped(owner, name, call, *command, "--threads", "1") as process:
        process.kill()
        process.communicate()
    assert sorted(os.listdir()) == [PART, "x"]
    before = {key: time for key, time in chunk_files(f"{PART}/out").items() if not key.endswith(".partial")}
    # Another worker's thread may not have ended its call before this one, or may run on for a moment.
    assert abs(len(before) - finished) <= 1
    assert main(list(command)) == 0
    assert computed(capsys) == f"{3 - len(before)} of 3"
    assert before.items() <= chunk_files("out").items()
    assert set(chunk_files("out")) == {f"c/{i}/0" for i in range(3)}
    assert sorted(os.listdir()) == ["out", "x"]
    assert_identical("out", np.full((3, 2**22), 2**-22, np.float32))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_what_is_finished(number, capsys):
    zarr.create_array("x", shape=(3, 2**22), dtype="f4", chunks=(1, 2**22))
    command = ("apply", "softmax", "--input", "x", "-o", "out")
    with stopped("ascend_grad", "softmax", 2, *command, "--threads", "1") as process:
        _, err = end_stopped(process, number)
    assert (process.returncode, err.count("\n")) == (128 + number, 1)
    before = chunk_files(f"{PART}/out")
    assert len(before) in (2, 3)  # the part that was at work is finished
    assert main(list(command)) == 0
    assert computed(capsys) == f"{3 - len(before)} of 3"
    assert before.items() <= chunk_files("out").items()


@pytest.mark.parametrize("when", ["computing", "naming"])
def test_a_failure_before_anything_is_finished_leaves_nothing(when, monkeypatch, capsys):
    save_zarr("x", np.zeros((2, 6)), (2, 6))

    def fail(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    target = {"computing": (ag, "softmax"), "naming": (os, "replace")}[when]
    monkeypatch.setattr(*target, functools.wraps(getattr(*target))(fail))
    message = refused(capsys, "softmax", "--input", "x", "-o", "out")
    assert message == ("" if when == "computing" else "out: cannot be written: ") + "No space left on device"


def test_a_full_disk_leaves_what_is_finished(run_script):
    x = values("softmax", (2, 2**21), np.float64)["input"]
    x[1] = 0
    save_zarr("x", x, (1, 2**21))
    script = """
        import resource, sys
        resource.setrlimit(resource.RLIMIT_FSIZE, ({0}, {0}))
        from ascend_grad.cli.main import main
        sys.exit(main(["apply", "softmax", "--input", "x", "--threads", "1", "-o", "out"]))
        """
    result = run_script(script.format(20_000), check=False)
    assert result.returncode == 2
    assert result.stderr == "ascend-grad apply: error: out: cannot be written: File too large\n"
    assert sorted(os.listdir()) == [PART, "x"]
    assert "1 of 2 parts computed" in run_script(script.format(10**8)).stdout
    assert_identical("out", ag.softmax(x))


# ---- two runs at once ------------------------------------------------------------------------------------------------


def test_two_runs_at_once(interrupted, capsys):
    command, x = interrupted
    with open(f"{PART}/lock", "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # a lock that is not exclusive would allow this shared one
        assert refused(capsys, *command[1:]) == "out: another run is writing it"
    assert main(command) == 0
    assert_identical("out", ag.softmax(x))


def test_another_run_ends_meanwhile(monkeypatch, capsys):
    """A run fails if another run creates the result after this run's first check."""
    x = values("softmax", (5, 6), np.float32)["input"]
    save_zarr("x", x, (2, 4))
    command = ["apply", "softmax", "--input", "x", "-o", "out"]
    mkdir = os.mkdir

    def made(path, mode=0o777, **settings):
        patch.setattr(os, "mkdir", mkdir)
        assert main(command) == 0
        mkdir(path, mode, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", made)
        assert main(command) == 2
    assert capsys.readouterr().err == "ascend-grad apply: error: out: another run has written it\n"
    assert sorted(os.listdir()) == ["out", "x"]
    assert_identical("out", ag.softmax(x))


def test_a_directory_that_appears_meanwhile_is_not_replaced(monkeypatch, capsys):
    x = values("softmax", (5, 6), np.float32)["input"]
    save_zarr("x", x, (2, 4))
    command = ["apply", "softmax", "--input", "x", "-o", "out"]
    with monkeypatch.context() as patch:
        patch.setattr(ag, "softmax", before_call(2, ag.softmax, Path("out").mkdir))
        assert main(command) == 2
    assert capsys.readouterr() == (
        "",
        "ascend-grad apply: error: out: was created by another process, and is not replaced\n",
    )
    assert os.listdir("out") == []
    Path("out").rmdir()
    assert main(command) == 0
    assert computed(capsys) == "0 of 3"
    assert_identical("out", ag.softmax(x))


def test_a_file_system_without_locks(monkeypatch, capsys):
    def no_locks(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    save_zarr("x", np.zeros((2, 6)), (2, 6))
    monkeypatch.setattr(fcntl, "flock", no_locks)
    message = refused(capsys, "softmax", "--input", "x", "-o", "out")
    assert message == "out: cannot be written: No locks available"


# ---- in a directory where others can write ---------------------------------------------------------------------------


def test_a_directory_of_another_user_is_not_used(capsys):
    if os.geteuid() != 0:
        pytest.skip("only root may give it to others")
    save_zarr("x", np.zeros((5, 6)), (2, 4))
    Path(PART).mkdir(0o700)
    os.chown(PART, 12345, 12345)
    assert "expected a directory that only this user can access" in refused(
        capsys, "softmax", "--input", "x", "-o", "out"
    )


@pytest.mark.parametrize("mode", [0o777, 0o701, 0o710, 0o740])
def test_a_hidden_directory_that_others_can_use_is_refused(mode, interrupted, capsys):
    command, _ = interrupted
    os.chmod(PART, mode)
    text = f"{os.path.realpath(PART)}: expected a directory that only this user can access; remove it to start again"
    assert refused(capsys, *command[1:]) == text


@pytest.mark.parametrize("kind", ["link", "file"])
def test_what_is_no_directory_is_not_used(kind, interrupted, capsys):
    command, _ = interrupted
    Path(PART).rename("elsewhere")
    Path(PART).symlink_to("elsewhere") if kind == "link" else Path(PART).write_bytes(b"planted")
    assert "expected a directory that only this user can access" in refused(capsys, *command[1:])


def test_nobody_else_can_write_to_what_is_not_finished(interrupted):
    assert os.stat(PART).st_mode & 0o777 == 0o700
    command, _ = interrupted
    Path("model").mkdir()
    assert main(command) == 0
    assert os.stat("out").st_mode == os.stat("model").st_mode
