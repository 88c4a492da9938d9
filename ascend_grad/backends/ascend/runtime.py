"""Finding the device: initialisation, the number of devices, what there is. Once per process, at first need.

A present toolkit proves nothing: the device is usable where the libraries load, the runtime initialises and counts a
device. The reason is kept where it is not.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ... import _acl, _aclnn, config
from ...errors import STATUS_CODES, STATUS_NAMES, AscendGradError, MissingKernelError
from . import libraries
from .libraries import Unusable

logger = logging.getLogger("ascend_grad")

#: The status code that all functions of a link-time stub return.
STUB = STATUS_CODES["ACL_ERROR_COMPILING_STUB_MODE"]
NO_DEVICE = STATUS_CODES["ACL_ERROR_RT_NO_DEVICE"]
#: The status code of aclInit if other code in this process has initialised the runtime.
INITIALISED = STATUS_CODES["ACL_ERROR_REPEAT_INITIALIZE"]

#: The device that the environment asks for, None if it asks for none.
DEVICE = config.integer("ASCEND_GRAD_DEVICE", 0, 2**31 - 1)


class State(NamedTuple):
    """The result of the search: whether the device is usable and why (not), and what is on it."""

    #: The fields of a `Status`.
    status: tuple[bool, str, str]
    device_count: int = 0
    soc: str = ""
    #: Operators that this toolkit lacks: the device's name of one -> the reason.
    absent: dict[str, str] = {}  # noqa: RUF012  # never changed
    #: The files of the toolkit's libraries.
    libraries: tuple[str, ...] = ()

    @property
    def usable(self) -> bool:
        return self.status[0]

    @property
    def reason(self) -> str:
        return self.status[1]


#: The result of the search, under "state"; empty until the first search. Dispatch reads it at every call.
found: dict[str, State] = {}
_opened = False  # whether aclInit was called by this process, or by its parent before the fork
_lock = threading.RLock()  # a signal handler may call `state` in the middle of the search
_searching = False
#: The state that is found while the process ends.
ENDING = State((False, "the process is ending", ""))


def state() -> State:
    """Return what was found; the first call searches for the device."""
    return found.get("state") or _find()


def _find() -> State:
    global _searching
    with _lock:
        if _searching:
            return State((False, "the search for the device is in progress", ""))
        _searching = True
        try:
            if "state" not in found:
                found["state"] = _look_for_device()
            return found["state"]
        finally:
            _searching = False


def status() -> tuple[bool, str, str]:
    """Return the fields of the backend's `Status`, with the libraries and operators of a usable device as details."""
    known = state()
    if not known.usable:
        return known.status
    lines = [
        _listed_libraries(known.libraries),
        f"operators found: {', '.join(name for name in _aclnn.NAMES if name not in known.absent)}",
        *(f"operator missing: {reason}" for reason in known.absent.values()),
    ]
    return True, known.reason, "\n".join(lines)


def _listed_libraries(paths: Sequence[str]) -> str:
    return f"libraries: {', '.join(paths)}" if paths else ""


def _look_for_device() -> State:
    toolkit = libraries.Toolkit()
    try:
        state = _open(toolkit)
    except Unusable as error:
        if error.broken:
            logger.warning("the Ascend NPU cannot be used: %s", error)
        else:
            logger.info("%s", error if error.details else f"no Ascend NPU: {error}")
        return State((False, str(error), error.details or _listed_libraries(toolkit.paths)))
    logger.info("Ascend NPU: %s", state.reason)
    return state


def _open(toolkit: libraries.Toolkit) -> State:
    global _opened
    if missing := _acl.fill_table([*toolkit.runtime(), *toolkit.framework()]):
        raise Unusable(f"the runtime library lacks {', '.join(missing)}", broken=True)
    torch_failure = _initialise_torch()
    symbols = _aclnn.bind(toolkit.operators())

    _opened = True
    code, message = _acl.initialise()
    if code == STUB:
        raise Unusable("the runtime library is a stub to link against, not a runtime", broken=False)
    if code not in (0, INITIALISED):
        raise Unusable(f"aclInit failed: {_described(code, message)}", broken=code != NO_DEVICE)
    atexit.register(_close)
    count = _device_count()
    if torch_failure:
        logger.warning("torch_npu.npu.init() failed (%s); the device is used without torch_npu", torch_failure)
    absent = {name: _reason_of_absence(name, symbol) for name, symbol in symbols.items()}
    return _usable(count, _acl.soc_name(), absent, tuple(toolkit.paths))


def _reason_of_absence(name: str, symbol: str) -> str:
    """Return the reason why an operator is absent whose library, or the runtime's, lacks a symbol."""
    if symbol.startswith(name):
        return f"this toolkit's operator library lacks {name}"
    return f"this toolkit's runtime library lacks {symbol}, which {name} needs"


