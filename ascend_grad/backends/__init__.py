"""The registry of backends: who computes, and why (not)."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from ..contract import Call
from ..device.limits import Refusal
from . import cpu, npu, reference


class Status(NamedTuple):
    """Whether a backend can be used on this machine, and the reason."""

    usable: bool
    reason: str


class Backend(Protocol):
    """What a backend module offers: its name, its status, and `run`, which computes a validated call."""

    NAME: str

    def status(self) -> tuple[bool, str]: ...

    def refusal(self, call: Call) -> Refusal | None:
        """Why this valid call is not for this backend, and what forcing it raises; None where it is."""

    def run(self, call: Call, num_threads: int | None) -> Any:
        """The results. `MissingKernelError`: there are none, and from now on `refusal` says so of such calls."""


#: In the order in which ``auto`` prefers them. The reference is never chosen by itself.
REGISTRY: dict[str, Backend] = {module.NAME: module for module in (npu, cpu, reference)}
AUTOMATIC = ("npu", "cpu")


def backends() -> dict[str, Status]:
    """Tell which backends can be used here.

    Returns
    -------
    dict
        Maps a backend's name to a named tuple ``usable, reason``.

    Examples
    --------
    >>> import ascend_grad as ag
    >>> ag.backends()["cpu"].usable
    True
    """
    return {name: Status(*backend.status()) for name, backend in REGISTRY.items()}
