"""Let one allocation of a process fail, by `failing_malloc.c`, which the process must have loaded before all else."""

from __future__ import annotations

import ctypes

_library = ctypes.CDLL(None)
#: Let the n-th allocation from now on fail. None: the library is not loaded.
fail_at = getattr(_library, "fail_at", None)
_has_failed = getattr(_library, "has_failed", None)
if fail_at is not None:
    fail_at.argtypes = [ctypes.c_long]


def ended() -> bool:
    """Return whether an allocation has failed; from now on none does. (These calls also allocate.)"""
    try:
        failed = bool(_has_failed())
        fail_at(0)
    except (MemoryError, ctypes.ArgumentError):
        return False
    return failed
