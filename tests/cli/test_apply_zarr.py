"""``ascend-grad apply`` on Zarr arrays: the bits of one call, in the chunks of the input, whole or not at all."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import zarr
from files import peak_anonymous_bytes, refused, save, values
from hypothesis import given
from hypothesis import strategies as st
from processes import start
from samples import ARRAYS, BFLOAT16, DTYPES, MASKED

import ascend_grad as ag
from ascend_grad.cli import chunks, new_directories
from ascend_grad.cli.main import main

pytestmark = [
    pytest.mark.usefixtures("here"),
    pytest.mark.filterwarnings("ignore:.*does not have a Zarr V3 specification"),
]
PART = ".out.ascend-grad-part"


def save_zarr(path: str, array: np.ndarray, chunks: tuple[int, ...], **settings) -> zarr.Array:
    stored = array.view("V2") if array.dtype == BFLOAT16 else array
    result = zarr.create_array(path, shape=array.shape, dtype=stored.dtype, chunks=chunks, **settings)
    result[...] = stored
    return result


def load(path: str) -> np.ndarray:
    array = np.asarray(zarr.open_array(path, mode="r")[...])
    return array.view(BFLOAT16) if array.dtype == np.dtype("V2") else array


def assert_identical(path: str, expected: np.ndarray) -> None:
    result = load(path)
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    assert result.tobytes() == expected.tobytes()


def chunk_files(path: str) -> dict[str, int]:
    """When the chunks of an array were written."""
    names = [Path(folder, name) for folder, _, files in os.walk(path) for name in files]
    return {
        str(name.relative_to(path)): name.stat().st_mtime_ns for name in names if not name.name.startswith((".", "z"))
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


def test_a_mask_in_a_file():
    arguments = values("scaled_masked_softmax", (3, 2, 5, 7), np.float32)
    save_zarr("x", arguments["x"], (1, 2, 2, 7))
    options = save(mask=arguments["mask"])
    assert main(["apply", "scaled_masked_softmax", "--x", "x", *options, "-o", "out"]) == 0
    assert_identical("out", ag.scaled_masked_softmax(**arguments))


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
    for box in chunks.grid_boxes(shape, dim, grid):
        covered[box] += 1
        for axis, part in enumerate(box):
            assert (part.stop - part.start == shape[axis]) if axis == dim else part.start % grid[axis] == 0
    assert (covered == 1).all()


def test_memory_is_that_of_a_row_of_chunks():
    """The array has 512 MiB, a row of its chunks 8."""
    zarr.create_array("x", shape=(2**17, 2**10), dtype="f4", chunks=(2**11, 2**9))
    assert peak_anonymous_bytes("softmax", "--input", "x", "-o", "out") < 2**28
    assert zarr.open_array("out", mode="r")[-1, -1] == np.float32(2**-10)


# ---- once more -------------------------------------------------------------------------------------------------------


class Interrupted(Exception):
    pass


@pytest.fixture
def interrupted(monkeypatch):
    """The command of a softmax of an array in three parts, ended when it computes the last one; and the array."""
    x = values("softmax", (5, 6), np.float32)["input"]
    save_zarr("x", x, (2, 4))
    command = ["apply", "softmax", "--input", "x", "-o", "out"]
    right = ag.softmax

    @functools.wraps(right)
    def softmax(part, *args, **kwargs):
        if len(part) == 1:
            raise Interrupted
        return right(part, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(ag, "softmax", softmax)
        with pytest.raises(Interrupted):
            main(command)
    assert sorted(os.listdir()) == [PART, "x"]
    return command, x


def test_a_run_goes_on_where_another_was_ended(interrupted, capsys):
    command, x = interrupted
    before = chunk_files(f"{PART}/out")
    assert set(before) == {f"c/{i}/{j}" for i in range(2) for j in range(2)}
    assert main(command) == 0
    assert "1 of 3 parts computed" in capsys.readouterr().out
    assert before.items() <= chunk_files("out").items()
    assert_identical("out", ag.softmax(x))
    assert main(command) == 0
    assert "0 of 3 parts computed" in capsys.readouterr().out


def test_parts_whose_chunks_have_changed_are_computed_again(interrupted, capsys):
    command, x = interrupted
    x = x + (np.arange(5)[:, None] == 3)
    zarr.open_array("x", mode="r+")[2:4, 0:2] = x[2:4, 0:2] + np.array([0, 1], np.float32)
    x[2:4, 0:2] += np.array([0, 1], np.float32)
    zarr.open_array("x", mode="r+")[2:4] = x[2:4]
    assert main(command) == 0
    assert "2 of 3 parts computed" in capsys.readouterr().out
    assert_identical("out", ag.softmax(x.astype(np.float32)))
    zarr.open_array("x", mode="r+")[0, 0] = 0
    assert "out: is there already, and 0:2, 0:6 was computed from other files" in refused(capsys, *command[1:])


def test_another_shape_or_other_chunks_are_refused(interrupted, capsys):
    command, x = interrupted
    shutil.rmtree("x")
    save_zarr("x", x, (3, 4))
    assert "was begun with cells [2, 4], not [3, 4]; remove" in refused(capsys, *command[1:])


def test_an_array_that_was_begun_and_has_no_record(interrupted):
    command, x = interrupted
    Path(PART, "out", new_directories.RECORD).write_bytes(b"")
    assert main(command) == 0
    assert_identical("out", ag.softmax(x))


def test_a_killed_run_leaves_nothing_half_written():
    x = np.tile(np.linspace(0, 1, 2**11, dtype=np.float32), (2**12, 1))
    save_zarr("x", x, (2**7, 2**11))
    command = ("apply", "softmax", "--input", "x", "--backend", "reference", "-o", "out")
    process = start(*command)
    while not os.path.exists(f"{PART}/out/c/1/0"):
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    assert sorted(os.listdir()) == [PART, "x"]
    finished = Path(PART, "out", new_directories.RECORD).read_text().count("\n") - 1
    before = chunk_files(f"{PART}/out")
    assert 1 <= finished < 32
    Path(PART, "out/c/31").mkdir(exist_ok=True)
    Path(PART, "out/c/31/0.0123.partial").write_bytes(b"half")
    assert main(list(command)) == 0
    assert {name: before[name] for name in (f"c/{i}/0" for i in range(finished))}.items() <= chunk_files("out").items()
    assert set(chunk_files("out")) == {f"c/{i}/0" for i in range(32)}
    assert_identical("out", ag.softmax(x, backend="reference"))


def test_chunks_are_synced_before_they_are_recorded(monkeypatch):
    save_zarr("x", np.zeros((4, 6)), (2, 6))
    synced, fsync = [], os.fsync

    def note(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}").rpartition("/out/")[2])
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    assert main(["apply", "softmax", "--input", "x", "-o", "out"]) == 0
    records = [i for i, name in enumerate(synced) if name == new_directories.RECORD]
    for chunk, end in zip(("c/0/0", "c/1/0"), records[1:]):
        assert chunk in synced[:end]
    assert synced.index("c/1/0") > records[1]


# ---- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("group", "group: not a Zarr array that can be used: "),
        ("damaged", "damaged: not a Zarr array that can be used: "),
        ("raw", "raw: elements of 2 raw bytes; if this is bfloat16, add --dtype bfloat16"),
        ("integers", "softmax: input: expected dtype float32"),
        ("text", "softmax: input: expected dtype float32"),
    ],
)
def test_what_cannot_be_an_input(name, text, capsys):
    zarr.open_group("group", mode="w")
    save_zarr("raw", np.zeros(3, BFLOAT16), (2,))
    save_zarr("integers", np.zeros(3, int), (2,))
    save_zarr("text", np.zeros(3, "S3"), (2,))
    save_zarr("damaged", np.zeros(3), (2,))
    Path("damaged/zarr.json").write_text("{")
    assert text in refused(capsys, "softmax", "--input", name, "-o", "out")


def test_what_does_not_go_together(capsys):
    save_zarr("x", np.zeros(3), (2,))
    Path("directory").mkdir()
    np.save("directory/x.npy", np.zeros(3))
    np.save("x.npy", np.zeros(3))
    for g, y, text in (
        ("x", "directory", "directory: expected a Zarr array or a file, since another input is a Zarr array"),
        ("x.npy", "x", "x.npy: expected a Zarr array, since another input is one, got a file"),
    ):
        assert refused(capsys, "softmax_backward", "--grad-output", g, "--output", y, "-o", "out") == text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("-o", "out.npy"), "out.npy: names a file"),
        (("-o", "x"), "x: is there already, and was not written by this command"),
        (("-o", "out", "--dim", "1"), "dim: expected a value in [-1, 0], got 1"),
        (("-o", "out", "--dtype", "bfloat16"), "x: --dtype bfloat16 is for elements of 2 raw bytes, these are float64"),
    ],
)
def test_options_that_are_refused(options, text, capsys):
    save_zarr("x", np.zeros(3), (2,))
    assert text in refused(capsys, "softmax", "--input", "x", *options)


def test_without_zarr(capsys, monkeypatch):
    save_zarr("x", np.zeros(3), (2,))
    monkeypatch.setitem(sys.modules, "zarr", None)
    text = "x: needs zarr (pip install 'ascend-grad[zarr]')"
    assert text in refused(capsys, "softmax", "--input", "x", "-o", "out")