def _usable(devices: int, soc: str, absent: dict[str, str], paths: tuple[str, ...]) -> State:
    reason = f"{'1 device' if devices == 1 else f'{devices} devices'}, {soc or 'unknown model'}"
    if absent:
        reason += f"; this toolkit lacks {', '.join(absent)}"
    return State((True, reason, ""), devices, soc, absent, paths)


def mark_operator_missing(error: MissingKernelError) -> None:
    """Record that the toolkit has no kernel of an operator, which is absent from now on, and warn once."""
    name = error.call.removesuffix("GetWorkspaceSize")
    reason = f"this toolkit has no usable kernel of {name} ({_described(error.code, error.runtime_message)})"
    with _lock:
        known = found.get("state")
        if known is None or not known.usable or name in known.absent:
            return
        absent = {**known.absent, name: reason}
        found["state"] = _usable(known.device_count, known.soc, absent, known.libraries)
    which = f"such as this call of {error.operator}"
    logger.warning("%s: calls that need it, %s, do not run on the Ascend NPU", reason, which)


def _initialise_torch() -> str:
    """Let torch_npu initialise the runtime, if this process uses it, and return its error, "" for none.

    The first aclInit decides the configuration, and torch_npu relies on its own. After an error the device is used
    without torch_npu.
    """
    torch = sys.modules.get("torch_npu")
    initialise = getattr(getattr(torch, "npu", None), "init", None)
    if initialise is None:  # torch_npu is not imported, or not yet as a whole
        return ""
    try:
        with _acl.ContextGuard():
            initialise()
    except Exception as error:
        return repr(error)
    return ""


def _current_stream_of_torch(device: int) -> int | None:
    """Return the address of torch's current stream of a device; None if this process does not use torch_npu.

    torch_npu keeps work back in a queue on the host for each device. The queue of torch's current device goes to the
    stream before this answers, so the address is read last, and within the device.
    """
    npu = getattr(sys.modules.get("torch_npu"), "npu", None)
    if npu is None or not npu.is_initialized() or _acl.is_detached():
        return None
    with _acl.ContextGuard(), npu.device(device):
        return npu.current_stream(device).npu_stream


def empty_queue_of_torch(device: int) -> None:
    """Let torch submit to its current stream of a device what it holds back, if this process uses torch_npu."""
    _current_stream_of_torch(device)


def wait_for_torch(device: int) -> None:
    """Wait for what torch has put on its current stream of a device, if this process uses torch_npu."""
    stream = _current_stream_of_torch(device)
    if stream is not None:
        with _acl.DeviceGuard(device):
            _acl.borrowed_stream(stream, device).synchronize()


def _device_count() -> int:
    try:
        count = _acl.device_count()
    except AscendGradError as error:
        if error.code == STUB:
            raise Unusable("the runtime library is a stub to link against, not a runtime", broken=False) from error
        raise Unusable(str(error), broken=error.code != NO_DEVICE) from error
    if count == 0:
        raise Unusable("the runtime found no device", broken=False)
    count = min(count, _acl.MAX_DEVICES)
    if DEVICE is not None and DEVICE >= count:
        there = f"the devices are 0 to {count - 1}" if count > 1 else "the only device is 0"
        raise Unusable(f"ASCEND_GRAD_DEVICE is {DEVICE}, but {there}", broken=True)
    return count


def _described(code: int | None, message: str) -> str:
    return f"{code} {STATUS_NAMES.get(code or 0, '')}".strip() + (f", {message}" if message else "")


_releases: list[Callable[[], bool]] = []


def before_closing(release: Callable[[], bool]) -> Callable[[], bool]:
    """Register a function that releases resources before the runtime is closed, and returns whether all were."""
    _releases.append(release)
    return release


def _close() -> None:
    """Release everything at the end of the process, and finalise the runtime unless some thread still uses it.

    Later calls, of other handlers for one, find no device.
    """
    found["state"] = ENDING
    released = [release() for release in _releases]
    if all(released):
        _acl.finalise()
        _acl.detach()


def _after_fork_in_child() -> None:
    global _lock, _searching
    _lock, _searching = threading.RLock(), False  # another thread of the parent may have held the lock
    if _opened:
        _acl.detach()
        atexit.unregister(_close)
        reason = (
            "this process was forked after its parent had opened the device, and cannot use the parent's handles; "
            "start processes with 'spawn', or fork before the first call"
        )
        found["state"] = State((False, reason, ""))


os.register_at_fork(after_in_child=_after_fork_in_child)
