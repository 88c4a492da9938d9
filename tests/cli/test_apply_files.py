"""Test that ``ascend-grad apply`` writes a whole result or nothing, and needs little memory."""

from __future__ import annotations

import errno
import io
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from files import apply, assert_same_file, peak_anonymous_bytes, refused, save, sparse, values
from processes import end_stopped, stopped

import ascend_grad as ag
from ascend_grad.cli import npy_files

pytestmark = pytest.mark.usefixtures("here")


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
    ("function", "number"), [("mmap.mmap", errno.ENODEV), ("mmap.mmap", errno.EPERM), ("os.fchmod", errno.EPERM)]
)
def test_a_file_system_that_lacks_something(function, number, old_result, monkeypatch, capsys):
    """A file system without a feature is an error, for example without writable shared maps or without permissions."""
    module, name = function.split(".")
    real = getattr(getattr(npy_files, module), name)

    def fail(*arguments, **settings):
        if "access" in settings:  # this call maps an input
            return real(*arguments, **settings)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(f"ascend_grad.cli.npy_files.{function}", fail)
    message = refused(capsys, "softmax", *save(input=np.zeros(3)), "-o", "out.npy")
    assert message == f"{os.path.realpath('out.npy')}: cannot be written: {os.strerror(number)}"
    assert Path("out.npy").read_bytes() == old_result


def test_an_input_that_can_be_mapped_but_not_read_again(monkeypatch, capsys):
    class Failing(io.BufferedReader):
        def read(self, size=-1):
            if maps:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().read(size)

    real, maps = mmap.mmap, []
    names = save(input=np.zeros(3))
    monkeypatch.setattr(npy_files, "open", lambda path, mode: Failing(io.FileIO(path, mode)), raising=False)
    monkeypatch.setattr(mmap, "mmap", lambda *where, **how: maps.append(real(*where, **how)) or maps[0])
    message = refused(capsys, "softmax", *names, "-o", "out.npy")
    assert message == f"input.npy: not a .npy file that can be used: {OSError(errno.EIO, os.strerror(errno.EIO))}"


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


def test_pages_are_given_back_and_come_back():
    np.save("x.npy", np.arange(5000.0))
    with open("x.npy", "r+b") as file:
        mapped = npy_files.open_array("x.npy", None)
        mapped.release()
        assert (mapped.array == np.arange(5000)).all()
        assert not mapped.array.flags.writeable
        file.seek(128)
    with npy_files.new_npy(os.path.abspath("out.npy"), (5000,), np.dtype("f8"), False) as result:
        result.array[...] = mapped.array
        result.release()
        assert (result.array == mapped.array).all()
    assert_same_file(np.arange(5000.0))
