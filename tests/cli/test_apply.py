"""``ascend-grad apply``: files in, files out, the same bits as one call, and nothing half-done under a final name."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import math
import os
import re
import shutil
import signal
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import start
from samples import ARRAYS, BFLOAT16, DTYPES, MASKED, generator

import ascend_grad as ag
from ascend_grad.backends.ascend import backend as npu
from ascend_grad.cli import chunks, npy_files
from ascend_grad.cli.main import main


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    """Every test runs in an empty directory of its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def small_boxes(monkeypatch) -> None:
    monkeypatch.setattr(chunks, "BOX_ELEMENTS", 20)
    monkeypatch.setattr(chunks, "RUN_ELEMENTS", 3)


def values(operator: str, shape: tuple[int, ...], dtype: np.dtype) -> dict[str, np.ndarray]:
    """Arguments of an operator."""
    rng = generator(operator, shape, str(dtype))
    arguments = {name: rng.standard_normal(shape).astype(dtype) for name in ARRAYS[operator]}
    if operator in MASKED:
        arguments["mask"] = rng.random((1, *shape[1:])) < 0.3
    return arguments


def save(**arrays: np.ndarray) -> list[str]:
    """Save arrays as NumPy does, and name them on the command line."""
    options = []
    for name, array in arrays.items():
        np.save(f"{name}.npy", array)
        options += [f"--{name.replace('_', '-')}", f"{name}.npy"]
    return options


def apply(operator: str, *options: str, raw: bool = False) -> None:
    """Run the command with the result in out.npy; it must succeed."""
    assert main(["apply", operator, *options, *(["--dtype", "bfloat16"] if raw else []), "-o", "out.npy"]) == 0


def assert_same_file(expected: np.ndarray, name: str = "out.npy") -> None:
    """The file is what NumPy would write, byte for byte."""
    buffer = io.BytesIO()
    np.save(buffer, expected)
    assert Path(name).read_bytes() == buffer.getvalue()


@pytest.mark.parametrize("name", ["y8", "y8.bin", "y.npy.old", "directory.d/y"])
def test_the_result_has_the_very_name_that_was_asked_for(name, here):
    """No suffix is added to it, as `numpy.save` does."""
    Path("directory.d").mkdir()
    values = np.ones((2, 3))
    before = {path for path in here.rglob("*") if path.is_file()}
    assert main(["apply", "softmax", *save(input=values), "-o", name]) == 0
    assert {path for path in here.rglob("*") if path.is_file()} - before == {here / "input.npy", here / name}
    assert_same_file(ag.softmax(values), name)


# ---- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_boxes")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operator", ARRAYS)
def test_every_operator_gives_the_bits_of_one_call(operator, dtype):
    arguments = values(operator, (3, 2, 5, 7), DTYPES[dtype])
    apply(operator, *save(**arguments), raw=dtype == "bfloat16")
    assert_same_file(getattr(ag, operator)(**arguments))


@pytest.mark.usefixtures("small_boxes")
@pytest.mark.parametrize("dim", range(-3, 3))
@pytest.mark.parametrize("order", ["CC", "FF", "CF", "FC"])
def test_any_dim_and_either_order(dim, order):
    arguments = values("softmax_backward", (6, 11, 9), np.float32)
    arguments = {name: np.asarray(array, order=o) for (name, array), o in zip(arguments.items(), order)}
    apply("softmax_backward", *save(**arguments), "--dim", str(dim))
    # A result in the order of the first input; one call would answer in C order whatever comes.
    assert_same_file(np.asarray(ag.softmax_backward(**arguments, dim=dim), order=order[0]))


