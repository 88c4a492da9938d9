"""Checks, at the beginning of a command, of the files that it writes at its end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import CommandError, writing

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_writable(option: str, path: Path) -> None:
    """Raise `CommandError` if no file of this name can be written."""
    if path.is_dir():
        raise CommandError(f"{option} {path}: is a directory")
    if path.exists():
        if not os.access(path, os.W_OK):
            raise CommandError(f"{option} {path}: not writable")
    elif not os.access(path.parent, os.W_OK):
        raise CommandError(f"{option} {path}: cannot write in {path.parent}")


def write_report(option: str, path: Path, text: str) -> None:
    """Write a text file, or raise `CommandError`."""
    with writing(f"{option} {path}"):
        path.write_text(text, encoding="utf-8")


def new_figure(option: str, path: Path) -> Figure:
    """Return an empty figure for a file of this name, or raise `CommandError`.

    The name has to end in a format that Matplotlib knows; otherwise Matplotlib would write a file of another name.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CommandError(f"{option} needs matplotlib (pip install matplotlib): {error}") from error
    figure = Figure(figsize=(7, 4), layout="constrained")
    kinds = figure.canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        raise CommandError(f"{option} {path}: the name must end in one of {', '.join(sorted(kinds))}")
    check_writable(option, path)
    return figure
