"""What a backend offers, and what it says of itself."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from .._call import Call
from ..errors import AscendGradError


class Status(NamedTuple):
    """Whether a backend can be used on this machine, and the reason."""

    usable: bool
    reason: str


class Unsupported(NamedTuple):
    """Why a device does not take a valid call."""

    reason: str
    #: What forcing the device raises; None where the device is asked all the same, and answers with its own code.
    error: AscendGradError | None


class Backend(Protocol):
    """What the module of a backend offers. Backends of the host take every call."""

    NAME: str

    def status(self) -> tuple[bool, str]:
        """Whether it is usable, and the reason; must neither raise nor import anything expensive."""

    def run(self, call: Call, threads: int) -> Any:
        """The results, on so many threads; 0: the default.

        `MissingKernelError`, before anything is written: there are none, and from now on `unsupported_reason` says so
        of such calls.
        """


class DeviceBackend(Backend, Protocol):
    """What the backend of a device offers beyond that: it may be absent, has limits, and arrays of its own."""

    #: What was found of the device, under "state": a tuple whose first entry is the status. Empty until somebody has
    #: looked. Dispatch reads it at every call, where calling `status` would be too slow.
    found: dict[str, Any]

    def owns(self, array: object) -> bool:
        """Whether an array lives on one of its devices."""

    def unsupported_reason(self, call: Call) -> Unsupported | None:
        """Why the device, which is usable, does not take this valid call; None where it does."""

    def workspace_size(self, call: Call) -> int:
        """The bytes of device memory that the call takes beyond arguments and results; errors as those of `run`."""
