"""Test ``ascend-grad apply`` on Zarr arrays.

A result has the bits of one call and the chunks of the input, and has its name when it is complete.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import itertools
import json
import os
import pickle
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr
from files import everything_here, peak_anonymous_bytes, refused, values
from processes import end_stopped, stopped
from samples import ARRAYS, BFLOAT16, DTYPES, MASKED
from zarr_files import assert_identical, chunk_files, save_zarr

import ascend_grad as ag
from ascend_grad.cli import apply_zarr
from ascend_grad.cli.main import main

pytestmark = [
    pytest.mark.usefixtures("here", "small_parts"),
    pytest.mark.filterwarnings("ignore:.*does not have a Zarr V3 specification"),
]
PART = ".out.ascend-grad-part"


@pytest.fixture
def small_parts(monkeypatch) -> None:
    """Let a part be a row of chunks."""
    monkeypatch.setattr(apply_zarr, "BLOCK_BYTES", 1)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


#: Functions that lose or damage a file.
LOSSES = {
    "nothing": Path.unlink,
    "no content": lambda path: path.write_bytes(b""),
    "less": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "more": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "another bit": flip,
    "a directory": lambda path: (path.unlink(), path.mkdir()),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a link": lambda path: (path.rename("elsewhere"), path.symlink_to(Path("elsewhere").absolute())),
}


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operator", ARRAYS)
def test_every_operator(operator, dtype, zarr_format, capsys):
    arguments = values(operator, (3, 2, 5, 7), DTYPES[dtype])
    options = ["--dtype", "bfloat16"] if dtype == "bfloat16" else []
    for name, array in arguments.items():
        save_zarr(name, array, tuple(min(n, m) for n, m in zip(array.shape, (2, 1, 3, 4))), zarr_format=zarr_format)
        options += [f"--{name.replace('_', '-')}", name]
    assert main(["apply", operator, *options, "-o", "out"]) == 0
    assert_identical("out", getattr(ag, operator)(**arguments))
    result = zarr.open_array("out", mode="r")
    assert (result.chunks, result.metadata.zarr_format) == ((2, 1, 3, 4), zarr_format)
    assert not os.path.exists(PART)
    assert "(3, 2, 5, 7), 8 of 8 parts computed and written in " in capsys.readouterr().out


@pytest.mark.parametrize("shape", [(), (0,), (5,), (0, 3), (3, 0), (4, 1, 6)])
def test_any_shape(shape):
    x = values("softmax", shape, np.float32)["input"]
    save_zarr("x", np.asarray(x), tuple(min(max(n, 1), 2) for n in shape))
    for dim in {0, -1}:
        assert main(["apply", "softmax", "--input", "x", "--dim", str(dim), "-o", f"out{dim}"]) == 0
        assert_identical(f"out{dim}", ag.softmax(x, dim))


def test_shards_and_names_of_dimensions_are_kept():
    x = values("softmax", (9, 10), np.float32)["input"]
    save_zarr("x", x, (2, 2), shards=(4, 6), dimension_names=("row", "column"))
    assert main(["apply", "softmax", "--input", "x", "--dim", "0", "-o", "out"]) == 0
    assert_identical("out", ag.softmax(x, 0))
    result = zarr.open_array("out", mode="r")
    assert (result.chunks, result.shards) == ((2, 2), (4, 6))
    assert result.metadata.dimension_names == ("row", "column")
    assert set(chunk_files("out")) == {f"c/{i}/{j}" for i in range(3) for j in range(2)}


@pytest.mark.parametrize("mask_chunks", [(1, 1, 5, 7), (1, 1, 2, 2)])
@pytest.mark.parametrize("mask", [(3, 2), (3, 1), (1, 2), (1, 1)])
@pytest.mark.parametrize("operator", MASKED)
def test_masks_and_other_chunks(operator, mask, mask_chunks):
    arguments = values(operator, (3, 2, 5, 7), np.float64)
    arguments["mask"] = np.arange(np.prod(mask) * 35).reshape(*mask, 5, 7) % 3 == 0
    options = ["--scale", "0.3"]
    for name, array in arguments.items():
        save_zarr(name, array, mask_chunks if name == "mask" else (2, 2, 2, 7))
        options += [f"--{name.replace('_', '-')}", name]
    assert main(["apply", operator, *options, "-o", "out"]) == 0
    assert_identical("out", getattr(ag, operator)(**arguments, scale=0.3))


def test_results_of_another_dtype():
    x = values("softmax", (4, 5), DTYPES["bfloat16"])["input"]
    save_zarr("x", x, (2, 5))
    options = ("--input", "x", "--dtype", "bfloat16")
    assert main(["apply", "softmax", *options, "--out-dtype", "float32", "-o", "wide"]) == 0
    assert_identical("wide", ag.softmax(x, out=np.empty(x.shape, np.float32)))


def test_the_other_byte_order():
    x = values("softmax", (4, 5), np.float32)["input"]
    save_zarr("x", x.astype(">f4"), (2, 5))
    assert main(["apply", "softmax", "--input", "x", "-o", "out"]) == 0
    assert_identical("out", ag.softmax(x))


@pytest.mark.parametrize("stored", ["int16", ">u2"])
def test_bits_of_bfloat16_in_integers(stored):
    x = values("softmax", (4, 5), DTYPES["bfloat16"])["input"]
    save_zarr("x", x.view("u2").astype(stored), (2, 5))
    assert main(["apply", "softmax", "--input", "x", "--dtype", "bfloat16", "-o", "out"]) == 0
    assert_identical("out", ag.softmax(x))


def test_arrays_of_a_group():
    group = zarr.open_group("group", mode="w")
    x = values("softmax", (4, 5), np.float32)["input"]
    group.create_array("x", data=x)
    assert main(["apply", "softmax", "--input", "group/x", "-o", "group/y"]) == 0
    assert sorted(name for name, _ in zarr.open_group("group", mode="r").arrays()) == ["x", "y"]
    assert_identical("group/y", ag.softmax(x))


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("block_bytes", [1, 250, 1000, 10**6])
def test_parts_are_whole_chunks(block_bytes, dim, monkeypatch):
    x = values("softmax", (7, 9, 10), np.float32)["input"]
    save_zarr("x", x, (2, 3, 4))
    monkeypatch.setattr(apply_zarr, "BLOCK_BYTES", block_bytes)
    assert main(["apply", "softmax", "--input", "x", "--dim", str(dim), "-o", "out"]) == 0
    assert_identical("out", ag.softmax(x, dim))


def test_memory_is_that_of_parts():
    """The command needs memory for a few parts of 16 MiB, and not for the array of 512 MiB."""
    zarr.create_array("x", shape=(2**17, 2**10), dtype="f4", chunks=(2**11, 2**9))
    assert peak_anonymous_bytes("softmax", "--input", "x", "--threads", "2", "-o", "out") < 2**28
    assert zarr.open_array("out", mode="r")[-1, -1] == np.float32(2**-10)


# ---- what an input may be --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("separator", [".", "/"])
def test_keys_of_the_second_format(separator):
    x = values("softmax", (5, 6), np.float32)["input"]
    encoding = {"name": "v2", "separator": separator}
    save_zarr("x", x, (2, 4), zarr_format=2, chunk_key_encoding=encoding)
    assert os.path.exists(f"x/2{separator}1")
    assert main(["apply", "softmax", "--input", "x", "-o", "out"]) == 0
    assert_identical("out", ag.softmax(x))


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_missing_chunk_of_an_input_is_one_of_fill_values(zarr_format):
    x = values("softmax", (5, 6), np.float32)["input"]
    save_zarr("x", x, (2, 4), zarr_format=zarr_format, fill_value=2.5)
    os.unlink("x/c/1/1" if zarr_format == 3 else "x/1.1")
    x[2:4, 4:6] = 2.5
    assert main(["apply", "softmax", "--input", "x", "-o", "out"]) == 0
    assert_identical("out", ag.softmax(x))


def test_a_missing_chunk_without_a_fill_value(capsys):
    save_zarr("x", np.ones((5, 6)), (2, 4), zarr_format=2)
    metadata = json.loads(Path("x/.zarray").read_text())
    Path("x/.zarray").write_text(json.dumps(metadata | {"fill_value": None}))
    assert main(["apply", "softmax", "--input", "x", "-o", "whole"]) == 0
    capsys.readouterr()
    os.unlink("x/1.1")
    message = refused(capsys, "softmax", "--input", "x", "-o", "out")
    assert message == "x: chunk 1.1 is missing, and there is no fill value"


def test_chunks_of_fill_values_are_written():
    """Chunks of fill values are written, so that a lost chunk can be noticed."""
    save_zarr("x", np.zeros((5, 6)), (2, 4))
    options = ("--grad-output", "x", "--output", "x")
    assert main(["apply", "softmax_backward", *options, "-o", "out"]) == 0
    assert_identical("out", np.zeros((5, 6)))
    assert set(chunk_files("out")) == {f"c/{i}/{j}" for i in range(3) for j in range(2)}


# ---- repeated runs ---------------------------------------------------------------------------------------------------


class Interrupted(Exception):
    pass


def before_call(number: int, function, action):
    """Return a function that calls `action` before its n-th call."""
    calls = itertools.count(1)

    @functools.wraps(function)
    def counted(*args, **kwargs):
        if next(calls) == number:
            action()
        return function(*args, **kwargs)

    return counted


def interrupt():
    raise Interrupted


@pytest.fixture(params=[2, 3])
def interrupted(request, monkeypatch):
    """Interrupt a softmax of three parts before it computes the last one, and return the command and the input."""
    x = values("softmax", (5, 6), np.float32)["input"]
    save_zarr("x", x, (2, 4), zarr_format=request.param)
    command = ["apply", "softmax", "--input", "x", "-o", "out"]
    with monkeypatch.context() as patch:
        patch.setattr(ag, "softmax", before_call(3, ag.softmax, interrupt))
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
    text = f"was begun with inputs that have changed since; remove {os.path.realpath(PART)} to begin anew"
    assert refused(capsys, *command[1:]).endswith(text)
    shutil.rmtree(PART)
    assert main(command) == 0
    x[2:4] = 1
    assert_identical("out", ag.softmax(x))
    zarr.open_array("x", mode="r+")[0, 0] = 0
    capsys.readouterr()
    text = "out: was begun with inputs that have changed since; name another result, or remove this one"
    assert refused(capsys, *command[1:]) == text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--dim", "0"), "was begun with axis -1, not 0"),
        (("--out-dtype", "float64"), 'was begun with out-dtype null, not "float64"'),
        (("--backend", "reference"), 'was begun with backend null, not "reference"'),
        (("--input", "moved"), "was begun with inputs"),
    ],
)
def test_other_options_are_refused(interrupted, options, text, capsys):
    command, _ = interrupted
    shutil.copytree("x", "moved")
    message = refused(capsys, *command[1:], *options)
    assert text in message
    assert message.endswith(f"; remove {os.path.realpath(PART)} to begin anew")


def test_a_complete_result_of_other_options(complete, capsys):
    command, _ = complete
    text = "out: was begun with axis -1, not 0; name another result, or remove this one"
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
    text = "out: is there already, and has lost a chunk; name another result, or remove this one"
    assert refused(capsys, "softmax", "--input", "x", "-o", "out") == text
    message = refused(capsys, "softmax", "--input", "out", "-o", "another")
    assert message == "out: chunk c/1/1 is missing, and ascend-grad has written all of them"


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
    assert len(before) in (finished, finished + 1)  # a worker's thread may run on for a moment
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


def test_two_runs_at_once(interrupted, capsys):
    command, x = interrupted
    with open(f"{PART}/lock", "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # a lock that is not exclusive would allow this shared one
        assert refused(capsys, *command[1:]) == "out: another run is at work on it"
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
    assert capsys.readouterr().err == "ascend-grad apply: error: out: another run has finished it\n"
    assert sorted(os.listdir()) == ["out", "x"]
    assert_identical("out", ag.softmax(x))


def test_a_directory_that_appears_meanwhile_is_not_replaced(monkeypatch, capsys):
    x = values("softmax", (5, 6), np.float32)["input"]
    save_zarr("x", x, (2, 4))
    command = ["apply", "softmax", "--input", "x", "-o", "out"]
    with monkeypatch.context() as patch:
        patch.setattr(ag, "softmax", before_call(2, ag.softmax, Path("out").mkdir))
        assert main(command) == 2
    assert capsys.readouterr() == ("", "ascend-grad apply: error: out: appeared meanwhile, and is not replaced\n")
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


# ---- in a directory where others can write ---------------------------------------------------------------------------


def test_a_directory_of_another_user_is_not_used(capsys):
    if os.geteuid() != 0:
        pytest.skip("only root may give it to others")
    save_zarr("x", np.zeros((5, 6)), (2, 4))
    Path(PART).mkdir(0o700)
    os.chown(PART, 12345, 12345)
    assert "expected a directory that is this user's alone" in refused(capsys, "softmax", "--input", "x", "-o", "out")


@pytest.mark.parametrize("mode", [0o777, 0o701, 0o710, 0o740])
def test_a_hidden_directory_that_others_can_use_is_refused(mode, interrupted, capsys):
    command, _ = interrupted
    os.chmod(PART, mode)
    text = f"{os.path.realpath(PART)}: expected a directory that is this user's alone; remove it to begin anew"
    assert refused(capsys, *command[1:]) == text


@pytest.mark.parametrize("kind", ["link", "file"])
def test_what_is_no_directory_is_not_used(kind, interrupted, capsys):
    command, _ = interrupted
    Path(PART).rename("elsewhere")
    Path(PART).symlink_to("elsewhere") if kind == "link" else Path(PART).write_bytes(b"planted")
    assert "expected a directory that is this user's alone" in refused(capsys, *command[1:])


def test_nobody_else_can_write_to_what_is_not_finished(interrupted):
    assert os.stat(PART).st_mode & 0o777 == 0o700
    command, _ = interrupted
    Path("model").mkdir()
    assert main(command) == 0
    assert os.stat("out").st_mode == os.stat("model").st_mode


# ---- refused ---------------------------------------------------------------------------------------------------------


def with_metadata(path: str, **changes) -> None:
    """Save an array in the second format, and change its metadata."""
    save_zarr(path, np.zeros(3), (2,), zarr_format=2)
    metadata = json.loads(Path(path, ".zarray").read_text())
    Path(path, ".zarray").write_text(json.dumps(metadata | changes))


METADATA = {
    "pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "device": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    "directory": lambda path: (path.unlink(), path.mkdir()),
    "huge": lambda path: os.truncate(path, 2**40),
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "nested": lambda path: path.write_bytes(b"[" * 100_000),
    "not UTF-8": lambda path: path.write_bytes(b"\xff\xfe"),
    "another type": lambda path: path.write_bytes(b"7"),
}


@pytest.mark.parametrize("damage", METADATA)
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_damaged_metadata(damage, zarr_format, capsys):
    save_zarr("x", np.zeros(3), (2,), zarr_format=zarr_format)
    METADATA[damage](Path("x", "zarr.json" if zarr_format == 3 else ".zarray"))
    assert refused(capsys, "softmax", "--input", "x", "-o", "out").startswith("x")


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [-1]},
        {"shape": [2**63]},
        {"shape": [2**62, 2**62], "chunks": [1, 1]},
        {"shape": ["3"]},
        {"shape": None},
        {"chunks": [0]},
        {"chunks": [2, 2]},
        {"dtype": "|O"},
        {"dtype": "|O", "filters": [{"id": "pickle"}]},
        {"filters": [{"id": "pickle"}]},
        {"compressor": {"id": "pickle"}},
        {"compressor": {"id": "nonsense"}},
        {"zarr_format": 7},
    ],
    ids=str,
)
def test_metadata_that_nothing_can_have(changes, capsys):
    with_metadata("x", **changes)
    Path("x/0").write_bytes(pickle.dumps(Trap()))
    message = refused(capsys, "softmax", "--input", "x", "-o", "out")
    assert message.startswith(("x: not a Zarr array that can be used: ", "softmax: input: expected"))


class Trap:
    def __reduce__(self):
        return exec, ("raise SystemExit('unpickled')",)


def test_a_row_of_chunks_beyond_any_memory(capsys):
    with_metadata("x", shape=[4, 2**50], chunks=[1, 2**10])
    message = refused(capsys, "softmax", "--input", "x", "-o", "out")
    assert message.startswith("out: cannot be computed from x: out of memory")


CODECS = {
    "zstd": {"compressors": zarr.codecs.ZstdCodec(checksum=True)},
    "gzip": {"compressors": zarr.codecs.GzipCodec()},
    "blosc": {"compressors": zarr.codecs.BloscCodec()},
    "checksum": {"compressors": zarr.codecs.Crc32cCodec()},
    "none": {"compressors": None},
    "shards": {"shards": (4, 4)},
    "second format": {"zarr_format": 2},
}


@pytest.mark.parametrize(
    ("codecs", "damage"),
    [
        *((codecs, damage) for codecs in CODECS for damage in ("no content", "less")),
        *((codecs, "another bit") for codecs in ("zstd", "gzip", "checksum", "shards")),  # these codecs have a checksum
    ],
)
def test_a_chunk_that_is_damaged(codecs, damage, capsys):
    x = values("softmax", (4, 4), np.float32)["input"]
    save_zarr("x", x, (2, 4), **CODECS[codecs])
    key = {"second format": "1.0", "shards": "c/0/0"}.get(codecs, "c/1/0")
    LOSSES[damage](Path("x", key))
    message = refused(capsys, "softmax", "--input", "x", "--dim", "0", "-o", "out")
    expected = {"no content": f"x/{key}: an empty file"}.get(damage, "x: cannot be read at [0:4, 0:4]: ")
    if damage == "less" and codecs == "blosc":
        expected = f"x/{key}: a damaged chunk, which had 48 bytes, and has 47"
    assert message.startswith(expected)


@pytest.mark.parametrize("damage", ["pipe", "directory", "device"])
def test_a_chunk_that_is_no_file(damage, capsys):
    save_zarr("x", np.ones((5, 6)), (2, 4))
    METADATA[damage](Path("x/c/0/1"))
    assert refused(capsys, "softmax", "--input", "x", "-o", "out") == "x/c/0/1: not a regular file"


@pytest.mark.parametrize(
    ("out", "text"),
    [
        ("x", "x: is there already, and was not written by this command"),
        ("x/", "x/: is there already, and was not written by this command"),
        ("link", "link: is there already, and was not written by this command"),
        ("file", "file: is there already, and was not written by this command"),
        ("directory", "directory: is there already, and was not written by this command"),
        ("", "is there already, and was not written by this command"),
        ("nowhere", "nowhere: is a link to nothing"),
        ("x/y", "x/y: lies in the input x; inputs are not changed"),
        ("x/c/y", "x/c/y: lies in the input x; inputs are not changed"),
        ("link/y", "link/y: lies in the input x; inputs are not changed"),
        ("absent/out", "absent/out: there is no directory"),
        ("file/out", "file/out: there is no directory"),
        ("/dev/full", "/dev/full: is there already"),
        ("y" * 256, "File name too long"),
        ("y" * 250, "File name too long"),
    ],
)
def test_results_that_cannot_be_written(out, text, capsys):
    save_zarr("x", np.ones(3), (2,))
    os.symlink("x", "link")
    os.symlink("absent", "nowhere")
    Path("file").write_bytes(b"")
    Path("directory").mkdir()
    assert text in refused(capsys, "softmax", "--input", "x", "-o", out)


def test_a_directory_that_is_read_only(capsys):
    os.mkdir("locked", 0o555)
    if os.access("locked", os.W_OK):
        pytest.skip("this user may write everywhere")
    save_zarr("x", np.zeros(3), (2,))
    assert "Permission denied" in refused(capsys, "softmax", "--input", "x", "-o", "locked/out")


@pytest.mark.parametrize("target", [(zarr, "create_array"), (zarr.codecs.ZstdCodec, "_encode_single")])
def test_what_zarr_cannot_write(target, monkeypatch, capsys):
    """Errors that Zarr raises, for example for chunks of 2 GiB, become messages of the command."""
    save_zarr("x", np.zeros(3), (2,))

    def fail(*args, **kwargs):
        raise ValueError("too large")

    monkeypatch.setattr(*target, fail)
    message = refused(capsys, "softmax", "--input", "x", "-o", "out")
    assert message == "out: cannot be encoded as the first input is: too large"


def test_linear_operators_take_files_alone(capsys):
    save_zarr("x", np.zeros(3), (2,))
    np.save("y.npy", np.zeros(3))
    names = ("--logits-max", "x", "--sum-exp-logits", "y.npy", "--predicted-logits", "y.npy", "--loss-out", "loss")
    message = refused(capsys, "fused_cross_entropy_loss_with_max_sum", *names)
    assert message == "fused_cross_entropy_loss_with_max_sum: Zarr arrays are for row-wise operators"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("group", "group: expected a Zarr array, got a group; without arrays"),
        ("members", "members: expected a Zarr array, got a group; name one of its arrays: members/a, members/b/c"),
        ("damaged", "damaged: not a Zarr array that can be used: "),
        ("raw", "raw: elements of 2 raw bytes; if this is bfloat16, add --dtype bfloat16"),
        ("text", "softmax: input: expected dtype float32"),
    ],
)
def test_what_cannot_be_an_input(name, text, capsys):
    zarr.open_group("group", mode="w")
    zarr.open_group("members", mode="w").create_group("b")
    save_zarr("members/a", np.zeros(3), (2,))
    save_zarr("members/b/c", np.zeros(3), (2,))
    save_zarr("raw", np.zeros(3, BFLOAT16), (2,))
    save_zarr("text", np.zeros(3, "S3"), (2,))
    save_zarr("damaged", np.zeros(3), (2,))
    Path("damaged/zarr.json").write_text("{")
    assert text in refused(capsys, "softmax", "--input", name, "-o", "out")


@pytest.mark.parametrize("order", [1, -1])
def test_what_does_not_go_together(order, capsys):
    save_zarr("x", np.zeros(3), (2,))
    Path("directory").mkdir()
    np.save("y.npy", np.zeros(3))
    for other in ("directory", "y.npy", "absent"):
        g, y = ("x", other)[::order]
        message = refused(capsys, "softmax_backward", "--grad-output", g, "--output", y, "-o", "out")
        assert message == f"{other}: expected a Zarr array, as x is one"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("-o", "out.npy"), "out.npy: ends in .npy, but the result of Zarr arrays is a Zarr array"),
        (("-o", "out", "--dim", "1"), "axis: expected a value in [-1, 0], got 1"),
        (
            ("-o", "out", "--dtype", "bfloat16"),
            "int16 or uint16, not float64",
        ),
    ],
)
def test_options_that_are_refused(options, text, capsys):
    save_zarr("x", np.zeros(3), (2,))
    assert text in refused(capsys, "softmax", "--input", "x", *options)


@pytest.mark.parametrize("package", ["zarr", "dask.array"])
def test_without_a_package(package, capsys, monkeypatch):
    save_zarr("x", np.zeros(3), (2,))
    monkeypatch.setitem(sys.modules, package, None)
    text = "x: needs zarr and dask (pip install zarr 'dask[array]')"
    assert text in refused(capsys, "softmax", "--input", "x", "-o", "out")
