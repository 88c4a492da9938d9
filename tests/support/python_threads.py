"""Run work on several Python threads at once, and check that calls let other threads run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import pytest

#: Code of a script that interrupts the main thread when the result `out`, an array of sevens, changes.
INTERRUPT = """
        def interrupt():
            while out[0, 0] == 7:
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
"""


def in_threads(*functions: Callable[[], object]) -> None:
    """Run each function on a separate thread, all at once, and raise one of their exceptions in the calling thread."""
    errors = []

    def guarded(function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def empty_on_threads(items: list) -> None:
    """Take all items out of a list on two threads at once, which free them."""

    def drop() -> None:
        with suppress(IndexError):
            while True:
                items.pop()

    in_threads(drop, drop)
    assert not items


def check_at_once(checks: Sequence[Callable[[], None]], threads: int, stride: int) -> None:
    """Make all checks on each of several threads, which begin together, each of them with another check."""
    start = threading.Barrier(threads)

    def work(first: int) -> None:
        start.wait()
        for i in range(len(checks)):
            checks[(first * stride + i) % len(checks)]()

    in_threads(*(lambda first=first: work(first) for first in range(threads)))


def assert_other_threads_run(call: Callable[[], object]) -> None:
    """Repeat a call until another thread has run during the call."""
    ticks, stop = 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not stop.is_set():
            ticks += 1
            time.sleep(0)

    other = threading.Thread(target=tick)
    other.start()
    try:
        for _ in range(500):
            before = ticks
            call()
            if ticks > before:
                break
        else:
            pytest.fail("another thread never ran while calls were computing")
    finally:
        stop.set()
        other.join()
