"""Test ``ascend-grad apply`` on Zarr arrays.

A result has the bits of one call and the chunks of the input. The command writes a whole result or nothing.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import json
import math
import os
import pickle
import shutil
import signal
import stat
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import zarr
from files import everything_here, peak_anonymous_bytes, refused, values
from hypothesis import given
from hypothesis import strategies as st
from processes import end_stopped, stopped
from samples import ARRAYS, BFLOAT16, DTYPES, MASKED
from zarr_files import assert_identical, chunk_files, save_zarr

import ascend_grad as ag
from ascend_grad.cli import zarr_grid
from ascend_grad.cli.main import main

pytestmark = [
    pytest.mark.usefixtures("here"),
    pytest.mark.filterwarnings("ignore:.*does not have a Zarr V3 specification"),
]
PART = ".out.ascend-grad-part"
RECORD = ".ascend-grad.jsonl"


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


@given(st.data())
def test_boxes_of_a_grid_cover_everything_once(data):
    shape = tuple(data.draw(st.lists(st.integers(0, 7), max_size=4)))
    grid = tuple(data.draw(st.integers(1, 8)) for _ in shape)
    dim = data.draw(st.integers(0, max(len(shape) - 1, 0)))
    covered = np.zeros(shape, int)
    cells = zarr_grid.Grid(shape, grid, lambda cell: "/".join(map(str, ("c", *cell))))
    boxes, keys = list(cells.boxes(dim)), []
    for box in boxes:
        covered[box] += 1
        keys += cells.keys(box)
        for axis, part in enumerate(box):
            assert (part.stop - part.start == shape[axis]) if axis == dim else part.start % grid[axis] == 0
    assert (covered == 1).all()
    assert len(boxes) == cells.number_of_boxes(dim)
    assert len(keys) == len(set(keys)) == math.prod(cells.counts)
    for key in keys:
        assert cells.has(key, False)
        assert not cells.has(key, True)
        assert all(cells.has(str(folder), True) for folder in list(Path(key).parents)[:-1])
        assert not any(cells.has(other, False) for other in (f"{key}/0", f"../{key}", f"0{key}", f"{key}0000"))


def test_memory_is_that_of_a_row_of_chunks():
    """The command needs memory for a row of chunks, which has 8 MiB, and not for the array of 512 MiB."""
    zarr.create_array("x", shape=(2**17, 2**10), dtype="f4", chunks=(2**11, 2**9))
    assert peak_anonymous_bytes("softmax", "--input", "x", "-o", "out") < 2**28
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


def softmax_after(action):
    """Return a softmax that calls `action` before it computes a part of one row."""
    right = ag.softmax

    @functools.wraps(right)
    def softmax(part, *args, **kwargs):
        if len(part) == 1:
            action()
        return right(part, *args, **kwargs)

    return softmax


@pytest.fixture
def interrupted(monkeypatch):
    """Interrupt a softmax of three parts while it computes the last part, and return the command and the input."""
    x = values("softmax", (5, 6), np.float32)["input"]
    save_zarr("x", x, (2, 4))
    command = ["apply", "softmax", "--input", "x", "-o", "out"]

    def interrupt():
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(ag, "softmax", softmax_after(interrupt))
        with pytest.raises(Interrupted):
            main(command)
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
    assert set(before) == {f"c/{i}/{j}" for i in range(2) for j in range(2)}
    assert main(command) == 0
    assert computed(capsys) == "1 of 3"
    assert before.items() <= chunk_files("out").items()
    assert_identical("out", ag.softmax(x))
    after = everything_here()
    assert main([*command[:-3], "./x/", "-o", "./out/"]) == 0
    assert computed(capsys) == "0 of 3"
    assert everything_here() == after


def test_parts_whose_chunks_have_changed_are_computed_again(interrupted, capsys):
    command, x = interrupted
    x[2:4, 0:2] += np.array([0, 1], np.float32)
    zarr.open_array("x", mode="r+")[2:4] = x[2:4]
    assert main(command) == 0
    assert computed(capsys) == "2 of 3"
    assert_identical("out", ag.softmax(x))
    zarr.open_array("x", mode="r+")[0, 0] = 0
    text = (
        "out: is there already, and [0:2, 0:6] was computed from other inputs; name another result, or remove this one"
    )
    assert refused(capsys, *command[1:]) == text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--dim", "0"), "was begun with dim -1, not 0"),
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


def test_other_threads_are_not_other_options(interrupted, capsys):
    command, x = interrupted
    assert main([*command, "--threads", "2"]) == 0
    assert computed(capsys) == "1 of 3"
    assert_identical("out", ag.softmax(x))


@pytest.mark.parametrize(("shape", "chunks"), [((5, 6), (3, 4)), ((7, 6), (2, 4))])
def test_another_shape_or_other_chunks_are_refused(shape, chunks, interrupted, capsys):
    command, _ = interrupted
    shutil.rmtree("x")
    save_zarr("x", np.zeros(shape, np.float32), chunks)
    text = "was begun with shape [5, 6], not [7, 6]" if shape == (7, 6) else "was begun with chunks [2, 4], not [3, 4]"
    assert f"{text}; remove" in refused(capsys, *command[1:])


def test_an_array_that_was_begun_and_has_no_record(interrupted, capsys):
    command, x = interrupted
    Path(PART, "out", RECORD).write_bytes(b"")
    assert main(command) == 0
    assert computed(capsys) == "3 of 3"
    assert_identical("out", ag.softmax(x))


@pytest.mark.parametrize("cut", [1, 3, 150])
def test_a_record_whose_last_line_was_cut(cut, interrupted, capsys):
    command, x = interrupted
    record = Path(PART, "out", RECORD)
    record.write_bytes(record.read_bytes()[:-cut])
    assert main(command) == 0
    assert computed(capsys) == ("3 of 3" if cut == 150 else "2 of 3")
    assert_identical("out", ag.softmax(x))
    assert main(command) == 0
    assert computed(capsys) == "0 of 3"


def test_shards_that_were_lost(capsys):
    x = values("softmax", (9, 10), np.float32)["input"]
    save_zarr("x", x, (2, 2), shards=(4, 6))
    command = ["apply", "softmax", "--input", "x", "-o", "out"]
    assert main(command) == 0
    capsys.readouterr()
    os.unlink("out/c/2/1")
    assert "out: is there already, and [8:9, 0:10] has lost a chunk" in refused(capsys, *command[1:])


@pytest.mark.parametrize("change", LOSSES)
def test_a_complete_result_that_has_changed(change, complete, capsys):
    """A complete result with a lost or changed chunk is refused. A missing chunk would be read as fill values."""
    command, _ = complete
    LOSSES[change](Path("out/c/1/1"))
    text = "out: is there already, and [2:4, 0:6] has lost a chunk, or one that was changed; "
    assert refused(capsys, *command[1:]).startswith(text)


@pytest.mark.parametrize("folder", ["c", "c/1"])
def test_a_folder_of_a_complete_result_that_is_a_link(folder, complete, capsys):
    """A result is refused if a folder of it is a link.

    Another user could reach the chunks in the linked folder, and a copy of the result would lack them.
    """
    command, _ = complete
    Path("out", folder).rename("elsewhere")
    Path("out", folder).symlink_to(Path("elsewhere").absolute())
    assert "has lost a chunk, or one that was changed; " in refused(capsys, *command[1:])


def test_a_link_to_a_complete_result(complete, capsys):
    command, _ = complete
    Path("out").rename("real")
    Path("out").symlink_to("real")
    assert main(command) == 0
    assert computed(capsys) == "0 of 3"


@pytest.mark.parametrize("change", [name for name in LOSSES if name not in ("a link", "a pipe", "a directory")])
def test_a_finished_part_that_has_changed_is_computed_again(change, interrupted, capsys):
    command, x = interrupted
    LOSSES[change](Path(f"{PART}/out/c/1/1"))
    assert main(command) == 0
    assert computed(capsys) == "2 of 3"
    assert_identical("out", ag.softmax(x))


def test_a_result_that_lost_a_chunk_is_no_input(complete, capsys):
    assert main(["apply", "softmax", "--input", "out", "-o", "again"]) == 0
    capsys.readouterr()
    os.unlink("out/c/1/1")
    message = refused(capsys, "softmax", "--input", "out", "-o", "another")
    assert message == f"out: chunk c/1/1 is missing, and ascend-grad has written all of them ({RECORD})"


def test_metadata_that_have_changed(complete, capsys):
    command, _ = complete
    text = Path("out/zarr.json").read_text()
    Path("out/zarr.json").write_text(text.replace('"float32"', '"float16"'))
    assert "out/zarr.json: not what was written there; name another" in refused(capsys, *command[1:])


@pytest.mark.parametrize(
    ("owner", "name", "call", "finished"),
    [
        ("ascend_grad", "softmax", 2, 1),
        ("ascend_grad", "softmax", 3, 2),
        ("os", "replace", 5, 1),  # the call renames the second chunk of the second part
        ("os", "fsync", 10, 1),  # the call syncs the first chunk of the second part
        ("os", "fsync", 15, 2),  # the call syncs the record, which has a line about the second part
        ("os", "rename", 1, 3),
    ],
)
def test_a_killed_run_leaves_nothing_half_written(owner, name, call, finished, capsys):
    x = values("softmax", (5, 6), np.float32)["input"]
    save_zarr("x", x, (2, 4))
    command = ("apply", "softmax", "--input", "x", "-o", "out")
    with stopped(owner, name, call, *command) as process:
        process.kill()
        process.communicate()
    assert sorted(os.listdir()) == [PART, "x"]
    before = chunk_files(f"{PART}/out")
    if finished < 3:
        Path(PART, "out.part").write_bytes(b"half")
    assert main(list(command)) == 0
    assert computed(capsys) == f"{3 - finished} of 3"
    kept = {f"c/{i}/{j}" for i in range(finished) for j in range(2)}
    assert {key: before[key] for key in kept}.items() <= chunk_files("out").items()
    assert set(chunk_files("out")) == {f"c/{i}/{j}" for i in range(3) for j in range(2)}
    assert sorted(os.listdir()) == ["out", "x"]
    assert_identical("out", ag.softmax(x))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_what_is_finished(number, capsys):
    x = values("softmax", (5, 6), np.float32)["input"]
    save_zarr("x", x, (2, 4))
    command = ("apply", "softmax", "--input", "x", "-o", "out")
    with stopped("ascend_grad", "softmax", 2, *command) as process:
        _, err = end_stopped(process, number)
    assert (process.returncode, err.count("\n")) == (128 + number, 1)
    before = chunk_files(f"{PART}/out")
    assert main(list(command)) == 0
    assert computed(capsys) == "2 of 3"
    assert_identical("out", ag.softmax(x))
    assert before["c/0/0"] == chunk_files("out")["c/0/0"]


def test_chunks_are_synced_before_they_are_recorded(monkeypatch):
    save_zarr("x", np.zeros((4, 6)), (2, 6))
    events, fsync, replace, rename = [], os.fsync, os.replace, os.rename

    def synced(descriptor):
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def replaced(old, new):
        events.append(f"to {os.path.relpath(new, f'{PART}/out')}")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    monkeypatch.setattr(os, "rename", lambda *names: events.append("renamed") or rename(*names))
    assert main(["apply", "softmax", "--input", "x", "-o", "out"]) == 0
    begin = ["out.part", "to zarr.json", "out", RECORD]
    parts = [event for i in "01" for event in ("out.part", f"to c/{i}/0", i, "c", "out", RECORD)]
    assert events == [*begin, *parts, "renamed", os.path.basename(os.getcwd())]


def test_two_runs_at_once(interrupted, capsys):
    command, x = interrupted
    with open(f"{PART}/out/{RECORD}", "r+b") as record:
        fcntl.flock(record, fcntl.LOCK_SH)  # a lock that is not exclusive would allow this shared one
        assert refused(capsys, *command[1:]) == "out: another run is at work on it"
    assert main(command) == 0
    assert_identical("out", ag.softmax(x))


@pytest.mark.parametrize("moment", ["before", "between", "locked"])
def test_another_run_ends_meanwhile(moment, monkeypatch, capsys):
    """A run fails if another run creates the result after this run's first check and before this run has the lock."""
    x = values("softmax", (5, 6), np.float32)["input"]
    save_zarr("x", x, (2, 4))
    command = ["apply", "softmax", "--input", "x", "-o", "out"]
    mkdir, flock = os.mkdir, fcntl.flock

    def made(path, mode):
        patch.setattr(os, "mkdir", mkdir)
        if moment == "before":
            assert main(command) == 0
        mkdir(path, mode)
        if moment == "between":
            assert main(command) == 0

    def locked(*args):
        """Remove the file that this run has opened, as a failed run without finished parts does, and lock it."""
        shutil.rmtree(PART)
        flock(*args)

    with monkeypatch.context() as patch:
        patch.setattr(*((fcntl, "flock", locked) if moment == "locked" else (os, "mkdir", made)))
        assert main(command) == 2
    text = {"before": "another run has finished it"}.get(moment, "another run is at work on it")
    assert capsys.readouterr().err == f"ascend-grad apply: error: out: {text}\n"
    assert not os.path.exists(PART)
    if moment != "locked":
        assert_identical("out", ag.softmax(x))


