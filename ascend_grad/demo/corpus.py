"""The demo's text: the source of the running interpreter's own standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

#: Directories that are no part of the library proper, or that differ from one installation to the next.
SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
#: Every tenth file is held out.
HELD_OUT = slice(9, None, 10)
LEAST_TRAINING, LEAST_HELD_OUT = 100_000, 10_000


class TooLittleTextError(Exception):
    """Error for a text that is too short to train on, with a message of one line for the user."""


class Corpus(NamedTuple):
    """Text as bytes, split by files."""

    training: NDArray[np.uint8]
    held_out: NDArray[np.uint8]
    files: int


def standard_library() -> Path:
    """Return the directory of the running interpreter's own library."""
    return Path(sysconfig.get_path("stdlib"))


def read_corpus(directory: Path) -> Corpus:
    """Read the Python source text below a directory, in the order of the files' names.

    Raises
    ------
    TooLittleTextError
        If there is too little of it.
    """
    names = sorted(path.relative_to(directory) for path in directory.rglob("*.py"))
    texts = [(directory / name).read_bytes() for name in names if SKIPPED.isdisjoint(name.parts)]
    files = len(texts)
    held_out = b"".join(texts[HELD_OUT])
    del texts[HELD_OUT]
    training = b"".join(texts)
    if len(training) < LEAST_TRAINING or len(held_out) < LEAST_HELD_OUT:
        raise TooLittleTextError(
            f"{directory}: expected at least {LEAST_TRAINING} bytes of Python source text to train on and "
            f"{LEAST_HELD_OUT} held out, got {len(training)} and {len(held_out)}"
        )
    return Corpus(np.frombuffer(training, np.uint8), np.frombuffer(held_out, np.uint8), files)
