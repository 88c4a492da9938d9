"""The registry of backends: who computes, and why (not)."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from .._call import Call
from . import cpu, npu, reference


class Status(NamedTuple):
    """Whether a backend can be used on this machine, and the reason."""

    usable: bool
    reason: str


class Backend(Protocol):
    """What a backend module offers: its name, its status, and `run`, which computes a validated call.

    The backends of the host take every call, `npu` says by its `refusal` which ones it does not.
    """

    NAME: str

    def status(self) -> tuple[bool, str]: ...

    def run(self, call: Call, threads: int) -> Any:
        """The results, on so many threads; 0: the default. `MissingKernelError`: there are none, and from now on
        `npu.refusal` says so of such calls."""


#: By name. ``auto`` chooses the device where it takes the call, else the CPU, whose compiled `run` is called directly.
REGISTRY: dict[str, Backend] = {module.NAME: module for module in (npu, cpu, reference)}


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
