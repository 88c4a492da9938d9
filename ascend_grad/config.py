"""Settings from the environment. Each is read and checked once, at import, by the module that it is for."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

#: The settings that the environment makes, by variable.
SETTINGS: dict[str, str | int] = {}


def choice(name: str, choices: Sequence[str], supported: Sequence[str] | None = None) -> str | None:
    """One of some words, None where the variable is not set. Not all choices may be supported by this machine."""
    value = os.environ.get(name)
    if not value:
        return None
    if value not in choices:
        _fail(f"{name}: expected one of {', '.join(choices)}, got {value!r}")
    if supported is not None and value not in supported:
        _fail(f"{name}: this machine supports {', '.join(supported)}, got {value!r}")
    SETTINGS[name] = value
    return value


def integer(name: str, low: int, high: int) -> int | None:
    """An integer in a range, None where the variable is not set."""
    value = os.environ.get(name)
    if not value:
        return None
    try:
        number = int(value)
    except ValueError:
        number = low - 1
    if not low <= number <= high:
        _fail(f"{name}: expected an integer in [{low}, {high}], got {value!r}")
    SETTINGS[name] = number
    return number


def _fail(message: str) -> NoReturn:
    # The command line cannot catch what happens while its own package is imported.
    if not _is_command_line():
        raise ValueError(message)
    print(f"ascend-grad: error: {message}", file=sys.stderr)
    sys.exit(2)


def _is_command_line() -> bool:
    """Whether this process was started as ``ascend-grad`` or ``python -m ascend_grad``."""
    # sys.argv does not name the module while `python -m` is looking for it, and importing its package for that.
    started = "".join(sys.orig_argv[-len(sys.argv) :][:1])
    return os.path.basename(started).removeprefix("-m") in ("ascend-grad", "ascend_grad")
