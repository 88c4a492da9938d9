"""How a command fails."""


class CommandError(Exception):
    """A command cannot do what it was asked for; the message is for the user, in one line."""


def reason(error: Exception) -> str:
    """Return what a library's exception says, or its name where it says nothing."""
    return str(error) or type(error).__name__
