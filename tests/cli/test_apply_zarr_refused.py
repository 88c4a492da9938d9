"""Test what ``ascend-grad apply`` refuses on Zarr arrays: damaged inputs, results that cannot be written, options."""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr
from files import refused, values
from samples import BFLOAT16
from zarr_files import save_zarr

pytestmark = [
    pytest.mark.usefixtures("here", "small_parts"),
    pytest.mark.filterwarnings("ignore:.*does not have a Zarr V3 specification"),
]

#: Functions that damage the metadata of an array.
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


def with_metadata(path: str, **changes) -> None:
    """Save an array in the second format, and change its metadata."""
    save_zarr(path, np.zeros(3), (2,), zarr_format=2)
    metadata = json.loads(Path(path, ".zarray").read_text())
    Path(path, ".zarray").write_text(json.dumps(metadata | changes))


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
    assert message.startswith(("x: expected a Zarr array of numbers: ", "softmax: input: expected"))


class Trap:
    def __reduce__(self):
        return exec, ("raise SystemExit('unpickled')",)


def test_a_row_of_chunks_beyond_any_memory(capsys):
    with_metadata("x", shape=[4, 2**50], chunks=[1, 2**10])
    message = refused(capsys, "softmax", "--input", "x", "-o", "out")
    assert message.startswith("out: cannot be computed from x: out of memory")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


#: Functions that damage a file.
DAMAGES = {
    "no content": lambda path: path.write_bytes(b""),
    "less": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "another bit": flip,
}


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
    DAMAGES[damage](Path("x", key))
    message = refused(capsys, "softmax", "--input", "x", "--dim", "0", "-o", "out")
    expected = {"no content": f"x/{key}: the file is empty"}.get(damage, "x: cannot be read at [0:4, 0:4]: ")
    if damage == "less" and codecs == "blosc":
        expected = f"x/{key}: a damaged chunk: expected 48 bytes, got 47"
    assert message.startswith(expected)


@pytest.mark.parametrize("damage", ["pipe", "directory", "device"])
def test_a_chunk_that_is_no_file(damage, capsys):
    save_zarr("x", np.ones((5, 6)), (2, 4))
    METADATA[damage](Path("x/c/0/1"))
    assert refused(capsys, "softmax", "--input", "x", "-o", "out") == "x/c/0/1: expected a regular file"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("group", "group: expected a Zarr array, got a group; it has no arrays"),
        ("members", "members: expected a Zarr array, got a group; name one of its arrays: members/a, members/b/c"),
        ("damaged", "damaged: expected a Zarr array of numbers: "),
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


# ---- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("out", "text"),
    [
        ("x", "x: exists, and was not written by this command"),
        ("x/", "x/: exists, and was not written by this command"),
        ("link", "link: exists, and was not written by this command"),
        ("file", "file: exists, and was not written by this command"),
        ("directory", "directory: exists, and was not written by this command"),
        ("", "exists, and was not written by this command"),
        ("nowhere", "nowhere: is a broken link"),
        ("x/y", "x/y: is inside the input x; inputs are not changed"),
        ("x/c/y", "x/c/y: is inside the input x; inputs are not changed"),
        ("link/y", "link/y: is inside the input x; inputs are not changed"),
        ("absent/out", "absent/out: there is no directory"),
        ("file/out", "file/out: there is no directory"),
        ("/dev/full", "/dev/full: exists"),
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
    assert message == "out: cannot be encoded like the first input: too large"


# ---- options and packages --------------------------------------------------------------------------------------------


def test_linear_operators_take_files_alone(capsys):
    save_zarr("x", np.zeros(3), (2,))
    np.save("y.npy", np.zeros(3))
    names = ("--logits-max", "x", "--sum-exp-logits", "y.npy", "--predicted-logits", "y.npy", "--loss-out", "loss")
    message = refused(capsys, "fused_cross_entropy_loss_with_max_sum", *names)
    assert message.endswith("_max_sum: expected a row-wise operator or cross_entropy for Zarr arrays")


@pytest.mark.parametrize("order", [1, -1])
def test_what_does_not_go_together(order, capsys):
    save_zarr("x", np.zeros(3), (2,))
    Path("directory").mkdir()
    np.save("y.npy", np.zeros(3))
    for other in ("directory", "y.npy", "absent"):
        g, y = ("x", other)[::order]
        message = refused(capsys, "softmax_backward", "--grad-output", g, "--output", y, "-o", "out")
        assert message == f"{other}: expected a Zarr array, like x"


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
