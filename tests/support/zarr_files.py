"""Make Zarr arrays for commands, look at those that commands have made, and interrupt commands."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import zarr
from samples import BFLOAT16

#: The directory of parts of the result "out" that is not complete.
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
    """Return the times at which the chunks of an array were written."""
    names = [Path(folder, name) for folder, _, files in os.walk(path) for name in files]
    return {
        str(name.relative_to(path)): name.stat().st_mtime_ns for name in names if not name.name.startswith((".", "z"))
    }


class Interrupted(Exception):
    pass


def interrupt():
    raise Interrupted


def before_call(number: int, function: Callable, action: Callable = interrupt) -> Callable:
    """Return a function that calls `action` before its n-th call."""
    calls = itertools.count(1)

    @functools.wraps(function)
    def counted(*args, **kwargs):
        if next(calls) == number:
            action()
        return function(*args, **kwargs)

    return counted
