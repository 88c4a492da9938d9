"""Errors of the commands."""

import resource
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from ..errors import AscendGradError

#: Names that a message lists.
_LISTED = 5


class CommandError(Exception):
    """A command cannot complete its task. The message is one line for the user."""


def reason(error: Exception) -> str:
    """Return the message of a library's exception, or the exception's name if there is no message."""
    return str(error) or type(error).__name__


def listed(names: Sequence[str]) -> str:
    """Return the first names of a list, and how many follow."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{', '.join(names[:_LISTED])}{more}"


def out_of_memory(targets: Sequence[str], sources: Sequence[str], error: MemoryError) -> CommandError:
    """Return the error of results that take more memory than there is."""
    details = f": {error}" if str(error) else ""
    what = f"{', '.join(targets)}: cannot be computed from {', '.join(sources)}"
    return CommandError(f"{what}: out of memory{details}{address_space()}")


def address_space() -> str:
    """Return the end of a message about too little memory: the limit of address space if there is one."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return "" if limit == resource.RLIM_INFINITY else f" (the limit of address space is {limit} bytes, see ulimit -v)"


@contextmanager
def _naming(path: str, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CommandError(f"{path}: cannot be {what}: {error.strerror or error}") from error


@contextmanager
def naming_inputs(operator: str, paths: Mapping[str, str | None]) -> Iterator[None]:
    """Name the file of an argument in the operator's errors about it. `paths` has the files by argument."""
    try:
        yield
    except AscendGradError as error:
        for argument, path in paths.items():
            if str(error).startswith(f"{operator}: {argument}: "):
                raise CommandError(f"{path}: {error}") from error
        raise


def reading(path: str) -> AbstractContextManager[None]:
    """Name the input in errors of the file system."""
    return _naming(path, "read")


def writing(path: str) -> AbstractContextManager[None]:
    """Name the result in errors of the file system, which would name a temporary file or none."""
    return _naming(path, "written")
