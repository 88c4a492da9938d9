"""The interface of backends."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from .._call import Call
from ..errors import AscendGradError


class Status(NamedTuple):
    """A backend's status on this machine: whether it can be used, and the reason."""

    usable: bool
    reason: str
    #: Of a device, in lines: where it was looked for, or the opened libraries with what they have and lack.
    details: str = ""


class Unsupported(NamedTuple):
    """The reason why a device does not take a valid call."""

    reason: str
    #: The exception if the device is forced. None: the forced device is called anyway, and returns its own code.
    error: AscendGradError | None


class Backend(Protocol):
    """The interface of a backend's module. Backends of the host take every call."""

    NAME: str

    def status(self) -> tuple:
        """Return the fields of a `Status`. This must neither raise nor import anything expensive."""

    def run(self, call: Call, threads: int) -> Any:
        """Compute and return the results, on `threads` threads; 0: the default.

        `MissingKernelError`, raised before anything is written, means that the device has no kernel for the call. From
        then on, `unsupported_reason` reports this for such calls. `ProcessEndingError`, raised before anything is
        written, means that the device takes no further calls. From then on, `status` reports this.
        """


class DeviceBackend(Backend, Protocol):
    """The interface of a device's backend, which may be absent, has limits, and has a separate class of arrays."""

    #: The device's state, under "state": a tuple whose first entry is the status. Empty until the first search for a
    #: device. Dispatch reads it at every call, as calling `status` would be too slow.
    found: dict[str, Any]
    #: Variables of the environment that decide what is found.
    ENVIRONMENT: tuple[str, ...]

    def owns(self, array: object) -> bool:
        """Return whether an array is on one of its devices."""

    def unsupported_reason(self, call: Call) -> Unsupported | None:
        """Return why the usable device does not take this valid call, or None if it takes it."""

    def transferred_bytes(self, call: Call) -> int:
        """Return the bytes of arguments and results that a call on arrays of the host copies to and from the device."""

    def workspace_size(self, call: Call) -> int:
        """Return the bytes of device memory that the call takes beyond arguments and results. It raises like `run`."""