@pytest.mark.usefixtures("small_boxes")
@pytest.mark.parametrize("shape", [(), (1,), (50,), (0,), (0, 3), (3, 0), (1, 1, 1), (2,) * 8, (1, 40, 1)])
@pytest.mark.parametrize("operator", ["log_softmax_backward", "log_softmax"])
def test_any_shape(operator, shape):
    arguments = {name: np.asarray(array) for name, array in values(operator, shape, np.float32).items()}
    for dim in {0, len(shape) // 2 - (len(shape) > 0), -1}:
        apply(operator, *save(**arguments), "--dim", str(dim))
        assert_same_file(getattr(ag, operator)(**arguments, dim=dim))


@pytest.mark.usefixtures("small_boxes")
@pytest.mark.parametrize("mask", [(4, 3), (4, 1), (1, 3), (1, 1)])
@pytest.mark.parametrize("operator", MASKED)
def test_masks_and_scale(operator, mask):
    arguments = values(operator, (4, 3, 2, 6), np.float64)
    arguments["mask"] = generator(mask).random((*mask, 2, 6)) < 0.5
    apply(operator, *save(**arguments), "--scale", "0.3")
    assert_same_file(getattr(ag, operator)(**arguments, scale=0.3))


@pytest.mark.parametrize("dtype", [*DTYPES, "swapped"])
def test_results_of_another_dtype(dtype):
    dtype = np.dtype(">f8") if dtype == "swapped" else DTYPES[dtype]
    arguments = values("softmax_backward", (5, 30), dtype)
    for out_dtype in DTYPES:
        apply("softmax_backward", *save(**arguments), "--out-dtype", out_dtype, raw=dtype == BFLOAT16)
        out = np.empty((5, 30), DTYPES[out_dtype])
        assert_same_file(ag.softmax_backward(**arguments, out=out))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_other_byte_order(dtype):
    native = values("softmax", (4, 9), DTYPES[dtype])["input"]
    apply("softmax", *save(input=native.astype(native.dtype.newbyteorder(">"))), raw=dtype == "bfloat16")
    assert_same_file(ag.softmax(native))


def test_bfloat16_results_can_be_read_again():
    apply("softmax", *save(input=np.ones((2, 4), BFLOAT16)), raw=True)
    assert np.array_equal(np.load("out.npy").view(BFLOAT16), np.full((2, 4), 0.25, BFLOAT16))
    Path("out.npy").rename("again.npy")
    apply("softmax", "--input", "again.npy", raw=True)
    assert_same_file(np.full((2, 4), 0.25, BFLOAT16))


@pytest.mark.parametrize("name", ["{}", "{}:x", "{}:x.npy"])
@pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
def test_archives(name, write, here):
    x = values("softmax", (20, 30), np.float32)["input"]
    others = {} if name == "{}" else {"other": x + 1}
    write("in.npz", x=x, **others)
    (here / "spool").mkdir()
    apply("softmax", "--input", name.format("in.npz"), "--tmp-dir", "spool")
    assert_same_file(ag.softmax(x))
    assert sorted(os.listdir()) == ["in.npz", "out.npy", "spool"]
    assert os.listdir("spool") == []


def test_a_name_with_a_colon_is_first_of_all_a_name():
    np.save("x.npy", np.zeros(3))
    shutil.copy("x.npy", "a:b")
    apply("softmax", "--input", "a:b")
    assert_same_file(np.full(3, 1 / 3))


def test_settings_are_passed_on(capsys):
    options = save(**values("softmax_backward", (5, 30), np.float32))
    apply("softmax_backward", *options, "--threads", "3", "--backend", "reference")
    assert "backend reference" in capsys.readouterr().out


@pytest.mark.parametrize(("options", "shown"), [((), False), (("--progress",), True), (("--no-progress",), False)])
def test_progress_goes_to_stderr(options, shown, capsys):
    np.savez("x.npz", np.zeros((3, 3)))
    apply("softmax", "--input", "x.npz", *options)
    out, err = capsys.readouterr()
    assert out.startswith("out.npy: float64 (3, 3)")
    assert ("softmax: 100%" in err) == ("reading x.npz: 100%" in err) == shown
    assert bool(err) == shown


# ---- refusals --------------------------------------------------------------------------------------------------------


def raw_npy(header: str, data: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    text = header.encode() + b"\n"
    return b"\x93NUMPY" + version + len(text).to_bytes(2, "little") + text + data


BROKEN = {
    "empty": b"",
    "text": b"some text, long enough for a header that it is not",
    "other magic": b"\x93NUMPX\x01\x00",
    "cut header": b"\x93NUMPY\x01\x00\xff\xff{'descr'",
    "version 3": raw_npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}", bytes(4), b"\x03\x00"),
    "no dict": raw_npy("(((", bytes(4)),
    "not Python": raw_npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1,) 'x", bytes(4)),
    "missing key": raw_npy("{'descr': '<f4', 'fortran_order': False}", bytes(4)),
    "unknown dtype": raw_npy("{'descr': '<q9', 'fortran_order': False, 'shape': (1,)}", bytes(4)),
    "negative length": raw_npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}", bytes(4)),
    "negative lengths": raw_npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, -1)}", bytes(4)),
    "too long": raw_npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}", bytes(7)),
    "far too long": raw_npy(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({2**70},)}}", bytes(7)),
    "huge and empty": raw_npy(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({2**70}, 0)}}", bytes(7)),
    "broken archive": b"PK\x03\x04 and nothing else",
}


