"""How a command fails."""

from collections.abc import Iterator
from contextlib import contextmanager


class CommandError(Exception):
    """A command cannot do what it was asked for; the message is for the user, in one line."""


def reason(error: Exception) -> str:
    """Return what a library's exception says, or its name where it says nothing."""
    return str(error) or type(error).__name__


@contextmanager
def writing(path: str) -> Iterator[None]:
    """Name the result in an error of the file system, which names a file that the user has not asked for, or none."""
    try:
        yield
    except OSError as error:
        raise CommandError(f"{path}: cannot be written: {error.strerror or error}") from error
