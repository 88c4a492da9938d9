"""The Ascend NPU's place in the registry. This release has no binding to the device, and says so."""

from __future__ import annotations

from ..contract import Call

NAME = "npu"
_REASON = "this release contains no binding to the device's operator library"


def status() -> tuple[bool, str]:
    return False, _REASON


def refusal(call: Call) -> str | None:
    return _REASON


def run(call: Call, num_threads: int | None):
    raise RuntimeError(_REASON)