def everything_here() -> dict[str, tuple[int, int, int]]:
    files = {name: os.stat(name) for name in os.listdir()}
    return {name: (file.st_ino, file.st_size, file.st_mtime_ns) for name, file in files.items()}


def refused(capsys, *argv: str) -> str:
    """The message of a command that fails and leaves the directory as it was."""
    before = everything_here()
    assert main(["apply", *argv]) == 2
    assert everything_here() == before
    out, err = capsys.readouterr()
    assert out == ""
    message = re.fullmatch(r"ascend-grad apply: error: (.*)\n", err)
    assert message, err
    return message[1]


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_files(kind, capsys):
    Path("x.npy").write_bytes(BROKEN[kind])
    assert refused(capsys, "softmax", "--input", "x.npy", "-o", "out.npy").startswith("x.npy: ")


def test_truncation_is_named(capsys):
    Path("x.npy").write_bytes(BROKEN["too long"])
    assert "truncated" in refused(capsys, "softmax", "--input", "x.npy", "-o", "out.npy")


class Trap:
    def __reduce__(self):
        return exec, ("raise SystemExit('unpickled')",)


@pytest.mark.parametrize("dtype", [object, [("a", object)]])
def test_objects_are_never_unpickled(dtype, capsys):
    np.save("x.npy", np.array([(Trap(),)], dtype), allow_pickle=True)
    assert "never unpickled" in refused(capsys, "softmax", "--input", "x.npy", "-o", "out.npy")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent.npy", "absent.npy: No such file"),
        ("two.npz", "holds 2 arrays, name one as FILE.npz:MEMBER: a, b"),
        ("none.npz", "holds 0 arrays"),
        ("two.npz:c", "no member 'c', there are: a, b"),
        ("two.npz:", "no member ''"),
        ("plain.npy:a", "plain.npy: not a .npz file, so it has no member 'a'"),
        ("damaged.npz:a", "damaged"),
        ("no_array.npz", "not a .npy file"),
        (".", "not a regular file"),
        ("fifo", "not a regular file"),
        ("/dev/null", "not a regular file"),
    ],
)
def test_what_cannot_be_an_input(name, message, capsys):
    np.save("plain.npy", np.zeros(3))
    np.savez("two.npz", a=np.zeros(100), b=np.zeros(3))
    with zipfile.ZipFile("none.npz", "w"):
        pass
    with zipfile.ZipFile("no_array.npz", "w") as archive:
        archive.writestr("a.npy", "")
    damaged = bytearray(Path("two.npz").read_bytes())
    damaged[300] ^= 1
    Path("damaged.npz").write_bytes(damaged)
    os.mkfifo("fifo")
    assert message in refused(capsys, "softmax", "--input", name, "-o", "out.npy")


