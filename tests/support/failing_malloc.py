"""Let one allocation of a process fail, by `failing_malloc.c`, which the process must have loaded before all else."""

from __future__ import annotations

import ctypes

_library = ctypes.CDLL(None)
_fail_at, _has_failed = _library.fail_at, _library.has_failed
_fail_at.argtypes = [ctypes.c_long]

#: Let the n-th allocation from now on fail.
fail_at = _fail_at


def ended() -> bool:
    """Tell whether an allocation has failed; from now on none does. (These calls allocate, too.)"""
    try:
        failed = bool(_has_failed())
        _fail_at(0)
    except (MemoryError, ctypes.ArgumentError):
        return False
    return failed
