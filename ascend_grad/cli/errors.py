"""How a command fails."""


class CommandError(Exception):
    """A command cannot do what it was asked for; the message is for the user, in one line."""
