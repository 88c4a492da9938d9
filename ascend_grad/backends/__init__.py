"""The registry of backends."""

from __future__ import annotations

from .. import config
from . import cpu, reference
from .ascend import backend as ascend
from .base import Backend, DeviceBackend, Status

__all__ = ["CHOICES", "DEVICES", "FROM_ENVIRONMENT", "REGISTRY", "Status", "backends"]

#: Backends of devices, in the order in which the automatic choice asks them. The CPU computes calls that none takes.
DEVICES: tuple[DeviceBackend, ...] = (ascend,)

_HOST: tuple[Backend, ...] = (cpu, reference)

#: All backends by name.
REGISTRY: dict[str, Backend] = {backend.NAME: backend for backend in (*DEVICES, *_HOST)}

#: Names that a choice of a backend accepts.
CHOICES = ("auto", *sorted(REGISTRY))

#: The environment's choice, or None.
FROM_ENVIRONMENT = config.choice("ASCEND_GRAD_BACKEND", CHOICES)


def backends() -> dict[str, Status]:
    """Return which backends can be used on this machine.

    Returns
    -------
    dict
        Maps a backend's name to a named tuple ``usable, reason, details``.

    Examples
    --------
    >>> import ascend_grad as ag
    >>> ag.backends()["cpu"].usable
    True
    """
    return {name: Status(*backend.status()) for name, backend in REGISTRY.items()}
