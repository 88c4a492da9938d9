"""The libraries of a toolkit: their names, and the folders in which they are looked for.

A library that the process has loaded already is used: a second copy of a toolkit would be a second runtime. The
libraries of a family belong together, so it is opened as a whole or not at all, and no two families of one kind are
mixed. Nothing is ever closed: others may have come to use it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from ... import _acl

RUNTIME = (("libascendcl.so",), ("libacl_rt.so",))
FRAMEWORK = (("libnnopbase.so",),)
#: Families of operator libraries by release, newest first. Each library may need the libraries before it.
OPERATORS = (
    ("libopapi_math.so", "libopapi_nn.so"),
    ("libopapi.so",),
    ("libaclnn_ops_infer.so", "libaclnn_ops_train.so"),
)
FOLDER_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")


class Unusable(Exception):
    """Error: there is no usable device. `broken` tells whether something is there that does not work."""

    def __init__(self, reason: str, *, broken: bool, details: str = ""):
        super().__init__(reason)
        self.broken, self.details = broken, details


class _Missing(Exception):
    """Error: a folder lacks a library of a family, and nothing was opened. Its text is "" if all are lacking."""


class Toolkit:
    """The libraries of a toolkit, opened one kind after the other, from the folder of the runtime first.

    Attributes
    ----------
    paths : list of str
        The files of the libraries that are in use, in the order in which they were opened.
    """

    def __init__(self) -> None:
        self.paths: list[str] = []
        self._folders = [os.path.join(path, "lib64") for name in FOLDER_VARIABLES if (path := os.environ.get(name))]

    def runtime(self) -> list[int]:
        """Open the runtime."""
        opened = self._open(RUNTIME, "")
        # The runtime may have been loaded before, from any folder. That folder also has the other libraries.
        self._folders.insert(0, os.path.dirname(_acl.path_of(opened[0])))
        return opened

    def framework(self) -> list[int]:
        """Open the framework of operators."""
        return self._open(FRAMEWORK, "no operator framework")

    def operators(self) -> list[int]:
        """Open the operators."""
        return self._open(OPERATORS, "no operator library")

    def _open(self, families: Sequence[tuple[str, ...]], what: str) -> list[int]:
        """Open a family, and record the paths of its files. `what` describes the absence of all of them.

        `what` is "" if they are absent where there is no device.
        """
        opened = self._opened(families, what)
        self.paths += map(_acl.path_of, opened)
        return opened

    def _opened(self, families: Sequence[tuple[str, ...]], what: str) -> list[int]:
        """Return the family that is in the process, else the first that loads, in a folder or on the loader's path."""
        for family in families:
            mapped = [_acl.loaded_library(name) for name in family]
            if all(mapped):
                return mapped
        parts = []
        for folder in dict.fromkeys([*self._folders, ""]):
            for family in families:
                try:
                    return _open_family(folder, family)
                except _Missing as missing:
                    parts.append(str(missing))
        if part := next(
            filter(None, parts), ""
        ):  # a library that does not load is told of before libraries that are absent
            raise Unusable(part, broken=True)
        places = [f"${name}/lib64 ({os.environ.get(name) or 'not set'})" for name in FOLDER_VARIABLES]
        names = ", ".join(dict.fromkeys(name for family in families for name in family))
        details = f"none of {names} in {', '.join(places)} or on the loader's path"
        if what:
            raise Unusable(f"{what}: {details}", broken=True)
        raise Unusable("no Ascend NPU found", broken=False, details=details)


def _open_family(folder: str, family: tuple[str, ...]) -> list[int]:
    """Open all libraries of a family in this folder; "" stands for the loader's path."""
    paths = [os.path.join(folder, name) for name in family]
    lacking = [path for path in paths if folder and not os.path.exists(path)]
    if len(lacking) == len(paths):
        raise _Missing
    if lacking:
        present = next(path for path in paths if path not in lacking)
        raise _Missing(f"{present} does not load: {os.path.basename(lacking[0])} is not in the same folder")
    opened: list[int] = []
    for path in reversed(paths):  # if a library that the last one needs is missing, it does not load: nothing is opened
        try:
            opened.append(_acl.loaded_library(os.path.basename(path)) or _acl.open_library(path))
        except OSError as error:
            text = f"{path} does not load: {error}"
            if opened:  # an open library stays open, so no other family may be opened
                raise Unusable(text, broken=True) from error
            raise _Missing(text if _is_there(path, str(error)) else "") from error
    return opened


def _is_there(path: str, error: str) -> bool:
    """Return whether a library that did not load exists, in its folder or, given a plain name, on the loader's path.

    The loader names a file that it has found by its path, and the neighbour that a library lacks.
    """
    folder, name = os.path.split(path)
    return bool(folder) or f"/{name}" in error or name not in error
