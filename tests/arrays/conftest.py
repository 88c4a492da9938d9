"""What was handed out is counted."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import producers
import pytest


@pytest.fixture(autouse=True)
def everything_is_deleted_once() -> Iterator[None]:
    """Whatever a test hands out is deleted by its end, once, without help of the garbage collector."""
    gc.collect()  # what the test before left in tracebacks
    producers.live.clear()
    yield
    assert not producers.wrongly_deleted