def test_a_directory_that_appears_meanwhile_is_not_replaced(monkeypatch, capsys):
    x = values("softmax", (5, 6), np.float32)["input"]
    save_zarr("x", x, (2, 4))
    command = ["apply", "softmax", "--input", "x", "-o", "out"]
    with monkeypatch.context() as patch:
        patch.setattr(ag, "softmax", softmax_after(Path("out").mkdir))
        assert main(command) == 2
    assert capsys.readouterr() == ("", "ascend-grad apply: error: out: appeared meanwhile, and is not replaced\n")
    assert os.listdir("out") == []
    Path("out").rmdir()
    assert main(command) == 0
    assert computed(capsys) == "0 of 3"
    assert_identical("out", ag.softmax(x))


def no_locks(*args):
    raise OSError(errno.ENOLCK, "No locks available")


def test_a_file_system_without_locks(monkeypatch, capsys):
    save_zarr("x", np.zeros((2, 6)), (2, 6))
    monkeypatch.setattr(fcntl, "flock", no_locks)
    message = refused(capsys, "softmax", "--input", "x", "-o", "out")
    assert message == "out: cannot be written: No locks available"


def test_without_locks_what_is_finished_remains(interrupted, monkeypatch, capsys):
    command, _ = interrupted
    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert refused(capsys, *command[1:]) == "out: cannot be written: No locks available"


