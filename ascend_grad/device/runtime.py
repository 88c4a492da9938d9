"""Finding the device: libraries, initialisation, the number of cards. Once per process, at first need.

A present toolkit proves nothing: the device is usable where the libraries load, the runtime initialises, and a card is
counted. The reason is kept where it is not.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Sequence
from typing import NamedTuple

from .. import _acl, _aclnn
from ..errors import STATUS_NAMES, AscendGradError, MissingKernelError

logger = logging.getLogger("ascend_grad")

RUNTIME_LIBRARIES = ("libascendcl.so", "libacl_rt.so")
FRAMEWORK_LIBRARY = "libnnopbase.so"
#: The operators' libraries by release, newest first. The first family that loads is used alone; the libraries of one
#: family are searched together, and opened in this order, as each may need those before it.
OPERATOR_LIBRARIES = (
    ("libopapi_math.so", "libopapi_nn.so"),
    ("libopapi.so",),
    ("libaclnn_ops_infer.so", "libaclnn_ops_train.so"),
)
FOLDER_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")

#: The code of every function of the libraries that exist only to link against.
STUB = 100039


class State(NamedTuple):
    """What was found: whether the device is usable and why (not), and what is on it."""

    status: tuple[bool, str]
    cards: int = 0
    soc: str = ""
    #: Operators that this toolkit lacks: the device's name of one -> the reason.
    absent: dict[str, str] = {}  # noqa: RUF012  # nobody changes it

    @property
    def usable(self) -> bool:
        return self.status[0]

    @property
    def reason(self) -> str:
        return self.status[1]


class _Unusable(Exception):
    """There is no usable device. `broken`: something is there that does not work."""

    def __init__(self, reason: str, *, broken: bool):
        super().__init__(reason)
        self.broken = broken


_state: State | None = None
_opened = False  # aclInit was called by this process, or by its parent before the fork
_lock = threading.RLock()  # a signal handler may ask in the middle of the search
_searching = False
ENDING = State((False, "the process is ending"))


def state() -> State:
    """What was found; looks for the device if nobody has."""
    return _state or _find()


def _find() -> State:
    global _state, _searching
    with _lock:
        if _searching:
            return State((False, "the device is being looked for"))
        _searching = True
        try:
            if _state is None:
                _state = _looked_for()
            return _state
        finally:
            _searching = False


def _looked_for() -> State:
    try:
        found = _open()
    except _Unusable as error:
        if error.broken:
            logger.warning("the Ascend NPU cannot be used: %s", error)
        else:
            logger.info("no Ascend NPU: %s", error)
        return State((False, str(error)))
    logger.info("Ascend NPU: %s", found.reason)
    return found


def _open() -> State:
    global _opened
    folders = [os.path.join(path, "lib64") for name in FOLDER_VARIABLES if (path := os.environ.get(name))]
    runtime = _first_that_loads(folders, [(name,) for name in RUNTIME_LIBRARIES], "no runtime library")
    libraries = [*runtime, *_first_that_loads(folders, [(FRAMEWORK_LIBRARY,)], "no operator framework", broken=True)]
    if missing := _acl.fill_table(libraries):
        raise _Unusable(f"the runtime library lacks {', '.join(missing)}", broken=True)
    operators = _first_that_loads(folders, OPERATOR_LIBRARIES, "no operator library", broken=True)
    symbols = _aclnn.bind(operators)

    _opened = True
    code, message = _acl.initialise()
    if code == STUB:
        raise _Unusable("the runtime library is a stub to link against, not a runtime", broken=False)
    if code not in (0, 100002):  # 100002: somebody else in this process has initialised it
        raise _Unusable(f"aclInit failed: {_described(code, message)}", broken=True)
    atexit.register(_close)
    count = _device_count()
    absent = {name: f"this toolkit's operator library lacks {symbol}" for name, symbol in symbols.items()}
    return _usable(count, _acl.soc_name(), absent)


def _usable(cards: int, soc: str, absent: dict[str, str]) -> State:
    reason = f"{'1 card' if cards == 1 else f'{cards} cards'}, {soc or 'of an unknown kind'}"
    if absent:
        reason += f"; this toolkit lacks {', '.join(absent)}"
    return State((True, reason), cards, soc, absent)


def lose_operator(error: MissingKernelError) -> None:
    """An operator turned out to have no kernel: it is absent from now on, and that is told once."""
    global _state
    name = error.call.removesuffix("GetWorkspaceSize")
    reason = f"this toolkit has no usable kernel of {name} ({_described(error.code, error.runtime_message)})"
    with _lock:
        found = _state
        if found is None or not found.usable or name in found.absent:
            return
        _state = _usable(found.cards, found.soc, {**found.absent, name: reason})
    logger.warning("the Ascend NPU computes no %s: %s", error.operator, reason)


def _device_count() -> int:
    from ..config import ENVIRONMENT

    try:
        count = _acl.device_count()
    except AscendGradError as error:
        if error.code == STUB:
            raise _Unusable("the runtime library is a stub to link against, not a runtime", broken=False) from error
        raise _Unusable(str(error), broken=True) from error
    if count == 0:
        raise _Unusable("the runtime counts no device", broken=False)
    count = min(count, _acl.MAX_DEVICES)
    if ENVIRONMENT.device is not None and ENVIRONMENT.device >= count:
        raise _Unusable(f"ASCEND_GRAD_DEVICE is {ENVIRONMENT.device}, the devices are 0 to {count - 1}", broken=True)
    return count


def _described(code: int | None, message: str) -> str:
    return f"{code} {STATUS_NAMES.get(code or 0, '')}".strip() + (f", {message}" if message else "")


def _first_that_loads(
    folders: list[str], families: Sequence[tuple[str, ...]], what: str, *, broken: bool = False
) -> list[int]:
    """Open the first family that loads as a whole, folder by folder and then by the loader's own search."""
    failures = []
    for folder in [*folders, ""]:
        for family in families:
            opened: list[int] = []
            try:
                for name in family:
                    path = os.path.join(folder, name)
                    opened.append(_acl.open_library(path))
            except OSError as error:
                for library in opened:
                    _acl.close_library(library)
                failures.append((_is_there(path, str(error)), path, str(error)))
            else:
                return opened
    for is_there, path, text in failures:  # worth more words than what is not there
        if is_there:
            raise _Unusable(f"{path} does not load: {text}", broken=True)
    places = [f"${name}/lib64 ({os.environ.get(name) or 'not set'})" for name in FOLDER_VARIABLES]
    names = ", ".join(dict.fromkeys(name for family in families for name in family))
    raise _Unusable(f"{what}: none of {names} in {', '.join(places)} or on the loader's path", broken=broken)


def _is_there(path: str, error: str) -> bool:
    """Whether a library that did not load exists, in that folder or, given a plain name, where the loader looks.

    The loader names a file that it has found by its path, and the neighbour that a library lacks.
    """
    folder, name = os.path.split(path)
    found = os.path.exists(path) if folder else f"/{name}" in error
    return found or name not in error


def _close() -> None:
    """The process ends: give everything back, and take back our initialisation, unless some thread still works.

    What calls from now on, another handler perhaps, finds no device.
    """
    global _state
    from .session import release_all

    _state = ENDING
    if release_all():
        _acl.finalise()
        _acl.disown()


def _after_fork_in_child() -> None:
    global _state, _lock, _searching
    _lock, _searching = threading.RLock(), False  # another thread of the parent may have held it
    if _opened:
        _acl.disown()
        atexit.unregister(_close)
        reason = (
            "this process was forked from one that had opened the device, whose handles are of no use here "
            "(start processes with 'spawn', or fork before the first call)"
        )
        _state = State((False, reason))


os.register_at_fork(after_in_child=_after_fork_in_child)
