"""Settings from the environment, read and checked once, at import."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

from . import _cpu
from .arguments import MAX_THREADS

#: What can be asked for; all but "auto" are names in the registry of `backends`.
BACKENDS = ("auto", "cpu", "npu", "reference")


class Environment(NamedTuple):
    """What the environment asks for; None where it is silent."""

    backend: str | None
    cpu: str | None
    num_threads: int | None
    device: int | None


def _choice(name: str, choices: tuple[str, ...]) -> str | None:
    value = os.environ.get(name) or None
    if value is not None and value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")
    return value


def _integer(name: str, low: int, high: int) -> int | None:
    value = os.environ.get(name) or None
    if value is None:
        return None
    try:
        number = int(value)
    except ValueError:
        number = low - 1
    if not low <= number <= high:
        raise ValueError(f"{name}: expected an integer in [{low}, {high}], got {value!r}")
    return number


def _read() -> Environment:
    cpu = _choice("ASCEND_GRAD_CPU", _cpu.VARIANTS)
    if cpu is not None and cpu not in _cpu.supported_variants():
        raise ValueError(f"ASCEND_GRAD_CPU: this machine supports {', '.join(_cpu.supported_variants())}, got {cpu!r}")
    return Environment(
        backend=_choice("ASCEND_GRAD_BACKEND", BACKENDS),
        cpu=cpu,
        num_threads=_integer("ASCEND_GRAD_NUM_THREADS", 1, MAX_THREADS),
        device=_integer("ASCEND_GRAD_DEVICE", 0, 2**31 - 1),
    )


def _is_command_line() -> bool:
    """Whether this process was started as ``ascend-grad`` or ``python -m ascend_grad``."""
    # sys.argv does not name the module while `python -m` is looking for it, and importing its package for that.
    started = "".join(sys.orig_argv[-len(sys.argv) :][:1])
    return os.path.basename(started).removeprefix("-m") in ("ascend-grad", "ascend_grad")


try:
    ENVIRONMENT = _read()
except ValueError as error:
    # The command line cannot catch what happens while its own package is imported.
    if not _is_command_line():
        raise
    print(f"ascend-grad: error: {error}", file=sys.stderr)
    sys.exit(2)
_cpu.force_variant(ENVIRONMENT.cpu)
