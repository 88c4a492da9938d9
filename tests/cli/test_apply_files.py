"""Test that ``ascend-grad apply`` writes a whole result or nothing, and needs little memory."""

from __future__ import annotations

import errno
import math
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from files import apply, assert_same_file, peak_anonymous_bytes, refused, save, sparse, values
from hypothesis import given
from hypothesis import strategies as st
from processes import end_stopped, stopped

import ascend_grad as ag
from ascend_grad.cli import array_file, npy_files
from ascend_grad.cli.main import main

pytestmark = pytest.mark.usefixtures("here")


@st.composite
def shapes_and_boxes(draw) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    """Draw the shape of an array, and a box of it."""
    shape = draw(st.lists(st.integers(0, 6), max_size=4))
    sides = [sorted(draw(st.tuples(st.integers(0, length), st.integers(0, length)))) for length in shape]
    return tuple(shape), tuple(slice(*side) for side in sides)


@pytest.fixture
def old_result() -> bytes:
    np.save("out.npy", np.arange(3))
    return Path("out.npy").read_bytes()


def test_a_result_replaces_an_older_one(old_result):
    x = values("softmax", (4, 5), np.float32)["input"]
    apply("softmax", *save(input=x))
    assert_same_file(ag.softmax(x))


def test_a_result_goes_where_a_link_points(here):
    (here / "elsewhere").mkdir()
    os.symlink("elsewhere/real.npy", "out.npy")
    apply("softmax", *save(input=np.zeros(2)))
    assert os.readlink("out.npy") == "elsewhere/real.npy"
    assert_same_file(np.full(2, 0.5), "elsewhere/real.npy")
    assert os.listdir("elsewhere") == ["real.npy"]


def test_results_are_as_readable_as_other_new_files():
    apply("softmax", *save(input=np.zeros(2)))
    assert os.stat("out.npy").st_mode == os.stat("input.npy").st_mode


def test_a_replaced_result_keeps_its_permissions(old_result):
    os.chmod("out.npy", 0o640)
    apply("softmax", *save(input=np.zeros(2)))
    assert os.stat("out.npy").st_mode & 0o7777 == 0o640
    assert_same_file(np.full(2, 0.5))


def test_a_replaced_result_keeps_its_owner(old_result):
    owner = (12345, 23456)
    try:
        os.chown("out.npy", *owner)
    except OSError:  # only root may give a file to others, and in a namespace not even root
        owner = (os.geteuid(), os.getegid())
    os.chmod("out.npy", 0o600)
    apply("softmax", *save(input=np.zeros(2)))
    status = os.stat("out.npy")
    assert (status.st_uid, status.st_gid, status.st_mode & 0o7777) == (*owner, 0o600)


@pytest.mark.parametrize("error", [MemoryError("no memory"), OSError(errno.EIO, "Input/output error")])
@pytest.mark.parametrize("when", ["computing", "syncing", "renaming"])
def test_a_failure_leaves_what_was_there(error, when, old_result, monkeypatch, capsys):
    def fail(*arguments, **settings):
        assert any(name.endswith(".part") for name in os.listdir())
        raise error

    target = {"computing": (ag, "softmax"), "syncing": (os, "fsync"), "renaming": (os, "replace")}[when]
    monkeypatch.setattr(*target, fail)
    message = refused(capsys, "softmax", *save(input=np.zeros(3)), "-o", "out.npy")
    if isinstance(error, OSError) and when != "computing":
        assert message == f"{os.path.realpath('out.npy')}: cannot be written: {error.strerror}"
    if isinstance(error, MemoryError):
        assert message == "out.npy: cannot be computed from input.npy: out of memory: no memory"
    assert str(error.args[-1]) in message
    assert Path("out.npy").read_bytes() == old_result


@pytest.mark.parametrize(
    ("function", "number"),
    [
        ("posix_fallocate", errno.ENOSPC),
        ("fchmod", errno.EPERM),
        ("pwritev", errno.ENOSPC),
        ("pwritev", errno.EIO),
        ("pwritev", errno.EDQUOT),
    ],
)
def test_a_result_that_cannot_be_written(function, number, old_result, monkeypatch, capsys):
    """The system's reason is told, such as a full disk or a file system without permissions."""

    def fail(*arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, function, fail)
    message = refused(capsys, "softmax", *save(input=np.zeros(3)), "-o", "out.npy")
    assert message.startswith(f"{os.path.realpath('out.npy')}: cannot ")
    assert message.endswith(f": {os.strerror(number)}")
    assert Path("out.npy").read_bytes() == old_result


@pytest.mark.parametrize("number", [errno.ENODEV, errno.EPERM])
def test_a_large_result_that_cannot_be_mapped(number, old_result, monkeypatch, capsys):
    """A file system may have no writable shared maps."""

    real = mmap.mmap

    def fail(*arguments, access, **settings):
        if access == mmap.ACCESS_READ:
            return real(*arguments, access=access, **settings)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(array_file, "BUFFER_BYTES", 8)
    monkeypatch.setattr(mmap, "mmap", fail)
    message = refused(capsys, "softmax", *save(input=np.zeros(3)), "-o", "out.npy")
    assert message == f"{os.path.realpath('out.npy')}: cannot map 24 bytes: {os.strerror(number)}"
    assert Path("out.npy").read_bytes() == old_result


