"""Test the files, arguments and places that ``ascend-grad apply`` refuses, and that it changes no file then."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import pickle
import re
import shutil
import stat
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from files import refused, save, sparse
from samples import BFLOAT16

import ascend_grad as ag
from ascend_grad.backends.ascend import backend as npu

pytestmark = pytest.mark.usefixtures("here")


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
    "archive": b"PK\x03\x04 and more",
    "nested": raw_npy("(" * 9000),
    "nested dtype": raw_npy(
        "{'descr': " + "[('', " * 900 + "'<f4'" + ")]" * 900 + ", 'fortran_order': False, 'shape': ()}"
    ),
    "an escape": raw_npy("{'descr': '\\d', 'fortran_order': False, 'shape': (1,)}", bytes(4)),
    "not UTF-8": b"\x93NUMPY\x02\x00\x04\x00\x00\x00\xff\xfe\xfd\n",
    "subarrays": raw_npy("{'descr': ('<f4', (2,)), 'fortran_order': False, 'shape': (1,)}", bytes(8)),
    "many axes": raw_npy(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({'1, ' * 100})}}", bytes(4)),
    "a header of 4 GiB": b"\x93NUMPY\x02\x00\xff\xff\xff\xff{'descr'",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_files(kind, capsys):
    Path("x.npy").write_bytes(BROKEN[kind])
    assert refused(capsys, "softmax", "--input", "x.npy", "-o", "out.npy").startswith("x.npy: ")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("empty", "x.npy: the file is empty"),
        ("text", "x.npy: expected a .npy file, as numpy.save writes"),
        ("other magic", "x.npy: expected a .npy file, as numpy.save writes"),
    ],
)
def test_files_that_are_no_arrays(kind, message, capsys):
    Path("x.npy").write_bytes(BROKEN[kind])
    assert refused(capsys, "softmax", "x.npy", "-o", "out.npy") == message


@pytest.mark.parametrize("argv", [("-", "-o", "y.npy"), ("x.npy", "-o", "-"), ("--input", "-", "-o", "y.npy")])
def test_standard_streams_are_refused(argv, capsys):
    np.save("x.npy", np.zeros(3))
    message = refused(capsys, "softmax", *argv)
    assert message.startswith("-: standard input and output are not supported; name a file")


def test_an_input_in_the_place_of_the_result(capsys):
    save(g=np.zeros(3), y=np.zeros(3))
    for inputs in (("g.npy", "y.npy"), ("g.npy",)):
        message = refused(capsys, "softmax_backward", *inputs, "--output", "dx.npy")
        assert message == "name a file for a result, with -o (--output is an input, the forward result)"
    assert refused(capsys, "softmax", "y.npy") == "name a file for a result, with -o"


def test_truncation_is_named(capsys):
    Path("x.npy").write_bytes(BROKEN["too long"])
    assert "truncated" in refused(capsys, "softmax", "--input", "x.npy", "-o", "out.npy")


def test_a_header_is_not_read_before_its_size_is_looked_at(capsys):
    Path("x.npy").write_bytes(BROKEN["a header of 4 GiB"])
    os.truncate("x.npy", 2**29)
    tracemalloc.start()
    try:
        message = refused(capsys, "softmax", "--input", "x.npy", "-o", "out.npy")
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()
    assert "its header has 4294967295 bytes, expected at most 10000" in message


def test_elements_that_are_arrays_are_named(capsys):
    Path("x.npy").write_bytes(BROKEN["subarrays"])
    message = refused(capsys, "softmax", "--input", "x.npy", "-o", "out.npy")
    assert message == "x.npy: expected a .npy file of numbers: its elements are arrays of dtype ('<f4', (2,))"


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
        ("archive.npz", "archive.npz: expected a .npy file; it is an .npz archive with the arrays a, b;"),
        ("empty.npz", "empty.npz: expected a .npy file; it is a zip archive; unpack it first"),
        ("fifo", "fifo: expected a regular file"),
        ("directory", "directory: expected a .npy file, got a directory that is no Zarr array"),
        ("socket", "socket: expected a regular file"),
        ("loop", "loop: Too many levels of symbolic links"),
        ("/dev/null", "/dev/null: expected a regular file"),
        ("/dev/zero", "/dev/zero: expected a regular file"),
        ("/proc/self/mem", "/proc/self/mem: cannot be read: Input/output error"),
        ("/proc/self/status", "/proc/self/status: expected a .npy file; it is text"),
    ],
)
def test_what_cannot_be_an_input(name, message, capsys):
    np.savez("archive.npz", a=np.zeros(100), b=np.zeros(1))
    np.savez("empty.npz")
    os.mkfifo("fifo")
    os.mkdir("directory")
    os.mknod("socket", stat.S_IFSOCK | 0o600)
    os.symlink("loop", "loop")
    assert message in refused(capsys, "softmax", "--input", name, "-o", "out.npy")


def zipped(*names: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in names:
            archive.writestr(name, b"")
    return buffer.getvalue()


def tensors(*names: str) -> bytes:
    description = json.dumps({"__metadata__": {}} | dict.fromkeys(names)).encode()
    return len(description).to_bytes(8, "little") + description


OTHER_FORMATS = {
    "x.npz": (
        zipped("a.npy", "b.npy"),
        "an .npz archive with the arrays a, b; convert it with numpy.save('FILE.npy', numpy.load(",
    ),
    "many.npz": (zipped(*(f"{n}.npy" for n in range(9))), "with the arrays 0, 1, 2, 3, 4 and 4 more;"),
    "x.pt": (
        zipped("x/data.pkl", "x/data/0"),
        "a file of torch.save; convert it with numpy.save('FILE.npy', torch.load('x.pt')[",
    ),
    "old.pth": (
        pickle.dumps(1, 2),
        "a pickle, which is never loaded; convert it with numpy.save('FILE.npy', torch.load(",
    ),
    "x.zarr.zip": (
        zipped("x/zarr.json", "x/c/0"),
        "a Zarr array or group in a zip archive; unpack it into a directory",
    ),
    "damaged.zip": (b"PK\x03\x04", "a damaged zip archive"),
    "x.safetensors": (
        tensors("a", "b"),
        "a safetensors file with the tensors a, b; convert it with numpy.save('FILE.npy', safetensors.",
    ),
    "x.h5": (
        b"\x89HDF\r\n\x1a\n",
        "an HDF5 file; convert it with numpy.save('FILE.npy', h5py.File('x.h5')['NAME'][:])",
    ),
    "x.csv": (b"1.5,2\n3,4\n", "text; convert it with numpy.save('FILE.npy', numpy.loadtxt('x.csv', delimiter=','))"),
    "x.txt": (b"1.5 2\n3 4\n", "text; convert it with numpy.save('FILE.npy', numpy.loadtxt('x.txt'))"),
    "x.npy.gz": (gzip.compress(b"x"), "compressed; decompress it first"),
}


@pytest.mark.parametrize("name", OTHER_FORMATS)
def test_other_formats(name, capsys):
    """The message tells how to make a .npy file."""
    content, message = OTHER_FORMATS[name]
    Path(name).write_bytes(content)
    expected = f"{name}: expected a .npy file; it is "
    found = refused(capsys, "softmax", "--input", name, "-o", "out.npy")
    assert found.startswith(expected)
    assert message in found


@pytest.mark.parametrize(
    ("g", "y", "options", "message"),
    [
        (
            np.zeros((2, 3), "i4"),
            np.zeros((2, 3), "i4"),
            (),
            "grad_output.npy: softmax_backward: grad_output: expected dtype float32",
        ),
        (
            np.zeros((2, 3), "f4"),
            np.zeros((2, 3), "f8"),
            (),
            "output.npy: softmax_backward: output: expected dtype float32",
        ),
        (np.zeros((2, 3), "f4"), np.zeros((3, 2), "f4"), (), "output: expected shape (2, 3)"),
        (np.zeros((2, 3), "f4"), np.zeros((2, 3), "f4"), ("--dim", "2"), "axis: expected a value in [-2, 1]"),
        (np.zeros((2, 3), "f4"), np.zeros((2, 3), "f4"), ("--threads", "0"), "num_threads: expected"),
        (np.zeros((2, 3), "f4"), np.zeros((2, 3), "f4"), ("--backend", "npu"), "backend 'npu'"),
        (np.zeros((2, 3), "f4"), np.zeros((2, 3), "f4"), ("--dtype", "bfloat16"), "int16 or uint16, not float32"),
        (np.zeros((2, 3), BFLOAT16), np.zeros((2, 3), BFLOAT16), (), "add --dtype bfloat16"),
        (np.zeros((2, 3), "i2"), np.zeros((2, 3), "i2"), (), "these are the bits of bfloat16, add --dtype bfloat16"),
        (np.zeros((2, 3), ">u2"), np.zeros((2, 3), "f4"), (), "these are the bits of bfloat16, add --dtype bfloat16"),
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


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("absent/out.npy", "there is no directory"),
        ("absent/", "absent/: names a directory, but the result is a file"),
        (".", "expected a regular file"),
        ("/dev/null", "expected a regular file"),
        ("/dev/full", "expected a regular file"),
        ("out.npz", "the result is a .npy file"),
        ("out.zarr", "out.zarr: ends in .zarr, but the result of .npy files is a .npy file"),
        ("absent/out.zarr/", "absent/out.zarr/: ends in .zarr, but the result of .npy files is a .npy file"),
        ("", "the name of a result is empty"),
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
    assert "cannot create a file in its directory" in refused(capsys, "softmax", *names, "-o", "locked/out.npy")


# ---- disk space ------------------------------------------------------------------------------------------------------


def test_a_result_beyond_the_disk_is_refused_at_once(capsys, here):
    free = shutil.disk_usage(here).free
    try:
        size = sparse("x.npy", (2, free // 4))
    except OSError:
        pytest.skip("this file system takes no file as large as its free space")
    message = refused(capsys, "softmax", "--input", "x.npy", "-o", "out.npy")
    if "Cannot allocate memory" in message:  # the address space is too small to map the input, as under emulation
        assert message.startswith("x.npy: expected a .npy file of numbers")
    else:
        assert re.search(rf"out\.npy: cannot reserve {size} bytes \(\d+ are free\): No space left on device", message)


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
