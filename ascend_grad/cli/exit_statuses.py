"""The exit statuses of all commands, and their description in the help."""

from __future__ import annotations

DONE, WRONG, FAILED = 0, 1, 2


def exit_statuses(done: str, wrong: str | None = None) -> str:
    """Return the end of a command's help: the meaning of its statuses. Without ``wrong``, it has no status 1."""
    lines = ["exit status:", f"  {DONE}        {done}"]
    if wrong is not None:
        lines.append(f"  {WRONG}        {wrong}")
    lines += [
        f"  {FAILED}        the command could not complete its task; one line on stderr says why",
        "  128 + n  signal n ended the command (130: Ctrl-C)",
    ]
    return "\n".join(lines) + "\n"
