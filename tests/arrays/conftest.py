"""Check at the end of each test that exported arrays are deleted once."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import producers
import pytest


@pytest.fixture(autouse=True)
def everything_is_deleted_once() -> Iterator[None]:
    """Check that every exported array is deleted exactly once by the end of the test, without the garbage collector."""
    gc.collect()  # tracebacks of the previous test may hold arrays
    producers.live.clear()
    yield
    assert not producers.wrongly_deleted