def test_a_disk_that_fails_while_an_input_is_read(old_result, monkeypatch, capsys):
    def fail(*arguments):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    message = refused(capsys, "softmax", *save(input=np.zeros(3)), "-o", "out.npy")
    assert message == "input.npy: cannot be read: Input/output error"
    assert Path("out.npy").read_bytes() == old_result


@pytest.mark.parametrize("buffer_bytes", [2**26, 8])
def test_an_input_that_gets_shorter(buffer_bytes, monkeypatch, capsys):
    """A part that was cut off is noticed where it is read, or when it is mapped."""
    names = save(input=np.zeros(3))

    def cut(*arguments):
        os.truncate("input.npy", 140)

    monkeypatch.setattr(array_file, "BUFFER_BYTES", buffer_bytes)
    monkeypatch.setattr(os, "posix_fallocate", cut)
    before = os.stat("input.npy").st_size
    assert main(["apply", "softmax", *names, "-o", "out.npy"]) == 2
    assert before > os.stat("input.npy").st_size
    assert "input.npy: was truncated meanwhile" in capsys.readouterr().err
    assert os.listdir() == ["input.npy"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_what_was_there(number, old_result):
    save(x=np.zeros(3))
    with stopped("ascend_grad", "softmax", 1, "apply", "softmax", "--input", "x.npy", "-o", "out.npy") as process:
        assert any(name.endswith(".part") for name in os.listdir())
        _, err = end_stopped(process, number)
    assert process.returncode == 128 + number
    assert err == f"ascend-grad apply: {'interrupted' if number == signal.SIGINT else 'terminated'}\n"
    assert sorted(os.listdir()) == ["out.npy", "x.npy"]
    assert Path("out.npy").read_bytes() == old_result


def test_signals_are_as_before_afterwards():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    apply("softmax", *save(input=np.zeros(2)))
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == before


def test_the_loop_of_the_document(here):
    text = (Path(__file__).parents[2] / "docs" / "command_line.md").read_text()
    loop = text.partition("## Many files")[2].partition("```sh\n")[2].partition("```")[0]
    arguments = {name: values("softmax_backward", (3, n), np.float32) for n, name in enumerate(("a.npy", "b c.npy"), 4)}
    for folder, argument in (("gradients", "grad_output"), ("forward", "output")):
        Path(folder).mkdir()
        for name, arrays in arguments.items():
            np.save(f"{folder}/{name}", arrays[argument])
    script = f'ascend-grad() {{ "{sys.executable}" -P -m ascend_grad "$@"; }}\n{loop}'
    for reported in (2, 0):
        result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
        assert (result.stdout.count("\n"), result.stderr) == (reported, "")
    assert sorted(os.listdir("results")) == ["a.npy", "b c.npy"]
    for name, arrays in arguments.items():
        assert_same_file(ag.softmax_backward(**arrays), f"results/{name}")


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dim", "swapped"), [("-1", False), ("0", True)])
def test_memory_does_not_grow_with_the_files(dim, swapped):
    size = sparse("g.npy", (320, 2**18), ">f4" if swapped else "<f4")
    assert size > 2**28
    sparse("y.npy", (320, 2**18), ">f4" if swapped else "<f4")
    inputs = ("--grad-output", "g.npy", "--output", "y.npy")
    assert peak_anonymous_bytes("softmax_backward", *inputs, "--dim", dim, "-o", "out.npy") < 2**28 / 2
    assert os.stat("out.npy").st_size == size


def test_memory_does_not_grow_with_one_long_row():
    size = sparse("x.npy", (5 * 2**24,))
    assert peak_anonymous_bytes("softmax", "--input", "x.npy", "-o", "out.npy") < 2**28 / 2
    assert os.stat("out.npy").st_size == size
    assert np.load("out.npy", mmap_mode="r")[-1] == np.float32(1 / (5 * 2**24))


@given(shapes_and_boxes(), st.sampled_from(["<f4", ">f8", "<i2", "?"]), st.booleans(), st.integers(1, 200))
def test_boxes_of_files(shape_and_box, dtype, fortran_order, limit):
    """Boxes are read and written as NumPy would: in buffers, through windows of the file, and in maps."""
    shape, box = shape_and_box
    array = np.arange(math.prod(shape)).reshape(shape).astype(dtype, order="F" if fortran_order else "C")
    np.save("x.npy", array)
    expected = array.copy("K")
    expected[box] = array[box][(..., *([slice(None, None, -1)] * len(shape)))]
    for buffer_bytes, window_bytes in ((2**26, limit), (limit, limit), (2**26, 2**26)):
        with pytest.MonkeyPatch.context() as patch, npy_files.open_array("x.npy", None) as file:
            patch.setattr(array_file, "BUFFER_BYTES", buffer_bytes)
            patch.setattr(array_file, "WINDOW_BYTES", window_bytes)
            part = file.read(box)
            assert part.dtype == array.dtype
            np.testing.assert_array_equal(part, array[box])
            new = npy_files.new_npy(os.path.abspath("out.npy"), shape, array.dtype, file.fortran_order)
            with new as result:
                with result.written(result.whole) as whole:
                    whole[...] = array
                with result.written(box) as out:
                    out[...] = expected[box]
        assert_same_file(expected)