@pytest.mark.parametrize(
    ("g", "y", "options", "message"),
    [
        (np.zeros((2, 3), "i4"), np.zeros((2, 3), "i4"), (), "grad_output: expected dtype float32"),
        (np.zeros((2, 3), "f4"), np.zeros((2, 3), "f8"), (), "output: expected dtype float32"),
        (np.zeros((2, 3), "f4"), np.zeros((3, 2), "f4"), (), "output: expected shape (2, 3)"),
        (np.zeros((2, 3), "f4"), np.zeros((2, 3), "f4"), ("--dim", "2"), "dim: expected a value in [-2, 1]"),
        (np.zeros((2, 3), "f4"), np.zeros((2, 3), "f4"), ("--threads", "0"), "num_threads: expected"),
        (np.zeros((2, 3), "f4"), np.zeros((2, 3), "f4"), ("--backend", "npu"), "backend 'npu'"),
        (np.zeros((2, 3), "f4"), np.zeros((2, 3), "f4"), ("--dtype", "bfloat16"), "these are float32"),
        (np.zeros((2, 3), BFLOAT16), np.zeros((2, 3), BFLOAT16), (), "add --dtype bfloat16"),
        (np.zeros((2, 3), "V3"), np.zeros((2, 3), "V3"), (), "grad_output: expected dtype float32"),
        (np.zeros((1,) * 9, "f4"), np.zeros((1,) * 9, "f4"), (), "rank 0 to 8"),
    ],
)
def test_arguments_that_the_library_refuses(g, y, options, message, capsys, monkeypatch):
    if "npu" in options:
        monkeypatch.setattr(npu, "status", lambda: (False, "not here"))
    names = save(grad_output=g, output=y)
    assert message in refused(capsys, "softmax_backward", *names, *options, "-o", "out.npy")


def test_masks_of_another_dtype(capsys):
    names = save(x=np.zeros((1, 1, 2, 3)), mask=np.zeros((1, 1, 2, 3), "u1"))
    assert "mask: expected dtype bool" in refused(capsys, "scaled_masked_softmax", *names, "-o", "out.npy")


@pytest.mark.parametrize("link", [None, os.symlink, os.link])
def test_an_input_is_never_the_result(link, capsys):
    names = save(grad_output=np.zeros(3), output=np.zeros(3))
    out = "./output.npy"
    if link is not None:
        link("output.npy", "link.npy")
        out = "link.npy"
    assert "this is the input output.npy" in refused(capsys, "softmax_backward", *names, "-o", out)


def test_an_archive_is_never_the_result(capsys):
    np.savez("x.npz", x=np.zeros(3))
    os.link("x.npz", "link")
    assert "this is the input x.npz" in refused(capsys, "softmax", "--input", "x.npz:x", "-o", "link")


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("absent/out.npy", "there is no directory"),
        (".", "not a regular file"),
        ("/dev/null", "not a regular file"),
        ("out.npz", "the result is a .npy file"),
        ("", "not a regular file"),
        ("x.npy/out.npy", "there is no directory"),
        ("x" * 256, "File name too long"),
    ],
)
def test_results_that_cannot_be_written(out, message, capsys):
    assert message in refused(capsys, "softmax", *save(input=np.zeros(3)), "-o", out)


def test_directories_and_files_that_are_read_only(capsys):
    os.mkdir("locked", 0o555)
    if os.access("locked", os.W_OK):
        pytest.skip("this user may write everywhere")
    names = save(input=np.zeros(3))
    np.save("old.npy", np.zeros(1))
    os.chmod("old.npy", 0o444)
    assert "old.npy: not writable" in refused(capsys, "softmax", *names, "-o", "old.npy")
    assert "cannot create a file beside it" in refused(capsys, "softmax", *names, "-o", "locked/out.npy")
    np.savez("in.npz", np.zeros(3))
    in_locked = ("--input", "in.npz", "--tmp-dir", "locked", "-o", "out.npy")
    assert "locked: cannot create a temporary file" in refused(capsys, "softmax", *in_locked)


