"""Settings from the environment. The module that uses a setting reads and checks it once, at import."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

#: Values of the settings that the environment sets, by variable.
SETTINGS: dict[str, str | int] = {}


def choice(
    name: str, choices: Sequence[str], unsupported_reason: Callable[[str], str | None] = lambda value: None
) -> str | None:
    """Return one of `choices`, or None if the variable is not set.

    `unsupported_reason` returns why this machine does not support a choice, or None.
    """
    value = os.environ.get(name)
    if not value:
        return None
    if value not in choices:
        _fail(f"{name}: expected one of {', '.join(choices)}, got {value!r}")
    if reason := unsupported_reason(value):
        supported = [each for each in choices if not unsupported_reason(each)]
        _fail(f"{name}: expected one of {', '.join(supported)} on this machine, got {value!r}: {reason}")
    SETTINGS[name] = value
    return value


def integer(name: str, low: int, high: int) -> int | None:
    """Return an integer in [low, high], or None if the variable is not set."""
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
    # The command line cannot catch exceptions that are raised while this package is imported.
    if not _is_command_line():
        raise ValueError(message)
    print(f"ascend-grad: error: {message}", file=sys.stderr)
    sys.exit(2)


def _is_command_line() -> bool:
    """Return whether this process was started as ``ascend-grad`` or ``python -m ascend_grad``."""
    # sys.argv does not name the module yet while `python -m` imports the package to find it; sys.orig_argv does.
    started = "".join(sys.orig_argv[-len(sys.argv) :][:1])
    return os.path.basename(started).removeprefix("-m") in ("ascend-grad", "ascend_grad")