@pytest.mark.parametrize("when", ["computing", "syncing", "renaming"])
def test_a_failure_before_anything_is_finished_leaves_nothing(when, monkeypatch, capsys):
    save_zarr("x", np.zeros((2, 6)), (2, 6))

    def fail(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    target = {"computing": (ag, "softmax"), "syncing": (os, "fsync"), "renaming": (os, "replace")}[when]
    monkeypatch.setattr(*target, functools.wraps(getattr(*target))(fail))
    message = refused(capsys, "softmax", "--input", "x", "-o", "out")
    assert message == ("" if when == "computing" else "out: cannot be written: ") + "No space left on device"


def test_a_full_disk_leaves_what_is_finished(run_script):
    x = values("softmax", (2, 40_000), np.float64)["input"]
    x[0] = 0
    save_zarr("x", x, (1, 40_000))
    script = """
        import resource, sys
        resource.setrlimit(resource.RLIMIT_FSIZE, ({0}, {0}))
        from ascend_grad.cli.main import main
        sys.exit(main(["apply", "softmax", "--input", "x", "-o", "out"]))
        """
    result = run_script(script.format(20_000), check=False)
    assert result.returncode == 2
    assert result.stderr == "ascend-grad apply: error: out: cannot be written: File too large\n"
    assert sorted(os.listdir()) == [PART, "x"]
    assert "1 of 2 parts computed" in run_script(script.format(10**7)).stdout
    assert_identical("out", ag.softmax(x))


# ---- in a directory where others can write ---------------------------------------------------------------------------


def plant(kind: str, path: Path, victim: Path) -> None:
    """Replace a file or a directory by an object that this command does not write."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if kind == "link":
        path.symlink_to(victim)
    elif kind == "name":
        os.link(victim, path)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o600)
    elif kind == "directory":
        path.mkdir()
    else:
        path.write_bytes(b"planted")


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        *(("link", path) for path in ("..", ".", "c", "c/0", "c/0/0", "c/1/2", "zarr.json", RECORD)),
        *(("link", path) for path in ("strange", "../strange", "../out.part", "c/2")),
        *(("pipe", path) for path in (".", "c/0/0", "zarr.json", RECORD)),
        *(("socket", path) for path in (".", "c/0/0", "zarr.json", RECORD)),
        *(
            ("directory", path)
            for path in ("c/0/0", "c/3", "c/0/1/0", "zarr.json", RECORD, "../strange", "../out.part")
        ),
        *(("file", path) for path in ("..", ".", "c", "c/0/2", "c/00/1", "c/0/0.partial", ".zarray", "../strange")),
        ("name", RECORD),
    ],
)
def test_what_was_planted_is_neither_used_nor_removed(kind, path, interrupted, capsys):
    command, _ = interrupted
    victim = Path("victim")
    if kind == "link" and path in ("..", ".", "c", "c/0", "c/2"):
        (victim / "out/c/0").mkdir(parents=True)
        for name in ("0", "c", "out/c/0/0"):
            (victim / name).write_bytes(b"precious")
    else:
        victim.write_bytes(b"precious")
    target = Path(os.path.normpath(f"{PART}/out/{path}"))
    if path == "c/0/1/0":
        target.parent.unlink()
    target.parent.mkdir(exist_ok=True)
    plant(kind, target, victim.absolute())
    assert PART in refused(capsys, *command[1:])


def test_a_directory_of_another_user_is_not_used(capsys):
    if os.geteuid() != 0:
        pytest.skip("only root may give it to others")
    save_zarr("x", np.zeros((5, 6)), (2, 4))
    Path(PART).mkdir()
    os.chown(PART, 12345, 12345)
    assert "expected a directory of this user" in refused(capsys, "softmax", "--input", "x", "-o", "out")


@pytest.mark.parametrize("mode", [0o777, 0o701, 0o710, 0o740])
def test_a_hidden_directory_that_others_can_use_is_refused(mode, interrupted, capsys):
    command, _ = interrupted
    os.chmod(PART, mode)
    text = f"{os.path.realpath(PART)}: expected mode 700, got {mode:o}; remove it to begin anew"
    assert refused(capsys, *command[1:]) == text


def test_nobody_else_can_write_to_what_is_not_finished(interrupted):
    assert os.stat(PART).st_mode & 0o777 == 0o700
    command, _ = interrupted
    Path("model").mkdir()
    assert main(command) == 0
    assert os.stat("out").st_mode == os.stat("model").st_mode


DIGEST = "0" * 64
DAMAGED = {
    "a name": b'["../../../victim", null]\n',
    "a name in a digest": f'[0, "{DIGEST}", "../../../victim"]\n'.encode(),
    "a number beyond the last part": f'[3, "{DIGEST}", "{DIGEST}"]\n'.encode(),
    "a negative number": f'[-1, "{DIGEST}", "{DIGEST}"]\n'.encode(),
    "a large number": f'[{"9" * 5000}, "{DIGEST}", "{DIGEST}"]\n'.encode(),
    "no number": f'[true, "{DIGEST}", "{DIGEST}"]\n'.encode(),
    "nested": b"[" * 100_000 + b"]" * 100_000 + b"\n",
    "another type": b"7\n",
    "null": b"null\n",
    "an object": b"{}\n",
    "an empty line": b"\n",
    "not UTF-8": b'["\xff\xfe"]\n',
    "zeros": bytes(500) + b"\n",
    "an escape": b'["\x1b[2J", 1]\n',
}


@pytest.mark.parametrize("damage", DAMAGED)
@pytest.mark.parametrize("where", ["before", "behind", "instead"])
def test_a_damaged_record(damage, where, interrupted, capsys):
    command, _ = interrupted
    Path("victim").write_bytes(b"precious")
    record = Path(PART, "out", RECORD)
    text = record.read_bytes() if where != "instead" else b""
    record.write_bytes(DAMAGED[damage] + text if where == "before" else text + DAMAGED[damage])
    path = os.path.realpath(PART)
    assert refused(capsys, *command[1:]) == f"{path}/out/{RECORD}: a damaged record; remove {path} to begin anew"


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_record_of_a_complete_result(damage, complete, capsys):
    command, _ = complete
    with open(f"out/{RECORD}", "ab") as record:
        record.write(DAMAGED[damage])
    assert "a damaged record; name another result, or remove this one" in refused(capsys, *command[1:])


def test_a_huge_record_is_not_read(interrupted, capsys):
    command, _ = interrupted
    os.truncate(f"{PART}/out/{RECORD}", 2**34)
    tracemalloc.start()
    try:
        assert "a damaged record" in refused(capsys, *command[1:])
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["link", "pipe", "socket", "directory"])
def test_a_planted_record_of_a_complete_result(kind, complete, capsys):
    command, _ = complete
    Path("victim").write_bytes(Path(f"out/{RECORD}").read_bytes())
    plant(kind, Path(f"out/{RECORD}"), Path("victim").absolute())
    assert refused(capsys, *command[1:]) == "out: is there already, and was not written by this command"


def test_an_empty_record_of_a_complete_array(capsys):
    save_zarr("x", np.zeros((0, 6)), (2, 4))
    save_zarr("out", np.ones((0, 6)), (2, 4))
    Path(f"out/{RECORD}").write_bytes(b"")
    assert "its record is empty" in refused(capsys, "softmax", "--input", "x", "-o", "out")


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
        ("integers", "softmax: input: expected dtype float32"),
        ("text", "softmax: input: expected dtype float32"),
    ],
)
def test_what_cannot_be_an_input(name, text, capsys):
    zarr.open_group("group", mode="w")
    zarr.open_group("members", mode="w").create_group("b")
    save_zarr("members/a", np.zeros(3), (2,))
    save_zarr("members/b/c", np.zeros(3), (2,))
    save_zarr("raw", np.zeros(3, BFLOAT16), (2,))
    save_zarr("integers", np.zeros(3, int), (2,))
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
        (("-o", "out", "--dim", "1"), "dim: expected a value in [-1, 0], got 1"),
        (
            ("-o", "out", "--dtype", "bfloat16"),
            "int16 or uint16, not float64",
        ),
    ],
)
def test_options_that_are_refused(options, text, capsys):
    save_zarr("x", np.zeros(3), (2,))
    assert text in refused(capsys, "softmax", "--input", "x", *options)


def test_without_zarr(capsys, monkeypatch):
    save_zarr("x", np.zeros(3), (2,))
    monkeypatch.setitem(sys.modules, "zarr", None)
    text = "x: needs zarr (pip install zarr)"
    assert text in refused(capsys, "softmax", "--input", "x", "-o", "out")