def test_a_temporary_directory_that_is_not_there(capsys):
    np.savez("x.npz", np.zeros(3))
    options = ("--input", "x.npz", "--tmp-dir", "absent", "-o", "out.npy")
    assert "absent: cannot create a temporary file" in refused(capsys, "softmax", *options)


# ---- disk space ------------------------------------------------------------------------------------------------------


def sparse(name: str, shape: tuple[int, ...], dtype: str = "<f4") -> int:
    """A file of zeros that takes no space; returns its size."""
    with open(name, "wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
        file.truncate(file.tell() + math.prod(shape) * np.dtype(dtype).itemsize)
        return file.seek(0, os.SEEK_END)


def test_a_result_beyond_the_disk_is_refused_at_once(capsys, here):
    free = shutil.disk_usage(here).free
    try:
        size = sparse("x.npy", (2, free // 4))
    except OSError:
        pytest.skip("this file system takes no file as large as its free space")
    message = refused(capsys, "softmax", "--input", "x.npy", "-o", "out.npy")
    assert re.search(rf"out\.npy: cannot reserve {size} bytes \(\d+ are free\): No space left on device", message)


def test_an_archive_beyond_the_disk_is_refused_at_once(capsys, monkeypatch):
    np.savez("x.npz", np.zeros(100))
    monkeypatch.setattr(os, "fstatvfs", lambda descriptor: os.statvfs_result((1,) * 10))
    message = refused(capsys, "softmax", "--input", "x.npz", "-o", "out.npy")
    assert "temporary copy of x.npz: cannot reserve" in message


def test_the_space_is_taken_before_anything_is_computed(capsys, monkeypatch):
    def full(descriptor, offset, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    def compute(*arguments, **settings):
        pytest.fail("computed")

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(ag, "softmax", compute)
    options = save(input=np.zeros(3))
    assert "cannot reserve" in refused(capsys, "softmax", *options, "-o", "out.npy")


def test_a_limit_on_file_sizes_is_an_error_like_others(run_script):
    np.save("x.npy", np.zeros(100_000))
    result = run_script(
        """
        import resource, sys
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        from ascend_grad.cli.main import main
        sys.exit(main(["apply", "softmax", "--input", "x.npy", "-o", "out.npy"]))
        """,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr.endswith("File too large\n")
    assert os.listdir() == ["x.npy"]


# ---- whole or not at all ---------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("error", [MemoryError("no memory"), OSError(errno.EIO, "Input/output error")])
@pytest.mark.parametrize("when", ["computing", "syncing", "renaming"])
def test_a_failure_leaves_what_was_there(error, when, old_result, monkeypatch, capsys):
    def fail(*arguments, **settings):
        assert any(name.endswith(".part") for name in os.listdir())
        raise error

    target = {"computing": (ag, "softmax"), "syncing": (os, "fsync"), "renaming": (os, "replace")}[when]
    monkeypatch.setattr(*target, fail)
    assert str(error.args[-1]) in refused(capsys, "softmax", *save(input=np.zeros(3)), "-o", "out.npy")
    assert Path("out.npy").read_bytes() == old_result


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_what_was_there(number, old_result):
    sparse("x.npy", (200, 500_000))
    # The reference is slow enough to be caught at work.
    process = start("apply", "softmax", "--input", "x.npy", "--backend", "reference", "-o", "out.npy")
    while not any(name.endswith(".part") for name in os.listdir()):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert err == f"ascend-grad apply: {'interrupted' if number == signal.SIGINT else 'terminated'}\n"
    assert sorted(os.listdir()) == ["out.npy", "x.npy"]
    assert Path("out.npy").read_bytes() == old_result


def test_signals_are_as_before_afterwards():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    apply("softmax", *save(input=np.zeros(2)))
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == before


# ---- memory ----------------------------------------------------------------------------------------------------------


def peak_anonymous_bytes(*argv: str) -> int:
    """The most anonymous memory that the command was seen to hold."""
    process, peak = start("apply", *argv), 0
    while process.poll() is None:
        with contextlib.suppress(OSError, StopIteration):
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            line = next(line for line in lines if line.startswith("RssAnon:"))
            peak = max(peak, int(line.split()[1]) * 1024)
        time.sleep(0.002)
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert peak > 0
    return peak


@pytest.mark.parametrize(("dim", "swapped"), [("-1", False), ("0", True)])
def test_memory_does_not_grow_with_the_files(dim, swapped):
    size = sparse("g.npy", (320, 2**18), ">f4" if swapped else "<f4")
    assert size > 2**28
    with zipfile.ZipFile("y.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.write("g.npy", "y.npy")
    inputs = ("--grad-output", "g.npy", "--output", "y.npz")
    assert peak_anonymous_bytes("softmax_backward", *inputs, "--dim", dim, "-o", "out.npy") < 2**28 / 2
    assert os.stat("out.npy").st_size == size


def test_memory_does_not_grow_with_one_long_row():
    size = sparse("x.npy", (5 * 2**24,))
    assert peak_anonymous_bytes("softmax", "--input", "x.npy", "-o", "out.npy") < 2**28 / 2
    assert os.stat("out.npy").st_size == size
    assert np.load("out.npy", mmap_mode="r")[-1] == np.float32(1 / (5 * 2**24))


def test_memory_of_linear_gradients_is_their_workspace():
    """The weight and its gradient are 256 MiB each, the logits would be, too."""
    rows, vocabulary, width = 64, 2**20, 64
    sparse("w.npy", (vocabulary, width))
    np.save("x.npy", np.ones((rows, width), np.float32))
    np.save("ones.npy", np.ones(rows, np.float32))
    np.save("sum.npy", np.full(rows, vocabulary, np.float32))
    np.save("mask.npy", np.zeros(rows, bool))
    np.save("target.npy", np.arange(rows))
    inputs = ("--grad", "ones.npy", "--input", "x.npy", "--weight", "w.npy", "--target-mask", "mask.npy")
    inputs += ("--masked-target", "target.npy", "--logits-max", "ones.npy", "--sum-exp-logits", "sum.npy")
    options = ("--workspace-bytes", str(2**24), *result_files("input_grad", "weight_grad"))
    assert peak_anonymous_bytes(GRADIENT, *inputs, *options) < 2**27
    gradient = np.load("weight_grad_out.npy", mmap_mode="r")
    assert gradient.shape == (vocabulary, width)
    expected = rows * math.exp(-1) / vocabulary
    np.testing.assert_allclose(gradient[-1], expected, rtol=1e-4)
    np.testing.assert_allclose(gradient[0], expected - 1, rtol=1e-4)


def test_pages_are_given_back_and_come_back():
    np.save("x.npy", np.arange(5000.0))
    with open("x.npy", "r+b") as file:
        mapped = npy_files.open_array(npy_files.parse_source("x.npy"), None, ".", None)
        mapped.release()
        assert (mapped.array == np.arange(5000)).all()
        assert not mapped.array.flags.writeable
        file.seek(128)
    with npy_files.new_npy(os.path.abspath("out.npy"), (5000,), np.dtype("f8"), False) as result:
        result.array[...] = mapped.array
        result.release()
        assert (result.array == mapped.array).all()
    assert_same_file(np.arange(5000.0))


# ---- linear operators ------------------------------------------------------------------------------------------------

GRADIENT = "fused_linear_cross_entropy_loss_grad"
STATISTICS = ("logits_max", "sum_exp_logits", "predicted_logits", "target_mask", "masked_target")


def linear_values(dtype: np.dtype, shape: tuple[int, int, int] = (10, 21, 5)) -> dict[str, np.ndarray]:
    """Arguments of the gradient, memory-saving mode, for (BT, V, H); some targets live in another shard."""
    rows, vocabulary, width = shape
    rng = generator(shape, str(dtype))
    x, weight = (rng.standard_normal((n, width)).astype(dtype) for n in (rows, vocabulary))
    target = rng.integers(0, 2 * vocabulary, rows)
    statistics = ag.fused_linear_online_max_sum(x, weight, target, 0, vocabulary)
    grad = rng.standard_normal(rows).astype(statistics.logits_max.dtype)
    used = {name: getattr(statistics, name) for name in STATISTICS if name != "predicted_logits"}
    return {"grad": grad, "input": x, "weight": weight} | used


def result_files(*names: str) -> list[str]:
    return [word for name in names for word in (f"--{name.replace('_', '-')}-out", f"{name}_out.npy")]


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_gradients_are_those_of_one_call(dtype):
    arguments = linear_values(DTYPES[dtype])
    raw = ["--dtype", "bfloat16"] if dtype == "bfloat16" else []
    names = ("input_grad", "weight_grad")
    assert main(["apply", GRADIENT, *save(**arguments), *raw, *result_files(*names)]) == 0
    for name, expected in zip(names, ag.fused_linear_cross_entropy_loss_grad(**arguments)):
        assert_same_file(expected, f"{name}_out.npy")


@pytest.mark.parametrize("index", [0, 1])
def test_a_linear_gradient_that_is_not_asked_for_is_not_computed(index, monkeypatch):
    arguments = linear_values(np.float32)
    right, calls = ag.fused_linear_cross_entropy_loss_grad, []

    def recorded(**settings):
        calls.append(settings["output_mask"])
        return right(**settings)

    expected = right(**arguments)[index]
    name = ("input_grad", "weight_grad")[index]
    monkeypatch.setattr(ag, GRADIENT, functools.wraps(right)(recorded))
    assert main(["apply", GRADIENT, *save(**arguments), "--out-dtype", "float64", *result_files(name)]) == 0
    assert calls == [[index == 0, index == 1]]
    np.testing.assert_allclose(np.load(f"{name}_out.npy"), expected, rtol=1e-5, atol=1e-6)
    assert sorted(os.listdir()) == sorted([*(f"{a}.npy" for a in arguments), f"{name}_out.npy"])


def test_the_chain_of_files():
    """Two shards of a vocabulary would each do this; here there is one."""
    rng = generator("chain")
    x, weight = rng.standard_normal((10, 5)), rng.standard_normal((21, 5))
    target = rng.integers(0, 21, 10)
    inputs = save(input=x, weight=weight)
    bounds = ("--vocab-start-index", "0", "--vocab-end-index", "21")
    options = [*inputs, *save(target=target), *bounds, *result_files(*STATISTICS)]
    assert main(["apply", "fused_linear_online_max_sum", *options]) == 0
    statistics = ag.fused_linear_online_max_sum(x, weight, target, 0, 21)
    for name in STATISTICS:
        assert_same_file(getattr(statistics, name), f"{name}_out.npy")

    def from_files(*names: str) -> list[str]:
        return [word for name in names for word in (f"--{name.replace('_', '-')}", f"{name}_out.npy")]

    options = [*from_files(*STATISTICS[:3]), *save(vocab_parallel_logits=x @ weight.T)]
    command = ["apply", "fused_cross_entropy_loss_with_max_sum", *options, *result_files("loss", "softmax")]
    assert main(command) == 0
    loss, softmax, expected = np.load("loss_out.npy"), np.load("softmax_out.npy"), np.ones(10)
    np.testing.assert_allclose(np.exp(-loss), softmax[np.arange(10), target], rtol=1e-12)
    np.testing.assert_allclose(softmax.sum(1), expected, rtol=1e-12)

    options = [*inputs, *save(grad=expected), *from_files("target_mask", "masked_target")]
    for mode in (from_files("logits_max", "sum_exp_logits"), from_files("softmax")):
        assert main(["apply", GRADIENT, *options, *mode, *result_files("weight_grad")]) == 0
        np.testing.assert_allclose(
            np.load("weight_grad_out.npy"), (softmax - np.eye(21)[target]).T @ x, rtol=1e-11, atol=1e-12
        )


@pytest.mark.parametrize(
    ("operator", "options", "message"),
    [
        (GRADIENT, (), "name a file for a result, with --input-grad-out or --weight-grad-out"),
        (GRADIENT, ("--input-grad-out", "a.npy", "--weight-grad-out", "./a.npy"), "a.npy: the file of two results"),
        (GRADIENT, ("--input-grad-out", "weight.npy"), "this is the input weight.npy"),
        (GRADIENT, ("--input-grad-out", "a.npy", "--filter-eps", "-1"), "filter_eps: expected"),
        (GRADIENT, ("--input-grad-out", "a.npy", "--workspace-bytes", "7"), "workspace_bytes: expected"),
        (GRADIENT, ("--input-grad-out", "a.npy", "--dtype", "bfloat16"), "these are float32"),
        ("fused_cross_entropy_loss_with_max_sum", ("--softmax-out", "a.npy"), "the call makes no softmax"),
        ("fused_cross_entropy_loss_with_max_sum", ("--loss-out", "a.npy"), "makes softmax: name a file for it"),
    ],
)
def test_linear_calls_that_are_refused(operator, options, message, capsys):
    arguments = linear_values(np.float32)
    if operator != GRADIENT:
        arguments = {name: arguments[name] for name in ("logits_max", "sum_exp_logits")}
        arguments["predicted_logits"] = arguments["logits_max"]
        if "--loss-out" in options:
            arguments["vocab_parallel_logits"] = np.zeros((10, 21), np.float32)
    assert message in refused(capsys, operator, *save(**arguments), *options)


@pytest.mark.parametrize("when", ["computing", "syncing"])
def test_a_failure_leaves_neither_of_two_results(when, monkeypatch, capsys):
    def fail(*arguments, **settings):
        assert sum(name.endswith(".part") for name in os.listdir()) == 2
        raise MemoryError("no memory")

    target = {"computing": (ag, GRADIENT), "syncing": (os, "fsync")}[when]
    names = save(**linear_values(np.float32))
    if when == "computing":
        fail = functools.wraps(ag.fused_linear_cross_entropy_loss_grad)(fail)
    monkeypatch.setattr(*target, fail)
    assert "no memory" in refused(capsys, GRADIENT, *names, *result_files("input_grad", "weight_grad"))


# ---- boxes -----------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 9), max_size=5)
    .map(tuple)
    .flatmap(lambda shape: st.tuples(st.just(shape), st.integers(0, max(len(shape) - 1, 0)))),
    st.booleans(),
    st.integers(1, 200),
    st.integers(1, 20),
)
def test_boxes_cover_everything_once(shape_and_dim, fortran_order, elements, run):
    shape, dim = shape_and_dim
    covered = np.zeros(shape, int)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "BOX_ELEMENTS", elements)
        patch.setattr(chunks, "RUN_ELEMENTS", run)
        parts = list(chunks.boxes(shape, dim, fortran_order))
    for box in parts:
        covered[box] += 1
        if covered.size:
            assert covered[box].shape[dim : dim + 1] == shape[dim : dim + 1]
            assert covered[box].size <= max(elements, shape[dim] if shape else 1) * run
    assert (covered == 1).all()


def test_boxes_are_of_the_size_meant():
    boxes = list(chunks.boxes((1000, 30, 4096), 2, False))
    assert [part.stop - part.start for part in boxes[0]] == [8, 30, 4096]
    assert len(boxes) == 125
    # Along the first axis of long columns: as many columns as keep the reading efficient.
    assert [part.stop - part.start for part in next(chunks.boxes((10**6, 10**5), 0, False))] == [10**6, 2**13]
    assert [part.stop - part.start for part in next(chunks.boxes((10**6, 10**5), 0, True))] == [10**6, 1]
