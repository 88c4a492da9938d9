"""Test ``ascend-grad apply`` on Zarr arrays: a result has the bits of one call and the chunks of the input."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import zarr
from files import peak_anonymous_bytes, refused, values
from samples import ARRAYS, DTYPES, MASKED
from zarr_files import PART, assert_identical, chunk_files, save_zarr

import ascend_grad as ag
from ascend_grad.cli import apply_zarr
from ascend_grad.cli.main import main

pytestmark = [
    pytest.mark.usefixtures("here", "small_parts"),
    pytest.mark.filterwarnings("ignore:.*does not have a Zarr V3 specification"),
]


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
